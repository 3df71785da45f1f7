"""List the benchmarks that are installed, with their settings."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON document")


def main(args: argparse.Namespace) -> int:
    from evalfleet import registry
    from evalfleet.cli.plugins import print_plugins

    return print_plugins(registry.benchmarks(), as_json=args.json)
