"""HAL's benchmarks: tasks and grades from HAL itself, its agents unchanged, on machines of any place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import msgspec
from msgspec import Struct, field

from evalfleet.benchmarks.containers import ContainerSettings, image_step, in_container
from evalfleet.benchmarks.loaded import Loaded
from evalfleet.benchmarks.results import outcome_of
from evalfleet.errors import RequestError
from evalfleet.model import (
    Answered,
    AttemptId,
    Bundle,
    Command,
    Ended,
    Measured,
    Needs,
    Outcome,
    Scorer,
    SetupStep,
    Task,
    TaskId,
    decodable,
)
from evalfleet.ports import Grader

from .checkout import HalAnswer, listing, parsed_args
from .contents import Contents, agent_files, kept_bundle, task_files
from .costs import ModelPrice, TokenUsage, price_table, priced
from .elsewhere import check_place
from .grader import FileGrader, HalGrader
from .settings import TIMEOUT_S, WANDB_LIBRARY, HalSettings, own_python, python_version, resolved
from .tree import HalResultReader, HalResultWriter

HOST = Path(__file__).parent / "host"
READY_S = 600.0
"""For copying a task's files before the agent starts, and what it left after it has ended."""
SETUP_S = 3600.0
PROGRAM, TASK = "hal", "hal_task"
"""The folders of a machine's bundles."""
ARGS, PRICES, TASKS = "agent_args.json", "prices.json", "tasks.json"
"""What a run keeps beside those, and no machine gets."""
_COSTS = ("total_cost", "cost_usd", "cost")
_MOST_METRICS = 200


class HalSpec(Struct, frozen=True):
    """What makes the benchmark again."""

    settings: HalSettings
    digest: str
    """Of the agent and the program that runs it."""
    root: str
    """HAL's checkout, whose commit the run records."""
    has_packages: bool = False
    """An environment is made for the agent."""
    runs_script: bool = False
    needs: Needs = Needs()
    base: str = ""
    """Where evalfleet.toml is looked for, which tells about places."""


class HalResult(Struct, frozen=True):
    """`result.json` as our program on the machine writes it; the agent could, too."""

    seconds: float
    timed_out: bool = False
    error: str = ""
    broken: str = ""
    metrics: Mapping[str, Any] = field(default_factory=dict[str, Any])
    usage: Mapping[str, TokenUsage] = field(default_factory=dict[str, TokenUsage])
    """Model -> its tokens, as far as what the agent left tells."""


