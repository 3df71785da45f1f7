"""Compute instances of Azure Machine Learning: the API by a stand-in, hosts with a real sshd behind it."""

from __future__ import annotations

import asyncio
import base64
import re
import ssl
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from evalfleet.errors import MachineUnavailable, PlaceError, RequestError
from evalfleet.model import Needs
from evalfleet.places.azure_ml import AzureMlPlace, AzureMlSettings
from evalfleet.places.azure_ml.instances import STATES, AzureMlInstances
from evalfleet.places.azure_ml.service import VERSION
from evalfleet.ports import Place, PlaceContext, Stoppable
from evalfleet.testing import Harness, PlaceContract
from lab import Lab
from standins.azure_ml import StandIn
from standins.azure_ml.instances import Instance
from standins.cloud.hosts import Hosts
from tests.cloud import ml_places
from tests.cloud.ml_places import FAST, HOME, machine_id
from tests.cloud.test_place_contract import CloudHarness
from tests.waiting import until

CANNOT = Lab.missing()
real_hosts = pytest.mark.skipif(CANNOT is not None, reason=f"NO TEST OF REAL HOSTS: {CANNOT}")
ONE = machine_id()
LIFE_S, DAY_S = 7200.0, 86_400.0


class InstanceHarness(CloudHarness):
    """Its machines tell their host key by a blob, and are let in by a script."""

    unit_s = 0.8
    boot_s = 4.0


class InstanceMachines:
    """Its channels are those of the place `ssh`, whose tests they pass."""

    cloud: ClassVar[StandIn]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _workspace(cls) -> Iterator[None]:
        with StandIn(machines=Hosts(), ml_timing=FAST) as cls.cloud:
            yield

    def harness(self) -> Harness:
        def make(home: Path) -> Place:
            return ml_places.instances(self.cloud, home)

        return InstanceHarness(self.cloud, make)


@real_hosts
class TestInstances(InstanceMachines):
    """What compute instances could get wrong; the rest is promised nightly."""

    test_creating_twice_makes_one_machine = PlaceContract.test_creating_twice_makes_one_machine

    def test_it_is_stopped_kept_and_started_again_with_all_that_is_on_it(self, tmp_path: Path) -> None:
        async def main() -> None:
            made = ml_places.instances(self.cloud, tmp_path)
            assert isinstance(made, Stoppable), "`pool` stops what it can"
            try:
                (first, *_) = await made.offers(Needs())
                await made.create(ONE, first, LIFE_S)
                (up,) = await made.list("run")
                assert (up.phase, bool(up.host_key)) == ("up", True)
                await self._on(up.node, "echo kept >/root/kept")
                await made.stop(ONE)
                assert [each.phase for each in await made.list("run")] == ["gone"]
                assert not self.cloud.meters.running(), "it is stopped, and costs money"
                await made.create(ONE, first, LIFE_S)
                assert (await made.list("run"))[0].host_key == up.host_key
                assert await self._on(up.node, "cat /root/kept") == "kept\n"
                await made.extend(ONE, 2 * LIFE_S)
                await made.mend(ONE, "restart", LIFE_S)
                assert [each.phase for each in await made.list("run")] == ["up"]
                await made.delete(ONE)
            finally:
                await made.close()

        with self.cloud.hosts.lab.inside():
            asyncio.run(main())
        until(lambda: not self.cloud.left(), lambda: f"{self.cloud.left()}")

    async def _on(self, instance: str, script: str) -> str:
        """What a script says that is run there as root."""
        execute = self.cloud.hosts.execute(instance, script)
        return (await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(execute, self.cloud._loop)))[1]


@real_hosts
@pytest.mark.nightly
class TestAllOfInstances(InstanceMachines, PlaceContract):
    """The whole contract."""


# -- what the states mean, and what ends without us --------------------------------------------------


@pytest.fixture
def ml() -> Iterator[StandIn]:
    """Without hosts, and fast."""
    with StandIn(ml_timing=FAST) as made:
        yield made


def wait_for(ml: StandIn, state: str) -> Instance:
    """The one compute instance, once it is in this state."""

    def look() -> Instance | None:
        found = ml.do(lambda: list(ml.service.instances.all.values()))
        return found[0] if found and found[0].state == state else None

    return until(look, f"it is {state}")


def play(ml: StandIn, home: Path, act: Callable[[AzureMlInstances], Awaitable[None]], **more: Any) -> None:
    async def main() -> None:
        made = ml_places.instances(ml, home, inside=False, **more)
        try:
            await act(made)
        finally:
            await made.close()

    asyncio.run(main())


