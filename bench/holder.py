"""One controller process that holds many hosts: our place, our channels, a supervisor and a long job on each.

`python -m bench.holder CONFIG.json`, in a process of its own inside the lab's network. It answers each line
on its standard input (`connect`, `stats`, `check`) with a line of JSON.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from evalfleet.engine import Tempo
from evalfleet.errors import ChannelError, StaleController
from evalfleet.model import AttemptId, Command, Job, Machine, MachineId, Needs
from evalfleet.places.ssh import SshPlace, SshSettings
from evalfleet.ports import Channel, Fence, PlaceContext

HOME_ID = "abc123"
LONG = Command(("sleep", "100000"))
LONG_S = 100_000.0


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
