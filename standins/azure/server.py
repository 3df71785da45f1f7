"""HTTP in front of the stand-in."""

from __future__ import annotations

import json
import re
import time
import uuid
from typing import Any
from urllib.parse import unquote

from aiohttp import web

from standins.cloud.faults import Failed, Stuck
from standins.cloud.server import response
from standins.cloud.words import Answer, Call

from .arm import Arm
from .cloud import Cloud
from .entra import EntraServer
from .faults import Refused, Throttled, refusal
from .identity import RESOURCE_MANAGER, Identity
from .power import LOGS
from .prices import retail_prices
from .words import ArmError


class Server(EntraServer):
    """HTTP in front of ARM."""

    def __init__(self, cloud: Cloud, arm: Arm, identity: Identity) -> None:
        super().__init__(cloud.clock, cloud.operations, identity)
        self._cloud, self._arm = cloud, arm

    def _now(self) -> float:
        return time.time()  # expiries count from what Azure's clock says, also after a jump of the stand-in's

    # -- requests ------------------------------------------------------------------------------

    async def _handle(self, request: web.Request, anonymous: bool) -> web.StreamResponse:
        path = "/" + "/".join(word for word in unquote(request.path).split("/") if word)
        base = f"{request.scheme}://{request.host}"
        try:
            writes = request.method in ("PUT", "POST", "PATCH") and _is_json(request)
            body = lenient(await request.text()) if writes else {}
        except json.JSONDecodeError:
            return response(
                ArmError(400, "InvalidRequestContent", "The request content is no JSON.").answer(), _ids()
            )
        call = Call(request.method, path, dict(request.query), body, base)
        answer = await self._open(call, request)
        if answer is None:
            answer = await self._guarded(call, request)
        return self._sent(request, call.path, answer, _ids())

    async def _open(self, call: Call, request: web.Request) -> Answer | None:
        """What needs no token."""
        lower = call.path.lower()
        if (answer := await self._token(call, request)) is not None:
            return answer
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
            own = (call.base, f"{call.base}/")  # as in a cloud that is not the public one
            self._identity.check(request.headers.get("Authorization", ""), (*RESOURCE_MANAGER, *own))
        except ArmError as error:
            return error.answer()
        effect = self._cloud.faults.pick(call, self._cloud.clock.now())
        match effect:
            case Throttled() | Failed() | Refused():
                return refusal(effect)
            case _:
                return await self._carried_out(call, effect)

    async def _answered(self, call: Call, effect: object) -> Answer:
        return await self._arm.answer(call, effect.seconds if isinstance(effect, Stuck) else 0.0)


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


def _ids() -> dict[str, str]:
    id = str(uuid.uuid4())
    return {
        "x-ms-request-id": id,
        "x-ms-correlation-request-id": id,
        "x-ms-ratelimit-remaining-subscription-reads": "11999",
    }
