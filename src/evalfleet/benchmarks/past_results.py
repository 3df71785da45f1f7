"""Results of a benchmark as its own program leaves them: read for imports, written for its own tools."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from evalfleet.model import Outcome, Plan


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


class SettledTask(NamedTuple):
    """A task of a run as far as it is settled, for a benchmark's own tools."""

    task: str
    domain: str
    score: float | None
    """None: it was not scored."""
    folder: Path
    """The files of the attempt that decided it, or of the last one; it may be missing."""


class ResultWriter(Protocol):
    """Writes a run's results as the benchmark's own program would have left them, for `evalfleet report`."""

    @property
    def format(self) -> str:
        """What `--format` calls it."""
        ...

    def write(self, plan: Plan, tasks: Sequence[SettledTask], folder: Path) -> Sequence[str]:
        """Write into a folder that is empty; return what there is to say about it. Raises OSError."""
        ...
