"""Time and machine cost of Windows Agent Arena before spending anything, by simulation.

Each draw goes through the real engine and policy, with the times of waa_durations. Durations are unknown to
the scheduler, as in a first run, and nothing fails. Three ways to have the machines:

- cold: the run makes them and installs Docker and Windows on each, all but the first after one attempt has
  ended there (`--canary 1`, the default on clouds); each is deleted when it has nothing left to do.
- cold_at_once: the same with `--canary 0`.
- stopped_pool: `pool start` and at once `run --pool`, which uses machines as they come; all are billed until
  the last result, then stopped.

`frugal` is the first way once more, as `evalfleet plan` draws runs: with spot machines, of the size that is
needed where the agent calls a model elsewhere.

Minutes are from the command to the last result. Cost is that of machines, their disks and addresses, at list
price; the disks of a pool while it is stopped are not in it.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from evalfleet.benchmarks.selection import select
from evalfleet.cost import billed_usd
from evalfleet.engine import Tempo
from evalfleet.events import AttemptEnded, Record
from evalfleet.model import (
    Limits,
    MachineId,
    Micros,
    Needs,
    Offer,
    Plan,
    Scored,
    Task,
    TaskId,
    seconds_between,
)
from evalfleet.places.azure.prices import AS_OF, AzurePriceBook, offers_of
from evalfleet.places.azure.settings import AzureSettings
from evalfleet.policy.spot import EVICTED_EVERY_H
from evalfleet.sim.montecarlo import draw_run
from evalfleet.sim.places import SimVms
from evalfleet.sim.scenario import Scenario
from evalfleet.sim.simulate import Parts, Simulated, simulate
from evalfleet.sim.world import Faults, Life, World

from .makespan import processes
from .result import Aim, Figures, Result, at_most, below, rounded
from .waa_durations import COLD, LIMIT_S, STOPPED, durations, machine_s, tasks

SEEDS = 100
SIZES = ((30, 1), (30, 5), (30, 10), (154, 1), (154, 5), (154, 10), (154, 40))
AIM_MINUTES = 60.0
BEFORE_USD = 7.68
"""What the original design reckoned for 154 tasks on 10 machines."""
FRUGAL_USD = 0.33 * BEFORE_USD
ASSUMED = (
    f"list prices of {AS_OF}; a spot machine is taken back after {EVICTED_EVERY_H:g} h on average; "
    "a guest of 8 GB on 16 GB; models run elsewhere; times of waa_durations"
)
NEEDS = Needs(cpus=8, memory_gb=32.0, disk_gb=128.0, nested_virtualization=True)
"""Of machines whose agent runs models of its own, as navi does by default."""
SMALL_NEEDS = Needs(cpus=4, memory_gb=16.0, disk_gb=128.0, nested_virtualization=True)
CALM = Tempo(requests_s=86_400.0, survey_s=86_400.0, longest_wait_s=86_400.0)
CALLS = Faults(latency_s=(0.05, 0.5), commit_s=(0.001, 0.02), create_lands_late_s=1.0)
PLACE = "vms"


@dataclass(frozen=True)
class Way:
    """How machines come. `kept`: they are a pool's, so that all are up and billed from start to end."""

    name: str
    stages: tuple[tuple[float, float], ...]
    canary: int
    kept: bool = False


WAYS = (
    Way("cold", COLD, canary=1),
    Way("cold_at_once", COLD, canary=0),
    Way("stopped_pool", STOPPED, canary=0, kept=True),
)


@dataclass(frozen=True)
class Case:
    way: Way
    tasks: int
    workers: int

    @property
    def name(self) -> str:
        return f"{self.tasks}_tasks_{self.workers}_workers"


@dataclass(frozen=True)
class Drawn:
    minutes: float
    usd: float


def run(quick: bool) -> Result:
    seeds = 2 if quick else SEEDS
    sizes = ((30, 5), (154, 40)) if quick else SIZES
    offer = cheapest(NEEDS)
    figures: Figures = {"seeds": seeds, "size": offer.size, "usd_per_hour": offer.usd_per_hour}
    figures["smaller_size"] = {"size": cheapest(SMALL_NEEDS).size, "cost_times": _smaller_costs()}
    with processes() as pool:
        for way in WAYS:
            for count, workers in sizes:
                case = Case(way, count, workers)
                found = list(pool.map(partial(draw, case), range(seeds), chunksize=5))
                figures.setdefault(way.name, {})[case.name] = _told(found)
    figures["frugal"] = _frugal(seeds)
    return Result("waa-plan", figures, _aims(figures))


def _aims(figures: Figures) -> dict[str, Aim]:
    """The slower end of the range must do."""
    _, slowest = figures["stopped_pool"]["30_tasks_5_workers"]["minutes_95"]
    return {
        "minutes_of_30_tasks_on_5_stopped_workers": below(slowest, AIM_MINUTES),
        "usd_of_154_tasks_spot_and_right_sized": at_most(figures["frugal"]["usd"], FRUGAL_USD),
    }


# -- spot machines of the size that the guest needs --------------------------------------------------------


