"""Running this machine's tools, and what of them is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .errors import LabError

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# PID 1 of a host shows its environment to the host: nothing of ours may be in it
CLEAN = {"PATH": PATH, "LANG": "C.UTF-8"}
NEEDED = {
    "ip": "iproute2",
    "sshd": "openssh-server",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "setpriv": "util-linux",
    "pivot_root": "util-linux",
}
NET_ADMIN, SYS_ADMIN, MKNOD = 12, 21, 27  # capabilities, by their numbers


def find(command: str) -> str | None:
    return shutil.which(command, path=PATH)


def missing() -> str | None:
    """Why there can be no lab of real hosts here, in one line; None if there can."""
    lacks: list[str] = []
    if not sys.platform.startswith("linux"):
        lacks.append("Linux")
    elif os.geteuid() != 0:
        lacks.append("root")
    elif not _may_do_all():
        lacks.append("root's rights (this is a container or a user namespace)")
    lacks += sorted({package for command, package in NEEDED.items() if find(command) is None})
    if not lacks:
        return None
    return f"the lab needs root, iproute2 and openssh-server; missing here: {', '.join(lacks)}"


def _may_do_all() -> bool:
    """Is this root the machine's? One of a container may neither mount nor make devices and networks."""
    lines = Path("/proc/self/status").read_text().splitlines()
    effective = int(next(line.split()[1] for line in lines if line.startswith("CapEff:")), 16)
    everybody = Path("/proc/self/uid_map").read_text().split() == ["0", "0", str(2**32 - 1)]
    return everybody and all(effective >> right & 1 for right in (NET_ADMIN, SYS_ADMIN, MKNOD))


def run(argv: Sequence[str], text: str = "") -> str:
    """A tool's output. Raises LabError with what it said if it failed."""
    done = subprocess.run(argv, input=text, capture_output=True, text=True, env=CLEAN, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise LabError(f"{' '.join(argv)} failed: {said or f'exit code {done.returncode}'}")
    return done.stdout
