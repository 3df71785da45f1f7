"""Keeping the values of secrets out of what comes back from machines."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, BinaryIO, cast
from urllib.parse import quote, quote_plus

import msgspec

MASK = "***"
SHORTEST = 4
"""A value shorter than this is not masked: it would be found everywhere by chance."""
SHORTEST_ENCODED = 8
"""So are encoded forms: base64 and hexadecimal digits look alike."""
CUT = re.compile(rb"\n\[\.\.\. \d{1,20} bytes left out \.\.\.\]\n")
"""What the supervisor writes where it has cut a log: a value may have been cut with it."""

# fmt: off
_COMMON = frozenset({
    "true", "false", "null", "none", "default", "test", "debug", "info", "user", "admin", "root", "local",
    "localhost", "password", "secret", "token", "score", "success", "error", "broken", "result",
})
# fmt: on
_CHUNK = 1 << 20
_CUT_BYTES = 64
_MOST_CUTS = 20
"""A log is cut once. A chunk with more of such lines was written to look so, and is not worth the time."""
_KEY_LINE = re.compile(r"^[ \t]*([A-Za-z0-9+/=_-]{8,})[ \t\r]*$|([A-Za-z0-9+/=]{40,})", re.MULTILINE)
"""A line of a PEM file, or what must be one where a JSON document holds the file."""
_BASE64 = rb"[A-Za-z0-9+/_-]"


def is_maskable(value: str) -> bool:
    """Is the value so long and odd that it is not found by chance, in results too?"""
    if len(value) < SHORTEST or value.lower() in _COMMON:
        return False
    return len(value) >= SHORTEST_ENCODED or not re.fullmatch(r"[-+.\d]*(e[-+]?\d+)?", value.lower())


def forms_of(value: str) -> set[bytes]:
    """The value as it may appear in a text: plain, in JSON, in a URL, in hexadecimal digits."""
    raw = os.fsencode(value)
    texts = {value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}
    quoted = {quote(raw, safe=""), quote(raw), quote_plus(raw)}
    texts |= quoted | {re.sub("%..", lambda found: found[0].lower(), text) for text in quoted}
    forms = {os.fsencode(text) for text in texts}
    if len(raw) * 2 >= SHORTEST_ENCODED:
        forms |= {binascii.hexlify(raw), binascii.hexlify(raw).upper()}
    return forms


def base64_forms_of(value: str) -> set[bytes]:
    """What is in every base64 text that the value is part of, wherever it begins there.

    Some characters before and after hold bits of the value and of its neighbours.
    """
    raw = os.fsencode(value)
    forms: set[bytes] = set()
    for skip in range(3):
        whole = raw[skip : skip + (len(raw) - skip) // 3 * 3]
        forms |= {base64.b64encode(whole), base64.urlsafe_b64encode(whole)}
    return {form for form in forms if len(form) >= SHORTEST_ENCODED}


def lines_of(value: str) -> set[bytes]:
    """The lines of a key that has several, which a program may print indented, or one by one."""
    text = value.replace("\\n", "\n")
    lines = (found[1] or found[2] for found in _KEY_LINE.finditer(text) if "\n" in text)
    return {os.fsencode(line) for line in lines if is_maskable(line)}


class Secrets:
    """The values behind some names, as they may appear in a text. Empty: nothing to hide."""

    def __init__(self, values: Mapping[str, str], names: Iterable[str]) -> None:
        maskable = {value for name in names if is_maskable(value := values.get(name, ""))}
        plain = {form for value in maskable for form in forms_of(value) | lines_of(value)}
        encoded = {form for value in maskable for form in base64_forms_of(value)} - plain
        # longest first: one value may be part of another
        self._plain = sorted(plain, key=len, reverse=True)
        self._encoded = sorted(encoded, key=len, reverse=True)
        self._forms = [*self._plain, *self._encoded]
        self._overlap = max((len(form) + 6 for form in self._forms), default=1) - 1

    def __bool__(self) -> bool:
        return bool(self._forms)

    def mask(self, data: bytes) -> bytes:
        for form in self._plain:
            data = data.replace(form, MASK.encode())
        for form in self._encoded:
            if form in data:
                around = rb"%b{0,3}%b%b{0,3}={0,2}" % (_BASE64, re.escape(form), _BASE64)
                data = re.sub(around, MASK.encode(), data)
        return data

    def mask_text(self, text: str) -> str:
        if not self._forms:
            return text
        return self.mask(text.encode("utf-8", "surrogateescape")).decode("utf-8", "surrogateescape")

    def mask_result(self, data: bytes) -> bytes:
        """Mask result.json. Where it is JSON its texts are masked, and nothing else: it stays JSON."""
        if not any(form in data for form in self._forms):
            return data
        try:
            return msgspec.json.encode(self._mask_texts(msgspec.json.decode(data)))
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return self.mask(data)

    def _mask_texts(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.mask_text(value)
        if isinstance(value, list):
            parts: list[Any] = [*value]
            return [self._mask_texts(item) for item in parts]
        if isinstance(value, dict):
            items = cast("dict[str, Any]", value).items()
            return {self.mask_text(name): self._mask_texts(item) for name, item in items}
        return value

    def mask_end(self, text: str) -> str:
        """Mask a text that is the end of a longer one: it may begin in the middle of a value."""
        data = text.encode("utf-8", "surrogateescape")
        return self.mask(self._without_ending(data)).decode("utf-8", "surrogateescape")

    def _without_ending(self, data: bytes) -> bytes:
        """Masked, if it begins with the end of a value."""
        # the longest: the end of one value may be the beginning of another that is here as a whole
        begun = max((self._end_of(form, data) for form in self._forms), default=0)
        return MASK.encode() + data[begun:] if begun else data

    def _without_beginning(self, data: bytes) -> bytes:
        """Masked, if it ends with the beginning of a value."""
        begun = self.begun_at_end(data)
        return data[: len(data) - begun] + MASK.encode() if begun >= SHORTEST else data

    def _end_of(self, form: bytes, data: bytes) -> int:
        """How much of a value, up to its end, the data begins with."""
        starts = range(max(len(form) - SHORTEST + 1, 1))
        return next((len(form) - start for start in starts if data.startswith(form[start:])), 0)

    def mask_head(self, data: bytes) -> bytes:
        """Mask bytes that are the end of longer ones, as `mask_end` does with a text."""
        return self.mask_end(data.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")

    def begun_at_end(self, data: bytes) -> int:
        """How many bytes at the end may be the beginning of a value whose rest is yet to come."""
        lengths = range(min(self._overlap, len(data)), 0, -1)
        return next((n for n in lengths if any(form.startswith(data[-n:]) for form in self._forms)), 0)

    def is_inside(self, data: bytes) -> bool:
        """Might all of it be a part of a value?"""
        return any(data in form for form in self._forms)

    def in_name(self, name: str) -> bool:
        raw = os.fsencode(name)
        return any(form in raw for form in self._forms)

    def found_in(self, file: BinaryIO) -> bool:
        rest = b""
        while chunk := file.read(_CHUNK):
            data = rest + chunk
            if any(form in data for form in self._forms):
                return True
            rest = data[max(len(data) - self._overlap, 0) :]
        return False

    def copy_masked(self, source: BinaryIO, target: BinaryIO) -> None:
        """Copy a log, with every value masked, also one that lies across two chunks or was cut in two."""
        rest = b""
        held = 2 * self._overlap + _CUT_BYTES  # so much on either side of a cut may belong together
        while chunk := source.read(_CHUNK):
            data = self._mask_cuts(self.mask(rest + chunk), at_end=False)
            keep = min(held, len(data))
            target.write(data[: len(data) - keep])
            rest = data[len(data) - keep :]
        target.write(self._mask_cuts(rest, at_end=True))

    def _mask_cuts(self, data: bytes, *, at_end: bool) -> bytes:
        parts: list[bytes] = []
        done = 0
        for cut in islice(CUT.finditer(data), _MOST_CUTS):
            if not at_end and len(data) - cut.end() < self._overlap:
                break
            before = self._without_ending(data[done : cut.start()]) if parts else data[: cut.start()]
            parts += [self._without_beginning(before), cut[0]]
            done = cut.end()
        rest = data[done:]
        return b"".join((*parts, self._without_ending(rest) if parts else rest))
