"""A run in figures, for the top of its page, and the line of it in the list of runs. The figures are those of
`show` and `ls`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from evalfleet.model import SECOND, Micros
from evalfleet.state import RunState
from evalfleet.views.alerts import Alert
from evalfleet.views.format import clean
from evalfleet.views.notable import WHOLE, by_place, left_places, refusals, steering
from evalfleet.views.results import (
    RunSummary,
    agent_of,
    attempt_model_usd,
    isolations,
    provenance,
    run_cost,
)
from evalfleet.views.stats import (
    by_domain,
    eta_range_s,
    eta_s,
    machine_end,
    machine_usd,
    per_minute,
    retries,
    together,
)
from evalfleet.views.summary import NOT_AS_ASKED, exit_code, shortfall

HOUR: Micros = 3600 * SECOND

RUN_COLUMNS = (
    *("name", "benchmark", "agent", "model", "place", "status", "live", "started", "ended", "total"),
    *("pass", "fail", "broken", "running", "waiting", "rate", "low", "high", "machine_usd", "model_usd"),
    *("budget_usd", "seconds", "left_s", "tags"),
)


def millis(at: Micros | None) -> int | None:
    return None if at is None else at // 1000


def head(state: RunState, now: Micros, live: bool, alerts: Iterable[Alert] = ()) -> dict[str, Any]:
    """All of it. Costs time proportional to the number of tasks."""
    at = max(now, state.last_at) if state.undeleted else state.last_at
    plan, strict = state.plan, state.plan.verdict.strict
    domains = by_domain(state.tasks.values(), strict)
    whole = together(domains.values(), strict)
    low, high = whole.ci or (None, None)
    cost = run_cost(state, at)
    waiting = state.total - state.scored - state.broken - state.answered - state.running
    return {
        "name": plan.run,
        "benchmark": plan.benchmark,
        "agent": agent_of(plan),
        "model": plan.model or None,
        "places": list(plan.places),
        "pool": plan.pool or None,
        "by_place": by_place(state, at) if len({*plan.places, *state.circuits}) > 1 else [],
        "status": "left" if state.ended_at is None and not live else state.status,
        "live": live,
        "started": millis(state.planned_at),
        "ended": millis(state.ended_at),
        "counts": {
            "total": state.total,
            "pass": whole.succeeded,
            "fail": whole.scored - whole.succeeded,
            "broken": state.broken,
            "answered": state.answered,
            "running": state.running,
            "waiting": waiting,
        },
        "rate": _rounded(whole.success_rate),
        "low": _rounded(low),
        "high": _rounded(high),
        "mean_score": _rounded(whole.mean_score),
        "strict": strict,
        "domains": [_domain(name, part) for name, part in domains.items()],
        "causes": [[str(cause), count] for cause, count in state.causes.most_common()],
        "money": {
            "machine_usd": cost["machines_usd"],
            "model_usd": cost["models_usd"],
            "model_usd_range": cost.get("models_usd_range"),
            "budget_usd": state.limits.budget_usd,
            "per_task_usd": cost["per_task_usd"],
            "prices_as_of": cost["prices_as_of"],
            "by_hour": by_hour(state, at),
        },
        **pace(state, now),
        "attempts": len(state.attempts),
        "retries": retries(state),
        "workers": state.limits.workers,
        "paused": state.paused is not None and state.ended_at is None,
        "stop": None if state.stop is None else {"reason": state.stop.reason, "detail": state.stop.detail},
        "alerts": [alert_row(alert) for alert in alerts],
        "notes": notes(state, live),
        "provenance": provenance(state),
        "isolation": isolations(state),
        "offers": offers(state),
        "steering": steering(state),
    }


def pace(state: RunState, now: Micros) -> dict[str, Any]:
    """How fast it goes, and between which seconds it is likely to end."""
    if state.ended_at is not None:
        return {"pace": None, "left_s": None}
    middle, likely = eta_s(state, now), eta_range_s(state, now)
    if likely is None and middle is not None:
        likely = (middle, middle)
    return {
        "pace": _rounded(per_minute(state, now)),
        "left_s": None if likely is None else [round(likely[0]), round(likely[1])],
    }


def _domain(name: str, part: Any) -> list[Any]:
    low, high = part.ci or (None, None)
    failed = part.scored - part.succeeded
    figures = (part.succeeded, failed, part.broken, part.total)
    return [name, *figures, _rounded(part.success_rate), _rounded(low), _rounded(high)]


def alert_row(alert: Alert) -> list[Any]:
    return [alert.severity, alert.text, alert.machine, alert.attempt, millis(alert.at), alert.rule]


def offers(state: RunState) -> list[list[Any]]:
    """[place, size, region, spot, dollars an hour, date of its price, machines], the most used first."""
    bought = Counter(
        (
            offer.place,
            offer.size,
            offer.region or None,
            offer.spot,
            offer.cost.usd_per_hour,
            offer.cost.priced,
        )
        for offer in (machine.offer for machine in state.machines.values())
    )
    return [[*offer, machines] for offer, machines in bought.most_common()]


def by_hour(state: RunState, now: Micros) -> list[list[Any]]:
    """[the hour's beginning, machine dollars, model dollars], of every hour from the first to the last.

    A machine's money is spread over its life; a model's is counted when its attempt ended.
    """
    machines: dict[int, float] = {}
    models: dict[int, float] = {}
    for machine in state.machines.values():
        cost, begun = machine_usd(machine, now), machine.billed_at
        life = machine_end(machine, now) - begun
        if not cost:
            continue
        if life <= 0:
            machines[begun // HOUR] = machines.get(begun // HOUR, 0.0) + cost
            continue
        for hour in range(begun // HOUR, (begun + life) // HOUR + 1):
            part = min(begun + life, (hour + 1) * HOUR) - max(begun, hour * HOUR)
            machines[hour] = machines.get(hour, 0.0) + cost * part / life
    for attempt in state.attempts.values():
        if attempt.ended_at is not None and (cost := attempt_model_usd(attempt) or 0.0):
            hour = attempt.ended_at // HOUR
            models[hour] = models.get(hour, 0.0) + cost
    hours = {*machines, *models}
    if not hours or max(hours) - min(hours) > 24 * 366:
        return []
    return [
        [hour * HOUR // 1000, round(machines.get(hour, 0.0), 4), round(models.get(hour, 0.0), 4)]
        for hour in range(min(hours), max(hours) + 1)
    ]


def notes(state: RunState, live: bool) -> list[str]:
    """What `show` says beside the figures."""
    found: list[str] = []
    run = state.plan.run
    if state.ended_at is None and not live:
        found.append(f"nobody works on it: `evalfleet resume {run}` takes it up")
    if state.grading_problem:
        found.append(f"its answers could not be graded: {clean(state.grading_problem)}")
    elif state.stop is not None and state.status != "done":
        found.append(f"stopped: {clean(state.stop.detail, WHOLE) or state.stop.reason}")
    if state.ended_at is not None and exit_code(state) == NOT_AS_ASKED:
        found.append(shortfall(state, state.plan.verdict))
    if state.paused is not None and state.ended_at is None:
        why = f": {clean(state.paused.why, WHOLE)}" if state.paused.why else ""
        found.append(f"paused by {clean(state.paused.by)}{why}")
    if state.ended_at is None:
        found += left_places(state)
    found += [
        f"{each['place']} {each['region'] or ''} {each['size']} refused machines: {clean(each['answer'])}"
        for each in refusals(state)
    ]
    found += [
        f"{clean(machine.name)} cannot be deleted"
        f"{', and costs on until it is' * (machine.offer.cost.usd_per_hour > 0)}: "
        f"{clean(machine.delete_refused)}"
        for machine in (state.machines[m] for m in state.undeleted)
        if machine.delete_refused
    ]
    if state.plan.rerun_of:
        found.append(f"rerun of {state.plan.rerun_of}")
    return found


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def run_row(summary: RunSummary, left_s: float | None = None) -> list[Any]:
    """A line of the list of runs: what `ls` shows, and the interval of its rate."""
    low, high = summary.success_rate_ci or (None, None)
    waiting = summary.unrun - summary.running - summary.answered
    return [
        *(summary.run, summary.benchmark, summary.agent, summary.model, ", ".join(summary.places)),
        *(summary.status, summary.status == "running", instant(summary.started_at)),
        *(instant(summary.ended_at), summary.total_tasks, summary.succeeded),
        *(summary.scored - summary.succeeded, summary.broken, summary.running, waiting),
        *(summary.success_rate, low, high, summary.machines_usd, summary.models_usd, summary.budget_usd),
        *(summary.duration_seconds, left_s, []),
    ]


def instant(text: str | None) -> int | None:
    return None if text is None else round(datetime.fromisoformat(text).timestamp() * 1000)
