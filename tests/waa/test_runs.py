"""Runs of `waa` on real hosts with the stand-in: ways to end, resets, secrets, set-up that fails."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from evalfleet.events import AttemptEnded, MachineCondemned, MachineReady
from evalfleet.model import Broken, Cause, Scored
from tests.lab.clients import needs_lab
from tests.waa.arena import DATA, KEY, Arena

pytestmark = [needs_lab, pytest.mark.slow]

QUICK = {"steps": 2, "seconds": 0.05}
STEPS = ["kvm", "disk", "room", "docker", "image", "golden", "container", "windows"]
Make = Callable[..., Arena]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Arena] = []

    def one(*wishes: str, **more: Any) -> Arena:
        """A task for each wish: the first attempt does it, later ones score."""
        tasks = {"notepad": list(wishes)} if wishes else {"notepad": ["score"]}
        plan = {wish: [{"do": wish, **QUICK}, {"do": "score", "score": 1.0, **QUICK}] for wish in wishes}
        hosts = more.pop("hosts", 1)
        made.append(
            Arena(
                tmp_path, hosts, tasks=tasks, plan={"default": QUICK, "tasks": plan, "boot_s": 0.05}, **more
            )
        )
        return made[0]

    yield one
    for arena in made:
        arena.destroy()


def ends(arena: Arena, run: str = "r") -> dict[str, AttemptEnded]:
    return {event.attempt: event for event in arena.events(run) if isinstance(event, AttemptEnded)}


def log_of(arena: Arena, task: str, number: int = 0) -> str:
    return (arena.attempt_folder("r", task, number) / "evalfleet.log").read_text()


def test_a_score_comes_with_its_steps_files_and_last_screenshot(make: Make) -> None:
    arena = make("score")
    arena.run("r", "--set", "max_steps=7", "--set", "a11y_backend=win32")
    (task,) = arena.results("r")["tasks"]
    assert (task["score"], task["num_steps"], task["machine"]) == (1.0, 2, "waa-eval-1")
    folder = arena.attempt_folder("r", "score")
    there = {path.name for path in folder.iterdir()}
    assert {"result.txt", "traj.jsonl", "traj.html", "logs", "client_logs", "evalfleet.log"} <= there
    assert len(task["screenshots"]) == 3
    assert set(task["screenshots"]) <= there
    told = (folder / "client_logs").glob("normal-*.log")
    (args,) = [line for path in told for line in path.read_text().splitlines() if "Args:" in line]
    for word in ("max_steps=7", "a11y_backend='win32'", "trial_id='score.0'", "model='gpt-4o'"):
        assert word in args
    ready = next(event for event in arena.events("r") if isinstance(event, MachineReady))
    assert [name for name in ready.timings if name.startswith("setup.")] == [
        f"setup.{step}" for step in STEPS
    ]
    assert arena.results("r")["cost"]["models_usd"] is None
    assert arena.results("r")["cost"]["models_usd_range"] == [0.097403, 0.649351]


BROKEN = {
    "no-result": (Cause.READINESS, "the client ended by itself (exit code 0)"),
    "controller": (Cause.READINESS, "the guest failed"),
    "set-up": (Cause.READINESS, "could not be set up"),
    "evaluator": (Cause.INTERNAL, "the evaluator failed"),
    "unauthorized": (Cause.MODEL, "the model's API failed"),
    "killed": (Cause.READINESS, "the client ended by itself (exit code 137)"),
    "hang": (Cause.STUCK, "took no step for long"),
    "guest-dies": (Cause.STUCK, "Windows did not answer /probe"),
}
SCORED = {"agent": "the agent failed", "slow": "time limit of 5 s reached", "bad-exit": None}


def test_every_way_to_end_is_told_apart_and_what_broke_is_tried_again(make: Make) -> None:
    arena = make(*BROKEN, *SCORED, hosts=3)
    arena.run("r", "--task-timeout", "5")
    ended = ends(arena)
    for wish, (cause, words) in BROKEN.items():
        outcome = ended[f"{wish}.0"].outcome
        assert isinstance(outcome, Broken), wish
        assert outcome.cause is cause, (wish, outcome)
        assert words in outcome.detail, (wish, outcome)
        assert isinstance(ended[f"{wish}.1"].outcome, Scored), "and then it is scored"
        assert (arena.attempt_folder("r", wish) / "container.log").exists()
    for wish, reason in SCORED.items():
        outcome = ended[f"{wish}.0"].outcome
        assert isinstance(outcome, Scored), (wish, outcome)
        assert f"{wish}.1" not in ended, "a score is never tried again"
        assert reason is None or (outcome.score == 0.0 and reason in (outcome.error or "")), (wish, outcome)
    slow = ended["slow.0"]
    assert isinstance(slow.outcome, Scored)
    assert (slow.outcome.limit_s, 5 <= slow.seconds < 15) == (5.0, True)


def test_windows_is_reset_after_a_broken_attempt_and_only_then(make: Make) -> None:
    arena = make("controller", "score", "bad-exit")
    arena.run("r")
    logs = {attempt: log_of(arena, *_split(attempt)) for attempt in ends(arena)}
    resets = [attempt for attempt, log in logs.items() if "Windows was restarted" in log]
    assert len(resets) == 1, logs
    assert "Windows is reset: attempt controller.0 did not end well" in logs[resets[0]]
    reset = ends(arena)[resets[0]]
    assert isinstance(reset.outcome, Scored)
    told = json.loads((arena.attempt_folder("r", *_split(resets[0])) / "result.json").read_text())
    assert reset.seconds == told["seconds"], "what the reset took is not the task's"


def _split(attempt: str) -> tuple[str, int]:
    task, _, number = attempt.rpartition(".")
    return task, int(number)


def test_a_guest_that_does_not_come_back_gets_golden_storage(make: Make) -> None:
    arena = make("corrupt")
    arena.run("r", "--task-timeout", "4")
    assert "Windows went back to golden" in log_of(arena, "corrupt", 1)
    assert isinstance(ends(arena)["corrupt.1"].outcome, Scored)


def test_fresh_each_goes_back_to_golden_before_every_task(make: Make) -> None:
    arena = make("score", "bad-exit")
    arena.run("r", "--set", "fresh=each")
    for task in ("score", "bad-exit"):
        assert "Windows went back to golden" in log_of(arena, task)


def test_nobody_sees_the_key(make: Make) -> None:
    arena = make("slow")
    run = arena.start_run("r", "--task-timeout", "6")
    host = arena.lab.hosts[0]
    seen = _watch(arena, "run.py")
    assert seen, "the client was never seen"
    assert not [argv for argv in seen if KEY in argv]
    inspected = host.run(["docker", "inspect", "winarena"], check=False).stdout
    assert "winarena" in inspected
    assert KEY not in inspected
    said, _ = run.communicate(timeout=60)
    assert KEY not in said
    found = host.run(["grep", "-rlF", KEY, DATA, "/root/.evalfleet", "/dev/shm", "/tmp"], check=False).stdout
    assert not found
    raw = KEY.encode()
    assert not [path for path in arena.home.rglob("*") if path.is_file() and raw in path.read_bytes()]


def _watch(arena: Arena, program: str) -> list[str]:
    """Command lines of the host, until one of the program is among them."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        lines = [" ".join(process.argv) for process in arena.lab.hosts[0].processes()]
        if any(program in line for line in lines):
            return lines
        time.sleep(0.05)
    return []


def test_a_refused_pull_names_its_step_and_what_to_do(make: Make) -> None:
    arena = make("score", private=True)
    said = arena.run("r", "--max-duration", "20s", code=4)
    condemned = [e for e in arena.events("r") if isinstance(e, MachineCondemned) and e.cause]
    assert condemned[0].step == "image", said
    assert "the registry refuses the pull" in condemned[0].detail


def test_windows_that_never_boots_leaves_its_log_and_its_screen(make: Make) -> None:
    arena = make("score")
    (arena.golden / "data.img").write_bytes(b"no Windows here\n")
    arena.run("r", "--set", "boot_s=3", "--max-duration", "20s", code=4)
    condemned = [e for e in arena.events("r") if isinstance(e, MachineCondemned) and e.cause]
    assert condemned[0].step == "windows"
    assert "did not answer /probe within" in condemned[0].detail
    assert "failed to load Boot0001" in condemned[0].detail
    left = arena.home / "r" / ".machines" / condemned[0].machine / "windows"
    assert "failed to load Boot0001" in (left / "container.log").read_text()
