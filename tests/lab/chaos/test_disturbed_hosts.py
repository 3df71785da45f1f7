"""Hosts that go on after what is done to them: no attempt may be lost, unless it must."""

from __future__ import annotations

import pytest

from evalfleet.model import Cause, Scored
from lab import LabError
from tests.lab.clients import needs_lab
from tests.waiting import slowness

from .arena import Arena, names
from .invariants import violations
from .workload import KILL_SUPERVISOR

pytestmark = needs_lab


def test_sshd_restart(arena: Arena) -> None:
    """Connections are dropped; attempts go on, and their end is heard over new ones."""
    victims = arena.choose(6)
    arena.run()
    arena.some_time()
    arena.hold(victims)
    for host in victims:
        host.restart_sshd(drop_sessions=True)
    arena.release(victims)
    arena.finish()
    assert arena.broken() == []
    assert violations(arena) == []


def test_supervisor_killed(arena: Arena) -> None:
    """The next connection starts another one, which adopts the attempt."""
    victims = arena.choose(6)
    arena.run()
    arena.some_time()
    held = arena.hold(victims)
    for host in victims:
        host.run(KILL_SUPERVISOR)
    arena.release(victims)
    arena.finish()
    assert arena.broken() == []
    assert all(isinstance(arena.state.attempts[attempt].outcome, Scored) for attempt in held.values())
    assert violations(arena) == []


def test_host_reboot(arena: Arena) -> None:
    """The disk stays and the attempt is gone: it is told as lost, and the host works on."""
    victims = arena.choose(4)
    arena.run()
    arena.some_time()
    held = arena.hold(victims)
    for host in victims:
        host.reboot()
    arena.release(victims)
    arena.finish()
    broken = arena.broken()
    assert set(held.values()) <= {attempt for _, attempt, _ in broken}
    # on a busy computer, a host may take longer to boot than one may be silent
    late = {Cause.CONNECTION} if slowness() > 1.5 else set[Cause]()
    assert {outcome.cause for _, _, outcome in broken} - late == {Cause.MACHINE_LOST}
    assert names(host for host, _, _ in broken) == names(victims)
    assert violations(arena) == []


def test_disk_full_on_hosts(arena: Arena) -> None:
    """What cannot write its result is broken and goes elsewhere; the host is cleaned up all the same."""
    victims = arena.choose(2)  # fewer than a task may have attempts
    arena.run()
    arena.some_time()
    held = arena.hold(victims)
    for host in victims:
        host.fill_disk()
    arena.release(victims)
    arena.finish()
    broken = arena.broken()
    assert set(held.values()) <= {attempt for _, attempt, _ in broken}
    spared = Cause.CANCELLED  # what ran on a host when it was given up for what had failed there before
    causes = {Cause.RESULT, Cause.SETUP, Cause.STUCK, spared}
    assert {outcome.cause for _, _, outcome in broken} <= causes
    assert names(host for host, _, _ in broken) == names(victims)
    assert violations(arena) == []


@pytest.mark.nightly
def test_slow_link(arena: Arena) -> None:
    """300 KB take seconds, and the heartbeats wait behind them: slow is not lost."""
    victims = arena.choose(6)
    arena.run()
    arena.some_time()
    for host in victims:
        host.slow_link(arena.rng.choice((400, 800, 1600)))
    arena.finish()
    assert arena.broken() == []
    assert [m.detail for m in arena.state.machines.values() if m.cause is not None] == []
    assert violations(arena) == []


@pytest.mark.nightly
def test_packet_loss(arena: Arena) -> None:
    victims = arena.choose(6)
    arena.run()
    arena.some_time()
    try:
        for host in victims:
            host.lose_packets(arena.rng.choice((5, 10, 20)))
    except LabError as err:
        pytest.skip(f"NO TEST OF PACKET LOSS: {err}")
    arena.finish()
    assert {outcome.cause for _, _, outcome in arena.broken()} <= {Cause.CONNECTION}
    assert names(host for host, _, _ in arena.broken()) <= names(victims)
    for host in victims:
        host.lose_packets(0)
    arena.pay_debts()
    assert violations(arena) == []


@pytest.mark.nightly
def test_host_key_swapped(arena: Arena) -> None:
    """Somebody else answers at the address: nothing is sent there, loudly, until its key is trusted."""
    victims = arena.choose(3)
    arena.run()
    arena.some_time()
    held = arena.hold(victims)
    for host in victims:
        host.swap_host_key()
        host.restart_sshd(drop_sessions=True)
    started = {host: arena.starts(host) for host in victims}
    arena.until_given_up(victims)
    arena.release(victims)
    arena.finish()
    assert "THE HOST KEY HAS CHANGED" in arena.desk.processes[-1].said
    assert {(host.name, attempt) for host, attempt, _ in arena.broken()} == {
        (host.name, attempt) for host, attempt in held.items()
    }
    assert {outcome.cause for _, _, outcome in arena.broken()} == {Cause.CONNECTION}
    assert {host: arena.starts(host) for host in victims} == started
    arena.lab.client.trust(victims)
    arena.pay_debts()
    assert violations(arena) == []
