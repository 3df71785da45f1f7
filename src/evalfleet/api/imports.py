"""Results that another program made, written down as a run that has ended."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from msgspec import structs

from evalfleet.benchmarks.loaded import PastResult, ResultFolder, ResultReader
from evalfleet.channels.artefacts import LEFT_OUT, STANDARD_CAPS, Caps, LeftOut, printable
from evalfleet.errors import RequestError
from evalfleet.events import (
    AttemptCollected,
    AttemptEnded,
    AttemptStarted,
    Event,
    MachineCondemned,
    MachineDeleted,
    MachineReady,
    MachineRequested,
    MachineUp,
    RunEnded,
    RunPlanned,
    TasksPlanned,
    TasksReopened,
)
from evalfleet.files import replace, to_json
from evalfleet.journal import Store
from evalfleet.model import (
    IMPORTED,
    SECOND,
    AttemptId,
    Collected,
    Limits,
    MachineId,
    Micros,
    Offer,
    Plan,
    Scored,
    Task,
    TaskId,
    after,
)
from evalfleet.names import (
    artefacts_folder,
    attempt_id,
    check_run_name,
    default_run_name,
    folder_of,
    machine_id,
)
from evalfleet.planning.plugins import KindFields, benchmark_kind, known
from evalfleet.planning.workspace import Workspace
from evalfleet.views.live import Scribe

from .run import Run
from .runs import CHUNK

Keep = Literal["first", "newest"]
"""Which score counts when a task has more than one."""


def import_results(
    workspace: Workspace,
    benchmark: str,
    roots: Sequence[Path],
    *,
    name: str | None = None,
    trial: str | None = None,
    keep: Keep | None = None,
    caps: Caps = STANDARD_CAPS,
) -> Run:
    """Make a run of the results in `roots`, and copy their files. Raises RequestError."""
    reader = _reader(benchmark)
    home, now = workspace.home, workspace.now()
    run = check_run_name(name) if name is not None else default_run_name(f"{benchmark}-import", now)
    tries = _chosen(reader.find(roots), reader, trial, keep)
    store = workspace.store()
    folder = _claimed(store, home, run)
    try:
        collected = {
            attempt: _copied(
                past.folder.path, folder / artefacts_folder(task, attempt), caps, reader.result_file
            )
            for task, some in tries.items()
            for attempt, past in numbered(task, some)
        }
        history = History(plan_of(run, benchmark, store.home_id, tries), tries, collected, now)
        store.create_past(run, now, history.events())
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    scribe = Scribe(home, store, run, is_newest=lambda: store.newest() == run, fields=KindFields())
    scribe.close()
    return Run(home, run)


def _reader(benchmark: str) -> ResultReader:
    reader = benchmark_kind(benchmark).result_reader
    if reader is None:
        able = ", ".join(_importable()) or "there is none"
        raise RequestError(f"results of {benchmark} cannot be imported; name a benchmark whose can: {able}")
    return reader


def _importable() -> list[str]:
    found: list[str] = []
    for name in sorted(known("benchmark")):
        with suppress(RequestError):  # a plug-in that cannot be imported reads nothing
            if benchmark_kind(name).result_reader is not None:
                found.append(name)
    return found


def _claimed(store: Store, home: Path, run: str) -> Path:
    """The run's folder, which nobody else has. Raises RequestError when the name is taken."""
    folder = folder_of(home, run)
    if run in {info.name for info in store.streams()}:
        raise RequestError(f"the name {run!r} is taken; choose another with --name")
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise RequestError(f"{folder} exists and is no run's: remove it, or choose another --name") from None
    return folder


# -- which of them: one configuration, and one score a task --------------------------------------


def _chosen(
    folders: Sequence[ResultFolder], reader: ResultReader, trial: str | None, keep: Keep | None
) -> dict[TaskId, list[PastAttempt]]:
    """The tries at each task, the one that settles it last. Raises RequestError when it must be asked."""
    some = _by_task(_one_configuration(_of_trial(folders, trial)))
    return _settled({task: _tries(its, reader) for task, its in some.items()}, keep)


def _of_trial(folders: Sequence[ResultFolder], trial: str | None) -> Sequence[ResultFolder]:
    if trial is None:
        return folders
    chosen = [folder for folder in folders if folder.trial == trial]
    if not chosen:
        there = ", ".join(sorted({folder.trial for folder in folders})[:12])
        raise RequestError(f"there is no trial {trial!r} in these results: there is {there}")
    return chosen


