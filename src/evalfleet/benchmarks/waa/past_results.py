"""What WAA's own client left behind, for `evalfleet import waa`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from evalfleet.benchmarks.past_results import PastResult, ResultFolder
from evalfleet.model import Broken, Cause, Outcome, Scored

from .reading import RESULT, Reading, read_task
from .trees import find_tasks


class WaaResultReader:
    """Reads result directories of WAA's client, of any number of workers."""

    result_file = RESULT

    def find(self, roots: Sequence[Path]) -> Sequence[ResultFolder]:
        return find_tasks(roots)

    def read(self, folder: Path) -> PastResult:
        reading = read_task(str(folder))
        return PastResult(_outcome(reading), reading.started, reading.seconds)


def _outcome(reading: Reading) -> Outcome:
    if reading.score is None:
        return Broken(Cause(reading.cause), reading.error)
    return Scored(
        reading.score,
        success=reading.score == 1.0,
        num_steps=reading.steps,
        error=reading.error or None,
        screenshots=reading.screenshots,
    )
