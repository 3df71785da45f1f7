"""The tasks of a benchmark file: a file of theirs beside it (JSONL, JSON or CSV), or `[[tasks]]` in it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta, Struct, field

from evalfleet.errors import RequestError
from evalfleet.model import Needs, Task, TaskId, decodable
from evalfleet.names import hint
from evalfleet.toml_tables import convert

from .containers import check_image
from .datasets import kind_of, lines_of, read_json, read_rows

MAX_TIMEOUT_S = 30 * 86400.0
MAX_ID_BYTES = 200
MAX_PARAMS_BYTES = 100_000
"""Linux takes at most 128 KiB in one argument or variable; beyond, the command would not even start."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")

ROW_NUMBER = "#"
"""In place of a field: the number of its row, from 1."""
EnvTable = Mapping[str, str | int | float]
"""Variables as people write them; a number is written out."""


class TaskLine(Struct, frozen=True, forbid_unknown_fields=True):
    """A task as people write it."""

    id: Annotated[str, Meta(description="unique in the file; printable, at most 200 bytes")]
    domain: Annotated[
        str, Meta(description="what by_domain groups by; default: the id up to its last '_'")
    ] = ""
    params: Annotated[
        Mapping[str, Any], Meta(description="anything JSON can hold, at most 100,000 bytes")
    ] = field(default_factory=dict[str, Any])
    timeout_s: Annotated[float | None, Meta(description="time limit; default: the file's")] = None
    stall_s: Annotated[
        float | None, Meta(description="how long it may write nothing; 0: until its time limit")
    ] = None
    env: Annotated[EnvTable, Meta(description="variables of its own, over the file's")] = field(
        default_factory=dict[str, str | int | float]
    )
    files: Annotated[tuple[str, ...], Meta(description="as the file's, for this task's attempts alone")] = ()
    setup: Annotated[
        tuple[tuple[str, ...], ...],
        Meta(description="run once on a machine before its first attempt there, among its own files"),
    ] = ()
    image: Annotated[
        str, Meta(description="its attempts run in a container of this image, not the file's")
    ] = ""
    needs: Annotated[
        Needs | None,
        Meta(description="what it needs beyond the file's; it runs on machines that have it"),
    ] = None
    tags: Annotated[tuple[str, ...], Meta(description="words to choose it by: --tag")] = ()
    metadata: Annotated[Mapping[str, Any], Meta(description="kept with the task; no command sees it")] = (
        field(default_factory=dict[str, Any])
    )


class TaskSource(Struct, frozen=True, forbid_unknown_fields=True):
    """A dataset as it is, and which of its fields are what: `tasks = {path = "data.csv", id = "task_id"}`."""

    path: Annotated[
        str, Meta(description="a .jsonl, .json, .csv or .tsv file beside this one, also with .gz")
    ]
    id: Annotated[str, Meta(description="the field that holds a task's id; '#' is the row's number")] = "id"
    domain: Annotated[
        str, Meta(description="the field that holds its domain; default: 'domain', if there is one")
    ] = ""
    params: Annotated[
        str | tuple[str, ...] | Mapping[str, str] | None,
        Meta(
            description="the field that holds its params, a list of fields that are its params, or a table "
            "PARAM = FIELD; default: all fields that are named nowhere else"
        ),
    ] = None
    timeout_s: Annotated[str, Meta(description="the field that holds its time limit")] = ""
    tags: Annotated[str, Meta(description="the field that holds its tags: a list, or words with commas")] = ""
    metadata: Annotated[tuple[str, ...], Meta(description="fields to be kept with the task")] = ()


class TaskOwn(Struct, frozen=True, omit_defaults=True):
    """`Task.own` of a command benchmark: what only its command, files and set-up are made of."""

    env: Mapping[str, str] = field(default_factory=dict[str, str])
    files: tuple[str, ...] = ()
    setup: tuple[tuple[str, ...], ...] = ()
    image: str = ""
    digest: str = ""
    """Of its own bundle, when the run was planned."""


class TaskDefaults(Struct, frozen=True):
    """What a task has that says nothing else, and what all tasks must have."""

    timeout_s: float
    stall_s: float = 0.0
    needed: tuple[str, ...] = ()
    """The params that the commands have placeholders for."""
    domain: str = ""
    """Of a task of a dataset whose id tells none."""


_decoder = msgspec.json.Decoder(decodable(TaskLine))
Located = tuple[str, TaskLine]
"""Where it is written (`tasks.jsonl:3`), and what it says."""


def read_file(path: Path, key: str) -> Iterator[Located]:
    """The tasks of a file that has their own keys. `key` says who named the file."""
    kind = kind_of(path, key)
    if kind == ".jsonl":
        for place, line in lines_of(path, key):
            yield place, _decode(line, place)
        return
    for place, row in read_rows(path, key):
        if kind == ".json":
            yield place, convert(row, TaskLine, place)
        else:
            cells = {name: text for name, text in row.items() if text}
            limit, tags = (name if name in cells else "" for name in ("timeout_s", "tags"))
            yield place, _mapped(place, cells, TaskSource(str(path), timeout_s=limit, tags=tags))


