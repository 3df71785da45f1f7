"""Files to and from a machine whose directory is on this computer."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import msgspec
from msgspec import Struct

from evalfleet.errors import ChannelError, SetupFailed
from evalfleet.model import AttemptId, Bundle, Collected, decodable
from evalfleet.names import NOTE, PARTIAL

from .link import UNREADABLE
from .secrecy import Secrets
from .supervisor.files import MOST_DEEP, job_name, read_file

LOG = "evalfleet.log"
LEFT_OUT = "left_out.json"
_OURS = frozenset({LOG, LEFT_OUT})
_SMALL = 16
_SMALL_BYTES = 100_000_000
CONTAINS_SECRET = "contains a secret"
MOST_LEFT_OUT = 1000
THE_REST = "..."
_NOTE_CAP = 16 << 20
_HOPS = 40
"""Links that a path may lead through: the kernel follows no more."""


class Caps(Struct, frozen=True):
    """How much of one attempt's artefacts is brought home."""

    bytes: int = 2 << 30
    files: int = 10_000


STANDARD_CAPS = Caps()


class LeftOut(Struct, frozen=True):
    """An artefact that stays behind, and why."""

    name: str
    reason: str
    bytes: int = 0


class LocalMover:
    """A mover of files between here and a machine's directory on this computer.

    All `secrets` are masked in what comes from there, whatever a job says that it was given.
    """

    def __init__(self, directory: Path, secrets: Mapping[str, str], caps: Caps = STANDARD_CAPS) -> None:
        self._directory = directory
        self._secrets = secrets
        self._caps = caps

    async def put(self, bundle: Bundle, contents: Mapping[str, list[Any]]) -> None:
        """The bundle's files are complete on the machine when this returns."""
        target = self._directory / "bundles" / bundle.digest
        if target.is_dir():
            return
        if not target.parent.is_dir():
            raise ChannelError(f"there is no machine at {self._directory}")
        try:
            await asyncio.to_thread(put_files, bundle, target)
        except OSError as err:
            raise SetupFailed("files", str(err)) from err

    async def collect(self, job: AttemptId, into: Path) -> Collected:
        folder = f"{self._directory}/jobs/{job_name(job)}"
        if problem := no_value(self._secrets):
            return Collected(problem=problem)
        if not self._secrets and (plain := bring_home_plain(folder, str(into))) is not None:
            return plain  # a thread would cost more than the work
        secrets = Secrets(self._secrets, self._secrets)
        return await asyncio.to_thread(bring_home, Path(folder), into, secrets, self._caps)


def no_value(secrets: Mapping[str, str]) -> str:
    """The problem of artefacts one of whose secrets has no value here; empty if all have one."""
    unknown = next((name for name, value in secrets.items() if not value), None)
    return f"left out: {unknown} has no value here, so nothing could be masked" if unknown else ""


def bring_home_plain(folder: str, into: str) -> Collected | None:
    """The common case, in few calls: some small plain files and no secret. None: it is not that case.

    It does what `bring_home` would do; what it leaves when it is interrupted, that one takes up.
    """
    out = f"{folder}/out"
    size = _plain_size(out)
    if size is None or os.path.lexists(into) or os.path.lexists(into + NOTE):
        return None
    try:
        os.mkdir(os.path.dirname(into))
    except FileExistsError:
        pass
    except FileNotFoundError:
        os.makedirs(os.path.dirname(into), exist_ok=True)
    if size.files:
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            os.link(f"{out}/result.json", f"{folder}/result.json", follow_symlinks=False)
    try:
        _link_log(f"{folder}/log", f"{out}/{LOG}")
        os.rename(out, into)
    except OSError:
        return None  # another file system, perhaps
    return size


