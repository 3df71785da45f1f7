"""How bad a simulated world is: rates and spans, drawn from the seed."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Faults:
    """Chances are per call, per machine or per job; spans are seconds. All zero: a perfect world."""

    call_fails: float = 0.0
    call_throttled: float = 0.0
    refused_for_good: float = 0.0
    create_lands_late_s: float = 1.0
    never_boots: float = 0.0
    boot_s: tuple[float, float] = (30.0, 60.0)
    setup_fails: float = 0.0
    machine_dies_every_s: float = 0.0
    machine_freezes_every_s: float = 0.0
    freeze_s: tuple[float, float] = (20.0, 900.0)
    machine_hangs_every_s: float = 0.0
    hangs_from_boot: float = 0.0
    evicted_every_s: float = 0.0
    eviction_notice_s: float = 0.0
    channel_fails: float = 0.0
    job_hangs: float = 0.0
    job_breaks: float = 0.0
    grader_fails: float = 0.0
    queue_s: tuple[float, float] = (0.0, 3600.0)
    service_restarts_every_s: float = 0.0
    controller_crashes: int = 0
    crash_every_s: float = 2000.0
    take_over: float = 0.0
    reboots: float = 0.0  # that a crash of the controller is one of its computer
    lies: float = 0.0  # that a machine answers anything: see places.LyingChannel
    forges: float = 0.0  # that something else than our supervisor answers on it from the start
    latency_s: tuple[float, float] = (0.05, 2.0)
    commit_s: tuple[float, float] = (0.001, 0.02)

    @property
    def calm(self) -> bool:
        """Nothing fails but, perhaps, controllers, their own network, and machines that lie."""
        return not (
            self.call_fails
            or self.never_boots
            or self.setup_fails
            or self.channel_fails
            or self.job_hangs
            or self.job_breaks
            or self.machine_dies_every_s
            or self.machine_freezes_every_s
            or self.machine_hangs_every_s
            or self.hangs_from_boot
            or self.evicted_every_s
            or self.service_restarts_every_s
        )


def draw_faults(rng: random.Random) -> Faults:
    """A world somewhere between calm and awful."""
    misery = rng.choice((0.0, 0.3, 1.0, 1.0, 2.0))
    return Faults(
        machine_hangs_every_s=rng.choice((0.0, 6000.0)) * (misery > 0),
        hangs_from_boot=0.04 * misery,
        eviction_notice_s=rng.choice((0.0, 30.0)),
        call_fails=0.04 * misery,
        call_throttled=0.04 * misery,
        refused_for_good=rng.choice((0.0, 0.0, 0.02)) * misery,
        create_lands_late_s=rng.uniform(1.0, 40.0),
        never_boots=0.04 * misery,
        boot_s=(30.0, rng.choice((60.0, 300.0, 900.0))),
        setup_fails=0.05 * misery,
        machine_dies_every_s=rng.choice((0.0, 7200.0, 3000.0)) * (misery > 0),
        machine_freezes_every_s=rng.choice((0.0, 5000.0)) * (misery > 0),
        evicted_every_s=rng.choice((0.0, 4000.0)) * (misery > 0),
        channel_fails=0.02 * misery,
        job_hangs=0.03 * misery,
        job_breaks=0.08 * misery,
        grader_fails=0.01 * misery,
        queue_s=rng.choice(((0.0, 60.0), (0.0, 3600.0), (0.0, 3600.0))),
        service_restarts_every_s=rng.choice((0.0, 5000.0)) * (misery > 0),
        controller_crashes=rng.choice((0, 2, 5, 9)),
        crash_every_s=rng.choice((300.0, 2000.0)),
        take_over=rng.choice((0.0, 0.5)),
        reboots=rng.choice((0.0, 0.0, 0.5)),
        lies=rng.choice((0.0, 0.0, 0.1, 0.3)),
    )
