"""The tasks of a benchmark file: a JSONL file beside it, or `[[tasks]]` in it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field

from evalfleet.errors import RequestError
from evalfleet.model import Task, TaskId
from evalfleet.toml_tables import convert, reason

MAX_TIMEOUT_S = 30 * 86400.0
MAX_ID_BYTES = 200
MAX_PARAMS_BYTES = 100_000
"""Linux takes at most 128 KiB in one argument or variable; beyond, the command would not even start."""


class TaskLine(Struct, frozen=True, forbid_unknown_fields=True):
    """A task as people write it."""

    id: str
    domain: str = ""
    params: Mapping[str, Any] = field(default_factory=dict[str, Any])
    timeout_s: float | None = None
    stall_s: float | None = None


_decoder = msgspec.json.Decoder(TaskLine)
Located = tuple[str, TaskLine]
"""Where it is written (`tasks.jsonl:3`), and what it says."""


def read_jsonl(path: Path, key: str) -> Iterator[Located]:
    """The tasks of a file with one a line; blank lines are skipped. `key` says who named the file."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise RequestError(f"{key}: {path} does not exist; create it or correct the key") from None
    except OSError as e:
        raise RequestError(f"{key}: {path} cannot be read ({reason(e)})") from None
    shown = str(path)
    # Split by hand: splitlines would also split at characters that JSON allows in strings.
    for number, line in enumerate(raw.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if line.strip():
            place = f"{shown}:{number}"
            yield place, _decode(line, place)


def read_inline(tables: Sequence[Any], where: str) -> Iterator[Located]:
    """The `[[tasks]]` of the benchmark file itself; the first is number 1."""
    for number, table in enumerate(tables, start=1):
        place = f"{where}: [[tasks]] number {number}"
        if not isinstance(table, dict):
            raise RequestError(f'{place}: must be a table such as {{id = "a_1"}}')
        yield place, convert(table, TaskLine, place)


def make_tasks(
    lines: Iterable[Located], timeout_s: float, stall_s: float, needed: Iterable[str]
) -> tuple[Task, ...]:
    """Checked tasks, in order. `needed` are the params that the command has placeholders for."""
    first_at: dict[str, str] = {}
    tasks: list[Task] = []
    wanted = tuple(needed)
    for place, line in lines:
        task = _make(place, line, timeout_s, stall_s)
        for name in wanted:
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


def default_domain(id: str) -> str:
    """The id up to its last underscore; the id itself when nothing is before one."""
    return id.rpartition("_")[0] or id


def _decode(line: bytes, place: str) -> TaskLine:
    try:
        return _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        pass  # told below: is it no JSON, or JSON that is no task?
    try:
        data = msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as e:
        what = str(e).removeprefix("JSON is malformed: ")
        raise RequestError(
            f'{place}: not JSON ({what}); write one task a line, such as {{"id": "a_1"}}'
        ) from None
    if not isinstance(data, dict):
        raise RequestError(f'{place}: must be a JSON object, one a line, such as {{"id": "a_1"}}')
    return convert(data, TaskLine, place)


def _make(place: str, line: TaskLine, timeout_s: float, stall_s: float) -> Task:
    domain = line.domain or default_domain(line.id)
    _check_text(place, "id", line.id)
    _check_text(place, "domain", domain)
    _check_params(place, line.params)
    limit = timeout_s if line.timeout_s is None else check_timeout(line.timeout_s, place)
    stall = stall_s if line.stall_s is None else check_stall(line.stall_s, place)
    return Task(TaskId(line.id), domain, line.params, limit, stall_s=stall)


def _check_text(place: str, key: str, text: str) -> None:
    size = len(text.encode("utf-8", "surrogatepass"))
    if not text.strip():
        problem = "is empty; give every task a name of its own"
    elif size > MAX_ID_BYTES:
        problem = f"is {size} bytes long; shorten it to {MAX_ID_BYTES}"
    elif not text.isprintable():
        problem = "has a control or other unprintable character; take it out"
    elif text != text.strip():
        problem = "starts or ends with a space; take it out"
    else:
        return
    raise RequestError(f"{place}: key {key!r} {problem}")


def _check_params(place: str, params: Mapping[str, Any]) -> None:
    for key, value in params.items():
        if not _is_plain(value):
            raise RequestError(
                f"{place}: key 'params.{key}' is not JSON (a date, nan or inf); write a string"
            )
    size = len(msgspec.json.encode(params))
    if size > MAX_PARAMS_BYTES:
        raise RequestError(
            f"{place}: key 'params' is {size} bytes, more than {MAX_PARAMS_BYTES}; put big data into 'files'"
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
