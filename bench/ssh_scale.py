"""Many hosts held by one controller: what a host costs while nothing happens, and when all links break.

`python -m bench.ssh_scale CONFIG.json` is that controller, a process inside the lab's network: our place, our
channels, a supervisor and a long job on each host. It answers each line on its standard input (`connect`,
`stats`, `check`) with a line of JSON.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from evalfleet.channels.supervisor.server import BEAT_S
from evalfleet.engine import Tempo
from evalfleet.errors import ChannelError, StaleController
from evalfleet.model import AttemptId, Command, Job, Machine, MachineId, Needs
from evalfleet.places.ssh import SshPlace, SshSettings
from evalfleet.ports import Channel, Fence, PlaceContext
from lab import HostProcess, Lab

from .hosts import cannot, lab_of, settings
from .result import Figures, Result, at_most, rounded
from .workspace import ROOT, Workspace, environment

HOSTS, HOLD_S = 500, 60.0
FAR = 5_000
HOME_ID = "abc123"
LONG = Command(("sleep", "100000"))
LONG_S = 100_000.0
LIMIT_S = 300.0
CONNECT_AIM_S = 90.0
HOW_HELD = (
    "our place and channels in one process: each host locked, with a supervisor and a job of "
    f"`sleep`; supervisors push a heartbeat every {BEAT_S:g} s (asked for: 10), the controller "
    "pings, and lists the machines every 10 s, as the engine does"
)
HOW_FAR = (
    "a host's memory and CPU while held do not depend on how many there are, so they are multiplied; so is "
    "the controller's CPU to connect and to reconnect: what it takes once hosts have cores of their own"
)


def run(quick: bool) -> Result:
    if (error := cannot("ssh-scale")) is not None:
        return Result("ssh-scale", dict(error), {})
    hosts, hold_s = (4, 1.0) if quick else (HOSTS, HOLD_S)
    began = time.perf_counter()
    with lab_of(hosts) as lab, Workspace() as space:
        boot_s = time.perf_counter() - began
        with Controller(space, lab) as controller:
            connect = controller.ask("connect")
            held = _hold(controller, hold_s)
            storm = _storm(controller, lab)
    lost = int(storm["jobs_lost"])
    figures: Figures = {
        "hosts": hosts,
        "lab_boot_s": rounded(boot_s),
        "connect_s": rounded(connect["seconds"]),
        "connect_cpu_ms_a_host": rounded(1000 * connect["cpu_s"] / hosts),
        "memory_kb_a_host": rounded((held["rss"] - connect["rss_before"]) / 1024 / hosts),
        "hold_s": hold_s,
        "hold_cpu_share": rounded(held["share"]),
        "hold_cpu_ms_a_host_and_minute": rounded(60_000 * held["share"] / hosts),
        "storm_cut_s": rounded(storm["cut_s"]),
        "storm_s": rounded(storm["seconds"]),
        "storm_cpu_ms_a_host": rounded(1000 * storm["cpu_s"] / hosts),
        "storm_silences": storm["silences"],
        "storm_connections_cut": storm["cut"],
        "jobs_lost": lost,
        "held": HOW_HELD,
    }
    figures[f"at_{FAR}_hosts"] = {
        "memory_mb": rounded(figures["memory_kb_a_host"] * FAR / 1024 + connect["rss_before"] / (1 << 20)),
        "hold_cpu_share": rounded(held["share"] / hosts * FAR),
        "connect_cpu_s": rounded(connect["cpu_s"] / hosts * FAR),
        "storm_cpu_s": rounded(storm["cpu_s"] / hosts * FAR),
        "how": HOW_FAR,
    }
    aims = {"connect_s": at_most(figures["connect_s"], CONNECT_AIM_S), "jobs_lost": at_most(lost, 0)}
    return Result("ssh-scale", figures, aims)


def _hold(controller: Controller, hold_s: float) -> dict[str, float]:
    first = controller.ask("stats")
    time.sleep(hold_s)  # what is measured is that nothing happens
    last = controller.ask("stats")
    share = (last["cpu_s"] - first["cpu_s"]) / (last["wall_s"] - first["wall_s"])
    return {"share": share, "rss": last["rss"]}


def _storm(controller: Controller, lab: Lab) -> dict[str, Any]:
    """Every sshd session dies at once; then every host must answer again."""
    pids = [pid for host in lab.hosts for pid in session_pids(host.processes())]
    start = time.perf_counter()
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    cut_s = time.perf_counter() - start
    return {**controller.ask("check"), "cut_s": cut_s, "cut": len(pids)}


def session_pids(found: Sequence[HostProcess]) -> list[int]:
    """Of sshd's processes for connections, not of the one that listens."""
    titles = [(each.pid, " ".join(each.argv)) for each in found]
    return [pid for pid, title in titles if title.startswith("sshd:") and "[listener]" not in title]


