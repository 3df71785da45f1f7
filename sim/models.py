"""Attempts that call models in the simulated world: meters, calls whose cost nobody tells, and one budget."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import structs

from evalfleet.model import (
    Allowance,
    AttemptId,
    Ended,
    Isolated,
    Isolation,
    Job,
    Metered,
    Metering,
    ModelApi,
    ModelUse,
)

from .checks import machines_usd
from .places import SimChannel
from .scenario import Scenario, draw
from .simulate import Parts, Simulated, simulate
from .world import SimJob, SimMachine, World

TOKENS_A_DOLLAR = 100_000


@dataclass(slots=True, eq=False)
class SimAccount:
    """What the meter of a machine knows of one attempt: what its calls used, and what they may use."""

    job: SimJob
    allowance: Allowance
    usd: float = 0.0
    calls: int = 0
    unknown: int = 0
    unknown_usd: float = 0.0  # the most that calls of unknown cost can have cost
    in_flight: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """Of each call under way: what it will cost, and the most that it can cost, as far as its meter knows."""
    refused: str = ""
    last_usd: float = 0.0
    """Of the calls that were under way when the allowance was used up, or when the attempt ended before."""

    def has_room(self) -> bool:
        allowed, used = self.allowance, self.used()
        return (allowed.usd is None or used.used_usd < allowed.usd) and (
            allowed.tokens is None or used.used_tokens < allowed.tokens
        )

    def used(self) -> Metered:
        tokens = {"in": int(self.usd * TOKENS_A_DOLLAR)}
        return Metered(
            self.usd,
            self.calls,
            self.unknown,
            tokens=tokens,
            models={"m": ModelUse(self.calls, self.usd, self.unknown, tokens, self.unknown_usd)},
            refused=self.refused,
            unknown_usd=self.unknown_usd,
            unknown_tokens=int(self.unknown_usd * TOKENS_A_DOLLAR),
        )


class MeteredWorld(World):
    """A world whose attempts call models, until their machine's meter lets them no more.

    `model_usd` is what the models' vendor bills, whether anybody heard of it or not.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.channel_class = MeteredChannel
        self.accounts: dict[AttemptId, SimAccount] = {}
        self.models = random.Random(f"models {args[0]}")
        self.model_usd = 0.0
        self.in_flight_usd = self.peak_in_flight_usd = 0.0

    def start(
        self, machine: SimMachine, job: Job, length_s: float, end: Ended, marks: tuple[str, str] = ("", "")
    ) -> None:
        is_new = job.id not in machine.jobs
        super().start(machine, job, length_s, end, marks)
        if is_new and job.metering is not None:
            account = self.accounts[job.id] = SimAccount(machine.jobs[job.id], job.allowance)
            for _ in range(self.models.choice((1, 1, 2, 4))):
                self.later(self.models.uniform(0.0, 30.0), self._call, account)
            if self.models.random() < 0.02:
                self.later(self.models.uniform(1.0, 600.0), self._kill_meter, account)

    def _may_call(self, account: SimAccount) -> bool:
        return account.has_room()

    def _call(self, account: SimAccount) -> None:
        """One call after another, until the attempt has ended."""
        if account.job.ended is not None:
            return
        if not self._may_call(account):
            account.refused = "its allowance is used up"
            self.end_job(account.job, Ended("budget"))
            return
        usd = min(self.models.expovariate(1 / 0.01), 0.3)
        most_usd = usd * self.models.uniform(1.0, 5.0)
        account.in_flight.append((usd, most_usd))
        account.calls += 1
        self.model_usd += usd
        self.in_flight_usd += usd
        self.peak_in_flight_usd = max(self.peak_in_flight_usd, self.in_flight_usd)
        self.later(self.models.uniform(1.0, 90.0), self._answered, account, (usd, most_usd))

    def _answered(self, account: SimAccount, call: tuple[float, float]) -> None:
        usd, most_usd = call
        self.in_flight_usd -= usd
        if account.job.ended is not None:
            return
        under_way = sum(each for each, _ in account.in_flight)
        account.in_flight.remove(call)
        if self.models.random() < 0.05:
            account.unknown += 1
            account.unknown_usd += most_usd
        else:
            account.usd += usd
        if not account.last_usd and not account.has_room():
            account.last_usd = under_way
        self.later(self.models.uniform(0.5, 60.0), self._call, account)

    def _kill_meter(self, account: SimAccount) -> None:
        self.end_job(account.job, Ended("unmetered"))

    def end_job(self, job: SimJob, ended: Ended) -> None:
        """What was in flight then is unknown."""
        account = self.accounts.get(job.id)
        if account is not None and job.ended is None:
            account.unknown += len(account.in_flight)
            account.unknown_usd += sum(most_usd for _, most_usd in account.in_flight)
            account.last_usd = account.last_usd or sum(usd for usd, _ in account.in_flight)
            ended = structs.replace(ended, metered=account.used())
        super().end_job(job, ended)


