"""Short tasks on lab hosts over SSH, with everything that a run promises, beside GNU parallel."""

from __future__ import annotations

import os
import shlex
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evalfleet.model import seconds_between
from lab import Lab

from .hosts import cannot, first_start_and_last_end, lab_of, pool_of, records, start_pool_run, start_run
from .result import Aim, Figures, Result, at_least, at_most, below, rounded
from .workspace import Workspace, await_end, cpu_s, environment, wait_until

TASKS, HOSTS, ROUNDS = 1_000, 20, 3
TASK_S = 0.05
COMMANDS = {"true": ["true"], "sleep": ["sleep", "0.05"]}
LIMIT_S, PEER_LIMIT_S = 180.0, 240.0
COUNTED = (
    "true, sleep: on a pool of the hosts, whose supervisors run already, as its connections do; "
    "makespan: from the first start to the last end, by the journal (GNU parallel: by its joblog); "
    "bound: tasks x 0.05 s / hosts; wall: the "
    "whole command; steady_ms: the controller's CPU an attempt, during the makespan; command_s: its CPU from "
    "start to end, which has 0.4 s for Python and asyncssh and the making of connections; "
    "isolation: none, as GNU parallel has none; "
    "driver_cpu_ms: CPU a task of GNU parallel with the processes it waited for, on the same hosts without a "
    "durable journal, supervised attempts or collected artefacts"
)


def run(quick: bool) -> Result:
    if (error := cannot("ssh-dispatch")) is not None:
        return Result("ssh-dispatch", dict(error), {})
    tasks, hosts, rounds = (24, 3, 1) if quick else (TASKS, HOSTS, ROUNDS)
    ours: dict[str, list[Figures]] = {kind: [] for kind in COMMANDS}
    cold: list[Figures] = []
    against: Figures = {}
    loads: list[float] = []
    with lab_of(hosts) as lab:
        for number in range(rounds):
            loads.append(os.getloadavg()[0])
            for kind, argv in COMMANDS.items():
                ours[kind].append(_evalfleet(lab, argv, tasks, warm=True))
            cold.append(_evalfleet(lab, COMMANDS["sleep"], tasks, warm=False))
            if number == 0:
                against["gnu_parallel"] = _peer(lab, tasks)
    bound_s = tasks * TASK_S / hosts
    figures: Figures = {kind: _medians(each) for kind, each in ours.items()}
    figures["sleep"]["makespan_over_bound"] = rounded(figures["sleep"]["makespan_s"] / bound_s)
    for other in against.values():
        if "error" not in other:
            other["sleep"]["makespan_over_bound"] = rounded(other["sleep"]["makespan_s"] / bound_s)
    aims = _aims(figures, against.get("gnu_parallel", {}))
    figures |= {"tasks": tasks, "hosts": hosts, "rounds": rounds, "bound_s": bound_s, "counted": COUNTED}
    figures["sleep_on_hosts_never_seen"] = _medians(cold)
    figures["sleep_makespans_s"] = [rounded(each["makespan_s"]) for each in ours["sleep"]]
    figures["load_before_a_round"] = loads  # a busy computer makes everything slower, peers too
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


def _evalfleet(lab: Lab, argv: Sequence[str], tasks: int, *, warm: bool) -> Figures:
    """`warm`: on a pool, whose machines are up before, as the workers of peers are."""
    with Workspace() as space:
        path = space.benchmark(argv, [{"id": f"t_{i}"} for i in range(tasks)], "none")
        if not warm:
            return _measured(space, tasks, lambda: start_run(space, lab, path, len(lab.hosts)))
        with pool_of(space, lab) as pool:
            return _measured(space, tasks, lambda: start_pool_run(space, lab, path, pool))


def _measured(space: Workspace, tasks: int, start: Callable[[], subprocess.Popen[bytes]]) -> Figures:
    began = time.perf_counter()
    process = start()
    with CpuClock(process.pid) as clock:
        spent = await_end(process, LIMIT_S)
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
                self._seen.append((time.time(), cpu_s(self._pid)))
            except OSError:
                return

    def at(self, wall: float) -> float:
        """CPU seconds at that time by the wall clock, as of the last look before."""
        return max((spent for seen, spent in self._seen if seen <= wall), default=0.0)