def _plain_size(out: str) -> Collected | None:
    """How much there is, if it is little: plain, readable files that are not called like our own."""
    files = size = 0
    try:
        with os.scandir(out) as entries:
            for entry in entries:
                about = entry.stat(follow_symlinks=False)
                plain = stat.S_ISREG(about.st_mode) and about.st_mode & 0o600 == 0o600
                if not plain or entry.name in _OURS or files >= _SMALL:
                    return None
                files += 1
                size += about.st_size
        mode = os.lstat(out).st_mode
    except OSError:
        return None
    sound = stat.S_ISDIR(mode) and mode & 0o700 == 0o700
    return Collected(files, size) if sound and size <= _SMALL_BYTES else None


def put_files(bundle: Bundle, target: Path) -> None:
    """Copy into a directory beside the target and rename: under its final name it is complete."""
    partial = target.with_name(target.name + ".tmp")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name, source in bundle.files.items():
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts or not pure.parts:
            raise OSError(errno.EINVAL, "a bundle's file must stay inside it", name)
        copy = partial / pure
        copy.parent.mkdir(parents=True, exist_ok=True)
        if os.path.isdir(source):
            shutil.copytree(source, copy, symlinks=True, dirs_exist_ok=True)
        else:
            shutil.copy2(source, copy)
    partial.rename(target)


def bring_home(
    folder: Path,
    into: Path,
    secrets: Secrets,
    caps: Caps,
    stayed: Sequence[LeftOut] = (),
    note: Path | None = None,
) -> Collected:
    """Make a job's artefacts and log the directory `into`, at once or not at all. May be repeated.

    What must stay behind is moved aside and listed, after those that `stayed` on the host; then the whole
    directory is renamed (or copied, if `into` is on another file system). result.json also stays, for a
    controller that asks once more. Nothing in `folder` is trusted: links in it are not followed, and what we
    must remember until all is done is in the file `note`, by default beside `into`, where no job writes.
    """
    note = note or into.with_name(into.name + NOTE)
    if into.exists():
        note.unlink(missing_ok=True)
        return tally(into)
    if folder.is_symlink() or not folder.is_dir():
        raise ChannelError(f"no files of job {folder.name!r} are on the machine")
    into.parent.mkdir(parents=True, exist_ok=True)
    out = folder / "out"
    if out.is_symlink() or not out.is_dir():
        Aside(folder).put(out)
        out.mkdir()
    os.chmod(out, stat.S_IMODE(os.stat(out).st_mode) | 0o700)
    sieve = ArtefactSieve(folder, note, secrets, caps)
    sieve.run(stayed)
    with contextlib.suppress(FileExistsError, FileNotFoundError):
        os.link(out / "result.json", folder / "result.json", follow_symlinks=False)
    _place_log(folder / "log", out / LOG, secrets)
    _move(out, into, sieve.stuck)
    note.unlink(missing_ok=True)
    return Collected(sieve.files, sieve.bytes, len(sieve.left_out), _problem(sieve.left_out))


def _problem(left_out: list[LeftOut]) -> str:
    leaks = any(drop.reason == CONTAINS_SECRET for drop in left_out)
    return "an artefact, or its name, contains a secret and was left out" if leaks else ""


