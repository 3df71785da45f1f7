"""An attempt that gets stuck, or vanishes, is tried again elsewhere."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from evalfleet.events import AttemptEnded, AttemptStarted
from tests.e2e.harness import Fleet, task
from tests.waiting import PATIENCE_S, slowness, until

FIRST = 'if [ "$EVALFLEET_ATTEMPT" = 0 ]; then echo working; {}; fi; score 1'


def attempts(fleet: Fleet, id: str) -> tuple[list[str | None], list[str], str]:
    """Causes, machines, and the first one's detail."""
    shown = fleet("show", "r", id, "--json").json["attempts"]
    causes = [each["cause"] for each in shown]
    return causes, [each["machine"] for each in shown], shown[0]["error"]


def test_an_attempt_that_writes_nothing_is_tried_elsewhere(fleet: Fleet) -> None:
    stall_s = round(slowness())
    fleet.bench(
        [
            task("stuck", FIRST.format("sleep 300"), stall_s=stall_s),
            task("scored", "score 0.5; sleep 300", stall_s=stall_s),
            task("silent", "gate go; score 1"),
        ],
        stall_s=0,
        timeout_s=PATIENCE_S,
    )
    run = fleet.start_run("--workers", "3")
    fleet.started("stuck.1")
    fleet.open_gate("go")
    assert run.wait().code == 0
    causes, machines, detail = attempts(fleet, "stuck")
    assert causes == ["stuck", None]
    assert len(set(machines)) == 2
    assert detail.startswith(f"nothing was written to the log or the artefacts for {stall_s} s: working")
    assert (fleet.task("scored")["score"], fleet.task("scored")["attempts"]) == (0.5, 1)
    assert "working" in (fleet.home / "r/stuck/stuck.0/evalfleet.log").read_text()
    fleet.settled()


def test_an_attempt_whose_processes_vanish_is_tried_elsewhere(fleet: Fleet) -> None:
    fleet.bench(
        [
            task("a", FIRST.format("echo $PPID > $EVALFLEET_OUT/wrapper; sleep 300")),
            task("b", "gate go; score 1"),
        ]
    )
    run = fleet.start_run("--workers", "2")
    fleet.recorded(AttemptStarted, 2)  # both machines are there
    wrapper = until(lambda: [int(text) for file in wrappers(fleet) if (text := file.read_text().strip())])
    os.killpg(wrapper[0], signal.SIGKILL)
    fleet.recorded(AttemptEnded)
    fleet.open_gate("go")  # another machine is free now
    assert run.wait().code == 0
    causes, machines, detail = attempts(fleet, "a")
    assert causes == ["machine_lost", None]
    assert len(set(machines)) == 2
    assert "processes are gone" in detail
    assert "working" in detail
    fleet.settled()


def wrappers(fleet: Fleet) -> list[Path]:
    return list(fleet.home.glob(".machines/*/jobs/a.0/out/wrapper"))
