"""Attempts on machines that only a mailbox reaches: how soon they run, and what each costs.

The controller is this process, each machine has one of its own, and the store is the stand-in for Cloud
Storage in another one; both ends look as often as they do by default.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from evalfleet.channels.folder_mail import FOLDER_PACE_S
from evalfleet.channels.mailbox import STORE_PACE_S
from evalfleet.model import AttemptId, Command, Job, Machine, MachineId
from evalfleet.ports import Fence
from evalfleet.testing.harness import first_offer
from tests.mailboxes import MailboxPlace, Nodes, Store, StorePlace

from .result import Figures, Result, below, rounded

MACHINES, ATTEMPTS = 8, 12
TASK_S = 1.0
AIM_START_S, AIM_CPU_MS = 5.0, 5.0
PATIENCE_S = 120.0
COUNTED = (
    "attempts of `sleep 1`, one after another on each machine; start_*_s: from the controller's call to the "
    "attempt's own clock; cpu_ms: of the controller, an attempt, with its looks and what it brings home; "
    "requests: of both ends to the store, an attempt; idle_requests_a_minute: of a machine with nothing to do"
)
SERVER = """\
import json, sys
from pathlib import Path
from standins.gcs import CloudStorage
from tests.mailboxes import cloud_storage
with CloudStorage("bucket") as storage:
    print(json.dumps(cloud_storage(storage, Path(sys.argv[1]))), flush=True)
    for line in sys.stdin:
        print(len(storage.requests), flush=True)
"""


def run(quick: bool) -> Result:
    machines, attempts = (2, 2) if quick else (MACHINES, ATTEMPTS)
    with tempfile.TemporaryDirectory(prefix="evalfleet-bench-", dir="/tmp") as name:
        folder = asyncio.run(_measure_folder(Path(name), machines, attempts))
        with _storage(Path(name)) as storage:
            bucket = asyncio.run(_measure_bucket(Path(name), storage, machines, attempts))
    figures: Figures = {
        "machines": machines,
        "attempts": machines * attempts,
        "bucket": bucket,
        "folder": folder,
        "counted": COUNTED,
    }
    aims = {
        "bucket_start_p95_s": below(bucket["start_p95_s"], AIM_START_S),
        "folder_start_p95_s": below(folder["start_p95_s"], AIM_START_S),
        "bucket_cpu_ms": below(bucket["cpu_ms"], AIM_CPU_MS),
        "folder_cpu_ms": below(folder["cpu_ms"], AIM_CPU_MS),
    }
    return Result("mailbox", figures, aims)


class Storage:
    """The stand-in in a process of its own, and how many requests it has had."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdout is not None
        self.store = Store(*json.loads(process.stdout.readline()))

    def requests(self) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@contextmanager
def _storage(folder: Path) -> Iterator[Storage]:
    """The stand-in, with its key in a folder that is removed by whoever made it: the process is killed."""
    argv = [sys.executable, "-c", SERVER, str(folder)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Storage(process)
        finally:
            process.kill()


async def _measure_folder(folder: Path, machines: int, attempts: int) -> Figures:
    nodes = Nodes(folder, FOLDER_PACE_S)
    try:
        return await _measure(MailboxPlace(folder / "shared", nodes), folder / "home", machines, attempts)
    finally:
        nodes.close()


async def _measure_bucket(folder: Path, storage: Storage, machines: int, attempts: int) -> Figures:
    nodes = Nodes(folder, STORE_PACE_S)
    try:
        place = StorePlace(folder / "apart", nodes, storage.store)
        return await _measure(place, folder / "homes", machines, attempts, storage)
    finally:
        nodes.close()


async def _measure(
    place: MailboxPlace, home: Path, machines: int, attempts: int, storage: Storage | None = None
) -> Figures:
    offer = await first_offer(place)
    ids = [MachineId(f"bench-abc123-{number}") for number in range(machines)]
    for id in ids:
        await place.create(id, offer, 3600.0)
    try:
        runs = [_Machine(place, machine, home) for machine in await place.list("bench")]
        await asyncio.gather(*(run.attempt(0) for run in runs))  # the first one opens the line
        for run in runs:
            run.delays_s.clear()
        requests, cpu_s = storage.requests() if storage else 0, time.process_time()
        await asyncio.gather(*(run.attempts(attempts) for run in runs))
        cpu_s, used = time.process_time() - cpu_s, (storage.requests() if storage else 0) - requests
        delays = sorted(delay for run in runs for delay in run.delays_s)
        figures: Figures = {
            "start_p50_s": rounded(statistics.median(delays), 3),
            "start_p95_s": rounded(statistics.quantiles(delays, n=20)[-1], 3),
            "cpu_ms": rounded(1000 * cpu_s / len(delays), 2),
        }
        if storage is not None:
            figures["requests"] = rounded(used / len(delays), 3)
            figures["idle_requests_a_minute"] = await _idle(storage, machines)
        for run in runs:
            await run.channel.close()
    finally:
        for id in ids:
            await place.delete(id)
    return figures


async def _idle(storage: Storage, machines: int) -> float:
    """While each machine has a line, and nobody waits for anything."""
    seconds = 20.0
    before = storage.requests()
    await asyncio.sleep(seconds)
    return rounded((storage.requests() - before) * 60 / seconds / machines, 3)


class _Machine:
    """One machine that runs attempt after attempt."""

    def __init__(self, place: MailboxPlace, machine: Machine, home: Path) -> None:
        self.channel = place.channel(machine, Fence("bench", 1, PATIENCE_S))
        self.delays_s: list[float] = []
        self._home = home / machine.id

    async def attempts(self, count: int) -> None:
        for number in range(1, count + 1):
            await self.attempt(number)

    async def attempt(self, number: int) -> None:
        id = AttemptId(f"t.{number}")
        result = 'echo "{}" >"$EVALFLEET_OUT/result.json"'
        script = f'date +%s.%N >"$EVALFLEET_OUT/began"; sleep {TASK_S:g}; {result}'
        asked = time.time()
        await self.channel.start(Job(id, Command(("sh", "-c", script)), 600.0))
        ended = await self.channel.ended(id)
        assert ended.exit_code == 0, ended
        await self.channel.collect(id, self._home / id)
        self.channel.forget(id)
        self.delays_s.append(float((self._home / id / "began").read_text()) - asked)
