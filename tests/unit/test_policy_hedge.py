"""While machines are slow to come, one or two more are asked for, and no attempt is raced."""

from __future__ import annotations

from typing import Any

from evalfleet.events import AttemptStarted, MachineCondemned, MachineRequested
from evalfleet.model import Offer
from evalfleet.policy import next_deadline
from evalfleet.state import RunState

from .runs import FREE, Run

VM = Offer("cloud", "D4", usd_per_hour=0.36, billing_step_s=1.0)


def slow(workers: int = 4, **limits: Any) -> Run:
    """All machines but the last one are ready after 100 s."""
    run = Run(20, [VM], workers=workers, **limits)
    run.turn()
    run.wait(100)
    run.ready(*list(run.state.coming)[:-1])
    return run


def asked(run: Run) -> int:
    return sum(isinstance(event, MachineRequested) for event in run.log)


def test_one_more_is_asked_for_once_a_machine_takes_twice_as_long_as_the_others() -> None:
    run = slow()
    run.wait(99)
    assert asked(run) == 4
    due = next_deadline(run.state, run.now)
    assert due is not None
    run.wait((due - run.now) / 1e6)
    assert asked(run) == 5
    run.wait(1000)
    assert asked(run) <= 6, "not more than two, however slow they are"


def test_the_first_that_is_ready_works_and_the_other_one_is_let_go_before_it_begins() -> None:
    run = slow()
    run.wait(100)
    slow_one, hedge = run.state.coming
    decided = run.ready(hedge)
    assert [event.machine for event in decided if isinstance(event, AttemptStarted)] == [hedge]
    assert [event.machine for event in decided if isinstance(event, MachineCondemned)] == [slow_one]
    assert run.machine(slow_one).attempts == 0
    assert run.state.live == 4


def test_one_that_came_after_all_works_and_the_one_that_hedged_is_let_go() -> None:
    run = slow()
    run.wait(100)
    slow_one, hedge = run.state.coming
    decided = run.ready(slow_one)
    assert [event.machine for event in decided if isinstance(event, MachineCondemned)] == [hedge]
    assert list(run.open().values()).count(slow_one) == 1


def test_both_may_come_at_once_and_no_task_is_run_twice() -> None:
    run = slow()
    run.wait(100)
    run.ready(*run.state.coming)
    assert run.state.live == len(run.open()) == 4
    tasks = [attempt.rpartition(".")[0] for attempt in run.open()]
    assert len(set(tasks)) == 4


def test_what_runs_goes_on_while_others_are_hedged() -> None:
    run = slow()
    before = run.open()
    run.wait(100)
    assert run.open() == before
    run.score(next(iter(before)))
    assert len(run.open()) == 3, "a machine that is ready gets its next task also while others are awaited"


def test_nothing_is_hedged_where_machines_cost_nothing_or_nobody_knows_what_is_usual() -> None:
    lent = Run(20, [FREE], workers=4)
    lent.turn()
    lent.wait(100)
    lent.ready(*list(lent.state.coming)[:-1])
    lent.wait(1000)
    assert asked(lent) == 4
    unknown = Run(20, [VM], workers=4)
    unknown.turn()
    unknown.wait(1000)
    assert asked(unknown) == 4


def test_nothing_is_hedged_without_money_or_work_for_it() -> None:
    poor = slow(budget_usd=0.36 * 4 * 0.35, max_duration_s=1200)
    poor.wait(100)
    spent: RunState = poor.state
    assert spent.closed_usd + spent.reserved_usd <= 0.36 * 4 * 0.35 + 1e-9
    few = Run(4, [VM], workers=4)
    few.turn()
    few.wait(100)
    few.ready(*list(few.state.coming)[:-1])
    few.score(next(iter(few.open())))
    few.wait(1000)
    assert few.state.live <= 4
