"""What was read of images, kept in the home: a second run does not read it again."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from msgspec import Struct

from evalfleet.images.manifests import DIGEST

from .files import LIST, Held

FOLDER = Path(".waa") / "tasks"
TOLD = Path(".waa") / "told"
"""What machines say of their images. Agents have worked there: it serves nobody else."""
NAMES = "names.json"


class Kept:
    """By digest; and which digest a name stood for the last time."""

    def __init__(self, home: Path | None, folder: Path = FOLDER) -> None:
        self._folder = None if home is None else home / folder

    def find(self, name: str, digest: str) -> Held | None:
        """Under this name. What cannot be read is not there."""
        path = self._path(digest)
        try:
            found = None if path is None else msgspec.json.decode(path.read_bytes(), type=Held)
        except (OSError, msgspec.MsgspecError):
            return None
        if found is None or found.digest != digest or LIST not in found.texts:
            return None
        return msgspec.structs.replace(found, name=name)

    def last(self, name: str) -> Held | None:
        """Of the image that had this name when it was looked up last."""
        digest = self._names().get(name, "")
        return self.find(name, digest) if digest else None

    def keep(self, held: Held) -> None:
        """A home that cannot be written is no reason to stop: it is read again next time."""
        path = self._path(held.digest)
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, held)
            _write(path.parent / NAMES, {**self._names(), held.name: held.digest})
        except OSError:
            return

    def _path(self, digest: str) -> Path | None:
        if self._folder is None or not DIGEST.fullmatch(digest):
            return None
        return self._folder / f"{digest.replace(':', '-')}.json"

    def _names(self) -> dict[str, str]:
        try:
            path = Path() if self._folder is None else self._folder / NAMES
            return msgspec.json.decode(path.read_bytes(), type=dict[str, str])
        except (OSError, msgspec.MsgspecError):
            return {}


def _write(path: Path, what: Struct | dict[str, str]) -> None:
    """Replaced as a whole: others may read it, or write it as well."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_bytes(msgspec.json.encode(what, order="deterministic"))
    fresh.replace(path)
