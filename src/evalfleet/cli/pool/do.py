"""Doing to machines what the benchmark that they were set up for has a verb for."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from .arguments import add_benchmark, add_machine, add_machines, add_name, add_yes


def do_arguments(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    parser.add_argument(
        "word", metavar="VERB", help="what to do; a wrong one is answered with those there are"
    )
    add_machines(parser)
    add_benchmark(parser)
    add_yes(parser)


def do(args: argparse.Namespace) -> int:
    """Do something to machines of a pool that the benchmark has a verb for which they were set up for.

    `pool reset` and `pool clean` are two such verbs. Nobody else can have the machines meanwhile.
    """
    return _do(args.name, args.word, args.machines, args.benchmark, sure=args.yes)


def reset_arguments(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    add_machine(parser)
    add_benchmark(parser)


def reset(args: argparse.Namespace) -> int:
    """Bring what a benchmark runs on one machine of a pool back to its golden state.

    What is in it now is lost.
    """
    return _do(args.name, "reset", [args.machine], args.benchmark, sure=True)


def clean_arguments(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    add_machines(parser)
    add_benchmark(parser)
    add_yes(parser)


def clean(args: argparse.Namespace) -> int:
    """Undo what setting up a benchmark left on a pool's machines, which may be much.

    For hosts that were lent, which otherwise keep it. Those of a cloud need it not: `pool delete` deletes
    their disks.
    """
    return _do(args.name, "clean", args.machines, args.benchmark, sure=args.yes)


def _do(name: str, word: str, machines: Sequence[str], benchmark: str | None, *, sure: bool) -> int:
    from evalfleet.api import appliances, pools
    from evalfleet.cli.confirm import agreed

    from .show import print_problems

    pool = pools.open_pool(name)
    running = pool.running(machines)
    owner, verb = appliances.verb_of(pool, running, word, benchmark)
    names = [machine.name for machine in running]
    if verb.asks and not sure and not agreed(f"{verb.asks} on {', '.join(names)}"):
        return 2
    answers = appliances.do(pool, names, owner, verb)
    for answer in answers:
        if answer.said:
            print(answer.said)
    return print_problems(answers)
