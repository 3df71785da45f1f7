"""The same tasks on the same lab hosts with GNU parallel and with a bare asyncssh loop."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lab import Lab

from .bare_asyncssh import COMMANDS
from .hosts import settings
from .result import Figures, rounded
from .workspace import ROOT, Workspace, environment, wait_until

LIMIT_S = 240.0


def measured(peer: Callable[[Lab, int], Figures], lab: Lab, count: int) -> Figures:
    """Its figures, or why there are none."""
    try:
        return peer(lab, count)
    except subprocess.TimeoutExpired as err:
        return {"error": f"not done after {err.timeout:g} s"}
    except (RuntimeError, OSError) as err:
        return {"error": str(err).strip().splitlines()[-1] if str(err).strip() else type(err).__name__}


def bare_asyncssh(lab: Lab, count: int) -> Figures:
    with Workspace() as space:
        place, told = space.folder / "place.json", space.folder / "told.json"
        place.write_text(json.dumps(settings(lab)))
        argv = (sys.executable, "-m", "bench.bare_asyncssh", str(place), str(count), str(told))
        _finish(space, (*lab.prefix, *argv), environment(), ROOT)
        return _rounded(json.loads(told.read_text()))


def parallel(lab: Lab, count: int) -> Figures:
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
            cpu_s = _finish(space, [*argv, "--joblog", str(log), *command], environ, space.folder)
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


def _finish(space: Workspace, argv: Sequence[str], environ: Mapping[str, str], cwd: Path) -> float:
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
    if code := process.wait(LIMIT_S):
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


PEERS: Mapping[str, Callable[[Lab, int], Figures]] = {
    "bare_asyncssh": bare_asyncssh,
    "gnu_parallel": parallel,
}
