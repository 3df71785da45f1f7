"""How the dashboard's server is started: where it may listen, and under which link."""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import secrets
import socket
import sys
from contextlib import suppress
from pathlib import Path

import uvicorn

from evalfleet.errors import RequestError
from evalfleet.planning.workspace import Workspace

from .hub import Hub
from .server import Pages, application

TOKEN_LENGTH = 32
GRACE_S = 1
"""How long the end waits for what browsers are being told."""
SWITCH_S = 0.0005
"""After so long a thread that folds a run lets others have their turn: those that send a page's files."""


def check_host(host: str, yes: bool) -> None:
    """Raises RequestError for an address that other computers reach, unless somebody said `--yes`."""
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host.lower() == "localhost"
    if not loopback and not yes:
        raise RequestError(
            f"--host {host}: other computers could read there what is sent, the token included; "
            "say --yes, or reach this one by `ssh -L`"
        )


def check_home(workspace: Workspace) -> bool:
    """Are there runs? Raises what is wrong with the home: it is no folder, damaged, or of a newer version."""
    store = workspace.records_if_any()
    return store is not None and any(info.kind == "run" for info in store.streams())


def listening(host: str, port: int) -> socket.socket:
    """A socket at that address. Raises RequestError if there can be none."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as err:
        raise RequestError(f"--host {host} is no address of this computer: {err.strerror}") from err
    # asyncio sends at once only on connections that say they are TCP: an answer's end waits 40 ms otherwise
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(1024)
    except OSError as err:
        found.close()
        if err.errno == errno.EADDRINUSE:
            raise RequestError(f"port {port} is taken: name another with --port, or 0 for any") from err
        why = (err.strerror or str(err)).lower()
        raise RequestError(f"cannot listen at {host}, port {port}: {why}") from err
    return found


def kept_token(home: Path, read_only: bool) -> str:
    """The home's token, made when first asked for: so pages that are open outlive a restart of the server.

    Only its owner can read the file. A link to look without changing anything has another one.
    """
    file = home / ".dashboard" / ("token-read-only" if read_only else "token")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileExistsError):
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as new:
                new.write(secrets.token_urlsafe(24))
        token, status = file.read_text("utf-8"), file.stat()
        if len(token) == TOKEN_LENGTH and status.st_mode & 0o077 == 0 and status.st_uid == os.getuid():
            return token
    except (OSError, UnicodeError):
        pass  # a home that cannot be written, or a file that others can read: a token for this time only
    return secrets.token_urlsafe(24)


def link(host: str, listener: socket.socket, token: str) -> str:
    """Where the dashboard is, with the token."""
    port = listener.getsockname()[1]
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    return f"http://{f'[{name}]' if ':' in name else name}:{port}/?token={token}"


def serve(
    workspace: Workspace, listener: socket.socket, token: str, host: str, *, read_only: bool = False
) -> None:
    """Until somebody interrupts it."""
    sys.setswitchinterval(SWITCH_S)
    pages = Pages(Hub(workspace), read_only)
    config = uvicorn.Config(
        application(pages, token, host, read_only=read_only),
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
        ws="none",
        proxy_headers=False,
        lifespan="off",
    )
    _Server(config, pages).run(sockets=[listener])


class _Server(uvicorn.Server):
    """A server that ends the streams of open pages first: else it would wait for them, and log that."""

    def __init__(self, config: uvicorn.Config, pages: Pages) -> None:
        super().__init__(config)
        self._pages = pages

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        await self._pages.close()
        await super().shutdown(sockets)
