"""Model calls through the meter, beside the same calls made directly, to a stand-in for the models' APIs."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from evalfleet.channels import meter

from .result import Figures, Result, at_most, below, rounded
from .workspace import cpu_s, memory_mb

KEY = "sk-real-key-of-the-stand-in"
PRICES = {"any": {"in": 2e-6, "cached": 1e-6, "cache_write": 3e-6, "out": 8e-6}}
CALLS, STREAMS, MIXED, AT_ONCE = 600, 200, 10_000, 32
MESSAGES = [{"role": "user", "content": "say words"}]


class Way(NamedTuple):
    """A way to the models: where it is, the key it takes, and its process, if it has one of its own."""

    url: str
    key: str
    pid: int = 0
    folder: str = ""  # of the meter's list of calls


def run(quick: bool) -> Result:
    return asyncio.run(_run(quick))


async def _run(quick: bool) -> Result:
    calls, streams, mixed = (40, 10, 200) if quick else (CALLS, STREAMS, MIXED)
    async with AsyncExitStack() as stack:
        models = await stack.enter_async_context(_models())
        metered = await stack.enter_async_context(_meter(models))
        ways = {"direct": models, "meter": metered}
        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        )
        times = await _times(session, ways, calls)
        load = await _load(session, metered, streams)
        exact = await _exact(session, models, metered, mixed)
    figures: Figures = {
        **_added(times["direct"], times["meter"]),
        **load,
        **exact,
        "streams": streams,
        "calls": calls,
    }
    figures["direct_p50_ms"] = rounded(1000 * _quantile([call for call, _ in times["direct"]], 0.5), 3)
    return Result("meter", figures, _aims(figures))


def _aims(figures: Figures) -> dict[str, Any]:
    return {
        "added_p50_ms": below(figures["added_p50_ms"], 5),
        "added_p99_ms": below(figures["added_p99_ms"], 20),
        "first_byte_added_p50_ms": below(figures["first_byte_added_p50_ms"], 5),
        "cpu_percent": below(figures["cpu_percent"], 50),
        "memory_mb": below(figures["memory_mb"], 60),
        "tokens_miscounted": at_most(figures["tokens_miscounted"], 0),
    }


@asynccontextmanager
async def _models() -> AsyncIterator[Way]:
    command = (sys.executable, "-m", "standins.models")
    process = await asyncio.create_subprocess_exec(*command, stdout=-1)
    try:
        assert process.stdout is not None
        address = (await process.stdout.readuntil(b"/v1\n")).decode().partition("OPENAI_BASE_URL=")[2]
        yield Way(address.strip().removesuffix("/v1"), KEY)
    finally:
        process.kill()
        await process.wait()


@asynccontextmanager
async def _meter(models: Way) -> AsyncIterator[Way]:
    with tempfile.TemporaryDirectory() as folder:
        upstreams = {"models": {"url": models.url, "key": KEY, "header": "authorization"}}
        orders = {"folder": folder, "upstreams": upstreams, "prices": PRICES}
        command = (sys.executable, "-I", "-S", str(Path(meter.__file__).parent))
        process = await asyncio.create_subprocess_exec(*command, stdin=-1, stdout=-1)
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(orders).encode() + b"\n")
            port = json.loads(await process.stdout.readline())["port"]
            await _tell(folder, {"do": "open", "key": "ef-1", "attempt": "a.1", "folder": folder})
            yield Way(f"http://127.0.0.1:{port}/models", "ef-1", process.pid, folder)
        finally:
            process.kill()
            await process.wait()


async def _tell(folder: str, question: Figures) -> Figures:
    reader, writer = await asyncio.open_unix_connection(f"{folder}/meter.sock")
    writer.write(json.dumps(question).encode() + b"\n")
    answer: Figures = json.loads(await reader.readline())
    writer.close()
    return answer


async def _call(
    session: aiohttp.ClientSession, way: Way, path: str = "/v1/chat/completions", **body: Any
) -> tuple[float, float]:
    """Seconds until the first byte of the body, and until its end."""
    began, first = time.perf_counter(), 0.0
    body = {"model": "any", "messages": MESSAGES, **body}
    async with session.post(
        way.url + path, json=body, headers={"Authorization": f"Bearer {way.key}"}
    ) as answer:
        async for _ in answer.content.iter_any():
            first = first or time.perf_counter() - began
        if answer.status != 200:
            raise RuntimeError(f"{way.url}{path} answered {answer.status}")
    return first, time.perf_counter() - began


async def _times(
    session: aiohttp.ClientSession, ways: dict[str, Way], calls: int
) -> dict[str, list[tuple[float, float]]]:
    """Seconds of a plain call and until a stream's first byte, by way, one after another and interleaved."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(calls + 5):
        for name, way in ways.items():
            _, whole = await _call(session, way)
            first, _ = await _call(session, way, stream=True)
            if number >= 5:  # the first ones open connections
                times[name].append((whole, first))
    return times


