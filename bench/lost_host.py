"""From the moment a host is gone until its task runs on another one, with the settings that everybody has."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from evalfleet.events import AttemptEnded, AttemptStarted, Record
from evalfleet.model import Broken, Cause, Scored
from lab import Lab, NamespaceHost

from .hosts import cannot, lab_of, records, start_run
from .result import Aim, Figures, Result, at_most, rounded
from .workspace import Workspace, wait_until

HOSTS, ROUNDS = 4, 3
BESIDE_S, BESIDE = 0.5, 1_200
AIM_S = 15.0
LIMIT_S, QUICK_LIMIT_S = 240.0, 40.0
END_S = 180.0
GO = "/tmp/evalfleet-bench-go"
LONG = "long_0"
# the long task waits for a file; the others keep the other hosts busy until it is there
SCRIPT = (
    f"case $1 in long*) until [ -e {GO} ]; do sleep 0.1; done;; *) [ -e {GO} ] || sleep {BESIDE_S};; esac"
)
COUNTED = (
    "from just before the fault until a process of the task is seen on another host; others busy: they run "
    f"tasks of {BESIDE_S:g} s meanwhile; others idle: the lost host was the only one with something to do"
)


class Fault(NamedTuple):
    """What happens to a host, and how it is undone."""

    name: str
    strike: Callable[[NamespaceHost], None]
    mend: Callable[[NamespaceHost], None]


FAULTS = (
    Fault("power_loss", NamespaceHost.power_off, NamespaceHost.power_on),
    Fault("partition", NamespaceHost.partition, NamespaceHost.heal),
)
OTHERS = {"others_busy": BESIDE, "others_idle": HOSTS - 1}


@dataclass(frozen=True)
class Round:
    """What one fault did. `seconds` is None if the task was nowhere to be seen in time."""

    seconds: float | None
    causes: tuple[Cause, ...]
    lost: int
    twice: int


def run(quick: bool) -> Result:
    if (error := cannot("lost-host")) is not None:
        return Result("lost-host", dict(error), {})
    rounds, limit_s = (1, QUICK_LIMIT_S) if quick else (ROUNDS, LIMIT_S)
    cases = [(fault, name) for fault in FAULTS for name in OTHERS]
    figures: Figures = {"rounds": rounds, "hosts": HOSTS, "counted": COUNTED}
    made: dict[str, list[Round]] = {}
    for fault, name in cases[1:2] if quick else cases:
        for _ in range(rounds):
            made.setdefault(f"{fault.name}.{name}", []).append(_round(fault, OTHERS[name], limit_s))
    for case, each in made.items():
        kind, _, others = case.partition(".")
        figures.setdefault(kind, {})[others] = _told(each, limit_s)
    return Result("lost-host", figures, _aims(made, limit_s))


def _aims(made: dict[str, list[Round]], limit_s: float) -> dict[str, Aim]:
    everything = [each for rounds in made.values() for each in rounds]
    aims: dict[str, Aim] = {}
    for fault in FAULTS:
        times = [
            _seconds(each, limit_s) for case in made if case.startswith(fault.name) for each in made[case]
        ]
        if times:
            aims[f"{fault.name}_worst_s"] = at_most(rounded(max(times)), AIM_S)
    odd = sum(each.causes != (Cause.CONNECTION,) for each in everything)
    aims["causes_other_than_connection"] = at_most(odd, 0)
    aims["tasks_lost"] = at_most(sum(each.lost for each in everything), 0)
    aims["tasks_scored_twice"] = at_most(sum(each.twice for each in everything), 0)
    return aims


def _told(rounds: Sequence[Round], limit_s: float) -> Figures:
    times = [_seconds(each, limit_s) for each in rounds]
    told: Figures = {
        "median_s": rounded(statistics.median(times)),
        "worst_s": rounded(max(times)),
        "by_round_s": [rounded(each) for each in times],
        "causes": sorted({str(cause) for each in rounds for cause in each.causes}),
    }
    if any(each.seconds is None for each in rounds):
        told["error"] = f"not elsewhere within {limit_s:g} s; counted as that"
    return told


def _seconds(each: Round, limit_s: float) -> float:
    return limit_s if each.seconds is None else each.seconds


def _round(fault: Fault, beside: int, limit_s: float) -> Round:
    ids = [LONG, *(f"t_{n}" for n in range(beside))]
    with lab_of(HOSTS) as lab, Workspace() as space:
        path = space.benchmark(["sh", "-c", SCRIPT, "sh", "{task_id}"], [{"id": each} for each in ids])
        process = start_run(space, lab, path, HOSTS)
        wait_until(lambda: _where(lab) is not None and _settled(space, beside), 60.0, 0.1)
        struck = _where(lab)
        assert struck is not None
        began = time.monotonic()
        fault.strike(struck)
        seconds = _until(lambda: _where(lab, struck) is not None, began, limit_s)
        fault.mend(struck)
        for host in lab.hosts:
            host.run(["touch", GO])
        space.finish(process, END_S)
        return _account(records(space), ids, seconds)


def _until(condition: Callable[[], bool], began: float, limit_s: float) -> float | None:
    """Seconds from `began` until it came true, if it did."""
    try:
        wait_until(condition, limit_s, 0.05)
    except TimeoutError:
        return None
    return time.monotonic() - began


def _where(lab: Lab, but: NamespaceHost | None = None) -> NamespaceHost | None:
    """The host on which the long task runs."""
    for host in lab.hosts:
        if host is not but and any(each.argv[-1] == LONG for each in host.processes()):
            return host
    return None


def _settled(space: Workspace, beside: int) -> bool:
    """All hosts work by now, or all but one have nothing left to do."""
    enough = min(beside, 2 * HOSTS)
    return sum(isinstance(record.event, AttemptEnded) for record in records(space)) >= enough


def _account(told: Sequence[Record], ids: Sequence[str], seconds: float | None) -> Round:
    task_of: dict[str, str] = {}
    scored: Counter[str] = Counter()
    causes: list[Cause] = []
    for record in told:
        match record.event:
            case AttemptStarted(attempt, task):
                task_of[attempt] = task
            case AttemptEnded(attempt, Scored()):
                scored[task_of[attempt]] += 1
            case AttemptEnded(attempt, Broken(cause)) if task_of[attempt] == LONG:
                causes.append(cause)
            case _:
                pass
    twice = sum(times > 1 for times in scored.values())
    return Round(seconds, tuple(causes), len(ids) - len(scored), twice)
