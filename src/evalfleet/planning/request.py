"""The first step of planning: flags, environment, profile and defaults are read into one value a flag."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as data_field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Unpack, cast

from msgspec import Struct, field

from evalfleet.errors import RequestError
from evalfleet.model import ScheduleName, Verdict
from evalfleet.names import hint
from evalfleet.toml_tables import expand, reason

from . import values
from .config import Config, config_of, env_file_of, environment, home_of
from .flags import Flag, RunOptions, flags, variables, word_of


class RunRequest:
    """What `evalfleet run` was given: a benchmark, and options of which only the names are checked yet."""

    def __init__(self, benchmark: str, **options: Unpack[RunOptions]) -> None:
        for name in options:
            if name not in flags():
                raise RequestError(f"run() has no parameter {name!r}; {hint(name, flags())}")
        self.benchmark = benchmark
        given = {name: value for name, value in options.items() if value is not None}
        self.options = cast("RunOptions", given)

    def but(self, **options: Unpack[RunOptions]) -> RunRequest:
        """The same request with other values for these options."""
        changed: RunOptions = {**self.options, **options}
        return RunRequest(self.benchmark, **changed)


class Flags(Struct, frozen=True, kw_only=True):
    """Every flag settled and checked; the defaults here are the built-in ones."""

    on: tuple[str, ...] = ("local",)
    workers: int | Literal["auto"] | None = None
    """None: all machines of places that list some, else one."""
    tasks: int | None = None
    seed: int = 0
    first: int | None = None
    task: tuple[str, ...] = ()
    domain: tuple[str, ...] = ()
    tag: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    repeat: int = 1
    model: tuple[str, ...] = ()
    set: Mapping[str, str] = field(default_factory=dict[str, str])
    agent: Mapping[str, str] = field(default_factory=dict[str, str])
    keep_calls: bool = False
    budget: float | None = None
    task_budget: float | None = None
    max_tokens: int | None = None
    max_duration: float | None = None
    deadline: float | None = None
    task_timeout: float | None = None
    attempts: int = 3
    schedule: ScheduleName = "dynamic"
    canary: int | None = None
    spot: bool = False
    mix: bool = False
    right_size: bool = False
    keep: bool = False
    allow_broken: Verdict = Verdict()
    fail_under: float | None = None
    strict: bool = False
    store: str = ""


class _Given(NamedTuple):
    """A raw value and who gave it."""

    value: Any
    where: str


_Layer = dict[str, _Given]
_CHOICE = frozenset({"tasks", "first", "task"})
"""Ways to choose tasks, of which a run has one: a nearer layer's replaces all of a farther one's."""


Purpose = Literal["run", "dry run", "forecast", "elsewhere", "setup"]
"""Only a run writes anything down. A forecast may lack what machines need, and neither it nor a run that will
start elsewhere needs the values of secrets. A set-up has no tasks."""


@dataclass(frozen=True)
class Options:
    """Everything that the user asked for, by flags, files and the environment."""

    request: RunRequest
    flags: Flags
    config: Config
    environ: Mapping[str, str] = data_field(repr=False)
    """With what `.env` files add: values of secrets, too."""
    env_file: Path | None
    cwd: Path
    home: Path
    purpose: Purpose = "run"


def read(
    request: RunRequest,
    *,
    environ: Mapping[str, str],
    cwd: Path,
    home: Path | None = None,
    purpose: Purpose = "run",
) -> Options:
    """Read flags, files and the environment. `home`: by default that of the environment and the folder."""
    request = with_listed_tasks(request, cwd)
    config = config_of(request.options.get("config"), environ, cwd)
    merged = environment(environ, cwd, config, request.options.get("env_file"))
    env_file = env_file_of(request.options.get("env_file"), environ, cwd)
    flags = settle(request, merged, config)
    return Options(request, flags, config, merged, env_file, cwd, home or home_of(environ, cwd), purpose)


def settle(request: RunRequest, environ: Mapping[str, str], config: Config) -> Flags:
    """Flags, then EVALFLEET_* variables, then the profile, then [defaults], then built in.

    `set` and `agent` are joined key by key; of everything else the nearest that was given counts.
    """
    layers = [_from_request(request), _from_environ(environ)]
    profile = request.options.get("profile") or environ.get("EVALFLEET_PROFILE", "")
    if profile:
        table = values.choose(profile, config.profiles, str(config.path or "no evalfleet.toml"), "profile")
        layers.append(_from_table(table, f"{config.path}: [profiles.{profile}]"))
    layers.append(_from_table(config.defaults, f"{config.path}: [defaults]"))
    by_word = {word_of(name): flag for name, flag in flags().items()}
    settled: dict[str, Any] = {}
    for layer in layers:
        choice_made = bool(_CHOICE & settled.keys())
        for key, given in layer.items():
            if key in _CHOICE and choice_made:
                continue
            value = _read(by_word[key], given)
            if key in ("set", "agent"):
                settled[key] = {**value, **settled.get(key, {})}
            else:
                settled.setdefault(key, value)
    return Flags(**settled)


def _read(flag: Flag, given: _Given) -> Any:
    if flag.kind == "count":
        return values.parse_count(given.value, given.where, flag.low, flag.high)
    if flag.kind == "strings":  # ids may hold commas, so a single string is a list of one
        single = isinstance(given.value, str)
        return values.parse_names([given.value] if single else given.value, given.where)
    return getattr(values, f"parse_{flag.kind}")(given.value, given.where)


def _from_request(request: RunRequest) -> _Layer:
    spelt = {word_of(name): value for name, value in request.options.items() if flags()[name].in_files}
    return {key: _Given(value, f"--{key.replace('_', '-')}") for key, value in spelt.items()}


def _from_environ(environ: Mapping[str, str]) -> _Layer:
    return {key: _Given(environ[name], name) for name, key in variables().items() if environ.get(name)}


def _from_table(table: Mapping[str, Any], where: str) -> _Layer:
    return {key: _Given(value, f"{where} key {key!r}") for key, value in table.items()}


# -- tasks that are named elsewhere than in flags --------------------------------------------------------


def with_listed_tasks(request: RunRequest, cwd: Path) -> RunRequest:
    """The request with what `--tasks-file` lists as if `--task` had said it."""
    listed = request.options.get("tasks_file")
    if listed is None:
        return request
    path = cwd / expand(listed)
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeError) as err:
        raise RequestError(f"--tasks-file {path} cannot be read ({reason(err)})") from None
    ids = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not ids:
        raise RequestError(f"--tasks-file {path} names no task; write one a line")
    return request.but(task_ids=(*request.options.get("task_ids", ()), *ids))


EarlierTasks = Callable[[str, Sequence[str]], Collection[str]]
"""An earlier run, and which outcomes (none: all) -> the benchmark's ids of its tasks. Raises RequestError."""


def nothing_earlier(run: str, only: Sequence[str]) -> Collection[str]:
    raise RequestError(f"--from {run!r}: there is no such run")


def earlier_tasks(request: RunRequest, earlier: EarlierTasks) -> Collection[str] | None:
    """Which tasks `--from` and `--only` leave to choose from; None: all."""
    only, run = request.options.get("only"), request.options.get("from_run")
    if run:
        return earlier(run, () if only is None else values.parse_names(only, "--only"))
    if only is not None:
        raise RequestError("--only chooses among the tasks of an earlier run; name it with --from RUN")
    return None
