"""What machines of a region share: the resource group, a network, and a group of rules that lets SSH in.

The rules are a place's own: two places of one home may let different addresses in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from msgspec import Struct

from evalfleet.clock import pauses
from evalfleet.places.vm.answers import Json, Problem, rows

from .answers import ArmFault, tags_in
from .arm import ArmClient
from .names import HOME, plain, shared_name, shared_tags
from .settings import AzureAccount, AzureSettings
from .template import API, NSG, RESOURCES, SUBNET, VNET, id_of, network, security_group

READY_S = 180.0
Alike = Callable[[Json, Json], bool]
"""Is what is there, the first, as is wanted, the second?"""


class NetworkIds(Struct, frozen=True):
    """The ids of what a machine is attached to in one region."""

    subnet: str
    nsg: str
    """Of the network security group: the rules that let SSH in."""


class RegionNetwork:
    """The resource group, and in each region the network and the rules that machines share.

    They are made once a region, by whoever needs them first; they cost nothing, and stay.
    """

    def __init__(
        self, arm: ArmClient, place: str, settings: AzureSettings, account: AzureAccount, home: str
    ) -> None:
        self._arm = arm
        self._place = place
        self._settings = settings
        self._home = home
        self._group = account.group
        self.tags = shared_tags(home, account.owner, settings.tags)
        """Of all that the machines of this home share."""
        self._making: dict[str, asyncio.Task[NetworkIds]] = {}
        self._grouping: asyncio.Task[None] | None = None

    @property
    def root(self) -> str:
        """The id of the resource group."""
        return f"{self._arm.root}/resourceGroups/{self._group}"

    async def ids(self, region: str) -> NetworkIds:
        """Make the network in a region if it is not there. Raises ArmFault."""
        task = self._making.get(region)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._making[region] = asyncio.create_task(self._make(region))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)

    def rules_id(self, region: str) -> str:
        return id_of(self.root, NSG, shared_name(self._home, region, f"{plain(self._place)}-ssh"))

    async def _make(self, region: str) -> NetworkIds:
        await self._have_group(region)
        nsg = self.rules_id(region)
        if self._settings.subnet:
            await self._have_rules(nsg, region)
            return NetworkIds(self._settings.subnet, nsg)
        vnet = id_of(self.root, VNET, shared_name(self._home, region, "net"))
        await asyncio.gather(
            self._have_rules(nsg, region), self._have(vnet, VNET, network(region, self.tags), _any)
        )
        return NetworkIds(f"{vnet}/subnets/{SUBNET}", nsg)

    async def admit(self, region: str) -> None:
        """Let in whom the settings name now, and nobody else, where machines of this place may be.

        Raises ArmFault.
        """
        if await self._arm.find(self.rules_id(region), API[NSG]) is not None:
            await self._have_rules(self.rules_id(region), region)

    async def _have_group(self, region: str) -> None:
        """Make the resource group. The first region that needs it is where its records are kept."""
        if self._grouping is None or self._grouping.done():
            self._grouping = asyncio.create_task(self._make_group(region))
        await asyncio.shield(self._grouping)

    async def _make_group(self, region: str) -> None:
        if await self._arm.find(self.root, RESOURCES) is None:
            await self._arm.send("PUT", self.root, RESOURCES, {"location": region, "tags": self.tags})

    async def _have_rules(self, nsg: str, region: str) -> None:
        sources, port = self._settings.ssh_from, self._settings.port
        await self._have(nsg, NSG, security_group(region, self.tags, sources, port), rules_alike)

    async def _have(self, id: str, type: str, wanted: Json, alike: Alike) -> None:
        there = await self._arm.find(id, API[type])
        if there is not None:
            check_ours(there, self._home)
        if there is None or not alike(there, wanted):
            there = await self._arm.send("PUT", id, API[type], wanted)
        await self._settled(id, type, there)

    async def _settled(self, id: str, type: str, shown: Json) -> None:
        rests = pauses(0.3, 5.0)
        async with asyncio.timeout(READY_S):
            while (state := shown["properties"]["provisioningState"]) != "Succeeded":
                if state in ("Failed", "Canceled"):
                    raise ArmFault(409, (Problem("RetryableError", f"{id} could not be made"),))
                await asyncio.sleep(next(rests))
                shown = await self._arm.get(id, API[type])


def _any(there: Json, wanted: Json) -> bool:
    return True


def rules_alike(there: Json, wanted: Json) -> bool:
    """Do they let the same addresses in? Rules that somebody added do not stay."""

    def told(shown: Json) -> list[Json]:
        rules = rows(shown["properties"].get("securityRules"))
        keys = ("sourceAddressPrefix", "destinationPortRange", "access", "direction", "priority")
        many = [sorted(rule["properties"].get("sourceAddressPrefixes") or []) for rule in rules]
        return [
            {**{key: rule["properties"].get(key) for key in keys}, "many": each}
            for rule, each in zip(rules, many, strict=True)
        ]

    return told(there) == told(wanted)


def check_ours(shown: Json, home: str) -> None:
    """Raises ArmFault if it is somebody else's."""
    if tags_in(shown).get(HOME) != home:
        why = f"{shown['id']} is not ours (its tag {HOME} is not this home's); it is left alone"
        raise ArmFault(400, (Problem("NotOurs", why),))
