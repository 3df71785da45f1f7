"""Effects: what the engine has under way in the world, and what it reports back as events.

Each may be started again at any time, by this controller or by its successor: every call it makes is
idempotent by the names that the journal holds.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence

from evalfleet.errors import FleetError, StaleController
from evalfleet.events import AttemptCollected, GradingFailed, MachineCondemned
from evalfleet.model import AttemptId, Cause, Collected, Needs, Offer
from evalfleet.policy import (
    BringUp,
    Collect,
    Effect,
    EndAttempt,
    Extend,
    GradeAnswers,
    Listen,
    Mend,
    RunAttempt,
    Stop,
    TearDown,
)
from evalfleet.ports import Place

from . import attempts, machines, silence
from .tools import FenceOf, RunCopy, Tools

DOWNLOADS_AT_ONCE = 8

log = logging.getLogger(__name__)

__all__ = ["FenceOf", "Performer", "RunCopy", "Tools"]


class Performer:
    """What performs effects. A bug in a plug-in breaks the machine that it concerns, not the run."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._downloads = asyncio.Semaphore(DOWNLOADS_AT_ONCE)

    async def take_up(self) -> None:
        """Clear away what an earlier controller has left half done here. It is called first."""
        await attempts.discard_halves(self._tools)

    async def settle_ended(self) -> None:
        """Report what ended before a run was cancelled: it counts. It is called before anything is
        decided."""
        await attempts.settle_ended(self._tools)

    async def perform(self, effect: Effect) -> None:
        """Perform the effect until it is done and reported. Raises FleetError only when the controller must
        stop."""
        while True:
            try:
                return await self._perform(effect)
            except StaleController as err:
                # Only the journal's epoch stops a controller: if there is a newer one, what we report now is
                # refused. If there is none, the machine lies, or an agent has spoken to it as a controller.
                if not isinstance(effect, TearDown | Stop):
                    return self._report(effect, str(err), Cause.STUCK)
            except FleetError:
                raise
            except Exception as err:  # a plug-in's, or ours: one effect must not end the run
                if not threading.main_thread().is_alive():
                    raise asyncio.CancelledError from err  # Python is ending and takes its executors away
                log.exception("%r failed", effect)
                if not isinstance(effect, TearDown | Stop):
                    return self._report(effect, f"{type(err).__name__}: {err}", Cause.INTERNAL)
            await asyncio.sleep(self._tools.pace.poll_cap_s)  # a machine must end, whatever it takes

    async def _perform(self, effect: Effect) -> None:
        tools, state = self._tools, self._tools.state
        match effect:
            case BringUp(machine):
                await machines.bring_up(tools, state.machines[machine])
            case Extend(machine, expires_at):
                await machines.extend(tools, state.machines[machine], expires_at)
            case Listen(machine):
                await silence.listen(tools, state.machines[machine])
            case Mend(machine, step):
                await silence.mend(tools, state.machines[machine], step)
            case Stop(machine):
                await machines.stop(tools, state.machines[machine])
            case TearDown(machine):
                await machines.tear_down(tools, state.machines[machine])
            case RunAttempt(attempt):
                await tools.has_files()
                await attempts.run_attempt(tools, state.attempts[attempt])
            case EndAttempt(attempt):
                await attempts.end_attempt(tools, state.attempts[attempt])
            case Collect(attempt):
                for _ in range(2):  # what is to be started goes out first: a machine waits for it
                    await asyncio.sleep(0)
                await attempts.collect(tools, state.attempts[attempt], self._downloads)
            case GradeAnswers():
                await attempts.grade_answers(tools)

    def _report(self, effect: Effect, detail: str, cause: Cause) -> None:
        match effect:
            case GradeAnswers():
                self._tools.report(GradingFailed(detail))
            case Collect(attempt):
                self._tools.report(AttemptCollected(attempt, Collected(problem=detail)))
            case RunAttempt(attempt) | EndAttempt(attempt):
                machine = self._tools.state.attempts[attempt].machine
                self._tools.report(MachineCondemned(machine, detail, cause))
            case (
                BringUp(machine)
                | Extend(machine, _)
                | Listen(machine)
                | Mend(machine, _)
                | Stop(machine)
                | TearDown(machine)
            ):
                self._tools.give_up(MachineCondemned(machine, detail, cause))

    def forget(self, attempt: AttemptId) -> None:
        """The attempt's artefacts are home and the journal says so."""
        channel = self._tools.open_channel(self._tools.state.attempts[attempt].machine)
        if channel is not None:
            channel.forget(attempt)
            if attempts.is_graded(self._tools, self._tools.state.attempts[attempt]):
                channel.forget(attempts.scoring_job(attempt))

    async def offers(self, place: Place, needs: Needs) -> Sequence[Offer]:
        return await machines.find_offers(self._tools, place, needs)

    async def survey(self, place: Place) -> None:
        await machines.survey(self._tools, place)

    async def close(self) -> None:
        await self._tools.close()
