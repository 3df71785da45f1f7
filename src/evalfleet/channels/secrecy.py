"""Keeping the values of secrets out of what comes back from machines."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import BinaryIO

MASK = "***"
SHORTEST = 4
"""A value shorter than this is not masked: it would be found everywhere by chance."""

_CHUNK = 1 << 20


class Secrets:
    """The values behind some names, as they may appear in a text or in JSON. Empty: nothing to hide."""

    def __init__(self, values: Mapping[str, str], names: Iterable[str]) -> None:
        plain = {values[name] for name in names if len(values.get(name, "")) >= SHORTEST}
        forms = (
            plain
            | {json.dumps(v)[1:-1] for v in plain}
            | {json.dumps(v, ensure_ascii=False)[1:-1] for v in plain}
        )
        # longest first: one value may be part of another
        self._forms = sorted((os.fsencode(form) for form in forms), key=len, reverse=True)
        self._overlap = max((len(form) for form in self._forms), default=1) - 1

    def __bool__(self) -> bool:
        return bool(self._forms)

    def mask(self, data: bytes) -> bytes:
        for form in self._forms:
            data = data.replace(form, MASK.encode())
        return data

    def mask_text(self, text: str) -> str:
        if not self._forms:
            return text
        return self.mask(text.encode("utf-8", "surrogateescape")).decode("utf-8", "surrogateescape")

    def mask_end(self, text: str) -> str:
        """Of a text that is the end of a longer one: it may begin in the middle of a value."""
        data = text.encode("utf-8", "surrogateescape")
        # the longest: the end of one value may be the beginning of another that is here as a whole
        begun = max((self._end_of(form, data) for form in self._forms), default=0)
        if begun:
            data = MASK.encode() + data[begun:]
        return self.mask(data).decode("utf-8", "surrogateescape")

    def _end_of(self, form: bytes, data: bytes) -> int:
        """How much of a value, up to its end, the data begins with."""
        starts = range(max(len(form) - SHORTEST + 1, 1))
        return next((len(form) - start for start in starts if data.startswith(form[start:])), 0)

    def mask_head(self, data: bytes) -> bytes:
        """As `mask_end`, of bytes."""
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
        """Copy, with every value masked, also one that lies across two chunks."""
        rest = b""
        while chunk := source.read(_CHUNK):
            data = self.mask(rest + chunk)
            keep = min(self._overlap, len(data))
            target.write(data[: len(data) - keep])
            rest = data[len(data) - keep :]
        target.write(rest)
