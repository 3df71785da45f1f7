"""The 154 tasks of Windows Agent Arena on 10 lab machines, a minute in a second, and its client's faults.

First, how near each schedule comes to max(sum / machines, longest), all on the same durations (a sixtieth of
what people who ran the arena reported). A task is a `sleep`: the figure is the scheduler's, not that of two
cores which play ten machines.

Then, with WAA_CHECKOUT, a checkout of WindowsAgentArena: is a zero that is not the agent's ever scored? Its
own client, unchanged, runs in the stand-in's container with its libraries stubbed and its sleeps shortened;
guest, QMP and model are faked. Each fault is done to the first attempt at one task, through evalfleet. Then
the client runs all tasks of `test_all.json` with nothing wrong, and with errors that do not matter, and our
reading of its files is held against what it wrote.
"""

from __future__ import annotations

import base64
import io
import json
import os
import random
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalfleet.benchmarks.waa.task_folder import RESULT, read_task
from evalfleet.events import AttemptEnded, AttemptStarted
from evalfleet.journal import Store
from evalfleet.model import Broken, ScheduleName, Scored, seconds_between
from lab import NamespaceHost
from tests.waa.arena import Arena

from .hosts import cannot, first_start_and_last_end, lab_of, pool_of, records, start_pool_run
from .makespan import bound, list_schedule
from .result import Aim, Figures, Result, at_most, rounded
from .workspace import Workspace

SCALE = 1 / 60
MACHINES = 10
KINDS: dict[str, ScheduleName] = {
    "dynamic": "dynamic",
    "dynamic_known": "dynamic",
    "slices": "slices",
    "round_robin": "round-robin",
}
SEED = 0
LIMIT_S = 240.0
AIM_KNOWN = 1.10
COUNTED = (
    "over_bound: from the first start to the last end, over max(sum / machines, longest), on warm hosts; "
    "tasks sleep"
)


@dataclass(frozen=True)
class Size:
    """Of the runs that are compared."""

    domains: tuple[str, ...]
    seconds: tuple[float, ...]
    machines: int

    @property
    def bound_s(self) -> float:
        return bound(self.seconds, self.machines)

    def told(self, makespan_s: float) -> Figures:
        return {"makespan_s": rounded(makespan_s), "over_bound": rounded(makespan_s / self.bound_s)}


def run(quick: bool) -> Result:
    if (error := cannot("waa")) is not None:
        return Result("waa", dict(error), {})
    size = _size(8, 2, SCALE / 15) if quick else _size(154, MACHINES, SCALE)
    figures: Figures = {
        "tasks": len(size.domains),
        "machines": size.machines,
        "bound_s": rounded(size.bound_s),
        "ideal_over_bound": rounded(list_schedule(size.seconds, size.machines) / size.bound_s),
        **_schedules(size),
        "counted": COUNTED,
    }
    aims = {"known_over_bound": at_most(figures["dynamic_known"]["over_bound"], AIM_KNOWN)}
    figures["client_faults"], own = _client_faults(quick)
    return Result("waa", figures, aims | own)


def _size(count: int, machines: int, scale: float) -> Size:
    domains = tuple(domain for domain, many in DOMAINS.items() for _ in range(many))[:count]
    return Size(domains, tuple(round(each * scale, 3) for each in durations(SEED, domains)), machines)


# -- schedules -------------------------------------------------------------------------------------


def _schedules(size: Size) -> Figures:
    """One after the other, in one home: the second run knows from the first how long each task takes."""
    told: Figures = {}
    with lab_of(size.machines) as lab, Workspace() as space, pool_of(space, lab) as pool:
        path = _benchmark(space, size)
        for name, schedule in KINDS.items():
            words = ("--schedule", schedule)
            space.finish(start_pool_run(space, lab, path, pool, *words, name=name), LIMIT_S)
            told[name] = _told(space, size, name)
    return told


def _benchmark(space: Workspace, size: Size) -> Path:
    lines = [
        {"id": f"{domain}-{n}", "domain": domain, "params": {"s": seconds}}
        for n, (domain, seconds) in enumerate(zip(size.domains, size.seconds, strict=True))
    ]
    return space.benchmark(["sleep", "{params.s}"], lines)


def _told(space: Workspace, size: Size, name: str) -> Figures:
    first, last = first_start_and_last_end(records(space, name), len(size.domains))
    return size.told(seconds_between(first, last))


# -- how long tasks take ---------------------------------------------------------------------------

DOMAINS: Mapping[str, int] = {
    "file_explorer": 19,
    "libreoffice_calc": 24,
    "notepad": 2,
    "chrome": 17,
    "microsoft_paint": 3,
    "libreoffice_writer": 19,
    "settings": 5,
    "vs_code": 24,
    "msedge": 13,
    "vlc": 21,
    "windows_calc": 3,
    "clock": 4,
}
"""How many tasks each has, in the order of the list."""

