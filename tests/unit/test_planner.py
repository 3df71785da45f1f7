"""What is believed of a run before it is started, and which way to run it is chosen."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean

import pytest

from evalfleet.api.experience import Experience, TaskTime, chances_of
from evalfleet.api.plan_table import out_of_reach
from evalfleet.api.planner import Outlook, chosen
from evalfleet.model import Limits, Offer, Plan, Task, TaskId
from evalfleet.sim.chances import Basis, Chances, SpotRecord
from evalfleet.sim.forecast import Forecast, Option, OptionDraws, Range, draw, forecasts

VM = Offer("cloud", "D4", usd_per_hour=0.2)
SPOT = Offer("cloud", "D4", usd_per_hour=0.05, spot=True)


def time(task: str, seconds: float, run: str = "r", model: str = "m", place: str = "cloud") -> TaskTime:
    return TaskTime(run, task, task.partition("_")[0], model, place, seconds)


def believed(
    experience: Experience, *tasks: Task, offer: Offer = VM, usual_s: Mapping[str, float] | None = None
) -> Chances:
    return chances_of(
        experience,
        tasks,
        [offer],
        model="m",
        model_range=None,
        usual_s=usual_s or {},
        machine_s={"cloud": (60.0, 120.0)},
    )


def task(name: str, weight_s: float | None = None) -> Task:
    return Task(TaskId(name), name.partition("_")[0], timeout_s=1000.0, weight_s=weight_s)


TIMES = [time("web_1", 100.0), time("web_2", 400.0), time("os_1", 50.0, model="other")]


@pytest.mark.parametrize(
    ("wanted", "basis", "seconds"),
    [
        (task("web_1"), "task", 100.0),
        (task("os_1"), "other model", 50.0),
        (task("web_9"), "domain", 200.0),
        (task("mail_1"), "benchmark", (100.0 * 400.0 * 50.0) ** (1 / 3)),
    ],
)
def test_the_nearest_earlier_attempts_tell(wanted: Task, basis: Basis, seconds: float) -> None:
    found = believed(Experience(1, TIMES), wanted)
    assert found.bases == {basis: 1}
    assert found.tasks[wanted.id][0] == pytest.approx(seconds)


def test_without_earlier_runs_the_benchmark_tells_and_else_the_time_limit() -> None:
    found = believed(Experience(), task("web_1", weight_s=70.0), task("web_2"))
    assert found.bases == {"default": 1, "guess": 1}
    assert found.tasks[TaskId("web_1")][0] == 70.0
    assert found.guessed == {"web_2"}
    drawn = [found.fate(seed).task_s(task("web_2"), VM) for seed in range(200)]
    assert max(drawn) == 1000.0, "no attempt takes longer than its limit"
    assert min(drawn) < 100.0


def test_a_benchmark_says_what_its_domains_usually_take() -> None:
    usual_s = {"web": 70.0, "": 5000.0}
    found = believed(Experience(), task("web_1"), task("os_1"), usual_s=usual_s)
    assert found.bases == {"default": 2}
    assert [found.tasks[TaskId(name)][0] for name in ("web_1", "os_1")] == [70.0, 1000.0], (
        "its limit, at most"
    )
    found = believed(Experience(1, TIMES), task("web_1"), usual_s=usual_s)
    assert found.bases == {"task": 1}, "earlier runs know better"


def test_runs_that_differ_as_wholes_make_the_range_wide() -> None:
    names = [f"web_{n}" for n in range(20)]
    alike = [time(name, 100.0, run) for run in ("a", "b", "c", "d") for name in names]
    unlike = [time(each.task, each.seconds * factor, each.run) for each, factor in factored(alike)]
    narrow, wide = (believed(Experience(4, times), task("web_1")) for times in (alike, unlike))
    assert wide.shared > 1.5 * narrow.shared
    assert believed(Experience(4, unlike), task("web_1"), offer=Offer("lab", "host")).shared > wide.shared


def factored(times: list[TaskTime]) -> list[tuple[TaskTime, float]]:
    return [(each, {"a": 0.6, "b": 0.8, "c": 1.2, "d": 1.6}[each.run]) for each in times]


def test_machines_take_what_those_of_their_size_took_else_what_is_guessed() -> None:
    known = Experience(1, TIMES, machines={("cloud", "D4"): [[300.0]], ("cloud", "D8"): [[900.0]]})
    assert believed(known, task("web_1")).machines[VM.key] == [[300.0]]
    guessed = believed(Experience(1, TIMES), task("web_1"))
    assert not guessed.known_machines
    assert (guessed.machines[VM.key][0], guessed.machines[VM.key][-1]) == ([60.0], [120.0])


def test_machines_of_a_drawn_run_took_what_those_of_one_earlier_run_took() -> None:
    machines = {("cloud", "D4"): [[60.0, 62.0], [300.0, 310.0]]}
    known = believed(Experience(2, TIMES, machines=machines), task("web_1"))
    drawn = [{fate.machine_s(VM) for _ in range(20)} for fate in map(known.fate, range(20))]
    assert all(times in ({60.0, 62.0}, {300.0, 310.0}) for times in drawn)
    assert len(set(map(frozenset, drawn))) == 2, "days differ"


def test_evictions_are_as_frequent_as_earlier_ones_of_the_offer_and_regular_machines_stay() -> None:
    def mean_h(offer: Offer, **records: SpotRecord) -> float:
        spot = {f"cloud//{size}/spot": record for size, record in records.items()}
        known = believed(Experience(1, TIMES, spot=spot), task("web_1"))
        return fmean(min(1e5, known.fate(seed).evicted_s(offer) / 3600) for seed in range(400))

    often, never = SpotRecord(200.0, 200), SpotRecord(2000.0, 0)
    assert mean_h(SPOT, D4=often) == pytest.approx(1.0, rel=0.25)
    assert mean_h(SPOT, D4=never) > 100 * mean_h(SPOT, D4=often)
    unknown = Offer("cloud", "D16", usd_per_hour=0.1, spot=True)
    assert mean_h(unknown, D4=often) < 3.0, "what is known of others counts until it is known itself"
    assert mean_h(SPOT, D4=never, D8=often) > 20 * mean_h(SPOT, D4=often, D8=never)
    assert believed(Experience(1, TIMES), task("web_1")).fate(0).evicted_s(VM) == math.inf


def test_models_cost_what_attempts_did_else_what_the_benchmark_says_else_nobody_knows() -> None:
    told = believed(Experience(1, TIMES, model_usd={"m": [0.1] * 5, "other": [9.0] * 9}), task("web_1"))
    assert told.fate(0).models_usd(10) == pytest.approx(1.0, rel=0.5)
    few = believed(Experience(1, TIMES, model_usd={"m": [0.1] * 4}), task("web_1"))
    assert few.fate(0).models_usd(10) is None


def test_models_cost_the_same_in_each_way_to_run_it() -> None:
    told = believed(Experience(1, TIMES, model_usd={"m": [0.01, 0.1, 1.0, 3.0, 9.0]}), task("web_1"))
    one, other = told.fate(7), told.fate(7)
    for _ in range(5):
        other.task_s(task("web_1"), VM)
    assert one.models_usd(20) == other.models_usd(20)
    assert one.models_usd(20) != told.fate(8).models_usd(20)


def forecast(workers: int, minutes: float, usd: float, spread: float = 1.1) -> Forecast:
    seconds = Range(60 * minutes / spread, 60 * minutes, 60 * minutes * spread)
    money = Range(usd / spread, usd, usd * spread)
    return Forecast(Option(workers, (VM,)), seconds, money, None, money, 0.0, 0.0)


WAYS = (forecast(1, 100, 1.0), forecast(5, 25, 1.5), forecast(10, 15, 2.0), forecast(20, 15, 3.0))


def workers(deadline_min: float | None, budget_usd: float | None) -> int | None:
    found = chosen(WAYS, None if deadline_min is None else 60 * deadline_min, budget_usd)
    return None if found is None else found.option.workers


def test_the_cheapest_in_time_and_the_quickest_for_the_money_are_chosen() -> None:
    assert workers(deadline_min=60, budget_usd=None) == 5
    assert workers(deadline_min=20, budget_usd=None) == 10
    assert workers(deadline_min=26, budget_usd=None) == 10, "25 minutes may well be 27.5"
    assert workers(deadline_min=None, budget_usd=1.8) == 5
    assert workers(deadline_min=None, budget_usd=100.0) == 10, "the dearer of two that are as quick"
    assert workers(deadline_min=60, budget_usd=1.2) is None
    outlook = Outlook(WAYS, believed(Experience(), task("web_1")))
    assert "no way is done in 5m00s: the quickest is 10 workers" in out_of_reach(outlook, 300.0, None)
    assert "no way costs $0.50 at most: the cheapest is 1 worker " in out_of_reach(outlook, None, 0.5)
    assert "both promises" in out_of_reach(outlook, 3600.0, 1.2)


def test_more_workers_are_quicker_and_what_is_neither_quicker_nor_cheaper_is_not_best() -> None:
    every = tuple(task(f"web_{n}") for n in range(20))
    known = believed(Experience(1, [time(each.id, 100.0) for each in every]), *every)
    dear = Offer("cloud", "D8", usd_per_hour=0.4)
    known = replace(known, machines={key: [[60.0]] for key in (VM.key, dear.key)})
    options = [Option(1, (VM,)), Option(10, (VM,)), Option(10, (dear,))]
    plans = [Plan("p", "b", ("cloud",), limits=Limits(each.workers), home="x") for each in options]
    found = forecasts(
        [OptionDraws(plan, every, option, known) for plan, option in zip(plans, options, strict=True)], 20
    )
    one, ten, dearer = found
    assert one.seconds.low > ten.seconds.middle
    assert one.seconds.middle > 4 * ten.seconds.middle
    assert ten.seconds.low < ten.seconds.middle < ten.seconds.high
    assert [each.best for each in found] == [True, True, False]
    assert dearer.usd.middle == pytest.approx(2 * ten.usd.middle, rel=0.01)


def test_nine_of_ten_runs_that_go_as_earlier_ones_did_are_within_the_range() -> None:
    """Whole runs differ by a fifth, tasks by a third: five earlier runs tell how much the sixth may take."""
    rng, inside, trials = random.Random(7), 0, 25
    every = tuple(task(f"web_{n}") for n in range(16))
    plan, option = Plan("p", "b", ("cloud",), limits=Limits(4), home="x"), Option(4, (VM,))
    for _ in range(trials):
        middles = {each.id: rng.lognormvariate(5.0, 0.6) for each in every}

        def seconds(middles: dict[TaskId, float] = middles) -> dict[TaskId, float]:
            pace = rng.lognormvariate(0.0, 0.2)
            return {name: min(1000.0, s * pace * rng.lognormvariate(0.0, 0.3)) for name, s in middles.items()}

        earlier = [time(name, took, str(run)) for run in range(5) for name, took in seconds().items()]
        known = replace(believed(Experience(5, earlier), *every), machines={VM.key: [[60.0]]})
        (expected,) = forecasts([OptionDraws(plan, every, option, known)], 25)
        truth = replace(known, tasks={name: (s, 0.0) for name, s in seconds().items()}, shared=0.0)
        took = draw(OptionDraws(plan, every, option, truth), 0).seconds
        inside += expected.seconds.low <= took <= expected.seconds.high
    assert inside >= 0.8 * trials
    assert inside < trials, "a range that holds whatever comes says nothing"


def test_earlier_prices_count_for_spot_machines() -> None:
    known = believed(Experience(), task("web_1", 100.0), offer=SPOT)
    lived = replace(known, spot={SPOT.key: SpotRecord(10_000.0, 10, (0.04, 0.05, 0.06))})
    factors = {round(lived.fate(seed).price_factor(SPOT), 2) for seed in range(50)}
    assert factors == {0.8, 1.0, 1.2}
    assert lived.fate(1).price_factor(VM) == 1.0
