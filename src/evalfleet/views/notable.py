"""What of a run's events is worth a line to somebody who watches, in words. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from evalfleet import events as ev
from evalfleet.model import (
    Answered,
    AttemptId,
    Broken,
    Cause,
    MachineId,
    Micros,
    Outcome,
    Scored,
    seconds_between,
)
from evalfleet.state import Circuit, MachineState, Refusal, RunState

from .format import clean, counted, duration, iso, plural, table, usd
from .stats import machine_hourly_usd

if TYPE_CHECKING:
    from . import documents

Kind = Literal["start", "task", "trouble", "news", "end"]


@dataclass(frozen=True, slots=True)
class Notice:
    """One thing that happened. `outcome`: it was the end of an attempt; `settles`: and that of its task."""

    at: Micros
    kind: Kind
    text: str
    good: bool = True
    outcome: Outcome | None = None
    settles: bool = False


def notices(state: RunState, records: Sequence[ev.Record]) -> Iterator[Notice]:
    """What is notable of the records; machines that are requested together, or fail alike, share a line."""
    requested = sum(isinstance(record.event, ev.MachineRequested) for record in records)
    failures = Counter(failure for record in records if (failure := _failure(record.event)) is not None)
    stops = " ".join(record.event.detail for record in records if isinstance(record.event, ev.StopRequested))
    for record in records:
        failure = _failure(record.event)
        if isinstance(record.event, ev.MachineRequested) and requested > MOST_REQUESTED:
            yield Notice(record.at, "news", f"{requested:,} machines requested")
            requested = 0
        elif isinstance(record.event, ev.MachineRequested) and not requested:
            continue
        elif failure is not None:
            if many := failures.pop(failure, 0):
                yield _given_up(state, record, failure, many, why_follows=failure[1] in stops)
        elif (notice := notable(state, record)) is not None:
            yield notice


MOST_REQUESTED = 3
_NO_FAULT = (None, Cause.CANCELLED, Cause.PROVISIONING)
WHOLE = 2000
"""Characters of what a place says: the longest host key, which is to be pasted, is not cut."""


def _failure(event: ev.Event) -> tuple[Cause, str] | None:
    """Why a machine was given up, in words that are the same for all that failed alike."""
    if not isinstance(event, ev.MachineCondemned) or event.cause is None or event.image:
        return None
    return event.cause, event.detail.removeprefix(f"{event.machine}: ")


def _given_up(
    state: RunState, record: ev.Record, failure: tuple[Cause, str], many: int, why_follows: bool
) -> Notice:
    assert isinstance(record.event, ev.MachineCondemned)
    cause, detail = failure
    who = _name(state, record.event.machine) if many == 1 else f"{many:,} machines"
    why = "" if why_follows or not detail else f": {clean(detail, WHOLE)}"
    return Notice(record.at, "trouble", f"{who} given up ({words(cause)}){why}", good=False)


def notable(state: RunState, record: ev.Record) -> Notice | None:
    """The record in words, by a state that already has it; None if it is of no interest."""
    at = record.at
    match record.event:
        case ev.AttemptEnded(attempt, outcome, seconds):
            return _attempt_ended(state, at, attempt, outcome, seconds)
        case ev.RunPlanned(plan, total):
            return Notice(at, "start", f"{plan.run}: {plural(total, 'task')} of {plan.benchmark} planned")
        case ev.PoolPlanned(plan):
            return Notice(at, "start", f"pool {plan.run}: {plural(plan.limits.workers, 'machine')} planned")
        case ev.PoolResized(workers):
            return Notice(at, "start", f"pool {state.plan.run}: to have {plural(workers, 'machine')}")
        case ev.RunResumed(new_files=new):
            with_what = f" {new_files(new)}" if new is not None else ""
            return Notice(at, "start", f"{state.plan.run} is taken up again{with_what}")
        case ev.TasksReopened(tasks):
            return Notice(at, "news", f"{plural(len(tasks), 'broken task')} reopened")
        case ev.StopRequested() if not state.plan.benchmark:
            return Notice(at, "news", f"pool {state.plan.run} is to be deleted")
        case ev.StopRequested(reason, detail):
            who = by_whom(record.event)
            text = f"stopping: {clean(detail, WHOLE) or _REASONS[reason]}{who}"
            return Notice(at, "trouble", text, good=False)
        case ev.AttemptGraded() | ev.GradingRequested() | ev.GradingFailed():
            return _grading(state, record)
        case ev.RunEnded(status):
            return Notice(at, "end", f"the run is over: {status}", good=status == "done")
        case ev.AttemptCollected(attempt, collected) if collected.problem and _counts(state, attempt):
            text = f"artefacts of {clean(attempt)} are not complete: {clean(collected.problem)}"
            return Notice(at, "trouble", text, good=False)
        case _:
            return _machine(state, record)


def _counts(state: RunState, attempt: AttemptId) -> bool:
    """That a lost machine's files are lost, too, is no news."""
    return isinstance(state.attempts[attempt].outcome, Scored | Answered)


