"""Large files over HTTP: in pieces, several at once, and on where an earlier try stopped."""

from __future__ import annotations

import errno
import http.client
import json
import os
import shutil
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from .shell import Failed, replace_file, say

PIECE = 64 << 20
BLOCK = 1 << 20
AT_ONCE = 8
TRIES = 6
ANSWER_S = 60.0
TELL_S = 30.0


class Missing(Exception):
    """There is no such file."""


class Download:
    """One file. `token` is what comes after the '?', and is never told."""

    def __init__(self, url: str, token: str, path: str, piece: int = PIECE, tries: int = TRIES) -> None:
        self._url, self._token, self._path = url, token, path
        self._piece = piece
        self._tries = tries
        self._part, self._note = f"{path}.part", f"{path}.part.json"
        self._lock = threading.Lock()
        self._done: set[int] = set()
        self._told = time.monotonic()
        self._size = 0
        self._pieces = 0
        self._written = 0.0
        """When it was written there, in seconds since 1970; 0 if the server does not tell."""

    def bring(self) -> None:
        """Complete under its name, or not at all. Raises Missing, Failed."""
        size, tag = self._look()
        if os.path.exists(self._path) and os.path.getsize(self._path) == size:
            return
        self._size = size
        self._pieces = max(1, -(-size // self._piece))
        self._done = self._done_before(size, tag)
        try:
            with open(self._part, "r+b" if self._done else "wb") as file:
                file.truncate(size)  # what is zero takes no room
        except OSError as err:
            raise Failed(no_room(os.path.dirname(self._part), err)) from None
        with ThreadPoolExecutor(AT_ONCE) as pool:
            waiting = [n for n in range(self._pieces) if n not in self._done]
            for piece in [pool.submit(self._bring_piece, n, size, tag) for n in waiting]:
                piece.result()
        if os.path.getsize(self._part) != size:
            raise Failed(f"{self._url}: {os.path.getsize(self._part)} bytes came of {size}")
        if self._written:
            os.utime(self._part, (self._written, self._written))
        os.replace(self._part, self._path)
        os.unlink(self._note)

    def _done_before(self, size: int, tag: str) -> set[int]:
        """The pieces that came before, of the same file: one that was replaced meanwhile is brought anew."""
        try:
            with open(self._note) as file:
                note = json.load(file)
            if (note["size"], note["tag"], note["piece"]) == (size, tag, self._piece):
                return set(note["done"]) if os.path.exists(self._part) else set()
        except (OSError, ValueError, KeyError):
            pass
        return set()

    def _look(self) -> tuple[int, str]:
        with self._ask("bytes=0-0") as answer:
            tag = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
            self._written = _seconds(answer.headers.get("Last-Modified") or "")
            total = (answer.headers.get("Content-Range") or "").rpartition("/")[2]
            if answer.status == 206 and total.isdigit():
                return int(total), tag
            length = answer.headers.get("Content-Length") or ""
            if length == "0":
                return 0, tag
        raise Failed(f"{self._url}: the server does not give parts of files, so that a copy could not go on")

    def _ask(self, span: str) -> http.client.HTTPResponse:
        url = f"{self._url}?{self._token.lstrip('?')}" if self._token else self._url
        request = urllib.request.Request(url, headers={"Range": span})
        for tried in range(self._tries):
            try:
                answer: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=ANSWER_S)
                return answer
            except urllib.error.HTTPError as err:
                err.close()
                if err.code == 404:
                    raise Missing(self._url) from None
                if err.code == 416:  # an empty file has no first byte
                    return _Nothing(err)  # type: ignore[return-value]
                if err.code in (401, 403) or tried == self._tries - 1:
                    raise Failed(f"{self._url}: answer {err.code}; check the URL and its token") from None
            except (OSError, http.client.HTTPException) as err:
                if tried == self._tries - 1:
                    raise Failed(f"{self._url}: {_reason(err)}") from None
            time.sleep(min(2.0**tried, 30.0))
        raise AssertionError("the last try returns or raises")

    def _bring_piece(self, number: int, size: int, tag: str) -> None:
        first = number * self._piece
        last = min(first + self._piece, size) - 1
        if last >= first:
            for tried in range(self._tries):
                try:
                    self._copy(first, last)
                    break
                except (OSError, http.client.HTTPException) as err:
                    if isinstance(err, OSError) and err.errno == errno.ENOSPC:
                        raise Failed(no_room(os.path.dirname(self._part), err)) from None
                    if tried == self._tries - 1:
                        raise Failed(f"{self._url}: {_reason(err)}") from None
                    time.sleep(min(2.0**tried, 30.0))
        self._note_piece(number, size, tag)

    def _copy(self, first: int, last: int) -> None:
        with self._ask(f"bytes={first}-{last}") as answer, open(self._part, "r+b") as file:
            if answer.status != 206:  # written as this part, the whole would spoil others
                raise ConnectionError(f"answer {answer.status} instead of a part")
            at = first
            while block := answer.read(BLOCK):
                if block.strip(b"\0"):
                    file.seek(at)
                    file.write(block)
                at += len(block)
        if at != last + 1:
            raise ConnectionError(f"{at - first} bytes came of {last + 1 - first}")

    def _note_piece(self, number: int, size: int, tag: str) -> None:
        with self._lock:
            self._done.add(number)
            note = {"size": size, "tag": tag, "piece": self._piece, "done": sorted(self._done)}
            replace_file(self._note, json.dumps(note))
            if time.monotonic() - self._told > TELL_S:
                self._told = time.monotonic()
                say(f"{os.path.basename(self._path)}: {len(self._done)} of {self._pieces} parts")


class _Nothing:
    """The answer about an empty file."""

    def __init__(self, err: urllib.error.HTTPError) -> None:
        told = {name: err.headers.get(name) for name in ("ETag", "Last-Modified")}
        self.headers = {"Content-Length": "0", **told}
        self.status = 416

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *about: object) -> None: ...


def _seconds(date: str) -> float:
    """Since 1970, of a date as HTTP writes it; 0 if it is none."""
    from email.utils import parsedate_to_datetime

    try:
        return parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError):  # Python before 3.10 raises the first
        return 0.0


def no_room(folder: str, err: OSError) -> str:
    free = shutil.disk_usage(folder).free / (1 << 30)
    return f"{folder} cannot be written ({err.strerror}; {free:.1f} GB free); take a larger disk"


def _reason(err: Exception) -> str:
    return str(getattr(err, "reason", None) or err)
