"""Runs whose controller, supervisor or machine is lost, taken over, cancelled or interrupted."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from evalfleet.events import AttemptEnded, AttemptStarted, RunEnded
from tests.desk import Process
from tests.e2e.harness import Fleet, task, tasks
from tests.waiting import PATIENCE_S, until


def once_each(fleet: Fleet) -> None:
    """Every attempt was started at most once, and every task scored."""
    starts = fleet.starts()
    assert len(starts) == len(set(starts)), starts
    found = fleet.results()
    assert found["scored"] == found["total_tasks"], found
    ended = [event.attempt for event in fleet.events() if isinstance(event, AttemptEnded)]
    assert len(ended) == len(set(ended))
    fleet.settled()


def gated(fleet: Fleet, *flags: str, count: int = 4, **keys: object) -> Process:
    """A run of `count` tasks, two at a time, all waiting at the gate `go`."""
    fleet.bench(tasks(count, "gate go; score 1"), **keys)
    run = fleet.start_run("--workers", "2", *flags)
    fleet.started("a_1.0", "a_2.0")
    return run


def test_kill_9_then_resume_adopts(fleet: Fleet) -> None:
    gated(fleet).kill()
    assert fleet("ls", "--json").json[0]["status"] == "left"
    resumed = fleet.start("resume", "r")
    until(lambda: fleet.state().controllers == 2)
    fleet.open_gate("go")
    assert resumed.wait().code == 0
    once_each(fleet)
    assert fleet.starts() == ["a_1.0", "a_2.0", "a_3.0", "a_4.0"]


def test_attempts_that_end_while_nobody_looks_are_collected(fleet: Fleet) -> None:
    fleet.bench(tasks(2, "gate go; echo said; score 1; touch $EVALFLEET_OUT/done"))
    run = fleet.start_run("--workers", "2")
    fleet.started("a_1.0", "a_2.0")
    run.kill()
    fleet.open_gate("go")
    until(lambda: not [argv for argv in fleet.alive().values() if "run.sh" in argv])
    assert fleet("resume").code == 0
    once_each(fleet)
    assert fleet.starts() == ["a_1.0", "a_2.0"]
    assert (fleet.home / "r" / "a_1" / "a_1.0" / "done").exists()
    assert "said" in fleet("logs", "r", "a_1").out


def test_kill_9_of_the_supervisor(fleet: Fleet) -> None:
    run = gated(fleet, count=3)
    for pid in fleet.supervisors().values():
        os.kill(pid, signal.SIGKILL)
    fleet.open_gate("go")
    assert run.wait().code == 0
    once_each(fleet)
    assert fleet.starts() == ["a_1.0", "a_2.0", "a_3.0"]


def test_kill_9_of_both(fleet: Fleet) -> None:
    run = gated(fleet, count=3)
    run.kill()
    for pid in fleet.supervisors().values():
        os.kill(pid, signal.SIGKILL)
    resumed = fleet.start("resume", "r")
    until(lambda: fleet.state().controllers == 2)
    fleet.open_gate("go")
    assert resumed.wait().code == 0
    once_each(fleet)
    assert fleet.starts() == ["a_1.0", "a_2.0", "a_3.0"]


def test_a_machine_deleted_by_hand(fleet: Fleet) -> None:
    fleet.bench([task("a", "gate $EVALFLEET_ATTEMPT; score 1")])
    run = fleet.start_run("--workers", "1")
    fleet.started("a.0")
    (machine,) = fleet.supervisors()
    shutil.rmtree(fleet.home / ".machines" / machine)
    fleet.open_gate("1", "2", "3")
    assert run.wait().code == 0
    assert fleet.results()["causes"].keys() == {"machine_lost"}
    found = fleet.task("a")
    assert (found["score"], found["machine"]) == (1.0, "worker-2")
    fleet.settled()


def test_a_finished_run_says_so(fleet: Fleet) -> None:
    fleet.bench(tasks(1))
    fleet.run()
    fleet("resume", "r").refused("'r'", "no unrun tasks")
    fleet("resume", "r", "--only", "broken").refused("no broken tasks")
    fleet("resume", "none").refused("none")


def test_only_broken(fleet: Fleet) -> None:
    fleet.bench([task("a"), task("x", f"test -e {fleet.folder}/gates/mended && score 1")])
    assert fleet.run("--attempts", "2").code == 1
    fleet("resume", "r").refused("--only broken")
    fleet.open_gate("mended")
    assert fleet("resume", "r", "--only", "broken").code == 0
    once_each(fleet)
    assert fleet.starts() == ["a.0", "x.0", "x.1", "x.2"]
    assert fleet.task("x")["attempts"] == 3


def test_ctrl_c_drains_and_the_run_can_be_resumed(fleet: Fleet) -> None:
    run = gated(fleet)
    run.interrupt()
    until(lambda: fleet.state().stop)
    fleet.open_gate("go")
    assert run.wait().code == 130
    found = fleet.results()
    assert (found["status"], found["scored"], found["unrun"]) == ("stopped", 2, 2)
    fleet.settled()
    again = fleet("resume", "r")
    assert (again.code, "r is resumed: 2 of 4 tasks to run\n" in again.err) == (0, True), again
    once_each(fleet)


def test_ctrl_c_twice_leaves_and_resume_adopts(fleet: Fleet) -> None:
    run = gated(fleet)
    run.interrupt()
    until(lambda: fleet.state().stop)
    run.interrupt()
    done = run.wait()
    assert done.code == 130
    assert "evalfleet resume r" in done.err
    assert [argv for argv in fleet.alive().values() if "run.sh" in argv]
    fleet.open_gate("go")
    assert fleet("resume", "r").code == 0
    once_each(fleet)
    assert fleet.starts() == ["a_1.0", "a_2.0", "a_3.0", "a_4.0"]


def test_ctrl_c_again_and_again(fleet: Fleet) -> None:
    run = gated(fleet)

    def ended() -> bool:
        run.interrupt()
        return run.popen.poll() is not None

    until(ended)
    assert run.wait().code == 130
    fleet.open_gate("go")
    assert fleet("resume", "r").code == 0
    once_each(fleet)


def test_sigterm_drains(fleet: Fleet) -> None:
    run = gated(fleet)
    run.signal(signal.SIGTERM)
    until(lambda: fleet.state().stop)
    fleet.open_gate("go")
    assert run.wait().code == 130
    assert fleet.results()["unrun"] == 2
    fleet.settled()


def test_sighup_leaves(fleet: Fleet) -> None:
    run = gated(fleet)
    run.signal(signal.SIGHUP)
    assert run.wait().code == 130
    fleet.open_gate("go")
    assert fleet("resume", "r").code == 0
    once_each(fleet)


def test_what_was_ignored_from_the_start_stays_ignored(fleet: Fleet) -> None:
    """`nohup`, and jobs in the background of a script: neither the terminal nor its Ctrl-C is theirs."""

    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    fleet.bench(tasks(4, "gate go; score 1"))
    run = fleet.start_run("--workers", "2", preexec_fn=ignore)
    fleet.started("a_1.0", "a_2.0")
    run.signal(signal.SIGHUP)
    run.interrupt()
    fleet.open_gate("go")
    assert run.wait().code == 0
    once_each(fleet)


def test_a_second_controller_is_told_who_holds_the_run(fleet: Fleet) -> None:
    run = gated(fleet)
    fleet("resume", "r").refused("held by", str(run.pid), "--take-over")
    fleet.open_gate("go")
    assert run.wait().code == 0
    once_each(fleet)


def test_take_over(fleet: Fleet) -> None:
    first = gated(fleet)
    second = fleet.start("resume", "r", "--take-over")
    first_done = first.wait()
    first_done.failed(130, "over")
    fleet.open_gate("go")
    assert second.wait().code == 0
    once_each(fleet)
    assert sum(isinstance(event, RunEnded) for event in fleet.events()) == 1


@pytest.mark.parametrize("left", [False, True], ids=["live", "left"])
def test_cancel(fleet: Fleet, left: bool) -> None:
    run = gated(fleet)
    if left:
        run.kill()
    cancelled = fleet("cancel", "r", "--json")
    assert cancelled.code == 0
    assert cancelled.json["status"] == "stopped"
    if not left:
        assert run.wait().code == 130
    found = fleet.results()
    assert (found["status"], found["scored"], found["unrun"], found["broken"]) == ("stopped", 0, 4, 0)
    fleet.settled()
    started = sum(isinstance(event, AttemptStarted) for event in fleet.events())
    assert started == 2
    assert fleet("watch", "r").code == 130
    fleet.open_gate("go")
    assert fleet("resume", "r").code == 0
    once_each(fleet)


def test_cancel_of_a_left_run_starts_nothing(fleet: Fleet) -> None:
    """What ended meanwhile frees its machine, but nothing may be handed out, and no secret is needed."""
    fleet.bench(tasks(4, "gate go; score 1"), secrets=["KEY"])
    fleet.forks = True
    run = fleet.start_run("--workers", "2", env={"KEY": "sesame-42"})
    fleet.started("a_1.0", "a_2.0")
    run.kill()
    fleet.open_gate("go")
    until(lambda: not [argv for argv in fleet.alive().values() if "run.sh" in argv])
    assert fleet("cancel", "r").code == 0
    assert fleet.starts() == ["a_1.0", "a_2.0"]
    assert sum(isinstance(event, AttemptStarted) for event in fleet.events()) == 2
    assert fleet.results()["scored"] == 2
    fleet.settled()


def test_cancel_keeps_what_has_ended_while_nobody_looked(fleet: Fleet) -> None:
    fleet.bench(
        [
            *tasks(2, "gate go; echo said; score 0.5"),
            task("x", "gate go; exit 3"),
            *tasks(3, "gate late; score 1", "z"),
        ]
    )
    run = fleet.start_run("--workers", "4")
    fleet.started("a_1.0", "a_2.0", "x.0", "z_1.0")
    run.kill()
    fleet.open_gate("go")
    until(lambda: not [argv for argv in fleet.alive().values() if "run.sh" in argv and "late" not in argv])
    assert fleet("cancel", "r").code == 0
    found = fleet.results()
    assert (found["status"], found["scored"], found["unrun"], found["broken"]) == ("stopped", 2, 4, 0)
    assert found["causes"] == {"result": 1, "cancelled": 1}
    assert "said" in fleet("logs", "r", "a_1").out
    fleet.settled()
    fleet.open_gate("late")
    fleet("resume", "r", "--workers", "4")
    assert fleet.task("a_1")["score"] == 0.5
    assert fleet.starts().count("a_1.0") == 1
    assert "a_1.1" not in fleet.starts()
    assert fleet.results()["scored"] == 5


def test_cancel_of_an_ended_or_unknown_run(fleet: Fleet) -> None:
    fleet.bench(tasks(1))
    fleet.run()
    assert fleet("cancel", "r").code == 0
    assert fleet.results()["status"] == "done"
    fleet("cancel", "none").refused("none")


def test_resume_with_new_limits(fleet: Fleet) -> None:
    fleet.bench(tasks(3, "gate go; score 1"))
    assert fleet.run("--max-duration", "1s").code == 3
    fleet.open_gate("go")
    assert fleet("resume", "r", "--max-duration", "1h", "--workers", "3").code == 0
    assert fleet.results()["scored"] == 3
    fleet.settled()


def test_detached_run(fleet: Fleet) -> None:
    fleet.bench(tasks(3, "gate go; score 1"))
    started = fleet("run", "./b.toml", "--name", "r", "--workers", "2", "--detach", "--json")
    assert started.code == 0
    assert started.json["run"] == "r"
    assert os.getsid(started.json["pid"]) == started.json["pid"]
    fleet.started("a_1.0", "a_2.0")
    watch = fleet.start("watch", "r", "--json")
    fleet.open_gate("go")
    done = watch.wait()
    assert done.code == 0
    assert done.json["scored"] == 3
    once_each(fleet)


def test_a_detached_run_is_cancelled_and_resumed_detached(fleet: Fleet) -> None:
    fleet.bench(tasks(2, "gate go; score 1"))
    fleet("run", "./b.toml", "--name", "r", "--detach")
    fleet.started("a_1.0")
    assert fleet("cancel", "r").code == 0
    fleet.settled()
    fleet.open_gate("go")
    assert fleet("resume", "r", "--detach").code == 0
    assert fleet("watch", "r").code == 0
    assert fleet.results()["scored"] == 2
    until(lambda: not fleet.alive())


def test_detach_refuses_what_is_held(fleet: Fleet) -> None:
    run = gated(fleet)
    fleet("resume", "r", "--detach").refused("held by")
    fleet.open_gate("go")
    assert run.wait().code == 0


def test_watch_stops_without_touching_the_run(fleet: Fleet) -> None:
    run = gated(fleet)
    watch = fleet.start("watch", "r")
    until(lambda: "r" in watch.out)
    watch.interrupt()
    assert watch.wait().code == 130
    fleet.open_gate("go")
    assert run.wait().code == 0


def test_watch_of_a_run_that_was_left(fleet: Fleet) -> None:
    gated(fleet).kill()
    watched = fleet("watch", "r")
    assert watched.code == 130
    assert "evalfleet resume r" in watched.err
    assert fleet("cancel", "r").code == 0


def test_stopped_for_a_while(fleet: Fleet) -> None:
    """A laptop that sleeps: attempts end meanwhile, and are found when it wakes."""
    run = gated(fleet)
    run.suspend()
    fleet.open_gate("go")
    until(lambda: not [argv for argv in fleet.alive().values() if "run.sh" in argv])
    run.signal(signal.SIGCONT)
    assert run.wait().code == 0
    once_each(fleet)


INTERRUPTED = """
import asyncio, os, signal, sys
from evalfleet.cli.terminal import result_of

