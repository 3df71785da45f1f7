"""A run's cost includes the seconds for which a service bills nodes after their machines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from standins.azure_ml import Processes, StandIn
from tests.cloud import ml_places
from tests.cloud.mail_desk import nothing_left
from tests.cloud.services import desk

CANNOT = Processes.missing()
pytestmark = pytest.mark.skipif(CANNOT is not None, reason=f"NO TEST OF AZURE ML'S JOBS: {CANNOT}")
USD_A_SECOND = 0.01
LONG_S = 15.0


@pytest.fixture
def ml() -> Iterator[StandIn]:
    with StandIn(Processes(), ml_timing=ml_places.FAST) as made:
        yield made


def test_a_node_that_waits_for_the_next_machine_until_the_run_is_over_is_in_its_cost(
    ml: StandIn, tmp_path: Path
) -> None:
    """One machine is let go when nothing is left for it, while the other one has much to do."""
    at = desk(ml, tmp_path, 2)
    with (tmp_path / "evalfleet.toml").open("a") as settings:
        settings.write(f"[places.p.prices]\n{ml_places.SIZE} = {USD_A_SECOND * 3600}\n")
    score = 'echo \'{"score": 1}\' >"$EVALFLEET_OUT/result.json"'
    (tmp_path / "run.sh").write_text(f"if mkdir {tmp_path}/begun; then sleep {LONG_S}; fi\n{score}\n")
    done = at("run", "b.toml", "--on", "p", "--workers", "2", "--name", "r", "--canary", "0")
    assert done.code == 0, done
    nothing_left(ml)
    billed_s = ml.meters.seconds("vm", ml.clock.now())
    told = at.results("r")
    counted_s = told["cost"]["machines_usd"] / USD_A_SECOND
    assert billed_s - 6 < counted_s, "an upper bound of what Azure bills"
