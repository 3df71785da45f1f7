"""Running attempts to their end, and bringing home what they made."""

from __future__ import annotations

import asyncio
from pathlib import Path

from evalfleet.errors import ChannelError, StaleController
from evalfleet.events import AttemptCollected, AttemptEnded, MachineCondemned, MachineHeard, MachineSilent
from evalfleet.model import Broken, Cause, Collected, Ended, Job, Outcome, Scored, Task
from evalfleet.names import safe_name
from evalfleet.ports import Channel
from evalfleet.state import AttemptState, MachineState

from .machines import silent_since
from .tools import Tools

COLLECT_LIMIT_S = 600.0
LOOKS = 2
UNREACHABLE = frozenset({Cause.MACHINE_LOST, Cause.EVICTED, Cause.CONNECTION, Cause.BOOT, Cause.PROVISIONING})


async def run_attempt(tools: Tools, attempt: AttemptState) -> None:
    """Start it, or attach to it, and report how it ended."""
    machine, limits = tools.state.machines[attempt.machine], tools.state.limits
    task = tools.state.tasks[attempt.task].task
    channel = tools.channel(machine)
    command = tools.benchmark.command(task, attempt.id)
    job = Job(attempt.id, command, task.timeout_s, tools.benchmark.bundle.digest, limits.lease_s)
    # the host ends the attempt at its limit; this only catches a host that does not. The second look
    # is for a controller that was stopped for long: what it waited for may have happened meanwhile
    patience_s, looks = task.timeout_s + limits.grace_s, 0
    while looks < LOOKS:
        try:
            async with asyncio.timeout(patience_s):
                ended = await _to_the_end(tools, channel, job, machine)
                outcome = await _judge(tools, channel, task, ended)
        except TimeoutError:
            patience_s = limits.grace_s
            looks += machine.silent_since is None  # how long silence is borne is not decided here
            continue
        seconds, node = round(ended.seconds, 3), ended.node or machine.node
        tools.report(AttemptEnded(attempt.id, outcome, seconds, node))
        return
    detail = f"{attempt.id} was not ended at its limit of {task.timeout_s:g} s"
    tools.report(MachineCondemned(machine.id, detail, Cause.STUCK))


async def _to_the_end(tools: Tools, channel: Channel, job: Job, machine: MachineState) -> Ended:
    while True:
        try:
            await channel.start(job)
            if machine.silent_since is not None:
                tools.report(MachineHeard(machine.id))
            return await channel.ended(job.id)
        except StaleController:
            raise
        except ChannelError:
            tools.report(MachineSilent(machine.id, silent_since(tools)))
            await asyncio.sleep(tools.pace.poll_s * 5)


async def _judge(tools: Tools, channel: Channel, task: Task, ended: Ended) -> Outcome:
    healthy = True
    if ended.reason == "timed_out" and ended.result is None:
        healthy = await _answers(tools, channel)
    return tools.benchmark.outcome(task, ended, healthy)


async def _answers(tools: Tools, channel: Channel) -> bool:
    try:
        return await channel.probe(tools.benchmark.probe)
    except StaleController:
        raise
    except ChannelError:
        return False


async def collect(tools: Tools, attempt: AttemptState, turn: asyncio.Semaphore) -> None:
    """Bring the artefacts home. Trouble with them never touches the outcome."""
    machine = tools.state.machines[attempt.machine]
    if machine.phase == "condemned" and machine.cause in UNREACHABLE:
        tools.report(AttemptCollected(attempt.id, Collected(problem="the machine is gone")))
        return
    superseded: Outcome | None = None
    try:
        async with turn, asyncio.timeout(COLLECT_LIMIT_S):
            channel = tools.channel(machine)
            if machine.phase == "condemned":
                superseded = await _late_result(tools, channel, attempt)
            collected = await channel.collect(attempt.id, _home_of(tools, attempt))
    except StaleController:
        raise
    except (ChannelError, OSError) as err:  # a TimeoutError is an OSError
        collected = Collected(problem=str(err) or type(err).__name__)
    tools.report(AttemptCollected(attempt.id, collected, superseded))


async def _late_result(tools: Tools, channel: Channel, attempt: AttemptState) -> Outcome | None:
    """End what still runs of the attempt. A score that it wrote is kept, but no longer counts."""
    await channel.stop(attempt.id)
    if not isinstance(attempt.outcome, Broken):
        return None
    ended = await channel.ended(attempt.id)
    outcome = tools.benchmark.outcome(tools.state.tasks[attempt.task].task, ended, True)
    return outcome if isinstance(outcome, Scored) and ended.result is not None else None


def _home_of(tools: Tools, attempt: AttemptState) -> Path:
    return tools.artefacts / f"{safe_name(attempt.task)}/{safe_name(attempt.id)}"
