"""The stand-in for Azure Batch as tests hold it: a server in a thread, and hands to read and break it."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import Sequence
from email.utils import formatdate
from urllib.parse import unquote

from aiohttp import web

from evalfleet.lab.network import GATEWAY
from standins.azure.identity import CLIENT_ID, CLIENT_SECRET, IDENTITY_HEADER, Identity
from standins.azure.words import SUBSCRIPTION, TENANT, ArmError, Call
from standins.azure.words import Answer as EntraAnswer
from standins.cloud import listener
from standins.cloud.faults import Failed, Late, Lost
from standins.cloud.hosts import Hosts
from standins.cloud.machines import Machines
from standins.cloud.meters import Meters
from standins.cloud.standin import LOOPBACK, START_S, CloudStandIn

from .api import Api
from .nodes import LabNodes, Paper
from .service import Job, Node, Service, Timing
from .words import ACCOUNT, CONTENT, REGION, Answer, BatchError, Faults, Refused, Throttled, refusal

MSI_PATH = "/msi/token"
MOST_BYTES = 2 << 20


class Server:
    """HTTP in front of the API. `calls`: what clients asked for, and the status of the answer."""

    def __init__(self, service: Service, api: Api, identity: Identity) -> None:
        self._service, self._api, self._identity = service, api, identity
        self._runners: list[web.AppRunner] = []
        self.calls: list[tuple[str, str, int]] = []
        self.ahead_s = 0.0
        """By how much the service's clock, in the `Date` of its answers, is ahead of this computer's."""

    async def listen(self, sock: socket.socket, tls: ssl.SSLContext | None) -> None:
        app = web.Application(client_max_size=MOST_BYTES)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runners.append(await listener.begin(app, sock, tls))

    async def close(self) -> None:
        for runner in self._runners:
            await listener.end(runner)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path = unquote(request.path).rstrip("/")
        base = f"{request.scheme}://{request.host}"
        if (told := await self._token(request, path, base)) is not None:
            return web.json_response(told.body, status=told.status)
        try:
            call = Call(request.method, path, dict(request.query), await _body(request), base)
            answer = await self._guarded(call, request.headers.get("Authorization", ""))
        except BatchError as error:
            answer = error.answer()
        self.calls.append((request.method, path, answer.status if answer else 0))
        if answer is None:
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=500)
        now = self._service.clock.now() + self.ahead_s
        headers = {"request-id": "stand-in", "Date": formatdate(now, usegmt=True), **answer.headers}
        if isinstance(answer.body, bytes):
            kind = {"Content-Type": "application/octet-stream"}
            return web.Response(status=answer.status, body=answer.body, headers={**headers, **kind})
        if answer.body is None:
            return web.Response(status=answer.status, headers=headers)
        return web.json_response(answer.body, status=answer.status, headers=headers)

    async def _token(self, request: web.Request, path: str, base: str) -> EntraAnswer | None:
        """What Entra ID and a managed identity answer; None if it is not they who are asked."""
        lower = path.lower()
        if lower == MSI_PATH:
            call = Call(request.method, path, dict(request.query), {}, base)
            return self._identity.managed_token(call, request.headers.get("X-IDENTITY-HEADER", ""))
        if lower.endswith("/v2.0/.well-known/openid-configuration"):
            return self._identity.configuration(base)
        if lower == f"/{TENANT}/oauth2/v2.0/token" and request.method == "POST":
            form = await request.post()
            return self._identity.client_token({key: str(value) for key, value in form.items()})
        return None

    async def _guarded(self, call: Call, authorization: str) -> Answer | None:
        """None: the connection breaks."""
        try:
            self._identity.check(authorization)
        except ArmError as error:
            raise BatchError(
                401, "AuthenticationFailed", "Server failed to authenticate the request."
            ) from error
        effect = self._service.faults.by_rules(call)
        match effect:
            case Throttled() | Failed() | Refused():
                return refusal(effect)
            case Late(delay_s):
                self._service.spawn(self._later(call, delay_s))
                return None
            case _:
                # a client that leaves does not stop what it asked for
                answer = await asyncio.shield(asyncio.ensure_future(self._answered(call)))
                return None if isinstance(effect, Lost) else answer

    async def _answered(self, call: Call) -> Answer:
        try:
            return await self._api.answer(call)
        except BatchError as error:
            return error.answer()

    async def _later(self, call: Call, delay_s: float) -> None:
        await self._service.clock.sleep(delay_s)
        await self._answered(call)


async def _body(request: web.Request) -> dict[str, object]:
    """What was sent. Batch reads JSON only if the client says that it knows OData's lesser metadata."""
    if request.method not in ("POST", "PUT", "PATCH") or not request.can_read_body:
        return {}
    said = request.headers.get("Content-Type", "").lower().replace(" ", "")
    if said.split(";charset")[0] != CONTENT.replace(" ", ""):
        message = "The value for one of the HTTP headers is not in the correct format."
        raise BatchError(400, "InvalidHeaderValue", message, HeaderName="Content-Type", HeaderValue=said)
    try:
        body = json.loads(await request.text() or "{}")
    except json.JSONDecodeError:
        raise BatchError(
            400, "InvalidRequestBody", "The specified Request Body is not syntactically valid."
        ) from None
    return body if isinstance(body, dict) else {}


