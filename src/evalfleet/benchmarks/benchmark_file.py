"""Reads a benchmark file (mybench.toml) and checks all of it before anything starts."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
from msgspec import Struct

from evalfleet.errors import RequestError
from evalfleet.model import Isolation, Needs
from evalfleet.toml_tables import convert, read_toml

from .files import bundle_files, check_files
from .loaded import Loaded
from .spec import PLACEHOLDER, CommandSpec, bundle_of, score_bundle_of, spec_data
from .tasks import check_stall, check_timeout, make_tasks, read_inline, read_jsonl

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,59}")
_SECRET = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_BRACES = re.compile(r"(\$?)\{([A-Za-z_][A-Za-z0-9_.-]*)\}")
_SCRIPTS = frozenset({".sh", ".bash", ".py", ".js", ".mjs", ".ts", ".rb", ".pl", ".jl", ".r", ".lua", ".ps1"})
_KNOWN = ("task_id", "domain", "attempt", "params")


class BenchmarkFile(Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of the file."""

    name: str
    command: tuple[str, ...]
    tasks: str | tuple[Any, ...]
    files: tuple[str, ...] = ()
    setup: tuple[tuple[str, ...], ...] = ()
    probe: tuple[str, ...] | None = None
    timeout_s: float = 3600.0
    stall_s: float = 0.0
    on_timeout: str = "zero"
    score_from: str = "result"
    secrets: tuple[str, ...] = ()
    needs: Needs = Needs()
    slots: int = 1
    isolation: str = ""
    score: tuple[str, ...] | None = None
    score_files: tuple[str, ...] = ()
    score_timeout_s: float = 600.0


def load_benchmark(path: Path) -> Loaded:
    """The benchmark that a file describes. RequestError names the file, the line or key, and the fix."""
    where = str(path)
    file = convert(read_toml(path), BenchmarkFile, where)
    root = Path(os.path.abspath(path)).parent
    _check_values(file, where)
    check_files(root, file.files, where)
    check_files(root, file.score_files, where)
    spec = _spec(file, root)
    if isinstance(file.tasks, str):
        lines = read_jsonl(path.parent / file.tasks, f"{where}: key 'tasks'")
    else:
        lines = read_inline(file.tasks, where)
    tasks = make_tasks(lines, file.timeout_s, file.stall_s, _params_in((*file.command, *(file.score or ()))))
    if not tasks:
        raise RequestError(f"{where}: key 'tasks' has no tasks; write at least one")
    files = bundle_files(root, file.files)
    planned = msgspec.structs.replace(
        spec, digest=bundle_of(spec).digest, score_digest=score_bundle_of(spec).digest
    )
    return Loaded(
        name=file.name,
        spec=spec_data(planned),
        tasks=tasks,
        secrets=file.secrets,
        slots=file.slots,
        files=(*files.values(), *bundle_files(root, file.score_files).values()),
        warnings=tuple(f"{where}: {warning}" for warning in warnings_about(spec)),
        isolation=_isolation(file.isolation, where),
    )


def _isolation(given: str, where: str) -> Isolation:
    if given == "container":
        raise RequestError(f'{where}: isolation = "container" is not supported yet; write "user" or "none"')
    if given in ("user", "none"):
        return "user" if given == "user" else "none"
    if given:
        raise RequestError(
            f'{where}: key \'isolation\' is {given!r}; write "user" or "none", or leave it out'
        )
    return ""


def _spec(file: BenchmarkFile, root: Path) -> CommandSpec:
    return CommandSpec(
        name=file.name,
        root=str(root),
        command=file.command,
        files=file.files,
        setup=file.setup,
        probe=file.probe or (),
        on_timeout="zero" if file.on_timeout == "zero" else "broken",
        score_from="exit_code" if file.score_from == "exit_code" else "result",
        secrets=file.secrets,
        needs=file.needs,
        slots=file.slots,
        score=file.score or (),
        score_files=file.score_files,
        score_timeout_s=file.score_timeout_s,
    )


def _check_values(file: BenchmarkFile, where: str) -> None:
    if not _NAME.fullmatch(file.name):
        raise RequestError(
            f"{where}: key 'name' is {file.name[:80]!r}; write 1 to 60 letters, digits, '.', '_' or '-', "
            "the first a letter or digit"
        )
    _check_argv(file.command, where, "command")
    for number, step in enumerate(file.setup, start=1):
        _check_argv(step, where, f"setup (step {number})")
    if file.probe is not None:
        _check_argv(file.probe, where, "probe")
    _check_score(file, where)
    check_timeout(file.timeout_s, where)
    check_stall(file.stall_s, where)
    if file.on_timeout not in ("zero", "broken"):
        raise RequestError(f'{where}: key \'on_timeout\' is {file.on_timeout!r}; write "zero" or "broken"')
    if file.score_from not in ("result", "exit_code"):
        raise RequestError(
            f'{where}: key \'score_from\' is {file.score_from!r}; write "result" or "exit_code"'
        )
    if not 1 <= file.slots <= 1000:
        raise RequestError(f"{where}: key 'slots' is {file.slots}; write a whole number from 1 to 1000")
    for name in file.secrets:
        if not _SECRET.fullmatch(name):
            # The value itself may have been written here by mistake: it is not shown.
            raise RequestError(
                f"{where}: key 'secrets' has an entry that is no variable name; "
                'write names such as "OPENAI_API_KEY", never values'
            )
    _check_needs(file.needs, where)


