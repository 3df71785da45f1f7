"""The life of Azure's machines, on real hosts: made, stopped, started, expired, deleted; what goes wrong."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from evalfleet.errors import MachineMute, PlaceError
from evalfleet.model import AttemptId, Command, Job, Machine, MachineId
from evalfleet.places.azure import AzurePlace
from evalfleet.ports import Fence
from evalfleet.testing.harness import find, raised
from lab import Lab
from lab.network import GATEWAY
from standins.azure import Failed, Late, Lost, StandIn, Throttled
from standins.cloud.hosts import Hosts
from tests.cloud.conftest import FAST
from tests.cloud.places import HOME, SIZE, offer, place
from tests.cloud.rest import Rest, network
from tests.waiting import PATIENCE_S, until_async, until_seen

CANNOT = Lab.missing()
pytestmark = pytest.mark.skipif(CANNOT is not None, reason=f"NO TEST OF REAL HOSTS: {CANNOT}")
ONE = MachineId("pool-abc123-1")
LONG_S = 7200.0
HERE = f"{GATEWAY}/32"
VM = "Microsoft.Compute/virtualMachines"
SCHEDULE = "Microsoft.DevTestLab/schedules"


@pytest.fixture(scope="module")
def cloud() -> Iterator[StandIn]:
    with StandIn(Hosts(), timing=FAST) as made:
        yield made


@pytest.fixture
def azure(cloud: StandIn) -> Iterator[StandIn]:
    """Each test leaves it empty."""
    cloud.do(cloud.server.calls.clear)
    cloud.do(cloud.faults.met.clear)
    yield cloud
    cloud.do(cloud.faults.rules.clear)
    assert not cloud.left()
    assert not cloud.meters.running()


Work = Callable[[AzurePlace], Awaitable[Any]]


def use(azure: StandIn, home: Path, work: Work, **more: Any) -> Any:
    """With a place, in the machines' network; what the work leaves is deleted."""

    async def main() -> Any:
        made = place(azure, home, inside=True, **more)
        try:
            return await work(made)
        finally:
            await asyncio.gather(*(made.delete(each.id) for each in await made.list("pool")))
            await made.close()

    with azure.hosts.lab.inside():
        return asyncio.run(main())


async def bring_up(made: AzurePlace, machine: MachineId = ONE) -> Machine:
    await made.create(machine, offer(), LONG_S)
    seen = await find(made, machine)
    assert seen is not None
    assert seen.phase == "up"
    return seen