class Controller:
    """The process that holds the hosts. Ends with us."""

    def __init__(self, space: Workspace, lab: Lab) -> None:
        space.home.mkdir()
        config = space.folder / "holder.json"
        config.write_text(json.dumps({"place": settings(lab), "home": str(space.home)}))
        argv = (*lab.prefix, sys.executable, "-m", "bench.ssh_scale", str(config))
        self._errors = open(space.folder / "output", "wb")  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            argv,
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        self._space = space
        space.adopt(self._process)
        assert self._process.stdout is not None
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)

    def ask(self, verb: str) -> dict[str, Any]:
        """Raises RuntimeError when it has died, TimeoutError when it says nothing."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{verb}\n".encode())
        self._process.stdin.flush()
        if not self._selector.select(LIMIT_S):
            raise TimeoutError(f"{verb}: no answer within {LIMIT_S:g} s:\n{self._space.output()}")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{verb}: it has ended:\n{self._space.output()}")
        told: dict[str, Any] = json.loads(line)
        return told

    def __enter__(self) -> Controller:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        self._errors.close()


# -- in the controller's process ---------------------------------------------------------------


class Holder:
    def __init__(self, config: dict[str, Any]) -> None:
        settings = msgspec.convert(config["place"], SshSettings)
        self._place = SshPlace.make("hosts", settings, PlaceContext(Path(config["home"]), HOME_ID))
        self._hosts = len(settings.hosts)
        self._channels: list[Channel] = []
        self._waiting: list[asyncio.Task[Any]] = []
        self._surveys = asyncio.create_task(self._survey())

    async def connect(self) -> dict[str, Any]:
        """Take every host, start its supervisor, connect to it, start a long job, and wait for its end."""
        before = _rss_bytes()
        start, cpu = time.perf_counter(), time.process_time()
        machines = [MachineId(f"pool-{HOME_ID}-{n}") for n in range(1, self._hosts + 1)]
        await asyncio.gather(*map(self._hold, machines))
        return {
            "seconds": time.perf_counter() - start,
            "cpu_s": time.process_time() - cpu,
            "rss_before": before,
            "rss": _rss_bytes(),
        }

    async def _hold(self, machine: MachineId) -> None:
        offer = (await self._place.offers(Needs()))[0]
        await self._place.create(machine, offer, LONG_S)
        fence = Fence("run", 1, 20.0)
        channel = self._place.channel(Machine(machine, "up"), fence)
        await _patiently(lambda: channel.probe(None))
        job = Job(AttemptId(f"{machine}.0"), LONG, LONG_S)
        await _patiently(lambda: channel.start(job))
        self._channels.append(channel)
        self._waiting.append(asyncio.create_task(_patiently(lambda: channel.ended(job.id))))

    async def _survey(self) -> None:
        """As the engine does it, for machines that vanish without a word."""
        while True:
            await asyncio.sleep(Tempo().survey_s)
            await self._place.list("pool")

    async def stats(self) -> dict[str, Any]:
        return {"cpu_s": time.process_time(), "rss": _rss_bytes(), "wall_s": time.perf_counter()}

    async def check(self) -> dict[str, Any]:
        """Until every host has answered a question that was asked now; and no job was lost."""
        start, cpu = time.perf_counter(), time.process_time()
        probes = [functools.partial(channel.probe, None) for channel in self._channels]
        given_up = await asyncio.gather(*map(_patiently, probes))
        return {
            "seconds": time.perf_counter() - start,
            "cpu_s": time.process_time() - cpu,
            "silences": sum(given_up),
            "jobs_lost": sum(task.done() for task in self._waiting),
        }

    async def close(self) -> None:
        for task in (self._surveys, *self._waiting):
            task.cancel()
        await asyncio.gather(self._surveys, *self._waiting, return_exceptions=True)
        await asyncio.gather(*(channel.close() for channel in self._channels))
        await self._place.close()


async def _patiently(call: Callable[[], Awaitable[object]]) -> int:
    """Until it succeeds, as the engine does it. How often a channel told of silence before."""
    for silences in itertools.count():
        try:
            await call()
        except StaleController:
            raise
        except ChannelError:
            await asyncio.sleep(1.0)
        else:
            return silences
    raise AssertionError


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def main(config: dict[str, Any]) -> None:
    holder = Holder(config)
    verbs: dict[str, Callable[[], Awaitable[dict[str, Any]]]] = {
        "connect": holder.connect,
        "stats": holder.stats,
        "check": holder.check,
    }
    loop = asyncio.get_running_loop()
    try:
        while verb := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
            print(json.dumps(await verbs[verb]()), flush=True)
    finally:
        await holder.close()


if __name__ == "__main__":
    asyncio.run(main(json.loads(Path(sys.argv[1]).read_text())))
