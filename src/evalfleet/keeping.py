"""Named pools from Python: what `evalfleet pool` calls."""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from .config import home_of
from .controller import Controller, Order, WallClock
from .effects.machines import MACHINES
from .errors import (
    ChannelError,
    FleetError,
    MachineMute,
    ProviderError,
    RequestError,
    RunHeld,
    StaleController,
)
from .events import MachineExtended, MachineLeaseSet, MachinePrepared, PoolPlanned, Record
from .journal import Holder, Holds, SqliteJournal, Store
from .model import (
    AttemptId,
    Command,
    Ended,
    Job,
    Limits,
    MachineId,
    Micros,
    Needs,
    Offer,
    Plan,
    after,
    seconds_between,
)
from .names import safe_name
from .plan import (
    EXPIRES_S,
    PREFIX,
    PoolRequest,
    Resolved,
    benchmark_of,
    changed_settings,
    environment_of,
    places_of,
    resolve_pool,
)
from .policy import POOL
from .pools import Change, OwnPlace, PoolView, changes, look_at, machine_of, pool_fence, read_pool
from .ports import Channel, Enterable, Fence, PlaceContext, Provider, Stoppable, Undoable
from .state import MachineState, RunState
from .views.follow import Follower

PROBE_S = 10.0

Observer = Callable[[RunState, Sequence[Record]], None]


def create(request: PoolRequest, home: Path | None = None) -> Pool:
    """Write the pool down and begin to make its machines."""
    home = home or home_of(dict(os.environ), Path.cwd())
    store = Store.open(home)
    plan, environ = resolve_pool(request, environ=os.environ, cwd=Path.cwd(), home_id=store.home_id)
    asyncio.run(_try_places(plan, PlaceContext(home, store.home_id, {}, environ)))
    pool = Pool(store, plan.run)
    if _was_deleted(store, plan.run):
        pool.catch_up()
        pool.control(functools.partial(changes.made_anew, plan=plan))
    else:
        store.create_stream(plan.run, "pool", WallClock().now(), [PoolPlanned(plan)])
        pool.control()
    return pool


def _was_deleted(store: Store, name: str) -> bool:
    kinds = {info.name: info.kind for info in store.streams()}
    return kinds.get(name) == "pool" and look_at(store, name).state.ended_at is not None


async def _try_places(plan: Plan, context: PlaceContext) -> None:
    """Raises what keeps a place from being used, before anything is written down."""
    for place in places_of(plan, context).values():
        try:
            _check_life(await place.offers(Needs()), plan.limits.lease_s)
        finally:
            await place.close()


def _check_life(offers: Sequence[Offer], expires_s: float) -> None:
    """A place may be unable to end a machine by itself so soon. Raises RequestError."""
    least = min(offers, key=lambda offer: offer.least_life_s, default=None)
    if least is not None and expires_s < least.least_life_s:
        minutes = f"{least.least_life_s / 60:.0f}m"
        raise RequestError(
            f"--expires is {expires_s / 60:.0f} minutes, and {least.place} cannot end a machine by itself "
            f"before {minutes}: say {minutes} or more (`evalfleet pool stop` and `pool delete` act at once)"
        )


def keep_plan(plan: Plan, name: str) -> Plan:
    """The plan of the pool that a run makes and leaves, in the places of the run."""
    return Plan(
        run=name,
        benchmark="",
        places=plan.places,
        place_specs=plan.place_specs,
        limits=Limits(workers=plan.limits.workers, lease_s=EXPIRES_S),
        home=plan.home,
        machine_names=PREFIX,
    )


def tend(store: Store, name: str) -> None:
    """Go on with a pool whose machines are still to be made, unless somebody does."""
    pool = Pool(store, name)
    state = look_at(store, name).state
    if state.ended_at is None and (not state.machines or not POOL.settled(state)):
        with suppress(RunHeld):
            pool.control()


def open_pool(name: str, home: Path | None = None) -> Pool:
    """Raises RequestError when there is none."""
    home = home or home_of(dict(os.environ), Path.cwd())
    store = Store.open(home, create=False)
    read_pool(store, name)
    pool = Pool(store, name)
    pool.catch_up()
    return pool


