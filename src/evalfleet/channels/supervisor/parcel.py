"""Parcels: files on their way between a controller and a host, as one stream that tells when it is whole.

Records are JSON lines; a file's bytes follow its line. The last record tells the SHA-256 of all before it, so
a stream that was cut short is never taken for a whole one. Names are relative; their bytes are written as
Latin-1, so that any name a file system allows survives. Both sides use this module.

A job's artefacts are a parcel of job.json, log, and out/ as far as its caps allow; what becomes a bundle is
one, too. For those the working directory is the machine's.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat

from .files import MOST_DEEP, hasher

TYPE_CHECKING = False  # importing typing would cost 3 ms
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

CHUNK = 1 << 18
LINE_CAP = 16 << 20
RECORD_CAP = 1 << 16
"""Bytes of a record, but for the last one: room for a name and a target, each byte written as `\\u00ff`."""
NAME_CAP, PART_CAP = 4096, 255
LATEST_NS = 1 << 62


class BadParcel(OSError):
    """The stream is not a parcel, is not whole, or holds what it must not."""


class ForgedParcel(BadParcel):
    """A parcel holds what no packer of ours writes: to ask for it again would not help."""


def wire(name: str) -> str:
    return os.fsencode(name).decode("latin-1")


def unwire(name: str) -> str:
    """The name behind what `wire` made, whatever it leads to. Raises ForgedParcel."""
    try:
        return os.fsdecode(name.encode("latin-1"))
    except (UnicodeError, AttributeError):
        raise ForgedParcel(f"{str(name)[:80]!r} is no name") from None


def inner_name(wired: str) -> str:
    """The name behind what `wire` made, if it stays below where it starts. Raises ForgedParcel."""
    name = unwire(wired)
    parts = name.split("/")
    if (
        any(part in ("", ".", "..") or len(os.fsencode(part)) > PART_CAP for part in parts)
        or "\0" in name
        or len(wired) > NAME_CAP
    ):
        raise ForgedParcel(f"{wired[:80]!r} is no name for a file in here")
    return name


def file_time(mtime_ns: int) -> int:
    """Return a time that every file system takes."""
    return min(max(mtime_ns, 0), LATEST_NS)


class Packer:
    """A writer of a parcel, record by record."""

    def __init__(self, write: Callable[[bytes], Any]) -> None:
        self._write = write
        self._sum = hasher()
        self._changed: list[str] = []

    def folder(self, name: str, mode: int = 0o700) -> None:
        self._record({"folder": wire(name), "mode": mode & 0o777})

    def link(self, name: str, target: str) -> None:
        self._record({"link": wire(name), "to": wire(target)})

    def same(self, name: str, path: str) -> None:
        """A file that the machine has, at the path there."""
        self._record({"same": wire(name), "as": wire(path)})

    def file(self, name: str, path: str, follow: bool = False) -> int:
        """Write a file. Returns its size. Raises OSError, with nothing written, if it is no regular file."""
        # it may be a job's making: a fifo must not block us, a link not lead us away
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW))
        try:
            about = os.fstat(fd)
            if not stat.S_ISREG(about.st_mode):
                raise OSError("not a regular file")
            head = {"file": wire(name), "size": about.st_size, "mode": about.st_mode & 0o777}
            self._record({**head, "mtime": about.st_mtime_ns})
            self._content(fd, name, about.st_size)
        finally:
            os.close(fd)
        return about.st_size

    def end(self, more: dict[str, Any]) -> None:
        """`more` goes with the last record, which names files that shrank while they were read."""
        record = {"end": self._sum.hexdigest(), "changed": self._changed, **more}
        self._write(json.dumps(record).encode() + b"\n")

    def _content(self, fd: int, name: str, left: int) -> None:
        while left:
            chunk = os.read(fd, min(left, CHUNK))
            if not chunk:
                self._changed.append(wire(name))
                chunk = bytes(min(left, CHUNK))
            left -= len(chunk)
            self._put(chunk)

    def _record(self, record: dict[str, Any]) -> None:
        self._put(json.dumps(record).encode() + b"\n")

    def _put(self, data: bytes) -> None:
        self._sum.update(data)
        self._write(data)


class Unpacker:
    """A reader of a parcel, which makes its files under an empty folder `top`, and nothing anywhere else.

    `feed` it; once `end` is set the parcel was whole. Raises BadParcel, or OSError if it cannot write.
    Links are made last: no record can lead through one. `expected` says what may be at the top, each name
    with its kind ("file", "folder"); None: anything. `shares`: it may name files of other bundles in the
    working directory, to which hard links are made.
    """

    def __init__(
        self,
        top: str,
        bytes_cap: int = 1 << 62,
        count_cap: int = 1 << 62,
        expected: dict[str, str] | None = None,
        shares: bool = False,
    ) -> None:
        self.end: dict[str, Any] | None = None
        self.files: set[str] = set()
        self._top = top
        self._bytes_left = bytes_cap
        self._count_left = count_cap
        self._expected = expected
        self._shares = shares
        self._sum = hasher()
        self._rest = bytearray()
        self._folders = {""}
        self._links: dict[str, str] = {}
        self._file: int | None = None
        self._size_left = 0
        self._mtime = 0

    def feed(self, data: bytes) -> None:
        start = 0
        while start < len(data):
            if self._file is not None:
                start += self._write(data[start : start + self._size_left])
                continue
            stop = data.find(b"\n", start) + 1 or len(data)
            self._rest += data[start:stop]
            start = stop
            if len(self._rest) > LINE_CAP:
                raise ForgedParcel("a record is too long")
            if self._rest.endswith(b"\n"):
                line, self._rest = bytes(self._rest), bytearray()
                self._line(line)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _line(self, line: bytes) -> None:
        if self.end is not None:
            raise ForgedParcel("something follows the end")
        try:
            record = json.loads(line)
            if "end" in record:
                return self._finish(record)
            self._count_left -= 1
            if self._count_left < 0:
                raise ForgedParcel("it holds more than was agreed")
            if len(line) > RECORD_CAP:
                raise ForgedParcel("a record is too long")
            self._sum.update(line)
            return self._make(record)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as err:
            raise ForgedParcel(f"not a record: {str(err)[:200]}") from None

    def _make(self, record: dict[str, Any]) -> None:
        if "folder" in record:
            name = self._checked(record["folder"], "folder")
            os.mkdir(f"{self._top}/{name}", 0o700)
            self._folders.add(name)
        elif "link" in record:
            name, target = self._checked(record["link"], "link"), unwire(record["to"])
            if not target or "\0" in target or len(target) > NAME_CAP:
                raise ForgedParcel(f"{name[:80]!r} links to what is no name")
            self._links[name] = target
        elif "same" in record and self._shares:
            self._share(self._checked(record["same"], "file"), inner_name(record["as"]))
        else:
            self._open(self._checked(record["file"], "file"), record)

    def _share(self, name: str, other: str) -> None:
        if not other.startswith("bundles/") or os.path.islink(other):
            raise ForgedParcel(f"{other[:80]!r} is no file of a bundle")
        try:
            os.link(other, f"{self._top}/{name}")
        except OSError:  # a file system without links, or too many of them
            import shutil

            shutil.copy2(other, f"{self._top}/{name}")
        self.files.add(name)

    def _checked(self, wired: str, kind: str) -> str:
        """The name, if it is a new one and stays inside: its parent is a folder that this parcel has made."""
        name = inner_name(wired)
        parent, _, _ = name.rpartition("/")
        if parent not in self._folders or name in self.files or name in self._folders or name in self._links:
            raise ForgedParcel(f"{wired[:80]!r} is no name for a file in here")
        if not parent and self._expected is not None and self._expected.get(name) != kind:
            raise ForgedParcel(f"{wired[:80]!r} has no place at its top")
        return name

    def _open(self, name: str, record: dict[str, Any]) -> None:
        size, mode = int(record["size"]), int(record["mode"]) & 0o777 | 0o600
        mtime = file_time(int(record["mtime"]))
        self._bytes_left -= size
        if size < 0 or self._bytes_left < 0:
            raise ForgedParcel("it holds more than was agreed")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        self._file = os.open(f"{self._top}/{name}", flags, mode)
        self.files.add(name)
        self._size_left, self._mtime = size, mtime
        if not size:
            self._write(b"")

    def _write(self, data: bytes) -> int:
        """Write to the open file. Returns how much of the data was that file's."""
        assert self._file is not None
        self._sum.update(data)
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]
        self._size_left -= len(data)
        if not self._size_left:
            os.utime(self._file, ns=(self._mtime, self._mtime))
            self.close()
        return len(data)

    def _finish(self, record: dict[str, Any]) -> None:
        if record["end"] != self._sum.hexdigest():
            raise BadParcel("its checksum is wrong")
        for name, target in self._links.items():
            os.symlink(target, f"{self._top}/{name}")
        self.end = record


