"""The load of each machine, as files beside the journal: anybody may read them at any time.

The newest is one small file a machine, replaced at every beat. The series is another one, a line a sample:
every ten seconds for a day, then by the minute for a week.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from evalfleet.files import replace
from evalfleet.model import SECOND, Micros, decodable
from evalfleet.names import safe_name

_Id = TypeVar("_Id", bound=str)
FOLDER = ".samples"
SERIES = ".series"
EVERY_S = 10.0
FINE_S = 86_400.0
"""So long each sample of the series is kept; of older ones, their mean by the minute."""
COARSE_S = 7 * 86_400.0
TIDY_LINES = 2000
"""The series is made shorter again after so many new lines."""


class JobOutput(Struct, frozen=True):
    """How much a job has written, and since when it has not written more."""

    written: int
    """Bytes of its log, and of the list of its model calls."""
    grew_at: Micros


ENGINE_DOWN = -1
"""So many containers has an engine that is there and does not answer."""


class Load(NamedTuple):
    """How busy a machine is; CPU, memory and disk as shares from 0 to 1. None: it does not tell."""

    cpu: float
    memory: float
    disk: float
    received: float | None = None
    """Bytes a second, over its network, since the sample before."""
    sent: float | None = None
    containers: int | None = None
    """Those that run, or `ENGINE_DOWN`."""


class Newest(Struct, frozen=True, omit_defaults=True):
    """The newest that a machine has told of itself, with the fields of `Load`."""

    cpu: float
    memory: float
    disk: float
    at: Micros = 0
    jobs: Mapping[str, JobOutput] = {}
    received: float | None = None
    sent: float | None = None
    containers: int | None = None


class Sample(NamedTuple):
    """One line of the series: a time, and the fields of `Load`."""

    at: Micros
    cpu: float
    memory: float
    disk: float
    received: float | None = None
    sent: float | None = None
    containers: int | None = None


class Samples:
    """What machines tell of their load, kept under `home`. A sample that cannot be kept is not worth a
    complaint."""

    def __init__(self, home: Path) -> None:
        self._folder = home / FOLDER
        self._jobs: dict[str, dict[str, JobOutput]] = {}
        self._kept_at: dict[str, Micros] = {}
        self._lines: dict[str, int] = {}

    def keep(
        self,
        machine: str,
        load: Load,
        written: Mapping[str, int] | None = None,
        now: Micros | None = None,
    ) -> None:
        """`written`: by each job that runs there, as in `JobOutput`; None: nobody knows, so what is known of
        them stays. `now` is the wall clock's, unless a test says so."""
        at = time.time_ns() // 1000 if now is None else now
        with contextlib.suppress(OSError):
            self._folder.mkdir(exist_ok=True)
            jobs = self._outputs(machine, written, at)
            newest = Newest(**load._asdict(), at=at, jobs=jobs)
            replace(self._path(machine), msgspec.json.encode(newest))
            if not 0 <= at - self._kept_at.get(machine, 0) < EVERY_S * SECOND:  # clocks jump both ways
                self._kept_at[machine] = at
                self._append(machine, Sample(at, *load))

    def drop(self, machine: str) -> None:
        """The machine is gone. What it told stays in its series."""
        for known in (self._jobs, self._kept_at, self._lines):
            known.pop(machine, None)
        with contextlib.suppress(OSError):
            self._path(machine).unlink()

    def _outputs(self, machine: str, written: Mapping[str, int] | None, at: Micros) -> dict[str, JobOutput]:
        before = self._jobs.get(machine)
        if before is None:  # an earlier controller may have seen since when a job is quiet
            newest = read_newest(self._folder.parent, machine)
            before = {} if newest is None else dict(newest.jobs)
        if written is None:
            return before
        found: dict[str, JobOutput] = {}
        for job, size in written.items():
            known = before.get(job)
            found[job] = known if known is not None and known.written == size else JobOutput(size, at)
        self._jobs[machine] = found
        return found

    def _append(self, machine: str, sample: Sample) -> None:
        path = self._path(machine, SERIES)
        with open(path, "a", encoding="ascii") as file:
            file.write(_line(sample))
        self._lines[machine] = self._lines.get(machine, 0) + 1
        if self._lines[machine] >= TIDY_LINES:
            self._lines[machine] = 0
            thinned = thin(read_series(self._folder.parent, machine), sample.at)
            replace(path, "".join(map(_line, thinned)).encode())

    def _path(self, machine: str, ending: str = ".json") -> Path:
        return self._folder / f"{safe_name(machine)}{ending}"


def read_newest(home: Path, machine: str) -> Newest | None:
    """What the machine has told last; None if nothing that can be read."""
    try:
        return msgspec.json.decode(
            (home / FOLDER / f"{safe_name(machine)}.json").read_bytes(), type=decodable(Newest)
        )
    except (OSError, msgspec.MsgspecError):
        return None


def read_loads(home: Path, machines: Iterable[_Id]) -> dict[_Id, Newest]:
    """What each of these machines has told last, where there is anything that can be read."""
    if not (home / FOLDER).is_dir():
        return {}
    return {machine: newest for machine in machines if (newest := read_newest(home, machine)) is not None}


def read_series(home: Path, machine: str, last_bytes: int | None = None) -> list[Sample]:
    """All that is kept of what the machine told, or the end of it, oldest first.

    Lines that cannot be read are left out.
    """
    try:
        with open(home / FOLDER / f"{safe_name(machine)}{SERIES}", "rb") as file:
            if last_bytes is not None and file.seek(0, os.SEEK_END) > last_bytes:
                file.seek(-last_bytes, os.SEEK_END)
                file.readline()  # its beginning is missing
            else:
                file.seek(0)
            text = file.read().decode("ascii", "replace")
    except OSError:
        return []
    samples: list[Sample] = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            at, cpu, memory, disk, *more = line.split()
            received, sent, containers = (None if word == "-" else float(word) for word in more or "---")
            count = None if containers is None else int(containers)
            samples.append(Sample(int(at), float(cpu), float(memory), float(disk), received, sent, count))
    return samples


def thin(samples: list[Sample], now: Micros) -> list[Sample]:
    """A day of all samples, and before that a week of minutes' means. What is of the future is left out."""
    fine, coarse = now - round(FINE_S * SECOND), now - round(COARSE_S * SECOND)
    minutes: dict[int, list[Sample]] = {}
    for sample in samples:
        if coarse <= sample.at < fine:
            minutes.setdefault(sample.at // (60 * SECOND), []).append(sample)
    older = [_mean(minutes[minute]) for minute in sorted(minutes)]
    newer = [sample for sample in samples if fine <= sample.at <= now]
    return [*older, *sorted(newer, key=lambda sample: sample.at)]


def _mean(samples: list[Sample]) -> Sample:
    def mean(values: Iterable[float | None]) -> float:
        known = [value for value in values if value is not None]
        return round(sum(known) / len(known), 3) if known else 0.0

    first, last = samples[0], samples[-1]
    return Sample(
        first.at,
        mean(sample.cpu for sample in samples),
        mean(sample.memory for sample in samples),
        mean(sample.disk for sample in samples),
        None if last.received is None else mean(sample.received for sample in samples),
        None if last.sent is None else mean(sample.sent for sample in samples),
        last.containers,
    )


def _line(sample: Sample) -> str:
    return (
        " ".join([str(sample.at), *("-" if value is None else f"{value:g}" for value in sample[1:])]) + "\n"
    )
