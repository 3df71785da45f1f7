"""Everything at once: what happens to which host, and when it is over, is drawn from the seed."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from evalfleet.model import Cause
from lab import NamespaceHost
from tests.lab.clients import needs_lab

from .arena import Arena
from .invariants import violations
from .workload import KILL_SUPERVISOR

pytestmark = needs_lab

FAULTS = 12
MOST_DOWN = 8
CALM_S = 2.0
Undo = Callable[[], None]


@pytest.mark.parametrize("round", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_storm(arena: Arena, round: int) -> None:
    """Also of the controller, which is killed and started again in between."""
    arena.run()
    arena.some_time()
    down: dict[NamespaceHost, Undo] = {}
    for _ in range(FAULTS):
        calm(arena)
        if down and (len(down) >= MOST_DOWN or arena.rng.random() < 0.4):
            host = arena.rng.choice(sorted(down, key=lambda host: host.name))
            down.pop(host)()
        elif arena.rng.random() < 0.15:
            arena.desk.processes[-1].kill()
            arena.resume()
        else:
            host = arena.rng.choice([host for host in arena.hosts if host not in down])
            down[host] = arena.rng.choice(MENU)(host)
    for undo in down.values():
        undo()
    if arena.look().ended_at is None:
        arena.finish()
    arena.pay_debts()
    assert {outcome.cause for _, _, outcome in arena.broken()} <= {
        *(Cause.CONNECTION, Cause.MACHINE_LOST, Cause.RESULT, Cause.INTERNAL, Cause.STUCK)
    }
    assert violations(arena) == []


def calm(arena: Arena) -> None:
    """Until some more attempts have ended; or a moment, when nothing goes on."""
    since, more = time.monotonic(), arena.rng.randint(1, 12)
    before = len(arena.state.attempts) - arena.state.running
    arena.until(
        lambda state: (
            state.ended_at is not None
            or len(state.attempts) - state.running >= before + more
            or time.monotonic() > since + CALM_S
        ),
        "a moment to pass",
    )


def lose_power(host: NamespaceHost) -> Undo:
    host.power_off()
    return host.power_on


def stand_still(host: NamespaceHost) -> Undo:
    host.freeze()
    return host.thaw


def be_cut_off(host: NamespaceHost) -> Undo:
    host.partition()
    return host.heal


def reboot(host: NamespaceHost) -> Undo:
    host.reboot()
    return lambda: None


def drop_sessions(host: NamespaceHost) -> Undo:
    host.restart_sshd(drop_sessions=True)
    return lambda: None


def lose_supervisor(host: NamespaceHost) -> Undo:
    host.run(KILL_SUPERVISOR, check=False)  # it may have none now
    return lambda: None


def be_slow(host: NamespaceHost) -> Undo:
    host.slow_link(500)
    return lambda: host.slow_link(None)


MENU = (lose_power, stand_still, be_cut_off, reboot, drop_sessions, lose_supervisor, be_slow)
