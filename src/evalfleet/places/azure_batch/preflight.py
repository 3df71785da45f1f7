"""Before money is spent: what can be had, what it costs, and the checks of `doctor` with their remedies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

from evalfleet.channels.mail.boxes import MAIL_SILENT_S, MailStore
from evalfleet.model import Cost, Lifetime, MachineId, Needs, Offer
from evalfleet.places.azure.answers import ArmFault
from evalfleet.places.azure.arm import ArmClient
from evalfleet.places.azure.prices import AzurePriceBook
from evalfleet.places.azure.services import WHOSE, looked, node_offers, offer_checks, storage_checks
from evalfleet.places.azure.sizes import VmSize, vcpus
from evalfleet.places.vm.answers import Json, table
from evalfleet.places.vm.preflight import clock_checks, machine_words, workers_checks
from evalfleet.ports import Check, Made

from .service import VERSION
from .settings import CONTAINER_IMAGE, AzureBatchSettings, BatchAccount, image_of
from .storage import managed_account
from .template import END_S, job_id

LOST_S = 600.0
"""A machine that is reached by a mailbox may be silent for so long, while others are heard."""
NODE_S, READY_S = 300.0, 1200.0
"""So long a node may take to boot, and a machine to be ready after its pilot has answered."""
SWEEP_S = 300.0
"""For so long after a machine's end its node may be billed: Batch deletes it by itself, in its own time."""
REGION_S = 60.0
"""So long the Resource Manager is waited for before a run: without its answer a wrong region is only told as
a host that does not exist, again and again."""
QUOTAS = "the account's page Quotas in the portal"


# -- offers --------------------------------------------------------------------------------------------


def offers_of(
    place: str, settings: AzureBatchSettings, region: str, book: AzurePriceBook, needs: Needs
) -> Sequence[Offer]:
    by_mail = settings.reach == "mailbox"
    start_s = settings.answer_s + (settings.prepare_s if settings.images or settings.container else NODE_S)

    def made(size: VmSize) -> Offer:
        return Offer(
            place,
            size.name,
            capacity=settings.max_vcpus // size.cpus if settings.max_vcpus else None,
            cpus=size.cpus,
            memory_gb=size.memory_gb or 0.0,
            cost=Cost(sweep_s=SWEEP_S),
            life=Lifetime(
                teardown_s=max(END_S, settings.teardown_s),
                boot_s=start_s + READY_S,
                silent_s=MAIL_SILENT_S if by_mail else 20.0,
                lost_s=lost_s(settings),
            ),
        )

    offers = node_offers(settings, settings.sizes, region, book, needs, settings.disk_gb, made)
    return [offer for offer in offers if offer.capacity != 0]


def lost_s(settings: AzureBatchSettings) -> float:
    """How long a machine may be silent while others are heard."""
    return max(LOST_S if settings.reach == "mailbox" else 20.0, settings.lost_s)


def outline(
    settings: AzureBatchSettings, account: BatchAccount, machines: Sequence[tuple[MachineId, Offer]]
) -> Iterator[Made]:
    """What would be made: a job a machine, which brings its pool of one node."""
    for machine, offer in machines:
        words = machine_words(offer, f"{settings.disk_gb} GB system disk", public_ip=settings.public_ip)
        where = f"{account.name} in {account.region}"
        yield Made("job with a pool of one node", job_id(machine, settings.name), where, words)


# -- doctor --------------------------------------------------------------------------------------------


