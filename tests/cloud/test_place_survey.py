"""Azure looked at from outside any run: `doctor` before money is spent, `machines` and `reap` afterwards."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from evalfleet.model import SECOND, MachineId
from evalfleet.places.azure.names import stamp
from standins.azure import StandIn
from standins.azure.catalog import Restriction
from tests.cloud.desk import AzureDesk
from tests.cloud.places import GROUP, HOME, SIZE, examine, offer, place
from tests.cloud.rest import Rest
from tests.waiting import PATIENCE_S, until_seen

ONE = MachineId("pool-abc123-1")


def test_all_is_well(azure: StandIn, tmp_path: Path) -> None:
    found = examine(azure, tmp_path)
    assert {check.verdict for check in found.values()} == {"good"}
    assert "lasts for 100 more" in found[f"{SIZE} in eastus"].found
    assert "2026-08" in found["prices"].found
    assert not azure.resources(), "looking made something"


def test_what_is_wrong_has_a_remedy(azure: StandIn, tmp_path: Path) -> None:
    azure.cloud.registered.discard("microsoft.devtestlab")
    azure.cloud.quota.limits["eastus", "standardDDSv5Family"] = 3
    azure.cloud.catalog.restrictions.append(Restriction("Standard_D4s_v5", "eastus"))
    azure.faults.denied_actions.append("Microsoft.Compute/virtualMachines/write")
    found = examine(azure, tmp_path, sizes=(SIZE, "Standard_D4s_v5"), image="Canonical:no:such:latest")
    wrong = {name: check for name, check in found.items() if check.verdict != "good"}
    assert set(wrong) == {
        "permissions",
        "registration",
        "image in eastus",
        f"{SIZE} in eastus",
        "Standard_D4s_v5 in eastus",
    }
    assert all(check.remedy for check in wrong.values())
    assert "standardDDSv5Family" in wrong[f"{SIZE} in eastus"].remedy
    assert "Microsoft.Compute/virtualMachines/write" in wrong["permissions"].found


def test_disks_zones_and_sizes_are_looked_at(azure: StandIn, tmp_path: Path) -> None:
    azure.cloud.quota.limits["eastus", "PremiumDiskCount"] = 0
    azure.cloud.quota.limits["eastus", "lowPriorityCores"] = 3
    azure.cloud.catalog.restrictions.append(Restriction(SIZE, "eastus", zones=("2",)))
    found = examine(azure, tmp_path, sizes=(SIZE, "Standard_D2s_v5"), zones=("1", "2"))
    assert "in zone 2" in found[f"{SIZE} in eastus"].found
    assert "PremiumDiskCount" in found["disks in eastus"].remedy
    assert "Standard_D2s_v5" in found["sizes"].found
    assert all(found[name].remedy for name in (f"{SIZE} in eastus", "disks in eastus", "sizes"))
    spot = examine(azure, tmp_path, spot=True, disk="Standard_LRS")
    assert "lowPriorityCores" in spot[f"{SIZE} in eastus"].remedy
    assert spot["disks in eastus"].verdict == "good"


@pytest.mark.parametrize("quota", ["PublicIPAddresses", "IPv4StandardSkuPublicIpAddresses"])
def test_addresses_are_looked_at(azure: StandIn, tmp_path: Path, quota: str) -> None:
    azure.cloud.quota.limits["eastus", quota] = 0
    assert "addresses" in examine(azure, tmp_path)["addresses in eastus"].remedy


def test_so_many_workers_are_compared_with_quota_and_addresses(azure: StandIn, tmp_path: Path) -> None:
    azure.cloud.quota.limits["eastus", "IPv4StandardSkuPublicIpAddresses"] = 3
    azure.cloud.quota.limits["westus2", "standardDDSv5Family"] = 8
    regions = ("eastus", "westus2")
    assert "workers" not in examine(azure, tmp_path, regions=regions)
    few = examine(azure, tmp_path, workers=5, regions=regions)["workers"]
    assert (few.verdict, few.found) == ("good", "5 of 5 machines can be had (3 in eastus, 2 in westus2)")
    many = examine(azure, tmp_path, workers=40, regions=regions)["workers"]
    assert many.verdict == "warn"
    assert many.found.startswith("5 of 40")
    assert "public addresses in eastus, quota of vCPUs in westus2" in many.remedy


def test_regions_are_compared_for_every_type_of_resource(azure: StandIn, tmp_path: Path) -> None:
    schedules = "Microsoft.DevTestLab/schedules"
    azure.cloud.catalog.not_made.add((schedules, "westus2"))
    check = examine(azure, tmp_path, regions=("eastus", "westus2"))["regions"]
    assert (check.verdict, check.found) == ("bad", f"{schedules} is not to be had in westus2")


def test_rights_on_the_group_alone_are_enough(azure: StandIn, tmp_path: Path) -> None:
    Rest(azure).furnish()
    azure.faults.only_group = GROUP
    found = examine(azure, tmp_path)
    assert found["permissions"].verdict == "good"
    assert not [check for check in found.values() if check.verdict == "bad"]
    assert "Reader on the subscription" in found["sizes in eastus"].remedy

    async def main() -> None:
        made = place(azure, tmp_path)
        try:
            assert not await made.belongings()
            assert not await made.list("pool")
        finally:
            await made.close()

    asyncio.run(main())


@pytest.mark.parametrize(("ahead_s", "told"), [(7200.0, "2.0 h behind"), (-600.0, "10 min ahead of")])
def test_a_clock_that_is_wrong_is_told_and_corrected(
    azure: StandIn, tmp_path: Path, ahead_s: float, told: str
) -> None:
    azure.server.ahead_s = ahead_s
    check = examine(azure, tmp_path)["clock"]
    assert (check.verdict, told in check.found) == ("warn", True)
    rest = Rest(azure)
    rest.furnish()
    ends = stamp(time.time() + ahead_s + 3600)
    tags = {"evalfleet-home": HOME, "evalfleet-machine": str(ONE), "evalfleet-expires-at": ends}
    rest.new_vm(str(ONE), tags=tags)

    async def main() -> float:
        made = place(azure, tmp_path)
        try:
            assert any(told in doubt for doubt in await made.doubts(60))
            (belonging,) = await made.belongings()
        finally:
            await made.close()
        return (belonging.expires_at or 0) / SECOND

    assert abs(asyncio.run(main()) - time.time() - 3600) < PATIENCE_S, "by this computer's clock"


def test_without_credentials_nothing_else_is_asked(azure: StandIn, tmp_path: Path) -> None:
    azure.identity.refuses = True
    (check,) = examine(azure, tmp_path).values()
    assert (check.name, check.verdict) == ("credentials", "bad")
    assert "az login" in check.remedy


def test_requests_share_connections(azure: StandIn, tmp_path: Path) -> None:
    """Each costs a handshake, which takes longer than most requests."""

    async def main() -> int:
        made = place(azure, tmp_path)
        try:
            for _ in range(4):
                await made.list("pool")
            return azure.do(lambda: azure.server.connections)
        finally:
            await made.close()

    lists_at_once, token = 3, 1
    assert asyncio.run(main()) <= lists_at_once + token


# -- machines and reap ---------------------------------------------------------------------------


def abandon(
    azure: StandIn, home: Path, expires_s: float, machine: MachineId = ONE, *, for_pool: bool = False
) -> None:
    """Somebody's controller begins a machine, and is never seen again."""

    async def main() -> None:
        made = place(azure, home, for_pool=for_pool)
        creating = asyncio.create_task(made.create(machine, offer(), expires_s))
        await until_seen(lambda: any(span.kind == "vm" for span in azure.meters.running()), "it costs money")
        await until_seen(lambda: azure.resources("Microsoft.DevTestLab/schedules"), "its end is planned")
        creating.cancel()
        await asyncio.gather(creating, return_exceptions=True)
        await made.close()

    asyncio.run(main())


