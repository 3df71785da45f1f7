"""Runs compared task by task: the statistics against scipy and statsmodels, and what is said of them.

What takes long to import is imported where it is used: every worker collects all tests, and runs a few.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from evalfleet.views.compare import (
    MANY,
    Corners,
    mcnemar,
    paired_means,
    paired_rates,
)


def corners(both: int, first: int, second: int, neither: int) -> Corners:
    return {"both_pass": both, "first_only": first, "second_only": second, "neither": neither}


@pytest.mark.parametrize(("first", "second"), [(0, 0), (0, 1), (3, 3), (1, 9), (12, 30), (400, 460)])
def test_mcnemar_is_that_of_statsmodels(first: int, second: int) -> None:
    from statsmodels.stats.contingency_tables import mcnemar as their_mcnemar

    theirs: Any = their_mcnemar([[50, first], [second, 40]], exact=True)
    assert mcnemar(first, second) == pytest.approx(theirs.pvalue, abs=1e-12)


@pytest.mark.parametrize("cells", [(10, 0, 0, 5), (40, 3, 9, 60), (1, 0, 2, 1), (300, 70, 45, 900)])
def test_the_interval_of_rates_is_that_of_half_a_task_more_in_each_corner(cells: tuple[int, ...]) -> None:
    found = paired_rates(corners(*cells))
    import numpy as np
    from statsmodels.stats.weightstats import DescrStatsW

    adjusted = np.array(cells) + 0.5
    theirs: Any = DescrStatsW(np.array([0.0, -1.0, 1.0, 0.0]), weights=adjusted)
    # theirs divides by one less than the number of tasks, which is for samples from their own variance
    half = 1.959964 * theirs.std_mean * np.sqrt((adjusted.sum() - 1) / adjusted.sum())
    assert found["mean"] == pytest.approx((cells[2] - cells[1]) / sum(cells), abs=1e-6)
    assert found["ci"] == pytest.approx([theirs.mean - half, theirs.mean + half], abs=1e-5)


def test_the_interval_of_rates_holds_the_truth_as_often_as_it_says() -> None:
    rng, held = random.Random(1), 0
    for _ in range(2000):
        drawn = rng.choices(range(4), (0.4, 0.08, 0.18, 0.34), k=40)
        ci = paired_rates(corners(*(drawn.count(corner) for corner in range(4))))["ci"]
        assert ci is not None
        held += ci[0] <= 0.1 <= ci[1]
    assert 0.935 < held / 2000 < 0.975


def test_the_interval_of_scores_is_that_of_scipys_bootstrap() -> None:
    import numpy as np
    from scipy.stats import bootstrap

    rng = random.Random(2)
    differences = [rng.choice((0.0, 0.0, 0.25, 0.5, -0.25)) for _ in range(120)]
    found = paired_means(differences)
    theirs = bootstrap(
        (differences,), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(3)
    ).confidence_interval
    assert found["ci"] == pytest.approx([theirs.low, theirs.high], abs=0.004)
    assert found == paired_means(differences), "the same runs compare alike, every time"


@pytest.mark.parametrize("value", [0.0, 1.0, -0.2])
def test_repeats_that_never_differ_leave_as_much_doubt_as_so_many_tasks(value: float) -> None:
    found = paired_means([value] * 8)
    assert found["ci"] is not None
    assert found["ci"][0] < found["mean"] <= found["ci"][1]
    assert found["ci"][1] - found["ci"][0] > 0.3
    assert paired_means([0.0] * 8) == paired_rates(corners(5, 0, 0, 3))


def test_many_tasks_get_the_normal_interval_which_is_the_same() -> None:
    rng = random.Random(4)
    few = [rng.choice((0.0, 1.0, -1.0)) for _ in range(MANY)]
    found, normal = paired_means(few), paired_means([*few, 0.0])
    assert (found["method"], normal["method"]) == ("paired bootstrap over tasks", "paired, normal")
    assert found["ci"] == pytest.approx(normal["ci"], abs=0.005)
    assert paired_means([1.0])["ci"] is None
