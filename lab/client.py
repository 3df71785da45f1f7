"""The client side of a lab: one key that every host accepts, and the hosts' keys."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from . import keys
from .host import Host


class LabClient:
    """What an SSH client of a lab needs: its private key, and the hosts' keys as they were when they were
    made."""

    def __init__(self, directory: Path, prefix: tuple[str, ...]) -> None:
        self._pair = keys.new_key("evalfleet-lab")
        self.key_path = directory / "client_key"
        self.known_hosts_path = directory / "known_hosts"
        self.public_key = self._pair.public
        self._prefix = prefix

    def write(self) -> None:
        keys.write_private(self.key_path, self._pair.private)
        self.known_hosts_path.touch()

    def trust(self, hosts: Iterable[Host]) -> None:
        """Not done again when a host's key changes: whether that is noticed is what tests want to know."""
        with open(self.known_hosts_path, "a", encoding="utf-8") as file:
            file.writelines(f"{host.known_hosts_line()}\n" for host in hosts)

    def ssh(
        self, host: Host, *command: str, user: str | None = None, options: Sequence[str] = ()
    ) -> list[str]:
        """The argv of an OpenSSH client in the lab's network; `options` as in `-o`, before ours."""
        every = (
            *options,
            f"UserKnownHostsFile={self.known_hosts_path}",
            "GlobalKnownHostsFile=none",
            "StrictHostKeyChecking=yes",
            "IdentitiesOnly=yes",
            "IdentityAgent=none",
            "BatchMode=yes",
            "LogLevel=ERROR",
        )
        flags = [word for option in every for word in ("-o", option)]
        who = f"{user or host.users[0]}@{host.address}"
        argv = ["ssh", "-F", "none", "-i", str(self.key_path), "-p", str(host.port), *flags, who]
        return [*self._prefix, *argv, *(["--", *command] if command else [])]


class AnyLab(Protocol):
    """A lab of either kind. Labs are context managers, too."""

    @property
    def hosts(self) -> Sequence[Host]: ...

    @property
    def client(self) -> LabClient: ...

    @property
    def prefix(self) -> tuple[str, ...]:
        """Before a command: it runs on this machine and reaches the hosts."""
        ...

    def inside(self) -> AbstractContextManager[None]:
        """This thread reaches the hosts meanwhile, and so does what it starts (threads, processes).

        For a client in this process: what it connects in here stays connected afterwards.
        """
        ...

    def socket(self) -> socket.socket:
        """A TCP socket that reaches the hosts, to connect from anywhere in this process."""
        ...

    def destroy(self) -> None:
        """Nothing is left afterwards. Repeats safely."""
        ...
