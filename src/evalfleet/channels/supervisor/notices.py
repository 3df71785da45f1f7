"""Is the machine to be taken back by its place? Some clouds tell the machine itself, half a minute ahead.

Whom to ask, and what in the answer means that, comes from the place. It is asked over a socket of our own,
so that no proxy is in between, and without a thread or a process: nothing of it is in the way of what runs
here.
"""

from __future__ import annotations

import errno
import json
import selectors
import socket
import time

TYPE_CHECKING = False  # importing typing would cost 3 ms
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

ASK_S = 1.0
ANSWER_S = 150.0  # the first answer of all may take two minutes
MOST_BYTES = 1 << 20
WEB_PORT = 80


class Notices:
    """A watch on a URL, asked every second. `taken` is called once, when an answer says that the machine is
    to go.

    `watch` has the `url` (plain http, an address instead of a name), the `headers` of the request, and the
    `match` that `is_taken` looks for.
    """

    def __init__(
        self, selector: selectors.BaseSelector, watch: dict[str, Any], taken: Callable[[], None]
    ) -> None:
        self.due = time.monotonic()
        self._selector = selector
        self._taken = taken
        host, _, path = str(watch["url"]).partition("://")[2].partition("/")
        address, _, port = host.partition(":")
        self._peer = (address, int(port or WEB_PORT))
        headers = {"Host": host, **watch["headers"], "Connection": "close"}
        lines = [f"GET /{path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        self._question = "".join(f"{line}\r\n" for line in [*lines, ""]).encode()
        self._match: dict[str, Any] = watch["match"]
        self._sock: socket.socket | None = None
        self._said = b""

    def tick(self, now: float) -> None:
        """Looks for a notice. Call it when it is `due`."""
        self.close()
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        if sock.connect_ex(self._peer) not in (0, errno.EINPROGRESS):
            sock.close()
            self.due = now + ASK_S
            return
        self._sock, self._said, self.due = sock, b"", now + ANSWER_S
        self._selector.register(sock, selectors.EVENT_WRITE, self._on_ready)

    def close(self) -> None:
        if self._sock is not None:
            self._selector.unregister(self._sock)
            self._sock.close()
            self._sock = None

    def _on_ready(self, key: selectors.SelectorKey, events: int) -> None:
        try:
            over = self._go_on(key, events)
        except BlockingIOError:
            return
        except OSError:
            over = True
        if over:
            self.close()
            self.due = time.monotonic() + ASK_S
            if is_taken(self._said, self._match):
                self.due = float("inf")
                self._taken()

    def _go_on(self, key: selectors.SelectorKey, events: int) -> bool:
        """Send the question, or read the answer. Returns True if that is all."""
        sock = self._sock
        if sock is None:
            return False
        if events & selectors.EVENT_WRITE:
            sock.send(self._question)
            self._selector.modify(sock, selectors.EVENT_READ, self._on_ready)
            return False
        data = sock.recv(1 << 16)
        self._said += data
        return not data or len(self._said) > MOST_BYTES


def is_taken(answer: bytes, match: dict[str, Any]) -> bool:
    """Return True if an answer announces that the machine is taken back.

    `match` has the word that the answer then is (`text`). Or the answer is a JSON object: then `match` names
    the list that is looked at (`list`) and what one of its items must have (`fields`): for each field one
    value, which the item has there, or among others. Upper and lower case are the same.
    """
    body = answer.partition(b"\r\n\r\n")[2]
    if "text" in match:
        return body.strip().lower() == str(match["text"]).lower().encode()
    try:
        items = json.loads(body[body.index(b"{") : body.rindex(b"}") + 1])[match["list"]]
        return any(all(_has(item[key], value) for key, value in match["fields"].items()) for item in items)
    except (ValueError, KeyError, TypeError):
        return False


def _has(found: Any, value: str) -> bool:
    if isinstance(found, str):
        return found.lower() == value.lower()
    return any(str(each).lower() == value.lower() for each in found)