# -- what is packed: a job's artefacts --------------------------------------------------------------

LIGHT_FILES = 64
LIGHT_BYTES = 192 << 10
PROMPT_BYTES = 16 << 10  # more would hold up the word of a job's end on a slow line
MOST_LEFT_OUT = 1000
OURS = frozenset(("evalfleet.log", "left_out.json"))


def is_light(folder: str, most: int = LIGHT_BYTES) -> bool:
    """A few small files: they fit into one message."""
    try:
        total = os.stat(folder + "/log").st_size
        with os.scandir(folder + "/out") as entries:
            for count, entry in enumerate(entries):
                about = entry.stat(follow_symlinks=False)
                total += about.st_size
                if count >= LIGHT_FILES or total > most or stat.S_ISDIR(about.st_mode):
                    return False
    except OSError:
        return False
    return True


def pack(folder: str, write: Callable[[bytes], Any], bytes_cap: int, files_cap: int) -> None:
    """Write the parcel. Its end lists what stays behind, as [name, reason, size]."""
    packer = Packer(write)
    for name in ("job.json", "log"):
        with contextlib.suppress(OSError):
            packer.file(name, f"{folder}/{name}")
    packer.folder("out")
    sieve = Sieve(packer, folder + "/out", bytes_cap, files_cap)
    if os.path.isdir(folder + "/out") and not os.path.islink(folder + "/out"):
        sieve.run()
    packer.end({"left_out": sieve.left_out})


