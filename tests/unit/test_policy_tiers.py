"""Several places: their order, and what becomes of one that keeps failing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from evalfleet.events import (
    CircuitChanged,
    Event,
    MachineCondemned,
    RunEnded,
    RunResumed,
    StopRequested,
    decode,
    encode,
)
from evalfleet.model import Cause, Cost, Offer, Plan, after, seconds_between
from evalfleet.policy.tiers import LONGEST_PAUSE_S, in_order
from evalfleet.state import Circuit, RunState, apply
from evalfleet.views.notable import by_place

from .runs import Run

DEAR, CHEAP, FIRST = (
    Offer("a", "large", "", cost=Cost(usd_per_hour=3.0)),
    Offer("b", "small", "", cost=Cost(usd_per_hour=1.0)),
    Offer("a", "small", "", cost=Cost(usd_per_hour=2.0)),
)


def test_offers_come_in_the_order_of_their_places_then_by_price_unless_they_are_mixed() -> None:
    ordered = Plan("r", "b", ("a", "b"), ordered=True)
    assert in_order(ordered, [CHEAP, DEAR, FIRST]) == [FIRST, DEAR, CHEAP]
    assert in_order(Plan("r", "b", ("a", "b")), [DEAR, CHEAP, FIRST]) == [CHEAP, FIRST, DEAR]


MINE, CLOUD = Offer("mine", "host", capacity=2), Offer("cloud", "vm", cost=Cost(usd_per_hour=1.0))


def two_places(tasks: int = 40, offers: Sequence[Offer] = (MINE, CLOUD), **limits: Any) -> Run:
    run = Run(tasks, offers, places=("mine", "cloud"), ordered=True, **limits)
    run.turn()
    return run


def places_of(run: Run) -> Counter[str]:
    """The places of the machines that take, or will take, work."""
    live = (*run.state.coming, *run.state.ready)
    return Counter(run.state.machines[machine].offer.place for machine in live)


def changes(events: Sequence[Event]) -> list[tuple[str, str]]:
    return [(event.place, event.phase) for event in events if isinstance(event, CircuitChanged)]


def break_all(run: Run) -> list[Event]:
    """Whatever runs now breaks, one after the other."""
    decided: list[Event] = []
    for attempt in [attempt.id for attempt in run.state.attempts.values() if attempt.outcome is None]:
        decided += run.breaks(attempt)
    return decided


def fail_until_left(run: Run) -> list[Event]:
    decided: list[Event] = []
    for _ in range(4):
        decided += break_all(run)
        if ("mine", "open") in changes(decided):
            return decided + break_all(run)
    raise AssertionError("the place was not left")


def test_the_first_place_is_filled_before_the_next_one_is_asked() -> None:
    run = two_places(workers=5)
    assert places_of(run) == {"mine": 2, "cloud": 3}


def test_a_dearer_place_comes_first_and_the_next_one_when_the_budget_does_not_pay_it() -> None:
    dear, cheap = (
        Offer("mine", "vm", cost=Cost(usd_per_hour=3600.0)),
        Offer("cloud", "vm", cost=Cost(usd_per_hour=0.36)),
    )
    assert places_of(two_places(offers=(dear, cheap), workers=2)) == {"mine": 2}
    assert places_of(two_places(offers=(dear, cheap), workers=2, budget_usd=0.01)) == {"cloud": 2}


def test_a_place_that_keeps_failing_is_left_and_its_tasks_move_on() -> None:
    run = two_places(workers=2)
    run.ready()
    decided = fail_until_left(run)
    assert places_of(run) == {"cloud": 2}
    opened = next(event for event in decided if isinstance(event, CircuitChanged) and event.phase == "open")
    assert "4 of the last 4 attempts and machines there failed; the last one, result" in opened.detail
    run.ready()
    assert run.state.running == 2
    assert not run.state.broken


def test_what_runs_at_a_place_that_is_left_may_end_and_its_score_counts() -> None:
    run = two_places(offers=(msgspec.structs.replace(MINE, capacity=6), CLOUD), workers=6)
    run.ready()
    for attempt in list(run.state.attempts)[:4]:
        run.breaks(attempt)
    assert run.state.circuits["mine"].phase == "open"
    assert places_of(run) == {"mine": 5, "cloud": 1}, "five still run something"
    for attempt in [a.id for a in run.state.attempts.values() if a.outcome is None]:
        run.score(attempt)
    assert places_of(run) == {"cloud": 6}
    assert run.state.scored == 5


def test_one_machine_is_tried_later_and_brings_the_place_back() -> None:
    run = two_places(workers=2)
    run.ready()
    fail_until_left(run)
    run.ready()
    assert places_of(run) == {"cloud": 2}
    run.wait(120.0)
    busy = next(a.id for a in run.state.attempts.values() if a.outcome is None)
    assert places_of(run) == {"cloud": 2}, "nobody is taken from work"
    run.score(busy)
    assert places_of(run) == {"cloud": 1, "mine": 1}, "much is left: one makes room for the probe"
    run.ready()
    probe = next(iter(run.state.circuits["mine"].machines))
    assert changes(run.score(next(iter(run.machine(probe).open)))) == []
    decided = run.score(next(iter(run.machine(probe).open)))
    assert changes(decided) == [("mine", "closed")]
    other = next(a.id for a in run.state.attempts.values() if a.outcome is None and a.machine != probe)
    run.score(other)
    assert places_of(run) == {"mine": 2}, "it has as many as it had"


def test_a_probe_that_fails_keeps_the_place_shut_for_longer() -> None:
    run = two_places(workers=2)
    run.ready()
    fail_until_left(run)
    first = run.state.circuits["mine"].until - run.now
    run.ready()
    run.wait(120.0)
    run.score(next(a.id for a in run.state.attempts.values() if a.outcome is None))
    decided = run.lose(next(iter(run.state.circuits["mine"].machines)), Cause.BOOT)
    assert changes(decided) == [("mine", "open")]
    assert run.state.circuits["mine"].until - run.now > first
    assert places_of(run) == {"cloud": 2}


def test_a_place_that_was_tried_a_thousand_times_is_tried_again() -> None:
    run = two_places(workers=2)
    run.ready()
    fail_until_left(run)
    run.ready()
    run.state.circuits["mine"].opened = 2000
    run.wait(120.0)
    run.score(next(a.id for a in run.state.attempts.values() if a.outcome is None))
    run.lose(next(iter(run.state.circuits["mine"].machines)), Cause.BOOT)
    pause_s = seconds_between(run.now, run.state.circuits["mine"].until)
    assert 0.5 * LONGEST_PAUSE_S < pause_s < 2.0 * LONGEST_PAUSE_S


def test_a_new_controller_knows_which_circuits_are_open() -> None:
    run = two_places(workers=2)
    run.ready()
    fail_until_left(run)
    again = RunState()
    for event in run.log:
        apply(again, run.now, decode(encode(event)))
    assert again.circuits["mine"].phase == "open"
    assert again.circuits["mine"].until == run.state.circuits["mine"].until


def test_a_refusal_for_good_leaves_the_place_at_once_with_what_it_said() -> None:
    run = two_places(workers=2)
    told = "no such image: waa:latests; write another one into `image`"
    machine = next(iter(run.state.coming))
    decided = run.tell(MachineCondemned(machine, told, Cause.PROVISIONING, scope="place", permanent=True))
    assert [(e.place, e.detail, e.permanent) for e in decided if isinstance(e, CircuitChanged)] == [
        ("mine", told, True)
    ]
    assert places_of(run) == {"cloud": 2}
    run.wait(100_000.0)
    assert run.state.circuits["mine"].probe is None


def test_what_a_whole_place_says_is_not_said_again_of_each_size() -> None:
    run = Run(3, [CLOUD], places=("cloud",), workers=1)
    run.turn()
    told = "no such image: waa:latests; write another one into `image`"
    run.tell(MachineCondemned(next(iter(run.state.coming)), told, Cause.PROVISIONING, scope="offer"))
    run.wait(60.0)
    (machine,) = run.state.coming
    decided = run.tell(MachineCondemned(machine, told, Cause.PROVISIONING, scope="place", permanent=True))
    assert [event.detail for event in decided if isinstance(event, StopRequested)] == [f"cloud/: {told}"]


def test_a_place_that_is_full_is_not_one_that_fails() -> None:
    run = two_places(workers=3)
    for machine in list(run.state.circuits["mine"].machines):
        run.tell(MachineCondemned(machine, "every host is taken", Cause.PROVISIONING, scope="offer"))
    assert run.state.circuits["mine"].phase == "closed"
    assert places_of(run) == {"cloud": 3}


def test_three_machines_that_fail_alike_at_the_first_place_do_not_end_the_run() -> None:
    run = two_places(workers=1)
    decided: list[Event] = []
    for _ in range(3):
        decided += run.lose(next(iter(run.state.coming)), Cause.SETUP, step="install")
    assert changes(decided)[-1] == ("mine", "open")
    assert places_of(run) == {"cloud": 1}
    for _ in range(3):
        run.lose(next(iter(run.state.coming)), Cause.SETUP, step="install")
    assert run.state.stop is not None, "it fails alike everywhere"
    assert "3 machines failed alike (setup install)" in run.state.stop.detail


def test_where_all_places_fail_alike_none_is_left_for_the_other() -> None:
    run = two_places(offers=(msgspec.structs.replace(MINE, capacity=None), CLOUD), workers=2, attempts=9)
    for place in ("mine", "cloud"):
        for _ in range(10):
            circuit = run.state.circuits.setdefault(place, Circuit())
            circuit.recent.append(bool(len(circuit.recent) % 2))
    run.ready()
    assert changes(break_all(run)) == []


def test_a_rising_rate_of_failures_drains_a_place_before_it_is_left() -> None:
    run = two_places(offers=(msgspec.structs.replace(MINE, capacity=8), CLOUD), workers=8)
    run.ready()
    for attempt in list(run.state.attempts)[:5]:
        run.score(attempt)
    broken = list(run.state.attempts)[5:8]
    decided = [event for attempt in broken for event in run.breaks(attempt)]
    assert changes(decided) == [("mine", "draining")]
    assert places_of(run)["mine"] == 8, "those that work stay"
    newest = list(run.state.attempts)[-1]
    run.breaks(newest)
    assert places_of(run) == {"mine": 7, "cloud": 1}, "one that breaks an attempt now goes"


@pytest.mark.parametrize(("attempts", "broken"), [(1, 4), (2, 0)])
def test_tasks_that_broke_for_good_only_at_a_place_that_is_left_are_tried_at_the_next_unless_once_is_all(
    attempts: int, broken: int
) -> None:
    run = two_places(4 // attempts, workers=2, attempts=attempts)
    run.ready()
    opened = list[Event]()
    for _ in range(4):
        opened += break_all(run)
        opened += run.wait(600.0)
    assert ("mine", "open") in changes(opened)
    assert run.state.broken == broken


def test_machines_are_replaced_up_to_a_limit() -> None:
    run = Run(4, (Offer("cloud", "vm"),), workers=1, same_failure_machines=10**6)
    run.turn()
    for _ in range(100):
        if run.state.stop is not None:
            break
        run.lose(next(iter(run.state.coming)), Cause.BOOT)
        run.wait(1.0)
    assert run.state.stop is not None
    assert len(run.state.machines) == 13
    assert "13 of its machines failed and 0 attempts worked there" in run.state.stop.detail


def test_a_place_where_nothing_is_ready_for_ten_minutes_is_left_after_one_machine() -> None:
    run = two_places(workers=1)
    run.now = after(run.now, 600.0)
    decided = run.lose(next(iter(run.state.coming)), Cause.BOOT)
    assert changes(decided) == [("mine", "open")]
    assert places_of(run) == {"cloud": 1}


def test_what_ran_where_is_told_of_the_whole_run_also_after_one_that_had_stopped_is_resumed() -> None:
    run = two_places(workers=2)
    run.ready()
    run.lose(next(iter(run.state.ready)), Cause.BOOT)
    fail_until_left(run)
    run.ready()
    run.score(next(a.id for a in run.state.attempts.values() if a.outcome is None))
    before = by_place(run.state, run.now)
    apply(run.state, run.now, RunEnded("stopped"))
    apply(run.state, run.now, RunResumed())
    after_it = by_place(run.state, run.now)
    counts = ("machines", "failed_machines", "attempts", "scored", "broken")
    assert [[use[key] for key in counts] for use in after_it] == [  # type: ignore[literal-required]
        [use[key] for key in counts]  # type: ignore[literal-required]
        for use in before
    ]
    mine, cloud = after_it
    assert (mine["failed_machines"], mine["scored"], cloud["scored"]) == (1, 0, 1)
    assert (mine["circuit"], mine["changes"][-1]["phase"]) == ("closed", "open"), "it is tried anew"
