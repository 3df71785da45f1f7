"""`python -m bench [NAME|all] [--json] [--quick]`."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Protocol, cast

from .result import Result, table

BENCHES: dict[str, str] = {
    "shape": "how large the parts of the source are, how much they explain, what knows what",
    "startup": "CPU seconds until the command line answers",
    "before": "what runs cost now beside an earlier commit, by the benchmarks of each",
    "ls": "1,000 runs listed by `evalfleet ls`, and one run's journal checked by `evalfleet verify`",
    "sim-scale": "100,000 tasks on 1,000 machines, simulated; what an event costs",
    "tiers": "154 tasks, simulated, whose first place fails half its jobs and goes away; 1,000 such runs",
    "stuck": "hangs of managed compute, simulated: until noticed, and until the task runs elsewhere",
    "dispatch": "2,000 attempts of `true` on 8 local machines, beside GNU parallel and xargs",
    "makespan": "how near the schedules come to the shortest possible run",
    "waa-plan": "time and machine cost of Windows Agent Arena on 1 to 40 machines, simulated",
    "plan-speed": "200 runs of 154 tasks on 40 spot machines, simulated to plan by",
    "calibration": "100 varied runs on this computer: how many take a time within their plan's 90% range",
    "store": "a run's copy in object storage: its cost, taking over from there, and races of two computers",
    "policies": "each schedule's time and cost over their bounds: six kinds of durations, 1 to 100 machines",
    "reconcile": "what a run on the stand-in for Azure is counted at, beside what its meters bill",
    "recovery": "kill -9 the controller twenty times; time to take a run up again",
    "first-contact": "from `run` to the refusal: 12 lab hosts, one dead, eleven with unknown keys",
    "ssh-dispatch": "1,000 short tasks on 20 lab hosts over SSH, beside GNU parallel, Ray, Dask, Parsl",
    "ssh-scale": "500 lab hosts held by one controller; a reconnect storm",
    "lost-host": "from power loss or partition of a host to its task running on another one",
    "waa-154": "the 154 tasks of Windows Agent Arena on 10 lab hosts, beside slices and openadapt-evals",
    "watching": "a picture of 100 machines, and a look by the rules of alerts: shares of a core",
    "alerts": "each rule of alerts replayed: seconds from its cause to a webhook that has it",
    "follow": "from a line that is written on a lab host to the screens of ten who follow it",
    "dashboard": "runs of 100,000 tasks and lists of 1,000 for a browser; 100 watchers of a live run",
    "report-html": "a report of 154 tasks with screenshots in one file: time, size, network requests",
    "meter": "model calls through the meter beside direct ones: time, CPU, memory, and every token counted",
    "budget-overshoot": "dollars over a budget of machines and models: 1,000 simulated runs, and a real one",
    "waa-faults": "WAA's own client and what goes wrong around it: whose zeros are scored (WAA_CHECKOUT)",
    "fuzz": "everything that a host can send, mutated for ten minutes, through to the disk and the terminal",
    "waa-fresh": "Windows back to golden by a thin layer over its disk, beside copying it",
    "azure-fleet": "20 and 100 Azure machines on the stand-in: time until all are ready",
    "gce-fleet": "20 and 100 Compute Engine machines on the stand-in: time until all are ready",
    "gce-leak": "the same on Compute Engine: what is left and billed, and lives past the limit",
    "service-leak": "the same on managed compute: what its own limits end, and what is left after `reap`",
    "service-start": "from asking managed compute for a machine until it is up: our own share of it",
    "azure-first-run": "an empty region, and deletes that Azure refuses: how soon each is known",
    "hostile": "attacks of attempts on their machine and its neighbours, on each isolation",
    "isolation-cost": "ms that an attempt takes as a user of its own, beside none",
    "hal-overhead": "CPU and seconds of a HAL task beyond its agent's own (HAL_REPO, HAL_PYTHON)",
    "hal-fleet": "200 tasks of HAL on 50 lab hosts, a tenth of them lost, the controller killed twice",
    "hal-plan": "10, 50 and 200 HAL tasks on Google Cloud by --dry-run, beside what people hope they cost",
    "cluster-overhead": "1,000 tasks of `sleep 1` on 8 jobs of a real Slurm, beside srun and a job a task",
    "slurm-leak": "the controller killed at 200 moments on a real Slurm: jobs, steps and files that are left",
    "mailbox": "attempts on machines that only a mailbox reaches: how soon they run, what each costs",
    "azure-leak": "the controller killed at 200 moments: what is left and billed after `reap`",
}


class Bench(Protocol):
    """What a benchmark's module has."""

    def run(self, quick: bool) -> Result: ...


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("name", nargs="?", choices=(*BENCHES, "all"), metavar="NAME")
    parser.add_argument("--json", action="store_true", help="one JSON object a benchmark, each on a line")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it works, no more")
    args = parser.parse_args(argv)
    if args.name is None:
        print("python -m bench NAME [--json] [--quick], where NAME is `all` or one of")
        for name, what in BENCHES.items():
            print(f"  {name:<12}  {what}")
        return 0
    signal.signal(signal.SIGTERM, _end)
    try:
        with _compiled(args.quick):
            for name in BENCHES if args.name == "all" else (args.name,):
                _measure(name, args.json, args.quick)
    except KeyboardInterrupt:
        print("bench: interrupted; everything it started is gone", file=sys.stderr)
        return 130
    return 0


def _measure(name: str, as_json: bool, quick: bool) -> None:
    module = cast(Bench, importlib.import_module(f"bench.{name.replace('-', '_')}"))
    start = time.monotonic()
    result = module.run(quick)
    if as_json:
        print(json.dumps(result.data()), flush=True)
    else:
        title = f"{name}: {BENCHES[name]} ({time.monotonic() - start:.0f} s{', quick' if quick else ''})"
        print(table(title, result), flush=True)


@contextmanager
def _compiled(quick: bool) -> Iterator[None]:
    """Measure compiled modules, as users have them, also where Python was told not to keep them."""
    if quick or not sys.dont_write_bytecode:
        yield
        return
    cache = tempfile.mkdtemp(prefix="evalfleet-bench-")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = cache
    try:
        yield
    finally:
        shutil.rmtree(cache, ignore_errors=True)


def _end(signum: int, frame: FrameType | None) -> None:
    """As Ctrl-C: whoever has something to clean up does so."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
