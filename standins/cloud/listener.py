"""Listening, and ending it."""

from __future__ import annotations

import asyncio
import socket
import ssl

from aiohttp import web


async def begin(
    app: web.Application, sock: socket.socket, tls: ssl.SSLContext | None = None
) -> web.AppRunner:
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    await web.SockSite(runner, sock, ssl_context=tls, backlog=1024).start()
    return runner


async def end(runner: web.AppRunner) -> None:
    """Connections are cut: over TLS, to close politely would take as long as the client likes."""
    assert runner.server is not None
    cut = [each.transport for each in runner.server.connections if each.transport is not None]
    for transport in cut:
        transport.abort()
    await runner.cleanup()
    await asyncio.sleep(0)
