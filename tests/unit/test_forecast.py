"""What a run would take and cost, from what earlier ones took."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from statistics import fmean
from typing import Any

import pytest
from msgspec import structs

from evalfleet.api.survey import Outlook
from evalfleet.cli.plan_table import out_of_reach
from evalfleet.model import Cost, Lifetime, Limits, Needs, Offer, Plan, Task, TaskId
from evalfleet.planning.forecast import (
    Basis,
    Chances,
    Expected,
    Forecast,
    Option,
    Range,
    Way,
    chances_of,
    chosen,
    draw,
    estimate,
    forecasts,
    machines_of,
)
from evalfleet.planning.past import EarlierMachine, EarlierRun, EarlierTask, Past

VM = Offer("cloud", "D4", cost=Cost(usd_per_hour=0.36))
SPOT = Offer("cloud", "D4", spot=True, cost=Cost(usd_per_hour=0.05))
NOON = datetime(2026, 11, 15, 12, tzinfo=UTC)


def task(name: str, weight_s: float | None = None, **fields: Any) -> Task:
    fields = {"timeout_s": 1000.0, **fields}
    return Task(TaskId(name), name.partition("_")[0], weight_s=weight_s, **fields)


def ran(
    seconds: Mapping[str, float], machines: Sequence[EarlierMachine] = (), model: str = "m"
) -> EarlierRun:
    """A run in which these tasks took so long."""
    tasks = [
        EarlierTask(name, name, name.partition("_")[0], model, "scored", 1.0, took)
        for name, took in seconds.items()
    ]
    return EarlierRun("b", tuple(tasks), "r", model, tuple(machines))


def machine(ready_s: float, size: str = "D4", **fields: Any) -> EarlierMachine:
    return EarlierMachine(
        "cloud", size, requested_at=NOON, ready_at=NOON + timedelta(seconds=ready_s), **fields
    )


def believed(
    past: Past, *tasks: Task, offer: Offer = VM, usual_s: Mapping[str, float] | None = None
) -> Chances:
    plan = Plan("p", "b", ("cloud",), model="m", usual_s=usual_s or {})
    return chances_of(past, plan, tasks, [offer], {"cloud": (60.0, 120.0)})


PAST = Past([ran({"web_1": 100.0, "web_2": 400.0}), ran({"os_1": 50.0}, model="other")])


@pytest.mark.parametrize(
    ("wanted", "basis", "seconds"),
    [
        (task("web_1"), "task", 100.0),
        (task("os_1"), "other model", 50.0),
        (task("web_9"), "domain", 200.0),
        (task("mail_1"), "benchmark", (100.0 * 400.0 * 50.0) ** (1 / 3)),
    ],
)
def test_the_nearest_earlier_attempts_count(wanted: Task, basis: Basis, seconds: float) -> None:
    chances = believed(PAST, wanted)
    assert chances.bases == {basis: 1}
    assert chances.tasks[wanted.id].seconds == pytest.approx(seconds)


def test_the_time_that_a_machine_was_taken_counts_and_not_the_tasks_own() -> None:
    earlier = EarlierTask("web_1", status="answered", duration_seconds=100.0, machine_seconds=160.0)
    past = Past([EarlierRun("b", (earlier, EarlierTask("web_2", duration_seconds=9.0, status="broken")))])
    assert past.durations() == {"web_1": 160.0}


def test_without_earlier_runs_the_benchmark_tells_and_else_the_time_limit() -> None:
    one, two = task("web_1", weight_s=70.0), task("web_2")
    chances = believed(Past(), one, two)
    assert chances.bases == {"default": 1, "guess": 1}
    assert chances.tasks[one.id].seconds == 70.0
    plan, option = Plan("p", "b", ("cloud",)), Option(1, (VM,))
    chances = replace(chances, machines={VM.key: [[0.0]]})
    drawn = [draw(Way(plan, [two], option, chances), seed).seconds for seed in range(200)]
    assert 900.0 < max(drawn) <= 1000.0, "no attempt takes longer than its limit"
    assert min(drawn) < 100.0


def test_a_benchmark_says_what_its_domains_usually_take() -> None:
    usual_s = {"web": 70.0, "": 5000.0}
    chances = believed(Past(), task("web_1"), task("os_1"), usual_s=usual_s)
    assert chances.bases == {"default": 2}
    expected = [chances.tasks[TaskId(name)].seconds for name in ("web_1", "os_1")]
    assert expected == [70.0, 1000.0], "its limit, at most"
    assert believed(PAST, task("web_1"), usual_s=usual_s).bases == {"task": 1}, "earlier runs know better"


def test_runs_that_differ_as_wholes_make_the_range_wide() -> None:
    names = [f"web_{n}" for n in range(20)]
    alike = Past([ran(dict.fromkeys(names, 100.0)) for _ in range(4)])
    unlike = Past([ran(dict.fromkeys(names, 100.0 * pace)) for pace in (0.4, 0.8, 1.2, 2.4)])
    narrow, wide = (believed(past, task("web_1")).shared for past in (alike, unlike))
    assert wide > 1.5 * narrow


def test_machines_take_what_those_of_their_size_took_else_what_is_guessed() -> None:
    earlier = [
        machine(300.0),
        machine(900.0, "D8"),
        machine(5.0, "pool"),
        machine(7.0, mended_by=("restart",)),
    ]
    chances = believed(Past([ran({"web_1": 100.0}, earlier)]), task("web_1"))
    assert chances.machines[VM.key] == [[300.0]]
    other = Offer("cloud", "D2")
    chances = believed(Past([ran({}, earlier)]), task("web_1"), offer=other)
    assert chances.machines[other.key] == [[300.0, 900.0]], "those of the place"
    guessed = believed(PAST, task("web_1"))
    assert not guessed.known_machines
    assert (guessed.machines[VM.key][0], guessed.machines[VM.key][-1]) == ([60.0], [120.0])


def test_spot_machines_are_taken_back_as_often_as_in_earlier_runs() -> None:
    def rate(hours: float, evicted: int) -> float:
        spot = [EarlierMachine("cloud", "D4", spot=True, uptime_seconds=3600 * hours)]
        spot += [EarlierMachine("cloud", "D4", spot=True, cause="evicted")] * evicted
        return believed(Past([ran({}, spot)]), task("web_1")).evictions_an_hour

    assert rate(0.0, 0) == 1 / 20
    assert rate(200.0, 200) == pytest.approx(1.0, rel=0.1)
    assert rate(2000.0, 0) < 0.001


def test_models_cost_what_attempts_did_else_what_the_benchmark_says_else_it_is_unknown() -> None:
    def past(count: int) -> Past:
        tasks = [EarlierTask(f"t{n}", attempts=2, model_usd=0.2) for n in range(count)]
        return Past([EarlierRun("b", tuple(tasks), model="m")])

    tasks = [task(f"web_{n}", 100.0) for n in range(10)]
    plan, option = Plan("p", "b", ("cloud",)), Option(1, (VM,))
    drawn = draw(Way(plan, tasks, option, believed(past(5), *tasks)), 0)
    assert drawn.models_usd == pytest.approx(1.0, rel=0.5)
    assert draw(Way(plan, tasks, option, believed(past(4), *tasks)), 0).models_usd is None
    told = replace(believed(past(4), *tasks), model_range=(0.5, 0.6))
    assert 5.0 <= (draw(Way(plan, tasks, option, told), 0).models_usd or 0) <= 6.0


# -- drawn runs ---------------------------------------------------------------------------------------------


def steady(
    tasks: Sequence[Task], offers: Sequence[Offer], seconds: float = 600.0, boot_s: float = 60.0
) -> Chances:
    """Nothing by chance."""
    return Chances(
        {each.id: Expected(seconds, 0.0, "task") for each in tasks},
        0.0,
        {offer.key: [[boot_s]] for offer in offers},
        1e-12,
        0.0,
    )


def many(count: int, **fields: Any) -> list[Task]:
    return [task(f"t_{n:02}", timeout_s=100_000.0, **fields) for n in range(count)]


def plan_of(workers: int = 1, schedule: Any = "dynamic", slots: int = 1, **limits: Any) -> Plan:
    bounds = Limits(workers, **limits)
    return Plan("p", "b", ("cloud",), limits=bounds, schedule=schedule, slots=slots)


def test_tasks_over_workers_and_a_boot_at_the_price_of_each_machine() -> None:
    tasks = many(10)
    drawn = draw(Way(plan_of(4), tasks, Option(4, (VM,)), steady(tasks, [VM])), 0)
    assert drawn.done
    assert drawn.seconds == 60 + 3 * 600
    assert drawn.machines_usd == pytest.approx(0.36 * (2 * 1860 + 2 * 1260) / 3600)
    slots = draw(Way(plan_of(2, slots=2), tasks, Option(2, (VM,)), steady(tasks, [VM])), 0)
    assert slots.seconds == 60 + 3 * 600


def test_the_first_tasks_run_on_one_machine_where_the_plan_says_so() -> None:
    tasks = many(3)
    drawn = draw(Way(plan_of(3, canary=1), tasks, Option(3, (VM,)), steady(tasks, [VM])), 0)
    assert drawn.seconds == 660 + 660, "the second machine takes the third task before the first one does"


@pytest.mark.parametrize(
    ("schedule", "seconds"), [("dynamic", 1000.0), ("slices", 1300.0), ("round-robin", 1100.0)]
)
def test_each_machine_takes_tasks_in_the_order_of_the_schedule(schedule: str, seconds: float) -> None:
    durations = [1000.0, 300.0, 100.0, 100.0]
    tasks = [task(f"t_{n}", took, timeout_s=100_000.0) for n, took in enumerate(durations)]
    chances = steady(tasks, [VM], boot_s=0.0)
    known = {each.id: Expected(each.weight_s or 0.0, 0.0, "task") for each in tasks}
    way = Way(plan_of(2, schedule), tasks, Option(2, (VM,)), replace(chances, tasks=known))
    assert draw(way, 0).seconds == seconds


def test_a_place_that_makes_few_machines_a_minute_makes_the_others_wait() -> None:
    tasks, slow = many(30), structs.replace(VM, creates_a_minute=3)
    at_once, waiting = (
        draw(Way(plan_of(30), tasks, Option(30, (offer,)), steady(tasks, [offer])), 0) for offer in (VM, slow)
    )
    assert at_once.seconds == 660
    assert waiting.seconds == 9 * 60 + 660, "the last of 30 is asked for in the tenth minute"


def test_a_machine_is_billed_in_steps_and_for_the_least_time_of_its_place() -> None:
    tasks = many(1)
    dollar = Offer("cloud", "D4", cost=Cost(usd_per_hour=3600.0))
    minute = structs.replace(dollar, cost=structs.replace(dollar.cost, least_billed_s=60.0))
    hourly = structs.replace(dollar, cost=structs.replace(dollar.cost, billing_step_s=3600.0))
    costs = [
        draw(Way(plan_of(), tasks, Option(1, (offer,)), steady(tasks, [offer], 5.0, 10.0)), 0).machines_usd
        for offer in (dollar, minute, hourly)
    ]
    assert costs == pytest.approx([15.0, 60.0, 3600.0])


def test_machines_of_a_queue_come_later_and_wait_for_nothing() -> None:
    job = Offer("service", "job", cost=Cost(usd_per_hour=0.36), life=Lifetime(queues=True, queue_s=300.0))
    tasks = many(5)
    drawn = [
        draw(Way(plan_of(5), tasks, Option(5, (job,)), steady(tasks, [job])), seed) for seed in range(50)
    ]
    assert fmean(each.seconds for each in drawn) > 1000
    most = 5 * 0.36 * 661 / 3600
    assert all(0.9 * most < each.machines_usd <= most for each in drawn), "the wait is not billed"


def test_what_is_evicted_or_breaks_is_run_again_and_paid() -> None:
    tasks, option = many(40), Option(5, (SPOT, VM))
    calm = steady(tasks, [SPOT, VM])
    lossy = replace(calm, evictions_an_hour=3.0, breaks=0.1)
    quiet, rough = (draw(Way(plan_of(5), tasks, option, chances), 1) for chances in (calm, lossy))
    assert (quiet.evictions, quiet.done) == (0, True)
    assert rough.evictions > 0
    assert rough.seconds > quiet.seconds
    assert rough.machines_usd > quiet.machines_usd
    hopeless = draw(Way(plan_of(5), tasks, option, replace(calm, breaks=0.95)), 1)
    assert not hopeless.done


def test_tasks_with_needs_of_their_own_run_on_machines_that_meet_them() -> None:
    gpu = Needs(gpus=1)
    large = Offer("cloud", "NC6", has=gpu, cost=Cost(usd_per_hour=3.6))
    tasks = [*many(3), task("gpu_1", needs=gpu, timeout_s=100_000.0)]
    plan = plan_of(2)
    assert machines_of((VM, large), plan, tasks, 2) == [large, VM]
    drawn = draw(Way(plan, tasks, Option(2, (VM, large)), steady(tasks, [VM, large])), 0)
    assert drawn.done
    assert not draw(Way(plan, tasks, Option(2, (VM,)), steady(tasks, [VM])), 0).done
    joined = structs.replace(plan, schedule="slices")
    assert machines_of((VM,), joined, tasks, 2) == [VM, VM], "all machines do for all tasks"


def test_the_estimate_is_tasks_over_workers() -> None:
    tasks = [task(f"t_{n}", 60.0) for n in range(12)]
    expected = estimate(plan_of(3), tasks, [VM] * 3, steady(tasks, [VM], boot_s=300.0))
    assert (expected.at_once, expected.task_s, expected.machine_s) == (3, 60.0, 300.0)
    assert expected.duration_s == 12 / 3 * 60 + 300
    assert expected.machine_hours == pytest.approx(0.45)
    assert expected.usd == pytest.approx(0.45 * 0.36)


# -- ways ---------------------------------------------------------------------------------------------------


def forecast(workers: int, minutes: float, usd: float, spread: float = 1.1) -> Forecast:
    seconds = Range(60 * minutes / spread, 60 * minutes, 60 * minutes * spread)
    money = Range(usd / spread, usd, usd * spread)
    return Forecast(Option(workers, (VM,)), seconds, money, None, money, 0.0, 0.0)


WAYS = (forecast(1, 100, 1.0), forecast(5, 25, 1.5), forecast(10, 15, 2.0), forecast(20, 15, 3.0))


def workers(deadline_min: float | None, budget_usd: float | None) -> int | None:
    best = chosen(WAYS, None if deadline_min is None else 60 * deadline_min, budget_usd)
    return None if best is None else best.option.workers


def test_the_cheapest_in_time_and_the_quickest_for_the_money_are_chosen() -> None:
    assert workers(deadline_min=60, budget_usd=None) == 5
    assert workers(deadline_min=20, budget_usd=None) == 10
    assert workers(deadline_min=26, budget_usd=None) == 10, "25 minutes may well be 27.5"
    assert workers(deadline_min=None, budget_usd=1.8) == 5
    assert workers(deadline_min=None, budget_usd=100.0) == 10, "the dearer of two that are as quick"
    assert workers(deadline_min=60, budget_usd=1.2) is None
    outlook = Outlook(WAYS, believed(Past(), task("web_1")))
    assert "no way is done in 5m00s: the quickest is 10 workers" in out_of_reach(outlook, 300.0, None)
    assert "no way costs $0.50 at most: the cheapest is 1 worker " in out_of_reach(outlook, None, 0.5)
    assert "both promises" in out_of_reach(outlook, 3600.0, 1.2)


def test_more_workers_are_quicker_and_what_is_neither_quicker_nor_cheaper_is_not_best() -> None:
    every = tuple(task(f"web_{n}") for n in range(20))
    dear = Offer("cloud", "D8", cost=Cost(usd_per_hour=0.72))
    chances = believed(Past([ran({each.id: 100.0 for each in every})]), *every)
    chances = replace(chances, machines={key: [[60.0]] for key in (VM.key, dear.key)})
    options = [Option(1, (VM,)), Option(10, (VM,)), Option(10, (dear,))]
    one, ten, dearer = forecasts([Way(plan_of(each.workers), every, each, chances) for each in options], 20)
    assert one.seconds.low > ten.seconds.middle
    assert one.seconds.middle > 4 * ten.seconds.middle
    assert ten.seconds.low < ten.seconds.middle < ten.seconds.high
    assert [each.best for each in (one, ten, dearer)] == [True, True, False]
    assert dearer.usd.middle == pytest.approx(2 * ten.usd.middle, rel=0.01)


def test_nine_of_ten_runs_that_go_as_earlier_ones_did_are_within_the_range() -> None:
    """Whole runs differ by a fifth, tasks by a third: five earlier runs show how much the sixth may take."""
    rng, inside, trials = random.Random(7), 0, 50
    every = tuple(task(f"web_{n}") for n in range(16))
    plan, option = plan_of(4), Option(4, (VM,))
    for _ in range(trials):
        middles = {each.id: rng.lognormvariate(5.0, 0.6) for each in every}

        def seconds(middles: Mapping[TaskId, float] = middles) -> dict[str, float]:
            pace = rng.lognormvariate(0.0, 0.2)
            return {name: min(1000.0, s * pace * rng.lognormvariate(0.0, 0.3)) for name, s in middles.items()}

        past = Past([ran(seconds()) for _ in range(5)])
        chances = replace(believed(past, *every), machines={VM.key: [[60.0]]})
        (expected,) = forecasts([Way(plan, every, option, chances)], 40)
        truth = {TaskId(name): Expected(s, 0.0, "task") for name, s in seconds().items()}
        took = draw(Way(plan, every, option, replace(chances, tasks=truth, shared=0.0)), 0).seconds
        inside += expected.seconds.low <= took <= expected.seconds.high
    assert inside >= 0.8 * trials
    assert inside < trials, "a range that holds whatever comes says nothing"
