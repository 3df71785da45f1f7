"""The files that a benchmark puts on every machine: checked, named and digested."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath

import msgspec

from evalfleet.errors import RequestError
from evalfleet.model import SetupStep
from evalfleet.toml_tables import reason

_CHUNK = 1 << 20


def check_files(root: Path, entries: Sequence[str], where: str) -> None:
    """Every entry is a regular file or a folder of such, in `root`, readable. RequestError if not.

    Links are refused, not followed: places would differ in what they make of them.
    """
    for entry in entries:
        path = PurePosixPath(entry)
        if not path.parts or "\0" in entry:
            raise RequestError(f"{where}: 'files' has {entry!r}, the folder itself; list what is in it")
        if path.is_absolute() or ".." in path.parts:
            raise RequestError(
                f"{where}: 'files' has {entry!r}, outside the benchmark's folder; copy it into {root}"
            )
        try:
            for found in _walk(root, path):
                _check_file(root / found, f"{where}: 'files' has {entry!r}", str(found))
        except OSError as e:
            raise RequestError(
                f"{where}: 'files' has {entry!r}, which cannot be read ({reason(e)})"
            ) from None


def bundle_files(root: Path, entries: Sequence[str]) -> dict[str, Path]:
    """Name on the machine (the relative path, as written) -> path here; what a listed folder holds once."""
    names = sorted({PurePosixPath(entry) for entry in entries})
    covered = set(names)
    return {str(name): root / name for name in names if not covered.intersection(name.parents)}


def digest(root: Path, names: Iterable[str], steps: Sequence[SetupStep]) -> str:
    """SHA-256 over names, executable bits and contents of all files, and the steps."""
    total = hashlib.sha256(msgspec.json.encode(steps))
    for name in sorted(names):
        try:
            for found in _walk(root, PurePosixPath(name)):
                total.update(_record(root / found, found))
        except OSError as e:
            raise RequestError(
                f"{root / name}: cannot be read ({reason(e)}); the benchmark needs it on every machine"
            ) from None
    return total.hexdigest()


def _walk(root: Path, entry: PurePosixPath) -> Iterator[PurePosixPath]:
    """The entry, the folders above it, and all in it: sorted, links not followed, folders before contents."""
    yield from reversed([parent for parent in entry.parents if parent.parts])
    waiting = [entry]
    while waiting:
        path = waiting.pop()
        yield path
        mode = os.lstat(root / path).st_mode
        if stat.S_ISDIR(mode):
            waiting += sorted((path / name for name in os.listdir(root / path)), reverse=True)


def _check_file(path: Path, what: str, name: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        raise RequestError(f"{what}, which does not exist; create {path} or take it out") from None
    if stat.S_ISLNK(mode):
        raise RequestError(f"{what}, but {name} is a symbolic link; put a copy of its target there")
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise RequestError(f"{what}, but {name} is neither a file nor a folder; take it out")
    if path.name == ".env":
        raise RequestError(f"{what}, but {name} holds secrets and is never uploaded; name them in 'secrets'")
    if not os.access(path, os.R_OK | (os.X_OK if stat.S_ISDIR(mode) else 0)):
        raise RequestError(f"{what}, but {name} cannot be read; check its permissions")


def _record(path: Path, name: PurePosixPath) -> bytes:
    """One entry's line: two different trees never give the same sequence of lines."""
    mode = os.lstat(path).st_mode
    label = msgspec.json.encode(os.fsencode(name))
    if stat.S_ISDIR(mode):
        return b"d %s\n" % label
    content = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            content.update(chunk)
    executable = b"x" if mode & stat.S_IXUSR else b"-"
    return b"%s %s %s\n" % (executable, label, content.hexdigest().encode())
