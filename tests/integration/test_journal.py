"""The SQLite journal on real files, with real processes that are really killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evalfleet.errors import JournalError, JournalForeign, LeaseLost, RequestError, RunHeld
from evalfleet.events import (
    SCHEMA,
    AttemptStarted,
    Event,
    MachineAllocated,
    MachineQueued,
    Record,
    RunEnded,
    StopRequested,
    decode,
    upgrade,
)
from evalfleet.journal import Holder, SqliteJournal, Store
from evalfleet.journal.checksums import checksum, seed
from evalfleet.journal.database import APPLICATION_ID, LAYOUT, build, file_system
from evalfleet.model import SECOND, AttemptId, MachineId, TaskId
from evalfleet.ports import Journal
from tests.waiting import PATIENCE_S

NOW = 1_800_000_000 * SECOND
DATA = Path(__file__).parent.parent / "data"

CHILD = """
import asyncio, json, os, sys, time
from pathlib import Path
from evalfleet.errors import FleetError
from evalfleet.events import AttemptStarted, StopRequested
from evalfleet.journal import Holder, Store

def say(**what):
    os.write(1, (json.dumps(what) + "\\n").encode())

def named(names):
    return [AttemptStarted(attempt=name, task=name, machine="m") for name in names]

async def storm(journal, worker):
    n = 0
    while True:
        names = [f"{os.getpid()}.{worker}.{n}.{k}" for k in range(n % 3 + 1)]
        await journal.append(time.time_ns() // 1000, named(names))
        say(acked=names)
        n += 1

async def main(home, *flags):
    now = time.time_ns() // 1000
    store = Store.open(Path(home))
    journal = store.acquire("r", Holder.here(now), now, take_over="take_over" in flags)
    say(epoch=journal.epoch, pid=os.getpid())
    for line in sys.stdin:
        verb, *names = line.split()
        if verb == "storm":
            await asyncio.gather(*(storm(journal, worker) for worker in range(8)))
        elif verb == "append":
            await journal.append(now, named(names))
            say(acked=names)
        elif verb == "fork" and os.fork() == 0:
            try:
                asyncio.run(journal.append(now, named(names)))
            except FleetError as err:
                say(forked=os.getpid(), error=type(err).__name__)
            sys.stdin.read()  # lives until the test ends, after its parent was killed
            os._exit(0)
    await journal.close()

try:
    asyncio.run(main(*sys.argv[1:]))
except FleetError as err:
    say(error=type(err).__name__, message=str(err))
"""


class Child:
    """Another controller, in a process of its own."""

    def __init__(self, home: Path, *flags: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", CHILD, str(home), *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_env(),
        )

    def tell(self, line: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout
        heard: dict[str, Any] = json.loads(self.process.stdout.readline())
        return heard

    def kill(self) -> list[dict[str, Any]]:
        """With kill -9, as it stands. What it had said and was not heard yet."""
        assert self.process.stdout
        self.process.kill()
        rest = [json.loads(line) for line in self.process.stdout if line.endswith(b"\n")]
        self.end()
        return rest

    def end(self) -> None:
        assert self.process.stdin
        assert self.process.stdout
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def child_env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def store(home: Path) -> Store:
    made = Store.open(home)
    made.create_stream("r", "run", NOW, [started("first")])
    return made


@contextlib.contextmanager
def child(home: Path, *flags: str) -> Iterator[Child]:
    it = Child(home, *flags)
    try:
        yield it
    finally:
        if it.process.poll() is None:
            it.process.kill()
        it.end()


def started(name: str) -> AttemptStarted:
    return AttemptStarted(attempt=AttemptId(name), task=TaskId(name), machine=MachineId("m"))


def names(records: Iterator[Record] | Sequence[Record]) -> list[str]:
    return [record.event.attempt for record in records if isinstance(record.event, AttemptStarted)]


def acquire(store: Store, take_over: bool = False) -> SqliteJournal:
    return store.acquire("r", Holder.here(NOW), NOW, take_over)


def foreign_tables(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as conn:
        conn.execute("CREATE TABLE photos (id INTEGER)")
        conn.commit()


# What is written is read


def test_round_trip(store: Store) -> None:
    async def main() -> None:
        journal: Journal = acquire(store)
        await journal.append(NOW + 1, [started("a"), RunEnded(status="done")])
        await journal.append(NOW, [])
        await journal.append(NOW - 5, [started("ü\0'")])
        assert list(journal.read()) == list(store.read("r"))
        await acquire(store, take_over=True).close()

    asyncio.run(main())
    assert list(store.read("r")) == [
        Record(1, 0, NOW, started("first")),
        Record(2, 1, NOW + 1, started("a")),
        Record(3, 1, NOW + 1, RunEnded(status="done")),
        Record(4, 1, NOW + 1, started("ü\0'")),  # time never runs backwards
    ]
    assert [record.seq for record in store.read("r", after=2)] == [3, 4]
    assert list(store.read("r", after=4)) == []
    assert Store.open(store.home).home_id == store.home_id
    assert store.home_id.isalnum()
    assert len(store.home_id) == 6


def test_reading_goes_on_over_many_pages(store: Store) -> None:
    many = [started(str(n)) for n in range(2000)]
    store.create_stream("big", "run", NOW, many)
    assert names(store.read("big")) == [str(n) for n in range(2000)]


def test_streams_are_listed_and_names_are_taken_once(store: Store) -> None:
    store.create_stream("p", "pool", NOW + 1, [])
    assert [(info.name, info.kind, info.created_at, info.epoch) for info in store.streams()] == [
        ("r", "run", NOW, 0),
        ("p", "pool", NOW + 1, 0),
    ]
    with pytest.raises(RequestError, match=r"'r' is taken; choose another with --name"):
        store.create_stream("r", "run", NOW, [started("other")])
    assert names(store.read("r")) == ["first"]
    for use in (lambda: list(store.read("none")), lambda: store.ask("none", started("x"), NOW)):
        with pytest.raises(RequestError, match="no run or pool 'none'"):
            use()


def test_appends_made_while_one_is_committed_share_a_commit_in_order(store: Store) -> None:
    statements: list[str] = []

    async def main() -> list[int]:
        journal = acquire(store)
        journal._writer._conn.set_trace_callback(statements.append)
        done: list[int] = []

        async def one(n: int) -> None:
            await journal.append(NOW, [started(f"{n}.{k}") for k in range(n % 3)])
            done.append(n)

        await asyncio.gather(*(one(n) for n in range(500)))
        await journal.close()
        return done

    assert asyncio.run(main()) == list(range(500))
    assert names(store.read("r"))[1:] == [f"{n}.{k}" for n in range(500) for k in range(n % 3)]
    assert statements.count("COMMIT") < 50


def test_a_cancelled_caller_does_not_take_its_events_back(store: Store) -> None:
    async def main() -> None:
        journal = acquire(store)
        first = asyncio.create_task(journal.append(NOW, [started("a")]))
        await asyncio.sleep(0)
        first.cancel()
        await journal.append(NOW, [started("b")])
        assert first.cancelled()
        await journal.close()

    asyncio.run(main())
    assert names(store.read("r")) == ["first", "a", "b"]


def test_closing_writes_what_is_queued_and_lets_go(store: Store) -> None:
    async def main() -> None:
        journal = acquire(store)
        queued = [asyncio.create_task(journal.append(NOW, [started(str(n))])) for n in range(10)]
        await asyncio.sleep(0)
        await asyncio.gather(journal.close(), journal.close())
        await asyncio.gather(*queued)
        with pytest.raises(JournalError, match="closed"):
            await journal.append(NOW, [started("late")])
        await journal.close()

    asyncio.run(main())
    assert len(list(store.read("r"))) == 11
    assert store.stream("r").holder is None
    assert list((store.home / ".locks").glob("r.*")) == []


# Requests


def test_requests_are_answered_with_the_events_that_answer_them(store: Store) -> None:
    async def main() -> None:
        journal = acquire(store)
        assert await journal.requests() == []
        stop = StopRequested(reason="user")
        first = store.ask("r", stop, NOW)
        second = store.ask("r", stop, NOW)
        assert [(request.id, request.event) for request in await journal.requests()] == [
            (first, stop),
            (second, stop),
        ]
        await journal.append(NOW, [stop], answered=[first])
        assert [request.id for request in await journal.requests()] == [second]
        successor = acquire(store, take_over=True)
        with pytest.raises(LeaseLost):
            await journal.append(NOW, [stop], answered=[second])
        assert [request.id for request in await successor.requests()] == [second]
        await successor.append(NOW, [], answered=[second])
        assert await successor.requests() == []
        await journal.close()
        await successor.close()

    asyncio.run(main())
    assert len(list(store.read("r"))) == 2


def test_a_request_that_cannot_be_understood_is_left_out(store: Store) -> None:
    async def main() -> None:
        journal = acquire(store)
        with contextlib.closing(sqlite3.connect(store.path)) as conn:
            conn.execute("INSERT INTO request VALUES (1, 'r', 0, 99, '{}', 0)")
            conn.commit()
        assert await journal.requests() == []
        await journal.close()

    asyncio.run(main())


def test_looking_for_requests_in_vain_breaks_nothing_that_was_written(store: Store) -> None:
    async def main() -> None:
        journal = acquire(store)
        with contextlib.closing(sqlite3.connect(store.path)) as conn:
            conn.execute("ALTER TABLE request RENAME TO away")
            append = asyncio.create_task(journal.append(NOW, [started("a")]))
            look = asyncio.create_task(journal.requests())  # in one batch with the append
            await append
            with pytest.raises(JournalError, match="no such table"):
                await look
            conn.execute("ALTER TABLE away RENAME TO request")
        await journal.append(NOW, [started("b")])
        assert await journal.requests() == []
        await journal.close()

    asyncio.run(main())
    assert names(store.read("r")) == ["first", "a", "b"]


# Crashes


@pytest.mark.parametrize("seed", range(5))
def test_what_was_acknowledged_survives_kill_9(store: Store, seed: int) -> None:
    acked: list[str] = []
    with child(store.home) as writer:
        assert writer.hear()["epoch"] == 1
        writer.tell("storm")
        for _ in range(random.Random(seed).randrange(1, 150)):
            acked += writer.hear()["acked"]
        for heard in writer.kill():
            acked += heard["acked"]
    records = list(store.read("r"))  # raises if a number is missing
    recorded = set(names(records))
    assert set(acked) <= recorded
    assert len(recorded) == len(records)
    whole = {name.rsplit(".", 1)[0]: int(name.split(".")[-2]) % 3 + 1 for name in recorded if name != "first"}
    assert sum(whole.values()) + 1 == len(records), "an append was recorded in part"
    journal = acquire(store)  # died -> taken at once
    assert journal.epoch == 2
    asyncio.run(journal.close())


def test_a_forked_child_neither_writes_nor_keeps_the_lock(store: Store) -> None:
    with child(store.home) as parent:
        parent.hear()
        parent.tell("fork x")
        forked = parent.hear()
        assert forked["error"] == "JournalError"
        parent.process.kill()
        parent.process.wait()
        os.kill(forked["forked"], 0)  # still there
        asyncio.run(acquire(store).close())
    assert names(store.read("r")) == ["first"]


# Two controllers


def test_opening_the_home_again_does_not_unlock_what_is_written_to(store: Store) -> None:
    """POSIX drops all of a process's locks on a file with the first descriptor of it that is closed.

    Another process would then believe itself the last one and remove the log that we still write to.
    """

    async def write() -> None:
        journal = acquire(store)
        await journal.append(NOW, [started("before")])
        Store.open(store.home)
        visit = "import sys; from pathlib import Path; from evalfleet.journal import Store; "
        visit += "store = Store.open(Path(sys.argv[1]))"
        home = str(store.home)
        subprocess.run([sys.executable, "-c", visit, home], env=child_env(), check=True, timeout=PATIENCE_S)
        await journal.append(NOW, [started("after")])
        look = visit + '; print([record.event.attempt for record in store.read("r", 1)])'
        seen = subprocess.run(
            [sys.executable, "-c", look, home],
            env=child_env(),
            check=True,
            timeout=PATIENCE_S,
            capture_output=True,
        )
        assert seen.stdout.decode().strip() == "['before', 'after']"
        await journal.close()

    asyncio.run(write())


def test_a_second_controller_is_told_who_holds_the_run(store: Store) -> None:
    with child(store.home) as first, child(store.home) as second:
        heard = [first.hear(), second.hear()]
        (pid,) = (it["pid"] for it in heard if "pid" in it)
        (refused,) = (it for it in heard if "error" in it)
        assert refused["error"] == "RunHeld"
        for part in (f"pid {pid} on ", "`evalfleet watch r`", "--take-over", " since 20"):
            assert part in refused["message"]
        held = store.held(store.stream("r"), NOW)
        assert held is not None
        assert held.pid == pid


def test_after_a_take_over_the_first_can_write_no_more(store: Store) -> None:
    with child(store.home) as first:
        first.hear()
        first.tell("append a")
        assert first.hear() == {"acked": ["a"]}
        with child(store.home, "take_over") as second:
            pid = second.hear()["pid"]
            second.tell("append b")
            assert second.hear() == {"acked": ["b"]}
            first.tell("append c")
            lost = first.hear()
            assert lost["error"] == "LeaseLost"
            assert f"pid {pid} on " in lost["message"]
    assert [(record.epoch, record.seq) for record in store.read("r")] == [(0, 1), (1, 2), (2, 3)]
    assert names(store.read("r")) == ["first", "a", "b"]


def test_one_that_lost_the_run_stays_out_and_learns_it_when_idle(store: Store) -> None:
    async def main() -> None:
        journal = acquire(store)
        await acquire(store, take_over=True).close()
        with pytest.raises(LeaseLost, match="let it go since"):
            await journal.requests()
        for _ in range(2):
            with pytest.raises(LeaseLost):
                await journal.append(NOW, [started("x")])
        await journal.close()
        with pytest.raises(LeaseLost):
            await journal.append(NOW, [started("x")])

    asyncio.run(main())
    assert names(store.read("r")) == ["first"]


def test_from_another_computer_only_the_lease_tells(store: Store) -> None:
    elsewhere = Holder(pid=1, host="other", computer="other", since=NOW)
    journal = store.acquire("r", elsewhere, NOW)
    with pytest.raises(RunHeld, match=r"pid 1 on other since 2027-01-1\d \d\d:\d\d:00[+-]\d\d:\d\d"):
        store.acquire("r", Holder.here(NOW), NOW + 29 * SECOND)
    second = store.acquire("r", Holder.here(NOW), NOW + 30 * SECOND)
    assert second.epoch == 2
    assert [path.name for path in (store.home / ".locks").glob("r.*")] == ["r.2.lock"]
    asyncio.run(journal.close())
    assert store.stream("r").holder is not None, "the one that lost it has no say any more"
    asyncio.run(second.close())


def test_the_lease_is_renewed(store: Store) -> None:
    renewed = threading.Semaphore(0)

    def clock() -> int:
        renewed.release()
        return NOW + 100 * SECOND

    journal = store.acquire("r", Holder.here(NOW), NOW, renew_s=0.01, clock=clock)
    for _ in range(2):  # asked a second time: the first renewal is written
        assert renewed.acquire(timeout=PATIENCE_S)
    assert store.stream("r").lease_until == NOW + 130 * SECOND
    asyncio.run(journal.close())


def test_a_lock_that_the_store_does_not_know_is_respected(store: Store) -> None:
    journal = acquire(store)
    with contextlib.closing(sqlite3.connect(store.path)) as conn:
        conn.execute("UPDATE stream SET epoch = 0, holder = NULL")
        conn.commit()
    with pytest.raises(RunHeld, match="does not know"):
        acquire(store, take_over=True)
    asyncio.run(journal.close())


Step = tuple[str, int]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["acquire", "take over", "append", "append", "crash", "close"]), st.integers(0, 3)
        ),
        max_size=14,
    )
)
def test_any_interleaving_keeps_one_writer_and_every_acknowledged_event(steps: list[Step]) -> None:
    home = Path(tempfile.mkdtemp())
    try:
        asyncio.run(interleave(home, steps))
    finally:
        shutil.rmtree(home)


async def interleave(home: Path, steps: list[Step]) -> None:
    """A crashed controller's thread lives on here, as a process does that was only believed dead."""
    store = Store.open(home)
    store.create_stream("r", "run", NOW, [])
    made: list[SqliteJournal] = []
    closed: set[int] = set()
    alive: int | None = None  # which of those made holds its lock, and is the newest
    expected: list[str] = []
    for number, (verb, which) in enumerate(steps):
        chosen = len(made) - 1 - which % len(made) if made else -1
        if verb in ("acquire", "take over"):
            if alive is not None and verb == "acquire":
                with pytest.raises(RunHeld):
                    acquire(store)
            else:
                made.append(acquire(store, verb == "take over"))
                alive = len(made) - 1
        elif chosen == -1 or chosen in closed:
            continue
        elif verb == "append" and chosen == len(made) - 1:
            await made[chosen].append(NOW, [started(f"{number}")])
            expected.append(f"{number}")
        elif verb == "append":
            with pytest.raises(LeaseLost):
                await made[chosen].append(NOW, [started(f"{number}")])
        else:
            made[chosen]._lock.drop() if verb == "crash" else await made[chosen].close()
            closed |= {chosen} if verb == "close" else set()
            alive = None if alive == chosen else alive
    assert names(store.read("r")) == expected
    assert [journal.epoch for journal in made] == list(range(1, len(made) + 1))
    for journal in made:
        await journal.close()


# Trouble with the disk


def fill(store: Store, room: int) -> tuple[list[str], JournalError]:
    """Append until it fails; then check that it stays failed. What was acknowledged, and the error."""

    async def main() -> tuple[list[str], JournalError]:
        journal = acquire(store)
        acked: list[str] = []

        async def until_it_fails() -> None:
            while len(acked) * 10_000 < room:
                pair = [started(f"{len(acked) + k}".ljust(10_000, "x")) for k in range(2)]
                await journal.append(NOW, pair)
                acked.extend(event.attempt for event in pair)

        with pytest.raises(JournalError) as told:
            await until_it_fails()
        with pytest.raises(JournalError) as again:
            await journal.append(NOW, [started("small")])
        assert str(again.value) == str(told.value)
        await journal.close()
        return acked, told.value

    return asyncio.run(main())


def test_a_full_disk_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("NOT RUN: needs root to mount a small file system")
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", tmp_path], capture_output=True
    ).returncode:
        pytest.skip("NOT RUN: root here may not mount a small file system")
    try:
        ballast = tmp_path / "ballast"
        ballast.write_bytes(bytes(1_000_000))
        store = Store.open(tmp_path / "home")
        store.create_stream("r", "run", NOW, [])
        acked, error = fill(store, 3_000_000)
        assert "the disk is full" in str(error)
        assert acked
        assert names(store.read("r")) == acked
        ballast.unlink()
        asyncio.run(append_one(store, "after"))
        assert names(store.read("r")) == [*acked, "after"]
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)