def pools(home: Path | None = None) -> list[PoolView]:
    """All that exist, newest first."""
    home = home or home_of(dict(os.environ), Path.cwd())
    try:
        store = Store.open(home, create=False, read_only=True)
    except RequestError:
        return []  # nothing was ever made here
    found: list[PoolView] = []
    for info in reversed(store.streams()):
        try:
            if info.kind == "pool":
                found.append(read_pool(store, info.name))
        except RequestError:
            continue  # it was deleted
    return found


@dataclass(frozen=True)
class Answer:
    """What came of something done to a machine: nothing is wrong, or `problem`."""

    machine: MachineState
    problem: str = ""


@dataclass(frozen=True)
class Site:
    """One machine, and all that is needed to work on it."""

    machine: MachineState
    place: OwnPlace
    fence: Fence
    channel: Channel
    journal: SqliteJournal


Work = Callable[[Site], Awaitable[None]]


class Pool:
    """A named pool. Verbs that change it take its stream, so two never do at once."""

    def __init__(self, store: Store, name: str) -> None:
        self.name = name
        self.store = store
        self._controller: Controller | None = None
        self._follower = Follower(store, name)

    def view(self) -> PoolView:
        return read_pool(self.store, self.name)

    # -- what its controller does ----------------------------------------------------------------

    def control(self, change: Callable[[PoolView, Micros], Change] | None = None) -> None:
        """Change it, and bring it to where it shall be, in a thread of this process."""
        environ = environment_of(os.environ, Path.cwd())
        plan = look_at(self.store, self.name).state.plan
        settings = {} if change is None else changed_settings(plan, environ=os.environ, cwd=Path.cwd())
        order = Order(self.store.home, self.name, {}, environ, change=change, settings=settings)
        self._controller = Controller(order)
        self._controller.start()

    def catch_up(self) -> None:
        """What has happened until now is no news."""
        self._follower.poll()

    def wait(self, observe: Observer | None = None) -> RunState:
        """Until it is there. Raises what stopped the controller."""
        controller = self._controller
        over = controller is None
        while not over:
            over = controller is None or controller.join(0.1)
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

    def resize(self, workers: int) -> None:
        """More are made; of too many, those that nobody has go, the newest first."""
        self.control(functools.partial(changes.resized, workers=workers))

    def delete(self) -> None:
        self.control(changes.deleted)

    def stop(self) -> None:
        for place in self._places().values():
            if not isinstance(place, Stoppable):
                hint = f"`evalfleet pool delete {self.name}` ends them"
                raise RequestError(f"machines of {place.name} cannot be stopped; {hint}")
        self.control(changes.stopped)

    def start(self) -> None:
        """Those that were stopped or have expired, and those that are missing."""
        self.control(changes.started)

    # -- what is done to machines directly -------------------------------------------------------

    def extend(self, expires_s: float) -> list[Answer]:
        """All machines may live for so long from now. A run that has some is not disturbed."""
        return asyncio.run(self._extend(expires_s))

    async def _extend(self, expires_s: float) -> list[Answer]:
        async with self._alone({}) as (journal, places):
            staying = [m for m in changes.in_use(self.view()).machines if m.phase in ("ready", "stopped")]
            _check_life([machine.offer for machine in staying], expires_s)
            return [await _prolong(m, places[m.offer.place], journal, expires_s) for m in staying]

    def prepare(self, resolved: Resolved, tell: Callable[[str], None]) -> list[Answer]:
        """Bring a benchmark's files to all machines and set it up there, so that runs need not."""
        benchmark = benchmark_of(resolved.plan)

        async def work(site: Site) -> None:
            begun = time.monotonic()
            left = self.store.home / safe_name(self.name) / MACHINES / safe_name(site.machine.id)

            def say(step: str, said: str) -> None:
                tell(f"{site.machine.name}: {step}{said and ': '}{said}")

            steps = await site.channel.prepare(benchmark.bundle, left, say)
            if not await site.channel.probe(benchmark.probe):
                raise ChannelError("set up, but its probe does not succeed")
            took = round(time.monotonic() - begun, 3)
            timings = {"prepare": took, **{f"setup.{name}": round(s, 3) for name, s in steps.items()}}
            prepared = MachinePrepared(site.machine.id, benchmark.name, timings)
            await site.journal.append(WallClock().now(), [prepared])
            tell(f"{site.machine.name} is prepared for {benchmark.name} after {took:.1f}s")

        return asyncio.run(self.on(self._all, work, resolved.secrets))

    def restart(self, name: str) -> list[Answer]:
        """End all that runs on one machine, bring it up anew, and see that it answers."""
        return asyncio.run(self.on(self._only(name), _restart, {}))

    def execute(
        self, names: Sequence[str], argv: Sequence[str], limit_s: float, undone: int | None = None
    ) -> list[tuple[Answer, Ended | None]]:
        """Run a command on machines that nobody else has meanwhile, and wait for its end.

        With `undone` it undoes a set-up, and says by exit code 0 or this one that none is there any more.
        """
        ends: dict[MachineId, Ended] = {}

        async def work(site: Site) -> None:
            job = Job(AttemptId(f"by-hand-{os.urandom(6).hex()}"), Command(tuple(argv)), limit_s)
            try:
                await site.channel.start(job)
                ended = ends[site.machine.id] = await site.channel.ended(job.id)
            except asyncio.CancelledError:  # Ctrl-C: what nobody waits for must not go on there
                await site.channel.stop(job.id)
                raise
            site.channel.forget(job.id)
            if undone is not None and ended.reason == "exited" and ended.exit_code in (0, undone):
                await _set_up_no_more(site)

        def which(view: PoolView) -> list[MachineState]:
            return [machine for name in names for machine in self._only(name)(view)]

        answers = asyncio.run(self.on(which, work, {}))
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
    ) -> list[Answer]:
        """Do the work on machines that nobody else has meanwhile, on all at once."""
        async with self._alone(secrets) as (journal, places):
            machines = which(changes.in_use(self.view()))
            ids = [machine.id for machine in machines]
            holds = Holds(self.store, self.name)
            holds.take_all(ids, journal.epoch, WallClock().now())
            fence = Fence(self.name, journal.epoch)
            try:
                return await asyncio.gather(
                    *(_try(work, m, places[m.offer.place], fence, journal) for m in machines)
                )
            finally:
                holds.give_back(ids, self.name, journal.epoch)

    @asynccontextmanager
    async def _alone(
        self, secrets: Mapping[str, str]
    ) -> AsyncGenerator[tuple[SqliteJournal, dict[str, OwnPlace]]]:
        """The pool's stream, and its places, while nobody else changes it."""
        clock = WallClock()
        journal = self.store.acquire(self.name, Holder.here(clock.now()), clock.now())
        places = self._places(secrets)
        holds = Holds(self.store, self.name)
        try:
            yield journal, {name: OwnPlace(place, holds) for name, place in places.items()}
        finally:
            for place in places.values():
                await place.close()
            await journal.close()

    def _places(self, secrets: Mapping[str, str] | None = None) -> dict[str, Provider]:
        environ = environment_of(os.environ, Path.cwd())
        context = PlaceContext(self.store.home, self.store.home_id, secrets or {}, environ)
        plan = self.view().state.plan
        return places_of(plan, context, changed_settings(plan, environ=os.environ, cwd=Path.cwd()))

    # -- looking ---------------------------------------------------------------------------------

    def probe(self, machines: Sequence[MachineState] | None = None) -> list[Answer]:
        """Ask these, or all that should run, whether they do. Whoever has them is not disturbed."""
        return asyncio.run(self._probe(machines))

    async def _probe(self, machines: Sequence[MachineState] | None) -> list[Answer]:
        view = self.view()
        asked_for = running_in(view) if machines is None else machines
        async with self.places() as places:
            asked = [self._ask(view, m, places[m.offer.place]) for m in asked_for]
            return await asyncio.gather(*asked)

    @asynccontextmanager
    async def places(self) -> AsyncGenerator[dict[str, Provider]]:
        """Those of the pool, to look at its machines."""
        places = self._places()
        try:
            yield places
        finally:
            for place in places.values():
                await place.close()

    def running(self, names: Sequence[str] = ()) -> list[MachineState]:
        """Of these machines, or of all, those that run. Raises RequestError if there is none."""
        view = self.view()
        asked = [view.machine(name) for name in names] or view.machines
        running = [machine for machine in running_in(view) if machine in asked]
        if not running:
            hint = f"`evalfleet pool start {self.name}` starts what was stopped"
            raise RequestError(f"no such machine of pool {self.name!r} is running; {hint}")
        return running

    async def _ask(self, view: PoolView, machine: MachineState, place: Provider) -> Answer:
        hold = view.holds.get(machine.id)
        epoch = self.store.stream(self.name).epoch if hold is None else hold.epoch
        fence = pool_fence(self.name, hold, Fence(self.name, epoch))
        channel = place.channel(machine_of(machine), fence)
        try:
            async with asyncio.timeout(PROBE_S):
                await channel.probe(None)
        except StaleController:
            return Answer(machine)  # whoever has it since a moment: it has answered
        except TimeoutError:
            return Answer(machine, f"no answer within {PROBE_S:g} s")
        except (FleetError, OSError) as err:
            return Answer(machine, str(err))
        finally:
            await channel.close()
        return Answer(machine)

    def shell(self, name: str, command: Sequence[str]) -> Sequence[str]:
        """What to execute to look into a machine. Raises RequestError where that cannot be."""
        machine = self.view().machine(name)
        place = self._places()[machine.offer.place]
        if not isinstance(place, Enterable):
            raise RequestError(f"there is no way into machines of {place.name}")
        return place.shell(machine_of(machine), command)