def _one_configuration(folders: Sequence[ResultFolder]) -> Sequence[ResultFolder]:
    known = sorted({(*(value for _, value in folder.settings), folder.model) for folder in folders})
    if len(known) > 1:
        names = ("/".join(filter(None, values)) for values in known[:4])
        shown = ", ".join(names) + (", ..." if len(known) > 4 else "")
        raise RequestError(
            f"these are results of {len(known)} configurations ({shown}), and a run has one: "
            "name the folder of one of them"
        )
    return folders


def _by_task(folders: Sequence[ResultFolder]) -> dict[TaskId, list[ResultFolder]]:
    """The results by task id, or by domain and id where two domains have the same one."""
    domains: dict[str, set[str]] = {}
    for folder in folders:
        domains.setdefault(folder.task, set()).add(folder.domain)
    found: dict[TaskId, list[ResultFolder]] = {}
    for folder in folders:
        unique = len(domains[folder.task]) == 1
        task = TaskId(folder.task if unique else f"{folder.domain}/{folder.task}")
        found.setdefault(task, []).append(folder)
    return found


def _tries(folders: Iterable[ResultFolder], reader: ResultReader) -> list[PastAttempt]:
    """In the order they were made, but one with a score last: with a score a task is settled."""
    tries = [PastAttempt(folder, reader.read(folder.path)) for folder in folders]
    return sorted(tries, key=lambda past: (past.is_scored, past.began_s, _natural(past.folder.trial)))


def _natural(trial: str) -> tuple[int, str]:
    return (int(trial), "") if trial.isdecimal() else (0, trial)


def _settled(tries: dict[TaskId, list[PastAttempt]], keep: Keep | None) -> dict[TaskId, list[PastAttempt]]:
    """One score a task. Which one it is, when there are several, is for the user to say."""
    twice = {task: some for task, some in tries.items() if sum(past.is_scored for past in some) > 1}
    if twice and keep is None:
        task, some = next(iter(twice.items()))
        trials = sorted({past.folder.trial for past in some if past.is_scored}, key=_natural)
        where = f"in trials {', '.join(trials)}" if len(trials) > 1 else "from several workers"
        raise RequestError(
            f"{len(twice)} of {len(tries)} tasks have more than one score ({task} has {where}): "
            "choose with --trial T, or with --keep first or --keep newest"
        )
    return {task: _with_one_score(some, keep or "first") for task, some in tries.items()}


def _with_one_score(tries: list[PastAttempt], keep: Keep) -> list[PastAttempt]:
    scored = [past for past in tries if past.is_scored]
    chosen = scored[:1] if keep == "first" else scored[-1:]
    return [*(past for past in tries if not past.is_scored), *chosen]


# -- their files ---------------------------------------------------------------------------------


def _copied(source: Path, into: Path, caps: Caps, first: str) -> Collected:
    """Copy plain files, `first` before the others, up to the caps; what stays behind is listed."""
    files = size = 0
    left_out: list[LeftOut] = []
    for folder, names, entries in os.walk(source):
        names.sort()
        target = into / os.path.relpath(folder, source)
        target.mkdir(parents=True, exist_ok=True)
        for name in sorted(entries, key=lambda name: (name != first, name)):
            path = Path(folder, name)
            shown = printable(os.path.relpath(path, source))
            bytes_ = path.lstat().st_size
            if reason := _unfit(path, files, size + bytes_, caps):
                left_out.append(LeftOut(shown, reason, bytes_))
                continue
            try:
                shutil.copy2(path, target / name, follow_symlinks=False)
            except PermissionError as err:
                left_out.append(LeftOut(shown, f"unreadable: {err.strerror}", bytes_))
                continue
            files, size = files + 1, size + bytes_
    if left_out:
        replace(into / LEFT_OUT, to_json(left_out))
    return Collected(files, size, len(left_out))


def _unfit(path: Path, files: int, bytes_: int, caps: Caps) -> str:
    if path.is_symlink() or not path.is_file():
        return "not a file"
    if path.name == LEFT_OUT:
        return "the name is evalfleet's own"
    return "too many files" if files >= caps.files else "too many bytes" if bytes_ > caps.bytes else ""


Dated = tuple[Micros, Event]


@dataclass(frozen=True)
class PastAttempt:
    """One try at a task, as its files tell it."""

    folder: ResultFolder
    result: PastResult

    @property
    def is_scored(self) -> bool:
        return isinstance(self.result.outcome, Scored)

    @property
    def began_s(self) -> float:
        return self.result.began_s or 0.0


