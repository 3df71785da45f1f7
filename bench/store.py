"""What a copy in object storage costs an attempt, and how soon and how safely another computer takes over.

The stores are a folder on this disk and moto's S3 server, a Python program on the same computer: what is
measured is our own part, not the way to a cloud. In a race, one computer writes as fast as it can while
another one takes the run. A double write would be an event that was acknowledged to one of them and is not in
the store, or a number of the sequence that both believe to have written.

moto's server answers one request at a time here: with threads it acknowledges one creation to two clients.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from evalfleet.api.resumption import fetch_run
from evalfleet.clock import WallClock
from evalfleet.errors import LeaseLost
from evalfleet.events import (
    AttemptCollected,
    AttemptEnded,
    AttemptStarted,
    Event,
    GradingFailed,
    MachineRequested,
    RunPlanned,
    TasksPlanned,
)
from evalfleet.journal import Holder, Store
from evalfleet.mirror import JournalSequence, Mirror, MirroredJournal, collected_in, open_objects
from evalfleet.model import AttemptId, MachineId, Offer, Plan, Scored, Task, TaskId
from evalfleet.names import artefacts_folder, folder_of
from evalfleet.planning import workspace as planning
from evalfleet.state import fold

from .result import Figures, Result, at_most, rounded
from .workspace import EVALFLEET, Workspace, environment

ATTEMPTS, ROUNDS, TAKEN, RACES = 200, 3, 1000, 200
RACES_AT_ONCE = 4
RUN = "r"
BENCHMARK = """
name = "short"
tasks = "tasks.jsonl"
command = ["sh", "-c", "echo '{\\"score\\": 1}' > $EVALFLEET_OUT/result.json"]
timeout_s = 60
"""


def run(quick: bool) -> Result:
    attempts, rounds, taken, races = (4, 1, 10, 2) if quick else (ATTEMPTS, ROUNDS, TAKEN, RACES)
    with Workspace() as space:
        environ = start_s3(space)
        folder = space.folder / "bucket"
        folder.mkdir()
        stores = {"none": "", "folder": str(folder), "s3": "s3://bucket/runs"}
        walls: dict[str, list[float]] = {name: [] for name in stores}
        for n in range(rounds):
            for name, url in stores.items():
                walls[name].append(_run_s(space, environ, url, f"{name}-{n}", attempts))
        plain, *copied = (statistics.median(walls[name]) for name in stores)
        costs = {
            f"mirror_ms_an_attempt_{name}": rounded((wall - plain) / attempts * 1000)
            for name, wall in zip(("folder", "s3"), copied, strict=True)
        }
        journal_objects = asyncio.run(_write_attempts(space.folder / "taken", taken))
        filled = start_s3(space, "filled", holds=space.folder / "taken" / "bucket")
        folder_url = (space.folder / "taken" / "bucket").as_uri()
        take_over_s, files_s = asyncio.run(_take_over_s(space.folder / "a", folder_url, {}))
        take_over_s3_s, files_s3_s = asyncio.run(_take_over_s(space.folder / "b", "s3://bucket", filled))
        outcomes = asyncio.run(_races(space, environ, races))
    figures: Figures = {
        "attempts": attempts,
        **costs,
        "attempts_taken_over": taken,
        "journal_objects_taken_over": journal_objects,
        "take_over_s": rounded(take_over_s),
        "take_over_s3_s": rounded(take_over_s3_s),
        "with_files_s": rounded(files_s),
        "with_files_s3_s": rounded(files_s3_s),
        "races": races,
        "double_writes": sum(double for double, _ in outcomes),
        "writes_before_the_loser_knew": max(writes for _, writes in outcomes),
        "load": os.getloadavg()[0],
    }
    return Result("store", figures, {"double_writes": at_most(figures["double_writes"], 0)})


def start_s3(space: Workspace, name: str = "s3", *, holds: Path | None = None) -> dict[str, str]:
    """moto's server with one bucket, and the variables by which it is reached.

    `holds`: a folder whose files are the bucket's first objects. Asked for one by one it takes minutes.
    """
    port_file = space.folder / f"port-{name}"
    program = (
        "import sys, pathlib\n"
        "from werkzeug.serving import make_server\n"
        "from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app\n"
        "from moto.s3.models import s3_backends\n"
        "s3 = s3_backends['123456789012']['aws']; s3.create_bucket('bucket', 'us-east-1')\n"
        "for holds in map(pathlib.Path, sys.argv[2:]):\n"
        "    for file in filter(pathlib.Path.is_file, holds.rglob('*')):\n"
        "        s3.put_object('bucket', file.relative_to(holds).as_posix(), file.read_bytes())\n"
        "app = DomainDispatcherApplication(create_backend_app)\n"
        "server = make_server('127.0.0.1', 0, app)\n"
        "path = pathlib.Path(sys.argv[1]); part = path.with_suffix('.part')\n"
        "part.write_text(str(server.port)); part.rename(path)\n"
        "server.serve_forever()\n"
    )
    with (space.folder / "s3.log").open("ab") as log:
        argv = [sys.executable, "-c", program, str(port_file), *([str(holds)] if holds else [])]
        space.adopt(subprocess.Popen(argv, stdout=log, stderr=log, env=environment()))
    while not port_file.exists():
        time.sleep(0.05)
    url = f"http://127.0.0.1:{port_file.read_text()}"
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
    return {**keys, "AWS_ENDPOINT_URL": url}


def _run_s(space: Workspace, environ: Mapping[str, str], url: str, name: str, attempts: int) -> float:
    """How long a run takes from its first attempt's start to its last one's end."""
    (space.folder / "bench.toml").write_text(BENCHMARK)
    lines = (json.dumps({"id": f"t_{n}"}) + "\n" for n in range(attempts))
    (space.folder / "tasks.jsonl").write_text("".join(lines))
    store = ["--store", url] if url else []
    subprocess.run(
        [*EVALFLEET, "run", "./bench.toml", "--workers", "4", "--name", name, "--quiet", *store],
        cwd=space.folder,
        env=environment(EVALFLEET_HOME=str(space.home), **environ),
        stdout=subprocess.DEVNULL,
        check=True,
    )
    records = list(Store.open(space.home, create=False, read_only=True).read(name))
    started = [record.at for record in records if isinstance(record.event, AttemptStarted)]
    ended = [record.at for record in records if isinstance(record.event, AttemptCollected)]
    if len(ended) != attempts:
        raise RuntimeError(f"{len(ended)} attempts came home instead of {attempts}")
    return (max(ended) - min(started)) / 1e6


# -- journals of two computers -----------------------------------------------------------------------


def planned(home: Path, url: str, tasks: int = 1) -> Store:
    """A home with a new run that has a copy at the URL."""
    store = Store.open(home)
    plan = Plan(RUN, "b", home=store.home_id, store=url)
    events: list[Event] = [RunPlanned(plan, tasks)]
    events.append(TasksPlanned(tuple(Task(TaskId(f"t_{n}"), "t") for n in range(tasks))))
    store.create_stream(RUN, "run", WallClock().now(), events)
    folder_of(home, RUN).mkdir(parents=True, exist_ok=True)
    return store


async def opened(
    home: Path, url: str, environ: Mapping[str, str], *, claims: bool = False
) -> MirroredJournal:
    """The journal, as a controller of this home opens it."""
    store = Store.open(home)
    folder = folder_of(home, RUN)
    folder.mkdir(parents=True, exist_ok=True)
    mirror = Mirror(url, environ, store, RUN, folder, claims=claims)
    if not claims and await mirror.sequence.newest() is None:
        await mirror.reserve(dry=False)
    holder = Holder.here(WallClock().now())
    await mirror.catch_up(holder)
    local = store.acquire(RUN, holder, WallClock().now())
    try:
        return await MirroredJournal.open(local, mirror, holder, lambda: None)
    except BaseException:
        await local.close()
        raise


async def _write_attempts(folder: Path, attempts: int) -> int:
    """Put a run of so many attempts into the folder's bucket. Returns the number of its journal's objects."""
    bucket = folder / "bucket"
    bucket.mkdir(parents=True)
    planned(folder / "first", bucket.as_uri(), attempts)
    journal = await opened(folder / "first", bucket.as_uri(), {})
    offer = Offer("local", "small")
    await journal.append(1, [MachineRequested(MachineId("m-1"), "m-1", offer, 10**15)])
    for n in range(attempts):
        attempt = AttemptId(f"t_{n}.0")
        home = folder_of(folder / "first", RUN) / artefacts_folder(f"t_{n}", attempt)
        home.mkdir(parents=True)
        for name in ("result.json", "evalfleet.log", "step_0.png"):
            (home / name).write_bytes(b"x" * 500)
        await journal.keep(attempt)
        ended: list[Event] = [AttemptEnded(attempt, Scored(1.0), 1.0), AttemptCollected(attempt)]
        await journal.append(2, [AttemptStarted(attempt, TaskId(f"t_{n}"), MachineId("m-1"))])
        await journal.append(3, ended)
    await journal.close()
    return len(list((bucket / RUN / "journal").iterdir()))


async def _take_over_s(folder: Path, url: str, environ: Mapping[str, str]) -> tuple[float, float]:
    """Seconds from the command to the moment at which the run at the URL is another computer's, and to that
    at which its attempts' files are there, too."""
    folder.mkdir()
    start = time.perf_counter()
    workspace = planning.Workspace(environ, folder, folder / "second")
    await fetch_run(workspace, url, None, lambda note: None)
    second = await opened(folder / "second", url, environ, claims=True)
    taken_s = time.perf_counter() - start
    second.fetch(collected_in(fold(second.read())), lambda: None)
    await second.fetched()
    files_s = time.perf_counter() - start
    await second.close()
    return taken_s, files_s


