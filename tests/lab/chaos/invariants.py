"""What must be true after every scenario, whatever was broken meanwhile."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator

from evalfleet.model import Scored
from evalfleet.names import INCOMING, PARTIAL
from evalfleet.state import AttemptState
from sim import ledger
from tests.folders import below

from . import workload
from .arena import RUN, Arena

Check = Callable[[Arena], Iterator[str]]


def violations(arena: Arena) -> list[str]:
    """Everything that must not be, in words. Empty: all invariants hold."""
    arena.look()
    return [found for check in CHECKS for found in check(arena)]


def the_journal_is_sound(arena: Arena) -> Iterator[str]:
    """By the checks that simulated runs must pass, too."""
    yield from ledger.started_and_scored_once(arena.records, arena.state)
    yield from ledger.one_writer_at_a_time(arena.records)
    yield from ledger.nothing_under_way(arena.state)
    yield from ledger.causes_are_told(arena.state)
    yield from ledger.artefacts_come_home(arena.records, arena.state)
    if arena.state.undeleted:
        yield f"machines are left: {list(arena.state.undeleted)}"


def every_task_has_its_own_score(arena: Arena) -> Iterator[str]:
    if arena.state.status != "done":
        yield f"the run is {arena.state.status}"
    if len(arena.state.tasks) != workload.TASKS:
        yield f"{len(arena.state.tasks)} tasks instead of {workload.TASKS}"
    for n, (task, known) in enumerate(arena.state.tasks.items()):
        if not isinstance(known.outcome, Scored):
            yield f"{task} is {known.status}: {known.outcome}"
        elif known.outcome.score != workload.score(n):
            yield f"{task} has the score {known.outcome.score} instead of {workload.score(n)}"


def the_results_say_the_same(arena: Arena) -> Iterator[str]:
    told = json.loads((arena.home / RUN / "results.json").read_text())
    figures = (told["total_tasks"], told["scored"], told["broken"], told["unrun"])
    if figures != (workload.TASKS, workload.TASKS, 0, 0):
        yield f"results.json tells (tasks, scored, broken, unrun) as {figures}"
    scores = [task["score"] for task in told["tasks"]]
    if scores != [workload.score(n) for n in range(workload.TASKS)]:
        yield "results.json tells other scores"


def attempts_ran_at_most_once(arena: Arena) -> Iterator[str]:
    """By what they wrote down on the hosts themselves. One that scored ran where the journal says."""
    ran = {host: arena.starts(host) for host in arena.hosts}
    counts = Counter(attempt for attempts in ran.values() for attempt in attempts)
    for attempt, count in counts.items():
        if count > 1:
            yield f"{attempt} ran {count} times"
    journal = {str(attempt): known for attempt, known in arena.state.attempts.items()}
    for host, attempts in ran.items():
        for attempt in attempts:
            known = journal.get(attempt)
            if known is None:
                yield f"{attempt} ran on {host.name}, and the journal does not know it"
            elif arena.host_of(known.machine) is not host:
                yield f"{attempt} ran on {host.name}, which is not where the journal sent it"
    for attempt, known in journal.items():
        if isinstance(known.outcome, Scored) and attempt not in counts:
            yield f"{attempt} has a score and never ran"


def artefacts_are_whole(arena: Arena) -> Iterator[str]:
    """Those of scored attempts are complete to the byte; or the journal says that the machine was gone."""
    for n, known in enumerate(arena.state.tasks.values()):
        if isinstance(known.outcome, Scored) and known.decided_by is not None:
            yield from _problems_of(arena, n, arena.state.attempts[known.decided_by])
    for path in below(arena.home):
        if path.suffix in (INCOMING, PARTIAL):
            yield f"{path} is left of a collection"


def _problems_of(arena: Arena, n: int, attempt: AttemptState) -> Iterator[str]:
    collected = attempt.collected
    if collected is None:
        yield f"{attempt.id} was never collected"
        return
    if collected.problem:
        return  # whether that may be, the journal tells
    folder = arena.home / RUN / attempt.task / attempt.id
    wanted = {"started": f"{attempt.id}\n".encode(), "blob": workload.blob(attempt.id, n)}
    for name, content in wanted.items():
        if not (folder / name).is_file() or (folder / name).read_bytes() != content:
            yield f"{attempt.id}: {name} is not what the attempt wrote"
    if json.loads((folder / "result.json").read_bytes())["score"] != workload.score(n):
        yield f"{attempt.id}: result.json is not what the attempt wrote"


def nothing_is_left_on_hosts(arena: Arena) -> Iterator[str]:
    """Neither a process nor a file of ours, on any host that is up."""
    end = time.monotonic() + arena.settle_s
    for host in arena.hosts:
        while (left := arena.left_on(host)) and time.monotonic() < end:
            time.sleep(0.05)
        if left:
            yield f"{host.name}: {left}"


def controllers_are_gone(arena: Arena) -> Iterator[str]:
    for controller in arena.desk.processes:
        if controller.lives:
            yield "a controller is still there"
        if "Traceback" in controller.said:
            yield f"a controller fell over: {controller.said[-2000:]}"


CHECKS: tuple[Check, ...] = (
    the_journal_is_sound,
    every_task_has_its_own_score,
    the_results_say_the_same,
    attempts_ran_at_most_once,
    artefacts_are_whole,
    nothing_is_left_on_hosts,
    controllers_are_gone,
)
