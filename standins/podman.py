"""A real podman, Debian's, whose images and containers are in a folder of a test's own. It needs root."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

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
