"""What every kind of benchmark gives when it is loaded, and how one is made again from a plan.

Beside tasks, a kind may have an `Appliance`, which says what people can do by hand with machines that were
set up for it (`evalfleet pool do`, `reset`, `clean`, `vnc`, `screenshot`, `tunnel` and `status --probe` are
made of nothing else), and a reader and a writer of results as its own program leaves them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import msgspec
from msgspec import Struct

from evalfleet.model import (
    AttemptId,
    Broken,
    Bundle,
    Cause,
    Command,
    Ended,
    Grade,
    Isolation,
    Needs,
    Outcome,
    Plan,
    Scorer,
    Task,
    TaskId,
    Trajectory,
)
from evalfleet.ports import Answer, Benchmark, FileBenchmark, Graded, Grader, Guest, HasGuest, Stepped


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
    """A reader of results that another program made, for `evalfleet import`."""

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
    model_usd: float | None = None
    """What its models cost, as they were metered, else as it told itself. None: nobody knows."""
    metered: Mapping[str, Mapping[str, int]] = {}
    """Model -> its tokens (`input`, `cached`, `output`), as they were metered."""


class ResultWriter(Protocol):
    """A writer of results as the benchmark's own program would have left them, for `evalfleet report`."""

    @property
    def format(self) -> str:
        """What `--format` calls it."""
        ...

    def write(
        self, plan: Plan, tasks: Sequence[SettledTask], folder: Path, cost: Mapping[str, Any]
    ) -> Sequence[str]:
        """Write into a folder that is empty; return what there is to say about it. Raises OSError.

        `cost` is what the run has cost, as `results.json` tells it.
        """
        ...


class HostVerb(Struct, frozen=True):
    """A command that people may run on machines which nobody else uses meanwhile."""

    does: str
    """What it does, as in `reset: bring ... back`."""
    command: tuple[str, ...]
    limit_s: float
    """The longest that it may take."""
    says: Mapping[int, str]
    """Exit codes that mean success, and what is said then; `{machine}` is the machine's name."""
    asks: str = ""
    """What it deletes, if people must agree to that: `delete all of it`."""
    undoes: bool = False
    """After it, the machine is set up no more."""


class Screen(Struct, frozen=True):
    """What a machine shows, for people to look at. Ports are those of the machine's own loopback."""

    port: int
    """Where a browser finds it."""
    picture_port: int
    picture_path: str
    """Where a PNG of it is to be had from the guest itself."""
    picture: tuple[str, ...]
    """A command that prints a PNG, for a guest that hangs."""


class Appliance(Struct, frozen=True, kw_only=True):
    """What runs on a machine that was set up for a benchmark, and what can be asked of it.

    Its commands know nothing of a run's settings, and may be run on any machine: where nothing was set up,
    they end with the exit code `absent`.
    """

    what: str
    """What runs there, as people call it: `there is no ... on it`."""
    absent: int
    verbs: Mapping[str, HostVerb] = {}
    probe: tuple[str, ...] = ()
    """A command that tells by exit code 0 that it answers, and changes nothing."""
    rest: tuple[str, ...] = ()
    """A command that ends it before a disk is copied, and leaves what was set up as a new machine is to find
    it. It may be repeated."""
    screen: Screen | None = None
    tunnel: tuple[int, int] | None = None
    """What `pool tunnel` opens unless told otherwise: the first port to try here, and the machine's."""
    registry: Mapping[str, object] = {}
    """What `vm_pool_registry.json` says of such a machine."""
    ready_key: str = ""
    """The key by which it says that the machine is ready."""


