"""What attempts left behind, for browsers: files that stay in their folder, logs in pieces, images.

An agent wrote all of it. Nothing is opened by way of a link, nothing is sent as what a browser would run,
and control characters of logs are shown, not sent.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

import msgspec

from evalfleet.api.live_log import LiveLog
from evalfleet.api.run import Run
from evalfleet.channels.artefacts import LOG
from evalfleet.errors import RequestError
from evalfleet.model import AttemptId
from evalfleet.names import artefacts_folder
from evalfleet.state import AttemptState
from evalfleet.views.format import visible
from evalfleet.views.model_costs import metered_calls
from evalfleet.views.results import attempt_entry

MOST_LOG = 1 << 20
"""Bytes of a log in one answer."""
MOST_LINES = 3000
"""Lines of a log in one answer: a page can show no more at once."""
MOST_MATCHES = 500
MOST_SEARCHED = 256 << 20
MATCH_BEFORE, MATCH_BYTES = 200, 2000
"""Bytes of a line that are shown: before what was found, and in all."""
MOST_IMAGE = 32 << 20
MOST_PIXELS = 64_000_000
"""A small file can be an image that takes gigabytes to show."""
MOST_FILES = 5000
MOST_STEPS = 5000
MOST_JSON = 4 << 20
LIVE_S = 60.0
"""A log that nobody has asked for so long is not followed any more."""
RESULT = "result.json"


class TooLarge(RequestError):
    """It is there, and larger than a browser should be given."""


def open_within(root: Path, path: str) -> BinaryIO:
    """A regular file below `root`, also if links lie about where it is. Raises RequestError."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or "\0" in path or any(part in ("..", ".") for part in parts):
        raise RequestError(f"{path[:200]!r} is not among the attempt's files")
    folders: list[int] = []
    try:
        folders.append(os.open(root, os.O_RDONLY | os.O_DIRECTORY))
        for part in parts[:-1]:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
            folders.append(os.open(part, flags, dir_fd=folders[-1]))
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe must not make us wait
        file = os.open(parts[-1], flags, dir_fd=folders[-1])
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise RequestError(f"{path[:200]!r} is no file")
        return os.fdopen(file, "rb")
    except (OSError, UnicodeError) as err:
        raise RequestError(f"{path[:200]!r} is not among the attempt's files") from err
    finally:
        for folder in folders:
            os.close(folder)


def list_files(root: Path) -> list[tuple[str, int]]:
    """The files of an attempt with their bytes, in order; links are left out, and what are too many."""
    found: list[tuple[str, int]] = []
    for folder, folders, names in os.walk(root):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(folder, name)
            with suppress(OSError):
                status = os.lstat(path)
                if stat.S_ISREG(status.st_mode):
                    relative = os.path.relpath(path, root)
                    found.append(
                        (relative.encode(errors="surrogateescape").decode(errors="replace"), status.st_size)
                    )
            if len(found) >= MOST_FILES:
                return found
    return found


# -- images --------------------------------------------------------------------------------------------


def read_image(root: Path, path: str) -> tuple[bytes, str]:
    """An image and its type, by what is in it. Raises RequestError, TooLarge."""
    with open_within(root, path) as file:
        return checked_image(file.read(MOST_IMAGE + 1), path)


def checked_image(data: bytes, name: str) -> tuple[bytes, str]:
    kind = image_type(data)
    if kind is None:
        raise RequestError(f"{name[:200]!r} is no PNG, JPEG or WebP image")
    size = image_size(data, kind)
    if len(data) > MOST_IMAGE or (size is not None and size[0] * size[1] > MOST_PIXELS):
        raise TooLarge(f"{name[:200]!r} is too large to be shown: download it")
    return data, kind


def image_type(data: bytes) -> str | None:
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return None


def image_size(data: bytes, kind: str) -> tuple[int, int] | None:
    """Width and height, where the file's beginning tells them."""
    with suppress(struct.error, IndexError):
        if kind == "image/png":
            width, height = struct.unpack(">II", data[16:24])
            return int(width), int(height)
        if kind == "image/webp":
            return _webp_size(data)
        if kind == "image/jpeg":
            return _jpeg_size(data)
    return None


def _webp_size(data: bytes) -> tuple[int, int] | None:
    """Of the extended form, of a lossy one (14 bits a side), and of a lossless one (14 bits less one)."""
    match data[12:16]:
        case b"VP8X":
            return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
        case b"VP8 ":
            width, height = struct.unpack("<HH", data[26:30])
            return width & 0x3FFF, height & 0x3FFF
        case b"VP8L":
            (bits,) = struct.unpack("<I", data[21:25])
            return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        case _:
            return None