_REASONS = {
    "user": "asked by the user",
    "budget": "the budget is used up",
    "time": "the time limit is reached",
    "refused": "the place refuses us",
    "store": "the store is away",
}


def _machine(state: RunState, record: ev.Record) -> Notice | None:
    at = record.at
    match record.event:
        case ev.MachineRequested(machine, name, offer):
            where = "/".join(part for part in (offer.place, offer.region, offer.size) if part)
            return Notice(
                at, "news", f"{clean(name)} requested ({clean(where)}{', spot' if offer.spot else ''})"
            )
        case ev.MachineReady(machine, timings):
            return _ready(state.machines[machine], at, timings)
        case ev.MachineMending(machine, step, detail):
            return Notice(
                at, "trouble", f"{_name(state, machine)}: {step}, since {clean(detail)}", good=False
            )
        case ev.MachinePrepared(machine, ""):
            return Notice(at, "news", f"{_name(state, machine)} is prepared for nothing any more")
        case ev.MachinePrepared(machine, benchmark):
            return Notice(at, "news", f"{_name(state, machine)} is prepared for {clean(benchmark)}")
        case ev.MachineStopped(machine):
            return Notice(at, "news", f"{_name(state, machine)} has stopped")
        case ev.MachineStarting(machine):
            return Notice(at, "news", f"{_name(state, machine)} is to start again")
        case ev.MachineSilent(machine):
            return Notice(at, "trouble", f"{_name(state, machine)} is silent", good=False)
        case ev.MachineHeard(machine):
            return Notice(at, "news", f"{_name(state, machine)} is heard again")
        case ev.MachineCondemned(machine, image=image) if image:
            return Notice(at, "news", f"{_name(state, machine)} becomes the image {clean(image)}, and goes")
        case ev.MachineCondemned() if (failure := _failure(record.event)) is not None:
            return _given_up(state, record, failure, 1, why_follows=False)
        case _:
            return _by_its_place(state, record)


def _by_its_place(state: RunState, record: ev.Record) -> Notice | None:
    match record.event:
        case ev.CircuitChanged():
            return _circuit(record.at, record.event)
        case ev.RunSteered():
            return Notice(record.at, "news", steered(state, record.event))
        case ev.BudgetPassed(percent):
            budget = usd(state.limits.budget_usd)
            return Notice(record.at, "news", f"{percent}% of the budget of {budget} is spent")
        case ev.MachineQueued(machine, detail) if state.machines[machine].queued_at == record.at:
            told = f" ({clean(detail)})" if detail else ""
            return Notice(record.at, "news", f"{_name(state, machine)} waits in the queue of its place{told}")
        case ev.MachineAllocated(machine):
            known = state.machines[machine]
            waited = duration(seconds_between(known.requested_at, known.billed_at))
            return Notice(record.at, "news", f"{_name(state, machine)} left the queue after {waited}")
        case ev.MachineStopping(machine, _, detail) if detail:
            text = f"{_name(state, machine)} is stopped and keeps its disk: {clean(detail)}"
            return Notice(record.at, "trouble", text, good=False)
        case ev.MachineDeleteRefused(machine, detail):
            hourly = machine_hourly_usd(state.machines[machine], record.at)
            costs = f", and costs {usd(hourly)} an hour until it is" if hourly else ""
            text = f"{_name(state, machine)} cannot be deleted{costs}"
            return Notice(record.at, "trouble", f"{text} (this waits for it): {clean(detail)}", good=False)
        case _:
            return None


