"""The dashboard's server: pages, and what they ask for, as JSON."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import os
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Any, BinaryIO
from urllib.parse import quote, unquote
from weakref import WeakKeyDictionary

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from evalfleet.api import places, pools
from evalfleet.api.documents import belonging_row, image_belonging_row, pool_document
from evalfleet.api.run import Run
from evalfleet.api.run_changes import change_of, machine_of, steer
from evalfleet.api.runs import compare_results
from evalfleet.errors import FleetError, JournalForeign, RequestError
from evalfleet.model import AttemptId, decodable
from evalfleet.names import artefacts_folder
from evalfleet.state import AttemptState
from evalfleet.version import __version__

from .client_script import CLIENT, linked
from .files import MOST_LOG, Logs, TooLarge, attempt_document, open_within, read_image
from .guard import Guard
from .hub import Hub
from .screens import Screens, Tunnels, other_name
from .triage import Triage
from .watched import WatchedRun

SCRIPT = "app.js"
"""It is answered with all that it imports in it."""
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".webmanifest": "application/manifest+json",
}
MOST_BODY = 1 << 16
MOST_SEARCH = 500
WORTH_PACKING = 2000
BELONGINGS_S = 20.0
"""What clouds say of our machines is asked for as often."""

Endpoint = Callable[[Request], Awaitable[Response]]


def application(pages: Pages, token: str, host: str, *, read_only: bool = False) -> Guard:
    """The dashboard of a home, as an ASGI application. `host`: the name or address it is served at."""
    client_files()
    routes = [
        Route("/api/session", pages.session),
        Route("/api/runs", pages.runs),
        Route("/api/runs/{run}", pages.run),
        Route("/api/runs/{run}/events", pages.events),
        Route("/api/runs/{run}/triage", pages.triage),
        Route("/api/runs/{run}/wall", pages.wall),
        Route("/api/runs/{run}/steer", pages.steer, methods=["POST"]),
        Route("/api/runs/{run}/tasks/{task:path}", pages.task),
        Route("/api/runs/{run}/attempts/{attempt}/log", pages.log),
        Route("/api/runs/{run}/attempts/{attempt}/image/{path:path}", pages.image),
        Route("/api/runs/{run}/attempts/{attempt}/file/{path:path}", pages.file),
        Route("/api/runs/{run}/attempts/{attempt}", pages.attempt),
        Route("/api/runs/{run}/machines/{machine}/screen", pages.screen),
        Route("/api/runs/{run}/machines/{machine}/screen-tunnel", pages.tunnel, methods=["POST"]),
        Route("/api/runs/{run}/machines/{machine}", pages.machine),
        Route("/api/compare", pages.compare),
        Route("/api/pools", pages.pools),
        Route("/api/machines", pages.machines),
        Route("/api/money", pages.money),
        Route("/api/{rest:path}", pages.nothing),
        Route("/client/{path:path}", pages.client),
        Route("/{rest:path}", pages.page),
    ]
    app = Starlette(
        routes=[Route(route.path, _answered(route.endpoint), methods=route.methods) for route in routes]
    )
    return Guard(app, token, host, read_only)


def _answered(endpoint: Endpoint) -> Endpoint:
    """The endpoint, whose errors are one line each."""

    async def answered(request: Request) -> Response:
        # parts of the path come as they were sent: a task's name may have a slash, encoded
        request.path_params.update({name: _decoded(name, part) for name, part in request.path_params.items()})
        try:
            return await endpoint(request)
        except TooLarge as err:
            return as_json({"error": str(err)}, 413)
        except RequestError as err:
            return as_json({"error": str(err)}, 404 if request.method == "GET" else 400)
        except JournalForeign as err:
            return as_json({"error": str(err)}, 409)
        except FleetError as err:
            return as_json({"error": str(err)}, 503)
        except asyncio.CancelledError:  # by the server's end alone: whoever hangs up is not waited for
            return as_json({"error": "the dashboard has ended"}, 503)

    return answered


def _decoded(name: str, part: str) -> str:
    """Return what a part of a path stands for. See `url_part`, which files' paths do without."""
    return unquote(part) if name == "path" else re.sub(r"^~(~*\.\.?)\Z", r"\1", unquote(part))


def as_json(document: Any, code: int = 200) -> Response:
    return Response(msgspec.json.encode(document), code, media_type="application/json")


async def _packed(request: Request, make: Callable[[], Any]) -> Response:
    """What is made in a thread, compressed if it is worth it."""

    def made() -> tuple[bytes, bool]:
        body = msgspec.json.encode(make())
        pack = len(body) > WORTH_PACKING and "gzip" in request.headers.get("accept-encoding", "")
        return (gzip.compress(body, 1) if pack else body), pack

    body, packed = await asyncio.to_thread(made)
    headers = {"content-encoding": "gzip"} if packed else {}
    return Response(body, headers=headers, media_type="application/json")


