"""Showing what a pool's controller does, and how the pool stands then."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from evalfleet.api.documents import answer_row, pool_document
from evalfleet.cli.watch import notes
from evalfleet.clock import WallClock
from evalfleet.views.format import clean, clock_time, plural, table, usd
from evalfleet.views.notable import notable, refusals_table
from evalfleet.views.show import undeleted_lines

if TYPE_CHECKING:
    from evalfleet.api.pool_machine import ActionResult
    from evalfleet.api.pools import Pool
    from evalfleet.events import Record
    from evalfleet.model import MachineId
    from evalfleet.named_pools import PoolView
    from evalfleet.state import RunState
    from evalfleet.views.fleet_documents import PoolCost, PoolDocument


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


def print_answers(answers: Sequence[ActionResult], *, as_json: bool) -> int:
    """Say what came of something done to machines; the exit code."""
    for answer in answers if not as_json else ():
        if answer.said:
            print(answer.said)
    if as_json:
        print(json.dumps([answer_row(answer) for answer in answers]))
    return print_problems(answers)


def print_problems(answers: Sequence[ActionResult]) -> int:
    """Say what went wrong; the exit code."""
    problems = [answer for answer in answers if answer.problem]
    for answer in problems:
        print(f"evalfleet: {answer.machine.name}: {answer.problem}", file=sys.stderr)
    return 1 if problems else 0


def show(
    view: PoolView,
    *,
    as_json: bool,
    answers: Sequence[ActionResult] | None = None,
    screens: Mapping[MachineId, str] | None = None,
    usual: Mapping[MachineId, str] | None = None,
) -> None:
    """`answers` of machines that were asked, and links to their `screens`, if they have any.

    `usual`: the links that `pool vnc` opens.
    """
    told = pool_document(view, WallClock().now(), answers, screens)
    print(json.dumps(told) if as_json else text(view, told, usual or {}))


def _cost(cost: PoolCost) -> list[str]:
    if not cost["machines_usd"] and not cost["usd_per_hour"]:
        return []
    of_when = f" (prices of {cost['prices_as_of']})" if cost["prices_as_of"] else ""
    now = f"{usd(cost['machines_usd'])} so far, {usd(cost['usd_per_hour'])} an hour now"
    stopped = f", {usd(monthly)} a month while stopped" if (monthly := cost["stopped_usd_per_month"]) else ""
    return [f"cost: {now}{stopped}{of_when}"]


def text(view: PoolView, told: PoolDocument, usual: Mapping[MachineId, str]) -> str:
    columns = ["name", "address", "status", "run", "prepared"]
    columns += [
        name for name in ("probe", "screen") if any(machine.get(name) for machine in told["machines"])
    ]
    columns += ["cost"] if told["cost"]["machines_usd"] else []
    rows = [
        [usd(machine["cost_usd"]) if column == "cost" else machine.get(column) for column in columns]
        for machine in told["machines"]
    ]
    is_open = any(machine.get("screen") for machine in told["machines"])
    closed = {} if is_open else {view.state.machines[id].name: link for id, link in usual.items()}
    missing = told["workers"] - len(rows)
    head = f"pool {view.name}: {plural(len(rows), 'machine')} on {told['place']}"
    if view.expires_at is not None:
        head += f", until {str(told['expires_at'])[:16].replace('T', ' ')} UTC"
    lines = [head, *_cost(told["cost"]), *(["", table(columns, rows)] if rows else [])]
    if missing > 0:
        asked = "more was" if missing == 1 else "more were"
        lines += ["", f"{missing} {asked} asked for: `evalfleet pool start {view.name}` tries again"]
        lines += ["", refusals_table(told["refusals"])] if told["refusals"] else []
    if closed:
        lines += ["", f"`evalfleet pool vnc {view.name}` opens these screens:"]
        lines += [f"{name}  {link}" for name, link in closed.items()]
    if failed := [f"{m['name']} is stopped: {clean(m['failure'])}" for m in told["machines"] if m["failure"]]:
        lines += ["", *failed]
    if undeleted := undeleted_lines(told["machines"]):
        lines += ["", undeleted]
    lines += ["", told["warning"]] if told["warning"] else []
    return "\n".join(lines)
