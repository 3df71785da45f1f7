"""Holds on a pool's machines: two never have the same one, whoever they are and whoever dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from evalfleet.errors import LeaseLost, RequestError
from evalfleet.events import PoolPlanned
from evalfleet.journal import Hold, Holder, Holds, SqliteJournal, Store
from evalfleet.journal.database import LAYOUT
from evalfleet.journal.holds import EPOCHS
from evalfleet.model import SECOND, MachineId, Micros, Plan
from evalfleet.named_pools import pool_fence
from evalfleet.ports import Fence
from tests.waiting import PATIENCE_S

DATA = Path(__file__).parents[1] / "data"
NOW: Micros = 1_800_000_000 * SECOND
LATER: Micros = NOW + 3600 * SECOND
MACHINES = [MachineId(f"p-h-{n}") for n in range(1, 4)]

# Takes and gives back, and marks what it has while it has it: O_EXCL finds any other that has it, too.
RACER = """
import os, sys
from pathlib import Path
from evalfleet.journal import Holds, Store
home, run, busy, rounds = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
holds = Holds(Store.open(Path(home)), "p")
machines = ["p-h-1", "p-h-2"]
got = 0
sys.stdin.readline()
for turn in range(rounds):
    borrower = f"{run}-h-{turn}"
    hold = holds.take(machines, run, 0, borrower, 1, 1 << 60)
    if hold is None:
        continue
    os.close(os.open(busy / hold.machine, os.O_CREAT | os.O_EXCL))
    got += 1
    os.unlink(busy / hold.machine)
    holds.give_back([borrower], run, 0)
