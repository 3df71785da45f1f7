"""Results that another program made of a benchmark's tasks, as a kind of benchmark finds and reads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from evalfleet.model import Outcome


class ResultFolder(NamedTuple):
    """The files of one try at a task."""

    path: Path
    settings: tuple[tuple[str, str], ...]
    """With what it was made, by names of the benchmark's settings; empty where nothing tells."""
    model: str
    trial: str
    """Tries of one trial belong together."""
    domain: str
    task: str
    worker: str
    """Who made it: one worker made one try at a time."""


class PastResult(NamedTuple):
    """What the files of one try say."""

    outcome: Outcome
    began_s: float | None = None
    """Since 1970, if anything tells."""
    seconds: float | None = None
    """How long it took, if anything tells."""


class ResultReader(Protocol):
    """Reads results that another program made, for `evalfleet import`."""

    @property
    def result_file(self) -> str:
        """The name of the file that must be kept, whatever of the others is too much."""
        ...

    def find(self, roots: Sequence[Path]) -> Sequence[ResultFolder]:
        """All that these folders hold, by path. Raises RequestError when one of them holds nothing."""
        ...

    def read(self, folder: Path) -> PastResult:
        """What one try came to. Any files may be there: none of them raise."""
        ...
