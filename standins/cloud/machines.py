"""What is behind a virtual machine: nothing, or a real host (see `hosts.py`)."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Guest:
    """What a virtual machine is to be, for its first boot."""

    id: str
    name: str
    address: str
    user: str
    keys: tuple[str, ...]
    custom_data: bytes
    has_temp_disk: bool
    image: str = ""
    """What its disk is a copy of, if that was captured here."""


class MachineTrouble(Exception):
    """A machine does not do what it was told to; says why."""


class Machines(Protocol):
    """Raise MachineTrouble. Calls about a machine that is not there do nothing."""

    is_flat: bool
    """Has a machine one address, public and private?"""

    def new_address(self, taken: Set[str]) -> str: ...

    async def create(self, guest: Guest) -> None:
        """It is up and answers when this returns."""
        ...

    async def power_off(self, id: str) -> None: ...

    async def power_on(self, id: str, address: str, *, fresh_temp_disk: bool) -> None: ...

    async def destroy(self, id: str) -> None: ...

    async def protect(self, id: str, rules: str) -> None:
        """Who may connect to it, as `iptables-restore` takes it."""
        ...

    async def authorize(self, id: str, user: str, keys: Sequence[str]) -> None:
        """These keys, and no others, let one in as the user."""
        ...

    async def execute(self, id: str, script: str) -> tuple[int, str, str]:
        """Run it there as root. What it exits with, and what it prints as output and as errors."""
        ...

    async def capture(self, id: str, image: str) -> None:
        """Keep a copy of its disk under this name. It is off."""
        ...

    def forget_image(self, image: str) -> None: ...

    def mend(self, id: str) -> None:
        """Its hardware is another one now: what was broken of it is whole again."""
        ...

    def log(self, id: str) -> str:
        """What its serial console said."""
        ...

    async def close(self) -> None: ...


class Records:
    """No machines: only what the cloud would say of them."""

    is_flat = False

    def __init__(self) -> None:
        self._log: dict[str, str] = {}

    def new_address(self, taken: Set[str]) -> str:
        pool = (
            ipaddress.ip_network("203.0.113.0/24")
            if len(taken) < 200
            else ipaddress.ip_network("198.18.0.0/15")
        )
        return next(str(each) for each in pool.hosts() if str(each) not in taken)

    async def create(self, guest: Guest) -> None:
        self._log[guest.id.lower()] = f"Linux boots\n{guest.name} login: "

    async def power_off(self, id: str) -> None:
        self._note(id, "Power down.")

    async def power_on(self, id: str, address: str, *, fresh_temp_disk: bool) -> None:
        self._note(id, "Linux boots")

    async def destroy(self, id: str) -> None:
        self._log.pop(id.lower(), None)

    async def protect(self, id: str, rules: str) -> None:
        pass

    async def authorize(self, id: str, user: str, keys: Sequence[str]) -> None:
        pass

    async def execute(self, id: str, script: str) -> tuple[int, str, str]:
        return 0, "", ""

    async def capture(self, id: str, image: str) -> None:
        pass

    def forget_image(self, image: str) -> None:
        pass

    def mend(self, id: str) -> None:
        pass

    def _note(self, id: str, line: str) -> None:
        if id.lower() in self._log:
            self._log[id.lower()] += f"\n{line}\n"

    def log(self, id: str) -> str:
        return self._log.get(id.lower(), "")

    async def close(self) -> None:
        pass
