"""One machine loses power after some tasks: whose results are kept?"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from evalfleet.errors import RequestError
from evalfleet.events import AttemptEnded, AttemptStarted, Event, MachineUp
from evalfleet.lab import NamespaceHost
from evalfleet.model import Scored
from tests.waa.arena import Arena

from .result import Figures
from .waa_arena import arena_of
from .waa_durations import Named, durations, tasks
from .waa_peer import look, openadapt
from .workspace import wait_until

RUN = "lost"
FIRST_S = 120.0
LIMIT_S = 240.0


@dataclass(frozen=True)
class Lost:
    """`after` so many results on one machine, it is gone."""

    tasks: int
    machines: int
    scale: float
    after: int = 3

    @property
    def named(self) -> tuple[Named, ...]:
        return tasks()[: self.tasks]

    @property
    def seconds(self) -> tuple[float, ...]:
        return tuple(each * self.scale for each in durations(0, self.named))


# -- evalfleet -------------------------------------------------------------------------------------


def kept_by_evalfleet(lost: Lost) -> Figures:
    with arena_of(lost.named, lost.seconds, lost.machines) as arena:
        process = arena.start_run(RUN)
        wait_until(lambda: _struck(arena, lost.after) is not None, FIRST_S, 0.1)
        host = _struck(arena, lost.after)
        assert host is not None
        host.power_off()
        wait_until(lambda: _kept(arena)["kept"] == lost.tasks or not process.lives, LIMIT_S, 0.2)
        host.power_on()  # or the run would wait a while to clean up there
        done = process.wait(LIMIT_S)
        if done.code not in (0, 1):
            raise RuntimeError(f"the run ended with {done.code}:\n{done.said[-2000:]}")
        return _kept(arena)


def _struck(arena: Arena, after: int) -> NamespaceHost | None:
    """The first host that has so many results."""
    address: dict[str, str] = {}
    machine_of: dict[str, str] = {}
    ended: Counter[str] = Counter()
    for event in _events(arena):
        match event:
            case MachineUp(machine, at):
                address[machine] = at
            case AttemptStarted(attempt, _, machine):
                machine_of[attempt] = machine
            case AttemptEnded(attempt, Scored()):
                ended[machine_of[attempt]] += 1
            case _:
                pass
    full = [address[machine] for machine, results in ended.items() if results >= after]
    return next((host for host in arena.lab.hosts if host.address in full), None)


def _events(arena: Arena) -> list[Event]:
    """None before the run has begun."""
    try:
        return arena.events(RUN)
    except RequestError:
        return []


def _kept(arena: Arena) -> Figures:
    events = _events(arena)
    task_of = {each.attempt: each.task for each in events if isinstance(each, AttemptStarted)}
    ended = [each for each in events if isinstance(each, AttemptEnded)]
    scored = Counter(task_of[each.attempt] for each in ended if isinstance(each.outcome, Scored))
    return {
        "kept": len(scored),
        "scored_twice": sum(times > 1 for times in scored.values()),
        "attempts": len(task_of),
    }


# -- openadapt-evals -------------------------------------------------------------------------------


def kept_by_openadapt(lost: Lost) -> Figures:
    """It starts a client a host with a slice of the tasks, and fetches nothing: results stay on the hosts."""
    with arena_of(lost.named, lost.seconds, lost.machines) as arena:
        hosts = arena.lab.hosts
        with openadapt(arena, lost.tasks) as (space, process):
            wait_until(lambda: any(len(look(host).ended) >= lost.after for host in hosts), FIRST_S, 0.1)
            struck = next(host for host in hosts if len(look(host).ended) >= lost.after)
            struck.power_off()
            others = [host for host in hosts if host is not struck]
            share = lost.tasks // lost.machines
            wait_until(lambda: all(len(look(host).ended) >= share for host in others), LIMIT_S, 0.2)
            noticed = "FAILED" in space.output() or process.poll() is not None
        struck.power_on()
        on_the_lost = len(look(struck).ended)
        elsewhere = sum(len(look(host).ended) for host in others)
    return {
        "kept": elsewhere + on_the_lost,
        "of_these_on_the_lost_machine": on_the_lost,
        "loss_noticed_when_all_others_were_done": noticed,
    }
