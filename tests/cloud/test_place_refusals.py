"""What Azure refuses, and what is not ours: machines are records only, since none gets as far as a login."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from evalfleet.errors import PlaceError
from evalfleet.model import MachineId
from evalfleet.places.azure import AzurePlace
from evalfleet.testing.harness import raised
from standins.azure import Policy, Refused, StandIn
from tests.cloud.places import offer, place
from tests.cloud.rest import Rest, network

ONE = MachineId("pool-abc123-1")


def use(azure: StandIn, home: Path, work: Callable[[AzurePlace], Awaitable[Any]], **more: Any) -> Any:
    """With a place, which is closed."""

    async def main() -> Any:
        made = place(azure, home, **more)
        try:
            return await work(made)
        finally:
            await made.close()

    return asyncio.run(main())


def refused(azure: StandIn, home: Path, where: str = "eastus", **more: Any) -> PlaceError:
    """What `create` answers; what it left is deleted."""

    async def work(made: AzurePlace) -> PlaceError:
        error = await raised(PlaceError, made.create(ONE, offer(where), 7200))
        await made.delete(ONE)
        assert not await made.list("pool")
        return error

    error: PlaceError = use(azure, home, work, **more)
    assert not azure.left(), "a refused machine left something behind"
    assert not azure.meters.running()
    return error


def test_no_room_in_a_region(azure: StandIn, tmp_path: Path) -> None:
    azure.cloud.capacity.limits["eastus", "", ""] = 0
    error = refused(azure, tmp_path)
    assert (error.transient, error.scope) == (False, "offer")
    assert "AllocationFailed" in str(error)


def test_many_machines_that_are_asked_for_at_once_ask_an_empty_region_once(
    azure: StandIn, tmp_path: Path
) -> None:
    azure.cloud.capacity.limits["eastus", "", ""] = 0

    async def work(made: AzurePlace) -> None:
        machines = [MachineId(f"pool-abc123-{n}") for n in range(8)]
        refused = await asyncio.gather(
            *(raised(PlaceError, made.create(machine, offer(), 7200)) for machine in machines)
        )
        assert {(error.transient, error.scope) for error in refused} == {(False, "offer")}
        puts = [path for method, path, _ in azure.server.calls if method == "PUT"]
        assert sum("/deployments/" in path for path in puts) == 1

    use(azure, tmp_path, work)


def test_no_room_in_a_zone(azure: StandIn, tmp_path: Path) -> None:
    azure.cloud.capacity.limits["eastus", "2", ""] = 0
    assert "ZonalAllocationFailed" in str(refused(azure, tmp_path, "eastus-2", zones=("2",)))


@pytest.mark.parametrize(("quota", "scope"), [("standardDDSv5Family", "family"), ("cores", "region")])
def test_no_quota(azure: StandIn, tmp_path: Path, quota: str, scope: str) -> None:
    azure.cloud.quota.limits["eastus", quota] = 3
    error = refused(azure, tmp_path)
    assert (error.transient, error.scope) == (False, scope)


def test_a_policy(azure: StandIn, tmp_path: Path) -> None:
    azure.faults.policies.append(
        Policy("cost-centre-needed", "Microsoft.Compute/virtualMachines", required_tag="cost-centre")
    )
    error = refused(azure, tmp_path)
    assert not error.transient
    assert "'cost-centre-needed'" in str(error)


def test_no_rights(azure: StandIn, tmp_path: Path) -> None:
    azure.faults.denied_actions.append("Microsoft.Network/virtualNetworks/write")
    error = refused(azure, tmp_path)
    assert (error.transient, error.scope) == (False, "place")
    assert "Contributor" in str(error)


def test_wrong_credentials(azure: StandIn, tmp_path: Path) -> None:
    azure.identity.refuses = True

    async def work(made: AzurePlace) -> PlaceError:
        return await raised(PlaceError, made.create(ONE, offer(), 7200))

    error: PlaceError = use(azure, tmp_path, work)
    assert (error.transient, error.scope) == (False, "place")
    assert "az login" in str(error)


def test_an_image_that_is_not_there(azure: StandIn, tmp_path: Path) -> None:
    error = refused(azure, tmp_path, image="Canonical:nothing:here:latest")
    assert (error.transient, error.scope) == (False, "place")


def test_when_azure_goes_on_being_busy(azure: StandIn, tmp_path: Path) -> None:
    rule = azure.faults.add(Refused(409, "AnotherOperationInProgress"), method="PUT", path="deployments")
    error = refused(azure, tmp_path)
    assert error.transient
    assert rule.times is None


def test_a_ceiling_of_our_own(azure: StandIn, tmp_path: Path) -> None:
    error = refused(azure, tmp_path, max_vcpus=3)
    assert error.transient
    assert "max_vcpus" in str(error)


# -- what is not ours ----------------------------------------------------------------------------


@pytest.mark.parametrize("tags", [{}, {"evalfleet-home": "another", "evalfleet-machine": str(ONE)}])
def test_a_strangers_machine_is_left_alone(azure: StandIn, tmp_path: Path, tags: dict[str, str]) -> None:
    rest = Rest(azure)
    rest.furnish()
    rest.new_vm(str(ONE), tags=tags)
    before = azure.shown()

    async def work(made: AzurePlace) -> None:
        error = await raised(PlaceError, made.create(ONE, offer(), 7200))
        assert (error.transient, error.scope) == (True, "machine"), "the next one has another name"
        assert "not ours" in str(error)
        await made.delete(ONE)
        await raised(PlaceError, made.stop(ONE))
        await raised(PlaceError, made.extend(ONE, 60))
        assert not await made.list("pool")

    use(azure, tmp_path, work)
    assert azure.shown() == before


def test_a_strangers_network_is_left_alone(azure: StandIn, tmp_path: Path) -> None:
    rest = Rest(azure)
    rest.furnish()
    path = network("networkSecurityGroups/evalfleet-abc123-eastus-azure-ssh")
    rest.put(path, {"location": "eastus", "properties": {}})
    error = refused(azure, tmp_path)
    assert "is not ours" in str(error)
    (group,) = azure.resources("Microsoft.Network/networkSecurityGroups")
    assert not group.tags
