"""The part of `leak` on a real Slurm: which jobs, steps, files and processes are left."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from evalfleet.channels.supervisor.processes import marked
from evalfleet.model import AttemptId, Command, Job, Machine, MachineId, Needs
from evalfleet.places.slurm import SlurmPlace, SlurmSettings
from evalfleet.places.slurm.login import Spoken, ThisComputer
from evalfleet.ports import Fence, PlaceContext
from tests.slurm.cluster import Cluster, missing
from tests.waiting import until

from .result import Aim, Figures, at_most

POINTS, QUICK_POINTS = 200, 4
TOGETHER = 4
SEED = 11
LIFE_S = 8.0
"""So long a machine may live: when its time is over and nobody has come back, it ends by itself."""
LATER_S = 3600.0
LOOKS = ("survey", "look", "squeue")
COUNTED = (
    "a process that makes two machines through the place, runs an attempt on each and deletes them is killed "
    "(kill -9) before, during or after something that it does, a command of Slurm's or a change of a folder, "
    "chosen by a seed; then, in turn, a new controller of its home lists and deletes what is there, or "
    f"nobody comes back: jobs end by themselves after {LIFE_S:g} s, and another home reaps; counted is what "
    "squeue and /proc show and what is in the shared folder after that"
)

T = TypeVar("T")
When = Literal["before", "during", "after"]


@dataclass(frozen=True)
class Point:
    """Where a controller dies: at the n-th thing that it does; 0: it lives to its end."""

    n: int
    when: When
    delay_s: float
    adopted: bool
    """A controller of its home comes back."""


@dataclass(frozen=True)
class Aftermath:
    """What one crash led to."""

    died_at: str
    jobs: int
    steps: int
    files: tuple[str, ...]
    processes: int
    outlived: int
    """Jobs that did not end by themselves."""


class Mortal(ThisComputer):
    """A login on which the process dies. What has happened until then is in a file."""

    def __init__(self, environ: Mapping[str, str], point: Point, diary: Path) -> None:
        super().__init__(environ)
        self._point = point
        self._diary = diary
        self._count = 0

    async def _through(self, what: str, call: Awaitable[T]) -> T:
        if what in LOOKS:
            return await call
        self._count += 1
        with self._diary.open("a") as diary:
            diary.write(f"{what}\n")
        if self._count != self._point.n:
            return await call
        if self._point.when == "during":
            asyncio.get_running_loop().call_later(self._point.delay_s, _die)
        elif self._point.when == "before":
            _die()
        answer = await call
        _die()
        return answer

    async def run(self, argv: Sequence[str], given: str, answer_s: float) -> Spoken:
        return await self._through(argv[0], super().run(argv, given, answer_s))

    async def perform(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return await self._through(str(request["verb"]), super().perform(request))

    async def open_step(
        self, argv: Sequence[str], protocol: asyncio.Protocol, patience_s: float
    ) -> asyncio.WriteTransport:
        return await self._through("srun", super().open_step(argv, protocol, patience_s))


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class MortalPlace(SlurmPlace):
    """A place whose login kills its process."""

    def use(self, login: Mortal) -> None:
        self._login = self._slurm._login = login  # pyright: ignore[reportPrivateUsage]


def place_of(folder: Path, home: str, environ: Mapping[str, str]) -> MortalPlace:
    settings = SlurmSettings(folder=str(folder / "shared"), poll_s=0.2)
    (folder / home).mkdir(exist_ok=True)
    return MortalPlace("slurm", settings, PlaceContext(folder / home, home, environ=environ))


def home_of(folder: str | Path) -> str:
    """Jobs of all controllers are in one queue, where a home is told by its id."""
    return f"l{int(Path(folder).name):05d}"


def live(folder: str, environ: Mapping[str, str], point: Point) -> None:
    """The controller that dies."""

    async def all_of_it() -> None:
        place = place_of(Path(folder), home_of(folder), environ)
        place.use(Mortal(environ, point, Path(folder, "diary")))
        (offer,) = await place.offers(Needs())
        machines = [MachineId(f"r-{home_of(folder)}-{number}") for number in (1, 2)]
        await asyncio.gather(*(place.create(machine, offer, LIFE_S) for machine in machines))
        await asyncio.gather(*(work(place, machine) for machine in machines))
        await asyncio.gather(*(place.delete(machine) for machine in machines))
        await place.close()

    asyncio.run(all_of_it())


async def work(place: SlurmPlace, id: MachineId) -> None:
    """An attempt, once the machine is up."""
    found: Machine | None = None
    while found is None or found.phase == "queued" or found.phase == "pending":
        await asyncio.sleep(0.1)
        found = next((machine for machine in await place.list("r") if machine.id == id), None)
    if found.phase != "up":
        return  # on a busy computer its time may be over already
    channel = place.channel(found, Fence("r", 1, 20.0))
    await channel.start(Job(AttemptId("t.0"), Command(("sleep", "600")), 600.0))
    await channel.close()


async def adopt(folder: Path, environ: Mapping[str, str]) -> None:
    """The next controller of the home: what its place lists is all there is."""
    place = place_of(folder, home_of(folder), environ)
    for machine in await place.list("r"):
        await place.delete(machine.id)
    await place.close()


async def reap(folder: Path, environ: Mapping[str, str]) -> None:
    """Another home, an hour later."""
    place = place_of(folder, "others", environ)
    later = (time.time() + LATER_S) * 1e6
    for belonging in await place.belongings():
        if (
            belonging.home == home_of(folder)
            and belonging.expires_at is not None
            and belonging.expires_at < later
        ):
            await place.reap(belonging)
    await place.close()


def measure(quick: bool) -> tuple[Figures, dict[str, Aim]]:
    if (error := missing()) is not None:
        return {"error": error}, {}
    # Slurm's sockets are below it, and an address holds 108 bytes
    with tempfile.TemporaryDirectory(prefix="evalfleet-bench-", dir="/tmp") as name:
        cluster = Cluster(Path(name, "slurm"), nodes=2, cpus=8)
        try:
            cluster.start()
            return _measure(cluster, Path(name), QUICK_POINTS if quick else POINTS)
        finally:
            cluster.stop()


def _measure(cluster: Cluster, folder: Path, count: int) -> tuple[Figures, dict[str, Aim]]:
    world = World(cluster, folder)
    undisturbed = world.crash(0, Point(0, "before", 0.0, True))
    done = (folder / "0" / "diary").read_text().split()
    rng = random.Random(SEED)
    whens: tuple[When, ...] = ("before", "during", "after")
    points = [
        Point(rng.randint(1, len(done)), whens[n % 3], rng.uniform(0.0, 0.1), n % 2 == 0)
        for n in range(count)
    ]
    with ThreadPoolExecutor(TOGETHER) as together:
        found = [undisturbed, *together.map(world.crash, range(1, count + 1), points)]
    figures: Figures = {
        "crash_points": dict(Counter(each.died_at for each in found[1:])),
        "things_done_in_a_life": len(done),
        "jobs_left": sum(each.jobs for each in found),
        "steps_left": sum(each.steps for each in found),
        "files_left": sum(len(each.files) for each in found),
        "processes_left": sum(each.processes for each in found),
        "jobs_that_outlived_their_time": sum(each.outlived for each in found),
        "examples": [file for each in found for file in each.files][:5],
        "counted": COUNTED,
    }
    kinds = ("jobs_left", "steps_left", "files_left", "processes_left", "jobs_that_outlived_their_time")
    return figures, {kind: at_most(figures[kind], 0) for kind in kinds}


class World:
    """One cluster, on which one controller after another dies; each has a user's folder of its own."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster = cluster
        self._folder = folder
        self._fork = multiprocessing.get_context("forkserver")
        self._fork.set_forkserver_preload(["bench.leak_slurm"])

    def crash(self, number: int, point: Point) -> Aftermath:
        folder = self._folder / str(number)
        folder.mkdir()
        environ = self._cluster.environ
        process = self._fork.Process(target=live, args=(str(folder), environ, point))
        process.start()
        process.join(300.0)
        if process.is_alive():
            process.kill()
            raise RuntimeError(f"{point}: the controller hangs")
        diary = folder / "diary"
        done = diary.read_text().split() if diary.exists() else []
        died = process.exitcode == -signal.SIGKILL
        if process.exitcode and not died:
            raise RuntimeError(f"{point}: the controller ended with {process.exitcode}")
        outlived = 0
        if point.adopted:
            asyncio.run(adopt(folder, environ))
        else:
            outlived = self._await_end(folder)
            asyncio.run(reap(folder, environ))
        return self._look(folder, done[point.n - 1] if died and point.n <= len(done) else "lived", outlived)

    def _jobs(self, folder: Path, *options: str) -> list[str]:
        """Slurm's jobs whose working directory is in the folder."""
        lines = self._cluster.ask("squeue", "-h", *options, "-o", "%i %Z").splitlines()
        return [line for line in lines if f"{folder}/" in line]

    def _await_end(self, folder: Path) -> int:
        """How many jobs do not end by themselves, long after their time."""
        try:
            until(lambda: not self._jobs(folder), "jobs to end by themselves", 12 * LIFE_S)
        except AssertionError:
            return len(self._jobs(folder))
        return 0

    def _look(self, folder: Path, died_at: str, outlived: int) -> Aftermath:
        until(lambda: not self._jobs(folder, "--states=COMPLETING"), "jobs to complete")
        jobs = {line.split()[0] for line in self._jobs(folder)}
        steps = self._cluster.ask("squeue", "-h", "--steps", "-o", "%i").split()
        shared = folder / "shared"
        files = tuple(str(file.relative_to(folder)) for file in shared.rglob("*")) if shared.exists() else ()
        processes = marked(b"\0EVALFLEET_MACHINE=" + os.fsencode(str(folder)))
        left_steps = sum(step.partition(".")[0] in jobs for step in steps)
        return Aftermath(died_at, len(jobs), left_steps, files, len(processes), outlived)
