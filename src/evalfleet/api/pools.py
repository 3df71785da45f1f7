"""A named pool, and its verbs."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

from evalfleet.controller import Controller, Order
from evalfleet.effects.machines import MACHINES
from evalfleet.errors import ChannelError, FleetError, RequestError, RunHeld, StaleController
from evalfleet.events import MachinePrepared, PoolPlanned, Record
from evalfleet.journal import Holder, Holds, SqliteJournal, Store
from evalfleet.model import AttemptId, Bundle, Command, Ended, Job, Limits, MachineId, Micros, Needs, Plan
from evalfleet.named_pools import (
    Change,
    PoolView,
    changes,
    look_at,
    machine_of,
    pool_fence,
    read_pool,
)
from evalfleet.names import safe_name
from evalfleet.planning.plan import Resolved
from evalfleet.planning.plan_parts import PlaceSettings, benchmark_of
from evalfleet.planning.plugins import KindFields
from evalfleet.planning.pool_plan import EXPIRES_S, PREFIX, PoolRequest, resolve_pool
from evalfleet.planning.workspace import Workspace
from evalfleet.policy import POOL
from evalfleet.ports import Fence, KeepsFiles, Place, Reachable, Stoppable
from evalfleet.state import MachineState, RunState
from evalfleet.views.follow import Follower
from evalfleet.views.live import PoolScribe

from .pool_machine import (
    ActionResult,
    PoolMachine,
    Work,
    check_life,
    learn_tasks,
    prolong,
    restart,
    running_in,
    set_up_no_more,
    work_at,
)

PROBE_S = 30.0
"""How long a probe waits at most. Machines that are reached by mail take seconds to answer."""
KEPT_S = 6 * 3600.0
"""So long machines may take to fetch files from their place's storage."""

Observer = Callable[[RunState, Sequence[Record]], None]


