"""Folders that nobody needs any more: they are put aside at once, and removed when that harms no job."""

from __future__ import annotations

import contextlib
import os
import stat

from .files import CLEANER
from .processes import spawn

MOST_TRASH = 5000
SMALL_COUNT, SMALL_BYTES = 64, 1 << 20


class Trash:
    """The folder `trash`, and the processes that empty it, which are added to `helpers`: children of this
    process that are not jobs.

    Ext4 takes long to make files where others were just deleted: 0.2 ms each, measured, against 0.03. So a
    small folder waits in the trash until no job would notice; a big one is removed at once, by a process of
    its own.
    """

    def __init__(self, environ: dict[str, str]) -> None:
        self.helpers: set[int] = set()
        self._environ = environ
        self._named = 0
        self._waiting = 0  # small folders

    @property
    def is_full(self) -> bool:
        return self._waiting > MOST_TRASH

    def discard(self, folder: str) -> None:
        with contextlib.suppress(OSError):
            return os.rmdir(folder)  # many jobs leave nothing where they worked
        self._named += 1
        target = f"trash/{os.getpid()}-{self._named}"
        try:
            small = is_small(folder)
            os.chmod(folder, 0o700)
            os.rename(folder, target)
        except OSError:
            return  # it is gone, or the disk is in trouble; deleting the machine removes it
        if small:
            self._waiting += 1
        else:
            self._remove(target)

    def restore(self) -> None:
        """Go on with what processes that are gone were removing."""
        for name in os.listdir("."):
            if name.startswith("trash-"):
                self._remove(name)
        self._waiting = len(os.listdir("trash"))
        self.empty()

    def empty(self) -> None:
        if not self._waiting:
            return
        name = f"trash-{os.getpid()}-{self._named}"
        with contextlib.suppress(OSError):
            os.rename("trash", name)
            os.mkdir("trash")
            self._waiting = 0
            self._remove(name)

    def _remove(self, path: str) -> None:
        with contextlib.suppress(OSError):
            argv = ["sh", "-c", CLEANER, "evalfleet-clean", path]
            self.helpers.add(spawn(argv, self._environ, os.devnull))


def is_small(folder: str) -> bool:
    """Return True if so little is in a folder that it can wait. Raises FileNotFoundError."""
    count_left, bytes_left = SMALL_COUNT, SMALL_BYTES
    folders = [folder]
    try:
        while folders:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    about = entry.stat(follow_symlinks=False)
                    count_left -= 1
                    bytes_left -= about.st_size
                    if count_left < 0 or bytes_left < 0:
                        return False
                    if stat.S_ISDIR(about.st_mode):
                        folders.append(entry.path)
    except PermissionError:
        return False  # who knows
    return True
