"""A prepared machine of a pool becomes an image: what `evalfleet pool prepare --capture` does.

It is written down that the machine goes before anything is done to it. Whoever comes after a crash finds it
there, and goes on; whoever changes the pool instead lets it go.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from evalfleet.benchmarks.loaded import Appliance
from evalfleet.errors import ChannelError, PlaceError, RequestError
from evalfleet.model import AttemptId, Command, Job
from evalfleet.named_pools import PoolView, changes, estate_at, machine_of
from evalfleet.ports import Image
from evalfleet.state import MachineState

from .pool_machine import PoolMachine, running_in
from .pools import Pool

REST_S = 2 * 3600.0


async def check(pool: Pool, image: str) -> None:
    """Can the pool's place do it, and is the name free? Raises RequestError, PlaceError."""
    machine = chosen(pool.view(), image)
    async with pool.places() as places:
        await estate_at(places[machine.offer.place]).reserve(machine.id, image)


async def capture(pool: Pool, appliance: Appliance | None, image: str, tell: Callable[[str], None]) -> Image:
    """Make an image of a machine, once what the benchmark runs there rests.

    The machine is left to the pool's controller to delete. Raises RequestError, PlaceError.
    """
    made: list[Image] = []

    async def work(site: PoolMachine) -> None:
        await site.journal.append(pool.workspace.now(), changes.captured(pool.view(), site.machine.id, image))

        async def rest() -> None:
            if appliance is not None and appliance.rest:
                await _run(site, Command(appliance.rest))

        machine = machine_of(site.machine)
        made.append(await estate_at(site.place).capture(machine, image, rest, tell))

    (answer,) = await pool.on(lambda view: [chosen(view, image)], work, {})
    if answer.problem:
        raise PlaceError(
            f"{answer.machine.name}: {answer.problem}; the same command goes on, and "
            f"`evalfleet pool start {pool.name}` gives it up and deletes the machine",
            transient=False,
        )
    return made[0]


def begun(view: PoolView, image: str) -> list[MachineState]:
    """Who was becoming this image when a command broke off."""
    return [machine for machine in changes.in_use(view).machines if machine.image == image]


def chosen(view: PoolView, image: str) -> MachineState:
    """The one that has begun to become this image, else the first that runs. Raises RequestError."""
    found = begun(view, image) or running_in(view)
    if not found:
        hint = f"`evalfleet pool start {view.name}` starts what was stopped"
        raise RequestError(f"no machine of pool {view.name!r} is running; {hint}")
    return found[0]


async def _run(site: PoolMachine, command: Command) -> None:
    job = Job(AttemptId(f"rest-{os.urandom(6).hex()}"), command, REST_S)
    await site.channel.start(job)
    ended = await site.channel.ended(job.id)
    if ended.reason != "exited" or ended.exit_code != 0:
        raise ChannelError(f"what runs there cannot be stopped: {ended.detail.strip() or ended.reason}")
