"""Hosts that fall silent: given up, not believed when they come back, and cleaned up then."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest

from evalfleet.model import AttemptId, Cause, Scored
from evalfleet.state import AttemptState
from lab import NamespaceHost
from tests.lab.clients import needs_lab
from tests.waiting import slowness

from .arena import OFFER, Arena
from .invariants import violations

pytestmark = needs_lab


@pytest.mark.slow
def test_power_loss(arena: Arena) -> None:
    """Attempts are run again elsewhere. Hosts that are back are used, or at least clean, again."""
    victims = arena.choose(4)
    arena.run()
    arena.some_time()
    held = arena.hold(victims)
    witness = arena.witness(victims)
    for host in victims:
        host.power_off()
    arena.until_given_up(victims)
    stays_off, *back = victims
    for host in back:
        arena.power_on(host)
    arena.until_clean(back)
    arena.release([witness])
    arena.finish()
    assert_only_held_broke(arena, held.values(), Cause.CONNECTION)
    arena.power_on(stays_off)
    assert arena.left_on(stays_off), "its disk is as it was"
    arena.pay_debts()
    assert violations(arena) == []


@pytest.mark.slow
def test_freeze_and_thaw_after_the_lease(arena: Arena) -> None:
    """A host that stood still wakes up when its lease is over, in the middle of an attempt."""
    lease_s = 20.0 * slowness()  # long enough that a busy controller renews those of the other hosts
    victims = arena.choose(4)
    arena.run(lease_s=lease_s)
    arena.some_time()
    held = arena.hold(victims)
    witness = arena.witness(victims)
    for host in victims:
        host.freeze()
    frozen_at = time.monotonic()
    arena.until_given_up(victims)
    arena.until(lambda _: time.monotonic() > frozen_at + lease_s, "the lease to lapse")
    arena.release(victims)
    for host in victims:
        host.thaw()
    arena.until_clean(victims)
    arena.release([witness])
    arena.finish()
    assert_only_held_broke(arena, held.values(), Cause.CONNECTION)
    assert violations(arena) == []


@pytest.mark.nightly
def test_partition_and_heal(arena: Arena) -> None:
    """One that heals soon is as if nothing had been; one that was given up yields no second score."""
    victims = arena.choose(6)
    briefly, long = victims[:3], victims[3:]
    arena.run()
    arena.some_time()
    held = arena.hold(victims)
    witness = arena.witness(victims)
    for host in briefly:
        host.partition()
    arena.release(briefly)
    arena.until(lambda _: all(held[host] in arena.results_on(host) for host in briefly), "their results")
    for host in briefly:
        host.heal()
    for host in long:
        host.partition()
    arena.release(long)
    arena.until_given_up(long)
    for host in long:
        assert held[host] in arena.results_on(host), "it went on, and has a result that nobody wants"
        host.heal()
    arena.until_clean(long)
    arena.release([witness])
    arena.finish()
    assert_only_held_broke(arena, [held[host] for host in long], Cause.CONNECTION)
    for host in briefly:
        assert isinstance(arena.state.attempts[held[host]].outcome, Scored)
    assert violations(arena) == []


def test_partition_during_collection(arena: Arena) -> None:
    """The artefacts of a host that was silent for a while, and was not given up, come home whole."""
    slow = {host.address for host in arena.choose(10)}
    arena.run()
    witness = arena.witness([])
    for host in arena.hosts:
        host.slow_link(400 if host.address in slow else None)

    def on_slow_hosts(_: object) -> list[AttemptState]:
        return [a for a in arena.under_way() if arena.state.machines[a.machine].address in slow]

    arena.until(on_slow_hosts, "the collection of something large")
    victim = on_slow_hosts(None)[0]
    host = arena.host_of(victim.machine)
    host.partition()
    arena.until(lambda state: victim.machine in state.silent, "its silence to be noticed")
    host.heal()
    host.slow_link(None)
    arena.release([witness])
    arena.finish()
    assert arena.broken() == []
    assert victim.collected is not None
    assert victim.collected.problem == ""
    assert violations(arena) == []


def test_our_own_network_is_down(arena: Arena) -> None:
    """All hosts are silent at once: it is not them, so none is given up."""
    arena.run()
    arena.some_time()
    arena.hold(arena.hosts)
    with ThreadPoolExecutor(len(arena.hosts)) as together:  # before the first of them would be given up
        list(together.map(NamespaceHost.partition, arena.hosts))
    arena.until(lambda state: len(state.silent) == len(arena.hosts), "all hosts to be silent")
    silent_at = time.monotonic()
    arena.until(
        lambda _: time.monotonic() > silent_at + OFFER.life.silent_s,
        "the time after which one would be given up",
    )
    for host in arena.hosts:
        host.heal()
    arena.release(arena.hosts)
    arena.finish()
    assert arena.broken() == []
    assert violations(arena) == []


@pytest.mark.nightly
def test_everything_is_switched_off(arena: Arena) -> None:
    """Controller and hosts at once; the disks stay, and the run goes on."""
    arena.run()
    arena.some_time()
    held = arena.hold(arena.choose(5))
    arena.desk.processes[-1].kill()
    for host in arena.hosts:
        host.power_off()
    for host in arena.hosts:
        arena.power_on(host)
    arena.resume()
    arena.finish()
    broken = {attempt: outcome.cause for _, attempt, outcome in arena.broken()}
    assert set(held.values()) <= set(broken)
    assert set(broken.values()) == {Cause.MACHINE_LOST}
    assert violations(arena) == []


def assert_only_held_broke(arena: Arena, held: Iterable[AttemptId], cause: Cause) -> None:
    broken = {attempt: outcome.cause for _, attempt, outcome in arena.broken()}
    assert broken == dict.fromkeys(held, cause)
