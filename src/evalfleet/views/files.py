"""Files that others read at any time: replaced whole, never rewritten in place."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import msgspec


def to_json(document: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def replace(path: Path, content: bytes) -> None:
    """Make `content` the file's. A reader sees the old or the new, whole. Raises OSError.

    Not flushed to disk: after a power failure these files are made anew from the journal.
    """
    scratch = _scratch(path)
    try:
        scratch.write_bytes(content)
        os.replace(scratch, path)
    except OSError:
        with contextlib.suppress(OSError):  # the first error is the one to tell
            scratch.unlink()
        raise


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
    scratch = _scratch(link)
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


def _scratch(path: Path) -> Path:
    # Of this process and thread alone: two that write the same file must not share a scratch file.
    return path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
