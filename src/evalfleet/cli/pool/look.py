"""Pools looked at: which there are, how one stands, what happened to it."""

from __future__ import annotations

import argparse
import codecs
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Self

from . import add_json, add_name

if TYPE_CHECKING:
    from evalfleet.api.live_log import LiveLog
    from evalfleet.api.pools import Pool
    from evalfleet.api.run import Run
    from evalfleet.model import AttemptId, MachineId
    from evalfleet.state import AttemptState
    from evalfleet.views.fleet_documents import PoolDocument

FIRST_S = 20.0
LOOK_S = 0.3

ls_arguments = add_json


def ls(args: argparse.Namespace) -> int:
    """List the pools of this home, newest first."""
    from evalfleet.api import pools
    from evalfleet.api.documents import pool_document
    from evalfleet.planning.workspace import Workspace
    from evalfleet.views.format import table

    workspace = Workspace.here()
    shown = [pool_document(view, workspace.now()) for view in pools.pools(workspace)]
    if args.json:
        print(json.dumps(shown))
    elif not shown:
        print("no pools: make one with `evalfleet pool create NAME --on PLACE --workers N`")
    else:
        head = ("pool", "place", "machines", "held", "created", "expires")
        print(table(head, [_cells(pool) for pool in shown]))
        for warning in filter(None, (pool["warning"] for pool in shown)):
            print(f"evalfleet: note: {warning}", file=sys.stderr)
    return 0


def _cells(pool: PoolDocument) -> tuple[object, ...]:
    from evalfleet.views.format import local_time

    machines = pool["machines"]
    held = sum(machine["run"] is not None for machine in machines)
    created, expires = local_time(pool["created_at"]), local_time(pool["expires_at"])
    return pool["pool"], pool["place"], len(machines), held, created, expires


def status_arguments(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    parser.add_argument(
        "--probe",
        action="store_true",
        help="ask every machine, and what a benchmark runs on it, whether it answers",
    )
    add_json(parser)


async def status(args: argparse.Namespace) -> int:
    """Show a pool's machines: where they are, how they are, and which run uses them.

    Where they have screens, also the links to those that `pool vnc` keeps open, or would open.
    """
    from evalfleet.api import appliances, pools
    from evalfleet.api.pool_machine import running_in
    from evalfleet.planning.workspace import Workspace

    from .show import show

    pool = pools.open_pool(Workspace.here(), args.name)
    answers = await appliances.probe(pool) if args.probe else None
    view = pool.view()
    screens, usual = appliances.open_links(pool), appliances.usual_links(pool, running_in(view))
    show(view, as_json=args.json, answers=answers, screens=screens if screens or usual else None, usual=usual)
    return 1 if answers is not None and any(answer.problem for answer in answers) else 0


def logs_arguments(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    parser.add_argument("machine", metavar="MACHINE", nargs="?", help="its name or id (default: all)")
    parser.add_argument(
        "-f", "--follow", action="store_true", help="keep printing until it is deleted, or Ctrl-C"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")


def logs(args: argparse.Namespace) -> int:
    """Print what happened to a pool, or to one of its machines, and the output of attempts that run there."""
    from evalfleet.api import pools
    from evalfleet.cli.terminal import reader_left
    from evalfleet.events import RunEnded
    from evalfleet.planning.workspace import Workspace
    from evalfleet.views.lines import event_line, json_line

    pool = pools.open_pool(Workspace.here(), args.name)
    about = pool.view().machine(args.machine).id if args.machine else None
    seen, deleted = 0, False
    with _Outputs(pool, about, as_json=args.json) as outputs:
        while True:
            for record in pool.store.read(pool.name, after=seen):
                seen, deleted = record.seq, isinstance(record.event, RunEnded)
                if about is None or getattr(record.event, "machine", None) == about:
                    print(json_line(record) if args.json else event_line(record), flush=args.follow)
            if not deleted:
                outputs.show(follow=args.follow)
            if deleted or not args.follow or reader_left(LOOK_S):
                return 0


class _Outputs:
    """A printer of what attempts write that runs have on the machines of a pool, or on one of them."""

    def __init__(self, pool: Pool, machine: MachineId | None, *, as_json: bool) -> None:
        self._pool, self._machine, self._as_json = pool, machine, as_json
        self._logs: dict[AttemptId, _Output] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for log in self._logs.values():
            log.close()

    def show(self, *, follow: bool) -> None:
        """Print what is new: all that is there, or what comes within a moment."""
        for name, run, attempt in self._running():
            if attempt.id not in self._logs:
                self._logs[attempt.id] = _Output(name, run.live_log(attempt), attempt.id, self._as_json)
        for log in self._logs.values():
            log.show(LOOK_S / len(self._logs) if follow else FIRST_S)

    def _running(self) -> Iterator[tuple[str, Run, AttemptState]]:
        """Yield the attempts, with the name of the pool's machine and the run of each."""
        from evalfleet.api import runs

        view, now = self._pool.view(), self._pool.workspace.now()
        held: dict[str, list[str]] = {}
        for machine in view.machines:
            holder = view.holder(machine.id, now)
            if holder is not None and self._machine in (None, machine.id):
                held.setdefault(holder, []).append(machine.name)
        for holder, names in held.items():
            run = runs.open_run(self._pool.workspace, holder)
            state = run.state()
            for machine in state.machines.values():
                if machine.name in names:
                    yield from ((machine.name, run, state.attempts[attempt]) for attempt in machine.open)


class _Output:
    """A printer of what one attempt writes, line by line, each with the name of its machine."""

    def __init__(self, machine: str, log: LiveLog, attempt: AttemptId, as_json: bool) -> None:
        self._machine, self._log, self._attempt, self._as_json = machine, log, attempt, as_json
        self._text = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def show(self, seconds: float) -> None:
        from evalfleet.views.format import visible

        if self._log.over:
            return
        text = self._text.decode(self._log.read(seconds))
        if self._as_json and text:
            print(json.dumps({"attempt": self._attempt, "text": text}), flush=True)
            return
        *lines, self._rest = (self._rest + text).split("\n")
        if self._log.over and self._rest:
            lines.append(self._rest)
        for line in lines:
            print(f"{self._machine}: {visible(line)}", flush=True)
        if self._log.problem:
            print(f"evalfleet: {self._machine}: {self._log.problem}", file=sys.stderr)

    def close(self) -> None:
        self._log.close()