class HalBenchmark:
    """HAL (Holistic Agent Leaderboard): tasks and graders of a checkout of hal-harness, and its agents."""

    Settings = HalSettings
    machine_names = "hal"
    result_reader = HalResultReader()
    result_writer = HalResultWriter()

    def __init__(
        self,
        spec: HalSpec,
        *,
        model: str = "",
        agent: Mapping[str, str] | None = None,
        kept: Path | None = None,
    ) -> None:
        self._spec = spec
        self._model = model
        self._agent = dict(agent or {})
        self._kept = kept
        self._bundles: dict[str, Bundle] = {}

    @classmethod
    def load(cls, name: str, settings: HalSettings, base: Path, home: Path) -> Loaded:
        settings = resolved(settings, base, f"benchmark {name!r}")
        check_place(settings, base)
        told = listing(settings)
        if not told.tasks:
            raise RequestError(f"HAL lists no tasks for {settings.benchmark}")
        installs = not (own_python(settings) or settings.image)
        wanted = settings.wandb or python_version(settings) or _names_packages(Path(settings.agent_dir))
        has_packages = installs and bool(wanted)
        runs_script = settings.setup_script and bool(told.setup_script)
        spec = HalSpec(settings, "", settings.hal_repo, has_packages, runs_script, base=str(base.resolve()))
        spec = msgspec.structs.replace(spec, digest=_program(spec).digest(_steps(spec)))
        secrets = (*settings.secrets, *settings.grader_secrets, settings.image_token)
        return Loaded(
            name=f"hal-{settings.benchmark}",
            spec=msgspec.to_builtins(spec),
            tasks=tuple(
                Task(TaskId(task), settings.benchmark, timeout_s=TIMEOUT_S, ready_s=READY_S)
                for task in told.tasks
            ),
            secrets=tuple(filter(None, dict.fromkeys(secrets))),
            in_containers=bool(settings.image),
            files=(Path(settings.agent_dir),),
            warnings=tuple(_warnings(settings, told)),
            setup_s=SETUP_S if has_packages or runs_script or settings.image else 0.0,
            settle=lambda chosen: tuple(
                _settled(settings, told, task) for task in _fit(settings, told, chosen)
            ),
        )

    @classmethod
    def from_spec(
        cls, spec: Mapping[str, Any], *, model: str, agent: Mapping[str, str], settings: Mapping[str, str]
    ) -> HalBenchmark:
        return cls(msgspec.convert(spec, decodable(HalSpec)), model=model, agent=agent)

    @property
    def name(self) -> str:
        return f"hal-{self._spec.settings.benchmark}"

    @property
    def needs(self) -> Needs:
        return self._spec.needs

    # -- what machines get -------------------------------------------------------------------------

    def keep(self, tasks: Sequence[Task], folder: Path, twins: Callable[[str], Path | None]) -> None:
        """The agent, its arguments as HAL reads them, and each task as HAL gives it to agents."""
        settings = self._spec.settings
        _keep(_program(self._spec), self._spec.digest, folder, twins, _steps(self._spec))
        told = listing(settings)
        for task in tasks:
            contents = _contents(settings, told, task.id)
            _keep(contents, task.own["digest"], folder, twins)
        (folder / ARGS).write_bytes(msgspec.json.encode(self._given_args()))
        if settings.tasks_file:
            (folder / TASKS).write_bytes(Path(settings.tasks_file).read_bytes())
        (folder / PRICES).write_bytes(msgspec.json.encode(price_table(Path(settings.hal_repo))))

    def with_kept(self, folder: Path) -> HalBenchmark:
        return HalBenchmark(self._spec, model=self._model, agent=self._agent, kept=folder)

    def check_files(self, tasks: Sequence[Task]) -> None:
        _ = self.bundle
        for task in tasks:
            self.task_bundle(task)

    @cached_property
    def bundle(self) -> Bundle:
        return kept_bundle(PROGRAM, _steps(self._spec), self._spec.digest, "", self._kept)

    def task_bundle(self, task: Task) -> Bundle:
        if task.id not in self._bundles:
            self._bundles[task.id] = kept_bundle(TASK, (), task.own["digest"], "task-", self._kept)
        return self._bundles[task.id]

    def scorer(self, task: Task, attempt: AttemptId) -> Scorer | None:
        return None

    def scored(self, task: Task, ended: Ended, scorer: Ended) -> Outcome:
        return self.outcome(task, ended, True)

    @property
    def probe(self) -> Command | None:
        return None

    # -- an attempt ----------------------------------------------------------------------------------

    @cached_property
    def args(self) -> dict[str, Any]:
        """What the agent's function is called with, beside its input."""
        if self._kept is not None and (self._kept / ARGS).is_file():
            args = msgspec.json.decode((self._kept / ARGS).read_bytes(), type=dict[str, Any])
        else:
            args = self._given_args()
        if self._model:
            args.setdefault("model_name", self._model)
        return {**args, "benchmark_name": self._spec.settings.benchmark}

    @cached_property
    def prices(self) -> Mapping[str, ModelPrice]:
        """HAL's own, as they were when the run was planned."""
        if self._kept is not None and (self._kept / PRICES).is_file():
            return msgspec.json.decode(
                (self._kept / PRICES).read_bytes(), type=decodable(dict[str, ModelPrice])
            )
        return price_table(Path(self._spec.settings.hal_repo))

    def _given_args(self) -> dict[str, Any]:
        return parsed_args(self._spec.settings, self._agent)

    def command(self, task: Task, attempt: AttemptId) -> Command:
        settings = self._spec.settings
        order = {
            "task": task.id,
            "function": settings.agent_function,
            "args": self.args,
            "timeout_s": task.timeout_s,
            "python": own_python(settings),
            "wandb": settings.wandb,
        }
        env = {"EVALFLEET_HAL": msgspec.json.encode(order).decode()}
        command = Command(("python3", "-S", f"{PROGRAM}/attempt.py"), env, settings.secrets)
        return in_container(command, settings.image, ContainerSettings()) if settings.image else command

    def outcome(self, task: Task, ended: Ended, healthy: bool) -> Outcome:
        """An answer, whatever it is worth: also a crash, and the time limit, go to HAL's grader."""
        if ended.result is None and ended.reason == "timed_out" and healthy:
            return Answered(seconds=ended.seconds)
        try:
            result = msgspec.json.decode(ended.result or b"", type=decodable(HalResult))
        except msgspec.MsgspecError:
            return outcome_of(task, ended, healthy)
        if result.broken:
            return outcome_of(task, ended, healthy)
        numbers = {key: float(value) for key, value in result.metrics.items() if _is_number(value)}
        costs = [numbers[key] for key in _COSTS if key in numbers and 0 <= numbers[key] < 1e6]
        steps = numbers.get("step_count", -1.0)
        tokens = {
            "in": sum(each.input for each in result.usage.values()),
            "cached": sum(each.cached for each in result.usage.values()),
            "out": sum(each.output for each in result.usage.values()),
        }
        measured = Measured(
            metrics=dict(list(numbers.items())[:_MOST_METRICS]), tokens=tokens if result.usage else {}
        )
        return Answered(
            num_steps=int(steps) if 0 <= steps < 1e9 else None,
            cost_usd=costs[0] if costs else priced(result.usage, self.prices),
            seconds=min(max(result.seconds, 0.0), ended.seconds),
            measured=measured if numbers or result.usage else None,
        )

    @property
    def grader(self) -> Grader | None:
        if self._spec.settings.tasks_file:
            kept = None if self._kept is None else self._kept / TASKS
            return FileGrader(Path(self._spec.settings.tasks_file), kept)
        return HalGrader(self._spec.settings, self.args, Path(self._spec.base), self.prices)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15


