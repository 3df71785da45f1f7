"""Policy on tasks that need more than others: which machines are asked for, and who gets what."""

from __future__ import annotations

from msgspec import structs

from evalfleet.events import NewFiles, RunResumed
from evalfleet.model import Cause, Needs, Task, TaskId

from .runs import FREE, PRICED, Run, condemned, requested, started, tasks_of

GPU = Needs(gpus=1)
LARGE = Needs(memory_gb=64.0)
PLAIN = PRICED
WITH_GPU = structs.replace(
    PRICED, size="NC4", has=GPU, cost=structs.replace(PRICED.cost, usd_per_hour=3 * 3600.0)
)
WITH_BOTH = structs.replace(
    PRICED, size="NC64", has=GPU.joined(LARGE), cost=structs.replace(PRICED.cost, usd_per_hour=9 * 3600.0)
)


def some(count: int, needs: Needs, name: str = "g") -> tuple[Task, ...]:
    return tuple(Task(TaskId(f"{name}{i}"), needs=needs) for i in range(count))


def sizes(run: Run) -> list[str]:
    return sorted(machine.offer.size for machine in run.state.machines.values())


def test_as_many_machines_of_each_kind_are_asked_for_as_have_something_to_do() -> None:
    run = Run((*tasks_of(8), *some(2, GPU)), (PLAIN, WITH_GPU), workers=5, canary=0)
    assert len(requested(run.turn())) == 5
    assert sizes(run) == ["D4", "D4", "D4", "NC4", "NC4"]


def test_each_task_goes_to_a_machine_that_has_what_it_needs_and_the_rest_anywhere() -> None:
    run = Run((*tasks_of(4), *some(1, GPU)), (PLAIN, WITH_GPU), workers=3, canary=0)
    run.turn()
    run.ready()
    on = {attempt.split(".")[0]: run.machine(machine).offer.size for attempt, machine in run.open().items()}
    assert on == {"g0": "NC4", "t0": "D4", "t1": "D4"}
    assert [attempt for attempt, _ in started(run.score("g0.0"))] == ["t2.0"], (
        "afterwards it helps the others"
    )


def test_a_machine_that_has_more_does_for_less() -> None:
    run = Run((*some(1, GPU), *some(1, LARGE, "l")), (PLAIN, WITH_BOTH), workers=1, canary=0)
    run.turn()
    assert sizes(run) == ["NC64"]
    run.ready()
    run.score("g0.0")
    assert set(run.open()) == {"l0.0"}


def test_a_retry_goes_only_where_its_needs_are_met() -> None:
    run = Run((*tasks_of(2), *some(1, GPU)), (PLAIN, WITH_GPU), workers=2, canary=0)
    run.turn()
    run.ready()
    gpu = run.open()["g0.0"]
    run.lose(gpu)
    run.gone(gpu)
    run.score("t0.0")
    assert set(run.open()) == {"t1.0"}, "the plain machine does not get it"
    run.ready()
    assert set(run.open()) == {"t1.0", "g0.1"}
    assert run.machine(run.open()["g0.1"]).offer == WITH_GPU


def test_a_task_that_broke_on_the_one_machine_that_does_for_it_is_tried_there_again() -> None:
    """Others that are ready are no others for it: each of the two would wait for the other's machine."""
    large = structs.replace(PRICED, size="E8", has=LARGE, capacity=1)
    gpu = structs.replace(WITH_GPU, capacity=1)
    run = Run((*some(1, GPU), *some(1, LARGE, "l")), (gpu, large), workers=2, canary=0)
    run.turn()
    run.ready()
    run.breaks("g0.0")
    run.breaks("l0.0")
    run.wait(120.0)
    assert set(run.open()) == {"g0.1", "l0.1"}


def test_a_free_machine_in_the_way_of_another_kind_goes_when_nothing_is_left_for_it() -> None:
    larger = structs.replace(FREE, size="large", has=LARGE, capacity=1)
    run = Run((*tasks_of(1), *some(1, LARGE)), (FREE, larger), workers=1, canary=0)
    run.turn()
    assert sizes(run) == ["large"], "that which is hardest to have comes first"
    run.lose("r-h-1", Cause.PROVISIONING)
    run.gone("r-h-1")
    run.ready()
    (attempt,) = run.open()
    assert attempt.startswith("t0"), "while the other is refused, what can be run is run"
    assert condemned(run.score(attempt)) == ["r-h-2"]
    run.gone("r-h-2")
    run.wait(3600.0)
    assert run.machine("r-h-3").offer == larger


def test_when_no_machine_for_the_rest_can_be_had_the_run_stops() -> None:
    run = Run((*tasks_of(1), *some(1, GPU)), (FREE,), workers=1, canary=0)
    run.turn()
    run.ready()
    run.score("t0.0")
    run.gone("r-h-1")
    assert run.stop.reason == "refused"
    assert "has what the tasks that are left need" in run.stop.detail


def test_new_files_may_change_what_a_task_needs() -> None:
    run = Run((*tasks_of(1), *some(2, GPU)), (PLAIN,), workers=1, canary=0)
    lowered = tuple(structs.replace(task, needs=None) for task in some(2, GPU))
    run.tell(RunResumed(new_files=NewFiles(benchmark_spec={}, slots=1, tasks=lowered)))
    assert run.state.unsettled == {None: 3, GPU: 0}
    run.ready()
    for task in ("t0.0", "g0.0", "g1.0"):
        assert set(run.open()) == {task}
        run.score(task)
    assert run.state.scored == 3


def test_a_static_schedule_deals_tasks_out_whatever_they_need() -> None:
    run = Run((*tasks_of(2), *some(2, GPU)), (FREE,), workers=2, canary=0, schedule="round-robin")
    run.turn()
    run.ready()
    assert len(run.open()) == 2
    assert set(run.state.kinds) == {None}
