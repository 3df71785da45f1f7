"""A browser's part of the dashboard, without a browser: what it asks for, and the tables that it keeps."""

from __future__ import annotations

import gzip
import http.client
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import quote

from tests.desk import Desk, Process
from tests.waiting import PATIENCE_S, until

LINK = re.compile(r"http://(?P<host>[^/]+):(?P<port>\d+)/\?token=(?P<token>\S+)")
Document = dict[str, Any]


class Answer(NamedTuple):
    """What the server has answered."""

    code: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def refused(self, code: int, *words: str) -> None:
        """With this code, and one line that has the words."""
        told = self.body.decode()
        assert self.code == code, (self.code, told)
        assert all(word in told for word in words), told
        assert "\n" not in told.strip()


class Dashboard:
    """An `evalfleet serve` that runs, and somebody with its link."""

    def __init__(self, process: Process) -> None:
        self.process = process
        found = until(lambda: LINK.search(process.out) or not process.lives, lambda: process.said)
        assert isinstance(found, re.Match), process.said
        self.host, self.port, self.token = found["host"], int(found["port"]), found["token"]

    def ask(
        self,
        path: str,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        body: object = None,
        token: bool = True,
    ) -> Answer:
        given = {"Accept-Encoding": "gzip", **({"Authorization": f"Bearer {self.token}"} if token else {})}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            sent = None if body is None else json.dumps(body)
            connection.request(method, path, sent, {**given, **(headers or {})})
            answer = connection.getresponse()
            told = {name.lower(): value for name, value in answer.getheaders()}
            data = answer.read()
        finally:
            connection.close()
        return Answer(answer.status, told, gzip.decompress(data) if told.get("content-encoding") else data)

    def get(self, path: str) -> Any:
        answer = self.ask(path)
        assert answer.code == 200, (path, answer.code, answer.body[:500])
        return answer.json

    def change(self, path: str, document: object) -> Answer:
        return self.ask(path, "POST", {"X-Evalfleet": "1"}, document)

    def snapshot(self, run: str = "r") -> Tables:
        return Tables(self.get(f"/api/runs/{run}"))

    @contextmanager
    def stream(self, run: str = "r", after: int | None = None) -> Iterator[Stream]:
        headers = {"Authorization": f"Bearer {self.token}"}
        headers |= {} if after is None else {"Last-Event-ID": str(after)}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request("GET", f"/api/runs/{run}/events", headers=headers)
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            yield Stream(answer)
        finally:
            connection.close()


class Stream:
    """Server-sent events, one at a time."""

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self._answer = answer

    def next(self) -> tuple[str, Document]:
        """The next event's kind and data; comments are passed over."""
        kind, data = "message", b""
        while True:
            line = self._answer.readline()
            assert line, "the stream has ended"
            if line.startswith(b"event:"):
                kind = line[6:].strip().decode()
            elif line.startswith(b"data:"):
                data = line[5:].strip()
            elif not line.strip() and data:
                return kind, json.loads(data)


class Tables:
    """What a page keeps of a run: a snapshot, and the changes that followed."""

    def __init__(self, snapshot: Document) -> None:
        self.seq: int = snapshot["seq"]
        self.run: Document = snapshot["run"]
        self.tasks = _rows(snapshot, "tasks")
        self.attempts = _rows(snapshot, "attempts")
        self.machines = _rows(snapshot, "machines")
        self._columns = {name: snapshot[name]["columns"] for name in ("tasks", "attempts", "machines")}

    def take(self, event: Document) -> None:
        self.seq, self.run = event["seq"], event.get("run", self.run)
        for name, columns in self._columns.items():
            for row in event.get(name, ()):
                entry = dict(zip(columns, row, strict=True))
                getattr(self, name)[entry["id"]] = entry


def _rows(snapshot: Document, name: str) -> dict[str, Document]:
    table = snapshot[name]
    entries = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    return {entry["id"]: entry for entry in entries}


def dashboard(desk: Desk, *words: str) -> Dashboard:
    """One that is started at a desk, on a port that is free."""
    return Dashboard(desk.start("serve", "--port", "0", *words))


def part(name: str) -> str:
    """A name as one part of a path."""
    return quote(name, safe="")
