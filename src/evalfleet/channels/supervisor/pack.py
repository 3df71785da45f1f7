"""A job's artefacts as a parcel: job.json, log, and out/ as far as its caps allow. A parcel as a bundle.

The working directory is the machine's.
"""

from __future__ import annotations

import contextlib
import os
import stat

from .files import MOST_DEEP
from .parcel import BadParcel, Packer, Unpacker, wire

TYPE_CHECKING = False  # importing typing would cost 3 ms
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

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
    """Write the parcel. What stays behind is told at its end, as [name, reason, size]."""
    packer = Packer(write)
    for name in ("job.json", "log"):
        with contextlib.suppress(OSError):
            packer.file(name, f"{folder}/{name}")
    packer.folder("out")
    sieve = Sieve(packer, folder + "/out", bytes_cap, files_cap)
    if os.path.isdir(folder + "/out") and not os.path.islink(folder + "/out"):
        sieve.run()
    packer.end({"left_out": sieve.left_out})


def has_bundle(digest: str) -> bool:
    if "/" in digest or digest.startswith(".") or digest.endswith(".tmp") or not digest:
        raise ValueError(f"no name for a bundle: {digest}")
    return os.path.isdir("bundles/" + digest)


def unpack_bundle(digest: str, chunks: Iterable[bytes]) -> None:
    """Under its own name a bundle is whole. Raises OSError."""
    partial = f"bundles/{digest}-{os.getpid()}.tmp"
    os.mkdir(partial)
    unpacker = Unpacker(partial)
    try:
        for chunk in chunks:
            unpacker.feed(chunk)
        if unpacker.end is None:
            raise BadParcel("it ended before it was whole")
        with contextlib.suppress(FileExistsError, IsADirectoryError):
            if not has_bundle(digest):
                os.rename(partial, "bundles/" + digest)
    finally:
        unpacker.close()
        if os.path.exists(partial):
            import shutil

            shutil.rmtree(partial, ignore_errors=True)


class Sieve:
    """Goes through the artefacts, by name, until the caps are reached; then not for ever."""

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
                names = (entry.name for entry in entries)
                return self._least(names, most)
        except OSError as err:
            self._leave(folder.rstrip("/"), f"unreadable: {err.strerror}", 0)
            return ()

    def _least(self, names: Iterable[str], most: int) -> list[str]:
        import heapq  # only here: most supervisors never need it

        return heapq.nsmallest(most, names, key=lambda name: (name != "result.json", name))

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