class ArtefactSieve:
    """A walk through a job's artefacts, once more after a crash, that sets aside what must stay."""

    def __init__(self, folder: Path, note: Path, secrets: Secrets, caps: Caps) -> None:
        self.files = 0
        self.bytes = 0
        self.stuck: set[str] = set()
        self.left_out: list[LeftOut] = []
        self._leaks = False
        self._folder = folder
        self._note = note
        self._out = folder / "out"
        self._secrets = secrets
        self._caps = caps

    def run(self, stayed: Sequence[LeftOut]) -> None:
        noted = _read_note(self._note)
        # we were here before: what bears our names in out/ is ours
        again = noted is not None
        earlier = [
            LeftOut(self._secrets.mask_text(drop.name), drop.reason, drop.bytes)
            for drop in (*stayed, *(noted or ()))
        ]
        drops: list[str] = []
        for path, drop in self._drops(again):
            drops.append(path)
            self._list(drop)
        self._list_rest(len(drops), earlier)
        if self.left_out or self._secrets:  # else a link to the log is all we add, and that is recognised
            _write_whole(self._note, msgspec.json.encode(self.left_out))
        aside = Aside(self._folder)
        for path in drops:
            try:
                aside.put(path)
            except OSError:  # in a directory of another user's, say a container's: it is copied around
                self.stuck.add(path)
        if self.left_out:
            listed = msgspec.json.format(msgspec.json.encode(self.left_out), indent=1)
            with _new_file(self._out / LEFT_OUT) as file:
                file.write(listed)

    def _list(self, drop: LeftOut) -> None:
        """There may be millions: the first ones are listed, and in any case one with a secret."""
        if len(self.left_out) < MOST_LEFT_OUT or (drop.reason == CONTAINS_SECRET and not self._leaks):
            self.left_out.append(drop)
        self._leaks = self._leaks or drop.reason == CONTAINS_SECRET

    def _list_rest(self, count: int, earlier: list[LeftOut]) -> None:
        seen = {drop.name for drop in self.left_out}
        more = count - len(self.left_out)
        if more:
            self.left_out.append(LeftOut(THE_REST, f"and {more:,} more"))
            seen.add(THE_REST)
        self.left_out += [drop for drop in earlier if drop.name not in seen]

    def _drops(self, again: bool) -> Iterator[tuple[str, LeftOut]]:
        for path, about in _walk(self._out):
            name = os.path.relpath(path, self._out)
            if name in _OURS:
                if not again and not self._is_our_log(about):
                    yield path, LeftOut(name, "the name is evalfleet's own", about.st_size)
                continue
            reason = CONTAINS_SECRET if self._secrets.in_name(name) else self._reason(path, about)
            if reason:
                yield path, LeftOut(self._secrets.mask_text(printable(name)), reason, about.st_size)
            elif not stat.S_ISDIR(about.st_mode):
                self.files += 1
                self.bytes += about.st_size if stat.S_ISREG(about.st_mode) else 0

    def _is_our_log(self, about: os.stat_result) -> bool:
        try:
            return os.path.samestat(about, os.lstat(self._folder / "log"))
        except OSError:
            return False

    def _reason(self, path: str, about: os.stat_result) -> str:
        """Why this must stay behind; empty if it need not."""
        if path.count("/") - str(self._out).count("/") > MOST_DEEP + (not stat.S_ISDIR(about.st_mode)):
            return "too deep"
        if stat.S_ISDIR(about.st_mode):
            return "" if os.access(path, os.R_OK | os.X_OK) else "unreadable"
        if stat.S_ISLNK(about.st_mode):
            if self._secrets.in_name(os.readlink(path)):
                return CONTAINS_SECRET
            return "" if _stays_inside(path, str(self._out)) else "the link leads outside"
        if not stat.S_ISREG(about.st_mode):
            return "not a file"
        if self.files >= self._caps.files:
            return "too many files"
        if self.bytes + about.st_size > self._caps.bytes:
            return "too many bytes"
        try:
            # a file with other names may be another's, too: its mode is not ours to change
            if about.st_mode & 0o600 != 0o600 and about.st_nlink == 1:
                with contextlib.suppress(PermissionError):
                    os.chmod(path, about.st_mode | 0o600)
            with open(path, "rb", opener=plain_opener) as file:
                return CONTAINS_SECRET if self._secrets and self._secrets.found_in(file) else ""
        except OSError as err:
            return f"unreadable: {err.strerror}"


def _walk(top: Path) -> Iterable[tuple[str, os.stat_result]]:
    """Everything under a directory, by name, result.json first: it counts before any cap is reached."""
    stack = [str(top)]
    while stack:
        folder = stack.pop()
        try:
            names = sorted(os.listdir(folder), key=lambda name: (name != "result.json", name))
        except OSError:
            continue
        for name in names:
            path = os.path.join(folder, name)
            try:
                about = os.lstat(path)
            except OSError:  # too long a name, in the end
                continue
            if stat.S_ISDIR(about.st_mode):
                stack.append(path)
                if about.st_mode & 0o700 != 0o700:
                    with contextlib.suppress(OSError):
                        os.chmod(path, 0o700)
            yield path, about


