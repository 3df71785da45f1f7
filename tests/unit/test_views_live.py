"""The files that others read while a run lives: right, whole, and no danger to the run."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from evalfleet import files
from evalfleet.controller import SCRIBE_S
from evalfleet.errors import JournalForeign
from evalfleet.events import AttemptStarted, Record
from evalfleet.journal import Store
from evalfleet.model import AttemptId, MachineId, Micros, Scored, TaskId, seconds_between
from evalfleet.state import fold
from evalfleet.views.follow import Follower
from evalfleet.views.live import Scribe, live
from sim.scenario import draw
from sim.simulate import simulate
from tests.unit.views_feed import START, Feed, a_mixed_run

CONTRACT = json.loads("""
{"status": "running", "pool_id": "...", "run": "...", "started_at": "...Z", "total_tasks": 30,
 "completed_tasks": 12,
 "failed_tasks": 2,
 "workers": [{"name": "waa-eval-1", "status": "running", "assigned": 6, "completed": 4,
              "current_task": "notepad_3"}],
 "infrastructure": {"active_nodes": 5, "pending_jobs": 0,
                    "compute_health": {"waa-eval-1": {"cpu": 0.4, "memory": 0.6, "disk": 0.3}}},
 "performance": {"avg_task_duration": 181.0, "task_success_rate": 0.42, "retry_rate": 0.05},
 "cost": {"current_hourly_rate": 0.95, "current_usd": 0.31, "estimated_total": 1.02}}
""")


class Rows:
    """A store of one run, whose records the test adds."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed

    def read_pages(self, stream: str, after: int = 0) -> Iterable[list[Record]]:
        yield self.feed.records[after:]


def keys(document: Any) -> Any:
    """The keys of a document, all the way down."""
    if isinstance(document, dict):
        return {key: keys(value) for key, value in document.items()}  # pyright: ignore[reportUnknownVariableType]
    return [keys(document[0])] if isinstance(document, list) and document else None  # pyright: ignore[reportUnknownArgumentType]


def test_the_live_file_has_the_keys_of_the_contract() -> None:
    feed = Feed(tasks=3, machines=1)
    sample = {MachineId("run1-abc123-1"): {"cpu": 0.4, "memory": 0.6, "disk": 0.3}}
    document = live(feed.state, feed.now, sample)
    contract = json.loads(json.dumps(CONTRACT).replace("waa-eval-1", "worker-1"))
    assert keys(document) == keys(contract)
    assert document["pool_id"] == "20260102_143052"


def test_the_live_file_tells_what_goes_on() -> None:
    feed = Feed(tasks=10, machines=2, usd_per_hour=3.6)
    feed.attempt("t_0", Scored(1.0, True))
    feed.start("t_1")
    feed.lose(2)
    document = live(feed.state, feed.now)
    assert document["workers"] == [
        {"name": "worker-1", "status": "running", "assigned": 2, "completed": 1, "current_task": "t_1"},
        {"name": "worker-2", "status": "failed", "assigned": 0, "completed": 0, "current_task": None},
    ]
    assert document["infrastructure"]["active_nodes"] == 1
    assert document["performance"] == {"avg_task_duration": 60.0, "task_success_rate": 1.0, "retry_rate": 0.0}
    assert document["cost"]["current_hourly_rate"] == 7.2
    assert (document["cost"]["estimated_total"] or 0) > (document["cost"]["current_usd"] or 0) == 0.12


