"""What nodes cost that a service keeps, without work, after their machines: data in, data out."""

from __future__ import annotations

import pytest
from msgspec import structs

from evalfleet.events import MachineAllocated, MachineDeleted, MachineReady, MachineUp, NodeReleased, RunEnded
from evalfleet.model import Cause, after
from evalfleet.state import accepts
from evalfleet.views.results import machine_entry
from evalfleet.views.stats import hourly_usd, machines_usd

from .runs import Run, of, tasks_of
from .test_policy_queue import JOB, M1, M2, M3

KEPT = structs.replace(JOB, idle_usd_per_hour=3600.0, linger_s=100.0, sweep_s=100.0)
"""A dollar a second, with work or without; its node is kept for 100 s at most."""


def starts(run: Run, machine: str, node: str) -> None:
    known = run.machine(machine)
    run.tell(MachineAllocated(known.id, run.now, "start 1", node))
    run.tell(MachineUp(known.id), MachineReady(known.id))


def a_run_with_one_let_go(kept: bool = True) -> Run:
    """Two machines have cost $10 each; the first one is gone, and its node is idle, or gone, too."""
    run = Run(9, (KEPT,), workers=2, budget_usd=5000.0, lease_s=1000.0)
    run.turn()
    starts(run, M1, "node 1")
    starts(run, M2, "node 2")
    run.wait(10)
    run.lose(M1)
    run.tell(MachineDeleted(M1, run.now, keeps_node=kept))
    return run


def test_a_node_that_is_kept_costs_on_until_it_is_released() -> None:
    run = a_run_with_one_let_go()
    reserved = run.state.reserved_usd
    run.wait(30)
    assert run.machine(M1).open_usd(run.now) == pytest.approx(30.0)
    assert machines_usd(run.state, run.now) == pytest.approx(10.0 + 30.0 + 40.0)
    assert hourly_usd(run.state, run.now) == pytest.approx(2 * 3600.0)
    run.tell(NodeReleased(M1, run.now, "scaled down"))
    run.wait(500)
    assert run.machine(M1).closed_usd == pytest.approx(10.0 + 30.0)
    assert run.state.closed_usd == pytest.approx(40.0)
    assert reserved - run.state.reserved_usd == pytest.approx(100.0), "nothing more is kept back for it"
    entry = machine_entry(run.machine(M1), run.now)
    assert entry["node_idle_seconds"] == 30.0
    assert entry["cost_usd"] == pytest.approx(40.0)
    assert not accepts(run.state, NodeReleased(M1, run.now, "again")), "it is paid once"


def test_one_that_is_not_kept_costs_nothing_more() -> None:
    run = a_run_with_one_let_go(kept=False)
    run.wait(30)
    assert run.machine(M1).closed_usd == pytest.approx(10.0)
    assert run.machine(M1).open_usd(run.now) == 0.0
    assert not accepts(run.state, NodeReleased(M1, run.now, "never kept"))


def test_nobody_pays_for_longer_than_a_node_may_be_kept() -> None:
    run = a_run_with_one_let_go()
    run.wait(5000)
    assert run.machine(M1).open_usd(run.now) == pytest.approx(100.0)


@pytest.mark.parametrize("kept", [True, False], ids=["seen idle", "not seen"])
def test_no_second_is_paid_twice_when_the_next_machine_gets_the_node(kept: bool) -> None:
    """Nor is one left out where nobody has looked between the two."""
    run = a_run_with_one_let_go(kept)
    run.wait(20)
    starts(run, M3, "node 1")
    run.wait(50)
    assert run.machine(M1).closed_usd == pytest.approx(10.0 + 20.0)
    assert run.machine(M3).open_usd(run.now) == pytest.approx(50.0)
    assert machines_usd(run.state, run.now) == pytest.approx(30.0 + 80.0 + 50.0), "node 1 80 s, node 2 80 s"
    assert not run.state.lingering


def test_a_node_that_has_its_next_machine_before_the_first_one_is_known_to_be_gone_is_paid_once() -> None:
    run = Run(9, (KEPT,), workers=2, lease_s=1000.0)
    run.turn()
    starts(run, M1, "node 1")
    run.wait(10)
    run.lose(M1)
    gone_at = run.now
    run.wait(15)
    starts(run, M3, "node 1")
    run.wait(5)
    run.tell(MachineDeleted(M1, gone_at, keeps_node=True))
    assert run.machine(M1).closed_usd == pytest.approx(10.0 + 15.0)
    assert not run.state.lingering


def test_what_is_kept_when_the_run_ends_is_counted_as_long_as_it_may_be() -> None:
    run = Run(1, (KEPT,), workers=1, lease_s=1000.0)
    run.turn()
    starts(run, M1, "node 1")
    run.wait(10)
    run.score("t0.0")
    decided = run.tell(MachineDeleted(M1, run.now, keeps_node=True))
    (released,) = of(NodeReleased, decided)
    assert released.released_at == after(run.now, 100.0)
    assert of(RunEnded, decided)
    assert run.state.closed_usd == pytest.approx(10.0 + 100.0)
    assert run.state.reserved_usd == 0.0


def test_the_money_for_it_is_kept_back_and_a_budget_is_used_up_only_when_the_node_is_gone() -> None:
    """$100 of work and $100 for the node's end; $10 of it are spent, and the node is idle for $20 more."""
    fixed = structs.replace(KEPT, extendable=False, boot_s=0.0)
    run = Run(tasks_of(9, timeout_s=50.0), (fixed,), workers=1, budget_usd=230.0, lease_s=100.0, grace_s=0.0)
    run.turn()
    starts(run, M1, "node 1")
    run.wait(10)
    run.lose(M1, Cause.STUCK)
    run.tell(MachineDeleted(M1, run.now, keeps_node=True))
    assert run.state.reserved_usd == pytest.approx(100.0)
    assert len(run.state.machines) == 1, "the node may cost what another machine would need"
    assert run.state.stop is None, "but it may go sooner"
    run.wait(20)
    run.tell(NodeReleased(M1, run.now, "scaled down"))
    assert len(run.state.machines) == 2, "now another one is paid"
    assert run.state.closed_usd + run.state.reserved_usd <= 230.0
