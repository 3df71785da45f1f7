"""The stand-in for Azure Batch as tests hold it: a server in a thread, and hands to read and break it."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import replace
from urllib.parse import unquote

from aiohttp import web

from lab.network import GATEWAY
from standins.azure.blobs import ACCOUNT as STORAGE
from standins.azure.blobs import BlobStorage
from standins.azure.entra import EntraServer, EntraStandIn
from standins.azure.identity import BATCH, RESOURCE_MANAGER, Identity
from standins.azure.words import ArmError
from standins.cloud.faults import Failed
from standins.cloud.hosts import Hosts
from standins.cloud.machines import Machines
from standins.cloud.meters import Meters
from standins.cloud.server import response
from standins.cloud.standin import LOOPBACK, START_S, bound
from standins.cloud.words import Answer, Call

from .api import Api
from .nodes import LabNodes, Paper, ProcessNodes
from .service import Job, Node, Service, Timing
from .words import ACCOUNT, CONTENT, REGION, BatchError, Faults, Refused, Throttled, refusal


class Server(EntraServer):
    """HTTP in front of the API."""

    def __init__(self, service: Service, api: Api, identity: Identity) -> None:
        super().__init__(service.clock, service, identity)
        self._service, self._api = service, api

    async def _handle(self, request: web.Request, anonymous: bool) -> web.StreamResponse:
        path = unquote(request.path).rstrip("/")
        call = Call(request.method, path, dict(request.query), {}, f"{request.scheme}://{request.host}")
        if (token := await self._token(call, request)) is not None:
            return response(token)
        try:
            if "/" in request.rel_url.raw_path.partition("/files/")[2]:
                message = "The requested URI does not represent any resource on the server."
                raise BatchError(400, "InvalidUri", message)  # a file's path has %2F
            call = replace(call, body=await _body(request))
            answer = await self._guarded(call, request.headers.get("Authorization", ""))
        except BatchError as error:
            answer = error.answer()
        return self._sent(request, path, answer, {"request-id": "stand-in"})

    async def _guarded(self, call: Call, authorization: str) -> Answer | None:
        """None: the connection breaks."""
        try:
            managed = call.path.lower().startswith("/subscriptions/")
            self._identity.check(authorization, RESOURCE_MANAGER if managed else BATCH)
        except ArmError as error:
            words = (
                "Server failed to authenticate the request. Make sure the value of Authorization header is "
                "formed correctly."
            )
            detail = {"AuthenticationErrorDetail": error.message}
            raise BatchError(401, "AuthenticationFailed", words, **detail) from error
        effect = self._service.faults.pick(call, self._clock.now())
        match effect:
            case Throttled() | Failed() | Refused():
                return refusal(effect)
            case _:
                return await self._carried_out(call, effect)

    async def _answered(self, call: Call, effect: object) -> Answer:
        try:
            return await self._api.answer(call)
        except BatchError as error:
            return error.answer()


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


class StandIn(EntraStandIn):
    """The stand-in for one Batch account. Tests set faults and the like through `service`, or with `do`.
    `beside`: that for the rest of Azure, if clients sign in to both; it shares the network of its hosts."""

    account, region = ACCOUNT, REGION
    _serves_blobs = False

    def __init__(
        self,
        machines: Machines | None = None,
        *,
        nodes: ProcessNodes | None = None,
        beside: EntraStandIn | None = None,
        timing: Timing | None = None,
        speed: float = 1.0,
        seed: int = 0,
    ) -> None:
        super().__init__("azure-batch", machines, speed)
        if beside is not None:
            self.identity, self._lab = beside.identity, beside.hosts.lab
        own = LabNodes(machines) if isinstance(machines, Hosts) else Paper()
        self.service = Service(self.clock, nodes or own, timing or Timing(), seed)
        self.storage = BlobStorage(time.time, self.identity)  # by the clock that `Date` tells
        self._storage_socket = socket.create_server((LOOPBACK, 0), backlog=1024)
        self._storage_port: int = self._storage_socket.getsockname()[1]
        self.storage_endpoint = f"https://{LOOPBACK}:{self._storage_port}/{STORAGE}"
        self.storage_endpoint_inside = f"https://{GATEWAY}:{self._storage_port}/{STORAGE}"
        self.storage.script = self._script
        if nodes is not None:
            nodes.environ = {"SSL_CERT_FILE": str(self.ca)}
        self.server = Server(self.service, Api(self.service), self.identity)

    async def _listen(self, sock: socket.socket, context: ssl.SSLContext | None) -> None:
        await self.server.listen(sock, context)
        if context is not None and not self._serves_blobs:
            self._serves_blobs = True
            await self.storage.listen(self._storage_socket, context)
            if self._lab is not None:
                inside = bound(self._lab.socket(), GATEWAY, self._storage_port)
                await self.storage.listen(inside, context)

    async def _listen_metadata(self, sock: socket.socket, hosts: Hosts) -> None:
        sock.close()  # nodes are told nothing there

    async def _close(self) -> None:
        await self.server.close()
        await self.storage.close()
        await self.service.close()

    def _script(self, call: Call) -> object:
        script = self.service.faults.script
        return None if script is None else script(call)

    def _troubles(self) -> Sequence[BaseException]:
        return self.service.troubles

    def _machine(self, name: str) -> str:
        return self.node(name).id

    # -- for tests -----------------------------------------------------------------------------

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
        """Pools, jobs and mailboxes: all that costs money, or makes it be spent."""
        service = self.service
        return self.do(
            lambda: [
                *(each.id for each in service.pools.values()),
                *(each.id for each in service.jobs.values()),
                *self.storage.containers["evalfleet"].blobs,
            ]
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
