"""Before money is spent: what can be had, what it costs, and the checks of `doctor` with their remedies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

from evalfleet.model import MachineId, Needs, Offer
from evalfleet.places.azure.answers import ArmFault
from evalfleet.places.azure.arm import ArmClient, ArmEndpoint
from evalfleet.places.azure.prices import OWN, SPOT_FAMILY, AzurePriceBook
from evalfleet.places.azure.sizes import VmSize, fits, size_of, vcpus
from evalfleet.places.vm.answers import Json, rows, table
from evalfleet.places.vm.preflight import clock_checks, machine_words, workers_checks
from evalfleet.places.vm.price_book import Quote
from evalfleet.ports import Check, Made

from .service import VERSION
from .settings import AzureBatchSettings, BatchAccount
from .template import END_S, job_id

WHOSE = "Azure's"
ACCOUNTS = "2025-06-01"
SWEEP_S = 300.0
"""For so long after a machine's end its node may be billed: Batch deletes it by itself, in its own time."""
QUOTAS = "the account's page Quotas in the portal"


# -- offers --------------------------------------------------------------------------------------------


def unpriced(settings: AzureBatchSettings, region: str, book: AzurePriceBook) -> list[str]:
    """Sizes that have no price in the region."""
    sizes = [size for name in settings.sizes if (size := size_of(name)) is not None]
    strange = [name for name in settings.sizes if size_of(name) is None and name not in settings.prices]
    return [
        *strange,
        *(size.name for size in sizes if _price(settings, book, size, region, spot=False) is None),
    ]


def _price(
    settings: AzureBatchSettings, book: AzurePriceBook, size: VmSize, region: str, *, spot: bool
) -> Quote | None:
    """Of an hour of the node: Batch itself costs nothing, and its nodes' system disks come with them."""
    given = settings.prices.get(f"{size.name}@{region}", settings.prices.get(size.name))
    return book.machine(size, region, spot=spot) if given is None else Quote(given, OWN)


def offers_of(
    place: str, settings: AzureBatchSettings, region: str, book: AzurePriceBook, needs: Needs
) -> Sequence[Offer]:
    """What can be had, cheapest first; with `spot`, regular nodes beside the spot ones."""
    kinds = ([True] if settings.spot else []) + ([] if settings.spot and settings.spot_only else [False])
    offers = [
        _offer(place, settings, size, region, quote, spot=spot)
        for spot in kinds
        for size in filter(None, map(size_of, settings.sizes))
        if fits(size, needs, settings.disk_gb) and not (settings.max_vcpus and size.cpus > settings.max_vcpus)
        if (quote := _price(settings, book, size, region, spot=spot)) is not None
    ]
    return sorted(offers, key=lambda offer: offer.usd_per_hour)


def _offer(
    place: str, settings: AzureBatchSettings, size: VmSize, region: str, quote: Quote, *, spot: bool
) -> Offer:
    return Offer(
        place,
        size.name,
        region,
        usd_per_hour=round(quote.usd, 6),
        spot=spot,
        capacity=settings.max_vcpus // size.cpus if settings.max_vcpus else None,
        teardown_s=max(END_S, settings.teardown_s),
        settle_s=settings.settle_s,
        family=SPOT_FAMILY if spot else size.series.family,
        idle_usd_per_hour=round(quote.usd, 6),
        sweep_s=SWEEP_S,
        priced=quote.as_of,
        queues=True,
        queue_s=settings.expected_queue_s,
        max_queue_s=settings.queue_s,
        extendable=False,
        max_life_s=settings.time_limit_s,
        silent_s=20.0,
        lost_s=max(20.0, settings.lost_s),
        cpus=size.cpus,
        memory_gb=size.memory_gb or 0.0,
    )


def outline(
    settings: AzureBatchSettings, account: BatchAccount, machines: Sequence[tuple[MachineId, Offer]]
) -> Iterator[Made]:
    """What would be made: a job a machine, which brings its pool of one node."""
    for machine, offer in machines:
        words = machine_words(offer, f"{settings.disk_gb} GB system disk", public_ip=settings.public_ip)
        where = f"{account.name} in {account.region}"
        if settings.pool:
            yield Made("job", job_id(machine, settings.name), where, f"in your pool {settings.pool}")
        else:
            yield Made("job with a pool of one node", job_id(machine, settings.name), where, words)


