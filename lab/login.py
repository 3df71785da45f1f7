"""Logging in to a host: its sshd, and its users root and `lab`, who have the lab's client key."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from . import system

ORDINARY = "lab"
UID = 1000
NOBODY = 65534
USERS = ("root", ORDINARY)
COMMON = """\
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
MaxSessions 100
MaxStartups 1000:30:2000
PrintMotd no
PrintLastLog no
AcceptEnv LANG LC_*
# The client's order decides, so that what is slow must not be offered: OpenSSH's default costs 100 ms
# of CPU a connection, this 15 ms.
KexAlgorithms curve25519-sha256,curve25519-sha256@libssh.org,ecdh-sha2-nistp256
"""
# From 9.8 on sshd shuts out addresses that fail often, which is what tests do.
NO_PENALTIES = "PerSourcePenalties no\n"

NAMESPACE = """\
AddressFamily inet
HostKey /etc/ssh/ssh_host_ed25519_key
PidFile /run/sshd.pid
PermitRootLogin prohibit-password
Subsystem sftp internal-sftp
"""


def write_users(base: Path, rootfs: Path, client_key: str) -> None:
    """The machine's system users stay, for its packages; its people are none of the hosts' business."""
    shell = "/bin/bash" if (rootfs / "bin/bash").exists() else "/bin/sh"
    accounts = [f"{ORDINARY}:x:{UID}:{UID}::/home/{ORDINARY}:{shell}"]
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
    return [
        line
        for line, (name, _, uid, *_) in fields
        if name != ORDINARY and (int(uid) < UID or int(uid) == NOBODY)
    ]


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


def server_config(rootfs: Path) -> str:
    return NAMESPACE + COMMON + _penalties(rootfs / "usr/sbin/sshd")


def loopback_config(directory: Path, address: str, port: int, session: str) -> str:
    server = system.find("sshd") or "sshd"
    return f"""\
ListenAddress {address}:{port}
HostKey {directory}/host_key
PidFile {directory}/sshd.pid
AuthorizedKeysFile {directory}/authorized_keys
PermitRootLogin prohibit-password
StrictModes no
Subsystem sftp {_sftp_server()}
ForceCommand {session}
{COMMON}{_penalties(Path(server))}"""


def _sftp_server() -> str:
    folders = ("lib/openssh", "libexec/openssh", "lib/ssh", "libexec")
    places = [f"/usr/{folder}/sftp-server" for folder in folders]
    return next((path for path in places if Path(path).exists()), places[-1])


def _penalties(server: Path) -> str:
    """A server that does not know a setting does not start."""
    # -V is new; older ones say their version when they refuse it
    try:
        done = subprocess.run([server, "-V"], capture_output=True, text=True, env=system.CLEAN, check=False)
    except OSError:
        return ""
    version = re.search(r"OpenSSH_(\d+)\.(\d+)", done.stderr + done.stdout)
    return NO_PENALTIES if version and (int(version[1]), int(version[2])) >= (9, 8) else ""
