"""Rates, intervals and estimates. Pure; nothing here costs more than the number of machines, per call,
unless it is given a list."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from evalfleet.model import (
    Answered,
    Cause,
    MachineId,
    Micros,
    ScheduleName,
    Scored,
    TaskId,
    seconds_between,
)
from evalfleet.schedules import is_static
from evalfleet.state import AttemptState, MachineState, RunState, TaskState

from .format import usd, whole_duration

Z95 = 1.959963984540054


def wilson(succeeded: float, scored: float) -> tuple[float, float] | None:
    """The 95% interval of a share (Wilson's score interval); None of nothing."""
    if scored <= 0:
        return None
    share, z2 = succeeded / scored, Z95**2
    middle = share + z2 / (2 * scored)
    half = Z95 * math.sqrt(share * (1 - share) / scored + z2 / (4 * scored**2))
    scale = 1 + z2 / scored
    # Exactly 0 and 1 at the ends, where the difference of two equal numbers would leave dust.
    low = 0.0 if succeeded == 0 else max(0.0, (middle - half) / scale)
    high = 1.0 if succeeded == scored else min(1.0, (middle + half) / scale)
    return low, high


def clustered(clusters: Iterable[tuple[int, int]]) -> tuple[float, float] | None:
    """The 95% interval of a share of results that come in clusters, such as the repeats of one task.

    Each cluster is how many of how many succeeded. Repeats of a task are alike: ten of one tell less than ten
    tasks. So it is Wilson's interval for as many independent results as would scatter the share alike (the
    design effect, from the scatter between clusters): never fewer than clusters, never more than results.
    """
    known = [(succeeded, judged) for succeeded, judged in clusters if judged]
    total, succeeded = sum(judged for _, judged in known), sum(good for good, _ in known)
    if not total or len(known) == total:
        return wilson(succeeded, total)
    share, count = succeeded / total, len(known)
    if count == 1:  # one task alone: its repeats tell about it, and nothing else is claimed
        return wilson(succeeded, total)
    effective = float(count)  # where all succeeded, or none, their scatter tells nothing
    if 0 < succeeded < total:
        scatter = sum((good - judged * share) ** 2 for good, judged in known) * count / (count - 1)
        if scatter:
            effective = min(total, max(count, total * total * share * (1 - share) / scatter))
        else:
            effective = float(total)
    return wilson(share * effective, effective)


def pass_at(k: int, succeeded: int, tries: int) -> float:
    """How likely one of `k` tries succeeds, estimated from `tries` >= k of which so many did (unbiased)."""
    return 1.0 - math.comb(tries - succeeded, k) / math.comb(tries, k)


def mean_interval(values: Sequence[float], results: int) -> tuple[float, float] | None:
    """The 95% interval of a mean of shares, one of each task, of so many results in all; None of fewer than
    two shares. Where all tasks have as many results, that of pass@1 is the one of the pass rate."""
    count = len(values)
    if count < 2:
        return None
    mean = sum(values) / count
    scatter = sum((value - mean) ** 2 for value in values) / (count - 1)
    effective = float(count)  # see `clustered`
    if 0 < mean < 1:
        effective = min(results, max(count, count * mean * (1 - mean) / scatter)) if scatter else results
    return wilson(mean * effective, effective)


def rate(succeeded: int, scored: int) -> float | None:
    """The pass rate of scored tasks only: what is broken says nothing about the agent."""
    return succeeded / scored if scored else None


@dataclass(slots=True)
class Tally:
    """What some tasks came to. `strict`: broken ones count as failed."""

    strict: bool = False
    total: int = 0
    scored: int = 0
    broken: int = 0
    succeeded: int = 0
    score_sum: float = 0.0
    clusters: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """The benchmark's own id of a task -> how many of how many repeats of it succeeded."""

    def add(self, known: TaskState) -> None:
        outcome, is_broken = known.outcome, known.status == "broken"
        self.total += 1
        self.broken += is_broken
        scored = outcome if isinstance(outcome, Scored) else None
        if known.task.origin:
            good, of = self.clusters.get(known.task.origin, (0, 0))
            counts = scored is not None or (self.strict and is_broken)
            solved = scored is not None and scored.success
            self.clusters[known.task.origin] = (good + solved, of + counts)
        if scored is not None:
            self.scored += 1
            self.succeeded += scored.success
            self.score_sum += scored.score

    @property
    def judged(self) -> int:
        """How many of them every rate is of."""
        return self.scored + self.broken if self.strict else self.scored

    @property
    def success_rate(self) -> float | None:
        return rate(self.succeeded, self.judged)

    @property
    def ci(self) -> tuple[float, float] | None:
        if not self.clusters:
            return wilson(self.succeeded, self.judged)
        return clustered(self.clusters.values())

    @property
    def mean_score(self) -> float | None:
        return self.score_sum / self.judged if self.judged else None


def judged(state: RunState) -> int:
    """How many tasks the run's success rate is of, by now."""
    return state.scored + state.broken if state.plan.verdict.strict else state.scored


def tally(tasks: Iterable[TaskState], strict: bool = False) -> Tally:
    whole = Tally(strict)
    for known in tasks:
        whole.add(known)
    return whole


def together(parts: Iterable[Tally], strict: bool = False) -> Tally:
    """What the tasks of all these came to."""
    whole = Tally(strict)
    for part in parts:
        whole.total += part.total
        whole.scored += part.scored
        whole.broken += part.broken
        whole.succeeded += part.succeeded
        whole.score_sum += part.score_sum
        for origin, (good, of) in part.clusters.items():
            before = whole.clusters.get(origin, (0, 0))
            whole.clusters[origin] = (before[0] + good, before[1] + of)
    return whole


def by_domain(tasks: Iterable[TaskState], strict: bool = False) -> dict[str, Tally]:
    """Domains in alphabetical order."""
    found: dict[str, Tally] = {}
    for known in tasks:
        domain = known.task.domain
        if domain not in found:
            found[domain] = Tally(strict)
        found[domain].add(known)
    return dict(sorted(found.items()))


def percentile(values: Sequence[float], share: float) -> float | None:
    """Linear between neighbours, as most libraries do it; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


# -- money and time of machines --------------------------------------------------------------------


def machine_end(machine: MachineState, now: Micros) -> Micros:
    """When it ceased to run, or `now`; never past its expiry, at which the place ends it by itself."""
    end = now if machine.gone_at is None else machine.gone_at
    off = machine.ends_at if machine.stopped_at is None else machine.stopped_at
    return machine.billed_at if machine.unstarted else max(machine.billed_at, min(end, off))


def machine_usd(machine: MachineState, now: Micros) -> float:
    return machine.closed_usd + machine.open_usd(now)


def machines_usd(state: RunState, now: Micros) -> float:
    """What all machines of the run have cost until now."""
    return state.spend.machines.spent + sum(
        state.machines[machine].open_usd(now) for machine in state.undeleted
    )


def hourly_usd(state: RunState, now: Micros) -> float:
    """Return what the machines that exist cost an hour."""
    return sum((machine_hourly_usd(state.machines[machine], now) for machine in state.undeleted), 0.0)


HOURS_A_MONTH = 730.0


def stopped_monthly_usd(state: RunState) -> float:
    """What the machines that exist cost in a month in which all of them are stopped."""
    idle = (state.machines[machine].offer.cost.idle_usd_per_hour for machine in state.undeleted)
    return HOURS_A_MONTH * sum(idle, 0.0)


def machine_hourly_usd(machine: MachineState, now: Micros) -> float:
    """One that is stopped, or has expired, costs what its disk and its address cost; in a queue, nothing."""
    if machine.unstarted:
        return 0.0
    off = machine.stopped_at is not None or machine.ends_at <= now
    return machine.offer.cost.idle_usd_per_hour if off else machine.offer.cost.usd_per_hour


def attempt_usd(state: RunState, attempt: AttemptState, now: Micros) -> float:
    """Its machine's price while it ran, or its slot's share. Boot, set-up and idle time are nobody's."""
    end = now if attempt.ended_at is None else attempt.ended_at
    offer = state.machines[attempt.machine].offer
    return seconds_between(attempt.started_at, end) * offer.cost.usd_per_hour / 3600 / state.plan.slots


def prices_as_of(state: RunState) -> str | None:
    """The dates of the price tables that the machines were bought by."""
    dates = {machine.offer.cost.priced for machine in state.machines.values()} - {""}
    return ", ".join(sorted(dates)) or None


# -- pace ------------------------------------------------------------------------------------------


def mean_seconds(state: RunState) -> float | None:
    """The mean duration of attempts that were scored or answered."""
    return state.proof_seconds / state.proofs if state.proofs else None


def retries(state: RunState) -> int:
    """Attempts beyond each task's first."""
    begun = state.scored + state.answered + state.broken + state.running + len(state.retries)
    if state.counts["held"]:  # rare: tasks tried before, left alone by `resume --only broken`
        begun = sum(1 for known in state.tasks.values() if known.attempts)
    return len(state.attempts) - begun


def per_minute(state: RunState, now: Micros) -> float | None:
    """Scored or answered tasks a minute, lately. None before the first.

    Looks at the newest attempts only, so that it stays cheap, and true after a break or a resume.
    """
    newest = list(islice(reversed(state.attempts.values()), 4 * state.running + 200))
    recent = [attempt for attempt in newest if attempt.started_at >= state.started_at]
    if not recent:
        return None
    since, until = recent[-1].started_at, now if state.ended_at is None else state.ended_at
    if len(recent) == len(newest) < len(state.attempts):
        # Older attempts that end in the window's first part are not seen: count in its last part only.
        since += 3 * (until - since) // 4
    worked = (a.ended_at for a in recent if isinstance(a.outcome, Scored | Answered))
    count = sum(1 for end in worked if end is not None and end >= since)
    return 60 * count / seconds_between(since, until) if count and until > since else None


def eta_s(state: RunState, now: Micros) -> float | None:
    """Seconds until the last task is expected to end. None: nothing is known yet, or nobody works."""
    left = state.waiting + state.running
    if not left or state.ended_at is not None:
        return 0.0
    mean = mean_seconds(state)
    if mean is None or not state.live:
        return None
    under_way = [max(0.0, mean - spent) for spent in _open_seconds(state, now)]
    places = min(state.live * state.plan.slots, left)
    waiting = 0 if state.stop is not None else state.waiting
    work = (waiting * mean + sum(under_way)) * _lost_work(state)
    return max(work / places, max(under_way, default=0.0), mean if waiting else 0.0)


RANGE_Z = 1.28
"""Four of five runs end within the range."""


def eta_range_s(state: RunState, now: Micros) -> tuple[float, float] | None:
    """Between which seconds the last task is likely to end, by how much durations have differed so far.

    Looks at the newest attempts only, so that it stays cheap. None: too little is known yet.
    """
    middle, left = eta_s(state, now), state.waiting + state.running
    newest = islice(reversed(state.attempts.values()), 4 * state.running + 200)
    seconds = [attempt.seconds for attempt in newest if isinstance(attempt.outcome, Scored | Answered)]
    if not middle or len(seconds) < 3:
        return None
    mean = sum(seconds) / len(seconds)
    spread = math.sqrt(sum((each - mean) ** 2 for each in seconds) / (len(seconds) - 1))
    places = max(1, min(state.live * state.plan.slots, left))
    # of the tasks that are left, of the mean that is not known better, and of the last task that all wait for
    half = RANGE_Z * spread * (math.sqrt(left) / places + left / places / math.sqrt(len(seconds)))
    return max(0.0, middle - half), middle + half + RANGE_Z * spread


def _lost_work(state: RunState) -> float:
    """How many attempts a score takes here: what was broken so far will go on to be."""
    lost = state.causes.total() - state.causes[Cause.CANCELLED]
    return min(3.0, 1 + lost / state.proofs)


def _open_seconds(state: RunState, now: Micros) -> Iterable[float]:
    for machine in state.ready:
        for attempt in state.machines[machine].open:
            yield seconds_between(state.attempts[attempt].started_at, now)


def estimated_usd(state: RunState, now: Micros) -> float | None:
    """What the machines will have cost at the end, if it goes on like this."""
    spent = machines_usd(state, now)
    if state.ended_at is not None:
        return spent
    left_s = eta_s(state, now)
    return None if left_s is None else spent + hourly_usd(state, now) * left_s / 3600


def at_risk(state: RunState, now: Micros) -> list[str]:
    """Which limits the run will meet before its last task, as it goes now: nothing while that is not likely.

    It is unlikely to hold if even the middle of what is expected is beyond the limit, and will not hold if
    the early end of the range is.
    """
    middle = eta_s(state, now)
    if not middle or state.stop is not None or state.paused is not None:
        return []
    found: list[str] = []
    low_s, _ = eta_range_s(state, now) or (middle, middle)
    gone_s = seconds_between(state.started_at, now)
    ends = {"in time": state.limits.max_duration_s, "by its deadline": state.limits.deadline_s}
    for what, limit_s in ends.items():
        left_s = math.inf if limit_s is None else max(0.0, limit_s - gone_s)
        if middle > left_s:
            late = f"it needs about {whole_duration(middle)} more, and has {whole_duration(left_s)}"
            found.append(f"the run {'will' if low_s > left_s else 'may'} not be done {what}: {late}")
    if (budget := state.limits.budget_usd) is not None and state.proofs:
        models = state.spend.models.spent * state.total / state.proofs
        soonest = machines_usd(state, now) + hourly_usd(state, now) * low_s / 3600 + models
        expected = (estimated_usd(state, now) or 0.0) + models
        if expected > budget:
            told = f"about {usd(expected)} are needed, and the budget is {usd(budget)}"
            found.append(f"the budget {'will' if soonest > budget else 'may'} not do: {told}")
    return found


# -- who does what ---------------------------------------------------------------------------------


def current_task(state: RunState, machine: MachineId) -> TaskId | None:
    attempt = next(iter(state.machines[machine].open), None)
    return None if attempt is None else state.attempts[attempt].task


def lane_share(schedule: ScheduleName, lane: int, total: int, lanes: int) -> int:
    """Return how many tasks a static schedule gives to a lane, without a loop."""
    if not 0 <= lane < lanes or not is_static(schedule):
        return 0
    return total // lanes + (lane < total % lanes)  # in turn or in slices: the first ones have one more
