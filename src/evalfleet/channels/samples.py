"""The newest load of each machine, as files beside the journal: anybody may read them at any time."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from evalfleet.names import safe_name

FOLDER = ".samples"


class Samples:
    """One file a machine under `home`. A sample that cannot be kept is not worth a complaint."""

    def __init__(self, home: Path) -> None:
        self._folder = home / FOLDER

    def keep(self, machine: str, cpu: float, memory: float, disk: float) -> None:
        path = self._path(machine)
        part = path.with_suffix(".part")
        with contextlib.suppress(OSError):
            self._folder.mkdir(exist_ok=True)
            part.write_bytes(msgspec.json.encode({"cpu": cpu, "memory": memory, "disk": disk}))
            os.replace(part, path)

    def drop(self, machine: str) -> None:
        with contextlib.suppress(OSError):
            self._path(machine).unlink()

    def _path(self, machine: str) -> Path:
        return self._folder / f"{safe_name(machine)}.json"
