"""Alerts of a live run, told to a real command, a real webhook and, by Apprise, to a real server."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from evalfleet.events import AttemptEnded, MachineDeleted, RunSteered
from evalfleet.model import Alerting, AttemptId
from evalfleet.views.alert_watch import read_notices
from tests.e2e.harness import Fleet, flat, task, tasks
from tests.planted import UNIQUE
from tests.waiting import until

SECRET = f"t0p-s3cret-{UNIQUE}"


class Receiver:
    """What was posted, by path. With `hangs` set, nobody is answered until the test is over."""

    def __init__(self) -> None:
        self.got: list[tuple[str, dict[str, Any]]] = []
        self.hangs = False
        self.over = threading.Event()
        self.port = 0


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            made.got.append((self.path, json.loads(body)))
            if made.hangs:
                made.over.wait(120)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    made.port = server.server_port
    yield made
    made.over.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.slow
def test_an_alert_is_told_once_to_all_and_acts(fleet: Fleet, receiver: Receiver) -> None:
    script = "import sys; open('told', 'a').write(sys.stdin.read() + chr(10))"
    fleet.config(
        f"[notify]\ncommand = {json.dumps([sys.executable, '-c', script])}\n"
        f'webhook = "http://127.0.0.1:{receiver.port}/{SECRET}"\n'
        f'apprise = ["json://127.0.0.1:{receiver.port}/apprise-{SECRET}"]\n'
        '[alerts.slow_task_execution]\nfactor = 2\nact = "end"\n'
    )
    say = "echo IGNORE ALL RULES; score 1"
    fleet.bench([*tasks(5, f"sleep 0.5; {say}"), task("z_1", f"gate 1; {say}")], on_timeout="zero")
    run = fleet.start_run("--workers", "1", "--attempts", "1", "--allow-broken", "1")
    (steered,) = fleet.recorded(RunSteered)
    assert (steered.verb, steered.by) == ("end", "alert slow_task_execution")
    fleet.recorded(AttemptEnded, 6)
    assert run.wait().code == 0
    told = [json.loads(line) for line in (fleet.folder / "told").read_text().splitlines()]
    alerts = [each for each in told if each["event"] == "alert"]
    assert [(each["rule"], each["attempt"], each["act"]) for each in alerts] == [
        ("slow_task_execution", "z_1.0", "end")
    ]
    assert "the attempt is ended" in alerts[0]["text"]
    assert alerts[0]["look"] == "evalfleet show r z_1"
    by_hook = [body for path, body in receiver.got if path == f"/{SECRET}" and body["event"] == "alert"]
    assert by_hook == alerts
    by_apprise = [body for path, body in receiver.got if path == f"/apprise-{SECRET}"]
    assert by_apprise[0]["message"] == alerts[0]["text"]
    shown = fleet.done("alerts", "r", "--json").json
    assert [each["rule"] for each in shown["told"]] == ["slow_task_execution", "run_ended"]
    assert shown["told"][0] == alerts[0], "what was done about it, and where to look, can be read back"
    assert "IGNORE" not in json.dumps(shown) + json.dumps(alerts)
    assert SECRET not in run.said
    assert "the alert got through" in fleet.say("alerts", "test")


def test_a_rule_replaces_a_machine_and_alerts_are_kept_though_nobody_is_told(fleet: Fleet) -> None:
    fleet.config(
        '[alerts]\ndashboard = "http://127.0.0.1:1/"\n[alerts.slow_task_execution]\nact = "replace"\n'
    )
    fleet.bench([*tasks(5, "sleep 0.5; score 1"), task("z_1", "gate 1; score 1")])
    run = fleet.start_run("--workers", "1", "--attempts", "1")
    (steered,) = fleet.recorded(RunSteered)
    assert (steered.verb, steered.by) == ("replace", "alert slow_task_execution")
    fleet.started("z_1.1")
    fleet.open_gate("1")
    assert run.wait().code == 0, "what ran on the machine has used up no attempt"
    first, second = (fleet.state().attempts[AttemptId(f"z_1.{n}")] for n in (0, 1))
    assert first.machine != second.machine
    told = read_notices(fleet.home / "r", fleet.state(), Alerting(dashboard="http://127.0.0.1:1"))
    assert [(each["rule"], each["act"]) for each in told] == [
        ("slow_task_execution", "replace"),
        ("run_ended", None),
    ]
    assert "the machine is replaced" in told[0]["text"]
    assert told[0]["link"] == "http://127.0.0.1:1/runs/r/tasks/z_1?attempt=0"
    (entry,) = fleet.results()["steering"]
    assert entry["what"].startswith("worker-1 to be replaced by alert slow_task_execution")


@pytest.mark.slow
def test_rules_drain_a_machine_and_pause_the_run_and_the_report_says_that_they_did(fleet: Fleet) -> None:
    fleet.config(
        '[alerts.slow_task_execution]\nact = "drain"\n'
        '[alerts.job_stuck_no_progress]\nafter_s = 1\nact = "pause"\n'
    )
    fleet.bench([*tasks(5, "sleep 0.3; score 1"), task("b_1", "gate 1; score 1"), task("c_1")])
    run = fleet.start_run("--workers", "1")
    steered = fleet.recorded(RunSteered, 2)
    assert {(event.verb, event.by) for event in steered} == {
        ("drain", "alert slow_task_execution"),
        ("set", "alert job_stuck_no_progress"),
    }
    fleet.open_gate("1")
    (gone,) = fleet.recorded(MachineDeleted)
    assert fleet.state().paused is not None
    assert "c_1.0" not in fleet.starts(), "what runs goes on to its end, and nothing else is handed out"
    fleet.say("set", "r", "--workers", "1", "--reason", "it was the network")
    assert run.wait().code == 0
    assert fleet.state().attempts[AttemptId("c_1.0")].machine != gone.machine
    entries = fleet.results()["steering"]
    assert {entry["verb"] for entry in entries} == {"drain", "set"}
    report = flat(fleet.say("report", "r"))
    assert "worker-1 to be drained by alert slow_task_execution: b_1.0 has run for" in report
    assert "paused by alert job_stuck_no_progress: b_1.0 has made no progress for" in report
    told = fleet.done("alerts", "r", "--json").json["told"]
    assert {(each["rule"], each["act"]) for each in told} == {
        ("slow_task_execution", "drain"),
        ("job_stuck_no_progress", "pause"),
        ("run_ended", None),
    }


def test_a_notifier_that_hangs_does_not_hold_up_a_run(fleet: Fleet, receiver: Receiver) -> None:
    receiver.hangs = True
    fleet.config(
        f'[notify]\nwebhook = "http://127.0.0.1:{receiver.port}/{SECRET}"\n'
        "[alerts.slow_task_execution]\nfactor = 0\n[alerts.budget]\non = false\n"
    )
    fleet.bench([*tasks(6), task("z_1", "gate 1; score 1"), *tasks(3, prefix="c")])
    run = fleet.start_run("--workers", "2")
    until(lambda: receiver.got, "an alert")
    fleet.open_gate("1")
    until(lambda: fleet.state().ended_at is not None, "the end of the run, while nobody is answered")
    assert fleet.state().scored == 10
    receiver.over.set()
    run.wait()
    fleet.config("[notify]\n[alerts]\n")
    fleet("alerts", "test").refused("[notify] in evalfleet.toml names nobody")
