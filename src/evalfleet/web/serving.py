"""How the dashboard's server is started: where it may listen, and under which link."""

from __future__ import annotations

import errno
import ipaddress
import socket

import uvicorn

from evalfleet.errors import RequestError
from evalfleet.planning.workspace import Workspace

from .server import application

GRACE_S = 1
"""How long the end waits for what browsers are being told."""


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
    found = socket.socket(family, socket.SOCK_STREAM)
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


def link(host: str, listener: socket.socket, token: str) -> str:
    """Where the dashboard is, with the token."""
    port = listener.getsockname()[1]
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    return f"http://{f'[{name}]' if ':' in name else name}:{port}/?token={token}"


def serve(
    workspace: Workspace, listener: socket.socket, token: str, host: str, *, read_only: bool = False
) -> None:
    """Until somebody interrupts it."""
    config = uvicorn.Config(
        application(workspace, token, host, read_only=read_only),
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
        ws="none",
    )
    uvicorn.Server(config).run(sockets=[listener])
