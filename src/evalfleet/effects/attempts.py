"""Running attempts to their end, and bringing home what they made."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
from msgspec import structs

from evalfleet.channels.secrecy import Secrets
from evalfleet.errors import (
    ChannelError,
    FleetError,
    MachineForged,
    PlaceError,
    RequestError,
    SetupFailed,
    StaleController,
)
from evalfleet.events import (
    AttemptCollected,
    AttemptEnded,
    AttemptGraded,
    GradingFailed,
    MachineCondemned,
    MachineHeard,
    MachineSilent,
)
from evalfleet.model import (
    CAUSES,
    Allowance,
    AttemptId,
    Broken,
    Bundle,
    Cause,
    Collected,
    Command,
    Ended,
    Grade,
    Job,
    Measured,
    Metered,
    Outcome,
    Scored,
    Scorer,
    Task,
    after,
    decodable,
)
from evalfleet.names import INCOMING, PARTIAL, SCORE, artefacts_folder
from evalfleet.policy import proven_online
from evalfleet.ports import Answer, Channel, Graded
from evalfleet.state import AttemptState, MachineState, is_ungradable, is_ungraded, steered_by

from .machines import report_gone
from .silence import forged, silent_since
from .steps import following_steps
from .tools import Tools, check_wanted

COLLECT_LIMIT_S = 600.0
DEAD_S = 60.0
"""A machine that was given up and has been silent for so long, while others were heard, is dead: nothing more
comes from it."""
COLLECT_TRIES = 5
"""While the machine answers in between: a connection that breaks three times in a row is no wonder in a large
run."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
LOOKS = 2
LOOK_S = 60.0
EVICTION_S = 300.0
"""So long after its machine has announced it, a place may take to show that it took a machine back."""
NO_TIME_S = 1.0
"""A start that took less has taken no time: the attempt's limit has a margin."""
SETTLE_S, MOMENT_S = 30.0, 1.0
"""How long a machine may take to answer before a cancelled run lets it go, and then to say how an attempt
ended."""
NOT_USED = Metered()
METER = "meter"
"""The step of a machine's set-up without which no metered attempt can be started."""
SCRATCH = ".grading"
"""Where in the run's folder a grader may keep things."""

log = logging.getLogger(__name__)


async def run_attempt(tools: Tools, attempt: AttemptState) -> None:
    """Start it, or attach to it, and report how it ended."""
    machine, limits = tools.state.machines[attempt.machine], tools.state.limits
    task = tools.state.tasks[attempt.task].task
    channel, bundle, scorer = tools.channel(machine), tools.task_bundle(task), tools.scorer(task, attempt.id)
    job = _job_of(tools, task, attempt, machine, bundle, scorer)
    # the host ends the attempt at its limit; this only catches a host that does not. The second look
    # is for a controller that was stopped for long: what it waited for may have happened meanwhile
    patience_s, looks = task.limit_s + limits.grace_s, 0
    while looks < LOOKS:
        try:
            async with asyncio.timeout(patience_s) as patience:
                if bundle.digest:
                    patience.reschedule(None)  # its steps have limits of their own, kept on the host
                    await _prepared(tools, channel, bundle, machine)
                await _started(tools, channel, job, machine)
                # its time counts from when its command runs, never from when it was asked for; but most take
                # no time to start, and large runs feel a second timer an attempt
                due = asyncio.get_running_loop().time() + patience_s
                if (when := patience.when()) is None or when < due - NO_TIME_S:
                    patience.reschedule(due)
                async with following_steps(tools, channel, attempt):
                    ended = await _to_the_end(tools, channel, job, machine)
                metered, ending = ended.metered, _ended_by_its_meter(tools, attempt, ended)
                if ending is None and scorer is not None and _scorable(ended):
                    patience.reschedule(None)  # its own limit is kept on the host
                    outcome, metered = await _score(tools, channel, task, job, machine, scorer, ended)
                else:
                    _note(tools, attempt.id, metered)
                    outcome = ending or await _judge(tools, channel, task, ended)
        except TimeoutError:
            patience_s = limits.grace_s
            looks += machine.silent_since is None  # how long silence is borne is not decided here
            continue
        except (MachineForged, SetupFailed) as err:
            tools.report(_unfit(tools, machine, attempt, err))
            return
        if attempt.ending is not None and ended.reason == "stopped" and isinstance(outcome, Broken):
            detail = f"ended {steered_by(attempt.ending)}"
            outcome = structs.replace(outcome, cause=Cause.CANCELLED, detail=detail, counts=True)
        if (
            isinstance(outcome, Broken)
            and outcome.is_free
            and ended.reason
            != "unmetered"  # by a neighbour, or by itself: forgiven once, as a lost machine is
            and not (metered and metered.refused)
        ):
            if ended.reason == "evicted":
                await _rescue(tools, machine, attempt)
            if await _is_gone(tools, machine, ended):
                return  # what was said of the machine ends its attempts, too
            # it was we who were silent
            away = ended.reason == "lease" and attempt.started_at < tools.began_at
            outcome = structs.replace(outcome, counts=not away)
        seconds, node = round(_seconds(outcome, ended), 3), ended.node or machine.node
        tools.report(AttemptEnded(attempt.id, outcome, seconds, node, metered))
        if ended.reason == "evicted":
            _let_go(tools, machine, attempt, outcome)
        return
    detail = f"{attempt.id} was not ended at its limit of {task.limit_s:g} s"
    tools.report(MachineCondemned(machine.id, detail, Cause.STUCK))