def _ready(machine: MachineState, at: Micros, timings: Mapping[str, float]) -> Notice:
    step = next((step for step in machine.mends if step in timings), None)
    if step is not None:
        return Notice(at, "news", f"{clean(machine.name)} is well again after {clean(step)}")
    took = duration(seconds_between(machine.billed_at, at))
    return Notice(at, "news", f"{clean(machine.name)} ready after {took}{_steps(timings)}")


SHORT_S = 0.95


def _steps(timings: Mapping[str, float]) -> str:
    """What took long, if its place tells more than that it booted."""
    ours = ("boot", "setup", "probe")
    if all(step.partition(".")[0] in ours for step in timings):
        return ""
    long = [f"{step.replace('_', '-')} {duration(s)}" for step, s in timings.items() if s >= SHORT_S]
    return f" ({', '.join(long)})" if long else ""


def _name(state: RunState, machine: MachineId) -> str:
    return clean(state.machines[machine].name)


def words(cause: Cause) -> str:
    return str(cause).replace("_", " ")


def _attempt_ended(
    state: RunState, at: Micros, attempt: AttemptId, outcome: Outcome, seconds: float
) -> Notice:
    known = state.attempts[attempt]
    task = state.tasks[known.task]
    where = f"{clean(task.task.id)} on {clean(state.machines[known.machine].name)}"
    if isinstance(outcome, Scored):
        text = f"{where}: {_score(outcome)} in {duration(seconds)}"
        return Notice(at, "task", text, outcome.success, outcome, settles=True)
    if isinstance(outcome, Answered):
        return Notice(at, "task", f"{where}: answered in {duration(seconds)}", outcome=outcome)
    what = words(outcome.cause) + (f" ({clean(outcome.detail, 120)})" if outcome.detail else "")
    # By the task as it is now: in a batch of records it may already be further.
    last = task.decided_by == known.id
    fate = (
        "broken for good"
        if last
        else "not counted"
        if outcome.cause is Cause.CANCELLED and not outcome.counts
        else "to be retried"
    )
    return Notice(at, "trouble", f"{where}: {what}, {fate}", False, outcome, settles=last)


def _grading(state: RunState, record: ev.Record) -> Notice | None:
    at = record.at
    match record.event:
        case ev.AttemptGraded(attempt, grade):
            known = state.attempts[attempt]
            first = len(known.grades) == 1  # in a batch of records it may already have more
            what = f"{clean(known.task)} graded{'' if first else ' again'}"
            if isinstance(grade, Scored):
                return Notice(at, "task", f"{what}: {_score(grade)}", grade.success, grade, settles=first)
            text = f"{what}: broken: {words(grade.cause)} ({clean(grade.detail, 120)})"
            return Notice(at, "trouble", text, False, grade, settles=first)
        case ev.GradingRequested(attempts):
            return Notice(at, "news", f"{plural(len(attempts), 'answer')} to be graded again")
        case ev.GradingFailed(detail):
            return Notice(at, "trouble", f"grading failed: {clean(detail)}", good=False)
        case _:
            return None


def steered(state: RunState, event: ev.RunSteered | ev.StopRequested) -> str:
    """What somebody has changed of the run, in words."""
    return f"{_change(state, event)}{by_whom(event)}"


def by_whom(event: ev.RunSteered | ev.StopRequested) -> str:
    who = f" by {clean(event.by)}" if event.by else ""
    return who + (f": {clean(event.why, 300)}" if event.why else "")


