"""The stand-in as tests hold it: a server in a thread, and hands to read and break it with."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import tempfile
import threading
from collections.abc import Callable
from email.utils import formatdate
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote

from aiohttp import web

from evalfleet.lab.network import GATEWAY
from standins.cloud import serving, tls
from standins.cloud.clock import Clock
from standins.cloud.hosts import METADATA, Hosts
from standins.cloud.machines import Machines, Records
from standins.cloud.meters import Meters

from . import billing, contract
from .api import Api
from .cloud import Cloud, Instance, Timing
from .faults import Failed, Faults, Late, Lost, Refused, Throttled, refusal
from .identity import Identity
from .metadata import Metadata
from .words import PREFIX, PROJECT, Answer, ApiError, Call

T = TypeVar("T")
START_S = 240.0
LOOPBACK = "127.0.0.1"
TOKEN_PATH = "/token"
MOST_BYTES = 2 << 20


class Server:
    """HTTP in front of the API. `calls`: what clients asked for, and the status of the answer."""

    def __init__(self, cloud: Cloud, api: Api, identity: Identity) -> None:
        self._cloud = cloud
        self._api = api
        self._identity = identity
        self._runners: list[web.AppRunner] = []
        path = contract.document_path()
        self._contract = contract.load(path) if path is not None else None
        self.violations: list[str] = []
        """What does not agree with Google's own description of the API."""
        self.calls: list[tuple[str, str, int]] = []
        self.ahead_s = 0.0
        """By how much Google's clock, in the `Date` of its answers, is ahead of this computer's."""

    async def listen(
        self, sock: socket.socket, tls: ssl.SSLContext | None, *, anonymous: bool = False
    ) -> None:
        """`anonymous`: calls need no token, for clients that cannot be given one without https."""

        async def handle(request: web.Request) -> web.StreamResponse:
            return await self._handle(request, anonymous)

        app = web.Application(client_max_size=MOST_BYTES)
        app.router.add_route("*", "/{path:.*}", handle)
        self._runners.append(await serving.begin(app, sock, tls))

    async def close(self) -> None:
        for runner in self._runners:
            await serving.end(runner)

    async def _handle(self, request: web.Request, anonymous: bool) -> web.StreamResponse:
        path = unquote(request.path)
        if path == TOKEN_PATH and request.method == "POST":
            form = await request.post()
            return _response(self._identity.exchange({key: str(value) for key, value in form.items()}))
        base = f"{request.scheme}://{request.host}"
        query = {key: value for key, value in request.query.items() if key != "alt"}
        text = await request.text()
        try:
            body = json.loads(text) if text.strip() else None
            call = Call(request.method, path.removeprefix(PREFIX).rstrip("/"), query, body, base)
            answer = await self._guarded(call, "" if anonymous else request.headers.get("Authorization", "?"))
        except json.JSONDecodeError:
            answer = ApiError(400, "parseError", "Parse Error").answer()
        self.calls.append((request.method, path, answer.status if answer else 0))
        if answer is None:
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=500)
        response = _response(answer)
        response.headers["Date"] = formatdate(self._cloud.clock.now() + self.ahead_s, usegmt=True)
        return response

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
                case Late(delay_s):
                    cloud.spawn(self._later(call, delay_s))
                    return None
                case _:
                    # a client that leaves does not stop what it asked for
                    asked = asyncio.ensure_future(self._checked(call, effect))
                    answer = await asyncio.shield(asked)
                    return None if isinstance(effect, Lost) else answer
        except ApiError as error:
            return error.answer()

    async def _checked(self, call: Call, effect: object) -> Answer:
        """Both ways by Google's own description, where that is at hand. What it does not allow is refused."""
        if call.path.startswith("/v1/"):
            return Answer(200, billing.catalogue(call))  # another service of Google's, with its own document
        if self._contract is not None:
            wrong = self._contract.problems_of_call(call.method, call.path, call.query, call.body)
            if wrong:
                self.violations += wrong
                raise ApiError(400, "invalid", f"Invalid JSON payload received. {wrong[0]}")
        body = await self._api.answer(call, effect)  # type: ignore[arg-type]
        if self._contract is not None:
            self.violations += self._contract.problems_of_answer(call.method, call.path, body)
        return Answer(200, body)

    async def _later(self, call: Call, delay_s: float) -> None:
        await self._cloud.clock.sleep(delay_s)
        try:
            await self._checked(call, None)
        except ApiError:
            return  # nobody is there to hear it


def _response(answer: Answer) -> web.Response:
    return web.json_response(answer.body, status=answer.status, headers=answer.headers)


