"""Simulate seeded runs in a failing world, with the real engine, and check every invariant."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", metavar="N", type=int, default=100, help="how many seeds (default: 100)")
    parser.add_argument("--start", metavar="S", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--seed", metavar="S", type=int, help="only this one, with its journal")
    parser.add_argument("--json", action="store_true", help="one JSON document")


def main(args: argparse.Namespace) -> int:
    if args.seed is not None:
        return _replay(args.seed)
    import dataclasses
    import json
    import time

    from evalfleet.sim.seeds import run_seeds

    start = time.perf_counter()
    report = run_seeds(range(args.start, args.start + args.seeds))
    seconds = time.perf_counter() - start
    if args.json:
        print(json.dumps({**dataclasses.asdict(report), "seconds": round(seconds, 2)}))
    else:
        print(
            f"{report.seeds} seeds: {report.events} events, {report.attempts} attempts, "
            f"{report.machines} machines, "
            f"{report.crashes} controller crashes, {report.refusals} stale controllers refused, "
            f"{report.virtual_hours:.0f} virtual hours in {seconds:.1f} s; digest {report.digest}"
        )
        for seed, found in report.failures.items():
            print(f"seed {seed}: {'; '.join(found[:3])}\n  replay: evalfleet sim --seed {seed}")
    return 1 if report.failures else 0


def _replay(seed: int) -> int:
    from evalfleet.sim.loop import EPOCH
    from evalfleet.sim.seeds import check_seed

    found, sim = check_seed(seed)
    for record in sim.store.read() if sim is not None else ():
        print(f"{(record.at - EPOCH) / 1e6:12.3f}  epoch {record.epoch}  {record.event}")
    print("\n".join(found) or "no invariant was violated")
    return 1 if found else 0
