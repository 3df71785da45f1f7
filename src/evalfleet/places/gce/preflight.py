"""Before money is spent: what would be made, and checks of login, network, image, types, quota and prices.

Each check that fails tells its remedy, the `gcloud` command where there is one.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

from evalfleet.model import MachineId, Needs, Offer
from evalfleet.places.vm.answers import Json, rows
from evalfleet.places.vm.preflight import (
    UNLIMITED,
    clock_checks,
    machine_words,
    price_checks,
    workers_checks,
)
from evalfleet.ports import Check, Made

from .answers import QUOTA_PAGE, GoogleFault
from .client import ComputeClient
from .firewall import Firewall
from .machine_types import HYPERDISK, SPOT_QUOTA, MachineType, disk_of, fits, region_of, type_of
from .names import name_of
from .prices import wants_nesting
from .settings import GceSettings, GoogleAccount
from .template import HYPERDISK_IOPS, HYPERDISK_MB_S

WHOSE = "Google's"
HANDSHAKES, HANDSHAKE_S = 3, 3.0
ALL_REGIONS = "CPUS_ALL_REGIONS"


def outline(
    settings: GceSettings, firewall: Firewall, machines: Sequence[tuple[MachineId, Offer]]
) -> Iterator[Made]:
    """What would be made for these machines: what they share first, then each with all that goes with it."""
    who = ", ".join(firewall.sources)
    yield Made("firewall rule", firewall.names[0], settings.network, "nobody may connect to our machines")
    yield Made("firewall rule", firewall.names[1], settings.network, f"but port {settings.port} from {who}")
    for machine, offer in machines:
        disk = f"{settings.disk_gb} GB {disk_of(offer.size, settings.disk)}"
        words = machine_words(offer, disk, public_ip=settings.public_ip)
        yield Made("machine", name_of(machine, settings.name), offer.region, words)


async def distances(regions: Iterable[str], by: Mapping[str, str], ca: str) -> dict[str, float]:
    """How far the regions are: seconds of a TLS handshake, the least of a few; nearest first.

    Google ends the TLS sessions of a regional endpoint in the region itself, whereas those of its other names
    end wherever it comes near us. A region that does not answer is left out.
    """
    trusted = await asyncio.to_thread(ssl.create_default_context, cafile=ca or None)

    async def measure(region: str) -> tuple[float, str] | None:
        host, _, port = by.get(region, f"storage.{region}.rep.googleapis.com:443").rpartition(":")
        taken: list[float] = []
        for _ in range(HANDSHAKES):
            begun = time.monotonic()
            try:
                async with asyncio.timeout(HANDSHAKE_S):
                    _, writer = await asyncio.open_connection(host, int(port), ssl=trusted)
            except (OSError, TimeoutError):
                break
            taken.append(time.monotonic() - begun)
            writer.transport.abort()
        return (min(taken), region) if taken else None

    found = await asyncio.gather(*map(measure, regions))
    return {region: seconds for seconds, region in sorted(filter(None, found))}


class GceChecks:
    """The checks of `evalfleet doctor` for one place. They only read."""

    def __init__(
        self,
        client: ComputeClient,
        settings: GceSettings,
        account: GoogleAccount,
        firewall: Firewall,
        zones: Sequence[str],
    ) -> None:
        self._client = client
        self._zones_used = zones
        self._settings = settings
        self._account = account
        self._firewall = firewall
        self._room: dict[str, dict[str, int]] = {}
        """By region: for how many machines each of what is limited lasts."""
        self._everywhere: dict[str, int] = {}
        """The same, of quotas of the whole project."""

    async def all(self, offers: Sequence[Offer], needs: Needs, workers: int = 1) -> Sequence[Check]:
        """All checks, for so many machines. If we are not let in, nothing else is asked."""
        first = await _guarded("credentials", self._credentials)
        if first[0].verdict == "bad":
            return first
        regions = list(dict.fromkeys(region_of(zone) for zone in self._zones_used))
        found = await asyncio.gather(
            _guarded("network", self._network),
            _guarded("image", self._image),
            *(_guarded(f"quota in {region}", self._quota(region, offers)) for region in regions),
            *(_guarded(f"zones of {region}", self._zones(region)) for region in regions),
            *(_guarded(f"types in {zone}", self._types(zone)) for zone in self._zones_used),
        )
        told = [check for some in found for check in some]
        return (*first, *told, *self._fitting(needs), *self._ends(offers, workers))

    # -- who we are ----------------------------------------------------------------------------

    async def _credentials(self) -> list[Check]:
        shown = await self._client.get(self._client.root)
        found = [Check("credentials", "good", f"project {shown.get('name')} can be seen")]
        free = free_of(shown).get(ALL_REGIONS, UNLIMITED)
        if free < UNLIMITED:
            self._everywhere[ALL_REGIONS] = free // self._least_cpus()
            remedy = "" if free >= self._least_cpus() else self._more_quota(ALL_REGIONS, "")
            told = f"quota {ALL_REGIONS} has {free} vCPUs left"
            found.append(Check("quota of the project", "warn" if remedy else "good", told, remedy))
        return [*found, *clock_checks(self._client.skew_s, WHOSE)]

    def _least_cpus(self) -> int:
        return min((type.cpus for type in filter(None, map(type_of, self._settings.types))), default=1)

    def _more_quota(self, metric: str, region: str) -> str:
        where = f" in {region}" if region else ""
        return f"ask for more of {metric}{where}: {QUOTA_PAGE}?project={self._account.project}"

    # -- what all machines share ---------------------------------------------------------------

    async def _network(self) -> list[Check]:
        name, project = self._settings.network, self._account.project
        shown = await self._client.find(self._firewall.network)
        if shown is None:
            remedy = f"`gcloud compute networks create {name} --subnet-mode=auto --project {project}`"
            return [Check("network", "bad", f"there is no network {name}", f"{remedy}, or set `network`")]
        if not shown.get("autoCreateSubnetworks") and not self._settings.subnet:
            remedy = f"set `subnet` (`gcloud compute networks subnets list --network {name}`)"
            return [Check("network", "bad", f"the network {name} makes no subnets itself", remedy)]
        who = ", ".join(self._firewall.sources)
        told = (
            f"{name} is there; machines of ours let port {self._settings.port} in from {who} and nothing else"
        )
        return [Check("network", "good", told)]

    async def _image(self) -> list[Check]:
        image = self._settings.image
        shown = await self._client.find(image)
        if shown is None:
            remedy = "check `image`: `gcloud compute images list` shows those there are"
            return [Check("image", "bad", f"{image} is not there", remedy)]
        needed = int(shown.get("diskSizeGb") or 0)
        if needed > self._settings.disk_gb:
            told = f"{image} needs a disk of {needed} GB"
            return [Check("image", "bad", told, f"set disk_gb = {needed}")]
        return [Check("image", "good", f"{image} is there ({shown.get('name')})")]

    # -- what can be had -----------------------------------------------------------------------

    def _zones(self, region: str) -> Callable[[], Awaitable[list[Check]]]:
        async def check() -> list[Check]:
            wanted = [zone for zone in self._zones_used if region_of(zone) == region]
            found = await asyncio.gather(
                *(self._client.find(f"{self._client.root}/zones/{zone}") for zone in wanted)
            )
            bad = [
                zone
                for zone, shown in zip(wanted, found, strict=True)
                if shown is None or shown.get("status") != "UP"
            ]
            if not bad:
                return []
            remedy = f"leave it out of `zones`: `gcloud compute zones list --filter region={region}`"
            return [Check(f"zones of {region}", "warn", f"{', '.join(bad)}: not there, or down", remedy)]

        return check

    def _types(self, zone: str) -> Callable[[], Awaitable[list[Check]]]:
        async def check() -> list[Check]:
            shown = await self._client.all(f"{self._client.root}/zones/{zone}/machineTypes")
            sold = {str(each.get("name")) for each in shown}
            missing = [name for name in self._settings.types if name not in sold]
            if not shown or not missing:
                return []
            verdict: Literal["warn", "bad"] = "warn" if len(missing) < len(self._settings.types) else "bad"
            remedy = f"leave it out of `types`: `gcloud compute machine-types list --zones {zone}`"
            return [Check(f"types in {zone}", verdict, f"{', '.join(missing)}: not there", remedy)]

        return check

    def _quota(self, region: str, offers: Sequence[Offer]) -> Callable[[], Awaitable[list[Check]]]:
        """For how many machines do vCPUs, addresses and disks last?"""

        async def check() -> list[Check]:
            shown = await self._client.get(f"{self._client.root}/regions/{region}")
            if warning := shown.get("quotaStatusWarning"):
                told = f"it could not be read: {dict(warning).get('message', 'Google does not say why')}"
                return [Check(f"quota in {region}", "warn", told, "try again later")]
            free, room = free_of(shown), self._room.setdefault(region, {})
            types = [type for each in offers if (type := type_of(each.size)) and each.area == region]
            found = [self._cpus(type, region, free) for type in {type.name: type for type in types}.values()]
            room["vCPUs"] = max((many for _, many in found), default=0)
            checks = [check for check, _ in found]
            kinds = {type.disk(self._settings.disk) for type in types} or {self._settings.disk}
            disks = [_tightest(disk_quotas(kind, self._settings.disk_gb), free) for kind in sorted(kinds)]
            limits = [_tightest({"INSTANCES": 1}, free), max(disks, key=lambda disk: disk[1])]
            if self._settings.public_ip:
                limits.append(_tightest({"IN_USE_ADDRESSES": 1}, free))
            room.update(limits)
            for metric, many in dict.fromkeys((*limits, *disks)):
                if many == 0:
                    remedy, told = self._more_quota(metric, region), "none is left"
                    verdict: Literal["warn", "bad"] = "bad" if (metric, many) in limits else "warn"
                    checks.append(Check(f"{metric} in {region}", verdict, told, remedy))
            return checks

        return check

    def _cpus(self, type: MachineType, region: str, free: dict[str, int]) -> tuple[Check, int]:
        metrics = quotas_of(type, free, spot=self._settings.spot)
        tightest = min(metrics, key=lambda metric: free.get(metric, UNLIMITED))
        many = max(0, free.get(tightest, UNLIMITED)) // type.cpus
        told = f"quota {tightest} lasts for {many} more of {type.cpus} vCPUs"
        about = f"{type.name} in {region}"
        if many > 0:
            return Check(about, "good", told, room={type.name: many}), many
        return Check(about, "warn", told, self._more_quota(tightest, region), room={type.name: 0}), 0

    def _fitting(self, needs: Needs) -> list[Check]:
        """Which types have what is needed? The others are not offered."""
        found: list[Check] = []
        types = [type for name in self._settings.types if (type := type_of(name)) is not None]
        if wants_nesting(self._settings, needs):
            nesting = [type.name for type in types if type.nested]
            told = f"{', '.join(nesting) or 'none of `types`'} can run virtual machines"
            remedy = "" if nesting else 'name types of Intel\'s, but not E2: types = ["n2-standard-4"]'
            found.append(Check("nested virtualisation", "good" if nesting else "bad", told, remedy))
        unfit = [type.name for type in types if not fits(type, needs, self._settings.disk_gb)]
        if unfit:
            remedy = "leave them out of `types`, or raise `disk_gb`"
            found.append(Check("types", "warn", f"{', '.join(unfit)}: less than is needed", remedy))
        return found

    def _ends(self, offers: Sequence[Offer], workers: int) -> list[Check]:
        """What all checks together say: for how many machines there is room, and at which price."""
        room = workers_checks(workers, self._room, QUOTA_PAGE, everywhere=self._everywhere)
        return [*room, *price_checks(offers, "types", "`prices` and `discounts` set yours")]


async def _guarded(name: str, check: Callable[[], Awaitable[list[Check]]]) -> list[Check]:
    try:
        return await check()
    except GoogleFault as fault:
        told, _, remedy = str(fault.refusal(name)).partition("; ")
        return [Check(name, "bad", told.removeprefix(f"{name}: "), remedy)]


# -- reading Google's answers: pure ---------------------------------------------------------------


def free_of(shown: Json) -> dict[str, int]:
    """What is left of each quota of a region or a project; that of spot machines only if it was granted."""
    return {
        str(each.get("metric")): int(float(each.get("limit", 0)) - float(each.get("usage", 0)))
        for each in rows(shown.get("quotas"))
        if each.get("metric") != SPOT_QUOTA or each.get("limit")
    }


def disk_quotas(kind: str, gb: int) -> Mapping[str, int]:
    """The quotas of a region that such a disk counts in, and how much of each it needs."""
    if kind == HYPERDISK:
        return {"HDB_TOTAL_GB": gb, "HDB_TOTAL_IOPS": HYPERDISK_IOPS, "HDB_TOTAL_THROUGHPUT": HYPERDISK_MB_S}
    return {"DISKS_TOTAL_GB" if kind == "pd-standard" else "SSD_TOTAL_GB": gb}


def _tightest(needed: Mapping[str, int], free: Mapping[str, int]) -> tuple[str, int]:
    """Of quotas that are all needed, the one that lasts for the fewest machines, and for how many."""
    lasts = {metric: max(0, free.get(metric, UNLIMITED)) // each for metric, each in needed.items()}
    return min(lasts.items(), key=lambda metric: metric[1])


def quotas_of(type: MachineType, free: dict[str, int], *, spot: bool) -> tuple[str, ...]:
    """The quotas that its vCPUs count in. Spot counts as the others do until it is granted a quota."""
    if spot and SPOT_QUOTA in free:
        return (SPOT_QUOTA,)
    return (type.quota,)
