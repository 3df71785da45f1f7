"""A machine that a task has set up for itself is given the next one with the same set-up first."""

from __future__ import annotations

from evalfleet.model import Task, TaskId

from .runs import Run


def task(name: str, set_up: str, weight_s: float | None = None) -> Task:
    return Task(TaskId(name), set_up=set_up, weight_s=weight_s)


def order_on_one_machine(*tasks: Task) -> list[str]:
    run = Run(tasks, workers=1)
    run.turn()
    run.ready()
    ran: list[str] = []
    while opened := run.open():
        (attempt,) = opened
        ran.append(attempt.rpartition(".")[0])
        run.score(attempt)
    return ran


def test_tasks_of_one_image_run_one_after_another() -> None:
    tasks = [task("a1", "python"), task("b1", "node"), task("a2", "python"), task("b2", "node")]
    assert order_on_one_machine(*tasks) == ["a1", "a2", "b1", "b2"]


def test_a_task_without_a_set_up_of_its_own_keeps_its_turn() -> None:
    tasks = [task("a1", "python"), task("plain", ""), task("a2", "python")]
    assert order_on_one_machine(*tasks) == ["a1", "plain", "a2"]


def test_a_much_longer_task_goes_first_nevertheless() -> None:
    tasks = [task("a1", "python", 900), task("b1", "node", 800), task("a2", "python", 500)]
    assert order_on_one_machine(*tasks) == ["a1", "a2", "b1"]
    tasks = [task("a1", "python", 900), task("b1", "node", 800), task("a2", "python", 300)]
    assert order_on_one_machine(*tasks) == ["a1", "b1", "a2"]


def test_each_machine_keeps_to_what_it_has() -> None:
    run = Run([task(f"{image}{n}", image) for n in range(3) for image in ("x", "y")], workers=2)
    run.turn()
    run.ready()
    images: dict[str, set[str]] = {}
    while opened := run.open():
        for attempt, machine in opened.items():
            images.setdefault(machine, set()).add(attempt[0])
        for attempt in opened:
            run.score(attempt)
    assert sorted(map(sorted, images.values())) == [["x"], ["y"]]