class StandIn:
    """Use as a context manager. Its methods may be called from any thread.

    `endpoint`: the API, over https. `anonymous_endpoint`: over http, without tokens, for Google's clients.
    `ca`: the file of the authority to trust. `environment`: what makes google-auth work against it. Tests set
    faults, quota and the like through `cloud`, before clients come or with `do`, which runs in the server's
    thread.
    """

    project = PROJECT

    def __init__(
        self,
        machines: Machines | None = None,
        *,
        timing: Timing | None = None,
        speed: float = 1.0,
        seed: int = 0,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gce-stand-in-")
        self._machines = machines or Records()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="gce-stand-in")
        self._ready = threading.Event()
        self._end = asyncio.Event()
        self._failure: BaseException | None = None
        self._sockets = [_listener(), _listener()]
        self.clock = Clock(speed)
        self.cloud = Cloud(self.clock, self._machines, timing or Timing(), seed)
        self.identity = Identity()
        self.api = Api(self.cloud)
        self.server = Server(self.cloud, self.api, self.identity)
        self.metadata = Metadata(self.cloud, self.api.instances)
        ports = [sock.getsockname()[1] for sock in self._sockets]
        self.endpoint = f"https://{LOOPBACK}:{ports[0]}{PREFIX.rstrip('/')}"
        self.anonymous_endpoint = f"http://{LOOPBACK}:{ports[1]}{PREFIX}"
        self.ca, self._tls = tls.make(Path(self._folder.name), [LOOPBACK, GATEWAY])
        self.key, self._key_inside = (
            Path(self._folder.name) / "key.json",
            Path(self._folder.name) / "inside.json",
        )
        self.identity.write_key(self.key, f"http://{LOOPBACK}:{ports[1]}{TOKEN_PATH}")
        self.identity.write_key(self._key_inside, f"http://{GATEWAY}:{ports[1]}{TOKEN_PATH}")
        self.allows_violations = False
        """Does a test send what Google's description of the API does not allow on purpose?"""

    # -- life ----------------------------------------------------------------------------------

    def __enter__(self) -> StandIn:
        self._thread.start()
        self._ready.wait(START_S)
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
        self._folder.cleanup()
        failures = [*filter(None, [self._failure]), *self.cloud.troubles]
        if failures:
            raise failures[0]
        if not self.allows_violations:
            assert not self.server.violations, f"not as Google describes it: {self.server.violations[:5]}"

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except BaseException as err:
            self._failure = err
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        await self.server.listen(self._sockets[0], self._tls)
        await self.server.listen(self._sockets[1], None, anonymous=True)
        if isinstance(self._machines, Hosts):
            hosts = self._machines
            for where, context in zip(self._sockets, (self._tls, None), strict=True):
                sock = _bound(hosts.lab.socket(), GATEWAY, where.getsockname()[1])
                await self.server.listen(sock, context, anonymous=context is None)
            await self.metadata.listen(_bound(hosts.lab.socket(), METADATA, 80), hosts)
        self._ready.set()
        try:
            await self._end.wait()
        finally:
            await self.server.close()
            await self.metadata.close()
            await self.cloud.close()
            await self._machines.close()

    # -- for tests -----------------------------------------------------------------------------

    @property
    def environment(self) -> dict[str, str]:
        """For a client on this computer; one inside the lab's network needs `environment_inside`."""
        return {"GOOGLE_APPLICATION_CREDENTIALS": str(self.key), "GOOGLE_CLOUD_PROJECT": PROJECT}

    @property
    def endpoint_inside(self) -> str:
        return self.endpoint.replace(LOOPBACK, GATEWAY)

    @property
    def environment_inside(self) -> dict[str, str]:
        return {**self.environment, "GOOGLE_APPLICATION_CREDENTIALS": str(self._key_inside)}

    @property
    def hosts(self) -> Hosts:
        """What is behind the instances, if there is."""
        assert isinstance(self._machines, Hosts)
        return self._machines

    def do(self, action: Callable[[], T]) -> T:
        """In the server's thread."""

        async def run() -> T:
            return action()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(START_S)

    @property
    def faults(self) -> Faults:
        return self.cloud.faults

    @property
    def meters(self) -> Meters:
        return self.cloud.meters

    def jump(self, seconds: float) -> None:
        """Let time pass; what is due meanwhile has happened afterwards."""
        asyncio.run_coroutine_threadsafe(self.clock.jump(seconds), self._loop).result()

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

    def make_unreachable(self, name: str, *, also_after_restart: bool = False) -> None:
        """A machine says it runs, but nothing reaches it, until it is reset, or stopped and started."""
        work = self.hosts.make_unreachable(self.instance(name).path, also_after_restart=also_after_restart)
        asyncio.run_coroutine_threadsafe(work, self._loop).result(START_S)


def _bound(sock: socket.socket, address: str, port: int) -> socket.socket:
    """Also where a connection from that port has just ended."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
    except OSError:
        sock.close()
        raise
    return sock


def _listener() -> socket.socket:
    return socket.create_server((LOOPBACK, 0), backlog=1024)
