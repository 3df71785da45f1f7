"""Secrets' values: that they are there, that they can be masked, and that no flag shows one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from evalfleet.channels.secrecy import is_maskable
from evalfleet.errors import RequestError

from .request import (
    Flags,
)


def secret_values(names: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """RequestError names all that are missing or empty."""
    missing = [name for name in names if not environ.get(name)]
    if missing:
        raise RequestError(
            f"the benchmark needs {', '.join(missing)}; set {'it' if len(missing) == 1 else 'them'} in the "
            "environment, in .env beside evalfleet.toml, or in a file given with --env-file"
        )
    return {name: environ[name] for name in names}


CHANCE = 8
"""A value shorter than this may be part of another word."""


def refuse_shown(flags: Flags, secrets: Mapping[str, str]) -> None:
    """A secret's value must not be in the plan: that is in the journal, and on command lines."""
    given = {f"-A {key}": value for key, value in flags.agent.items()}
    given |= {f"--set {key}": value for key, value in flags.set.items()} | {"--model": ",".join(flags.model)}
    for name, value in secrets.items():
        by_chance = not is_maskable(value) or len(value) < CHANCE
        shown = next((flag for flag, text in given.items() if value in text), None)
        if shown is not None and (not by_chance or given[shown] == value):
            raise RequestError(
                f"{shown} holds the value of {name}, which would be kept in the journal; leave it out: "
                f"the task's command finds it in ${name}"
            )


def weak_secrets(secrets: Mapping[str, str]) -> list[str]:
    return [
        f"the value of {name} is so short or common that it is not masked in logs and artefacts"
        for name, value in secrets.items()
        if not is_maskable(value)
    ]