HUMAN_STEPS: Mapping[str, float] = {
    "libreoffice_calc": 16.1,
    "libreoffice_writer": 7.4,
    "vlc": 7.1,
    "chrome": 4.5,
    "msedge": 4.5,
    "vs_code": 3.9,
}
USUAL_HUMAN_STEPS = 5.7
AGENT_TIMES = (1.4, 4.3)
SPREAD = 0.4
STEP_S, HARD_STEP_S = (10.0, 32.0), (40.0, 61.0)
HARD_DOMAIN, HARD_SHARE = "libreoffice_calc", 0.25
TASK_S, TASK_LIMIT_S, MAX_STEPS = 10.0, 900.0, 15


def durations(seed: int, domains: Iterable[str]) -> tuple[float, ...]:
    """Return the seconds of each task, in the order given, by what people who ran the arena reported.

    A task: its steps are those of a human times 1.4 to 4.3, at least 1 and at most 15 (the client's
    `max_steps`). A human's spread around the mean of the domain (lognormal, sigma 0.4), which is known for
    five domains; Edge counts as Chrome, the others as the mean of the four that are not spreadsheets. A step
    takes 10 to 32 s, the same in all of a task; one spreadsheet task in four is hard, with 40 to 61 s. A task
    takes 10 s and its steps, and ends at its limit of 900 s.
    """
    rng = random.Random(f"waa durations {seed}")
    return tuple(_duration(rng, domain) for domain in domains)


def _duration(rng: random.Random, domain: str) -> float:
    human = HUMAN_STEPS.get(domain, USUAL_HUMAN_STEPS) * rng.lognormvariate(-(SPREAD**2) / 2, SPREAD)
    steps = max(1, min(MAX_STEPS, round(human * rng.uniform(*AGENT_TIMES))))
    hard = domain == HARD_DOMAIN and rng.random() < HARD_SHARE
    return min(TASK_LIMIT_S, TASK_S + steps * rng.uniform(*(HARD_STEP_S if hard else STEP_S)))


# -- faults of the client --------------------------------------------------------------------------

RUN = "faults"
MODEL = "gpt-4o"
CLIENT_SCALE = 0.004
FAULTS = ("setup", "observation", "later-observation", "update", "evaluator", "dies", "model")
CLEAN = ("nothing", "windows", "code", "browser")
"""What is done to all tasks, and does not matter."""
CLIENT_LIMIT_S = 1200.0


def _client_faults(quick: bool) -> tuple[Figures, dict[str, Aim]]:
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
    figures: Figures = {"faults": faults, "clean": clean, "client_sleeps_times": CLIENT_SCALE}
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


def _try_faults(arena: Arena, chosen: Mapping[Any, str]) -> dict[str, Figures]:
    """What became of each first attempt, and how long it took until that was told."""
    words = [word for task in chosen.values() for word in ("--task", task)]
    for setting in ("base_url=http://20.20.20.21:5000/v1", "som_origin=a11y", "max_steps=4"):
        words += ["--set", setting]
    done = arena.start_run(RUN, *words).wait(CLIENT_LIMIT_S)
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
            faults[names[event.attempt]] = {**_outcome(event.outcome), "told_after_s": round(seconds, 1)}
    return faults


def _outcome(outcome: object) -> Figures:
    if isinstance(outcome, Broken):
        return {"outcome": "broken", "cause": str(outcome.cause), "says": outcome.detail[:120]}
    assert isinstance(outcome, Scored)
    return {"outcome": "scored", "cause": "", "says": f"{outcome.score:g}"}


def _has_windows(host: NamespaceHost) -> bool:
    return bool(host.run(["docker", "ps", "-q"], check=False).stdout.strip())


def _try_all(host: NamespaceHost, name: str, folder: Path) -> Figures:
    """The client over all of its tasks, in one go, and what we read in its files."""
    flags = f"--trial_id {name}.0 --som_origin a11y --max_steps 4 --model {MODEL} --result_dir /tmp/{name}"
    client = f"cd /client && python run.py {flags} >/tmp/{name}.out 2>&1"
    variables = ("-e", "OPENAI_BASE_URL=http://20.20.20.21:5000/v1", "-e", "OPENAI_API_KEY=k")
    host.run(["docker", "exec", *variables, "winarena", "sh", "-c", client], timeout_s=CLIENT_LIMIT_S)
    packed = host.run(
        ["sh", "-c", f"docker cp winarena:/tmp/{name} - | base64"], timeout_s=CLIENT_LIMIT_S
    ).stdout
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
