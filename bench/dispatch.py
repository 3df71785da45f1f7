"""How fast attempts follow each other, and what CPU they cost, beside tools that keep no books.

What is counted, all of it read from processes that have ended, when their figures are final:
controller    the process `evalfleet run`: start, plan, engine, journal, live files, report
supervisors   the resident processes of the machines, from their start to their end
starters      the short-lived processes that start supervisors (children of the controller)
wrapper       the `sh` of an attempt and its command (children that supervisors waited for)
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from evalfleet.events import AttemptEnded, AttemptStarted
from evalfleet.journal import Store
from evalfleet.model import seconds_between

from .result import Aim, Figures, Result, at_least, below, rounded
from .workspace import Workspace, await_end, heir, inherited

ATTEMPTS, MACHINES, ROUNDS = 2_000, 8, 3
LIMIT_S = 120.0
COUNTED = (
    "CPU of ended processes; controller: all of `evalfleet run`; supervisors: from start to end; "
    "wrapper: an attempt's sh and command; rates: attempts over the whole command's wall time, "
    "steady: from the first start to the last end"
)


def run(quick: bool) -> Result:
    attempts, machines, rounds = (24, 2, 1) if quick else (ATTEMPTS, MACHINES, ROUNDS)
    ours: list[Figures] = []
    theirs: dict[str, list[Figures]] = {}
    loads: list[float] = []
    with ExitStack() as kept:  # ext4 is slow to make files for minutes after many were deleted
        for _ in range(rounds):
            loads.append(os.getloadavg()[0])
            ours.append(_evalfleet(attempts, machines, kept.enter_context(Workspace())))
            for name, argv in PEERS.items():
                theirs.setdefault(name, []).append(peer(argv, attempts))
    figures = _medians(ours)
    against = {name: _medians(each) for name, each in theirs.items()}
    for name, other in against.items():
        if "error" not in other:
            figures[f"rate_over_{name}"] = rounded(figures["attempts_per_s"] / other["attempts_per_s"], 3)
    aims: dict[str, Aim] = {}
    if "controller_and_supervisors_ms" in figures:
        aims["controller_and_supervisors_ms"] = below(figures["controller_and_supervisors_ms"], 3.0)
    if "rate_over_gnu_parallel" in figures:
        aims["rate_over_gnu_parallel"] = at_least(figures["rate_over_gnu_parallel"], 1.0)
    figures |= {"attempts": attempts, "machines": machines, "rounds": rounds, "counted": COUNTED}
    figures["cpu_ms_by_round"] = [rounded(each.get("controller_and_supervisors_ms", 0.0)) for each in ours]
    figures["load_before_a_round"] = loads  # a busy computer makes the same work cost more CPU
    return Result("dispatch", figures, aims, against)


def _medians(rounds: Sequence[Figures]) -> Figures:
    """Of each figure; the first error, if there is one."""
    for each in rounds:
        if "error" in each:
            return each
    return {key: rounded(statistics.median(each[key] for each in rounds)) for key in rounds[0]}


def _evalfleet(attempts: int, machines: int, space: Workspace) -> Figures:
    with heir() as inherits:
        path = space.benchmark(["true"], [{"id": f"t_{i}"} for i in range(attempts)])
        start = time.perf_counter()
        process = space.start_run(path, machines)
        if not inherits:
            space.finish(process, LIMIT_S)
            return _rates(space, attempts, time.perf_counter() - start)
        controller = await_end(process, LIMIT_S)
        wall_s = time.perf_counter() - start
        supervisors = inherited(30.0)
        space.finish(process)
        own = 1000 / attempts
        watching = sum(each.own_s for each in supervisors)
        return {
            **_rates(space, attempts, wall_s),
            "controller_ms": own * controller.own_s,
            "supervisors_ms": own * watching,
            "controller_and_supervisors_ms": own * (controller.own_s + watching),
            "starters_ms": own * controller.children_s,
            "wrapper_and_command_ms": own * sum(each.children_s for each in supervisors),
        }


def _rates(space: Workspace, attempts: int, wall_s: float) -> Figures:
    """Checks, too, that every attempt was made: what did not run is not fast."""
    starts, ends = [], []
    for record in Store.open(space.home, create=False).read("run"):
        if isinstance(record.event, AttemptStarted):
            starts.append(record.at)
        elif isinstance(record.event, AttemptEnded):
            ends.append(record.at)
    if len(ends) != attempts:
        raise RuntimeError(f"{len(ends)} attempts instead of {attempts}:\n{space.output()}")
    steady_s = seconds_between(starts[0], ends[-1])
    return {"attempts_per_s": attempts / wall_s, "steady_attempts_per_s": attempts / steady_s}


# -- the others --------------------------------------------------------------------------------

PEERS: dict[str, tuple[str, ...]] = {
    "gnu_parallel": ("parallel", "--will-cite", "-j", str(MACHINES), "-a", "ids", "true"),
    "gnu_parallel_joblog_results": (
        *("parallel", "--will-cite", "-j", str(MACHINES), "--joblog", "log", "--results", "out", "-a", "ids"),
        "true",
    ),
    "xargs": ("xargs", "-a", "ids", "-n", "1", "-P", str(MACHINES), "true"),
}


def peer(argv: Sequence[str], attempts: int) -> Figures:
    if shutil.which(argv[0]) is None:
        return {"error": "not installed"}
    with Workspace() as space:
        (space.folder / "ids").write_text("".join(f"t_{i}\n" for i in range(attempts)))
        home = {**os.environ, "HOME": str(space.folder)}  # GNU parallel keeps files there
        start = time.perf_counter()
        process: subprocess.Popen[Any] = subprocess.Popen(
            argv,
            cwd=space.folder,
            env=home,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        space.adopt(process)
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            return {"error": f"exit code {process.returncode}"}
        cpu_s = usage.ru_utime + usage.ru_stime
        return {"attempts_per_s": attempts / wall_s, "everything_ms": 1000 * cpu_s / attempts}
