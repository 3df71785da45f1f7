"""vm_pool_registry.json: the words and keys that other tools know, for runs and for pools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from evalfleet import events as ev
from evalfleet.files import replace, to_json
from evalfleet.model import Broken, Cause, Limits, MachineId, Plan, Scored
from evalfleet.planning.plugins import KindFields
from evalfleet.state import fold
from evalfleet.views.live import REGISTRY, PoolScribe, Registrar, Scribe, lend, worker_status

from .views_feed import START, Feed

M1 = MachineId("run1-abc123-1")


def document(feed: Feed, **plan: str) -> dict[str, Any]:
    feed.state.plan = structs.replace(feed.state.plan, **plan)
    registrar = Registrar(KindFields())
    registrar.note(feed.records)
    return registrar.document(feed.state)


def test_a_run_in_the_schema_that_people_know() -> None:
    feed = Feed(tasks=3, machines=1)
    feed.attempt("t_0", Scored(1.0, True))
    feed.attempt("t_1", Broken(Cause.RESULT, "nothing written"))
    feed.start("t_2")
    told = document(feed)
    assert told == {
        "pool_id": "20260102_143052",
        "created_at": "2026-01-02T14:30:52Z",
        "resource_group": "",
        "location": "east",
        "vm_size": "big",
        "workers": [
            {
                "name": "worker-1",
                "ip": "10.0.0.1",
                "status": "running",
                "docker_container": None,
                "waa_ready": False,
                "assigned_tasks": ["t_0", "t_1", "t_2"],
                "completed_tasks": ["t_0"],
                "current_task": "t_2",
                "error": None,
                "created_at": "2026-01-02T14:30:52Z",
                "updated_at": "2026-01-02T14:32:52Z",
            }
        ],
        "total_tasks": 3,
        "completed_tasks": 1,
        "failed_tasks": 1,
    }


def test_places_and_benchmarks_say_some_of_it() -> None:
    azure = {"kind": "azure_vm", "base": "/", "settings": {"resource_group": "agents", "owner": "me"}}
    local = {"kind": "local", "base": "/", "settings": {}}
    plan = Plan("r", "mine", ("l", "a"), {"kind": "waa"}, {"l": local, "a": azure})
    pool = Plan("p", "", ("gone",), {}, {"gone": {"kind": "uninstalled", "base": "/", "settings": {}}})
    fields = KindFields()
    assert fields.of_pool(plan) == {"resource_group": "agents"}
    assert fields.of_pool(pool) == {"resource_group": ""}
    waa = {"docker_container": "winarena", "waa_ready": True}
    assert fields.of_worker(plan, "", ready=True) == fields.of_worker(pool, "waa", ready=True) == waa
    assert fields.of_worker(pool, "b", ready=True) == {"docker_container": None, "waa_ready": False}


def test_the_words_for_a_machines_life() -> None:
    feed = Feed(tasks=1, machines=1, ready=False)
    machine = feed.state.machines[M1]
    seen = [worker_status(machine)]
    for event in (ev.MachineUp(M1), ev.MachineReady(M1)):
        feed.add(event)
        seen.append(worker_status(machine))
    attempt = feed.start("t_0")
    seen.append(worker_status(machine))
    feed.end(attempt, Scored(1.0, True))
    feed.finish()
    seen.append(worker_status(machine))
    assert seen == ["creating", "creating", "ready", "running", "deleted"]


def test_a_machine_that_was_lost_says_why() -> None:
    feed = Feed(tasks=1, machines=1)
    feed.lose(1)
    (worker,) = document(feed)["workers"]
    assert (worker["status"], worker["error"]) == ("failed", "the place took it back")


@pytest.mark.parametrize(
    ("address", "ip"),
    [
        ("/home/me/.machines/x", "127.0.0.1"),
        ("root@10.1.2.3:2222", "10.1.2.3"),
        ("gpu1.example.org", "gpu1.example.org"),
        ("fd00::1", "fd00::1"),
        ("", None),
    ],
)
def test_addresses(address: str, ip: str | None) -> None:
    feed = Feed(tasks=1, machines=1, ready=False)
    feed.add(ev.MachineUp(M1, address))
    assert document(feed)["workers"][0]["ip"] == ip


# -- a pool's file while runs have its machines --------------------------------------------------


def a_pool(tmp_path: Path, names: tuple[str, ...]) -> Path:
    feed = Feed(tasks=1, machines=len(names))
    told = document(feed)
    for worker, name in zip(told["workers"], names, strict=True):
        worker["name"] = name
    folder = tmp_path / "p"
    folder.mkdir()
    replace(folder / REGISTRY, to_json(told))
    return folder


def shown(folder: Path) -> dict[str, dict[str, Any]]:
    told = json.loads((folder / REGISTRY).read_bytes())
    return {worker["name"]: worker for worker in told["workers"]}


def test_two_runs_show_what_they_do_and_keep_off_each_others_machines(tmp_path: Path) -> None:
    folder = a_pool(tmp_path, ("worker-1", "worker-2"))
    first, second = Feed(tasks=2, machines=1), Feed(tasks=2, machines=0)
    second.wait(10)
    second.machine(2)
    first.wait(5)
    first.start("t_0")
    second.start("t_1", machine=2)
    lend(folder, document(first))
    lend(folder, document(second))
    assert {name: worker["current_task"] for name, worker in shown(folder).items()} == {
        "worker-1": "t_0",
        "worker-2": "t_1",
    }
    assert {worker["status"] for worker in shown(folder).values()} == {"running"}


def test_what_a_run_has_given_back_is_ready_and_the_next_ones(tmp_path: Path) -> None:
    folder = a_pool(tmp_path, ("worker-1",))
    first = Feed(tasks=1, machines=1)
    first.attempt("t_0", Scored(1.0, True))
    first.finish()
    lend(folder, document(first))
    assert shown(folder)["worker-1"]["status"] == "ready"
    assert shown(folder)["worker-1"]["completed_tasks"] == ["t_0"]
    second = Feed(tasks=2, machines=0)
    second.now = first.now
    second.wait(30)
    second.machine(1)
    second.start("t_1")
    lend(folder, document(second))
    lend(folder, document(first))  # once more, late
    assert shown(folder)["worker-1"]["current_task"] == "t_1", "a run that has ended wrote over a live one"


def test_a_run_on_a_pool_knows_its_size_and_leaves_machines_that_are_set_up_and_live(tmp_path: Path) -> None:
    folder = a_pool(tmp_path, ("worker-1", "worker-2"))
    run = Feed(tasks=1, machines=2)
    run.attempt("t_0", Scored(1.0, True))
    run.lose(2)
    run.finish()
    told = document(run, pool="p", benchmark="waa")
    told["vm_size"] = "pool"
    lend(folder, told)
    assert told["vm_size"] == "big"
    assert [(w["status"], w["waa_ready"]) for w in told["workers"]] == [("ready", True), ("failed", False)]
    assert {name: w["waa_ready"] for name, w in shown(folder).items()} == {
        "worker-1": True,
        "worker-2": False,
    }


def test_a_pool_without_a_file_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    lend(tmp_path / "p", document(Feed(tasks=1, machines=1)))
    assert not list((tmp_path / "p").iterdir())


class Rows:
    def __init__(self, records: list[ev.Record]) -> None:
        self.records = records

    def read_pages(self, stream: str, after: int = 0) -> list[list[ev.Record]]:
        return [self.records[after:]]


def test_the_homes_copy_is_the_newest_ones(tmp_path: Path) -> None:
    plan = Plan("p", "", ("lab",), limits=Limits(workers=1))
    pool = [ev.Record(1, 1, START, ev.PoolPlanned(plan))]
    assert fold(pool).total == 0
    run = Feed(tasks=1, machines=1)
    newest = ["p"]
    PoolScribe(tmp_path, Rows(pool), "p", is_newest=lambda: newest == ["p"]).tick()
    home, own = tmp_path / REGISTRY, tmp_path / "p" / REGISTRY
    assert home.read_bytes() == own.read_bytes()
    newest[0] = "run1"
    Scribe(tmp_path, Rows(run.records), "run1", lambda: run.now, lambda: newest == ["run1"]).tick()
    assert home.read_bytes() == (tmp_path / "run1" / REGISTRY).read_bytes()
    PoolScribe(tmp_path, Rows(pool), "p", is_newest=lambda: newest == ["p"]).tick()
    assert home.read_bytes() != own.read_bytes()
