"""WAA's `evaluation_examples_windows`, in a folder or as an image had it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

if TYPE_CHECKING:
    from evalfleet.images.overlay import Interest

FOLDER = "client/evaluation_examples_windows"
"""In the image."""
LIST = "test_all.json"
_LIST = re.compile(r"test_[^/]*\.json")
_DEFINITION = re.compile(r"examples[^/]*/[^/]+/[^/]+\.json")


class TaskFiles(Protocol):
    """Names are paths below it, with `/`."""

    @property
    def where(self) -> str:
        """For messages."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What to tell the user about where they come from."""
        ...

    def read(self, name: str) -> bytes:
        """Raises OSError."""
        ...

    def lists(self) -> list[str]:
        """Their names, without `.json`."""
        ...

    def has(self, name: str) -> bool: ...

    def has_folder(self, name: str) -> bool: ...


class Folder:
    """Of a checkout."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def where(self) -> str:
        return str(self._path)

    @property
    def notes(self) -> tuple[str, ...]:
        return ()

    def read(self, name: str) -> bytes:
        return (self._path / name).read_bytes()

    def lists(self) -> list[str]:
        return [each.stem for each in self._path.glob("test_*.json")]

    def has(self, name: str) -> bool:
        return (self._path / name).is_file()

    def has_folder(self, name: str) -> bool:
        return (self._path / name).is_dir()


class Held(Struct, frozen=True, omit_defaults=True):
    """What was read of an image: its lists, and which tasks it defines. `name` is the image's, or its file's.

    `doubt`: why it may be out of date.
    """

    name: str
    digest: str
    texts: Mapping[str, str]
    defined: frozenset[str]
    doubt: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(filter(None, (f"tasks: from {self.where}", self.doubt)))

    @property
    def where(self) -> str:
        return f"{self.name}@{self.digest}" if self.digest else self.name

    def read(self, name: str) -> bytes:
        if name not in self.texts:
            raise FileNotFoundError(name)
        return self.texts[name].encode()

    def lists(self) -> list[str]:
        return [name.removesuffix(".json") for name in self.texts]

    def has(self, name: str) -> bool:
        return name in self.defined

    def has_folder(self, name: str) -> bool:
        return any(each.startswith(f"{name}/") for each in self.defined)


def interest(name: str) -> Interest:
    """What is wanted of a file in an image."""
    if _LIST.fullmatch(name):
        return "content"
    return "name" if _DEFINITION.fullmatch(name) else None


def held(name: str, digest: str, files: Mapping[str, bytes]) -> Held:
    texts = {each: _text(data) for each, data in files.items() if _LIST.fullmatch(each)}
    return Held(name, digest, texts, frozenset(each for each in files if each not in texts))


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
