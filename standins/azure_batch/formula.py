"""Autoscale formulas of Batch, as far as the stand-in knows them: numbers, sums, tasks, and the time."""

from __future__ import annotations

import re
from datetime import datetime

_WORD = re.compile(r"[A-Za-z]\w*")
_TERM = re.compile(r'\(time\(\) < time\("([^"]+)"\) \? (\d+) : (\d+)\)')
_SAMPLED = r"\(\d+ \* TimeInterval_Second\)"
_PENDING = re.compile(
    rf"\$PendingTasks\.GetSamplePercent{_SAMPLED} < \d+ \? \d+ : max\(\$PendingTasks\.GetSample{_SAMPLED}\)"
)
"""Samples are always there: it is the number of tasks."""
_LEAST = re.compile(r"min\(([^,()]+), ([^,()]+)\)")
TARGETS = {"$TargetDedicatedNodes": False, "$TargetLowPriorityNodes": True}
OPTIONS = ("requeue", "terminate", "taskcompletion", "retaineddata")


def evaluated(formula: str, now: float, pending: int) -> dict[bool, int]:
    """The nodes that it wants, dedicated by False, spot by True, where so many tasks run or wait. Raises
    SyntaxError."""
    values: dict[str, int] = {}
    targets = {False: 0, True: 0}
    for statement in filter(None, (each.strip() for each in formula.split(";"))):
        name, equal, said = (part.strip() for part in statement.partition("="))
        if not equal:
            raise SyntaxError(f"no assignment: {statement}")
        if _PENDING.fullmatch(said):
            said = str(pending)
        elif found := _LEAST.fullmatch(said):
            said = str(min(_sum(each, values, now) for each in found.groups()))
        if name == "$NodeDeallocationOption":
            if said not in OPTIONS:
                raise SyntaxError(f"no such option: {said}")
        elif name in TARGETS:
            targets[TARGETS[name]] = _sum(said, values, now)
        elif _WORD.fullmatch(name):
            values[name] = _sum(said, values, now)
        else:
            raise SyntaxError(f"no such variable: {name}")
    return targets


def _sum(said: str, values: dict[str, int], now: float) -> int:
    return sum(_value(term.strip(), values, now) for term in said.split(" + "))


def _value(term: str, values: dict[str, int], now: float) -> int:
    if found := _TERM.fullmatch(term):
        return int(found[2] if now < datetime.fromisoformat(found[1]).timestamp() else found[3])
    if term.isdecimal():
        return int(term)
    if term not in values:
        raise SyntaxError(f"nothing is known of {term}")
    return values[term]
