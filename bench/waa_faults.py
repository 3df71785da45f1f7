"""WAA's own client, unchanged, and what goes wrong around it: is a zero that is not the agent's ever scored?

Needs WAA_CHECKOUT, a checkout of WindowsAgentArena. Its client runs in the stand-in's container with its
libraries stubbed and its sleeps shortened; guest, QMP and model are faked. Each fault is done to the first
attempt at one task, through evalfleet. Then the client runs all tasks of `test_all.json` with nothing wrong,
and with errors that do not matter, and our reading of its files is held against what it wrote.
"""

from __future__ import annotations

import base64
import io
import json
import os
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evalfleet.benchmarks.waa.task_folder import RESULT, read_task
from evalfleet.events import AttemptEnded, AttemptStarted
from evalfleet.journal import Store
from evalfleet.model import Broken, Scored
from lab import NamespaceHost
from tests.waa.arena import Arena

from .result import Aim, Figures, at_most

RUN = "faults"
MODEL = "gpt-4o"
SCALE = 0.004
FAULTS = ("setup", "observation", "later-observation", "update", "evaluator", "dies", "model")
CLEAN = ("nothing", "windows", "code", "browser")
"""What is done to all tasks, and does not matter."""
LIMIT_S = 1200.0


def measure(quick: bool) -> tuple[Figures, dict[str, Aim]]:
    checkout = Path(os.environ.get("WAA_CHECKOUT", ""))
    examples = checkout / "src/win-arena-container/client/evaluation_examples_windows"
    if not (examples / "test_all.json").is_file():
        told = "WAA_CHECKOUT names no checkout of WindowsAgentArena: git clone it, and name it there"
        return {"error": told}, {}
    chosen = dict(zip(FAULTS, _file_tasks(examples), strict=False))
    wishes: dict[str, Any] = {
        task: [{"fault": fault, "steps": 2}, {"steps": 1}] for fault, task in chosen.items()
    }
    wishes.update({name: {"fault": name, "steps": 1} for name in CLEAN})
    with tempfile.TemporaryDirectory(prefix="evalfleet-bench-") as folder:
        plan = {"tasks": wishes, "boot_s": 0.05}
        arena = Arena(Path(folder), 2, plan=plan, checkout=checkout)
        try:
            faults = _try_faults(arena, chosen)
            host = next(host for host in arena.lab.hosts if _has_windows(host))
            clean = {name: _try_all(host, name, Path(folder)) for name in CLEAN[: 1 if quick else None]}
        finally:
            arena.destroy()
    zeros = sum(told["outcome"] == "scored" for told in faults.values())
    wrong = sum(len(each["called_broken"]) for each in clean.values())
    figures: Figures = {"faults": faults, "clean": clean, "client_sleeps_times": SCALE}
    figures["zeros_that_are_not_the_agents"] = zeros
    figures["scores_called_broken"] = wrong
    aims = {"zeros_that_are_not_the_agents": at_most(zeros, 0), "scores_called_broken": at_most(wrong, 0)}
    return figures, aims


def _file_tasks(examples: Path) -> list[str]:
    """Tasks whose set-up brings a file and opens it, and whose evaluator fetches it."""
    chosen: list[str] = []
    for task in json.loads((examples / "test_all.json").read_text())["libreoffice_writer"]:
        definition = json.loads((examples / f"examples/libreoffice_writer/{task}.json").read_text())
        evaluator = definition["evaluator"]
        if isinstance(evaluator["func"], str) and evaluator.get("result", {}).get("type") == "vm_file":
            chosen.append(task)
    return chosen


# -- through evalfleet -----------------------------------------------------------------------------


def _try_faults(arena: Arena, chosen: Mapping[Any, str]) -> dict[str, Figures]:
    """What became of each first attempt, and how long it took until that was told."""
    words = [word for task in chosen.values() for word in ("--task", task)]
    for setting in ("base_url=http://20.20.20.21:5000/v1", "som_origin=a11y", "max_steps=4"):
        words += ["--set", setting]
    done = arena.start_run(RUN, *words).wait(LIMIT_S)
    if done.code not in (0, 1):
        raise RuntimeError(f"the run ended with {done.code}:\n{done.said[-2000:]}")
    begun: dict[str, int] = {}
    faults: dict[str, Figures] = {}
    names = {f"{task}.0": fault for fault, task in chosen.items()}
    for record in Store.open(arena.home, create=False, read_only=True).read(RUN):
        event = record.event
        if isinstance(event, AttemptStarted):
            begun[event.attempt] = record.at
        elif isinstance(event, AttemptEnded) and event.attempt in names:
            seconds = (record.at - begun[event.attempt]) / 1e6
            faults[names[event.attempt]] = {**_told(event.outcome), "told_after_s": round(seconds, 1)}
    return faults


def _told(outcome: object) -> Figures:
    if isinstance(outcome, Broken):
        return {"outcome": "broken", "cause": str(outcome.cause), "says": outcome.detail[:120]}
    assert isinstance(outcome, Scored)
    return {"outcome": "scored", "cause": "", "says": f"{outcome.score:g}"}


# -- all tasks -------------------------------------------------------------------------------------


def _has_windows(host: NamespaceHost) -> bool:
    return bool(host.run(["docker", "ps", "-q"], check=False).stdout.strip())


def _try_all(host: NamespaceHost, name: str, folder: Path) -> Figures:
    """The client over all of its tasks, in one go, and what we read in its files."""
    flags = f"--trial_id {name}.0 --som_origin a11y --max_steps 4 --model {MODEL} --result_dir /tmp/{name}"
    client = f"cd /client && python run.py {flags} >/tmp/{name}.out 2>&1"
    variables = ("-e", "OPENAI_BASE_URL=http://20.20.20.21:5000/v1", "-e", "OPENAI_API_KEY=k")
    host.run(["docker", "exec", *variables, "winarena", "sh", "-c", client], timeout_s=LIMIT_S)
    packed = host.run(["sh", "-c", f"docker cp winarena:/tmp/{name} - | base64"], timeout_s=LIMIT_S).stdout
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(packed))) as archive:
        archive.extractall(folder / "all", filter="data")
    scored, broken, unscored = 0, [], []
    for task in sorted((folder / "all" / name).glob(f"pyautogui/*/{MODEL}/*/*/*")):
        reading = read_task(str(task))
        if not (task / RESULT).exists() and reading.score is None:
            unscored.append(f"{task.name}: {reading.error}")  # by the client itself
        elif reading.score is None:
            broken.append(f"{task.name}: {reading.error}")
        else:
            scored += 1
    return {"scored": scored, "called_broken": broken, "no_score_by_the_client": unscored}
