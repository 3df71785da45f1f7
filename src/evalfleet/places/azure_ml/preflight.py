"""Before money is spent: what can be had, what it costs, and the checks of `doctor` with their remedies."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

from evalfleet.channels.mail.boxes import MAIL_SILENT_S, MailStore
from evalfleet.errors import PlaceError
from evalfleet.model import Cost, Lifetime, MachineId, Needs, Offer
from evalfleet.places.azure.answers import ArmFault
from evalfleet.places.azure.names import HOME, OWNER
from evalfleet.places.azure.prices import ADDRESS, AzurePriceBook, disk
from evalfleet.places.azure.services import (
    WHOSE,
    looked,
    node_offers,
    node_price,
    offer_checks,
    storage_checks,
)
from evalfleet.places.azure.sizes import VmSize, fits, size_of, vcpus
from evalfleet.places.vm.answers import Json, rows, table
from evalfleet.places.vm.preflight import clock_checks, machine_words, workers_checks
from evalfleet.ports import Check, Made

from .service import LOGIN_REMEDY, VERSION, MlClient
from .settings import AzureMlSettings, MlAccount
from .template import END_S, job_name

SCALE_DOWN_S = 180.0
"""So long Azure may take to give a node back that has been idle for long enough."""
QUOTAS = "the studio's page Quota (https://ml.azure.com/quota)"
INSTANCE_DISK = disk("Premium_LRS", 120)
"""The system disk of a compute instance."""
BALANCER_USD_PER_HOUR = 0.025
"""Of the load balancer in front of a compute instance (November 2026, list price of one with a rule)."""
TEARDOWN_S = 120.0
INSTANCE_LOST_S = 60.0
"""A silence of so many seconds before a compute instance is restarted."""
DISK_GB = 64
"""What a node has for images and files at least: the system disk of clusters is 120 GB, in part taken."""


# -- offers --------------------------------------------------------------------------------------------


def offers_of(
    place: str,
    settings: AzureMlSettings,
    region: str,
    book: AzurePriceBook,
    needs: Needs,
    idle_s: float | None = None,
) -> Sequence[Offer]:
    """`idle_s`: for so long the cluster keeps a node without a job, if that is not what the settings say."""
    kept_s = (settings.idle_s if idle_s is None else idle_s) + SCALE_DOWN_S

    def made(size: VmSize) -> Offer:
        return Offer(
            place,
            size.name,
            capacity=settings.max_nodes,
            cost=Cost(sweep_s=kept_s, linger_s=kept_s),
            life=Lifetime(
                teardown_s=END_S,
                boot_s=settings.prepare_s + settings.start_s,
                silent_s=MAIL_SILENT_S,
                lost_s=settings.lost_s,
            ),
        )

    sizes = settings.sizes[:1] if settings.cluster else settings.sizes
    return node_offers(settings, sizes, region, book, needs, DISK_GB, made)


def instance_offers(
    place: str, settings: AzureMlSettings, region: str, book: AzurePriceBook, needs: Needs
) -> Sequence[Offer]:
    """Compute instances that can be had, cheapest first. What is billed while one is stopped comes on top."""
    address = [book.extra(ADDRESS, region)] if settings.public_ip else []
    idle = sum(quote.usd for quote in (book.extra(INSTANCE_DISK, region), *address)) + BALANCER_USD_PER_HOUR
    offers = [
        Offer(
            place,
            size.name,
            region,
            capacity=settings.max_nodes,
            family=size.series.family,
            cpus=size.cpus,
            memory_gb=size.memory_gb or 0.0,
            mends=("restart",),
            cost=Cost(
                usd_per_hour=round(quote.usd + idle, 6),
                idle_usd_per_hour=round(idle, 6),
                sweep_s=SCALE_DOWN_S,
                priced=quote.as_of,
            ),
            life=Lifetime(
                teardown_s=TEARDOWN_S,
                settle_s=settings.settle_s,
                lost_s=min(settings.lost_s, INSTANCE_LOST_S),
            ),
        )
        for size in filter(None, map(size_of, settings.sizes))
        if fits(size, needs, DISK_GB)
        if (quote := node_price(settings, book, size, region, spot=False)) is not None
    ]
    return sorted(offers, key=lambda offer: offer.cost.usd_per_hour)


def outline(
    settings: AzureMlSettings,
    account: MlAccount,
    machines: Sequence[tuple[MachineId, Offer]],
    cluster_of: Callable[[MachineId, Offer], str],
) -> Iterator[Made]:
    """What would be made: a cluster for each size, and a job with a mailbox for each machine."""
    where = f"{account.workspace} in {account.group}"
    told: set[str] = set()
    for machine, offer in machines:
        cluster = cluster_of(machine, offer)
        if cluster not in told and not settings.cluster:
            told.add(cluster)
            words = f"0 to {settings.max_nodes} nodes, each kept for {settings.idle_s:g} s without a job"
            yield Made("cluster", cluster, where, words)
        words = machine_words(offer, f"on {cluster}", public_ip=settings.public_ip)
        yield Made("job with a mailbox", job_name(machine, settings.name), where, words)


PRIVATE = "compute instances without a public address are reached from within their network only"
PRIVATE_REMEDY = (
    'run evalfleet there, or set `jump`; or set compute = "clusters", whose machines are reached by mailbox'
)


def private_doubts(settings: AzureMlSettings) -> list[str]:
    """What is to be said where nobody may come in from outside."""
    return [] if settings.public_ip or settings.jump else [f"{PRIVATE}: {PRIVATE_REMEDY}"]


# -- clusters ------------------------------------------------------------------------------------------


def cluster_state(shown: Json) -> str:
    return str(table(shown.get("properties")).get("provisioningState") or "").lower()


def no_cluster(name: str) -> PlaceError:
    why = f"the workspace has no cluster {name}; `az ml compute list -o table` shows those it has"
    return PlaceError(why, transient=False, scope="place")


def cluster_problem(name: str, shown: Json, offer: Offer, home: str, *, named: bool) -> str:
    """Why a cluster of this name cannot be used; empty if it can."""
    compute = table(shown.get("properties"))
    properties = table(compute.get("properties"))
    tags = table(shown.get("tags"))
    size = str(properties.get("vmSize") or "")
    if str(compute.get("computeType")).lower() != "amlcompute":
        return f"{name} is no cluster but {compute.get('computeType')}; set another `cluster`"
    if not named and tags.get(HOME) != home:
        whose = f" but {tags[OWNER]}'s" if tags.get(OWNER) else ""
        return (
            f"the cluster {name} is not this home's{whose}; choose another --name, or set `cluster` to use it"
        )
    if size.lower() != offer.size.lower():
        return f'the nodes of the cluster {name} are {size}; set sizes = ["{size}"]: by it they are priced'
    return ""


def cluster_failure(offer: Offer, shown: Json) -> PlaceError:
    errors = [
        table(each.get("error")) or each
        for each in rows(table(shown.get("properties")).get("provisioningErrors"))
    ]
    first = errors[0] if errors else {"message": "the cluster could not be made", "code": "Failed"}
    why = f"{offer.size}: {str(first.get('message')).rstrip('.')} ({first.get('code')})"
    is_quota = "quota" in why.lower()
    remedy = f"; ask for more: {QUOTAS}" if is_quota else ""
    return PlaceError(why + remedy, transient=False, scope="family" if is_quota else "offer")


# -- doctor --------------------------------------------------------------------------------------------


class MlChecks:
    """The checks of `evalfleet doctor` for one place. They only read."""

    def __init__(
        self,
        client: MlClient,
        opened: Callable[[], Awaitable[MailStore]],
        settings: AzureMlSettings,
        account: MlAccount,
    ) -> None:
        self._client, self._opened = client, opened
        self._settings, self._account = settings, account

    async def all(
        self, offers: Callable[[], Awaitable[Sequence[Offer]]], needs: Needs, workers: int
    ) -> Sequence[Check]:
        account = self._account
        try:
            shown = await self._client.workspace()
        except ArmFault as fault:
            told, _, remedy = str(fault.refusal(account.workspace)).partition("; ")
            return [Check("workspace", "bad", told, remedy or "check `workspace` and `resource_group`")]
        if shown is None:
            told = f"there is no workspace {account.workspace} in the resource group {account.group}"
            return [Check("workspace", "bad", told, "`az ml workspace list -o table` shows yours")]
        region = str(shown.get("location") or "").replace(" ", "").lower()
        checks = [Check("workspace", "good", f"{account.workspace} in {region} lets us in")]
        checks += clock_checks(self._client.arm.skew_s, WHOSE)
        if self._settings.region and self._settings.region != region:
            told = f"the workspace is in {region}, not in {self._settings.region}"
            checks.append(Check("region", "bad", told, f'set region = "{region}", or leave it out'))
        found = await offers()
        idle = f"a node is billed from its start, and {self._settings.idle_s:g} s after its last job"
        if self._settings.compute == "instances" and found:
            idle = f"${found[0].cost.idle_usd_per_hour:.3f} of that also while it is stopped"
        checks += offer_checks(found, needs, region, idle)
        checks += await looked("storage", self._storage, must=True)
        checks += self._network(table(shown.get("properties")))
        if self._settings.compute == "clusters":
            checks += await looked("image", lambda: self._image(table(shown.get("properties"))), must=False)
        if self._settings.cluster:
            checks += await looked("cluster", lambda: self._own_cluster(found), must=True)
        quota = await looked("quota", lambda: self._quota(found, workers, region), must=False)
        return [*checks, *quota]

    async def _storage(self) -> list[Check]:
        return await storage_checks(self._opened)

    def _network(self, workspace: Json) -> list[Check]:
        isolation = str(table(workspace.get("managedNetwork")).get("isolationMode") or "Disabled")
        if str(workspace.get("publicNetworkAccess") or "Enabled").lower() == "disabled":
            told = "the workspace is reached from its own network only"
            return [Check("network", "warn", told, "run evalfleet there: nodes are reached by mailbox alone")]
        told = "nodes are reached by a mailbox in the storage account; no port is open"
        if self._settings.compute == "instances":
            told = "instances are reached by SSH with a key of ours; their port is open to everybody"
            if not self._settings.public_ip and not self._settings.jump:
                return [Check("network", "warn", PRIVATE, PRIVATE_REMEDY)]
            if not self._settings.public_ip:
                told = "instances are reached by SSH through `jump`"
        if isolation.lower() == "allowonlyapprovedoutbound":
            remedy = "allow what tasks need (model APIs) in the workspace's outbound rules"
            return [Check("network", "warn", f"{told}; nodes reach approved addresses only", remedy)]
        return [Check("network", "good", told)]

    async def _image(self, workspace: Json) -> list[Check]:
        image = self._settings.image
        host, _, rest = image.partition("/")
        registry = str(workspace.get("containerRegistry") or "").rpartition("/")[2]
        if host in ("mcr.microsoft.com", f"{registry}.azurecr.io"):
            return [Check("image", "good", f"{image}: Azure's own registry")]
        if (host if "." in host and rest else "docker.io") in await self._client.registry_logins():
            return [Check("image", "good", f"{image}: by a connection of the workspace")]
        if host.endswith(".azurecr.io"):
            told = f"{image}: not the workspace's own registry, and no connection of it logs in there"
            return [Check("image", "warn", told, LOGIN_REMEDY)]
        source = image if "." in host and rest else f"docker.io/{image if rest else f'library/{image}'}"
        name = source.partition("/")[2]
        line = f"`az acr import -n {registry or 'REGISTRY'} --source {source} --image {name}`"
        remedy = f'{line}, then image = "{registry or "REGISTRY"}.azurecr.io/{name}"'
        return [Check("image", "warn", f"{image}: pulled from outside Azure, which limits pulls", remedy)]

    async def _own_cluster(self, offers: Sequence[Offer]) -> list[Check]:
        name = self._settings.cluster
        shown = await self._client.cluster(name)
        if shown is None:
            told, _, remedy = str(no_cluster(name)).partition("; ")
            return [Check("cluster", "bad", told, remedy)]
        if offers and (why := cluster_problem(name, shown, offers[0], "", named=True)):
            told, _, remedy = why.partition("; ")
            return [Check("cluster", "bad", told, remedy)]
        scale = table(table(table(shown.get("properties")).get("properties")).get("scaleSettings"))
        if int(scale.get("minNodeCount") or 0):
            told = f"it keeps {scale['minNodeCount']} nodes, which cost money also when nothing runs there"
            return [Check("cluster", "warn", told, f"`az ml compute update -n {name} --min-instances 0`")]
        return [Check("cluster", "good", f"{name}: 0 to {scale.get('maxNodeCount')} nodes")]

    async def _quota(self, offers: Sequence[Offer], workers: int, region: str) -> list[Check]:
        path = (
            f"{self._client.arm.root}/providers/Microsoft.MachineLearningServices/locations/{region}/usages"
        )
        left = cores_left(await self._client.arm.all(path, VERSION), self._account.path)
        checks: list[Check] = []
        room: dict[bool, int] = {}
        for family, spot in dict.fromkeys((offer.family, offer.spot) for offer in offers):
            each = min(vcpus(offer.size) for offer in offers if (offer.family, offer.spot) == (family, spot))
            regional = _least(left, REGIONAL[spot])
            cores = _least(left, () if spot else _family_names(family), regional)
            if cores is None:
                continue
            many = max(0, cores // each)
            checks.append(self._quota_check(family, spot=spot, cores=cores, each=each))
            # all families share the quota of their region
            room[spot] = room.get(spot, 0) + many
            if regional is not None:
                least = min(vcpus(offer.size) for offer in offers if offer.spot == spot)
                room[spot] = min(room[spot], max(0, regional // least))
        if not checks:
            return [Check("quota", "warn", "Azure does not tell it for these sizes", QUOTAS)]
        return [*checks, *workers_checks(workers, {region: {"cores": sum(room.values())}}, QUOTAS)]

    def _quota_check(self, family: str, *, spot: bool, cores: int, each: int) -> Check:
        settings, many = self._settings, max(0, cores // each)
        kind = "spot quota" if spot else f"quota of {family}"
        told = f"{cores} cores are left: {many} nodes of {each}"
        if not many:
            return Check(kind, "bad", told, f"ask for more: {QUOTAS}")
        if settings.compute == "clusters" and not settings.cluster and settings.max_nodes > many:
            told = f"{told}, and max_nodes = {settings.max_nodes} needs {settings.max_nodes * each}"
            return Check(kind, "warn", told, f"set max_nodes = {many}, or ask for more: {QUOTAS}")
        return Check(kind, "good", told)


def cores_left(usages: Sequence[Json], workspace: str) -> dict[str, int]:
    """By the name of each quota, in small letters, how many cores it leaves to this workspace.

    Azure lists the same name for the subscription, for each workspace and for each compute. The least of the
    subscription's and the workspace's own counts. A limit of -1 is none.
    """
    left: dict[str, int] = {}
    for usage in usages:
        limit, whose = int(usage.get("limit") or 0), str(usage.get("id")).lower().partition("/usages")[0]
        if limit >= 0 and ("/workspaces/" not in whose or whose == workspace.lower()):
            name = str(table(usage.get("name")).get("value") or "").lower()
            cores = limit - int(usage.get("currentValue") or 0)
            left[name] = min(cores, left.get(name, cores))
    return left


REGIONAL = {
    False: ("total cluster dedicated regional vcpus",),
    True: ("total cluster lowpriority regional vcpus", "total cluster low-priority regional vcpus"),
}
"""What Azure calls the quota of a region, in small letters, by whether nodes are spot."""


def _family_names(family: str) -> Sequence[str]:
    """What Azure calls the quota of a family of sizes, such as standardDSv5Family, in small letters."""
    series = re.sub(r"^standard|family$", "", family, flags=re.IGNORECASE).lower()
    return (f"standard {series} family cluster dedicated vcpus", family.lower())


def _least(left: Mapping[str, int], names: Sequence[str], other: int | None = None) -> int | None:
    """The least of what these quotas leave, and of `other`; None if nothing is known of any."""
    known = [left[name] for name in names if name in left]
    return min([*known, *([] if other is None else [other])], default=None)
