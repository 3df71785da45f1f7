"""Files to and from a machine whose directory is on this computer."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

import msgspec
from msgspec import Struct

from evalfleet.errors import ChannelError, SetupFailed
from evalfleet.model import AttemptId, Bundle, Collected
from evalfleet.names import PARTIAL

from .secrecy import Secrets
from .supervisor.files import MOST_DEEP, job_name

LOG = "evalfleet.log"
LEFT_OUT = "left_out.json"
_OURS = frozenset({LOG, LEFT_OUT})
_SMALL = 16
_SMALL_BYTES = 100_000_000
CONTAINS_SECRET = "contains a secret"
MOST_LEFT_OUT = 1000
THE_REST = "..."


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


class JobNote(Struct, frozen=True):
    """What job.json tells that matters here."""

    secret_names: tuple[str, ...] = ()


class LocalMover:
    """Moves files between here and a machine's directory on this computer."""

    def __init__(self, directory: Path, secrets: Mapping[str, str], caps: Caps = STANDARD_CAPS) -> None:
        self._directory = directory
        self._secrets = secrets
        self._caps = caps

    async def put(self, bundle: Bundle) -> None:
        """The bundle's files are complete on the machine when this returns."""
        target = self._directory / "bundles" / bundle.digest
        if target.is_dir():
            return
        try:
            await asyncio.to_thread(put_files, bundle, target)
        except OSError as err:
            raise SetupFailed("files", str(err)) from err

    async def collect(self, job: AttemptId, into: Path) -> Collected:
        folder = f"{self._directory}/jobs/{job_name(job)}"
        names = _secret_names(folder)
        unknown = [name for name in names if name not in self._secrets]
        if unknown:
            return Collected(problem=f"left out: {unknown[0]} has no value here, so nothing could be masked")
        if not names and (plain := bring_home_plain(folder, str(into))) is not None:
            return plain  # a thread would cost more than the work
        secrets = Secrets(self._secrets, names)
        return await asyncio.to_thread(bring_home, Path(folder), into, secrets, self._caps)


def _secret_names(folder: str) -> tuple[str, ...]:
    try:
        with open(f"{folder}/job.json", "rb") as file:
            return msgspec.json.decode(file.read(), type=JobNote).secret_names
    except (OSError, msgspec.DecodeError):
        return ()


def bring_home_plain(folder: str, into: str) -> Collected | None:
    """The common case, in few calls: some small plain files and no secret. None: it is not that case.

    It does what `bring_home` would do; what it leaves when it is interrupted, that one takes up.
    """
    out = f"{folder}/out"
    size = _plain_size(out)
    if size is None or os.path.lexists(into):
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
        with contextlib.suppress(FileNotFoundError):
            os.link(f"{folder}/log", f"{out}/{LOG}")
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


def bring_home(folder: Path, into: Path, secrets: Secrets, caps: Caps) -> Collected:
    """Make a job's artefacts and log the directory `into`, at once or not at all. May be repeated.

    What must stay behind is moved aside and listed; then the whole directory is renamed (or copied, if
    `into` is on another file system). result.json also stays, for a controller that asks once more.
    """
    if into.exists():
        return tally(into)
    if not folder.is_dir():
        raise ChannelError(f"no files of job {folder.name!r} are on the machine")
    into.parent.mkdir(parents=True, exist_ok=True)
    out = folder / "out"
    if out.is_symlink() or not out.is_dir():
        Aside(folder).put(out)
        out.mkdir()
    os.chmod(out, stat.S_IMODE(os.stat(out).st_mode) | 0o700)
    sieve = Sieve(folder, secrets, caps)
    sieve.run()
    with contextlib.suppress(FileExistsError, FileNotFoundError):
        os.link(out / "result.json", folder / "result.json", follow_symlinks=False)
    _place_log(folder / "log", out / LOG, secrets)
    _move(out, into, sieve.stuck)
    return Collected(sieve.files, sieve.bytes, len(sieve.left_out), _problem(sieve.left_out))


