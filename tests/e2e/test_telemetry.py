"""Runs as metrics and traces: a real Prometheus reads them, and a collector and a gateway of our own."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from evalfleet.channels.samples import ENGINE_DOWN, Newest
from evalfleet.views.metrics import DURATIONS, FAMILIES, RUN_INFO, exposition
from tests.desk import Process
from tests.e2e.harness import Fleet, task
from tests.e2e.metered import metered, serving_models
from tests.unit.views_feed import Feed
from tests.waiting import until

DOCS = Path(__file__).parents[2] / "docs"
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="Prometheus is not installed: apt-get install prometheus"
)
DO = """
call("gpt-4o")
with open(os.environ["EVALFLEET_OUT"] + "/traj.jsonl", "w") as file:
    json.dump({"at": time.time(), "action": "click"}, file)
score(1)
"""
PRICES = '[model.prices]\n"gpt-4o" = {in = 2, out = 8}\n'
FORGED = """
with open(os.environ["EVALFLEET_OUT"] + "/calls.jsonl", "w") as file:
    json.dump({"n": 1, "at": time.time(), "model": "forged", "status": 200, "ms": 1}, file)
score(0)
"""


class Receiver:
    """An HTTP server that keeps what it is sent: path -> bodies."""

    def __init__(self) -> None:
        self.got: dict[str, list[bytes]] = {}
        self.code = 200
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                receiver.got.setdefault(self.path, []).append(body)
                self.send_response(receiver.code)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self._thread = threading.Thread(target=self.server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with closing(Receiver()) as served:
        yield served


@pytest.fixture
def fleet_with_run(fleet: Fleet) -> Fleet:
    tasks = [task('a"\\', DO), task("b", FORGED), task("c", "pass")]
    with serving_models(fleet.folder) as models:
        metered(fleet, models, tasks, PRICES, steps="traj.jsonl")
        assert fleet.run("--workers", "2", "--attempts", "2", "--allow-broken", "1").code == 0
    return fleet


def address_of(exporter: Process) -> str:
    until(lambda: "/metrics" in exporter.out, "the exporter to listen")
    return exporter.out.split()[-1]


@needs_prometheus
def test_prometheus_scrapes_a_run_while_it_goes_on_and_after(fleet: Fleet, tmp_path: Path) -> None:
    fleet.bench([task("a", "score 1"), task("b", "gate go; score 0")])
    run = fleet.start_run("--workers", "2", "--model", 'm"1')
    fleet.started("b.0")
    exporter = fleet.start("metrics", "--port", "0")
    address = address_of(exporter)
    config, log = tmp_path / "prometheus.yml", tmp_path / "prometheus.log"
    target = address.removeprefix("http://").removesuffix("/metrics")
    config.write_text(
        "global: {scrape_interval: 1s}\n"
        f"scrape_configs: [{{job_name: evalfleet, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    argv = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    with log.open("wb") as said:
        prometheus = subprocess.Popen([*argv, "--web.listen-address=127.0.0.1:0"], stdout=said, stderr=said)
    try:
        listens = re.compile(r'"Listening on" address=127\.0\.0\.1:(\d+)')
        port = until(lambda: listens.search(log.read_text()), log.read_text)[1]

        def value(query: str) -> float | None:
            url = f"http://127.0.0.1:{port}/api/v1/query?query={urllib.request.quote(query)}"  # type: ignore[attr-defined]
            try:
                found = json.loads(urllib.request.urlopen(url, timeout=10).read())["data"]["result"]
            except OSError:
                return None
            return float(found[0]["value"][1]) if found else None

        until(lambda: value('evalfleet_run_tasks{run="r",status="scored"}') == 1, "a score, live")
        assert value('evalfleet_run_tasks{run="r",status="running"}') == 1
        assert value('evalfleet_run_info{run="r",model="m\\"1",status="running"}') == 1
        rate = 'evalfleet_machine_network_bytes_per_second{run="r",direction="received"}'
        until(lambda: value(rate) is not None, "a rate over the network, which takes two samples")
        fleet.open_gate("go")
        run.finish()
        until(lambda: value('evalfleet_run_tasks{run="r",status="scored"}') == 2, "the end")
        assert value('evalfleet_run_pass_ratio{run="r"}') == 0.5
        assert value("sum(evalfleet_run_machines) or vector(0)") == 0
    finally:
        prometheus.terminate()
        prometheus.wait()
    exporter.interrupt()
    assert exporter.wait().code == 130


def check_by_promtool(text: str) -> None:
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


@needs_prometheus
def test_what_machines_tell_of_network_and_container_engine_is_among_the_metrics() -> None:
    feed = Feed(tasks=1, machines=3)
    one, two, three = feed.state.machines
    loads = {
        one: Newest(0.5, 0.25, 0.1, received=2e6, sent=0.0, containers=4),
        two: Newest(0.5, 0.25, 0.1, containers=ENGINE_DOWN),
        three: Newest(0.5, 0.25, 0.1),
    }
    text = exposition([(feed.state, loads)], feed.now)
    check_by_promtool(text)
    prefix = "evalfleet_machine_"
    told = [line.removeprefix(prefix) for line in text.splitlines() if line.startswith(prefix)]
    assert [line for line in told if not line.startswith("used_ratio")] == [
        'network_bytes_per_second{run="run1",machine="worker-1",direction="received"} 2000000',
        'network_bytes_per_second{run="run1",machine="worker-1",direction="sent"} 0',
        'container_engine_up{run="run1",machine="worker-1"} 1',
        'container_engine_up{run="run1",machine="worker-2"} 0',
        'containers{run="run1",machine="worker-1"} 4',
    ]


@needs_prometheus
def test_promtool_finds_no_fault_in_the_metrics(fleet_with_run: Fleet) -> None:
    text = fleet_with_run("metrics", "r").out
    check_by_promtool(text)
    assert 'evalfleet_run_broken_attempts_total{run="r",cause="result"} 2\n' in text
    assert 'evalfleet_attempt_duration_seconds_count{run="r"} 2\n' in text


def test_a_run_that_is_over_is_pushed(fleet_with_run: Fleet, receiver: Receiver) -> None:
    done = fleet_with_run("metrics", "r", "--push", receiver.url)
    assert done.out == "pushed to /metrics/job/evalfleet/run/r\n"
    (body,) = receiver.got["/metrics/job/evalfleet/run/r"]
    assert b'evalfleet_run_tasks{run="r",status="scored"} 2\n' in body
    receiver.code = 400
    assert "the Pushgateway answered 400" in refused(fleet_with_run, "metrics", "r", "--push", receiver.url)


def test_a_run_is_sent_as_a_trace(fleet_with_run: Fleet, receiver: Receiver) -> None:
    for _ in range(2):
        assert fleet_with_run("traces", "r", "--otlp", receiver.url).code == 0
    first, again = (spans_of(body) for body in receiver.got["/v1/traces"])
    assert first == again, "sent again, they are the same spans"
    by_name = {span["name"]: span for span in first.values()}
    run, call = by_name["run r"], by_name["chat gpt-4o"]
    step = first[call["parent"]]
    attempt = first[step["parent"]]
    assert (step["name"], step["evalfleet.action"]) == ("step 0", "click")
    machine = first[attempt["parent"]]
    assert (run["parent"], machine["parent"], machine["name"].split()[0]) == ("", run["id"], "machine")
    assert (attempt["name"], attempt["evalfleet.passed"]) == ('attempt a"\\.0', True)
    own = fleet_with_run.home / fleet_with_run.task('a"\\')["artifacts"] / "calls.jsonl"
    kept = json.loads(own.read_text().splitlines()[-1])
    assert (call["gen_ai.usage.input_tokens"], call["gen_ai.provider.name"]) == (kept["in"], "openai")
    assert call["ns"] == pytest.approx(kept["ms"] * 1e6, abs=1e3)
    assert "chat forged" not in by_name
    broken = by_name["attempt c.1"]
    assert (broken["error.type"], broken["status"]) == ("result", 2)


def spans_of(body: bytes) -> dict[str, dict[str, Any]]:
    request = ExportTraceServiceRequest.FromString(body)
    spans = [span for each in request.resource_spans for scope in each.scope_spans for span in scope.spans]
    return {
        span.span_id.hex(): {
            "id": span.span_id.hex(),
            "parent": span.parent_span_id.hex(),
            "name": span.name,
            "ns": span.end_time_unix_nano - span.start_time_unix_nano,
            "status": span.status.code,
            **{
                pair.key: getattr(pair.value, str(pair.value.WhichOneof("value"))) for pair in span.attributes
            },
        }
        for span in spans
    }


def test_every_metric_is_documented_and_the_dashboard_uses_no_other() -> None:
    page = (DOCS / "telemetry.md").read_text()
    names = {family.name for family in (*FAMILIES.values(), RUN_INFO, DURATIONS)}
    assert {name for name in names if f"| `{name}` |" not in page} == set()
    dashboard = json.loads((DOCS / "grafana.json").read_text())
    used = set(re.findall(r"evalfleet_\w+", json.dumps(dashboard["panels"])))
    assert len(dashboard["panels"]) >= 8
    assert {re.sub("_(bucket|sum|count)$", "", name) for name in used} <= names


def refused(fleet: Fleet, *words: str) -> str:
    done = fleet(*words)
    assert (done.code, done.out) == (2, ""), done
    assert done.err.rstrip("\n").count("\n") == 0, done.err
    return done.err


def test_what_cannot_be_done_is_said_in_one_line(fleet_with_run: Fleet, receiver: Receiver) -> None:
    taken = str(receiver.server.server_port)
    assert "Address already in use; choose another --port" in refused(
        fleet_with_run, "metrics", "--port", taken
    )
    assert "is no port" in refused(fleet_with_run, "metrics", "--port", "70000")
    assert "there is no run" in refused(fleet_with_run, "metrics", "nope")
    assert "such as http://gateway:9091" in refused(fleet_with_run, "metrics", "r", "--push", "gateway")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and does not listen, so nobody does
        gone = f"http://user:secret@127.0.0.1:{silent.getsockname()[1]}"
        said = refused(fleet_with_run, "metrics", "r", "--push", gone)
    assert "cannot be reached" in said
    assert "secret" not in said
    receiver.code = 400
    assert "did not take the spans" in refused(fleet_with_run, "traces", "r", "--otlp", receiver.url)
