"""Child processes that are ended before they are done."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from typing import cast


def send_signal(process: asyncio.subprocess.Process | asyncio.SubprocessTransport, signum: int) -> None:
    """Signal a child of ours, if it has not ended.

    asyncio's own way looks first whether it has ended. If it has, just now, asyncio finds no exit code
    afterwards, makes one up and complains on the screen (Python 3.11).
    """
    if isinstance(process, asyncio.SubprocessTransport):
        pid, code = process.get_pid(), process.get_returncode()
    else:
        pid, code = process.pid, process.returncode
    if code is None:
        with suppress(ProcessLookupError):
            os.kill(pid, signum)


async def end(process: asyncio.subprocess.Process) -> None:
    """Kill a child of ours, and return once it has gone. What it said last is dropped."""
    send_signal(process, signal.SIGKILL)
    # Whoever it has started may hold its output open for ever. Python complains of a pipe that is still open
    # when the event loop is closed.
    transport = cast("asyncio.SubprocessTransport", vars(process)["_transport"])
    for pipe in map(transport.get_pipe_transport, range(3)):
        if pipe is not None:
            pipe.close()
    await process.wait()