class MeteredChannel(SimChannel):
    """Reaches a machine that has a meter."""

    async def isolate(self, wanted: Isolation) -> Isolated:
        return Isolated()

    async def clear(self, once: str = "") -> None:
        return

    async def forget_set_up(self) -> None:
        return

    async def meter(self, metering: Metering) -> None:
        await self._reach()


def draw_metered(seed: int) -> Scenario:
    """The seed's run with models: one budget for them and for machines. No machine lies: what one says of its
    own calls nobody else can know."""
    drawn, rng = draw(seed), random.Random(f"budget {seed}")
    limits = structs.replace(
        drawn.plan.limits,
        budget_usd=rng.choice((1.0, 3.0, 8.0, 30.0)),
        task_budget_usd=rng.choice((None, None, 0.1, 1.0)),
        max_tokens=rng.choice((None, None, None, 200_000)),
    )
    metering = Metering((ModelApi("models", "https://models.example", "KEY", "authorization"),))
    plan = structs.replace(drawn.plan, limits=limits, metering=metering)
    return replace(drawn, plan=plan, faults=replace(drawn.faults, lies=0.0, forges=0.0))


@dataclass(frozen=True, slots=True)
class Overshoot:
    """How far a run passed its budget, beyond the billing steps of its machines, and the calls in flight.

    Those are the calls under way at one moment; or, where that is more, the calls of each attempt that were
    under way when its allowance was used up: attempts come to their end one after another.
    """

    over_usd: float
    in_flight_usd: float
    untold_usd: float
    """What vendors billed beyond what the journal accounts for, the most that it can have been included."""

    def violations(self) -> Iterator[str]:
        if self.over_usd > self.in_flight_usd + 1e-6:
            yield f"${self.over_usd:.4f} over the budget, with calls of ${self.in_flight_usd:.4f} in flight"
        if self.untold_usd > self.in_flight_usd + 1e-6:
            yield f"${self.untold_usd:.4f} of model money that the journal does not know"


def overshoot(sim: Simulated) -> Overshoot:
    world, purse, limits = sim.world, sim.state.spend.models, sim.state.limits
    assert isinstance(world, MeteredWorld)
    machines = machines_usd(sim)
    over = machines.spent + world.model_usd - (limits.budget_usd or 0.0) - machines.one_step
    if limits.max_tokens is not None:
        over = max(over, world.model_usd - limits.max_tokens / TOKENS_A_DOLLAR)
    known = {attempt.id for attempt in sim.state.attempts.values() if attempt.metered is not None}
    last = {
        job: account.last_usd
        for job, account in world.accounts.items()
        if job not in known or not account.has_room()
    }
    in_flight = max(world.peak_in_flight_usd, sum(last.values()))
    return Overshoot(max(0.0, over), in_flight, max(0.0, world.model_usd - purse.taken))


def simulate_metered(seed: int, world: type[MeteredWorld] = MeteredWorld) -> Simulated:
    return simulate(draw_metered(seed), Parts(world=world))