def _jpeg_size(data: bytes) -> tuple[int, int] | None:
    place = 2
    while place + 9 < len(data):
        if data[place] != 0xFF:
            return None
        marker, length = data[place + 1], int.from_bytes(data[place + 2 : place + 4], "big")
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack(">HH", data[place + 5 : place + 9])
            return int(width), int(height)
        place += 2 + length
    return None


# -- logs ----------------------------------------------------------------------------------------------


class Logs:
    """Logs of attempts, in pieces: as they came home, or from the machine while they run."""

    def __init__(self) -> None:
        self._live: dict[tuple[str, AttemptId], _Following] = {}
        self._lock = threading.Lock()

    def piece(
        self, run: Run, attempt: AttemptState, start: int, most: int, before: int | None = None
    ) -> dict[str, Any]:
        """Return the log from byte `start` on, or its end if negative, or what is `before` a byte.

        It has at most `most` bytes and MOST_LINES lines. Call it in a thread: it may ask a machine.
        """
        most = max(1, min(most, MOST_LOG))
        with self._bytes(run, attempt) as log:
            backwards = before is not None or start < 0
            if before is not None:
                end = max(log.begun, min(before, log.size))
            else:
                end = log.size if start < 0 else min(log.size, max(log.begun, start) + most)
                most = min(most, -start) if start < 0 else most
            start = max(log.begun, end - most) if backwards else max(log.begun, min(start, log.size))
            data = log.read(start, end - start)
            if backwards:
                lines = data.rsplit(b"\n", MOST_LINES + data.endswith(b"\n"))
                cut = len(lines[0]) + 1 if len(lines) > MOST_LINES else 0
                start, data = start + cut, data[cut:]
            else:
                lines = data.split(b"\n", MOST_LINES)
                data = data[: len(data) - len(lines[MOST_LINES])] if len(lines) > MOST_LINES else data
            return _piece(data, start, log.size, live=log.live, problem=log.problem)

    def search(self, run: Run, attempt: AttemptState, text: str, start: int) -> dict[str, Any]:
        """Return lines with this text, whatever its case, each with the byte at which it begins.

        `next` is the byte from which to search on, or None at the end. Call it in a thread.
        """
        wanted = re.compile(re.escape(text.encode("utf-8", "replace")), re.IGNORECASE)
        matches: list[tuple[int, str]] = []
        with self._bytes(run, attempt) as log:
            at, latest = max(log.begun, start), max(log.begun, start) + MOST_SEARCHED
            while at < min(log.size, latest) and len(matches) < MOST_MATCHES:
                data = log.read(at, MOST_LOG)
                if not data:  # it was cut meanwhile
                    return {"matches": matches, "next": None, "size": log.size}
                whole = data.rfind(b"\n") + 1 if at + len(data) < log.size else 0
                data = data[: whole or len(data)]
                at += _matches(data, at, wanted, matches)
            return {"matches": matches, "next": at if at < log.size else None, "size": log.size}

    @contextmanager
    def _bytes(self, run: Run, attempt: AttemptState) -> Generator[_LogBytes]:
        root = run.folder / artefacts_folder(attempt.task, attempt.id)
        try:
            file = open_within(root, LOG)
        except RequestError:
            if attempt.outcome is not None and attempt.collected is not None:
                yield _LogBytes(0, 0, _no_bytes, live=False, problem=run.why_no_log(attempt.id))
                return
            following = self._followed(run, attempt)
            following.read()
            begun, kept = following.begun, bytes(following.data)

            def read_kept(at: int, most: int) -> bytes:
                return kept[at - begun : at - begun + most]

            live, problem = not following.over, following.problem or None
            yield _LogBytes(begun, begun + len(kept), read_kept, live, problem)
            return
        with file:

            def read(at: int, most: int) -> bytes:
                file.seek(at)
                return file.read(most)

            yield _LogBytes(0, file.seek(0, os.SEEK_END), read, live=False, problem=None)

    def _followed(self, run: Run, attempt: AttemptState) -> _Following:
        with self._lock:
            now = time.monotonic()
            for key, following in list(self._live.items()):
                if now - following.used_at > LIVE_S:
                    self._live.pop(key).close()
            found = self._live.get((run.name, attempt.id))
            if found is None:
                found = self._live[run.name, attempt.id] = _Following(run.live_log(attempt))
            found.used_at = now
            return found

    def close(self) -> None:
        with self._lock:
            for following in self._live.values():
                following.close()
            self._live.clear()


