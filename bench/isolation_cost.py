"""What each isolation costs an attempt: the same attempts with and without it, turn by turn.

One local machine, one attempt of `true` at a time, from its start until its end is known here. Attempts with
and without alternate, so that whatever else the computer does meets both alike. Users of their own in three
ways:

- `quiet`: at real-time priority, so that other programs do not count, with a pause after each attempt, in
  which the supervisor gets the next keeper ready. Attempts that last some time are like that.
- `shared`: the same at ordinary priority, whatever the load is.
- `busy`: at ordinary priority without pauses; CPU is counted here. It is that of the machine's supervisor and
  of all that it has waited for: wrapper or keeper, and the command.

Containers are those of a real podman, where there is one, as in `shared`; a plain `podman run` takes its turn
beside them, so that what is ours can be told from what is the engine's.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from evalfleet.benchmarks.containers import ContainerSettings, image_step, in_container
from evalfleet.channels.supervisor.processes import parse_stat
from evalfleet.model import AttemptId, Bundle, Command, Isolation, Job, MachineId, Needs
from evalfleet.places.local import LocalPlace, LocalSettings
from evalfleet.ports import Channel, Fence
from standins.podman import LIMITS, Podman, lacking, podman_with

from .result import Figures, Result, below, rounded

PACED, BURSTS, BURST = 80, 8, 25
CONTAINERS = 20
PAUSE_S = 0.1
WARM = 5
MACHINE = MachineId("cost-000000-1")
TRUE = Command(("true",))
IMAGE = "localhost/tiny"
COUNTED = (
    "ms from asking for an attempt of `true` until its end is known, medians of attempts that alternate; "
    "quiet: at real-time priority with pauses, shared: at ordinary priority with pauses, "
    "busy: without pauses (cpu: there); plain_container: `podman run` without evalfleet, in shared"
)

Turn = Callable[[str], Awaitable[None]]


def run(quick: bool) -> Result:
    if os.geteuid() != 0:
        return Result("isolation-cost", {"error": "needs root: attempts become users of their own"}, {})
    paced, bursts, containers = (3, 1, 1) if quick else (PACED, BURSTS, CONTAINERS)
    # not below /tmp: as on most hosts, the machine's folder is not in what each attempt has of its own
    with tempfile.TemporaryDirectory(prefix="evalfleet-bench-", dir=Path.home()) as name:
        folder = Path(name)
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        try:
            figures = asyncio.run(_users("quiet", folder / "quiet", paced, PAUSE_S))
        finally:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        figures |= asyncio.run(_users("shared", folder / "shared", paced, PAUSE_S))
        figures |= asyncio.run(_users("busy", folder / "busy", bursts, 0.0))
        if cannot := lacking(("true", "sh")):
            figures["container_not_tried"] = cannot
        else:
            with podman_with(("true", "sh")) as podman:
                figures |= asyncio.run(_containers(folder / "containers", podman, containers))
            figures["containers"] = containers
    figures |= {"attempts": paced, "busy_attempts": bursts * BURST, "counted": COUNTED}
    figures["load"] = rounded(os.getloadavg()[0])
    return Result(
        "isolation-cost", figures, {"quiet_user_more_ms": below(figures["quiet_user_more_ms"], 5.0)}
    )


async def _users(way: str, folder: Path, rounds: int, pause_s: float) -> Figures:
    """Rounds of one attempt and a pause, or, without one, of many attempts, on a machine of their own."""
    async with _machine(folder) as (channel, pid):
        await channel.isolate("user")  # type: ignore[attr-defined]
        turns: dict[str, Turn] = {
            "none": partial(_attempt, channel, "none", TRUE),
            "user": partial(_attempt, channel, "user", TRUE),
        }
        walls, cpus = await _alternated(turns, pid, rounds, pause_s)
    return _figures(way, walls) | ({} if pause_s else _figures("cpu", cpus))


async def _containers(folder: Path, podman: Podman, rounds: int) -> Figures:
    program = podman.folder / "bin" / "podman"
    args = (*LIMITS, *podman.grouped)
    settings = ContainerSettings(engine="podman", network="none", args=args)
    os.environ["PATH"], path = f"{program.parent}:{os.environ['PATH']}", os.environ["PATH"]
    try:
        async with _machine(folder) as (channel, pid):
            await channel.prepare(Bundle("b", {}, (image_step(settings, [IMAGE]),)))
            turns: dict[str, Turn] = {
                "none": partial(_attempt, channel, "none", TRUE),
                "container": partial(_attempt, channel, "container", in_container(TRUE, IMAGE, settings)),
                "plain_container": partial(_plain, (str(program), "run", "--rm", "--network=none", *args)),
            }
            walls, _ = await _alternated(turns, pid, rounds, PAUSE_S)
    finally:
        os.environ["PATH"] = path
    told = ("shared_container_ms", "shared_container_more_ms", "shared_plain_container_ms")
    figures = _figures("shared", walls)
    return {name: figures[name] for name in told}  # `none` is that of users


@asynccontextmanager
async def _machine(folder: Path) -> AsyncIterator[tuple[Channel, int]]:
    """A local machine, and the process id of its supervisor."""
    folder.mkdir()
    place = LocalPlace("local", LocalSettings(), folder)
    (offer,) = await place.offers(Needs())
    await place.create(MACHINE, offer, 3600.0)
    try:
        (machine,) = await place.list("cost-000000")
        channel = place.channel(machine, Fence("cost", 1, 20.0))
        yield channel, parse_stat((Path(machine.address) / "supervisor.pid").read_bytes())[0] or 0
        await channel.close()
    finally:
        await place.delete(MACHINE)


async def _alternated(
    turns: dict[str, Turn], pid: int, rounds: int, pause_s: float
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """The milliseconds of each turn, and those of CPU that the supervisor used."""
    walls: dict[str, list[float]] = {kind: [] for kind in turns}
    cpus: dict[str, list[float]] = {kind: [] for kind in turns}
    warm, many = (WARM, 1) if pause_s else (1, BURST)
    for number in range(rounds + warm):
        for kind, turn in turns.items():
            begun, used = time.perf_counter(), _cpu_s(pid)
            for n in range(many):
                await turn(f"{kind}-{number}-{n}.0")
            wall = (time.perf_counter() - begun) / many * 1000
            if number >= warm:
                walls[kind].append(wall)
                cpus[kind].append((_cpu_s(pid) - used) / many * 1000)
            await asyncio.sleep(pause_s)
    return walls, cpus


def _figures(way: str, found: dict[str, list[float]]) -> Figures:
    medians = {kind: statistics.median(values) for kind, values in found.items()}
    none = medians["none"]
    more = {f"{kind}_more": value - none for kind, value in medians.items() if kind != "none"}
    return {f"{way}_{name}_ms": rounded(value) for name, value in (medians | more).items()}


async def _attempt(channel: Channel, kind: Isolation, command: Command, name: str) -> None:
    attempt = AttemptId(name)
    bundle = "b" if kind == "container" else ""
    await channel.start(Job(attempt, command, 60.0, bundle, isolation=kind))
    ended = await channel.ended(attempt)
    if ended.exit_code != 0:
        raise RuntimeError(f"{name} ended with {ended}")
    channel.forget(attempt)


async def _plain(argv: tuple[str, ...], name: str) -> None:
    process = await asyncio.create_subprocess_exec(*argv, "--name", name, IMAGE, "true")
    if await process.wait() != 0:
        raise RuntimeError(f"{name} ended with {process.returncode}")


def _cpu_s(pid: int) -> float:
    """Of a process and all that it has waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
