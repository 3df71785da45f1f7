"""Asking the program that a set-up of WAA left on a machine, without taking the machine from anybody."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Sequence
from typing import NamedTuple

from evalfleet.api.pool import Pool
from evalfleet.api.pool_machine import ActionResult
from evalfleet.benchmarks.waa import host_commands
from evalfleet.errors import RequestError
from evalfleet.state import MachineState

LOOK_S = 20.0


class Visit(NamedTuple):
    """`code` None: it could not be asked, or did not end in time."""

    code: int | None
    said: bytes = b""


async def visit(pool: Pool, machine: MachineState, verb: str, limit_s: float) -> Visit:
    try:
        argv = pool.shell(machine.name, host_commands.verb(verb))
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # away from the terminal: nobody is there to be asked for a passphrase
        )
    except (RequestError, OSError):
        return Visit(None)
    try:
        async with asyncio.timeout(limit_s):
            said, _ = await process.communicate()
    except TimeoutError:
        return Visit(None)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return Visit(process.returncode, said)


def no_windows(pool: str) -> str:
    return f"there is no Windows on it; `evalfleet pool prepare {pool} waa` sets it up"


def with_windows(pool: Pool, answers: Sequence[ActionResult]) -> list[ActionResult]:
    """Of machines that answer and have Windows: does that answer, too?"""
    return asyncio.run(_with_windows(pool, answers))


async def _with_windows(pool: Pool, answers: Sequence[ActionResult]) -> list[ActionResult]:
    return await asyncio.gather(*(_asked(pool, answer) for answer in answers))


async def _asked(pool: Pool, answer: ActionResult) -> ActionResult:
    if answer.problem:
        return answer
    seen = await visit(pool, answer.machine, "answers", LOOK_S)
    if seen.code in (0, host_commands.NO_WINDOWS, None):
        return answer
    return ActionResult(answer.machine, "Windows does not answer")
