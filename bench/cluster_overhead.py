"""What an attempt costs on a real Slurm beyond its own time, beside `srun` and one job a task."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from evalfleet.events import AttemptEnded, AttemptStarted, MachineReady
from evalfleet.model import seconds_between
from tests.desk import Desk
from tests.slurm.cluster import Cluster, missing

from .result import Figures, Result, at_most, below, rounded

BENCH = "cluster-overhead"
SLOTS, QUICK_SLOTS = 8, 2
TASKS, QUICK_TASKS = 1000, 8
PEER_TASKS, QUICK_PEER_TASKS = 40, 4
MAILBOX_TASKS, QUICK_MAILBOX_TASKS = 200, 4
TASK_S = 1.0
AIM_S, AIM_MAILBOX_S, AIM_MAKESPAN = 0.2, 5.0, 1.15
COUNTED = (
    "tasks of `sleep 1` on a private cluster of this computer; overhead_s: on a machine, the median time "
    "from the start of one attempt to that of the next, less a second; makespan: from the first machine "
    "that is ready to the last end, over tasks * 1 s / slots; against: as many at once, a task each"
)


def run(quick: bool) -> Result:
    if (error := missing()) is not None:
        return Result(BENCH, {"error": error}, {})
    slots, tasks, peers, mailed = (
        (QUICK_SLOTS, QUICK_TASKS, QUICK_PEER_TASKS, QUICK_MAILBOX_TASKS)
        if quick
        else (SLOTS, TASKS, PEER_TASKS, MAILBOX_TASKS)
    )
    with _cluster(slots) as (cluster, folder):
        figures = {**_ours(cluster, folder / "desk", slots, tasks), "counted": COUNTED}
        figures["mailbox"] = _ours(cluster, folder / "mailed", slots, mailed, 'reach = "mailbox"\n')
        srun = ("srun", "--quiet", "--ntasks=1", "sleep", f"{TASK_S:g}")
        sbatch = ("sbatch", "--wait", "--output=/dev/null", f"--wrap=sleep {TASK_S:g}")
        against = {"srun": _peer(cluster, srun, slots, peers), "sbatch": _peer(cluster, sbatch, slots, peers)}
    aims = {
        "overhead_s": below(figures["overhead_s"], AIM_S),
        "mailbox_overhead_s": below(figures["mailbox"]["overhead_s"], AIM_MAILBOX_S),
        "makespan_over_bound": at_most(figures["makespan_over_bound"], AIM_MAKESPAN),
    }
    return Result(BENCH, figures, aims, against)


@contextmanager
def _cluster(slots: int) -> Iterator[tuple[Cluster, Path]]:
    # Slurm's sockets are below it, and an address holds 108 bytes
    with tempfile.TemporaryDirectory(prefix="evalfleet-bench-", dir="/tmp") as name:
        cluster = Cluster(Path(name, "slurm"), nodes=slots, cpus=1)
        try:
            cluster.start()
            yield cluster, Path(name)
        finally:
            cluster.stop()


def _ours(cluster: Cluster, folder: Path, slots: int, tasks: int, settings: str = "") -> Figures:
    desk = Desk(folder, folder / "results", dict(cluster.environ))
    desk.config(f'[places.hpc]\nkind = "slurm"\nfolder = "shared"\n{settings}')
    (folder / "tasks.jsonl").write_text("".join(json.dumps({"id": f"t{n}"}) + "\n" for n in range(tasks)))
    (folder / "run.sh").write_text(
        f'sleep {TASK_S:g}; echo \'{{"score": 1}}\' >"$EVALFLEET_OUT/result.json"\n'
    )
    (folder / "b.toml").write_text(
        'name = "b"\ntasks = "tasks.jsonl"\ncommand = ["sh", "run.sh"]\nfiles = ["run.sh"]\ntimeout_s = 600\n'
    )
    limit_s = 600.0 + 4 * tasks * TASK_S / slots
    desk.done("run", "b.toml", "--on", "hpc", "--workers", str(slots), "--name", "r", timeout_s=limit_s)
    return _read(desk, slots, tasks)


def _read(desk: Desk, slots: int, tasks: int) -> Figures:
    records = desk.records()
    ready = min(record.at for record in records if isinstance(record.event, MachineReady))
    last = max(record.at for record in records if isinstance(record.event, AttemptEnded))
    starts: dict[str, list[int]] = {}
    for record in records:
        if isinstance(record.event, AttemptStarted):
            starts.setdefault(record.event.machine, []).append(record.at)
    gaps = sorted(seconds_between(*pair) for times in starts.values() for pair in pairwise(times))
    bound_s = tasks * TASK_S / slots
    return {
        "tasks": tasks,
        "slots": slots,
        "machines": len(starts),
        "overhead_s": rounded(gaps[len(gaps) // 2] - TASK_S),
        "makespan_over_bound": rounded(seconds_between(ready, last) / bound_s),
    }


def _peer(cluster: Cluster, argv: tuple[str, ...], slots: int, tasks: int) -> Figures:
    def one(number: int) -> None:
        done: subprocess.CompletedProcess[str] = cluster.try_(*argv)
        assert done.returncode == 0, done.stderr

    began = time.monotonic()
    with ThreadPoolExecutor(slots) as pool:
        list(pool.map(one, range(tasks)))
    each_s = (time.monotonic() - began) * slots / tasks
    return {"tasks": tasks, "overhead_s": rounded(each_s - TASK_S)}
