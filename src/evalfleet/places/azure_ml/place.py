"""The place `azure_ml`: a machine is a command job of an Azure Machine Learning workspace.

The job runs on a cluster that has nodes only while it has jobs, and its program is our supervisor. Nobody can
reach it: what is said to it goes through a mailbox in the workspace's own datastore.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from evalfleet.channels.mail.boxes import Mailboxes, MailPilot
from evalfleet.channels.samples import Load, Samples
from evalfleet.channels.supervisor.pilot import NO_KVM
from evalfleet.errors import MachineUnavailable, PlaceError
from evalfleet.model import KeptFiles, Machine, MachineId, Needs, Offer
from evalfleet.places.azure.arm import ArmClient, ArmEndpoint
from evalfleet.places.azure.names import HOME, POOL, tags_of
from evalfleet.places.azure.prices import AzurePriceBook
from evalfleet.places.azure.retail import RetailPrices
from evalfleet.places.azure.services import (
    REFUSALS,
    ServiceLooks,
    belongings_of,
    box_parts,
    check_priced,
    knock,
    without_mail,
)
from evalfleet.places.vm.answers import Json, as_refusal, table
from evalfleet.places.vm.place import UNSEEN, check_installed
from evalfleet.places.vm.settings import MachineUse
from evalfleet.ports import Belonging, Channel, Check, Fence, Made, PlaceContext

from . import preflight
from .instances import AzureMlInstances
from .monitor import MlMonitor, QuietMachines
from .service import (
    IMAGE_REMEDY,
    QUOTA_REMEDY,
    RUNNING,
    MlClient,
    MlJob,
    MlSighting,
    StagePatience,
    WorkspaceInventory,
    is_cluster,
    machine_of,
)
from .settings import AzureMlSettings, MlAccount, account_of
from .template import (
    END_S,
    MlJobBuild,
    cluster_body,
    cluster_name,
    environment_body,
    environment_version,
    job_body,
    job_name,
)
from .workspace import MlWorkspace

CLUSTER_S = 300.0
"""How long a cluster may take to be made, which has no nodes yet."""
DELETE_S = 100.0
"""For so long one call of `delete` waits for a job to end."""
PAUSE_S = 1.0
AT_WORK = ("pending", "up")
QUIET_S = 60.0
"""A machine that has not told its load for so long: Azure Monitor is asked for it."""


class AzureMlPlace:
    """Jobs of Azure Machine Learning, each a machine that takes task after task."""

    Settings = AzureMlSettings
    default_canary = 1
    extra = "azure"
    machine_s = 300.0
    price_list = RetailPrices()

    def __init__(
        self, name: str, settings: AzureMlSettings, account: MlAccount, context: PlaceContext
    ) -> None:
        self._name, self._settings, self._account, self._context = name, settings, account, context
        endpoint = ArmEndpoint(account.subscription, settings.endpoint, settings.scope, account.ca)
        self._arm = ArmClient(endpoint, context.environ)
        self._client = MlClient(self._arm, account)
        self._workspace = MlWorkspace(self._client, settings, account, context.environ, context.open_bucket)
        opened = self._workspace.mail
        self._boxes = Mailboxes(context, account.owner, opened, self._arm.now, settings.lost_s)
        self._use: MachineUse = "pool" if context.for_pool else "run"
        self._home = context.home_id
        self._samples = Samples(context.home)
        self._told_at: dict[MachineId, float] = {}
        """When each machine that has a channel has told its load, by our steady clock."""
        monitor = MlMonitor(self._arm, account.path)
        self._monitor = QuietMachines(monitor, self._quiet, self._samples.keep)
        self._inventory = WorkspaceInventory(self._client, self._workspace.storage, self._boxes, self._home)
        self._looks = ServiceLooks(self._inventory.look, settings.poll_s)
        self._turns: dict[str, asyncio.Lock] = {}
        """Held by whoever makes or ends a machine, or a cluster: it is done once at a time."""
        self._coming: Counter[str] = Counter()
        """By cluster, how many machines are being made there."""
        self._ending: dict[str, float] = {}
        """By job that is being deleted: since when, by Azure's clock."""
        self._refused: dict[str, str] = {}
        """Clusters whose nodes have turned out to be of no use, and why."""
        self._no_image = ""
        """Why no container can be had: all machines are made of the same image."""
        self._kvm = False
        """Must machines be able to run virtual machines?"""
        self._idle_s: float | None = None

    @classmethod
    def make(
        cls, name: str, settings: AzureMlSettings, context: PlaceContext
    ) -> AzureMlPlace | AzureMlInstances:
        """By `compute`: jobs on a cluster, or compute instances."""
        check_installed(name, ("azure.identity", "azure.mgmt.resource", "aiohttp"), "azure")
        account = account_of(name, settings, context)
        # without a region of its own, one that has a price for all that is known
        check_priced(name, settings, settings.region or "eastus", AzurePriceBook.of(context.home))
        if settings.compute == "instances":
            return AzureMlInstances.of(name, settings, account, context)
        return cls(name, settings, account, context)

    @property
    def name(self) -> str:
        return self._name

    @property
    def owner(self) -> str:
        return self._account.owner

    async def offers(self, needs: Needs) -> Sequence[Offer]:
        """By the list of prices; the workspace is asked for its region, unless the settings name it."""
        self._kvm = needs.nested_virtualization
        with as_refusal(f"place {self._name!r}"):
            region, idle_s = await self._workspace.region(), await self._cluster_idle_s()
        book = AzurePriceBook.of(self._context.home)
        return preflight.offers_of(self._name, self._settings, region, book, needs, idle_s)

    async def _cluster_idle_s(self) -> float:
        """For how long a node without a job is kept: the user's cluster says that itself."""
        if self._idle_s is None:
            own = self._settings.cluster
            told = await self._client.idle_time(own) if own else None
            self._idle_s = self._settings.idle_s if told is None else told
        return self._idle_s

    # -- what exists -----------------------------------------------------------------------------

    async def list(self, pool: str) -> Sequence[Machine]:
        found, now = await self._looks.fresh(), self._arm.now()
        patience = StagePatience(self._settings.prepare_s, self._settings.start_s)
        machines = [
            machine_of(seen, now, patience) for id, seen in sorted(found.items()) if id.startswith(f"{pool}-")
        ]
        self._note_refusals(machines, found)
        self._looks.note(machines)
        return tuple(without_mail(each, self._boxes, has_box=found[each.id].has_box) for each in machines)

    def _note_refusals(self, machines: Sequence[Machine], found: Mapping[MachineId, MlSighting]) -> None:
        """Remember what will not become better: the next machine is refused at once, with the remedy."""
        jobs = {machine.id: job for machine in machines if (job := found[machine.id].job) is not None}
        at_work = {jobs[each.id].cluster for each in machines if each.id in jobs and each.phase in AT_WORK}
        for machine in machines:
            if IMAGE_REMEDY in machine.detail:
                self._no_image = machine.detail
            elif machine.id in jobs:
                cluster = jobs[machine.id].cluster
                # a quota that others of ours use up may have room again when they go
                no_quota = machine.detail.endswith(QUOTA_REMEDY) and cluster not in at_work
                if no_quota or machine.detail.endswith(REFUSALS[NO_KVM]):
                    self._refused[cluster] = machine.detail

    # -- making and ending -------------------------------------------------------------------------

    def _turn(self, name: str) -> asyncio.Lock:
        return self._turns.setdefault(name, asyncio.Lock())

    def _cluster_of(self, machine: MachineId, offer: Offer) -> str:
        pool = machine.rsplit("-", 2)[0]
        return self._settings.cluster or cluster_name(pool, self._home, offer.size, spot=offer.spot)

    async def create(self, machine: MachineId, offer: Offer, expires_s: float) -> None:
        """Submit the job. Returns when Azure has taken it, not when it runs."""
        cluster = self._cluster_of(machine, offer)
        if why := self._refused.get(cluster):
            raise PlaceError(f"{offer.size}: {why}", transient=False, scope="offer")
        if self._no_image:
            raise PlaceError(self._no_image, transient=False, scope="place")
        name = job_name(machine, self._settings.name)
        async with self._turn(name):
            with as_refusal(f"{offer.size} in {offer.region}"):
                if await self._is_there(machine, name):
                    return
                wait_s = self._wait_s()
                until = self._arm.now() + wait_s + expires_s
                tags = tags_of(machine, self._home, self.owner, self._use, until, {})
                self._coming[cluster] += 1
                try:
                    async with self._turn(cluster):
                        await self._have_cluster(cluster, offer, tags)
                    pilot = await self._boxes.make(machine, expires_s, wait_s, kvm=self._kvm)
                    await self._submit(machine, name, cluster, expires_s, pilot, tags)
                finally:
                    self._coming[cluster] -= 1

    def _wait_s(self) -> float:
        """How long a machine may take besides its life: it may wait, prepare, start, and be ended."""
        settings = self._settings
        return settings.queue_s + settings.prepare_s + settings.start_s + END_S

    async def _is_there(self, machine: MachineId, name: str) -> bool:
        """Has an earlier call submitted the job? Raises PlaceError if it is not ours."""
        job = await self._client.job(name)
        if job is None:
            return False
        if job.tags.get(HOME, self._home) != self._home:
            why = f"the workspace has a job {name} that is not this home's; set another `name`"
            raise PlaceError(why, transient=False, scope="place")
        if job.stage not in RUNNING:
            raise MachineUnavailable(machine, "it is over")
        return True

    async def _have_cluster(self, name: str, offer: Offer, tags: Mapping[str, str]) -> None:
        """Make the cluster, if there is none, and wait until it takes jobs."""
        until, asked = time.monotonic() + CLUSTER_S, False
        while True:
            shown = await self._client.cluster(name)
            if shown is None:
                if self._settings.cluster:
                    raise preflight.no_cluster(name)
                region = await self._workspace.region()
                body = cluster_body(self._settings, region, offer.size, tags, spot=offer.spot)
                await self._client.add_cluster(name, body)
                asked = True
            state = "" if shown is None else preflight.cluster_state(shown)
            if shown is not None and state in ("failed", "canceled"):
                if not self._settings.cluster:
                    await self._client.delete_cluster(name)
                if asked:
                    raise preflight.cluster_failure(offer, shown)
            elif shown is not None and state != "deleting":
                named = bool(self._settings.cluster)
                if why := preflight.cluster_problem(name, shown, offer, self._home, named=named):
                    raise PlaceError(why, transient=False, scope="place")
                if state == "succeeded":
                    return
            if time.monotonic() > until:
                raise PlaceError(f"cluster {name} is not made in time", transient=True, scope="offer")
            await asyncio.sleep(min(PAUSE_S, self._settings.poll_s))

    async def _submit(
        self,
        machine: MachineId,
        name: str,
        cluster: str,
        expires_s: float,
        pilot: MailPilot,
        tags: Mapping[str, str],
    ) -> None:
        settings = self._settings
        version = environment_version(settings.image)
        environment = await self._client.add_environment(version, environment_body(settings.image))
        build = MlJobBuild(machine, cluster, self._kvm, pilot, expires_s, environment, tags)
        await self._client.add_job(name, job_body(settings, self._account, build))

    async def delete(self, machine: MachineId) -> None:
        """End the job, and remove all there is of it; with a run's last job its cluster goes, too."""
        self._samples.drop(machine)
        self._told_at.pop(machine, None)
        await self._delete(machine, job_name(machine, self._settings.name))

    async def _delete(self, machine: MachineId, name: str) -> None:
        self._ending.setdefault(name, self._arm.now())
        async with self._turn(name):
            with as_refusal(f"job {name} of {self._account.workspace}"):
                with suppress(PlaceError):  # its storage may be away: the job is ended all the same
                    await self._boxes.ask_to_stop(machine)  # the pilot leaves, whatever Azure does
                await self._end_job(machine, name)
                await self._drop_clusters(machine.rsplit("-", 2)[0])
                await self._boxes.remove(machine)
        self._ending.pop(name, None)

    async def _end_job(self, machine: MachineId, name: str) -> None:
        """Have the job end, and remove its record. Raises PlaceError if it does not end."""
        until = time.monotonic() + DELETE_S
        while (job := await self._client.job(name)) is not None:
            if job.stage == "over":
                await self._client.delete_job(name)
                return
            if job.stage != "ends":
                await self._client.cancel_job(name)
            elif self._arm.now() - self._ending.get(name, self._arm.now()) > self._settings.end_s:
                # with its cluster, all that runs there ends, and the meter stops
                await self._drop_clusters(machine.rsplit("-", 2)[0])
            if time.monotonic() > until:
                if not await self._client.cluster(job.cluster):
                    return  # a record and no more: nothing runs, and nothing is billed
                why = f"{machine}: job {name} stays {job.status}; it is asked again"
                raise PlaceError(why, transient=True, scope="machine")
            await asyncio.sleep(min(PAUSE_S, self._settings.poll_s))

    async def _drop_clusters(self, pool: str) -> None:
        """Delete the clusters that were made for this run or pool, if nobody uses them any more."""
        clusters, jobs = await asyncio.gather(self._client.clusters(), self._client.jobs())
        for name, tags in _unused_clusters(clusters, [job for job in jobs if job.name not in self._ending]):
            ours = (tags.get(HOME), tags.get(POOL)) == (self._home, pool)
            if ours and not self._coming[name] and name != self._settings.cluster:
                async with self._turn(name):
                    await self._client.delete_cluster(name)

    # -- reaching them -----------------------------------------------------------------------------------

    def channel(self, machine: Machine, fence: Fence) -> Channel:
        on_load = functools.partial(self._keep_load, machine.id)
        self._told_at[machine.id] = time.monotonic()
        self._monitor.begin()
        return self._boxes.channel(machine.id, fence, self._context.secrets, on_load)

    def _keep_load(self, machine: MachineId, load: Load, written: Mapping[str, int] | None = None) -> None:
        self._told_at[machine] = time.monotonic()
        self._samples.keep(machine, load, written)

    def _quiet(self) -> Mapping[str, str]:
        """Machines that do not tell their load, and their jobs."""
        since = time.monotonic() - QUIET_S
        return {
            machine: job_name(machine, self._settings.name)
            for machine, at in self._told_at.items()
            if at < since
        }

    async def close(self) -> None:
        await self._monitor.close()
        await self._workspace.close()
        await self._arm.close()

    # -- before, and after -------------------------------------------------------------------------

    def outline(self, machines: Sequence[tuple[MachineId, Offer]]) -> Sequence[Made]:
        return tuple(preflight.outline(self._settings, self._account, machines, self._cluster_of))

    async def doubts(self, lasts_s: float) -> Sequence[str]:
        return await knock(self._arm, self._name, self._check)

    async def _check(self) -> None:
        """Raises PlaceError if the workspace, or the user's cluster, is not there or not as the settings
        say."""
        await self._workspace.check()
        if not (name := self._settings.cluster):
            return
        shown = await self._client.cluster(name)
        if shown is None:
            raise preflight.no_cluster(name)
        for offer in await self.offers(Needs()):
            if why := preflight.cluster_problem(name, shown, offer, self._home, named=True):
                raise PlaceError(why, transient=False, scope="place")

    async def keep_files(
        self, files: KeptFiles, lasts_s: float, tell: Callable[[str], None]
    ) -> Mapping[str, str]:
        with as_refusal(f"place {self._name!r}: {files.label}"):
            return await self._workspace.keep_files(files, lasts_s, tell)

    async def examine(self, needs: Needs, workers: int = 1) -> Sequence[Check]:
        checks = preflight.MlChecks(self._client, self._workspace.mail, self._settings, self._account)
        return await checks.all(lambda: self.offers(needs), needs, workers)

    async def belongings(self) -> Sequence[Belonging]:
        """What is evalfleet's in the workspace, of all homes: jobs, mailboxes, and clusters without jobs."""
        with as_refusal(UNSEEN):
            jobs, boxes, clusters = await asyncio.gather(
                self._client.jobs(), self._boxes.left(), self._client.clusters()
            )
        parts = (
            *(("job", job.name, job.tags) for job in jobs),
            *box_parts(boxes),
            *(("cluster", *each) for each in _unused_clusters(clusters, jobs)),
        )
        return belongings_of(parts, f"{self._account.workspace} in {self._account.group}")

    async def reap(self, belonging: Belonging) -> None:
        with as_refusal(belonging.machine):
            for part in belonging.parts:
                what, _, name = part.partition(" ")
                if what == "job":
                    await self._end_job(belonging.machine, name)
                elif what == "mailbox":
                    await self._boxes.remove_named(name)
                else:
                    await self._client.delete_cluster(name)


def _unused_clusters(
    clusters: Sequence[Json], jobs: Sequence[MlJob]
) -> Sequence[tuple[str, Mapping[str, str]]]:
    """Clusters of ours that no job uses, as if each were the last machine of its run. Compute instances are
    machines of their own."""
    used = {job.cluster for job in jobs if job.stage != "over"}
    found: list[tuple[str, Mapping[str, str]]] = []
    for shown in clusters:
        name, tags = str(shown.get("name")), table(shown.get("tags"))
        if HOME in tags and name not in used and is_cluster(shown):
            found.append((name, {key: str(value) for key, value in tags.items()}))
    return found
