"""One notification when a run ends, however it does: to a real command, to a real webhook."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from evalfleet.api.documents import belonging_row
from evalfleet.api.places import FoundBelonging
from evalfleet.errors import RequestError
from evalfleet.model import MachineId, Notify
from evalfleet.planning.config import load_config, notify_of
from evalfleet.ports import Belonging
from evalfleet.views import notify
from evalfleet.views.notify import MARK
from tests.e2e.harness import Fleet, task, tasks
from tests.planted import UNIQUE, holding
from tests.waiting import until

SECRET = f"T0P-s3cret-path-{UNIQUE}"


@dataclass
class Hook:
    """A webhook's end. `status` is what it answers; `busy` unset: it does not answer."""

    status: int = 200
    got: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    busy: threading.Event = field(default_factory=threading.Event)
    url: str = ""


@pytest.fixture
def hook() -> Iterator[Hook]:
    made = Hook()
    made.busy.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            made.got.append(json.loads(body))
            made.busy.wait(30)
            self.send_response(made.status)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    made.url = f"http://127.0.0.1:{server.server_port}/{SECRET}"
    yield made
    made.busy.set()
    server.shutdown()
    thread.join()
    server.server_close()


def teller(
    fleet: Fleet, script: str = "import sys; open('told', 'a').write(sys.stdin.read() + chr(10))"
) -> None:
    fleet.config(f"[notify]\ncommand = {json.dumps([sys.executable, '-c', script])}\n")


def told(fleet: Fleet) -> list[dict[str, Any]]:
    path = fleet.folder / "told"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def marks(fleet: Fleet) -> list[Path]:
    return list(fleet.home.glob(f"*/{MARK}"))


def test_a_run_that_ends_is_told_to_a_command_and_to_a_webhook(fleet: Fleet, hook: Hook) -> None:
    fleet.bench([*tasks(2), task("env", "env | note; score 0")])
    teller(fleet)
    done = fleet.run(env={"EVALFLEET_NOTIFY_WEBHOOK": hook.url})
    assert done.code == 0
    (by_command,), (by_hook,) = told(fleet), hook.got
    assert by_command == by_hook
    assert (by_hook["event"], by_hook["run"], by_hook["status"]) == ("run_ended", "r", "done")
    assert (by_hook["scored"], by_hook["broken"], by_hook["unrun"]) == (3, 0, 0)
    assert by_hook["cost"] == fleet.results()["cost"]
    assert (by_hook["left"], by_hook["reason"]) == ([], None)
    assert by_hook["text"] == "evalfleet r: done: 3 of 3 scored, $0.00 for machines"
    assert not marks(fleet)
    assert SECRET not in done.out + done.err + fleet.note("env")
    assert not holding(fleet.home, SECRET)


def test_a_run_that_a_limit_stops_says_so(fleet: Fleet, hook: Hook) -> None:
    fleet.bench(tasks(3, "gate never; score 1"))
    done = fleet.run("--max-duration", "1.5", env={"EVALFLEET_NOTIFY_WEBHOOK": hook.url})
    assert done.code == 3
    (got,) = hook.got
    assert (got["status"], got["unrun"]) == ("stopped", 3)
    assert "time limit" in got["reason"]
    assert "time limit" in got["text"]


def test_a_detached_run_is_told_of_too(fleet: Fleet, hook: Hook) -> None:
    fleet.bench(tasks(1))
    (fleet.folder / ".env").write_text(f"EVALFLEET_NOTIFY_WEBHOOK={hook.url}\n")
    fleet.config("")
    assert fleet.run("--detach").code == 0
    until(lambda: hook.got, "the notification")
    assert hook.got[0]["status"] == "done"
    fleet.settled()
    assert not holding(fleet.home, SECRET)


@pytest.mark.parametrize(
    ("script", "says"),
    [("raise SystemExit(3)", "exit code 3"), ("import time; time.sleep(60)", "took longer")],
)
def test_what_is_wrong_with_a_command_is_said(script: str, says: str) -> None:
    assert says in notify.by_command([sys.executable, "-c", script], b"{}", 1.0)


def test_a_command_that_is_not_there_is_a_note(fleet: Fleet) -> None:
    fleet.bench(tasks(1))
    fleet.config('[notify]\ncommand = ["/no/such/program"]\n')
    done = fleet.run()
    assert done.code == 0
    assert "note: the notification did not get through: /no/such/program: No such file" in done.err


