"""The files below one folder of an image, as its layers leave them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from .streams import Stream, Unreadable
from .tars import Archive, Entry

Interest = Literal["content", "name"] | None
MOST_FILES = 100_000
MOST_FILE = 4 << 20
MOST_KEPT = 32 << 20
GONE, OPAQUE = ".wh.", ".wh..wh..opq"


class Overlay:
    """Layers come lowest first. `interest` says of a file, by its path below `root`, what is wanted of it."""

    def __init__(self, root: str, interest: Callable[[str], Interest]) -> None:
        self._root = root
        self._interest = interest
        self._files: dict[str, bytes] = {}

    @property
    def files(self) -> Mapping[str, bytes]:
        """Path below the root -> content; nothing for those of which only the name was wanted."""
        return self._files

    def add(self, stream: Stream) -> None:
        """Another layer on top. Raises Unreadable; then nothing of it counts."""
        archive = Archive(stream)
        layer = _Layer()
        for entry in archive:
            self._take(entry, archive, layer)
        below = {name: data for name, data in self._files.items() if not layer.hides(name)}
        files = {**below, **layer.files}
        if len(files) > MOST_FILES or sum(map(len, files.values())) > MOST_KEPT:
            raise self._too_much()
        self._files = files

    def _take(self, entry: Entry, archive: Archive, layer: _Layer) -> None:
        folder, _, base = entry.name.rpartition("/")
        if base == OPAQUE:
            self._hide(folder, layer)
        elif base.startswith(GONE):
            self._hide(f"{folder}/{base.removeprefix(GONE)}".lstrip("/"), layer)
        elif entry.kind != "folder":
            self._hide(entry.name, layer)  # what was a folder below is none any more
            name = self._below(entry.name)
            if name and (interest := self._interest(name)):
                self._keep(name, interest, entry, archive, layer)

    def _keep(self, name: str, interest: Interest, entry: Entry, archive: Archive, layer: _Layer) -> None:
        data: bytes | None = None
        if entry.kind == "file":
            data = archive.read(MOST_FILE) if interest == "content" else b""
        elif entry.kind == "hard" and (target := self._below(entry.target)):
            data = layer.files.get(target, self._files.get(target))
        if data is not None:
            layer.files[name] = data
            layer.size += len(data)
        if len(layer.files) > MOST_FILES or layer.size > MOST_KEPT:
            raise self._too_much()

    def _hide(self, path: str, layer: _Layer) -> None:
        """Remember it, if it is the root, above or below it."""
        name = self._below(path)
        if name is not None:
            layer.hidden.add(name)
        elif not path or self._root.startswith(f"{path}/"):
            layer.hidden.add("")
        if len(layer.hidden) > MOST_FILES:
            raise self._too_much()

    def _too_much(self) -> Unreadable:
        return Unreadable(f"there is more in /{self._root} than {MOST_FILES} files and {MOST_KEPT >> 20} MB")

    def _below(self, path: str) -> str | None:
        """The path as seen from the root; the root's own is empty."""
        if path == self._root:
            return ""
        return path.removeprefix(f"{self._root}/") if path.startswith(f"{self._root}/") else None


@dataclass
class _Layer:
    """What a layer adds; `hidden` of those below it is not seen any more, with all that is in it."""

    files: dict[str, bytes] = field(default_factory=dict[str, bytes])
    hidden: set[str] = field(default_factory=set[str])
    size: int = 0

    def hides(self, name: str) -> bool:
        parts = name.split("/")
        return any("/".join(parts[:n]) in self.hidden for n in range(len(parts) + 1))
