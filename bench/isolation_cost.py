"""What it costs an attempt to be a user of its own: the same attempts with and without, turn by turn.

One local machine, one attempt of `true` at a time, from its start until its end is known here. Attempts of
both kinds alternate, so that whatever else the computer does meets both alike. Three ways:

- `quiet`: at real-time priority, so that other programs do not count, with a pause after each attempt, in
  which the supervisor gets the next keeper ready. Attempts that last some time are like that.
- `shared`: the same at ordinary priority, whatever the load is.
- `busy`: at ordinary priority without pauses; CPU is counted here. It is that of the machine's supervisor and
  of all that it has waited for: wrapper or keeper, and the command.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path

from evalfleet.channels.supervisor.processes import parse_stat
from evalfleet.model import AttemptId, Command, Isolation, Job, MachineId, Needs
from evalfleet.places.local import LocalPlace, LocalSettings
from evalfleet.ports import Channel, Fence

from .result import Figures, Result, below, rounded

PACED, BURSTS, BURST = 80, 8, 25
PAUSE_S = 0.1
WARM = 5
MACHINE = MachineId("cost-000000-1")
KINDS: tuple[Isolation, ...] = ("none", "user")
COUNTED = (
    "ms from asking for an attempt of `true` until its end is known, medians of attempts that alternate; "
    "quiet: at real-time priority with pauses, shared: at ordinary priority with pauses, "
    "busy: without pauses (cpu: there)"
)


def run(quick: bool) -> Result:
    if os.geteuid() != 0:
        return Result("isolation-cost", {"error": "needs root: attempts become users of their own"}, {})
    paced, bursts = (8, 2) if quick else (PACED, BURSTS)
    # not below /tmp: as on most hosts, the machine's folder is not in what each attempt has of its own
    with tempfile.TemporaryDirectory(prefix="evalfleet-bench-", dir=Path.home()) as name:
        folder = Path(name)
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        try:
            figures = asyncio.run(_measured("quiet", folder / "quiet", paced, PAUSE_S))
        finally:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        figures |= asyncio.run(_measured("shared", folder / "shared", paced, PAUSE_S))
        figures |= asyncio.run(_measured("busy", folder / "busy", bursts, 0.0))
    figures |= {"attempts": paced, "busy_attempts": bursts * BURST, "counted": COUNTED}
    figures["load"] = rounded(os.getloadavg()[0])
    return Result(
        "isolation-cost", figures, {"quiet_user_more_ms": below(figures["quiet_user_more_ms"], 5.0)}
    )


async def _measured(way: str, folder: Path, rounds: int, pause_s: float) -> Figures:
    """Rounds of one attempt and a pause, or, without one, of many attempts, on a machine of their own."""
    folder.mkdir()
    place = LocalPlace("local", LocalSettings(), folder)
    (offer,) = await place.offers(Needs())
    await place.create(MACHINE, offer, 3600.0)
    try:
        (machine,) = await place.list("cost-000000")
        channel = place.channel(machine, Fence("cost", 1))
        await channel.isolate("user")  # type: ignore[attr-defined]
        pid = parse_stat((Path(machine.address) / "supervisor.pid").read_bytes())[0] or 0
        walls: dict[str, list[float]] = {kind: [] for kind in KINDS}
        cpus: dict[str, list[float]] = {kind: [] for kind in KINDS}
        warm, many = (WARM, 1) if pause_s else (1, BURST)
        for number in range(rounds + warm):
            for kind in KINDS:
                begun, used = time.perf_counter(), _cpu_s(pid)
                for n in range(many):
                    await _attempt(channel, AttemptId(f"{kind}-{number}-{n}.0"), kind)
                wall = (time.perf_counter() - begun) / many * 1000
                if number >= warm:
                    walls[kind].append(wall)
                    cpus[kind].append((_cpu_s(pid) - used) / many * 1000)
                await asyncio.sleep(pause_s)
        await channel.close()
    finally:
        await place.delete(MACHINE)
    return _figures(way, walls) | ({} if pause_s else _figures("cpu", cpus))


def _figures(way: str, found: dict[str, list[float]]) -> Figures:
    none, user = (statistics.median(found[kind]) for kind in KINDS)
    return {
        f"{way}_none_ms": rounded(none),
        f"{way}_user_ms": rounded(user),
        f"{way}_user_more_ms": rounded(user - none),
    }


async def _attempt(channel: Channel, name: AttemptId, kind: Isolation) -> None:
    await channel.start(Job(name, Command(("true",)), 60.0, isolation=kind))
    ended = await channel.ended(name)
    if ended.exit_code != 0:
        raise RuntimeError(f"{name} ended with {ended}")
    channel.forget(name)


def _cpu_s(pid: int) -> float:
    """Of a process and all that it has waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
