"""What a host is called, how it may be reached, and the ways in which it says no."""

from __future__ import annotations

import math
import re
import shlex
import socket
from collections.abc import Callable, Sequence
from typing import Literal

from msgspec import Struct

from evalfleet.errors import ChannelError, RequestError

_TARGET = re.compile(
    r"(?:(?P<user>[^@\s]+)@)?(?:\[(?P<six>[0-9A-Fa-f:.%\w]+)\]|(?P<host>[^:@\s\[\]]+))(?::(?P<port>\d{1,5}))?"
)


AS_POOL = " (pool)"
"""The end of what a host is told of the owner of a pool's machine."""


class HostDown(OSError):
    """The host does not answer now. Nothing was asked of it."""


class HostLost(OSError):
    """The connection ended before the answer came: what was asked may have happened."""


Stage = Literal["key", "login", "python"]
"""What comes one after the other when a host is reached, and may fail."""


class HostRefused(ChannelError):
    """The host cannot be used until somebody mends something: its key, ours, its Python.

    The message names the host and tells everything. `what` and `remedy` are the same for all hosts that have
    the same trouble, so that they can be told together. `stage` is how far we came.
    """

    def __init__(self, host: str, what: str, remedy: str, detail: str = "", stage: Stage = "python") -> None:
        super().__init__(f"{host}: {what}{detail and f' ({detail})'}; {remedy}")
        self.what = what
        self.remedy = remedy
        self.stage: Stage = stage


class HostKeyUnknown(HostRefused):
    """Nobody has said yet whether the host's key is the right one."""

    def __init__(self, host: str, fingerprint: str, file: str, line: str) -> None:
        remedy = f"if the host's owner confirms that fingerprint, add this line to {file}: {line}"
        super().__init__(host, "the host key is unknown", remedy, fingerprint, "key")
        self.host = host
        self.fingerprint = fingerprint
        self.file = file
        """The file of known hosts that the line belongs into."""
        self.line = line
        """What makes the key known, without the end of the line."""


class NoMachine(ChannelError):
    """The host answers and does not have the machine (or the job)."""


class Target(Struct, frozen=True):
    """A host as the settings name it. What is not given comes from the settings or ~/.ssh/config."""

    name: str
    host: str
    port: int | None = None
    user: str | None = None


class Access(Struct, frozen=True):
    """How hosts are reached. Paths are absolute; None leaves it to ~/.ssh/config and OpenSSH's defaults.

    `new_socket` makes a TCP socket of the network that the hosts are in, where that is not this computer's.
    Then ~/.ssh/config and agents, which are about this computer, have no say, and there are no jump hosts.
    """

    user: str | None = None
    key: str | None = None
    known_hosts: str | None = None
    port: int | None = None
    jump: str | None = None
    python: str = "python3"
    connect_timeout_s: float = 10.0
    agent: str | None = None
    new_socket: Callable[[], socket.socket] | None = None


def openssh(where: Target, access: Access, command: Sequence[str] = ()) -> list[str]:
    """The command line of OpenSSH's client that goes there as we do: host keys verified, always."""
    options = {
        "StrictHostKeyChecking": "yes",
        "UserKnownHostsFile": access.known_hosts,
        "IdentityFile": access.key,
        "ProxyJump": access.jump,
        # a machine that is off, or hangs, is told about instead of waited for
        "ConnectTimeout": str(math.ceil(access.connect_timeout_s)),
        "ServerAliveInterval": "15",
    }
    argv = ["ssh", *(word for name, value in options.items() if value for word in ("-o", f"{name}={value}"))]
    if port := where.port or access.port:
        argv += ["-p", str(port)]
    if user := where.user or access.user:
        argv += ["-l", user]
    return [*argv, "--", where.host, *([shlex.join(command)] if command else [])]


def target(text: str) -> Target:
    """What `[user@]host[:port]` names; an IPv6 address with a port is in brackets. Raises RequestError."""
    if text.count(":") > 1 and "[" not in text:
        user, _, host = text.rpartition("@")
        return Target(text, host, None, user or None)
    found = _TARGET.fullmatch(text)
    if found is None:
        raise RequestError(f"{text!r} is no host; write [user@]host[:port]")
    port = int(found["port"]) if found["port"] else None
    return Target(text, found["six"] or found["host"], port, found["user"])