def read_source(folder: Path, source: TaskSource, key: str) -> Iterator[Located]:
    """The tasks of a dataset, its fields mapped to theirs."""
    for number, (place, row) in enumerate(read_rows(folder / source.path, f"{key} 'tasks.path'"), start=1):
        yield place, _mapped(place, {ROW_NUMBER: number, **row} if source.id == ROW_NUMBER else row, source)


def read_inline(tables: Sequence[Any], where: str) -> Iterator[Located]:
    """The `[[tasks]]` of the benchmark file itself; the first is number 1."""
    for number, table in enumerate(tables, start=1):
        place = f"{where}: [[tasks]] number {number}"
        if not isinstance(table, dict):
            raise RequestError(f'{place}: must be a table such as {{id = "a_1"}}')
        yield place, convert(table, TaskLine, place)


def _mapped(place: str, row: Mapping[str, Any], source: TaskSource) -> TaskLine:
    """The task that a row of a dataset is."""

    def value(name: str, key: str) -> Any:
        if name not in row:
            raise RequestError(
                f"{place}: has no field {name!r}, which 'tasks.{key}' names; {hint(name, row)}"
            )
        return row[name]

    def text(name: str, key: str) -> str:
        given = value(name, key)
        return "" if given is None else str(given)

    domain = source.domain or ("domain" if "domain" in row else "")
    taken = {source.id, domain, source.timeout_s, source.tags, *source.metadata}
    if source.params is None:
        params = {name: row[name] for name in row if name not in taken}
    elif isinstance(source.params, str):
        held = value(source.params, "params")
        params = cast("dict[str, Any]", held) if isinstance(held, dict) else {source.params: held}
    elif isinstance(source.params, Mapping):
        params = {param: value(name, "params") for param, name in source.params.items()}
    else:
        params = {name: value(name, "params") for name in source.params}
    given: dict[str, Any] = {"id": text(source.id, "id"), "params": params}
    if domain:
        given["domain"] = text(domain, "domain")
    if source.timeout_s:
        given["timeout_s"] = _seconds(value(source.timeout_s, "timeout_s"))
    if source.tags:
        tags = value(source.tags, "tags")
        given["tags"] = re.split(r"[\s,;]+", tags.strip()) if isinstance(tags, str) else tags
    given["metadata"] = {name: value(name, "metadata") for name in source.metadata}
    return convert(given, TaskLine, place)


def _seconds(given: Any) -> Any:
    """A cell of a table holds text; what is no number is told by who reads the task."""
    try:
        return float(given) if isinstance(given, str) else given
    except ValueError:
        return given


# -- from what is written to tasks ---------------------------------------------------------------


def make_tasks(lines: Iterable[Located], defaults: TaskDefaults) -> tuple[Task, ...]:
    """Checked tasks, in order."""
    first_at: dict[str, str] = {}
    tasks: list[Task] = []
    for place, line in lines:
        task = _make(place, line, defaults)
        for name in defaults.needed:
            _check_param(place, task, name)
        if line.id in first_at:
            raise RequestError(f"{place}: id {line.id!r} is already used by {first_at[line.id]}; rename one")
        first_at[line.id] = place
        tasks.append(task)
    return tuple(tasks)


def check_timeout(seconds: float, where: str, key: str = "timeout_s") -> float:
    if not (math.isfinite(seconds) and 0 < seconds <= MAX_TIMEOUT_S):
        raise RequestError(
            f"{where}: key {key!r} is {seconds:g}; write seconds above 0, at most 2592000 (30 days)"
        )
    return seconds


def check_stall(seconds: float, where: str) -> float:
    if not (math.isfinite(seconds) and 0 <= seconds <= MAX_TIMEOUT_S):
        raise RequestError(
            f"{where}: key 'stall_s' is {seconds:g}; write seconds, at most 2592000 (30 days), or 0 for never"
        )
    return seconds


def check_argv(argv: Sequence[str], where: str, key: str) -> None:
    if not argv or not argv[0].strip():
        raise RequestError(
            f'{where}: key {key!r} is empty; write a program and its arguments, such as ["bash", "run.sh"]'
        )
    if any("\0" in word for word in argv):
        raise RequestError(f"{where}: key {key!r} has a NUL character, which no argument may; take it out")


def check_needs(needs: Needs, where: str) -> None:
    for key, low in (("cpus", 1), ("memory_gb", 0), ("disk_gb", 0), ("gpus", 0)):
        value = getattr(needs, key)
        if not low <= value <= 1_000_000:  # False for nan, too
            raise RequestError(f"{where}: key 'needs.{key}' is {value}; write a number from {low} to 1000000")


def env_of(table: EnvTable, where: str, secrets: Sequence[str] = ()) -> dict[str, str]:
    """The variables as a command gets them."""
    for name, value in table.items():
        if not _VARIABLE.fullmatch(name):
            raise RequestError(f"{where}: key 'env' has {name!r}, which is no variable name; rename it")
        if name.startswith("EVALFLEET_"):
            raise RequestError(f"{where}: key 'env' has {name!r}; names with EVALFLEET_ are evalfleet's own")
        if name in secrets:
            raise RequestError(f"{where}: {name!r} is in 'env' and in 'secrets'; take it out of one of them")
        if isinstance(value, str) and "\0" in value:
            raise RequestError(f"{where}: key 'env.{name}' has a NUL character; take it out")
    return {
        name: value if isinstance(value, str) else msgspec.json.encode(value).decode()
        for name, value in table.items()
    }


def default_domain(id: str) -> str:
    """The id up to its last underscore; the id itself when nothing is before one."""
    return id.rpartition("_")[0] or id


def _decode(line: bytes, place: str) -> TaskLine:
    try:
        return _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        pass  # told below: is it no JSON, or JSON that is no task?
    data = read_json(line, place, 'write one task a line, such as {"id": "a_1"}')
    if not isinstance(data, dict):
        raise RequestError(f'{place}: must be a JSON object, one a line, such as {{"id": "a_1"}}')
    return convert(data, TaskLine, place)


def _make(place: str, line: TaskLine, defaults: TaskDefaults) -> Task:
    domain = line.domain or (line.id.rpartition("_")[0] or defaults.domain or line.id)
    _check_text(place, "id", line.id)
    _check_text(place, "domain", domain)
    _check_plain(place, "params", line.params)
    _check_plain(place, "metadata", line.metadata)
    for number, step in enumerate(line.setup, start=1):
        check_argv(step, place, f"setup (step {number})")
    if line.needs is not None:
        check_needs(line.needs, place)
    for tag in line.tags:
        _check_text(place, "tags", tag)
    check_image(line.image, place)
    own = TaskOwn(env_of(line.env, place), line.files, line.setup, line.image)
    return Task(
        TaskId(line.id),
        domain,
        line.params,
        defaults.timeout_s if line.timeout_s is None else check_timeout(line.timeout_s, place),
        stall_s=defaults.stall_s if line.stall_s is None else check_stall(line.stall_s, place),
        needs=line.needs,
        tags=line.tags,
        metadata=line.metadata,
        own=_plain(own) if own != _NOTHING else {},
    )


_NOTHING = TaskOwn()


def _plain(own: TaskOwn) -> dict[str, Any]:
    """The value as a journal gives it back."""
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(own))
    return plain


def own_of(task: Task) -> TaskOwn:
    return msgspec.convert(task.own, decodable(TaskOwn)) if task.own else _NOTHING


def with_own(task: Task, own: TaskOwn) -> Task:
    return msgspec.structs.replace(task, own=_plain(own))


def _check_text(place: str, key: str, text: str) -> None:
    size = len(text.encode("utf-8", "surrogatepass"))
    if not text.strip():
        problem = "is empty; give every task a name of its own" if key == "id" else "is empty; write a word"
    elif size > MAX_ID_BYTES:
        problem = f"is {size} bytes long; shorten it to {MAX_ID_BYTES}"
    elif not text.isprintable():
        problem = "has a control or other unprintable character; take it out"
    elif text != text.strip():
        problem = "starts or ends with a space; take it out"
    else:
        return
    raise RequestError(f"{place}: key {key!r} {problem}")


def _check_plain(place: str, what: str, table: Mapping[str, Any]) -> None:
    for key, value in table.items():
        if not _is_plain(value):
            raise RequestError(
                f"{place}: key '{what}.{key}' is not JSON (a date, nan or inf); write a string"
            )
    size = len(msgspec.json.encode(table))
    if size > MAX_PARAMS_BYTES:
        raise RequestError(
            f"{place}: key {what!r} is {size} bytes, more than {MAX_PARAMS_BYTES}; put big data into 'files'"
        )


def _check_param(place: str, task: Task, name: str) -> None:
    if name not in task.params:
        raise RequestError(
            f"{place}: task {task.id!r} has no param {name!r}, but the command has {{params.{name}}}; add it"
        )
    value = task.params[name]
    if isinstance(value, str) and "\0" in value:
        raise RequestError(
            f"{place}: key 'params.{name}' has a NUL character, which no argument may; take it out"
        )


def _is_plain(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(_is_plain(item) for item in value.values())  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)  # pyright: ignore[reportUnknownVariableType]
    return value is None or isinstance(value, str | int)
