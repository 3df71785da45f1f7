"""Running this machine's tools, and what of them is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

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


def find(command: str) -> str | None:
    return shutil.which(command, path=PATH)


def missing() -> str | None:
    """Why there can be no lab of real hosts here, in one line; None if there can."""
    lacks: list[str] = []
    if not sys.platform.startswith("linux"):
        lacks.append("Linux")
    elif os.geteuid() != 0:
        lacks.append("root")
    lacks += sorted({package for command, package in NEEDED.items() if find(command) is None})
    if not lacks:
        return None
    return f"the lab needs root, iproute2 and openssh-server; missing here: {', '.join(lacks)}"


def run(argv: Sequence[str], text: str = "") -> str:
    """A tool's output. Raises LabError with what it said if it failed."""
    done = subprocess.run(argv, input=text, capture_output=True, text=True, env=CLEAN, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise LabError(f"{' '.join(argv)} failed: {said or f'exit code {done.returncode}'}")
    return done.stdout