async def says(made: AzurePlace, machine: Machine, script: str) -> str:
    """What people see who look into it."""
    argv = made.shell(machine, ("sh", "-c", script))
    done = await asyncio.to_thread(
        subprocess.run, argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# -- made ----------------------------------------------------------------------------------------


def test_a_machine_is_ours_and_has_its_switch(azure: StandIn, tmp_path: Path) -> None:
    async def work(made: AzurePlace) -> None:
        seen = await bring_up(made)
        assert await says(made, seen, "whoami; hostname") == "azureuser\n" + ONE
        (vm,), (schedule,) = azure.resources(VM), azure.resources(SCHEDULE)
        for each in (vm, schedule, *azure.resources("Microsoft.Compute/disks")):
            assert each.tags["evalfleet-home"] == HOME
            assert each.tags["evalfleet-machine"] == ONE
            assert each.tags["evalfleet-pool"] == "pool"
            assert each.tags["evalfleet-owner"] == "tester"
            assert each.tags["team"] == "evals"
            assert each.tags["evalfleet-expires-at"].endswith("Z")
        assert schedule.properties["targetResourceId"] == str(vm.id)
        assert schedule.properties["status"] == "Enabled"
        assert "identity" not in vm.extra

    use(azure, tmp_path, work, tags={"team": "evals"})


def test_only_ssh_is_open_and_only_to_whom_the_settings_name(azure: StandIn, tmp_path: Path) -> None:
    async def work(made: AzurePlace) -> list[Any]:
        await bring_up(made)
        rules = azure.resources("Microsoft.Network/networkSecurityGroups/securityRules")
        return [rule.properties for rule in rules]

    (first,) = use(azure, tmp_path, work, ssh_from=(HERE,))
    assert (first["sourceAddressPrefix"], first["destinationPortRange"]) == (HERE, "22")
    (then,) = use(azure, tmp_path, work, ssh_from=(HERE, "192.0.2.7/32"))
    assert then["sourceAddressPrefixes"] == [HERE, "192.0.2.7/32"]


def sources(azure: StandIn) -> dict[str, str]:
    """Group of rules -> who is let in."""
    rules = azure.resources("Microsoft.Network/networkSecurityGroups/securityRules")
    return {rule.id.names[-2]: str(rule.properties.get("sourceAddressPrefix")) for rule in rules}


def test_two_places_of_one_home_let_different_addresses_in(azure: StandIn, tmp_path: Path) -> None:
    """The second is used while the first has a machine, which stays reachable."""

    async def work(made: AzurePlace) -> None:
        seen = await bring_up(made)
        other = place(azure, tmp_path, inside=True, name="other", ssh_from=("198.18.0.0/16",))
        await bring_up(other, MachineId("pool-abc123-2"))
        await other.list("pool")
        assert await says(made, seen, "hostname") == ONE
        await other.close()
        assert sources(azure)["evalfleet-abc123-eastus-azure-ssh"] == HERE
        assert sources(azure)["evalfleet-abc123-eastus-other-ssh"] == "198.18.0.0/16"

    use(azure, tmp_path, work, ssh_from=(HERE,))


def test_who_may_connect_is_applied_again_by_the_next_controller(azure: StandIn, tmp_path: Path) -> None:
    """Whoever has moved says so in the settings, and goes on with the machines there are."""

    async def work(made: AzurePlace) -> None:
        await bring_up(made)
        for source in ("192.0.2.7/32", HERE):
            then = place(azure, tmp_path, inside=True, ssh_from=(source,))
            await then.list("pool")
            assert sources(azure)["evalfleet-abc123-eastus-azure-ssh"] == source
            if source == HERE:
                await then.extend(ONE, LONG_S)
            await then.close()

    use(azure, tmp_path, work, ssh_from=(HERE,))


def test_no_list_of_azures_tells_the_host_key(azure: StandIn, tmp_path: Path) -> None:
    async def work(made: AzurePlace) -> None:
        await bring_up(made)
        (key,) = tmp_path.glob(".azure/azure/hosts/*.key")
        body = key.read_text().splitlines()[2]
        assert body not in json.dumps(azure.shown())

    use(azure, tmp_path, work)


def test_many_machines_at_once_cost_few_requests(azure: StandIn, tmp_path: Path) -> None:
    ids = [MachineId(f"pool-abc123-{n}") for n in range(1, 6)]

    async def work(made: AzurePlace) -> None:
        await asyncio.gather(*(made.create(each, offer(), LONG_S) for each in ids))
        assert [seen.phase for seen in await made.list("pool")] == ["up"] * len(ids)
        writes = [path for method, path, _ in azure.server.calls if method == "PUT"]
        assert len([path for path in writes if "/deployments/" in path]) == len(ids)
        assert len(writes) <= len(ids) + 3, "the group, its network and its rules are made once"
        reads = [path for method, path, _ in azure.server.calls if method == "GET"]
        assert len(reads) < 20 * len(ids), "each machine was asked about by itself"

    use(azure, tmp_path, work)


def test_throttled_and_failing_calls_are_made_again(azure: StandIn, tmp_path: Path) -> None:
    azure.faults.add(Throttled(1), path="deployments|virtualMachines", rate=0.1)
    azure.faults.add(Failed(), path="resources|network", rate=0.05)
    ids = [MachineId(f"pool-abc123-{n}") for n in range(1, 4)]

    async def work(made: AzurePlace) -> None:
        await asyncio.gather(*(made.create(each, offer(), LONG_S) for each in ids))
        assert [seen.phase for seen in await made.list("pool")] == ["up"] * len(ids)

    use(azure, tmp_path, work)


def test_a_machine_that_never_answers_tells_what_its_console_said(azure: StandIn, tmp_path: Path) -> None:
    async def work(made: AzurePlace) -> None:
        error = await raised(MachineMute, made.create(ONE, offer(), LONG_S))
        assert error.step == "ssh"
        assert "cannot be reached" in str(error)
        assert "cloud-init: finished" in str(error)

    use(azure, tmp_path, work, ssh_from=("192.0.2.7/32",), answer_s=1.0)


# -- lost answers --------------------------------------------------------------------------------


def test_a_create_whose_answer_is_lost_is_one_machine(azure: StandIn, tmp_path: Path) -> None:
    azure.faults.add(Lost(), method="PUT", path="deployments", times=1)

    async def work(made: AzurePlace) -> None:
        await bring_up(made)
        assert len(azure.resources(VM)) == 1

    use(azure, tmp_path, work)


def test_a_create_that_lands_late_is_found_and_deleted(azure: StandIn, tmp_path: Path) -> None:
    azure.faults.add(Late(60.0), method="PUT", path="deployments")

    async def work(made: AzurePlace) -> None:
        creating = asyncio.create_task(made.create(ONE, offer(), LONG_S))
        await until_seen(lambda: azure.faults.met, "it was asked for")
        creating.cancel()
        await asyncio.gather(creating, return_exceptions=True)
        await made.delete(ONE)
        assert await find(made, ONE) is None
        azure.jump(61.0)
        await until_async(lambda: find(made, ONE), "it has landed")
        await made.delete(ONE)
        assert await find(made, ONE) is None

    use(azure, tmp_path, work)


def test_deleted_while_it_is_made(azure: StandIn, tmp_path: Path) -> None:
    async def work(made: AzurePlace) -> None:
        creating = asyncio.create_task(made.create(ONE, offer(), LONG_S))
        await until_seen(lambda: azure.resources(VM), "it is being made")
        await made.delete(ONE)
        assert await find(made, ONE) is None
        error = await raised(PlaceError, creating)
        assert error.transient

    use(azure, tmp_path, work)


# -- stopped and started -------------------------------------------------------------------------


def test_stopped_costs_no_machine_and_starts_again_with_its_files(azure: StandIn, tmp_path: Path) -> None:
    async def work(made: AzurePlace) -> None:
        seen = await bring_up(made)
        await says(made, seen, "echo kept > file")
        await made.stop(ONE)
        await made.stop(ONE)
        assert {span.kind for span in azure.meters.running()} == {"disk", "address"}
        stopped = await find(made, ONE)
        assert stopped is not None
        assert stopped.phase == "gone"
        again = await bring_up(made)
        assert await says(made, again, "cat file") == "kept"
        channel = made.channel(again, Fence("r", 1, 20.0))
        await channel.start(Job(AttemptId("t.0"), Command(("true",)), 60))
        assert (await channel.ended(AttemptId("t.0"))).exit_code == 0
        await channel.close()

    use(azure, tmp_path, work)


# -- expiry --------------------------------------------------------------------------------------


def times(azure: StandIn) -> str:
    (schedule,) = azure.resources(SCHEDULE)
    time = schedule.properties["dailyRecurrence"]["time"]
    assert re.fullmatch(r"\d{4}", time)
    return str(time)


def test_extend_moves_the_switch_and_the_tags(azure: StandIn, tmp_path: Path) -> None:
    async def work(made: AzurePlace) -> None:
        await bring_up(made)
        before, tags = times(azure), dict(azure.resources(VM)[0].tags)
        await made.extend(ONE, LONG_S + 3600)
        assert (int(times(azure)[:2]) - int(before[:2])) % 24 == 1
        costly = [*azure.resources(VM), *azure.resources("Microsoft.Compute/disks")]
        costly += azure.resources("Microsoft.Network/publicIPAddresses")
        assert len(costly) == 3
        assert len({each.tags["evalfleet-expires-at"] for each in costly}) == 1
        assert azure.resources(VM)[0].tags["evalfleet-expires-at"] > tags["evalfleet-expires-at"]

    use(azure, tmp_path, work)


def test_a_dead_controllers_machine_is_stopped_by_azure_itself(cloud: StandIn, tmp_path: Path) -> None:
    """No call of ours between its creation and its end."""

    async def leave(made: AzurePlace) -> None:
        await bring_up(made)
        await made.close()

    async def main() -> None:
        await leave(place(cloud, tmp_path, inside=True))
        cloud.jump(LONG_S + 60)
        await until_seen(lambda: all(span.kind != "vm" for span in cloud.meters.running()), "it is stopped")
        made = place(cloud, tmp_path, inside=True)
        await made.delete(ONE)
        await made.close()

    with cloud.hosts.lab.inside():
        asyncio.run(main())
    assert not cloud.left()
    (billed,) = [span for span in cloud.meters.of("vm") if span.sku == SIZE][-1:]
    assert billed.seconds(0.0) <= LONG_S + 120


# -- spot, and networks of one's own ---------------------------------------------------------------


def test_a_spot_machine_that_azure_takes_back_is_evicted(azure: StandIn, tmp_path: Path) -> None:
    async def work(made: AzurePlace) -> None:
        await made.create(ONE, offer(spot=True), LONG_S)
        (vm,) = azure.resources(VM)
        assert vm.properties["priority"] == "Spot"
        azure.evict(vm.id.name, notice_s=0.1)

        async def not_up() -> Machine | None:
            seen = await find(made, ONE)
            return seen if seen is not None and seen.phase != "up" else None

        assert (await until_async(not_up, "it is taken back")).phase == "evicted"

    use(azure, tmp_path, work, spot=True)


def test_a_subnet_of_ones_own_and_no_public_address(azure: StandIn, tmp_path: Path) -> None:
    rest = Rest(azure)
    rest.furnish()
    subnet = rest.root + network("virtualNetworks/net/subnets/s")

    async def work(made: AzurePlace) -> None:
        seen = await bring_up(made)
        assert await says(made, seen, "hostname") == ONE
        assert not azure.resources("Microsoft.Network/publicIPAddresses")
        (nic,) = azure.resources("Microsoft.Network/networkInterfaces")
        assert nic.properties["ipConfigurations"][0]["properties"]["subnet"]["id"] == subnet

    azure.cloud.clients_are_inside = True  # as if by a VPN
    try:
        use(azure, tmp_path, work, public_ip=False, subnet=subnet, ssh_from=())
    finally:
        azure.cloud.clients_are_inside = False


def test_through_a_jump_host(azure: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One machine is the only way to another; the user knows its key."""
    monkeypatch.setenv("HOME", str(tmp_path))
    known = tmp_path / ".ssh/known_hosts"

    async def work(made: AzurePlace) -> None:
        jump = await bring_up(made)
        known.parent.mkdir()
        (line,) = tmp_path.glob(".azure/azure/hosts/*.known_hosts")
        known.write_text(line.read_text())
        behind = place(
            azure,
            tmp_path,
            inside=True,
            public_ip=False,
            regions=("westus2",),
            ssh_from=(f"{jump.address}/32",),
            jump=f"azureuser@{jump.address}",
        )
        await behind.create(MachineId("pool-abc123-2"), offer("westus2"), LONG_S)
        assert (await find(behind, MachineId("pool-abc123-2"))) is not None
        await behind.close()

    use(azure, tmp_path, work)
