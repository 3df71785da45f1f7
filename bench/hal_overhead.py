"""What a HAL task costs beyond its agent's own work, on a warm machine, beside HAL's own local runner."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from evalfleet.events import AttemptEnded, AttemptStarted
from evalfleet.model import SECOND

from . import processes
from .hosts import records
from .result import Figures, Result, below, rounded
from .workspace import EVALFLEET, Workspace, environment

FEW, MANY = 5, 40
PEER_FEW, PEER_MANY = 2, 6
LIMIT_S = 600.0
AGENT = '''
import time

def run(input, **kwargs):
    """As long and as much as the task says."""
    began, spent = time.perf_counter(), time.process_time()
    while time.process_time() - spent < 0.02:
        pass
    metrics = {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - spent}
    return {task: {"answer": "done", "metrics": metrics} for task in input}
'''
COUNTED = (
    "CPU of all processes (controller, supervisor, attempts with their Pythons), and seconds from an "
    "attempt's start to its end by the journal; each less what the agent's function took itself; one local "
    f"machine, the difference of {MANY} and {FEW} tasks, so that what a run costs once is not in it"
)
PEER_COUNTED = (
    "hal-eval of corebench_easy with list_files_agent and W&B off, in HAL_REPO with HAL_PYTHON: CPU by the "
    f"difference of {PEER_MANY} and {PEER_FEW} tasks, seconds by its own _WALL_CLOCK_TIMES"
)


def run(quick: bool) -> Result:
    few, many = (1, 3) if quick else (FEW, MANY)
    # machines start `python3`, and here that may be a script which looks for one (pyenv)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    with processes.heir() as possible:
        if not possible:
            return Result("hal-overhead", {"error": "only Linux tells the CPU of orphans"}, {})
        low, high = _run(few), _run(many)
    figures: Figures = {
        "cpu_s_a_task": rounded((high["cpu_s"] - low["cpu_s"]) / (many - few)),
        "s_a_task": rounded(high["seconds"]),
        "load": os.getloadavg()[0],
        "tasks": many,
        "counted": COUNTED,
    }
    aims = {"cpu_s_a_task": below(figures["cpu_s_a_task"], 0.3), "s_a_task": below(figures["s_a_task"], 1.0)}
    return Result("hal-overhead", figures, aims, {"hal_local_runner": _peer()})


def _run(tasks: int) -> Figures:
    with Workspace() as space:
        agent = space.folder / "agent"
        agent.mkdir()
        (agent / "main.py").write_text(AGENT)
        (space.folder / "tasks.json").write_text(
            json.dumps({f"t_{n}": {"prompt": "p", "answer": "done"} for n in range(tasks)})
        )
        settings = ("tasks_file=tasks.json", "agent_dir=agent", f"agent_python={sys.executable}")
        words = ("run", "hal", "--name", "run", *(f"--set={each}" for each in settings))
        spent = processes.await_end(space.start(*EVALFLEET, *words, "--workers", "1"), LIMIT_S)
        others = processes.inherited(LIMIT_S)
        cpu_s = sum(each.own_s + each.children_s for each in (spent, *others))
        answers = [
            json.loads(path.read_bytes())["metrics"] for path in (space.home / "run").glob("*/*/result.json")
        ]
        if len(answers) != tasks:
            raise RuntimeError(f"{len(answers)} of {tasks} tasks have answered")
        seconds = _attempt_seconds(space)
        return {
            "cpu_s": cpu_s - sum(told["cpu_s"] for told in answers),
            "seconds": (seconds - sum(told["seconds"] for told in answers)) / tasks,
        }


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


# -- HAL's own -------------------------------------------------------------------------------------


def _peer() -> Figures:
    repo, python = os.environ.get("HAL_REPO"), os.environ.get("HAL_PYTHON")
    if not repo or not python:
        return {"error": "set HAL_REPO and HAL_PYTHON to a checkout of hal-harness and its Python"}
    with Workspace() as space:
        low = _hal_eval(space, Path(repo), python, PEER_FEW)
        high = _hal_eval(space, Path(repo), python, PEER_MANY)
        return {
            "cpu_s_a_task": rounded((high["cpu_s"] - low["cpu_s"]) / (PEER_MANY - PEER_FEW)),
            "s_a_task": rounded(high["seconds"]),
            "counted": PEER_COUNTED,
        }


def _hal_eval(space: Workspace, repo: Path, python: str, tasks: int) -> Figures:
    run = f"overhead_{tasks}"
    agent = ("--agent_name", "list", "--agent_dir", "agents/list_files_agent", "--agent_function", "main.run")
    words = ("--benchmark", "corebench_easy", *agent, "--max_tasks", str(tasks), "--run_id", run)
    path = f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # it runs agents by `python`
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(  # without W&B it ends with 1, once the agents have run
        [python, "-m", "hal.cli", *words, "--results_dir", str(space.folder / "results")],
        cwd=repo,
        env=environment(PATH=path, WEAVE_DISABLED="true", WANDB_MODE="disabled"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    times = space.folder / f"results/corebench_easy/{run}/{run}_WALL_CLOCK_TIMES.jsonl"
    if not times.is_file():
        raise RuntimeError(f"hal-eval has run no task in {time.monotonic() - began:.0f} s")
    seconds = [json.loads(line)["wall_clock_time"] for line in times.read_text().splitlines()]
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu_s": cpu_s, "seconds": sum(seconds) / max(1, len(seconds))}
