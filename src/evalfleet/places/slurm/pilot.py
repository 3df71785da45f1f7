"""The program of a job: it is a machine's supervisor for as long as the job may run, and ends with it.

The job's script runs this source with the node's Python (3.8 and later, standard library only):
`python -c SOURCE FOLDER SUPERVISOR DIGEST SECONDS`. Slurm keeps the script, so no attempt can change it. A
folder is started once: a job that was requeued, or submitted twice, finds the mark of the first start and
leaves.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import cast


def claim(folder: Path) -> bool:
    """Is this the machine's first start? The mark is made whole and at once, also on a shared file system."""
    job, restarts = os.environ.get("SLURM_JOB_ID", "0"), os.environ.get("SLURM_RESTART_COUNT", "0")
    name = f"{job}.{restarts}"
    mark = {"start": name, "node": os.environ.get("SLURMD_NODENAME") or platform.node(), "at": time.time()}
    own = folder / f"start-{name}"
    own.write_text(json.dumps(mark))
    try:
        os.link(own, folder / "start")
    except FileExistsError:
        first = json.loads((folder / "start").read_text())["start"]
        if first != name and first.split(".")[0] == job:
            (folder / "restarted").touch()  # what the first start ran is lost, and we cannot go on with it
        return False
    finally:
        own.unlink()
    return True


def main(folder: Path, supervisor: str, digest: str, seconds: float) -> int:
    began = time.monotonic()
    if hashlib.sha256(Path(supervisor).read_bytes()).hexdigest() != digest:
        sys.stderr.write(f"{supervisor} was changed after evalfleet wrote it; the job starts nothing\n")
        return 1
    if not claim(folder):
        return 0
    sys.path.insert(0, supervisor)
    from supervisor.mailbox import FolderPost  # type: ignore[import-not-found]
    from supervisor.pilot import hold  # type: ignore[import-not-found]

    # where no steps may be used to reach us, there is a mailbox
    post = cast("object", FolderPost(str(folder / "mail"))) if (folder / "mail").is_dir() else None
    try:
        return cast("int", hold(folder, seconds - (time.monotonic() - began), post))
    finally:
        ran = folder / "ran.new"
        ran.write_text(f"{time.monotonic() - began:.3f}")
        ran.replace(folder / "ran")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4])))
