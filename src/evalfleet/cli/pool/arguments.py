"""Arguments that several verbs have. Loads nothing: `--help` of all verbs is made by it."""

from __future__ import annotations

import argparse


def add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the pool; `evalfleet pool ls` shows all")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def add_machine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("machine", metavar="MACHINE", help="its name or id")


def add_machines(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("machines", metavar="MACHINE", nargs="*", help="its name or id (default: all)")


def add_benchmark(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--benchmark", metavar="B", help="whose machines they are (default: what they were prepared for)"
    )


def add_yes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")