async def _body(request: Request) -> bytes:
    """All of a request's body. Raises RequestError if that is more than any of ours."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MOST_BODY:
            raise RequestError("that is too much")
    return bytes(body)


def _number(request: Request, name: str, usual: int) -> int:
    given = request.query_params.get(name, "")
    return int(given) if re.fullmatch(r"-?\d{1,15}", given) else usual


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while data := file.read(1 << 18):
            yield data


class Recent:
    """What is expensive to find out, and good for a while."""

    def __init__(self, good_s: float) -> None:
        self._good_s, self._until = good_s, 0.0
        self._found: Any = None
        self._lock = asyncio.Lock()

    async def get(self, find: Callable[[], Awaitable[Any]]) -> Any:
        async with self._lock:
            if time.monotonic() >= self._until:
                self._found = await find()
                self._until = time.monotonic() + self._good_s
            return self._found


def packed_json(request: Request, packed: bytes) -> Response:
    """What is compressed already, as the browser takes it."""
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(packed, headers={"content-encoding": "gzip"}, media_type="application/json")
    return Response(gzip.decompress(packed), media_type="application/json")


class SteeringRequest(msgspec.Struct):
    """What somebody wants changed of a run: a verb of the command line, and what it needs."""

    verb: str
    arguments: dict[str, str | int | float | None] = {}
    reason: str = ""


class Pages:
    """The endpoints."""

    def __init__(self, hub: Hub, read_only: bool) -> None:
        self._hub = hub
        self._workspace = hub.workspace
        self._read_only = read_only
        self._logs, self._screens, self._tunnels = Logs(), Screens(), Tunnels(hub.workspace)
        self._triage: WeakKeyDictionary[WatchedRun, Triage] = WeakKeyDictionary()
        self._belongings = Recent(BELONGINGS_S)

    async def close(self) -> None:
        await self._hub.close()
        await self._tunnels.close()
        await asyncio.to_thread(self._logs.close)

    async def session(self, request: Request) -> Response:
        home = str(self._workspace.home)
        return as_json({"version": __version__, "home": home, "read_only": self._read_only})

    # -- runs ------------------------------------------------------------------------------------

    async def runs(self, request: Request) -> Response:
        return await _packed(request, self._hub.runs)

    async def run(self, request: Request) -> Response:
        return packed_json(request, await self._hub.snapshot(request.path_params["run"]))

    async def events(self, request: Request) -> Response:
        given = request.headers.get("last-event-id") or request.query_params.get("after") or ""
        after = int(given) if re.fullmatch(r"\d{1,15}", given) else None
        run = request.path_params["run"]
        await asyncio.to_thread(self._hub.check, run)  # one that is not there is told by a code
        stream = self._hub.events(run, after)
        return StreamingResponse(stream, media_type="text/event-stream", headers={"x-accel-buffering": "no"})

    async def triage(self, request: Request) -> Response:
        watched = await self._opened(request)
        triage = self._triage.setdefault(watched, Triage(watched.board.folder))
        return await _packed(request, lambda: triage.groups(watched.board.state))

    async def compare(self, request: Request) -> Response:
        names = [request.query_params.get(side, "") for side in ("a", "b")]
        if not all(names):
            raise RequestError("name two runs: /api/compare?a=RUN&b=RUN")
        sides = [await self._hub.open(name) for name in names]
        return await _packed(request, lambda: compare_results([side.results() for side in sides]))

    async def steer(self, request: Request) -> Response:
        watched = await self._opened(request)
        try:
            wanted = msgspec.json.decode(await _body(request), type=decodable(SteeringRequest))
        except msgspec.MsgspecError as err:
            raise RequestError(f"that is no change of a run: {err}") from err
        run = watched.run()
        event = change_of(run.state(), wanted.verb, wanted.arguments, wanted.reason)
        await asyncio.to_thread(steer, run, event)
        return as_json({"done": wanted.verb}, 202)

    # -- tasks and attempts ----------------------------------------------------------------------

    async def task(self, request: Request) -> Response:
        watched, task = await self._opened(request), request.path_params["task"]
        return await _packed(request, lambda: watched.run().task(task))

    async def attempt(self, request: Request) -> Response:
        run, attempt = await self._attempt(request)
        return await _packed(request, lambda: attempt_document(run, attempt))

    async def log(self, request: Request) -> Response:
        run, attempt = await self._attempt(request)
        if text := request.query_params.get("search", "")[:MOST_SEARCH]:
            begin = _number(request, "from", 0)
            return await _packed(request, lambda: self._logs.search(run, attempt, text, begin))
        start, most = _number(request, "from", -MOST_LOG), _number(request, "most", MOST_LOG)
        before = _number(request, "before", 0) if "before" in request.query_params else None
        return await _packed(request, lambda: self._logs.piece(run, attempt, start, most, before))

    async def image(self, request: Request) -> Response:
        run, attempt = await self._attempt(request)
        root, path = run.folder / artefacts_folder(attempt.task, attempt.id), request.path_params["path"]
        data, kind = await asyncio.to_thread(read_image, root, path)
        kept = "private, max-age=3600" if attempt.collected is not None else "no-store"
        return Response(data, media_type=kind, headers={"cache-control": kept})

    async def file(self, request: Request) -> Response:
        run, attempt = await self._attempt(request)
        root, path = run.folder / artefacts_folder(attempt.task, attempt.id), request.path_params["path"]
        file = await asyncio.to_thread(open_within, root, path)
        name = quote(PurePosixPath(path).name)
        return StreamingResponse(
            _chunks(file),
            media_type="application/octet-stream",
            headers={
                "content-disposition": f"attachment; filename*=utf-8''{name}",
                "content-length": str(os.fstat(file.fileno()).st_size),
                "content-security-policy": "sandbox; default-src 'none'",
            },
        )

    # -- machines --------------------------------------------------------------------------------

    async def machine(self, request: Request) -> Response:
        watched = await self._opened(request)
        return await _packed(request, lambda: watched.machine(request.path_params["machine"]))

    async def wall(self, request: Request) -> Response:
        watched = await self._opened(request)
        return await _packed(request, watched.wall)

    async def screen(self, request: Request) -> Response:
        watched = await self._opened(request)
        state = watched.board.state
        machine = state.machines[machine_of(state, request.path_params["machine"])]
        data, kind = await asyncio.to_thread(
            self._screens.newest, watched.run(), machine, watched.board, self._workspace.now()
        )
        return Response(data, media_type=kind)

    async def tunnel(self, request: Request) -> Response:
        watched = await self._opened(request)
        state = watched.board.state
        machine = state.machines[machine_of(state, request.path_params["machine"])]
        port = await self._tunnels.screen(state, machine)
        return as_json({"port": port, "url": f"http://{other_name(request.headers['host'])}:{port}/"})

    # -- the home --------------------------------------------------------------------------------

    async def pools(self, request: Request) -> Response:
        now = self._workspace.now()
        return await _packed(
            request, lambda: [pool_document(view, now) for view in pools.pools(self._workspace)]
        )

    async def machines(self, request: Request) -> Response:
        """Those of the journals, and all that clouds list besides."""
        own = await asyncio.to_thread(self._hub.machines)
        known = {row["id"] for row in own}
        listed = await self._belongings.get(self._find_belongings)
        return as_json(own + [row for row in listed if row["machine"] not in known])

    async def _find_belongings(self) -> list[Any]:
        found, images = await places.machines(self._workspace), await places.images(self._workspace)
        return [*map(belonging_row, found), *map(image_belonging_row, images)]

    async def money(self, request: Request) -> Response:
        return await _packed(request, self._hub.money)

    async def _opened(self, request: Request) -> WatchedRun:
        return await self._hub.open(request.path_params["run"])

    async def _attempt(self, request: Request) -> tuple[Run, AttemptState]:
        watched, name = await self._opened(request), request.path_params["attempt"]
        attempt = watched.board.state.attempts.get(AttemptId(name))
        if attempt is None:
            raise RequestError(f"run {watched.board.run!r} has no attempt {name[:200]!r}")
        return watched.run(), attempt

    # -- pages -----------------------------------------------------------------------------------

    async def nothing(self, request: Request) -> Response:
        return as_json({"error": f"there is nothing at {request.url.path}"}, 404)

    async def client(self, request: Request) -> Response:
        return _file(request, request.path_params["path"])

    async def page(self, request: Request) -> Response:
        """The same for all. A browser is told what it will ask for: it would find that out one by one."""
        answer = _file(request, "index.html")
        run = _RUN.match(request.url.path)
        soon: list[str] = []
        if run is not None:
            soon.append(f"</api/runs/{quote(unquote(run[1]), safe='')}>; rel=preload; as=fetch; crossorigin")
        soon.append(f"</client/{SCRIPT}>; rel=modulepreload")
        answer.headers["link"] = ", ".join(soon)
        return answer


def _file(request: Request, path: str) -> Response:
    file = client_files().get(path)
    if file is None:
        return as_json({"error": f"the dashboard has no file {path!r}"}, 404)
    headers = {"etag": file.tag, "cache-control": "no-cache", "vary": "accept-encoding"}
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    content = file.content
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["content-encoding"], content = "gzip", file.packed
    return Response(content, headers=headers, media_type=TYPES[PurePosixPath(path).suffix])


_RUN = re.compile("/runs/([^/]+)")


@dataclass(frozen=True)
class ClientFile:
    """A file of the client, as it is sent."""

    content: bytes
    packed: bytes
    tag: str


@lru_cache(1)
def client_files() -> dict[str, ClientFile]:
    """The client's files by path. They are read once, so that all pages of a server are of one version."""
    paths = (path for path in CLIENT.rglob("*") if path.suffix in TYPES)
    contents = {path.relative_to(CLIENT).as_posix(): path.read_bytes() for path in paths}
    contents[SCRIPT] = linked(SCRIPT, base="/client").encode()
    return {
        path: ClientFile(content, gzip.compress(content), f'"{hashlib.sha256(content).hexdigest()[:16]}"')
        for path, content in contents.items()
    }
