"""One run, past or live: how it goes, how it went, and how it is stopped."""

from __future__ import annotations

import asyncio
import getpass
import os
import socket
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from evalfleet.benchmarks.loaded import SettledTask
from evalfleet.benchmarks.steps import MOST_BYTES
from evalfleet.channels.artefacts import LOG, plain_opener
from evalfleet.clock import WallClock
from evalfleet.controller import Controller
from evalfleet.errors import RequestError
from evalfleet.events import Record, StopRequested
from evalfleet.journal import Store
from evalfleet.model import AttemptId, RunStatus, Step, TaskId, seconds_between
from evalfleet.names import SCORE, artefacts_folder, folder_of, hint
from evalfleet.planning.plan_parts import benchmark_of, result_writer_of
from evalfleet.ports import Stepped
from evalfleet.state import AttemptState, RunState
from evalfleet.views.follow import Follower
from evalfleet.views.lines import event_document
from evalfleet.views.model_costs import task_tokens
from evalfleet.views.progress import progress_entry, read_progress, step_row
from evalfleet.views.report import FORMATS
from evalfleet.views.results import origin_of, results, task_detail
from evalfleet.views.summary import exit_code

from .live_log import LiveLog

if TYPE_CHECKING:
    import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

    from evalfleet.views.documents import Cost, Results, StepRow, TaskDetail, TaskResult
    from evalfleet.views.spans import Span
    from evalfleet.views.terminal import TerminalView

Observer = Callable[[RunState, Sequence[Record]], None]


GRADER_SHOWN = 1000
LOOK_S = 0.1
"""How often a run that goes on is looked at."""
CLOSING_S = 5.0
"""Whoever waits for a run waits for so long after its end for its controller, which writes the results."""


def view_of(progress: bool | None) -> TerminalView | None:
    """What shows a run that goes on, if that is wanted; None: in a notebook it is."""
    from evalfleet.views.terminal import in_notebook, view_for

    return view_for() if progress or (progress is None and in_notebook()) else None


def flat(task: TaskResult) -> dict[str, Any]:
    """A task as one row: its tokens and metrics are columns, named as in the CSV report."""
    row: dict[str, Any] = {
        key: value for key, value in task.items() if key not in ("tokens", "metrics", "metadata")
    }
    row |= {f"tokens.{kind}": count for kind, count in task["tokens"].items()}
    row |= {f"metrics.{name}": number for name, number in task["metrics"].items()}
    return {**row, "metadata": task["metadata"]}


