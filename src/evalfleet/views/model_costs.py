"""What metered model calls cost: by model, task, machine, domain, place and cause, of all attempts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Required, TypedDict

import msgspec

from evalfleet.channels.artefacts import plain_opener
from evalfleet.model import Broken, Metered, ModelUse, TaskId, decodable
from evalfleet.names import artefacts_folder
from evalfleet.state import AttemptState, RunState

if TYPE_CHECKING:
    from .documents import ModelCost, ModelCosts

CALLS = "calls.jsonl"
MOST_CALLS = 10_000
"""Maximum number of calls of one attempt in a trace, or on a page."""
MOST_BYTES = 8 << 20
CAUSELESS = {"Scored": "scored", "Answered": "answered", "NoneType": "running"}


def model_costs(state: RunState) -> ModelCosts:
    """All zero where models are not metered, which it says."""
    metering = state.plan.metering
    known = [attempt for attempt in state.attempts.values() if attempt.metered is not None]
    whole = _whole(known)
    machines, tasks = state.machines, state.tasks
    deciding = {task.decided_by for task in tasks.values()}
    return {
        "metered": metering is not None,
        "priced": None if metering is None else metering.priced or None,
        **model_cost(whole),
        "throttled_calls": whole.throttled,
        "lost_usd": round(state.spend.models.lost, 6),
        "retries_usd": round(sum(_usd(each) for each in known if each.id not in deciding), 6),
        "by_model": {name: model_cost(use) for name, use in whole.models.items()},
        "by_cause": _by(known, _cause),
        "by_domain": _by(known, lambda each: tasks[each.task].task.domain),
        "by_machine": _by(known, lambda each: machines[each.machine].name),
        "by_place": _by(known, lambda each: machines[each.machine].offer.place),
        "unseen": [each.id for each in known if _went_round(each)],
        "untold": [each.id for each in state.attempts.values() if metering and _is_untold(each)],
    }


def _whole(attempts: Iterable[AttemptState]) -> Metered:
    whole = Metered()
    for attempt in attempts:
        whole = whole.plus(attempt.metered)
    return whole


def model_cost(use: Metered | ModelUse) -> ModelCost:
    return {
        "usd": round(use.usd, 6),
        "calls": use.calls,
        "unknown_calls": use.unknown,
        "unknown_usd": round(use.unknown_usd, 6),
        "tokens": dict(use.tokens),
    }


def _usd(attempt: AttemptState) -> float:
    return 0.0 if attempt.metered is None else attempt.metered.usd


def _by(attempts: Iterable[AttemptState], key: Callable[[AttemptState], str]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for attempt in attempts:
        sums[key(attempt)] = sums.get(key(attempt), 0.0) + _usd(attempt)
    return {name: round(usd, 6) for name, usd in sorted(sums.items())}


def task_model_usd(attempts: Iterable[AttemptState]) -> float | None:
    """What the metered calls of these attempts cost; None if none was metered."""
    metered = [each.metered.usd for each in attempts if each.metered is not None]
    return round(sum(metered), 6) if metered else None


def task_tokens(state: RunState, task: TaskId) -> dict[str, dict[str, int]]:
    """Model -> the tokens that its metered calls used, in all attempts at the task."""
    whole = _whole(state.attempts[attempt] for attempt in state.tasks[task].attempts)
    names = {"input": "in", "cached": "cached", "output": "out"}
    return {
        model: {name: use.tokens.get(kind, 0) for name, kind in names.items()}
        for model, use in whole.models.items()
    }


def _cause(attempt: AttemptState) -> str:
    """What became of the attempt: what did retries cost, and why?"""
    if attempt.superseded is not None:
        return "superseded"
    outcome = attempt.outcome
    return str(outcome.cause) if isinstance(outcome, Broken) else CAUSELESS[type(outcome).__name__]


def _is_untold(attempt: AttemptState) -> bool:
    """Is it over, and its machine gone, without a word of what its calls used? That is unknown, and not 0."""
    return attempt.metered is None and attempt.outcome is not None and attempt.collected is not None


def _went_round(attempt: AttemptState) -> bool:
    """Does it tell of model calls, and the meter saw none? Then it has called by another way."""
    if attempt.metered is None or attempt.metered.calls or attempt.outcome is None:
        return False
    measured = attempt.outcome.measured
    return bool(attempt.outcome.cost_usd or (measured is not None and measured.tokens))


CallRow = TypedDict(
    "CallRow",
    {
        "n": Required[int],
        "at": Required[float],
        "model": str,
        "status": int,
        "in": int,
        "cached": int,
        "cache_write": int,
        "out": int,
        "reasoning": int,
        "ms": float,
        "usd": float,
        "error": str,
    },
    total=False,
)
"""A model call in the meter's list. Unknown values are absent: a call under way has no status."""


def metered_calls(attempt: AttemptState, run_folder: Path) -> Sequence[CallRow]:
    """Return the calls that the meter listed, each once. An attempt without a meter has none.

    The meter's list replaces a file of that name. In an attempt without a meter, the agent wrote the file.
    The meter writes a line when a call begins and another when it ends.
    """
    path = run_folder / artefacts_folder(attempt.task, attempt.id) / CALLS
    lines: list[bytes] = []
    if attempt.metered is not None:
        with suppress(OSError), open(path, "rb", opener=plain_opener) as file:
            lines = file.read(MOST_BYTES).splitlines()
    merged: dict[int, dict[str, Any]] = {}
    for line in lines:
        with suppress(msgspec.MsgspecError, UnicodeDecodeError):
            call = msgspec.json.decode(line, type=dict[str, Any])
            merged.setdefault(msgspec.convert(call.get("n"), int), {}).update(call)
    calls: list[CallRow] = []
    for call in merged.values():
        with suppress(msgspec.ValidationError):
            calls.append(msgspec.convert(call, decodable(CallRow)))
    return calls[:MOST_CALLS]
