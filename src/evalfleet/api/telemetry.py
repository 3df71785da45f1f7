"""Runs as metrics for Prometheus and as traces for OpenTelemetry, read from the journal.

Nothing here is part of a run: an exporter that hangs or dies delays nobody.
"""

from __future__ import annotations

import gzip
import logging
from collections.abc import Sequence
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

import msgspec

from evalfleet.channels.samples import read_loads
from evalfleet.errors import JournalError, RequestError
from evalfleet.http_client import NoAnswer, ask
from evalfleet.journal import Store, StreamInfo
from evalfleet.journal.database import FILE, refuse_file
from evalfleet.model import SECOND, Micros, decodable
from evalfleet.planning.workspace import Workspace
from evalfleet.state import RunState
from evalfleet.version import install_command
from evalfleet.views.follow import Follower
from evalfleet.views.metrics import CONTENT_TYPE, exposition
from evalfleet.views.results import RunSummary
from evalfleet.views.spans import Span, trace_id

from .run import Run

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

PUSH_S = 10.0
BATCH = 512
"""Spans a request to a collector."""

log = logging.getLogger(__name__)


# -- metrics -----------------------------------------------------------------------------------------


class Exporter:
    """The metrics of a home's runs: of all that go on, and of those that ended not long ago.

    Each run is followed, so that a scrape reads only what is new. May be used from several threads.
    """

    def __init__(self, workspace: Workspace, ended_s: float) -> None:
        refuse_file(workspace.home)
        self._workspace = workspace
        self._ended_s = ended_s
        self._followers: dict[str, Follower] = {}
        self._lock = Lock()

    def text(self) -> str:
        """Raises JournalError."""
        with self._lock:
            home = self._workspace.home
            if not (home / FILE).exists():
                return ""
            store, now = Store.open(home, create=False, read_only=True), self._workspace.now()
            stored = [
                (info, body) for info, body in store.summaries(RunSummary.VERSION) if info.kind == "run"
            ]
            wanted = [info.name for info, body in stored if self._is_wanted(store, info, body, now)]
            self._followers = {name: self._followers.get(name) or Follower(store, name) for name in wanted}
            states = [state for follower in self._followers.values() if (state := _polled(follower))]
            return exposition(((state, read_loads(home, state.ready)) for state in states), now)

    def _is_wanted(self, store: Store, info: StreamInfo, body: str | None, now: Micros) -> bool:
        """Has it no summary yet, a controller, or an end that is not long ago?"""
        ended = msgspec.json.decode(body, type=decodable(_Ended)).ended_at if body is not None else None
        if ended is None or store.held(info, now) is not None:
            return True
        return datetime.fromisoformat(ended).timestamp() + self._ended_s >= now / SECOND


class _Ended(msgspec.Struct):
    """What of a run's summary is looked at."""

    ended_at: str | None = None


def _polled(follower: Follower) -> RunState | None:
    try:
        follower.poll()
    except JournalError as err:
        log.warning("run %s cannot be read: %s", follower.run, err)
        return None
    return follower.state


def server(exporter: Exporter, host: str, port: int) -> ThreadingHTTPServer:
    """Serves `/metrics`, once `serve_forever` is called. Raises RequestError if it cannot listen there."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 30

        def do_GET(self) -> None:
            if urlsplit(self.path).path != "/metrics":
                self.send_error(404, "metrics are at /metrics")
                return
            try:
                body = exporter.text().encode()
            except JournalError as err:
                self.send_error(503, explain=str(err))
                return
            zipped = "gzip" in self.headers.get("Accept-Encoding", "")
            body = gzip.compress(body, 1) if zipped else body
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            if zipped:
                self.send_header("Content-Encoding", "gzip")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            log.debug(format, *args)

    try:
        return ThreadingHTTPServer((host, port), Handler)
    except OSError as err:
        why = err.strerror or str(err)
        raise RequestError(f"cannot listen on {host} port {port}: {why}; choose another --port") from err


def push(run: Run, gateway: str) -> str:
    """Give the run's metrics to a Pushgateway, in place of what it had of this run. Returns where they are.

    Raises RequestError, which does not show the address: it may hold a password.
    """
    if not gateway.startswith(("http://", "https://")):
        raise RequestError("--push wants the address of a Pushgateway, such as http://gateway:9091")
    state = run.state()
    body = exposition([(state, read_loads(run.home, state.ready))], state.last_at).encode()
    path = f"/metrics/job/evalfleet/run/{quote(run.name, safe='')}"
    try:
        answer = ask(gateway.rstrip("/") + path, body, {"Content-Type": CONTENT_TYPE}, timeout_s=PUSH_S)
    except NoAnswer as err:
        raise RequestError(f"the Pushgateway cannot be reached ({err}); is --push right?") from err
    if answer.code >= 300:
        raise RequestError(f"the Pushgateway answered {answer.code}: {answer.text[:200].strip()}")
    return path


# -- traces ------------------------------------------------------------------------------------------


def send_trace(run: Run, endpoint: str | None = None) -> tuple[str, int]:
    """Send the run as spans to an OTLP collector by HTTP. Returns the trace's id and how many spans it has.

    Without an endpoint, OpenTelemetry's own variables say where, else it is localhost:4318. Ids follow from
    the run: sent again, they are the same spans. Raises RequestError.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import SpanExportResult
    except ImportError as err:
        raise RequestError(f"traces need OpenTelemetry: {install_command('otel')}") from err
    state = run.state()
    found = run.spans()
    url = None if endpoint is None else f"{endpoint.rstrip('/')}/v1/traces"
    exporter = OTLPSpanExporter(endpoint=url, timeout=PUSH_S)
    library = logging.getLogger("opentelemetry")
    propagate, library.propagate = library.propagate, False  # the error says all, in one line
    library.addHandler(mute := logging.NullHandler())
    try:
        for begin in range(0, len(found), BATCH):
            batch = _readable(found[begin : begin + BATCH], trace_id(state))
            if exporter.export(batch) is not SpanExportResult.SUCCESS:
                raise RequestError(
                    "the collector did not take the spans; is --otlp right (such as http://localhost:4318)?"
                )
    finally:
        exporter.shutdown()  # type: ignore[no-untyped-call]
        library.removeHandler(mute)
        library.propagate = propagate
    return f"{trace_id(state):032x}", len(found)


def _readable(found: Sequence[Span], trace: int) -> list[ReadableSpan]:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    def context(span: int) -> SpanContext:
        return SpanContext(trace, span, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    resource = Resource.create({"service.name": "evalfleet"})
    return [
        ReadableSpan(
            span.name,
            context(span.id),
            None if span.parent is None else context(span.parent),
            resource,
            dict(span.attributes),
            kind=SpanKind.CLIENT if "gen_ai.operation.name" in span.attributes else SpanKind.INTERNAL,
            status=Status() if span.error is None else Status(StatusCode.ERROR, span.error),
            start_time=span.start * 1000,
            end_time=max(span.start, span.end) * 1000,
        )
        for span in found
    ]
