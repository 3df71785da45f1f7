"""How a lab's sshd is set up."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from . import commands

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


def server_config(rootfs: Path) -> str:
    return NAMESPACE + COMMON + _penalties(rootfs / "usr/sbin/sshd")


def loopback_config(directory: Path, address: str, port: int, session: str) -> str:
    server = commands.find("sshd") or "sshd"
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
        done = subprocess.run([server, "-V"], capture_output=True, text=True, env=commands.CLEAN, check=False)
    except OSError:
        return ""
    version = re.search(r"OpenSSH_(\d+)\.(\d+)", done.stderr + done.stdout)
    return NO_PENALTIES if version and (int(version[1]), int(version[2])) >= (9, 8) else ""
