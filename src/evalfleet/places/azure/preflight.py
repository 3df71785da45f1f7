"""Before money is spent: what would be made, and checks of rights, sizes, quota, image and prices.

Each check that fails tells its remedy.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

from evalfleet.model import MachineId, Needs, Offer
from evalfleet.places.vm.answers import Json, rows, table
from evalfleet.places.vm.preflight import (
    UNLIMITED,
    clock_checks,
    machine_words,
    price_checks,
    workers_checks,
)
from evalfleet.ports import Check, Made

from .answers import QUOTA_PAGE, ArmFault
from .arm import ArmClient, login_doubt
from .galleries import regions_of
from .leftovers import UNLOCK, all_locks, lock_on, lock_scope
from .names import names_of, plain, shared_name
from .settings import AzureAccount, AzureSettings
from .sizes import fits, region_and_zone, size_of
from .template import (
    ADDRESS,
    COMPUTE,
    DISK,
    GALLERIES,
    NETWORK,
    NIC,
    NSG,
    RANGE,
    RESOURCES,
    SCHEDULE,
    VM,
    VNET,
)

AUTHORIZATION = "2022-04-01"
SKUS = "2021-07-01"
NAMESPACES = ("Microsoft.Compute", "Microsoft.Network", "Microsoft.DevTestLab")
ACTIONS = (
    "Microsoft.Compute/virtualMachines/write",
    "Microsoft.Compute/virtualMachines/delete",
    "Microsoft.Compute/virtualMachines/start/action",
    "Microsoft.Compute/virtualMachines/deallocate/action",
    "Microsoft.Compute/disks/delete",
    "Microsoft.DevTestLab/schedules/write",
    "Microsoft.DevTestLab/schedules/delete",
    "Microsoft.Network/networkInterfaces/delete",
    "Microsoft.Network/publicIPAddresses/delete",
    "Microsoft.Resources/deployments/delete",
    "Microsoft.Network/networkInterfaces/write",
    "Microsoft.Network/networkSecurityGroups/write",
    "Microsoft.Network/publicIPAddresses/write",
    "Microsoft.Network/virtualNetworks/subnets/join/action",
    "Microsoft.Resources/deployments/write",
    "Microsoft.Resources/deployments/cancel/action",
    "Microsoft.Resources/tags/write",
)
DISK_QUOTA = {
    "Premium_LRS": "PremiumDiskCount",
    "StandardSSD_LRS": "StandardSSDDiskCount",
    "Standard_LRS": "StandardDiskCount",
}
ADDRESS_QUOTAS = frozenset(
    {
        "publicipaddresses",
        "staticpublicipaddresses",
        "standardskupublicipaddresses",
        "ipv4standardskupublicipaddresses",
    }
)
WHOSE = "Azure's"
MADE = (VM, DISK, NIC, ADDRESS, NSG, VNET, SCHEDULE)
LONG_RUN_S = 4 * 3600.0
NEW_GROUP = "Microsoft.Resources/subscriptions/resourceGroups/write"
NEW_NETWORK = "Microsoft.Network/virtualNetworks/write"


def outline(
    place: str,
    settings: AzureSettings,
    account: AzureAccount,
    home: str,
    machines: Sequence[tuple[MachineId, Offer]],
) -> Iterator[Made]:
    """What would be made for these machines: what they share first, then each with all that goes with it."""
    yield Made("resource group", account.group, "", "made if it is not there")
    for region in dict.fromkeys(region_and_zone(offer.region)[0] for _, offer in machines):
        if settings.subnet:
            yield Made("subnet", settings.subnet, region, "yours")
        else:
            yield Made("network", shared_name(home, region, "net"), region, RANGE)
        rules = shared_name(home, region, f"{plain(place)}-ssh")
        who = ", ".join(settings.ssh_from) or "nowhere but the network itself"
        yield Made("security group", rules, region, f"port {settings.port} from {who}; nothing else")
    for machine, offer in machines:
        yield _made_machine(settings, machine, offer)


def _made_machine(settings: AzureSettings, machine: MachineId, offer: Offer) -> Made:
    region, zone = region_and_zone(offer.region)
    words = machine_words(offer, f"{settings.disk_gb} GB {settings.disk}", public_ip=settings.public_ip)
    where = f"{region}, zone {zone}" if zone else region
    return Made("machine", names_of(machine, settings.name).vm, where, words)


class AzureChecks:
    """The checks of `evalfleet doctor` for one place. They only read."""

    def __init__(
        self, arm: ArmClient, environ: Mapping[str, str], settings: AzureSettings, account: AzureAccount
    ) -> None:
        self._arm = arm
        self._environ = environ
        self._settings = settings
        self._group = f"{arm.root}/resourceGroups/{account.group}"
        self._name = account.group
        self._room: dict[str, dict[str, int]] = {}
        """By region: for how many machines each of what is limited lasts."""

    async def all(self, offers: Sequence[Offer], needs: Needs, workers: int = 1) -> Sequence[Check]:
        """All checks, for so many machines. If we are not let in, nothing else is asked."""
        first = await _guarded("credentials", self._credentials)
        if first[0].verdict == "bad":
            return first
        regions = [region for region in self._settings.regions if any(_in(each, region) for each in offers)]
        self._room = {region: {} for region in regions}
        found = await asyncio.gather(
            _guarded("permissions", self._permissions),
            _guarded("locks", self._locks),
            *(_guarded("registration", self._registration(name)) for name in NAMESPACES),
            *(_guarded(f"image in {region}", self._image(region)) for region in regions),
            *(_guarded(f"sizes in {region}", self._sizes(region, offers)) for region in regions),
            *(_guarded(f"addresses in {region}", self._addresses(region)) for region in regions),
            *(_guarded(f"disks in {region}", self._disks(region)) for region in regions),
        )
        told = [check for some in found for check in some]
        return (*first, *told, *self._fitting(needs), *self._ends(offers, workers))

    def _ends(self, offers: Sequence[Offer], workers: int) -> list[Check]:
        """What all checks together say: for how many machines there is room, and at which price."""
        prices = price_checks(offers, "sizes", "`evalfleet prices --update` fetches today's")
        return [*workers_checks(workers, self._room, QUOTA_PAGE), *prices]

    def _fitting(self, needs: Needs) -> list[Check]:
        """Which sizes have what is needed? The others are not offered. Azure does not list which can nest."""
        found: list[Check] = []
        sizes = [size for name in self._settings.sizes if (size := size_of(name)) is not None]
        if needs.nested_virtualization:
            nesting = [size.name for size in sizes if size.series.nested]
            told = f"{', '.join(nesting) or 'none of `sizes`'} can run virtual machines"
            remedy = "" if nesting else "name sizes of other series"
            found.append(Check("nested virtualisation", "good" if nesting else "bad", told, remedy))
        unfit = [size.name for size in sizes if not fits(size, needs, self._settings.disk_gb)]
        if unfit:
            told = f"{', '.join(unfit)}: less than the {words_of(needs)} that are needed"
            found.append(Check("sizes", "warn", told, "leave them out of `sizes`, or raise `disk_gb`"))
        return found

    # -- who we are ----------------------------------------------------------------------------

    async def _credentials(self) -> list[Check]:
        shown = await self._arm.get(self._arm.root, RESOURCES)
        state = str(shown.get("state"))
        told = f"subscription {shown.get('displayName')} ({shown.get('subscriptionId')}) is {state}"
        remedy = "" if state == "Enabled" else "choose another with `subscription`"
        found = [Check("credentials", "bad" if remedy else "good", told, remedy)]
        found += clock_checks(self._arm.skew_s, WHOSE)
        if doubt := await login_doubt(self._arm.claims, self._environ, self._arm.now(), LONG_RUN_S):
            why, _, advice = doubt.rpartition("; ")
            told = why.replace("this run", f"a run of {LONG_RUN_S / 3600:g} h")
            found.append(Check("login", "warn", told, advice))
        return found

    async def _permissions(self) -> list[Check]:
        there = await self._arm.find(self._group, RESOURCES) is not None
        scope = self._group if there else self._arm.root
        granted = await self._arm.all(f"{scope}/providers/Microsoft.Authorization/permissions", AUTHORIZATION)
        wanted = [*ACTIONS, *(() if there else (NEW_GROUP,))]
        wanted += [] if self._settings.subnet else [NEW_NETWORK]
        if missing := [action for action in wanted if not allowed(action, granted)]:
            remedy = f"ask for the role Contributor on the resource group {self._name}"
            return [Check("permissions", "bad", f"not allowed: {', '.join(missing)}", remedy)]
        what = "exists" if there else "will be made"
        return [Check("permissions", "good", f"all that are needed; resource group {self._name} {what}")]

    async def _locks(self) -> list[Check]:
        """What would keep machines from being deleted, or made."""
        locks = await all_locks(self._arm, self._group)
        found = [lock for lock in locks if f"{self._group.lower()}/".startswith(f"{lock_scope(lock)}/")]
        if not found:
            return [Check("locks", "good", f"none on the resource group {self._name}")]
        told = ", ".join(lock_on(self._group, [lock]) for lock in found)
        remedy = f"{UNLOCK} (whoever set it can), or set another `resource_group`"
        return [Check("locks", "bad", f"machines could not be deleted: {told}", remedy)]

    def _registration(self, namespace: str) -> Callable[[], Awaitable[list[Check]]]:
        async def check() -> list[Check]:
            shown = await self._arm.get(f"{self._arm.root}/providers/{namespace}", RESOURCES)
            state = str(shown.get("registrationState"))
            good = state == "Registered"
            remedy = "" if good else f"az provider register --namespace {namespace}"
            found = [Check("registration", "good" if good else "bad", f"{namespace} is {state}", remedy)]
            return [*found, *self._where_made(namespace, rows(shown.get("resourceTypes")))]

        return check

    def _where_made(self, namespace: str, types: list[Json]) -> list[Check]:
        """Is every type that a machine needs made in every region? Azure writes regions in two ways."""
        found: list[Check] = []
        for kind in (each for each in MADE if each.startswith(f"{namespace}/")):
            name = kind.split("/", 1)[1].lower()
            about: Json = next(
                (each for each in types if str(each.get("resourceType")).lower() == name), dict[str, object]()
            )
            regions = {re.sub(r"\W", "", str(each)).lower() for each in about.get("locations") or ()}
            missing = [each for each in self._settings.regions if regions and each not in regions]
            if missing:
                told = f"{kind} is not to be had in {', '.join(missing)}"
                found.append(Check("regions", "bad", told, "leave them out of `regions`"))
        return found

    # -- what can be had -----------------------------------------------------------------------

    def _image(self, region: str) -> Callable[[], Awaitable[list[Check]]]:
        async def check() -> list[Check]:
            image = self._settings.image
            if image.startswith("/"):
                version = GALLERIES if "/galleries/" in image.lower() else COMPUTE
                found = await self._arm.find(image, version)
                copies = regions_of(found or {})  # only a version of a gallery's image tells
                there = found is not None and (not copies or region in copies)
            else:
                publisher, offer, sku, _ = image.split(":")
                words = f"publishers/{publisher}/artifacttypes/vmimage/offers/{offer}/skus/{sku}/versions"
                path = f"{self._arm.root}/providers/Microsoft.Compute/locations/{region}/{words}"
                there = bool(table(await self._arm.find(path, COMPUTE)).get("value"))
            ours = "`evalfleet machines --images` lists those that were captured, with their regions"
            theirs = "`az vm image list --all --publisher NAME` lists those there are"
            remedy = "" if there else f"check `image`: {ours if image.startswith('/') else theirs}"
            told = f"{image} {'is there' if there else 'is not there'}"
            return [Check(f"image in {region}", "good" if there else "bad", told, remedy)]

        return check

    def _sizes(self, region: str, offers: Sequence[Offer]) -> Callable[[], Awaitable[list[Check]]]:
        """Are they sold there to this subscription, and for how many does the quota last?"""

        async def check() -> list[Check]:
            root = f"{self._arm.root}/providers/Microsoft.Compute"
            skus, usages = await asyncio.gather(
                self._arm.all(f"{root}/skus", SKUS, **{"$filter": f"location eq '{region}'"}),
                self._arm.all(f"{root}/locations/{region}/usages", COMPUTE),
            )
            names = list(dict.fromkeys(each.size for each in offers if _in(each, region)))
            free = free_of(usages)
            found = [self._size(name, region, skus, free) for name in names]
            self._room[region]["quota of vCPUs"] = max((many for _, many in found), default=0)
            return [check for check, _ in found]

        return check

    def _size(self, name: str, region: str, skus: list[Json], free: dict[str, int]) -> tuple[Check, int]:
        """What there is to say of a size, and how many of it the quota lasts for."""
        about = f"{name} in {region}"
        sku = next((each for each in skus if str(each.get("name")).lower() == name.lower()), None)
        why = "not sold there" if sku is None else restricted(sku, region, self._settings.zones)
        if why:
            remedy = "leave it out of `sizes`, or the region out of `regions`"
            return Check(about, "warn", why, remedy, room={name: 0}), 0
        size = size_of(name)
        assert size is not None
        spot = self._settings.spot
        family = str(table(sku).get("family") or size.series.family)
        limits = ("lowPriorityCores",) if spot else (family, "cores")
        tightest = min(limits, key=lambda limit: free.get(limit, UNLIMITED))
        many = max(0, free.get(tightest, UNLIMITED) // size.cpus)
        told = f"quota {tightest} lasts for {many} more of {size.cpus} vCPUs"
        if many > 0:
            return Check(about, "good", told, room={name: many}), many
        remedy = f"ask for more of {tightest} in {region}: {QUOTA_PAGE}"
        return Check(about, "warn", told, remedy, room={name: 0}), 0

    def _disks(self, region: str) -> Callable[[], Awaitable[list[Check]]]:
        async def check() -> list[Check]:
            path = f"{self._arm.root}/providers/Microsoft.Compute/locations/{region}/usages"
            quota = DISK_QUOTA[self._settings.disk]
            many = free_of(await self._arm.all(path, COMPUTE)).get(quota)
            if many is None:
                return [Check(f"disks in {region}", "good", f"there is no quota of {self._settings.disk}")]
            self._room[region]["disks"] = max(0, many)
            remedy = "" if many > 0 else f"ask for more of {quota} in {region}: {QUOTA_PAGE}"
            told = f"quota {quota} lasts for {max(0, many)} more"
            return [Check(f"disks in {region}", "warn" if remedy else "good", told, remedy)]

        return check

    def _addresses(self, region: str) -> Callable[[], Awaitable[list[Check]]]:
        async def check() -> list[Check]:
            if not self._settings.public_ip:
                return []
            path = f"{self._arm.root}/providers/Microsoft.Network/locations/{region}/usages"
            free = free_of(await self._arm.all(path, NETWORK))
            many = min((free[key] for key in free if key.lower() in ADDRESS_QUOTAS), default=0)
            self._room[region]["public addresses"] = max(0, many)
            remedy = "" if many > 0 else f"ask for more public addresses in {region}: {QUOTA_PAGE}"
            return [
                Check(f"addresses in {region}", "warn" if remedy else "good", f"{max(0, many)} more", remedy)
            ]

        return check


async def _guarded(name: str, check: Callable[[], Awaitable[list[Check]]]) -> list[Check]:
    try:
        return await check()
    except ArmFault as fault:
        if fault.status == 403 and name != "permissions":
            told = "it cannot be looked at: rights on the resource group do not reach so far"
            remedy = (
                "ask for the role Reader on the subscription, or whoever has it; machines can be made without"
            )
            return [Check(name, "warn", told, remedy)]
        told, _, remedy = str(fault.refusal(name)).partition("; ")
        return [Check(name, "bad", told.removeprefix(f"{name}: "), remedy)]


def _in(offer: Offer, region: str) -> bool:
    return region_and_zone(offer.region)[0] == region


# -- reading Azure's answers: pure ---------------------------------------------------------------


def allowed(action: str, granted: list[Json]) -> bool:
    """Does any of the roles grant the action? None of them takes away what another gives."""

    def has(patterns: object) -> bool:
        texts = [str(each) for each in patterns] if isinstance(patterns, list) else []  # pyright: ignore
        regexes = [re.escape(text).replace(r"\*", ".*") for text in texts]
        return any(re.fullmatch(regex, action, re.IGNORECASE) for regex in regexes)

    return any(has(each.get("actions")) and not has(each.get("notActions")) for each in granted)


def restricted(sku: Json, region: str, zones: tuple[str, ...]) -> str:
    """Why the size cannot be had there, or not in some of the zones; empty if it can."""
    for each in rows(sku.get("restrictions")):
        kind, reason = each.get("type"), str(each.get("reasonCode"))
        shut = {str(zone) for zone in table(each.get("restrictionInfo")).get("zones") or ()}
        if kind == "Location":
            return f"restricted: {reason}"
        if kind == "Zone" and (wanted := shut & set(zones)):
            return f"restricted in zone {', '.join(sorted(wanted))}: {reason}"
    places = [each for each in rows(sku.get("locationInfo")) if str(each.get("location")).lower() == region]
    sold = {str(zone) for each in places for zone in each.get("zones") or ()}
    missing = set(zones) - sold if places else set[str]()
    return f"not sold in zone {', '.join(sorted(missing))}" if missing else ""


def words_of(needs: Needs) -> str:
    words = (
        f"{needs.cpus} vCPUs",
        f"{needs.memory_gb:g} GB of memory" if needs.memory_gb else "",
        f"{needs.disk_gb:g} GB of disk" if needs.disk_gb else "",
    )
    return ", ".join(filter(None, words))


def free_of(usages: list[Json]) -> dict[str, int]:
    """What is left of each quota."""
    return {
        str(table(each.get("name")).get("value")): int(each.get("limit", 0))
        - int(each.get("currentValue", 0))
        for each in usages
    }
