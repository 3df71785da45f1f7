"""A whole run as one file: its events as they were recorded, and the files of its folder.

The file is a gzipped tar: `run.json` says what it is, `events.jsonl` has one event a line, and `files/` is
the run's folder. It may come from anybody: only plain files with plain names are taken out of it, and events
that do not fit together are refused.
"""

from __future__ import annotations

import io
import os
import shutil
import stat
import tarfile
from pathlib import Path, PurePosixPath

import msgspec
from msgspec import Raw, Struct

from evalfleet.errors import JournalForeign, RequestError
from evalfleet.events import SCHEMA, Event, Record, RunPlanned, decode, encode
from evalfleet.files import scratch_of
from evalfleet.model import Micros, decodable
from evalfleet.names import check_run_name, folder_of, safe_name
from evalfleet.planning.workspace import Workspace
from evalfleet.state import fold
from evalfleet.version import __version__
from evalfleet.views.dashboard.snapshots import KEPT, keep_at_end

from . import runs
from .run import Run

FORMAT = 1


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
                if file.is_file() and not file.is_symlink() and file != run.folder / KEPT:
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
        with tarfile.open(path, "r:gz") as archive:
            return _imported(archive, path, name, workspace)
    except (tarfile.TarError, EOFError, OSError, msgspec.MsgspecError, JournalForeign) as err:
        raise RequestError(f"{path} is no run that evalfleet exported, or is damaged ({err})") from err


def _imported(archive: tarfile.TarFile, path: Path, name: str | None, workspace: Workspace) -> Run:
    header = msgspec.json.decode(_read(archive, "run.json"), type=decodable(ArchiveHeader))
    if header.format > FORMAT:
        raise RequestError(f"{path} was written by a newer evalfleet ({header.version}): upgrade evalfleet")
    run = check_run_name(name or header.run)
    events = _events(_read(archive, "events.jsonl"), header.schema, run)
    state = fold(Record(seq, 0, at, event) for seq, (at, event) in enumerate(events, start=1))
    if state.ended_at is None:
        raise RequestError(f"{path} holds a run that is not over: it cannot be imported")
    store, folder = workspace.store(), folder_of(workspace.home, run)
    if folder.exists():
        raise RequestError(f"the name {run!r} is taken: choose another with --name")
    scratch = scratch_of(workspace.home / safe_name(run))
    try:
        _unpack(archive, scratch)
        store.create_past(run, header.created_at, events)
        os.replace(scratch, folder)
        keep_at_end(workspace.home, store, state, workspace.now())
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Run(workspace.home, run)


def _read(archive: tarfile.TarFile, name: str) -> bytes:
    member = archive.next()
    content = archive.extractfile(member) if member is not None and member.name == name else None
    if content is None:
        raise tarfile.TarError(f"it does not hold {name} where that should be")
    with content:
        return content.read()


def _events(lines: bytes, schema: int, run: str) -> list[tuple[Micros, Event]]:
    events: list[tuple[Micros, Event]] = []
    decoder = msgspec.json.Decoder(decodable(EventLine))
    for line in lines.splitlines():
        found = decoder.decode(line)
        event = decode(bytes(found.event), schema)
        if isinstance(event, RunPlanned):
            event = msgspec.structs.replace(event, plan=msgspec.structs.replace(event.plan, run=run))
        events.append((found.at, event))
    return events


def _unpack(archive: tarfile.TarFile, folder: Path) -> None:
    """Plain files only, each below `files/`. The folder is new, so nothing in it leads elsewhere."""
    folder.mkdir(parents=True)
    while (member := archive.next()) is not None:
        top, *parts = PurePosixPath(member.name).parts
        content = archive.extractfile(member) if member.isreg() else None
        if content is None or top != "files" or not parts or ".." in parts or parts == [KEPT]:
            continue  # what the dashboard shows is made here, of the events: an archive could tell anything
        target = folder.joinpath(*parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        with content, target.open("xb") as file:
            shutil.copyfileobj(content, file)
        if member.mode & stat.S_IXUSR:  # what machines get is kept as it was
            target.chmod(target.stat().st_mode | stat.S_IXUSR)