# -- doctor --------------------------------------------------------------------------------------------


class BatchChecks:
    """The checks of `evalfleet doctor` for one place. They only read."""

    def __init__(
        self,
        batch: ArmClient,
        environ: Mapping[str, str],
        settings: AzureBatchSettings,
        account: BatchAccount,
    ) -> None:
        self._batch, self._environ = batch, environ
        self._settings, self._account = settings, account

    async def all(self, offers: Sequence[Offer], needs: Needs, workers: int) -> Sequence[Check]:
        try:
            jobs = await self._batch.all("/jobs", VERSION, **{"$filter": "state eq 'active'"})
        except ArmFault as fault:
            told, _, remedy = str(fault.refusal(self._account.endpoint)).partition("; ")
            return [
                Check("account", "bad", told, remedy or f"check `account`: it is {self._account.name} now")
            ]
        checks = [
            Check("account", "good", f"{self._account.endpoint} lets us in; {len(jobs)} jobs are active")
        ]
        checks += clock_checks(self._batch.skew_s, WHOSE)
        checks += self._offer_checks(offers, needs)
        checks += await self._looked("image", self._image)
        if self._settings.pool:
            checks += await self._looked("pool", self._own_pool)
        checks += self._network()
        return [*checks, *await self._looked("quota", lambda: self._managed(offers, workers, len(jobs)))]

    async def _looked(self, name: str, look: Callable[[], Awaitable[list[Check]]]) -> list[Check]:
        try:
            return await look()
        except ArmFault as fault:
            told, _, remedy = str(fault.refusal(name)).partition("; ")
            return [Check(name, "warn", f"it cannot be seen: {told}", remedy)]

    def _offer_checks(self, offers: Sequence[Offer], needs: Needs) -> list[Check]:
        if not offers:
            wanted = needs.in_words() or "what is needed"
            return [Check("offers", "bad", f"none of `sizes` has {wanted}", "name larger ones")]
        first = offers[0]
        told = f"from ${first.usd_per_hour:.3f} an hour ({first.size}); prices of {first.priced}"
        return [Check("prices", "good", f"{told}; a node is billed from its start, also while it boots")]

    async def _image(self) -> list[Check]:
        settings = self._settings
        if settings.image.startswith("/") or settings.pool:
            return [Check("image", "good", "of a gallery or of your pool: Batch does not list it")]
        agents: dict[str, str] = {}
        for each in await self._batch.all("/supportedimages", VERSION):
            shown = table(each.get("imageReference"))
            name = ":".join(str(shown.get(part)) for part in ("publisher", "offer", "sku"))
            agents[name.lower()] = str(each.get("nodeAgentSKUId"))
        wanted = settings.image.rpartition(":")[0].lower()
        remedy = "`az batch pool supported-images list` shows those that it has"
        if wanted not in agents:
            return [Check("image", "bad", f"Batch does not have {settings.image}", remedy)]
        if agents[wanted] != settings.node_agent:
            told = f"Batch's agent for {settings.image} is {agents[wanted]!r}, not {settings.node_agent!r}"
            return [Check("image", "bad", told, f"set node_agent = {agents[wanted]!r}")]
        return [Check("image", "good", f"{settings.image} with {settings.node_agent}")]

    async def _own_pool(self) -> list[Check]:
        settings = self._settings
        pool = await self._batch.find(f"/pools/{settings.pool}", VERSION)
        if pool is None:
            remedy = (
                "`az batch pool list` shows those that there are; without `pool` each machine has its own"
            )
            return [Check("pool", "bad", f"the account has no pool {settings.pool}", remedy)]
        size = str(pool.get("vmSize"))
        if size.lower() not in {each.lower() for each in settings.sizes}:
            return [
                Check(
                    "pool", "bad", f"its nodes are {size}", f'set sizes = ["{size}"]: by it they are priced'
                )
            ]
        machine = table(pool.get("virtualMachineConfiguration"))
        if machine.get("containerConfiguration"):
            told = "it has containerConfiguration, and so takes container tasks only"
            return [Check("pool", "bad", told, "use a pool without it; `images` are pulled by a start task")]
        ends = table(table(pool.get("networkConfiguration")).get("endpointConfiguration"))
        if settings.public_ip and not any(
            nat.get("backendPort") == 22 for nat in rows(ends.get("inboundNATPools"))
        ):
            told = "no inbound NAT pool leads to port 22 of its nodes"
            return [Check("pool", "bad", told, "make it with one, or set public_ip = false and `jump`")]
        if not pool.get("enableAutoScale"):
            told = "it does not scale by itself: its nodes cost money also when nothing runs there"
            return [
                Check("pool", "warn", told, "give it an autoscale formula, or resize it to zero yourself")
            ]
        return [Check("pool", "good", f"{settings.pool}: {size}, scales by itself")]

    def _network(self) -> list[Check]:
        settings = self._settings
        if not settings.public_ip:
            return [
                Check("network", "good", f"nodes have no public address; they are reached by {settings.jump}")
            ]
        first, last = settings.ports
        who = ", ".join(settings.ssh_from) or "whoever your pool lets in"
        told = f"ports {first} to {last} of the public address lead to sshd, for {who}; nothing else"
        if {"*", "0.0.0.0/0"} & set(settings.ssh_from):
            return [Check("network", "warn", told, "name your own addresses in `ssh_from`")]
        return [Check("network", "good", told)]

    async def _managed(self, offers: Sequence[Offer], workers: int, active: int) -> list[Check]:
        """What only Azure's Resource Manager tells: quotas, and the account's storage."""
        account = self._account
        if not account.subscription:
            return [
                Check("quota", "warn", "no subscription is known", "set `subscription`, or run `az login`")
            ]
        endpoint = ArmEndpoint(account.subscription, self._settings.management, ca=account.ca)
        arm = ArmClient(endpoint, self._environ)
        try:
            shown = await arm.all(f"{arm.root}/providers/Microsoft.Batch/batchAccounts", ACCOUNTS)
        finally:
            await arm.close()
        found = [each for each in shown if str(each.get("name")).lower() == account.name]
        if not found:
            told = f"{account.name} is not in the subscription {account.subscription}"
            return [Check("quota", "warn", told, "set `subscription` to its own")]
        if str(found[0].get("location")).lower() != account.region:
            told = f"{account.name} is in {found[0].get('location')}, not in {account.region}"
            return [
                Check("region", "bad", told, f'set account = "{account.name}.{found[0].get("location")}"')
            ]
        return _quota_checks(table(found[0].get("properties")), offers, workers, active)


