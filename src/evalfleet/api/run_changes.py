"""Changing a run while it goes on, from any process. Each change is a request in the store, which the run's
one writer turns into an event, or drops if it has come too late.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from evalfleet.clock import WallClock
from evalfleet.errors import FleetError, RequestError
from evalfleet.events import RunSteered, StopRequested
from evalfleet.journal import Store
from evalfleet.model import AttemptId, MachineId, TaskId
from evalfleet.names import hint
from evalfleet.planning.values import parse_count, parse_line, parse_usd
from evalfleet.state import RunState, objection

from .run import Run, whoami

if TYPE_CHECKING:
    from evalfleet.events import SteeringVerb


PATIENCE_S = 30.0
"""How long a controller may take to take note: it looks twice a second, and may be busy or suspended."""
LOOK_S = 0.1
STEERED_BY: Mapping[str, tuple[str, ...]] = {
    "cancel": (),
    "set": ("workers", "budget", "attempts"),
    "end": ("attempt",),
    "drain": ("machine",),
    "undrain": ("machine",),
}
"""What can be done to a run that goes on, and what each needs to be told."""


def steer(run: Run, event: RunSteered | StopRequested) -> None:
    """Ask the run's controller for the change, and return when it is recorded.

    Raises RequestError if it cannot be done, FleetError if nobody has taken note of it.
    """
    state = run.state()
    if problem := objection(state, event):
        raise RequestError(f"run {run.name!r} {problem}")
    if not run.is_live():
        raise RequestError(
            f"no controller is at work on run {run.name!r}: `evalfleet resume {run.name}` takes it up"
        )
    before, store = state.events, Store.open(run.home)
    request = store.ask(run.name, event, WallClock().now())
    deadline = time.monotonic() + PATIENCE_S
    while not store.is_answered(request):
        if time.monotonic() >= deadline or not run.is_live():
            raise FleetError(
                f"the controller of run {run.name!r} has not taken note of it: it is asked, and whoever "
                "takes up the run will"
            )
        time.sleep(LOOK_S)
    if not any(record.event == event for record in run.records(after=before)):
        raise RequestError(f"run {run.name!r} {objection(run.state(), event) or 'was faster'}")


def change_of(
    state: RunState, verb: str, arguments: Mapping[str, object], reason: str
) -> RunSteered | StopRequested:
    """What a verb of the command line asks for, given by name: `machine`, `attempt`, `workers`, `budget`,
    `attempts`. Raises RequestError."""
    given = {name: str(value) for name, value in arguments.items() if value is not None}
    takes = STEERED_BY.get(verb)
    if takes is None:
        raise RequestError(f"{verb[:80]!r} is nothing that can be done to a run; {hint(verb, STEERED_BY)}")
    if unknown := sorted(set(given) - set(takes)):
        raise RequestError(f"{verb} takes no {unknown[0][:80]!r}; {hint(unknown[0], takes)}")
    by, why = whoami(), parse_line(reason, "reason")
    if verb == "cancel" or (verb == "drain" and not given):
        detail = "cancelled" if verb == "cancel" else "drained"
        return StopRequested("user", detail, drain=verb == "drain", by=by, why=why)
    if verb != "set" and set(given) != set(takes):
        raise RequestError(f"{verb} needs {' and '.join(takes)}")
    if verb == "set" and not given:
        raise RequestError(f"nothing to set: say {' or '.join(takes)}")
    return RunSteered(
        cast("SteeringVerb", verb),
        by,
        why,
        attempt=attempt_of(state, given["attempt"]) if "attempt" in given else None,
        machine=machine_of(state, given["machine"]) if "machine" in given else None,
        workers=parse_count(given["workers"], "workers", 0, 10_000) if "workers" in given else None,
        budget_usd=parse_usd(given["budget"], "budget") if "budget" in given else None,
        attempts=parse_count(given["attempts"], "attempts", 1, 10) if "attempts" in given else None,
    )


def attempt_of(state: RunState, name: str) -> AttemptId:
    """The attempt of this name, or the one that runs of the task of this name. Raises RequestError."""
    if name in state.attempts:
        return AttemptId(name)
    if name not in state.tasks:
        raise RequestError(f"run {state.plan.run!r} has no task {name!r}; {hint(name, state.tasks)}")
    attempts = state.tasks[TaskId(name)].attempts
    if not attempts or state.attempts[attempts[-1]].outcome is not None:
        raise RequestError(f"task {name!r} of run {state.plan.run!r} does not run now")
    return attempts[-1]


def machine_of(state: RunState, name: str) -> MachineId:
    """The machine of this name or id; of several that had the name, the newest. Raises RequestError."""
    if name in state.machines:
        return MachineId(name)
    names = {machine.name: machine.id for machine in state.machines.values()}
    if name not in names:
        raise RequestError(f"run {state.plan.run!r} has no machine {name!r}; {hint(name, names)}")
    return names[name]
