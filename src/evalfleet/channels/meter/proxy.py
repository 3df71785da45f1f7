"""The proxy that model calls go through: it swaps an attempt's key for the real one, passes on, and counts.

A call's path begins with the name of an upstream: `/openai/v1/chat/completions` goes to `openai`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import zlib
from typing import Any, Callable, Generator, NamedTuple, Sequence, cast
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit

from .accounts import NOTHING, OK, Account, Accounts, Call, Most
from .endpoints import Route, route_of, split_target
from .http import (
    BACKLOG,
    LAST_CHUNK,
    PART,
    BadMessage,
    Caller,
    Connections,
    Head,
    Upstream,
    ask,
    chunk,
    descriptors,
    parts_of,
    read_head,
    write_head,
)
from .usage import Events, Told, most_of, parse_call, parse_json, table, told_by

LARGEST_CALL = 64 << 20
MOST_HELD = 128 << 20
"""Bytes that the calls of one attempt may have in memory at a time. Further calls wait."""
HELD_LOOK_S = 0.05
STRANGERS = 512
"""Connections that have not shown a key yet. Beyond it, the oldest one is closed."""
MOST_CONNECTIONS = 1000
"""Connections of one attempt: as many as the vendors' own clients open at most."""
HEAD_S, IDLE_S = 10.0, 900.0
"""How long a head may take to come: the first one of a connection, and one after a call."""
LARGEST_COUNTED = 64 << 20
MOST_OUT = 32_768
"""Tokens that a call puts out at most, where neither it nor `[model] max_output_tokens` says."""
KEY_HEADERS = ("authorization", "x-api-key", "api-key", "x-goog-api-key")
REROUTING = ("x-http-method", "x-method-", "x-original-", "x-rewrite-", "x-forwarded-")
"""What headers begin with that make some servers read another method or path than the call has."""
STREAM_USAGE = ("/chat/completions", "/completions")
API_VERSION_THAT_TELLS_USAGE = "2024-09-01"