class BatchChecks:
    """The checks of `evalfleet doctor` for one place. They only read."""

    def __init__(
        self,
        batch: ArmClient,
        opened: Callable[[], Awaitable[MailStore]],
        environ: Mapping[str, str],
        settings: AzureBatchSettings,
        account: BatchAccount,
    ) -> None:
        self._batch, self._opened, self._environ = batch, opened, environ
        self._settings, self._account = settings, account

    async def all(self, offers: Sequence[Offer], needs: Needs, workers: int) -> Sequence[Check]:
        try:
            jobs = await self._batch.all("/jobs", VERSION, **{"$filter": "state eq 'active'"})
        except ArmFault as fault:
            # the host of an account that is elsewhere has no address
            if (elsewhere := await region_check(self._settings, self._account, self._environ)) is not None:
                return [elsewhere]
            told, _, remedy = str(fault.refusal(self._account.endpoint)).partition("; ")
            return [
                Check("account", "bad", told, remedy or f"check `account`: it is {self._account.name} now")
            ]
        checks = [
            Check("account", "good", f"{self._account.endpoint} lets us in; {len(jobs)} jobs are active")
        ]
        checks += clock_checks(self._batch.skew_s, WHOSE)
        billed = "a node is billed from its start, also while it boots"
        checks += offer_checks(offers, needs, self._account.region, billed)
        checks += await looked("image", self._image, must=False)
        settings = self._settings
        checks += self._network()
        if settings.reach == "mailbox":
            checks += await looked("storage", self._mail_storage, must=True)
        quota = await looked("quota", lambda: self._managed(offers, workers, len(jobs)), must=False)
        return [*checks, *quota]

    async def _image(self) -> list[Check]:
        settings = self._settings
        image = image_of(settings)
        if image.startswith("/"):
            return [Check("image", "good", "of a gallery: Batch does not list it")]
        agents: dict[str, str] = {}
        with_containers: set[str] = set()
        for each in await self._batch.all("/supportedimages", VERSION):
            shown = table(each.get("imageReference"))
            name = ":".join(str(shown.get(part)) for part in ("publisher", "offer", "sku"))
            agents[name.lower()] = str(each.get("nodeAgentSKUId"))
            if "DockerCompatible" in (each.get("capabilities") or []):
                with_containers.add(name.lower())
        wanted = image.rpartition(":")[0].lower()
        remedy = "`az batch pool supported-images list` shows those that it has"
        if wanted not in agents:
            return [Check("image", "bad", f"Batch does not have {image}", remedy)]
        if agents[wanted] != settings.node_agent:
            told = f"Batch's agent for {image} is {agents[wanted]!r}, not {settings.node_agent!r}"
            return [Check("image", "bad", told, f"set node_agent = {agents[wanted]!r}")]
        if settings.container and wanted not in with_containers:
            told = f"Batch does not say that nodes of {image} run containers"
            return [Check("image", "warn", told, f'image = "{CONTAINER_IMAGE}" does')]
        return [Check("image", "good", f"{image} with {settings.node_agent}")]

    async def _mail_storage(self) -> list[Check]:
        return await storage_checks(self._opened)

    def _network(self) -> list[Check]:
        settings = self._settings
        if settings.reach == "mailbox":
            told = "nodes are reached by a mailbox in a storage account; no port is open"
            return [Check("network", "good", told)]
        if not settings.public_ip:
            return [
                Check("network", "good", f"nodes have no public address; they are reached by {settings.jump}")
            ]
        first, last = settings.ports
        who = ", ".join(settings.ssh_from)
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
        shown = await managed_account(self._settings, account, self._environ)
        if shown is None:
            told = f"{account.name} is not in the subscription {account.subscription}"
            return [Check("quota", "warn", told, "set `subscription` to its own")]
        if (elsewhere := _elsewhere(account, shown)) is not None:
            return [elsewhere]
        checks = _quota_checks(table(shown.get("properties")), offers, workers, active)
        return [check for check in checks if check.name != "storage" or self._settings.reach == "ssh"]


async def region_check(
    settings: AzureBatchSettings, account: BatchAccount, environ: Mapping[str, str]
) -> Check | None:
    """What is wrong with the account's region, as far as the Resource Manager tells in time: Batch itself has
    no host by that name, and so does not answer."""
    if not account.subscription:
        return None
    try:
        async with asyncio.timeout(REGION_S):
            shown = await managed_account(settings, account, environ)
    except (ArmFault, TimeoutError):
        return None
    return None if shown is None else _elsewhere(account, shown)


def _elsewhere(account: BatchAccount, shown: Json) -> Check | None:
    region = str(shown.get("location")).replace(" ", "").lower()
    if region == account.region:
        return None
    told = f"the Batch account {account.name} is in {region}, not in {account.region}"
    return Check("region", "bad", told, f'set account = "{account.name}.{region}"')


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
