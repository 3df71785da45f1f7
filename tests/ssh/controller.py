"""A controller of the evalfleet that PYTHONPATH leads to: `controller.py PLACE MACHINE FENCE`, each JSON.

It reads a call a line, [name of the channel's method, its arguments...], and answers each with a line: what
was returned, or what was raised.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from evalfleet.errors import ChannelError
from evalfleet.model import AttemptId, Command, Job, Machine
from evalfleet.places.ssh import SshPlace, SshSettings
from evalfleet.ports import Channel, Fence, PlaceContext


async def call(channel: Channel, name: str, *arguments: str) -> object:
    if name == "probe":
        return await channel.probe(None)
    job = AttemptId(arguments[0])
    if name == "start":
        await channel.start(Job(job, Command(("sh", "-c", arguments[1])), 60.0))
        return None
    ended = await channel.ended(job)
    return [ended.exit_code, (ended.result or b"").decode()]


async def answers(channel: Channel) -> None:
    while line := await asyncio.to_thread(sys.stdin.readline):
        answer: dict[str, Any] = {}
        try:
            answer["returned"] = await call(channel, *json.loads(line))
        except ChannelError as err:
            answer["raised"] = f"{type(err).__name__}: {err}"
        print(json.dumps(answer), flush=True)


async def main(place: str, machine: str, fence: str) -> None:
    about = json.loads(place)
    settings = msgspec.convert(about["settings"], SshSettings)
    hosts = SshPlace.make("lab", settings, PlaceContext(Path(about["home"]), about["home_id"]))
    channel = hosts.channel(msgspec.json.decode(machine, type=Machine), Fence(*json.loads(fence)))
    try:
        await answers(channel)
    finally:
        await channel.close()
        await hosts.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