def _job_of(
    tools: Tools,
    task: Task,
    attempt: AttemptState,
    machine: MachineState,
    bundle: Bundle,
    scorer: Scorer | None,
) -> Job:
    return Job(
        attempt.id,
        tools.benchmark.command(task, attempt.id),
        task.limit_s,
        tools.benchmark.bundle.digest,
        tools.state.limits.lease_s,
        stall_s=task.stall_s,
        isolation=machine.isolated.kind,
        graded=scorer is not None,
        task_bundle=bundle.digest,
        metering=tools.state.plan.metering,
        allowance=attempt.allowance,
    )


async def settle_ended(tools: Tools) -> None:
    """Report what has ended by itself while no controller was there, before a cancelled run lets go.

    What still runs is left to be ended. A machine that does not answer soon keeps what it has.
    """
    state = tools.state
    if state.stop is None or state.stop.drain:
        return
    ready = [state.machines[machine] for machine in state.ready]
    open_attempts = [(machine, state.attempts[attempt]) for machine in ready for attempt in machine.open]
    await asyncio.gather(*(_settle(tools, machine, attempt) for machine, attempt in open_attempts))


async def _settle(tools: Tools, machine: MachineState, attempt: AttemptState) -> None:
    # without its files or secrets here, and from a machine that is gone, there is no result to be had
    with suppress(ChannelError, RequestError, TimeoutError):
        channel, task = tools.channel(machine), tools.state.tasks[attempt.task].task
        async with asyncio.timeout(SETTLE_S):
            ended = await _ended_already(channel, attempt.id)
        if ended is None or not _scorable(ended):
            return
        scorer, metered = tools.scorer(task, attempt.id), ended.metered
        if (ending := _ended_by_its_meter(tools, attempt, ended)) is not None or scorer is None:
            outcome = ending or await _judge(tools, channel, task, ended)
        else:
            job = _job_of(tools, task, attempt, machine, tools.task_bundle(task), scorer)
            async with asyncio.timeout(scorer.timeout_s + SETTLE_S):
                outcome, metered = await _score(tools, channel, task, job, machine, scorer, ended)
        if not all(tools.secrets.values()):
            outcome = _without_words(outcome)
        node = ended.node or machine.node
        seconds = round(_seconds(outcome, ended), 3)
        tools.report(AttemptEnded(attempt.id, outcome, seconds, node, metered))


def _without_words(outcome: Outcome) -> Outcome:
    """Where a secret has no value, nothing can be masked: the score counts, and what was said is left out."""
    if isinstance(outcome, Scored):
        return Scored(outcome.score, outcome.success, limit_s=outcome.limit_s, seconds=outcome.seconds)
    return Broken(
        outcome.cause if isinstance(outcome, Broken) else Cause.RESULT, "a secret has no value here"
    )


async def _ended_already(channel: Channel, attempt: AttemptId) -> Ended | None:
    """How the attempt ended; None while it runs. Raises ChannelError."""
    waiting = asyncio.create_task(channel.ended(attempt))
    try:
        await channel.probe(None)  # the machine is there, and was asked about the attempt before
        await asyncio.wait({waiting}, timeout=MOMENT_S)
        return waiting.result() if waiting.done() else None
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