def test_reap_deletes_what_is_mine_and_expired_with_no_local_state(azure: StandIn, tmp_path: Path) -> None:
    abandon(azure, tmp_path / "lost", expires_s=0)
    desk = AzureDesk(azure, tmp_path / "desk", owner="tester")
    (shown,) = json.loads(desk.say("machines", "--json"))
    assert (shown["machine"], shown["owner"], shown["why"]) == (ONE, "tester", "expired")
    assert "pool-abc123-1" in desk.say("reap", "--dry-run")
    assert azure.left()
    assert "deleted: 1" in desk.say("reap")
    assert not azure.left()
    assert not azure.meters.running()
    assert desk.say("reap") == "nothing of ours has expired\n"


def test_an_expired_pool_of_another_home_of_mine_is_left_until_pools_are_asked_for(
    azure: StandIn, tmp_path: Path
) -> None:
    abandon(azure, tmp_path / "lost", expires_s=0, for_pool=True)
    desk = AzureDesk(azure, tmp_path / "desk", owner="tester")
    assert desk.say("reap") == "nothing of ours has expired\n"
    assert azure.left()
    assert "deleted: 1" in desk.say("reap", "--pools")
    assert not azure.left()


def test_an_expiry_that_azure_cannot_keep_is_refused(azure: StandIn, tmp_path: Path) -> None:
    desk = AzureDesk(azure, tmp_path / "desk", owner="tester")
    done = desk.start("pool", "create", "p", "--on", "azure", "--expires", "30m").wait()
    assert done.code == 2
    assert "--expires is 30 minutes, and azure cannot end a machine by itself before 40m" in done.err
    assert not azure.resources()


def test_reap_leaves_others_machines_and_what_has_not_expired(azure: StandIn, tmp_path: Path) -> None:
    abandon(azure, tmp_path / "lost", expires_s=7200)
    desk, other = (
        AzureDesk(azure, tmp_path / "desk", "tester"),
        AzureDesk(azure, tmp_path / "other", "somebody"),
    )
    rest = Rest(azure)
    rest.furnish()
    rest.new_vm(
        "by-hand", tags={"evalfleet-machine": "by-hand", "evalfleet-expires-at": "2020-01-01T00:00:00Z"}
    )
    before = azure.left()
    desk.say("reap")
    azure.jump(1)
    other.say("reap", "--all-owners", "--yes")
    assert azure.left() == before


def test_what_others_own_is_asked_about(azure: StandIn, tmp_path: Path) -> None:
    abandon(azure, tmp_path / "lost", expires_s=0)
    other = AzureDesk(azure, tmp_path / "other", "somebody")
    assert other.say("reap") == "nothing of ours has expired\n"
    other.say("reap", "--all-owners", code=2)
    assert azure.left()
    other.say("reap", "--all-owners", "--yes")
    assert not azure.left()


def test_doctor_prints_each_check(azure: StandIn, tmp_path: Path) -> None:
    desk = AzureDesk(azure, tmp_path / "desk", "tester")
    said = desk.say("doctor", "azure", "--nested", "--workers", "3", "--set", "regions=eastus")
    assert "ok    credentials" in said
    assert "3 of 3 machines can be had (100 in eastus)" in said
    azure.identity.refuses = True
    assert "-> run `az login`" in desk.say("doctor", code=4)
