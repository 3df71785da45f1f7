"""Files to a machine that shares none with us, and home from it: small ones with the messages, others as
streams of their own."""

from __future__ import annotations

import abc
import asyncio
import errno
import os
import shutil
from collections.abc import Awaitable, Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from evalfleet.clock import pauses
from evalfleet.errors import ChannelError, SetupFailed
from evalfleet.model import AttemptId, Bundle, Collected, Job, decodable
from evalfleet.names import INCOMING, PARTIAL
from evalfleet.ports import Fence

from .artefacts import (
    LEFT_OUT,
    LOG,
    MOST_LEFT_OUT,
    STANDARD_CAPS,
    Caps,
    LeftOut,
    bring_home,
    no_value,
    printable,
    tally,
)
from .link import UNREADABLE, Dial, Incoming
from .resident import Resident
from .secrecy import Secrets
from .session import OnLoad
from .supervisor.parcel import (
    BadParcel,
    ForgedParcel,
    Packer,
    Unpacker,
    file_time,
    inner_name,
    unwire,
)

LIGHT_BYTES = 192 << 10
LARGE_BYTES = 100_000
"""A file of this size is sent to a machine once, however many tasks have it."""
LOG_ROOM = 60_000_000
TRIES = 4
RETRY_S, LONGEST_RETRY_S = 0.5, 4.0
CHANGED = "it changed while it was read"
EXPECTED = {"job.json": "file", "log": "file", "out": "folder"}
"""What a job's parcel has at its top."""
MOST_TOLD = 2 * MOST_LEFT_OUT
NAME_CAP = 4096
REASON_CAP = 200

T = TypeVar("T")
Ask = Callable[[str, dict[str, Any]], Awaitable[Incoming]]