def _change(state: RunState, event: ev.RunSteered | ev.StopRequested) -> str:
    if isinstance(event, ev.StopRequested):
        return "run drained" if event.drain else "run cancelled"
    match event.verb:
        case "pause":
            return "paused"
        case "unpause":
            return "unpaused"
        case "set":
            if event.workers == 0 and event.budget_usd is None and event.attempts is None:
                return "paused, and its machines released" if event.release else "paused"
            parts = [f"workers {event.workers}"] if event.workers is not None else []
            parts += [f"budget {usd(event.budget_usd)}"] if event.budget_usd is not None else []
            parts += [f"attempts {event.attempts}"] if event.attempts is not None else []
            return f"set to {', '.join(parts)}"
        case "end":
            return f"attempt {clean(event.attempt or '')} to be ended"
        case "drain" | "undrain" | "restart" | "replace":
            name = _name(state, event.machine) if event.machine is not None else ""
            done = {"drain": "drained", "restart": "restarted", "replace": "replaced"}
            return f"{name} to be {done[event.verb]}" if event.verb in done else f"{name} may be used again"


def steering(state: RunState) -> list[documents.Steered]:
    """What people have changed of the run from outside, in order."""
    return [_steered_entry(state, at, event) for at, event in state.steered]


def _steered_entry(state: RunState, at: Micros, event: ev.RunSteered | ev.StopRequested) -> documents.Steered:
    asked = event if isinstance(event, ev.RunSteered) else None
    machine = asked.machine if asked is not None else None
    return {
        "at": iso(at) or "",
        "verb": event.verb if isinstance(event, ev.RunSteered) else "drain" if event.drain else "cancel",
        "by": event.by,
        "reason": event.why or None,
        "what": steered(state, event),
        "machine": None if machine is None else state.machines[machine].name,
        "attempt": asked.attempt if asked is not None else None,
        "workers": asked.workers if asked is not None else None,
        "budget_usd": asked.budget_usd if asked is not None else None,
        "attempts": asked.attempts if asked is not None else None,
    }


def _score(outcome: Scored) -> str:
    verdict = "pass" if outcome.success else "fail"
    exact = "" if outcome.score in (0.0, 1.0) else f" (score {outcome.score:.3g})"
    return f"{verdict}{exact}{', time limit' if outcome.limit_s is not None else ''}"


def new_files(new: ev.NewFiles) -> str:
    """Says that what is left runs with other files, and what is different in them."""
    parts = [", ".join(new.changed[:5]) + (", ..." if len(new.changed) > 5 else "")] if new.changed else []
    if new.tasks:
        parts.append(plural(len(new.tasks), "task"))
    return f"with new files for what is left (changed: {' and '.join(parts) or 'its description'})"


def together(lines: list[Notice]) -> str:
    """Many lines as one: how many, and what the attempts among them came to."""
    outcomes = [line.outcome for line in lines if line.outcome is not None]
    scored = [outcome for outcome in outcomes if isinstance(outcome, Scored)]
    answered = sum(isinstance(outcome, Answered) for outcome in outcomes)
    causes = Counter(str(outcome.cause) for outcome in outcomes if isinstance(outcome, Broken))
    rest = len(lines) - len(outcomes)
    parts = [
        f"{len(scored):,} scored, {sum(o.success for o in scored):,} of them pass" if scored else "",
        f"{answered:,} answered" if answered else "",
        f"broken: {counted(causes)}" if causes else "",
        plural(rest, "notice") + " about machines and the run" if rest else "",
    ]
    return "; ".join(part for part in parts if part)


def _has_failed(machine: MachineState) -> bool:
    """Was it given up for a fault? Who is refused a machine has none, and spot machines are only lent."""
    if machine.phase not in ("condemned", "deleted") or machine.cause in _NO_FAULT:
        return False
    return machine.cause is not Cause.EVICTED or not machine.offer.spot