def _problem(left_out: list[LeftOut]) -> str:
    leaks = any(drop.reason == CONTAINS_SECRET for drop in left_out)
    return "an artefact, or its name, contains a secret and was left out" if leaks else ""


class Sieve:
    """Goes through a job's artefacts, once more after a crash, and sets aside what must stay."""

    def __init__(self, folder: Path, secrets: Secrets, caps: Caps) -> None:
        self.files = 0
        self.bytes = 0
        self.stuck: set[str] = set()
        self.left_out: list[LeftOut] = []
        self._leaks = False
        self._folder = folder
        self._out = folder / "out"
        self._secrets = secrets
        self._caps = caps

    def run(self) -> None:
        note = self._folder / LEFT_OUT
        earlier: list[LeftOut] = []
        if note.exists():  # we were here before: what bears our names in out/ is ours
            found = msgspec.json.decode(note.read_bytes(), type=list[LeftOut])
            earlier = [LeftOut(self._secrets.mask_text(drop.name), drop.reason, drop.bytes) for drop in found]
        drops: list[str] = []
        for path, drop in self._drops(again=note.exists()):
            drops.append(path)
            self._list(drop)
        self._list_rest(len(drops), earlier)
        if self.left_out or self._secrets:  # else a link to the log is all we add, and that is recognised
            _write_whole(note, msgspec.json.encode(self.left_out))
        aside = Aside(self._folder)
        for path in drops:
            try:
                aside.put(path)
            except OSError:  # in a directory of another user's, say a container's: it is copied around
                self.stuck.add(path)
        if self.left_out:
            _write_whole(self._out / LEFT_OUT, msgspec.json.format(note.read_bytes(), indent=1))

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
            return os.path.samestat(about, os.stat(self._folder / "log"))
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
            return "" if _stays_inside(path, self._out) else "the link leads outside"
        if not stat.S_ISREG(about.st_mode):
            return "not a file"
        if self.files >= self._caps.files:
            return "too many files"
        if self.bytes + about.st_size > self._caps.bytes:
            return "too many bytes"
        try:
            if about.st_mode & 0o600 != 0o600:
                with contextlib.suppress(PermissionError):
                    os.chmod(path, about.st_mode | 0o600)
            with open(path, "rb") as file:
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


def _stays_inside(link: str, top: Path) -> bool:
    target = os.readlink(link)
    # an absolute one would lead back to the machine after the move
    if os.path.isabs(target):
        return False
    real_top = os.path.realpath(top)
    real = os.path.realpath(os.path.join(os.path.dirname(link), target))
    return real == real_top or real.startswith(real_top + os.sep)


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
            self._folder.mkdir(exist_ok=True)
            self._count = len(os.listdir(self._folder))
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, self._folder / str(self._count))
            self._count += 1


def _place_log(log: Path, target: Path, secrets: Secrets) -> None:
    partial = log.with_name("log.masked")
    try:
        if secrets:
            with open(log, "rb") as source, open(partial, "wb") as copy:
                secrets.copy_masked(source, copy)
            os.replace(partial, target)
        else:
            os.link(log, target)
    except FileExistsError:
        return  # ours, from an earlier try
    except FileNotFoundError:
        return


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
    partial.write_bytes(data)
    os.replace(partial, path)


def tally(into: Path) -> Collected:
    """What an earlier collection brought."""
    files = size = 0
    for path, about in _walk(into):
        if os.path.relpath(path, into) not in _OURS and not stat.S_ISDIR(about.st_mode):
            files += 1
            size += about.st_size if stat.S_ISREG(about.st_mode) else 0
    left_out: list[LeftOut] = []
    with contextlib.suppress(OSError, msgspec.DecodeError):
        left_out = msgspec.json.decode((into / LEFT_OUT).read_bytes(), type=list[LeftOut])
    return Collected(files, size, len(left_out), _problem(left_out))
