"""What is asked of Azure's services: all that ends without us, who may come in, and what nodes are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evalfleet.channels.mail.boxes import MailPilot
from evalfleet.model import MachineId, Needs
from evalfleet.places.azure.prices import AzurePriceBook
from evalfleet.places.azure_batch import AzureBatchSettings
from evalfleet.places.azure_batch import preflight as batch
from evalfleet.places.azure_batch.template import JobBuild
from evalfleet.places.azure_batch.template import job_body as batch_job
from evalfleet.places.azure_ml import AzureMlSettings
from evalfleet.places.azure_ml import preflight as ml
from evalfleet.places.azure_ml.settings import MlAccount
from evalfleet.places.azure_ml.template import (
    MlJobBuild,
    cluster_body,
    environment_body,
    job_body,
    job_name,
)

ONE = MachineId("run-abc123-1")
SIZE = "Standard_D4s_v5"
LIFE_S = 3600.0
MAIL = MailPilot((), {"EVALFLEET_MAILBOX": "{}"})


@pytest.mark.parametrize(("spot", "priority"), [(False, "Dedicated"), (True, "LowPriority")])
def test_a_cluster_of_azure_ml_has_no_nodes_without_jobs_and_nobody_can_log_in(
    spot: bool, priority: str
) -> None:
    settings = AzureMlSettings(max_nodes=7, idle_s=90.0)
    body = cluster_body(settings, "eastus", SIZE, {"a": "b"}, spot=spot)
    asked = body["properties"]["properties"]
    assert asked["scaleSettings"] == {
        "minNodeCount": 0,
        "maxNodeCount": 7,
        "nodeIdleTimeBeforeScaleDown": "PT90S",
    }
    assert (asked["vmPriority"], asked["remoteLoginPortPublicAccess"]) == (priority, "Disabled")
    assert (body["tags"], body["properties"]["disableLocalAuth"]) == ({"a": "b"}, True)


def test_an_environment_that_has_a_name_is_not_sent_as_anonymous() -> None:
    assert environment_body("python:3.12") == {"properties": {"image": "python:3.12", "osType": "Linux"}}


def test_a_job_of_azure_ml_has_our_name_and_ends_a_minute_after_its_machine() -> None:
    account = MlAccount(subscription="s", group="g", workspace="w", owner="me", ca="")
    build = MlJobBuild(ONE, "c", True, MAIL, LIFE_S, "e", {"a": "b"})
    asked = job_body(AzureMlSettings(), account, build)["properties"]
    assert job_name(ONE, AzureMlSettings().name) == f"evalfleet-{ONE}"
    assert asked["limits"] == {"jobLimitsType": "Command", "timeout": "PT3660S"}
    assert asked["resources"]["dockerArgs"] == "--device=/dev/kvm"
    assert asked["tags"] == {"a": "b"}


def batch_body(spot: bool = False, **more: Any) -> dict[str, Any]:
    settings = AzureBatchSettings(account="a.eastus", ssh_from=("203.0.113.7/32",), **more)
    pilot = MAIL if settings.reach == "mailbox" else None
    return batch_job(settings, JobBuild(ONE, SIZE, spot, False, "key", LIFE_S, {"a": "b"}, pilot))


def test_a_job_of_batch_brings_one_node_of_ubuntu_24_04_which_goes_with_it() -> None:
    job = batch_body(queue_s=600.0)
    auto = job["poolInfo"]["autoPoolSpecification"]
    assert (auto["poolLifetimeOption"], auto["keepAlive"]) == ("job", False)
    pool = auto["pool"]
    assert (pool["targetDedicatedNodes"], pool.get("targetLowPriorityNodes")) == (1, None)
    machine = pool["virtualMachineConfiguration"]
    assert machine["imageReference"]["offer"] == "ubuntu-24_04-lts"
    assert machine["nodeAgentSKUId"] == "batch.node.ubuntu 24.04"
    assert job["constraints"] == {"maxWallClockTime": "PT5160S", "maxTaskRetryCount": 0}, "it may wait, too"
    pilot = job["jobManagerTask"]
    assert pilot["constraints"] == {"maxWallClockTime": "PT3660S", "maxTaskRetryCount": 0}
    assert pilot["killJobOnCompletion"] is True
    contained = batch_body(reach="mailbox", container="python:3.12")["poolInfo"]["autoPoolSpecification"]
    image = contained["pool"]["virtualMachineConfiguration"]["imageReference"]
    assert (image["offer"], image["sku"]) == ("ubuntu-hpc", "2404")


def test_a_spot_node_of_batch_is_a_low_priority_one() -> None:
    pool = batch_body(spot=True)["poolInfo"]["autoPoolSpecification"]["pool"]
    assert (pool.get("targetDedicatedNodes"), pool["targetLowPriorityNodes"]) == (None, 1)


def test_port_22_of_a_node_is_reached_by_an_inbound_nat_pool_by_whom_the_settings_name_and_no_other_is() -> (
    None
):
    network = batch_body()["poolInfo"]["autoPoolSpecification"]["pool"]["networkConfiguration"]
    (nat,) = network["endpointConfiguration"]["inboundNATPools"]
    assert nat["backendPort"] == 22
    assert [(rule["access"], rule["sourceAddressPrefix"]) for rule in nat["networkSecurityGroupRules"]] == [
        ("allow", "203.0.113.7/32"),
        ("deny", "*"),
    ]
    without: list[dict[str, Any]] = [
        {"reach": "mailbox"},
        {"public_ip": False, "subnet": "/s", "jump": "me@gate"},
    ]
    for more in without:
        pool = batch_body(**more)["poolInfo"]["autoPoolSpecification"]["pool"]
        assert "endpointConfiguration" not in pool.get("networkConfiguration", {})


def test_images_are_pulled_before_a_node_takes_its_task() -> None:
    pool = batch_body(images=("docker.io/a/b:1",))["poolInfo"]["autoPoolSpecification"]["pool"]
    assert "pull docker.io/a/b:1" in pool["startTask"]["commandLine"]
    assert pool["startTask"]["waitForSuccess"] is True
    body = batch_body(reach="mailbox", container="python:3.12", images=("docker.io/a/b:1",))
    machine = body["poolInfo"]["autoPoolSpecification"]["pool"]["virtualMachineConfiguration"]
    assert machine["containerConfiguration"]["containerImageNames"] == ["python:3.12", "docker.io/a/b:1"]
    assert body["jobManagerTask"]["containerSettings"]["imageName"] == "python:3.12"


@pytest.mark.parametrize("region", ["eastus", "westus2"])
def test_a_spot_node_costs_no_more_than_a_regular_one(region: str, tmp_path: Path) -> None:
    book = AzurePriceBook.of(tmp_path)
    sizes = (SIZE, "Standard_D8s_v3")
    some: dict[str, Any] = {"sizes": sizes, "spot": True}
    found = [
        ml.offers_of("ml", AzureMlSettings(**some), region, book, Needs()),
        batch.offers_of("b", AzureBatchSettings(account="a.eastus", **some), region, book, Needs()),
    ]
    for offers in found:
        regular = {offer.size: offer.cost.usd_per_hour for offer in offers if not offer.spot}
        spot = {offer.size: offer.cost.usd_per_hour for offer in offers if offer.spot}
        assert regular.keys() == spot.keys() == set(sizes)
        assert all(spot[size] <= regular[size] for size in spot)