async def begin(made: AzureMlInstances, life_s: float = LIFE_S) -> asyncio.Task[None]:
    """Ask for one: without a host behind it, it never answers."""
    (first, *_) = await made.offers(Needs())
    return asyncio.create_task(made.create(ONE, first, life_s))


async def give_up(making: asyncio.Task[None]) -> None:
    making.cancel()
    await asyncio.gather(making, return_exceptions=True)


def test_azure_stops_it_at_its_end_and_what_is_left_can_be_reaped(ml: StandIn, tmp_path: Path) -> None:
    """At its end and not before, though nobody uses it in Azure's sense for longer than Azure's idle limit.
    The end is changed without a second PUT, which Azure refuses."""

    async def make(made: AzureMlInstances) -> None:
        making = await begin(made)
        await asyncio.to_thread(wait_for, ml, "Running")
        await give_up(making)
        await made.stop(ONE)
        making = await begin(made)
        await asyncio.to_thread(wait_for, ml, "Running")
        await give_up(making)
        with pytest.raises(MachineUnavailable):  # there is no host that could be told
            await made.extend(ONE, 14 * DAY_S)

    play(ml, tmp_path, make)
    ml.jump(13 * DAY_S)
    time.sleep(0.3)
    assert wait_for(ml, "Running")

    async def seen(made: AzureMlInstances) -> None:
        (machine,) = await made.list("run")
        assert machine.phase == "up", "it has not expired"

    play(ml, tmp_path, seen)
    ml.jump(DAY_S + 120)
    wait_for(ml, "Stopped")
    assert not ml.meters.running(), "it costs money still"

    async def reap(made: AzureMlInstances) -> None:
        (machine,) = await made.list("run")
        assert (machine.phase, machine.detail) == ("gone", "Azure ML: stopped by Azure (Schedule)")
        (left,) = await made.belongings()
        assert [part.split()[0] for part in left.parts] == ["folder", "instance"]
        assert (left.machine, left.home, left.owner) == (ONE, HOME, "tester")
        assert (left.expires_at or 0) / 1e6 < ml.clock.now(), "it has expired"
        await made.reap(left)

    play(ml, tmp_path, reap)
    until(lambda: not ml.left(), lambda: f"{ml.left()}")


def test_a_pool_of_two_weeks_can_be_made_where_the_storage_takes_no_keys(ml: StandIn, tmp_path: Path) -> None:
    """What Azure lends a login to sign with lasts a week: so do the tokens of the creation script."""
    ml.service.has_key = ml.storage.takes_keys = False

    async def act(made: AzureMlInstances) -> None:
        making = await begin(made, 14 * DAY_S)
        instance = await asyncio.to_thread(wait_for, ml, "Running")
        await give_up(making)
        script = base64.b64decode(
            instance.settings["setupScripts"]["scripts"]["creationScript"]["scriptData"]
        )
        (url,) = re.findall(r"urlopen\('([^']+)'\)", script.decode())
        trusted = ssl.create_default_context(cafile=str(ml.ca))
        program = await asyncio.to_thread(lambda: urllib.request.urlopen(url, context=trusted).read())
        assert b"main('azureuser'" in program
        await made.delete(ONE)

    play(ml, tmp_path, act)
    until(lambda: not ml.left(), lambda: f"{ml.left()}")


@pytest.mark.parametrize(
    ("state", "told"),
    [("CreateFailed", "AllocationFailed"), ("SetupFailed", "The creation script has failed")],
)
def test_one_that_cannot_be_made_is_told_in_azures_words_and_deleted(
    ml: StandIn, tmp_path: Path, state: str, told: str
) -> None:
    ml.service.instances.fails = state

    async def act(made: AzureMlInstances) -> None:
        with pytest.raises(PlaceError, match=told):
            await (await begin(made))
        (machine,) = await made.list("run")
        assert machine.phase == "gone"
        assert told in machine.detail
        await made.delete(ONE)

    play(ml, tmp_path, act)
    until(lambda: not ml.left(), lambda: f"{ml.left()}")


