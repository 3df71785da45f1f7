"""Whether a machine that is deleted is gone, also where its place tells nothing any more."""

from __future__ import annotations

import asyncio
import logging

from evalfleet.errors import PlaceError
from evalfleet.events import MachineAllocated, MachineDeleted, MachineDeleteRefused
from evalfleet.model import Cause, Machine, Micros, after, seconds_between
from evalfleet.state import MachineState

from .tools import Tools

LOOK_TRIES = 3
UNSEEN_S = 120.0
"""A place that tells nothing for longer may not be back soon: then it is told that machines stay."""

log = logging.getLogger(__name__)


def started_at(tools: Tools, seen: Machine) -> Micros:
    """When its service started the machine, by our clock."""
    return after(tools.clock.now(), -(seen.ran_s or 0.0))


class Sight:
    """Looks whether a machine is gone. One of a service that nobody can see, or delete, is over once its own
    limits must have ended it: waiting for longer would help nobody."""

    def __init__(self, tools: Tools, machine: MachineState) -> None:
        self._tools, self._machine = tools, machine
        self._unseen_since: Micros | None = None
        self._refused = ""

    async def last_queued(self) -> Micros | None:
        """When it was last seen waiting: it may start, and cost something, before its delete gets there.

        None if it has run (that is reported, with how long) or never existed, or nobody can tell.
        """
        tools, machine = self._tools, self._machine
        while True:
            asked_at = tools.clock.now()
            try:
                seen = await tools.find(machine, LOOK_TRIES)
                break
            except PlaceError as err:
                if not err.transient or self._is_past():
                    return None
                self._note_unseen(err)
                if told := self.told(str(err)):
                    tools.report(MachineDeleteRefused(machine.id, told))
                await asyncio.sleep(tools.pace.poll_cap_s)
        self._unseen_since = None
        if seen is not None and (seen.ran_s or seen.phase in ("pending", "up")):
            tools.report(MachineAllocated(machine.id, started_at(tools, seen), seen.start, seen.node))
        elif seen is not None and seen.phase == "queued":
            return asked_at
        return None

    def _note_unseen(self, why: PlaceError) -> None:
        if self._unseen_since is None:
            log.warning("cannot tell whether %s is gone: %s", self._machine.id, why)
            self._unseen_since = self._tools.clock.now()

    async def is_absent(self) -> bool:
        """Is it not shown at all? A dead one that is still listed may still hold a lock or a disk."""
        try:
            absent = await self._tools.find(self._machine, LOOK_TRIES) is None
        except PlaceError as err:  # credentials, or the place, may come back
            self._note_unseen(err)
            await asyncio.sleep(self._tools.pace.poll_cap_s)
            return False
        self._unseen_since = None
        return absent

    def told(self, refused: str) -> str:
        """What to tell of a machine that cannot be deleted; nothing, if its place may be back soon, or it was
        told."""
        now = self._tools.clock.now()
        if self._unseen_since is None:
            return refused
        if now < after(self._unseen_since, UNSEEN_S) or refused == self._refused:
            return ""
        self._refused, end = refused, self._ended_by()
        if end is None:
            return refused
        return f"{refused}; it ends by itself, within {max(0.0, seconds_between(now, end)) / 60:.0f} min"

    def is_over(self) -> bool:
        """Has nobody seen it until its service must have ended it by itself? Then that is reported."""
        machine, end = self._machine, self._ended_by()
        if self._unseen_since is None or end is None or not self._is_past():
            return False
        log.warning("%s was not seen to be gone: its own limits have ended it", machine.id)
        # one that its place took, or may have, may have run
        taken = machine.queued_at is not None or machine.cause is not Cause.PROVISIONING
        unseen_s = (
            seconds_between(machine.billed_at, machine.ends_at) if machine.unstarted and taken else None
        )
        self._tools.report(MachineDeleted(machine.id, end, unseen_s))
        return True

    def _is_past(self) -> bool:
        end = self._ended_by()
        return end is not None and self._tools.clock.now() >= end

    def _ended_by(self) -> Micros | None:
        """When nothing of it is there, or billed, whoever looks. None if nobody can tell: what is no job of a
        service may cost something after its end."""
        machine, offer = self._machine, self._machine.offer
        if not offer.queues or (machine.unstarted and offer.max_queue_s is None):
            return None
        begins_s = 0.0
        if machine.unstarted:
            begins_s = (offer.max_queue_s or 0.0) + self._tools.state.limits.boot_limit_s(offer)
        return after(machine.ends_at, begins_s + offer.teardown_s + offer.sweep_s)
