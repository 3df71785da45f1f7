"""A controller is killed at 200 moments: what is left at Compute Engine, and costs money, after `reap`."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .azure_leak import Point, end, points
from .result import Figures, Result, at_most, rounded
from .workspace import Workspace

if TYPE_CHECKING:
    from standins.gce import StandIn

BENCH = "gce-leak"
POINTS, QUICK_POINTS = 200, 3
TOGETHER = 4
SEED = 11
REAP_AFTER_S, LOOK_AFTER_S = 60.0, 86_400.0
PHASES = ("create", "run", "delete")
COUNTED = (
    "a process that makes, stops, starts and deletes two machines through the place is killed (kill -9) at a "
    "request chosen by a seed, which is either never carried out or carried out unheard; the stand-in's "
    f"clock then moves to {REAP_AFTER_S:g} s after the last expiry that was decided, `reap` runs on a "
    "computer without a home, and a day later the stand-in's books are read; vm, address: billed after the "
    "expiry; disk: billed after reap had ended; lives_past_limit: machines told to end after their expiry"
)


@dataclass(frozen=True)
class Aftermath:
    """What one crash led to. `died_in`: the phase; the number of all, if it lived to its end."""

    died_in: int
    left: int
    vm_s: float
    disk_s: float
    address_s: float
    problems: int
    lives: int
    requests: tuple[int, ...]


def run(quick: bool) -> Result:
    try:
        import standins.gce  # noqa: F401
    except ModuleNotFoundError as err:
        return Result(BENCH, {"error": f"{err.name} is not installed: pip install -e '.[dev]'"}, {})
    return measure(quick)


def measure(quick: bool) -> Result:
    undisturbed = _crash(Point(0, 0, False))
    chosen = points(QUICK_POINTS if quick else POINTS, undisturbed.requests)
    load = os.getloadavg()[0]
    with ThreadPoolExecutor(TOGETHER) as together:
        found = list(together.map(_crash, chosen))
    died = Counter(each.died_in for each in found)
    names = dict(enumerate(PHASES, 1)) | {len(PHASES) + 1: "after_all"}
    billed = {
        "vm": rounded(sum(each.vm_s for each in found)),
        "disk": rounded(sum(each.disk_s for each in found)),
        "address": rounded(sum(each.address_s for each in found)),
    }
    figures: Figures = {
        "crash_points": {names[number]: died[number] for number in sorted(died)},
        "requests_of_a_life": dict(zip(PHASES, undisturbed.requests, strict=True)),
        "resources_left": sum(each.left for each in found),
        "billed_s_past_expiry": billed,
        "lives_past_limit": sum(each.lives for each in found),
        "reap_said_no": sum(each.problems for each in found),
        "load_before": load,
        "counted": COUNTED,
    }
    aims = {
        "resources_left": at_most(figures["resources_left"], 0),
        "lives_past_limit": at_most(figures["lives_past_limit"], 0),
        **{f"{kind}_s_past_expiry": at_most(seconds, 0) for kind, seconds in billed.items()},
    }
    return Result(BENCH, figures, aims)


def _crash(point: Point) -> Aftermath:
    from standins.gce import StandIn, Timing

    quick = (0.0, 0.02)
    timing = Timing(insert=(0.05, 0.1), boot=quick, delete=quick, power=quick, other=quick, wait=5.0)
    with StandIn(timing=timing, seed=SEED) as google, Workspace() as space:
        return _World(google, space.folder).crash(point)


def settings(google: StandIn) -> dict[str, Any]:
    """Of a place `gce` that nothing is reached in by SSH."""
    return {
        "project": google.project,
        "types": ["e2-standard-4"],
        "zones": ["us-central1-a"],
        "ssh_from": ["*"],
        "owner": "bench",
        "endpoint": google.endpoint,
        "ca": str(google.ca),
        "jump": "127.0.0.1:1",
    }


class _World:
    """One stand-in, one controller that dies, one that cleans up."""

    def __init__(self, google: StandIn, folder: Path) -> None:
        from . import azure_life, gce_life

        self._google = google
        self._life, self._clean_up = gce_life, azure_life.clean_up
        self._fork = multiprocessing.get_context("forkserver")
        self._fork.set_forkserver_preload(["bench.gce_life", "bench.azure_life"])
        self._lost, self._desk = folder / "lost", folder / "desk"
        self._lost.mkdir()
        self._desk.mkdir()
        lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings(google).items())
        (self._desk / "evalfleet.toml").write_text(f'[places.gce]\nkind = "gce"\n{lines}')
        variables = "".join(f"{key}={value}\n" for key, value in google.environment.items())
        (self._desk / ".env").write_text(variables)

    def crash(self, point: Point) -> Aftermath:
        phase, expires_at = self._fork.Value("i", 0), self._fork.Value("d", 0.0)
        google = self._google
        given = {**settings(google), "answer_s": 0.3}
        process = self._fork.Process(
            target=self._life.live, args=(given, google.environment, str(self._lost), phase, expires_at)
        )
        cut = _cut(phase, point, process)
        google.cloud.faults = cut
        process.start()
        end(process)
        if not cut.struck and process.exitcode:
            raise RuntimeError(f"the controller ended with {process.exitcode}")
        died_in = phase.value if cut.struck else len(PHASES) + 1
        lives = sum((each.ends_at or 0.0) > expires_at.value for each in google.instances())
        google.jump(max(0.0, expires_at.value + REAP_AFTER_S - google.clock.now()))
        problems = self._reap()
        reaped_at = google.clock.now()
        google.jump(LOOK_AFTER_S)
        now, seconds = google.clock.now(), google.meters.seconds
        return Aftermath(
            died_in=died_in,
            left=len(google.left()),
            vm_s=seconds("vm", now, since=expires_at.value),
            disk_s=seconds("disk", now, since=reaped_at),
            address_s=seconds("address", now, since=expires_at.value),
            problems=problems,
            lives=lives,
            requests=tuple(cut.seen),
        )

    def _reap(self) -> int:
        answer = self._desk / "answer.json"
        now = self._google.clock.now()
        process = self._fork.Process(target=self._clean_up, args=(str(self._desk), now, str(answer)))
        process.start()
        end(process)
        if process.exitcode:
            raise RuntimeError(f"reap ended with {process.exitcode}")
        told = json.loads(answer.read_text())
        return sum(bool(problem) for problem in told["problems"].values())


def _cut(phase: Synchronized[int], point: Point, process: BaseProcess) -> Any:
    """Faults that kill the process that asks. `seen`: how many requests each phase had."""
    from standins.gce import Failed, Lost
    from standins.gce.faults import Effect, Faults
    from standins.gce.words import Call

    class Cut(Faults):
        seen: Sequence[int]

        def __init__(self) -> None:
            super().__init__()
            self.counts = [0] * len(PHASES)
            self.seen = self.counts
            self.struck = False

        def pick(self, call: Call, now: float) -> Effect | None:
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
