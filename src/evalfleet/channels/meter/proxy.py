"""The proxy that model calls go through: it swaps an attempt's key for the real one, passes on, and counts.

A call's path begins with the name of an upstream: `/openai/v1/chat/completions` goes to `openai`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import zlib
from typing import Any, Callable, Generator, NamedTuple, cast
from urllib.parse import parse_qsl, urlencode, urlsplit

from .accounts import NOTHING, OK, Account, Accounts, Call, Most
from .http import (
    LAST_CHUNK,
    BadMessage,
    Caller,
    Connections,
    Head,
    Upstream,
    ask,
    chunk,
    parts_of,
    read_head,
    write_head,
)
from .usage import Events, is_counted, most_of, parse_json, table, tokens_of

LARGEST_CALL = 128 << 20
LARGEST_COUNTED = 64 << 20
GRANT_S = 3600.0
"""How long a call waits for more money: the controller may be dead, or others leave some when they end."""
MOST_OUT = 32_768
"""Tokens that a call puts out at most, where neither it nor `[model] max_output_tokens` says."""
KEY_HEADERS = ("authorization", "x-api-key", "api-key", "x-goog-api-key")
STREAM_USAGE = ("/chat/completions", "/completions")
API_VERSION_THAT_TELLS_USAGE = "2024-09-01"


class CallRefused(Exception):
    """A call that is answered here and goes nowhere."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


class ModelCall(NamedTuple):
    """A call as it came, with its body and what of it matters here."""

    head: Head
    body: bytes
    upstream: Upstream
    path: str  # below the upstream's URL, with its query, without a key
    account: Account
    model: str
    asked_for_usage: bool
    streams: bool
    most: Most  # of the tokens that it can use


