"""The time of a run: steady, whatever is done to the wall clock."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest

from evalfleet.clock import RunClock, SystemClocks, wall_seconds
from evalfleet.model import SECOND, Micros

HOUR = 3600 * SECOND
NOON = 1_800_000_000 * SECOND


@dataclass
class Computer:
    wall_at: Micros = NOON
    steady_at: Micros = 5 * HOUR
    boot: str = "boot 1"

    def wall(self) -> Micros:
        return self.wall_at

    def steady(self) -> Micros:
        return self.steady_at

    def pass_time(self, span: Micros) -> None:
        self.wall_at += span
        self.steady_at += span


def test_it_begins_as_the_wall_clock_and_goes_on_steadily() -> None:
    computer = Computer()
    clock = RunClock(computer)
    assert clock.now() == NOON
    computer.pass_time(HOUR)
    computer.wall_at -= 9 * HOUR
    assert clock.now() == NOON + HOUR


def test_a_successor_in_the_same_boot_goes_on_whatever_the_wall_clock_says() -> None:
    computer = Computer()
    first = RunClock(computer)
    computer.pass_time(HOUR)
    for step in (-2 * HOUR, 7 * HOUR):
        computer.wall_at += step
        second = RunClock(computer, boot=first.boot, zero=first.zero, last_at=NOON)
        assert second.now() == NOON + HOUR


def test_after_a_reboot_the_wall_clock_is_believed_unless_it_went_back() -> None:
    first = RunClock(Computer())
    ahead = Computer(NOON + HOUR, 0, "boot 2")
    assert RunClock(ahead, boot=first.boot, zero=first.zero, last_at=NOON).now() == NOON + HOUR
    behind = Computer(NOON - 2 * HOUR, 0, "boot 2")
    second = RunClock(behind, boot=first.boot, zero=first.zero, last_at=NOON)
    assert second.now() == NOON
    behind.pass_time(HOUR)
    assert second.now() == NOON + HOUR


def test_where_the_boot_cannot_be_told_none_is_the_same() -> None:
    nowhere = Computer(boot="")
    assert RunClock(nowhere, boot="", zero=17, last_at=0).now() == NOON


def test_seconds_of_a_process_are_the_wall_clocks_until_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    before = wall_seconds()
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert 0 <= wall_seconds() - before < 60
    monkeypatch.undo()
    assert abs(wall_seconds() - time.time()) < 60


def test_this_computer_counts_suspended_time() -> None:
    clocks = SystemClocks()
    before = time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000
    assert before <= clocks.steady() <= time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000
    assert clocks.boot
    assert abs(RunClock().now() - clocks.wall()) < 5 * SECOND