def plan_of(run: str, benchmark: str, home_id: str, tries: Mapping[TaskId, Sequence[PastAttempt]]) -> Plan:
    """The plan that a run with these results would have had."""
    folder = next(iter(tries.values()))[0].folder
    return Plan(
        run=run,
        benchmark=benchmark,
        places=(IMPORTED,),
        model=folder.model,
        settings={key: value for key, value in folder.settings if value},
        home=home_id,
    )


def numbered(task: TaskId, tries: Sequence[PastAttempt]) -> list[tuple[AttemptId, PastAttempt]]:
    """An attempt is called after its trial, where trials are numbers and each was one try."""
    trials = [past.folder.trial for past in tries]
    plain = all(trial.isdecimal() and str(int(trial)) == trial for trial in trials)
    named = plain and len(set(trials)) == len(trials)
    numbers = [int(trial) for trial in trials] if named else range(len(tries))
    return [(attempt_id(task, number), past) for number, past in zip(numbers, tries, strict=True)]


class History:
    """Tries at tasks, as the events that a fleet would have recorded.

    A machine had one attempt at a time: where times overlap (clocks in whole seconds, copied files), an
    attempt is moved behind the one before it, and where they overlap by much, it had another machine.
    """

    OVERLAP = 5 * SECOND

    def __init__(
        self,
        plan: Plan,
        tries: Mapping[TaskId, Sequence[PastAttempt]],
        collected: Mapping[AttemptId, Collected],
        now: Micros,
    ) -> None:
        self._plan = plan
        self._tries = tries
        self._collected = collected
        self._now = now
        self._begun: set[TaskId] = set()
        self._free: dict[MachineId, Micros] = {}
        self._workers: dict[str, list[MachineId]] = {}
        self._events: list[Dated] = []

    def events(self) -> list[Dated]:
        """In order of time."""
        order = [
            (self._since(past.began_s), task, n)
            for task, some in self._tries.items()
            for n, past in enumerate(some)
        ]
        settled: dict[TaskId, Micros] = {}
        waiting: dict[TaskId, list[tuple[AttemptId, PastAttempt]]] = {
            task: numbered(task, some) for task, some in self._tries.items()
        }
        for began, task, _ in sorted(order):
            attempt, past = waiting[task].pop(0)
            settled[task] = self._attempt(task, attempt, past, max(began, settled.get(task, 0)))
        began, ended = min(at for at, _ in self._events), max(at for at, _ in self._events)
        for machine, free in self._free.items():
            self._events.append((free, MachineCondemned(machine, "the results were imported")))
            self._events.append((free, MachineDeleted(machine, free)))
        return [
            *self._head(began),
            *sorted(self._events, key=lambda dated: dated[0]),
            (ended, RunEnded("done")),
        ]

    def _head(self, at: Micros) -> list[Dated]:
        tasks = tuple(Task(task, some[0].folder.domain) for task, some in self._tries.items())
        chunks = [TasksPlanned(tasks[n : n + CHUNK]) for n in range(0, len(tasks), CHUNK)]
        limits = Limits(workers=len(self._free), attempts=1, attempts_ceiling=1)
        plan = structs.replace(self._plan, limits=limits)
        return [(at, RunPlanned(plan, len(tasks))), *((at, chunk) for chunk in chunks)]

    def _attempt(self, task: TaskId, attempt: AttemptId, past: PastAttempt, earliest: Micros) -> Micros:
        machine = self._machine(past.folder.worker, earliest)
        began = max(earliest, self._free[machine])
        seconds = past.result.seconds or 0.0
        ended = min(self._now, after(began, seconds))
        self._free[machine] = ended
        if task in self._begun:
            self._events.append((began, TasksReopened((task,))))
        self._begun.add(task)
        self._events += [
            (began, AttemptStarted(attempt, task, machine)),
            (ended, AttemptEnded(attempt, past.result.outcome, seconds)),
            (ended, AttemptCollected(attempt, self._collected[attempt])),
        ]
        return ended

    def _machine(self, worker: str, at: Micros) -> MachineId:
        its = self._workers.setdefault(worker, [])
        for machine in its:
            if self._free[machine] <= at + self.OVERLAP:
                return machine
        machine = machine_id(self._plan.run, self._plan.home, len(self._free) + 1)
        name = worker if not its else f"{worker}-{len(its) + 1}"
        its.append(machine)
        self._free[machine] = at
        self._events += [
            (at, MachineRequested(machine, name, Offer(IMPORTED, "worker"), self._now)),
            (at, MachineUp(machine)),
            (at, MachineReady(machine)),
        ]
        return machine

    def _since(self, seconds: float) -> Micros:
        return min(self._now, max(0, round(seconds * SECOND)))