def by_place(state: RunState, now: Micros) -> list[documents.PlaceUse]:
    """What ran at each place, in the order in which they are tried; why they were left."""
    names = dict.fromkeys((*state.plan.places, *state.circuits))
    machines: dict[str, list[MachineState]] = {name: [] for name in names}
    for machine in state.machines.values():
        machines[machine.offer.place].append(machine)
    ends = Counter(
        (state.machines[attempt.machine].offer.place, isinstance(attempt.outcome, Broken))
        for attempt in state.attempts.values()
        if attempt.outcome is not None
    )
    return [
        _place_use(state, now, each, machines[each], ends[each, False], ends[each, True]) for each in names
    ]


def _place_use(
    state: RunState, now: Micros, place: str, machines: Sequence[MachineState], scored: int, broken: int
) -> documents.PlaceUse:
    """Of the whole run: its circuit begins to count anew when a run that had stopped is resumed."""
    circuit = state.circuits.get(place, Circuit())
    paid = sum(machine.closed_usd + machine.open_usd(now) for machine in machines)
    return {
        "place": place,
        "machines": len(machines),
        "failed_machines": sum(map(_has_failed, machines)),
        "attempts": sum(machine.attempts for machine in machines),
        "scored": scored,
        "broken": broken,
        "machines_usd": round(paid, 6),
        "circuit": circuit.phase,
        "changes": [
            {
                "at": iso(at) or "",
                "phase": change.phase,
                "why": clean(change.detail, WHOLE),
                "until": iso(change.until) if change.until else None,
                "permanent": change.permanent,
            }
            for at, change in circuit.history
        ],
    }


def left_places(state: RunState) -> Iterator[str]:
    """A sentence about each place that gets no machines now."""
    for place, circuit in state.circuits.items():
        if circuit.phase == "draining":
            yield f"{place} gets no new machines: {clean(circuit.detail)}"
        elif circuit.phase == "open":
            tried = ", and one machine of it is being tried" if circuit.probe is not None else ""
            yield f"{place} is left{tried}: {clean(circuit.detail)}"


def _circuit(at: Micros, event: ev.CircuitChanged) -> Notice:
    why = clean(event.detail, WHOLE)
    match event.phase:
        case "open" if event.permanent:
            return Notice(at, "trouble", f"{event.place} is left for good: {why}", good=False)
        case "open":
            return Notice(at, "trouble", f"{event.place} is left for now: {why}", good=False)
        case "draining":
            return Notice(at, "trouble", f"{event.place} gets no new machines: {why}", good=False)
        case "closed":
            return Notice(at, "news", f"{event.place} gets machines again: {why}", good=True)


def refusals(state: RunState) -> list[documents.RefusedOffer]:
    """One entry an offer, in the order in which they first refused."""
    return [_entry(each) for each in state.refusals.values()]


def _entry(refusal: Refusal) -> documents.RefusedOffer:
    offer = refusal.offer
    return {
        "place": offer.place,
        "region": offer.region or None,
        "size": offer.size,
        "spot": offer.spot,
        "usd_per_hour": offer.cost.usd_per_hour,
        "tries": refusal.tries,
        "answer": clean(refusal.detail, WHOLE),
        "blocked": _blocked(refusal),
        "permanent": refusal.permanent,
    }


def _blocked(refusal: Refusal) -> str:
    """How much of the place is not asked again."""
    offer = refusal.offer
    area = offer.area or offer.region
    match refusal.scope:
        case "place":
            return f"all of {offer.place}"
        case "region" if area:
            return area
        case "family" if offer.family:
            return " in ".join(word for word in (offer.family, area) if word)
        case _:
            return " in ".join(word for word in (offer.size, offer.region) if word)


def refusals_table(entries: Sequence[documents.RefusedOffer]) -> str:
    """Empty if nothing was refused."""
    if not entries:
        return ""
    rows = [
        (
            " ".join(filter(None, (each["place"], each["region"], each["size"], "spot" * each["spot"]))),
            each["tries"],
            each["blocked"] + ("" if each["permanent"] else ", for a while"),
            each["answer"],
        )
        for each in entries
    ]
    return table(("offer", "tried", "not asked again", "answer"), rows, right=("tried",), longest=WHOLE)