class Loaded(Struct, frozen=True):
    """A benchmark as read. `spec` is plain data that a plan carries: `from_spec` makes the benchmark of it.

    `secrets` are names. `files` are the paths here that machines get. `warnings` are sentences for the user.
    `setup_s` is how long a machine may take to be set up, beside booting. `model_usd` is what a task's model
    may cost, least and most, if only experience tells. `tasks_missing` says why `tasks` is empty, and what to
    do: machines can be set up all the same. `setup_missing` says why a new machine could not be set up, and
    what to do; one that was set up before may do.
    """

    name: str
    spec: Mapping[str, Any]
    tasks: tuple[Task, ...]
    secrets: tuple[str, ...] = ()
    slots: int = 1
    files: tuple[Path, ...] = ()
    warnings: tuple[str, ...] = ()
    setup_s: float = 0.0
    model_usd: tuple[float, float] | None = None
    usual_s: Mapping[str, float] = {}
    """Domain -> the seconds that a task of it usually takes, for plans before there are runs; "" is every
    other domain."""
    tasks_missing: str = ""
    setup_missing: str = ""
    isolation: Isolation = ""
    """How its attempts must be kept apart; empty: as the place does."""
    model_keys: tuple[str, ...] = ()
    """Those of its secrets that are keys of models, if it says so: calls with them are metered."""
    model_urls: Mapping[str, str] = {}
    """The address of an API by the name of its key, with the path that its clients are told, where the
    benchmark's settings say it; elsewhere it is the vendor's."""
    unmeterable: str = ""
    """Why its model calls cannot be metered; empty if they can."""
    in_containers: bool = False
    """Its commands run in containers with a network of their own: a meter must be reached from there."""
    settings: Mapping[str, str] = {}
    """The keys of `--set` that its command reads, with their defaults, if its kind declares settings."""
    oracle: Loaded | None = None
    """The same benchmark with its own solutions in place of an agent."""
    settle: Callable[[tuple[Task, ...]], tuple[Task, ...]] | None = None
    """What becomes of the tasks once it is known which of them are chosen."""

    def settled(self, chosen: tuple[Task, ...]) -> tuple[Task, ...]:
        return chosen if self.settle is None else self.settle(chosen)


class MakeFromSpec(Protocol):
    """A function that makes a benchmark again, of the plain data that a plan carries."""

    def __call__(
        self, spec: Mapping[str, Any], /, *, model: str, agent: Mapping[str, str], settings: Mapping[str, str]
    ) -> Benchmark: ...


@dataclass(frozen=True)
class BenchmarkKind:
    """A kind of benchmarks, as its class declares it."""

    Settings: type[Struct]
    """Its keys in `[benchmarks.NAME]` and for `--set`. It forbids unknown fields."""
    load: Callable[[str, Any, Path, Path], Loaded]
    """Read a benchmark. Raises RequestError.

    It is given the name, the settings, the folder that relative paths in these are beside, and the home.
    """
    from_spec: MakeFromSpec
    declares_settings: bool = False
    """Each benchmark of the kind says itself what `--set` may give its command: see `Loaded.settings`.

    `load` then knows nothing of `--set`.
    """
    machine_names: str = "worker"
    """What machines are called that are made for it: this, and a number."""
    appliance: Appliance | None = None
    """What can be done by hand with machines that were set up for it."""
    result_reader: ResultReader | None = None
    """How results are read that another program made."""
    result_writer: ResultWriter | None = None
    """How results are written for the benchmark's own tools."""


