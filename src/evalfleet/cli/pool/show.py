"""Showing what a pool's controller does, and how the pool stands then."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from evalfleet.cli.follow import notes
from evalfleet.clock import WallClock
from evalfleet.views.format import clock_time, iso, plural, table, usd
from evalfleet.views.notable import notable, refusals, refusals_table
from evalfleet.views.show import undeleted_lines
from evalfleet.views.stats import hourly_usd, machine_hourly_usd, machine_usd, machines_usd, prices_as_of

if TYPE_CHECKING:
    from evalfleet.api.pool_machine import ActionResult
    from evalfleet.api.pools import Pool
    from evalfleet.events import Record
    from evalfleet.pools import PoolView
    from evalfleet.state import MachineState, RunState


async def follow(pool: Pool) -> RunState:
    """Print what happens until the pool is where it shall be. Ctrl-C leaves it as it is then."""

    def observe(state: RunState, records: Sequence[Record]) -> None:
        for record in records:
            if (line := notable(state, record)) is not None and line.kind != "end":
                print(f"{clock_time(line.at)} {line.text}", file=sys.stderr, flush=True)

    try:
        with notes():
            return await pool.wait(observe)
    except asyncio.CancelledError:
        pool.leave()
        print(
            f"evalfleet: left pool {pool.name} half done; `evalfleet pool start {pool.name}` goes on",
            file=sys.stderr,
        )
        raise


def print_problems(answers: Sequence[ActionResult]) -> int:
    """Say what went wrong; the exit code."""
    problems = [answer for answer in answers if answer.problem]
    for answer in problems:
        print(f"evalfleet: {answer.machine.name}: {answer.problem}", file=sys.stderr)
    return 1 if problems else 0


def show(view: PoolView, *, as_json: bool, answers: Sequence[ActionResult] | None = None) -> None:
    print(json.dumps(document(view, answers)) if as_json else text(view, answers))


def document(view: PoolView, answers: Sequence[ActionResult] | None = None) -> dict[str, Any]:
    now, plan = WallClock().now(), view.state.plan
    return {
        "pool": view.name,
        "place": ", ".join(plan.places),
        "workers": view.state.limits.workers,
        "created_at": iso(view.state.planned_at),
        "expires_at": iso(view.expires_at),
        "warning": view.expiry(now) or None,
        "cost": {
            "machines_usd": round(machines_usd(view.state, now), 6),
            "usd_per_hour": round(hourly_usd(view.state, now), 6),
            "prices_as_of": prices_as_of(view.state),
        },
        "machines": [_machine(view, machine, now, answers) for machine in view.machines],
        "refusals": refusals(view.state),
    }


def _machine(
    view: PoolView, machine: MachineState, now: int, answers: Sequence[ActionResult] | None
) -> dict[str, Any]:
    shown = {
        "name": machine.name,
        "id": machine.id,
        "address": machine.address,
        "status": view.standing(machine, now),
        "run": view.holder(machine.id, now),
        "prepared": machine.prepared or None,
        "usd_per_hour": machine_hourly_usd(machine, now),
        "cost_usd": round(machine_usd(machine, now), 6),
        "delete_refused": machine.delete_refused or None,
    }
    if answers is not None:
        found = [answer for answer in answers if answer.machine.id == machine.id]
        shown["probe"] = None if not found else found[0].problem or "ok"
    return shown


def _cost(cost: dict[str, Any]) -> list[str]:
    if not cost["machines_usd"] and not cost["usd_per_hour"]:
        return []
    of_when = f" (prices of {cost['prices_as_of']})" if cost["prices_as_of"] else ""
    return [f"cost: {usd(cost['machines_usd'])} so far, {usd(cost['usd_per_hour'])} an hour now{of_when}"]


def text(view: PoolView, answers: Sequence[ActionResult] | None = None) -> str:
    told = document(view, answers)
    columns = ["name", "address", "status", "run", "prepared", *(["probe"] if answers is not None else [])]
    rows = [[machine[column] for column in columns] for machine in told["machines"]]
    if told["cost"]["machines_usd"]:
        columns.append("cost")
        rows = [[*row, usd(m["cost_usd"])] for row, m in zip(rows, told["machines"], strict=True)]
    missing = told["workers"] - len(rows)
    head = f"pool {view.name}: {plural(len(rows), 'machine')} on {told['place']}"
    if view.expires_at is not None:
        head += f", until {str(told['expires_at'])[:16].replace('T', ' ')} UTC"
    lines = [head, *_cost(told["cost"]), *(["", table(columns, rows)] if rows else [])]
    if missing > 0:
        asked = "more was" if missing == 1 else "more were"
        lines += ["", f"{missing} {asked} asked for: `evalfleet pool start {view.name}` tries again"]
        lines += ["", refusals_table(told["refusals"])] if told["refusals"] else []
    if undeleted := undeleted_lines(told["machines"]):
        lines += ["", undeleted]
    lines += ["", told["warning"]] if told["warning"] else []
    return "\n".join(lines)
