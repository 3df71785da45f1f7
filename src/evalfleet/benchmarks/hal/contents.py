"""Files for machines, named and digested: the agent's, and those of each task. A run keeps copies of them."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, cast

import msgspec

from evalfleet.benchmarks.containers import bundle_digest, digests_script
from evalfleet.benchmarks.files import bundle_files
from evalfleet.errors import RequestError
from evalfleet.model import Bundle, SetupStep

Entry = Path | bytes
NEVER_SENT = frozenset({".env", ".git"})


class Contents:
    """What a bundle holds: name in its one folder -> a file here, or the bytes themselves."""

    def __init__(self, top: str, entries: Mapping[str, Entry]) -> None:
        self._top = top
        """The folder's name on the machine."""
        self._entries = dict(entries)

    @classmethod
    def kept(cls, top: str, folder: Path) -> Contents:
        root = folder / top
        files = (Path(above, name) for above, _, names in os.walk(root) for name in names)
        return cls(top, {path.relative_to(root).as_posix(): path for path in files})

    def digest(self, steps: Sequence[SetupStep] = ()) -> str:
        """Over names, executable bits, contents and steps. Raises RequestError."""
        return bundle_digest(steps, self._digest)

    def _digest(self, steps: Sequence[SetupStep]) -> str:
        total = hashlib.sha256(msgspec.json.encode([self._top, steps]))
        for name in sorted(self._entries):
            entry = self._entries[name]
            try:
                runs = isinstance(entry, Path) and bool(entry.stat().st_mode & 0o100)
                data = hashlib.sha256(entry).digest() if isinstance(entry, bytes) else _hashed(entry)
            except OSError as err:
                raise RequestError(f"{entry!s} cannot be read ({err.strerror}); machines need it") from None
            total.update(msgspec.json.encode([name, runs]) + data)
        return total.hexdigest()

    def keep(self, folder: Path, twin: Path | None) -> None:
        """Copy all of it into the new folder, at once or not at all; link what another run keeps."""
        if folder.exists():
            return
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
        try:
            for name, entry in self._entries.items():
                target = scratch / self._top / name
                target.parent.mkdir(parents=True, exist_ok=True)
                if twin is not None:
                    _link_or_copy(twin / self._top / name, target)
                elif isinstance(entry, bytes):
                    target.write_bytes(entry)
                else:
                    shutil.copy2(entry, target)
            os.replace(scratch, folder)
        except OSError as err:
            raise RequestError(f"cannot copy what machines get to {folder}: {err.strerror}") from None
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _hashed(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)


def agent_files(agent: Path) -> dict[str, Entry]:
    """What of the agent's folder machines get: not what it ignores, and no `.env`."""
    found: dict[str, Entry] = {}
    for name, path in bundle_files(agent.parent, [agent.name]).items():
        inside = PurePosixPath(name).relative_to(agent.name)
        for relative, file in _files_of(path):
            full = inside / relative
            if not NEVER_SENT.intersection(full.parts):
                found[full.as_posix()] = file
    return found


def _files_of(path: Path) -> list[tuple[PurePosixPath, Path]]:
    """The files of a folder, by their paths in it; of a file, itself."""
    if not path.is_dir():
        return [(PurePosixPath(), path)]
    files = (Path(above, name) for above, _, names in os.walk(path) for name in names)
    return [(PurePosixPath(file.relative_to(path)), file) for file in files if file.is_file()]


def task_files(task_id: str, task: Any, repo: Path) -> dict[str, Entry]:
    """`input.json` as HAL's local runner writes it, and the files of the task, where HAL would put them.

    No source path is in it: those of some benchmarks tell the answer. Raises RequestError.
    """
    shown, found = task, dict[str, Entry]()
    fields = cast("dict[str, Any]", task) if isinstance(task, dict) else {}
    if isinstance(fields.get("files"), dict):
        files = cast("dict[str, Any]", fields["files"])
        shown = {**fields, "files": {to: os.path.basename(str(by)) for to, by in files.items()}}
        for target, source in files.items():
            found |= _sent(task_id, target, repo / str(source))
    return {**found, "input.json": msgspec.json.encode({task_id: shown})}


def _sent(task_id: str, target: str, source: Path) -> dict[str, Entry]:
    name = PurePosixPath(target.replace("/root/", "").lstrip("/"))
    if ".." in name.parts or not name.parts:
        raise RequestError(f"task {task_id!r} of HAL wants a file at {target!r}, outside its work directory")
    if not source.exists():
        raise RequestError(f"task {task_id!r} of HAL needs {source}, which is not there: download its data")
    return {f"files/{name / inside}": file for inside, file in _files_of(source)}


def kept_bundle(
    top: str, steps: tuple[SetupStep, ...], planned: str, prefix: str, kept: Path | None
) -> Bundle:
    """What a machine gets, from the run's own copy. Raises RequestError if that was changed."""
    if kept is None:  # the run is not written down yet
        return Bundle(planned, {}, steps)
    folder = kept / planned
    if not folder.is_dir():
        raise RequestError(f"the run's copy of what machines get is gone: {folder}; start a new run")
    found = prefix + Contents.kept(top, folder).digest(steps)
    if found != planned and not digests_script(planned, steps):
        raise RequestError(f"the files that the run keeps in {folder} were changed; start a new run")
    return Bundle(planned, {top: str(folder / top)}, steps)
