"""Files that others read at any time: replaced whole, never rewritten in place."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import msgspec

from evalfleet.files import replace, scratch_of

__all__ = ["alone_in", "changed_at", "point", "points_to", "replace", "to_json"]


def to_json(document: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


@contextlib.contextmanager
def alone_in(folder: Path) -> Generator[None]:
    """For who changes a file there that others change, too. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def changed_at(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def point(link: Path, target: str) -> None:
    """Make `link` a symbolic link to `target`, or, where there are none, a file that holds it."""
    if points_to(link) == target:
        return
    scratch = scratch_of(link)
    try:
        os.symlink(target, scratch, target_is_directory=True)
    except (OSError, NotImplementedError):
        replace(link, f"{target}\n".encode())
        return
    try:
        os.replace(scratch, link)
    except OSError:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise


def points_to(link: Path) -> str | None:
    """What `point` made of it last; None if that cannot be told."""
    try:
        return os.readlink(link) if link.is_symlink() else link.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
