"""Whether a run was as promised: one rule, however the figures are shown."""

from __future__ import annotations

import pytest

from evalfleet.api.plan_review import held, review_document, review_table
from evalfleet.model import Offer, Promise

from .runs import Run

VM = Offer("cloud", "D4", usd_per_hour=3.6, billing_step_s=1.0)


def took(seconds: float) -> Run:
    """A run of one task that ends so many seconds after its start."""
    run = Run(1, [VM], workers=1)
    run.turn()
    run.ready()
    run.wait(seconds)
    run.score(next(iter(run.open())))
    return run


@pytest.mark.parametrize(
    ("seconds", "inside"),
    [
        (59.9996, True),  # 60.000 to the millisecond
        (59.9994, False),
        (60.0, True),
        (61.25, True),
        (61.2504, True),
        (61.2506, False),  # the table shows 61 s for both
    ],
)
def test_a_time_is_inside_to_the_millisecond_and_a_program_can_tell_so_itself(
    seconds: float, inside: bool
) -> None:
    reviewed = held(took(seconds).state, Promise((60.00004, 60.5, 61.24996), (0.0, 0.06, 1.0), 3))
    assert reviewed.in_time_range is inside
    (row,) = review_document([reviewed])["runs"]
    assert row["inside"] is inside
    assert (row["seconds"]["low"] <= row["took_seconds"] <= row["seconds"]["high"]) is inside
    assert ("outside" in review_table([reviewed])) is not inside


def test_a_cost_is_inside_to_the_millionth_of_a_dollar() -> None:
    run = took(60.0)
    (machine,) = run.state.machines
    run.gone(machine)
    cost = held(run.state, Promise((0.0, 1.0, 100.0), (0.0, 0.0, 1.0), 3)).cost_usd
    assert cost > 0
    exact = held(run.state, Promise((0.0, 1.0, 100.0), (cost + 4e-7, cost, cost), 3))
    assert exact.in_cost_range, "the promise is rounded as what came is"
    dearer = held(run.state, Promise((0.0, 1.0, 100.0), (0.0, 0.0, cost - 1e-6), 3))
    assert not dearer.in_cost_range
