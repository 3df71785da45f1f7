"""Who may connect to our machines: two firewall rules of the network, about machines with our tag."""

from __future__ import annotations

import asyncio

from evalfleet.places.vm.answers import Json, Problem

from .answers import GoogleFault
from .client import ComputeClient
from .names import shared_name
from .settings import GceSettings
from .template import INSIDE, firewall_rules

COMPARED = ("priority", "direction", "allowed", "denied", "sourceRanges", "targetTags", "disabled")


class Firewall:
    """The rules of one place. They cost nothing, and stay when the machines are gone. Raises GoogleFault."""

    def __init__(self, client: ComputeClient, place: str, settings: GceSettings, home: str) -> None:
        self._client = client
        self._settings = settings
        self.tag = shared_name(home, place, "vm")
        self.names = shared_name(home, place, "deny"), shared_name(home, place, "ssh")
        self._whose = f"home {home}, place {place}"
        self._home = home
        self._lock = asyncio.Lock()
        self._ready = False

    @property
    def network(self) -> str:
        return f"{self._client.root}/global/networks/{self._settings.network}"

    @property
    def sources(self) -> tuple[str, ...]:
        """Who may connect."""
        return self._settings.ssh_from or INSIDE

    async def ensure(self) -> None:
        """See to it, once, that the rules are there, and as the settings say: before the first machine."""
        async with self._lock:
            if self._ready:
                return
            rules = firewall_rules(
                self.names, self.network, self.tag, self.sources, self._settings.port, self._whose
            )
            # At once, because each takes seconds: one opens the port to the caller alone, the other closes it
            # to all others, and no machine is made before both are there.
            for problem in await asyncio.gather(*map(self._have, rules), return_exceptions=True):
                if problem is not None:
                    raise problem
            self._ready = True

    async def _have(self, wanted: Json) -> None:
        path = f"{self._client.root}/global/firewalls/{wanted['name']}"
        shown = await self._client.find(path)
        if shown is None:
            try:
                await self._client.change("POST", f"{self._client.root}/global/firewalls", wanted)
                return
            except GoogleFault as fault:
                if not fault.has("alreadyExists", "RESOURCE_ALREADY_EXISTS"):
                    raise  # else another controller was first
            shown = await self._client.get(path)
        if self._whose not in str(shown.get("description", "")):
            why = (
                f"the firewall rule {wanted['name']} is not ours (its description says so); it is left alone"
            )
            raise GoogleFault(400, (Problem("forbidden", why),))
        if str(shown.get("network", "")).rsplit("/", 1)[-1] != self._settings.network:
            await self._client.change("DELETE", path)  # a rule cannot move to another network
            await self._client.change("POST", f"{self._client.root}/global/firewalls", wanted)
        elif any(_plain(shown.get(key)) != _plain(wanted.get(key)) for key in COMPARED):
            await self._client.change("PATCH", path, {key: wanted[key] for key in COMPARED if key in wanted})


def _plain(value: object) -> object:
    """As it is compared: Google leaves out what is false, and sorts lists as it likes."""
    if isinstance(value, list):
        return sorted(map(repr, value))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return value or None
