"""Verbs that are not meant to be typed by users: sim, controller."""

from __future__ import annotations

import argparse
import signal
import sys

from .terminal import result_of


def sim_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", metavar="N", type=int, default=100, help="how many seeds (default: 100)")
    parser.add_argument("--start", metavar="S", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--seed", metavar="S", type=int, help="only this one, with its journal")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def sim(args: argparse.Namespace) -> int:
    """Simulate seeded runs in a failing world, with the real engine, and check every invariant."""
    if args.seed is not None:
        return _replay(args.seed)
    import dataclasses
    import json
    import time

    from evalfleet.sim.checks import run_seeds

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
    from evalfleet.sim.checks import check_seed
    from evalfleet.sim.loop import EPOCH

    found, sim = check_seed(seed)
    for record in sim.store.read() if sim is not None else ():
        print(f"{(record.at - EPOCH) / 1e6:12.3f}  epoch {record.epoch}  {record.event}")
    print("\n".join(found) or "no invariant was violated")
    return 1 if found else 0


def controller_arguments(parser: argparse.ArgumentParser) -> None:
    """It has no arguments: everything comes on standard input."""


def controller(args: argparse.Namespace) -> int:
    """The process of a detached run. It reads its order from standard input, and is not meant to be typed."""
    from pathlib import Path

    import msgspec

    from evalfleet.api import runs
    from evalfleet.api.runs import TAKEN, ControllerInput, let_go_of_output
    from evalfleet.errors import FleetError
    from evalfleet.planning.workspace import Workspace

    errand = msgspec.json.decode(sys.stdin.buffer.read(), type=ControllerInput)
    try:
        run = result_of(runs.control(Workspace.here(Path(errand.home)), errand.order()))
    except FleetError as err:
        print(str(err), flush=True)
        return err.exit_code
    print(TAKEN, flush=True)
    let_go_of_output()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda signum, frame: run.drain())
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    run.wait()
    return run.exit_code