def _added(direct: Sequence[tuple[float, float]], through: Sequence[tuple[float, float]]) -> Figures:
    """What a way adds to a call: the difference to the direct call made just before."""
    calls = [1000 * (b[0] - a[0]) for a, b in zip(direct, through, strict=True)]
    firsts = [1000 * (b[1] - a[1]) for a, b in zip(direct, through, strict=True)]
    return {
        "added_p50_ms": rounded(_quantile(calls, 0.5), 3),
        "added_p99_ms": rounded(_quantile(calls, 0.99), 3),
        "first_byte_added_p50_ms": rounded(_quantile(firsts, 0.5), 3),
    }


def _quantile(values: Sequence[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


async def _load(session: aiohttp.ClientSession, way: Way, streams: int) -> Figures:
    """CPU and memory of a way's process while so many streams run at once, twice each."""
    began, cpu = time.perf_counter(), cpu_s(way.pid)
    for _ in range(2):
        await asyncio.gather(*(_call(session, way, model="any+slow", stream=True) for _ in range(streams)))
    seconds = time.perf_counter() - began
    percent = 100 * (cpu_s(way.pid) - cpu) / seconds
    return {"cpu_percent": rounded(percent, 1), "memory_mb": rounded(memory_mb(way.pid, "VmHWM"), 1)}


async def _exact(session: aiohttp.ClientSession, models: Way, metered: Way, calls: int) -> Figures:
    """Mixed calls, many at once; the tokens counted beside those served."""
    before = await _served(session, models)
    rng, gate = random.Random(1), asyncio.Semaphore(AT_ONCE)
    paths = [f"/v1/{name}" for name in ("chat/completions", "responses", "messages", "embeddings")]
    paths.append("/v1beta/models/any:generateContent")

    async def one(path: str, *, stream: bool, words: int) -> None:
        async with gate:
            if path.endswith("generateContent"):
                path = path.replace("generateContent", "streamGenerateContent") if stream else path
                await _call(session, metered, path, contents="x" * words)
            else:
                stream = stream and not path.endswith("embeddings")
                await _call(session, metered, path, stream=stream, input="x" * words)

    chosen = [(rng.choice(paths), rng.random() < 0.5, rng.randrange(400)) for _ in range(calls)]
    counted_before = _counted(metered)
    began = time.perf_counter()
    await asyncio.gather(*(one(path, stream=stream, words=words) for path, stream, words in chosen))
    seconds = time.perf_counter() - began
    after, counted = await _served(session, models), _counted(metered)
    served = {kind: after[kind] - before.get(kind, 0) for kind in after}
    found = {kind: counted.get(kind, 0) - counted_before.get(kind, 0) for kind in served}
    wrong = sum(abs(served[kind] - found[kind]) for kind in served)
    return {
        "mixed_calls": calls,
        "tokens_served": sum(served.values()),
        "tokens_miscounted": wrong,
        "mixed_calls_per_s": rounded(calls / seconds, 0),
    }


async def _served(session: aiohttp.ClientSession, models: Way) -> dict[str, int]:
    async with session.get(f"{models.url}/served") as answer:
        tokens: dict[str, int] = (await answer.json())["tokens"]
        return tokens


def _counted(metered: Way) -> dict[str, int]:
    """From the list of calls that the attempt gets, as a reader of it would add them up."""
    sums: dict[str, int] = {}
    for line in Path(metered.folder, "calls.jsonl").read_text().splitlines():
        for kind in ("in", "cached", "cache_write", "out", "reasoning"):
            sums[kind] = sums.get(kind, 0) + json.loads(line).get(kind, 0)
    return sums