class CallRefused(Exception):
    """A call that is answered here and goes nowhere."""

    def __init__(
        self, status: int, code: str, message: str, *, turns_away: bool = False, model: str = ""
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message
        self.turns_away, self.model = turns_away, model


class ModelCall(NamedTuple):
    """A call as it came, with its body and what of it matters here."""

    head: Head
    body: bytes
    upstream: Upstream
    route: Route
    query: str  # without a key
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
        self._connections: dict[str, Connections] = {}
        self._strangers: dict[Caller, None] = {}
        self._limit = descriptors()
        self.most_out = MOST_OUT
        self.opened: Sequence[str] = ()
        self.renames_max_tokens = False
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
        most = min(STRANGERS, self._limit // 4)
        return await asyncio.get_event_loop().create_server(
            lambda: Caller(self._serve, self._strangers, most), address, port, backlog=BACKLOG
        )

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One caller's connection, until either side ends it."""
        caller = cast("Caller", writer.transport.get_protocol())
        try:
            while await self._serve_one(reader, writer, caller):
                pass
        except (BadMessage, ValueError, OSError, asyncio.TimeoutError, asyncio.IncompleteReadError):
            pass  # the caller is gone, or speaks something else; a call that had begun is in its file
        finally:
            if caller.account is not None:
                caller.account.connections -= 1
            writer.close()

    async def _serve_one(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, caller: Caller
    ) -> bool:
        head = await asyncio.wait_for(read_head(reader), HEAD_S if caller.account is None else IDLE_S)
        if head is None:
            return False
        try:
            account = self._admitted(head, caller)
        except CallRefused as refusal:
            writer.write(_refused(refusal, closes=True))
            await writer.drain()
            with contextlib.suppress(
                BadMessage
            ):  # a small body is read, or its sender would not see the answer
                await asyncio.wait_for(reader.read(PART), HEAD_S)
            return False
        return await self._serve_call(head, account, caller, reader, writer) and head.keeps

    async def _serve_call(
        self,
        head: Head,
        account: Account,
        caller: Caller,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:
        """Returns whether the caller's connection can go on."""
        held = _size(head)
        while account.held and account.held + held > MOST_HELD:
            if caller.gone.done():
                return False
            await asyncio.sleep(HELD_LOOK_S)
        account.held += held
        try:
            body = await self._body(head, held, reader, writer)
            account.held += len(body) - held
            held = len(body)
            request = self._understood(head, body, account)
            self._afford(request)
            return await self._pass_on(request, writer)
        except CallRefused as refusal:
            if refusal.turns_away:
                account.turn_away(refusal.model, refusal.status, refusal.message)
                if account.wedged:
                    self._accounts.tell(account, "wedged")
            writer.write(_refused(refusal, closes=refusal.status == 413))
            await writer.drain()
            return refusal.status != 413
        finally:
            account.held -= held

    def _admitted(self, head: Head, caller: Caller) -> Account:
        """The account whose key the call has. Before that is known, nothing but its head is read."""
        account = self._accounts.of_key(_key(head))
        if account is None:
            raise CallRefused(
                401,
                "invalid_api_key",
                "the meter knows no attempt with this key; use the key in the environment",
            )
        if caller.account is not account:
            most = min(MOST_CONNECTIONS, self._limit // 16)
            if account.connections >= most:
                raise CallRefused(429, "too_many", f"an attempt may have at most {most} connections")
            if caller.account is not None:
                caller.account.connections -= 1
            caller.account = account
            account.connections += 1
            self._strangers.pop(caller, None)
        return account

    async def _body(
        self, head: Head, size: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bytes:
        too_large = CallRefused(413, "too_large", f"a call may have at most {LARGEST_CALL} bytes")
        if size > LARGEST_CALL:
            raise too_large
        if head.get("expect").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        parts: list[bytes] = []
        left = LARGEST_CALL
        async for part in parts_of(head, reader, to_end=False):
            parts.append(part)
            left -= len(part)
            if left < 0:
                raise too_large
        return b"".join(parts)

    def _understood(self, head: Head, body: bytes, account: Account) -> ModelCall:
        method = head.first[0]
        target = _target(head)
        name, path = split_target(target.path)
        upstream = self._upstreams.get(name)
        if upstream is None:
            raise CallRefused(
                404, "no_such_upstream", f"the meter passes on to {', '.join(self._upstreams)}, not {name!r}"
            )
        route = route_of(method, path, self.opened)
        if route is None:
            raise CallRefused(
                403,
                "not_allowed",
                f"the meter does not pass on {method[:20]} {path[:200]}; paths of [model] can allow it",
                turns_away=True,
            )
        if method == "GET":
            body = b""
        query = parse_qsl(target.query, keep_blank_values=True)
        try:
            document = parse_call(body) if route.generates else {}
        except ValueError as error:
            raise CallRefused(400, "unclear", f"the meter does not pass this call on: {error}") from None
        if self.renames_max_tokens and path.endswith("/chat/completions") and "max_tokens" in document:
            document.setdefault("max_completion_tokens", document.pop("max_tokens"))
            body = json.dumps(document).encode()
        asked = _asks_for_usage(document)
        streams = document.get("stream") is True or path.endswith(":streamGenerateContent")
        if document.get("stream") is True and not asked and _tells_usage(path, query):
            body = _asking_for_usage(body, document)
        rest = urlencode([(key, value) for key, value in query if key != "key"])
        model = (route.model or str(document.get("model") or ""))[:200]
        most = Most(*most_of(path, body, document, self.most_out)) if route.generates else NOTHING
        return ModelCall(head, body, upstream, route, rest, account, model, asked, streams, most)

    def _afford(self, request: ModelCall) -> None:
        """Raise CallRefused if the call must not begin."""
        account = request.account
        if account.wedged:
            raise CallRefused(503, "attempt_ended", f"this attempt is being ended: {account.wedged}")
        if request.route.is_free:
            return
        if request.route.generates and not account.can_price(request.model):
            raise CallRefused(
                402,
                "no_price",
                "evalfleet's run has a budget, and no price is known for the model "
                f"{request.model!r}; add it to [model.prices]",
                turns_away=True,
                model=request.model,
            )
        account.refused = account.refused or account.used_up()
        if account.refused:
            self._accounts.tell(account, "refused")
            raise CallRefused(
                402,
                "budget_exhausted",
                f"evalfleet's allowance of this attempt is used up: {account.refused}; "
                "a larger --budget or --task-budget gives more",
            )

    async def _pass_on(self, request: ModelCall, writer: asyncio.StreamWriter) -> bool:
        """Returns whether the caller's connection can go on."""
        call = request.account.begin(request.model, request.most, request.route)
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
        sent = _head_sent(request, connections)
        for fresh in (False, True):
            reader, upstream, reused = await connections.take(fresh=fresh)
            try:
                answer.is_sent()
                with answer.ending_with_its_caller(upstream):
                    head = await ask(sent, request.body, reader, upstream)
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
        shown = part
        if self._events is not None:
            shown = self._events.feed(plain)
            self._call.told = [self._events.told]
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

    def _told(self) -> list[Told]:
        """What cannot be read, or did not come whole, tells nothing."""
        if self._events is not None:
            return [self._events.told]
        return told_by(bytes(self._copy)) if self._copied and self._whole else []

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
        self._call.told = self._told()
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


def _head_sent(request: ModelCall, connections: Connections) -> bytes:
    """The call's head as the upstream sees it: its own host and key, and an answer that can be read."""
    head = request.head
    headers = head.end_to_end("host", "content-length", "accept-encoding", "expect", *KEY_HEADERS)
    headers = [(name, value) for name, value in headers if not _reroutes(name)]
    headers[:0] = [("Host", connections.netloc)]
    headers += [("Accept-Encoding", "identity"), request.upstream.credentials]
    if request.body or head.first[0] in ("POST", "PUT", "PATCH"):
        headers.append(("Content-Length", str(len(request.body))))
    target = f"{connections.path}{request.route.path}" + (f"?{request.query}" if request.query else "")
    return write_head(f"{head.first[0]} {target} HTTP/1.1", headers)


def _reroutes(header: str) -> bool:
    """Some servers take an underscore in a header's name for a hyphen."""
    return "_" in header or header.lower().startswith(REROUTING)


def _size(head: Head) -> int:
    """Of the body, as far as the head tells: one in chunks may be as large as any."""
    length = head.get("content-length")
    if "chunked" in head.get("transfer-encoding").lower():
        return LARGEST_CALL
    return int(length) if length.isdigit() and len(length) < 20 else 0


def _target(head: Head) -> SplitResult:
    """Two slashes at its beginning would else be taken for those before a host. Raises ValueError."""
    target = head.first[1]
    return urlsplit("/" + target.lstrip("/") if target.startswith("/") else target)


def _key(head: Head) -> str:
    for name in KEY_HEADERS:
        value = head.get(name)
        if value:
            return value[7:].strip() if value.lower().startswith("bearer ") else value
    query = parse_qsl(_target(head).query)
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


def _refused(refusal: CallRefused, *, closes: bool = False) -> bytes:
    """An error in a shape that the clients of all known APIs can read."""
    error = {
        "message": refusal.message,
        "type": refusal.code,
        "code": refusal.code,
        "status": refusal.code.upper(),
    }
    body = json.dumps({"type": "error", "error": error}).encode()
    headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
    if closes:
        headers.append(("Connection", "close"))
    return write_head(f"HTTP/1.1 {refusal.status} {refusal.code}", headers) + body
