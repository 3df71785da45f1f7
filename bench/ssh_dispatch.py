"""Short tasks on lab hosts over SSH, with everything that a run promises, beside tools that promise less."""

from __future__ import annotations

import os
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

from evalfleet.model import seconds_between
from lab import Lab

from . import processes
from .bare_asyncssh import COMMANDS
from .hosts import cannot, first_start_and_last_end, lab_of, pool_of, records, start_pool_run, start_run
from .result import Aim, Figures, Result, at_least, at_most, below, rounded
from .ssh_peers import PEERS, measured
from .workspace import Workspace

TASKS, HOSTS, ROUNDS = 1_000, 20, 3
TASK_S = 0.05
LIMIT_S = 180.0
COUNTED = (
    "true, sleep: on a pool of the hosts, whose supervisors run already, as the peers' workers do; "
    "makespan: from the first start to the last end, by the journal (GNU parallel: by its joblog; others: "
    "around the whole map, connections open and workers warm); bound: tasks x 0.05 s / hosts; wall: the "
    "whole command; steady_ms: the controller's CPU an attempt, during the makespan; command_s: its CPU from "
    "start to end, which has 0.4 s for Python and asyncssh and the making of connections; "
    "isolation: none, as the peers have none; sleep_isolated: each attempt as a user of its own, the default "
    "here, for which one kernel works 12 to 15 ms an attempt, one after another for all 20 hosts of a lab; "
    "driver_cpu_ms: CPU a task of a peer's own process (GNU parallel: with the processes it waited for)"
)
PEERS_ARE = "on the same hosts, without a durable journal, supervised attempts or collected artefacts"


def run(quick: bool) -> Result:
    if (error := cannot("ssh-dispatch")) is not None:
        return Result("ssh-dispatch", dict(error), {})
    tasks, hosts, rounds = (24, 3, 1) if quick else (TASKS, HOSTS, ROUNDS)
    ours: dict[str, list[Figures]] = {kind: [] for kind in COMMANDS}
    cold: list[Figures] = []
    isolated: list[Figures] = []
    against: Figures = {}
    loads: list[float] = []
    with lab_of(hosts) as lab:
        for number in range(rounds):
            loads.append(os.getloadavg()[0])
            for kind, argv in COMMANDS.items():
                ours[kind].append(_evalfleet(lab, argv, tasks, warm=True))
            cold.append(_evalfleet(lab, COMMANDS["sleep"], tasks, warm=False))
            isolated.append(_evalfleet(lab, COMMANDS["sleep"], tasks, warm=True, isolation="user"))
            for name in list(PEERS)[number::rounds]:  # in between, so that all see the same computer
                against[name] = measured(PEERS[name], lab, tasks)
    bound_s = tasks * TASK_S / hosts
    figures: Figures = {kind: _medians(each) for kind, each in ours.items()}
    figures["sleep"]["makespan_over_bound"] = rounded(figures["sleep"]["makespan_s"] / bound_s)
    for other in against.values():
        if "error" not in other:
            other["sleep"]["makespan_over_bound"] = rounded(other["sleep"]["makespan_s"] / bound_s)
    aims = _aims(figures, against.get("gnu_parallel", {}))
    figures |= {"tasks": tasks, "hosts": hosts, "rounds": rounds, "bound_s": bound_s, "counted": COUNTED}
    figures["sleep_on_hosts_never_seen"] = _medians(cold)
    figures["sleep_isolated"] = _medians(isolated)
    figures["sleep_makespans_s"] = [rounded(each["makespan_s"]) for each in ours["sleep"]]
    figures["load_before_a_round"] = loads  # a busy computer makes everything slower, peers too
    figures["peers_are"] = PEERS_ARE
    return Result("ssh-dispatch", figures, aims, against)


def _aims(figures: Figures, parallel: Figures) -> dict[str, Aim]:
    worst_ms = max(figures[kind]["steady_ms"] for kind in COMMANDS)
    aims = {
        "sleep_makespan_over_bound": at_most(figures["sleep"]["makespan_over_bound"], 1.3),
        "steady_ms": below(worst_ms, 2.0),
    }
    if "error" not in parallel:
        faster = {kind: parallel[kind]["makespan_s"] / figures[kind]["makespan_s"] for kind in COMMANDS}
        for kind, times in faster.items():
            aims[f"{kind}_times_faster_than_gnu_parallel"] = at_least(rounded(times, 3), 5.0)
        # the faster the computer, the less there is to gain on tasks that sleep
        figures["sleep_most_times_faster"] = parallel["sleep"]["makespan_over_bound"]
    return aims


def _medians(rounds: Sequence[Figures]) -> Figures:
    return {key: rounded(statistics.median(each[key] for each in rounds)) for key in rounds[0]}


def _evalfleet(lab: Lab, argv: Sequence[str], tasks: int, *, warm: bool, isolation: str = "none") -> Figures:
    """`warm`: on a pool, whose machines are up before, as the workers of peers are."""
    with Workspace() as space:
        path = space.benchmark(argv, [{"id": f"t_{i}"} for i in range(tasks)], isolation)
        if not warm:
            return _measured(space, tasks, lambda: start_run(space, lab, path, len(lab.hosts)))
        with pool_of(space, lab) as pool:
            return _measured(space, tasks, lambda: start_pool_run(space, lab, path, pool))


def _measured(space: Workspace, tasks: int, start: Callable[[], subprocess.Popen[bytes]]) -> Figures:
    began = time.perf_counter()
    process = start()
    with CpuClock(process.pid) as clock:
        spent = processes.await_end(process, LIMIT_S)
    wall_s = time.perf_counter() - began
    space.finish(process)
    first, last = first_start_and_last_end(records(space), tasks)
    _check_artefacts(space, tasks)
    return {
        "makespan_s": seconds_between(first, last),
        "wall_s": wall_s,
        "command_s": spent.own_s,
        "steady_ms": 1000 * (clock.at(last / 1e6) - clock.at(first / 1e6)) / tasks,
    }


def _check_artefacts(space: Workspace, tasks: int) -> None:
    """An attempt whose log did not come home was not collected."""
    logs = sum(1 for _ in (space.home / "run").glob("*/*/evalfleet.log"))
    if logs != tasks:
        raise RuntimeError(f"the artefacts of {logs} attempts came home instead of {tasks}")


class CpuClock:
    """What CPU a process had used by when: looked at often enough, from a thread."""

    EVERY_S = 0.02

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seen: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> CpuClock:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(self.EVERY_S):
            try:
                self._seen.append((time.time(), processes.cpu_s(self._pid)))
            except OSError:
                return

    def at(self, wall: float) -> float:
        """CPU seconds at that time by the wall clock, as of the last look before."""
        return max((spent for seen, spent in self._seen if seen <= wall), default=0.0)