class Pool:
    """A named pool. Verbs that change it take its stream, so two never do at once."""

    def __init__(self, workspace: Workspace, name: str) -> None:
        self.name = name
        self.workspace = workspace
        self.store = Store.open(workspace.home, create=False)
        self._controller: Controller | None = None
        self._follower = Follower(self.store, name)

    def view(self) -> PoolView:
        return read_pool(self.store, self.name)

    # -- what its controller does ----------------------------------------------------------------

    async def control(self, change: Callable[[PoolView, Micros], Change] | None = None) -> None:
        """Change it, and bring it to where it shall be, in a thread of this process."""
        workspace = self.workspace
        plan = look_at(self.store, self.name).state.plan
        settings: PlaceSettings = {} if change is None else workspace.changed_settings(plan)
        environ = workspace.environment()
        order = Order(self.store.home, self.name, {}, environ, change=change, settings=settings)
        self._controller = Controller(order)
        await asyncio.to_thread(self._controller.start)

    def catch_up(self) -> None:
        """What has happened until now is no news."""
        self._follower.poll()

    async def wait(self, observe: Observer | None = None) -> RunState:
        """Wait until it is there. Raises what stopped the controller."""
        controller = self._controller
        over = controller is None
        while not over:
            over = controller is None or await asyncio.to_thread(controller.join, 0.1)
            records = self._follower.poll()
            if observe is not None:
                observe(self._follower.state, records)
        if controller is not None and controller.failure is not None:
            raise controller.failure
        return self._follower.state

    def leave(self) -> None:
        """Stop working on it; the next verb goes on from there."""
        if self._controller is not None:
            self._controller.leave()

    async def resize(self, workers: int) -> None:
        """More are made; of too many, those that nobody has go, the newest first."""
        await self.control(functools.partial(changes.resized, workers=workers))

    async def delete(self) -> None:
        await self.control(changes.deleted)

    async def stop(self) -> None:
        """Stop all machines. Raises RequestError where that cannot be."""
        async with self.places() as places:
            for place in places.values():
                if not isinstance(place, Stoppable):
                    hint = f"`evalfleet pool delete {self.name}` ends them"
                    raise RequestError(f"machines of {place.name} cannot be stopped; {hint}")
        await self.control(changes.stopped)

    async def start(self) -> None:
        """Start machines that were stopped or have expired, and create those that are missing."""
        await self.control(changes.started)

    async def replace(self) -> None:
        """Delete machines that did not start, with their disks, and create others."""
        await self.control(changes.replaced)

    # -- what is done to machines directly -------------------------------------------------------

    async def extend(self, expires_s: float) -> list[ActionResult]:
        """All machines may live for so long from now. A run that has some is not disturbed."""
        async with self._alone({}) as (journal, places):
            staying = [m for m in changes.in_use(self.view()).machines if m.phase in ("ready", "stopped")]
            check_life([machine.offer for machine in staying], expires_s)
            return [await prolong(m, places[m.offer.place], journal, expires_s) for m in staying]

    async def prepare(self, resolved: Resolved, tell: Callable[[str], None]) -> list[ActionResult]:
        """Bring a benchmark's files to all machines and set it up there, so that runs need not."""
        benchmark = benchmark_of(resolved.plan)
        addresses = await self._keep_files(benchmark.bundle, tell)
        prefix = self._prefix_for(resolved.plan)

        async def work(site: PoolMachine) -> None:
            begun = time.monotonic()
            left = self.store.home / safe_name(self.name) / MACHINES / safe_name(site.machine.id)

            def say(step: str, said: str) -> None:
                tell(f"{site.machine.name}: {step}{said and ': '}{said}")

            steps = await site.channel.prepare(benchmark.bundle, left, say)
            if not await site.channel.probe(benchmark.probe):
                raise ChannelError("set up, but its probe does not succeed")
            took = round(time.monotonic() - begun, 3)
            timings = {"prepare": took, **{f"setup.{name}": round(s, 3) for name, s in steps.items()}}
            good_until = None
            try:
                good_until = await learn_tasks(site, benchmark, self.store.home)
            except RequestError as err:  # it is prepared all the same, and the list may be in a checkout
                tell(f"{site.machine.name}: {err}")
            prepared = MachinePrepared(site.machine.id, benchmark.name, timings, good_until, prefix)
            await site.journal.append(self.workspace.now(), [prepared])
            tell(f"{site.machine.name} is prepared for {benchmark.name} after {took:.1f}s")

        before = {machine.id: machine.name for machine in self.view().machines}
        results = await self.on(self._all, work, {**resolved.secrets, **addresses})
        self._write_registry()
        for machine in self.view().machines:
            if machine.name != before.get(machine.id, machine.name):
                tell(f"{before[machine.id]} is called {machine.name} now")
        return results

    def _prefix_for(self, plan: Plan) -> str:
        """Return how machines are called that are set up for a benchmark: by its word, unless the user chose
        their names, or they are hosts with names of their own."""
        view = self.view()
        own = view.state.plan.machine_names != PREFIX or any(m.offer.lent for m in view.machines)
        return "" if own else plan.machine_names.removesuffix("-{n}")

    def _write_registry(self) -> None:
        """Bring the pool's file up to date after a verb that needs no controller."""
        store, home = self.store, self.store.home
        newest = store.newest() == self.name
        PoolScribe(home, store, self.name, is_newest=lambda: newest, fields=KindFields()).close()

    async def _keep_files(self, bundle: Bundle, tell: Callable[[str], None]) -> dict[str, str]:
        """Have the files that set-up fetches in the storage of the machines' place. Returns the variables by
        which it learns where. Raises RequestError where there is no such storage."""
        found: dict[str, str] = {}
        for files in (step.kept for step in bundle.steps if step.kept is not None):
            names = {machine.offer.place for machine in self._all(self.view())}
            if len(names) > 1:
                raise RequestError(
                    f"{files.label} is sent to the storage of one place, and pool {self.name!r} has machines "
                    f"of {', '.join(sorted(names))}"
                )
            async with self.places() as places:
                place = places[names.pop()]
                if not isinstance(place, KeepsFiles):
                    raise RequestError(
                        f"{place.name} has no storage of its own that machines could fetch {files.label} "
                        "from; put it where they reach it, and name its URL, or its path there"
                    )
                kept = await place.keep_files(files, KEPT_S, tell)
            found[files.variable] = json.dumps(dict(kept))
        return found

    async def restart(self, name: str) -> list[ActionResult]:
        """End all that runs on one machine, bring it up anew, and see that it answers."""
        return await self.on(self._only(name), restart, {})

    async def execute(
        self, names: Sequence[str], argv: Sequence[str], limit_s: float, undone: Collection[int] = ()
    ) -> list[tuple[ActionResult, Ended | None]]:
        """Run a command on machines that nobody else has meanwhile, and wait for its end.

        By an exit code in `undone` it says that the machine is set up no more.
        """
        ends: dict[MachineId, Ended] = {}

        async def work(site: PoolMachine) -> None:
            job = Job(AttemptId(f"by-hand-{os.urandom(6).hex()}"), Command(tuple(argv)), limit_s)
            try:
                await site.channel.start(job)
                ended = ends[site.machine.id] = await site.channel.ended(job.id)
            except asyncio.CancelledError:  # Ctrl-C: what nobody waits for must not go on there
                await site.channel.stop(job.id)
                raise
            site.channel.forget(job.id)
            if ended.reason == "exited" and ended.exit_code in undone:
                await set_up_no_more(site)

        def which(view: PoolView) -> list[MachineState]:
            return [machine for name in names for machine in self._only(name)(view)]

        answers = await self.on(which, work, {})
        if undone:
            self._write_registry()
        return [(answer, ends.get(answer.machine.id)) for answer in answers]

    def _all(self, view: PoolView) -> list[MachineState]:
        if not (running := running_in(view)):
            hint = f"`evalfleet pool start {self.name}` starts what was stopped"
            raise RequestError(f"no machine of pool {self.name!r} is running; {hint}")
        return running

    def _only(self, name: str) -> Callable[[PoolView], list[MachineState]]:
        def one(view: PoolView) -> list[MachineState]:
            machine = view.machine(name)
            if machine not in running_in(view):
                hint = f"`evalfleet pool start {self.name}` starts it"
                raise RequestError(f"{machine.name} is not running; {hint}")
            return [machine]

        return one

    async def on(
        self,
        which: Callable[[PoolView], list[MachineState]],
        work: Work,
        secrets: Mapping[str, str],
    ) -> list[ActionResult]:
        """Do the work on machines that nobody else has meanwhile, on all at once."""
        async with self._alone(secrets) as (journal, places):
            machines = which(changes.in_use(self.view()))
            ids = [machine.id for machine in machines]
            holds = Holds(self.store, self.name)
            holds.take_all(ids, journal.epoch, self.workspace.now())
            try:
                return await asyncio.gather(
                    *(work_at(work, m, places[m.offer.place], holds, journal) for m in machines)
                )
            finally:
                holds.give_back(ids, self.name, journal.epoch)

    @asynccontextmanager
    async def _alone(
        self, secrets: Mapping[str, str]
    ) -> AsyncGenerator[tuple[SqliteJournal, dict[str, Place]]]:
        """The pool's stream, and its places, while nobody else changes it."""
        now = self.workspace.now()
        journal = self.store.acquire(self.name, Holder.here(now), now)
        try:
            async with self.places(secrets) as places:
                yield journal, places
        finally:
            await journal.close()

    # -- looking ---------------------------------------------------------------------------------

    async def probe(self, machines: Sequence[MachineState] | None = None) -> list[ActionResult]:
        """Ask these, or all that should run, whether they do. Whoever has them is not disturbed."""
        view = self.view()
        asked_for = running_in(view) if machines is None else machines
        async with self.places() as places:
            asked = [self._ask(view, m, places[m.offer.place]) for m in asked_for]
            return await asyncio.gather(*asked)

    def places(
        self, secrets: Mapping[str, str] | None = None
    ) -> AbstractAsyncContextManager[dict[str, Place]]:
        """The pool's places, with settings as they are now; closed afterwards."""
        plan = self.view().state.plan
        return self.workspace.places(plan, secrets, changed=self.workspace.changed_settings(plan))

    def running(self, names: Sequence[str] = ()) -> list[MachineState]:
        """The machines that run, of these or of all. RequestError if none does."""
        view = self.view()
        asked = [view.machine(name) for name in names] or view.machines
        running = [machine for machine in running_in(view) if machine in asked]
        if not running:
            hint = f"`evalfleet pool start {self.name}` starts what was stopped"
            raise RequestError(f"no such machine of pool {self.name!r} is running; {hint}")
        return running

    async def _ask(self, view: PoolView, machine: MachineState, place: Place) -> ActionResult:
        hold = view.holds.get(machine.id)
        epoch = self.store.stream(self.name).epoch if hold is None else hold.epoch
        fence = pool_fence(self.name, hold, Fence(self.name, epoch, machine.offer.life.silent_s))
        channel = place.channel(machine_of(machine), fence)
        try:
            async with asyncio.timeout(PROBE_S):
                await channel.probe(None)
        except StaleController:
            return ActionResult(machine)  # whoever has it since a moment: it has answered
        except TimeoutError:
            return ActionResult(machine, f"no answer within {PROBE_S:g} s")
        except (FleetError, OSError) as err:
            return ActionResult(machine, str(err))
        finally:
            await channel.close()
        return ActionResult(machine)

    async def shell(self, name: str, command: Sequence[str]) -> Sequence[str]:
        """What to execute to look into a machine. Raises RequestError where that cannot be."""
        machine = self.view().machine(name)
        async with self.places() as places:
            place = places[machine.offer.place]
            if not isinstance(place, Reachable):
                raise RequestError(f"there is no way into machines of {place.name}")
            return place.shell(machine_of(machine), command)


