"""The dashboard's server: pages, and what they ask for, as JSON."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import re
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from evalfleet.errors import FleetError, JournalForeign, RequestError
from evalfleet.version import __version__

from .guard import Guard
from .hub import Hub

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from evalfleet.planning.workspace import Workspace

CLIENT = Path(__file__).parent / "client"
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

Endpoint = Callable[[Request], Awaitable[Response]]


def application(workspace: Workspace, token: str, host: str, *, read_only: bool = False) -> Guard:
    """The dashboard of a home, as an ASGI application. `host`: the name or address it is served at."""
    hub = Hub(workspace)
    pages = Pages(hub, read_only)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        yield
        await hub.close()

    routes = [
        Route("/api/session", pages.session),
        Route("/api/runs", pages.runs),
        Route("/api/runs/{run}", pages.run),
        Route("/api/runs/{run}/events", pages.events),
        Route("/api/{rest:path}", pages.nothing),
        Route("/client/{path:path}", pages.client),
        Route("/{rest:path}", pages.page),
    ]
    app = Starlette(
        routes=[Route(route.path, _answered(route.endpoint), methods=route.methods) for route in routes],
        lifespan=lifespan,
    )
    return Guard(app, token, host, read_only)


def _answered(endpoint: Endpoint) -> Endpoint:
    """The endpoint, whose errors are one line each."""

    async def answered(request: Request) -> Response:
        try:
            return await endpoint(request)
        except RequestError as err:
            return as_json({"error": str(err)}, 404 if request.method == "GET" else 400)
        except JournalForeign as err:
            return as_json({"error": str(err)}, 409)
        except FleetError as err:
            return as_json({"error": str(err)}, 503)

    return answered


def as_json(document: Any, code: int = 200) -> Response:
    return Response(msgspec.json.encode(document), code, media_type="application/json")


def packed_json(request: Request, packed: bytes) -> Response:
    """What is compressed already, as the browser takes it."""
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(packed, headers={"content-encoding": "gzip"}, media_type="application/json")
    return Response(gzip.decompress(packed), media_type="application/json")


class Pages:
    """The endpoints."""

    def __init__(self, hub: Hub, read_only: bool) -> None:
        self._hub = hub
        self._workspace = hub.workspace
        self._read_only = read_only

    async def session(self, request: Request) -> Response:
        home = str(self._workspace.home)
        return as_json({"version": __version__, "home": home, "read_only": self._read_only})

    async def runs(self, request: Request) -> Response:
        return as_json(await asyncio.to_thread(self._hub.runs))

    async def run(self, request: Request) -> Response:
        return packed_json(request, await self._hub.snapshot(request.path_params["run"]))

    async def events(self, request: Request) -> Response:
        given = request.headers.get("last-event-id") or request.query_params.get("after") or ""
        after = int(given) if re.fullmatch(r"\d{1,15}", given) else None
        run = request.path_params["run"]
        await self._hub.open(run)  # so that a run that is not there is told by a code
        stream = self._hub.events(run, after)
        return StreamingResponse(stream, media_type="text/event-stream", headers={"x-accel-buffering": "no"})

    async def nothing(self, request: Request) -> Response:
        return as_json({"error": f"there is nothing at {request.url.path}"}, 404)

    async def client(self, request: Request) -> Response:
        return _file(request, request.path_params["path"])

    async def page(self, request: Request) -> Response:
        return _file(request, "index.html")


def _file(request: Request, path: str) -> Response:
    file = (CLIENT / path).resolve()
    if not file.is_relative_to(CLIENT.resolve()) or not file.is_file() or file.suffix not in TYPES:
        return as_json({"error": f"the dashboard has no file {path!r}"}, 404)
    content, packed, tag = _read(file, file.stat().st_mtime_ns)
    headers = {"etag": tag, "cache-control": "no-cache", "vary": "accept-encoding"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["content-encoding"], content = "gzip", packed
    return Response(content, headers=headers, media_type=TYPES[file.suffix])


@lru_cache(256)
def _read(file: Path, changed_ns: int) -> tuple[bytes, bytes, str]:
    content = file.read_bytes()
    return content, gzip.compress(content, 9), f'"{hashlib.sha256(content).hexdigest()[:16]}"'
