"""What labs of every kind have in common."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from .client import LabClient
from .host import Host


class AnyLab(Protocol):
    """They are context managers, too."""

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
