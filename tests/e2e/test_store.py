"""Runs with a copy in object storage: what is there, and how another computer takes over."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote

import pytest

from evalfleet.events import AttemptCollected, AttemptEnded, AttemptStarted
from evalfleet.mirror import open_objects
from standins import s3
from standins.gcs import CloudStorage
from tests.desk import Process
from tests.e2e.harness import Fleet, tasks
from tests.e2e.test_api import python
from tests.waiting import until


@pytest.fixture
def bucket(fleet: Fleet) -> Path:
    """A folder that computers share."""
    folder = fleet.folder / "bucket"
    folder.mkdir()
    return folder


@pytest.fixture
def other(fleet: Fleet, tmp_path: Path) -> Iterator[Fleet]:
    """Another computer: a folder and a home of its own."""
    made = Fleet.at(tmp_path / "other")
    yield made
    left = made.alive()
    made.sweep()
    assert not left, f"left running: {left}"


def journal_kinds(bucket: Path, run: str = "r") -> list[str]:
    """The kinds of all events in the store, in order."""
    kinds: list[str] = []
    for path in sorted((bucket / run / "journal").glob("[0-9]*")):
        kinds += [json.loads(line)[4] for line in path.read_text().splitlines()[1:]]
    return kinds


def stored_kinds(storage: CloudStorage) -> list[str]:
    """The same of a bucket."""
    objects = sorted(name for name in storage.buckets["bucket"] if "/journal/" in name)
    lines = [line for name in objects for line in storage.buckets["bucket"][name].splitlines()[1:]]
    return [json.loads(line)[4] for line in lines]


def gated(
    fleet: Fleet,
    *flags: str,
    store: str = "bucket",
    env: Mapping[str, str] | None = None,
    started: Sequence[str] = ("first_1.0", "a_1.0", "a_2.0"),
) -> Process:
    """A run with a store, of four tasks, two at a time, all but the first waiting at the gate `go`."""
    fleet.bench([*tasks(1, "echo said; score 1", "first"), *tasks(3, "gate go; score 1")])
    run = fleet.start_run("--workers", "2", "--store", store, *flags, env=env)
    fleet.started(*started)
    return run


def test_another_computer_takes_the_run_over_and_the_first_stops(
    fleet: Fleet, other: Fleet, bucket: Path
) -> None:
    first = gated(fleet)
    until(lambda: "AttemptCollected" in journal_kinds(bucket))
    second = other.start("resume", "--from", str(bucket))
    until(lambda: other.state().controllers == 2)
    fleet.open_gate("go")
    stopped = first.wait()
    assert stopped.code == 130, stopped
    assert "took over 'r' through file://" in stopped.err
    assert second.finish(0)
    found = other.results()
    assert (found["scored"], found["total_tasks"]) == (4, 4)
    # what was scored on the first computer stays so, with its files; nothing was started twice
    assert (other.home / "r/first_1/first_1.0/evalfleet.log").read_text() == "said\n"
    starts = [event.attempt for event in other.events() if isinstance(event, AttemptStarted)]
    assert len(starts) == len(set(starts))
    assert [name for name in fleet.starts() if name.startswith("first")] == ["first_1.0"]
    assert journal_kinds(bucket) == [type(event).__name__ for event in other.events()]
    other.settled()
    # the first computer does not go on with it, and says how to
    refused = fleet("resume", "r")
    assert refused.code == 2
    assert "takes it back" in refused.err
    assert refused.err.count("\n") == 1
    # its own machines are listed and reaped there: no other computer sees them
    assert fleet("machines").out.count("its run was taken over\n") == 2
    assert "deleted: 2" in fleet("reap", "--yes").out
    assert fleet("machines").out == "nothing of ours exists at the places of evalfleet.toml\n"
    assert not fleet.alive()


@pytest.mark.nightly
def test_a_run_is_taken_back_by_the_computer_that_it_was_taken_from(
    fleet: Fleet, other: Fleet, bucket: Path
) -> None:
    first = gated(fleet)
    second = other.start("resume", "r", "--from", str(bucket))
    fleet.started("a_1.1")
    assert first.wait().code == 130
    second.kill()
    other.sweep()
    fleet.open_gate("go")
    back = f"evalfleet.resume('r', from_url='{bucket.as_uri()}/').wait()"
    assert python(fleet, f"import evalfleet, json; print(json.dumps({back}['scored']))") == 4
    assert fleet.state().controllers == 3
    assert journal_kinds(bucket) == [type(event).__name__ for event in fleet.events()]
    assert fleet.results()["scored"] == 4
    ended = [event.attempt for event in fleet.events() if isinstance(event, AttemptEnded)]
    assert len(ended) == len(set(ended))
    fleet.sweep()
    other.sweep()


def test_what_was_not_put_before_a_kill_is_put_by_the_next_controller(fleet: Fleet, bucket: Path) -> None:
    run = gated(fleet)
    until(lambda: "AttemptCollected" in journal_kinds(bucket))
    run.suspend()
    run.kill()
    # as if it had been killed between its own journal and the store
    last = max((bucket / "r" / "journal").glob("[0-9]*"))
    assert len(last.read_text().splitlines()) > 1
    last.unlink()
    shutil.rmtree(bucket / "r" / "artefacts", ignore_errors=True)
    resumed = fleet.start("resume", "r")
    until(lambda: fleet.state().controllers == 2)
    fleet.open_gate("go")
    assert resumed.finish(0)
    assert journal_kinds(bucket) == [type(event).__name__ for event in fleet.events()]
    fleet.settled()


class SharedFolder:
    """A folder that can be unmounted: then an empty one is in its place."""

    url, away, environ = "bucket", "holds no r/", dict[str, str]()

    def __init__(self, folder: Path) -> None:
        self._here, self._elsewhere = folder / "bucket", folder / "unmounted"
        self._here.mkdir()

    def kinds(self) -> list[str]:
        return journal_kinds(self._here)

    def stop(self) -> None:
        self._here.rename(self._elsewhere)
        self._here.mkdir()

    def start(self) -> None:
        self._here.rmdir()  # nothing was written into it
        self._elsewhere.rename(self._here)


class StoreServer:
    """A server of objects that can be stopped."""

    url, away = "gs://bucket/runs", "gs://bucket/runs cannot be reached"

    def __init__(self, storage: CloudStorage, folder: Path) -> None:
        self._storage = storage
        self.environ = storage.environ(folder)
        self.stop, self.start = storage.stop, storage.start

    def kinds(self) -> list[str]:
        return stored_kinds(self._storage)


@pytest.fixture
def store(request: pytest.FixtureRequest, fleet: Fleet) -> Iterator[SharedFolder | StoreServer]:
    if request.param == "folder":
        yield SharedFolder(fleet.folder)
        return
    with CloudStorage("bucket") as storage:
        made = StoreServer(storage, fleet.folder)
        for name, value in made.environ.items():
            fleet.environ[name] = value
        fleet.forks = True
        yield made


STORES = pytest.mark.parametrize("store", ["folder", "server"], indirect=True)


@STORES
def test_a_store_that_is_away_is_waited_for(fleet: Fleet, store: SharedFolder | StoreServer) -> None:
    run = gated(fleet, store=store.url)
    until(lambda: "AttemptCollected" in store.kinds())
    store.stop()
    fleet.open_gate("go")
    until(lambda: "waits for it" in run.err)
    known = len(fleet.starts())
    until(lambda: sum(isinstance(event, AttemptEnded) for event in fleet.events()) >= 2)
    assert run.lives
    assert len(fleet.starts()) == known, "nothing is started that the store does not know of"
    store.start()
    assert "is back after" in run.finish(0)
    assert store.kinds() == [type(event).__name__ for event in fleet.events()]
    fleet.settled()


def test_a_machine_forgets_an_attempt_when_its_end_is_in_the_store_and_files_follow_the_claim(
    fleet: Fleet, other: Fleet
) -> None:
    def kept() -> list[Path]:
        return list((fleet.home / ".machines").glob("*/jobs/first_1.0"))

    def first_request(method: str, below: str) -> int:
        told = [unquote(request) for request in storage.requests]
        return next(n for n, request in enumerate(told) if request.startswith(f'"{method} {below}'))

    fleet.forks = other.forks = True
    with CloudStorage("bucket") as storage:
        environ = storage.environ(fleet.folder)
        storage.refuses = lambda name, content: "/journal/" in name and b"AttemptCollected" in content
        # what is decided after that is not stored, either, so that another attempt may not start yet
        run = gated(fleet, store="gs://bucket/runs", env=environ, started=("first_1.0", "a_1.0"))
        fleet.recorded(AttemptCollected)
        until(lambda: "waits for it" in run.err, lambda: run.err)
        assert "AttemptEnded" in stored_kinds(storage)
        assert "AttemptCollected" not in stored_kinds(storage)
        assert kept(), "the store does not know that it has come home"
        storage.refuses = lambda name, content: False
        until(lambda: not kept(), "it is forgotten")
        assert "AttemptCollected" in stored_kinds(storage)
        # another computer, which is in no hurry to have the files
        storage.requests.clear()
        storage.withholds = lambda name: "/files/" in name or "/artefacts/" in name
        second = other.start("resume", "--from", "gs://bucket/runs", env=environ)
        until(lambda: other.state().controllers == 2)
        fleet.open_gate("go")
        assert run.wait().code == 130
        until(lambda: [line for line in storage.requests if "/files/" in unquote(line)], "what machines get")
        assert second.lives, "it waits for its files, and the run is its own"
        storage.withholds = lambda name: False
        second.finish(0)
        claimed = first_request("PUT", "/bucket/runs/r/journal/")
        assert claimed < first_request("GET", "/bucket/runs/r/files/")
        assert claimed < first_request("GET", "/bucket/runs/r/artefacts/first_1/")
        assert (other.home / "r/first_1/first_1.0/evalfleet.log").read_text() == "said\n"
        assert not list((other.home / "r").glob(".store-*"))
    fleet.sweep()


@pytest.mark.nightly
@STORES
def test_a_run_whose_store_is_away_for_half_its_machines_life_drains_and_nothing_is_lost(
    fleet: Fleet, store: SharedFolder | StoreServer
) -> None:
    run = gated(fleet, "--max-duration", "80s", store=store.url)  # no machine lives longer
    until(lambda: "AttemptCollected" in store.kinds())
    store.stop()
    fleet.open_gate("go")
    assert "drains" in run.finish(3)
    ended = {event.attempt for event in fleet.events() if isinstance(event, AttemptEnded)}
    assert {"first_1.0", "a_1.0", "a_2.0"} <= ended
    known = fleet.results()
    assert known["scored"] == 3
    assert "a_3.0" not in fleet.starts(), "nothing is started that the store does not know of"
    fleet.settled()
    store.start()
    fleet.done("resume", "r", "--max-duration", "10m")
    assert fleet.results()["scored"] == 4
    assert store.kinds() == [type(event).__name__ for event in fleet.events()]
    assert len(fleet.starts()) == len(set(fleet.starts())) == 4
    fleet.settled()


@pytest.mark.parametrize(
    ("store", "lives"),
    [
        ("folder", True),
        pytest.param("folder", False, marks=pytest.mark.nightly),
        pytest.param("server", True, marks=pytest.mark.nightly),
        ("server", False),
    ],
    indirect=["store"],
)
def test_cancel_works_while_the_store_is_away_and_resume_puts_the_rest(
    fleet: Fleet, store: SharedFolder | StoreServer, lives: bool
) -> None:
    """By the controller, and where that is gone, by the command itself."""
    run = gated(fleet, store=store.url)
    until(lambda: "AttemptCollected" in store.kinds())
    store.stop()
    if lives:
        assert fleet("cancel", "r").code == 0
        stopped = run.wait()
        assert stopped.code == 130
    else:
        run.kill()
        stopped = fleet.done("cancel", "r")
    assert "events of run r are not in " in stopped.err
    fleet.settled()  # its machines are gone, although the store never heard of it
    refused = fleet("resume", "r")
    assert refused.code == 2
    assert store.away in refused.err
    assert refused.err.count("\n") == 1
    store.start()
    fleet.open_gate("go")
    assert fleet("resume", "r").code == 0
    assert store.kinds() == [type(event).__name__ for event in fleet.events()]
    assert fleet.results()["scored"] == 4
    fleet.settled()


@pytest.mark.parametrize(
    ("store", "told"),
    [
        ("absent", "there is no folder"),
        ("b.toml", "there is no folder"),
        ("ftp://host/x", "is of no kind that evalfleet knows"),
        ("s3:///x", "names no bucket"),
        ("s3://key:secret@bucket/x", "holds no keys"),
        ("/proc/sys", "/proc/sys"),  # not even root writes there
    ],
)
def test_a_store_that_cannot_be_used_is_refused_in_one_line(
    fleet: Fleet, say: Callable[..., str], store: str, told: str
) -> None:
    fleet.bench(tasks(1))
    refused = say("run", "./b.toml", "--name", "r", "--store", store, code=2)
    assert told in refused
    assert "secret" not in refused
    assert not fleet.records()


def test_a_bucket_that_is_absent_read_only_or_reserved_by_another_home_is_refused_in_one_line(
    fleet: Fleet, say: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.bench(tasks(1))
    with CloudStorage("bucket", "read-only") as storage:
        storage.read_only.add("read-only")
        storage.plant("bucket", "x/r/run.json", b'{"run": "r", "home": "another", "host": "there"}')
        for name, value in storage.environ(fleet.folder).items():
            monkeypatch.setenv(name, value)
        for url, told in (
            ("gs://absent/x", "there is no such bucket: make it first"),
            ("gs://read-only/x", "we may not use it with these credentials"),
            ("gs://bucket/x", "is another home's run: choose another --name"),
        ):
            assert told in say("run", "./b.toml", "--name", "r", "--store", url, code=2)
        assert len(storage.buckets["bucket"]) == 1
    assert not fleet.records()
    assert not fleet.starts()


def test_a_store_that_overwrites_what_it_is_asked_to_create_is_refused(
    fleet: Fleet,
) -> None:
    fleet.bench(tasks(1))
    with s3.serving(conditional=False) as address:
        fleet.environ.update(s3.environ_of(address))
        url = f"s3://{s3.BUCKET}/x"
        told = f"{url} overwrites objects that it is asked to create"
        fleet("run", "./b.toml", "--name", "r", "--store", url).refused(told)
        assert not fleet.starts()
        fleet.environ["EVALFLEET_STORE"] = url
        doctor = fleet("doctor", "local")
        assert (doctor.code, told in doctor.out) == (4, True), doctor
    with s3.serving() as address:
        fleet.environ["AWS_ENDPOINT_URL"] = address
        assert "runs can have a copy there" in fleet.done("doctor", "local").out
        assert asyncio.run(open_objects(url, s3.environ_of(address)).names("")) == []


def test_a_run_that_is_over_is_whole_in_the_store_and_no_other_gets_its_name(
    fleet: Fleet, say: Callable[..., str], bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.bench(tasks(3, 'echo said; score 1; touch "$EVALFLEET_OUT/a b%.txt"'))
    fleet.done("run", "./b.toml", "--name", "r", "--workers", "2", "--store", "bucket")
    assert journal_kinds(bucket) == [type(event).__name__ for event in fleet.events()]
    assert (bucket / "r" / "results.json").read_bytes() == (fleet.home / "r" / "results.json").read_bytes()
    assert (bucket / "r/artefacts/a_1/a_1.0/evalfleet.log").read_text() == "said\n"
    assert (bucket / "r/artefacts/a_1/a_1.0/a b%25.txt").exists()
    assert len(list((bucket / "r" / "files").iterdir())) == 1
    fleet.settled()
    # as if the store had been away at the end
    for path in sorted((bucket / "r" / "journal").glob("[0-9]*"))[-2:]:
        path.unlink()
    assert "events of r are in file://" in fleet.done("resume", "r", code=2).err
    assert journal_kinds(bucket) == [type(event).__name__ for event in fleet.events()]
    # from another home
    before = sorted((bucket / "r").rglob("*"))
    fleet.use_home(fleet.folder / "second")
    monkeypatch.setenv("EVALFLEET_HOME", str(fleet.home))
    again = ("run", "./b.toml", "--name", "r", "--store", str(bucket))
    assert "holds a run already" in say(*again, code=2)
    assert "holds a run already" in say(*again, "--dry-run", code=2)
    assert not fleet.records()
    assert sorted((bucket / "r").rglob("*")) == before
    assert "holds no run 'x': it has r" in say("resume", "x", "--from", str(bucket), code=2)
    assert "holds no run" in say("resume", "--from", str(fleet.folder / "gates"), code=2)
    assert "has no unrun tasks" in say("resume", "--from", str(bucket), code=2)
    assert json.loads(say("show", "r", "--json"))["scored"] == 3
    assert say("logs", "r", "a_1") == "said\n"


def test_a_damaged_store_is_named(
    fleet: Fleet, say: Callable[..., str], bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.bench(tasks(1))
    fleet.done("run", "./b.toml", "--name", "r", "--store", "bucket")
    monkeypatch.setenv("EVALFLEET_HOME", str(fleet.folder / "second"))
    third = sorted((bucket / "r" / "journal").iterdir())[2]
    third.write_text(third.read_text().replace("worker-1", "worker-7"))
    assert "is damaged: object 3" in say("resume", "r", "--from", str(bucket), code=2)
    third.unlink()
    assert "object 4 of the journal" in say("resume", "r", "--from", str(bucket), code=2)


def test_what_is_no_object_of_a_run_is_passed_over_or_named(
    fleet: Fleet, say: Callable[..., str], bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.bench(tasks(1))
    fleet.done("run", "./b.toml", "--name", "r", "--store", "bucket")
    journal = bucket / "r" / "journal"
    os.mkfifo(journal / "000000999.jsonl")
    os.mkfifo(bucket / "r" / "artefacts" / "a_1" / "a_1.0" / "pipe")
    (journal / "000000001.jsonl~").touch()
    (bucket / os.fsdecode(b"\xff\n")).mkdir()
    monkeypatch.setenv("EVALFLEET_HOME", str(fleet.folder / "second"))
    assert "has no unrun tasks" in say("resume", "--from", str(bucket), code=2)
    assert json.loads(say("show", "r", "--json"))["scored"] == 1
    _, second, *_ = sorted(journal.glob("*.jsonl"))
    os.truncate(second, 10 << 40)
    monkeypatch.setenv("EVALFLEET_HOME", str(fleet.folder / "third"))
    assert "which no object of a run does: remove it" in say("resume", "--from", str(bucket), code=2)
    second.unlink()
    os.mkfifo(second)
    assert "object 3 of the journal" in say("resume", "--from", str(bucket), code=2)


def _cut(archive: Path) -> None:
    archive.write_bytes(archive.read_bytes()[:700])


def _change(archive: Path) -> None:
    archive.write_bytes(archive.read_bytes().replace(b"score", b"scare", 1))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_cut, "in the store is damaged"),
        pytest.param(_change, "in the store is damaged", marks=pytest.mark.nightly),
        (Path.unlink, "/bucket/r/files has no archive of what machines get: put it back"),
    ],
)
def test_files_that_are_damaged_or_gone_in_the_store_are_told_in_one_line_and_nothing_is_lost(
    fleet: Fleet, other: Fleet, bucket: Path, damage: Callable[[Path], None], says: str
) -> None:
    run = gated(fleet)
    until(lambda: "AttemptCollected" in journal_kinds(bucket))
    run.kill()
    fleet.open_gate("go")
    (fleet.folder / "run.sh").unlink()  # the other computer does not have it
    (archive,) = (bucket / "r" / "files").iterdir()
    whole = archive.read_bytes()
    damage(archive)
    refused = other("resume", "--from", str(bucket))
    assert refused.code == 2, refused
    told = [line for line in refused.err.splitlines() if says in line]
    assert len(told) == 1, refused.err
    assert refused.err.count("\n") == 3, "that, whose run it was, and what is left of it"
    assert other.state().ended_at is None
    assert not list((other.home / "r" / ".files").glob("*")), "nothing of it is kept"
    archive.write_bytes(whole)
    assert other.done("resume", "--from", str(bucket))
    assert other.results()["scored"] == 4
    assert journal_kinds(bucket) == [type(event).__name__ for event in other.events()]
    assert (other.home / "r/first_1/first_1.0/evalfleet.log").read_text() == "said\n"
    other.settled()
    # what an attempt left is gone from there, and was never on a third computer
    shutil.rmtree(bucket / "r/artefacts/first_1")
    other.use_home(other.folder / "third")
    lacking = other.done("resume", "--from", str(bucket), code=2).err
    assert "r/artefacts/ does not hold all that 1 attempts left: first_1.0\n" in lacking
    assert "has no unrun tasks" in lacking
    fleet.sweep()
