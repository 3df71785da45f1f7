"""A stand-in for the APIs of models: OpenAI's (also as Azure serves it), Anthropic's and Gemini's.

    async with Models() as models:
        client = openai.AsyncOpenAI(base_url=f"{models.url}/v1", api_key=models.key)

It writes down what it served (`models.served`), so that what a meter counted can be held against it. A
model's name says how its calls go, after a `+`: `any+cut` breaks its streams off, `+stall` stops answering,
`+500`, `+429`, `+400` fail, `+nonsense` answers what is no JSON, `+negative` and `+absurd` tell usage that
cannot be, `+silent` tells none, `+slow` waits between the events of a stream, `+hold` stops in the midst of
one until somebody asks for `/go`. `models.deployed` says which model a deployment serves. As with the
originals, a path goes before the body, a background response can be fetched as often as one likes, and some
paths give keys away (`models.given_away`). By hand: `python -m standins.models`; MODELS_KEY may name a file
with the key to demand.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, Self

from aiohttp import web

from standins import by_hand

KEY = "sk-real-key-of-the-stand-in"
WORDS = 12
PAUSE_S = 0.05
_ids = count(1)
POLLS = 2
"""So often a background response is fetched before it is complete."""
MODEL_PATHS = {
    "chat/completions": "chat",
    "completions": "chat",
    "responses": "responses",
    "messages": "anthropic",
    "embeddings": "embeddings",
}


class Served(NamedTuple):
    """A call that was answered with a usage: its model, and its tokens as the meter names them."""

    model: str
    tokens: dict[str, int]


class Models:
    """The four APIs at one address of loopback."""

    def __init__(self, key: str = KEY, pause_s: float = 0.0, port: int = 0) -> None:
        self.key = key
        self.url = ""
        self.served: list[Served] = []
        self.keys_seen: set[str] = set()
        self.requests: list[dict[str, Any]] = []
        self.arrived: list[str] = []
        """Method and path of all that came with the key."""
        self.given_away: list[str] = []
        self.deployed: dict[str, str] = {}
        self._stored: dict[str, tuple[_Call, int]] = {}
        self._batch: list[_Call] = []
        self.cancelled = 0
        self.go = asyncio.Event()
        self._pause_s = pause_s
        self._port = port
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=256 << 20)
        app.router.add_get("/served", self._sums)
        app.router.add_get("/go", self._go)
        app.router.add_route("*", "/{rest:.*}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _sums(self, request: web.Request) -> web.Response:
        """How many calls were made, how many told their usage, and the tokens of those."""
        sums: Counter[str] = Counter()
        for call in self.served:
            sums.update(call.tokens)
        counts = {"requests": len(self.requests), "calls": len(self.served)}
        return web.json_response({**counts, "tokens": dict(sums)})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        headers = request.headers
        key = headers.get("x-api-key") or headers.get("api-key") or headers.get("x-goog-api-key")
        key = key or headers.get("authorization", "").removeprefix("Bearer ")
        self.keys_seen.add(key)
        if key != self.key:
            return _error(401, "invalid_api_key", "Incorrect API key provided.")
        method = headers.get("x-http-method-override", request.method).upper()
        self.arrived.append(f"{method} {request.path}")
        if method == "GET":
            return self._get(request.path)
        if method != "POST":
            return _error(405, "method_not_supported", f"Not allowed to {method} on {request.path}.")
        if request.path.endswith(("/realtime/client_secrets", "/key/generate")):
            self.given_away.append(f"ek-{len(self.given_away)}")
            return web.json_response({"value": self.given_away[-1]})
        if request.path.endswith("/moderations"):
            return web.json_response({"id": "modr-1", "model": "omni-moderation-latest", "results": []})
        if not _dialect(request.path):
            return _error(404, "not_found", f"Unknown request URL: POST {request.path}.")
        try:
            body: dict[str, Any] = json.loads(await request.text())
        except ValueError:
            return _error(400, "invalid_request_error", "We could not parse the JSON body of your request.")
        self.requests.append(body)
        call = _Call(request.path, body, self.deployed)
        if call.mood.isdigit():
            return _error(int(call.mood), "server_error", f"The stand-in was asked to fail with {call.mood}.")
        if call.mood == "stall":
            await asyncio.Event().wait()
        if call.mood == "nonsense":
            return web.Response(text="<html>this is no JSON</html>", content_type="application/json")
        if body.get("background"):
            self._stored[call.id] = (call, 0)
            return web.json_response(call.response("queued"))
        return await self._stream(request, call) if call.streams else self._whole(call)

    def _get(self, path: str) -> web.Response:
        parent, _, last = path.rpartition("/")
        if last == "models":
            return web.json_response({"object": "list", "data": [{"id": "any", "object": "model"}]})
        if path.endswith("/files/results/content"):
            return web.Response(text="".join(self._results()))
        if not parent.endswith("/responses") or last not in self._stored:
            return _error(404, "not_found", f"Unknown request URL: GET {path}.")
        call, polls = self._stored[last]
        self._stored[last] = (call, polls + 1)
        if polls + 1 == POLLS:
            self._note(call)
        return web.json_response(call.answer() if polls + 1 >= POLLS else call.response("in_progress"))

    def _results(self) -> list[str]:
        """What a batch has answered, a line for each of its calls. It used its tokens once."""
        if not self._batch:
            self._batch = [
                _Call("/v1/responses", {"model": "any", "input": "word " * n}, {}) for n in range(3)
            ]
            for call in self._batch:
                self._note(call)
        answers = [{"status_code": 200, "body": call.answer()} for call in self._batch]
        return [json.dumps({"custom_id": "a", "response": answer}) + "\n" for answer in answers]

    def _whole(self, call: _Call) -> web.Response:
        self._note(call)
        return web.json_response(call.answer())

    def _note(self, call: _Call) -> None:
        if call.tells:
            self.served.append(Served(call.model, call.tokens))

    async def _go(self, request: web.Request) -> web.Response:
        self.go.set()
        return web.Response()

    async def _stream(self, request: web.Request, call: _Call) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        try:
            async for event in self._events(call):
                await response.write(event)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if call.mood == "cut" and request.transport is not None:
            request.transport.abort()
        return response

    async def _events(self, call: _Call) -> AsyncIterator[bytes]:
        events = call.events()
        for position, event in enumerate(events):
            if call.mood == "cut" and position == len(events) // 2:
                return
            if call.mood == "hold" and position == len(events) // 2:
                await self.go.wait()
            if call.mood == "slow" or self._pause_s:
                await asyncio.sleep(self._pause_s or PAUSE_S)
            yield event
        self._note(call)


class _Call:
    """What was asked, in whichever dialect, and the answer."""

    def __init__(self, path: str, body: dict[str, Any], deployed: Mapping[str, str]) -> None:
        self.body = body
        self.dialect = _dialect(path)
        in_path = path.rpartition("/")[2].rpartition(":")[0] if self.dialect == "gemini" else ""
        deployment = path.partition("/deployments/")[2].partition("/")[0]
        asked = in_path or deployment or str(body.get("model") or "any")
        self.model = deployed.get(asked, asked)
        self.id = f"resp_{next(_ids)}"
        self.mood = self.model.partition("+")[2]
        self.streams = body.get("stream") is True or "streamGenerateContent" in path
        size = len(json.dumps(body))
        self.tokens = {
            "in": 20 + size % 500,
            "cached": size % 17,
            "out": 0 if self.dialect == "embeddings" else 5 + size % 300,
        }
        self.tokens["reasoning"] = min(size % 5, self.tokens["out"])
        if self.dialect == "anthropic":
            self.tokens["cache_write"] = size % 3
            del self.tokens["reasoning"]
        if self.dialect == "embeddings":
            del self.tokens["reasoning"], self.tokens["cached"]
        options = body.get("stream_options") or {}
        self.tells = self.mood not in ("silent", "negative", "absurd", "cut") and not (
            self.dialect == "chat" and self.streams and not options.get("include_usage")
        )

    def usage(self) -> dict[str, Any]:
        factor = {"negative": -1, "absurd": 10**12}.get(self.mood, 1)
        told = {kind: factor * count for kind, count in self.tokens.items()}
        if self.mood == "silent":
            return {}
        if self.dialect == "anthropic":
            plain = told["in"] - told["cached"] - told["cache_write"]
            cache = {
                "cache_read_input_tokens": told["cached"],
                "cache_creation_input_tokens": told["cache_write"],
            }
            return {"input_tokens": plain, "output_tokens": told["out"], **cache}
        if self.dialect == "gemini":
            said = {"promptTokenCount": told["in"], "candidatesTokenCount": told["out"] - told["reasoning"]}
            said |= {"cachedContentTokenCount": told["cached"], "thoughtsTokenCount": told["reasoning"]}
            return {**said, "totalTokenCount": told["in"] + told["out"]}
        if self.dialect == "responses":
            parts = {"input_tokens_details": {"cached_tokens": told["cached"]}}
            parts["output_tokens_details"] = {"reasoning_tokens": told["reasoning"]}
            return {
                "input_tokens": told["in"],
                "output_tokens": told["out"],
                "total_tokens": told["in"] + told["out"],
                **parts,
            }
        if self.dialect == "embeddings":
            return {"prompt_tokens": told["in"], "total_tokens": told["in"]}
        parts = {"prompt_tokens_details": {"cached_tokens": told["cached"]}}
        parts["completion_tokens_details"] = {"reasoning_tokens": told["reasoning"]}
        return {
            "prompt_tokens": told["in"],
            "completion_tokens": told["out"],
            "total_tokens": told["in"] + told["out"],
            **parts,
        }

    def answer(self) -> dict[str, Any]:
        usage, text = self.usage(), "word " * WORDS
        if self.dialect == "anthropic":
            content = [{"type": "text", "text": text}]
            known: dict[str, Any] = {
                "id": "msg_1",
                "type": "message",
                "role": "assistant",
                "stop_reason": "end_turn",
                "stop_sequence": None,
            }
            return {**known, "model": self.model, "content": content, **({"usage": usage} if usage else {})}
        if self.dialect == "gemini":
            candidate = {
                "content": {"role": "model", "parts": [{"text": text}]},
                "finishReason": "STOP",
                "index": 0,
            }
            return {
                "candidates": [candidate],
                "modelVersion": self.model,
                **({"usageMetadata": usage} if usage else {}),
            }
        if self.dialect == "responses":
            return {**self.response("completed"), "usage": usage or None}
        if self.dialect == "embeddings":
            data = [{"object": "embedding", "index": 0, "embedding": [0.1, 0.2]}]
            return {"object": "list", "model": self.model, "data": data, "usage": usage}
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        known = {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": self.model,
            "choices": [choice],
        }
        return {**known, **({"usage": usage} if usage else {})}

    def response(self, status: str) -> dict[str, Any]:
        content = [{"type": "output_text", "text": "word " * WORDS, "annotations": list[Any]()}]
        output = [
            {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": content}
        ]
        known = {"id": self.id, "object": "response", "created_at": 1, "status": status, "model": self.model}
        more: dict[str, Any] = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": list[Any]()}
        return {**known, **more, "output": output if status == "completed" else list[Any]()}

    def events(self) -> list[bytes]:
        if self.dialect == "anthropic":
            return self._anthropic_events()
        if self.dialect == "gemini":
            return self._gemini_events()
        if self.dialect == "responses":
            created: dict[str, Any] = {
                "type": "response.created",
                "response": self.response("in_progress"),
                "sequence_number": 0,
            }
            texts: list[dict[str, Any]] = [
                {"type": "response.output_text.delta", "delta": "word ", "item_id": "msg_1"}
                for _ in range(WORDS)
            ]
            done: dict[str, Any] = {
                "type": "response.completed",
                "response": self.answer(),
                "sequence_number": WORDS + 1,
            }
            return [_event(each, str(each["type"])) for each in (created, *texts, done)]
        return self._chat_events()

    def _chat_events(self) -> list[bytes]:
        told = bool((self.body.get("stream_options") or {}).get("include_usage"))
        known: dict[str, Any] = {
            "id": "chatcmpl-1",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": self.model,
        }
        known |= {"usage": None} if told else {}
        choice = {"index": 0, "delta": {"content": "word "}, "finish_reason": None}
        chunks = [{**known, "choices": [choice]} for _ in range(WORDS)]
        chunks.append({**known, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        if told and self.usage():
            chunks.append({**known, "choices": [], "usage": self.usage()})
        return [*(_event(chunk) for chunk in chunks), b"data: [DONE]\n\n"]

    def _anthropic_events(self) -> list[bytes]:
        usage = self.usage()
        start = {**self.answer(), "content": list[Any](), "stop_reason": None}
        if usage:
            start["usage"] = {**usage, "output_tokens": 1 if usage["output_tokens"] >= 0 else -1}
        delta = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "word "}}
        end: dict[str, Any] = {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
        }
        events: list[dict[str, Any]] = [
            {"type": "message_start", "message": start},
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
            *([delta] * WORDS),
            {"type": "content_block_stop", "index": 0},
            {**end, "usage": {"output_tokens": usage["output_tokens"]} if usage else {}},
            {"type": "message_stop"},
        ]
        return [_event(each, str(each["type"])) for each in events]

    def _gemini_events(self) -> list[bytes]:
        """Each event tells what has been used so far."""
        whole = self.answer()
        part = {"content": {"role": "model", "parts": [{"text": "word "}]}, "index": 0}
        early = {**whole, "candidates": [part]}
        if self.tells and "usageMetadata" in whole:
            early["usageMetadata"] = {
                "promptTokenCount": self.tokens["in"],
                "totalTokenCount": self.tokens["in"],
            }
        return [*([_event(early, end=b"\r\n\r\n")] * WORDS), _event(whole, end=b"\r\n\r\n")]


def _dialect(path: str) -> str:
    """Empty: the path is of no API."""
    if path.endswith((":generateContent", ":streamGenerateContent")):
        return "gemini" if path.startswith(("/v1beta/", "/v1/")) else ""
    return next((MODEL_PATHS[end] for end in MODEL_PATHS if path.endswith("/" + end)), "")


def _event(document: dict[str, Any], kind: str = "", end: bytes = b"\n\n") -> bytes:
    return (f"event: {kind}\n" if kind else "").encode() + b"data: " + json.dumps(document).encode() + end


def _error(status: int, code: str, message: str) -> web.Response:
    error = {"message": message, "type": code, "code": code}
    headers = {"Retry-After": "1"} if status == 429 else {}
    return web.json_response({"type": "error", "error": error}, status=status, headers=headers)


async def _serve(port: int) -> None:
    file, over = os.environ.get("MODELS_KEY"), by_hand.told_to_end()
    async with Models(Path(file).read_text().strip() if file else KEY, port=port) as models:
        print(_guide(models), flush=True)
        await asyncio.to_thread(over.wait)


def _guide(models: Models) -> by_hand.Guide:
    addresses = {"OPENAI_BASE_URL": f"{models.url}/v1"}
    addresses |= dict.fromkeys(("ANTHROPIC_BASE_URL", "GOOGLE_GEMINI_BASE_URL"), models.url)
    keys = dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY"), models.key)
    settings = {"key": "OPENAI_API_KEY", "upstream": models.url}
    hints = [
        "Then: evalfleet run BENCHMARK",
        'Its agent needs `secrets = ["OPENAI_API_KEY"]`, and asks at the OPENAI_BASE_URL that it is given.',
    ]
    return by_hand.Guide({**addresses, **keys}, "model", settings, hints)


def main(argv: list[str]) -> int:
    parser = by_hand.parser("models", "The APIs of models on this computer, until Ctrl-C.")
    parser.add_argument("port", type=int, nargs="?", default=0, help="of loopback; else one that is free")
    asyncio.run(_serve(parser.parse_args(argv).port))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