def _check_score(file: BenchmarkFile, where: str) -> None:
    check_timeout(file.score_timeout_s, where)
    if file.score is not None:
        _check_argv(file.score, where, "score")
    elif file.score_files:
        raise RequestError(
            f"{where}: key 'score_files' is for the 'score' command; write one, or take it out"
        )
    both = sorted(set(file.files) & set(file.score_files))
    if both:
        raise RequestError(
            f"{where}: {both[0]!r} is in 'files' and in 'score_files'; take it out of one of them"
        )


def _check_argv(argv: Sequence[str], where: str, key: str) -> None:
    if not argv or not argv[0].strip():
        raise RequestError(
            f'{where}: key {key!r} is empty; write a program and its arguments, such as ["bash", "run.sh"]'
        )
    if any("\0" in word for word in argv):
        raise RequestError(f"{where}: key {key!r} has a NUL character, which no argument may; take it out")


def _check_needs(needs: Needs, where: str) -> None:
    for key, low in (("cpus", 1), ("memory_gb", 0), ("disk_gb", 0)):
        value = getattr(needs, key)
        if not low <= value <= 1_000_000:  # False for nan, too
            raise RequestError(f"{where}: key 'needs.{key}' is {value}; write a number from {low} to 1000000")


def _params_in(command: Iterable[str]) -> list[str]:
    found = (match[1] for word in command for match in PLACEHOLDER.finditer(word))
    return sorted({name.removeprefix("params.") for name in found if name.startswith("params.")})


# -- what looks wrong but may be meant: told to the user, never refused ---------------------------------


def warnings_about(spec: CommandSpec) -> Iterator[str]:
    """One sentence for each, without the file's name."""
    yield from _about_braces(spec.command)
    others = [(f"setup (step {n})", argv) for n, argv in enumerate(spec.setup, start=1)]
    others += [("probe", spec.probe)] if spec.probe else []
    for key, argv in others:
        for match in (match for word in argv for match in PLACEHOLDER.finditer(word)):
            yield f"key {key!r} has {match[0]!r}, which is replaced in the command alone; it stays as it is"
    for key, argv in [("command", spec.command), *others]:
        yield from _about_files(key, argv, spec)


def _about_braces(command: Sequence[str]) -> Iterator[str]:
    for dollar, name in (match.groups() for word in command for match in _BRACES.finditer(word)):
        if PLACEHOLDER.fullmatch(f"{{{name}}}"):
            if dollar:
                yield (
                    f"key 'command' has '${{{name}}}': the value is put after the '$'; "
                    f"write '{{{name}}}', or a variable such as $EVALFLEET_TASK_ID"
                )
            continue
        head, _, rest = name.partition(".")
        close = difflib.get_close_matches(str(head), _KNOWN, n=1, cutoff=0.6)
        if close and not dollar:
            meant = f"params.{rest or 'NAME'}" if close[0] == "params" else close[0]
            yield f"key 'command' has '{{{name}}}', which stays as it is; did you mean '{{{meant}}}'?"


def _about_files(key: str, argv: Sequence[str], spec: CommandSpec) -> Iterator[str]:
    root = Path(spec.root)
    for position, word in enumerate(argv):
        if not _may_be_file(word):
            continue
        path = PurePosixPath(word)
        here = (root / path).is_file()
        listed = any(path == entry or entry in path.parents for entry in map(PurePosixPath, spec.files))
        if not listed and (here or path.suffix.lower() in _SCRIPTS):
            fix = f"add {str(path)!r} to it" if here else "no machine has it unless setup makes it"
            yield f"key {key!r} names {word!r}, which is not in 'files'; {fix}"
        elif position == 0 and listed and here and "/" not in word:
            yield f"key {key!r} starts with the file {word!r}; write {'./' + word!r} to run it"
        elif position == 0 and listed and here and not os.access(root / path, os.X_OK):
            yield f"key {key!r} starts with {word!r}, not executable; chmod +x it or name its interpreter"


def _may_be_file(word: str) -> bool:
    if not word or word.startswith(("-", "/", "~")) or len(word) > 200:
        return False
    return not re.search(r"[\s{}$*?;|&<>=:]", word) and ".." not in PurePosixPath(word).parts
