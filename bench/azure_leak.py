"""A controller is killed at 200 moments: what is left in Azure, and costs money, after `reap`."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from . import clouds
from .result import Figures, Result, at_most, rounded
from .workspace import Workspace

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from standins.azure import StandIn

BENCH = "azure-leak"
POINTS, QUICK_POINTS = 200, 3
TOGETHER = 4
SEED = 11
REAP_AFTER_S, LOOK_AFTER_S = 60.0, 86_400.0
LIMIT_S = 90.0
PHASES = ("create", "run", "delete")
COUNTED = (
    "a process that makes, extends, stops, starts and deletes two machines through the place is killed (kill "
    "-9) at a request chosen by a seed, which is either never carried out or carried out unheard; the "
    f"stand-in's clock then moves to {REAP_AFTER_S:g} s after the last expiry that was decided, `reap` runs "
    "on a computer without a home, and a day later the stand-in's books are read; vm: billed after the "
    "expiry, whoever stopped it; disk, address: billed after reap had ended, since they are billed until "
    "then; "
    "records: of deployments, which cost nothing"
)


@dataclass(frozen=True)
class Point:
    """Die at the n-th request of a phase; `done`: it is carried out all the same. n = 0: live on."""

    phase: int
    n: int
    done: bool


@dataclass(frozen=True)
class Aftermath:
    """What one crash led to. `died_in`: the phase; the number of all, if it lived to its end."""

    died_in: int
    left: int
    records: int
    vm_s: float
    disk_s: float
    address_s: float
    waiting_s: float
    problems: int
    requests: tuple[int, ...]


def run(quick: bool) -> Result:
    return clouds.where_it_can(BENCH, quick, measure)


def measure(quick: bool) -> Result:
    undisturbed = _crash(Point(0, 0, False))
    chosen = points(QUICK_POINTS if quick else POINTS, undisturbed.requests)
    load = os.getloadavg()[0]
    with ThreadPoolExecutor(TOGETHER) as together:
        found = list(together.map(_crash, chosen))
    died = Counter(each.died_in for each in found)
    names = dict(enumerate(PHASES, 1)) | {len(PHASES) + 1: "after_all"}
    figures: Figures = {
        "crash_points": {names[number]: died[number] for number in sorted(died)},
        "requests_of_a_life": dict(zip(PHASES, undisturbed.requests, strict=True)),
        "resources_left": sum(each.left for each in found),
        "records_left": sum(each.records for each in found),
        "billed_s_past_expiry": {
            "vm": rounded(sum(each.vm_s for each in found)),
            "disk": rounded(sum(each.disk_s for each in found)),
            "address": rounded(sum(each.address_s for each in found)),
        },
        "disk_and_address_s_from_expiry_to_reap": rounded(sum(each.waiting_s for each in found)),
        "reap_said_no": sum(each.problems for each in found),
        "load_before": load,
        "counted": COUNTED,
    }
    billed = figures["billed_s_past_expiry"]
    aims = {
        "resources_left": at_most(figures["resources_left"], 0),
        **{f"{kind}_s_past_expiry": at_most(seconds, 0) for kind, seconds in billed.items()},
    }
    return Result(BENCH, figures, aims)


def points(count: int, requests: Sequence[int]) -> list[Point]:
    """The phases in turn, so that each gets its share; where in them is chance, from a seed."""
    rng = random.Random(SEED)
    phases = [n % len(PHASES) + 1 for n in range(count)]
    return [Point(phase, rng.randint(1, requests[phase - 1]), rng.random() < 0.5) for phase in phases]


def _crash(point: Point) -> Aftermath:
    from standins.azure import StandIn, Timing

    quick = (0.0, 0.02)
    timing = Timing(quick, quick, (0.05, 0.1), quick, quick)
    with StandIn(timing=timing, seed=SEED) as azure, Workspace() as space:
        return World(azure, space.folder).crash(point)


class World:
    """One stand-in, one controller that dies, one that cleans up."""

    def __init__(self, azure: StandIn, folder: Path) -> None:
        from . import azure_life

        self._azure = azure
        self._life = azure_life
        self._fork = multiprocessing.get_context("forkserver")
        self._fork.set_forkserver_preload(["bench.azure_life"])
        self._lost, self._desk = folder / "lost", folder / "desk"
        self._lost.mkdir()
        self._desk.mkdir()
        # nothing is reached by SSH, nor looked for elsewhere than on this computer
        clouds.write_place(self._desk, azure, azure.endpoint, {"jump": "127.0.0.1:1"})

    def crash(self, point: Point) -> Aftermath:
        from .azure_cut import Cut

        phase, expires_at = self._fork.Value("i", 0), self._fork.Value("d", 0.0)
        endpoint = self._azure.endpoint
        settings = {**clouds.settings(self._azure, endpoint), "jump": "127.0.0.1:1", "answer_s": 0.3}
        given = (settings, clouds.credentials(self._azure, endpoint), str(self._lost), phase, expires_at)
        process = self._fork.Process(target=self._life.live, args=given)
        cut = Cut(phase, len(PHASES), (point.phase, point.n), point.done, process)
        self._azure.cloud.faults = cut
        process.start()
        end(process)
        if not cut.struck and process.exitcode:
            raise RuntimeError(f"the controller ended with {process.exitcode}")
        died_in = phase.value if cut.struck else len(PHASES) + 1
        self._azure.jump(max(0.0, expires_at.value + REAP_AFTER_S - self._azure.clock.now()))
        problems = self._reap()
        reaped_at = self._azure.clock.now()
        self._azure.jump(LOOK_AFTER_S)
        return self._account(died_in, expires_at.value, reaped_at, problems, cut.seen)

    def _reap(self) -> int:
        answer = self._desk / "answer.json"
        now = self._azure.clock.now()
        process = self._fork.Process(target=self._life.clean_up, args=(str(self._desk), now, str(answer)))
        process.start()
        end(process)
        if process.exitcode:
            raise RuntimeError(f"reap ended with {process.exitcode}")
        told = json.loads(answer.read_text())
        return sum(bool(problem) for problem in told["problems"].values())

    def _account(
        self, died_in: int, expires_at: float, reaped_at: float, problems: int, seen: Sequence[int]
    ) -> Aftermath:
        azure, now = self._azure, self._azure.clock.now()
        seconds = azure.meters.seconds
        return Aftermath(
            died_in=died_in,
            left=len(azure.left()),
            records=_records(azure),
            vm_s=seconds("vm", now, since=expires_at),
            disk_s=seconds("disk", now, since=reaped_at),
            address_s=seconds("address", now, since=reaped_at),
            waiting_s=seconds("disk", now, since=expires_at) + seconds("address", now, since=expires_at),
            problems=problems,
            requests=tuple(seen),
        )


def _records(azure: StandIn) -> int:
    from tests.cloud.rest import Rest

    path = f"/resourceGroups/{clouds.GROUP}/providers/Microsoft.Resources/deployments"
    told = Rest(azure).get(path)
    return len(told.body["value"]) if told.status == 200 else 0


def end(process: BaseProcess) -> None:
    process.join(LIMIT_S)
    if process.is_alive():
        process.kill()
        process.join()
        raise TimeoutError(f"a process did not end within {LIMIT_S:g} s")