new_event_loop = asyncio.events.new_event_loop

def interrupt(moment):
    if moment == sys.argv[1]:
        os.kill(os.getpid(), signal.SIGINT)

def interrupted():
    interrupt("made")
    loop = new_event_loop()
    close = loop.close
    loop.close = lambda: (interrupt("closed"), close())
    return loop

async def work():
    interrupt("begun")
    if sys.argv[1] != "closed":
        await asyncio.sleep(600)

asyncio.events.new_event_loop = interrupted
try:
    result_of(work())
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("moment", ["made", "begun", "closed"])
def test_ctrl_c_at_any_moment_of_an_event_loop_ends_the_work_without_a_complaint(moment: str) -> None:
    argv = [sys.executable, "-c", INTERRUPTED, moment]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert (done.stdout, done.stderr) == ("interrupted\n", "")


INTERRUPTED_IMPORT = """
import os, signal

class Interrupting:
    def __set_name__(self, owner, name):
        os.kill(os.getpid(), signal.SIGINT)

class Imported:
    field = Interrupting()  # Python makes a RuntimeError of whatever this raises
"""


def test_ctrl_c_while_modules_are_imported_ends_the_command_without_a_complaint(tmp_path: Path) -> None:
    (tmp_path / "interrupted.py").write_text(INTERRUPTED_IMPORT)
    argv = [sys.executable, "-m", "evalfleet", "run", "interrupted:Benchmark"]
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "EVALFLEET_HOME": str(tmp_path / "home")}
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("moment", ["home", "home/fleet.db", "home/r", "home/.machines"])
def test_ctrl_c_while_the_run_begins(fleet: Fleet, moment: str) -> None:
    fleet.bench(tasks(2, "gate go; score 1"))
    run = fleet.start_run("--workers", "2")
    until((fleet.folder / moment).exists)
    run.interrupt()
    fleet.open_gate("go")
    assert run.wait().code in (0, 130)
    if fleet.events():
        assert fleet("cancel", "r").code == 0
    fleet.settled()


def test_others_come_and_go(fleet: Fleet) -> None:
    """Who opens and closes the journal beside the controller must not take its locks or its log away."""
    run = gated(fleet)
    for words in (
        ("ls",),
        ("show", "r"),
        ("run", "./b.toml", "--name", "r"),
        ("resume", "r"),
        ("cancel", "no"),
    ):
        fleet(*words)
    fleet.open_gate("go")
    assert run.wait().code == 0
    once_each(fleet)
