"""Set a benchmark up on all machines of a pool: its files, its set-up steps, its probe."""

from __future__ import annotations

import argparse
import sys

from .arguments import add_json, add_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    parser.add_argument("benchmark", metavar="BENCHMARK", help="as for `evalfleet run`")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", dest="settings", help="a setting")
    parser.add_argument("--env-file", metavar="FILE", help="read secrets from here; never uploaded")
    parser.add_argument("--config", metavar="FILE", help="this file instead of the nearest evalfleet.toml")
    add_json(parser)


def main(args: argparse.Namespace) -> int:
    from evalfleet import api, keeping
    from evalfleet.request import RunRequest
    from evalfleet.values import parse_pairs

    from . import following

    request = RunRequest(
        benchmark=args.benchmark,
        pool=args.name,
        settings=parse_pairs(args.settings or (), "--set") or None,
        env_file=args.env_file,
        config=args.config,
    )
    pool = keeping.open_pool(args.name)
    answers = pool.prepare(api.resolve_request(request, dry=True, only_setup=True), _tell)
    following.show(pool.view(), as_json=args.json)
    return following.told(answers)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
