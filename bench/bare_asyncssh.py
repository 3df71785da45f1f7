"""The least that runs tasks over SSH: a loop, one connection a host, an exec a task. Keeps no books.

`python -m bench.bare_asyncssh PLACE.json COUNT TOLD.json`, in a process of its own inside the lab's network.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncssh

COMMANDS = {"true": ["true"], "sleep": ["sleep", "0.05"]}


async def _worker(connection: asyncssh.SSHClientConnection, command: str, tasks: Iterator[int]) -> None:
    for _ in tasks:  # shared by all workers
        await connection.run(command, check=True)


async def _connect(place: dict[str, Any]) -> list[asyncssh.SSHClientConnection]:
    """With the cipher and the key exchange that our channel prefers."""
    calls = [
        asyncssh.connect(
            host,
            username=place["user"],
            client_keys=[place["key"]],
            known_hosts=place["known_hosts"],
            config=None,
            agent_path=None,
            encryption_algs="^aes128-gcm@openssh.com",
            kex_algs="^curve25519-sha256",
        )
        for host in place["hosts"]
    ]
    return await asyncio.gather(*calls)


async def main(place: dict[str, Any], count: int) -> dict[str, Any]:
    began = time.perf_counter()
    connections = await _connect(place)
    told: dict[str, Any] = {"connect_s": time.perf_counter() - began}
    for kind, argv in COMMANDS.items():
        start, cpu = time.perf_counter(), time.process_time()
        tasks = iter(range(count))
        await asyncio.gather(*(_worker(each, " ".join(argv), tasks) for each in connections))
        told[kind] = {
            "makespan_s": time.perf_counter() - start,
            "driver_cpu_ms": 1000 * (time.process_time() - cpu) / count,
        }
    for connection in connections:
        connection.close()
        await connection.wait_closed()
    return told


if __name__ == "__main__":
    found = asyncio.run(main(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])))
    Path(sys.argv[3]).write_text(json.dumps(found))
