"""Pools and their machines come, change and go."""

from __future__ import annotations

import argparse
import sys

from . import add_config, add_json, add_machine, add_name, add_settings, add_yes


def create_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="what to call it")
    parser.add_argument(
        "--on", metavar="PLACE", default="local", help="where they come from (default: local)"
    )
    parser.add_argument(
        "--workers",
        metavar="N",
        help="how many machines (default: all hosts of a place that lists them; else 1)",
    )
    parser.add_argument("--expires", metavar="14d", default="14d", help="when they end by themselves")
    parser.add_argument(
        "--prefix",
        metavar="P",
        default=None,
        help="machines are called P-1, P-2, ... (default: worker, or the word of the benchmark that is "
        "prepared; hosts keep their own)",
    )
    add_settings(parser)
    add_config(parser)
    add_json(parser)


async def create(args: argparse.Namespace) -> int:
    """Create a pool and its machines. They stay, and may cost money, until they are deleted or expire."""
    from evalfleet.api import pools
    from evalfleet.errors import PlaceError
    from evalfleet.planning.pool_plan import PoolRequest
    from evalfleet.planning.values import parse_count, parse_duration, parse_pairs
    from evalfleet.planning.workspace import Workspace
    from evalfleet.views.notable import refusals, refusals_table

    from .show import follow, show

    request = PoolRequest(
        name=args.name,
        on=args.on,
        workers=None if args.workers is None else parse_count(args.workers, "--workers", 1, 10_000),
        expires_s=parse_duration(args.expires, "--expires"),
        prefix=args.prefix,
        settings=parse_pairs(args.settings or (), "--set"),
        config=args.config,
    )
    pool = await pools.create(Workspace.here(), request)
    state = await follow(pool)
    view = pool.view()
    if not view.machines:
        why = "; ".join(sorted({block.detail for block in state.blocks.values()})) or state.last_failure
        await pool.delete()
        await pool.wait()
        why = why or "no place offers any"
        if table := refusals_table(refusals(state)):
            print(table, file=sys.stderr)
        raise PlaceError(f"pool {pool.name!r} got no machine: {why}", transient=False)
    show(view, as_json=args.json)
    return 0


def start_arguments(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    parser.add_argument(
        "--replace",
        action="store_true",
        help="delete machines that do not start, with their disks, and create others",
    )
    add_json(parser)


async def start(args: argparse.Namespace) -> int:
    """Start the stopped machines of a pool, and create those that are missing.

    A machine that does not start keeps its disk, and stays stopped. The exit code is 4 if a machine did not
    start or is still missing.
    """
    from evalfleet.api import pools
    from evalfleet.errors import PlaceError
    from evalfleet.planning.workspace import Workspace

    from .show import follow, show

    pool = pools.open_pool(Workspace.here(), args.name)
    await pool.start()
    await follow(pool)
    if args.replace and pool.view().failed:
        await pool.replace()
        await follow(pool)
    view = pool.view()
    show(view, as_json=args.json)
    wanted, failed = view.state.limits.workers, len(view.failed)
    again = f"`evalfleet pool start {pool.name}` tries again"
    if failed:
        raise PlaceError(
            f"pool {pool.name!r}: {failed} of {wanted} machines did not start and keep their disks; {again}, "
            "and --replace deletes them and creates others",
            transient=False,
        )
    if (missing := wanted - len(view.machines)) > 0:
        raise PlaceError(f"pool {pool.name!r} lacks {missing} of {wanted} machines; {again}", transient=False)
    return 0


def stop_arguments(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    add_json(parser)


async def stop(args: argparse.Namespace) -> int:
    """Stop all machines of a pool: no longer billed, their disks kept. `pool start` brings them back."""
    from evalfleet.api import pools
    from evalfleet.planning.workspace import Workspace

    from .show import follow, show

    pool = pools.open_pool(Workspace.here(), args.name)
    await pool.stop()
    await follow(pool)
    show(pool.view(), as_json=args.json)
    return 0


def set_pool_arguments(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    parser.add_argument("--workers", metavar="N", help="set the number of machines")
    parser.add_argument("--expires", metavar="14d", help="set the expiry, counted from now")
    add_json(parser)


async def set_pool(args: argparse.Namespace) -> int:
    """Change how many machines a pool has, or when it ends by itself.

    Of the machines that no run uses, the newest are deleted first.
    """
    from evalfleet.api import pools
    from evalfleet.errors import RequestError
    from evalfleet.planning.values import parse_count, parse_duration
    from evalfleet.planning.workspace import Workspace

    from .show import follow, print_problems, show

    if args.workers is None and args.expires is None:
        raise RequestError("nothing to change: pass --workers N or --expires 14d")
    workers = None if args.workers is None else parse_count(args.workers, "--workers", 1, 10_000)
    expires_s = None if args.expires is None else parse_duration(args.expires, "--expires")
    pool = pools.open_pool(Workspace.here(), args.name)
    answers = [] if expires_s is None else await pool.extend(expires_s)
    if workers is not None:
        await pool.resize(workers)
        await follow(pool)
    show(pool.view(), as_json=args.json)
    return print_problems(answers)


def restart_arguments(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    add_machine(parser)
    add_json(parser)


async def restart(args: argparse.Namespace) -> int:
    """End everything that runs on one machine of a pool, and start it afresh."""
    import dataclasses

    from evalfleet.api import pools
    from evalfleet.planning.workspace import Workspace

    from .show import print_answers

    (answer,) = await pools.open_pool(Workspace.here(), args.name).restart(args.machine)
    said = "" if answer.problem else f"{answer.machine.name} was restarted and answers"
    return print_answers([dataclasses.replace(answer, said=said)], as_json=args.json)


def delete_arguments(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    add_yes(parser)
    add_json(parser)


async def delete(args: argparse.Namespace) -> int:
    """Delete a pool and all its machines, and what is on them."""
    import json

    from evalfleet.api import pools
    from evalfleet.cli.terminal import agreed
    from evalfleet.planning.workspace import Workspace
    from evalfleet.views.format import plural

    from .show import follow

    pool = pools.open_pool(Workspace.here(), args.name)
    names = [machine.name for machine in pool.view().machines]
    many = plural(len(names), "machine")
    if not args.yes and not agreed(f"delete pool {pool.name} and its {many}"):
        return 2
    await pool.delete()
    await follow(pool)
    if args.json:
        print(json.dumps({"pool": pool.name, "machines": names}))
    else:
        print(f"pool {pool.name} is deleted: {many}")
    return 0
