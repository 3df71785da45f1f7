"""The stand-in as tests hold it: a server in a thread, and hands to read and break it with."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

from aiohttp import web

from lab.network import GATEWAY
from standins.cloud.faults import Failed
from standins.cloud.hosts import Hosts
from standins.cloud.machines import Machines
from standins.cloud.meters import Meters
from standins.cloud.server import ApiServer, response
from standins.cloud.standin import LOOPBACK, CloudStandIn
from standins.cloud.words import Answer, Call

from . import contract, price_list
from .api import Api
from .cloud import Cloud, Instance, Timing
from .faults import Faults, Refused, Throttled, refusal
from .identity import IMPERSONATED, Identity
from .metadata import Metadata
from .words import PREFIX, PROJECT, ApiError

TOKEN_PATH = "/token"


class Server(ApiServer):
    """HTTP in front of the API."""

    def __init__(self, cloud: Cloud, api: Api, identity: Identity) -> None:
        super().__init__(cloud.clock, cloud)
        self._cloud = cloud
        self._api = api
        self._identity = identity
        path = contract.document_path()
        self._contract = contract.load(path) if path is not None else None
        self.violations: list[str] = []
        """What does not agree with Google's own description of the API."""

    async def _handle(self, request: web.Request, anonymous: bool) -> web.StreamResponse:
        path = unquote(request.path)
        if path == TOKEN_PATH and request.method == "POST":
            form = await request.post()
            return response(self._identity.exchange({key: str(value) for key, value in form.items()}))
        if request.method == "POST" and (whose := IMPERSONATED.fullmatch(path)):
            authorization, order = request.headers.get("Authorization", ""), await request.json()
            return response(self._identity.impersonate(whose[1], authorization, order))
        if request.method == "GET" and (told := self._identity.of_the_machine(path)) is not None:
            return response(told)
        base = f"{request.scheme}://{request.host}"
        query = {key: value for key, value in request.query.items() if key != "alt"}
        text = await request.text()
        try:
            body = json.loads(text) if text.strip() else None
            call = Call(request.method, path.removeprefix(PREFIX).rstrip("/"), query, body, base)
            answer = await self._guarded(call, "" if anonymous else request.headers.get("Authorization", "?"))
        except json.JSONDecodeError:
            answer = ApiError(400, "parseError", "Parse Error").answer()
        return self._sent(request, path, answer, {})

    async def _guarded(self, call: Call, authorization: str) -> Answer | None:
        """None: the connection breaks."""
        cloud = self._cloud
        try:
            if authorization:
                self._identity.check(authorization)
            if cloud.faults.api_is_off:
                message = (
                    f"Compute Engine API has not been used in project {PROJECT} before or it is disabled."
                )
                raise ApiError(403, "accessNotConfigured", message, info="SERVICE_DISABLED")
            effect = cloud.faults.pick(call, cloud.clock.now())
            match effect:
                case Throttled() | Failed() | Refused():
                    return refusal(effect)
                case _:
                    return await self._carried_out(call, effect)
        except ApiError as error:
            return error.answer()

    async def _checked(self, call: Call, effect: object) -> Answer:
        """Both ways by Google's own description, where that is at hand. What it does not allow is refused."""
        if call.path.startswith("/v1/"):
            # another service of Google's, with its own document
            return Answer(200, price_list.catalogue(call))
        if self._contract is not None:
            wrong = self._contract.problems_of_call(call.method, call.path, call.query, call.body)
            if wrong:
                self.violations += wrong
                raise ApiError(400, "invalid", f"Invalid JSON payload received. {wrong[0]}")
        body = await self._api.answer(call, effect)  # type: ignore[arg-type]
        if self._contract is not None:
            self.violations += self._contract.problems_of_answer(call.method, call.path, body)
        return Answer(200, body)

    async def _answered(self, call: Call, effect: object) -> Answer:
        try:
            return await self._checked(call, effect)
        except ApiError as error:
            return error.answer()


