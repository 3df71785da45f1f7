"""Alerts: what somebody should look at, by rules over the state, machines' loads and attempts' steps.

`holding` is a pure function; `Raised` remembers what was told, so that each thing is told once. Nothing that
an agent has written gets into an alert: who reads it may be a model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from statistics import median
from typing import NamedTuple

from msgspec import Struct

from evalfleet.alert_rules import AFTER_THE_END, AUTOMATIC, DEFAULTS, LIFELESS, UNHEALTHY
from evalfleet.channels.samples import ENGINE_DOWN, Sample
from evalfleet.model import (
    SECOND,
    Alerting,
    AlertRule,
    AttemptId,
    Broken,
    MachineId,
    Micros,
    Scored,
    after,
    seconds_between,
)
from evalfleet.state import RunState

from .format import clean, duration, iso, percent, usd
from .progress import Progress
from .stats import at_risk, machines_usd, retries

FEW_ATTEMPTS = 10
FEW_SCORED = 5
GAP_S = 30.0
"""Samples further apart than this do not tell what was between them."""


class Situation(NamedTuple):
    """All that rules look at. Times of samples are the wall clock's, as `wall` is."""

    state: RunState
    now: Micros
    wall: Micros
    progress: Mapping[AttemptId, Progress]
    series: Mapping[MachineId, Sequence[Sample]]


class Alert(Struct, frozen=True, omit_defaults=True):
    """One thing to look at. `subject` is what it is about: a rule tells of each subject once."""

    rule: str
    subject: str
    severity: str
    text: str
    at: Micros = 0
    machine: MachineId | None = None
    attempt: AttemptId | None = None
    act: str = ""
    """What was done about it: pause, drain, replace or end."""


Found = Iterator[tuple[str, str, MachineId | None, AttemptId | None]]
"""Subject, text, and the machine and attempt that it is about, if it is about one."""
Check = Callable[[Situation, AlertRule], Found]


def _running(state: RunState) -> Iterator[AttemptId]:
    for machine in state.ready:
        yield from state.machines[machine].open


def _stuck(situation: Situation, rule: AlertRule) -> Found:
    for attempt in _running(situation.state):
        known = situation.progress.get(attempt)
        if known is not None and known.idle_s is not None and known.idle_s >= rule.after_s:
            signs = "no step, no output, no model call"
            text = f"{clean(attempt)} has made no progress for {duration(known.idle_s)}: {signs}"
            yield attempt, text, situation.state.attempts[attempt].machine, attempt


def _lifeless(situation: Situation, rule: AlertRule) -> Found:
    """Attempts on a service's node of which nothing comes, while the node itself does nothing.

    One that computes is heard by its processor, and of one whose benchmark says how long it may be silent
    (`stall_s`), the machine itself thinks.
    """
    state = situation.state
    since = after(situation.wall, -rule.after_s)
    for machine in state.ready:
        known = state.machines[machine]
        if not known.offer.life.queues or not is_quiet(state, machine, situation.progress, rule.after_s):
            continue
        samples = [sample for sample in situation.series.get(machine, ()) if sample.at <= situation.wall]
        if not samples or seconds_between(samples[-1].at, situation.wall) > 2 * GAP_S:
            continue  # a machine that tells nothing at all is silent: it is given up for that
        begun = _since(samples, lambda sample: 1.0 - sample.cpu, 1.0 - rule.share)
        if begun is not None and begun <= since:
            attempt = next(iter(known.open))
            quiet = f"{clean(attempt)} has written nothing, made no step and asked no model"
            text = f"{quiet} for {duration(rule.after_s)}, while {clean(known.name)} did nothing"
            yield attempt, text, machine, attempt


def is_quiet(
    state: RunState, machine: MachineId, progress: Mapping[AttemptId, Progress], after_s: float
) -> bool:
    """Does something run there that may be expected to write, and has nothing come of any of it for long?"""
    running = state.machines[machine].open
    idle = [progress[attempt].idle_s or 0.0 for attempt in running if attempt in progress]
    if not running or len(idle) < len(running) or min(idle) < after_s:
        return False
    return not any(state.tasks[state.attempts[attempt].task].task.stall_s for attempt in running)


def _startup(situation: Situation, rule: AlertRule) -> Found:
    for machine in situation.state.coming:
        known = situation.state.machines[machine]
        waited = seconds_between(known.billed_at, situation.now)
        if known.phase != "queued" and not known.unstarted and waited >= rule.after_s:
            step = f" (at {clean(known.setting_up[0])})" if known.setting_up[0] else ""
            yield machine, f"{clean(known.name)} is not ready after {duration(waited)}{step}", machine, None


