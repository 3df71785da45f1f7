"""Keep machines that outlive runs. `evalfleet run BENCHMARK --pool NAME` borrows them.

A pool's machines are made once, set up once, and lent to one run after another, never to two at a time.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Coroutine
from typing import Any

VERBS: dict[str, str] = {
    "create": "create a pool and its machines",
    "ls": "list the pools of this home",
    "status": "show a pool's machines, and which run uses each",
    "prepare": "set a benchmark up on all machines, so that runs need not",
    "start": "start stopped machines, and create missing ones",
    "stop": "stop all machines: no longer billed, disks kept",
    "set": "change how many machines it has, or when it ends",
    "restart": "end everything that runs on one machine, and start it afresh",
    "do": "run one of the benchmark's own verbs on machines: reset, clean, ...",
    "ssh": "open a shell on a machine, or run a command there",
    "tunnel": "reach ports of machines on this computer",
    "vnc": "look at the machines' screens in a browser, or save pictures of them",
    "logs": "print what happened to a pool, or to one of its machines",
    "delete": "delete a pool and all its machines",
}
MODULES: dict[str, str] = {
    "ls": "look",
    "status": "look",
    "logs": "look",
    "prepare": "prepare",
    "do": "appliance",
    "ssh": "shell",
    "tunnel": "shell",
    "vnc": "appliance",
}
"""Where a verb is, if not in `lifecycle`: a function of its name, and one that adds its arguments."""
FUNCTIONS = {"set": "set_pool"}
"""Names that Python keeps for itself."""


def pool_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(
        dest="verb", metavar="VERB", required=True, help="`evalfleet pool VERB --help` says more"
    )
    for verb, what in VERBS.items():
        about = _function(verb).__doc__
        add_verb_arguments(verbs.add_parser(verb, help=what, description=about, allow_abbrev=False), verb)


def add_verb_arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    _function(verb, "_arguments")(parser)


def pool(args: argparse.Namespace) -> int | Coroutine[Any, Any, int]:
    code: int | Coroutine[Any, Any, int] = _function(args.verb)(args)
    return code


def _function(verb: str, suffix: str = "") -> Callable[..., Any]:
    module = importlib.import_module(f"evalfleet.cli.pool.{MODULES.get(verb, 'lifecycle')}")
    function: Callable[..., Any] = getattr(module, FUNCTIONS.get(verb, verb) + suffix)
    return function


# -- arguments of several verbs -----------------------------------------------------------------------------


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


def add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        dest="settings",
        help="a setting of the place; may be repeated",
    )


def add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", metavar="FILE", help="read this file instead of the nearest evalfleet.toml"
    )