class _LogBytes(NamedTuple):
    """The bytes of a log that are here, from `begun` to `size`."""

    begun: int
    size: int
    read: Callable[[int, int], bytes]
    """Bytes from a place on, at most so many."""
    live: bool
    problem: str | None


def _no_bytes(at: int, most: int) -> bytes:
    return b""


def _matches(data: bytes, at: int, wanted: re.Pattern[bytes], matches: list[tuple[int, str]]) -> int:
    """Add the lines of `data` that match, up to MOST_MATCHES. Return how many bytes were searched."""
    end = 0
    while (found := wanted.search(data, end)) is not None:
        begin = data.rfind(b"\n", 0, found.start()) + 1
        end = data.find(b"\n", found.end())
        end = len(data) if end < 0 else end + 1
        shown = max(begin, found.start() - MATCH_BEFORE)
        line = data[shown : min(end, shown + MATCH_BYTES)].rstrip(b"\r\n")
        matches.append((at + begin, visible(line.decode("utf-8", "replace"))))
        if len(matches) >= MOST_MATCHES or end >= len(data):
            return end
    return len(data)


class _Following:
    """The end of a log that grows, as far as it was read."""

    def __init__(self, log: LiveLog) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._first = True
        self.used_at = time.monotonic()
        self.begun = 0
        self.data = bytearray()

    @property
    def over(self) -> bool:
        return self._log.over

    @property
    def problem(self) -> str:
        return self._log.problem

    def read(self) -> None:
        with self._lock:
            self.data += self._log.read(10.0 if self._first else 0.3)
            self._first = False
            if len(self.data) > 2 * MOST_LOG:
                cut = len(self.data) - MOST_LOG
                self.begun += cut
                del self.data[:cut]

    def close(self) -> None:
        with self._lock, suppress(Exception):  # whatever a connection says when it ends
            self._log.close()


def _piece(data: bytes, start: int, size: int, *, live: bool, problem: str | None) -> dict[str, Any]:
    """A character that lies across the end is left for the next piece."""
    end = start + len(data)
    if end < size or live:
        for back in range(1, min(4, len(data)) + 1):
            if data[-back] & 0xC0 != 0x80:
                wide = (
                    1 if data[-back] < 0x80 else 2 if data[-back] < 0xE0 else 3 if data[-back] < 0xF0 else 4
                )
                if wide > back and len(data) > back:
                    data, end = data[:-back], end - back
                break
    text = visible(data.decode("utf-8", "replace"))
    return {"from": start, "to": end, "size": size, "text": text, "live": live, "problem": problem}


# -- attempts ------------------------------------------------------------------------------------------


def attempt_document(run: Run, attempt: AttemptState) -> dict[str, Any]:
    """One attempt: what became of it, its steps with their screenshots, its files, its model calls."""
    root = run.folder / artefacts_folder(attempt.task, attempt.id)
    entry = attempt_entry(run.state(), attempt)
    steps, problem = _steps(run, attempt, entry["screenshots"])
    return {
        "attempt": {**entry, "task": attempt.task},
        "steps": steps,
        "steps_problem": problem,
        "files": list_files(root),
        "calls": metered_calls(attempt, run.folder)[:MOST_STEPS],
        "result": _result(root),
    }


def _steps(
    run: Run, attempt: AttemptState, screenshots: list[str]
) -> tuple[list[dict[str, Any]], str | None]:
    problem, rows = None, []
    try:
        rows = run.steps(attempt.id)[:MOST_STEPS]
        folder = run.steps_folder()
    except RequestError as err:
        problem, folder = str(err), ""
    except msgspec.ValidationError:  # a run that was not planned here: nothing says what its benchmark is
        problem, folder = "its benchmark is not known here", ""
    if rows or not screenshots:
        return [
            {
                **row,
                "image": f"{folder}{row['screenshot']}" if row["screenshot"] else None,
                "point": None if row["x"] is None or row["y"] is None else [row["x"], row["y"]],
            }
            for row in rows
        ], problem
    return [
        {"n": n, "image": path, "point": None} for n, path in enumerate(screenshots[:MOST_STEPS], 1)
    ], None


def _result(root: Path) -> Any:
    try:
        with open_within(root, RESULT) as file:
            return msgspec.json.decode(file.read(MOST_JSON))
    except (RequestError, msgspec.MsgspecError, RecursionError):
        return None
