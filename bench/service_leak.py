"""A controller is killed at 200 moments: what is left at Azure Batch, and costs money, without it and after
`reap`."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import clouds
from .azure_leak import Point, end, points
from .result import Figures, Result, at_most, rounded
from .workspace import Workspace

if TYPE_CHECKING:
    from standins.azure_batch import StandIn

BENCH = "service-leak"
POINTS, QUICK_POINTS = 200, 3
TOGETHER = 4
SEED = 11
QUEUE_S = 600.0
SWEPT_S = 300.0
"""So long after its end the budget pays for a machine: `Offer.sweep_s`."""
LATEST_S = 7200.0
"""After the last expiry; by then Batch's own limits have ended everything."""
PHASES = ("create", "run", "delete")
COUNTED = (
    "a process that asks for two machines through the place, looks at them until their nodes run and deletes "
    "them is killed (kill -9) at a request chosen by a seed, which is either never carried out or carried "
    "out unheard; then the stand-in's clock moves on, and nobody asks: pools_left_alone, and "
    "billed_s_past_expiry of the worst machine, are what Batch's own limits leave; after `reap` on another "
    "computer, without a home, all that is there is counted as left; pilots are records, which never end by "
    "themselves"
)


@dataclass(frozen=True)
class Aftermath:
    """What one crash led to. `died_in`: the phase; the number of all, if it lived to its end."""

    died_in: int
    alone: int
    left: int
    late_s: float
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
        "pools_left_alone": sum(each.alone for each in found),
        "resources_left": sum(each.left for each in found),
        "billed_s_past_expiry": rounded(max(each.late_s for each in found)),
        "reap_said_no": sum(each.problems for each in found),
        "load_before": load,
        "counted": COUNTED,
    }
    aims = {
        "pools_left_alone": at_most(figures["pools_left_alone"], 0),
        "resources_left": at_most(figures["resources_left"], 0),
        "billed_s_past_expiry": at_most(figures["billed_s_past_expiry"], SWEPT_S),
    }
    return Result(BENCH, figures, aims)


def _crash(point: Point) -> Aftermath:
    from standins.azure_batch import StandIn, Timing

    quick = (0.0, 0.02)
    with StandIn(timing=Timing(quick, quick, quick), seed=SEED) as batch, Workspace() as space:
        return _World(batch, space.folder).crash(point)


def settings(batch: StandIn) -> dict[str, Any]:
    """Of a place `azure_batch` that nothing is reached in by SSH."""
    return {
        "account": f"{batch.account}.{batch.region}",
        "endpoint": batch.endpoint,
        "ca": str(batch.ca),
        "ssh_from": ["*"],
        "owner": "bench",
        "queue_s": QUEUE_S,
        "poll_s": 0.05,
    }


class _World:
    """One stand-in, one controller that dies, one that cleans up."""

    def __init__(self, batch: StandIn, folder: Path) -> None:
        from . import azure_life, service_life

        self._batch = batch
        self._life, self._clean_up = service_life, azure_life.clean_up
        self._fork = multiprocessing.get_context("forkserver")
        self._fork.set_forkserver_preload(["bench.service_life", "bench.azure_life"])
        self._lost, self._desk = folder / "lost", folder / "desk"
        self._lost.mkdir()
        self._desk.mkdir()
        lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings(batch).items())
        (self._desk / "evalfleet.toml").write_text(f'[places.batch]\nkind = "azure_batch"\n{lines}')
        variables = "".join(f"{key}={value}\n" for key, value in batch.service_principal().items())
        (self._desk / ".env").write_text(variables)

    def crash(self, point: Point) -> Aftermath:
        phase, expires_at = self._fork.Value("i", 0), self._fork.Value("d", 0.0)
        batch = self._batch
        given = (settings(batch), batch.service_principal(), str(self._lost), phase, expires_at)
        process = self._fork.Process(target=self._life.live, args=given)
        cut = _cut(phase, point, process)
        batch.service.faults = cut
        process.start()
        end(process)
        if not cut.struck and process.exitcode:
            raise RuntimeError(f"the controller ended with {process.exitcode}")
        died_in = phase.value if cut.struck else len(PHASES) + 1
        batch.jump(max(0.0, expires_at.value + LATEST_S - batch.clock.now()))
        alone = batch.do(lambda: len(batch.service.pools))
        now, since = batch.clock.now(), expires_at.value
        late_s = max((span.seconds(now, since) for span in batch.meters.of("vm")), default=0.0)
        problems = self._reap()
        batch.jump(60.0)
        return Aftermath(died_in, alone, len(batch.left()), late_s, problems, tuple(cut.counts))

    def _reap(self) -> int:
        answer = self._desk / "answer.json"
        now = self._batch.clock.now()
        process = self._fork.Process(target=self._clean_up, args=(str(self._desk), now, str(answer)))
        process.start()
        end(process)
        if process.exitcode:
            raise RuntimeError(f"reap ended with {process.exitcode}")
        told = json.loads(answer.read_text())
        return sum(bool(problem) for problem in told["problems"].values())


def _cut(phase: Synchronized[int], point: Point, process: BaseProcess) -> Any:
    """Faults that kill the process that asks. `counts`: how many requests each phase had."""
    from standins.azure_batch import Failed, Lost
    from standins.azure_batch.words import Effect, Faults
    from standins.cloud.faults import Asked

    class Cut(Faults):
        def __init__(self) -> None:
            super().__init__()
            self.counts = [0] * len(PHASES)
            self.struck = False

        def by_rules(self, call: Asked) -> Effect | None:
            now_in = phase.value
            if self.struck or not 1 <= now_in <= len(PHASES):
                return None
            self.counts[now_in - 1] += 1
            early = now_in == point.phase and self.counts[now_in - 1] < point.n
            if point.phase == 0 or now_in < point.phase or early:
                return None
            # a phase may have fewer requests than the last time: then it dies as soon as it is over
            self.struck = True
            process.kill()
            return Lost() if point.done else Failed()

    return Cut()
