"""A machine that is to be taken back: its supervisor hears of it, ends what runs, and begins nothing new."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from evalfleet.channels.supervisor.host import cloud_init
from evalfleet.channels.supervisor.notices import is_taken
from tests.waiting import until

from .test_supervisor import Host, hosting

PATH = "/metadata/scheduledevents?api-version=2020-07-01"
MATCH = {"list": "Events", "fields": {"EventType": "Preempt", "Resources": "vm-1"}}


class Metadata(ThreadingHTTPServer):
    """As Azure's, at an address of ours."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.events: list[dict[str, Any]] = []
        self.asked = 0
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()


class Answering(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        assert isinstance(self.server, Metadata)
        self.server.asked += 1
        good = self.headers["Metadata"] == "true" and self.path == PATH
        body = json.dumps({"DocumentIncarnation": 1, "Events": self.server.events}).encode()
        self.send_response(200 if good else 400)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    with Metadata() as made:
        yield made
        made.shutdown()


@pytest.fixture
def host(tmp_path: Path, metadata: Metadata, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody is there
    with hosting(tmp_path / "machine") as made:
        url = f"http://127.0.0.1:{metadata.server_address[1]}{PATH}"
        made.peer(run=None).ask("watch", url=url, headers={"Metadata": "true"}, match=MATCH)
        yield made


def event(kind: str, *names: str) -> dict[str, Any]:
    return {"EventId": "e", "EventType": kind, "Resources": list(names), "EventStatus": "Scheduled"}


def test_what_runs_ends_as_evicted_and_nothing_new_begins(host: Host, metadata: Metadata) -> None:
    peer = host.peer()
    peer.shell("a.0", "trap '' TERM; echo 1 > $EVALFLEET_OUT/pids; while :; do sleep 0.1; done")
    host.pids("a.0")
    metadata.events += [event("Preempt", "another"), event("Reboot", "vm-1")]
    before = metadata.asked
    until(lambda: metadata.asked >= before + 2, "two more questions")
    assert peer.ask("how", job="a.0")["state"] == "running", "neither is about us going"
    metadata.events.append(event("Preempt", "VM-1"))
    ended = peer.end("a.0")
    assert ended["reason"] == "evicted"
    peer.shell("b.0", "true")
    assert peer.ask("how", job="b.0")["reason"] == "evicted"


def test_a_supervisor_that_comes_later_watches_on(host: Host, metadata: Metadata) -> None:
    host.kill()
    metadata.events.append(event("Preempt", "vm-1"))
    host.supervise()
    peer = host.peer()

    def refused() -> bool:
        peer.shell("c.0", "sleep 60")
        return bool(peer.ask("how", job="c.0").get("reason") == "evicted")

    until(refused, "the notice")


def test_a_job_that_hears_of_its_eviction_long_before_the_supervisor_is_not_taken_at_its_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm sends SIGCONT to all processes of a job, then SIGTERM, one after another."""
    monkeypatch.setenv("EVALFLEET_PILOT", "1")
    with hosting(tmp_path / "machine") as host:
        peer = host.peer()
        for id in ("a.0", "b.0"):
            last_words = 'echo 0 >"$EVALFLEET_OUT/result.json"; exit 0'
            peer.shell(
                id, f"trap '{last_words}' TERM; echo $$ >$EVALFLEET_OUT/pids; while :; do sleep 0.1; done"
            )
        (first,), (second,) = host.pids("a.0"), host.pids("b.0")
        os.kill(first, signal.SIGTERM)
        assert peer.end("a.0")["reason"] == "exited", "nobody has said that we are to go"
        os.kill(host.pid, signal.SIGCONT)
        os.kill(second, signal.SIGTERM)
        until((host.job("b.0") / "exit").exists, "its end")
        time.sleep(0.2)  # ten times as long as an end is doubted without a warning
        assert peer.ask("how", job="b.0")["state"] == "running", "its end was believed"
        os.kill(host.pid, signal.SIGTERM)
        assert peer.end("b.0")["reason"] == "evicted"


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"x\r\n\r\n{}",
        b"x\r\n\r\n{[}",
        b'x\r\n\r\n{"Events": [{"EventType": "Preempt"}]}',
        b'x\r\n\r\n{"Events": "Preempt"}',
    ],
)
def test_no_answer_is_no_notice(answer: bytes) -> None:
    assert not is_taken(answer, MATCH)


def test_an_answer_may_be_one_word() -> None:
    assert is_taken(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nTRUE\n", {"text": "TRUE"})
    assert not is_taken(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nFALSE\n", {"text": "TRUE"})
    assert not is_taken(b"", {"text": "TRUE"})


def test_what_an_earlier_version_watched_for_is_left_alone(tmp_path: Path) -> None:
    with hosting(tmp_path / "machine") as host:
        host.kill()
        old = {"address": "127.0.0.1", "port": 9, "path": PATH, "resource": "vm-1"}
        (host.directory / "watch").write_text(json.dumps(old))
        host.supervise()
        assert host.peer().run("a.0", "true")["exit_code"] == 0


# -- how the host came up --------------------------------------------------------------------------

STATUS = {
    "v1": {
        "datasource": "DataSourceAzure",
        "init-local": {"errors": [], "start": 1000.5, "finished": 1002.0},
        "modules-final": {"errors": [], "start": 1010.0, "finished": 1012.75},
        "stage": None,
    }
}


def test_cloud_init_tells_how_long_it_took(tmp_path: Path) -> None:
    folder = tmp_path / "cloud-init"
    assert cloud_init(str(folder)) == {}, "not every image has it"
    folder.mkdir()
    (folder / "status.json").write_text(json.dumps(STATUS))
    assert cloud_init(str(folder)) == {"cloud_init": "running"}
    (folder / "result.json").write_text("{}")
    assert cloud_init(str(folder)) == {"cloud_init": "done", "cloud_init_s": 12.25}
    (folder / "status.json").write_text("{")
    assert cloud_init(str(folder)) == {"cloud_init": "done", "cloud_init_s": 0.0}
    (folder / "disabled").touch()
    assert cloud_init(str(folder)) == {}


def test_what_set_the_machine_up_is_run_again_after_a_boot(tmp_path: Path) -> None:
    with hosting(tmp_path / "machine") as host:
        peer = host.peer()
        assert peer.run("setup-x-0", "true", in_bundle=True)["exit_code"] == 0
        host.peer(run=None).ask("anew")
        host.peer(run=None).ask("anew")
        assert peer.ask("how", job="setup-x-0")["state"] == "ended", "it is still the same boot"
        (host.directory / "boot").write_text("another boot")
        host.peer(run=None).ask("anew")
        assert peer.ask("how", job="setup-x-0")["state"] == "unknown"