def _quota_checks(has: Json, offers: Sequence[Offer], workers: int, active: int) -> list[Check]:
    checks: list[Check] = []
    cores = {False: int(has.get("dedicatedCoreQuota") or 0), True: int(has.get("lowPriorityCoreQuota") or 0)}
    room = {
        "pools": int(has.get("poolQuota") or 0),
        "jobs": int(has.get("activeJobAndJobScheduleQuota") or 0) - active,
    }
    for spot in dict.fromkeys(offer.spot for offer in offers):
        kind = "spot" if spot else "dedicated"
        each = min(vcpus(offer.size) for offer in offers if offer.spot == spot)
        many = cores[spot] // max(1, each)
        room[f"{kind} cores"] = many
        told = f"{cores[spot]} {kind} cores in all: {many} nodes of {each}"
        checks.append(
            Check(f"{kind} quota", "good" if many else "bad", told, "" if many else f"ask for more: {QUOTAS}")
        )
    if "spot cores" in room and "dedicated cores" in room:
        room["cores"] = room.pop("spot cores") + room.pop("dedicated cores")
    region = offers[0].region if offers else ""
    checks += workers_checks(workers, {region: room}, QUOTAS)
    storage = table(has.get("autoStorage")).get("storageAccountId")
    told = (
        "the account has a storage account" if storage else "the account has none, and nothing here needs one"
    )
    return [*checks, Check("storage", "good", told)]
