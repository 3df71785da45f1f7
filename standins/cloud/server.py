"""HTTP in front of a cloud's API."""

from __future__ import annotations

import asyncio
import socket
import ssl
from abc import ABC, abstractmethod
from collections.abc import Mapping
from email.utils import formatdate

from aiohttp import web

from standins.cloud.words import Answer, Call

from . import listener
from .background import Background
from .clock import Clock
from .faults import Late, Lost

MOST_BYTES = 8 << 20


class ApiServer(ABC):
    """What the servers of all clouds have in common. `calls`: what clients asked for, and its status."""

    def __init__(self, clock: Clock, background: Background) -> None:
        self._clock, self._background = clock, background
        self._runners: list[web.AppRunner] = []
        self.calls: list[tuple[str, str, int]] = []
        self.ahead_s = 0.0
        """By how much the cloud's clock, in the `Date` of its answers, is ahead of this computer's."""

    @abstractmethod
    async def _handle(self, request: web.Request, anonymous: bool) -> web.StreamResponse: ...

    @abstractmethod
    async def _answered(self, call: Call, effect: object) -> Answer:
        """What the API answers; its errors are answers, too."""

    async def listen(
        self, sock: socket.socket, tls: ssl.SSLContext | None, *, anonymous: bool = False
    ) -> None:
        """`anonymous`: calls need no token, for clients that cannot be given one without https."""

        async def handle(request: web.Request) -> web.StreamResponse:
            return await self._handle(request, anonymous)

        app = web.Application(client_max_size=MOST_BYTES)
        app.router.add_route("*", "/{path:.*}", handle)
        self._runners.append(await listener.begin(app, sock, tls))

    async def close(self) -> None:
        for runner in self._runners:
            await listener.end(runner)

    @property
    def connections(self) -> int:
        """How many clients have open now."""
        return sum(len(runner.server.connections) for runner in self._runners if runner.server is not None)

    def _now(self) -> float:
        return self._clock.now()

    async def _carried_out(self, call: Call, effect: object) -> Answer | None:
        """The answer to a call that is not refused. None: the connection breaks."""
        if isinstance(effect, Late):
            self._background.spawn(self._later(call, effect.delay_s))
            return None
        # a client that leaves does not stop what it asked for
        answer = await asyncio.shield(asyncio.ensure_future(self._answered(call, effect)))
        return None if isinstance(effect, Lost) else answer

    async def _later(self, call: Call, delay_s: float) -> None:
        await self._clock.sleep(delay_s)
        await self._answered(call, None)

    def _sent(
        self, request: web.Request, path: str, answer: Answer | None, headers: Mapping[str, str]
    ) -> web.Response:
        """Note the call, and send its answer, or hang up."""
        self.calls.append((request.method, path, answer.status if answer else 0))
        if answer is None:
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=500)
        date = formatdate(self._now() + self.ahead_s, usegmt=True)
        return response(answer, {"Date": date, **headers})


def response(answer: Answer, headers: Mapping[str, str] | None = None) -> web.Response:
    body, status, all_headers = answer.body, answer.status, {**(headers or {}), **answer.headers}
    if isinstance(body, bytes):
        kind = {"Content-Type": "application/octet-stream"}
        return web.Response(status=status, body=body, headers={**all_headers, **kind})
    if isinstance(body, str):
        return web.Response(status=status, text=body, headers=all_headers)
    if body is None:
        return web.Response(status=status, headers=all_headers)
    return web.json_response(body, status=status, headers=all_headers)
