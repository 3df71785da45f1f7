"""What is told before money is spent: what would be made where, at what price, how long we may act."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
from pathlib import Path

import pytest

from evalfleet.channels.samples import Load, Samples
from evalfleet.clock import WallClock
from evalfleet.events import (
    AttemptEnded,
    AttemptStarted,
    Event,
    MachineReady,
    MachineRequested,
    MachineStopped,
    MachineStopping,
    MachineUp,
    PoolPlanned,
    RunEnded,
    RunPlanned,
    TasksPlanned,
)
from evalfleet.journal import Holder, Store
from evalfleet.model import (
    SECOND,
    AttemptId,
    Cost,
    Limits,
    MachineId,
    Offer,
    Plan,
    Scored,
    Task,
    TaskId,
    after,
)
from evalfleet.places.azure import AzurePlace
from evalfleet.ports import PlaceContext
from standins.azure import StandIn
from tests.cloud.desk import AzureDesk
from tests.cloud.places import SIZE, environment, settings

LONG_S = 7200
SIZES = ["Standard_D4ds_v5"]

AZ = """#!/bin/sh
echo '{"accessToken": "%s", "expires_on": %d, "tokenType": "Bearer"}'
"""


def test_a_dry_run_tells_what_would_be_made_and_asks_nobody(azure: StandIn, tmp_path: Path) -> None:
    desk = AzureDesk(
        azure,
        tmp_path / "desk",
        regions=["eastus", "westus2"],
        zones=["2"],
        ssh_from=["192.0.2.7/32"],
        spot=True,
    )
    desk.bench(12)
    words = ("run", "b.toml", "--on", "azure", "--workers", "3", "--name", "r", "--dry-run")
    shown = desk.say(*words)
    found = json.loads(desk.say(*words, "--json"))
    made = found["creates"]["azure"]
    assert [each["kind"] for each in made] == [
        "resource group",
        "network",
        "security group",
        *["machine"] * 3,
    ]
    rules, machine = made[2], made[3]
    assert "port 22 from 192.0.2.7/32" in rules["detail"]
    assert (machine["name"], machine["where"]) == ("r-xxxxxx-1", "eastus, zone 2")
    assert all(word in machine["detail"] for word in (SIZE, "spot", "128 GB", "public address", "$0."))
    assert all(each["name"] in shown for each in made)
    told = found["estimate"]
    assert (told["at_once"], told["task_seconds"], told["machine_seconds"]) == (3, 60.0, 300.0)
    assert told["duration_seconds"] == 12 / 3 * 60 + 300
    assert told["machine_hours"] == 0.45
    assert abs(told["usd"] - 0.45 * found["offers"][0]["usd_per_hour"]) < 0.001
    assert "12 tasks / 3 at once x 1.0 min a task + 5.0 min a machine (a guess, without its set-up)" in shown
    bench = desk.folder / "b.toml"
    plain = bench.read_text()
    bench.write_text(f'{plain}setup = [["true"]]\nsetup_timeout_s = 8000\n')
    told = json.loads(desk.say(*words, "--json"))["estimate"]
    guess = (told["machine_seconds"], told["machine_basis"])
    assert guess == (300 + 0.275 * 8000, "a guess, with its set-up"), "a share of what the set-up may take"
    *_, doubt = json.loads(desk.done(*words, "--json", "--budget", "0.01").out)["warnings"]
    assert doubt.startswith("--budget 0.01 may not pay one machine until it is ready: about $0.0")
    assert doubt.endswith(" for 42 min (a guess, with its set-up)")
    assert "until it is ready" not in desk.done(*words, "--budget", "1").err
    bench.write_text(plain)
    assert not azure.server.calls
    assert not desk.home.exists()

    past = {"place": "azure", "requested_at": "2026-11-15T12:00:00Z", "ready_at": "2026-11-15T12:20:00Z"}
    (desk.home / "old").mkdir(parents=True)
    (desk.home / "old/results.json").write_text(
        json.dumps({"benchmark": "b", "tasks": [], "machines": [past]})
    )
    assert "+ 20.0 min a machine (what earlier runs took)" in desk.say(*words)


class Person:
    """Somebody who is logged in with `az`: a program on the path that answers as az does."""

    def __init__(self, azure: StandIn, folder: Path) -> None:
        self._azure = azure
        self._folder = folder
        (folder / "bin").mkdir()
        (folder / ".azure").mkdir()
        self.log_in(upn="ada@example.org", scp="user_impersonation", idtyp="user")

    def log_in(self, **claims: str) -> None:
        self._azure.identity.more = dict(claims)
        program = self._folder / "bin/az"
        program.write_text(AZ % (self._azure.token(), 1 << 31))
        program.chmod(0o755)

    @property
    def environ(self) -> dict[str, str]:
        return {
            "PATH": f"{self._folder / 'bin'}:{os.environ['PATH']}",
            "HOME": str(self._folder),
            "AZURE_TOKEN_CREDENTIALS": "AzureCliCredential",
            **dict.fromkeys(("AZURE_TENANT_ID", "AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET"), ""),
        }


def doubts(azure: StandIn, home: Path, lasts_s: float, environ: dict[str, str]) -> str:
    async def main() -> str:
        made = AzurePlace.make("azure", settings(azure), PlaceContext(home, "h", {}, environ, home))
        try:
            return "; ".join(await made.doubts(lasts_s))
        finally:
            await made.close()

    return asyncio.run(main())


def test_a_login_that_may_not_outlive_the_run(
    azure: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    person = Person(azure, tmp_path)
    for name, value in person.environ.items():
        monkeypatch.setenv(name, value)
    assert not doubts(azure, tmp_path, 600.0, person.environ)
    assert "logged in to Azure as ada@example.org" in doubts(azure, tmp_path, LONG_S, person.environ)
    person.log_in(appid="app", idtyp="app")
    assert not doubts(azure, tmp_path, LONG_S, person.environ), "it renews itself"
    entry = {"client_id": "app", "tenant": "t", "client_assertion": "x.y.z"}
    (tmp_path / ".azure/service_principal_entries.json").write_text(json.dumps([entry]))
    note = doubts(azure, tmp_path, LONG_S, person.environ)
    assert "federated token" in note
    assert "x.y.z" not in note
    assert not doubts(azure, tmp_path, LONG_S, environment(azure)), "a secret gets new tokens"


def test_it_is_told_before_the_run_starts(azure: StandIn, tmp_path: Path) -> None:
    azure.cloud.capacity.limits["eastus", "", ""] = 0
    desk = AzureDesk(azure, tmp_path / "desk")
    desk.bench(3)
    environ = Person(azure, tmp_path).environ
    words = ("run", "b.toml", "--on", "azure", "--name", "r", "--task-timeout", str(LONG_S))
    note, *_ = desk.done(*words, code=4, env=environ).err.splitlines()
    assert note.startswith("evalfleet: note: you are logged in to Azure as ada@example.org")
    assert "warn  login" in desk.done("doctor", "azure", env=environ).out


def test_a_plan_tells_quotas_and_chooses_what_they_last_for(azure: StandIn, tmp_path: Path) -> None:
    azure.cloud.quota.limits["eastus", "standardDDSv5Family"] = 12
    desk = AzureDesk(azure, tmp_path / "desk", sizes=SIZES)
    desk.bench(12)
    words = ("plan", "b.toml", "--on", "azure", "--workers", "2,3,6", "--draws", "20", "--budget", "100")
    shown = desk.say(*words)
    assert "quota for 3 more" in shown
    assert re.search(r"^! +6 ", shown, re.MULTILINE)
    assert "! more machines than the quota lasts for" in shown
    assert max(map(len, shown.partition("\n* no other way")[0].splitlines())) <= 80
    found = json.loads(desk.say(*words, "--json"))
    regular = [each for each in found["options"] if not each["spot"] and not each["stopped_pool"]]
    assert {(each["workers"], each["quota"]) for each in regular} == {(2, 3), (3, 3), (6, 3)}
    spot = [each for each in found["options"] if each["spot"]]
    assert all(each["quota"] is None or each["quota"] > 3 for each in spot), "spot has a quota of its own"
    azure.do(azure.server.calls.clear)
    desk.say("plan", "b.toml", "--on", "azure", "--workers", "2", "--draws", "20")
    looked = [path for _, path, _ in azure.server.calls if path.endswith("/skus")]
    assert len(looked) <= 2, "once for regular machines, and once for spot ones"
    unlisted = desk("plan", "b.toml", "--on", "azure", "--set", "sizes=Standard_NC4as_T4_v3")
    unlisted.refused("the price of Standard_NC4as_T4_v3 is not known", "evalfleet prices --update")


def test_the_command_of_a_plan_is_one_that_works(azure: StandIn, tmp_path: Path) -> None:
    """A stopped pool is chosen where there is one, and by its name."""
    desk = AzureDesk(azure, tmp_path / "desk", sizes=[*SIZES, "Standard_D8ds_v5"])
    desk.bench(12)
    words = ("plan", "b.toml", "--on", "azure", "--workers", "2", "--draws", "20", "--json")
    for more in (("--deadline", "9h"), ("--budget", "100")):
        found = json.loads(desk.say(*words, *more))
        assert found["chosen"]["stopped_pool"] is False
        ways = {(each["size"], each["spot"], each["stopped_pool"]) for each in found["options"]}
        sizes = (SIZES[0], "Standard_D8ds_v5")
        made = {(size, spot, False) for size in sizes for spot in (False, True)}
        assert ways == {*made, (SIZES[0], False, True)}, "each size, spot and regular, new and stopped"
        copied = shlex.split(found["command"])
        told = json.loads(desk.say(*copied[1:], "--dry-run", "--json"))
        assert told["plan"]["limits"]["workers"] == 2
        assert {each["size"] for each in told["offers"]} == {found["chosen"]["size"]}
        assert told["offers"][0].get("spot", False) is found["chosen"]["spot"]
    a_stopped_pool(desk, "mine", machines=2)
    found = json.loads(desk.say(*words, "--budget", "100"))
    assert (found["chosen"]["stopped_pool"], found["chosen"]["pool"]) == (True, "mine")
    start, run = found["command"].split(" && ")
    assert start == "evalfleet pool start mine"
    assert "--pool mine" in run
    assert "--on" not in run
    three = json.loads(
        desk.say("plan", "b.toml", "--on", "azure", "--workers", "3", "--draws", "20", "--json")
    )
    assert {each["pool"] for each in three["options"] if each["stopped_pool"]} == {None}, "it has two"


def a_stopped_pool(desk: AzureDesk, name: str, machines: int) -> None:
    store = Store.open(desk.home)
    offer = Offer("azure", SIZES[0], "eastus", cpus=4, memory_gb=16.0, cost=Cost(usd_per_hour=0.226))
    began = WallClock().now()
    ids = [MachineId(f"{name}-abc123-{n}") for n in range(1, machines + 1)]
    events: list[Event] = [PoolPlanned(Plan(name, "", ("azure",), limits=Limits(machines, lease_s=86_400.0)))]
    for n, machine in enumerate(ids):
        events += [MachineRequested(machine, f"worker-{n}", offer, after(began, 86_400.0))]
        events += [
            MachineUp(machine),
            MachineReady(machine),
            MachineStopping(machine),
            MachineStopped(machine),
        ]
    store.create_stream(name, "pool", began, events)


def test_machines_have_the_size_that_tasks_of_each_domain_needed(azure: StandIn, tmp_path: Path) -> None:
    sizes = ["Standard_D2ds_v5", "Standard_D4ds_v5", "Standard_D8ds_v5"]
    desk = AzureDesk(azure, tmp_path / "desk", sizes=sizes)
    desk.bench(12)
    lines = [json.loads(line) for line in (desk.folder / "tasks.jsonl").read_text().splitlines()]
    named = [{**line, "domain": "web" if n % 2 else "video"} for n, line in enumerate(lines)]
    (desk.folder / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in named))
    an_earlier_run(desk, {"web": (0.1, 0.2), "video": (0.5, 0.9)})
    words = ("plan", "b.toml", "--on", "azure", "--workers", "2", "--draws", "20")
    found = json.loads(desk.say(*words, "--json"))
    assert {each["size"] for each in found["options"] if each["right_sized"]} == {"Standard_D2ds_v5"}
    told = json.loads(desk.say("run", "b.toml", "--on", "azure", "--right-size", "--dry-run", "--json"))
    assert told["plan"]["needs"] == {"memory_gb": 4.0}
    large = [each["size"] for each in told["offers"] if each.get("has", {}).get("memory_gb") == 32.0]
    assert large == ["Standard_D8ds_v5"], "14.4 GB and a margin"


def an_earlier_run(desk: AzureDesk, loads: dict[str, tuple[float, float]]) -> None:
    """Six tasks of each domain, one after another on a machine of 16 GB with this load (CPU, memory)."""
    store = Store.open(desk.home)
    offer = Offer(
        "azure", "Standard_D4ds_v5", "eastus", cpus=4, memory_gb=16.0, cost=Cost(usd_per_hour=0.226)
    )
    began, machine = 1_790_000_000 * SECOND, MachineId("old-abc123-1")
    tasks = [Task(TaskId(f"{domain}_{n}"), domain) for domain in loads for n in range(6)]
    events: list[Event] = [RunPlanned(Plan("old", "b", ("azure",)), len(tasks)), TasksPlanned(tuple(tasks))]
    events += [MachineRequested(machine, "vm-1", offer, after(began, 86_400.0))]
    store.create_stream("old", "run", began, [*events, MachineUp(machine), MachineReady(machine)])
    journal, samples = store.acquire("old", Holder.here(began), began), Samples(desk.home)

    async def write() -> None:
        for n, task in enumerate(tasks):
            start = began + 100 * (n + 1) * SECOND
            attempt = AttemptId(f"{task.id}.0")
            await journal.append(start, [AttemptStarted(attempt, task.id, machine)])
            samples.keep(machine, Load(*loads[task.domain], 0.1), now=start + 30 * SECOND)
            await journal.append(start + 60 * SECOND, [AttemptEnded(attempt, Scored(1.0, True), 60.0)])
        await journal.append(began + 5000 * SECOND, [RunEnded("done")])
        await journal.close()

    asyncio.run(write())
    (desk.home / "old").mkdir()
    (desk.home / "old/results.json").write_text('{"run": "old", "benchmark": "b", "tasks": []}')
