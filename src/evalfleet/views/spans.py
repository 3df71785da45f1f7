"""A run as spans of a trace: run > machine > attempt > step > model call, from its state and its files."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from evalfleet.model import SECOND, Broken, Micros, Scored, Step
from evalfleet.state import AttemptState, MachineState, RunState

from .model_costs import CallRow, metered_calls
from .stats import machine_end, machine_usd

VENDORS = {"claude": "anthropic", "gemini": "gcp.gemini", "gpt": "openai", "o1": "openai", "o3": "openai"}
"""What names of models begin with -> who makes them, in the words of OpenTelemetry."""

Value = str | int | float | bool


class Span(Struct, frozen=True):
    """A stretch of time with a name. Its id follows from what it is: told twice, it is the same one."""

    id: int
    parent: int | None
    name: str
    start: Micros
    end: Micros
    attributes: Mapping[str, Value] = {}
    error: str | None = None
    """Why it did not go well; None: it did, or nobody can tell."""


def trace_id(state: RunState) -> int:
    """An id of 128 bits that is never 0."""
    return int.from_bytes(_digest(state.plan.home, state.plan.run, state.planned_at)[:16]) or 1


def _span_id(*parts: object) -> int:
    return int.from_bytes(_digest(*parts)[:8]) or 1


def _digest(*parts: object) -> bytes:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).digest()


StepsOf = Callable[[AttemptState], Sequence[Step]]


def spans(state: RunState, folder: Path, now: Micros, steps_of: StepsOf) -> Iterator[Span]:
    """The spans of all that has ended; what goes on is told as far as it has come."""
    at = now if state.ended_at is None else state.ended_at
    plan, seed = state.plan, (state.plan.home, state.plan.run, state.planned_at)
    root = _span_id(*seed)
    attributes: dict[str, Value] = {
        "evalfleet.run": plan.run,
        "evalfleet.benchmark": plan.benchmark,
        "evalfleet.status": state.status,
        "evalfleet.tasks": state.total,
        "evalfleet.scored": state.scored,
        "evalfleet.broken": state.broken,
    }
    if plan.model:
        attributes["gen_ai.request.model"] = plan.model
    why = state.stop.detail or state.stop.reason if state.stop is not None else state.status
    failed = why if state.ended_at is not None and state.status != "done" else None
    yield Span(root, None, f"run {plan.run}", state.planned_at, at, attributes, failed)
    machines = {id: _span_id(*seed, id) for id in state.machines}
    for machine in state.machines.values():
        yield _machine(machine, machines[machine.id], root, at)
        yield from _set_up(machine, machines[machine.id], seed)
    for attempt in state.attempts.values():
        own = _span_id(*seed, attempt.id)
        yield _attempt(state, attempt, own, machines[attempt.machine], at)
        steps = list(_steps(attempt, steps_of(attempt), own, seed))
        yield from steps
        yield from _calls(attempt, metered_calls(attempt, folder), own, steps, seed)


def _machine(machine: MachineState, own: int, root: int, now: Micros) -> Span:
    end = machine_end(machine, now)
    attributes: dict[str, Value] = {
        "evalfleet.machine": machine.id,
        "evalfleet.place": machine.offer.place,
        "evalfleet.size": machine.offer.size,
        "evalfleet.spot": machine.offer.spot,
        "evalfleet.attempts": machine.attempts,
        "evalfleet.cost_usd": round(machine_usd(machine, now), 6),
    }
    if machine.offer.region:
        attributes["cloud.region"] = machine.offer.region
    error = machine.detail or str(machine.cause) if machine.cause is not None else None
    return Span(
        own,
        root,
        f"machine {machine.name}",
        machine.requested_at,
        max(end, machine.requested_at),
        attributes,
        error,
    )


def _set_up(machine: MachineState, parent: int, seed: tuple[object, ...]) -> Iterator[Span]:
    """Its steps to readiness ran one after another, and ended when it was ready."""
    if machine.ready_at is None:
        return
    at = machine.ready_at
    for step, seconds in reversed(machine.timings.items()):
        start = at - int(seconds * SECOND)
        yield Span(_span_id(*seed, machine.id, step), parent, f"set-up {step}", start, at)
        at = start


def _attempt(state: RunState, attempt: AttemptState, own: int, parent: int, now: Micros) -> Span:
    task = state.tasks[attempt.task].task
    attributes: dict[str, Value] = {
        "evalfleet.task": task.origin or task.id,
        "evalfleet.attempt": attempt.id,
        "evalfleet.domain": task.domain,
    }
    if task.model or state.plan.model:
        attributes["gen_ai.request.model"] = task.model or state.plan.model
    if attempt.metered is not None:
        attributes["evalfleet.model_usd"] = round(attempt.metered.usd, 6)
        attributes |= _usage(attempt.metered.tokens)
    outcome, error = attempt.outcome, None
    if isinstance(outcome, Scored):
        attributes |= {"evalfleet.score": outcome.score, "evalfleet.passed": outcome.success}
    if isinstance(outcome, Broken):
        attributes["error.type"] = str(outcome.cause)
        error = outcome.detail or str(outcome.cause)
    end = now if attempt.ended_at is None else attempt.ended_at
    return Span(own, parent, f"attempt {attempt.id}", attempt.started_at, end, attributes, error)


def _usage(tokens: Mapping[str, int]) -> dict[str, Value]:
    """Tokens by the names that OpenTelemetry gives them."""
    names = {
        "in": "gen_ai.usage.input_tokens",
        "out": "gen_ai.usage.output_tokens",
        "cached": "gen_ai.usage.cache_read.input_tokens",
        "cache_write": "gen_ai.usage.cache_creation.input_tokens",
        "reasoning": "evalfleet.usage.reasoning_tokens",
    }
    return {names[kind]: count for kind, count in tokens.items() if kind in names}


def _steps(
    attempt: AttemptState, steps: Sequence[Step], parent: int, seed: tuple[object, ...]
) -> Iterator[Span]:
    """A step lasts from the one before it to its own time: the agent asked its model, then acted."""
    before = attempt.started_at
    for step in steps:
        at = _micros(step.at)
        if at is None or at < before:
            continue
        attributes: dict[str, Value] = {"evalfleet.step": step.n, "evalfleet.action": step.action[:300]}
        if step.tokens is not None:
            attributes["evalfleet.tokens"] = step.tokens
        error = step.error[:300] or "it did not succeed" if step.error or step.ok is False else None
        own = _span_id(*seed, attempt.id, "step", step.n)
        yield Span(own, parent, f"step {step.n}", before, at, attributes, error)
        before = at


def _calls(
    attempt: AttemptState,
    calls: Sequence[CallRow],
    parent: int,
    steps: Sequence[Span],
    seed: tuple[object, ...],
) -> Iterator[Span]:
    """Yield a span for each model call, below the step in which it began."""
    ends = [step.end for step in steps]
    for call in calls:
        model, start, ms = call.get("model") or "unknown", _micros(call["at"]), call.get("ms", -1.0)
        if start is None or not 0 <= ms < 1e9:
            continue
        attributes: dict[str, Value] = {"gen_ai.operation.name": "chat", "gen_ai.request.model": model}
        vendor = next((name for start_, name in VENDORS.items() if model.startswith(start_)), None)
        if vendor is not None:
            attributes["gen_ai.provider.name"] = vendor
        if "status" in call:
            attributes["http.response.status_code"] = call["status"]
        if "usd" in call:
            attributes["evalfleet.model_usd"] = call["usd"]
        attributes |= _usage({kind: n for kind, n in call.items() if isinstance(n, int)})
        error = call.get("error", "")[:300] or None
        own, within = _span_id(*seed, attempt.id, "call", call["n"]), bisect_left(ends, start)
        above = steps[within].id if within < len(steps) and steps[within].start <= start else parent
        yield Span(own, above, f"chat {model}", start, start + int(ms * 1000), attributes, error)


def _micros(at: float | None) -> Micros | None:
    """Convert a Unix time in seconds, as the meter writes it."""
    return int(at * SECOND) if at is not None and 0 < at < 1e11 else None
