"""The place ssh: locks, hosts that do not answer, debts, and hosts that do badly."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from evalfleet.errors import PlaceError
from evalfleet.model import AttemptId, Machine, MachineId, Needs
from evalfleet.places.ssh import SshPlace
from evalfleet.places.ssh.examination import HostHealth, in_order
from evalfleet.ports import Fence
from tests.waiting import PATIENCE_S, slowness, until_async

from .fleet import HOME_ID, Fleet, bring_up, fleet
from .test_channel import shell

OTHER_HOME = "fff999"


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Fleet]:
    with fleet(tmp_path, 2) as made:
        yield made


def machine_id(n: int, home_id: str = HOME_ID) -> MachineId:
    return MachineId(f"pool-{home_id}-{n}")


async def take(place: SshPlace, n: int, expires_s: float = 600.0, home_id: str = HOME_ID) -> None:
    await place.create(machine_id(n, home_id), (await place.offers(Needs()))[0], expires_s)


async def everything_goes(place: SshPlace, hosts: Fleet) -> None:
    for seen in await place.list("pool"):
        await place.delete(seen.id)
    await place.close()
    assert not [path for host in hosts.hosts for path in host.home.iterdir()]


async def test_another_homes_lock_is_respected_until_it_expires(pair: Fleet) -> None:
    theirs, ours = pair.place("b", OTHER_HOME), pair.place()
    for n in (1, 2):
        await take(theirs, n, 8.0 * slowness(), OTHER_HOME)
    with pytest.raises(PlaceError, match=f"no host of lab is free now.*pool-{OTHER_HOME}") as caught:
        await take(ours, 1)
    assert caught.value.transient
    assert await ours.list("pool") == ()

    async def granted() -> bool:
        with contextlib.suppress(PlaceError):
            await take(ours, 1)
            return True
        return False

    await until_async(granted, "their lock to expire", look_s=0.5)
    taken = {seen.address for seen in await ours.list("pool")}
    mine = next(host for host in pair.hosts if host.name in taken)
    sure = [seen for seen in await theirs.list("pool") if seen.address == mine.name]
    with pytest.raises(PlaceError, match="had expired, and"):
        await theirs.extend(sure[0].id, 600)
    for seen in await theirs.list("pool"):
        await theirs.delete(seen.id)
    await theirs.close()
    assert (await ours.list("pool"))[0].phase == "up", "their delete took ours away"
    await everything_goes(ours, pair)


async def test_two_takers_at_once_get_a_host_each(pair: Fleet) -> None:
    places = [pair.place(home, home_id) for home, home_id in (("a", HOME_ID), ("b", OTHER_HOME))]
    calls = [
        take(place, n, 600, home_id)
        for place, home_id in zip(places, (HOME_ID, OTHER_HOME), strict=True)
        for n in (1, 2)
    ]
    done = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(each is None for each in done) == 2, done
    assert [len(list(host.ours.glob("*/pool-*"))) for host in pair.hosts] == [1, 1]
    for place in places:
        for seen in await place.list("pool"):
            await place.delete(seen.id)
        await place.close()
    assert not [path for host in pair.hosts for path in host.home.iterdir()]


async def test_several_machines_a_host(pair: Fleet) -> None:
    place = pair.place(max_per_host=2)
    (offer,) = await place.offers(Needs())
    assert offer.capacity == 4
    await asyncio.gather(*(take(place, n) for n in range(1, 5)))
    assert [len(list(host.ours.glob("*/pool-*"))) for host in pair.hosts] == [2, 2]
    with pytest.raises(PlaceError):
        await take(place, 5)
    first = next(seen for seen in await place.list("pool") if seen.id == machine_id(1))
    await place.delete(first.id)
    with pytest.raises(PlaceError):  # the other machine of its host is still there
        await place.create(machine_id(5), structs.replace(offer, without=(first.name,)), 600.0)
    await take(place, 5)
    await everything_goes(place, pair)


async def test_a_host_that_was_down_joins_when_it_is_back(pair: Fleet) -> None:
    pair.hosts[0].stop()
    place = pair.place()
    await take(place, 1)
    with pytest.raises(PlaceError, match=r"no host of lab is free now.* does not answer") as caught:
        await take(place, 2)
    assert caught.value.transient
    assert pair.hosts[0].name in str(caught.value)
    pair.hosts[0].start()
    await asyncio.sleep(caught.value.retry_after_s or 0)
    await take(place, 2)
    await everything_goes(place, pair)


async def test_an_unreachable_host_is_no_proof_of_absence(pair: Fleet) -> None:
    place = pair.place(gone_after_s=1.5)
    made = await bring_up(place)
    host = next(host for host in pair.hosts if host.name == made.address)
    channel = place.channel(made, Fence("run", 1, PATIENCE_S))
    await channel.start(shell("t.0", "sleep 100"))
    await channel.close()
    host.stop()
    assert await place.list("pool") == (made,), "it is only unreachable"
    later = pair.place(gone_after_s=1.5)
    assert await later.list("pool") == (made,), "the next controller of this home must know, too"
    await later.close()
    with pytest.raises(PlaceError) as caught:
        await place.delete(made.id)
    assert caught.value.transient
    assert await place.list("pool") == (made,)
    await until_async(lambda: none_in(place), "it is given up, or a run could never end")
    # the debt is paid when the host answers again, by whoever of this home comes next
    host.start()
    await place.close()
    heir = pair.place()

    async def paid() -> bool:
        await heir.list("pool")
        return not host.ours.exists()

    await until_async(paid, "the debt to be paid")
    assert not host.leftovers()
    await everything_goes(heir, pair)


async def none_in(place: SshPlace) -> bool:
    return not await place.list("pool")


def calls_at(server: socket.socket) -> int:
    """How many have connected since this was asked last. They are hung up on."""
    server.setblocking(False)
    calls = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            server.accept()[0].close()
            calls += 1
    return calls


async def test_a_silent_host_is_told_of_and_not_waited_for_each_time(
    pair: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    place = pair.place(gone_after_s=60, connect_timeout_s=6)
    made = await bring_up(place)
    host = next(host for host in pair.hosts if host.name == made.address)
    host.stop()
    with socket.create_server((host.address, host.port)) as mute:  # connects, and never says a word
        with pytest.raises(PlaceError):
            await place.delete(made.id)
        assert "it is asked again for 60 s; later, `evalfleet machines` removes" in caplog.text
        assert calls_at(mute) > 0
        with pytest.raises(PlaceError):
            await place.delete(made.id)
        assert calls_at(mute) == 0, "it was asked again at once"
    host.start()
    await until_async(lambda: none_in(place), "it is asked again")
    await everything_goes(place, pair)


@pytest.mark.parametrize("hours", [-2, 5])
async def test_a_wall_clock_that_is_set_does_not_end_the_lease_of_a_silent_host(
    pair: Fleet, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    place = pair.place()
    made = await bring_up(place)
    host = next(host for host in pair.hosts if host.name == made.address)
    host.stop()
    real, real_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: real() + hours * 3600)
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + hours * 3600 * 10**9)
    assert [machine.id for machine in await place.list("pool")] == [made.id]
    host.start()
    await until_async(lambda: seen_up(place), "it answers again")
    monkeypatch.undo()
    await everything_goes(place, pair)


async def seen_up(place: SshPlace) -> bool:
    return [machine.phase for machine in await place.list("pool")] == ["up"]


async def test_a_stop_does_not_wait_forever_for_a_host_that_is_off(
    pair: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    place = pair.place(gone_after_s=0.5)
    made = await bring_up(place)
    host = next(host for host in pair.hosts if host.name == made.address)
    host.stop()
    with pytest.raises(PlaceError):
        await place.stop(made.id)
    assert "counts as stopped after 0.5 s of silence" in caplog.text
    await asyncio.sleep(0.5)
    await place.stop(made.id)
    host.start()
    await everything_goes(place, pair)


async def test_a_new_machine_finds_the_host_of_an_old_debt_free(pair: Fleet) -> None:
    place = pair.place(gone_after_s=0.0)
    for n in (1, 2):
        await bring_up(place, n)
    for host in pair.hosts:
        host.stop()
    for n in (1, 2):
        with pytest.raises(PlaceError):
            await place.delete(machine_id(n))
    assert await place.list("pool") == ()
    await place.close()
    for host in pair.hosts:
        host.start()
    place = pair.place()
    await asyncio.gather(take(place, 3), take(place, 4))
    assert [seen.id for seen in await place.list("pool")] == [machine_id(3), machine_id(4)]
    await everything_goes(place, pair)


async def does_badly(place: SshPlace) -> Machine:
    """A machine that broke every attempt, and was given back."""
    bad = await bring_up(place)
    channel = place.channel(bad, Fence("run", 1, PATIENCE_S))
    for n in range(3):
        await channel.start(shell(f"t{n}.0", "exit 9"))
        await channel.ended(AttemptId(f"t{n}.0"))
    await channel.close()
    await place.delete(bad.id)
    return bad


async def test_a_host_that_does_badly_is_used_last(pair: Fleet) -> None:
    place = pair.place()
    bad = await does_badly(place)
    second = await bring_up(place, 2)
    assert second.address != bad.address
    with pytest.raises(PlaceError, match="1 set aside") as caught:
        await take(place, 3)
    assert caught.value.transient
    assert caught.value.retry_after_s is not None
    await everything_goes(place, pair)


def test_back_off() -> None:
    first, second = HostHealth(0, 30.0), HostHealth(1, 30.0)
    both = [("first", first), ("second", second)]
    assert in_order(both, 0.0) == ["first", "second"]
    first.silent(0.0, "down")
    assert in_order(both, 1.0) == ["second"]
    assert in_order(both, 3.0) == ["second", "first"]
    first.answered()
    assert not first.given_up(3.0)
    for _ in range(3):
        first.did(False)
    assert first.given_up(10.0)
    assert in_order(both, 11.0) == ["second"]
    assert in_order(both, 41.0) == ["second", "first"]
    first.did(True)
    assert in_order(both, 41.0) == ["first", "second"]


async def in_the_end(place: SshPlace, n: int) -> Machine:
    async def brought() -> Machine | None:
        with contextlib.suppress(PlaceError):
            return await bring_up(place, n)
        return None

    return await until_async(brought, "a host is asked again")


async def test_a_host_set_aside_is_probed_again_later(pair: Fleet) -> None:
    pair.hosts[1].stop()
    place = pair.place(set_aside_s=3.0 * slowness())
    bad = await does_badly(place)
    with pytest.raises(PlaceError, match="1 set aside") as caught:
        await take(place, 2)
    assert caught.value.retry_after_s is not None
    again = await in_the_end(place, 2)
    assert again.address == bad.address
    await everything_goes(place, pair)
