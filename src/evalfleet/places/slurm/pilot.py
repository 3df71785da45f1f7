"""The program of a job: it is a machine's supervisor for as long as the job may run, and ends with it.

Slurm runs a copy of this file with the node's Python (3.8 and later, standard library only):
`python pilot.py FOLDER SUPERVISOR SECONDS`. A folder is started once: a job that was requeued, or submitted
twice, finds the mark of the first start and leaves.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn, cast

ORDER_S = 30.0


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


def main(folder: Path, supervisor: str, seconds: float) -> int:
    began = time.monotonic()
    if not claim(folder):
        return 0
    sys.path.insert(0, supervisor)
    from supervisor.files import read_key  # type: ignore[import-not-found]
    from supervisor.machine import halt_machine, order  # type: ignore[import-not-found]
    from supervisor.mailbox import FolderPost, Relay  # type: ignore[import-not-found]
    from supervisor.main import start  # type: ignore[import-not-found]

    def leave(signum: int, frame: object) -> NoReturn:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, leave)
    os.environ["EVALFLEET_MACHINE"] = str(folder)
    os.environ["EVALFLEET_PILOT"] = "1"
    relay = cast("Any", Relay(FolderPost(str(folder / "mail")), read_key(str(folder)), str(folder)))
    try:
        problem = cast("str", start(str(folder)))
        if problem:
            sys.stderr.write(f"{problem}\n")
            return 1
        left_s = seconds - (time.monotonic() - began)
        order(folder, {"op": "expire", "seconds": left_s}, ORDER_S)
        if (folder / "mail").is_dir():  # no steps may be used to reach us
            threading.Thread(target=relay.run, daemon=True).start()
        with open(folder / "supervisor.lock", "r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # it has the lock while it lives: at its expiry it leaves
    except SystemExit:  # Slurm takes the node back: what runs is not to blame for its end
        with contextlib.suppress(OSError):
            order(folder, {"op": "evict"}, ORDER_S)
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        halt_machine(folder)
        relay.stop()
        ran = folder / "ran.new"
        ran.write_text(f"{time.monotonic() - began:.3f}")
        ran.replace(folder / "ran")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])))
