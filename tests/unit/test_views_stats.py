"""Rates, intervals and estimates."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from evalfleet.model import SECOND, Broken, Cause, Cost, Offer, ScheduleName, Scored, Task, TaskId
from evalfleet.schedules import orders
from evalfleet.views import stats
from evalfleet.views.frame import FrameSize, as_text, frame
from evalfleet.views.stats import clustered, mean_interval, pass_at, wilson
from sim.scenario import draw
from sim.simulate import simulate
from tests.unit.runs import Run
from tests.unit.views_feed import Feed


@pytest.mark.parametrize(
    ("succeeded", "scored", "low", "high"),
    [
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (61, 150, 0.331, 0.487),
        (1, 1, 0.2065, 1.0),
        (5, 10, 0.2366, 0.7634),
    ],
)
def test_wilson_gives_the_known_values(succeeded: int, scored: int, low: float, high: float) -> None:
    assert stats.wilson(succeeded, scored) == pytest.approx((low, high), abs=5e-4)


def test_nothing_scored_has_no_rate() -> None:
    assert stats.wilson(0, 0) is None
    assert stats.rate(0, 0) is None


@given(st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_interval_holds_the_rate(pair: tuple[int, int]) -> None:
    ends = stats.wilson(*pair)
    assert ends is not None
    assert 0.0 <= ends[0] <= pair[0] / pair[1] <= ends[1] <= 1.0


def test_percentiles_lie_between_neighbours() -> None:
    assert stats.percentile([], 0.5) is None
    assert stats.percentile([4.0, 1.0, 2.0, 3.0], 0.5) == 2.5
    assert stats.percentile([1.0, 2.0], 1.0) == 2.0


@given(st.integers(0, 300), st.integers(1, 40), st.sampled_from(("round-robin", "slices")))
def test_a_lanes_share_is_what_the_schedule_gives_it(total: int, lanes: int, schedule: ScheduleName) -> None:
    tasks = [Task(TaskId(f"t{index}")) for index in range(total)]
    assert [stats.lane_share(schedule, lane, total, lanes) for lane in range(lanes)] == [
        len(order) for order in orders(schedule, tasks, lanes)
    ]


def test_what_is_broken_does_not_lower_the_rate() -> None:
    feed = Feed(tasks=4, machines=1)
    feed.attempt("t_0", Scored(1.0, True))
    feed.attempt("t_1", Scored(0.25))
    feed.attempt("t_2", Broken(Cause.RESULT))
    whole = stats.tally(feed.state.tasks.values())
    assert (whole.total, whole.scored, whole.success_rate, whole.mean_score) == (4, 2, 0.5, 0.625)


def test_the_eta_is_the_work_left_shared_by_the_machines() -> None:
    feed = Feed(tasks=100, machines=5)
    assert stats.eta_s(feed.state, feed.now) is None
    for n in range(10):
        feed.attempt(f"t_{n}", Scored(1.0, True), seconds=60.0)
    assert stats.eta_s(feed.state, feed.now) == pytest.approx(90 * 60 / 5)


def test_the_pace_is_that_of_late_also_when_there_were_many() -> None:
    feed = Feed(tasks=1500, machines=1)
    for n in range(500):
        feed.attempt(f"t_{n}", Scored(1.0, True), seconds=10.0)
    for n in range(500, 1000):
        feed.attempt(f"t_{n}", Scored(1.0, True), seconds=60.0)
    assert stats.per_minute(feed.state, feed.now) == pytest.approx(1.0, rel=0.05)


def test_a_machine_costs_until_its_expiry_at_most() -> None:
    feed = Feed(tasks=1, machines=1, usd_per_hour=3.6)
    machine = next(iter(feed.state.machines.values()))
    later = machine.expires_at + 3600 * SECOND
    assert stats.machines_usd(feed.state, later) == stats.machines_usd(feed.state, machine.expires_at)


@pytest.mark.parametrize("seed", range(25))
def test_what_is_counted_cheaply_is_what_counting_gives(seed: int) -> None:
    state = simulate(draw(seed)).state
    begun = sum(1 for known in state.tasks.values() if known.attempts)
    assert stats.retries(state) == len(state.attempts) - begun
    whole = stats.tally(state.tasks.values())
    assert (whole.scored, whole.succeeded) == (state.scored, state.succeeded)
    each = sum(stats.machine_usd(machine, state.last_at) for machine in state.machines.values())
    assert stats.machines_usd(state, state.last_at) == pytest.approx(each)
    left = stats.eta_s(state, state.last_at)
    assert left is None or left >= 0


def test_repeats_that_agree_tell_no_more_than_their_tasks() -> None:
    """Ten tasks, ten repeats each, each task always alike: as if each had been run once."""
    assert clustered([(10, 10)] * 4 + [(0, 10)] * 6) == pytest.approx(wilson(4, 10))
    assert clustered([(10, 10)] * 10) == pytest.approx(wilson(10, 10))


def test_repeats_that_scatter_like_coins_tell_as_much_as_so_many_tasks() -> None:
    assert clustered([(5, 10)] * 10) == pytest.approx(wilson(50, 100))
    assert clustered([(1, 1), (0, 1), (1, 1)]) == wilson(2, 3)
    assert clustered([(3, 4)]) == wilson(3, 4)
    assert clustered([]) is None
    assert clustered([(0, 0), (0, 0)]) is None


@given(st.lists(st.integers(1, 6).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), min_size=2))
def test_an_interval_of_repeats_is_between_that_of_tasks_and_that_of_results(
    clusters: list[tuple[int, int]],
) -> None:
    found = clustered(clusters)
    assert found is not None
    total, good = sum(n for _, n in clusters), sum(n for n, _ in clusters)
    share, count = good / total, len(clusters)
    least, most = wilson(good, total), wilson(share * count, count)
    assert least is not None
    assert most is not None
    width = found[1] - found[0]
    assert least[1] - least[0] - 1e-9 <= width <= most[1] - most[0] + 1e-9
    assert found[0] - 1e-9 <= share <= found[1] + 1e-9


def test_pass_at_k_is_the_share_of_draws_with_a_success() -> None:
    for tries, good, k in itertools.product(range(1, 6), range(6), range(1, 6)):
        if good <= tries and k <= tries:
            draws = list(itertools.combinations([True] * good + [False] * (tries - good), k))
            assert pass_at(k, good, tries) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_a_mean_over_tasks_has_an_interval_from_their_scatter() -> None:
    assert mean_interval([0.5], 4) is None
    assert mean_interval([1.0] * 5, 10) == wilson(5, 5)
    for repeats in ([6, 0, 3, 2], [3, 3, 3], [0, 6, 0, 6], [5, 6, 6, 6], [0, 0]):
        shares = [good / 6 for good in repeats]
        found = mean_interval(shares, 6 * len(repeats))
        assert found == pytest.approx(clustered([(good, 6) for good in repeats])), "pass@1 is the pass rate"


def limited(time_limit_s: float | None = None, budget_usd: float | None = None) -> Feed:
    """90 of 100 tasks of a minute are left for 5 machines, which takes 18 minutes and $0.09."""
    feed = Feed(tasks=100, machines=5, usd_per_hour=0.06)
    feed.state.limits = structs.replace(feed.state.limits, max_duration_s=time_limit_s, budget_usd=budget_usd)
    for n in range(10):
        feed.attempt(f"t_{n}", Scored(1.0, True), seconds=55.0 + n)
    return feed


def test_a_run_says_when_its_limits_will_not_do() -> None:
    def told(**limits: float) -> list[str]:
        feed = limited(**limits)
        return stats.at_risk(feed.state, feed.now)

    assert told(time_limit_s=3600.0) == told(budget_usd=1.0) == []
    (late,) = told(time_limit_s=900.0)
    assert late.startswith("the run will not be done in time: it needs about 17m")
    (dear,) = told(budget_usd=0.1)
    assert dear == "the budget will not do: about $0.14 are needed, and the budget is $0.10"
    (near,) = told(budget_usd=0.138)
    assert near.startswith("the budget may not do")


def test_a_run_says_when_it_will_miss_its_deadline() -> None:
    feed = limited()
    feed.state.limits = structs.replace(feed.state.limits, deadline_s=900.0)
    (late,) = stats.at_risk(feed.state, feed.now)
    assert late.startswith("the run will not be done by its deadline: it needs about 17m")


def test_the_live_view_says_so_too() -> None:
    feed = limited(time_limit_s=900.0)
    text = as_text(frame(feed.state, feed.now, FrameSize(100, 30)))
    assert "at risk          the run will not be done in time" in text


def test_a_month_of_stopped_machines_costs_their_disks_and_addresses() -> None:
    run = Run(2, [Offer("cloud", "D4", cost=Cost(usd_per_hour=0.2, idle_usd_per_hour=0.03))], workers=2)
    run.turn()
    assert stats.stopped_monthly_usd(run.state) == pytest.approx(2 * 0.03 * 730)
