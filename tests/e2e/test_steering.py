"""A live run that is changed from another process: who did it and why is recorded, and reported."""

from __future__ import annotations

import json
from collections.abc import Callable

from evalfleet.events import AttemptEnded, MachineCondemned, MachineDeleted, RunSteered, StopRequested
from evalfleet.model import AttemptId, Broken, Cause
from tests.e2e.harness import Fleet, task

Say = Callable[..., str]


def test_a_live_run_is_paused_set_drained_and_one_attempt_ended(fleet: Fleet, say: Say) -> None:
    """One run for all of it: each part begins where the one before it ended."""
    fleet.bench([task(f"a_{n}", f"gate {n}; score 1") for n in range(1, 6)])
    run = fleet.start_run("--workers", "2")
    fleet.started("a_1.0", "a_2.0")

    said = say("set", "r", "--workers", "0", "--reason", "the model is down")
    assert said.startswith("r: paused by ")
    assert "the model is down" in said
    fleet.open_gate("1")
    fleet.recorded(AttemptEnded)
    assert fleet.state().paused is not None
    assert fleet.starts() == ["a_1.0", "a_2.0"]
    say("set", "r", "--workers", "2")
    fleet.started("a_3.0")

    ended = json.loads(say("end", "r", "a_3", "--reason", "it loops", "--json"))
    assert (ended["verb"], ended["attempt"], ended["reason"]) == ("end", "a_3.0", "it loops")
    fleet.started("a_4.0")
    (_, broken) = fleet.recorded(AttemptEnded, 2)
    assert isinstance(broken.outcome, Broken)
    assert (broken.outcome.cause, broken.outcome.counts) == (Cause.CANCELLED, True)
    assert "it loops" in broken.outcome.detail
    assert not [argv for argv in fleet.alive().values() if "gate 3" in argv and "a_3.0" in argv]

    machine = fleet.state().attempts[broken.attempt].machine
    say("drain", "r", machine)
    assert "workers 1" in say("set", "r", "--workers", "1")
    fleet.open_gate("2", "3", "4", "5")
    done = run.wait()
    assert done.code == 0, done.said
    gone = [event for event in fleet.recorded(MachineCondemned) if event.machine == machine]
    assert gone[0].detail.startswith("drained by ") or "is over" in gone[0].detail
    assert len(fleet.recorded(MachineDeleted)) == len(fleet.state().machines)

    found = fleet.results()
    assert [entry["verb"] for entry in found["steering"]] == ["set", "set", "end", "drain", "set"]
    assert all("@" in entry["by"] for entry in found["steering"])
    report = say("report", "r")
    assert "## Steering" in report
    assert "the model is down" in report
    fleet.settled()


def test_what_cannot_be_done_is_refused_in_a_line_and_resume_ends_a_pause(fleet: Fleet, say: Say) -> None:
    fleet.bench([task("a_1", "gate 1; score 1"), task("a_2")])
    run = fleet.start_run("--workers", "1")
    fleet.started("a_1.0")
    for words, answer in {
        ("set", "r"): "nothing to set",
        ("set", "r", "--workers", "none"): "whole number",
        ("set", "r", "--budget", "-3"): "dollars above 0",
        ("end", "r", "a_2"): "does not run now",
        ("end", "r", "a_9"): "has no task 'a_9'",
        ("drain", "r", "nothing"): "has no machine 'nothing'",
        ("restart", "r", "worker-1"): "`evalfleet drain RUN MACHINE`",
        ("replace", "r", "worker-1"): "`evalfleet drain RUN MACHINE`",
        ("pause", "r"): "`evalfleet set RUN --workers 0`",
        ("unpause", "r"): "`evalfleet set RUN --workers N`",
        ("set", "r", "--workers", "1"): "has these limits already",
        ("set", "r", "--workers", "1", "--release"): "--release needs --workers 0",
        ("set", "r", "--workers", "0", "--reason", "two\nlines"): "one line of text",
        ("show", "r", "a_1", "--steps"): "does not say where its steps are",
    }.items():
        assert answer in say(*words, code=2)
    assert not [event for event in fleet.events() if isinstance(event, RunSteered)]
    say("set", "r", "--workers", "0")
    assert "is paused already" in say("set", "r", "--workers", "0", code=2)
    run.kill()
    assert "no controller is at work on run 'r': `evalfleet resume r`" in say(
        "set", "r", "--workers", "1", code=2
    )
    fleet.open_gate("1")
    assert fleet("resume", "r").code == 0, "a run that is taken up again is not paused"
    assert fleet.results()["scored"] == 2


def test_a_paused_run_that_released_its_machines_continues_with_others(fleet: Fleet, say: Say) -> None:
    fleet.bench([task("a_1", "gate 1; score 1"), task("a_2")])
    run = fleet.start_run("--workers", "1")
    fleet.started("a_1.0")
    assert "released" in say("set", "r", "--workers", "0", "--release")
    fleet.open_gate("1")
    (gone,) = fleet.recorded(MachineDeleted)
    assert (fleet.state().paused is not None, fleet.starts()) == (True, ["a_1.0"])
    say("set", "r", "--workers", "1")
    assert run.wait().code == 0
    assert fleet.state().attempts[AttemptId("a_2.0")].machine != gone.machine
    fleet.settled()


def test_a_drained_run_ends_what_runs_and_says_who_asked_for_it(fleet: Fleet, say: Say) -> None:
    fleet.bench([task("a_1", "gate 1; score 1"), task("a_2")])
    run = fleet.start_run("--workers", "1")
    fleet.started("a_1.0")
    assert "lunch" in say("drain", "r", "--reason", "lunch")
    fleet.open_gate("1")
    assert run.wait().code == 130
    (stop,) = fleet.recorded(StopRequested)
    assert (stop.drain, stop.why) == (True, "lunch")
    found = fleet.results()
    assert (found["scored"], found["unrun"]) == (1, 1)
    assert found["steering"][0]["what"].startswith("run drained by ")
