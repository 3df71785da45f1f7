"""Connections: JSON lines in and out, written in batches."""

from __future__ import annotations

import json
import selectors
import socket
import time

from .host import NEVER

TYPE_CHECKING = False  # importing typing would cost 3 ms
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

LINE_CAP = 16 << 20
FIRST_LINE_CAP = 1 << 16
"""Bytes that a connection may send before it has shown the machine's key."""
MOST_STRANGERS = 32
"""Connections without the key. If there are more, the oldest is dropped: a job must not use up ours."""
BACKLOG_CAP = 64 << 20
LATE_S = 0.1


class Client:
    """A connection. `known` is set once it has shown the machine's key, `run` once it said hello."""

    __slots__ = ("closing", "epoch", "inbox", "known", "outbox", "run", "sock", "writing")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.inbox = b""
        self.outbox: list[bytes] = []
        self.run: str | None = None
        self.epoch = 0
        self.closing = self.writing = self.known = False


class Clients:
    """All connections. `receive(client, line)` is called for each line; `flush` sends what was said.

    What nobody is in a hurry to hear may be late: it goes with what is said next, or when `late_due` is due.
    """

    def __init__(self, selector: selectors.BaseSelector, receive: Callable[[Client, bytes], None]) -> None:
        self.all: set[Client] = set()
        self._selector = selector
        self._receive = receive
        self._dirty: set[Client] = set()
        self._late: set[Client] = set()
        self._strangers: list[Client] = []
        self.late_due = NEVER

    def add(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        client = Client(sock)
        self.all.add(client)
        self._strangers = [
            stranger for stranger in self._strangers if stranger in self.all and not stranger.known
        ]
        self._strangers.append(client)
        if len(self._strangers) > MOST_STRANGERS:
            self.drop(self._strangers.pop(0))

        def ready(key: selectors.SelectorKey, events: int) -> None:
            self._on_ready(client, events)

        self._selector.register(sock, selectors.EVENT_READ, ready)

    def _on_ready(self, client: Client, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._dirty.add(client)
        if not events & selectors.EVENT_READ or client.closing:
            return
        try:
            data = client.sock.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.drop(client)
            return
        *lines, client.inbox = (client.inbox + data).split(b"\n")
        for line in lines:
            if not client.closing:
                self._receive(client, line)
        if len(client.inbox) > (LINE_CAP if client.known else FIRST_LINE_CAP):
            self.refuse(client, None, "garbage", "the message is too long", close=True)

    @property
    def listening(self) -> bool:
        """Return True if some connection said hello, so that it is pushed to."""
        return any(client.run is not None for client in self.all)

    def push(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        for client in self.all:
            if client.run is not None and not client.closing:
                client.outbox.append(data)
                self._dirty.add(client)

    def answer(self, client: Client, message: dict[str, Any], late: bool = False) -> None:
        client.outbox.append(json.dumps(message).encode() + b"\n")
        if not late:
            self._dirty.add(client)
        elif client not in self._dirty:
            self._late.add(client)
            self.late_due = min(self.late_due, time.monotonic() + LATE_S)

    def refuse(self, client: Client, n: Any, error: str, detail: str, close: bool = False) -> None:
        self.answer(client, {"n": n, "error": error, "detail": detail})
        client.closing = client.closing or close

    def hurry(self) -> None:
        """Let what is late go with the next flush."""
        self._dirty |= self._late
        self._late.clear()
        self.late_due = NEVER

    def flush(self) -> None:
        self._late -= self._dirty
        if not self._late:
            self.late_due = NEVER
        while self._dirty:
            client = self._dirty.pop()
            if client in self.all:
                self._send(client)

    def _send(self, client: Client) -> None:
        data = b"".join(client.outbox)
        try:
            sent = client.sock.send(data) if data else 0
        except BlockingIOError:
            sent = 0
        except OSError:
            self.drop(client)
            return
        client.outbox = [data[sent:]] if sent < len(data) else []
        if len(data) - sent > BACKLOG_CAP or (client.closing and not client.outbox):
            self.drop(client)
        elif bool(client.outbox) != client.writing:
            client.writing = bool(client.outbox)
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.writing else 0)
            self._selector.modify(client.sock, wanted, self._selector.get_key(client.sock).data)

    def drop(self, client: Client) -> None:
        if client in self.all:
            self.all.discard(client)
            self._selector.unregister(client.sock)
            client.sock.close()

    def drop_socket(self, sock: Any) -> None:
        for client in [client for client in self.all if client.sock is sock]:
            self.drop(client)

    def close(self) -> None:
        """Send what is left, as far as it goes at once, and hang up."""
        self.hurry()
        self.flush()
        for client in list(self.all):
            self.drop(client)
