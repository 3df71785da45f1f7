"""The files of a benchmark as they must be: verified when a run comes, and again before each attempt.

A controller says what each file is (SHA-256, and whether it can be executed). What set-up changed in them is
recorded after it. Where jobs are users of their own they cannot write there; elsewhere this finds what one of
them has changed, unless it changes this record, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat

from .files import hasher, make_folder, read_file, sha256, write_atomic

TYPE_CHECKING = False  # importing typing would cost 3 ms
if TYPE_CHECKING:
    from typing import Any

FOLDER = "seals"
CHUNK = 1 << 20
SETTLED_NS = 100_000_000
"""A file that was changed so shortly before it was read may be changed once more without a new time."""


def content(path: str) -> list[Any]:
    """[SHA-256, whether its owner can execute it]; of what is no regular file, something no file has."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return ["", False]
    try:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            return ["", False]
        total = hasher()
        while True:
            chunk = os.read(fd, CHUNK)
            if not chunk:
                return [total.hexdigest(), bool(about.st_mode & 0o100)]
            total.update(chunk)
    finally:
        os.close(fd)


def look(path: str) -> tuple[int, ...]:
    """What changes whenever a file's content does: nobody but the kernel writes its last part."""
    about = os.lstat(path)
    return about.st_ino, about.st_mode, about.st_size, about.st_mtime_ns, about.st_ctime_ns


class Seals:
    """The record of each bundle, and how its files looked when they were last read."""

    def __init__(self) -> None:
        self._records: dict[str, dict[str, Any]] = {}
        self._looks: dict[str, dict[str, tuple[int, ...]]] = {}
        self._holders: dict[str, str] | None = None  # content -> where a file of it is

    def verify(self, bundle: str, files: dict[str, Any], set_up: bool, shared: bool = False) -> str:
        """The name of a file that is not as the controller says; empty if all are.

        `set_up`: steps have run since the files were brought, and may have changed them. `shared`: there are
        no steps for it, so that other bundles may have its files, too.
        """
        origin = sha256(json.dumps(files, sort_keys=True).encode())
        record = self._record(bundle)
        if set_up and record is not None and record.get("origin") == origin:
            expected = record["files"]
        else:
            expected = files
        return self._keep(bundle, origin, expected, shared)

    def renew(self, bundle: str) -> None:
        """Set-up has run: what it made of the files is what they must be from now on."""
        record = self._record(bundle)
        if record is not None:
            now = {name: content(f"bundles/{bundle}/{name}") for name in record["files"]}
            self._keep(bundle, record["origin"], now, False)

    def changed(self, bundle: str) -> str:
        """The name of a file that is not as it was; empty if all are, or nobody has said how they must be."""
        record = self._record(bundle)
        if record is None:
            return ""
        looks = self._looks.setdefault(bundle, {})
        for name, expected in record["files"].items():
            path = f"bundles/{bundle}/{name}"
            try:
                seen = look(path)
            except OSError:
                return str(name)
            if looks.get(name) != seen:
                if content(path) != expected:
                    return str(name)
                looks[name] = seen
        return ""

    def found(self, files: dict[str, Any]) -> dict[str, str]:
        """Those of these files that a bundle has, and where. What is made of them is verified as all is."""
        if files and self._holders is None:
            self._holders = {}
            for bundle in os.listdir(FOLDER) if os.path.isdir(FOLDER) else ():
                self._note_holder(bundle)
        found: dict[str, str] = {}
        for name, expected in files.items():
            path = (self._holders or {}).get(json.dumps(expected), "")
            if path and os.path.isfile(path) and not os.path.islink(path):
                found[name] = path
        return found

    def _note_holder(self, bundle: str) -> None:
        record = self._record(bundle)
        if self._holders is None or record is None or not record.get("shared"):
            return
        for name, expected in record["files"].items():
            self._holders[json.dumps(expected)] = f"bundles/{bundle}/{name}"

    def drop(self, bundle: str) -> None:
        self._records.pop(bundle, None)
        self._looks.pop(bundle, None)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{FOLDER}/{bundle}")

    def _keep(self, bundle: str, origin: str, files: dict[str, Any], shared: bool) -> str:
        self._looks[bundle] = {}
        self._records[bundle] = {"origin": origin, "files": files, "shared": shared}
        wrong = self.changed(bundle)
        if not wrong:
            make_folder(FOLDER)
            write_atomic(f"{FOLDER}/{bundle}", json.dumps(self._records[bundle]))
            self._note_holder(bundle)
        return wrong

    def _record(self, bundle: str) -> dict[str, Any] | None:
        if bundle not in self._records:
            try:
                self._records[bundle] = json.loads(read_file(f"{FOLDER}/{bundle}") or b"")
            except ValueError:
                return None
        return self._records[bundle]
