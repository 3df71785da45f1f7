"""What a channel makes of a supervisor's words that arrive at awkward moments."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

import pytest

from evalfleet.channels.link import OpenLink
from evalfleet.channels.resident import Resident
from evalfleet.errors import StaleController
from evalfleet.model import AttemptId, Bundle, Collected, Command, Job
from evalfleet.ports import Fence
from tests.waiting import PATIENCE_S

JOB = Job(AttemptId("t.0"), Command(("true",)), 60.0)
REFUSAL = {"error": "stale", "detail": "epoch 2 has taken over"}


class NoFiles:
    """A mover for a machine that gets no files."""

    async def put(self, bundle: Bundle, contents: Mapping[str, list[Any]]) -> None:
        raise NotImplementedError

    async def collect(self, job: AttemptId, into: Path) -> Collected:
        raise NotImplementedError


@contextlib.asynccontextmanager
async def talk(socket: Path, replies: dict[str, list[dict[str, Any]]]) -> AsyncGenerator[Resident]:
    """A channel to a supervisor that answers each operation with these messages, in one packet."""
    served: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.extend(filter(None, [asyncio.current_task()]))
        while line := await reader.readline():
            request = json.loads(line)
            answer, *more = replies.get(request["op"], [{}])
            said = [{"n": request.get("n"), **answer}, *more]
            writer.write("".join(json.dumps(each) + "\n" for each in said).encode())
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_unix_server(serve, socket)

    async def dial(protocol: asyncio.Protocol) -> OpenLink:
        transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: protocol, str(socket))
        return OpenLink(transport)

    channel = Resident(dial, NoFiles(), Fence("run", 1, 600.0), {})
    async with server, asyncio.timeout(PATIENCE_S):
        yield channel
        await channel.close()
        await asyncio.gather(*served)


def test_a_refusal_in_one_packet_with_the_answer_to_a_start_ends_the_wait_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with talk(tmp_path / "s", {"start": [{"state": "running"}, REFUSAL]}) as channel:
            await channel.start(JOB)
            with pytest.raises(StaleController, match="epoch 2"):
                await channel.ended(JOB.id)

    asyncio.run(main())


@pytest.mark.parametrize("op", ["stop", "how"])
def test_who_waits_for_an_end_hears_of_a_refusal_that_another_request_got(tmp_path: Path, op: str) -> None:
    async def main() -> None:
        job = "running" if op == "stop" else "ended"
        replies: dict[str, list[dict[str, Any]]] = {"hello": [{"jobs": {JOB.id: job}}], op: [REFUSAL]}
        async with talk(tmp_path / "s", replies) as channel:
            assert await channel.probe(None)
            waiting = asyncio.create_task(channel.ended(JOB.id))
            await asyncio.sleep(0)  # it waits
            if op == "stop":
                with pytest.raises(StaleController):
                    await channel.stop(JOB.id)
            with pytest.raises(StaleController, match="epoch 2"):
                await waiting

    asyncio.run(main())
