"""Completion in shells, by argcomplete: `eval "$(register-python-argcomplete evalfleet)"`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from typing import Any

from . import VERBS, add_arguments


def complete() -> None:
    """Answer the question that the shell's script left in the environment, and exit."""
    import argcomplete

    typed = os.environ.get("COMP_LINE", "").split()
    parser = argparse.ArgumentParser(prog="evalfleet")
    verbs = parser.add_subparsers()
    for verb, title in VERBS.items():
        subparser = verbs.add_parser(verb, help=title)
        if verb in typed[1:2]:
            add_arguments(subparser, verb)
            _add_completers(subparser)
    argcomplete.autocomplete(parser, always_complete_options=False)


def _add_completers(parser: argparse.ArgumentParser) -> None:
    """Tell argcomplete where the values of each argument come from, by its name or metavar."""
    actions: list[Any] = parser._actions  # pyright: ignore[reportPrivateUsage]
    for action in actions:
        if hasattr(action.choices, "values"):  # the verbs of `pool`
            for subparser in action.choices.values():
                _add_completers(subparser)
        elif action.dest == "pool" or (action.metavar == "NAME" and not action.option_strings):
            action.completer = _pools
        elif action.dest in ("on", "place"):
            action.completer = _places
        elif action.metavar == "RUN" and action.dest != "name":
            action.completer = _runs
        elif action.metavar == "TASK":
            action.completer = _tasks


def _pools(**_: object) -> list[str]:
    return _streams("pool")


def _runs(**_: object) -> list[str]:
    return ["latest", *_streams("run")]


def _places(**_: object) -> list[str]:
    from evalfleet.planning.plugins import known
    from evalfleet.planning.workspace import Workspace

    return sorted({*Workspace.here().config.places, *known("place")})


def _tasks(parsed_args: argparse.Namespace, **_: object) -> Iterable[str]:
    from evalfleet.api.runs import open_run
    from evalfleet.planning.workspace import Workspace

    run: str | None = getattr(parsed_args, "run", None)
    return open_run(Workspace.here(), run).state().tasks if run else ()


def _streams(kind: str) -> list[str]:
    from evalfleet.planning.workspace import Workspace

    store = Workspace.here().records_if_any()
    return [] if store is None else [info.name for info in store.streams() if info.kind == kind]
