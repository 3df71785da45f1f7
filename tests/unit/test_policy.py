"""Policy as data in, data out: what is decided when."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec import structs

from evalfleet.events import (
    AttemptEnded,
    MachineCondemned,
    MachineSilent,
    RunEnded,
    StopRequested,
)
from evalfleet.model import (
    CAUSES,
    AttemptId,
    Broken,
    Cause,
    Cost,
    MachineId,
    Offer,
    ScheduleName,
    Task,
    TaskId,
    after,
    seconds_between,
)
from evalfleet.policy import decide, next_deadline
from evalfleet.state.attempts import retry_delay_s

from .runs import FREE, PRICED, Run, condemned, of, requested, started, tasks_of

CHEAP = Offer("cloud", "D4", cost=Cost(usd_per_hour=36.0))
"""A cent a second."""
M1, M2, M3 = (MachineId(f"r-h-{n}") for n in (1, 2, 3))


# -- how many machines ---------------------------------------------------------------------------


def test_as_many_machines_as_workers_or_as_there_is_work_for() -> None:
    assert len(requested(Run(10, workers=3).turn())) == 3
    assert len(requested(Run(2, workers=8).turn())) == 2
    assert len(requested(Run(5, workers=8, slots=2).turn())) == 3


def test_the_first_machine_proves_that_it_works_before_more_are_asked_for() -> None:
    run = Run(9, workers=4, canary=1)
    assert [m.machine for m in requested(run.turn())] == [M1]
    run.ready()
    assert len(requested(run.score("t0.0"))) == 3


def test_a_canary_that_breaks_is_tried_again_before_more_machines_are_made() -> None:
    run = Run(9, workers=4, canary=1)
    run.turn()
    run.ready()
    for _ in range(2):
        told = run.breaks(_only_running(run))
        assert requested(told) == []
    assert len(requested(run.score(_only_running(run), 0.0))) == 3


def test_a_canary_that_breaks_three_times_stops_the_run_and_says_why() -> None:
    run = Run(9, workers=4, canary=1)
    run.turn()
    run.ready()
    run.breaks(_only_running(run), Cause.READINESS)
    run.breaks(_only_running(run), Cause.EVICTED)
    run.breaks(_only_running(run), Cause.READINESS)
    told = run.breaks(_only_running(run), Cause.MODEL)
    (stop,) = [event for event in told if isinstance(event, StopRequested)]
    assert stop == StopRequested(
        "refused", "the first 3 attempts broke and none scored, the last one by model: "
    )


def _only_running(run: Run) -> str:
    (attempt,) = [each.id for each in run.state.attempts.values() if each.outcome is None]
    return attempt


def test_no_more_machines_of_an_offer_than_it_has() -> None:
    scarce, other = Offer("a", "x", capacity=2), Offer("b", "x", cost=Cost(usd_per_hour=1.0))
    offers = [m.offer for m in requested(Run(9, (scarce, other), workers=4).turn())]
    assert offers == [scarce, scarce, other, other]


def test_an_offer_that_refuses_us_is_left_alone_for_a_while() -> None:
    first, second = Offer("a", "x"), Offer("b", "x", cost=Cost(usd_per_hour=1.0))
    run = Run(9, (first, second), workers=1)
    run.turn()
    (again,) = requested(run.lose(M1, Cause.PROVISIONING))
    assert again.offer == second
    run.lose(M2, Cause.PROVISIONING)
    assert 11.25 <= seconds_between(run.now, next_deadline(run.state, run.now) or 0) <= 18.75
    (third,) = requested(run.wait(18.75))
    assert third.offer == first


def test_a_refusal_of_the_whole_place_blocks_all_its_offers() -> None:
    run = Run(3, (Offer("a", "x"), Offer("a", "y"), Offer("b", "x")), workers=1)
    run.turn()
    refusal = MachineCondemned(M1, "no quota", Cause.PROVISIONING, scope="place", permanent=True)
    (again,) = requested(run.tell(refusal))
    assert again.offer.place == "b"


def test_a_refusal_of_a_region_is_one_of_all_its_zones() -> None:
    zones = [Offer("a", "x", f"r-{n}", area="r") for n in (1, 2)]
    elsewhere = Offer("a", "x", "s", cost=Cost(usd_per_hour=1.0))
    run = Run(3, (*zones, elsewhere), workers=1)
    run.turn()
    refusal = MachineCondemned(M1, "no quota", Cause.PROVISIONING, scope="region", permanent=True)
    assert [m.offer for m in requested(run.tell(refusal))] == [elsewhere]


def test_a_refusal_of_a_family_is_one_of_its_sizes_there() -> None:
    here = [Offer("a", size, "r", family=family) for size, family in (("x", "f"), ("y", "f"), ("z", "g"))]
    run = Run(3, here, workers=1)
    run.turn()
    refusal = MachineCondemned(M1, "no quota", Cause.PROVISIONING, scope="family", permanent=True)
    assert [m.offer for m in requested(run.tell(refusal))] == [here[2]]


def test_what_was_refused_for_good_stays_so_when_earlier_machines_come_up() -> None:
    """Two were asked for at once, and one got the last there was."""
    full, other = Offer("a", "x"), Offer("b", "x", cost=Cost(usd_per_hour=1.0))
    run = Run(9, (full, other), workers=2)
    run.turn()
    run.tell(MachineCondemned(M2, "full", Cause.PROVISIONING, scope="offer", permanent=True))
    run.ready(M1)
    run.lose(M1)
    assert {m.offer for m in run.state.machines.values() if m.phase == "requested"} == {other}


def test_a_success_lifts_what_was_refused_before_it_was_asked_for() -> None:
    run = Run(9, (Offer("a", "x", "r"),), workers=1)
    run.turn()
    for n in (1, 2):
        busy = MachineCondemned(MachineId(f"r-h-{n}"), "busy", Cause.PROVISIONING, scope="place")
        run.tell(busy)
        run.wait(60.0)
    assert run.state.blocks["a/"].failures == 2
    run.ready(M3)
    assert not run.state.blocks


def test_pauses_after_refusals_double_and_differ_from_run_to_run() -> None:
    """Whoever is refused for now together does not come back together."""

    def pauses_s(name: str) -> list[float]:
        run = Run(9, (Offer("a", "x"),), workers=1, offer_tries=100, same_failure_machines=100)
        run.state.plan = structs.replace(run.state.plan, run=name)
        run.turn()
        found = list[float]()
        for _ in range(8):
            (machine,) = run.state.coming
            run.tell(MachineCondemned(machine, "throttled", Cause.PROVISIONING, scope="offer"))
            found.append(seconds_between(run.now, run.state.blocks["a//x"].until))
            run.wait(found[-1] + 1.0)
        return found

    one, other = pauses_s("one"), pauses_s("other")
    assert all(mine != theirs for mine, theirs in zip(one, other, strict=True))
    for pause_s, usual_s in zip(one, (15, 30, 60, 120, 240, 480, 600, 600), strict=True):
        assert 0.75 * usual_s <= pause_s <= 1.25 * usual_s


def test_machines_refused_at_once_are_one_refusal() -> None:
    run = Run(9, workers=3)
    run.turn()
    busy = [MachineCondemned(m, "busy", Cause.PROVISIONING, scope="place") for m in (M1, M2, M3)]
    run.tell(*busy)
    assert 11.25 <= seconds_between(run.now, next_deadline(run.state, run.now) or 0) <= 18.75
    assert len(requested(run.wait(18.75))) == 3


def test_an_offer_that_only_ever_refuses_for_now_is_given_up_after_three_times() -> None:
    run = Run(9, workers=1)
    run.turn()
    for n in (1, 2, 3):
        assert run.state.stop is None
        run.tell(MachineCondemned(MachineId(f"r-h-{n}"), "no capacity", Cause.PROVISIONING, scope="offer"))
        run.wait(300.0)
    assert run.stop.reason == "refused"
    assert [refusal.tries for refusal in run.state.refusals.values()] == [3]


@pytest.mark.parametrize("capacity", [None, 50])
def test_an_outage_of_a_whole_place_at_the_start_is_waited_for(capacity: int | None) -> None:
    """But not for ever, however many machines it has in better times."""
    run = Run(9, (Offer("a", "x", capacity=capacity),), workers=1)
    run.turn()
    begun, n = run.now, 0
    while run.state.stop is None:
        n += 1
        run.tell(MachineCondemned(MachineId(f"r-h-{n}"), "503", Cause.PROVISIONING, scope="place"))
        run.wait(750.0)
    assert run.now > after(begun, 3 * 3600.0)
    assert run.stop.reason == "refused"


def test_what_others_have_borrowed_is_waited_for() -> None:
    run = Run(9, (Offer("a", "host", capacity=1),), workers=1)
    run.turn()
    for n in range(1, 8):
        run.tell(MachineCondemned(MachineId(f"r-h-{n}"), "taken", Cause.PROVISIONING))
        run.wait(751.0)
    assert run.state.stop is None


def test_the_run_stops_when_every_offer_is_refused_for_good() -> None:
    run = Run(3, workers=1)
    run.turn()
    run.tell(MachineCondemned(M1, "bad image", Cause.PROVISIONING, permanent=True))
    assert run.stop.reason == "refused"
    assert "bad image" in run.stop.detail


def test_set_up_that_would_fail_on_any_machine_asks_for_no_more_and_those_that_work_go_on() -> None:
    run = Run(3, workers=3)
    run.turn()
    run.ready(M1)
    for machine in (M2, M3):
        failed = MachineCondemned(machine, "expired", Cause.SETUP, "image", scope="place", permanent=True)
        assert requested(run.tell(failed)) == []
    assert run.state.stop is None
    run.score("t0.0")
    assert run.state.stop is None
    run.lose(M1)
    assert run.stop.reason == "refused"
    assert "expired" in run.stop.detail


def test_machines_that_cost_are_given_back_when_nothing_is_left_for_them() -> None:
    run = Run(2, (PRICED,), workers=2)
    run.turn()
    run.ready()
    assert condemned(run.score("t0.0")) == [M1]
    free = Run(2, workers=2)
    free.turn()
    free.ready()
    assert condemned(free.score("t0.0")) == [], "a machine that costs nothing stays for retries"


def test_a_machine_that_does_not_arrive_is_not_counted_on_when_the_others_have_left() -> None:
    run = Run(3, (PRICED,), workers=3)
    run.turn()
    run.ready(M1, M2)
    assert condemned(run.score("t0.0")) == [M3], "the last task runs on another"
    assert condemned(run.score("t2.0")) == [M1]
    (another,) = requested(run.lose(M2))
    run.ready(another.machine)
    run.wait(run.state.limits.retry_cap_s)
    assert run.machine(another.machine).open, "the task goes on there"


def weighed(count: int, seconds: float = 10.0) -> list[Task]:
    return [Task(TaskId(f"t{n}"), timeout_s=600.0, weight_s=seconds) for n in range(count)]


def test_no_machine_is_asked_for_that_would_be_ready_when_all_is_done() -> None:
    """A boot takes 100 s, a task 10 s: one machine does the last tasks before another would be there."""
    run = Run(weighed(6), (CHEAP,), workers=2)
    run.turn()
    run.wait(100)
    run.ready()
    run.score("t0.0")
    assert requested(run.lose("r-h-2")) == [], "four tasks wait, which take one machine 45 s"
    assert next_deadline(run.state, run.now) == after(run.now, 110.0)
    assert len(requested(run.wait(110))) == 1, "the other one takes much longer than it should"

    many = Run(weighed(60), (CHEAP,), workers=2)
    many.turn()
    many.wait(100)
    many.ready()
    assert len(requested(many.lose("r-h-2"))) == 1, "59 tasks take one machine ten minutes"

    free = Run(weighed(6), (FREE,), workers=2)
    free.turn()
    free.wait(100)
    free.ready()
    assert len(requested(free.lose("r-h-2"))) == 1, "what costs nothing may come in vain"


def test_as_few_machines_as_meet_the_deadline_and_more_once_it_is_in_danger() -> None:
    """100 tasks of 60 s are 6000 s of work, for which 0.85 of 3000 s, but for half a task, are three."""
    run = Run(weighed(100, 60.0), (CHEAP,), workers=50, auto=True, deadline_s=3000.0)
    assert len(requested(run.turn())) == 3
    run.wait(20)
    run.ready()
    assert requested(run.turn()) == []
    assert len(requested(run.wait(1500))) == 2, "nearly all is left to do in half of the time"
    unknown = Run(tasks_of(100), (CHEAP,), workers=50, auto=True, deadline_s=3000.0)
    assert len(requested(unknown.turn())) == 1, "until a task tells how long it takes"


def test_as_many_machines_as_the_budget_pays() -> None:
    """$100 are 8500 s within the margin: 6000 s of work, and 60 s that are lost on each machine."""
    run = Run(weighed(100, 60.0), (CHEAP,), workers=100, auto=True, budget_usd=100.0, lease_s=60.0)
    assert len(requested(run.turn())) == 41
    poor = Run(weighed(100, 60.0), (CHEAP,), workers=100, auto=True, budget_usd=50.0, lease_s=60.0)
    assert len(requested(poor.turn())) == 1, "it does not pay all of the work: no boot is wasted"


# -- which task goes where -----------------------------------------------------------------------


def test_file_order_without_weights() -> None:
    run = Run(3, workers=1)
    run.turn()
    assert started(run.ready()) == [("t0.0", M1)]
    assert started(run.score("t0.0")) == [("t1.0", M1)]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("dynamic", ["t2.0", "t3.0", "t0.0", "t1.0"]),
        ("longest-first", ["t2.0", "t3.0", "t0.0", "t1.0"]),
        ("fifo", ["t0.0", "t1.0", "t2.0", "t3.0"]),
    ],
)
def test_longest_first_with_weights_and_first_in_first_out_whatever_they_are(
    schedule: ScheduleName, expected: list[str]
) -> None:
    weights = (5.0, None, 50.0, 20.0)
    tasks = [Task(TaskId(f"t{i}"), weight_s=w) for i, w in enumerate(weights)]
    run = Run(tasks, workers=1, schedule=schedule)
    run.turn()
    order = [started(run.ready())[0][0]]
    while run.open():
        order += [attempt for attempt, _ in started(run.score(order[-1]))]
    assert order == expected


def test_a_slot_takes_one_attempt() -> None:
    run = Run(9, workers=2, slots=2)
    run.turn()
    run.ready()
    assert sorted(run.open().values()) == [M1, M1, M2, M2]


def test_a_retry_goes_to_another_machine_when_there_is_one() -> None:
    run = Run(3, workers=2)
    run.turn()
    run.ready()
    assert run.open() == {"t0.0": M1, "t1.0": M2}
    assert started(run.breaks("t0.0")) == [("t2.0", M1)], "M1 takes other work meanwhile"
    assert started(run.score("t1.0")) == [("t0.1", M2)]


def test_a_retry_stays_when_there_is_no_other_machine() -> None:
    run = Run(1, workers=1)
    run.turn()
    run.ready()
    assert started(run.breaks("t0.0")) == [("t0.1", M1)]


def test_later_retries_wait_longer() -> None:
    run = Run(1, workers=1, attempts=9)
    run.turn()
    run.ready()
    run.breaks("t0.0")
    assert run.breaks("t0.1") == []
    assert next_deadline(run.state, run.now) == after(run.now, 1.0)
    assert started(run.wait(1.0)) == [("t0.2", M1)]
    assert [retry_delay_s(run.state.limits, n) for n in (1, 2, 3, 4, 20)] == [0.0, 1.0, 2.0, 4.0, 60.0]


def test_round_robin_deals_tasks_out_and_slices_cuts_them() -> None:
    lanes: dict[str, list[int]] = {}
    for schedule in ("round-robin", "slices"):
        run = Run(6, workers=3, schedule=schedule)
        lanes[schedule] = [known.lane for known in run.state.tasks.values()]
    assert lanes == {"round-robin": [0, 1, 2, 0, 1, 2], "slices": [0, 0, 1, 1, 2, 2]}


def test_a_static_schedule_keeps_tasks_in_their_lane() -> None:
    run = Run(4, workers=2, schedule="slices")
    run.turn()
    run.ready()
    assert run.open() == {"t0.0": M1, "t2.0": M2}
    assert started(run.score("t2.0")) == [("t3.0", M2)]
    assert started(run.score("t3.0")) == [], "t1 is in the other lane"


def test_a_replacement_machine_takes_the_lane_that_has_tasks() -> None:
    run = Run(6, workers=2, schedule="round-robin")
    run.turn()
    run.ready()
    (replacement,) = requested(run.lose(M2))
    assert replacement.machine == M3
    assert {attempt for attempt, _ in started(run.ready(M3))} <= {"t1.1", "t3.0", "t5.0"}


def test_a_machine_that_has_done_its_lane_takes_one_that_nobody_has() -> None:
    run = Run(4, (Offer("a", "x", capacity=1, cost=Cost(usd_per_hour=1.0)),), workers=2, schedule="slices")
    run.turn()
    run.ready()
    run.score("t0.0")
    assert started(run.score("t1.0")) == [("t2.0", M1)], "there is no machine for the other lane"


# -- attempts ------------------------------------------------------------------------------------


def test_a_task_is_broken_after_its_allowed_attempts() -> None:
    run = Run(1, workers=1, attempts=2)
    run.turn()
    run.ready()
    run.breaks("t0.0")
    run.breaks("t0.1")
    assert run.task("t0").status == "broken"
    assert run.task("t0").outcome == Broken(Cause.RESULT)


AGAIN_AND_AGAIN = [
    cause
    for cause, traits in CAUSES.items()
    if traits.free and cause not in (Cause.CANCELLED, Cause.MACHINE_LOST)
]


ENDS = (Cause.CONNECTION, Cause.MACHINE_LOST)


def test_what_a_job_may_say_of_itself_is_never_free() -> None:
    assert not [cause for cause, traits in CAUSES.items() if traits.free and traits.declarable]


@pytest.mark.parametrize("cause", list(CAUSES))
def test_what_a_task_may_have_caused_uses_up_an_attempt_whatever_it_is_called(cause: Cause) -> None:
    run = Run(1, workers=1, attempts=1)
    run.turn()
    run.ready()
    run.tell(AttemptEnded(AttemptId("t0.0"), Broken(cause, counts=True)))
    assert run.task("t0").status == "broken"


def test_a_task_is_forgiven_the_loss_of_its_machine_once() -> None:
    run = Run(1, workers=1, attempts=1)
    run.turn()
    run.ready()
    run.breaks("t0.0", Cause.MACHINE_LOST)
    assert run.task("t0").status == "running"
    run.breaks("t0.1", Cause.MACHINE_LOST)
    assert run.task("t0").status == "broken"


@pytest.mark.parametrize("causes", [(c, d) for c in ENDS for d in ENDS])
def test_a_task_is_forgiven_once_whether_its_machine_is_lost_or_silent(causes: tuple[Cause, Cause]) -> None:
    """A task can end the machine below it, and can stop what answers there."""
    run = Run(1, workers=1, attempts=1)
    run.turn()
    run.ready()
    for cause, status in zip(causes, ("waiting", "broken"), strict=True):
        machine = MachineId(run.open().popitem()[1])
        run.tell(MachineSilent(machine, run.now))
        run.lose(machine, cause)
        assert run.task("t0").status == status
        run.gone(next(iter(run.state.undeleted)))
        run.ready()


@pytest.mark.parametrize("cause", AGAIN_AND_AGAIN)
def test_free_causes_use_no_attempt_up_but_there_is_a_ceiling(cause: Cause) -> None:
    run = Run(1, workers=1, attempts=2, attempts_ceiling=10)
    run.turn()
    run.ready()
    for n in range(10):
        assert run.task("t0").status == "running", n
        run.breaks(f"t0.{n}", cause)
        run.wait(60.0)
    known = run.task("t0")
    assert (known.status, known.used, known.tries) == ("broken", 0, 10)


def test_a_score_of_zero_is_never_retried() -> None:
    run = Run(1, workers=1)
    run.turn()
    run.ready()
    run.score("t0.0", 0.0)
    assert run.task("t0").status == "scored"
    assert not run.open()


# -- machines that fail --------------------------------------------------------------------------


def break_in_a_row(run: Run, machine: str, times: int) -> list[str]:
    """Whatever is on the machine breaks, again and again. Returns who is condemned."""
    out: list[str] = []
    for _ in range(times):
        attempt = next(a for a, m in run.open().items() if m == machine)
        out += condemned(run.breaks(attempt))
        run.wait(60.0)
    return out


def test_a_machine_is_condemned_only_while_others_score() -> None:
    run = Run(40, workers=2, attempts=9)
    run.turn()
    run.ready()
    assert break_in_a_row(run, M1, 4) == []
    other = next(a for a, m in run.open().items() if m == M2)
    assert condemned(run.score(other)) == [M1]


def test_what_runs_on_a_machine_that_is_condemned_for_earlier_attempts_is_not_charged() -> None:
    run = Run(40, workers=2, attempts=9)
    run.turn()
    run.ready()
    break_in_a_row(run, M1, 4)
    innocent = next(a for a, m in run.open().items() if m == M1)
    decided = run.score(next(a for a, m in run.open().items() if m == M2))
    (ended,) = of(AttemptEnded, decided)
    assert (ended.attempt, isinstance(ended.outcome, Broken) and ended.outcome.is_free) == (innocent, True)
    task = run.task(innocent.partition(".")[0])
    assert (task.used, task.tries) == (0, 0)


def test_a_model_that_fails_says_nothing_about_the_machine() -> None:
    run = Run(40, workers=2, attempts=9)
    run.turn()
    run.ready()
    for _ in range(5):
        run.breaks(next(a for a, m in run.open().items() if m == M1), Cause.MODEL)
        run.wait(60.0)
    assert condemned(run.score(next(a for a, m in run.open().items() if m == M2))) == []


def test_what_ran_on_a_lost_machine_is_broken_by_it_and_retried() -> None:
    run = Run(4, workers=2)
    run.turn()
    run.ready()
    decided = run.lose(M1, Cause.EVICTED)
    (ended,) = of(AttemptEnded, decided)
    assert (ended.attempt, ended.outcome) == ("t0.0", Broken(Cause.EVICTED, "told by the test"))
    assert len(requested(decided)) == 1
    assert run.task("t0").used == 0


def test_three_machines_that_fail_the_same_step_stop_the_run() -> None:
    run = Run(9, workers=1)
    run.turn()
    run.lose(M1, Cause.SETUP, "install")
    run.lose(M2, Cause.SETUP, "install")
    assert run.state.stop is None
    run.lose(M3, Cause.SETUP, "install")
    assert run.stop.reason == "refused"
    assert "install" in run.stop.detail


def test_other_steps_or_a_machine_that_comes_up_between_do_not() -> None:
    run = Run(9, workers=2)
    run.turn()
    for n, step in enumerate(("a", "b", "a", "b"), start=1):
        run.lose(f"r-h-{n}", Cause.SETUP, step)
    run.ready("r-h-5")
    run.lose("r-h-6", Cause.SETUP, "a")
    assert run.state.stop is None


def test_ten_first_attempts_broken_alike_with_none_scored_stop_the_run() -> None:
    run = Run(30, workers=1, attempts=1)
    run.turn()
    run.ready()
    for n in range(9):
        run.breaks(f"t{n}.0")
    assert run.state.stop is None
    run.breaks("t9.0")
    assert run.stop.reason == "refused"


@pytest.mark.parametrize(
    "but",
    [lambda run: run.score("t0.0"), lambda run: run.breaks("t0.0", Cause.MODEL)],
    ids=["score", "other"],
)
def test_one_score_or_another_cause_lets_it_go_on(but: Callable[[Run], object]) -> None:
    run = Run(30, workers=1, attempts=1)
    run.turn()
    run.ready()
    but(run)
    for n in range(1, 10):
        run.breaks(f"t{n}.0")
    assert run.state.stop is None


# -- how a run ends ------------------------------------------------------------------------------


def test_a_stop_lets_go_of_everything_at_once() -> None:
    run = Run(9, workers=2)
    run.turn()
    run.ready(M1)
    decided = run.tell(StopRequested("user"))
    assert sorted(condemned(decided)) == [M1, M2]
    assert [event.outcome for event in of(AttemptEnded, decided)] == [
        Broken(Cause.CANCELLED, "the run was stopped (user)")
    ]
    assert run.task("t0").status == "waiting"


def test_a_drain_lets_what_runs_end_by_itself() -> None:
    run = Run(9, workers=2)
    run.turn()
    run.ready(M1)
    decided = run.tell(StopRequested("user", drain=True))
    assert condemned(decided) == [M2], "what is not up yet, or idle, goes"
    assert run.open() == {"t0.0": M1}
    decided = run.score("t0.0")
    assert started(decided) == []
    assert condemned(decided) == [M1]


def test_a_stop_overrides_a_drain_but_not_the_other_way_round() -> None:
    run = Run(9, workers=1)
    run.turn()
    run.ready()
    run.tell(StopRequested("user", drain=True))
    assert condemned(run.tell(StopRequested("user"))) == [M1]
    run.tell(StopRequested("user", drain=True))
    assert not run.stop.drain


def test_the_run_ends_when_the_last_machine_is_gone() -> None:
    run = Run(1, workers=1)
    run.turn()
    run.ready()
    assert condemned(run.score("t0.0")) == [M1]
    assert run.turn() == []
    assert run.gone(M1) == [RunEnded("done")]
    assert decide(run.state, run.now, (FREE,)) == []


@pytest.mark.parametrize(
    ("stop", "status"), [(StopRequested("user"), "stopped"), (StopRequested("refused"), "failed")]
)
def test_how_a_stopped_run_ends(stop: StopRequested, status: str) -> None:
    run = Run(3, workers=1)
    run.turn()
    run.tell(stop)
    assert run.gone(M1) == [RunEnded(status)]  # type: ignore[arg-type]


def test_a_run_that_was_stopped_with_nothing_left_is_done() -> None:
    run = Run(1, workers=1)
    run.turn()
    run.ready()
    run.tell(StopRequested("user", drain=True))
    run.score("t0.0")
    assert run.gone(M1) == [RunEnded("done")]


def test_one_machine_that_breaks_all_in_a_moment_does_not_stop_the_others() -> None:
    run = Run(40, workers=3, machine_streak=99)
    run.turn()
    run.ready()
    first, second, third = (machine.id for machine in run.state.machines.values())
    for _ in range(12):
        (attempt,) = run.machine(first).open
        run.breaks(attempt)
    assert run.state.stop is None
    for machine in (second, third):
        (attempt,) = run.machine(machine).open
        run.breaks(attempt)
    assert run.stop.reason == "refused"
