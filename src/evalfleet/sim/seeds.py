"""Many seeds, one after the other: what `evalfleet sim` reports."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .checks import violations
from .scenario import draw
from .simulate import Parts, Simulated, simulate


@dataclass(frozen=True, slots=True)
class SeedsReport:
    """`failures`: seed -> what was violated. `digest` covers every journal, byte for byte."""

    seeds: int
    events: int
    attempts: int
    machines: int
    crashes: int
    refusals: int
    virtual_hours: float
    digest: str
    failures: dict[int, list[str]]


def run_seeds(
    seeds: Iterable[int], parts: Parts | None = None, on_seed: Callable[[int, list[str]], None] | None = None
) -> SeedsReport:
    events = attempts = machines = crashes = refusals = count = 0
    hours = 0.0
    digest = hashlib.sha256()
    failures: dict[int, list[str]] = {}
    for seed in seeds:
        found, sim = check_seed(seed, parts)
        if found:
            failures[seed] = found
        if on_seed is not None:
            on_seed(seed, found)
        count += 1
        if sim is None:
            continue
        events += len(sim.store.rows)
        attempts += len(sim.state.attempts)
        machines += len(sim.state.machines)
        crashes += sim.crashes
        refusals += sim.world.refusals
        hours += sim.virtual_s / 3600
        digest.update(sim.store.digest().encode())
    return SeedsReport(
        count, events, attempts, machines, crashes, refusals, hours, digest.hexdigest()[:12], failures
    )


def check_seed(seed: int, parts: Parts | None = None) -> tuple[list[str], Simulated | None]:
    """What one seed violates. An engine that falls over is a violation like any other."""
    try:
        sim = simulate(draw(seed), parts)
    except Exception as err:  # whatever a planted or real bug throws
        return [f"{type(err).__name__}: {err}"], None
    return violations(sim), sim
