"""One SSH connection. Its host key is verified, always: nothing is trusted because it is new."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import asyncssh

from .target import Access, HostDown, HostKeyUnknown, HostRefused, Target, target

KEEPALIVE_S = 5.0
KEEPALIVES = 3
# measured in the lab: half the CPU a message, and a seventh of it a connection, of what would be chosen
CIPHER = "aes128-gcm@openssh.com"
KEX = "curve25519-sha256"

OPENING_ERRORS = (asyncssh.Error, OSError, AssertionError, AttributeError)
"""What asyncssh raises when a connection or a session cannot be opened: the host is down.

The last two are how it fails when the connection is lost while a session is being opened over it: it goes on
with a channel that has been cleaned up (`assert self._conn is not None`, `self._session.session_started()`).
"""


class Connection:
    """An open connection and the jump hosts behind it."""

    def __init__(self, ssh: asyncssh.SSHClientConnection, jump: Connection | None) -> None:
        self.ssh = ssh
        self._jump = jump

    def abort(self) -> None:
        """Hang up without waiting for the other side: it may hear nothing."""
        self.ssh.abort()
        if self._jump is not None:
            self._jump.abort()

    async def close(self) -> None:
        self.ssh.close()
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(2.0):
                await self.ssh.wait_closed()
        if self._jump is not None:
            await self._jump.close()


class _Joined:
    """A transport that sends what was written in one turn of the loop at once.

    asyncssh writes an empty packet before each of ours, and every write is a packet on the network, which
    costs both ends more than its content does.
    """

    def __init__(self, transport: asyncio.WriteTransport) -> None:
        self._transport = transport
        self._parts: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._parts:
            asyncio.get_running_loop().call_soon(self._flush)
        self._parts.append(data)

    def _flush(self) -> None:
        parts, self._parts = self._parts, []
        if parts and not self._transport.is_closing():
            self._transport.write(b"".join(parts))

    def close(self) -> None:
        self._flush()
        self._transport.close()


def _joined(ssh: asyncssh.SSHClientConnection) -> asyncssh.SSHClientConnection:
    """Should asyncssh keep its transport elsewhere one day, nothing is joined, and all works the same."""
    transport = getattr(ssh, "_transport", None)
    if isinstance(transport, asyncio.WriteTransport):
        setattr(ssh, "_transport", _Joined(transport))  # noqa: B010 (it is private)
    return ssh


class _Client(asyncssh.SSHClient):
    """A client that remembers a key that was refused, and tells when the connection is gone."""

    def __init__(self, lost: Callable[[], None]) -> None:
        self.refused: asyncssh.SSHKey | None = None
        self._lost = lost

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        self.refused = key
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost()


class _Way(NamedTuple):
    """How a connection is made, and the files that its host key was looked up in."""

    options: asyncssh.SSHClientConnectionOptions
    files: list[str]


async def open_connection(where: Target, access: Access, lost: Callable[[], None]) -> Connection:
    """`lost` is called when it is gone. Raises HostDown or HostRefused, which name the host."""
    client = _Client(lost)
    try:
        options, files = await asyncio.to_thread(_way, where, access, client)
    except (asyncssh.Error, OSError, ValueError) as err:
        what = f"it cannot be reached with these settings: {err}"
        raise HostRefused(where.name, what, "correct them, or ~/.ssh/config", stage="key") from err
    try:
        async with asyncio.timeout(access.connect_timeout_s):
            return await _open(where, access, options)
    except (asyncssh.HostKeyNotVerifiable, asyncssh.KeyExchangeFailed) as err:
        raise _key_problem(where, options, files, client.refused, err) from err
    except asyncssh.PermissionDenied as err:
        what = f"it lets nobody in as {options.username} with the keys we have"
        remedy = "set `user` and `key`, or add the key to your agent"
        raise HostRefused(where.name, what, remedy, stage="login") from err
    except OPENING_ERRORS as err:
        raise HostDown(f"{where.name} does not answer: {_reason(err, access)}") from err


async def _open(where: Target, access: Access, options: asyncssh.SSHClientConnectionOptions) -> Connection:
    if access.new_socket is not None:
        return await _open_elsewhere(where, access.new_socket, options)
    via = access.jump or options.tunnel
    jump = await _open_jump(str(via), access) if via else None
    try:
        ssh = await asyncssh.connect(where.host, options=options, tunnel=jump.ssh if jump else None)
    except BaseException:
        if jump is not None:
            jump.abort()
        raise
    return Connection(_joined(ssh) if jump is None else ssh, jump)


async def _open_elsewhere(
    where: Target, new_socket: Callable[[], socket.socket], options: asyncssh.SSHClientConnectionOptions
) -> Connection:
    """In another network than this computer's: a socket stays in the one that it was made in."""
    sock = await asyncio.to_thread(new_socket)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (where.host, options.port))
    except BaseException:
        sock.close()
        raise
    # from here on the socket is asyncssh's
    ssh = await asyncssh.connect(where.host, options=options, config=None, sock=sock)
    return Connection(_joined(ssh), None)


def _reason(err: Exception, access: Access) -> str:
    if isinstance(err, TimeoutError):
        return f"nothing within {access.connect_timeout_s:g} s"
    return reason_of(err)


