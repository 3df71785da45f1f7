"""WAA's own client, unchanged, run by evalfleet on lab hosts: libraries stubbed; guest, QMP and model faked.

WAA_CHECKOUT names a checkout of https://github.com/microsoft/WindowsAgentArena.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from evalfleet.benchmarks.waa.task_folder import read_task
from evalfleet.events import AttemptEnded
from evalfleet.model import AttemptId, Broken, Cause, Scored
from evalfleet.views.progress import read_progress
from tests.lab.clients import needs_lab
from tests.waa.arena import Arena
from tests.waiting import until

CHECKOUT = os.environ.get("WAA_CHECKOUT", "")
pytestmark = [
    needs_lab,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not CHECKOUT, reason="NOT RUN: WAA's own client was not tried; WAA_CHECKOUT names no checkout of it"
    ),
]

NOTEPAD = "366de66e-cbae-4d72-b042-26390db2b145-WOS"
FAULTS: dict[str, tuple[Cause, str]] = {
    "setup": (Cause.READINESS, "the task could not be set up in the guest: Failed to "),
    "observation": (Cause.READINESS, "the guest failed: Failed to get the observations"),
    "later-observation": (Cause.READINESS, "the guest failed: Failed to get the observations"),
    "tree": (Cause.READINESS, "the guest failed: Failed to get accessibility tree"),
    "evaluator": (Cause.INTERNAL, "the evaluator failed: Failed to get file. Status code: 500"),
    "dies": (Cause.INTERNAL, "the evaluator failed: An unexpected error occurred: "),
    "model": (Cause.MODEL, "the model's API failed: openai.BadRequestError: Error code: 400"),
}
HARMLESS = ("windows", "code")
LIVE = "mute"


def writer_tasks() -> list[str]:
    """Of one kind: files that are brought, opened, and looked at in the end."""
    client = Path(CHECKOUT) / "src/win-arena-container/client/evaluation_examples_windows"
    listed: dict[str, list[str]] = json.loads((client / "test_all.json").read_text())
    chosen: list[str] = []
    for task in listed["libreoffice_writer"]:
        evaluator = json.loads((client / f"examples/libreoffice_writer/{task}.json").read_text())["evaluator"]
        if isinstance(evaluator["func"], str) and evaluator.get("result", {}).get("type") == "vm_file":
            chosen.append(task)
    return chosen


@pytest.fixture(scope="module")
def assigned() -> dict[str, str]:
    """Task by what is done to its first attempt."""
    return dict(zip((*FAULTS, *HARMLESS, LIVE), writer_tasks(), strict=False))


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory, assigned: dict[str, str]) -> Iterator[Arena]:
    wishes: dict[str, object] = {
        task: [{"fault": fault, "steps": 2}, {"steps": 1}] for fault, task in assigned.items()
    }
    wishes[NOTEPAD] = {"steps": 2, "file": "stand-in"}
    folder = tmp_path_factory.mktemp("own-client")
    made = Arena(folder, 2, plan={"tasks": wishes, "boot_s": 0.05}, checkout=Path(CHECKOUT))
    yield made
    made.destroy()


def flags(*tasks: str) -> list[str]:
    settings = ("base_url=http://20.20.20.21:5000/v1", "som_origin=a11y", "max_steps=4")
    chosen = [word for task in tasks for word in ("--task", task)]
    return chosen + [word for setting in settings for word in ("--set", setting)]


def run(arena: Arena, name: str, *tasks: str) -> dict[str, AttemptEnded]:
    arena.run(name, *flags(*tasks))
    return {event.attempt: event for event in arena.events(name) if isinstance(event, AttemptEnded)}


def test_a_task_well_done_is_scored_with_its_steps_and_screenshots(arena: Arena) -> None:
    (ended,) = run(arena, "happy", NOTEPAD).values()
    assert isinstance(ended.outcome, Scored)
    assert (ended.outcome.score, ended.outcome.num_steps) == (1.0, 2)
    assert len(ended.outcome.screenshots) == 3
    assert (arena.home / "happy" / NOTEPAD / f"{NOTEPAD}.0" / "traj.html").is_file()


def test_steps_and_the_newest_screenshot_are_seen_while_the_client_waits_for_its_model(
    arena: Arena, assigned: dict[str, str]
) -> None:
    task = assigned[LIVE]
    run = arena.start_run("live", *flags(task), "--workers", "1", "--task-timeout", "600")

    def steps() -> list[dict[str, object]]:
        progress = read_progress(arena.home, arena.state("live"), 0).get(AttemptId(f"{task}.0"))
        if progress is None or not progress.count:
            return []
        rows: list[dict[str, object]] = json.loads(arena.say("show", "live", task, "--steps", "--json"))
        return rows if any(row["action"] for row in rows) else []

    first = until(steps, lambda: f"a step of the agent's: {run.said}")
    assert first[-1]["screenshot"]
    shot = arena.folder / "newest.png"
    arena.say("show", "live", task, "--screenshot", str(shot))
    assert shot.read_bytes()[1:4] == b"PNG"
    arena.say("end", "live", task, "--reason", "its model says nothing")
    run.finish()
    second = arena.recorded(AttemptEnded, 2, "live")[1]
    assert isinstance(second.outcome, Scored)


def test_a_zero_that_is_not_the_agents_is_broken_and_tried_again(
    arena: Arena, assigned: dict[str, str]
) -> None:
    ended = run(arena, "faults", *(assigned[fault] for fault in FAULTS))
    for fault, (cause, words) in FAULTS.items():
        first, second = (ended[f"{assigned[fault]}.{n}"].outcome for n in (0, 1))
        assert isinstance(first, Broken), (fault, first)
        assert (first.cause, first.detail[: len(words)]) == (cause, words), fault
        assert isinstance(second, Scored), (fault, second)
        assert second.score == 0.0


def test_errors_that_do_not_matter_leave_a_zero_the_agents(arena: Arena, assigned: dict[str, str]) -> None:
    ended = run(arena, "harmless", *(assigned[fault] for fault in HARMLESS))
    for fault in HARMLESS:
        attempt = f"{assigned[fault]}.0"
        outcome = ended[attempt].outcome
        assert isinstance(outcome, Scored), (fault, outcome)
        assert outcome.score == 0.0
        folder = arena.home / "harmless" / assigned[fault] / attempt
        logged = "".join(path.read_text() for path in (folder / "logs").iterdir())
        assert "ERROR" in logged, "there was something that did not matter"
        assert read_task(str(folder)).score == 0.0
