"""What the tests of pools say in one word."""

from __future__ import annotations

import contextlib
import io
import json
import os
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

from evalfleet import cli
from evalfleet.events import AttemptStarted
from evalfleet.journal import Holds, Store
from evalfleet.named_pools import PoolView, look_at
from tests.desk import Done
from tests.e2e.harness import Fleet


def say(fleet: Fleet, *words: str) -> Done:
    """What `fleet(...)` does, in this process: starting another takes longer than most verbs of a pool."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    before, os.environ["EVALFLEET_HOME"] = os.environ.get("EVALFLEET_HOME"), str(fleet.home)
    try:
        with contextlib.chdir(fleet.folder), redirect_stdout(out), redirect_stderr(err):
            code = cli.main(words)
    except SystemExit as left:
        code = int(left.code or 0)
    finally:
        os.environ.pop("EVALFLEET_HOME")
        if before is not None:
            os.environ["EVALFLEET_HOME"] = before
    done = Done(code, out.getvalue(), err.getvalue())
    assert "Traceback" not in done.said, done
    return done


def pool(fleet: Fleet, verb: str, *words: str, name: str = "p") -> Done:
    """A verb that must succeed."""
    done = say(fleet, "pool", verb, name, *words)
    assert done.code == 0, done
    return done


def machines(fleet: Fleet, name: str = "p") -> dict[str, dict[str, Any]]:
    """By name, as `pool status --json` shows them."""
    told = pool(fleet, "status", "--json", name=name).json
    return {machine["name"]: machine for machine in told["machines"]}


def statuses(fleet: Fleet, name: str = "p") -> dict[str, str]:
    return {name: machine["status"] for name, machine in machines(fleet, name).items()}


def view(fleet: Fleet, name: str = "p") -> PoolView:
    return look_at(Store.open(fleet.home, create=False, read_only=True), name)


def holders(fleet: Fleet, name: str = "p") -> set[str]:
    store = Store.open(fleet.home, create=False, read_only=True)
    return {hold.holder for hold in Holds(store, name).all().values() if hold.holder is not None}


def folders(fleet: Fleet) -> set[str]:
    """The machines that exist, by their folders."""
    found = fleet.home / ".machines"
    return {path.name for path in found.iterdir()} if found.exists() else set()


def used(fleet: Fleet, run: str) -> set[str]:
    """The addresses of machines on which a run has started anything."""
    state = fleet.state(run)
    started = [event for event in fleet.events(run) if isinstance(event, AttemptStarted)]
    return {state.machines[event.machine].address for event in started}


def registry(fleet: Fleet, of: str = "") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((fleet.home / of / "vm_pool_registry.json").read_bytes())
    return found