def test_a_notification_that_fails_changes_no_exit_code_and_is_told_later(fleet: Fleet, hook: Hook) -> None:
    fleet.bench(tasks(1))
    hook.status = 500
    env = {"EVALFLEET_NOTIFY_WEBHOOK": hook.url}
    done = fleet.run(env=env)
    assert done.code == 0
    assert "note: the notification did not get through: the webhook answered 500" in done.err
    assert SECRET not in done.err
    hook.status = 200
    assert fleet("reap", env=env).code == 0
    assert [got["status"] for got in hook.got] == ["done", "done"]
    assert not marks(fleet)
    assert fleet("reap", env=env).code == 0
    assert len(hook.got) == 2, "told once is told"


def test_nobody_listens(fleet: Fleet) -> None:
    fleet.bench(tasks(1))
    done = fleet.run(env={"EVALFLEET_NOTIFY_WEBHOOK": f"http://127.0.0.1:9/{SECRET}"})
    assert done.code == 0
    assert "the webhook cannot be reached (Connection refused)" in done.err
    assert SECRET not in done.err


def test_killed_while_it_tells_the_next_one_tells(fleet: Fleet, hook: Hook) -> None:
    """The run has ended, its controller is killed before the webhook has answered: twice, not never."""
    fleet.bench(tasks(1))
    hook.busy.clear()
    env = {"EVALFLEET_NOTIFY_WEBHOOK": hook.url}
    run = fleet.start_run(env=env)
    until(lambda: hook.got, "the notification")
    run.kill()
    hook.busy.set()
    fleet("resume", "r", env=env).refused("no unrun tasks")
    assert [got["status"] for got in hook.got] == ["done", "done"]
    assert not marks(fleet)
    fleet.settled()


def test_a_run_that_was_killed_is_told_of_once_it_was_taken_up_again(fleet: Fleet, hook: Hook) -> None:
    fleet.bench(tasks(2, "gate go; score 1"))
    env = {"EVALFLEET_NOTIFY_WEBHOOK": hook.url}
    run = fleet.start_run(env=env)
    fleet.started("a_1.0")
    run.signal(signal.SIGKILL)
    run.popen.wait()
    assert fleet("cancel", "r", env=env).code == 0
    assert [(got["status"], got["reason"]) for got in hook.got] == [("stopped", "cancelled")]
    fleet.open_gate("go")
    assert fleet("resume", "r", env=env).code == 0
    assert [got["status"] for got in hook.got] == ["stopped", "done"], "each end once"
    fleet.settled()


def test_something_left_behind_is_told(hook: Hook) -> None:
    whom = Notify(webhook=hook.url)
    notify.reaped(whom, [], [], 0)
    belonging = Belonging(MachineId("p-abc123-1"), "abc123", "me", "east", 0, ("vm",))
    left = belonging_row(FoundBelonging("cloud", belonging, True, "expired"))
    notify.reaped(whom, [left], ["p-abc123-1: denied"], 0)
    (got,) = hook.got
    assert (got["event"], got["left"]) == ("reaped", [left])
    assert "1 machine left behind, 1 could not be deleted" in got["text"]


@pytest.mark.parametrize(
    "text",
    ['webhook = "ftp://SECRET"', "webhook = 3", 'command = "notify-send"', 'webhok = "https://SECRET"'],
)
def test_wrong_settings_are_told_without_the_address(tmp_path: Path, text: str) -> None:
    path = tmp_path / "evalfleet.toml"
    path.write_text(f"[notify]\n{text}\n")
    with pytest.raises(RequestError, match=r"\[notify\]") as wrong:
        load_config(path, tmp_path)
    assert "SECRET" not in str(wrong.value)


def test_the_environment_goes_before_the_file(tmp_path: Path) -> None:
    (tmp_path / "evalfleet.toml").write_text('[notify]\ncommand = ["a"]\nwebhook = "https://file"\n')
    config = load_config(tmp_path / "evalfleet.toml", tmp_path)
    assert notify_of(config, {}) == Notify(("a",), "https://file")
    environ = {"EVALFLEET_NOTIFY_WEBHOOK": "", "EVALFLEET_NOTIFY_COMMAND": "say 'it is over'"}
    assert notify_of(config, environ) == Notify(("say", "it is over"), "")
    with pytest.raises(RequestError, match="quote"):
        notify_of(config, {"EVALFLEET_NOTIFY_COMMAND": "say 'it"})
    assert "file" not in repr(config.notify)
