"""200 tasks of HAL on 50 lab hosts, of which five lose power; the controller is killed twice."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

from evalfleet.events import AttemptCollected, AttemptEnded, AttemptGraded, AttemptStarted
from evalfleet.lab import Lab
from evalfleet.model import Answered, Scored
from evalfleet.state import fold
from standins.hal import copy_to

from .hosts import PLACE, cannot, lab_of, records, write_place
from .recovery import kill
from .result import Figures, Result, at_least, at_most
from .workspace import EVALFLEET, Workspace, environment, wait_until

TASKS, HOSTS = 200, 50
LIMIT_S = 900.0
AGENT = """
import time

def run(input, **kwargs):
    ((task_id, task),) = input.items()
    time.sleep(task["seconds"])
    return {task_id: task["prompt"]}
"""
COUNTED = (
    "tasks of 2 to 5 s on HAL's interface (the stand-in's checkout, graded in a process of its own); a tenth "
    "of the hosts lose power when a quarter of the tasks have answered, and the controller is killed then; "
    "it is killed once more while HAL grades"
)


def run(quick: bool) -> Result:
    if (error := cannot("hal-fleet")) is not None:
        return Result("hal-fleet", dict(error), {})
    tasks, hosts = (12, 4) if quick else (TASKS, HOSTS)
    with lab_of(hosts) as lab, Workspace() as space:
        figures = _fleet(lab, space, tasks, lost=max(1, hosts // 10))
    aims = {
        "lines": at_least(figures["lines"], tasks),
        "tasks_with_two_lines": at_most(figures["tasks_with_two_lines"], 0),
        "scores": at_least(figures["scores"], tasks),
        "tasks_scored_twice": at_most(figures["tasks_scored_twice"], 0),
        "tasks_answered_twice": at_most(figures["tasks_answered_twice"], 0),
        "left_behind": at_most(figures["machines_left"], 0),
    }
    return Result("hal-fleet", {"tasks": tasks, "hosts": hosts, **figures, "counted": COUNTED}, aims)


def _fleet(lab: Lab, space: Workspace, tasks: int, lost: int) -> Figures:
    repo = _checkout(space, tasks)
    write_place(space.folder, lab)
    settings = (
        "hal_repo=hal-harness",
        f"hal_python={sys.executable}",
        "benchmark=gaia",
        "agent_dir=agents/slow",
    )
    words = ("run", "hal", "--name", "run", *(f"--set={each}" for each in settings))
    process = _start(space, lab, *words, "--on", PLACE, "--workers", str(len(lab.hosts)))
    wait_until(lambda: _answered(space) >= tasks // 4, LIMIT_S, 0.2)
    kill(process)
    struck = lab.hosts[:lost]
    for host in struck:
        host.power_off()
    process = _start(space, lab, "resume", "run")
    wait_until(lambda: (repo / "graded.jsonl").exists() or process.poll() is not None, LIMIT_S, 0.2)
    kill(process)
    graded_before = _graded(space)
    (repo / "hold").unlink()
    for host in struck:
        host.power_on()
    space.finish(_start(space, lab, "resume", "run"), LIMIT_S)
    space.finish(_start(space, lab, "report", "run", "--format", "hal", "-o", "tree"))
    told = records(space)
    task_of = {r.event.attempt: r.event.task for r in told if isinstance(r.event, AttemptStarted)}
    answered = {
        r.event.attempt
        for r in told
        if isinstance(r.event, AttemptEnded) and isinstance(r.event.outcome, Answered)
    }
    home = {
        r.event.attempt
        for r in told
        if isinstance(r.event, AttemptCollected) and not r.event.collected.problem
    }
    answers = Counter(task_of[attempt] for attempt in answered & home)
    scores = Counter(
        task_of[r.event.attempt]
        for r in told
        if isinstance(r.event, AttemptGraded) and isinstance(r.event.grade, Scored)
    )
    lines = (space.folder / "tree/gaia/run/run_RAW_SUBMISSIONS.jsonl").read_text().splitlines()
    shutil.rmtree(space.folder / "tree")
    in_lines = Counter(next(iter(json.loads(line))) for line in lines)
    return {
        "lines": len(in_lines),
        "tasks_with_two_lines": sum(times > 1 for times in in_lines.values()),
        "scores": len(scores),
        "tasks_scored_twice": sum(times > 1 for times in scores.values()),
        "tasks_answered_twice": sum(times > 1 for times in answers.values()),
        "answers_lost_with_their_hosts": len(answered - home),
        "attempts": len(task_of),
        "hosts_lost": lost,
        "graded_before_the_second_kill": graded_before,
        "machines_left": len(fold(told).undeleted) + _on_hosts(space, lab),
        "seconds": (told[-1].at - told[0].at) / 1e6,
    }


def _checkout(space: Workspace, tasks: int) -> Path:
    repo = copy_to(space.folder / "hal-harness")
    quiz = {f"t_{n}": {"prompt": f"{n}", "seconds": 2 + n % 4, "truth": f"{n}"} for n in range(tasks)}
    (repo / "data/quiz.json").write_text(json.dumps(quiz))
    (repo / "agents/slow").mkdir()
    (repo / "agents/slow/main.py").write_text(AGENT)
    (repo / "hold").touch()  # the grader waits as long as this is there
    return repo


def _start(space: Workspace, lab: Lab, *words: str) -> subprocess.Popen[bytes]:
    return space.start(*lab.prefix, *EVALFLEET, *words)


def _on_hosts(space: Workspace, lab: Lab) -> int:
    """How many machines of ours the hosts themselves show."""
    words = (*lab.prefix, *EVALFLEET, "machines", "--json")
    environ = environment(EVALFLEET_HOME=str(space.home))
    done = subprocess.run(words, cwd=space.folder, env=environ, capture_output=True, check=True)
    return len(json.loads(done.stdout))


def _answered(space: Workspace) -> int:
    if not (space.home / "run").exists():
        return 0
    ended = (r.event for r in records(space) if isinstance(r.event, AttemptEnded))
    return sum(isinstance(event.outcome, Answered) for event in ended)


def _graded(space: Workspace) -> int:
    return sum(isinstance(record.event, AttemptGraded) for record in records(space))