print(got)
"""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store.open(tmp_path / "home")
    made.create_stream("p", "pool", NOW, [PoolPlanned(Plan("p", ""))])
    for run in ("a", "b"):
        made.create_stream(run, "run", NOW, [])
    return made


@pytest.fixture
def holds(store: Store) -> Holds:
    return Holds(store, "p")


@contextlib.contextmanager
def controlled(store: Store, stream: str) -> Iterator[SqliteJournal]:
    """While a controller is at work on it."""
    now = NOW
    with asyncio.Runner() as runner:
        journal = store.acquire(stream, Holder.here(now), now)
        try:
            yield journal
        finally:
            runner.run(journal.close())


def take(holds: Holds, run: str, n: int = 1, now: Micros = NOW, until: Micros = LATER) -> Hold | None:
    return holds.take(MACHINES[:2], run, 0, MachineId(f"{run}-h-{n}"), now, until)


def test_a_machine_goes_to_one_and_comes_back(holds: Holds) -> None:
    first, second = take(holds, "a"), take(holds, "b")
    assert first is not None
    assert second is not None
    assert {first.machine, second.machine} == set(MACHINES[:2])
    assert take(holds, "b", 2) is None
    holds.give_back([MachineId("a-h-1")], "a", 0)
    third = take(holds, "b", 2)
    assert third is not None
    assert (third.machine, third.number) == (first.machine, first.number + 1)
    assert set(holds.of("b")) == {"b-h-1", "b-h-2"}
    assert holds.of("a") == {}


def test_taking_again_finds_the_same(holds: Holds) -> None:
    first = take(holds, "a")
    assert take(holds, "a") == first
    assert len(holds.of("a")) == 1


def test_a_hold_ends_when_its_time_is_over(holds: Holds) -> None:
    assert take(holds, "a", 1, until=NOW + 1)
    assert take(holds, "a", 2, until=NOW + 1)
    got = take(holds, "b", 1, now=NOW + 1)
    assert got is not None
    assert got.number == 2
    assert not holds.extend(MachineId("a-h-1"), LATER), "it is another's now"
    assert holds.extend(MachineId("a-h-2"), LATER)
    assert take(holds, "b", 2, now=NOW + 2) is None, "it was extended in time"


def test_a_controller_that_was_replaced_neither_takes_nor_gives_back(store: Store, holds: Holds) -> None:
    assert take(holds, "a")
    with controlled(store, "a") as journal:
        with pytest.raises(LeaseLost, match="another controller took over 'a'"):
            take(holds, "a", 2)
        with pytest.raises(LeaseLost):
            holds.give_back([MachineId("a-h-1")], "a", 0)
        mine = holds.take((), "a", journal.epoch, MachineId("a-h-1"), NOW, LATER)
        assert mine is not None
        assert (mine.number, mine.epoch) == (1, journal.epoch), "the hold goes on, under the new epoch"


def test_the_pool_takes_all_or_none(store: Store, holds: Holds) -> None:
    got = take(holds, "a")
    assert got is not None
    with controlled(store, "p") as journal:
        with pytest.raises(RequestError, match=r"is held by run 'a'.*evalfleet cancel a"):
            holds.take_all(MACHINES, journal.epoch, NOW)
        assert list(holds.all()) == [got.machine], "it took some"
        holds.give_back([MachineId("a-h-1")], "a", 0)
        holds.take_all(MACHINES, journal.epoch, NOW)
        assert take(holds, "b") is None
        assert holds.being_worked_on(NOW)
        holds.give_back(MACHINES, "p", journal.epoch)
        assert not holds.being_worked_on(NOW)
        assert take(holds, "b") is not None


def test_what_a_dead_controller_of_the_pool_held_is_free(store: Store, holds: Holds) -> None:
    with controlled(store, "p") as journal:
        holds.take_all(MACHINES, journal.epoch, NOW)
        assert take(holds, "a") is None
    assert not holds.being_worked_on(NOW)
    assert take(holds, "a") is not None
    with controlled(store, "p") as journal:  # what its predecessor held is not its own
        assert take(holds, "b") is not None


def test_a_later_holder_is_above_all_earlier_ones(holds: Holds) -> None:
    take(holds, "a")
    holds.give_back([MachineId("a-h-1")], "a", 0)
    old = Hold(MACHINES[0], "p", 1, "a", MachineId("a-h-1"), 0, LATER)
    new = take(holds, "b")
    assert new is not None
    for late_epoch in (5, EPOCHS - 1):
        stale = pool_fence("p", old, Fence("a", late_epoch, 20.0))
        fresh = pool_fence("p", new, Fence("b", 1, 20.0))
        assert stale.epoch < fresh.epoch
        assert stale.run == fresh.run == "p", "a machine compares epochs of one name"


def test_two_processes_never_have_the_same_machine(store: Store, tmp_path: Path) -> None:
    busy = tmp_path / "busy"
    busy.mkdir()
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    for run in ("c", "d"):
        store.create_stream(run, "run", NOW, [])
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(store.home), run, str(busy), "60"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environ,
            text=True,
        )
        for run in ("a", "b", "c", "d")
    ]
    try:
        said = [racer.communicate("go\n", timeout=PATIENCE_S) for racer in racers]
    finally:
        for racer in racers:
            racer.kill()
            racer.wait()
    assert [err for _, err in said] == [""] * 4, "two had the same machine"
    assert sum(int(out) for out, _ in said) > 60
    assert all(hold.holder is None for hold in Holds(store, "p").all().values())


# -- homes of before there were pools ------------------------------------------------------------


@pytest.fixture
def old_home(tmp_path: Path) -> Path:
    home = tmp_path / "old"
    home.mkdir()
    with contextlib.closing(sqlite3.connect(home / "fleet.db")) as conn:
        conn.executescript((DATA / "journal_v1.sql").read_text("utf-8"))
    return home


def layout(home: Path) -> int:
    with contextlib.closing(sqlite3.connect(home / "fleet.db")) as conn:
        (found,) = conn.execute("PRAGMA user_version").fetchone()
    return int(found)


def test_an_older_home_gets_its_table_when_it_is_written_to(old_home: Path) -> None:
    before = [record.event for record in Store.open(old_home, read_only=True).read("first")]
    assert layout(old_home) == 1
    store = Store.open(old_home)
    assert layout(old_home) == LAYOUT
    assert [record.event for record in store.read("first")] == before
    store.create_stream("p", "pool", NOW, [])
    store.create_stream("a", "run", NOW, [])
    assert take(Holds(store, "p"), "a") is not None
    Store.open(old_home)
    assert len(Holds(store, "p").of("a")) == 1, "it was made anew"


def test_an_older_home_is_read_as_it_is(old_home: Path) -> None:
    store = Store.open(old_home, read_only=True)
    assert Holds(store, "p").all() == {}
    assert layout(old_home) == 1
    environ = {**os.environ, "EVALFLEET_HOME": str(old_home)}
    done = subprocess.run(
        [sys.executable, "-m", "evalfleet", "pool", "ls", "--json"],
        env=environ,
        capture_output=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert json.loads(done.stdout) == []
    assert layout(old_home) == 1


def test_two_that_upgrade_at_once_do_it_once(old_home: Path) -> None:
    code = "import pathlib, sys; from evalfleet.journal import Store; Store.open(pathlib.Path(sys.argv[1]))"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    both = [
        subprocess.Popen([sys.executable, "-c", code, str(old_home)], stderr=subprocess.PIPE, env=environ)
        for _ in range(4)
    ]
    assert [(p.communicate(timeout=PATIENCE_S)[1], p.returncode) for p in both] == [(b"", 0)] * 4
    assert layout(old_home) == LAYOUT
