"""Files that others read at any time: they are replaced whole, in one way, and never rewritten in place.

And what git knows of those in a folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import msgspec

EVERYBODY = 0o666  # less what the umask takes away
OURSELVES = 0o600


def replace(path: Path, content: bytes, *, mode: int = EVERYBODY) -> None:
    """Make `content` the file's. A reader sees the old or the new, whole. Raises OSError.

    It is not flushed to disk: after a power failure such a file may be the old one, or empty, and what it
    holds can be had again.
    """
    scratch = scratch_of(path)
    try:
        _write(scratch, content, mode)
        os.replace(scratch, path)
    except OSError:
        with contextlib.suppress(OSError):  # the first error is the one to tell
            scratch.unlink()
        raise


def create(path: Path, content: bytes, *, mode: int = EVERYBODY) -> None:
    """Write a new file, whole; one that is there already stays as it is. Raises OSError."""
    scratch = scratch_of(path)
    try:
        _write(scratch, content, mode)
        with contextlib.suppress(FileExistsError):
            os.link(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def _write(path: Path, content: bytes, mode: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, mode), "wb") as file:
        file.write(content)


def scratch_of(path: Path) -> Path:
    """A name beside the file, of this process and thread alone: two that write it must not share one."""
    return path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")


def to_json(document: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


@contextlib.contextmanager
def alone_in(folder: Path) -> Generator[None]:
    """Keeps out all others who change files of the folder by this function. Raises OSError."""
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


GIT_S = 5.0
"""Nobody waits longer for a slow disk: a commit is good to know, and no more."""


def git(folder: Path, *words: str) -> str:
    """What git says of the folder; empty if it is in no repository, or there is no git."""
    import subprocess  # only here: it is slow to load

    # No program that the repository's own settings name is started, and nothing is written there.
    argv = ["git", "-C", str(folder), "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", *words]
    environ = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(argv, capture_output=True, timeout=GIT_S, check=True, env=environ)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode("utf-8", "replace").strip()