def reason_of(err: Exception) -> str:
    """What to tell of an opening error. An assertion has no words, and an attribute's are of no use."""
    if isinstance(err, AssertionError | AttributeError):
        return "the connection was lost"
    return str(err) or type(err).__name__


async def _open_jump(via: str, access: Access) -> Connection:
    """Through `a,b` one comes by a to b. Each is verified like any host."""
    *before, last = via.split(",")
    settings = Access(
        key=access.key,
        known_hosts=access.known_hosts,
        jump=",".join(before) or None,
        connect_timeout_s=access.connect_timeout_s,
        agent=access.agent,
    )
    return await open_connection(target(last), settings, lambda: None)


def _way(where: Target, access: Access, client: _Client) -> _Way:
    given: dict[str, Any] = {
        "host": where.host,
        "config": (),  # ~/.ssh/config; options that are made directly would go without
        "keepalive_interval": KEEPALIVE_S,
        "keepalive_count_max": KEEPALIVES,
        "login_timeout": access.connect_timeout_s,
        "client_factory": lambda: client,
        "agent_forwarding": False,
        "x11_forwarding": False,
    }
    settings = {
        "port": where.port or access.port,
        "username": where.user or access.user,
        "client_keys": [access.key] if access.key else None,
        "known_hosts": access.known_hosts,
        "agent_path": access.agent,
    }
    given.update({name: value for name, value in settings.items() if value is not None})
    if access.new_socket is not None:
        given.update(config=None, agent_path=None)
    options = asyncssh.SSHClientConnectionOptions(**given)
    files = [access.known_hosts] if access.known_hosts else _files(options.known_hosts)
    # said once and for all: neither `UserKnownHostsFile none` nor a `Match final` may switch it off
    more: dict[str, Any] = {"known_hosts": _known_hosts(files)}
    if options.config.get("Ciphers") is None:
        more["encryption_algs"] = "^" + CIPHER
    if options.config.get("KexAlgorithms") is None:
        more["kex_algs"] = "^" + KEX
    return _Way(asyncssh.SSHClientConnectionOptions(options, **more), files)


def _files(known_hosts: Any) -> list[str]:
    """The files that exist. If none does, it is the user's own; if that is missing too, nobody is trusted."""
    files = [str(Path(file).expanduser()) for file in known_hosts or ()]
    return [file for file in files if os.path.isfile(file)] or list(filter(os.path.isfile, [_own_file()]))


def _own_file() -> str:
    return str(Path("~/.ssh/known_hosts").expanduser())


def _known_hosts(files: list[str]) -> asyncssh.SSHKnownHosts:
    """Of no file, or one that is not there yet: nobody is known. Raises OSError, ValueError."""
    stamps = [(file, os.stat(file)) for file in files if os.path.exists(file)]
    return _parsed(tuple((file, it.st_mtime_ns, it.st_size, it.st_ino) for file, it in stamps))


@functools.lru_cache(maxsize=8)
def _parsed(stamps: tuple[tuple[str, int, int, int], ...]) -> asyncssh.SSHKnownHosts:
    """Once for all hosts, until a file changes: a line a host, read for each host, would be their square."""
    return asyncssh.read_known_hosts([file for file, _, _, _ in stamps])


# -- refused keys --------------------------------------------------------------------------------


def _key_problem(
    where: Target,
    options: asyncssh.SSHClientConnectionOptions,
    files: list[str],
    key: asyncssh.SSHKey | None,
    err: Exception,
) -> HostRefused:
    """What to tell of a host whose key is not the one we know."""
    port = options.port
    name = options.host_key_alias or options.host
    file = files[0] if files else _own_file()
    known = _known_keys(files, name, port)
    if key is None:
        if not known:
            what = f"its host key cannot be verified: {err}"
            return HostRefused(where.name, what, f"see which keys it has, and what {file} says", stage="key")
        detail = f"{file} knows {_prints(known)}, and the host offers no key of that kind: {err}"
        remedy = f"nothing was sent to it; if you know why, replace its line in {file}"
        return HostRefused(where.name, "THE HOST KEY MAY HAVE CHANGED", remedy, detail, "key")
    if known:
        detail = f"{file} says {_prints(known)}, the host has {_prints([key])}"
        remedy = (
            "somebody may be in between, or the host was made anew; nothing was sent to it; if you know why, "
            f"replace its line in {file}"
        )
        return HostRefused(where.name, "THE HOST KEY HAS CHANGED", remedy, detail, "key")
    entry = name if port == 22 else f"[{name}]:{port}"
    line = f"{entry} {key.export_public_key().decode().strip()}"
    return HostKeyUnknown(where.name, _prints([key]), file, line)


def _known_keys(files: list[str], name: str, port: int) -> list[asyncssh.SSHKey]:
    keys: list[asyncssh.SSHKey] = []
    for file in files:
        with contextlib.suppress(OSError, ValueError):
            matched = asyncssh.match_known_hosts(file, name, "", None if port == 22 else port)
            keys.extend(matched[0])
    return keys


def _prints(keys: list[asyncssh.SSHKey]) -> str:
    return " and ".join(f"{key.get_fingerprint()} ({key.get_algorithm()})" for key in keys)
