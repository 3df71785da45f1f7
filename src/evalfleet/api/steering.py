"""Changing a run while it goes on, from any process. Each change is a request in the store, which the run's
one writer turns into an event, or drops if it has come too late.
"""

from __future__ import annotations

import getpass
import os
import socket
import time
from typing import TYPE_CHECKING

from evalfleet.clock import WallClock
from evalfleet.errors import FleetError, RequestError
from evalfleet.events import RunSteered, StopRequested
from evalfleet.journal import Store
from evalfleet.model import AttemptId, MachineId, TaskId
from evalfleet.names import hint
from evalfleet.state import RunState, objection

if TYPE_CHECKING:
    from .run import Run

PATIENCE_S = 30.0
"""How long a controller may take to take note: it looks twice a second, and may be busy or suspended."""
LOOK_S = 0.1


def whoami() -> str:
    """Who asks: user@host."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a user without a name, as in some containers
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


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
