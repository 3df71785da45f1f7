"""The place `azure_batch`: a machine is a job of Azure Batch that brings its node, and takes it along.

The job's one task, the pilot, lets us in by SSH and holds the node. One call makes all of that, and whatever
ends the job deletes all of it: our delete, the pilot's end, or a wall clock of Batch's that needs nobody.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence

from msgspec import structs

from evalfleet.channels.mail.boxes import Mailboxes
from evalfleet.channels.samples import Samples
from evalfleet.channels.ssh.target import HostDown, HostLost, HostRefused
from evalfleet.errors import MachineUnavailable, PlaceError
from evalfleet.model import Machine, MachineId, Needs, Offer
from evalfleet.places.azure.answers import ArmFault
from evalfleet.places.azure.arm import ArmClient, ArmEndpoint
from evalfleet.places.azure.names import EXPIRES, HOME, MACHINE, stamp, tags_of
from evalfleet.places.azure.prices import AzurePriceBook
from evalfleet.places.azure.retail import RetailPrices
from evalfleet.places.azure.services import (
    REFUSALS,
    ServiceLooks,
    belongings_of,
    box_parts,
    check_priced,
    knock,
)
from evalfleet.places.azure.sizes import vcpus
from evalfleet.places.vm.answers import as_refusal, table
from evalfleet.places.vm.place import UNSEEN, VcpuCeiling, check_installed
from evalfleet.places.vm.settings import MachineUse
from evalfleet.places.vm.ssh_access import SshAccess, SshLogin
from evalfleet.ports import Belonging, Channel, Check, Dialled, Fence, Made, PlaceContext

from . import preflight
from .registry import registry_login
from .service import (
    CONTENT,
    SCOPE,
    SILENT,
    UNPULLABLE,
    AccountInventory,
    BatchClient,
    Sighting,
    ends_after,
    job_ends_at,
    machine_of,
    seconds_of,
)
from .settings import AzureBatchSettings, BatchAccount, account_of
from .storage import MailStorage
from .template import END_S, START, JobBuild, NodeStart, job_body, job_id, mark_of, metadata, metadata_in
from .ways import BatchWay, MailWay, SshWay

log = logging.getLogger(__name__)
DELETE_S = 100.0
"""For so long one call of `delete` waits for a job to be gone."""
PAUSE_S = 1.0
NO_SUCH_IMAGE = "set `image` and `node_agent` to what `az batch pool supported-images list` shows"


class AzureBatchPlace:
    """Nodes of Azure Batch, each held by a job of ours that ends by itself."""

    Settings = AzureBatchSettings
    default_canary = 1
    changeable = ("ssh_from",)
    extra = "azure"
    machine_s = 300.0
    price_list = RetailPrices()

    def __init__(
        self,
        name: str,
        settings: AzureBatchSettings,
        account: BatchAccount,
        context: PlaceContext,
        batch: BatchClient,
        storage: MailStorage,
        way: BatchWay,
    ) -> None:
        self._name, self._settings, self._account, self._environ = name, settings, account, context.environ
        self._home, self._folder = context.home_id, context.home
        self._use: MachineUse = "pool" if context.for_pool else "run"
        self._arm, self._batch, self._storage, self._way = batch.arm, batch, storage, way
        self._prefix = settings.name.partition("{machine}")[0].lower()
        self._samples = Samples(context.home)
        self._ceiling = VcpuCeiling(settings.max_vcpus)
        self._turns: dict[MachineId, asyncio.Lock] = {}
        """Held by whoever makes or ends the machine: it is done once at a time."""
        self._inventory = AccountInventory(self._batch, way.boxes, self._prefix, context.home_id)
        self._looks = ServiceLooks(self._look, settings.poll_s)
        self._meetings: dict[MachineId, asyncio.Task[None]] = {}
        self._troubles: dict[MachineId, str] = {}
        """Why a machine whose pilot runs cannot be used yet."""
        self._refused: dict[tuple[str, bool], str] = {}
        """Sizes that have turned out to be of no use, and why."""
        self._unpullable = ""
        """Why no node can be had: an image that all pull is not there."""
        self._kvm = False
        """Must machines be able to run virtual machines?"""

    @classmethod
    def make(cls, name: str, settings: AzureBatchSettings, context: PlaceContext) -> AzureBatchPlace:
        check_installed(name, ("azure.identity", "azure.mgmt.resource", "aiohttp", "asyncssh"), "azure")
        account = account_of(name, settings, context)
        check_priced(name, settings, account.region, AzurePriceBook.of(context.home))
        endpoint = ArmEndpoint("", account.endpoint, settings.scope or SCOPE, account.ca, CONTENT)
        arm = ArmClient(endpoint, context.environ)
        batch, storage = (
            BatchClient(arm),
            MailStorage(settings, account, context.environ, context.open_bucket),
        )
        parts = (name, settings, account, context, batch, storage)
        if settings.reach == "mailbox":
            lost_s = preflight.lost_s(settings)
            boxes = Mailboxes(context, account.owner, storage.opened, arm.now, lost_s)
            return cls(*parts, MailWay(boxes, storage, context))
        login = SshLogin.of(settings.user, settings.port, settings, context.environ)
        access = SshAccess.of(name, login, account.key, context, ".azure_batch")
        return SshBatchPlace(*parts, SshWay(batch, access, public_ip=settings.public_ip))

    @property
    def name(self) -> str:
        return self._name

    @property
    def owner(self) -> str:
        return self._account.owner

    async def offers(self, needs: Needs) -> Sequence[Offer]:
        """By the list of prices: Batch is asked nothing."""
        self._kvm = needs.nested_virtualization
        book = AzurePriceBook.of(self._folder)
        return preflight.offers_of(self._name, self._settings, self._account.region, book, needs)

    # -- what exists -----------------------------------------------------------------------------

    async def _look(self) -> Mapping[MachineId, Sighting]:
        """What is there; and what must be done for machines that have just started."""
        found = await self._inventory.look()
        fresh = [
            each for each in found.values() if each.state == "active" and each.start is None and each.node
        ]
        marked = await asyncio.gather(*(self._mark(each) for each in fresh))
        found = {**found, **{each.machine: each for each in marked}}
        for machine in self._meetings.keys() - found.keys():
            self._meetings.pop(machine).cancel()
        for seen in found.values():
            self._attend(seen)
        return found

    async def _mark(self, seen: Sighting) -> Sighting:
        """Write down with the job that it has started: of all that look, the first one's word counts."""
        start = seen.first_start
        assert start is not None
        await self._way.mark_allocated(seen.machine, start.allocated)
        # a node whose start task hangs or fails never comes to the pilot, whose own limit would end it
        await self._write(seen, start, constraints=ends_after(seen, start))
        return structs.replace(seen, start=start)

    async def _write(self, seen: Sighting, start: NodeStart, **more: object) -> None:
        ends_at = stamp(start.allocated + seen.life_s + END_S)
        tags = {**metadata_in(seen.job), START: mark_of(start), EXPIRES: ends_at}
        try:
            await self._batch.patch_job(str(seen.job["id"]), {"metadata": metadata(tags), **more})
        except ArmFault as fault:
            if fault.status not in (404, 409):  # it has ended meanwhile
                raise

    def _attend(self, seen: Sighting) -> None:
        """Meet the pilot, if it runs and nobody has yet; one that is met is let in by its key."""
        start = seen.start
        if start is not None and self._way.has_met(seen, start):
            return
        is_running = str(seen.node.get("state", "")).lower() == "running"
        if start is None or not is_running or f"{seen.node.get('id')}.{seen.requeued}" != start.start:
            return
        under_way = self._meetings.get(seen.machine)
        if under_way is None or under_way.done():
            self._meetings[seen.machine] = asyncio.create_task(self._meet(seen, start))

    async def _meet(self, seen: Sighting, start: NodeStart) -> None:
        trouble = ""
        try:
            if (met := await self._way.meet(seen, start)) is None:
                trouble = await self._with_log(seen, self._way.silence)
            else:
                await self._write(seen, met)
        except (HostDown, HostLost, HostRefused, PlaceError, ArmFault) as err:
            trouble = str(err)
        finally:
            self._troubles[seen.machine] = trouble

    async def _with_log(self, seen: Sighting, trouble: str) -> str:
        """The trouble, and how the log of a task ends that should have told more by now."""
        begun = seconds_of(table(seen.task.get("executionInfo")).get("startTime"))
        if not begun or self._arm.now() - begun < self._settings.answer_s / 2:
            return trouble
        words = await self._batch.task_words(str(seen.job["id"]))
        return f"{trouble}; its log ends: {words}" if words else trouble

    async def list(self, pool: str) -> Sequence[Machine]:
        found = await self._looks.fresh()
        now = self._arm.now()
        mine = [each for name, each in sorted(found.items()) if name.startswith(f"{pool}-")]
        shown = [machine_of(each, now, self._settings.answer_s) for each in mine]
        self._looks.note(shown)
        for machine in shown:
            if machine.detail.endswith(UNPULLABLE):
                self._unpullable = machine.detail
            if machine.detail in REFUSALS.values():
                self._note_refusal(found[machine.id], machine.detail)
        shown = [self._with_trouble(each) for each in shown]
        return tuple(self._way.shown(each, has_box=found[each.id].has_box) for each in shown)

    def _with_trouble(self, machine: Machine) -> Machine:
        trouble = self._troubles.get(machine.id, "")
        if trouble and machine.phase == "gone" and machine.detail.endswith(SILENT):
            return structs.replace(machine, detail=f"{machine.detail}: {trouble}")
        if machine.phase != "pending":
            return machine
        return structs.replace(machine, detail=trouble) if trouble else machine

    def _note_refusal(self, seen: Sighting, why: str) -> None:
        pool = seen.job.get("poolInfo", {}).get("autoPoolSpecification", {}).get("pool", {})
        self._refused[str(pool.get("vmSize", "")), "targetLowPriorityNodes" in pool] = why

    # -- making and ending -------------------------------------------------------------------------

    async def create(self, machine: MachineId, offer: Offer, expires_s: float) -> None:
        """Submit the job. Returns when Batch has taken it, not when it runs."""
        if self._unpullable:
            raise PlaceError(self._unpullable, transient=False, scope="place")
        if why := self._refused.get((offer.size, offer.spot)):
            raise PlaceError(f"{offer.size}: {why}", transient=False, scope="offer")
        async with self._turn(machine):
            with self._ceiling.counting(machine, vcpus(offer.size)):
                if self._settings.max_vcpus:
                    found = await self._looks.fresh()
                    self._ceiling.check(machine, {each: vcpus(_size_of(found[each])) for each in found})
                await self._submit(machine, offer, expires_s)

    async def _submit(self, machine: MachineId, offer: Offer, expires_s: float) -> None:
        until = job_ends_at(self._arm.now(), self._settings.queue_s, expires_s)
        tags = tags_of(machine, self._home, self.owner, self._use, until, {})
        registry = registry_login(self._settings, self._environ)
        if await self._is_there(machine):
            return  # its orders are not written again: they would be taken for a second start's
        wait_s = until - self._arm.now() - expires_s
        pilot, key = await self._way.prepare(machine, expires_s, wait_s, kvm=self._kvm)
        build = JobBuild(machine, offer.size, offer.spot, self._kvm, key, expires_s, tags, pilot, registry)
        try:
            await self._batch.add_job(job_body(self._settings, build))
        except ArmFault as fault:
            if fault.has("JobBeingDeleted"):
                raise MachineUnavailable(machine, "it is being deleted") from fault
            if fault.has("InvalidPropertyValue") and "imageReference" in str(fault):
                why = f"{fault.refusal(self._settings.image)}; {NO_SUCH_IMAGE}"
                raise PlaceError(why, transient=False, scope="place") from fault
            if not fault.has("JobExists"):
                raise fault.refusal(f"{offer.size} in {offer.region}") from fault
            await self._is_there(machine)

    async def _is_there(self, machine: MachineId) -> bool:
        """Has an earlier call submitted the job? Raises PlaceError if it is not ours."""
        id = job_id(machine, self._settings.name)
        with as_refusal(f"job {id}"):
            job = await self._batch.job(id)
        if job is None:
            return False
        if metadata_in(job).get(HOME, self._home) != self._home:
            why = f"the account has a job {id} that is not this home's; set another `name`"
            raise PlaceError(why, transient=False, scope="place")
        if str(job.get("state")).lower() == "deleting":
            raise MachineUnavailable(machine, "it is being deleted")
        return True

    async def delete(self, machine: MachineId) -> None:
        """Delete the job, and with it all that it has brought; also what is left of one that is gone."""
        self._samples.drop(machine)
        if (meeting := self._meetings.pop(machine, None)) is not None:
            meeting.cancel()
        await self._way.drop(machine)
        async with self._turn(machine):
            with as_refusal(self._named(machine)):
                await self._delete_job(machine, job_id(machine, self._settings.name))
                await self._delete_pools(await self._batch.pools(), machine, self._home)
            await self._way.remove(machine)
        self._troubles.pop(machine, None)

    async def _delete_job(self, machine: MachineId, id: str) -> None:
        """Delete a job, and wait until it is gone: what runs there writes into its mailbox until then."""
        until = time.monotonic() + DELETE_S
        await self._batch.delete(f"jobs/{id}")
        while await self._batch.job(id) is not None:
            if time.monotonic() > until:
                why = f"{machine}: job {id} is not gone yet; it is asked again"
                raise PlaceError(why, transient=True, scope="machine")
            await asyncio.sleep(min(PAUSE_S, self._settings.poll_s))

    async def _delete_pools(self, pools: Iterable[dict[str, object]], machine: MachineId, home: str) -> None:
        """Batch deletes a job's pool by itself; asked for, it does so also where that went wrong."""
        for pool in pools:
            tags = metadata_in(pool)
            if (tags.get(MACHINE), tags.get(HOME)) == (machine, home):
                await self._batch.delete(f"pools/{pool['id']}")

    def _named(self, machine: MachineId) -> str:
        return f"job {job_id(machine, self._settings.name)} of {self._account.name}"

    def _turn(self, machine: MachineId) -> asyncio.Lock:
        return self._turns.setdefault(machine, asyncio.Lock())

    async def close(self) -> None:
        for meeting in self._meetings.values():
            meeting.cancel()
        await asyncio.gather(*self._meetings.values(), return_exceptions=True)
        await self._way.close()
        await self._storage.close()
        await self._arm.close()

    def channel(self, machine: Machine, fence: Fence) -> Channel:
        return self._way.channel(machine, fence)

    # -- before, and after -------------------------------------------------------------------------

    def outline(self, machines: Sequence[tuple[MachineId, Offer]]) -> Sequence[Made]:
        return tuple(preflight.outline(self._settings, self._account, machines))

    async def doubts(self, lasts_s: float) -> Sequence[str]:
        registry_login(self._settings, self._environ)
        elsewhere = await preflight.region_check(self._settings, self._account, self._environ)
        if elsewhere is not None:
            why = f"place {self._name!r}: {elsewhere.found}; {elsewhere.remedy}"
            raise PlaceError(why, transient=False, scope="place")
        return await knock(self._arm, self._name, self._check)

    async def _check(self) -> None:
        """Raises ArmFault if the account, or the storage of its mailboxes, does not let us in."""
        await self._batch.jobs(self._prefix)
        await self._way.check()

    async def examine(self, needs: Needs, workers: int = 1) -> Sequence[Check]:
        opened = self._storage.opened
        checks = preflight.BatchChecks(self._arm, opened, self._environ, self._settings, self._account)
        return await checks.all(await self.offers(needs), needs, workers)

    async def belongings(self) -> Sequence[Belonging]:
        """What is evalfleet's in the account, of all homes: jobs, and pools that their jobs have left."""
        with as_refusal(UNSEEN):
            jobs, pools, boxes = await asyncio.gather(
                self._batch.jobs(self._prefix), self._batch.pools(), self._way.boxes_left()
            )
        shown = (("job", jobs), ("pool", pools))
        parts: list[tuple[str, str, Mapping[str, str]]] = []
        for what, all in shown:
            parts += [(what, str(each.get("id")), metadata_in(each)) for each in all]
        parts += box_parts(boxes)
        return belongings_of(parts, f"{self._account.name} in {self._account.region}")

    async def reap(self, belonging: Belonging) -> None:
        with as_refusal(belonging.machine):
            for part in belonging.parts:
                what, _, id = part.partition(" ")
                if what == "mailbox":
                    await self._way.remove_kept(id)
                elif what == "job":
                    await self._delete_job(belonging.machine, id)
                else:
                    await self._batch.delete(f"pools/{id}")


class SshBatchPlace(AzureBatchPlace):
    """Nodes that SSH leads to, so that people can look into them."""

    def __init__(
        self,
        name: str,
        settings: AzureBatchSettings,
        account: BatchAccount,
        context: PlaceContext,
        batch: BatchClient,
        storage: MailStorage,
        way: SshWay,
    ) -> None:
        super().__init__(name, settings, account, context, batch, storage, way)
        self._access = way.access

    def shell(self, machine: Machine, command: Sequence[str]) -> Sequence[str]:
        return self._access.shell(machine, command)

    async def dial(self, machine: Machine, port: int) -> Dialled:
        return await self._access.dial(machine, port)


def _size_of(seen: Sighting) -> str:
    pool = seen.job.get("poolInfo", {}).get("autoPoolSpecification", {}).get("pool", {})
    return str(pool.get("vmSize", seen.pool.get("vmSize", "")))
