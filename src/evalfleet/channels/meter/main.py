"""The meter as a process: where to listen comes by standard input, orders and questions through a socket.

The real keys come with its orders and stay in its memory. Whoever may write to its folder may steer it: that
is the supervisor's user alone. It outlives supervisor and controller, and ends when its folder is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
import sys
from typing import Any
from urllib.parse import urlsplit

from .accounts import SAME_ERROR_S, SAME_ERROR_TIMES, Account, Accounts
from .http import Upstream
from .proxy import MOST_OUT, Proxy

SOCKET = "meter.sock"
LOOK_S = 5.0
MOST_KEPT = 10 << 20
MASK = b"***"


class Meter:
    """Answers the supervisor's questions about attempts, and tells it what cannot wait."""

    def __init__(self, orders: dict[str, Any]) -> None:
        self._folder = orders["folder"]
        self._port = 0
        self._watchers: set[asyncio.StreamWriter] = set()
        self._over = asyncio.Event()
        self._accounts = Accounts({}, self._tell)
        context = ssl.create_default_context(cafile=orders.get("ca_file") or None)
        self._proxy = Proxy({}, self._accounts, context, self._keep)
        self._obey(orders)

    def _obey(self, orders: dict[str, Any]) -> None:
        """Take up orders, the first or later ones: a controller after ours may bring another key."""
        upstreams = {name: Upstream(name, **told) for name, told in orders["upstreams"].items()}
        masked = {form.encode("latin-1") for form in orders.get("mask", ())}
        masked |= {each.key.encode() for each in upstreams.values() if each.key}
        self._mask = sorted(masked, key=len, reverse=True)  # one value may be part of another
        self._keeps = bool(orders.get("keep_calls"))
        self._accounts.prices.clear()
        self._accounts.prices.update(orders.get("prices", {}))
        self._accounts.rule.times = orders.get("same_errors") or SAME_ERROR_TIMES
        self._accounts.rule.seconds = orders.get("same_error_s") or SAME_ERROR_S
        self._proxy.pass_to(upstreams, self._keeps)
        self._proxy.opened = orders.get("paths") or ()
        self._proxy.renames_max_tokens = bool(orders.get("renames_max_tokens"))
        self._proxy.most_out = orders.get("most_out") or MOST_OUT

    def _take_orders(self, asked: dict[str, Any]) -> str:
        """What is wrong with them, in one line; if nothing is, they hold from now on."""
        wrong = refusal(asked)
        if not wrong:
            self._obey(asked)
        return wrong

    async def run(self, addresses: list[str], port: int) -> None:
        """Listen, say at which port, and serve until told to end or the folder is gone."""
        servers = [await self._proxy.listen(addresses[0], port)]
        self._port = port = servers[0].sockets[0].getsockname()[1]
        servers += [await self._proxy.listen(address, port) for address in addresses[1:]]
        path = os.path.join(self._folder, SOCKET)
        servers.append(await asyncio.start_unix_server(self._steer, path, limit=1 << 20))
        sys.stdout.write(json.dumps({"port": port}) + "\n")
        sys.stdout.flush()
        _let_go_of_output()
        while os.path.exists(path):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._over.wait(), LOOK_S)
                break
        for server in servers:
            server.close()

    async def _steer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One JSON object a line, each answered by one; after `watch`, also what is told unasked."""
        try:
            async for line in reader:
                writer.write(json.dumps(self._answer(json.loads(line), writer)).encode() + b"\n")
                await writer.drain()
        except (OSError, ValueError):
            pass
        finally:
            self._watchers.discard(writer)
            writer.close()

    def _answer(self, asked: dict[str, Any], writer: asyncio.StreamWriter) -> dict[str, Any]:
        verb, attempt = asked.get("do"), asked.get("attempt", "")
        if verb == "open":
            account = self._accounts.open(asked["key"], attempt, asked["folder"])
            account.allowed_usd = asked.get("usd", account.allowed_usd)
            account.allowed_tokens = asked.get("tokens", account.allowed_tokens)
            return account.state()
        if verb == "watch":
            self._watchers.add(writer)
            for account in self._accounts.to_be_ended():  # who watched before may not have heard it
                told = "refused" if account.refused else "wedged"
                asyncio.get_event_loop().call_soon(self._accounts.tell, account, told)
            return {"port": self._port, "pid": os.getpid()}
        if verb == "orders":
            return {"wrong": self._take_orders(asked)}
        if verb == "end":
            self._over.set()
            return {"ending": True}
        if verb == "close":
            return self._accounts.close(attempt) or {"unknown_attempt": attempt}
        account_of = self._accounts.of(attempt)
        return {"unknown_attempt": attempt} if account_of is None else account_of.state()

    def _tell(self, told: dict[str, Any]) -> None:
        for writer in self._watchers:
            writer.write(json.dumps(told).encode() + b"\n")

    def _keep(self, account: Account, n: int, what: str, body: bytes) -> None:
        """A call's body as a file beside the list of calls, without keys."""
        if not self._keeps:
            return
        for secret in self._mask:
            body = body.replace(secret, MASK)
        folder = os.path.join(account.folder, "calls")
        with contextlib.suppress(OSError):
            os.makedirs(folder, mode=0o700, exist_ok=True)
            with open(os.path.join(folder, f"{n:06}.{what}"), "wb") as file:
                file.write(body[:MOST_KEPT])


def refusal(orders: dict[str, Any]) -> str:
    """What is wrong with the orders, in one line; empty if nothing is."""
    for name, upstream in orders["upstreams"].items():
        parts = urlsplit(str(upstream["url"]))
        if parts.scheme != "https" and parts.hostname not in ("127.0.0.1", "localhost", "::1"):
            return f"model upstream {name!r}: {upstream['url']!r} is not https: the key would travel openly"
    return ""


async def _serve(orders: dict[str, Any]) -> None:
    # made here: before Python 3.10 an event belongs to the loop of when it is made
    await Meter(orders).run(orders.get("listen") or ["127.0.0.1"], orders.get("port", 0))


def main(argv: list[str]) -> int:
    """Exit code 2: the orders cannot be carried out; standard error says why in one line."""
    orders = json.loads(sys.stdin.readline())
    _hide_memory()
    wrong = refusal(orders)
    if not wrong:
        try:
            asyncio.run(_serve(orders))
            return 0
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else str(error)
            port = orders.get("port") or 0
            wrong = f"the meter cannot listen at port {port}: {why}; name another or none under [model]"
    sys.stderr.write(wrong + "\n")
    return 2


def _hide_memory() -> None:
    """Another process of the same user must not read the keys out of our memory. Linux; best effort."""
    with contextlib.suppress(Exception):
        import ctypes

        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE


def _let_go_of_output() -> None:
    """Whoever started the meter reads its first line, and must not wait for more."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.close(null)