def _frugal(seeds: int) -> Figures:
    """154 tasks on 10 new spot machines of 4 vCPUs and 16 GB, of which a guest of 8 GB leaves 8.

    One machine is taken back in 20 hours, as `evalfleet plan` expects where nothing is known; what ran there
    is run again.
    """
    settings = AzureSettings(spot=True)
    offers = offers_of(PLACE, settings, AzurePriceBook(None), SMALL_NEEDS)
    chosen = tuple(offer for offer in offers if offer.size == offers[0].size)
    limits = Limits(workers=10, canary=1, boot_timeout_s=7200.0, lease_s=86_400.0)
    plan = Plan("waa", "sim", (PLACE,), limits=limits, home="abc123")
    every = tuple(
        Task(TaskId(each.id), each.domain, {"index": n}, timeout_s=LIMIT_S + 1)
        for n, each in enumerate(tasks())
    )
    drawn = [draw_run(plan, every, chosen, _SpotFate(seed)) for seed in range(seeds)]
    told = _told([Drawn(each.seconds / 60, each.machines_usd) for each in drawn])
    evictions = statistics.fmean(each.evictions for each in drawn)
    return {
        "size": chosen[0].size,
        "usd_per_hour": chosen[0].usd_per_hour,
        **told,
        "evictions": rounded(evictions, 3),
        "less_than_before": rounded(1 - told["usd"] / BEFORE_USD, 3),
        "assumed": ASSUMED,
    }


class _SpotFate:
    """Durations of tasks and machines by waa_durations, and evictions."""

    def __init__(self, seed: int) -> None:
        self._seconds = durations(seed, tasks())
        self._seed, self._machines = seed, 0
        self._rng = random.Random(f"evictions {seed}")

    def task_s(self, task: Task, offer: Offer) -> float:
        index: int = task.params["index"]
        return self._seconds[index]

    def machine_s(self, offer: Offer) -> float:
        self._machines += 1
        return machine_s(self._seed, MachineId(f"waa-abc123-{self._machines}"), COLD)

    def queue_s(self, offer: Offer) -> float:
        return 0.0

    def evicted_s(self, offer: Offer) -> float:
        return self._rng.expovariate(1 / (EVICTED_EVERY_H * 3600)) if offer.spot else math.inf

    def breaks(self) -> bool:
        return False


def _told(found: Sequence[Drawn]) -> Figures:
    minutes, usd = [each.minutes for each in found], [each.usd for each in found]
    return {
        "minutes": rounded(statistics.fmean(minutes), 3),
        "minutes_95": _range(minutes),
        "usd": rounded(statistics.fmean(usd), 3),
        "usd_95": _range(usd),
    }


def _range(values: Sequence[float]) -> list[float]:
    """In which 95 of 100 draws lie."""
    ordered = sorted(values)
    out = int(0.025 * len(ordered))
    return [rounded(ordered[out], 3), rounded(ordered[-1 - out], 3)]


# -- what it costs -----------------------------------------------------------------------------


def cheapest(needs: Needs) -> Offer:
    """What the place `azure_vm` takes first when nothing is configured."""
    return offers_of(PLACE, AzureSettings(), AzurePriceBook(None), needs)[0]


def _smaller_costs() -> float:
    return rounded(cheapest(SMALL_NEEDS).usd_per_hour / cheapest(NEEDS).usd_per_hour, 3)


def _usd(case: Case, done: Simulated, began: Micros, ended: Micros) -> float:
    meters = done.world.meters
    if case.way.kept:
        return case.workers * billed_usd(meters[0].offer, began, ended)
    return sum(billed_usd(each.offer, each.start, each.end or ended) for each in meters)


# -- a draw ------------------------------------------------------------------------------------


class WaaVms(SimVms):
    """A machine is up once Windows answers on it. One of a pool comes up from the start on, wanted or not."""

    def __init__(
        self, world: World, life: Life, name: str, offers: Sequence[Offer], *, way: Way, seed: int
    ) -> None:
        super().__init__(world, life, name, offers)
        self._way, self._seed = way, seed

    async def create(self, machine: MachineId, offer: Offer, expires_s: float) -> None:
        await self._world.place_call(self._life)
        self._world.must_be_durable(machine)
        passed_s = self._world.loop.time() if self._way.kept else 0.0
        takes_s = machine_s(self._seed, machine, self._way.stages)
        self._world.bring_up(machine, offer, expires_s, max(0.0, takes_s - passed_s))


def draw(case: Case, seed: int) -> Drawn:
    named, offer = tasks(), cheapest(NEEDS)
    every = tuple(
        Task(TaskId(each.id), each.domain, {"index": index}, timeout_s=LIMIT_S + 1)
        for index, each in enumerate(named)
    )
    limits = Limits(workers=case.workers, canary=case.way.canary, boot_timeout_s=7200.0, lease_s=86_400.0)
    scenario = Scenario(
        seed,
        Plan("waa", "sim", (PLACE,), limits=limits, home="abc123"),
        select(every, sample=case.tasks, seed=seed).tasks,
        CALLS,
        durations=durations(seed, named),
        offers={PLACE: (offer,)},
    )
    places = {PLACE: partial(WaaVms, way=case.way, seed=seed)}
    done = simulate(scenario, Parts(places=places), CALM)
    told = list(done.store.read())
    ended = last_result(told, case.tasks)
    return Drawn(seconds_between(told[0].at, ended) / 60, _usd(case, done, told[0].at, ended))


def last_result(told: Sequence[Record], tasks: int) -> Micros:
    """When it came. Checks, too, that all came."""
    ends = [record.at for record in told if isinstance(record.event, AttemptEnded)]
    scored = sum(
        isinstance(each.event, AttemptEnded) and isinstance(each.event.outcome, Scored) for each in told
    )
    if (len(ends), scored) != (tasks, tasks):
        raise RuntimeError(f"{len(ends)} attempts, {scored} scored, for {tasks} tasks")
    return ends[-1]
