"""Simulate seeded runs in a failing world, with the real engine, and check every invariant."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time

from .checks import check_seed, run_seeds
from .loop import EPOCH


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m sim", description=__doc__)
    parser.add_argument("--seeds", metavar="N", type=int, default=100, help="how many seeds (default: 100)")
    parser.add_argument("--start", metavar="S", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--seed", metavar="S", type=int, help="only this one, with its journal")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    return replay(args.seed) if args.seed is not None else check(args.start, args.seeds, args.json)


def check(start: int, count: int, as_json: bool) -> int:
    began = time.perf_counter()
    report = run_seeds(range(start, start + count))
    seconds = time.perf_counter() - began
    if as_json:
        print(json.dumps({**dataclasses.asdict(report), "seconds": round(seconds, 2)}))
    else:
        print(
            f"{report.seeds} seeds: {report.events} events, {report.attempts} attempts, "
            f"{report.machines} machines, "
            f"{report.crashes} controller crashes, {report.refusals} stale controllers refused, "
            f"{report.virtual_hours:.0f} virtual hours in {seconds:.1f} s; digest {report.digest}"
        )
        for seed, problems in report.failures.items():
            print(f"seed {seed}: {'; '.join(problems[:3])}\n  replay: python -m sim --seed {seed}")
    return 1 if report.failures else 0


def replay(seed: int) -> int:
    problems, sim = check_seed(seed)
    for record in sim.store.read() if sim is not None else ():
        print(f"{(record.at - EPOCH) / 1e6:12.3f}  epoch {record.epoch}  {record.event}")
    print("\n".join(problems) or "no invariant was violated")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
