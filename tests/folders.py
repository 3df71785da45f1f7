"""Folders that others work in while a test looks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def below(folder: Path) -> Iterator[Path]:
    """Everything below a folder. What vanishes meanwhile is left out; `Path.rglob` would fail."""
    for where, folders, names in os.walk(folder):
        yield from (Path(where, name) for name in (*folders, *names))


def plain_files(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """The files below a folder, each with its content."""
    for path in below(folder):
        with suppress(FileNotFoundError):
            if path.is_file() and not path.is_symlink():
                yield path, path.read_bytes()
