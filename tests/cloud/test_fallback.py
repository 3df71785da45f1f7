"""What is tried when Azure says no, and what is told when nothing is left to try."""

from __future__ import annotations

import json
from pathlib import Path

from standins.azure import Policy, Refused, StandIn
from tests.cloud.desk import AzureDesk
from tests.cloud.places import SIZE


def test_when_nothing_is_left_one_table_tells_what_was_tried(azure: StandIn, tmp_path: Path) -> None:
    """A full zone, a full region, a family without quota, a region without quota, a policy."""
    azure.cloud.capacity.limits["eastus", "", ""] = 0
    azure.cloud.quota.limits["westus2", "standardDDSv5Family"] = 3
    azure.cloud.quota.limits["westus2", "standardDSv5Family"] = 3
    azure.cloud.quota.limits["centralus", "cores"] = 3
    desk = AzureDesk(
        azure,
        tmp_path / "desk",
        sizes=[SIZE, "Standard_D8ds_v5", "Standard_D4s_v5"],
        regions=["eastus", "westus2", "centralus"],
    )
    desk.bench(3)
    done = desk.start_run("--workers", "2").wait()
    assert done.code == 4, done
    told = json.loads(desk.say("show", "r", "--json"))["refusals"]
    tried = {(each["region"], each["size"]): (each["blocked"], each["permanent"]) for each in told}
    assert tried == {
        ("eastus", SIZE): (f"{SIZE} in eastus", True),
        ("eastus", "Standard_D8ds_v5"): ("Standard_D8ds_v5 in eastus", True),
        ("eastus", "Standard_D4s_v5"): ("Standard_D4s_v5 in eastus", True),
        ("westus2", SIZE): ("standardDDSv5Family in westus2", True),
        ("westus2", "Standard_D4s_v5"): ("standardDSv5Family in westus2", True),
        ("centralus", "Standard_D4s_v5"): ("centralus", True),
    }
    assert all(each["tries"] >= 1 and each["answer"] for each in told)
    table = [line for line in done.err.splitlines() if line.startswith("azure ")]
    assert len(table) == len(told)
    assert any("AllocationFailed" in line for line in table)
    assert "not asked again" in desk.say("show", "r")
    assert not azure.left()
    assert not azure.meters.running()


def test_a_policy_is_named_and_not_asked_twice(azure: StandIn, tmp_path: Path) -> None:
    azure.faults.policies.append(
        Policy("cost-centre-needed", "Microsoft.Compute/virtualMachines", required_tag="cost-centre")
    )
    desk = AzureDesk(azure, tmp_path / "desk", sizes=[SIZE, "Standard_D4s_v5"])
    desk.bench(3)
    done = desk.start_run().wait()
    assert done.code == 4, done
    (told,) = json.loads(desk.say("show", "r", "--json"))["refusals"]
    assert (told["tries"], told["blocked"]) == (1, "eastus")
    assert "cost-centre-needed" in told["answer"]
    assert not azure.left()


def test_a_pool_that_gets_nothing_tells_the_same_and_is_no_pool(azure: StandIn, tmp_path: Path) -> None:
    azure.faults.add(Refused(409, "SkuNotAvailable", "not here"), method="PUT", path="deployments")
    desk = AzureDesk(azure, tmp_path / "desk", regions=["eastus", "westus2"])
    done = desk.done("pool", "create", "p", "--on", "azure", "--workers", "2", code=4)
    assert len([line for line in done.err.splitlines() if line.startswith("azure ")]) == 2
    assert "no pools" in desk.say("pool", "ls")
    assert not azure.left()