def _names_packages(agent: Path) -> bool:
    try:
        lines = (agent / "requirements.txt").read_text("utf-8", "replace").splitlines()
    except OSError:
        return False
    return any(line.partition("#")[0].strip() for line in lines)


def _program(spec: HalSpec) -> Contents:
    settings = spec.settings
    entries = {f"agent/{name}": path for name, path in agent_files(Path(settings.agent_dir)).items()}
    entries |= {name: HOST / name for name in ("attempt.py", "run_agent.py")}
    if spec.runs_script:
        entries["setup_script.sh"] = Path(listing(settings).setup_script)
    return Contents(PROGRAM, entries)


def _steps(spec: HalSpec) -> tuple[SetupStep, ...]:
    steps, settings = list[SetupStep](), spec.settings
    if settings.image:
        container = ContainerSettings()
        token, user = settings.image_token, settings.image_user
        hint = "put a token into a variable and name that, --set image_token=NAME"
        steps.append(image_step(container, [settings.image], token, user, program="python3", hint=hint))
    if spec.has_packages:
        version = python_version(settings)
        more = (*(("--python", version) if version else ()), *((WANDB_LIBRARY,) if settings.wandb else ()))
        words = ("python3", f"{PROGRAM}/attempt.py", "prepare", *more)
        steps.append(SetupStep("requirements", Command(words), SETUP_S))
    if spec.runs_script:
        steps.append(SetupStep("setup-script", Command(("bash", f"{PROGRAM}/setup_script.sh")), SETUP_S))
    return tuple(steps)


def _contents(settings: HalSettings, told: HalAnswer, task: str) -> Contents:
    return Contents(TASK, task_files(task, told.tasks[task], Path(settings.hal_repo)))


def _keep(
    contents: Contents,
    planned: str,
    folder: Path,
    twins: Callable[[str], Path | None],
    steps: tuple[SetupStep, ...] = (),
) -> None:
    top, prefix = (TASK, "task-") if planned.startswith("task-") else (PROGRAM, "")
    contents.keep(folder / planned, twins(planned))
    kept_bundle(top, steps, planned, prefix, folder)


def _settled(settings: HalSettings, told: HalAnswer, task: Task) -> Task:
    digest = _contents(settings, told, task.id).digest()
    matched = settings.gpu_tasks == "match" and _wants_gpu(told.tasks[task.id])
    return msgspec.structs.replace(
        task, own={"digest": f"task-{digest}"}, needs=Needs(gpus=1) if matched else None
    )


def _fit(settings: HalSettings, told: HalAnswer, chosen: Sequence[Task]) -> Sequence[Task]:
    wanting = [task.id for task in chosen if _wants_gpu(told.tasks[task.id])]
    if wanting and settings.gpu_tasks == "refuse":
        raise RequestError(
            f"{len(wanting)} of the chosen tasks need a GPU ({', '.join(wanting[:8])}): leave them out with "
            "--exclude, or say --set gpu_tasks=run where the machines have one"
        )
    return chosen


def _wants_gpu(task: object) -> bool:
    return isinstance(task, dict) and bool(cast("dict[str, Any]", task).get("gpu"))


def _warnings(settings: HalSettings, told: HalAnswer) -> list[str]:
    found = list[str]()
    if told.setup_script and not settings.setup_script:
        found.append(
            f"{settings.benchmark} has a set-up script, which HAL runs in containers and VMs and not on its "
            "own computer: --set setup_script=true runs it on each machine"
        )
    wanting = sum(map(_wants_gpu, told.tasks.values()))
    if wanting and settings.gpu_tasks == "match":
        many = "1 task asks for a GPU: --set gpu_tasks=run runs it anywhere"
        if wanting > 1:
            many = f"{wanting} tasks ask for a GPU: --set gpu_tasks=run runs them anywhere"
        found.append(f"of {settings.benchmark}, {many}, and --exclude leaves tasks out")
    return found