class ParcelMover(abc.ABC):
    """A mover of files between here and one machine. How large ones get through is its subclass's to say.

    `ask` puts a request to its supervisor; `alive` is told that bytes got through.
    """

    interrupted: tuple[type[Exception], ...] = (ConnectionError, BadParcel)
    """After what a stream is tried once more."""

    def __init__(self, secrets: Mapping[str, str], caps: Caps = STANDARD_CAPS) -> None:
        self.ask: Ask = _nobody
        self.alive: Callable[[], None] = lambda: None
        self._values = secrets
        self._caps = caps
        self._arrived: dict[str, bytes] = {}

    # -- there -----------------------------------------------------------------------------------

    async def put(self, bundle: Bundle, contents: Mapping[str, list[Any]]) -> None:
        large = await asyncio.to_thread(_large, bundle, contents)
        answer = await self.ask("put", {"digest": bundle.digest, **({"large": large} if large else {})})
        if answer.state == "here":
            return  # the same content is not sent again
        same = {name: path for name, path in answer.same.items() if name in large}
        try:
            parcel = await asyncio.to_thread(_light_parcel, bundle, same)
            if parcel is not None:
                await self.ask("put", {"digest": bundle.digest, "data": parcel})
            else:
                await self._persist(lambda: self._send(bundle, same))
        except OSError as err:
            raise SetupFailed("files", str(err)) from err

    @abc.abstractmethod
    async def _send(self, bundle: Bundle, same: Mapping[str, str]) -> None:
        """Send files as a stream, which are too large for a message. Raises SetupFailed."""

    # -- and back --------------------------------------------------------------------------------

    @property
    def with_the_end(self) -> dict[str, int]:
        """What a job is started with, so that small artefacts come with the word of its end."""
        return {"bytes": self._caps.bytes, "files": self._caps.files}

    def arrived(self, job: str, parcel: bytes) -> None:
        """Keep artefacts that came with a message. If nobody collects them, they go with the job."""
        self._arrived[job] = parcel

    def forget(self, job: str) -> None:
        self._arrived.pop(job, None)

    async def collect(self, job: AttemptId, into: Path) -> Collected:
        parcel = self._arrived.pop(job, None)
        if parcel is not None:
            return self._unpack_light(parcel, into)
        if os.path.lexists(into):
            return tally(into)
        caps = {"job": job, **self.with_the_end}
        answer = await self.ask("fetch", caps)
        if answer.state == "unknown":
            raise ChannelError(f"no files of job {job!r} are on the machine")
        if answer.data is not None:
            return self._unpack_light(answer.data, into)
        return await self._persist(lambda: self._receive(caps, into))

    def _unpack_light(self, parcel: bytes, into: Path) -> Collected:
        plain = flat(parcel, self._caps.files)
        if plain is not None and not self._values:
            return plain.make(into)
        stage = Stage(into, self._caps)
        try:
            stage.unpacker.feed(parcel)
            return stage.settle(self._values)
        finally:
            stage.remove()

    @abc.abstractmethod
    async def _receive(self, caps: dict[str, Any], into: Path) -> Collected:
        """Receive files as a stream, which are too large for a message."""

    async def _persist(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat the call until it succeeds as a whole: what is half here is worth nothing."""
        for pause_s in islice(pauses(RETRY_S, LONGEST_RETRY_S, 2), TRIES - 1):
            try:
                return await call()
            except ForgedParcel:
                raise
            except self.interrupted:
                await asyncio.sleep(pause_s)
        try:
            return await call()
        except ForgedParcel:
            raise
        except self.interrupted as err:
            raise ChannelError(f"the files did not come through {TRIES} times: {err}") from err


class ParcelChannel(Resident):
    """A channel whose mover is a ParcelMover: small artefacts come with the word of an attempt's end."""

    def __init__(
        self,
        dial: Dial,
        mover: ParcelMover,
        fence: Fence,
        secrets: Mapping[str, str],
        on_load: OnLoad | None = None,
    ) -> None:
        super().__init__(dial, mover, fence, secrets, on_load)
        mover.ask, mover.alive = self.ask, self.alive
        self._files = mover

    def on_push(self, message: Incoming) -> None:
        if message.push == "ended" and message.data is not None and self.is_ours(message.job):
            self._files.arrived(message.job, message.data)
        super().on_push(message)

    def forget(self, job: AttemptId) -> None:
        self._files.forget(job)
        super().forget(job)

    def _spec(self, job: Job, in_bundle: bool) -> dict[str, Any]:
        spec = super()._spec(job, in_bundle)
        return spec if in_bundle else {**spec, "fetch": self._files.with_the_end}


async def _nobody(op: str, body: dict[str, Any]) -> Incoming:
    raise ChannelError("not connected")


class ParcelEnd(Struct, frozen=True):
    """What the last record of a job's parcel tells: names as `supervisor.parcel` writes them."""

    changed: tuple[str, ...] = ()
    left_out: tuple[tuple[str, str, int], ...] = ()


class Stage:
    """A job's folder on the host as it arrives here, in a folder of ours beside where its artefacts will be.

    The parcel is unpacked in `job`, below that folder: no record reaches what is ours.
    """

    def __init__(self, into: Path, caps: Caps) -> None:
        self._into = into
        self._caps = caps
        self._folder = into.with_name(into.name + INCOMING)
        self._job = self._folder / "job"
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        self._folder.mkdir(0o700)  # nothing in it is masked yet
        self._job.mkdir(0o700)
        most = 3 * caps.files + 100
        self.unpacker = Unpacker(str(self._job), caps.bytes + LOG_ROOM, most, EXPECTED)

    def settle(self, values: Mapping[str, str]) -> Collected:
        """What arrived becomes `into`, sieved as on this computer. Raises BadParcel if it is not whole."""
        if self.unpacker.end is None:
            raise BadParcel("the stream ended before it was whole")
        stayed = self._stayed(self.unpacker.end)
        if problem := no_value(values):
            return Collected(problem=problem)
        note = self._folder / LEFT_OUT
        return bring_home(self._job, self._into, Secrets(values, values), self._caps, stayed, note)

    def _stayed(self, told: dict[str, Any]) -> list[LeftOut]:
        """What did not come, or came and is no good: that is removed. Raises ForgedParcel."""
        try:
            end = msgspec.convert(told, decodable(ParcelEnd))
        except msgspec.ValidationError as err:
            raise ForgedParcel(f"its end is none: {err}") from None
        if len(end.left_out) > MOST_TOLD:
            raise ForgedParcel("it leaves out more than it may list")
        stayed = [
            LeftOut(printable(unwire(name))[:NAME_CAP], why[:REASON_CAP], size)
            for name, why, size in end.left_out
        ]
        for name in map(unwire, end.changed):
            if name not in self.unpacker.files:  # it was checked when it was made
                raise ForgedParcel(f"{name[:80]!r} is said to have changed and did not come")
            self.unpacker.files.discard(name)
            os.unlink(self._job / name)
            stayed.append(LeftOut(printable(name.removeprefix("out/")), CHANGED))
        return stayed

    def remove(self) -> None:
        self.unpacker.close()
        shutil.rmtree(self._folder, ignore_errors=True)


# -- bundles -------------------------------------------------------------------------------------


def _large(bundle: Bundle, contents: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """The files that are worth a question: the machine may have them for another task."""
    if bundle.steps:  # they may write into what would be shared
        return {}
    found = dict[str, list[Any]]()
    for name, content in contents.items():
        top = next((top for top in bundle.files if name == top or name.startswith(top + "/")), None)
        if top is not None and os.path.getsize(bundle.files[top] + name[len(top) :]) >= LARGE_BYTES:
            found[name] = content
    return found


def _light_parcel(bundle: Bundle, same: Mapping[str, str]) -> bytes | None:
    """The parcel, if it is small enough to go with a message."""
    parcel = bytearray()

    def write(data: bytes) -> None:
        parcel.extend(data)
        if len(parcel) > LIGHT_BYTES:
            raise BlockingIOError

    try:
        pack_bundle(bundle, same, write)
    except BlockingIOError:
        return None
    return bytes(parcel)


def pack_bundle(bundle: Bundle, same: Mapping[str, str], write: Callable[[bytes], None]) -> None:
    """`same`: files that the machine has, and where. Raises OSError, which names the file."""
    packer = Packer(write)
    made: set[str] = set()
    for name, source in bundle.files.items():
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts or not pure.parts:
            raise OSError(f"a bundle's file must stay inside it: {name}")
        for parent in reversed(pure.parents[:-1]):
            _folder(packer, str(parent), made)
        if os.path.isdir(source):
            _pack_tree(packer, str(pure), source, made, same)
        elif str(pure) in same:
            packer.same(str(pure), same[str(pure)])
        else:
            packer.file(str(pure), source, follow=True)
    packer.end({})


def _pack_tree(packer: Packer, name: str, source: str, made: set[str], same: Mapping[str, str]) -> None:
    _folder(packer, name, made)
    with os.scandir(source) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            path = f"{name}/{entry.name}"
            if entry.is_symlink():
                packer.link(path, os.readlink(entry.path))
            elif entry.is_dir():
                _pack_tree(packer, path, entry.path, made, same)
            elif path in same:
                packer.same(path, same[path])
            else:
                packer.file(path, entry.path)


def _folder(packer: Packer, name: str, made: set[str]) -> None:
    if name not in made:
        made.add(name)
        packer.folder(name)


# -- small parcels, held whole in memory: most attempts leave a result and a log ---------------------


class Entry(Struct, frozen=True):
    """One record of a parcel, as `supervisor.parcel` writes it."""

    file: str | None = None
    size: int = 0
    mode: int = 0o600
    mtime: int = 0
    folder: str | None = None
    link: str | None = None
    end: str | None = None
    changed: tuple[str, ...] = ()
    left_out: tuple[msgspec.Raw, ...] = ()


_decode = msgspec.json.Decoder(decodable(Entry)).decode


class Flat(Struct, frozen=True):
    """A collection that needs no sieve: files only, all of them in out/ itself, none left out."""

    files: dict[str, tuple[Entry, memoryview]]

    def make(self, into: Path) -> Collected:
        """All at once: under its own name the directory is complete. One that is there already stays."""
        _make_parent(into)
        partial = f"{into}{PARTIAL}"
        _make_empty(partial)
        try:
            total = sum(_make(partial, name, *entry) for name, entry in self.files.items() if name != LOG)
            if LOG in self.files:
                _make(partial, LOG, *self.files[LOG])
            os.rename(partial, into)
        except OSError as err:
            shutil.rmtree(partial)
            if err.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            return tally(into)
        return Collected(len(self.files) - (LOG in self.files), total)


def _make(folder: str, name: str, entry: Entry, content: memoryview) -> int:
    """Its size."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    fd = os.open(f"{folder}/{name}", flags, entry.mode & 0o777 | 0o600)
    try:
        _write_all(fd, content)
        mtime = file_time(entry.mtime)
        os.utime(fd, ns=(mtime, mtime))
    finally:
        os.close(fd)
    return len(content)


def flat(parcel: bytes, most: int) -> Flat | None:
    """The parcel, if it is so plain, with no more files than `most`. Raises BadParcel if it is not whole."""
    files: dict[str, tuple[Entry, memoryview]] = {}
    for entry, content in _entries(parcel):
        if entry.end is not None:
            return Flat(files) if not entry.changed and not entry.left_out else None
        if entry.folder == "out":
            continue
        if entry.file is None:
            return None  # the long way tells what is wrong with it, if anything is
        name = inner_name(entry.file)
        if name == "job.json":
            continue
        last = LOG if name == "log" else name.removeprefix("out/")
        ours = name in (f"out/{LOG}", f"out/{LEFT_OUT}")
        if last == name or "/" in last or ours or last in files or len(files) > most:
            return None
        files[last] = (entry, content)
    raise BadParcel("it ended before it was whole")


def _entries(parcel: bytes) -> Iterable[tuple[Entry, memoryview]]:
    """The channel vouches for the bytes, and the message's own frame for their number."""
    view = memoryview(parcel)
    start = 0
    while (stop := parcel.find(b"\n", start)) >= 0:
        try:
            entry = _decode(view[start:stop])
        except UNREADABLE as err:
            raise ForgedParcel(f"not a record: {err}") from None
        start = stop + 1 + entry.size
        if entry.size < 0 or start > len(parcel):
            raise BadParcel("it ended before it was whole")
        yield entry, view[stop + 1 : start]


def _write_all(fd: int, content: memoryview) -> None:
    while content:
        content = content[os.write(fd, content) :]


def _make_parent(into: Path) -> None:
    try:
        os.mkdir(into.parent)
    except FileExistsError:
        pass
    except FileNotFoundError:
        into.parent.mkdir(parents=True, exist_ok=True)


def _make_empty(folder: str) -> None:
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:  # an earlier try was cut short
        shutil.rmtree(folder)
        os.mkdir(folder, 0o700)
