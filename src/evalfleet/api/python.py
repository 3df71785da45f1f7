"""What `import evalfleet` offers: the command line's verbs as functions, with errors in Python's words."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import re
import shlex
import warnings
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, get_type_hints

from evalfleet.errors import FleetError
from evalfleet.planning.flags import Count, Number, RunOptions, flags, word_of
from evalfleet.planning.request import RunRequest
from evalfleet.planning.values import parse_duration, parse_names
from evalfleet.planning.workspace import Workspace
from evalfleet.views.results import RunSummary

from . import home as homes
from . import pools as named
from . import resumption
from . import runs as starting
from .run import Run

if TYPE_CHECKING:
    from evalfleet.planning.plan import Resolved
    from evalfleet.views.compare import Comparison
    from evalfleet.views.fleet_documents import PoolDocument

PathArg = str | os.PathLike[str]
RunArg = str | Run
T = TypeVar("T")

Status = Literal["running", "left", "done", "stopped", "failed", "damaged"]


def run(benchmark: PathArg, *, home: PathArg | None = None, **options: Unpack[RunOptions]) -> Run:
    """Start a run and return at once: it goes on in a thread of this process until it ends.

    `run.wait()` or `await run` gives its results, `async for event in run` follows it.
    Nothing is started when the request is wrong: that raises evalfleet.RequestError.
    """
    with _python_words():
        workspace, request = _workspace(home), RunRequest(os.fspath(benchmark), **options)
        return _started(workspace, starting.resolve_request(workspace, request))


def resume(
    run: RunArg | None = None,
    *,
    only: Literal["broken"] | None = None,
    take_over: bool = False,
    with_new_files: bool = False,
    from_url: PathArg | None = None,
    budget: Number | None = None,
    max_duration: Number | None = None,
    workers: Count | None = None,
    env_file: PathArg | None = None,
    home: PathArg | None = None,
) -> Run:
    """Take up a run where it stopped (default: the latest), in a thread of this process.

    Unrun and unfinished tasks run; settled ones stay. `only="broken"` runs the broken ones again, and nothing
    else. `with_new_files` reads the benchmark again. `take_over` takes it from a controller that still lives.
    `from_url` is the store that has the run, which may be another computer's: it is taken over from there.
    """
    workspace = _workspace(home, run)

    async def begin() -> Run:
        found, order = await resumption.ready_to_resume(
            workspace,
            _name(run),
            tell=notes.append,
            only_broken=only == "broken",
            take_over=take_over,
            limits=resumption.new_limits(budget, max_duration, workers),
            env_file=None if env_file is None else os.fspath(env_file),
            with_new_files=with_new_files,
            from_url=None if from_url is None else os.fspath(from_url),
        )
        started = await starting.control(workspace, order, found)
        if not with_new_files:
            resumption.tell_of_changes(started, notes.append)
        return started

    notes: list[str] = []
    with _python_words():
        resumed = _in_a_thread(begin())
        _warn(notes)
        return resumed


def rerun(
    run: RunArg,
    tasks: str | Sequence[str] = (),
    *,
    only: str | Sequence[str] = (),
    name: str | None = None,
    keep: bool = False,
    budget: Number | None = None,
    max_duration: Number | None = None,
    workers: Count | None = None,
    env_file: PathArg | None = None,
    home: PathArg | None = None,
) -> Run:
    """Run tasks of an earlier run again, all or some, in a new run with the same settings and limits.

    `tasks` are ids, globs or ranges; `only` are outcomes: failed, broken, slow, unrun, passed.
    """
    from .rerun import resolve_rerun

    with _python_words():
        workspace = _workspace(home, run)
        resolved = resolve_rerun(
            workspace,
            _name(run) or "",
            (tasks,) if isinstance(tasks, str) else tuple(tasks),
            only=parse_names(only, "--only"),
            limits=resumption.new_limits(budget, max_duration, workers),
            new_name=name,
            keep=keep,
            env_file=None if env_file is None else os.fspath(env_file),
        )
        return _started(workspace, resolved)


def open(name: str | None = None, *, home: PathArg | None = None) -> Run:
    """A past or live run by its name, or by a beginning that only one has; without one, the latest."""
    with _python_words():
        return starting.open_run(_workspace(home), name)


def runs(
    *,
    benchmark: str | None = None,
    model: str | None = None,
    status: Status | None = None,
    since: Number | None = None,
    home: PathArg | None = None,
) -> list[RunSummary]:
    """The runs of the home, newest first, each in a few figures. `since`: started so long ago, or later."""
    with _python_words():
        since_s = None if since is None else parse_duration(since, "--since")
        wanted = {"benchmark": benchmark, "model": model, "status": status}
        return homes.list_runs(_workspace(home), since_s=since_s, **wanted)


def compare(first: RunArg, *others: RunArg, home: PathArg | None = None) -> list[Comparison]:
    """Each other run beside the first, task by task; of one run with several models, each model."""
    with _python_words():
        return starting.compare_runs(_workspace(home, first), [_name(run) or "" for run in (first, *others)])


def pools(*, home: PathArg | None = None) -> list[PoolDocument]:
    """The pools of the home, newest first, with their machines: what `pool ls --json` prints."""
    from .documents import pool_document

    with _python_words():
        workspace = _workspace(home)
        return [pool_document(view, workspace.now()) for view in named.pools(workspace)]


def _started(workspace: Workspace, resolved: Resolved) -> Run:
    doubts = _in_a_thread(starting.vet(resolved))
    _warn([*resolved.warnings, *doubts])
    return _in_a_thread(starting.start(workspace, resolved))


def _in_a_thread(work: Coroutine[Any, Any, T]) -> T:
    """In a notebook, this thread has an event loop already."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def _warn(notes: Sequence[str]) -> None:
    """What the command line says as notes. They point at whoever called a function of this module."""
    for note in notes:
        warnings.warn(in_python(note), stacklevel=4)


