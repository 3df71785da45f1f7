"""The files of a graded job, made ready for the job that grades it: without what could lead that one astray.

All processes of the graded job are gone by then. Its links, pipes, sockets and devices are kept aside while
it is graded: an answer that is a link to what the grader expects must not be right. Where jobs are users of
their own, the files belong to the grader from then on, who sees them read-only.
"""

from __future__ import annotations

import contextlib
import os
import stat

TYPE_CHECKING = False  # importing typing would cost 3 ms
if TYPE_CHECKING:
    from collections.abc import Callable

MOST = 1_000_000
"""Files and folders; who leaves more is not graded."""


class Grading:
    """A graded job's folder, the folder for what is kept aside, and the two users. -1 is the supervisor's."""

    def __init__(self, folder: str, aside: str, owner: int, grader: int) -> None:
        self.folder = folder
        self.aside = aside
        self.owner = owner
        self.grader = grader

    def environ(self) -> dict[str, str]:
        return {"EVALFLEET_GRADED_OUT": self.folder + "/out", "EVALFLEET_GRADED_WORK": self.folder + "/work"}

    def shown(self) -> list[tuple[str, bool]]:
        return [(f"{self.folder}/{name}", True) for name in ("out", "work") if self._is_there(name)]

    def _is_there(self, name: str) -> bool:
        path = f"{self.folder}/{name}"
        return os.path.isdir(path) and not os.path.islink(path)

    def prepared(self) -> Callable[[], None]:
        """Make the files ready for the grader. Returns a call that puts back what was kept aside."""
        moved: list[tuple[str, str]] = []
        os.makedirs(self.aside, mode=0o700, exist_ok=True)
        left = MOST
        for name in ("out", "work"):
            if not self._is_there(name):
                continue
            for folder, folders, files in os.walk(f"{self.folder}/{name}"):
                left -= 1 + len(files)
                if left < 0:
                    raise OSError("the attempt left too many files to be graded")
                self._give(folder)
                for entry in (*folders, *files):
                    self._sort_out(f"{folder}/{entry}", moved)
                folders[:] = [entry for entry in folders if not os.path.islink(f"{folder}/{entry}")]

        def put_back() -> None:
            for path, kept in reversed(moved):
                with contextlib.suppress(OSError):
                    os.rename(kept, path)

        return put_back

    def _sort_out(self, path: str, moved: list[tuple[str, str]]) -> None:
        about = os.lstat(path)
        # a file of somebody else's with another name is a link, too
        foreign = about.st_nlink > 1 and self.owner >= 0 and about.st_uid != self.owner
        if stat.S_ISDIR(about.st_mode) or (stat.S_ISREG(about.st_mode) and not foreign):
            self._give(path)
        else:
            kept = f"{self.aside}/{len(moved)}"
            os.rename(path, kept)
            moved.append((path, kept))

    def _give(self, path: str) -> None:
        about = os.lstat(path)
        if stat.S_ISLNK(about.st_mode):
            return
        wanted = stat.S_IMODE(about.st_mode) & 0o777 | (0o700 if stat.S_ISDIR(about.st_mode) else 0o400)
        if stat.S_IMODE(about.st_mode) != wanted:
            os.chmod(path, wanted)
        if self.grader >= 0:
            os.chown(path, self.grader, self.grader, follow_symlinks=False)