@pytest.mark.parametrize("seed", range(20))
def test_any_run_has_a_live_file_at_any_time(seed: int) -> None:
    records = list(simulate(draw(seed)).store.read())
    for upto in range(2, len(records), max(1, len(records) // 20)):
        state = fold(records[:upto])
        json.dumps(live(state, state.last_at))


def test_a_follower_reads_only_what_is_new(tmp_path: Path) -> None:
    feed = a_mixed_run()
    store = Store.open(tmp_path)
    store.create_stream("run1", "run", START, [record.event for record in feed.records])
    follower = Follower(Store.open(tmp_path, read_only=True), "run1")
    assert [record.event for record in follower.poll()] == [record.event for record in feed.records]
    assert follower.poll() == []
    assert (follower.state.scored, follower.state.broken, follower.seq) == (3, 1, len(feed.records))


def test_a_follower_stops_before_the_event_that_does_not_fit_and_finds_it_again() -> None:
    feed = a_mixed_run()
    good = list(feed.records)
    stray = AttemptStarted(AttemptId("x.0"), TaskId("x"), MachineId("none"))
    odd = Record(len(good) + 1, 1, feed.now, stray)
    feed.records += [odd, good[-1]]
    follower = Follower(Rows(feed), "run1")
    for _ in range(2):
        with pytest.raises(JournalForeign, match=f"event {odd.seq} "):
            follower.poll()
        assert (follower.seq, follower.state.scored, follower.state.broken) == (len(good), 3, 1)


def test_a_scribe_writes_all_files_of_a_run(tmp_path: Path) -> None:
    feed = a_mixed_run()
    scribe = Scribe(tmp_path, Rows(feed), "run1", lambda: feed.now)
    scribe.tick()
    names = {path.name for path in (tmp_path / "run1").iterdir()}
    machines = {"worker-1_results.json", "worker-2_results.json"}
    files = {"parallel_live.json", "vm_pool_registry.json", "results.json", "aggregated_results.json"}
    assert names == files | machines
    assert os.readlink(tmp_path / "latest") == "run1"
    assert (tmp_path / "parallel_live.json").read_bytes() == (
        tmp_path / "latest/parallel_live.json"
    ).read_bytes()
    assert json.loads((tmp_path / "run1/results.json").read_bytes())["scored"] == 3
    written = (tmp_path / "run1/results.json").stat().st_ino
    scribe.close()
    assert (tmp_path / "run1/results.json").stat().st_ino == written  # all was said: large ones take long
    assert scribe.problem() is None


def test_a_scribe_keeps_the_live_file_less_than_a_second_old(tmp_path: Path) -> None:
    feed = Feed(tasks=2, machines=1)
    scribe = Scribe(tmp_path, Rows(feed), "run1", lambda: feed.now)
    path = tmp_path / "run1/parallel_live.json"
    scribe.tick()
    written, ino, oldest_s = feed.now, path.stat().st_ino, 0.0
    for _ in range(20):
        feed.wait(SCRIBE_S)  # nothing happens
        oldest_s = max(oldest_s, seconds_between(written, feed.now))
        scribe.tick()
        if path.stat().st_ino != ino:
            written, ino = feed.now, path.stat().st_ino
    assert 0.5 <= oldest_s <= 0.9, "a second, less what a tick may take"
    feed.start("t_0")
    scribe.tick()
    assert json.loads(path.read_bytes())["workers"][0]["current_task"] == "t_0"


def test_samples_are_shown_and_nonsense_is_not(tmp_path: Path) -> None:
    feed = Feed(tasks=1, machines=3)
    samples = tmp_path / ".samples"
    samples.mkdir()
    (samples / "run1-abc123-1.json").write_text('{"cpu": 0.4, "memory": 0.6, "disk": 0.3, "x": 1}')
    (samples / "run1-abc123-2.json").write_text("{half a fi")
    Scribe(tmp_path, Rows(feed), "run1", lambda: feed.now).tick()
    health = json.loads((tmp_path / "parallel_live.json").read_bytes())["infrastructure"]["compute_health"]
    assert health == {"worker-1": {"cpu": 0.4, "memory": 0.6, "disk": 0.3}}


def test_the_homes_file_is_the_newest_runs(tmp_path: Path) -> None:
    feed = Feed(tasks=1, machines=1)
    older = Scribe(tmp_path, Rows(feed), "run0", lambda: feed.now)
    older.tick()
    Scribe(tmp_path, Rows(feed), "run1", lambda: feed.now).tick()
    before = (tmp_path / "parallel_live.json").stat().st_ino
    feed.wait(5)
    older.tick()
    assert (tmp_path / "parallel_live.json").stat().st_ino == before
    assert os.readlink(tmp_path / "latest") == "run1"


def test_a_disk_that_refuses_is_told_once_and_hurts_nobody(tmp_path: Path) -> None:
    (tmp_path / "run1").write_text("a file where the folder should be")
    feed = a_mixed_run()
    scribe = Scribe(tmp_path, Rows(feed), "run1", lambda: feed.now)
    scribe.tick()
    problem = scribe.problem()
    assert problem is not None
    assert "the run goes on" in problem
    scribe.close()
    assert scribe.problem() is None or scribe.problem() != problem
    (tmp_path / "run1").unlink()
    scribe.close()
    assert json.loads((tmp_path / "run1/results.json").read_bytes())["status"] == "stopped"


def test_without_symbolic_links_latest_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("not supported")

    monkeypatch.setattr(os, "symlink", refuse)
    feed = Feed(tasks=1, machines=1)
    Scribe(tmp_path, Rows(feed), "run1", lambda: feed.now).tick()
    assert (tmp_path / "latest").read_text() == "run1\n"
    assert (tmp_path / "parallel_live.json").exists()


def test_latest_replaces_another_and_leaves_no_scratch(tmp_path: Path) -> None:
    files.point(tmp_path / "latest", "one")
    files.point(tmp_path / "latest", "two")
    assert files.points_to(tmp_path / "latest") == "two"
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]


def test_readers_never_see_half_a_file(tmp_path: Path) -> None:
    feed = Feed(tasks=50, machines=40)
    now: list[Micros] = [feed.now]
    scribe = Scribe(tmp_path, Rows(feed), "run1", lambda: now[0])
    scribe.tick()
    done, seen, wrong = threading.Event(), [0], list[str]()

    def look() -> None:
        while not done.is_set():
            for path in (tmp_path / "parallel_live.json", tmp_path / "latest/results.json"):
                try:
                    json.loads(path.read_bytes())
                except (OSError, ValueError) as err:
                    wrong.append(f"{path.name}: {err!r}")
            seen[0] += 1

    reader = threading.Thread(target=look)
    reader.start()
    for n in range(60):
        now[0] += 1_000_000
        scribe.tick()
        if n % 12 == 0:
            scribe.close()
    done.set()
    reader.join()
    assert (wrong, seen[0] > 5) == ([], True)
    assert not list(tmp_path.rglob("*.tmp"))
