"""Machines that are not heard: is our own network to blame, and what can their place do about them?"""

from __future__ import annotations

import asyncio
from itertools import islice

from evalfleet.errors import (
    ChannelError,
    FleetError,
    MachineForged,
    MachineMute,
    PlaceError,
    StaleController,
)
from evalfleet.events import (
    MachineAnswered,
    MachineCondemned,
    MachineHeard,
    MachineReady,
    MachineSilent,
    MachineUnreachable,
)
from evalfleet.model import Cause, Micros, after, seconds_between
from evalfleet.policy import proven_online
from evalfleet.ports import Mendable
from evalfleet.state import MachineState

from .machines import BOOT_LOOK_S, PROVISIONING_TRIES, lifetime_s, report_gone, set_up
from .tools import Tools

ASKED_AT_ONCE = 3


async def listen(tools: Tools, machine: MachineState) -> None:
    """Ask the silent machine until it is heard again. If others answer meanwhile, our own network works."""
    others = asyncio.create_task(_ask_others(tools, machine))
    try:
        await _until_heard(tools, machine)
    finally:
        others.cancel()
        await asyncio.gather(others, return_exceptions=True)


async def _until_heard(tools: Tools, machine: MachineState) -> None:
    while True:
        try:
            await tools.channel(machine).probe(None)
        except StaleController:
            raise
        except MachineForged as err:
            tools.report(forged(machine, err))
            return
        except ChannelError:
            await asyncio.sleep(tools.pace.poll_s * 5)
        else:
            tools.report(MachineHeard(machine.id))
            return


def forged(machine: MachineState, err: MachineForged) -> MachineCondemned:
    """A machine that worked and is no longer ours. A task may have caused it: that is no free attempt."""
    return MachineCondemned(machine.id, str(err), Cause.STUCK)


async def _ask_others(tools: Tools, machine: MachineState) -> None:
    """Ask a few machines at a time until one has answered: idle machines say nothing by themselves."""
    state, asked = tools.state, {machine.id}
    asking: list[asyncio.Task[None]] = []
    try:
        while machine.silent_since is not None and not proven_online(state, machine):
            others = (m for m in state.audible if m not in asked and _tells(state.machines[m], machine))
            for other in list(islice(others, ASKED_AT_ONCE)):
                asked.add(other)
                asking.append(asyncio.create_task(_ask(tools, state.machines[other])))
            await asyncio.sleep(tools.pace.poll_s * 5)
    finally:
        for task in asking:
            task.cancel()


def _tells(other: MachineState, silent: MachineState) -> bool:
    """Does hearing the other one say anything about the silent one? A service speaks for its own only."""
    return not silent.offer.life.queues or other.offer.place == silent.offer.place


async def _ask(tools: Tools, machine: MachineState) -> None:
    try:
        await tools.channel(machine).probe(None)
    except ChannelError:
        tools.report(MachineSilent(machine.id, silent_since(tools, machine)))
    except FleetError:
        return  # whoever works with that machine meets it, too
    else:
        tools.report(MachineAnswered(machine.id))


def silent_since(tools: Tools, machine: MachineState) -> Micros:
    """Since when a machine has been silent whose channel has just given up."""
    return after(tools.clock.now(), -machine.offer.life.silent_s)


# -- mended by its place -----------------------------------------------------------------------------------


async def mend(tools: Tools, machine: MachineState, step: str) -> None:
    """Let its place do the step, then set it up again; or say that it did not help."""
    try:
        await _mend(tools, machine, step)
    except StaleController:
        raise
    except MachineMute as err:
        tools.report(MachineUnreachable(machine.id, f"after {step}: {err}", err.step))
    except (PlaceError, ChannelError) as err:
        tools.report(MachineUnreachable(machine.id, f"{step}: {err}", step))
    except TimeoutError:
        limit = tools.state.limits.mend_s
        tools.report(MachineUnreachable(machine.id, f"{step} took more than {limit:g} s", step))


async def _mend(tools: Tools, machine: MachineState, step: str) -> None:
    place, timings = tools.place_of(machine), dict[str, float]()
    async with asyncio.timeout(_time_left_s(tools, machine)):
        seen = await tools.find(machine)
        if seen is None or seen.phase in ("gone", "evicted"):
            report_gone(tools, machine, seen)
            return
        await tools.drop_channel(machine.id)
        begun = tools.clock.now()
        assert isinstance(place, Mendable), "its offer says that it is"
        mendable, until = place, machine.expires_at
        await tools.persist(
            lambda: mendable.mend(machine.id, step, lifetime_s(tools, machine, until)), PROVISIONING_TRIES
        )
        timings[step] = round(seconds_between(begun, tools.clock.now()), 3)
        seen = await tools.find(machine)
    if seen is None or seen.phase != "up":
        report_gone(tools, machine, seen)
        return
    await tools.drop_channel(machine.id)  # whoever waited for it may have made one, to where it was
    async with asyncio.timeout(tools.state.limits.boot_timeout_s):
        isolated = await set_up(tools, machine, seen, timings)
    tools.report(MachineReady(machine.id, timings, seen.address, isolated))


def _time_left_s(tools: Tools, machine: MachineState) -> float:
    """What is left of the time to mend, from the decision on; a controller that has just come gives it a
    moment."""
    limit = tools.state.limits.mend_s
    spent = seconds_between(machine.mending_since or tools.clock.now(), tools.clock.now())
    return max(limit - spent, min(limit, BOOT_LOOK_S))
