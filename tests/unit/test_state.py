"""The state's indexes are what a recount gives, its effects what a full look gives, at a flat cost."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from evalfleet.cost import billed_usd, idle_usd, reserved_usd
from evalfleet.events import (
    AttemptEnded,
    MachineAnswered,
    MachineDeleted,
    MachineHeard,
    MachineSilent,
    RunResumed,
    StopRequested,
    TasksReopened,
)
from evalfleet.model import Answered, Broken, Cause, MachineId, Scored, TaskId, after
from evalfleet.policy import changed_effects, decide, effects, next_deadline
from evalfleet.policy.effects import Effect, Owner
from evalfleet.state import MachineState, RunState, accepts, apply, apply_all, fold
from sim.scenario import draw, draw_tiers
from sim.simulate import simulate

from .runs import PRICED, Run

COMING = ("requested", "queued", "allocated", "up")
LIVE = (*COMING, "ready", "mending", "stopping", "stopped")


# -- recounts --------------------------------------------------------------------------------------


def check_tasks(state: RunState) -> None:
    assert +Counter(state.counts) == Counter(known.status for known in state.tasks.values())
    unsettled = (k for k in state.tasks.values() if k.status in ("waiting", "running"))
    assert +Counter(state.unsettled) == Counter(state.kind(known.task) for known in unsettled)
    waiting = [known for known in state.tasks.values() if known.status == "waiting"]
    assert state.retries == sorted((k.not_before, k.index, k.task.id) for k in waiting if k.retrying)
    for lane, heap in enumerate(state.fresh):
        fresh = {k.task.id for k in waiting if not k.retrying and k.lane == lane}
        assert {entry[2] for entry in heap if entry[2] in fresh} == fresh
        assert not heap or heap[0][2] in fresh, "the next task of a lane is none that waits"
    assert state.succeeded == sum(
        known.outcome.success for known in state.tasks.values() if isinstance(known.outcome, Scored)
    )


def check_attempts(state: RunState) -> None:
    attempts = state.attempts.values()
    open_on = {a.id: state.machines[a.machine] for a in attempts if a.outcome is None}
    assert set(state.orphans) == {
        a for a, machine in open_on.items() if machine.phase in ("condemned", "mending")
    }
    assert state.uncollected == sum(a.outcome is not None and a.collected is None for a in attempts)
    ends = [a.grades[0] if isinstance(a.outcome, Answered) and a.grades else a.outcome for a in attempts]
    assert state.causes == Counter(end.cause for end in ends if isinstance(end, Broken))
    for machine in state.machines.values():
        assert set(machine.open) == {a for a, on in open_on.items() if on is machine}
        assert set(machine.uncollected) == {
            a.id
            for a in attempts
            if a.machine == machine.id and a.outcome is not None and a.collected is None
        }


def check_machines(state: RunState) -> None:
    def those(which: Callable[[MachineState], bool]) -> set[MachineId]:
        return {m.id for m in state.machines.values() if which(m)}

    slots, streak = state.plan.slots, state.limits.machine_streak
    ready = those(lambda m: m.phase == "ready")
    assert set(state.coming) == those(lambda m: m.phase in COMING)
    assert set(state.ready) == ready
    free = those(lambda m: len(m.open) < slots and m.silent_since is None)
    assert set(state.idle) == (ready & free) - set(state.draining)
    asked = those(lambda m: m.steered is not None and m.phase not in ("condemned", "deleted"))
    shut = {place for place, circuit in state.circuits.items() if circuit.phase != "closed"}
    assert set(state.replacing) <= asked
    assert set(state.draining) <= asked | those(lambda m: m.offer.place in shut)
    by_circuit = [machine for circuit in state.circuits.values() for machine in circuit.machines]
    assert sorted(by_circuit) == sorted(those(lambda m: m.phase in LIVE))
    assert set(state.audible) == ready & those(lambda m: m.silent_since is None)
    assert set(state.silent) == ready & those(lambda m: m.silent_since is not None)
    assert set(state.silent) == {m for line in state.lines.values() for m in line.silent}
    assert set(state.mending) == those(lambda m: m.phase == "mending")
    assert set(state.unreachable) <= set(state.coming) | set(state.mending)
    assert set(state.suspects) == ready & those(lambda m: m.streak >= streak)
    assert set(state.undeleted) == those(lambda m: m.phase != "deleted")
    live = [m for m in state.machines.values() if m.phase in LIVE]
    assert +state.live_by_offer == Counter(m.offer.key for m in live)
    due = {(deadline.at, deadline.machine) for deadline in state.deadlines}
    timed = [m for m in live if m.phase not in ("stopping", "stopped") and not m.unstarted]
    assert {(m.renew_at, m.id) for m in timed} <= due
    assert not state.deadlines or state.deadlines[0] == min(state.deadlines)


def check_money(state: RunState) -> None:
    closed = reserved = 0.0
    for m in state.machines.values():
        closed += m.closed_usd
        if m.gone_at is not None and m.unstarted:
            assert m.closed_usd <= billed_usd(m.offer, m.billed_at, m.ends_at), "it never started"
        elif m.gone_at is not None:
            off = min(m.gone_at, m.ends_at)
            last = billed_usd(m.offer, m.billed_at, off) + idle_usd(m.offer, off, m.gone_at)
            assert m.closed_usd == last or not state.plan.benchmark, "only pools stop machines"
        elif m.stopped_at is None:
            reserved += reserved_usd(m.offer, m.billed_at, m.ends_at)
    assert state.spend.machines.spent == pytest.approx(closed)
    assert state.spend.machines.reserved == pytest.approx(reserved, abs=1e-6)


class Watch:
    """Follows a state event by event: what changed, summed up, must be what a full look gives."""

    def __init__(self) -> None:
        self.under_way: dict[Owner, tuple[Effect, ...]] = {}

    def check(self, state: RunState) -> None:
        for owner, wanted in changed_effects(state):
            self.under_way.pop(owner, None)
            if wanted:
                self.under_way[owner] = wanted
        assert self.under_way == effects(state)
        check_tasks(state)
        check_attempts(state)
        check_machines(state)
        check_money(state)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 10_000))
def test_after_every_event_of_a_simulated_run_all_indexes_hold(seed: int) -> None:
    state, watch, looked_at = RunState(), Watch(), RunState(queues=False)
    for record in simulate(draw(seed) if seed % 2 else draw_tiers(seed)).store.read():
        apply(state, record.at, record.event)
        apply(looked_at, record.at, record.event)
        watch.check(state)
    assert not any(looked_at.fresh)
    assert all_but_queues(looked_at) == all_but_queues(state)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 10_000), st.integers(1, 500))
def test_very_many_events_at_once_lead_where_one_by_one_do(seed: int, page: int) -> None:
    records = list(simulate(draw(seed) if seed % 2 else draw_tiers(seed)).store.read())
    one_by_one, at_once = RunState(queues=False), RunState(queues=False)
    for record in records:
        apply(one_by_one, record.at, record.event)
    for start in range(0, len(records), page):
        some = records[start : start + page]
        apply_all(at_once, [record.at for record in some], [record.event for record in some])
    for state in (one_by_one, at_once):  # who became idle first is asked by nobody who only looks
        state.idle = dict(sorted(state.idle.items()))
    assert all_but_queues(at_once) == all_but_queues(one_by_one)


def all_but_queues(state: RunState) -> dict[str, str]:
    """What whoever only looks at a run must find as whoever decides about it does."""
    own = ("fresh", "queues", "touched_machines", "touched_attempts")
    return {name: repr(value) for name, value in structs.asdict(state).items() if name not in own}


# -- any order of things that can happen ---------------------------------------------------------


class Anything:
    """Draws what happens next among what can."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.run = Run(
            data.draw(st.integers(1, 12), "tasks"),
            (PRICED,),
            schedule=data.draw(st.sampled_from(("dynamic", "round-robin", "slices")), "schedule"),
            slots=data.draw(st.integers(1, 2), "slots"),
            workers=data.draw(st.integers(1, 4), "workers"),
            attempts=data.draw(st.integers(1, 3), "attempts"),
            budget_usd=data.draw(st.sampled_from((None, 2000.0)), "budget"),
            canary=data.draw(st.integers(0, 1), "canary"),
        )

    def step(self) -> None:
        happens = (
            self.time,
            self.ready,
            self.score,
            self.breaks,
            self.lose,
            self.gone,
            self.silent,
            self.answered,
            self.heard,
            self.stop,
            self.resume,
        )
        self.data.draw(st.sampled_from(happens), "happens")()

    def one(self, of: Any) -> Any:
        known = list(of)
        return self.data.draw(st.sampled_from(known), "which") if known else None

    def time(self) -> None:
        self.run.wait(self.data.draw(st.sampled_from((0.1, 5.0, 70.0, 900.0)), "seconds"))

    def ready(self) -> None:
        if machine := self.one(self.run.state.coming):
            self.run.ready(machine)

    def score(self) -> None:
        if attempt := self.one(self.run.open()):
            self.run.score(attempt)

    def breaks(self) -> None:
        if attempt := self.one(self.run.open()):
            self.run.breaks(attempt, self.data.draw(st.sampled_from(Cause), "cause"))

    def lose(self) -> None:
        state = self.run.state
        if machine := self.one((*state.coming, *state.ready)):
            self.run.lose(machine, self.data.draw(st.sampled_from((None, *Cause)), "cause"), "step")

    def gone(self) -> None:
        machines = self.run.state.machines
        if machine := self.one(m for m in self.run.state.undeleted if machines[m].phase == "condemned"):
            self.run.gone(machine)

    def silent(self) -> None:
        if machine := self.one(self.run.state.audible):
            self.run.tell(MachineSilent(machine, after(self.run.now, -60.0)))

    def heard(self) -> None:
        if machine := self.one(self.run.state.silent):
            self.run.tell(MachineHeard(machine))

    def answered(self) -> None:
        if machine := self.one(self.run.state.audible):
            self.run.tell(MachineAnswered(machine))

    def stop(self) -> None:
        self.run.tell(StopRequested("user", drain=self.data.draw(st.booleans(), "drain")))

    def resume(self) -> None:
        state = self.run.state
        if state.stop is None and state.ended_at is None:
            return
        tasks = self.data.draw(st.sets(st.sampled_from(list(state.tasks))), "reopened")
        only = self.data.draw(st.sampled_from((None, tuple(sorted(tasks)))), "only")
        limits = structs.replace(state.limits, workers=self.data.draw(st.integers(1, 5), "workers"))
        self.run.tell(TasksReopened(tuple(sorted(tasks))), RunResumed(limits, only))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_whatever_happens_in_whatever_order_all_indexes_hold(data: st.DataObject) -> None:
    world, watch = Anything(data), Watch()
    world.run.turn()
    for _ in range(data.draw(st.integers(0, 60), "steps")):
        world.step()
        watch.check(world.run.state)
        due = next_deadline(world.run.state, world.run.now)
        assert due is None or due > world.run.now, "the engine would spin"


