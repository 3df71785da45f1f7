"""Controllers that die, sleep, meet another one, or have no room to write."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from evalfleet.model import Cause
from lab.system import mount_tmpfs
from tests.lab.clients import needs_lab

from . import workload
from .arena import OFFER, RUN, Arena
from .invariants import violations

pytestmark = needs_lab


def test_killed_during_collection(arena: Arena) -> None:
    """Three times, while large artefacts are on their way: they come home whole, and nothing runs again."""
    slow = arena.choose(10)
    arena.run()
    for _ in range(3):
        arena.until(lambda state: len(state.ready) == len(arena.hosts), "all machines")
        for host in slow:
            host.slow_link(800)
        arena.until_ended(len(arena.state.attempts) - arena.state.running + arena.rng.randint(1, 30))
        arena.until(lambda _: arena.under_way(), "the collection of something large")
        arena.desk.processes[-1].kill()
        assert arena.look().uncollected, "it was killed too late"
        for host in slow:
            host.slow_link(None)
        arena.resume()
    arena.finish()
    assert arena.broken() == []
    assert len(arena.state.attempts) == workload.TASKS
    assert violations(arena) == []


def test_two_controllers(arena: Arena) -> None:
    """The second is refused; one that takes over while the first sleeps is obeyed, and the sleeper is not."""
    first = arena.run()
    arena.some_time()
    held = arena.hold(arena.choose(4))
    refused = arena.resume()
    assert refused.wait().code == 2
    assert "is held by" in refused.said
    arena.suspend_between_writes(first)
    arena.resume("--take-over")
    arena.until(lambda _: arena.records[-1].epoch > 1, "another controller to write")
    first.signal(signal.SIGCONT)
    assert first.wait().code == 130
    assert "took over 'chaos'" in first.said.splitlines()[-1]
    arena.release(held)
    arena.finish()
    assert arena.broken() == []
    assert len(arena.state.attempts) == workload.TASKS
    assert violations(arena) == []


@pytest.mark.nightly
def test_cancelled_and_resumed(arena: Arena) -> None:
    """A result that was there when its attempt was cancelled is kept as superseded, and never counts."""
    lingering = arena.choose(4)
    first = arena.run()
    arena.some_time()
    for host in lingering:
        host.run(["touch", workload.LINGER])
    arena.until(lambda _: all(map(arena.results_on, lingering)), "results of attempts that go on")
    cancel = arena.desk.start("cancel", RUN)
    assert (cancel.wait().code, first.wait().code) == (0, 130), cancel.said
    cancelled = {attempt for host, attempt, _ in arena.broken() if host in lingering}
    for host in lingering:
        host.run(["rm", workload.LINGER])
    arena.resume()
    arena.finish()
    assert {outcome.cause for _, _, outcome in arena.broken()} == {Cause.CANCELLED}
    superseded = {a.id for a in arena.state.attempts.values() if a.superseded is not None}
    assert len(cancelled) == len(lingering)
    assert cancelled <= superseded
    assert violations(arena) == []


@pytest.mark.nightly
def test_asleep(arena: Arena) -> None:
    """A laptop that slept takes nobody for lost, although it heard nothing for long."""
    controller = arena.run()
    arena.some_time()
    held = arena.hold(arena.choose(10))
    controller.suspend()
    slept_at = time.monotonic()
    arena.until(
        lambda _: time.monotonic() > slept_at + OFFER.life.lost_s + 3.0,
        "the time after which hosts would be given up",
    )
    arena.release(held)
    controller.signal(signal.SIGCONT)
    arena.finish()
    assert arena.broken() == []
    assert violations(arena) == []


def test_disk_full(arena: Arena) -> None:
    """It says so and leaves; attempts go on, and once there is room the run does, too."""
    arena.desk.use_home(arena.lab.client.key_path.with_name("small"))  # whose mounts go with the lab
    arena.home.mkdir()
    mount_tmpfs(arena.home, "size=64m")
    first = arena.run()
    arena.some_time()
    fill(arena.home, arena.rng.choice((0, 200_000, 600_000)))
    assert first.wait().code == 1
    assert "the disk is full; what was recorded is safe" in first.said.splitlines()[-1]
    mount_tmpfs(arena.home, "size=64m", again=True)
    arena.resume()
    arena.finish()
    assert arena.broken() == []
    assert violations(arena) == []


def fill(mount: Path, bytes_left: int) -> None:
    for _ in range(100):
        room = os.statvfs(mount)
        used = (room.f_blocks - room.f_bfree) * room.f_frsize
        with suppress(OSError):  # more has been written meanwhile: it cannot be smaller than that
            return mount_tmpfs(mount, f"size={used + bytes_left}", again=True)
    raise AssertionError(f"{mount} cannot be made full")