# -- GNU parallel ------------------------------------------------------------------------------


def _peer(lab: Lab, count: int) -> Figures:
    """Return its figures, or why there are none."""
    try:
        return _parallel(lab, count)
    except subprocess.TimeoutExpired as err:
        return {"error": f"not done after {err.timeout:g} s"}
    except (RuntimeError, OSError) as err:
        return {"error": str(err).strip().splitlines()[-1] if str(err).strip() else type(err).__name__}


def _parallel(lab: Lab, count: int) -> Figures:
    """GNU parallel, a job at a time on each host, over connections that are open already (ControlMaster)."""
    if shutil.which("parallel") is None:
        return {"error": "not installed"}
    with Workspace() as space:
        config = _ssh_config(space.folder, lab)
        _open_masters(space, lab, config)
        logins = ",".join(f"1/{host.address}" for host in lab.hosts)
        ssh = f"ssh -F {shlex.quote(str(config))}"
        argv = [*lab.prefix, "parallel", "--will-cite", "-N0", "--ssh", ssh, "-S", logins, "-a", "ids"]
        (space.folder / "ids").write_text("".join(f"t_{i}\n" for i in range(count)))
        told: Figures = {}
        for kind, command in COMMANDS.items():
            log = space.folder / f"{kind}.log"
            start = time.perf_counter()
            environ = environment(HOME=str(space.folder))  # it keeps files there
            cpu_s = _cpu_s(space, [*argv, "--joblog", str(log), *command], environ, space.folder)
            told[kind] = {
                "makespan_s": _makespan(log, count),
                "wall_s": time.perf_counter() - start,
                "driver_cpu_ms": 1000 * cpu_s / count,
            }
        return _rounded(told)


def _ssh_config(folder: Path, lab: Lab) -> Path:
    path = folder / "ssh_config"
    path.write_text(
        f"User {lab.hosts[0].users[0]}\n"
        f"IdentityFile {lab.client.key_path}\nIdentitiesOnly yes\nIdentityAgent none\nBatchMode yes\n"
        f"UserKnownHostsFile {lab.client.known_hosts_path}\nStrictHostKeyChecking yes\nLogLevel ERROR\n"
        f"ControlPath ./%h\nControlMaster no\nKexAlgorithms curve25519-sha256\n"
    )
    return path


def _open_masters(space: Workspace, lab: Lab, config: Path) -> None:
    """Ours, so that they end with us."""
    for host in lab.hosts:
        space.start(*lab.prefix, "ssh", "-F", str(config), "-M", "-N", host.address)
    wait_until(lambda: all((space.folder / host.address).exists() for host in lab.hosts), 60.0)


def _makespan(log: Path, count: int) -> float:
    """From the first start to the last end, by its own record."""
    rows = [line.split("\t") for line in log.read_text().splitlines()[1:]]
    if len(rows) != count or any(row[6] != "0" for row in rows):
        raise RuntimeError(f"{len(rows)} of {count} jobs in its log, or some failed")
    return max(float(row[2]) + float(row[3]) for row in rows) - min(float(row[2]) for row in rows)


def _cpu_s(space: Workspace, argv: Sequence[str], environ: Mapping[str, str], cwd: Path) -> float:
    """CPU seconds of a command that must succeed, with all children that it waited for."""
    with open(space.folder / "output", "ab") as output:
        process = subprocess.Popen(
            argv,
            cwd=cwd,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    space.adopt(process)
    before = os.times()
    if code := process.wait(PEER_LIMIT_S):
        raise RuntimeError(f"{space.output()}\nended with {code}: {_last_line(space)}")
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def _last_line(space: Workspace) -> str:
    lines = space.output().strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def _rounded(told: Mapping[str, Any]) -> Figures:
    return {
        key: _rounded(value) if isinstance(value, Mapping) else rounded(float(value))
        for key, value in told.items()
    }
