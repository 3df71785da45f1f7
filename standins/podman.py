"""A real podman, Debian's, whose images and containers are in a folder of a test's own. It needs root."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from standins.waa import rootfs
from tests.waiting import PATIENCE_S, until

LIMITS = (
    "--ulimit",
    "nofile=20000:20000",
    "--ulimit",
    "nproc=32768:32768",
)  # or it asks for more than there is


class Podman:
    """With its images and containers in a folder of the test's own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        where = ("--root", str(folder / "root"), "--runroot", str(folder / "run"), "--storage-driver", "vfs")
        kept = ("--tmpdir", str(folder / "tmp"), "--cgroup-manager", "cgroupfs", "--runtime", "runc")
        self.argv = ("podman", *where, *kept)
        self.group = f"evalfleet-podman-{os.getpid()}"
        self.grouped = ("--cgroup-parent", f"/{self.group}")

    def __call__(self, *argv: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.argv, *argv], capture_output=True, text=True, input=text, timeout=PATIENCE_S
        )

    def ok(self, *argv: str, text: str | None = None) -> str:
        done = self(*argv, text=text)
        assert done.returncode == 0, f"podman {argv}: {done.returncode}: {done.stderr}"
        return done.stdout

    def destroy(self) -> None:
        """It leaves control groups behind otherwise."""
        self("rm", "-f", "-a", "-t", "0")
        tops = Path("/sys/fs/cgroup")
        for top in (*tops.glob(self.group), *tops.glob(f"*/{self.group}")):
            for group, _, _ in os.walk(top, topdown=False):
                remove_group(group)
        with suppress(OSError):
            os.rmdir("/run/runc")  # not if somebody else has containers
        shutil.rmtree(self.folder)


def lacking(programs: Sequence[str]) -> str | None:
    """Why `podman_with` cannot be used here, in one line."""
    if os.geteuid():
        return "that needs root"
    absent = [name for name in ("podman", "runc", *programs) if shutil.which(name) is None]
    return f"there is no {absent[0]} (Debian: apt install podman runc)" if absent else None


@contextmanager
def podman_with(programs: Sequence[str]) -> Iterator[Podman]:
    """An engine with the image localhost/tiny, made of programs of this computer; `bin/podman` runs it."""
    made = Podman(Path(tempfile.mkdtemp(prefix="ef-", dir="/tmp")))  # it takes no longer paths
    try:
        (made.folder / "files").mkdir()
        rootfs.write_rootfs(made.folder / "tiny.tar", made.folder / "files", programs)
        made.ok("import", "-q", str(made.folder / "tiny.tar"), "localhost/tiny")
        program = made.folder / "bin" / "podman"
        program.parent.mkdir()
        real_program = shutil.which("podman") or ""
        program.write_text(f'#!/bin/sh\nexec {shlex.join((real_program, *made.argv[1:]))} "$@"\n')
        program.chmod(0o755)
        yield made
    finally:
        made.destroy()


def remove_group(group: str) -> None:
    """The monitor of a container leaves its group a moment after the container is gone."""

    def removed() -> bool:
        try:
            os.rmdir(group)
        except OSError as err:
            if err.errno != errno.EBUSY:
                raise
            return False
        return True

    until(removed, f"{group} to be left")