def _unfit(
    tools: Tools, machine: MachineState, attempt: AttemptState, err: MachineForged | SetupFailed
) -> MachineCondemned | AttemptEnded:
    if isinstance(err, MachineForged):
        return forged(machine, err)
    if err.step == METER:
        return MachineCondemned(machine.id, str(err), Cause.SETUP, step=err.step)
    # the task's own: the machine may do well with others
    unused = NOT_USED if tools.state.plan.metering is not None else None
    return AttemptEnded(attempt.id, Broken(Cause.SETUP, str(err)), node=machine.node, metered=unused)


def _ended_by_its_meter(tools: Tools, attempt: AttemptState, ended: Ended) -> Broken | None:
    """Return what it means that an attempt's model calls could not go on, or None if they could.

    A truncated attempt is no measurement: whatever it has written, an attempt that was refused money has no
    score, and never a zero.
    """
    used = ended.metered
    if ended.reason == "budget" or (used is not None and used.refused):
        why = used.refused if used is not None else "its allowance is used up"
        cause = Cause.MODEL if _is_charged(tools, attempt) else Cause.CANCELLED
        return Broken(cause, f"its model calls were refused: {why}")
    if ended.reason == "model":
        told = used.wedged if used is not None else ""
        return Broken(Cause.MODEL, f"its model gave the same error again and again: {told}")
    if used is not None and used.wedged:
        return Broken(Cause.MODEL, f"its model calls failed: {used.wedged}")
    if ended.reason == "unmetered":
        return Broken(Cause.MACHINE_LOST, "the meter of its model calls was ended")
    return None


def _is_charged(tools: Tools, attempt: AttemptState) -> bool:
    """Return True if using up the allowance counts as one of the task's attempts.

    The task can bring it about, so it is forgiven once, and never where the user has set the allowance.
    """
    fixed, allowed = tools.state.limits.task_budget_usd, attempt.allowance.usd
    if fixed is not None and allowed is not None and allowed >= fixed:
        return True
    earlier = (tools.state.attempts[each].metered for each in tools.state.tasks[attempt.task].attempts)
    return any(metered is not None and metered.refused for metered in earlier)


def _rest(allowance: Allowance, used: Metered) -> Allowance:
    """What is left of an attempt's allowance for another job of it."""
    usd, tokens = allowance.usd, allowance.tokens
    return Allowance(
        None if usd is None else max(0.0, usd - used.used_usd),
        None if tokens is None else max(0, tokens - used.used_tokens),
    )


async def end_attempt(tools: Tools, attempt: AttemptState) -> None:
    """Stop it on its machine, until that was heard of: it may be on its way there. One that is silent is
    asked later."""
    machine = tools.state.machines[attempt.machine]
    channel = tools.channel(machine)
    while attempt.outcome is None:
        try:
            await channel.stop(attempt.id)
            await asyncio.sleep(tools.pace.poll_cap_s)
        except (StaleController, MachineForged):
            raise
        except ChannelError:
            await _fell_silent(tools, machine)


async def _is_gone(tools: Tools, machine: MachineState, ended: Ended) -> bool:
    """Does its place confirm that the machine is gone, or was started anew? Then that is reported.

    A job can write what its machine reads: nothing that is said there is believed where it would give the
    task another attempt for nothing. A machine that is told beforehand is still there for a while.
    """
    evictable = ended.reason == "evicted" and (machine.offer.spot or machine.offer.life.queues)
    with suppress(TimeoutError, PlaceError):
        async with asyncio.timeout(EVICTION_S if evictable else LOOK_S):
            while True:
                seen = await tools.find(machine)
                if seen is None or seen.phase not in ("pending", "up") or seen.start != machine.start:
                    report_gone(tools, machine, seen)
                    return True
                if not evictable:
                    return False
                await asyncio.sleep(tools.pace.poll_s * 5)
    return False


def _let_go(tools: Tools, machine: MachineState, attempt: AttemptState, outcome: Outcome) -> None:
    """Its machine said that its place takes it back, and was still there when the attempt was reported."""
    if isinstance(outcome, Broken):
        detail = "it said that its place takes it back, and its place does not"
        tools.report(MachineCondemned(machine.id, detail, Cause.STUCK))
    elif not set(machine.open) - {attempt.id}:
        # nothing hangs on whether that is so, and nobody has asked; what else runs there is told, too
        tools.report(MachineCondemned(machine.id, "it says that its place takes it back", None))


async def _rescue(tools: Tools, machine: MachineState, attempt: AttemptState) -> None:
    """Bring the artefacts home now: when its place confirms that it takes the machine back, it is gone."""
    with suppress(ChannelError, OSError):  # without them the attempt is no worse than after a sudden eviction
        async with asyncio.timeout(EVICTION_S):
            tools.rescued[attempt.id] = (await _bring_home(tools, machine, attempt)).collected


