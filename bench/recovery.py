"""A controller that is killed again and again, and how soon the next one goes on."""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import time
from collections import Counter
from pathlib import Path

from evalfleet.events import AttemptEnded, AttemptStarted, RunEnded
from evalfleet.journal import Store
from evalfleet.model import Scored

from .result import Figures, Result, at_most, below, rounded
from .workspace import EVALFLEET, Workspace, wait_until

MACHINES = 8
KILLS, TASKS, TASK_S = 20, 300, (0.5, 1.0)
EVENTS, RESUMES = 10_000, 5
LIVES_S = (0.02, 1.6)
LIMIT_S = 180.0
MARKED = 'echo "$EVALFLEET_JOB" >>{marks}; '


def run(quick: bool) -> Result:
    killed = _killed_often(*((2, 40) if quick else (KILLS, TASKS)))
    attach = _attach(*((60, 1) if quick else (EVENTS, RESUMES)))
    aims = {
        "tasks_lost": at_most(killed["tasks_lost"], 0),
        "tasks_scored_twice": at_most(killed["tasks_scored_twice"], 0),
        "attempts_started_twice": at_most(killed["attempts_started_twice"], 0),
        "first_attach_s": below(attach["first_attach_s"], 1.0),
        "left_behind": at_most(killed["left_behind"] + attach["left_behind"], 0),
    }
    return Result("recovery", {"killed": killed, "attach": attach}, aims)


# -- killed again and again --------------------------------------------------------------------


def _killed_often(kills: int, tasks: int) -> Figures:
    rng = random.Random("recovery")
    with Workspace() as space:
        marks = space.folder / "marks"
        durations = [{"id": f"t_{i}", "params": {"s": round(rng.uniform(*TASK_S), 3)}} for i in range(tasks)]
        script = MARKED.format(marks=marks) + 'exec sleep "$1"'
        path = space.benchmark(["sh", "-c", script, "sh", "{params.s}"], durations)
        process = space.start_run(path, MACHINES)
        wait_until(lambda: _planned(space), 30.0)
        done = 0
        for _ in range(kills):
            time.sleep(rng.uniform(*LIVES_S))
            kill(process)
            if _ended(space):
                break  # tasks were too short for so many kills
            done += 1
            process = space.start(*EVALFLEET, "resume", "run")
        else:
            space.finish(process, LIMIT_S)
        told = _account(space, marks, tasks)
        return {"kills": done, "tasks": tasks, **told, "left_behind": len(space.left_behind())}


def kill(process: subprocess.Popen[bytes]) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.wait(10)


def _planned(space: Workspace) -> bool:
    """From here on the run exists, and can be taken up."""
    return (space.home / "run").exists()


def _ended(space: Workspace) -> bool:
    """Asked of the journal once its controller is gone: between a look and a kill, a run can end."""
    records = Store.open(space.home, create=False).read("run")
    return any(isinstance(record.event, RunEnded) for record in records)


def _account(space: Workspace, marks: Path, tasks: int) -> Figures:
    """What the journal says, and what the tasks themselves have seen."""
    begun: Counter[str] = Counter()
    scored: Counter[str] = Counter()
    task_of: dict[str, str] = {}
    for record in Store.open(space.home, create=False).read("run"):
        match record.event:
            case AttemptStarted(attempt, task):
                begun[attempt] += 1
                task_of[attempt] = task
            case AttemptEnded(attempt, Scored()):
                scored[task_of[attempt]] += 1
            case _:
                pass
    seen = Counter(marks.read_text().split())
    twice = {attempt for count in (begun, seen) for attempt, times in count.items() if times > 1}
    return {
        "tasks_lost": tasks - len(scored),
        "tasks_scored_twice": sum(times > 1 for times in scored.values()),
        "attempts_started_twice": len(twice),
        "attempts_unknown_to_the_journal": len(set(seen) - set(begun)),
        "attempts": len(begun),
    }


# -- taken up again ----------------------------------------------------------------------------


def _attach(events: int, resumes: int) -> Figures:
    """Long attempts are under way behind a journal of many events: kill, resume, look when one is attached.

    A supervisor writes a new controller's epoch down when it has accepted its hello, and answers with the
    jobs that run there. So the change of that file is the moment, seen from outside.
    """
    quick_tasks = events // 3
    with Workspace() as space:
        marks, go = space.folder / "marks", space.folder / "go"
        marks.touch()
        script = (
            f"case {{task_id}} in long*) {MARKED.format(marks=marks)}"
            f"while [ ! -e {go} ]; do sleep 0.2; done;; esac"
        )
        ids = [*(f"t_{i}" for i in range(quick_tasks)), *(f"long_{i}" for i in range(MACHINES))]
        path = space.benchmark(["sh", "-c", script], [{"id": each} for each in ids])
        process = space.start_run(path, MACHINES)
        wait_until(lambda: len(marks.read_text().split()) == MACHINES, LIMIT_S, 0.1)
        length = _length(space)
        attached: list[list[float]] = []
        for _ in range(resumes):
            known = _epochs(space)
            kill(process)
            started = time.time()
            process = space.start(*EVALFLEET, "resume", "run")
            attached.append(_moments(known, started))
        go.touch()
        space.finish(process, LIMIT_S)
        told = _account(space, marks, quick_tasks + MACHINES) | {"attempts": 0}
        if any(told.values()):
            raise RuntimeError(f"the attached attempts did not end as they should: {told}")
        return {
            "journal_events": length,
            "resumes": resumes,
            "first_attach_s": rounded(statistics.median(min(each) for each in attached)),
            "slowest_first_attach_s": rounded(max(min(each) for each in attached)),
            "all_attached_s": rounded(statistics.median(max(each) for each in attached)),
            "left_behind": len(space.left_behind()),
        }


def _length(space: Workspace) -> int:
    return sum(1 for _ in Store.open(space.home, create=False).read("run"))


def _epochs(space: Workspace) -> dict[Path, int]:
    return {path: _epoch(path) for path in (machine / "epoch" for machine in space.machines())}


def _epoch(path: Path) -> int:
    """Which controller the machine obeys. The file is replaced, never rewritten."""
    return int(json.loads(path.read_text())["run"])


def _moments(known: dict[Path, int], started: float) -> list[float]:
    """Seconds from `started` until each machine knew the new controller: its epoch file was replaced then."""
    wait_until(lambda: all(_epoch(path) > epoch for path, epoch in known.items()), 30.0)
    return [path.stat().st_ctime - started for path in known]
