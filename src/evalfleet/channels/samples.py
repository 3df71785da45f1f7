"""The newest load of each machine, as files beside the journal: anybody may read them at any time."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from evalfleet.files import replace
from evalfleet.names import safe_name

FOLDER = ".samples"


class Samples:
    """One file a machine under `home`. A sample that cannot be kept is not worth a complaint."""

    def __init__(self, home: Path) -> None:
        self._folder = home / FOLDER

    def keep(self, machine: str, cpu: float, memory: float, disk: float) -> None:
        path = self._path(machine)
        with contextlib.suppress(OSError):
            self._folder.mkdir(exist_ok=True)
            replace(path, msgspec.json.encode({"cpu": cpu, "memory": memory, "disk": disk}))

    def drop(self, machine: str) -> None:
        with contextlib.suppress(OSError):
            self._path(machine).unlink()

    def _path(self, machine: str) -> Path:
        return self._folder / f"{safe_name(machine)}.json"