class Repeated:
    """A benchmark of whose tasks a run has several: one for each model and repeat, `<task>@<model>~<k>`.

    Each model has a benchmark of its own, which sees the task it knows, and k as a variable. What machines
    need and get is alike for all of them.
    """

    def __init__(self, inners: Mapping[str, Benchmark]) -> None:
        """Model -> its benchmark; of one without a name, if the run has one model."""
        self._inners = dict(inners)
        self._first = next(iter(self._inners.values()))

    @classmethod
    def times(cls, inner: Benchmark, repeat: int) -> Benchmark | Self:
        return cls({"": inner}) if repeat > 1 else inner

    @property
    def inners(self) -> list[Benchmark]:
        return list(self._inners.values())

    def _of(self, task: Task) -> Benchmark:
        return self._inners.get(task.model, self._first)

    @staticmethod
    def origins(tasks: Sequence[Task]) -> list[Task]:
        """The tasks that the inner benchmark knows, each once."""
        return list({origin.id: origin for origin in map(_origin, tasks)}.values())

    @property
    def name(self) -> str:
        return self._first.name

    @property
    def needs(self) -> Needs:
        return self._first.needs

    @property
    def bundle(self) -> Bundle:
        return self._first.bundle

    @property
    def probe(self) -> Command | None:
        return self._first.probe

    @property
    def grader(self) -> Grader | None:
        inners = {model: inner for model, inner in self._inners.items() if isinstance(inner, Graded)}
        graders = {model: inner.grader for model, inner in inners.items() if inner.grader is not None}
        return _RepeatedGrader(graders) if graders else None

    @property
    def guest(self) -> Guest | None:
        return self._first.guest if isinstance(self._first, HasGuest) else None

    @property
    def steps(self) -> str:
        return self._first.steps if isinstance(self._first, Stepped) else ""

    def read_steps(self, data: bytes) -> Trajectory:
        return self._first.read_steps(data) if isinstance(self._first, Stepped) else Trajectory()

    def command(self, task: Task, attempt: AttemptId) -> Command:
        command = self._of(task).command(_origin(task), attempt)
        repeat = task.repeat or (0 if task.origin else task.id.rpartition("~")[2])
        more = {"EVALFLEET_REPEAT": str(repeat)} if repeat else {}
        return msgspec.structs.replace(command, env={**command.env, **more})

    def outcome(self, task: Task, ended: Ended, healthy: bool) -> Outcome:
        return self._of(task).outcome(_origin(task), ended, healthy)

    def keep(self, tasks: Sequence[Task], folder: Path, twins: Callable[[str], Path | None]) -> None:
        if isinstance(self._first, FileBenchmark):
            self._first.keep(self.origins(tasks), folder, twins)

    def with_kept(self, folder: Path) -> Repeated:
        return Repeated(
            {
                model: inner.with_kept(folder) if isinstance(inner, FileBenchmark) else inner
                for model, inner in self._inners.items()
            }
        )

    def check_files(self, tasks: Sequence[Task]) -> None:
        if isinstance(self._first, FileBenchmark):
            self._first.check_files(self.origins(tasks))

    def task_bundle(self, task: Task) -> Bundle:
        inner = self._of(task)
        return inner.task_bundle(_origin(task)) if isinstance(inner, FileBenchmark) else Bundle()

    def scorer(self, task: Task, attempt: AttemptId) -> Scorer | None:
        inner = self._of(task)
        return inner.scorer(_origin(task), attempt) if isinstance(inner, FileBenchmark) else None

    def scored(self, task: Task, ended: Ended, scorer: Ended) -> Outcome:
        inner = self._of(task)
        assert isinstance(inner, FileBenchmark)
        return inner.scored(_origin(task), ended, scorer)


class _RepeatedGrader:
    """A grader that shows each model's own the tasks that it knows, and the attempts of all their repeats."""

    def __init__(self, graders: Mapping[str, Grader]) -> None:
        self._graders = graders

    async def grade(
        self, answers: Sequence[Answer], scratch: Path, secrets: Mapping[str, str]
    ) -> AsyncIterator[tuple[AttemptId, Grade]]:
        one = len(self._graders) == 1
        for model, grader in self._graders.items():
            own = [answer for answer in answers if one or answer.task.model == model]
            of_origins = [msgspec.structs.replace(answer, task=_origin(answer.task)) for answer in own]
            if of_origins:
                async for attempt, grade in grader.grade(of_origins, scratch, secrets):
                    yield attempt, grade


def _origin(task: Task) -> Task:
    """The task as the benchmark knows it. In plans of earlier versions only the repeat's own id tells it."""
    return msgspec.structs.replace(task, id=TaskId(task.origin or task.id.rpartition("~")[0]))


class Bare:
    """What a pool's machines are made for before anybody says what they are for."""

    name = ""
    needs = Needs()
    bundle = Bundle()
    probe: Command | None = None

    def command(self, task: Task, attempt: AttemptId) -> Command:
        raise NotImplementedError("a pool runs no tasks")

    def outcome(self, task: Task, ended: Ended, healthy: bool) -> Outcome:
        return Broken(Cause.INTERNAL, "a pool runs no tasks")
