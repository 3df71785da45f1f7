"""Machines of Azure Batch that nothing can connect to: pilots, mailboxes and storage are real."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evalfleet.errors import PlaceError
from evalfleet.events import MachineCondemned
from evalfleet.model import Needs
from evalfleet.places.azure_batch import AzureBatchPlace
from standins.azure_batch import ProcessNodes, StandIn
from standins.azure_ml import Processes
from tests.cloud.batch_places import FAST, HOME, examine, machine_id, offer, play
from tests.cloud.mail_desk import nothing_left, seen
from tests.cloud.services import desk
from tests.desk import Desk, Process
from tests.waiting import until, until_async

CANNOT = Processes.missing()
pytestmark = pytest.mark.skipif(CANNOT is not None, reason=f"NO TEST OF BATCH'S MAILBOXES: {CANNOT}")
LIFE_S = 3600.0
ONE = machine_id()
MAIL: dict[str, Any] = {"reach": "mailbox", "ssh_from": ()}
SECRET = "a-password-that-nobody-may-see"
PRIVATE = {**MAIL, "container": "evals.azurecr.io/agents:1", "registry_user": "evals"}
CONTAINER = {**MAIL, "container": "docker.io/library/python:3.12"}


# -- runs ------------------------------------------------------------------------------------------------


@pytest.fixture
def account() -> Iterator[StandIn]:
    with StandIn(nodes=ProcessNodes(), timing=FAST) as made:
        yield made


def gave_up(at: Desk, run: Process, tasks: int = 1) -> list[str]:
    """Wait until all tasks are scored. Returns why machines were given up before that."""
    assert run.wait().code == 0, run.said
    assert at.results("r")["scored"] == tasks
    return [event.detail for event in at.events() if isinstance(event, MachineCondemned) and event.detail]


@pytest.mark.nightly
@pytest.mark.parametrize("fault", ["nodes_unusable", "lost", "died"])
def test_a_node_that_is_unusable_or_lost_or_whose_container_dies_is_replaced(
    account: StandIn, tmp_path: Path, fault: str
) -> None:
    at = desk(account, tmp_path, 1, lost_s=12, isolation="none")
    score = (tmp_path / "run.sh").read_text()
    (tmp_path / "run.sh").write_text(f"if mkdir {tmp_path}/begun; then sleep 1000; fi\n{score}")
    account.faults.nodes_unusable = fault == "nodes_unusable"
    run = at.start("run", "b.toml", "--on", "p", "--workers", "1", "--name", "r")
    if fault == "nodes_unusable":
        (tmp_path / "begun").mkdir()
        until(lambda: any("unusable" in each for each in _details(at)), lambda: run.said)
        account.faults.nodes_unusable = False
    else:
        until((tmp_path / "begun").exists, lambda: run.said)
        node, task = account.node("r-"), account.job("r-").tasks["pilot"]
        if fault == "lost":
            account._await(account.service.release(node))
        else:
            assert task.run is not None
            account._await(task.run.kill())
    assert gave_up(at, run)
    nothing_left(account)


@pytest.mark.nightly
def test_a_node_that_burns_its_processors_and_gives_nothing_is_replaced_and_its_output_is_read_meanwhile(
    account: StandIn, tmp_path: Path
) -> None:
    """The first attempt writes one line, and then keeps every processor busy for ever. The other task does so
    for longer than the rule waits, but goes on to write, and so may do that."""
    at = desk(account, tmp_path, 2, isolation="none")
    with (tmp_path / "evalfleet.toml").open("a") as rules:
        rules.write("[alerts.compute_node_unhealthy]\nafter_s = 15\n")
    score = (tmp_path / "run.sh").read_text()
    (tmp_path / "run.sh").write_text(
        "burn() { for n in $(seq $(nproc)); do while :; do :; done & done; }\n"
        "if [ $EVALFLEET_TASK_ID = t1 ]; then burn; for n in $(seq 25); do echo alive $n; sleep 1; done\n"
        f"elif mkdir {tmp_path}/begun; then echo burning; burn; wait; fi\nkill $(jobs -p)\n{score}"
    )
    run = at.start("run", "b.toml", "--on", "p", "--workers", "1", "--name", "r")
    until((tmp_path / "begun").exists, lambda: run.said)
    until(lambda: "burning" in at("logs", "r", "t0").out, lambda: run.said)
    assert run.lives, "it is read while it runs"
    why = gave_up(at, run, tasks=2)[0]
    assert "alert compute_node_unhealthy: CPU of worker-1 has been over 95.0% for 15s" in why
    assert len(at.state("r").machines) == 2
    assert len(at.state("r").attempts) == 3, "the busy one that wrote on was left alone"
    nothing_left(account)


def _details(at: Desk) -> list[str]:
    return [event.detail for event in at.events() if isinstance(event, MachineCondemned)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quota", "told"),
    [
        ("dedicated", "ask for more dedicated cores: the account's page Quotas"),
        ("pools", "fewer --workers, or ask for more: the account's page Quotas"),
        ("jobs", "fewer --workers, or ask for more: the account's page Quotas"),
    ],
)
def test_a_run_without_quota_stops_at_once_and_says_where_to_ask(
    account: StandIn, tmp_path: Path, quota: str, told: str
) -> None:
    account.service.quota[quota] = 0
    done = desk(account, tmp_path, 1)("run", "b.toml", "--on", "p", "--workers", "1", "--name", "r")
    assert done.code == 4, done
    assert told in done.out
    assert not account.meters.spans, "nothing was billed"
    nothing_left(account)


# -- on paper --------------------------------------------------------------------------------------------


@pytest.fixture
def batch() -> Iterator[StandIn]:
    with StandIn(timing=FAST) as made:
        yield made


def test_no_port_is_open_and_what_everybody_may_read_leads_nowhere_but_once(
    batch: StandIn, tmp_path: Path
) -> None:
    sent: list[dict[str, Any]] = []

    async def act(made: AzureBatchPlace) -> None:
        await made.create(ONE, offer(), LIFE_S)
        sent.append(batch.job(ONE).body)

        async def waits() -> bool:
            return "has not come to its mailbox" in (await made.list("run"))[0].detail

        await until_async(waits, "it is told what is missing")
        await made.delete(ONE)

    play(batch, tmp_path, act, **MAIL)
    (job,) = sent
    pool = job["poolInfo"]["autoPoolSpecification"]["pool"]
    assert "networkConfiguration" not in pool
    environ = {each["name"]: each["value"] for each in job["jobManagerTask"]["environmentSettings"]}
    assert set(json.loads(environ["EVALFLEET_MAILBOX"])) == {"GET", "DELETE", "PUT"}
    until(lambda: not batch.left(), lambda: f"{batch.left()}")


def test_a_mailbox_without_its_job_is_shown_deleted_and_reaped(batch: StandIn, tmp_path: Path) -> None:
    """As a controller leaves it that dies between the two: before the job is made, or after it is deleted."""

    async def act(made: AzureBatchPlace) -> None:
        await made._way.prepare(ONE, LIFE_S, LIFE_S, kvm=False)
        (left,) = await made.list("run")
        assert (left.phase, left.ran_s) == ("queued", 0.0)
        await made.create(ONE, offer(), LIFE_S)
        await seen(made, "pending")
        await made.delete(ONE)
        await made._way.prepare(machine_id(2), LIFE_S, LIFE_S, kvm=False)

    async def reap(stranger: AzureBatchPlace) -> None:
        (found,) = await stranger.belongings()
        assert (found.machine, found.home) == (machine_id(2), HOME)
        assert [part.split()[0] for part in found.parts] == ["mailbox"]
        await stranger.reap(found)

    play(batch, tmp_path, act, **MAIL)
    play(batch, tmp_path / "stranger", reap, home_id="ffffffffffff", **MAIL)
    until(lambda: not batch.left(), lambda: f"{batch.left()}")


def test_a_container_is_the_pilot_where_the_pool_takes_no_other_tasks(batch: StandIn, tmp_path: Path) -> None:
    async def act(made: AzureBatchPlace) -> None:
        (first,) = await made.offers(Needs(nested_virtualization=True))
        await made.create(ONE, first, LIFE_S)
        await seen(made, "pending")
        task = batch.job(ONE).tasks["pilot"].body
        assert task["containerSettings"] == {
            "imageName": CONTAINER["container"],
            "containerRunOptions": "--device=/dev/kvm --shm-size=2g",
        }
        (pool,) = batch.service.pools.values()
        machine = pool.body["virtualMachineConfiguration"]
        assert machine["containerConfiguration"]["containerImageNames"] == [CONTAINER["container"], "a/b:1"]
        assert machine["imageReference"]["offer"] == "ubuntu-hpc"
        assert "startTask" not in pool.body, "the pool prefetches images"
        run = await until_async(lambda: _run(batch), "the pilot runs")
        batch.do(lambda: run.end(79))
        gone = await seen(made, "gone")
        assert gone.detail == "the image has no python3; name an `image` with Python 3.8 or later"
        assert not gone.start
        await made.delete(ONE)

    play(batch, tmp_path, act, **CONTAINER, images=("a/b:1",), container_args="--shm-size=2g")
    until(lambda: not batch.left(), lambda: f"{batch.left()}")


async def _run(batch: StandIn) -> Any:
    return next((run for folder, run in batch.paper.runs.items() if "workitems" in folder), None)


def test_a_container_image_that_is_not_there_ends_the_place(batch: StandIn, tmp_path: Path) -> None:
    batch.faults.nodes_unusable = True
    batch.faults.node_error = "Error response from daemon: manifest for a/b:1 not found: manifest unknown"

    async def act(made: AzureBatchPlace) -> None:
        await made.create(ONE, offer(), LIFE_S)
        assert "manifest unknown" in (await seen(made, "gone")).detail
        with pytest.raises(PlaceError, match="`container`, is not there") as refused:
            await made.create(machine_id(2), offer(), LIFE_S)
        assert (refused.value.transient, refused.value.scope) == (False, "place")
        await made.delete(ONE)

    play(batch, tmp_path, act, **CONTAINER)
    until(lambda: not batch.left(), lambda: f"{batch.left()}")


def test_a_private_registry_takes_the_password_which_nobody_else_sees(
    batch: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {**batch.service_principal(), "ACR_PASSWORD": SECRET}
    monkeypatch.setattr(batch, "service_principal", lambda **_: variables)
    batch.service.registries["evals.azurecr.io"] = {"username": "evals", "password": SECRET}

    async def act(made: AzureBatchPlace) -> None:
        await made.create(ONE, offer(), LIFE_S)
        run = await until_async(lambda: _run(batch), "the container runs")
        assert SECRET in json.dumps(batch.job(ONE).body), "Batch itself has it"
        shown = [await made._batch.job(f"evalfleet-{ONE}"), await made._batch.pools()]
        task = batch.job(ONE).tasks["pilot"].body
        assert SECRET not in json.dumps([shown, task]), "others are shown it, or tasks are"
        batch.do(lambda: run.end(0))
        await made.delete(ONE)

    play(batch, tmp_path, act, **PRIVATE, registry_password="ACR_PASSWORD")
    until(lambda: not batch.left(), lambda: f"{batch.left()}")


@pytest.mark.parametrize(
    ("password", "told"), [("wrong", "unauthorized: authentication required"), ("", "set ACR_PASSWORD in")]
)
def test_a_password_that_is_wrong_or_missing_ends_the_place_in_one_line(
    batch: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, password: str, told: str
) -> None:
    """Trying again would lock the account, at worst."""
    batch.service.registries["evals.azurecr.io"] = {"username": "evals", "password": SECRET}
    variables = {**batch.service_principal(), "ACR_PASSWORD": password}
    monkeypatch.setattr(batch, "service_principal", lambda **_: variables)

    async def act(made: AzureBatchPlace) -> None:
        if password:
            await made.create(ONE, offer(), LIFE_S)
            gone = await seen(made, "gone")
            assert told in gone.detail
            assert not gone.start, "another node would fare alike"
        with pytest.raises(PlaceError) as refused:
            await made.create(machine_id(2), offer(), LIFE_S)
        assert (refused.value.transient, refused.value.scope) == (False, "place")
        assert told in str(refused.value)
        assert "registry_password" in str(refused.value) or "ACR_PASSWORD" in str(refused.value)
        assert "\n" not in str(refused.value)
        await made.delete(ONE)

    play(batch, tmp_path, act, **PRIVATE, registry_password="ACR_PASSWORD")
    until(lambda: not batch.left(), lambda: f"{batch.left()}")


# -- before money is spent -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "name", "verdict", "told"),
    [
        ({}, "storage", "good", "by the login"),
        ({}, "network", "good", "no port is open"),
        ({"container": "a/b:1"}, "image", "good", "ubuntu-hpc"),
        ({"container": "a/b:1", "image": "canonical:0001-com-ubuntu-server-jammy:22_04-lts:latest",
          "node_agent": "batch.node.ubuntu 22.04"}, "image", "warn", "microsoft-dsvm:ubuntu-hpc:2404"),
    ],
)  # fmt: skip
def test_doctor_looks_at_what_mailboxes_and_containers_need(
    batch: StandIn, tmp_path: Path, more: dict[str, Any], name: str, verdict: str, told: str
) -> None:
    found = examine(batch, tmp_path, **{**MAIL, **more})[name]
    assert found.verdict == verdict, found
    assert told in found.found + found.remedy


@pytest.mark.parametrize(
    ("is_there", "missing", "key", "more", "told"),
    [
        (False, "", "", {}, "set `storage` to one of yours"),
        (True, "Storage Blob Delegator", "", {}, "Storage Blob Delegator"),
        (True, "", "", {"subscription": "0000"}, "check `subscription`"),
        (True, "", "d3Jvbmc=", {}, "correct AZURE_STORAGE_ACCOUNT_KEY"),
        (True, "", "no key at all", {}, "correct AZURE_STORAGE_ACCOUNT_KEY"),
    ],
)
def test_storage_that_cannot_be_used_is_told_in_one_line(
    batch: StandIn,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_there: bool,
    missing: str,
    key: str,
    more: dict[str, Any],
    told: str,
) -> None:
    variables = {**batch.service_principal(), "AZURE_STORAGE_ACCOUNT_KEY": key}
    monkeypatch.setattr(batch, "service_principal", lambda **_: variables)
    batch.service.has_storage = is_there
    batch.storage.roles.discard(missing)
    found = examine(batch, tmp_path, **MAIL, **more)["storage"]
    assert (found.verdict, told in found.remedy) == ("bad", True), found

    async def act(made: AzureBatchPlace) -> None:
        with pytest.raises(PlaceError) as refused:
            await made.create(ONE, offer(), LIFE_S)
        assert told in str(refused.value)
        assert "\n" not in str(refused.value)
        assert not refused.value.transient

    play(batch, tmp_path, act, **MAIL, **more)
    assert not batch.do(lambda: list(batch.service.jobs)), "nothing was begun"
