"""What a HAL task costs beyond its agent's own work, on a warm machine, beside HAL's own local runner."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from evalfleet.events import AttemptEnded, AttemptStarted
from evalfleet.model import SECOND

from .hosts import records
from .result import Figures, Result, below, rounded
from .workspace import EVALFLEET, Workspace, await_end, environment, heir, inherited

FEW, MANY = 5, 40
PEER_FEW, PEER_MANY = 2, 10
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
PEER_COUNTED = (
    f"the same agent and tasks ({BENCHMARK} of HAL_REPO, by HAL_PYTHON) by hal-eval, one after another, W&B "
    "off: CPU of it and of what it started, seconds by its own _WALL_CLOCK_TIMES; each less what the agent's "
    f"function took itself, CPU by the difference of {PEER_MANY} and {PEER_FEW} tasks"
)


class Peer(NamedTuple):
    """A checkout of hal-harness with its own Python."""

    repo: Path
    python: str


def run(quick: bool) -> Result:
    few, many = (1, 3) if quick else (FEW, MANY)
    # machines start `python3`, and here that may be a script which looks for one (pyenv)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    repo, python = os.environ.get("HAL_REPO"), os.environ.get("HAL_PYTHON")
    peer = Peer(Path(repo).resolve(), os.path.abspath(python)) if repo and python else None
    with heir() as possible:
        if not possible:
            return Result("hal-overhead", {"error": "only Linux tells the CPU of orphans"}, {})
        low, high = _run(few, peer), _run(many, peer)
    figures: Figures = {
        "cpu_s_a_task": rounded((high["cpu_s"] - low["cpu_s"]) / (many - few)),
        "s_a_task": rounded(high["seconds"]),
        "load": os.getloadavg()[0],
        "tasks": many,
        "counted": COUNTED,
    }
    aims = {"cpu_s_a_task": below(figures["cpu_s_a_task"], 0.3), "s_a_task": below(figures["s_a_task"], 1.0)}
    return Result("hal-overhead", figures, aims, {"hal_local_runner": _measured(peer)})


def _run(tasks: int, peer: Peer | None) -> Figures:
    """On HAL's own tasks if there is a checkout, else on as many from a file."""
    with Workspace() as space:
        settings = [f"agent_dir={_agent(space)}"]
        if peer is not None:
            settings += [f"hal_repo={peer.repo}", f"hal_python={peer.python}", f"agent_python={peer.python}"]
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


# -- HAL's own -------------------------------------------------------------------------------------


def _measured(peer: Peer | None) -> Figures:
    if peer is None:
        return {"error": "set HAL_REPO and HAL_PYTHON to a checkout of hal-harness and its Python"}
    with Workspace() as space:
        agent = _agent(space)
        low, high = (_hal_eval(space, peer, agent, tasks) for tasks in (PEER_FEW, PEER_MANY))
        return {
            "cpu_s_a_task": rounded((high["cpu_s"] - low["cpu_s"]) / (PEER_MANY - PEER_FEW)),
            "s_a_task": rounded(high["seconds"]),
            "counted": PEER_COUNTED,
        }


def _hal_eval(space: Workspace, peer: Peer, agent: Path, tasks: int) -> Figures:
    run = f"overhead_{tasks}"
    called = ("--agent_name", "own", "--agent_dir", str(agent), "--agent_function", "main.run")
    words = ("--benchmark", BENCHMARK, *called, "--max_tasks", str(tasks), "--run_id", run)
    path = f"{Path(peer.python).parent}{os.pathsep}{os.environ['PATH']}"  # it runs agents by `python`
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(  # without W&B it ends with 1, once the agents have run
        [peer.python, "-m", "hal.cli", *words, "--results_dir", str(space.folder / "results")],
        cwd=peer.repo,
        env=environment(PATH=path, WEAVE_DISABLED="true", WANDB_MODE="disabled"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    folder = space.folder / "results" / BENCHMARK / run
    own = _own(folder.glob("*/own.json"), tasks)
    lines = (folder / f"{run}_WALL_CLOCK_TIMES.jsonl").read_text().splitlines()
    seconds = sum(json.loads(line)["wall_clock_time"] for line in lines)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu_s": cpu_s - own["cpu_s"], "seconds": (seconds - own["seconds"]) / tasks}
