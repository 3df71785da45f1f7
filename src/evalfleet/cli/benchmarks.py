"""List the benchmarks that are installed, with their settings."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON document")


def main(args: argparse.Namespace) -> int:
    from evalfleet.cli.plugins import print_plugins
    from evalfleet.planning import plugins

    return print_plugins(plugins.benchmarks(), as_json=args.json)