class Proxy:
    """Serves the callers of one machine."""

    def __init__(
        self,
        upstreams: dict[str, Upstream],
        accounts: Accounts,
        context: ssl.SSLContext | None = None,
        keep: Callable[[Account, int, str, bytes], None] | None = None,
    ) -> None:
        self._accounts = accounts
        self._may_keep = keep
        self._context = context
        self._grants: dict[str, asyncio.Event] = {}
        self._connections: dict[str, Connections] = {}
        self.most_out = MOST_OUT
        self.pass_to(upstreams, keep is not None)

    def pass_to(self, upstreams: dict[str, Upstream], keeps: bool) -> None:
        """From now on, calls go to these upstreams. Those that have begun go on as they are."""
        self._upstreams = upstreams
        self._keep = self._may_keep if keeps else None
        self._connections = {
            **self._connections,
            **{name: Connections(each, self._context) for name, each in upstreams.items()},
        }

    async def listen(self, address: str, port: int) -> asyncio.Server:
        """At all addresses ("0.0.0.0"), only those are served who come by loopback or by a bridge of this
        machine, as containers do."""
        return await asyncio.get_event_loop().create_server(
            lambda: Caller(self._serve), address, port, backlog=1024
        )

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One caller's connection, until either side ends it."""
        try:
            while await self._serve_one(reader, writer):
                pass
        except (BadMessage, ConnectionError, asyncio.TimeoutError, asyncio.IncompleteReadError, OSError):
            pass  # the caller is gone, or speaks something else; a call that had begun is in its file
        finally:
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await read_head(reader)
        if head is None:
            return False
        try:
            request = self._understood(head, await self._body(head, reader, writer))
            await self._afford(request, cast("Caller", writer.transport.get_protocol()).gone)
        except CallRefused as refusal:
            writer.write(_refused(refusal))
            await writer.drain()
            return head.keeps and refusal.status != 413
        return await self._pass_on(request, writer) and head.keeps

    async def _body(self, head: Head, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        if head.get("expect").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = bytearray()
        async for part in parts_of(head, reader, to_end=False):
            body += part
            if len(body) > LARGEST_CALL:
                raise CallRefused(413, "too_large", f"a call may have at most {LARGEST_CALL} bytes")
        return bytes(body)

    def _understood(self, head: Head, body: bytes) -> ModelCall:
        if head.get("upgrade"):
            raise CallRefused(501, "not_metered", "the meter counts no web sockets: call the model by HTTP")
        target = urlsplit(head.first[1])
        name, _, path = target.path.lstrip("/").partition("/")
        upstream = self._upstreams.get(name)
        if upstream is None:
            raise CallRefused(
                404, "no_such_upstream", f"the meter passes on to {', '.join(self._upstreams)}, not {name!r}"
            )
        query = parse_qsl(target.query, keep_blank_values=True)
        account = self._accounts.of_key(_key(head, query))
        if account is None:
            raise CallRefused(
                401,
                "invalid_api_key",
                "the meter knows no attempt with this key; use the key in the environment",
            )
        path = f"/{path}"
        document = table(parse_json(body))
        asked = _asks_for_usage(document)
        streams = document.get("stream") is True or ":streamgeneratecontent" in path.lower()
        if document.get("stream") is True and not asked and _tells_usage(path, query):
            body = _asking_for_usage(body, document)
        rest = urlencode([(key, value) for key, value in query if key != "key"])
        model = str(document.get("model") or _model_in(path))[:200]
        most = NOTHING
        if head.first[0] == "POST" and is_counted(path):
            most = Most(*most_of(path, body, document, self.most_out))
        whole = path + (f"?{rest}" if rest else "")
        return ModelCall(head, body, upstream, whole, account, model, asked, streams, most)

    async def _afford(self, request: ModelCall, gone: asyncio.Future[None]) -> None:
        """Return once a call may begin.

        Raises CallRefused when no more money is granted, ConnectionError when the caller is gone meanwhile.
        """
        account = request.account
        if request.most is not NOTHING and not account.can_price(request.model):
            account.refused = f"no price is known for the model {request.model!r}: add it to [model.prices]"
            self._accounts.tell(account, "refused")
            raise CallRefused(402, "no_price", f"evalfleet's run has a budget, and {account.refused}")
        if account.wedged:
            raise CallRefused(503, "attempt_ended", f"this attempt is being ended: {account.wedged}")
        if account.has_room():
            return
        if not account.refused:
            granted = self._grants.setdefault(account.attempt, asyncio.Event())
            granted.clear()
            account.wanting = True
            self._accounts.tell(account, "wants")
            waiting: asyncio.Future[Any] = asyncio.ensure_future(granted.wait())
            await asyncio.wait([waiting, gone], timeout=GRANT_S, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if gone.done():
                raise ConnectionError("the caller did not wait for more money")
            if account.wanting:
                self._accounts.tell(account, "refused")  # by nobody: so its attempt ends, and is tried again
                raise CallRefused(402, "not_granted", f"nobody has granted more money within {GRANT_S:g} s")
            if account.has_room():
                return
        account.refused = account.refused or "the budget is used up"
        self._accounts.tell(account, "refused")
        raise CallRefused(
            402, "budget_exhausted", f"evalfleet's budget for this attempt is used up: {account.refused}"
        )

    def granted(self, attempt: str) -> None:
        """The limits of an attempt have been changed, or will not be."""
        self._grants.setdefault(attempt, asyncio.Event()).set()

    async def _pass_on(self, request: ModelCall, writer: asyncio.StreamWriter) -> bool:
        """Returns whether the caller's connection can go on."""
        call = request.account.begin(request.model, request.most)
        if self._keep:
            self._keep(request.account, call.n, "request", request.body)
        answer = _Answer(request, call, writer, self._keep)
        try:
            return await self._exchange(request, answer)
        except (BadMessage, OSError, asyncio.TimeoutError, asyncio.IncompleteReadError) as error:
            return await answer.break_off(error, self._connections[request.upstream.name].netloc)
        except asyncio.CancelledError:
            answer.end("the meter was ended")
            raise
        finally:
            answer.end("")
            if request.account.wedged:
                self._accounts.tell(request.account, "wedged")

    async def _exchange(self, request: ModelCall, answer: _Answer) -> bool:
        connections = self._connections[request.upstream.name]
        message = _sent(request, connections)
        for fresh in (False, True):
            reader, upstream, reused = await connections.take(fresh=fresh)
            try:
                answer.is_sent()
                with answer.ending_with_its_caller(upstream):
                    head = await ask(message, reader, upstream)
                    if head is None and reused and not answer.caller_is_gone:
                        continue  # it was closed while it was idle: nobody has read this call
                    if head is None:
                        break
                    await answer.relay(head, reader)
            except BaseException:
                upstream.close()
                raise
            if head.keeps and not reader.at_eof():
                connections.give_back(reader, upstream)
            else:
                upstream.close()
            return True
        raise BadMessage("it closed the connection without an answer")


class _Answer:
    """An answer on its way to the caller: passed on part by part, and read for its tokens."""

    def __init__(
        self,
        request: ModelCall,
        call: Call,
        writer: asyncio.StreamWriter,
        keep: Callable[[Account, int, str, bytes], None] | None,
    ) -> None:
        self._request = request
        self._call = call
        self._writer = writer
        self._gone: asyncio.Future[None] = cast("Caller", writer.transport.get_protocol()).gone
        self._keep = keep
        self._status = 0
        self._began = False
        self._ended = False
        self._whole = False
        self._events: Events | None = None
        self._copy = bytearray()
        self._copied = True

    async def relay(self, head: Head, reader: asyncio.StreamReader) -> None:
        status = head.first[1]
        self._status = int(status) if status.isdigit() else 502
        inflate = _inflater(head.get("content-encoding"))
        if "event-stream" in head.get("content-type"):
            self._events = Events(hide_usage=self._hides(head))
            self._call.tokens = self._events.tokens
        bare = self._status in (204, 304) or self._request.head.first[0] == "HEAD"
        self._writer.write(self._first_line(head, bare))
        self._began = True
        if not bare:
            async for part in parts_of(head, reader, to_end=True):
                self._call.first_byte()
                await self._write(self._seen(part, inflate))
            if self._events is not None:
                await self._write(self._events.rest())
        self._whole = True
        # counted before its caller knows that it is over, who may look at once, or end
        self.end(self._error() if self._status >= OK else "")
        if not bare:
            self._writer.write(LAST_CHUNK)
        await self._writer.drain()

    def _seen(self, part: bytes, inflate: Callable[[bytes], bytes] | None) -> bytes:
        """Read a part of the answer for what it tells; what is to be passed on of it."""
        plain = part if inflate is None else inflate(part)
        if self._events is None or self._keep or self._status >= OK:
            self._collect(plain)
        shown = part if self._events is None else self._events.feed(plain)
        return part if inflate is not None else shown

    def _hides(self, head: Head) -> bool:
        asked = self._request.asked_for_usage
        return self._request.streams and not asked and not head.get("content-encoding")

    def _first_line(self, head: Head, bare: bool) -> bytes:
        headers = head.end_to_end("content-length")
        if not bare:
            headers.append(("Transfer-Encoding", "chunked"))
        return write_head(f"HTTP/1.1 {head.first[1]} {head.first[2]}".rstrip(), headers)

    async def _write(self, part: bytes) -> None:
        if part:
            self._writer.write(chunk(part))
            await self._writer.drain()

    def _collect(self, part: bytes) -> None:
        if len(self._copy) + len(part) > LARGEST_COUNTED:
            self._copied = False
        elif self._copied:
            self._copy += part

    def _tokens(self) -> dict[str, int]:
        """What cannot be read, or did not come whole, tells nothing."""
        if self._events is not None:
            return self._events.tokens
        return tokens_of(parse_json(bytes(self._copy))) if self._copied and self._whole else {}

    def _error(self) -> str:
        error = table(table(parse_json(bytes(self._copy))).get("error"))
        if isinstance(error.get("message"), str):
            return str(error["message"])
        return bytes(self._copy[:500]).decode("utf-8", "replace").strip()

    @property
    def caller_is_gone(self) -> bool:
        return self._gone.done()

    @contextlib.contextmanager
    def ending_with_its_caller(self, upstream: asyncio.StreamWriter) -> Generator[None, None, None]:
        def close(_: Any) -> None:
            upstream.close()

        self._gone.add_done_callback(close)
        try:
            yield
        finally:
            self._gone.remove_done_callback(close)

    def is_sent(self) -> None:
        self._call.sent = True

    async def break_off(self, error: BaseException, netloc: str) -> bool:
        """The upstream could not be asked, or stopped in the middle of its answer, or the caller is gone."""
        told = str(error) or type(error).__name__
        if self.caller_is_gone:
            self.end("the caller hung up")
            return False
        if self._began:
            self.end(f"{netloc} broke off: {told}")
            self._writer.close()  # the caller must see that the answer is not whole
            return False
        self._status, self._call.unanswered = 502, self._call.sent
        self.end(f"{netloc} cannot be reached: {told}")
        self._writer.write(
            _refused(CallRefused(502, "upstream_unreachable", f"{netloc} cannot be reached: {told}"))
        )
        await self._writer.drain()
        return True

    def end(self, error: str) -> None:
        if self._ended:
            return
        self._ended = True
        if self._keep:
            self._keep(self._request.account, self._call.n, "response", bytes(self._copy))
        self._call.tokens = self._tokens()
        self._call.end(self._status, error)


def _inflater(encoding: str) -> Callable[[bytes], bytes] | None:
    if encoding not in ("gzip", "deflate"):
        return None
    decompress = zlib.decompressobj(47 if encoding == "gzip" else 15)

    def inflate(part: bytes) -> bytes:
        try:
            return decompress.decompress(part, LARGEST_COUNTED)
        except zlib.error:
            return b""

    return inflate


def _sent(request: ModelCall, connections: Connections) -> bytes:
    """The call as the upstream sees it: its own host and key, and an answer that can be read."""
    head = request.head
    headers = head.end_to_end("host", "content-length", "accept-encoding", "expect", *KEY_HEADERS)
    headers[:0] = [("Host", connections.netloc)]
    headers += [("Accept-Encoding", "identity"), request.upstream.credentials]
    if request.body or head.first[0] in ("POST", "PUT", "PATCH"):
        headers.append(("Content-Length", str(len(request.body))))
    return write_head(f"{head.first[0]} {connections.path}{request.path} HTTP/1.1", headers) + request.body


def _key(head: Head, query: list[tuple[str, str]]) -> str:
    for name in KEY_HEADERS:
        value = head.get(name)
        if value:
            return value[7:].strip() if value.lower().startswith("bearer ") else value
    return next((value for key, value in query if key == "key"), "")


def _asks_for_usage(document: dict[str, Any]) -> bool:
    return table(document.get("stream_options")).get("include_usage") is True


def _tells_usage(path: str, query: list[tuple[str, str]]) -> bool:
    """Would this API take our question for a stream's usage? Older versions, in the query, refuse it."""
    version = next((value for key, value in query if key == "api-version"), "")
    return path.endswith(STREAM_USAGE) and not ("2" <= version < API_VERSION_THAT_TELLS_USAGE)


def _asking_for_usage(body: bytes, document: dict[str, Any]) -> bytes:
    if "stream_options" not in document:  # what the caller wrote stays as it is, to the byte
        return body.rstrip()[:-1] + b',"stream_options":{"include_usage":true}}'
    options = {**table(document["stream_options"]), "include_usage": True}
    return json.dumps({**document, "stream_options": options}).encode()


def _model_in(path: str) -> str:
    """Some APIs name the model, or its deployment, in the path."""
    words = path.strip("/").split("/")
    for before in ("models", "deployments"):
        if before in words[:-1]:
            return words[words.index(before) + 1].partition(":")[0]
    return ""


def _refused(refusal: CallRefused) -> bytes:
    """An error in a shape that the clients of all known APIs can read."""
    error = {
        "message": refusal.message,
        "type": refusal.code,
        "code": refusal.code,
        "status": refusal.code.upper(),
    }
    body = json.dumps({"type": "error", "error": error}).encode()
    headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
    if refusal.status == 413:
        headers.append(("Connection", "close"))
    return write_head(f"HTTP/1.1 {refusal.status} {refusal.code}", headers) + body
