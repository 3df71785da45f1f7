"""What Azure's meters say against the budget, the time limit and the journal: also if nobody comes back."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evalfleet.places.azure.prices import ADDRESS, AzurePriceBook, disk
from evalfleet.places.azure.sizes import size_of
from evalfleet.places.azure.template import LEAST_LIFE_S
from evalfleet.views.stats import machines_usd
from lab import Lab
from standins.azure import StandIn
from standins.cloud.hosts import Hosts
from tests.cloud.conftest import FAST
from tests.cloud.desk import AzureDesk
from tests.cloud.places import SIZE
from tests.waiting import PATIENCE_S, until

CANNOT = Lab.missing()
pytestmark = pytest.mark.skipif(CANNOT is not None, reason=f"NO TEST OF REAL HOSTS: {CANNOT}")
BOOK = AzurePriceBook(None)
REGION = "eastus"


@pytest.fixture(scope="module")
def cloud() -> Iterator[StandIn]:
    with StandIn(Hosts(), timing=FAST) as made:
        yield made


@pytest.fixture
def azure(cloud: StandIn) -> Iterator[StandIn]:
    """Each test leaves it empty, and finds the meters at nothing."""
    cloud.do(cloud.meters.spans.clear)
    yield cloud
    assert not cloud.left()
    assert not cloud.meters.running()


def metered_usd(azure: StandIn) -> float:
    """What Azure would bill for all that the meters have counted, at the list's prices."""
    size, now = size_of(SIZE), azure.clock.now()
    assert size is not None
    machine = BOOK.machine(size, REGION, spot=False)
    assert machine is not None
    usd_per_hour = {
        "vm": machine.usd,
        "disk": BOOK.extra(disk("Premium_LRS", 128), REGION).usd,
        "address": BOOK.extra(ADDRESS, REGION).usd,
    }
    spans = azure.do(lambda: list(azure.meters.spans))
    return sum(span.seconds(now) * usd_per_hour[span.kind] / 3600 for span in spans)


def made_desk(azure: StandIn, folder: Path, seconds: float, **more: Any) -> AzureDesk:
    """Four tasks that take so long; commands run beside the machines."""
    desk = AzureDesk(azure, folder, inside=True, regions=[REGION], **more)
    desk.bench(4, seconds, timeout_s=600.0)
    return desk


def test_the_journal_accounts_for_all_that_the_meters_count(azure: StandIn, tmp_path: Path) -> None:
    desk = made_desk(azure, tmp_path, seconds=0.5)
    assert "(prices of 2026-08)" in desk.start_run("--workers", "2", "--budget", "1", "--yes").finish(0)
    counted = machines_usd(desk.state(), desk.state().last_at)
    assert 0 < metered_usd(azure) <= counted <= 1.0
    assert json.loads(desk.say("show", "r", "--json"))["cost"]["machines_usd"] == pytest.approx(
        counted, abs=1e-6
    )


def test_a_budget_that_cannot_hold_spends_nothing(azure: StandIn, tmp_path: Path) -> None:
    """Azure needs half an hour to stop a machine by itself: what does not pay that pays no machine."""
    desk = made_desk(azure, tmp_path, seconds=0.5)
    said = desk.start_run("--budget", "0.10", "--yes").finish(3)
    assert "the budget of $0.1 does not pay another machine for the 40 minutes" in said
    assert metered_usd(azure) == 0.0


def test_the_time_limit_holds_on_the_meters(azure: StandIn, tmp_path: Path) -> None:
    desk = made_desk(azure, tmp_path, seconds=300, teardown_s=8)
    limit_s = 24.0
    desk.start_run("--workers", "2", "--max-duration", f"{limit_s:g}s", "--yes").finish(3)
    spans = azure.do(lambda: list(azure.meters.spans))
    started = desk.state().started_at / 1e6
    ahead = azure.clock.now() - time.time()
    assert {span.kind for span in spans} == {"vm", "disk", "address"}
    assert max((span.end or 0.0) - ahead for span in spans) <= started + limit_s


@pytest.mark.slow
def test_the_budget_holds_on_the_meters_when_the_controller_is_killed(azure: StandIn, tmp_path: Path) -> None:
    """Nobody comes back until an hour after their expiry, for which the budget pays disks and addresses.

    The only test here that moves the stand-in's clock: afterwards it is not the controllers' any more.
    """
    budget = 0.5
    desk = made_desk(azure, tmp_path, seconds=300)
    run = desk.start_run("--workers", "9", "--budget", f"{budget:g}", "--yes")
    try:
        until(lambda: desk.state().running >= 2, "two machines at work")
        state = desk.state()
    finally:
        run.kill()
    assert 2 <= len(state.machines) < 9, "no more than the budget pays for as long as Azure needs"
    assert state.spend.machines.reserved + state.spend.machines.spent <= budget + 1e-9
    now = time.time()
    assert all(
        machine.ends_at / 1e6 - now >= LEAST_LIFE_S - PATIENCE_S for machine in state.machines.values()
    )
    last_s = max(machine.ends_at for machine in state.machines.values()) / 1e6 - now
    azure.jump(last_s)
    assert not [span for span in azure.meters.running() if span.kind == "vm"], "Azure has stopped them itself"
    azure.jump(3600.0)
    assert {span.kind for span in azure.meters.running()} == {"disk", "address"}, "these go on, as docs say"
    assert metered_usd(azure) <= budget
    desk.say("cancel", "r")
    assert not azure.meters.running(), "cancel cleans up, disks and addresses too"
    assert metered_usd(azure) <= budget
