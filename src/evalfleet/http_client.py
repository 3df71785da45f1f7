"""Asking by HTTP with nothing but the standard library: bounded in time and size, with errors in words."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

MOST_BYTES = 4 << 20
PIECE_BYTES = 65_536


class HttpAnswer(NamedTuple):
    """What a server answered, whatever that was."""

    code: int
    body: bytes
    retry_after: str = ""
    """When to ask again, as the server says."""

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")


class NoAnswer(OSError):
    """No usable answer came. The words show neither the address nor what was sent: both may be secret."""


def ask(
    url: str,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    *,
    timeout_s: float,
    most_bytes: int = MOST_BYTES,
    direct: bool = False,
) -> HttpAnswer:
    """The answer to a GET, or to a POST if there is a body. Raises NoAnswer.

    `direct`: past any proxy, because what an environment says of proxies is not about this computer.
    """
    import http.client  # here, because it takes a while
    import urllib.error
    import urllib.request

    until = time.monotonic() + timeout_s
    proxies = [urllib.request.ProxyHandler({})] if direct else []
    try:
        request = urllib.request.Request(url, body, dict(headers or {}))
        with urllib.request.build_opener(*proxies).open(request, timeout=timeout_s) as answer:
            return HttpAnswer(answer.status, _read(answer, until, most_bytes))
    except urllib.error.HTTPError as err:
        with err:
            return HttpAnswer(err.code, _read(err, until, most_bytes), err.headers.get("Retry-After", ""))
    except NoAnswer:
        raise
    except urllib.error.URLError as err:
        raise NoAnswer(_words(err.reason)) from err
    except (OSError, ValueError, http.client.HTTPException) as err:
        raise NoAnswer(_words(err)) from err


def _read(answer: Any, until: float, most_bytes: int) -> bytes:
    """Piece by piece, so that a server that dribbles does not keep us for ever."""
    body = b""
    while piece := answer.read1(PIECE_BYTES):
        body += piece
        if len(body) > most_bytes:
            raise NoAnswer(f"it answers with more than {most_bytes:,} bytes")
        if time.monotonic() > until:
            raise NoAnswer("it did not end its answer in time")
    return body


def _words(reason: object) -> str:
    """An operating system's own words, or the kind of error: other texts may quote the address."""
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror
    return "no answer in time" if isinstance(reason, TimeoutError) else type(reason).__name__
