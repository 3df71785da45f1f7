"""Setting a benchmark up on the machines of a pool, and making an image of one of them."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from . import add_config, add_json, add_name, add_settings

if TYPE_CHECKING:
    from evalfleet.api.pools import Pool
    from evalfleet.planning.plan import Resolved
    from evalfleet.ports import Image


def prepare_arguments(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    parser.add_argument("benchmark", metavar="BENCHMARK", help="as for `evalfleet run`")
    add_settings(parser)
    parser.add_argument(
        "--capture",
        metavar="IMAGE",
        help="then capture an image of a machine, to be named in its place's settings",
    )
    parser.add_argument("--env-file", metavar="FILE", help="read secrets from here; never uploaded")
    add_config(parser)
    add_json(parser)


async def prepare(args: argparse.Namespace) -> int:
    """Set a benchmark up on all machines of a pool: its files, its set-up steps, its probe.

    Files of gigabytes that machines are to fetch from their place's own storage, such as golden storage that
    is named by here:PATH, are sent there first, unless they are there; what was cut off goes on.

    With --capture, one of the machines becomes an image from which later machines come up ready. That machine
    is deleted then; the image costs money until `evalfleet machines --delete-image NAME`.
    """
    from evalfleet.api import capture, pools, runs
    from evalfleet.planning.request import RunRequest
    from evalfleet.planning.values import parse_pairs
    from evalfleet.planning.workspace import Workspace

    from .show import print_problems, show

    request = RunRequest(
        benchmark=args.benchmark,
        pool=args.name,
        settings=parse_pairs(args.settings or (), "--set"),
        env_file=args.env_file,
        config=args.config,
    )
    workspace = Workspace.here()
    pool = pools.open_pool(workspace, args.name)
    resolved = runs.resolve_request(workspace, request, "setup")
    if args.capture is not None:
        await capture.check(pool, args.capture)
        if capture.begun(pool.view(), args.capture):
            return await _capture(pool, resolved, args.capture, as_json=args.json)
    answers = await pool.prepare(resolved, _tell)
    if args.capture is None or any(answer.problem for answer in answers):
        show(pool.view(), as_json=args.json)
        return print_problems(answers)
    return await _capture(pool, resolved, args.capture, as_json=args.json)


async def _capture(pool: Pool, resolved: Resolved, image: str, *, as_json: bool) -> int:
    from evalfleet.api import capture
    from evalfleet.api.documents import image_facts, pool_document
    from evalfleet.planning.plan_parts import appliance_of

    from .show import follow, text

    machine = capture.chosen(pool.view(), image)
    setup_s = sum(seconds for step, seconds in machine.timings.items() if step.startswith("setup."))
    made = await capture.capture(pool, appliance_of(resolved.plan), image, _tell)
    pool.catch_up()
    await pool.control()
    await follow(pool)
    view = pool.view()
    told = pool_document(view, pool.workspace.now())
    if as_json:
        print(json.dumps({**told, "image": image_facts(made)}))
    else:
        print(f"{text(view, told, {})}\n\n{_words(pool.name, machine.name, made, setup_s)}")
    return 0


def _words(pool: str, machine: str, made: Image, setup_s: float) -> str:
    from evalfleet.cli.machines import monthly
    from evalfleet.views.format import duration

    where = ", ".join(made.regions)
    saved = f"; machines from it need not repeat its set-up of {duration(setup_s)}" if setup_s else ""
    return "\n".join(
        (
            f"image {made.name} is ready in {where}: {made.gb:.1f} GB, {monthly(made)} "
            f"until `evalfleet machines --delete-image {made.name}`",
            f"{machine} was deleted for it{saved}. Pool {pool} has one machine less; `evalfleet pool set "
            f"{pool} --workers N` makes another, with the image that the pool was created with",
            "runs and new pools have it at once with this line under the place in evalfleet.toml:",
            f"  {made.setting}",
        )
    )


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