async def create(workspace: Workspace, request: PoolRequest) -> Pool:
    """Write the pool down and begin to make its machines."""
    store = workspace.store()
    plan, environ = resolve_pool(request, environ=workspace.environ, cwd=workspace.cwd, home_id=store.home_id)
    await _try_places(workspace, plan, environ)
    if _was_deleted(store, plan.run):
        pool = Pool(workspace, plan.run)
        pool.catch_up()
        await pool.control(functools.partial(changes.made_anew, plan=plan))
    else:
        store.create_stream(plan.run, "pool", workspace.now(), [PoolPlanned(plan)])
        pool = Pool(workspace, plan.run)
        await pool.control()
    return pool


def _was_deleted(store: Store, name: str) -> bool:
    kinds = {info.name: info.kind for info in store.streams()}
    return kinds.get(name) == "pool" and look_at(store, name).state.ended_at is not None


async def _try_places(workspace: Workspace, plan: Plan, environ: Mapping[str, str]) -> None:
    """Raises what keeps a place from being used, before anything is written down."""
    async with workspace.places(plan, environ=environ) as places:
        for place in places.values():
            check_life(await place.offers(Needs()), plan.limits.lease_s)


def keep_plan(plan: Plan, name: str) -> Plan:
    """The plan of the pool that a run makes and leaves, in the places of the run."""
    return Plan(
        run=name,
        benchmark="",
        places=plan.places,
        place_specs=plan.place_specs,
        limits=Limits(workers=plan.limits.workers, lease_s=EXPIRES_S),
        home=plan.home,
        machine_names=plan.machine_names.removesuffix("-{n}"),
    )


async def tend(workspace: Workspace, name: str) -> None:
    """Go on with a pool whose machines are still to be made, unless somebody does."""
    pool = Pool(workspace, name)
    state = look_at(pool.store, name).state
    if state.ended_at is None and (not state.machines or not POOL.settled(state)):
        with suppress(RunHeld):
            await pool.control()


def open_pool(workspace: Workspace, name: str) -> Pool:
    """The pool of this name. RequestError if there is none."""
    pool = Pool(workspace, name)
    pool.view()
    pool.catch_up()
    return pool


def pools(workspace: Workspace) -> list[PoolView]:
    """All that exist, newest first."""
    store = workspace.records_if_any()
    if store is None:
        return []  # nothing was ever made here
    found: list[PoolView] = []
    for info in reversed(store.streams()):
        try:
            if info.kind == "pool":
                found.append(read_pool(store, info.name))
        except RequestError:
            continue  # it was deleted
    return found