async def append_one(store: Store, name: str) -> None:
    journal = acquire(store)
    await journal.append(NOW, [started(name)])
    await journal.close()


LIMITED = """
import asyncio, resource, signal, sys
from pathlib import Path
from evalfleet.errors import JournalError
from evalfleet.events import AttemptStarted
from evalfleet.journal import Holder, Store

async def main(home):
    store = Store.open(Path(home))
    journal = store.acquire("r", Holder.here(0), 0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
    for n in range(1000):
        try:
            event = AttemptStarted(attempt=f"{n}".ljust(5000, "x"), task="", machine="")
            await journal.append(0, [event, event])
        except JournalError as err:
            print(n, err, flush=True)
            break
    await journal.close()

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
asyncio.run(main(sys.argv[1]))
"""


def test_a_write_that_the_system_refuses_is_told(store: Store) -> None:
    argv = [sys.executable, "-c", LIMITED, str(store.home)]
    told = subprocess.run(argv, env=child_env(), capture_output=True, text=True, check=True).stdout
    count, message = told.split(" ", 1)
    assert str(store.path) in message
    assert message.count("\n") == 1
    assert len(list(store.read("r"))) == 1 + 2 * int(count)
    asyncio.run(append_one(store, "after"))


def test_a_database_that_stays_locked_is_told(store: Store) -> None:
    impatient = Store.open(store.home, busy_s=0.05)

    async def main() -> None:
        journal = acquire(impatient)
        with contextlib.closing(sqlite3.connect(store.path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(JournalError, match="stays locked by another process"):
                Store.open(store.home, busy_s=0.05)
            with pytest.raises(JournalError, match="stays locked by another process"):
                await journal.append(NOW, [started("x")])
            assert names(store.read("r")) == ["first"], "a reader is not kept out"
        with pytest.raises(JournalError, match="stays locked"):  # the caller's state has run ahead
            await journal.append(NOW, [started("y")])
        await journal.close()

    asyncio.run(main())
    assert names(store.read("r")) == ["first"]


AS_NOBODY = """
import os, sys
from pathlib import Path
from evalfleet.errors import FleetError
from evalfleet.journal import Holder, Store
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
home = Path(sys.argv[1])
reader = Store.open(home, read_only=True)
print(reader.home_id, len(reader.streams()), sum(1 for _ in reader.read("r")))
for refused in (
    lambda: Store.open(home),
    lambda: Store.open(home / "new"),
    lambda: reader.ask("r", next(reader.read("r")).event, 0),
    lambda: reader.acquire("r", Holder.here(0), 0, take_over=True),
):
    try:
        refused()
        print("NOT REFUSED")
    except FleetError as err:
        print(type(err).__name__, err)
"""


@pytest.mark.parametrize("state", ["closed", "being written", "rollback"])
def test_a_read_only_home_is_read_and_not_written(state: str) -> None:
    top = Path(tempfile.mkdtemp())  # not tmp_path: that is closed to other users
    home = top / "home"
    if state == "rollback":
        home.mkdir()
        build(home / "fleet.db", wal=False)
    store = Store.open(home)
    store.create_stream("r", "run", NOW, [started("first")])
    journal = acquire(store)
    try:
        asyncio.run(journal.append(NOW, [started("second")]))
        if state == "closed":
            asyncio.run(journal.close())
        for path in home.iterdir():
            path.chmod(0o555 if path.is_dir() else 0o444)
        home.chmod(0o555)
        top.chmod(0o755)
        argv = [sys.executable, "-c", AS_NOBODY, str(home)]
        told = subprocess.run(argv, env=child_env(), capture_output=True, text=True)
        assert told.stderr == ""
        first, *refusals = told.stdout.splitlines()
        assert first == f"{store.home_id} 1 2"
        assert len(refusals) == 4
        for refusal in refusals:
            assert refusal.startswith(f"JournalError {home}")
        assert "EVALFLEET_HOME" in refusals[0]
    finally:
        home.chmod(0o755)
        for path in home.iterdir():
            path.chmod(0o755)
        asyncio.run(journal.close())
        shutil.rmtree(top)


# Files that are not what they should be


def refuses_untouched(home: Path, error: type[Exception], match: str) -> None:
    before = {path: path.read_bytes() for path in home.glob("fleet.db*") if path.suffix != ".db-shm"}
    for read_only in (False, True):
        with pytest.raises(error, match=match) as told:
            list(Store.open(home, read_only=read_only).read("r"))
        assert "\n" not in str(told.value)
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("content", [b"not a database", b"SQLite format 3\0", bytes(5000)])
def test_a_file_that_is_no_database(home: Path, content: bytes) -> None:
    home.mkdir()
    (home / "fleet.db").write_bytes(content)
    refuses_untouched(home, JournalForeign, "is not a database")


def test_a_database_of_another_program(home: Path) -> None:
    home.mkdir()
    foreign_tables(home / "fleet.db")
    refuses_untouched(home, JournalForeign, "of another program")


def test_a_journal_of_a_newer_evalfleet(store: Store) -> None:
    with contextlib.closing(sqlite3.connect(store.path)) as conn:
        conn.execute(f"PRAGMA user_version = {LAYOUT + 1}")
    refuses_untouched(store.home, JournalForeign, "newer evalfleet .* upgrade evalfleet")


def test_an_event_of_a_newer_evalfleet(store: Store) -> None:
    with contextlib.closing(sqlite3.connect(store.path)) as conn:
        at, kind, body = conn.execute("SELECT at, kind, body FROM event").fetchone()
        right = (checksum(seed("r"), 1, 0, 99, at, kind.encode(), body.encode()),)
        conn.execute("UPDATE event SET v = 99, checksum = ?", right)
        conn.execute("UPDATE stream SET checksum = ?", right)
        conn.commit()
    refuses_untouched(store.home, JournalForeign, "newer evalfleet .* upgrade evalfleet")


def test_a_truncated_journal(store: Store) -> None:
    store.create_stream("big", "run", NOW, [started(str(n)) for n in range(1000)])
    os.truncate(store.path, store.path.stat().st_size // 8192 * 4096)
    refuses_untouched(store.home, JournalForeign, "damaged")


def test_a_journal_with_rubbish_inside(store: Store) -> None:
    with store.path.open("r+b") as file:
        file.seek(4096)
        file.write(random.Random(1).randbytes(store.path.stat().st_size - 4096))
    refuses_untouched(store.home, JournalForeign, "damaged")


def test_a_journal_with_an_event_missing_or_unreadable(store: Store) -> None:
    with contextlib.closing(sqlite3.connect(store.path)) as conn:
        conn.execute("""UPDATE event SET body = '{"kind":"Nonsense"}', checksum = NULL""")
        conn.execute("UPDATE stream SET checksum = NULL")
        conn.commit()
        refuses_untouched(store.home, JournalForeign, "event 1 of 'r': .* cannot be read")
        conn.execute("UPDATE event SET seq = 2")
        conn.commit()
        refuses_untouched(store.home, JournalForeign, "event 1 of 'r' is missing")


def test_a_home_that_is_a_file_or_empty_or_absent(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for home in (file, file / "below"):
        for read_only in (False, True):
            with pytest.raises(RequestError, match=f"{file} is a file, not a folder"):
                Store.open(home, read_only=read_only)
    assert file.read_text() == "mine"
    for options in ({"create": False}, {"read_only": True}):
        with pytest.raises(RequestError, match="holds no journal"):
            Store.open(tmp_path / "none", **options)
        assert not (tmp_path / "none").exists()
    (tmp_path / "fleet.db").touch()
    assert Store.open(tmp_path).streams() == []


def test_two_that_open_a_new_home_at_once_get_the_same_one(home: Path) -> None:
    script = "import sys; from pathlib import Path; from evalfleet.journal import Store\n"
    script += "sys.stdin.read(); print(Store.open(Path(sys.argv[1])).home_id)"
    argv = [sys.executable, "-c", script, str(home)]
    pipe = subprocess.PIPE
    both = [subprocess.Popen(argv, stdin=pipe, stdout=pipe, env=child_env()) for _ in range(4)]
    for process in both:
        assert process.stdin
        process.stdin.close()
    for process in both:
        process.wait()
    ids: set[bytes] = set()
    for process in both:
        assert process.stdout
        with process.stdout:
            ids.add(process.stdout.read())
    assert len(ids) == 1
    assert len(ids.pop()) == 7


# Older journals


@pytest.fixture
def old_home(home: Path) -> Path:
    home.mkdir()
    with contextlib.closing(sqlite3.connect(home / "fleet.db")) as conn:
        conn.executescript((DATA / "journal_v1.sql").read_text("utf-8"))
    return home


def test_a_journal_of_version_1_opens_for_ever(old_home: Path) -> None:
    store = Store.open(old_home)
    assert store.home_id == "k3x9q0"
    records = list(store.read("first"))
    kinds = [type(record.event).__name__ for record in records]
    assert kinds == [
        *("RunPlanned", "TasksPlanned", "ControllerStarted"),
        *("AttemptStarted", "AttemptEnded", "StopRequested"),
    ]

    async def main() -> None:
        journal = store.acquire("first", Holder.here(NOW), NOW)
        (request,) = await journal.requests()
        assert request.event == StopRequested(reason="user", drain=True)
        await journal.append(NOW, [request.event], answered=[request.id])
        await journal.close()

    asyncio.run(main())
    assert list(store.read("first"))[:6] == records
    assert list(store.read("first"))[6].epoch == 2


def test_a_journal_of_version_1_goes_on_in_the_schema_of_today(old_home: Path) -> None:
    store, machine = Store.open(old_home), MachineId("first-k3x9q0-1")
    before = [record.event for record in store.read("first")]
    now: list[Event] = [MachineQueued(machine), MachineAllocated(machine, NOW, "start 1", "node-7")]

    async def main() -> None:
        journal = store.acquire("first", Holder.here(NOW), NOW)
        await journal.append(NOW, now)
        await journal.close()

    asyncio.run(main())
    assert [record.event for record in Store.open(old_home).read("first")] == [*before, *now]
    with contextlib.closing(sqlite3.connect(old_home / "fleet.db")) as conn:
        written = [v for (v,) in conn.execute("SELECT v FROM event ORDER BY seq")]
    assert written == [*[1] * len(before), SCHEMA, SCHEMA]


def test_an_event_of_an_older_schema_is_lifted_when_read(old_home: Path) -> None:
    with contextlib.closing(sqlite3.connect(old_home / "fleet.db")) as conn:
        before = [record.event for record in Store.open(old_home).read("first")]
        conn.execute("UPDATE event SET v = 0")
        conn.commit()
        assert [record.event for record in Store.open(old_home).read("first")] == before
        (body,) = conn.execute("SELECT body FROM event WHERE kind = 'AttemptStarted'").fetchone()
    lifted = upgrade(
        body.encode(),
        1,
        target=3,
        upgrades={
            (1, "AttemptStarted"): lambda old: {**old, "machine": old["machine"] + "-lifted"},
            (2, "AttemptStarted"): lambda old: {**old, "task": old["machine"]},
        },
    )
    event = decode(lifted)
    assert isinstance(event, AttemptStarted)
    assert (event.machine, event.task) == ("first-k3x9q0-1-lifted",) * 2


# File systems


def test_a_rollback_journal_does_where_wal_cannot(home: Path) -> None:
    home.mkdir()
    build(home / "fleet.db", wal=False)
    store = Store.open(home)
    store.create_stream("r", "run", NOW, [])
    asyncio.run(append_one(store, "a"))
    assert names(store.read("r")) == ["a"]
    assert mode(store) == "delete"


def test_wal_is_used_where_it_can(store: Store) -> None:
    assert mode(store) == "wal"
    with contextlib.closing(sqlite3.connect(store.path)) as conn:
        assert conn.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)


def mode(store: Store) -> str:
    with contextlib.closing(sqlite3.connect(store.path)) as conn:
        (answer,) = conn.execute("PRAGMA journal_mode").fetchone()
    return str(answer)


def test_the_file_system_of_a_folder_is_found_in_the_mount_table() -> None:
    mounts = (
        "/dev/sda / ext4 rw 0 0\nsrv:/x /mnt/my\\040team nfs4 rw 0 0\nt /mnt/my\\040team/fast tmpfs rw 0 0\n"
    )
    for folder, kind in (
        ("/home/me", "ext4"),
        ("/mnt/my team/runs", "nfs4"),
        ("/mnt/my team", "nfs4"),
        ("/mnt/my teammate", "ext4"),
        ("/mnt/my team/fast/runs", "tmpfs"),
    ):
        assert file_system(Path(folder), mounts) == kind
