"""What a HAL task costs beyond its agent's own work, on a warm machine."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from evalfleet.events import AttemptEnded, AttemptStarted
from evalfleet.model import SECOND

from .hosts import records
from .result import Figures, Result, below, rounded
from .workspace import EVALFLEET, Workspace, await_end, heir, inherited

FEW, MANY = 5, 40
LIMIT_S = 900.0
BENCHMARK = "corebench_easy"
AGENT = '''
import json
import time

def run(input, **kwargs):
    """Some work, and how much that was."""
    began, spent = time.perf_counter(), time.process_time()
    while time.process_time() - spent < 0.02:
        pass
    with open("own.json", "w") as file:
        json.dump({"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - spent}, file)
    return {task: {} for task in input}
'''
COUNTED = (
    "CPU of all processes (controller, supervisor, attempts with their Pythons), and seconds from an "
    "attempt's start to its end by the journal; each less what the agent's function took itself; one local "
    f"machine, the difference of {MANY} and {FEW} tasks, so that what a run costs once is not in it"
)


class Hal(NamedTuple):
    """A checkout of hal-harness with its own Python."""

    repo: Path
    python: str


def run(quick: bool) -> Result:
    few, many = (1, 3) if quick else (FEW, MANY)
    # machines start `python3`, and here that may be a script which looks for one (pyenv)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    repo, python = os.environ.get("HAL_REPO"), os.environ.get("HAL_PYTHON")
    hal = Hal(Path(repo).resolve(), os.path.abspath(python)) if repo and python else None
    with heir() as possible:
        if not possible:
            return Result("hal-overhead", {"error": "only Linux tells the CPU of orphans"}, {})
        low, high = _run(few, hal), _run(many, hal)
    figures: Figures = {
        "cpu_s_a_task": rounded((high["cpu_s"] - low["cpu_s"]) / (many - few)),
        "s_a_task": rounded(high["seconds"]),
        "load": os.getloadavg()[0],
        "tasks": many,
        "counted": COUNTED,
    }
    aims = {"cpu_s_a_task": below(figures["cpu_s_a_task"], 0.3), "s_a_task": below(figures["s_a_task"], 1.0)}
    return Result("hal-overhead", figures, aims)


def _run(tasks: int, hal: Hal | None) -> Figures:
    """On HAL's own tasks if there is a checkout, else on as many from a file."""
    with Workspace() as space:
        settings = [f"agent_dir={_agent(space)}"]
        if hal is not None:
            settings += [f"hal_repo={hal.repo}", f"hal_python={hal.python}", f"agent_python={hal.python}"]
            settings += [f"benchmark={BENCHMARK}", "gpu_tasks=run"]
        else:
            given = {f"t_{n}": {"prompt": "p", "answer": "done"} for n in range(tasks)}
            (space.folder / "tasks.json").write_text(json.dumps(given))
            settings += ["tasks_file=tasks.json", f"agent_python={sys.executable}"]
        words = ("run", "hal", "--name", "run", "--first", str(tasks), "--workers", "1")
        run = space.start(*EVALFLEET, *words, *(f"--set={each}" for each in settings))
        spent = await_end(run, LIMIT_S)
        others = inherited(LIMIT_S)
        own = _own((space.home / "run").glob("*/*/task/own.json"), tasks)
        return {
            "cpu_s": sum(each.own_s + each.children_s for each in (spent, *others)) - own["cpu_s"],
            "seconds": (_attempt_seconds(space) - own["seconds"]) / tasks,
        }


def _agent(space: Workspace) -> Path:
    agent = space.folder / "agent"
    agent.mkdir()
    (agent / "main.py").write_text(AGENT)
    (agent / "requirements.txt").touch()  # HAL insists on one
    return agent


def _own(told: Iterable[Path], tasks: int) -> dict[str, float]:
    """What the agent took itself, on all tasks."""
    each = [json.loads(path.read_bytes()) for path in told]
    if len(each) != tasks:
        raise RuntimeError(f"{len(each)} of {tasks} tasks have answered")
    return {name: sum(own[name] for own in each) for name in ("cpu_s", "seconds")}


def _attempt_seconds(space: Workspace) -> float:
    """Of all attempts together, from start to end."""
    began, total = dict[str, int](), 0.0
    for record in records(space):
        match record.event:
            case AttemptStarted(attempt):
                began[attempt] = record.at
            case AttemptEnded(attempt):
                total += (record.at - began[attempt]) / SECOND
            case _:
                pass
    return total
