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
    "startup": "CPU seconds until the command line answers",
    "before": "cost of runs now beside an earlier commit",
    "dispatch": "2,000 attempts of `true` on 8 local machines, beside GNU parallel and xargs",
    "ssh-dispatch": "1,000 short tasks on 20 lab hosts, beside GNU parallel",
    "ssh-scale": "500 lab hosts held by one controller, and a reconnect storm",
    "recovery": "kill -9 the controller twenty times, and resume",
    "lost-host": "seconds from a host's power loss or partition to its task running on another one",
    "makespan": "length of a run on each schedule over the shortest possible",
    "sim-scale": "100,000 tasks on 1,000 machines, simulated: CPU, memory, cost of an event",
    "leak": "the controller killed at 200 moments in each kind of place: what is left and billed",
    "fleet": "20 and 100 cloud machines on stand-ins: seconds until all are ready",
    "meter": "model calls through the meter beside direct ones: time, CPU, memory, tokens",
    "budget-overshoot": "dollars over a budget of machines and models: 1,000 simulated runs, and a real one",
    "reconcile": "a run's counted cost beside what the stand-in for Azure bills",
    "alerts": "seconds from an alert's cause to the webhook that reports it",
    "dashboard": "runs of 20,000 tasks in a browser, and 100 watchers of a live run",
    "waa": "154 tasks of Windows Agent Arena on 10 lab hosts, and faults of its client (WAA_CHECKOUT)",
    "hal-overhead": "CPU and seconds of a HAL task beyond its agent's own (HAL_REPO, HAL_PYTHON)",
    "cluster-overhead": "1,000 tasks of `sleep 1` on 8 jobs of a real Slurm, beside srun and sbatch",
    "store": "a run's copy in object storage: its cost, take-over, races of two computers",
    "hostile": "attacks of attempts on their machine, and ten minutes of fuzzed input from hosts",
}


class Bench(Protocol):
    """A benchmark's module. One that measures several places names them in PLACES and takes `place`."""

    def run(self, quick: bool, **options: str) -> Result: ...


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("name", nargs="?", choices=(*BENCHES, "all"), metavar="NAME")
    parser.add_argument("--json", action="store_true", help="one JSON object a benchmark, each on a line")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it works, no more")
    parser.add_argument("--place", metavar="NAME", help="measure only this place (leak, fleet)")
    args = parser.parse_args(argv)
    if args.name is None:
        print("python -m bench NAME [--json] [--quick], where NAME is `all` or one of")
        for name, title in BENCHES.items():
            print(f"  {name:<16}  {title}")
        return 0
    signal.signal(signal.SIGTERM, _end)
    try:
        with _compiled(args.quick):
            for name in BENCHES if args.name == "all" else (args.name,):
                _measure(name, args)
    except KeyboardInterrupt:
        print("bench: interrupted; everything it started is gone", file=sys.stderr)
        return 130
    return 0


def _measure(name: str, args: argparse.Namespace) -> None:
    module = cast(Bench, importlib.import_module(f"bench.{name.replace('-', '_')}"))
    options = {"place": str(args.place)} if args.place else {}
    places: Sequence[str] = getattr(module, "PLACES", ())
    if args.place and args.place not in places:
        sys.exit(f"bench {name}: --place {args.place} is not one of: {', '.join(places) or 'none'}")
    start = time.monotonic()
    result = module.run(args.quick, **options)
    if args.json:
        print(json.dumps(result.data()), flush=True)
    else:
        title = f"{name}: {BENCHES[name]} ({time.monotonic() - start:.0f} s{', quick' if args.quick else ''})"
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
