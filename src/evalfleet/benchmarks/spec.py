"""A command benchmark as it is planned and recorded: the checked contents of its file but for the tasks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from evalfleet.errors import RequestError
from evalfleet.model import Bundle, Command, Needs, SetupStep

from .files import bundle_files, digest

PLACEHOLDER = re.compile(r"\{(task_id|domain|attempt|params\.[^{}]+)\}")


class CommandSpec(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The checked contents of the file but for its tasks. `root` is its folder, absolute.

    `digest` is the bundle's when the run was planned: files that change later are refused, not mixed.
    """

    name: str
    root: str
    command: tuple[str, ...]
    files: tuple[str, ...] = ()
    setup: tuple[tuple[str, ...], ...] = ()
    probe: tuple[str, ...] = ()
    on_timeout: Literal["zero", "broken"] = "zero"
    score_from: Literal["result", "exit_code"] = "result"
    digest: str = ""
    secrets: tuple[str, ...] = ()
    needs: Needs = Needs()
    slots: int = 1
    score: tuple[str, ...] = ()
    score_files: tuple[str, ...] = ()
    score_timeout_s: float = 600.0
    score_digest: str = ""


def score_bundle_of(spec: CommandSpec) -> Bundle:
    """The files that only the score command gets. Raises RequestError as `bundle_of` does."""
    if not spec.score_files:
        return Bundle()
    root = Path(spec.root)
    files = bundle_files(root, spec.score_files)
    found = "score-" + digest(root, files, ())
    _check_unchanged(spec, spec.score_digest, found)
    return Bundle(found, {name: str(path) for name, path in files.items()})


def _check_unchanged(spec: CommandSpec, planned: str, found: str) -> None:
    if planned not in ("", found):
        raise RequestError(
            f"the files of benchmark {spec.name!r} in {spec.root} have changed since the run was planned: "
            "put them back as they were, or start a new run"
        )


def bundle_of(spec: CommandSpec) -> Bundle:
    """Reads every file once. Raises RequestError if one cannot be read or has changed."""
    steps = tuple(SetupStep(f"setup-{n}", Command(argv)) for n, argv in enumerate(spec.setup, start=1))
    root = Path(spec.root)
    files = bundle_files(root, spec.files)
    found = digest(root, files, steps)
    _check_unchanged(spec, spec.digest, found)
    return Bundle(found, {name: str(path) for name, path in files.items()}, steps)


def spec_data(spec: CommandSpec) -> dict[str, Any]:
    """As JSON would give it back: lists, not tuples."""
    data: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(spec))
    return data
