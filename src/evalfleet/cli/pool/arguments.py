"""Arguments that several verbs have. Loads nothing: `--help` of all verbs is made by it."""

from __future__ import annotations

import argparse


def add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the pool; `evalfleet pool ls` shows all")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON document")


def add_machines(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("machines", metavar="MACHINE", nargs="*", help="its name or id (default: all)")
