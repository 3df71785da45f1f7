"""Machines that run but cannot be reached: what their place can do about it, and being set up again."""

from __future__ import annotations

import asyncio
from typing import cast

from evalfleet.errors import ChannelError, MachineMute, PlaceError, StaleController
from evalfleet.events import MachineReady, MachineUnreachable
from evalfleet.model import seconds_between
from evalfleet.ports import Mendable
from evalfleet.state import MachineState

from .machines import BOOT_LOOK_S, PROVISIONING_TRIES, lifetime_s, report_gone, set_up
from .tools import Tools


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
        mendable, until = cast(Mendable, place), machine.expires_at  # its offer says that it is
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
