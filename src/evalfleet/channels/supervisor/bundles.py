"""Bundles: the files of benchmarks. They are verified when a run comes, and again before each attempt.

A controller says what each file is (SHA-256, and whether it can be executed). What set-up changed in
them is recorded after it. Where jobs are users of their own they cannot write there. Elsewhere a changed file
is found, unless the job that changed it changed this record, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat

from .files import hasher, make_folder, read_file, sha256, write_atomic
from .parcel import BadParcel, Unpacker

TYPE_CHECKING = False  # importing typing would cost 3 ms
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

FOLDER = "seals"
CHUNK = 1 << 20


def content(path: str) -> list[Any]:
    """Return [SHA-256, whether its owner can execute it]. No regular file gives what no file has."""
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
    """Return what changes whenever a file's content does. Only the kernel writes its last part."""
    about = os.lstat(path)
    return about.st_ino, about.st_mode, about.st_size, about.st_mtime_ns, about.st_ctime_ns


def has_bundle(digest: str) -> bool:
    """Return True if a bundle is here. Raises ValueError for what is no name."""
    if "/" in digest or digest.startswith(".") or digest.endswith(".tmp") or not digest:
        raise ValueError(f"no name for a bundle: {digest}")
    return os.path.isdir("bundles/" + digest)


def unpack_bundle(digest: str, chunks: Iterable[bytes]) -> None:
    """Make a bundle of a parcel. It gets its name once it is whole. Raises OSError."""
    partial = f"bundles/{digest}-{os.getpid()}.tmp"
    os.mkdir(partial)
    unpacker = Unpacker(partial, shares=True)
    try:
        for chunk in chunks:
            unpacker.feed(chunk)
        if unpacker.end is None:
            raise BadParcel("it ended before it was whole")
        with contextlib.suppress(FileExistsError, IsADirectoryError):
            if not has_bundle(digest):
                os.rename(partial, "bundles/" + digest)
    finally:
        unpacker.close()
        if os.path.exists(partial):
            import shutil

            shutil.rmtree(partial, ignore_errors=True)


def folder_of(name: str) -> str:
    """Return the folder of a bundle. It is empty for no bundle, and `*` is the one that was prepared last."""
    if name == "*":
        with os.scandir("bundles") as entries:
            prepared = [
                (entry.stat().st_mtime, entry.path)
                for entry in entries
                if not entry.name.endswith((".tmp", ".part"))
                and not entry.name.startswith(("score-", "task-"))
            ]
        return max(prepared)[1] if prepared else ""
    if "/" in name or name.startswith("."):
        raise ValueError(f"no name for a bundle: {name}")
    return "bundles/" + name if name else ""


def more_folders(spec: dict[str, Any]) -> list[str]:
    """Return the folders of the bundles that a job has beside its benchmark's. A later one hides what others
    have."""
    names = (str(spec.get(key) or "") for key in ("task_bundle", "score_bundle"))
    return ["bundles/" + name for name in names if name and has_bundle(name)]


def _open_up(top: str) -> None:
    """Let every user read what is below a folder, and enter and run what its owner may."""
    for folder, folders, files in os.walk(top):
        for path in (folder, *(os.path.join(folder, name) for name in (*folders, *files))):
            with contextlib.suppress(OSError):
                mode = os.lstat(path).st_mode
                wanted = stat.S_IMODE(mode) | 0o044 | (0o011 if mode & 0o100 else 0)
                if not stat.S_ISLNK(mode) and stat.S_IMODE(mode) != wanted:
                    os.chmod(path, wanted)


class Bundles:
    """The bundles of a machine, whose directory is the working directory and `home`."""

    def __init__(self, home: str) -> None:
        self._home = home
        self._records: dict[str, dict[str, Any]] = {}
        self._looks: dict[str, dict[str, tuple[int, ...]]] = {}  # how files looked when they were last read
        self._holders: dict[str, str] | None = None  # content -> where a file of it is
        self._entries: dict[str, tuple[int, list[str]]] = {}
        self._opened: set[str] = set()

    # -- what jobs are given ---------------------------------------------------------------------

    def link(self, folder: str, work: str, over: bool = False) -> None:
        """Link what is in a bundle's folder. With `over`, replace links of the same name."""
        changed = os.stat(folder).st_mtime_ns
        entries = self._entries.get(folder)
        if entries is None or entries[0] != changed:
            entries = self._entries[folder] = (changed, os.listdir(folder))
        for name in entries[1]:
            if over and os.path.islink(f"{work}/{name}"):
                os.unlink(f"{work}/{name}")
            with contextlib.suppress(FileExistsError):  # an earlier start got this far
                os.symlink(f"{self._home}/{folder}/{name}", f"{work}/{name}")

    def open_up(self, folder: str) -> None:
        """Let every user read what is in a bundle's folder, and enter and run what its owner may."""
        if folder not in self._opened:
            _open_up(folder)
            self._opened.add(folder)

    def forget_opened(self) -> None:
        """Open bundles up again when they are next used: set-up has made files in one."""
        self._opened.clear()

    # -- whether they are as they must be --------------------------------------------------------

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
        """Record what set-up made of the files: that is what they must be from now on."""
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
                appearance = look(path)
            except OSError:
                return str(name)
            if looks.get(name) != appearance:
                if content(path) != expected:
                    return str(name)
                looks[name] = appearance
        return ""

    def found(self, files: dict[str, Any]) -> dict[str, str]:
        """Those of these files that a bundle has, and where. What is made of them is verified as all is."""
        if files and self._holders is None:
            self._holders = {}
            for bundle in os.listdir(FOLDER) if os.path.isdir(FOLDER) else ():
                self._note_holder(bundle)
        places: dict[str, str] = {}
        for name, expected in files.items():
            path = (self._holders or {}).get(json.dumps(expected), "")
            if path and os.path.isfile(path) and not os.path.islink(path):
                places[name] = path
        return places

    def _note_holder(self, bundle: str) -> None:
        record = self._record(bundle)
        if self._holders is None or record is None or not record.get("shared"):
            return
        for name, expected in record["files"].items():
            self._holders[json.dumps(expected)] = f"bundles/{bundle}/{name}"

    def drop(self, bundle: str) -> None:
        self._records.pop(bundle, None)
        self._looks.pop(bundle, None)
        self._entries.pop("bundles/" + bundle, None)
        self._opened.discard("bundles/" + bundle)
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
