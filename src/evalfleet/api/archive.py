"""A whole run as one file: its events as they were recorded, and the files of its folder.

The file is a gzipped tar: `run.json` says what it is, `events.jsonl` has one event a line, and `files/` is
the run's folder. It may come from anybody. Only plain files with plain names are taken out of it, as far as
the disk has room. Events that no run of evalfleet records are refused, before anything is written.
"""

from __future__ import annotations

import gzip
import io
import math
import os
import shutil
import stat
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

import msgspec
from msgspec import Raw, Struct, structs

from evalfleet.errors import JournalForeign, RequestError
from evalfleet.events import (
    SCHEMA,
    AttemptEnded,
    AttemptStarted,
    Event,
    MachineRequested,
    PoolPlanned,
    PoolResized,
    RunPlanned,
    RunSteered,
    StopRequested,
    TasksPlanned,
    decode,
    encode,
)
from evalfleet.files import scratch_of
from evalfleet.model import SECOND, Limits, Micros, Scored, decodable
from evalfleet.names import check_run_name, folder_of, safe_name
from evalfleet.planning.workspace import Workspace
from evalfleet.state import RunState, accepts, apply
from evalfleet.version import __version__
from evalfleet.views.format import clean
from evalfleet.views.results import results

from . import runs
from .run import Run

FORMAT = 1
MOST_AT_ONCE = 16_000_000
"""Bytes that are read at once. A header of tar that is longer has no name that a file could have."""
MOST_HEADER = 64_000
ROOM, DENSEST = 64_000_000, 50
"""Events unpack to so many bytes, or to so many times the size of the archive: what is denser is no text."""
MOST_FILES = 1_000_000
MOST_WORKERS = 100_000
BLOCK = 4096
LATEST: Micros = 4_102_444_800 * SECOND
"""The year 2100."""
NONSENSE = (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError)
"""What our own functions raise about events that no run records."""
LARGEST = 1e16
"""No time, duration, size or price is larger."""


class ArchiveHeader(Struct, frozen=True):
    """What `run.json` holds."""

    format: int
    run: str
    created_at: Micros
    schema: int
    version: str
    """Of the evalfleet that wrote it."""


class EventLine(Struct, frozen=True):
    """One event in `events.jsonl`."""

    at: Micros
    event: Raw


def export_run(workspace: Workspace, name: str | None, path: Path) -> Run:
    """Write a run that has ended into a new file. Raises RequestError."""
    run = runs.open_run(workspace, name)
    if run.state().ended_at is None:
        raise RequestError(
            f"run {run.name!r} is not over: wait for its end, or `evalfleet cancel {run.name}`"
        )
    if path.exists():
        raise RequestError(f"{path} exists: choose another file")
    created_at = workspace.records().stream(run.name).created_at
    header = ArchiveHeader(FORMAT, run.name, created_at, SCHEMA, __version__)
    lines = [
        msgspec.json.encode(EventLine(each.at, Raw(encode(each.event)))) + b"\n" for each in run.records()
    ]
    scratch = scratch_of(path)
    try:
        with tarfile.open(scratch, "x:gz", compresslevel=6) as archive:
            _add(archive, "run.json", msgspec.json.encode(header))
            _add(archive, "events.jsonl", b"".join(lines))
            for file in sorted(run.folder.rglob("*")):
                if file.is_file() and not file.is_symlink():
                    archive.add(file, f"files/{file.relative_to(run.folder).as_posix()}", recursive=False)
        os.replace(scratch, path)
    except OSError as err:
        raise RequestError(f"cannot write {path}: {err.strerror or err}") from err
    finally:
        scratch.unlink(missing_ok=True)
    return run


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def import_run(workspace: Workspace, path: Path, *, name: str | None = None) -> Run:
    """Make a run of a file that `export_run` wrote, here or in another home. Raises RequestError."""
    try:
        with gzip.open(path) as unpacked, tarfile.open(fileobj=_Portions(unpacked), mode="r:") as archive:
            return _imported(archive, path, name, workspace)
    except (
        tarfile.TarError,
        EOFError,
        OSError,
        RecursionError,
        ValueError,
        zlib.error,
        msgspec.MsgspecError,
        JournalForeign,
    ) as err:
        why = clean(str(err), 200)
        raise RequestError(f"{path} is no run that evalfleet exported, or is damaged ({why})") from err


class _Portions(io.RawIOBase):
    """What gzip unpacks, a portion at a time."""

    def __init__(self, unpacked: gzip.GzipFile) -> None:
        self._unpacked = unpacked

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= MOST_AT_ONCE:
            raise tarfile.ReadError(f"it has a header of {size} bytes")
        return self._unpacked.read(size)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._unpacked.seek(offset, whence)

    def tell(self) -> int:
        return self._unpacked.tell()


def _imported(archive: tarfile.TarFile, path: Path, name: str | None, workspace: Workspace) -> Run:
    with _opened(archive, "run.json", MOST_HEADER) as content:
        header = msgspec.json.decode(content.read(MOST_HEADER), type=decodable(ArchiveHeader))
    if header.format > FORMAT:
        version = clean(header.version, 40)
        raise RequestError(f"{path} was written by a newer evalfleet ({version}): upgrade evalfleet")
    run = check_run_name(name or header.run)
    if not 0 <= header.created_at <= LATEST:
        raise JournalForeign(f"the run was made at {header.created_at}, which is no time")
    with _opened(archive, "events.jsonl", max(ROOM, DENSEST * path.stat().st_size)) as lines:
        events = list(_events(lines, header.schema, run))
    state = _folded(events)
    store, folder = workspace.store(), folder_of(workspace.home, run)
    if folder.exists():
        raise RequestError(f"the name {run!r} is taken: choose another with --name")
    _check_shown(state, folder, workspace.now())
    scratch = scratch_of(workspace.home / safe_name(run))
    try:
        _unpack(archive, scratch)
        os.replace(scratch, folder)
        try:
            store.create_past(run, header.created_at, events)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Run(workspace.home, run)


