"""Where labs keep what they made, so that a dead one can be swept away by anybody.

A lab is a directory with a lock that its creator holds until it dies. Everything it makes is either below
that directory, or written down there before it is made.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Generator
from pathlib import Path

from .system import LabError

Demolish = Callable[[Path], None]
"""Ends everything of a lab, given its directory. May be repeated."""


class State:
    """A directory of one lab, ours until `destroy`."""

    def __init__(self, path: Path, lock: int, demolish: Demolish) -> None:
        self.path = path
        self._lock = lock
        self._demolish = demolish

    def destroy(self) -> None:
        """May be repeated. Raises LabError or OSError if something stays."""
        if self._lock < 0:
            return
        self._demolish(self.path)
        root = self.path.parent
        with _all_labs(root):  # else a sweeper could find the directory without its lock
            shutil.rmtree(self.path)
            os.close(self._lock)
            self._lock = -1
            if os.listdir(root) == ["lock"]:
                (root / "lock").unlink()
                root.rmdir()


def claim(root: Path, demolish: Demolish) -> State:
    """A new directory of `root`."""
    with _all_labs(root):
        path = root / secrets.token_hex(4)
        path.mkdir(mode=0o700)
        lock = _take(path)
    if lock is None:
        raise LabError(f"{path} is held by another lab")
    return State(path, lock, demolish)


def sweep(root: Path, demolish: Demolish) -> list[str]:
    """Remove what labs left whose creator is dead; never touches a live one. Returns their names."""
    if not root.exists():
        return []
    dead: list[State] = []
    with _all_labs(root):
        for path in sorted(entry for entry in root.iterdir() if entry.is_dir()):
            lock = _take(path)
            if lock is not None:
                dead.append(State(path, lock, demolish))
    for state in dead:
        state.destroy()
    return [state.path.name for state in dead]


@contextlib.contextmanager
def _all_labs(root: Path) -> Generator[None]:
    """Between a lab's directory and its lock nobody must look."""
    lock = _lock_all(root)
    try:
        yield
    finally:
        os.close(lock)


def _lock_all(root: Path) -> int:
    while True:
        root.mkdir(mode=0o700, exist_ok=True)
        if root.stat().st_uid != os.geteuid():
            raise LabError(f"{root} belongs to somebody else")
        try:
            lock = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # the last lab has just gone, and the directory with it
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:
            return lock
        os.close(lock)


def _take(path: Path) -> int | None:
    lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock
