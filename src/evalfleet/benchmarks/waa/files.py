"""WAA's `evaluation_examples_windows`, in a checkout or as a container image has it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from msgspec import Struct

LIST = "test_all.json"


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


class Told(Struct, frozen=True):
    """The folder as the image `name` has it, told by a machine: its lists, and which tasks it defines."""

    name: str
    digest: str
    texts: Mapping[str, str]
    defined: frozenset[str]

    @property
    def notes(self) -> tuple[str, ...]:
        return (f"tasks: from {self.where}",)

    @property
    def where(self) -> str:
        return f"{self.name}@{self.digest}"

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
