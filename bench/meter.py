"""Model calls through the meter, beside the same calls made directly, to a stand-in for the models' APIs.

With LITELLM_PYTHON set to the Python of an environment that has `litellm[proxy]`, beside LiteLLM's proxy too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import secrets
import socket
import subprocess
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

KEY = "sk-real-key-of-the-stand-in"
PRICES = {"any": {"in": 2e-6, "cached": 1e-6, "cache_write": 3e-6, "out": 8e-6}}
CALLS, STREAMS, MIXED, AT_ONCE = 600, 200, 10_000, 32
MESSAGES = [{"role": "user", "content": "say words"}]
READY_S = 600.0


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
        litellm = os.environ.get("LITELLM_PYTHON")
        against: Figures = {"litellm": {"error": "set LITELLM_PYTHON to a Python that has litellm[proxy]"}}
        if litellm:
            ways["litellm"] = await stack.enter_async_context(_litellm(litellm, models))
        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        )
        times = await _times(session, ways, calls)
        added = {name: _added(times["direct"], times[name]) for name in ways if name != "direct"}
        load = {name: await _load(session, way, streams) for name, way in ways.items() if way.pid}
        if litellm:
            against = {"litellm": {**added["litellm"], **load["litellm"], **_weight(litellm)}}
        exact = await _exact(session, models, metered, mixed)
    figures: Figures = {**added["meter"], **load["meter"], **exact, "streams": streams, "calls": calls}
    figures["direct_p50_ms"] = rounded(1000 * _quantile([call for call, _ in times["direct"]], 0.5), 3)
    return Result("meter", figures, _aims(figures), against)


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


@asynccontextmanager
async def _litellm(python: str, models: Way) -> AsyncIterator[Way]:
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        parameters = {"model": "openai/any", "api_base": f"{models.url}/v1", "api_key": KEY}
        model_list = [{"model_name": "any", "litellm_params": parameters}]
        slow = {**parameters, "model": "openai/any+slow"}
        model_list.append({"model_name": "any+slow", "litellm_params": slow})
        key = f"sk-{secrets.token_hex(32)}"  # newer versions do not start without one
        config = {"model_list": model_list, "general_settings": {"master_key": key}}
        path = Path(folder, "config.yaml")
        path.write_text(json.dumps(config))
        program = str(Path(python).with_name("litellm"))
        command = (program, "--config", str(path), "--host", "127.0.0.1", "--port", str(port))
        process = await asyncio.create_subprocess_exec(*command, stdout=-3, stderr=-3, cwd=folder)
        try:
            await _until_up(f"http://127.0.0.1:{port}/health/liveliness")
            yield Way(f"http://127.0.0.1:{port}", key, process.pid)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _until_up(url: str) -> None:
    end = time.monotonic() + READY_S
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < end:
            try:
                async with session.get(url) as answer:
                    if answer.status < 500:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.2)
    raise TimeoutError(f"{url} did not answer within {READY_S:g} s")


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
    began, cpu = time.perf_counter(), _cpu_s(way.pid)
    for _ in range(2):
        await asyncio.gather(*(_call(session, way, model="any+slow", stream=True) for _ in range(streams)))
    seconds = time.perf_counter() - began
    percent = 100 * (_cpu_s(way.pid) - cpu) / seconds
    return {"cpu_percent": rounded(percent, 1), "memory_mb": rounded(_memory_mb(way.pid), 1)}


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


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


def _weight(python: str) -> Figures:
    """Packages and megabytes of an environment."""
    folder = Path(python).parents[1]
    listed = subprocess.run((python, "-m", "pip", "list", "--format=json"), capture_output=True, check=True)
    used = subprocess.run(("du", "-sm", str(folder)), capture_output=True, text=True, check=True).stdout
    return {"packages": len(json.loads(listed.stdout)), "megabytes": int(used.split()[0])}