def _stays_inside(link: str, top: str) -> bool:
    """Does the link lead to something below `top`, without leaving it on the way, wherever `top` is moved?"""
    way = os.path.relpath(os.path.dirname(link), top).split("/")
    here = [part for part in way if part != "."]
    ahead = os.readlink(link).split("/")[::-1]
    hops = 0
    if not ahead[-1]:
        return False  # it is absolute, and would lead back to the machine after the move
    while ahead:
        part = ahead.pop()
        if part == ".." and not here:
            return False
        if part == "..":
            here.pop()
        elif part not in ("", "."):
            try:
                target = os.readlink("/".join((top, *here, part)))
            except OSError:  # no link
                here.append(part)
                continue
            hops += 1
            if target.startswith("/"):
                return False
            if hops > _HOPS:
                return True  # nobody can follow it
            ahead += target.split("/")[::-1]
    return True


def printable(name: str) -> str:
    """A file name as JSON can hold it: bytes that are no text are shown escaped."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


class Aside:
    """Where a job's files go that must stay behind."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "dropped"
        self._count = -1

    def put(self, path: str | Path) -> None:
        if self._count < 0:
            if self._folder.is_symlink() or not self._folder.is_dir():
                self._folder.unlink(missing_ok=True)
                self._folder.mkdir()
            self._count = len(os.listdir(self._folder))
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, self._folder / str(self._count))
            self._count += 1


def _place_log(log: Path, target: Path, secrets: Secrets) -> None:
    """Put the log with the artefacts, masked if there is something to be masked."""
    if not secrets:
        _link_log(str(log), str(target))
        return
    try:
        fd = plain_opener(str(log), os.O_RDONLY)
    except OSError:
        return  # there is none, or it is no file
    with os.fdopen(fd, "rb") as source, _new_file(target) as copy:
        secrets.copy_masked(source, copy)


def _link_log(log: str, target: str) -> None:
    """The log itself under another name, if it is a plain file; one that is there already is ours."""
    with contextlib.suppress(FileExistsError, FileNotFoundError):
        if stat.S_ISREG(os.lstat(log).st_mode):
            os.link(log, target, follow_symlinks=False)


def plain_opener(path: str, flags: int) -> int:
    """Opens files that a job made: a link does not lead us away, a pipe does not block us. Raises OSError."""
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a file", path)
    return fd


def _new_file(path: Path) -> BinaryIO:
    """A file of ours where a job may have put something: that is removed, never written through."""
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644), "wb")


def _move(out: Path, into: Path, without: set[str]) -> None:
    try:
        if not without:
            os.rename(out, into)
            return
    except OSError as err:
        if err.errno != errno.EXDEV:
            raise

    def ignored(folder: str, names: list[str]) -> set[str]:
        return {name for name in names if os.path.join(folder, name) in without}

    partial = into.with_name(into.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(str(out), partial, symlinks=True, ignore=ignored)
    os.rename(partial, into)


def _write_whole(path: Path, data: bytes) -> None:
    partial = path.with_name(path.name + ".tmp")
    with _new_file(partial) as file:
        file.write(data)
    os.replace(partial, path)


def _read_note(path: Path) -> list[LeftOut] | None:
    """What was left out, by a file of ours; None if there is none that can be read."""
    data = read_file(str(path), _NOTE_CAP)
    try:
        return None if data is None else msgspec.json.decode(data, type=decodable(list[LeftOut]))
    except UNREADABLE:
        return None


def tally(into: Path) -> Collected:
    """What an earlier collection brought."""
    files = size = 0
    for path, about in _walk(into):
        if os.path.relpath(path, into) not in _OURS and not stat.S_ISDIR(about.st_mode):
            files += 1
            size += about.st_size if stat.S_ISREG(about.st_mode) else 0
    left_out = _read_note(into / LEFT_OUT) or []
    return Collected(files, size, len(left_out), _problem(left_out))