# -- facts -----------------------------------------------------------------------------------------


def test_folding_is_applying_one_by_one() -> None:
    records = list(simulate(draw(3)).store.read())
    state = fold(records)
    assert state.events == len(records)
    assert state.last_at == records[-1].at


def test_what_is_news_no_more_is_not_accepted() -> None:
    run = Run(2, workers=1)
    run.turn()
    run.ready()
    run.lose("r-h-1")
    (attempt,) = run.state.attempts.values()
    assert not accepts(run.state, AttemptEnded(attempt.id, Scored(1.0))), "the first end stays"
    run.gone("r-h-1")
    assert not accepts(run.state, MachineDeleted(MachineId("r-h-1"), run.now))
    assert not accepts(run.state, MachineSilent(MachineId("r-h-1"), run.now))


def test_a_machine_that_nobody_looked_at_is_billed_to_its_expiry_only() -> None:
    """The laptop slept from Friday to Monday; the place ended the machine an hour after it fell asleep."""
    run = Run(2, (PRICED,), workers=1, lease_s=3600.0)
    run.turn()
    run.now = after(run.now, 60 * 3600.0)
    run.lose("r-h-1")
    run.gone("r-h-1")
    assert run.state.spend.machines.spent == pytest.approx(3600.0)


def test_broken_tasks_are_reopened_with_a_fresh_allowance() -> None:
    run = Run(1, workers=1, attempts=1)
    run.turn()
    run.ready()
    run.breaks("t0.0")
    run.tell(TasksReopened((TaskId("t0"),)))
    known = run.task("t0")
    assert (known.status, known.used, known.tries, known.broken_on) == ("waiting", 0, 0, ())
    run.ready()
    assert known.attempts == ["t0.0", "t0.1"], "attempts are kept, and their numbers go on"


