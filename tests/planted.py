"""Secrets that tests plant, and where these are found: nowhere, it is hoped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

UNIQUE = os.urandom(8).hex()
"""Part of every planted value: other tests run beside these, and theirs must not be taken for ours."""


def holding(folder: Path, *values: str) -> list[str]:
    """Files below `folder` that contain one of the values. Files may come and go meanwhile."""
    raw = [value.encode() for value in values]
    return [
        str(path.relative_to(folder))
        for path, content in _contents(folder)
        if any(value in content for value in raw)
    ]


def _contents(folder: Path) -> Iterator[tuple[Path, bytes]]:
    for where, _, names in os.walk(folder):
        for path in (Path(where, name) for name in names):
            try:
                if path.is_file() and not path.is_symlink():
                    yield path, path.read_bytes()
            except FileNotFoundError:
                continue
