"""The engine: record what was decided, start the effects that are missing, wait for what happens.

Recovery is not a special case: folding the journal leaves every owner of an effect marked as changed,
so the first turn of a new controller starts exactly what must be under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from .clock import pauses
from .effects import FenceOf, Performer, RunCopy, Tools
from .errors import FleetError, PlaceError
from .events import (
    AttemptCollected,
    AttemptEnded,
    AttemptStarted,
    CircuitChanged,
    ControllerStarted,
    Event,
    MachineCondemned,
    MachineRequested,
    StopRequested,
)
from .model import Broken, Cause, Micros, Needs, Offer, Task, seconds_between
from .policy import RUN, Effect, Rules, changed_effects
from .policy.effects import Owner
from .policy.finish import grading_is_due
from .policy.scale import task_without_offer
from .policy.tiers import in_order
from .ports import Benchmark, Clock, Journal, Place, Request
from .state import RunState, accepts, apply, fold


class Tempo(Struct, frozen=True):
    """How often the engine looks at what does not report by itself."""

    requests_s: float = 0.5
    survey_s: float = 10.0
    poll_s: float = 0.2
    poll_cap_s: float = 10.0
    linger_s: float = 0.05
    longest_wait_s: float = 30.0  # a computer that slept must notice what fell due meanwhile


class Engine:
    """The loop that runs one stream to its end. Only this class writes to the journal."""

    def __init__(
        self,
        journal: Journal,
        places: Mapping[str, Place],
        benchmark: Benchmark,
        clock: Clock,
        artefacts: Path,
        *,
        controller: ControllerStarted | None = None,
        tempo: Tempo | None = None,
        rules: Rules = RUN,
        secrets: Mapping[str, str] | None = None,
        state: RunState | None = None,
        copy: RunCopy | None = None,
        fence_of: FenceOf | None = None,
    ) -> None:
        self._journal = journal
        self._clock = clock
        self._rules = rules
        self._tempo = tempo or Tempo()
        self._controller = controller or ControllerStarted()
        self._places = places
        self._benchmark = benchmark
        self.state: RunState = fold(journal.read()) if state is None else state
        self._performer = Performer(
            Tools(
                *(self.state, places, benchmark, clock, artefacts, journal.epoch, self._tempo, self.report),
                secrets=secrets or {},
                began_at=clock.now(),
                copy=copy,
                fence_of=fence_of,
            )
        )
        self._offers: Sequence[Offer] = ()
        self._inbox: list[Event] = []
        self._answered: list[int] = []
        self._seen_requests: set[int] = set()
        self._news = asyncio.Event()
        self._alarm: asyncio.TimerHandle | None = None
        self._fatal: BaseException | None = None
        self._under_way: dict[Owner, tuple[Effect, ...]] = {}
        self._tasks: dict[Effect, asyncio.Task[None]] = {}
        self._asking: list[asyncio.Task[None]] = []

    async def run(self) -> RunState:
        """Run until the run has ended. Raises LeaseLost or JournalError when this controller must stop."""
        background = [asyncio.create_task(self._listen()), asyncio.create_task(self._survey())]
        try:
            await self._performer.take_up()
            self.report(self._controller)
            await self._performer.settle_ended()
            await self._turn()  # what the journal says must be under way does not wait for offers
            if not grading_is_due(self.state):  # then no machine is needed any more
                self._offers = await self._find_offers()
            while True:
                await self._turn()
                if self._rules.settled(self.state):
                    break
                await self._wait()
            return self.state
        finally:
            await self._halt(background)

    def report(self, event: Event) -> None:
        """What happened, from an effect or a signal handler: recorded in the next turn.

        Nothing waits for artefacts that have come home, so they share the turn and the commit of what
        comes next: an attempt costs one commit instead of two.
        """
        self._inbox.append(event)
        if type(event) is AttemptCollected:
            self._set_alarm(asyncio.get_running_loop(), self._tempo.linger_s)
        else:
            self._news.set()

    # -- one turn --------------------------------------------------------------------------

    async def _turn(self) -> None:
        if self._fatal is not None:
            raise self._fatal
        self._news.clear()
        now = max(self._clock.now(), self.state.last_at)
        recorded = self._take_news(now)
        while decided := self._rules.decide(self.state, now, self._offers):
            for event in decided:
                apply(self.state, now, event)
            recorded.extend(decided)
        answered, self._answered = self._answered, []
        if recorded or answered:
            everywhere = await self._journal.append(now, recorded, answered)
            if not everywhere and self._hold_back(recorded):
                return
            for event in recorded:
                if type(event) is AttemptCollected and everywhere:
                    self._performer.forget(event.attempt)
        for owner, wanted in changed_effects(self.state):
            self._sync(owner, wanted)

    def _hold_back(self, recorded: Sequence[Event]) -> bool:
        """Take back what would be started by events that are not in the run's store: somebody else may have
        taken the run over meanwhile, and start the same. True if there is something."""
        why, news = "not started: the store was away", len(self._inbox)
        for event in recorded:
            if isinstance(event, AttemptStarted):
                self.report(AttemptEnded(event.attempt, Broken(Cause.CANCELLED, why)))
            elif isinstance(event, MachineRequested):
                self.report(MachineCondemned(event.machine, why, Cause.CANCELLED))
        return len(self._inbox) > news

    def _take_news(self, now: Micros) -> list[Event]:
        inbox, self._inbox = self._inbox, []
        recorded: list[Event] = []
        for event in inbox:
            if accepts(self.state, event):
                apply(self.state, now, event)
                recorded.append(event)
        return recorded

    def _sync(self, owner: Owner, wanted: tuple[Effect, ...]) -> None:
        """Make what is under way for one owner equal to what must be."""
        have = self._under_way.get(owner, ())
        if have == wanted:
            return
        for effect in have:
            if effect not in wanted and (task := self._tasks.pop(effect, None)):
                task.cancel()
        for effect in wanted:
            if effect not in have:
                self._tasks[effect] = asyncio.create_task(self._perform(effect))
        if wanted:
            self._under_way[owner] = wanted
        else:
            del self._under_way[owner]

    async def _perform(self, effect: Effect) -> None:
        try:
            await self._performer.perform(effect)
        except FleetError as err:  # another controller has been here, or there is no going on
            self._fail(err)
        finally:
            if self._tasks.get(effect) is asyncio.current_task():
                del self._tasks[effect]

    def _fail(self, err: BaseException) -> None:
        self._fatal = self._fatal or err
        self._news.set()

    async def _wait(self) -> None:
        """Wait for news, or for the next moment at which something is due."""
        if self._news.is_set():
            return
        now = self._clock.now()
        delay = self._tempo.longest_wait_s
        if (due := self._rules.next_deadline(self.state, now)) is not None:
            delay = min(delay, max(0.0, seconds_between(now, due)))
        self._set_alarm(asyncio.get_running_loop(), delay)
        await self._news.wait()

    def _set_alarm(self, loop: asyncio.AbstractEventLoop, delay_s: float) -> None:
        """Wake the engine at that time at the latest. An alarm that rings early costs a turn; a new one each
        turn, more."""
        at = loop.time() + delay_s
        if self._alarm is not None:
            if self._alarm.when() <= at and not self._alarm.cancelled():
                return
            self._alarm.cancel()
        self._alarm = loop.call_at(at, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self._news.set()

    # -- beside the turns --------------------------------------------------------------------

    @property
    def _needs(self) -> Needs:
        """What machines must have: as earlier runs have shown, else as the benchmark says."""
        return self.state.plan.needs or self._benchmark.needs

    async def _find_offers(self) -> Sequence[Offer]:
        """All places' offers, the best first. A place that refuses us leaves the others."""
        found: list[Offer] = []
        refusals: dict[str, PlaceError] = {}
        for place in self._places.values():
            try:
                found.extend(await self._performer.offers(place, self._needs))
            except PlaceError as err:
                refusals[place.name] = err
        if not found:
            why = "; ".join(f"{name}: {refusal}" for name, refusal in refusals.items())
            why = why or "no place offers a machine that the benchmark could use"
            self.report(StopRequested("refused", why))
            return ()
        for name, refusal in refusals.items():
            self._leave(name, refusal)
        if (without := task_without_offer(self._tasks_by_needs(), found)) is not None:
            self.report(StopRequested("refused", without))
        return in_order(self.state.plan, found)

    def _leave(self, place: str, err: PlaceError) -> None:
        """Record that a place is not used, and why. If it may answer later it is asked again and again."""
        known = self.state.circuits.get(place)
        if known is None or known.phase != "open":
            self.report(CircuitChanged(place, "open", str(err), permanent=not err.transient))
        if err.transient:
            self._asking.append(asyncio.create_task(self._ask_again(place)))

    async def _ask_again(self, place: str) -> None:
        """Once a place answers, its offers are there for the machine by which it is tried."""
        for pause_s in pauses(self._tempo.poll_cap_s * 6, 900.0, 2):
            await asyncio.sleep(pause_s)
            try:
                found = await self._performer.offers(self._places[place], self._needs)
            except PlaceError as err:
                if not err.transient:
                    return
                continue
            self._offers = in_order(self.state.plan, [*self._offers, *found])
            self._news.set()
            return

    def _tasks_by_needs(self) -> Iterator[Task]:
        """Tasks that are left and go only to machines that have what they need."""
        for known in self.state.tasks.values():
            if known.status in ("waiting", "running") and self.state.kind(known.task) is not None:
                yield known.task

    async def _listen(self) -> None:
        """Turn what others ask of this run (cancel) into events."""
        while True:
            try:
                for request in await self._journal.requests():
                    self._take(request)
            except FleetError as err:
                self._fail(err)
                return
            await asyncio.sleep(self._tempo.requests_s)

    def _take(self, request: Request) -> None:
        if request.id not in self._seen_requests:
            self._seen_requests.add(request.id)
            self._answered.append(request.id)
            self.report(request.event)

    async def _survey(self) -> None:
        """Look after machines that vanish without a word."""
        while True:
            await asyncio.sleep(self._tempo.survey_s)
            for place in self._places.values():
                await self._performer.survey(place)

    async def _halt(self, background: Sequence[asyncio.Task[None]]) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        tasks = [*background, *self._asking, *self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._performer.close()