async def _races(space: Workspace, environ: Mapping[str, str], races: int) -> list[tuple[int, int]]:
    """Every other race is for a run in a folder. Some go on at once, each for a run of its own."""
    turn = asyncio.Semaphore(RACES_AT_ONCE)

    async def one(n: int) -> tuple[int, int]:
        bucket = space.folder / f"bucket-{n}"
        bucket.mkdir()
        url = f"s3://bucket/race-{n}" if n % 2 else bucket.as_uri()
        async with turn:
            return await race(space.folder / f"race-{n}", url, environ)

    return await asyncio.gather(*(one(n) for n in range(races)))


async def race(folder: Path, url: str, environ: Mapping[str, str]) -> tuple[int, int]:
    """One computer writes, another takes the run over. Returns double writes, and how many objects the first
    wrote while the second one was at it."""
    planned(folder / "first", url)
    first = await opened(folder / "first", url, environ)
    told: dict[str, set[str]] = {"first": set(), "second": set()}
    lost = asyncio.Event()

    async def write(name: str, journal: MirroredJournal, count: int) -> None:
        for n in range(count):
            await journal.append(n, [GradingFailed(f"{name} {n}")])
            told[name].add(f"{name} {n}")

    async def write_until_lost() -> None:
        with suppress(LeaseLost):
            await write("first", first, 10_000)
            raise RuntimeError("the first computer was never told")
        lost.set()

    writing = asyncio.create_task(write_until_lost())
    await asyncio.sleep(0.01)
    before = len(told["first"])
    second = await opened(folder / "second", url, environ, claims=True)
    await write("second", second, 5)
    await writing
    await asyncio.gather(first.close(), second.close())
    _, objects = await JournalSequence(open_objects(url, environ), RUN).since(set())  # it verifies them
    kept = [json.loads(row.body)["detail"] for each in objects for row in each.rows if row.kind == _KIND]
    acknowledged = told["first"] | told["second"]
    taken_at = next(each.header.number for each in objects if each.header.epoch > objects[0].header.epoch)
    stale = [each for each in objects[taken_at:] if each.header.home == objects[0].header.home]
    double = len(kept) - len(set(kept)) + len(acknowledged - set(kept)) + len(stale)
    return double, len(told["first"]) - before


_KIND = b"GradingFailed"
