"""Who can log in to a host: root, and the ordinary user `lab`; both with the lab's client key."""

from __future__ import annotations

import os
from pathlib import Path

ORDINARY = "lab"
UID = 1000
USERS = ("root", ORDINARY)


def write(base: Path, rootfs: Path, client_key: str) -> None:
    """The machine's system users stay, for its packages; its people are none of the hosts' business."""
    accounts = [f"{ORDINARY}:x:{UID}:{UID}::/home/{ORDINARY}:{_shell(rootfs)}"]
    accounts = _system(rootfs / "etc/passwd") + accounts
    _file(base / "etc/passwd", accounts, 0o644)
    _file(base / "etc/group", [*_system(rootfs / "etc/group"), f"{ORDINARY}:x:{UID}:"], 0o644)
    # `*`: no password fits, but unlike with `!`, sshd does not take the account for locked
    _file(base / "etc/shadow", [f"{line.split(':')[0]}:*:19000:0:99999:7:::" for line in accounts], 0o640)
    _home(base / "root", 0, client_key)
    _home(base / "home" / ORDINARY, UID, client_key)


def _system(file: Path) -> list[str]:
    lines = [line for line in file.read_text().splitlines() if line.count(":") >= 3]
    fields = [(line, line.split(":")) for line in lines]
    return [line for line, (name, _, uid, *_) in fields if name != ORDINARY and _is_system(int(uid))]


def _is_system(uid: int) -> bool:
    return uid < UID or uid == 65534


def _shell(rootfs: Path) -> str:
    return "/bin/bash" if (rootfs / "bin/bash").exists() else "/bin/sh"


def _home(path: Path, uid: int, client_key: str) -> None:
    (path / ".ssh").mkdir(parents=True)
    _file(path / ".ssh/authorized_keys", [client_key], 0o600)
    for made in (path, path / ".ssh", path / ".ssh/authorized_keys"):
        os.chown(made, uid, uid)
    path.chmod(0o700)
    (path / ".ssh").chmod(0o700)


def _file(path: Path, lines: list[str], mode: int) -> None:
    path.write_text("".join(f"{line}\n" for line in lines))
    path.chmod(mode)