# -- cost per step ---------------------------------------------------------------------------------


def opcodes(work: Callable[[], object]) -> int:
    """How many bytecodes it takes: what a clock would tell, but the same each time."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def cost_of_steps(tasks: int, workers: int, **plan: Any) -> float:
    """Bytecodes for each score, and for each failure, with the decisions that follow, in mid-run."""
    run = Run(tasks, workers=workers, attempts=5, **plan)
    run.turn()
    run.ready()
    for _ in range(workers):
        run.score(next(iter(run.open())))
    list(changed_effects(run.state))
    under_way = list(run.open())[:40]

    def steps() -> None:
        for n, attempt in enumerate(under_way):
            run.score(attempt) if n % 2 else run.breaks(attempt)
            list(changed_effects(run.state))
            decide(run.state, run.now, run.offers)
            next_deadline(run.state, run.now)

    return opcodes(steps) / len(under_way)


@pytest.mark.parametrize("schedule", ["dynamic", "round-robin", "slices"])
def test_a_step_costs_the_same_however_many_tasks_there_are(schedule: str) -> None:
    assert cost_of_steps(10_000, 40, schedule=schedule) < 1.5 * cost_of_steps(500, 40, schedule=schedule)


def test_a_step_costs_the_same_however_many_machines_there_are() -> None:
    assert cost_of_steps(5_000, 1_000) < 1.5 * cost_of_steps(5_000, 50)