def is_graded(tools: Tools, attempt: AttemptState) -> bool:
    """Does a command of its own score the attempt, after its end?"""
    try:
        return tools.scorer(tools.state.tasks[attempt.task].task, attempt.id) is not None
    except RequestError:
        return True  # the files of that command are not here, or not yet


def scoring_job(attempt: AttemptId) -> AttemptId:
    """The job that grades an attempt. No attempt is called so: they end with a number."""
    return AttemptId(f"{attempt}+score")


def _scorable(ended: Ended) -> bool:
    """Was the end the agent's own doing, and is what it left still there?"""
    return ended.reason in ("exited", "timed_out")


async def _score(
    tools: Tools,
    channel: Channel,
    task: Task,
    job: Job,
    machine: MachineState,
    scorer: Scorer,
    ended: Ended,
) -> tuple[Outcome, Metered | None]:
    attempt, used = tools.state.attempts[job.id], ended.metered or NOT_USED
    grading = Job(
        scoring_job(job.id),
        scorer.command,
        scorer.timeout_s,
        job.bundle,
        job.lease_s,
        isolation=job.isolation,
        grades=job.id,
        score_bundle=scorer.bundle.digest,
        task_bundle=job.task_bundle,
        metering=job.metering,
        allowance=_rest(attempt.allowance, used),
    )
    await _started(tools, channel, grading, machine)
    graded = await _to_the_end(tools, channel, grading, machine)
    assert tools.files is not None, "only benchmarks made of files have scorers"
    outcome = _ended_by_its_meter(tools, attempt, graded) or tools.files.scored(task, ended, graded)
    metered = graded.metered if ended.metered is None else ended.metered.plus(graded.metered)
    _note(tools, job.id, metered)
    return outcome, metered


def _note(tools: Tools, attempt: AttemptId, metered: Metered | None) -> None:
    """Keep what its model calls used: its machine may be gone before anybody can report it."""
    if metered is not None:
        tools.metered[attempt] = metered


def _seconds(outcome: Outcome, ended: Ended) -> float:
    """How long the task itself took, where the benchmark knows it: getting the machine ready is not the
    task's."""
    own = None if isinstance(outcome, Broken) else outcome.seconds
    if own is None:
        return ended.seconds
    return min(own, ended.seconds) if ended.seconds else own  # it cannot be longer than what was measured


async def _prepared(tools: Tools, channel: Channel, bundle: Bundle, machine: MachineState) -> None:
    """Wait until the machine has the task's own files and has run its steps. Raises SetupFailed."""
    while True:
        try:
            await channel.prepare(bundle)
            return
        except (SetupFailed, StaleController, MachineForged):
            raise
        except ChannelError:
            await _fell_silent(tools, machine)


async def _started(tools: Tools, channel: Channel, job: Job, machine: MachineState) -> None:
    """Wait until the machine has the job, however long it is silent meanwhile."""
    while True:
        try:
            await channel.start(job)
        except (StaleController, MachineForged, SetupFailed):
            raise
        except ChannelError:
            await _fell_silent(tools, machine)
        else:
            if machine.silent_since is not None:
                tools.report(MachineHeard(machine.id))
            return


async def _to_the_end(tools: Tools, channel: Channel, job: Job, machine: MachineState) -> Ended:
    while True:
        try:
            return await channel.ended(job.id)
        except (StaleController, MachineForged):
            raise
        except ChannelError:
            await _fell_silent(tools, machine)
        await _started(tools, channel, job, machine)  # it may know nothing of the job


async def _fell_silent(tools: Tools, machine: MachineState) -> None:
    check_wanted()
    tools.report(MachineSilent(machine.id, silent_since(tools, machine)))
    await asyncio.sleep(tools.pace.poll_s * 5)


async def _judge(tools: Tools, channel: Channel, task: Task, ended: Ended) -> Outcome:
    healthy = True
    if tools.scorer(task, AttemptId(f"{task.id}.0")) is not None:
        ended = structs.replace(ended, result=None, unusable="")  # it is no attempt's own to say
    if ended.reason == "timed_out" and ended.result is None:
        healthy = await _answers(channel, tools.benchmark.probe)
    return tools.benchmark.outcome(task, ended, healthy)


async def _answers(channel: Channel, probe: Command | None) -> bool:
    try:
        return await channel.probe(probe)
    except StaleController:
        raise
    except ChannelError:
        return False