def _opened(archive: tarfile.TarFile, name: str, most: int) -> IO[bytes]:
    member = archive.next()
    content = archive.extractfile(member) if member is not None and member.name == name else None
    if member is None or content is None:
        raise tarfile.TarError(f"it does not hold {name} where that should be")
    if member.size > most or member.issparse():
        raise tarfile.TarError(f"its {name} unpacks to {member.size} bytes")
    return content


def _events(lines: IO[bytes], schema: int, run: str) -> Iterator[tuple[Micros, Event]]:
    decoder = msgspec.json.Decoder(decodable(EventLine))
    for line in lines:
        found = decoder.decode(line)
        event = decode(bytes(found.event), schema)
        if isinstance(event, RunPlanned):
            event = structs.replace(event, plan=structs.replace(event.plan, run=run))
        yield found.at, event


# -- what a run records ------------------------------------------------------------------------------


def _folded(events: Sequence[tuple[Micros, Event]]) -> RunState:
    """The state that the events lead to. Raises JournalForeign if no run of evalfleet recorded them."""
    state = RunState()
    for seq, (at, event) in enumerate(events, start=1):
        try:
            problem = _problem(state, at, event)
            if not problem:
                apply(state, at, event)
        except NONSENSE as err:
            problem = f"does not fit those before it ({err!r})"
        if problem:
            raise JournalForeign(f"event {seq} {problem}")
    if len(state.tasks) != state.total:
        raise JournalForeign(f"it plans {state.total} tasks, and has {len(state.tasks)}")
    if state.ended_at is None:
        raise JournalForeign("the run is not over: wait for its end, and export it then")
    if state.undeleted:
        raise JournalForeign(f"machine {next(iter(state.undeleted))} was never deleted")
    return state


def _problem(state: RunState, at: Micros, event: Event) -> str:
    """Why no run records this event now; empty if one may."""
    is_first = state.events == 0
    if isinstance(event, RunPlanned) is not is_first or isinstance(event, PoolPlanned | PoolResized):
        return "does not belong there"
    if not state.last_at <= at <= LATEST:
        return f"has the time {at}, which is earlier than that of the one before it, or no time"
    outcome = event.outcome if isinstance(event, AttemptEnded) else getattr(event, "grade", None)
    if isinstance(outcome, Scored) and not 0 <= outcome.score <= 1:
        return f"has the score {outcome.score:g}; scores are from 0 to 1"
    limits = event.plan.limits if isinstance(event, RunPlanned) else getattr(event, "limits", None)
    workers = limits.workers if isinstance(limits, Limits) else getattr(event, "workers", None)
    if not _is_sane(event) or (workers or 0) > MOST_WORKERS:
        return "has a number that is too large"
    match event:
        case TasksPlanned(tasks):
            ids = {task.id for task in tasks}
            twice = len(ids) < len(tasks) or not ids.isdisjoint(state.tasks)
        case MachineRequested(machine):
            twice = machine in state.machines
        case AttemptStarted(attempt, task):
            twice = attempt in state.attempts or state.tasks[task].status != "waiting"
        case RunSteered() | StopRequested():
            twice = False
        case _:
            twice = not accepts(state, event)
    return "was recorded before, or comes too late" if twice else ""


def _is_sane(value: object) -> bool:
    """Are all numbers of an event such as can be computed with? What a benchmark has made up is its own."""
    if isinstance(value, int | float):
        return math.isfinite(value) and abs(value) <= LARGEST
    if isinstance(value, Struct):
        return all(_is_sane(getattr(value, name)) for name in value.__struct_fields__)
    return all(map(_is_sane, cast("tuple[object, ...]", value))) if isinstance(value, tuple) else True


def _check_shown(state: RunState, folder: Path, now: Micros) -> None:
    """Raises JournalForeign if the run could not be shown."""
    try:
        msgspec.json.encode(results(state, folder, now))
    except NONSENSE as err:
        raise JournalForeign(f"its events cannot be summed up: {err!r}") from err


def _unpack(archive: tarfile.TarFile, folder: Path) -> None:
    """Plain files only, each below `files/`. The folder is new, so nothing in it leads elsewhere.

    Raises TarError if they do not fit on the disk, before they fill it.
    """
    folder.mkdir(parents=True)
    free, taken, count = shutil.disk_usage(folder).free, 0, 0
    while (member := archive.next()) is not None:
        cast(Any, archive).members.clear()  # it keeps all that it has seen
        taken, count = taken + member.size + BLOCK, count + 1
        if taken > free or count > MOST_FILES:
            raise tarfile.TarError(f"its files unpack to {taken} bytes or more, and {free} are free")
        top, *parts = PurePosixPath(member.name).parts
        content = archive.extractfile(member) if member.isreg() and not member.issparse() else None
        if content is None or top != "files" or not parts or ".." in parts:
            continue
        target = folder.joinpath(*parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        with content, target.open("xb") as file:
            shutil.copyfileobj(content, file)
        if member.mode & stat.S_IXUSR:  # what machines get is kept as it was
            target.chmod(target.stat().st_mode | stat.S_IXUSR)