class Sieve:
    """A walk through the artefacts, by name, until the caps are reached. It ends soon after that."""

    def __init__(self, packer: Packer, top: str, bytes_cap: int, files_cap: int) -> None:
        self.left_out: list[list[Any]] = []
        self._packer = packer
        self._top = top
        self._bytes_left = bytes_cap
        self._files_left = self._folders_left = files_cap

    def run(self) -> None:
        stack = [""]
        while stack:
            folder = stack.pop()
            for name in self._names(folder):
                if len(self.left_out) >= MOST_LEFT_OUT:
                    self.left_out.append(["...", "and what else there is: too many files", 0])
                    return
                self._add(folder + name, stack)

    def _names(self, folder: str) -> Iterable[str]:
        """In order, result.json first, and no more of them than can matter: there may be millions."""
        most = self._files_left + self._folders_left + MOST_LEFT_OUT + 1
        path = f"{self._top}/{folder}"
        try:
            if stat.S_IMODE(os.stat(path).st_mode) & 0o700 != 0o700:
                os.chmod(path, 0o700)
            with os.scandir(path) as entries:
                import heapq  # only here: most supervisors never need it

                names = (entry.name for entry in entries)
                return heapq.nsmallest(most, names, key=lambda name: (name != "result.json", name))
        except OSError as err:
            self._leave(folder.rstrip("/"), f"unreadable: {err.strerror}", 0)
            return ()

    def _add(self, name: str, stack: list[str]) -> None:
        path = f"{self._top}/{name}"
        try:
            about = os.lstat(path)
            if name in OURS:
                self._leave(name, "the name is evalfleet's own", about.st_size)
            elif stat.S_ISDIR(about.st_mode):
                self._add_folder(name, about, stack)
            elif stat.S_ISLNK(about.st_mode) and self._files_left:
                self._files_left -= 1
                self._packer.link("out/" + name, os.readlink(path))
            else:
                self._add_file(name, path, about)
        except OSError as err:
            self._leave(name, f"unreadable: {err.strerror or err}", 0)

    def _add_folder(self, name: str, about: os.stat_result, stack: list[str]) -> None:
        if name.count("/") >= MOST_DEEP:
            return self._leave(name, "too deep", 0)
        if not self._folders_left:
            return self._leave(name, "too many folders", 0)
        self._folders_left -= 1
        self._packer.folder("out/" + name, about.st_mode)
        stack.append(name + "/")
        return None

    def _add_file(self, name: str, path: str, about: os.stat_result) -> None:
        if not stat.S_ISREG(about.st_mode) and not stat.S_ISLNK(about.st_mode):
            return self._leave(name, "not a file", 0)
        if not self._files_left:
            return self._leave(name, "too many files", about.st_size)
        if about.st_size > self._bytes_left:
            return self._leave(name, "too many bytes", about.st_size)
        if about.st_mode & 0o400 == 0:
            with contextlib.suppress(OSError):
                os.chmod(path, about.st_mode | 0o600)
        self._bytes_left -= self._packer.file("out/" + name, path)
        self._files_left -= 1
        return None

    def _leave(self, name: str, reason: str, size: int) -> None:
        self.left_out.append([wire(name), reason, size])
