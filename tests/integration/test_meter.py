"""The meter as a real process, between the vendors' own clients and a stand-in for their APIs."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from evalfleet.channels import meter
from evalfleet.channels.supervisor.meter_process import _sums_of  # pyright: ignore[reportPrivateUsage]
from standins.models import Models
from tests.lazily import lazily
from tests.pythons import python_3_8
from tests.waiting import until_seen

if TYPE_CHECKING:
    import anthropic
    import openai
    from google import genai
else:
    anthropic, genai, openai = lazily("anthropic"), lazily("google.genai"), lazily("openai")

FOLDER = Path(meter.__file__).parent
PRICE = {"in": 2e-6, "cached": 1e-6, "cache_write": 3e-6, "out": 8e-6}
MOODS = ("cut", "hold", "silent", "negative", "absurd", "nonsense", "stall")
PRICES = {"any": PRICE, **{f"any+{mood}": PRICE for mood in MOODS}}
ASK: Any = [{"role": "user", "content": "say words"}]


class Metered:
    """A running meter with one attempt, and the clients that its command would make."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, folder: Path, models: Models) -> None:
        self.process, self.folder, self.models = process, folder, models
        self.socket = f"/proc/{process.pid}/cwd/meter/meter.sock"  # short: an address holds 108 bytes
        self.url = f"http://127.0.0.1:{port}"
        self.clients = AsyncExitStack()
        self.key = f"ef-{secrets.token_hex(8)}"

    async def ask(self, **question: Any) -> dict[str, Any]:
        reader, writer = await asyncio.open_unix_connection(self.socket)
        writer.write(json.dumps(question).encode() + b"\n")
        answer: dict[str, Any] = json.loads(await reader.readline())
        writer.close()
        return answer

    async def open(self, **limits: Any) -> None:
        folder = str(self.folder / "attempt")
        await self.ask(do="open", key=self.key, attempt="t.1", folder=folder, **limits)

    async def state(self) -> dict[str, Any]:
        return await self.ask(do="state", attempt="t.1")

    def gpt(self, **options: Any) -> openai.AsyncOpenAI:
        options = {"max_retries": 0, **options}
        client = openai.AsyncOpenAI(base_url=f"{self.url}/openai/v1", api_key=self.key, **options)
        self.clients.push_async_callback(client.close)
        return client

    def azure(self) -> openai.AsyncAzureOpenAI:
        client = openai.AsyncAzureOpenAI(
            azure_endpoint=f"{self.url}/azure", api_key=self.key, api_version="2024-10-21", max_retries=0
        )
        self.clients.push_async_callback(client.close)
        return client

    def claude(self) -> anthropic.AsyncAnthropic:
        client = anthropic.AsyncAnthropic(base_url=f"{self.url}/anthropic", api_key=self.key, max_retries=0)
        self.clients.push_async_callback(client.close)
        return client

    def gemini(self) -> genai.Client:
        options = genai.types.HttpOptions(base_url=f"{self.url}/gemini")
        client = genai.Client(api_key=self.key, http_options=options)
        self.clients.push_async_callback(client.aio.aclose)
        return client

    def lines(self) -> list[dict[str, Any]]:
        text = (self.folder / "attempt/calls.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def ended(self) -> list[dict[str, Any]]:
        return [line for line in self.lines() if "status" in line]


@asynccontextmanager
async def metered(
    tmp_path: Path, models: Models, python: str = sys.executable, **orders: Any
) -> AsyncIterator[Metered]:
    folder = tmp_path / "meter"
    folder.mkdir(mode=0o700)
    upstreams = {
        "openai": {"url": f"{models.url}/v1", "key": models.key, "header": "authorization"},
        "anthropic": {"url": models.url, "key": models.key, "header": "x-api-key"},
        "azure": {"url": models.url, "key": models.key, "header": "api-key"},
        "gemini": {"url": models.url, "key": models.key, "header": "x-goog-api-key"},
    }
    process = await asyncio.create_subprocess_exec(
        python, "-I", "-S", str(FOLDER), stdin=-1, stdout=-1, cwd=tmp_path
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        told = {"folder": folder.name, "upstreams": upstreams, "prices": PRICES, **orders}
        process.stdin.write(json.dumps(told).encode() + b"\n")
        port = json.loads(await process.stdout.readline())["port"]
        yield Metered(process, port, folder, models)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def run(test: Callable[[Metered], Awaitable[None]], tmp_path: Path, **orders: Any) -> None:
    """Run a test's coroutine beside a stand-in and a meter with one attempt open."""

    async def all_of_it() -> None:
        async with AsyncExitStack() as stack:
            models = await stack.enter_async_context(Models())
            it = await stack.enter_async_context(metered(tmp_path, models, **orders))
            await stack.enter_async_context(it.clients)
            await it.open()
            await test(it)

    asyncio.run(all_of_it())


async def _every_kind_of_call(it: Metered) -> None:
    client, azure, claude, gemini = it.gpt(), it.azure(), it.claude(), it.gemini()
    await client.chat.completions.create(model="any", messages=ASK)
    await azure.chat.completions.create(model="any", messages=ASK)
    async for _ in await client.chat.completions.create(model="any", messages=ASK, stream=True):
        pass
    await client.responses.create(model="any", input="say words")
    async for _ in await client.responses.create(model="any", input="words", stream=True):
        pass
    await client.embeddings.create(model="any", input="words", encoding_format="float")
    await claude.messages.create(model="any", messages=ASK, max_tokens=9)
    async with claude.messages.stream(model="any", messages=ASK, max_tokens=9) as stream:
        assert "word" in await stream.get_final_text()
    await gemini.aio.models.generate_content(model="any", contents="say words")
    async for _ in await gemini.aio.models.generate_content_stream(model="any", contents="words"):
        pass


@pytest.mark.parametrize("python", [sys.executable, python_3_8()], ids=["this Python", "Python 3.8"])
@pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession")
def test_the_vendors_own_clients_work_and_every_token_served_is_counted(
    tmp_path: Path, python: str | None
) -> None:
    if python is None:
        pytest.skip("NO TEST OF THE METER ON PYTHON 3.8: there is none here")

    async def test(it: Metered) -> None:
        await _every_kind_of_call(it)
        state, served = await it.state(), it.models.served
        assert len(served) == state["calls"] == 10
        assert state["unknown"] == 0
        kinds = {kind for call in served for kind in call.tokens}
        sums = {kind: sum(call.tokens.get(kind, 0) for call in served) for kind in kinds}
        assert state["tokens"] == sums
        assert it.models.keys_seen == {it.models.key}
        assert state["usd"] == pytest.approx(sum(line["usd"] for line in it.ended()), abs=1e-6)
        assert [line["model"] for line in it.ended()] == ["any"] * 10

    run(test, tmp_path, python=python)


def test_a_call_costs_its_tokens_at_the_models_price(tmp_path: Path) -> None:
    async def test(it: Metered) -> None:
        await it.claude().messages.create(model="any-2026-01-31", messages=ASK, max_tokens=9)
        (call,) = it.models.served
        price, told = PRICES["any"], call.tokens
        plain = told["in"] - told["cached"] - told["cache_write"]
        usd = plain * price["in"] + sum(told[kind] * price[kind] for kind in ("cached", "cache_write", "out"))
        assert (await it.state())["usd"] == pytest.approx(usd)
        await it.gpt().chat.completions.create(model="any-mini", messages=ASK)
        state = await it.state()  # a model of a similar name is another model
        assert state["unknown"] == 1
        assert "usd" not in it.ended()[-1]

    run(test, tmp_path)


def test_a_stream_tells_its_caller_no_usage_unless_it_asked(tmp_path: Path) -> None:
    async def chunks(it: Metered, **options: Any) -> list[Any]:
        stream: Any = await it.gpt().chat.completions.create(
            model="any", messages=ASK, stream=True, **options
        )
        return [chunk async for chunk in stream]

    async def test(it: Metered) -> None:
        assert all(chunk.choices for chunk in await chunks(it))
        asked = await chunks(it, stream_options={"include_usage": True})
        assert asked[-1].choices == []
        assert asked[-1].usage.prompt_tokens > 0
        assert len(it.models.served) == 2  # the stand-in told both times
        assert it.models.requests[0]["messages"] == ASK

    run(test, tmp_path)


def test_the_bound_of_a_chat_call_can_be_sent_under_the_name_that_newer_models_want(tmp_path: Path) -> None:
    async def test(it: Metered) -> None:
        await it.gpt().chat.completions.create(model="any", messages=ASK, max_tokens=7)
        await it.gpt().chat.completions.create(model="any", messages=ASK, max_tokens=7, stream=True)
        for request in it.models.requests:
            assert (request["max_completion_tokens"], request.get("max_tokens")) == (7, None)
        await it.gpt().completions.create(model="any", prompt="say words", max_tokens=7)
        assert it.models.requests[-1]["max_tokens"] == 7, "of chat calls alone"

    run(test, tmp_path, renames_max_tokens=True)


def test_events_pass_as_they_come(tmp_path: Path) -> None:
    async def test(it: Metered) -> None:
        stream: Any = await it.gpt().chat.completions.create(model="any+slow", messages=ASK, stream=True)
        first = await anext(aiter(stream))
        assert first.choices
        assert not it.models.served
        await stream.close()

    run(test, tmp_path)


@pytest.mark.parametrize("mood", ["cut", "silent", "negative", "absurd", "nonsense"])
def test_what_cannot_be_read_is_unknown_and_never_zero(tmp_path: Path, mood: str) -> None:
    async def call(it: Metered) -> None:
        stream = mood == "cut"
        body = {"model": f"any+{mood}", "messages": ASK, "stream": stream}
        headers = {"Authorization": f"Bearer {it.key}"}
        async with aiohttp.ClientSession() as session:
            url = f"{it.url}/openai/v1/chat/completions"
            async with session.post(url, json=body, headers=headers) as answer:
                await answer.read()

    async def test(it: Metered) -> None:
        with_error = pytest.raises(aiohttp.ClientPayloadError) if mood == "cut" else None
        if with_error is not None:
            with with_error:
                await call(it)
        else:
            await call(it)
        await until_seen(it.ended, "the call to be written down")
        (line,) = it.ended()
        assert not {"in", "out", "usd"} & line.keys()
        state = await it.state()
        assert (state["usd"], state["unknown"]) == (0, 1)
        assert state["unknown_usd"] == line["at_most_usd"] > 0.26  # 32768 tokens put out
        assert state["unknown_tokens"] == line["at_most_tokens"] > 32768
        await it.open(usd=line["at_most_usd"])
        with pytest.raises(openai.APIStatusError, match="are used up"):
            await it.gpt().chat.completions.create(model="any", messages=ASK)

    run(test, tmp_path)


def test_a_cut_stream_tells_what_was_put_in_and_not_what_was_put_out(tmp_path: Path) -> None:
    async def test(it: Metered) -> None:
        with pytest.raises(Exception, match=r"peer closed|incomplete|Connection|closed"):
            async with it.claude().messages.stream(model="any+cut", messages=ASK, max_tokens=9) as stream:
                await stream.get_final_message()
        (line,) = await until_seen(it.ended, "the call to be written down")
        assert line["in"] > 0
        assert "out" not in line
        assert line["at_most_tokens"] == line["in"] + 9  # it asked for 9 at most
        assert line["at_most_usd"] == pytest.approx(line["in"] * 3e-6 + 9 * 8e-6)
        assert "broke off" in line["error"]

    run(test, tmp_path)


def test_an_error_of_the_api_reaches_the_caller_and_the_list_of_calls(tmp_path: Path) -> None:
    async def test(it: Metered) -> None:
        with pytest.raises(openai.BadRequestError, match="asked to fail with 400"):
            await it.gpt().chat.completions.create(model="any+400", messages=ASK)
        with pytest.raises(anthropic.RateLimitError):
            await it.claude().messages.create(model="any+429", messages=ASK, max_tokens=9)
        assert [line["status"] for line in it.ended()] == [400, 429]
        assert it.ended()[0]["error"] == "The stand-in was asked to fail with 400."
        assert (await it.state())["throttled"] == 1

    run(test, tmp_path)


def test_the_same_error_again_and_again_ends_the_attempt(tmp_path: Path) -> None:
    async def test(it: Metered) -> None:
        reader, writer = await asyncio.open_unix_connection(it.socket)
        writer.write(b'{"do": "watch"}\n')
        await reader.readline()
        for _ in range(20):
            with pytest.raises(openai.InternalServerError):
                await it.gpt().chat.completions.create(model="any+500", messages=ASK)
        told = json.loads(await reader.readline())
        assert told["tell"] == "wedged"
        assert "asked to fail with 500" in told["wedged"]
        with pytest.raises(openai.InternalServerError, match="being ended"):
            await it.gpt().chat.completions.create(model="any", messages=ASK)
        assert (await it.state())["calls"] == 20  # that one went nowhere
        writer.close()

    run(test, tmp_path)


def test_how_often_the_same_error_may_come_can_be_said(tmp_path: Path) -> None:
    async def test(it: Metered) -> None:
        for _ in range(4):
            with pytest.raises(openai.InternalServerError):
                await it.gpt().chat.completions.create(model="any+500", messages=ASK)
        assert "asked to fail with 500" in (await it.state())["wedged"]

    run(test, tmp_path, same_errors=4)


def test_the_same_error_for_long_ends_the_attempt_unless_a_call_succeeds_meanwhile(tmp_path: Path) -> None:
    """Ten minutes are a second here."""

    async def test(it: Metered) -> None:
        async def fail() -> None:
            with pytest.raises(openai.InternalServerError):
                await it.gpt().chat.completions.create(model="any+500", messages=ASK)

        async def wedged() -> str:
            return str((await it.state())["wedged"])

        await fail()
        await asyncio.sleep(1.1)
        await fail()
        assert not await wedged(), "two unlucky calls are no pattern"
        await it.gpt().chat.completions.create(model="any", messages=ASK)
        await fail()
        await fail()
        await asyncio.sleep(1.1)
        await it.gpt().chat.completions.create(model="any", messages=ASK)
        await fail()
        assert not await wedged(), "there was a success between them"
        await asyncio.sleep(1.1)
        await fail()
        await fail()
        assert "asked to fail with 500" in await wedged()

    run(test, tmp_path, same_error_s=1.0)


def test_a_call_beyond_the_allowance_is_refused_and_the_supervisor_is_told(tmp_path: Path) -> None:
    async def test(it: Metered) -> None:
        await it.open(usd=1e-9)
        await it.gpt().chat.completions.create(model="any", messages=ASK)
        reader, writer = await asyncio.open_unix_connection(it.socket)
        writer.write(b'{"do": "watch"}\n')
        await reader.readline()
        with pytest.raises(openai.APIStatusError, match=r"the \$1e-09 that it may cost") as refused:
            await it.gpt(max_retries=2).chat.completions.create(model="any", messages=ASK)
        assert refused.value.status_code == 402
        assert json.loads(await reader.readline())["tell"] == "refused"
        assert len(it.models.served) == 1
        writer.close()
        reader, writer = await asyncio.open_unix_connection(it.socket)
        writer.write(b'{"do": "watch"}\n')
        await reader.readline()
        assert json.loads(await reader.readline())["tell"] == "refused", "to one who was not there"
        writer.close()

    run(test, tmp_path)


def test_tokens_can_be_limited_too(tmp_path: Path) -> None:
    async def test(it: Metered) -> None:
        await it.open(tokens=1)
        await it.gpt().chat.completions.create(model="any", messages=ASK)
        with pytest.raises(openai.APIStatusError, match="the 1 tokens that it may use are used up"):
            await it.gpt().chat.completions.create(model="any", messages=ASK)

    run(test, tmp_path)


async def raw(it: Metered, line: str, body: bytes = b"", headers: str = "", key: str = "") -> tuple[int, str]:
    """A call as no client would write it: its first line as it is. The status and what was answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(it.url.rpartition(":")[2]))
    head = f"{line} HTTP/1.1\r\nAuthorization: Bearer {key or it.key}\r\nConnection: close\r\n{headers}"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    answer = await reader.read()
    writer.close()
    return int(answer.split()[1]), answer.partition(b"\r\n\r\n")[2].decode()


CHAT = json.dumps({"model": "any", "messages": ASK}).encode()
NOT_ALLOWED = (
    "POST /openai/v1/realtime/client_secrets",
    "POST /openai/key/generate",
    "POST /openai/v1/../key/generate",
    "POST /openai/%2e%2e/key/generate",
    "POST /openai/v1/chat/completions/%2e%2e/%2e%2e/%2e%2e/key/generate",
    "POST /openai/v1/chat/completions/%252e%252e/%252e%252e/key/generate",
    "POST /openai/v1/chat/completions:models",
    "POST /openai/%2e%2e/models",
    "POST /openai/v1/models/any;x=1:countTokens",
    "post /openai/v1/chat/completions",
    "PUT /openai/v1/chat/completions",
    "GET /openai/v1/chat/completions",
    "GET /openai/v1/files",
    "GET /openai/v1/realtime",
    "POST /openai/v1/batches",
    "DELETE /openai/v1/models/any",
)


def test_only_known_methods_and_paths_are_passed_on_and_the_others_are_told_why(tmp_path: Path) -> None:
    async def test(it: Metered) -> None:
        for line in NOT_ALLOWED:
            status, answer = await raw(it, line, CHAT)
            assert status in (403, 404), line
            assert "the meter does not pass on" in answer or "the meter passes on to" in answer, line
        assert (it.models.arrived, it.models.given_away) == ([], [])
        assert (await raw(it, "POST /openai/v1/batches/b/cancel"))[0] == 404, "the upstream's own answer"
        assert (await it.state())["wedged"] == ""

    run(test, tmp_path, paths=["/v1/batches/b"])


def test_calls_that_others_may_read_otherwise_are_passed_on_in_one_form_and_counted(tmp_path: Path) -> None:
    async def test(it: Metered) -> None:
        twice = b'{"model": "cheap", "messages": [], "Model": "any"}'
        assert (await raw(it, "POST /openai/v1/chat/completions", twice))[0] == 400
        override = "X-HTTP-Method-Override: GET\r\nX_HTTP_Method_Override: GET\r\nUpgrade: h2c\r\n"
        for path in ("/openai/v1/chat/completions", "//openai/%76%31//./chat/completions/"):
            assert (await raw(it, f"POST {path}", CHAT, override))[0] == 200
        assert it.models.arrived == ["POST /v1/v1/chat/completions"] * 2
        assert (await raw(it, "GET /openai/v1/models", CHAT))[0] == 200
        state = await it.state()
        assert state["tokens"]["in"] == sum(call.tokens["in"] for call in it.models.served) > 0
        assert (state["unknown"], len(it.models.served)) == (0, 2)

    run(test, tmp_path)


CHEAP = {**PRICES, "cheap": {"in": 1e-9, "out": 1e-9}}


def test_a_call_is_priced_by_what_the_upstream_says_then_its_path_then_its_body(tmp_path: Path) -> None:
    async def test(it: Metered) -> None:
        it.models.deployed = {"cheap-alias": "any", "cheap": "any"}
        body = json.dumps({"model": "cheap", "messages": ASK}).encode()
        for line in (
            "POST /azure/openai/deployments/any/chat/completions",
            "POST /gemini/v1beta/models/any:generateContent",
            "POST /azure/openai/deployments/cheap-alias/chat/completions",
            "POST /openai/v1/chat/completions",
        ):
            assert (await raw(it, line, body))[0] == 200
            call = it.models.served[-1].tokens
            usd = (call["in"] - call["cached"]) * PRICE["in"] + call["cached"] * PRICE["cached"]
            assert it.ended()[-1]["usd"] == pytest.approx(usd + call["out"] * PRICE["out"]), line
        assert [line["model"] for line in it.ended()] == ["any"] * 4
        await raw(it, "POST /azure/openai/deployments/any%2Bsilent/chat/completions", body)
        begun = [line for line in it.lines() if "status" not in line][-1]
        assert begun["model"] == "any+silent", "until the upstream says one, the path goes before the body"
        assert begun["at_most_usd"] > 0.2

    run(test, tmp_path, prices=CHEAP)


def test_a_background_response_counts_once_when_it_is_complete(tmp_path: Path) -> None:
    async def test(it: Metered) -> None:
        client = it.gpt()
        begun = await client.responses.create(model="any", input="say words", background=True)
        unknown = (await it.state())["unknown_usd"]
        assert (await client.responses.retrieve(begun.id)).status == "in_progress"
        assert (await it.state())["unknown_usd"] == unknown > 0.2
        for _ in range(5):
            assert (await client.responses.retrieve(begun.id)).status == "completed"
        state, (served,) = await it.state(), it.models.served
        assert state["tokens"] == served.tokens
        assert (state["unknown"], state["unknown_tokens"], state["unknown_usd"]) == (0, 0, 0)
        assert state["usd"] == pytest.approx(sum(line.get("usd", 0) for line in it.ended()), abs=1e-8)
        assert state["models"]["any"]["calls"] == 1
        left = _sums_of(str(it.folder / "attempt"))
        assert (left["usd"], left["tokens"]) == (pytest.approx(state["usd"], abs=1e-8), state["tokens"])
        assert (left["unknown"], left["unknown_usd"]) == (0, 0)

    run(test, tmp_path)


def test_the_results_of_a_batch_count_once_when_they_are_fetched(tmp_path: Path) -> None:
    async def test(it: Metered) -> None:
        for _ in range(2):
            assert (await raw(it, "GET /openai/v1/files/results/content"))[0] == 200
        state, served = await it.state(), it.models.served
        assert len(served) == 3
        assert state["tokens"]["out"] == sum(call.tokens["out"] for call in served)
        assert (state["unknown"], state["usd"] > 0) == (0, True)

    run(test, tmp_path, paths=["/v1/files"])


def test_with_a_budget_free_calls_pass_and_calls_without_a_price_are_refused_one_by_one(
    tmp_path: Path,
) -> None:
    async def test(it: Metered) -> None:
        await it.open(usd=1.0)
        with pytest.raises(openai.APIStatusError, match=r"no price is known for the model 'anny'; add it"):
            await it.gpt().chat.completions.create(model="anny", messages=ASK)
        state = await it.state()
        assert (state["refused"], state["wedged"], state["usd"], state["unknown"]) == ("", "", 0, 0)
        assert (await raw(it, "POST /openai/v1/moderations", b'{"input": "words"}'))[0] == 200
        await it.gpt().chat.completions.create(model="any", messages=ASK)
        assert [line["status"] for line in it.ended()] == [402, 200, 200]
        assert (await it.ask(do="close", attempt="t.1"))["wedged"] == ""

    run(test, tmp_path)


def test_an_attempt_all_of_whose_calls_were_turned_away_is_not_measured(tmp_path: Path) -> None:
    async def test(it: Metered) -> None:
        await it.open(usd=1.0)
        with pytest.raises(openai.APIStatusError):
            await it.gpt().chat.completions.create(model="anny", messages=ASK)
        assert "no price is known" in (await it.ask(do="close", attempt="t.1"))["wedged"]

    run(test, tmp_path)


def test_who_has_no_key_can_neither_fill_the_memory_nor_keep_others_out(tmp_path: Path) -> None:
    """A body of 64 MB without a key, and 1,100 connections that say nothing or only half a head."""

    async def test(it: Metered) -> None:
        port = int(it.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = "POST /openai/v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer x\r\n"
        writer.write(f"{head}Content-Length: {64 << 20}\r\n\r\n".encode())
        assert b" 401 " in await reader.readline()
        writer.write(b"x" * (64 << 20))
        with pytest.raises(ConnectionError):
            await writer.drain()
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(1100)]
        assert len(os.listdir(f"/proc/{it.process.pid}/fd")) < 600, "the oldest are hung up on"
        for _, half in idle[-500:]:
            half.write(b"POST /openai")
        await asyncio.wait_for(it.gpt().chat.completions.create(model="any", messages=ASK), 20)
        for _, connection in idle:
            connection.close()

    few, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    try:
        run(test, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))


def test_nobody_without_an_attempts_key_is_served(tmp_path: Path) -> None:
    async def test(it: Metered) -> None:
        it.key = "sk-guessed"
        with pytest.raises(openai.AuthenticationError):
            await it.gpt().chat.completions.create(model="any", messages=ASK)
        with pytest.raises(anthropic.AuthenticationError):
            await it.claude().messages.create(model="any", messages=ASK, max_tokens=9)
        assert it.models.keys_seen == set()

    run(test, tmp_path)


def _own_address() -> str:
    """By which this computer would speak to others; empty if it could not."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))
        except OSError:
            return ""
        return str(sock.getsockname()[0])


@pytest.mark.skipif(not _own_address(), reason="NO TEST OF STRANGERS: this computer has no network")
def test_where_containers_are_served_nobody_else_on_the_network_is(tmp_path: Path) -> None:
    async def test(it: Metered) -> None:
        await it.gpt().chat.completions.create(model="any", messages=ASK)
        it.url = it.url.replace("127.0.0.1", _own_address())
        with pytest.raises(openai.APIConnectionError):
            await it.gpt().chat.completions.create(model="any", messages=ASK)
        assert len(it.models.requests) == 1

    run(test, tmp_path, listen=["0.0.0.0"])


def test_a_caller_that_hangs_up_ends_its_call(tmp_path: Path) -> None:
    async def test(it: Metered) -> None:
        call = it.gpt().chat.completions.create(model="any+stall", messages=ASK)
        calling = asyncio.create_task(call)
        await until_seen(lambda: it.models.requests, "the call to arrive")
        calling.cancel()
        await until_seen(it.ended, "the call to be written down")
        assert "hung up" in it.ended()[0]["error"]
        assert (await it.state())["in_flight"] == 0

    run(test, tmp_path)


def test_a_call_is_in_the_list_before_its_caller_sees_its_end(tmp_path: Path) -> None:
    """The list is a full pipe here: the meter stays where it writes the end, for as long as we like."""
    listed = tmp_path / "meter/attempt/calls.jsonl"

    def read(pipe: int) -> bytes:
        with suppress(BlockingIOError):
            return os.read(pipe, 1 << 20)
        return b""

    def fill(pipe: int) -> None:
        for size in (4096, 1):  # whole pages, then what is left of the last one
            with suppress(BlockingIOError):
                while os.write(pipe, b"\n" * size):
                    pass

    async def test(it: Metered, reading: int, filling: int) -> None:
        await it.open()
        stream: Any = await it.gpt().chat.completions.with_raw_response.create(
            model="any+hold", messages=ASK, stream=True
        )
        assert b'"n":1' in read(reading)
        fill(filling)
        it.models.go.set()
        answer = asyncio.create_task(stream.http_response.aread())
        done, _ = await asyncio.wait([answer], timeout=0.5)
        assert not done
        await until_seen(lambda: b'"status":200' in read(reading), "the call to be written down")
        assert b"[DONE]" in await answer

    async def all_of_it() -> None:
        async with AsyncExitStack() as stack:
            it = await stack.enter_async_context(metered(tmp_path, await stack.enter_async_context(Models())))
            await stack.enter_async_context(it.clients)
            listed.parent.mkdir()
            os.mkfifo(listed)
            reading = os.open(listed, os.O_RDONLY | os.O_NONBLOCK)
            stack.callback(os.close, reading)
            filling = os.open(listed, os.O_WRONLY | os.O_NONBLOCK)
            stack.callback(os.close, filling)
            await test(it, reading, filling)

    asyncio.run(all_of_it())


def test_a_call_that_outlives_its_attempt_is_counted_as_far_as_it_has_told(tmp_path: Path) -> None:
    """A process that was killed may be reaped before the meter sees that its connections are closed."""

    async def test(it: Metered) -> None:
        client, claude = it.gpt(), it.claude()
        silent: Any = await client.chat.completions.create(model="any+hold", messages=ASK, stream=True)
        await anext(aiter(silent))
        telling = await claude.messages.create(model="any+hold", messages=ASK, max_tokens=9, stream=True)
        await anext(aiter(telling))
        sums = await it.ask(do="close", attempt="t.1")
        first, second = it.ended()
        assert (sums["calls"], sums["in_flight"], sums["unknown"], sums["usd"]) == (2, 0, 2, 0)
        assert sums["unknown_usd"] == pytest.approx(first["at_most_usd"] + second["at_most_usd"])
        assert "in" not in first
        assert sums["tokens"]["in"] == second["in"] > 0
        assert first["error"] == second["error"] == "its attempt had ended"
        it.models.go.set()
        async for _ in silent:
            pass
        async for _ in telling:
            pass
        assert it.ended() == [first, second]

    run(test, tmp_path)


def test_a_meter_that_is_killed_leaves_a_list_with_the_calls_in_flight(tmp_path: Path) -> None:
    async def test(it: Metered) -> None:
        await it.gpt().chat.completions.create(model="any", messages=ASK)
        call = it.gpt().chat.completions.create(model="any+stall", messages=ASK)
        calling = asyncio.create_task(call)
        await until_seen(lambda: len(it.models.requests) == 2, "the call to arrive")
        it.process.send_signal(signal.SIGKILL)
        with pytest.raises(openai.APIConnectionError):
            await calling
        assert [(line["n"], line.get("status")) for line in it.lines()] == [(1, None), (1, 200), (2, None)]
        assert it.lines()[-1]["at_most_usd"] > 0.26

    run(test, tmp_path)


def test_the_real_key_is_in_no_file_and_no_environment(tmp_path: Path) -> None:
    async def test(it: Metered) -> None:
        await it.gpt().chat.completions.create(
            model="any", messages=[{"role": "user", "content": f"my key is {it.models.key}"}]
        )
        key = it.models.key.encode()
        process = Path(f"/proc/{it.process.pid}")
        assert key not in (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert {path.name for path in files} >= {"calls.jsonl", "000001.request", "000001.response"}
        assert not [path for path in files if key in path.read_bytes()]

    run(test, tmp_path, keep_calls=True)


def test_a_meter_ends_with_its_folder(tmp_path: Path) -> None:
    async def test(it: Metered) -> None:
        os.unlink(it.folder / "meter.sock")
        assert await it.process.wait() == 0

    run(test, tmp_path)


@pytest.mark.parametrize(
    ("orders", "told"),
    [
        (
            {"upstreams": {"x": {"url": "http://models.example", "key": "k", "header": "api-key"}}},
            "is not https",
        ),
        ({"port": None}, "cannot listen at port"),
    ],
)
def test_orders_that_cannot_be_carried_out_are_refused_in_one_line(
    tmp_path: Path, orders: dict[str, Any], told: str
) -> None:
    async def refused() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            given = {"folder": str(tmp_path), "upstreams": {}, **orders}
            if "port" in orders:
                given["port"] = taken.getsockname()[1]
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", str(FOLDER), stdin=-1, stdout=-1, stderr=-1
            )
            _, error = await process.communicate(json.dumps(given).encode() + b"\n")
            assert process.returncode == 2
            assert told in error.decode()
            assert error.count(b"\n") == 1

    asyncio.run(refused())
