"""What is said to Azure Machine Learning, and what its stand-in answers, against Microsoft's description."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from evalfleet.channels.mail.boxes import MailPilot
from evalfleet.model import MachineId
from evalfleet.places.azure.arm import ArmClient, ArmEndpoint
from evalfleet.places.azure_ml import AzureMlSettings
from evalfleet.places.azure_ml.preflight import cores_left
from evalfleet.places.azure_ml.service import STAGES, VERSION
from evalfleet.places.azure_ml.settings import MlAccount
from evalfleet.places.azure_ml.template import (
    ComputeInstanceBuild,
    MlJobBuild,
    cluster_body,
    environment_body,
    instance_body,
    job_body,
)
from standins.azure_ml import StandIn
from tests.cloud import ml_places
from tests.cloud.rest import Json
from tests.cloud.test_azure_contracts import FOLDER, contract

pytestmark = pytest.mark.skipif(not FOLDER, reason="NO CHECK AGAINST AZURE'S CONTRACTS: set AZURE_CONTRACTS")
USAGES = "azure-openapi/specification/machinelearningservices/**/examples/Usage/list.json"
SUBNET = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Network/virtualNetworks/n/subnets/s"


def complaints(body: Json, kind: str, *, sent: bool) -> list[str]:
    rules, type = contract("machinelearning", VERSION), f"Microsoft.MachineLearningServices/workspaces/{kind}"
    return rules.complaints(rules.resource(type, VERSION), body, type, sent=sent)


@pytest.mark.parametrize("spot", [False, True])
@pytest.mark.parametrize("more", [{}, {"docker_args": "--privileged", "shm_gb": 8}, {"subnet": SUBNET}])
def test_what_we_send_is_what_azure_takes(spot: bool, more: dict[str, Any]) -> None:
    settings = AzureMlSettings(**more)
    account = MlAccount(subscription="s", group="g", workspace="w", owner="me", ca="")
    build = MlJobBuild(MachineId("r-a-1"), "c", True, MailPilot((), {"A": "b"}), 60.0, "e", {"a": "b"})
    sent = {
        "computes": cluster_body(settings, "eastus", "Standard_D4s_v5", {"a": "b"}, spot=spot),
        "environments/versions": environment_body("python:3.12"),
        "jobs": job_body(settings, account, build),
    }
    for kind, body in sent.items():
        assert complaints({"name": "n", **body}, kind, sent=True) == []
    sent["jobs"]["properties"].update(colour="red", status="Running")
    assert len(complaints({"name": "n", **sent["jobs"]}, "jobs", sent=True)) == 2, "mistakes are found"


@pytest.mark.parametrize(
    "more", [{}, {"subnet": SUBNET, "public_ip": False}, {"assigned_user": f"{'0' * 36}/{'1' * 36}"}]
)
def test_a_compute_instance_is_sent_as_azure_takes_it(more: dict[str, Any]) -> None:
    build = ComputeInstanceBuild(
        region="eastus",
        size="Standard_D8s_v3",
        setup="https://x",
        stops_at=2e9,
        tags={"a": "b"},
    )
    body = instance_body(AzureMlSettings(compute="instances", **more), build)
    inner = body["properties"]["properties"]
    assert complaints({"name": "n", **body}, "computes", sent=True) == []
    assert inner["schedules"]["computeStartStop"][0]["cron"]["expression"] == "35 3 18 5 *"


def test_what_the_stand_in_shows_of_an_instance_is_what_azure_shows() -> None:
    build = ComputeInstanceBuild(
        region="eastus",
        size="Standard_D8s_v3",
        setup="https://x",
        stops_at=4e9,
        tags={"a": "b"},
    )
    with StandIn(ml_timing=ml_places.FAST) as ml:
        body = instance_body(AzureMlSettings(compute="instances"), build)
        instances = ml.service.instances
        shown = ml.do(
            lambda: instances.show("/r", "Microsoft.MachineLearningServices", instances.add("one", body))
        )
        assert complaints(shown, "computes", sent=False) == []


def test_what_the_stand_in_shows_is_what_azure_shows(tmp_path: Path) -> None:
    async def main(ml: StandIn) -> None:
        place = ml_places.place(ml, tmp_path)
        arm = ArmClient(ArmEndpoint(ml.subscription, ml.endpoint, ca=str(ml.ca)), ml.service_principal())
        try:
            await place.create(ml_places.machine_id(), ml_places.offer(), 60.0)
            root = f"/resourceGroups/{ml.group}/providers/Microsoft.MachineLearningServices/workspaces"
            for kind in ("computes", "jobs", "datastores"):
                (shown,) = await arm.all(f"{arm.root}{root}/{ml.workspace}/{kind}", VERSION)
                assert complaints(shown, kind, sent=False) == []
        finally:
            await arm.close()
            await place.close()

    with StandIn(ml_timing=ml_places.FAST) as ml:
        asyncio.run(main(ml))


def test_microsofts_own_example_of_quotas_is_read_as_azure_counts() -> None:
    """A family leaves 12 cores to the subscription, and to one of its workspaces and each compute 18."""
    example = json.loads(next(Path(FOLDER).parent.glob(USAGES)).read_text())
    listed = example["responses"]["200"]["body"]["value"]
    (one, *_) = (each["id"].partition("/usages")[0] for each in listed if "/workspaces/" in each["id"])
    left = cores_left(listed, one.partition("/computes/")[0])
    assert left["total cluster dedicated regional vcpus"] == 10
    assert left["standard nc family cluster dedicated vcpus"] == 12
    assert left["total cluster lowpriority regional vcpus"] == 32
    assert "standard nc family cluster lowpriority vcpus" not in left, "-1 is no limit"


def test_every_status_that_azure_names_has_a_meaning() -> None:
    rules = contract("machinelearning", VERSION)
    assert not (rules.literals("JobBaseProperties", "status") - STAGES.keys())