def _pull(situation: Situation, rule: AlertRule) -> Found:
    for machine in situation.state.coming:
        known = situation.state.machines[machine]
        step = known.setting_up[0]
        waited = seconds_between(known.step_since, situation.now)
        if any(word in step for word in ("image", "pull")) and known.step_since and waited >= rule.after_s:
            text = f"{clean(known.name)} has been fetching its image for {duration(waited)}"
            yield machine, text, machine, None


def _unhealthy(situation: Situation, rule: AlertRule) -> Found:
    since = after(situation.wall, -rule.after_s)
    together = Counter(_computer(situation.state, machine) for machine in situation.state.ready)
    told: set[tuple[str, str, str]] = set()
    for machine in situation.state.ready:
        samples = [sample for sample in situation.series.get(machine, ()) if sample.at <= situation.wall]
        if not samples or seconds_between(samples[-1].at, situation.wall) > 2 * GAP_S:
            continue  # what it told long ago is no news
        name = clean(situation.state.machines[machine].name)
        computer = _computer(situation.state, machine)
        if together[computer] > 1:
            name = f"{clean(computer[1])}, which has {together[computer]} machines of the run,"
        for what, used in _USED.items():
            begun = _since(samples, used, rule.share)
            if begun is not None and begun <= since and (*computer, what) not in told:
                told.add((*computer, what))
                text = f"{what} of {name} has been over {percent(rule.share)} for {duration(rule.after_s)}"
                yield f"{machine} {what}", text, machine, None
        begun = _since(samples, lambda sample: float(sample.containers == ENGINE_DOWN), 1.0)
        worked = any(sample.containers not in (None, ENGINE_DOWN) for sample in samples)
        if begun is not None and begun <= since and worked and (*computer, "engine") not in told:
            told.add((*computer, "engine"))
            text = f"the container engine of {name} has not answered for {duration(rule.after_s)}"
            yield f"{machine} engine", text, machine, None


def _computer(state: RunState, machine: MachineId) -> tuple[str, str]:
    """The place and the computer of a machine. A service's node is replaced for each machine by itself."""
    known = state.machines[machine]
    shared = known.node and not known.offer.life.queues
    return (known.offer.place, known.node if shared else machine)


_USED: dict[str, Callable[[Sample], float]] = {
    "CPU": lambda sample: sample.cpu,
    "memory": lambda sample: sample.memory,
    "disk": lambda sample: sample.disk,
}


def _since(samples: Sequence[Sample], used: Callable[[Sample], float], share: float) -> Micros | None:
    """Since when so much of it was used in all of the newest samples, without a gap."""
    begun: Micros | None = None
    for sample in reversed(samples):
        if used(sample) < share or (begun is not None and begun - sample.at > GAP_S * SECOND):
            break
        begun = sample.at
    return begun


def _slow(situation: Situation, rule: AlertRule) -> Found:
    state = situation.state
    newest = islice(reversed(state.attempts.values()), 500 + state.running)
    seconds = [attempt.seconds for attempt in newest if isinstance(attempt.outcome, Scored)]
    if len(seconds) < FEW_SCORED:
        return
    usual = median(seconds)
    for attempt in _running(state):
        known = state.attempts[attempt]
        took = seconds_between(known.started_at, situation.now)
        if took >= max(rule.factor * usual, 1.0):
            text = f"{clean(attempt)} has run for {duration(took)}; half of all tasks took {duration(usual)}"
            yield attempt, text, known.machine, attempt


def _retries(situation: Situation, rule: AlertRule) -> Found:
    state = situation.state
    many = len(state.attempts)
    if many >= FEW_ATTEMPTS and retries(state) >= rule.share * many:
        causes = ", ".join(f"{cause} {n}" for cause, n in state.causes.most_common(3))
        yield "run", f"{percent(retries(state) / many)} of {many} attempts were retries: {causes}", None, None


def _budget(situation: Situation, rule: AlertRule) -> Found:
    state, budget = situation.state, situation.state.limits.budget_usd
    if not budget:
        return
    spent = machines_usd(state, situation.now) + state.spend.models.spent + state.spend.models.lost
    passed = max((mark for mark in (50, 80, 100) if spent >= budget * mark / 100), default=None)
    if passed is not None:
        yield f"{passed}%", f"{usd(spent)} of the budget of {usd(budget)} is spent ({passed}%)", None, None


def _promise(situation: Situation, rule: AlertRule) -> Found:
    if situation.state.proofs < rule.count:
        return  # a few tasks tell too little of the others
    for told in at_risk(situation.state, situation.now):
        # what is needed changes all the time; which promise it is does not
        yield told.partition(":")[0].replace(" may ", " will "), told, None, None


