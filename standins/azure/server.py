"""HTTP in front of the stand-in."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import ssl
import time
import uuid
from email.utils import formatdate
from typing import Any
from urllib.parse import unquote

from aiohttp import web

from standins.cloud import listener
from standins.cloud.faults import Failed, Late, Lost, Stuck

from .arm import Arm
from .cloud import Cloud
from .faults import Refused, Throttled, refusal
from .identity import Identity
from .power import LOGS
from .prices import retail_prices
from .words import TENANT, Answer, ArmError, Call

MSI_PATH = "/msi/token"
MOST_BYTES = 8 << 20


class Server:
    """`calls`: how often each verb was asked for, by clients; for figures."""

    def __init__(self, cloud: Cloud, arm: Arm, identity: Identity) -> None:
        self._cloud = cloud
        self._arm = arm
        self._identity = identity
        self._runners: list[web.AppRunner] = []
        self.calls: list[tuple[str, str, int]] = []
        self.ahead_s = 0.0
        """By how much Azure's clock, in the `Date` of its answers, is ahead of this computer's."""

    async def listen(self, sock: socket.socket, tls: ssl.SSLContext | None) -> None:
        app = web.Application(client_max_size=MOST_BYTES)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runners.append(await listener.begin(app, sock, tls))

    async def close(self) -> None:
        for runner in self._runners:
            await listener.end(runner)

    @property
    def connections(self) -> int:
        """How many clients have open now."""
        return sum(len(each.server.connections) for each in self._runners if each.server is not None)

    # -- requests ------------------------------------------------------------------------------

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path = "/" + "/".join(word for word in unquote(request.path).split("/") if word)
        base = f"{request.scheme}://{request.host}"
        try:
            writes = request.method in ("PUT", "POST", "PATCH") and _is_json(request)
            body = lenient(await request.text()) if writes else {}
        except json.JSONDecodeError:
            return _response(
                ArmError(400, "InvalidRequestContent", "The request content is no JSON.").answer()
            )
        call = Call(request.method, path, dict(request.query), body, base)
        answer = await self._open(call, request)
        if answer is None:
            answer = await self._guarded(call, request)
        self.calls.append((call.method, call.path, answer.status if answer else 0))
        if answer is None:
            return _hang_up(request)
        response = _response(answer)
        response.headers["Date"] = formatdate(time.time() + self.ahead_s, usegmt=True)
        return response

    async def _open(self, call: Call, request: web.Request) -> Answer | None:
        """What needs no token."""
        lower = call.path.lower()
        if lower == MSI_PATH:
            return self._identity.managed_token(call, request.headers.get("X-IDENTITY-HEADER", ""))
        if lower.endswith("/v2.0/.well-known/openid-configuration"):
            return self._identity.configuration(call.base)
        if lower == f"/{TENANT}/oauth2/v2.0/token" and call.method == "POST":
            form = await request.post()
            return self._identity.client_token({key: str(value) for key, value in form.items()})
        if lower == "/metadata/endpoints":
            return Answer(200, self._identity.endpoints(call.base))
        if lower == "/api/retail/prices":
            return retail_prices(call)
        if lower.startswith(LOGS):
            return Answer(200, self._cloud.machines.log(call.path.removeprefix(LOGS)))
        return None

    async def _guarded(self, call: Call, request: web.Request) -> Answer | None:
        """None: the connection breaks."""
        try:
            self._identity.check(request.headers.get("Authorization", ""))
        except ArmError as error:
            return error.answer()
        effect = self._cloud.faults.pick(call, self._cloud.clock.now())
        match effect:
            case Throttled() | Failed() | Refused():
                return refusal(effect)
            case Late(delay_s):
                self._cloud.operations.spawn(self._later(call, delay_s))
                return None
            case Lost():
                await self._arm.answer(call)
                return None
            case Stuck(seconds):
                return await self._arm.answer(call, seconds)
            case None:
                # a client that leaves does not stop what it asked for
                return await asyncio.shield(asyncio.ensure_future(self._arm.answer(call)))

    async def _later(self, call: Call, delay_s: float) -> None:
        await self._cloud.clock.sleep(delay_s)
        await self._arm.answer(call)


_COMMENTS = re.compile(r'("(?:[^"\\]|\\.)*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_LOOSE = re.compile(r'("(?:[^"\\]|\\.)*")|([A-Za-z_$][\w$]*)(?=\s*:)|,(?=\s*[}\]])')
"""A text in quotes, which stays; or what JSON does not allow: a bare key, a comma before a bracket."""


def lenient(text: str) -> Any:
    """JSON as ARM reads it: with comments, commas before brackets, and keys without quotes.

    `az` sends a template as it is in its file.
    """
    try:
        return json.loads(text, strict=False)
    except json.JSONDecodeError:
        pass

    text = _COMMENTS.sub(lambda found: found[1] or "", text)
    text = _LOOSE.sub(lambda found: found[1] or (f'"{found[2]}"' if found[2] else ""), text)
    return json.loads(text, strict=False)


def _is_json(request: web.Request) -> bool:
    return request.can_read_body and "json" in request.content_type


def _response(answer: Answer) -> web.Response:
    id = str(uuid.uuid4())
    headers = {
        "x-ms-request-id": id,
        "x-ms-correlation-request-id": id,
        "x-ms-ratelimit-remaining-subscription-reads": "11999",
        **answer.headers,
    }
    if isinstance(answer.body, str):
        return web.Response(status=answer.status, text=answer.body, headers=headers)
    if answer.body is None:
        return web.Response(status=answer.status, headers=headers)
    return web.json_response(answer.body, status=answer.status, headers=headers)


def _hang_up(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=500)