@pytest.mark.parametrize("told", [True, False])
def test_one_that_does_not_start_again_is_told_in_azures_words_and_stays(
    ml: StandIn, tmp_path: Path, told: bool
) -> None:
    async def act(made: AzureMlInstances) -> None:
        making = await begin(made)
        await asyncio.to_thread(wait_for, ml, "Running")
        await give_up(making)
        await made.stop(ONE)
        ml.service.instances.tells_starts = told
        for _ in range(2):
            ml.service.instances.fails = "StartFailed"
            with pytest.raises(
                PlaceError, match=r"Allocation failed\..*\(AllocationFailed\); start it again later"
            ):
                await (await begin(made))
        await made.stop(ONE)
        assert [instance.state for instance in ml.service.instances.all.values()] == ["Stopped"]
        assert not ml.meters.running()
        await made.delete(ONE)

    play(ml, tmp_path, act)
    until(lambda: not ml.left(), lambda: f"{ml.left()}")


def test_no_quota_is_told_with_its_remedy_and_makes_nothing(ml: StandIn, tmp_path: Path) -> None:
    ml.service.quota[False] = 3

    async def act(made: AzureMlInstances) -> None:
        with pytest.raises(PlaceError, match="the studio's page Quota") as refused:
            await (await begin(made))
        assert (refused.value.transient, refused.value.scope) == (False, "family")
        await made.delete(ONE)

    play(ml, tmp_path, act)
    until(lambda: not ml.left(), lambda: f"{ml.left()}")


def test_every_state_that_azure_names_has_a_meaning() -> None:
    from tests.cloud.test_azure_contracts import FOLDER, contract

    if not FOLDER:
        pytest.skip("NO CHECK AGAINST AZURE'S CONTRACTS: set AZURE_CONTRACTS")
    states = contract("machinelearning", VERSION).literals("ComputeInstanceProperties", "state")
    assert states
    assert not {state.lower() for state in states} - STATES.keys()


def test_places_of_clusters_and_of_instances_do_not_take_each_others_machines(
    ml: StandIn, tmp_path: Path
) -> None:
    async def act(made: AzureMlInstances) -> None:
        making = await begin(made)
        await asyncio.to_thread(wait_for, ml, "Running")
        jobs = ml_places.place(ml, tmp_path)
        assert await jobs.list("run") == ()
        assert await jobs.belongings() == []
        await jobs.close()
        await give_up(making)
        await made.delete(ONE)

    play(ml, tmp_path, act)
    until(lambda: not ml.left(), lambda: f"{ml.left()}")


def test_doctor_and_prices_know_instances(ml: StandIn, tmp_path: Path) -> None:
    async def act(made: AzureMlInstances) -> None:
        found = {check.name: check for check in await made.examine(Needs(cpus=4), 30)}
        assert "image" not in found
        assert "also while it is stopped" in found["prices"].found
        assert "SSH" in found["network"].found
        assert found["workers"].found.startswith("25 of 30 machines")
        (first, *_) = await made.offers(Needs())
        assert 0 < first.cost.idle_usd_per_hour < first.cost.usd_per_hour < 1
        assert not first.life.queues
        assert [each.kind for each in made.outline([(ONE, first)])] == ["compute instance"]

    play(ml, tmp_path, act)


def test_a_private_network_without_a_way_in_is_told_beforehand_and_what_needs_none(
    ml: StandIn, tmp_path: Path
) -> None:
    subnet = "/subscriptions/x/virtualNetworks/n/subnets/s"

    async def act(made: AzureMlInstances) -> None:
        (doubt,) = await made.doubts(60.0)
        assert 'set compute = "clusters", whose machines are reached by mailbox' in doubt
        found = {check.name: check for check in await made.examine(Needs(cpus=4), 1)}["network"]
        assert (found.verdict, "mailbox" in found.remedy) == ("warn", True)

    async def by_jump(made: AzureMlInstances) -> None:
        assert await made.doubts(60.0) == ()

    play(ml, tmp_path, act, public_ip=False, subnet=subnet)
    play(ml, tmp_path, by_jump, public_ip=False, subnet=subnet, jump="me@gate")


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"spot": True}, "regular machines: leave out `spot`"),
        ({"cluster": "mine"}, "leave it out with compute"),
        ({"assigned_user": "me"}, "must be TENANT/OBJECT"),
        ({"compute": "clusters", "jump": "h"}, '`jump` needs compute = "instances"'),
        ({"key": "nowhere"}, "is no file"),
    ],
)
def test_bad_settings_are_told_in_one_line(tmp_path: Path, more: dict[str, Any], told: str) -> None:
    given = {"workspace": "evals", "resource_group": "g", "subscription": "s", "compute": "instances", **more}
    context = PlaceContext(tmp_path, HOME, environ={"HOME": str(tmp_path)}, base=tmp_path)
    with pytest.raises(RequestError) as refused:
        AzureMlPlace.make("ml", AzureMlSettings(**given), context)
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)
