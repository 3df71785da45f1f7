"""Machines of Azure Machine Learning on the stand-in: what its states mean, and that nothing is left."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from evalfleet.channels.mail.boxes import WAY, Mailboxes
from evalfleet.channels.samples import Load
from evalfleet.channels.supervisor.mailbox import sealed
from evalfleet.channels.supervisor.pilot import END, NO_KVM, START
from evalfleet.errors import PlaceError
from evalfleet.model import Needs
from evalfleet.places.azure.arm import ArmClient, ArmEndpoint
from evalfleet.places.azure_ml import AzureMlPlace
from evalfleet.places.azure_ml.monitor import MlMonitor
from evalfleet.places.azure_ml.settings import MlAccount
from standins.azure.blobs import KEY
from standins.azure_ml import StandIn
from standins.azure_ml.api import CONTAINER
from tests.cloud import mail_desk
from tests.cloud.mail_desk import seen
from tests.cloud.ml_places import FAST, HOME, SIZE, examine, machine_id, offer, place
from tests.waiting import until, until_async

LIFE_S = 3600.0
ONE = machine_id()
JOB = f"evalfleet-{ONE}"
BOX = Mailboxes.name(HOME, ONE)


@pytest.fixture
def ml() -> Iterator[StandIn]:
    """Without containers, and fast."""
    with StandIn(ml_timing=FAST) as made:
        yield made


def play(ml: StandIn, home: Path, act: Callable[[AzureMlPlace], Awaitable[None]], **more: Any) -> None:
    mail_desk.play(lambda: place(ml, home, **more), act)


@pytest.mark.parametrize(
    ("password", "told"),
    [("", "pull access denied"), ("wrong", "unauthorized: authentication required"), ("right", "")],
)
def test_a_private_registry_is_logged_in_to_by_a_connection_of_the_workspace(
    ml: StandIn, tmp_path: Path, password: str, told: str
) -> None:
    """We are never told its password. Without one, or with a wrong one, the place is refused."""
    ml.service.registries["evals.azurecr.io"] = {"username": "evals", "password": "right"}
    login = {"username": "evals", "password": password}
    target = {"category": "ContainerRegistry", "target": "https://evals.azurecr.io", "credentials": login}
    if password:
        ml.service.connections["acr"] = {"properties": {"authType": "UsernamePassword", **target}}
    image: dict[str, Any] = {"image": "evals.azurecr.io/agents:1"}
    found = examine(ml, tmp_path, **image)["image"]
    assert (found.verdict, "az ml connection create" in found.remedy) == (
        ("good", False) if password else ("warn", True)
    )

    async def act(made: AzureMlPlace) -> None:
        await made.create(ONE, offer(), LIFE_S)
        if not told:
            assert await until_async(lambda: _running(ml), "its container runs")
        else:
            gone = await seen(made, "gone")
            assert told in gone.detail
            assert "az ml connection create" in gone.detail
            assert not gone.start
            with pytest.raises(PlaceError, match="az ml connection create") as refused:
                await made.create(machine_id(2), offer(), LIFE_S)
            assert not refused.value.transient
        await made.delete(ONE)

    play(ml, tmp_path, act, **image)
    until(lambda: not ml.left(), lambda: f"{ml.left()}")


async def _running(ml: StandIn) -> bool:
    return ml.job(ONE).status == "Running"


def put(ml: StandIn, name: str, content: bytes) -> None:
    """What a pilot would write into its mailbox."""
    ml.do(lambda: ml.storage.containers[CONTAINER].blobs.__setitem__(f"evalfleet/mail/{BOX}/{name}", content))


def mark(ml: StandIn, name: str, **said: Any) -> None:
    key = hmac.new(KEY.encode(), f"evalfleet/{BOX}".encode(), "sha256").hexdigest()
    put(ml, name, sealed(key, name, {"at": 1.0, **said}))


def begin(ml: StandIn) -> None:
    """As a pilot does: it takes its orders, and says that it is there."""
    ml.do(lambda: ml.storage.containers[CONTAINER].blobs.pop(f"evalfleet/mail/{BOX}/{WAY}"))
    mark(ml, START, start="1", node="n1")


# -- what the statuses mean ------------------------------------------------------------------------


def test_a_machine_is_up_when_its_pilot_says_so_and_not_when_azure_does(ml: StandIn, tmp_path: Path) -> None:
    async def act(made: AzureMlPlace) -> None:
        await made.create(ONE, offer(), LIFE_S)
        await made.create(ONE, offer(), LIFE_S)
        coming = await seen(made, "pending")
        assert coming.start
        until(lambda: ml.job(ONE).status == "Running", "Azure says that it runs")
        assert (await made.list("run"))[0].phase == "pending"
        begin(ml)
        up = await seen(made, "up")
        assert (up.start, up.node) == (coming.start, coming.node)
        assert coming.node.startswith("tvmps_"), "Azure tells which node it has"
        await made.delete(ONE)

    play(ml, tmp_path, act)
    until(lambda: not ml.left(), lambda: f"{ml.left()}")


@pytest.mark.parametrize(
    ("status", "limits", "told"),
    [
        ("Running", {"start_s": 0.5}, "running for 0 min, but its container has not started"),
        ("Preparing", {"prepare_s": 0.5}, "preparing for 0 min, but its image is not there"),
    ],
)
def test_a_job_that_is_stuck_is_given_up_in_time(
    ml: StandIn, tmp_path: Path, status: str, limits: dict[str, Any], told: str
) -> None:
    """The one that ran for eight hours with nothing done, and its cousin."""
    ml.troubles_of_jobs.stuck = {status}

    async def act(made: AzureMlPlace) -> None:
        await made.create(ONE, offer(), LIFE_S)
        coming = await seen(made, "pending", "gone")
        if status == "Preparing" and coming.phase == "pending":
            assert coming.step == "pull", "the rule docker_pull_slow goes by that"
        gone = await seen(made, "gone")
        assert told in gone.detail
        assert gone.start, "its node was billed, and another one may fare better"
        await made.delete(ONE)

    play(ml, tmp_path, act, **limits)
    until(lambda: not ml.left(), lambda: f"{ml.left()}")


@pytest.mark.parametrize("status", ["Finalizing", "CancelRequested"])
def test_a_job_that_does_not_end_loses_its_cluster(ml: StandIn, tmp_path: Path, status: str) -> None:
    """With the cluster the node goes, and the meter stops, whatever the job says."""
    ml.troubles_of_jobs.stuck = {status}

    async def act(made: AzureMlPlace) -> None:
        await made.create(ONE, offer(), LIFE_S)
        await seen(made, "pending")
        until(lambda: ml.job(ONE).status == "Running", "it runs")
        if status == "Finalizing":
            ml.do(lambda: ml.paper.runs[JOB].end(0))
            assert "finalizing" in (await seen(made, "gone")).detail
        await made.delete(ONE)
        await until_async(lambda: _absent(made), "it is not listed")

    play(ml, tmp_path, act, end_s=0.5)
    until(lambda: not ml.meters.running(), "no node is billed")


async def _absent(made: AzureMlPlace) -> bool:
    return not await made.list("run")


@pytest.mark.parametrize(
    ("answer", "told", "for_good"),
    [
        ("Error: manifest for docker.io/a/b:1 not found: manifest unknown", "name an `image`", True),
        ("Error: toomanyrequests: You have reached your pull rate limit", "toomanyrequests", False),
    ],
)
def test_a_pull_that_fails_is_told_in_the_registrys_words(
    ml: StandIn, tmp_path: Path, answer: str, told: str, for_good: bool
) -> None:
    ml.troubles_of_jobs.pull_error = answer

    async def act(made: AzureMlPlace) -> None:
        await made.create(ONE, offer(), LIFE_S)
        gone = await seen(made, "gone")
        assert told in gone.detail
        assert bool(gone.start) != for_good, "without a start, the offer is given up"
        if for_good:
            with pytest.raises(PlaceError, match="name an `image`") as refused:
                await made.create(machine_id(2), offer(), LIFE_S)
            assert (refused.value.transient, refused.value.scope) == (False, "place")
        await made.delete(ONE)

    play(ml, tmp_path, act)
    until(lambda: not ml.left(), lambda: f"{ml.left()}")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("evalfleet: the image has no python3", "name an `image` with Python 3.8"),
        ("evalfleet: python3 of the image is older than 3.8", "older than 3.8; name an `image`"),
        ("Killed", "failed before its container began: Killed"),
    ],
)
def test_what_a_container_said_before_it_failed_is_told(
    ml: StandIn, tmp_path: Path, said: str, told: str
) -> None:
    async def act(made: AzureMlPlace) -> None:
        await made.create(ONE, offer(), LIFE_S)
        until(lambda: JOB in ml.paper.runs, "it runs")
        ml.do(lambda: ml.paper.runs[JOB].end(79, said.encode()))
        until(lambda: ml.job(ONE).status == "Failed", "it has failed")
        assert told in (await seen(made, "gone")).detail
        await made.delete(ONE)

    play(ml, tmp_path, act)


def test_where_no_virtual_machine_can_be_made_the_size_is_refused(ml: StandIn, tmp_path: Path) -> None:
    async def act(made: AzureMlPlace) -> None:
        (first, *_) = await made.offers(Needs(nested_virtualization=True))
        await made.create(ONE, first, LIFE_S)
        await seen(made, "pending")
        assert "--device=/dev/kvm" in ml.job(ONE).body["resources"]["dockerArgs"]
        mark(ml, END, code=NO_KVM, why="/dev/kvm: No such file or directory", ran_s=1.0)
        ml.do(lambda: ml.paper.runs[JOB].end(77))
        gone = await seen(made, "gone")
        assert "/dev/kvm" in gone.detail
        assert not gone.start
        with pytest.raises(PlaceError, match="/dev/kvm") as refused:
            await made.create(machine_id(2), first, LIFE_S)
        assert (refused.value.transient, refused.value.scope) == (False, "offer")
        await made.delete(ONE)

    play(ml, tmp_path, act)


def test_a_node_without_the_device_refuses_its_size_in_the_words_of_docker(
    ml: StandIn, tmp_path: Path
) -> None:
    """Then no container of ours begins at all, and no pilot can try it."""
    ml.service.has_kvm = False

    async def act(made: AzureMlPlace) -> None:
        (first, *_) = await made.offers(Needs(nested_virtualization=True, strict=False))
        await made.create(ONE, first, LIFE_S)
        gone = await seen(made, "gone")
        assert "adding custom device" in gone.detail
        assert not gone.start
        with pytest.raises(PlaceError, match="name other `sizes`") as refused:
            await made.create(machine_id(2), first, LIFE_S)
        assert (refused.value.transient, refused.value.scope) == (False, "offer")
        await made.delete(ONE)

    play(ml, tmp_path, act)


def test_a_job_whose_node_is_unusable_is_given_up_whatever_azure_says_of_it(
    ml: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from evalfleet.places.azure_ml import service

    monkeypatch.setattr(service, "RECHECK_S", 0.2)

    async def act(made: AzureMlPlace) -> None:
        await made.create(ONE, offer(), LIFE_S)
        await seen(made, "pending")
        until(lambda: ml.job(ONE).status == "Running", "it runs")
        begin(ml)
        up = await seen(made, "up")
        ml.spoil(ONE)
        gone = await seen(made, "gone")
        assert gone.detail == f"Azure ML: running, but its node {up.node} is unusable"
        assert gone.start, "another node may fare better"
        await made.delete(ONE)

    play(ml, tmp_path, act)
    until(lambda: not ml.left(), lambda: f"{ml.left()}")


def test_a_cluster_whose_nodes_are_all_unusable_is_left(ml: StandIn, tmp_path: Path) -> None:
    async def act(made: AzureMlPlace) -> None:
        await made.create(ONE, offer(), LIFE_S)
        until(lambda: ml.job(ONE).status == "Running", "it runs")
        await made.create(machine_id(2), offer(), LIFE_S)
        ml.spoil(ONE)

        async def second() -> str:
            (found,) = [each for each in await made.list("run") if each.id == machine_id(2)]
            return found.detail if found.phase == "gone" else ""

        detail = await until_async(second, "it is given up")
        assert "all nodes of its cluster (1) are unusable" in detail

    play(ml, tmp_path, act, max_nodes=1)


def test_what_azure_monitor_tells_of_a_node_is_read(ml: StandIn, tmp_path: Path) -> None:
    ml.service.loads[JOB] = {
        "CpuUtilizationPercentage": 99.0,
        "CpuMemoryUtilizationPercentage": 97.5,
        "DiskUsedMegabytes": 900.0,
        "DiskAvailMegabytes": 100.0,
    }

    async def main() -> None:
        endpoint = ArmEndpoint(ml.subscription, ml.endpoint, ca=str(ml.ca))
        arm = ArmClient(endpoint, ml.service_principal())
        account = MlAccount(
            subscription=ml.subscription, group=ml.group, workspace=ml.workspace, owner="", ca=""
        )
        found = await MlMonitor(arm, account.path).loads([JOB, "evalfleet-other"])
        await arm.close()
        assert found == {JOB: Load(0.99, 0.975, 0.9)}, "of jobs that are not measured nothing is told"

    asyncio.run(main())


def test_a_job_that_azure_runs_anew_is_an_eviction_whoever_looks(ml: StandIn, tmp_path: Path) -> None:
    async def act(made: AzureMlPlace) -> None:
        await made.create(ONE, offer(spot=True), LIFE_S)
        first = await seen(made, "pending")
        begin(ml)
        await seen(made, "up")
        ml.preempt(ONE)
        put(ml, WAY, b"")  # as the second start does
        assert (await seen(made, "evicted")).start == first.start
        other = place(ml, tmp_path / "other")
        assert (await seen(other, "evicted")).start == first.start
        await other.close()
        await made.delete(ONE)

    play(ml, tmp_path, act, spot=True)
    until(lambda: not ml.left(), lambda: f"{ml.left()}")


def test_no_quota_is_told_in_azures_words_with_its_remedy(ml: StandIn, tmp_path: Path) -> None:
    ml.service.quota[False] = 3

    async def act(made: AzureMlPlace) -> None:
        await made.create(ONE, offer(), LIFE_S)
        gone = await seen(made, "gone")
        assert "ClusterCoreQuotaReached" in gone.detail
        assert "ask for more cores" in gone.detail
        assert not gone.start
        assert gone.ran_s == 0
        with pytest.raises(PlaceError, match="ask for more cores") as refused:
            await made.create(machine_id(2), offer(), LIFE_S)
        assert (refused.value.transient, refused.value.scope) == (False, "offer"), "it is not tried again"
        await made.delete(ONE)

    play(ml, tmp_path, act)
    until(lambda: not ml.left(), lambda: f"{ml.left()}")


# -- nothing is left -------------------------------------------------------------------------------


def test_all_that_costs_money_ends_by_itself_and_what_is_left_can_be_reaped(
    ml: StandIn, tmp_path: Path
) -> None:
    async def make(made: AzureMlPlace) -> None:
        await made.create(ONE, offer(), LIFE_S)
        await seen(made, "pending")

    play(ml, tmp_path, make)
    until(lambda: ml.job(ONE).status == "Running", "it runs")
    ml.jump(LIFE_S + 61)
    until(lambda: not ml.living(), "its job is over")
    ml.jump(125.0)
    until(lambda: not ml.meters.running(), "its node is gone")
    assert ml.meters.seconds("vm", ml.clock.now()) < LIFE_S + 200
    ml.jump(2 * 3600.0)

    async def reap(stranger: AzureMlPlace) -> None:
        found = await stranger.belongings()
        assert [each.machine for each in found] == [ONE]
        assert [part.split()[0] for part in found[0].parts] == ["job", "mailbox", "cluster"]
        assert (found[0].home, found[0].expires_at is not None) == (HOME, True)
        assert (found[0].expires_at or 0) / 1e6 < ml.clock.now(), "it has expired"
        for each in found:
            await stranger.reap(each)

    play(ml, tmp_path / "stranger", reap, home_id="ffffffffffff")
    until(lambda: not ml.left(), lambda: f"{ml.left()}")


def test_a_cluster_goes_with_its_last_machine_and_stays_while_it_has_others(
    ml: StandIn, tmp_path: Path
) -> None:
    async def act(made: AzureMlPlace) -> None:
        await asyncio.gather(*(made.create(machine_id(n), offer(), LIFE_S) for n in (1, 2)))
        assert len(ml.service.clusters) == 1
        await made.delete(ONE)
        assert len(ml.service.clusters) == 1
        assert [each.id for each in await made.list("run")] == [machine_id(2)]
        await made.delete(machine_id(2))

    play(ml, tmp_path, act)
    until(lambda: not ml.left(), lambda: f"{ml.left()}")
    until(lambda: not ml.meters.running(), "no node is billed")


@pytest.mark.parametrize(
    ("told", "idle_s"), [("PT30M", 1800.0), ("PT1H0M15S", 3615.0), ("P1D", 86_400.0), ("soon", 120.0)]
)
def test_idle_nodes_of_the_users_cluster_are_counted_for_as_long_as_it_keeps_them(
    ml: StandIn, tmp_path: Path, told: str, idle_s: float
) -> None:
    scale = {"maxNodeCount": 2, "minNodeCount": 0, "nodeIdleTimeBeforeScaleDown": told}
    inner = {"vmSize": SIZE, "scaleSettings": scale}
    body = {"location": "eastus", "properties": {"computeType": "AmlCompute", "properties": inner}}
    ml.do(lambda: setattr(ml.service.add_cluster("mine", body), "state", "Succeeded"))

    async def act(made: AzureMlPlace) -> None:
        (first,) = await made.offers(Needs())
        assert (first.cost.linger_s, first.cost.sweep_s) == (idle_s + 180.0, idle_s + 180.0)

    play(ml, tmp_path, act, cluster="mine")


def test_a_cluster_of_the_users_is_used_and_left_as_it_was(ml: StandIn, tmp_path: Path) -> None:
    inner = {"vmSize": SIZE, "scaleSettings": {"maxNodeCount": 2, "minNodeCount": 0}}
    body = {"location": "eastus", "properties": {"computeType": "AmlCompute", "properties": inner}}
    ml.do(lambda: setattr(ml.service.add_cluster("mine", body), "state", "Succeeded"))

    async def act(made: AzureMlPlace) -> None:
        await made.create(ONE, offer(), LIFE_S)
        await seen(made, "pending")
        await made.delete(ONE)

    play(ml, tmp_path, act, cluster="mine")
    until(lambda: ml.left() == ["mine"], "the job is gone, and the cluster is there")

    async def other_size(made: AzureMlPlace) -> None:
        with pytest.raises(PlaceError, match=r'set sizes = \["Standard_D4s_v5"\]'):
            await made.create(ONE, (await made.offers(Needs()))[0], LIFE_S)

    play(ml, tmp_path, other_size, cluster="mine", sizes=("Standard_D8s_v5",))


# -- before money is spent -------------------------------------------------------------------------


def test_doctor_looks_at_workspace_storage_network_image_and_quotas(ml: StandIn, tmp_path: Path) -> None:
    ml.service.quota[True] = 0
    found = examine(ml, tmp_path, workers=30, spot=True)
    assert {name: check.verdict for name, check in found.items()} == {
        "workspace": "good",
        "prices": "good",
        "storage": "good",
        "network": "good",
        "image": "good",
        "spot quota": "bad",
        "quota of standardDSv5Family": "good",
        "workers": "warn",
    }
    assert "Quota" in found["spot quota"].remedy
    assert found["workers"].found.startswith("25 of 30 machines")


@pytest.mark.parametrize(
    ("region", "family", "max_nodes", "verdict", "told"),
    [
        (24, 48, 6, "good", "24 cores are left: 6 nodes of 4"),
        (100, 13, 3, "good", "13 cores are left: 3 nodes of 4"),
        (24, -1, 6, "good", "24 cores are left: 6 nodes of 4"),
        (24, 48, 50, "warn", "24 cores are left: 6 nodes of 4, and max_nodes = 50 needs 200"),
    ],
    ids=["region", "family", "unlimited family", "too many nodes"],
)
def test_the_least_of_the_quotas_that_count_for_the_workspace_is_told(
    ml: StandIn, tmp_path: Path, region: int, family: int, max_nodes: int, verdict: str, told: str
) -> None:
    """Azure lists the quota of a family again for other workspaces and for computes, which do not count."""
    ml.service.quota[False], ml.service.family_quota = region, family
    found = examine(ml, tmp_path, max_nodes=max_nodes)["quota of standardDSv5Family"]
    assert (found.verdict, found.found) == (verdict, told)


@pytest.mark.parametrize(
    ("has_key", "takes_keys", "missing", "verdict", "told"),
    [
        (False, False, "", "good", "by the login"),
        (True, False, "", "good", "by the login"),
        (False, True, "Storage Blob Data Contributor", "bad", "needs the roles Storage Blob Data"),
        (False, True, "Storage Blob Delegator", "bad", "and Storage Blob Delegator"),
    ],
)
def test_a_storage_that_takes_no_key_is_used_by_the_login_or_it_is_told_what_that_needs(
    ml: StandIn, tmp_path: Path, has_key: bool, takes_keys: bool, missing: str, verdict: str, told: str
) -> None:
    ml.service.has_key, ml.storage.takes_keys = has_key, takes_keys
    ml.storage.roles.discard(missing)
    found = examine(ml, tmp_path)["storage"]
    assert found.verdict == verdict
    assert told in found.found + found.remedy
