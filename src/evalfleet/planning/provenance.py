"""What a run is made of beside its plan: which flags chose its tasks, which commit, which versions."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from evalfleet.files import git
from evalfleet.model import Provenance, Task
from evalfleet.version import __version__

from .request import Flags, RunRequest
from .values import parse_names


def provenance(selection: Mapping[str, Any], tasks: Sequence[Task], folder: Path) -> Provenance:
    """`folder` is where the benchmark's files are."""
    commit = git(folder, "rev-parse", "HEAD")
    return Provenance(
        selection=selection,
        tasks_digest=tasks_digest(tasks),
        commit=commit,
        uncommitted=bool(commit and git(folder, "status", "--porcelain", "--", ".")),
        versions=versions(),
    )


def selection_of(flags: Flags, request: RunRequest) -> dict[str, Any]:
    """The flags that chose tasks, as far as they were given; the seed with a sample."""
    given: dict[str, Any] = {
        "tasks": flags.tasks,
        "seed": None if flags.tasks is None else flags.seed,
        "first": flags.first,
        "task": list(flags.task),
        "domain": list(flags.domain),
        "tag": list(flags.tag),
        "exclude": list(flags.exclude),
        "from": request.options.get("from_run"),
        "only": list(parse_names(request.options.get("only", ()), "--only")),
        "repeat": None if flags.repeat == 1 else flags.repeat,
    }
    return {key: value for key, value in given.items() if value not in (None, [], "")}


def tasks_digest(tasks: Sequence[Task]) -> str:
    """Whatever is expected of their durations."""
    plain = [msgspec.structs.replace(task, weight_s=None) for task in tasks]
    return hashlib.sha256(msgspec.json.encode(plain, order="sorted")).hexdigest()


def versions() -> dict[str, str]:
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    return {"evalfleet": __version__, "python": platform.python_version(), "system": system}
