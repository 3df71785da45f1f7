"""Runs as metrics in Prometheus' text format. Pure; costs time proportional to machines and attempts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from evalfleet.channels.samples import ENGINE_DOWN, Newest
from evalfleet.model import SECOND, MachineId, Micros
from evalfleet.state import RunState
from evalfleet.version import __version__

from .model_costs import model_costs
from .stats import eta_s, hourly_usd, judged, machines_usd, rate, retries

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BUCKETS_S = (1, 5, 15, 60, 180, 600, 1200, 1800, 3600, 7200, 14_400)
"""Tasks take seconds in one benchmark and hours in another."""

Loads = Mapping[MachineId, Newest]
"""The newest that each machine has told of itself."""
Labels = Mapping[str, str]


class Family(NamedTuple):
    """A metric: its name is public, and never changes its meaning."""

    name: str
    kind: str
    help: str


RUN_INFO = Family("evalfleet_run_info", "gauge", "A run; always 1. Its labels say what it is.")
FAMILIES = {
    "tasks": Family("evalfleet_run_tasks", "gauge", "Tasks of the run by what became of them."),
    "passed": Family("evalfleet_run_tasks_passed", "gauge", "Scored tasks that passed."),
    "rate": Family("evalfleet_run_pass_ratio", "gauge", "Passed tasks over scored ones."),
    "attempts": Family("evalfleet_run_attempts_total", "counter", "Attempts that were started."),
    "retries": Family("evalfleet_run_retries_total", "counter", "Attempts beyond the first of each task."),
    "broken": Family("evalfleet_run_broken_attempts_total", "counter", "Attempts that broke, by cause."),
    "machines": Family("evalfleet_run_machines", "gauge", "Machines that exist, by place and phase."),
    "made": Family("evalfleet_run_machines_total", "counter", "Machines that were asked for."),
    "usd": Family("evalfleet_run_cost_usd_total", "counter", "Money spent, on machines and on models."),
    "hourly": Family("evalfleet_run_cost_usd_per_hour", "gauge", "What the machines cost an hour now."),
    "budget": Family("evalfleet_run_budget_usd", "gauge", "The budget, if there is one."),
    "left": Family("evalfleet_run_eta_seconds", "gauge", "Seconds until the last task is expected to end."),
    "planned": Family("evalfleet_run_start_time_seconds", "gauge", "When it was planned, as a Unix time."),
    "ended": Family("evalfleet_run_end_time_seconds", "gauge", "When it ended, as a Unix time."),
    "last": Family("evalfleet_run_last_event_time_seconds", "gauge", "When something was last recorded."),
    "calls": Family("evalfleet_model_calls_total", "counter", "Metered model calls of attempts that ended."),
    "tokens": Family("evalfleet_model_tokens_total", "counter", "Metered tokens of attempts that ended."),
    "load": Family("evalfleet_machine_used_ratio", "gauge", "CPU, memory and disk in use on a machine."),
    "network": Family(
        "evalfleet_machine_network_bytes_per_second", "gauge", "What a machine receives and sends."
    ),
    "engine": Family(
        "evalfleet_machine_container_engine_up", "gauge", "Whether a machine's container engine answers."
    ),
    "containers": Family("evalfleet_machine_containers", "gauge", "Containers that run on a machine."),
}
DURATIONS = Family(
    "evalfleet_attempt_duration_seconds", "histogram", "How long attempts that were scored took."
)


class _Lines:
    """Samples by metric, in the order in which metrics are first told: all of one stand together."""

    def __init__(self) -> None:
        self._of: dict[Family, list[str]] = {}

    def add(self, family: Family, labels: Labels, value: float | None, suffix: str = "") -> None:
        if value is not None:
            pairs = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items())
            self._of.setdefault(family, []).append(f"{family.name}{suffix}{{{pairs}}} {value:.17g}")

    def text(self) -> Iterator[str]:
        for family, samples in self._of.items():
            yield f"# HELP {family.name} {family.help}"
            yield f"# TYPE {family.name} {family.kind}"
            yield from samples


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def exposition(runs: Iterable[tuple[RunState, Loads]], now: Micros) -> str:
    """The metrics of these runs, for a scrape or a push."""
    lines = _Lines()
    for state, loads in runs:
        _tell(lines, state, loads, now if state.ended_at is None else state.ended_at)
    return "".join(f"{line}\n" for line in lines.text())


def _tell(lines: _Lines, state: RunState, loads: Loads, now: Micros) -> None:
    run = {"run": state.plan.run}

    def tell(what: str, value: float | None, **labels: str) -> None:
        lines.add(FAMILIES[what], {**run, **labels}, value)

    plan = state.plan
    info = {"benchmark": plan.benchmark, "model": plan.model, "status": state.status, "version": __version__}
    lines.add(RUN_INFO, {**run, **info}, 1)
    unrun = state.total - state.scored - state.broken - state.answered - state.running - state.waiting
    for status in ("scored", "broken", "answered", "running", "waiting"):
        tell("tasks", state.counts[status], status=status)
    tell("tasks", unrun, status="unrun")
    tell("passed", state.succeeded)
    tell("rate", rate(state.succeeded, judged(state)))
    tell("attempts", len(state.attempts))
    tell("retries", retries(state))
    for cause, count in sorted(state.causes.items()):
        tell("broken", count, cause=str(cause))
    scored = (task.decided_by for task in state.tasks.values() if task.status == "scored")
    _tell_durations(lines, run, [state.attempts[each].seconds for each in scored if each is not None])
    existing = Counter((m.offer.place, m.phase) for m in state.machines.values() if m.phase != "deleted")
    for (place, phase), count in sorted(existing.items()):
        tell("machines", count, place=place, phase=phase)
    tell("made", len(state.machines))
    costs = model_costs(state)
    tell("usd", machines_usd(state, now), kind="machines")
    tell("usd", costs["usd"] if costs["metered"] else None, kind="models")
    tell("hourly", 0.0 if state.ended_at is not None else hourly_usd(state, now))
    tell("budget", state.limits.budget_usd)
    tell("left", eta_s(state, now))
    tell("planned", state.planned_at / SECOND)
    tell("ended", None if state.ended_at is None else state.ended_at / SECOND)
    tell("last", state.last_at / SECOND)
    for model, cost in costs["by_model"].items():
        tell("calls", cost["calls"], model=model)
        for kind, count in cost["tokens"].items():
            tell("tokens", count, model=model, kind=kind)
    for machine, load in loads.items():
        name = state.machines[machine].name
        for resource, share in (("cpu", load.cpu), ("memory", load.memory), ("disk", load.disk)):
            tell("load", share, machine=name, resource=resource)
        for direction, speed in (("received", load.received), ("sent", load.sent)):
            tell("network", speed, machine=name, direction=direction)
        if load.containers is not None:
            is_up = load.containers != ENGINE_DOWN
            tell("engine", is_up, machine=name)
            tell("containers", load.containers if is_up else None, machine=name)


def _tell_durations(lines: _Lines, run: Labels, seconds: Sequence[float]) -> None:
    for bound in BUCKETS_S:
        within = sum(1 for each in seconds if each <= bound)
        lines.add(DURATIONS, {**run, "le": f"{bound}"}, within, "_bucket")
    lines.add(DURATIONS, {**run, "le": "+Inf"}, len(seconds), "_bucket")
    lines.add(DURATIONS, run, sum(seconds), "_sum")
    lines.add(DURATIONS, run, len(seconds), "_count")
