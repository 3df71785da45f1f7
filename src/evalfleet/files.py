"""Replacing a file as a whole, in the one way that we do it."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

EVERYBODY = 0o666  # less what the umask takes away
OURSELVES = 0o600


def replace(path: Path, content: bytes, *, mode: int = EVERYBODY) -> None:
    """Make `content` the file's. A reader sees the old or the new, whole. Raises OSError.

    It is not flushed to disk: after a power failure such a file may be the old one, or empty, and what it
    holds can be had again.
    """
    scratch = scratch_of(path)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(scratch, flags, mode), "wb") as file:
            file.write(content)
        os.replace(scratch, path)
    except OSError:
        with contextlib.suppress(OSError):  # the first error is the one to tell
            scratch.unlink()
        raise


def scratch_of(path: Path) -> Path:
    """A name beside the file, of this process and thread alone: two that write it must not share one."""
    return path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