class StandIn(CloudStandIn):
    """The stand-in for Compute Engine.

    `anonymous_endpoint`: the API over http, without tokens, for Google's clients. `environment`: what makes
    google-auth work against it. Tests set faults, quota and the like through `cloud`, before clients come or
    with `do`, which runs in the server's thread.
    """

    project = PROJECT
    vendor_names = ("oauth2.googleapis.com", "iamcredentials.googleapis.com")

    def __init__(
        self,
        machines: Machines | None = None,
        *,
        timing: Timing | None = None,
        speed: float = 1.0,
        seed: int = 0,
    ) -> None:
        super().__init__("gce", machines, speed)
        self.cloud = Cloud(self.clock, self._machines, timing or Timing(), seed)
        self.identity = Identity()
        self.api = Api(self.cloud)
        self.server = Server(self.cloud, self.api, self.identity)
        self.metadata = Metadata(self.cloud, self.api.instances)
        folder, anonymous = Path(self._folder.name), self._ports[1]
        self.anonymous_endpoint = f"http://{LOOPBACK}:{anonymous}{PREFIX}"
        self.key, self._key_inside = folder / "key.json", folder / "inside.json"
        self.identity.write_key(self.key, f"http://{LOOPBACK}:{anonymous}{TOKEN_PATH}")
        self.identity.write_key(self._key_inside, f"http://{GATEWAY}:{anonymous}{TOKEN_PATH}")
        self.allows_violations = False
        """Does a test send what Google's description of the API does not allow on purpose?"""

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        if not self.allows_violations:
            assert not self.server.violations, f"not as Google describes it: {self.server.violations[:5]}"

    async def _listen(self, sock: socket.socket, context: ssl.SSLContext | None) -> None:
        await self.server.listen(sock, context, anonymous=context is None)

    async def _listen_metadata(self, sock: socket.socket, hosts: Hosts) -> None:
        await self.metadata.listen(sock, hosts)

    async def _close(self) -> None:
        await self.server.close()
        await self.metadata.close()
        await self.cloud.close()

    def _troubles(self) -> Sequence[BaseException]:
        return self.cloud.troubles

    def _machine(self, name: str) -> str:
        return self.instance(name).path

    # -- for tests -----------------------------------------------------------------------------

    @property
    def endpoint(self) -> str:
        return f"https://{LOOPBACK}:{self._ports[0]}{PREFIX.rstrip('/')}"

    @property
    def environment(self) -> dict[str, str]:
        """For a client on this computer; one inside the lab's network needs `environment_inside`."""
        return {"GOOGLE_APPLICATION_CREDENTIALS": str(self.key), "GOOGLE_CLOUD_PROJECT": PROJECT}

    @property
    def environment_inside(self) -> dict[str, str]:
        return {**self.environment, "GOOGLE_APPLICATION_CREDENTIALS": str(self._key_inside)}

    @property
    def faults(self) -> Faults:
        return self.cloud.faults

    @property
    def meters(self) -> Meters:
        return self.cloud.meters

    def instances(self) -> list[Instance]:
        """All there are now."""
        return self.do(lambda: list(self.cloud.instances.values()))

    def left(self) -> list[str]:
        """Instances, disks and images of ours, by their paths: all that costs money."""
        return self.do(
            lambda: [
                *self.cloud.instances,
                *self.cloud.disks,
                *(path for path in self.cloud.images if path.startswith(f"projects/{PROJECT}/")),
            ]
        )

    def instance(self, name: str) -> Instance:
        for each in self.instances():
            if each.name == name:
                return each
        raise KeyError(name)

    def preempt(self, name: str, notice_s: float = 30.0) -> None:
        """Announce that a machine is taken back; it goes `notice_s` later."""
        instance = self.instance(name)
        self.do(lambda: self.cloud.spawn(self.api.instances.preempt(instance, notice_s)))
