"""Damage in the journal is found by whoever reads it, and told in one line that names the event."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from evalfleet.errors import JournalForeign
from evalfleet.events import AttemptStarted, RunEnded, StopRequested
from evalfleet.journal import Holder, Store
from evalfleet.model import SECOND, AttemptId, MachineId, TaskId
from tests.e2e.harness import Fleet, tasks

NOW = 1_800_000_000 * SECOND

DAMAGE = {
    "a changed score": "UPDATE event SET body = replace(body, ':0.0', ':1.0') WHERE seq = {seq}",
    "a changed time": "UPDATE event SET at = at + 1 WHERE seq = {seq}",
    "a removed event": "DELETE FROM event WHERE seq = {seq}",
    "swapped events": (
        "UPDATE event SET seq = 1000000 WHERE seq = {seq};"
        "UPDATE event SET seq = {seq} WHERE seq = {seq} + 1;"
        "UPDATE event SET seq = {seq} + 1 WHERE seq = 1000000"
    ),
    "a lost checksum": "UPDATE event SET checksum = NULL WHERE seq = {seq}",
}


def damage(home: Path, script: str) -> None:
    with closing(sqlite3.connect(home / "fleet.db")) as database:
        database.executescript(script)


def scored_at(home: Path) -> int:
    with closing(sqlite3.connect(home / "fleet.db")) as database:
        (seq,) = database.execute("SELECT min(seq) FROM event WHERE body LIKE '%\"score\":0.0%'").fetchone()
    return int(seq)


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    fleet = Fleet.at(tmp_path_factory.mktemp("intact"))
    fleet.bench(tasks(2, "score 0.0"))
    assert fleet.run().code == 0
    return fleet


def test_a_journal_as_it_was_written_is_told_so(intact: Fleet) -> None:
    done = intact("ls", "--verify")
    assert (done.code, done.err) == (0, "")
    assert done.out == f"r: {len(intact.events())} events are as they were written\n"
    (checked,) = intact("ls", "--verify", "r", "--json").json
    assert checked == {"name": "r", "events": len(intact.events()), "not_covered": 0, "problem": None}
    intact("ls", "--verify", "nothing").refused("there is no run or pool 'nothing'")


def test_what_is_shown_is_made_of_the_journal_whatever_results_json_says(intact: Fleet) -> None:
    results = intact.home / "r/results.json"
    honest, shown = results.read_text(), intact("show", "r", "--json").json
    results.write_text(honest.replace('"score": 0.0', '"score": 1.0').replace('"score":0.0', '"score":1.0'))
    try:
        assert results.read_text() != honest
        assert intact("show", "r", "--json").json == shown
        assert {task["score"] for task in shown["tasks"]} == {0.0}
    finally:
        results.write_text(honest)


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_found_by_whoever_reads_the_run(intact: Fleet, fleet: Fleet, what: str) -> None:
    fleet.home.mkdir()
    with closing(sqlite3.connect(intact.home / "fleet.db")) as source:
        source.execute("VACUUM INTO ?", (str(fleet.home / "fleet.db"),))
    seq = scored_at(fleet.home)
    damage(fleet.home, DAMAGE[what].format(seq=seq))
    for words in (("show", "r"), ("resume", "r"), ("report", "r")):
        fleet(*words).refused(f"event {seq} of 'r'", "restore the file from a copy")
    done = fleet("ls", "--verify")
    done.failed(1, f"event {seq} of 'r'", "restore the file from a copy")
    assert done.out == "r: DAMAGED\n"


def events(count: int) -> list[AttemptStarted]:
    return [AttemptStarted(AttemptId(str(n)), TaskId(str(n)), MachineId("m")) for n in range(count)]


@pytest.mark.parametrize("seq", [1, 1500, 2500])
@pytest.mark.parametrize("after", [0, 1499])
def test_the_first_bad_event_is_named_on_any_page(tmp_path: Path, seq: int, after: int) -> None:
    store = Store.open(tmp_path)
    store.create_stream("s", "run", NOW, events(2500))
    damage(tmp_path, f"UPDATE event SET epoch = 7 WHERE seq = {seq}")
    if seq <= after:
        assert len(list(store.read("s", after))) == 2500 - after
    else:
        with pytest.raises(JournalForeign, match=f"event {seq} of 's' is not as it was written"):
            list(store.read("s", after))


def test_a_flipped_bit_that_is_no_utf_8_is_damage(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    store.create_stream("s", "run", NOW, [*events(3), StopRequested("user", "interrupted")])
    damage(tmp_path, "UPDATE event SET body = replace(body, 'rupted', CAST(x'F2' AS TEXT)) WHERE seq = 4")
    with pytest.raises(JournalForeign, match="event 4 of 's' is not as it was written"):
        list(store.read("s"))
    damage(
        tmp_path,
        "PRAGMA writable_schema = ON;"
        "UPDATE sqlite_schema SET sql = replace(sql, 'CREATE', 'CRE' || CAST(x'A0' AS TEXT)) "
        "WHERE name = 'request'",
    )
    with pytest.raises(JournalForeign, match="is damaged"):
        Store.open(tmp_path)


def test_a_missing_end_is_found_and_not_written_over(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    store.create_stream("s", "run", NOW, [*events(3), RunEnded("done")])
    damage(tmp_path, "DELETE FROM event WHERE seq = 4")
    with pytest.raises(JournalForeign, match="event 4 of 's' is missing"):
        list(store.read("s"))
    with pytest.raises(JournalForeign, match="event 4 of 's' is missing"):
        list(store.read("s", 3))
    with pytest.raises(JournalForeign, match="event 4 of 's' is missing"):
        store.acquire("s", Holder.here(NOW), NOW)


def test_an_event_of_another_stream_does_not_fit(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    for name in ("one", "two"):
        store.create_stream(name, "run", NOW, [StopRequested("user")])
    damage(tmp_path, "DELETE FROM event WHERE stream = 'one'; UPDATE event SET stream = 'one'")
    with pytest.raises(JournalForeign, match="event 1 of 'one' is not as it was written"):
        list(store.read("one"))


def test_events_that_do_not_fit_together_are_no_traceback(fleet: Fleet) -> None:
    """Of a journal without checksums, made by an earlier version."""
    store = Store.open(fleet.home)
    store.create_stream("s", "run", NOW, events(1))
    damage(fleet.home, "UPDATE event SET checksum = NULL; UPDATE stream SET checksum = NULL")
    for words in (("show", "s"), ("resume", "s")):
        fleet(*words).refused("event 1 (AttemptStarted) does not fit")
    fleet("ls", "--verify").failed(1, "event 1 (AttemptStarted) does not fit")
