"""What it costs an attempt to be a user of its own: the same attempts with and without, turn by turn.

One local machine, one attempt of `true` at a time, from its start until its end is known here. Rounds of both
kinds alternate, so that whatever else the computer does meets both alike. CPU is that of the machine's
supervisor and of all that it has waited for: wrapper or keeper, and the command.
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

ATTEMPTS, ROUNDS = 100, 9
MACHINE = MachineId("cost-000000-1")
KINDS: tuple[Isolation, ...] = ("none", "user")
COUNTED = (
    "ms from asking for an attempt of `true` until its end is known, median of rounds that alternate; "
    "cpu: of supervisor, wrapper or keeper, and command"
)


def run(quick: bool) -> Result:
    if os.geteuid() != 0:
        return Result("isolation-cost", {"error": "needs root: attempts become users of their own"}, {})
    attempts, rounds = (5, 2) if quick else (ATTEMPTS, ROUNDS)
    with tempfile.TemporaryDirectory(prefix="evalfleet-bench-") as folder:
        figures = asyncio.run(_measure(Path(folder), attempts, rounds))
    more = figures["user_ms"] - figures["none_ms"]
    figures["user_more_ms"] = rounded(more)
    figures["user_more_cpu_ms"] = rounded(figures["user_cpu_ms"] - figures["none_cpu_ms"])
    figures |= {"attempts_a_round": attempts, "rounds": rounds, "counted": COUNTED}
    figures["load"] = rounded(os.getloadavg()[0])
    return Result("isolation-cost", figures, {"user_more_ms": below(more, 5.0)})


async def _measure(folder: Path, attempts: int, rounds: int) -> Figures:
    place = LocalPlace("local", LocalSettings(), folder)
    (offer,) = await place.offers(Needs())
    await place.create(MACHINE, offer, 3600.0)
    try:
        (machine,) = await place.list("cost-000000")
        channel = place.channel(machine, Fence("cost", 1))
        isolated = await channel.isolate("user")  # type: ignore[attr-defined]
        pid = parse_stat((Path(machine.address) / "supervisor.pid").read_bytes())[0] or 0
        walls: dict[str, list[float]] = {kind: [] for kind in KINDS}
        cpus: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for number in range(rounds + 1):
            for kind in KINDS:
                begun, used = time.perf_counter(), _cpu_s(pid)
                for n in range(attempts):
                    await _attempt(channel, AttemptId(f"{kind}-{number}-{n}.0"), kind)
                if number:  # the first round warms up
                    walls[kind].append((time.perf_counter() - begun) / attempts * 1000)
                    cpus[kind].append((_cpu_s(pid) - used) / attempts * 1000)
        await channel.close()
    finally:
        await place.delete(MACHINE)
    figures: Figures = {f"{kind}_ms": rounded(statistics.median(walls[kind])) for kind in KINDS}
    figures |= {f"{kind}_cpu_ms": rounded(statistics.median(cpus[kind])) for kind in KINDS}
    figures["user_means"] = isolated.detail
    return figures


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