def _name(run: RunArg | None) -> str | None:
    return run.name if isinstance(run, Run) else run


def _workspace(home: PathArg | None, run: RunArg | None = None) -> Workspace:
    """Here; with the home that is named, or that a run is in."""
    if home is None:
        return Workspace.here(run.home if isinstance(run, Run) else None)
    return Workspace.here(Path(home).expanduser().absolute())


# -- Python's words ----------------------------------------------------------------------------------


@contextmanager
def _python_words() -> Generator[None]:
    """Errors name parameters and functions instead of flags and commands."""
    try:
        yield
    except FleetError as err:
        err.args = (in_python(str(err)),)
        raise


def in_python(text: str) -> str:
    """What was written for the command line, for who calls a function.

    `--task-budget` becomes `task_budget`, `--set 'x'` settings['x'], and `evalfleet resume R` the call.
    """
    text = re.sub(r"`evalfleet ([a-z]+(?: ls)?)((?: [^` ]+)*)`", _call, text)
    text = re.sub(rf"`{_FLAG}[ =]([^`]+)`", lambda m: f"`{_option(m[1])}={_value(m[2])}`", text)
    text = re.sub(rf"{_FLAG} ('[^']*')", _item, text)
    text = re.sub(rf"{_FLAG} ([A-Z]+)\b", lambda m: f"{_option(m[1])}={m[2]}", text)
    return re.sub(rf"(?<!`){_FLAG}(?!`)", lambda m: f"`{_option(m[1])}`", text)


_FLAG = r"(?<![\w-])(-A|--[a-z][a-z-]*[a-z])(?![\w-])"
_CALLS = {
    "run": "evalfleet.run({})",
    "resume": "evalfleet.resume({})",
    "ls": "evalfleet.runs({})",
    "pool ls": "evalfleet.pools({})",
    "compare": "evalfleet.compare({})",
    "show": "evalfleet.open({}).results()",
    "cancel": "evalfleet.open({}).cancel()",
}


@functools.cache
def _options() -> dict[str, str]:
    """A flag -> the parameter that it is in Python."""
    return {flag.short or f"--{word_of(name).replace('_', '-')}": name for name, flag in flags().items()}


def _option(flag: str) -> str:
    return _options().get(flag) or flag.removeprefix("--").replace("-", "_")


def _value(text: str) -> str:
    return text if text.isupper() else repr(text)


def _item(match: re.Match[str]) -> str:
    """A flag and a quoted word. Of a table it is the key, of all else the value."""
    option = _option(match[1])
    is_table = option in flags() and flags()[option].kind == "table"
    return f"{option}[{match[2]}]" if is_table else f"{option}={match[2]}"


def _call(match: re.Match[str]) -> str:
    if match[1] not in _CALLS:
        return match[0]
    words, arguments = shlex.split(match[2]), list[str]()
    if match[1] == "resume":  # where `--from` names a store, and no earlier run
        words = ["--from-url" if word == "--from" else word for word in words]
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            arguments.append(_value(word))
        elif words and not words[0].startswith("-"):
            arguments.append(f"{_option(word)}={_value(words.pop(0))}")
        else:
            arguments.append(f"{_option(word)}=True")
    return f"`{_CALLS[match[1]].format(', '.join(arguments))}`"


# -- help --------------------------------------------------------------------------------------------


def _spell_out(function: Callable[..., object]) -> None:
    """Give `help(run)`, and editors that ask at run time, every parameter of the table of flags."""
    hints = get_type_hints(RunOptions)
    kinds = inspect.Parameter
    parameters = [
        each for each in inspect.signature(function).parameters.values() if each.kind is not kinds.VAR_KEYWORD
    ]
    parameters += [kinds(name, kinds.KEYWORD_ONLY, default=None, annotation=hints[name]) for name in flags()]
    setattr(function, "__signature__", inspect.Signature(parameters, return_annotation=Run))  # noqa: B010
    width = max(map(len, flags()))
    lines = [f"    {name:<{width}}  {in_python(flag.help)}" for name, flag in flags().items()]
    function.__doc__ = "\n".join([(function.__doc__ or "").rstrip(), "", *lines, ""])


_spell_out(run)