def running_in(view: PoolView) -> list[MachineState]:
    now = WallClock().now()
    return [machine for machine in view.machines if view.standing(machine, now) in ("ready", "held")]


async def _prolong(
    machine: MachineState, place: OwnPlace, journal: SqliteJournal, expires_s: float
) -> Answer:
    """One that is stopped is told when it starts."""
    clock = WallClock()
    until = after(clock.now(), expires_s)
    try:
        if machine.phase != "stopped":
            await place.extend(machine.id, expires_s)
    except ProviderError as err:
        return Answer(machine, str(err))
    await journal.append(
        clock.now(), [MachineExtended(machine.id, until), MachineLeaseSet(machine.id, until)]
    )
    return Answer(machine)


async def _try(
    work: Work, machine: MachineState, place: OwnPlace, fence: Fence, journal: SqliteJournal
) -> Answer:
    channel = place.channel(machine_of(machine), fence)
    try:
        await work(Site(machine, place, fence, channel, journal))
    except (FleetError, OSError) as err:
        return Answer(machine, str(err))
    finally:
        await channel.close()
    return Answer(machine)


async def _set_up_no_more(site: Site) -> None:
    """Who comes next sets it up from the start."""
    if isinstance(site.channel, Undoable):
        await site.channel.forget_set_up()
    await site.journal.append(WallClock().now(), [MachinePrepared(site.machine.id, "")])


async def _restart(site: Site) -> None:
    machine = site.machine
    left_s = seconds_between(WallClock().now(), machine.expires_at)
    if machine.offer.mends:  # to stop it could cost us its place there
        await _mend(site, left_s)
    else:
        await site.place.stop(machine.id)
        await site.place.create(machine.id, machine.offer, left_s)
    anew = site.place.channel(machine_of(machine), site.fence)  # what led there before may have been closed
    try:
        await anew.probe(None)
    finally:
        await anew.close()


async def _mend(site: Site, left_s: float) -> None:
    """The mildest way after which it can be reached."""
    *milder, last = site.machine.offer.mends
    for step in milder:
        with suppress(MachineMute):
            return await site.place.mend(site.machine.id, step, left_s)
    await site.place.mend(site.machine.id, last, left_s)