class Run:
    """A run, past or live, this process's or another's.

    `await run` waits for its results, and `async for event in run` follows it.
    """

    def __init__(
        self,
        home: Path,
        name: str,
        controller: Controller | None = None,
        follower: Follower | None = None,
    ) -> None:
        """`follower`: one that has read the run's journal already."""
        self.home = home
        self.name = name
        self._controller = controller
        self._follower = follower or self._new_follower()
        self._follower.poll()

    def controlled_by(self, controller: Controller) -> Run:
        """The run as this process's own. What was read of its journal is not read again."""
        return Run(self.home, self.name, controller, self._follower)

    def __repr__(self) -> str:
        return f"<evalfleet run {self.name!r}: {self.status}>"

    @property
    def folder(self) -> Path:
        return folder_of(self.home, self.name)

    @property
    def is_of_another_home(self) -> bool:
        """Return True if the run can be resumed only in the home that made it, where its machines are."""
        plan = self.state().plan
        here = Store.open(self.home, create=False, read_only=True).home_id
        return bool(plan.home) and plan.home != here and not plan.store

    @property
    def status(self) -> RunStatus:
        return self.state().status

    @property
    def exit_code(self) -> int:
        """0 as asked, 1 not so, 3 a limit was reached, 4 refused, 130 interrupted or not ended."""
        return exit_code(self.state())

    def state(self) -> RunState:
        """The journal's fold, up to now."""
        self._follower.poll()
        return self._follower.state

    def results(self) -> Results:
        """What `results.json` holds, up to now: machines that are there cost on while nothing happens."""
        state = self.state()
        return results(state, self.folder, WallClock().now() if state.undeleted else None)

    def export(self, format: str, folder: Path) -> list[str]:
        """Write the results for the benchmark's own tools, and return what there is to say about them.

        Raises RequestError for a format that the benchmark does not have, or a folder that is not empty.
        """
        state = self.state()
        plan = state.plan
        writer = result_writer_of(plan)
        if writer is None or writer.format != format:
            known = ", ".join((*FORMATS, "html", "site", *([writer.format] if writer else [])))
            raise RequestError(f"report format {format!r} is unknown for this run; write one of {known}")
        if plan.models:
            raise RequestError(f"run {self.name!r} has several models, which {format!r} has no folders for")
        results = self.results()
        settled = [
            SettledTask(
                task["task_id"],
                task["domain"],
                task["score"],
                self.home / (task["artifacts"] or ""),
                task["cost_usd"] if task["model_usd"] is None else task["model_usd"],
                task_tokens(state, TaskId(task["task_id"])),
            )
            for task in results["tasks"]
        ]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise RequestError(f"{folder} is not empty; name another folder")
            return list(writer.write(plan, settled, folder, results["cost"]))
        except OSError as err:
            raise RequestError(f"cannot write {folder}: {err.strerror}") from err

    def tasks(self) -> list[TaskResult]:
        return self.results()["tasks"]

    def df(self) -> pd.DataFrame:
        """The tasks as a pandas DataFrame, indexed by `task_id`, with a column for each metric."""
        try:
            import pandas as pd  # pyright: ignore[reportMissingTypeStubs]
        except ImportError:
            raise RequestError(
                "df() needs pandas: pip install pandas; tasks() has the same rows without it"
            ) from None
        rows = [flat(task) for task in self.tasks()]
        frame: Any = pd.DataFrame(rows)
        return frame.set_index("task_id") if rows else frame

    def _repr_html_(self) -> str:
        """How it looks when a notebook shows it."""
        from evalfleet.views.terminal import notebook_picture

        return notebook_picture(self.state(), WallClock().now())

    def task(self, task_id: str) -> TaskDetail:
        """One task with all its attempts; how far it has come, of one that runs."""
        state = self.state()
        detail = task_detail(state, TaskId(task_id))
        running = [entry for entry in detail["attempts"] if entry["outcome"] == "running"]
        if running and state.ended_at is None:
            progress = read_progress(self.home, state, WallClock().now())
            for entry in running:
                if (found := progress.get(AttemptId(entry["attempt"]))) is not None:
                    entry["progress"] = progress_entry(found)
        for entry in detail["attempts"]:
            if text := self.graders_log(state.attempts[AttemptId(entry["attempt"])]):
                entry["grader"] = text[-GRADER_SHOWN:]
        return detail

    def steps(self, name: str, seconds: float = 60.0) -> list[StepRow]:
        """The steps of a task's newest attempt, or of the attempt named.

        Those of one that runs are fetched from its machine. If they do not come within so many seconds, it is
        the newest alone, as it is with 0. Raises RequestError if its benchmark tells no steps, or the file
        with them is not here or cannot be read.
        """
        attempt = self._attempt(name)
        benchmark = self._stepped()
        if benchmark is None:
            raise RequestError(
                f"the benchmark of run {self.name!r} does not say where its steps are: key 'steps'"
            )
        if attempt is None:
            return []
        if attempt.collected is None:
            if seconds and (steps := self._live_steps(benchmark, attempt, seconds)):
                return [step_row(step) for step in steps]
            found = read_progress(self.home, self.state(), WallClock().now()).get(attempt.id)
            return [] if found is None or found.step is None else [step_row(found.step)]
        return [step_row(step) for step in self._read_steps(benchmark, attempt)]

    def _stepped(self) -> Stepped | None:
        """The benchmark, if it tells where its steps are."""
        benchmark = benchmark_of(self.state().plan)
        return benchmark if isinstance(benchmark, Stepped) and benchmark.steps else None

    def _read_steps(self, benchmark: Stepped, attempt: AttemptState) -> Sequence[Step]:
        path = f"{self._artefacts(attempt)}/{benchmark.steps}"
        try:
            with open(self.home / path, "rb", opener=plain_opener) as file:
                steps, problem = benchmark.read_steps(file.read(MOST_BYTES + 1))
        except FileNotFoundError as err:
            raise RequestError(f"attempt {attempt.id!r} left no {benchmark.steps}") from err
        except OSError as err:
            raise RequestError(f"{path} cannot be read: {err.strerror}") from err
        if problem and not steps:
            raise RequestError(f"{path}: {problem}")
        return steps

    def _artefacts(self, attempt: AttemptState) -> str:
        """Return the folder of an attempt's artefacts, relative to the home."""
        return f"{self.folder.name}/{artefacts_folder(attempt.task, attempt.id)}"

    def _live_steps(self, benchmark: Stepped, attempt: AttemptState, seconds: float) -> Sequence[Step]:
        with suppress(RequestError):
            return benchmark.read_steps(self._fetch(attempt, f"out/{benchmark.steps}", seconds)).steps
        return ()

    def spans(self) -> list[Span]:
        """The run as spans of a trace, with all that is here of its attempts' steps and model calls."""
        from evalfleet.views.spans import spans

        state = self.state()
        try:
            benchmark = self._stepped()
        except RequestError:  # it can no longer be read: the rest of the trace does not need it
            benchmark = None

        def steps_of(attempt: AttemptState) -> Sequence[Step]:
            if benchmark is not None and attempt.collected is not None:
                with suppress(RequestError):
                    return self._read_steps(benchmark, attempt)
            return ()

        return list(spans(state, self.folder, state.last_at, steps_of))

    def _attempt(self, name: str) -> AttemptState | None:
        """A task's newest attempt, or the attempt of this name. Raises RequestError."""
        state = self.state()
        if name not in state.tasks and name not in state.attempts:
            raise RequestError(f"run {self.name!r} has no task {name!r}; {hint(name, state.tasks)}")
        attempts = state.tasks[TaskId(name)].attempts if name in state.tasks else [AttemptId(name)]
        return state.attempts[attempts[-1]] if attempts else None

    def screenshot(self, name: str, seconds: float = 60.0) -> tuple[str, bytes]:
        """The newest screenshot of a task or an attempt: its name, and what is in it.

        Of one that runs, it is fetched from its machine. Raises RequestError if there is none.
        """
        attempt, shown = self._attempt(name), None
        for patience_s in (0.0, seconds):  # the newest step often has one, and is here already
            if shown is None:
                rows = self.steps(name, patience_s)
                shown = next((row["screenshot"] for row in reversed(rows) if row["screenshot"]), None)
        if attempt is None or shown is None:
            raise RequestError(f"{name} of run {self.name!r} has no step with a screenshot yet")
        file = self.steps_folder() + shown
        if ".." in file.split("/") or file.startswith("/"):
            raise RequestError(f"the screenshot {shown!r} of {name} is not among its artefacts")
        if attempt.collected is not None:
            path = f"{self._artefacts(attempt)}/{file}"
            try:
                with open(self.home / path, "rb", opener=plain_opener) as opened:
                    return shown, opened.read(MOST_BYTES)
            except OSError as err:
                raise RequestError(f"the screenshot {path} is gone: {err.strerror}") from err
        data = self._fetch(attempt, f"out/{file}", seconds)
        if not data:
            raise RequestError(f"the screenshot {shown!r} of {name} is gone, or its machine does not answer")
        return shown, data

    def steps_folder(self) -> str:
        """The folder of the trajectory, which screenshots are beside: empty, or with a `/` at its end."""
        benchmark = benchmark_of(self.state().plan)
        folder = str(PurePosixPath(benchmark.steps).parent) if isinstance(benchmark, Stepped) else "."
        return "" if folder == "." else f"{folder}/"

    def _fetch(self, attempt: AttemptState, file: str, seconds: float) -> bytes:
        """A file of an attempt that runs, as its machine has it now."""
        live = LiveLog(self.home, self.state(), attempt, file)
        try:
            data = live.read(seconds)
            if live.problem:
                raise RequestError(f"{file} cannot be had from the machine: {live.problem}")
            return data
        finally:
            live.close()

    def origins(self) -> set[str]:
        """The benchmark's own ids of its tasks: other ones where there are repeats, or several models."""
        state = self.state()
        return {origin_of(state.plan, known.task) for known in state.tasks.values()}

    def records(self, after: int = 0) -> Iterator[Record]:
        """The journal itself, from event number `after` on."""
        return Store.open(self.home, create=False, read_only=True).read(self.name, after)

    def log_of(self, name: str) -> tuple[AttemptState | None, Path | None]:
        """A task's newest attempt (or the attempt named), and its output, if that has come home."""
        attempt = self._attempt(name)
        if attempt is None:
            return None, None
        home = self.folder / artefacts_folder(attempt.task, attempt.id) / LOG
        return attempt, home if home.exists() else None

    def graders_log(self, attempt: AttemptState) -> str:
        """What the score command of an attempt printed; empty if there was none, or it is not here."""
        folder = self.folder / artefacts_folder(attempt.task, attempt.id)
        try:
            with open(folder.with_name(folder.name + SCORE) / LOG, "rb", opener=plain_opener) as file:
                return file.read().decode("utf-8", "replace")
        except OSError:
            return ""

    def why_no_log(self, name: str) -> str:
        """Why the output of a task or an attempt that is over is not here."""
        attempt, _ = self.log_of(name)
        if attempt is None or attempt.collected is None:
            return f"{name} has no log yet"
        folder = self._artefacts(attempt)
        if attempt.collected.problem:
            return f"the log of {attempt.id} did not come home: {attempt.collected.problem}"
        return f"the log of {attempt.id} is gone: {folder} was deleted, or what was in it"

    def live_log(self, attempt: AttemptState) -> LiveLog:
        """An attempt's output while it runs, from its machine."""
        return LiveLog(self.home, self.state(), attempt)

    def cost(self) -> Cost:
        return self.results()["cost"]

    def wait(
        self,
        timeout_s: float | None = None,
        observe: Observer | None = None,
        *,
        progress: bool | None = None,
    ) -> Results:
        """Wait until the run has ended, its controller is gone, or time is up; the results as they are then.

        `progress`: show how it goes meanwhile; by default in a notebook alone, and not to an observer.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        view = view_of(progress) if observe is None else None
        # an observer is told everything from the beginning on, also what this object has read before
        follower = self._follower if observe is None and view is None else self._new_follower()
        over = False
        while not over:
            over = self._over(follower, LOOK_S) or (deadline is not None and time.monotonic() >= deadline)
            records = follower.poll()
            if observe is not None:
                observe(follower.state, records)
            if view is not None:
                view.update(follower.state, WallClock().now(), records)
        if view is not None:
            view.close(follower.state, WallClock().now())
        self._follower = follower  # it has read all that ours would read once more
        self._raise_failure()
        return self.results()

    async def ended(self, *, progress: bool | None = None) -> Results:
        """Does what `wait` does, for programs with an event loop: `await run` is short for it."""
        view = view_of(progress)
        state = self.state()
        if view is not None:
            view.update(state, WallClock().now())
        async for state, records in self._news():
            if view is not None:
                view.update(state, WallClock().now(), records)
        if view is not None:
            view.close(state, WallClock().now())
        return results(state, self.folder)

    def __await__(self) -> Generator[Any, None, Results]:
        return self.ended().__await__()

    def events(self) -> Iterator[dict[str, Any]]:
        """What has happened until now, each as a line of `watch --json` has it."""
        return (event_document(record) for record in self.records())

    async def __aiter__(self) -> AsyncGenerator[dict[str, Any]]:
        """What happens, from the beginning to the end of the run, each as a line of `watch --json` has it."""
        async for _, records in self._news():
            for record in records:
                yield event_document(record)

    async def _news(self) -> AsyncGenerator[tuple[RunState, list[Record]]]:
        """The state, and what became part of it since the last time, until the run is over.

        The journal is read in a thread, so that the caller's event loop goes on meanwhile.
        """
        follower = self._new_follower()
        over = False
        while not over:
            over = await asyncio.to_thread(self._over, follower, LOOK_S)
            records = await asyncio.to_thread(follower.poll)
            yield follower.state, records
        self._raise_failure()

    def _new_follower(self) -> Follower:
        return Follower(Store.open(self.home, create=False, read_only=True), self.name)

    def _over(self, follower: Follower, patience_s: float) -> bool:
        if self._controller is not None:
            return self._controller.join(patience_s)
        if not self.is_live():
            return True
        ended_at = follower.state.ended_at
        if ended_at is not None and seconds_between(ended_at, WallClock().now()) > CLOSING_S:
            return True
        time.sleep(patience_s)
        return False

    def _raise_failure(self) -> None:
        failure = self._controller.failure if self._controller is not None else None
        if failure is not None:
            raise failure

    def is_live(self) -> bool:
        """Is a controller at work on it, anywhere?"""
        store = Store.open(self.home, create=False, read_only=True)
        return store.held(store.stream(self.name), WallClock().now()) is not None

    def drain(self, reason: str = "") -> None:
        """Hand out no more tasks; what runs may end by itself."""
        if self._controller is not None and not reason:
            self._controller.drain()
        else:
            self._stop(drain=True, reason=reason)

    def cancel(self, reason: str = "") -> None:
        """End what runs and clean up; unfinished tasks stay unrun and the run can be resumed."""
        self._stop(drain=False, reason=reason)

    def _stop(self, *, drain: bool, reason: str) -> None:
        if self.state().ended_at is not None:
            return
        stop = StopRequested("user", "drained" if drain else "cancelled", drain, by=whoami(), why=reason)
        Store.open(self.home).ask(self.name, stop, WallClock().now())

    @property
    def left(self) -> bool:
        """Did this process's controller leave before the end?"""
        return self._controller is not None and self._controller.left

    def leave(self) -> None:
        """Stop this process's controller now; attempts go on and the run can be resumed."""
        if self._controller is not None:
            self._controller.leave()


def whoami() -> str:
    """Who asks: user@host."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a user without a name, as in some containers
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
