"""Machines of the size that earlier runs needed, by domain, by what their machines told."""

from __future__ import annotations

from pathlib import Path

import pytest

from evalfleet.benchmarks.waa.benchmark import WaaBenchmark
from evalfleet.channels.samples import Load, Samples
from evalfleet.model import SECOND, Cost, Needs, Offer, Task, TaskId
from evalfleet.planning.past import DomainLoad, domain_loads
from evalfleet.planning.right_size import needs_of_domain

from .runs import Run

VM = Offer("cloud", "D4", cpus=4, memory_gb=16.0, cost=Cost(usd_per_hour=0.2))
ASKED = Needs(cpus=8, memory_gb=32.0, disk_gb=128.0, nested_virtualization=True)
LEAST = Needs(cpus=2, memory_gb=12.0, disk_gb=128.0, nested_virtualization=True)


def ran(home: Path, offer: Offer, loads: dict[str, tuple[float, float]]) -> Run:
    """Tasks of these domains, one after another, with their machine's load (CPU, memory) meanwhile."""
    tasks = [Task(TaskId(f"{domain}_{n}"), domain) for domain in loads for n in range(5)]
    run, samples = Run(tasks, [offer], workers=1), Samples(home)
    run.turn()
    run.ready()
    while opened := run.open():
        ((attempt, machine),) = opened.items()
        cpu, memory = loads[attempt.partition("_")[0]]
        for second in range(0, 120, 12):
            busy = 1.0 if second == 60 else cpu
            samples.keep(machine, Load(busy, memory, 0.1), now=run.now + second * SECOND)
        run.wait(119)
        run.score(attempt)
        run.wait(1)
    return run


def test_loads_are_told_apart_by_domain_in_gigabytes_and_processors(tmp_path: Path) -> None:
    run = ran(tmp_path, VM, {"web": (0.2, 0.25), "video": (0.9, 0.875)})
    found = domain_loads(tmp_path, [run.state])
    assert found.keys() == {"web", "video"}
    assert (found["web"].attempts, found["web"].memory_gb) == (5, 4.0)
    assert found["web"].cpus == pytest.approx(0.8), "a moment of full load is no need of more"
    assert found["video"].memory_gb == 14.0


def test_machines_of_unknown_size_and_runs_without_samples_tell_nothing(tmp_path: Path) -> None:
    unknown = ran(tmp_path / "a", Offer("cloud", "D4", cost=Cost(usd_per_hour=0.2)), {"web": (0.2, 0.25)})
    assert domain_loads(tmp_path / "a", [unknown.state]) == {}
    run = ran(tmp_path / "b", VM, {"web": (0.2, 0.25)})
    assert domain_loads(tmp_path / "elsewhere", [run.state]) == {}


@pytest.mark.parametrize(
    ("load", "cpus", "memory_gb"),
    [
        (DomainLoad(5, 11.0, 2.9), 4, 16.0),
        (DomainLoad(5, 2.0, 0.3), 2, 12.0),
        (DomainLoad(5, 30.0, 7.9), 16, 64.0),
        (DomainLoad(4, 2.0, 0.3), 8, 32.0),
        (None, 8, 32.0),
    ],
)
def test_what_was_used_and_a_margin_is_asked_for_but_never_less_than_the_guest_needs(
    load: DomainLoad | None, cpus: int, memory_gb: float
) -> None:
    found = needs_of_domain(ASKED, LEAST, load)
    assert (found.cpus, found.memory_gb) == (cpus, memory_gb)
    assert (found.disk_gb, found.nested_virtualization) == (128.0, True)


@pytest.mark.parametrize(("ram", "least_gb"), [("8G", 12.0), ("4G", 8.0), ("16G", 24.0)])
def test_windows_agent_arena_never_has_less_than_its_guest_and_4_gb(ram: str, least_gb: float) -> None:
    benchmark = WaaBenchmark.from_spec({"settings": {"ram": ram}}, model="", agent={}, settings={})
    assert benchmark.guest is not None
    assert benchmark.guest.least_needs.memory_gb == least_gb
    assert benchmark.guest.least_needs.nested_virtualization