class StandIn(CloudStandIn):
    """The stand-in for one Batch account. Tests set faults and the like through `service`, or with `do`."""

    account, region, subscription = ACCOUNT, REGION, SUBSCRIPTION

    def __init__(
        self,
        machines: Machines | None = None,
        *,
        timing: Timing | None = None,
        speed: float = 1.0,
        seed: int = 0,
    ) -> None:
        super().__init__("azure-batch", machines, speed)
        nodes = LabNodes(machines) if isinstance(machines, Hosts) else Paper()
        self.service = Service(self.clock, nodes, timing or Timing(), seed)
        self.identity = Identity()
        self.server = Server(self.service, Api(self.service), self.identity)

    async def _listen(self, sock: socket.socket, context: ssl.SSLContext | None) -> None:
        await self.server.listen(sock, context)

    async def _listen_metadata(self, sock: socket.socket, hosts: Hosts) -> None:
        sock.close()  # nodes are told nothing there

    async def _close(self) -> None:
        await self.server.close()
        await self.service.close()

    def _troubles(self) -> Sequence[BaseException]:
        return self.service.troubles

    def _machine(self, name: str) -> str:
        return self.node(name).id

    # -- for tests -----------------------------------------------------------------------------

    @property
    def endpoint(self) -> str:
        return f"https://{LOOPBACK}:{self._ports[0]}"

    @property
    def environment(self) -> dict[str, str]:
        """For a client on this computer; one inside the lab's network needs `environment_inside`."""
        return {
            "IDENTITY_ENDPOINT": f"http://{LOOPBACK}:{self._ports[1]}{MSI_PATH}",
            "IDENTITY_HEADER": IDENTITY_HEADER,
            "REQUESTS_CA_BUNDLE": str(self.ca),
            "SSL_CERT_FILE": str(self.ca),
            "AZURE_SUBSCRIPTION_ID": SUBSCRIPTION,
        }

    @property
    def environment_inside(self) -> dict[str, str]:
        there = self.environment["IDENTITY_ENDPOINT"].replace(LOOPBACK, GATEWAY)
        return {**self.environment, "IDENTITY_ENDPOINT": there}

    def service_principal(self, *, inside: bool = False) -> dict[str, str]:
        """The variables of a service principal that may use the account."""
        return {
            "AZURE_TENANT_ID": TENANT,
            "AZURE_CLIENT_ID": CLIENT_ID,
            "AZURE_CLIENT_SECRET": CLIENT_SECRET,
            "AZURE_AUTHORITY_HOST": self.endpoint_inside if inside else self.endpoint,
            "AZURE_SUBSCRIPTION_ID": SUBSCRIPTION,
        }

    @property
    def faults(self) -> Faults:
        return self.service.faults

    @property
    def meters(self) -> Meters:
        return self.service.meters

    @property
    def paper(self) -> Paper:
        """The nodes, where they are records."""
        assert isinstance(self.service.nodes, Paper)
        return self.service.nodes

    def left(self) -> list[str]:
        """Pools, and jobs: all that costs money, or makes it be spent."""
        service = self.service
        return self.do(
            lambda: [each.id for each in service.pools.values()] + [each.id for each in service.jobs.values()]
        )

    def job(self, name: str) -> Job:
        """The job whose id has this in it. Raises KeyError."""
        for job in self.do(lambda: list(self.service.jobs.values())):
            if name in job.id:
                return job
        raise KeyError(name)

    def node(self, name: str) -> Node:
        """The node that runs a task of the job whose id has this in it. Raises KeyError."""
        for task in self.job(name).tasks.values():
            if task.node is not None:
                return task.node
        raise KeyError(name)

    def preempt(self, name: str) -> None:
        """Take the node of a job back, as happens to spot nodes; its task is put back into the queue."""
        self._await(self.service.preempt(self.node(name)))

    def reboot(self, name: str) -> None:
        """Restart the node of a job: Batch runs its task anew there, whatever its retry count."""
        self._await(self.service.reboot(self.node(name)))

    def _await(self, work: object) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(START_S)  # type: ignore[arg-type]