async def collect(tools: Tools, attempt: AttemptState, turn: asyncio.Semaphore) -> None:
    """Bring the artefacts home. Trouble with them never touches the outcome.

    A machine that falls silent meanwhile is waited for, as long as it is not given up.
    """
    machine = tools.state.machines[attempt.machine]
    found = AttemptCollected(attempt.id, Collected(problem="the machine is gone"))
    if attempt.id in tools.rescued:
        rescued = tools.rescued.pop(attempt.id)
        if tools.copy is not None:
            await tools.copy.keep(attempt.id)
        tools.report(AttemptCollected(attempt.id, rescued, metered=_metered_late(tools, attempt)))
        return
    for _ in range(COLLECT_TRIES):
        if _is_dead(tools, machine):
            break
        try:
            async with turn, _while_it_may_answer(tools, machine):
                found = await _bring_home(tools, machine, attempt)
            break
        except StaleController:
            raise
        except TimeoutError:
            why = "says nothing any more" if _is_dead(tools, machine) else "took too long to send them"
            found = AttemptCollected(attempt.id, Collected(problem=f"the machine {why}"))
            break
        except (ChannelError, OSError) as err:
            if isinstance(err, OSError) and err.errno in NO_ROOM:
                raise _no_room(tools) from err
            found = AttemptCollected(attempt.id, Collected(problem=str(err) or type(err).__name__))
            if isinstance(err, OSError) or not await _answers_again(tools, machine):
                break
    if found.metered is None and (late := _metered_late(tools, attempt)) is not None:
        found = structs.replace(found, metered=late)
    if tools.copy is not None:
        await tools.copy.keep(attempt.id)
    tools.report(found)


@asynccontextmanager
async def _while_it_may_answer(tools: Tools, machine: MachineState) -> AsyncGenerator[None]:
    """Bounds what is asked of a machine. Raises TimeoutError, and does so soon if the machine is dead."""
    loop = asyncio.get_running_loop()
    given_up_at = loop.time() + COLLECT_LIMIT_S
    timer: asyncio.TimerHandle | None = None
    async with asyncio.timeout(None) as patience:  # large runs feel a second timer an attempt

        def look() -> None:
            nonlocal timer
            if loop.time() >= given_up_at or _is_dead(tools, machine):
                patience.reschedule(loop.time())
            else:
                timer = loop.call_later(DEAD_S / 4, look)

        timer = loop.call_later(DEAD_S / 4, look)
        try:
            yield
        finally:
            timer.cancel()


def _is_dead(tools: Tools, machine: MachineState) -> bool:
    """Was it given up, and is it known that it answers no more? While nobody else is heard, our own network
    may be down, and it may answer yet."""
    if machine.phase != "condemned":
        return False
    if machine.cause is not None and CAUSES[machine.cause].unreachable:
        return True
    if machine.silent_since is None or not proven_online(tools.state, machine):
        return False
    return tools.clock.now() >= after(machine.silent_since, max(DEAD_S, 2 * machine.offer.life.silent_s))


def _metered_late(tools: Tools, attempt: AttemptState) -> Metered | None:
    """What its model calls used, if the journal does not know."""
    told = tools.metered.pop(attempt.id, None)
    return told if attempt.metered is None else None


async def grade_answers(tools: Tools) -> None:
    """Let the benchmark grade what attempts have left, and report each grade as it comes."""
    hidden = Secrets(tools.secrets, tools.secrets)
    try:
        await _grade(tools, hidden)
    except Exception as err:  # a plug-in's, or its environment's: whatever it is, the answers stay
        log.info("grading failed", exc_info=True)
        detail = str(err) if isinstance(err, FleetError) else f"{type(err).__name__}: {err}"
        tools.report(GradingFailed(hidden.mask_text(detail)))


async def _grade(tools: Tools, hidden: Secrets) -> None:
    grader = tools.benchmark.grader if isinstance(tools.benchmark, Graded) else None
    if grader is None:
        raise FleetError(f"the benchmark {tools.benchmark.name!r} has no grader for what its tasks answered")
    if tools.copy is not None:
        await tools.copy.fetched()
    answers = _answers_of(tools)
    wanted = {answer.attempt for answer in answers if answer.wanted}
    async for attempt, grade in grader.grade(answers, tools.artefacts / SCRATCH, tools.secrets):
        if attempt in wanted:
            wanted.remove(attempt)
            tools.report(AttemptGraded(attempt, _masked(grade, hidden)))
    for attempt in sorted(wanted):
        tools.report(AttemptGraded(attempt, Broken(Cause.RESULT, "the grader gave no grade for it")))


