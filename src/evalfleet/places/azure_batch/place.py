"""The place `azure_batch`: a machine is a job of Azure Batch that brings its node, and takes it along.

The job's one task, the pilot, lets us in by SSH and holds the node. One call makes all of that, and whatever
ends the job deletes all of it: our delete, the pilot's end, or a wall clock of Batch's that needs nobody.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import NoReturn

from msgspec import structs

from evalfleet.channels.ssh.target import HostDown, HostLost, HostRefused
from evalfleet.errors import MachineUnavailable, NoSuchMachine, PlaceError, RequestError
from evalfleet.model import Machine, MachineId, Needs, Offer
from evalfleet.places.azure.answers import ArmFault
from evalfleet.places.azure.arm import ArmClient, ArmEndpoint
from evalfleet.places.azure.mailboxes import BlobMailboxes
from evalfleet.places.azure.names import EXPIRES, HOME, MACHINE, stamp, tags_of
from evalfleet.places.azure.prices import AzurePriceBook
from evalfleet.places.azure.retail import RetailPrices
from evalfleet.places.azure.services import (
    REFUSALS,
    ServiceLooks,
    belongings_of,
    check_priced,
    knock,
    not_longer,
    storage_checks,
    without_mail,
)
from evalfleet.places.azure.sizes import vcpus
from evalfleet.places.vm.answers import as_refusal, table
from evalfleet.places.vm.place import UNSEEN, VmPlace, check_installed
from evalfleet.ports import Belonging, Channel, Check, Dialled, Fence, Image, Made, PlaceContext, Preflight

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

log = logging.getLogger(__name__)
MAILBOX = "mailbox"
"""The address of a machine that nothing can connect to."""
NO_SUCH_IMAGE = "set `image` and `node_agent` to what `az batch pool supported-images list` shows"
NO_WAY_IN = "the node has no inbound NAT for port 22; give the pool one, or leave `pool` out"


class AzureBatchPlace(VmPlace[Sighting, "NoSnapshot"], Preflight):
    """Nodes of Azure Batch, each held by a job of ours that ends by itself."""

    Settings = AzureBatchSettings
    extra = "azure"
    machine_s = 300.0
    price_list = RetailPrices()

    def __init__(
        self, name: str, settings: AzureBatchSettings, account: BatchAccount, context: PlaceContext
    ) -> None:
        super().__init__(name, settings, account, context, ".azure_batch")
        self._settings, self._account, self._environ = settings, account, context.environ
        endpoint = ArmEndpoint("", account.endpoint, settings.scope or SCOPE, account.ca, CONTENT)
        self._arm = ArmClient(endpoint, context.environ)
        self._batch = BatchClient(self._arm)
        self._prefix = settings.name.partition("{machine}")[0].lower()
        self._storage = MailStorage(settings, account, context.environ, self._arm)
        self._boxes: BlobMailboxes | None = None
        """Where machines are reached by those."""
        if settings.reach == "mailbox":
            opened = self._storage.blobs
            lost_s = preflight.lost_s(settings)
            self._boxes = BlobMailboxes("batch", context, account.owner, opened, self._arm.now, lost_s)
        self._inventory = AccountInventory(self._batch, self._boxes, self._prefix, context.home_id)
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
        return cls(name, settings, account, context)

    async def offers(self, needs: Needs) -> Sequence[Offer]:
        """By the list of prices: Batch is asked nothing."""
        self._kvm = needs.nested_virtualization
        book = AzurePriceBook.of(self._folder)
        return preflight.offers_of(self._name, self._settings, self._account.region, book, needs)

    async def _let_us_in(self, machine: MachineId) -> bool:
        """Batch would have to run a task for that, where the pilot has the only slot."""
        return False

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
        if self._boxes is not None and not self._boxes.gone:
            await self._boxes.mark_allocated(seen.machine, start.allocated)
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
        if start is not None and start.address == MAILBOX:
            return
        if start is not None and start.key and seen.state == "active":
            if not self._keys.has_host(seen.machine):
                self._keys.pin(seen.machine, start.key)
            return
        is_running = str(seen.node.get("state", "")).lower() == "running"
        if start is None or not is_running or f"{seen.node.get('id')}.{seen.requeued}" != start.start:
            return
        under_way = self._meetings.get(seen.machine)
        if under_way is None or under_way.done():
            meeting = self._meet(seen, start) if self._boxes is None else self._meet_by_mail(seen, start)
            self._meetings[seen.machine] = asyncio.create_task(meeting)

    async def _meet_by_mail(self, seen: Sighting, start: NodeStart) -> None:
        """Has the pilot written that it is there? It is written down with the job, too: so nobody looks
        there again."""
        assert self._boxes is not None
        trouble = ""
        try:
            if (await self._boxes.marks(seen.machine)).start is None:
                trouble = await self._with_log(seen, "the pilot has not come to its mailbox yet")
                return
            await self._write(seen, structs.replace(start, address=MAILBOX))
        except (PlaceError, ArmFault) as err:
            trouble = str(err)
        finally:
            self._troubles[seen.machine] = trouble

    async def _meet(self, seen: Sighting, start: NodeStart) -> None:
        """Come in for the first time: by the host key that the pilot has told Batch, as nobody else could."""
        machine, trouble = seen.machine, ""
        try:
            key = await self._batch.host_key(str(seen.job["id"]))
            if not key:
                trouble = await self._with_log(seen, "the pilot has not told its host key yet")
                return
            address = seen.address or ("" if self._settings.public_ip else f"{seen.node.get('ipAddress')}:22")
            if not address:
                trouble = NO_WAY_IN
                return
            self._keys.pin(machine, key)
            until = start.allocated + seen.life_s - self._arm.skew_s
            await self._access.take(machine, address, until, None)
            await self._write(seen, structs.replace(start, address=address, key=key))
        except (HostDown, HostLost, HostRefused, MachineUnavailable, ArmFault) as err:
            trouble = str(err)
        finally:
            self._troubles[machine] = trouble

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
        if self._boxes is None:
            return tuple(shown)
        return tuple(without_mail(each, self._boxes, has_box=found[each.id].has_box) for each in shown)

    def _with_trouble(self, machine: Machine) -> Machine:
        trouble = self._troubles.get(machine.id, "")
        if trouble and machine.phase == "gone" and machine.detail.endswith(SILENT):
            return structs.replace(machine, detail=f"{machine.detail}: {trouble}")
        if machine.phase != "pending":
            return machine
        if trouble == NO_WAY_IN:
            return structs.replace(machine, phase="gone", start="", detail=trouble)
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
        tags = tags_of(machine, self._home, self._owner, self._use, until, {})
        pilot, registry = None, registry_login(self._settings, self._environ)
        if self._boxes is not None:
            if await self._is_there(machine):
                return  # its orders are not written again: they would be taken for a second start's
            wait_s = until - self._arm.now() - expires_s
            pilot = await self._boxes.make(machine, expires_s, wait_s, kvm=self._kvm)
        key = self._keys.login().public if pilot is None else ""
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

    async def extend(self, machine: MachineId, expires_s: float) -> None:
        raise not_longer(machine, "Batch")

    async def delete(self, machine: MachineId) -> None:
        """Delete the job, and with it all that it has brought; also what is left of one that is gone."""
        self._samples.drop(machine)
        if (meeting := self._meetings.pop(machine, None)) is not None:
            meeting.cancel()
        await self._access.drop(machine)
        async with self._turn(machine):
            with as_refusal(self._named(machine)):
                await self._batch.delete(f"jobs/{job_id(machine, self._settings.name)}")
                await self._delete_pools(await self._batch.pools(), machine, self._home)
            if self._boxes is not None:
                await self._boxes.remove(machine)
        self._keys.drop(machine)
        self._troubles.pop(machine, None)

    async def _delete_pools(self, pools: Iterable[dict[str, object]], machine: MachineId, home: str) -> None:
        """Batch deletes a job's pool by itself; asked for, it does so also where that went wrong."""
        for pool in pools:
            tags = metadata_in(pool)
            if (tags.get(MACHINE), tags.get(HOME)) == (machine, home):
                await self._batch.delete(f"pools/{pool['id']}")

    async def stop(self, machine: MachineId) -> None:
        raise PlaceError(
            f"{machine}: a node of Batch cannot be stopped and kept", transient=False, scope="machine"
        )

    async def mend(self, machine: MachineId, step: str, expires_s: float) -> None:
        raise NoSuchMachine(machine)

    def _named(self, machine: MachineId) -> str:
        return f"job {job_id(machine, self._settings.name)} of {self._account.name}"

    def _vcpus(self, size: str) -> int:
        return vcpus(size)

    async def close(self) -> None:
        for meeting in self._meetings.values():
            meeting.cancel()
        await asyncio.gather(*self._meetings.values(), return_exceptions=True)
        await self._access.close()
        await self._storage.close()
        await self._arm.close()

    # -- reaching them, where SSH does not ---------------------------------------------------------

    def channel(self, machine: Machine, fence: Fence) -> Channel:
        if self._boxes is None:
            return super().channel(machine, fence)
        on_load = functools.partial(self._samples.keep, machine.id)
        return self._boxes.channel(machine.id, fence, self._secrets, on_load)

    def shell(self, machine: Machine, command: Sequence[str]) -> Sequence[str]:
        self._check_ssh(machine)
        return super().shell(machine, command)

    async def dial(self, machine: Machine, port: int) -> Dialled:
        self._check_ssh(machine)
        return await super().dial(machine, port)

    def _check_ssh(self, machine: Machine) -> None:
        if self._boxes is not None:
            raise RequestError(f"{machine.id} is reached by its mailbox alone: nothing can connect to it")

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
        if self._boxes is not None:  # what cannot be made cannot be seen to be gone, either
            await storage_checks(await self._storage.blobs())

    async def examine(self, needs: Needs, workers: int = 1) -> Sequence[Check]:
        blobs = self._storage.blobs
        checks = preflight.BatchChecks(self._arm, blobs, self._environ, self._settings, self._account)
        return await checks.all(await self.offers(needs), needs, workers)

    async def belongings(self) -> Sequence[Belonging]:
        """What is evalfleet's in the account, of all homes: jobs, and pools that their jobs have left."""
        with as_refusal(UNSEEN):
            jobs, pools = await asyncio.gather(self._batch.jobs(self._prefix), self._batch.pools())
            boxes = () if self._boxes is None else await self._boxes.left()
        shown = (("job", jobs), ("pool", pools))
        parts = [(what, str(each.get("id")), metadata_in(each)) for what, all in shown for each in all]
        parts += [("mailbox", box.name, dict(box.tags)) for box in boxes]
        return belongings_of(parts, f"{self._account.name} in {self._account.region}")

    async def reap(self, belonging: Belonging) -> None:
        with as_refusal(belonging.machine):
            for part in belonging.parts:
                what, _, id = part.partition(" ")
                if what == "mailbox":
                    await (await self._storage.blobs()).delete_container(id)
                else:
                    await self._batch.delete(f"{what}s/{id}")

    # -- images, which nodes do not become -----------------------------------------------------------

    async def reserve(self, machine: MachineId, image: str) -> None:
        self._no_images()

    async def capture(
        self,
        machine: Machine,
        image: str,
        rest: Callable[[], Awaitable[None]],
        tell: Callable[[str], None],
    ) -> Image:
        self._no_images()

    def _no_images(self) -> NoReturn:
        raise RequestError(
            "nodes of Batch cannot be captured; make the image with `azure_vm`, and name it in `image`"
        )

    async def images(self) -> Sequence[Image]:
        return ()

    async def drop_image(self, image: Image) -> None:
        self._no_images()


class NoSnapshot:
    """What VmPlace would hold snapshots as; machines of this place are seen by `list` alone."""

    vms: Mapping[MachineId, object] = {}


def _size_of(seen: Sighting) -> str:
    pool = seen.job.get("poolInfo", {}).get("autoPoolSpecification", {}).get("pool", {})
    return str(pool.get("vmSize", seen.pool.get("vmSize", "")))
