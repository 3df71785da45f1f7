"""What a machine of Slurm's is, by its folder and by what `squeue` said: also if clocks are apart."""

from __future__ import annotations

import pytest
from msgspec import structs

from evalfleet.model import SECOND, Machine, MachineId
from evalfleet.places.slurm.commands import SlurmJob
from evalfleet.places.slurm.sight import MachineFolder, Sight, StartMark, belonging, queue_of

NOW = 1_800_000_000.0
NAME = "evalfleet-0a1b2c-r-0a1b2c-1"
HOUR_S = 3600.0


def job(state: str, ran_s: float, id: str = "7") -> SlurmJob:
    return SlurmJob(id, state, ran_s, "n1", "main", "", NAME)


def folder(began_ago_s: float, off_s: float = 0.0) -> MachineFolder:
    """Of a machine that has begun so long ago, on a node whose clock is so far ahead."""
    mark = StartMark("7.0", "n1", NOW - began_ago_s + off_s)
    return MachineFolder(job="7", start=mark, listens=True, life_s=1800.0, made_at=NOW - 900.0)


def seen(folder: MachineFolder, *jobs: SlurmJob) -> Machine:
    sight = Sight(queue_of(0.0, jobs), {}, NOW, 0.0, 7200.0)
    return sight.machine(MachineId("r-0a1b2c-1"), "/shared/m", NAME, folder)


@pytest.mark.parametrize("off_s", [-HOUR_S, 0.0, HOUR_S])
def test_a_node_whose_clock_is_apart_does_not_change_how_long_its_machine_has_run(off_s: float) -> None:
    machine = seen(folder(600.0, off_s), job("RUNNING", 601.0))
    assert machine.phase == "up"
    assert machine.ran_s == pytest.approx(601.0, abs=5.0)


@pytest.mark.parametrize("off_s", [-HOUR_S, 0.0, HOUR_S])
def test_a_node_whose_clock_is_apart_does_not_make_its_machine_a_leftover(off_s: float) -> None:
    """It has run for ten minutes of thirty: `reap` of another home leaves it alone, and knows its end."""
    told = belonging("/shared", "0a1b2c", "m", folder(600.0, off_s), job("RUNNING", 601.0), "me", NOW)
    assert told.expires_at is not None
    assert told.expires_at / SECOND - NOW == pytest.approx(1200.0, abs=61.0)


def test_what_waits_has_no_expiry_and_what_has_no_job_is_over() -> None:
    waits = MachineFolder(job="7", life_s=1800.0, made_at=NOW - 900.0)
    assert belonging("/shared", "0a1b2c", "m", waits, job("PENDING", 0.0), "me", NOW).expires_at is None
    over = belonging("/shared", "0a1b2c", "m", folder(600.0), None, "me", NOW).expires_at
    assert over is not None
    assert over <= NOW * SECOND


@pytest.mark.parametrize(
    ("state", "restarted", "phase", "detail"),
    [
        ("FAILED", False, "gone", "failed"),
        ("CANCELLED", False, "gone", "cancelled"),
        ("PREEMPTED", False, "evicted", "preempted"),
        ("NODE_FAIL", False, "evicted", "node_fail"),
        # what runs on the machine can bring these about
        ("PENDING", False, "gone", "requeued"),
        ("RUNNING", True, "gone", "requeued"),
        ("FAILED", True, "gone", "requeued"),
    ],
)
def test_only_what_slurm_gives_its_own_reason_for_is_evicted(
    state: str, restarted: bool, phase: str, detail: str
) -> None:
    machine = seen(structs.replace(folder(600.0), restarted=restarted), job(state, 600.0))
    assert (machine.phase, machine.detail) == (phase, f"Slurm: {detail}")


@pytest.mark.parametrize("off_s", [-HOUR_S, 0.0, HOUR_S])
def test_a_job_that_waited_when_slurm_was_asked_and_has_begun_since_is_up(off_s: float) -> None:
    sight = Sight(queue_of(0.0, [job("PENDING", 0.0)]), {}, NOW, 10.0, 7200.0, {"7.0"})
    machine = sight.machine(MachineId("r-0a1b2c-1"), "/shared/m", NAME, folder(3.0, off_s))
    assert machine.phase == "up"
    assert machine.ran_s is not None
    assert 0.0 <= machine.ran_s <= 10.0
    if not off_s:
        assert machine.ran_s == pytest.approx(3.0)


def test_its_own_job_counts_and_not_another_of_the_same_name() -> None:
    new = MachineFolder(job="8", made_at=NOW)
    before = job("COMPLETED", 50.0)
    assert seen(new, before, job("FAILED", 3.0, "8")).detail.startswith(
        "its job ended before it began (failed)"
    )
    assert seen(new, job("FAILED", 3.0, "8"), before).ran_s == 3.0