def _left(situation: Situation, rule: AlertRule) -> Found:
    for machine in situation.state.undeleted:
        known = situation.state.machines[machine]
        leaving_s = seconds_between(known.condemned_at or situation.now, situation.now)
        if not (known.offer.cost.usd_per_hour or known.offer.cost.idle_usd_per_hour):
            continue  # a host that is lent for nothing costs nothing while it is cleaned up
        if known.delete_refused or situation.state.ended_at is not None:
            yield machine, f"{clean(known.name)} cannot be deleted, and costs on until it is", machine, None
        elif leaving_s >= rule.after_s:
            text = f"{clean(known.name)} is not deleted after {duration(leaving_s)}, and costs on until it is"
            yield machine, text, machine, None


def _ended(situation: Situation, rule: AlertRule) -> Found:
    state = situation.state
    if state.ended_at is not None:
        parts = [f"{state.scored:,} of {state.total:,} scored"]
        parts += [f"{state.broken:,} broken"] if state.broken else []
        yield (
            f"at {iso(state.ended_at)}",
            f"the run has ended ({state.status}): {', '.join(parts)}",
            None,
            None,
        )


CHECKS: dict[str, Check] = {
    "job_stuck_no_progress": _stuck,
    LIFELESS: _lifeless,
    "container_startup_timeout": _startup,
    UNHEALTHY: _unhealthy,
    "slow_task_execution": _slow,
    "high_retry_rate": _retries,
    "docker_pull_slow": _pull,
    "budget": _budget,
    "promise_at_risk": _promise,
    "machines_left": _left,
    "run_ended": _ended,
}


def holding(situation: Situation, alerting: Alerting) -> list[Alert]:
    """What the rules have to say now, whether it was said before or not."""
    over = situation.state.ended_at is not None
    found: list[Alert] = []
    for name, check in CHECKS.items():
        rule = alerting.rules.get(name, DEFAULTS[name])
        if rule.on and (not over or name in AFTER_THE_END):
            for subject, text, machine, attempt in check(situation, rule):
                found.append(Alert(name, subject, rule.severity, text, situation.now, machine, attempt))
    return found


def act_of(situation: Situation, rule: AlertRule, alert: Alert) -> str:
    """What a rule does about what it has found; empty: it only tells it."""
    if rule.act != "auto":
        return rule.act
    return "replace" if alert.machine is not None and _is_used_up(situation, rule, alert) else ""


def _is_used_up(situation: Situation, rule: AlertRule, alert: Alert) -> bool:
    """Is it a service's node that will do no good any more?

    A busy processor alone is what tasks are for: then nothing must have come of it, either. A task that has
    cost a node already is left alone: it would use up the next one, too.
    """
    state = situation.state
    assert alert.machine is not None
    machine = state.machines[alert.machine]
    if not machine.offer.life.queues or any(_was_replaced(state, attempt) for attempt in machine.open):
        return False
    if alert.rule == LIFELESS or not alert.subject.endswith(" CPU"):
        return True
    idle = [
        situation.progress[attempt].idle_s or 0.0 for attempt in machine.open if attempt in situation.progress
    ]
    return len(idle) == len(machine.open) and all(seconds >= rule.after_s for seconds in idle)


def _was_replaced(state: RunState, attempt: AttemptId) -> bool:
    """Has an earlier attempt at its task cost a machine by one of these rules?"""
    tries = state.tasks[state.attempts[attempt].task].attempts
    earlier = [outcome for tried in tries if isinstance(outcome := state.attempts[tried].outcome, Broken)]
    return any(f"alert {rule}" in outcome.detail for outcome in earlier for rule in AUTOMATIC)


class Raised:
    """What was told, so that it is told once: again only if it was over, and the cool-down is, too."""

    def __init__(self, earlier: Sequence[Alert] = ()) -> None:
        self._at = {(alert.rule, alert.subject): alert.at for alert in earlier}
        self._still = set(self._at)

    def new(self, alerts: Sequence[Alert], now: Micros, cool_down_s: float) -> list[Alert]:
        fresh: list[Alert] = []
        holds: set[tuple[str, str]] = set()
        for alert in alerts:
            key = (alert.rule, alert.subject)
            last = self._at.get(key)
            if key not in self._still and (last is None or now >= after(last, cool_down_s)):
                self._at[key] = now
                fresh.append(alert)
                holds.add(key)
            elif key in self._still:
                holds.add(key)
        self._still = holds  # what came again too soon is told when the cool-down is over
        return fresh