def _answers_of(tools: Tools) -> list[Answer]:
    """All answers that the run's tasks were settled by; those that are to be graded now are wanted."""
    state, answers = tools.state, list[Answer]()
    for known in state.tasks.values():
        graded = known.status in ("answered", "scored") or is_ungradable(known)
        if known.decided_by is not None and graded:
            attempt = state.attempts[known.decided_by]
            wanted = attempt.id in state.regrading or is_ungraded(state, attempt)
            answers.append(Answer(known.task, attempt.id, _home_of(tools, attempt), wanted))
    return answers


def _masked(grade: Grade, hidden: Secrets) -> Grade:
    """What a grader says may have been said by the agent, which knows secrets."""
    if grade.measured is not None:
        plain = hidden.mask_result(msgspec.json.encode(grade.measured))
        grade = structs.replace(grade, measured=msgspec.json.decode(plain, type=decodable(Measured)))
    if isinstance(grade, Broken):
        return structs.replace(grade, detail=hidden.mask_text(grade.detail))
    if not 0.0 <= grade.score <= 1.0:
        raise FleetError(f"the grader gave a score of {grade.score!r}, which is not between 0 and 1")
    return grade if grade.error is None else structs.replace(grade, error=hidden.mask_text(grade.error))


async def discard_halves(tools: Tools) -> None:
    """What a controller that was killed while it collected has left, perhaps with secrets not masked yet.

    The journal does not call those attempts collected: what is here of one may even be complete.
    """
    for machine in tools.state.machines.values():
        for attempt in (*machine.open, *machine.uncollected):
            home = _home_of(tools, tools.state.attempts[attempt])
            for half in (f"{home}{INCOMING}", f"{home}{PARTIAL}"):
                if os.path.lexists(half):
                    await asyncio.to_thread(shutil.rmtree, half, ignore_errors=True)


def _no_room(tools: Tools) -> FleetError:
    """The error that stops a controller whose disk is full: artefacts are safer on their machines than lost
    here."""
    where = f"{tools.artefacts}: the disk is full"
    return FleetError(f"{where}; what was recorded is safe: free some space, then resume")


async def _bring_home(tools: Tools, machine: MachineState, attempt: AttemptState) -> AttemptCollected:
    channel = tools.channel(machine)
    superseded: Outcome | None = None
    if machine.phase == "condemned" or (attempt.metered is None and tools.state.plan.metering is not None):
        superseded = await _late_result(tools, channel, attempt)
    collected = await channel.collect(attempt.id, _home_of(tools, attempt))
    if is_graded(tools, attempt):
        with suppress(ChannelError):  # there is none if the attempt was not graded
            grading, home = scoring_job(attempt.id), _home_of(tools, attempt)
            await channel.collect(grading, home.with_name(home.name + SCORE))
    return AttemptCollected(attempt.id, collected, superseded, _metered_late(tools, attempt))


async def _answers_again(tools: Tools, machine: MachineState) -> bool:
    """Wait until the machine answers. False: it was given up, or the run is over and waits no longer."""
    patience = after(tools.clock.now(), machine.offer.life.lost_s)
    while machine.phase in ("ready", "mending") or (machine.cause is None and tools.clock.now() < patience):
        if _is_dead(tools, machine):
            return False
        if await _answers(tools.channel(machine), None):
            return True
        await _fell_silent(tools, machine)
    return False


async def _late_result(tools: Tools, channel: Channel, attempt: AttemptState) -> Outcome | None:
    """End what still runs of the attempt. A score that it wrote is kept, but no longer counts."""
    await channel.stop(attempt.id)
    task = tools.state.tasks[attempt.task].task
    metered = tools.state.plan.metering is not None and attempt.metered is None
    apart = not isinstance(attempt.outcome, Broken) or is_graded(tools, attempt)
    if apart and not metered:
        return None
    ended = await channel.ended(attempt.id)
    if metered and ended.metered is not None:
        tools.metered[attempt.id] = ended.metered
    if apart or _ended_by_its_meter(tools, attempt, ended) is not None:
        return None
    outcome = tools.benchmark.outcome(task, ended, True)
    return outcome if isinstance(outcome, Scored) and ended.result is not None else None


def _home_of(tools: Tools, attempt: AttemptState) -> Path:
    return tools.artefacts / artefacts_folder(attempt.task, attempt.id)
