"""What every place promises. Subclass, give it a harness, and let pytest find the tests."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from msgspec import structs

from evalfleet.errors import ChannelError, PlaceError
from evalfleet.model import AttemptId, Job, Machine, Needs
from evalfleet.ports import Extendable, Place

from .harness import Harness, find, first_offer, has_ended, has_started, promise, raised


class PlaceContract:
    """`list` is the only truth; `create`, `extend` and `delete` may be repeated; expiries are kept."""

    def harness(self) -> Harness:
        raise NotImplementedError("give the suite a harness with a fresh world")

    # -- offers --------------------------------------------------------------------------------

    @promise
    async def test_offers_are_of_this_place(self, h: Harness) -> None:
        place = h.place()
        offers = await place.offers(Needs())
        assert offers
        assert len({offer.key for offer in offers}) == len(offers), "two offers have one key"
        for offer in offers:
            assert offer.place == place.name
            assert offer.cost.usd_per_hour >= 0
            assert offer.cost.billing_step_s > 0
            assert min(offer.life.teardown_s, offer.life.settle_s, offer.life.least_life_s) >= 0
            assert offer.capacity is None or offer.capacity >= 1
            assert 0 < offer.life.silent_s <= offer.life.lost_s
            assert offer.life.max_life_s is None or offer.life.max_life_s > offer.life.least_life_s
            assert offer.life.queues == (h.kind == "service"), "machines of a service queue, and no others"

    @promise
    async def test_lent_places_say_how_many_they_lend(self, h: Harness) -> None:
        offers = await h.place().offers(Needs())
        if h.kind == "lent":
            assert all(offer.capacity is not None for offer in offers)

    @promise
    async def test_no_more_machines_than_there_are(self, h: Harness) -> None:
        if h.capacity is None:
            return
        place = h.place()
        for n in range(1, h.capacity + 1):
            await h.bring_up(place, n)
        offer = await first_offer(place)
        await h.bring_up(place, 1)  # one that we have needs no room
        err = await raised(PlaceError, place.create(h.machine_id(h.capacity + 1), offer, h.life_s(offer)))
        assert err.transient, "a place that is full may have room later"
        assert await find(place, h.machine_id(h.capacity + 1)) is None
        await h.remove(place, h.machine_id(1))
        await h.bring_up(place, h.capacity + 1)

    # -- create and list -----------------------------------------------------------------------

    @promise
    async def test_a_created_machine_comes_up(self, h: Harness) -> None:
        place = h.place()
        assert not await place.list(h.pool), "a fresh world is not empty"
        seen = await h.bring_up(place)
        assert seen.id == h.machine_id()

    @promise
    async def test_every_controller_sees_the_machine(self, h: Harness) -> None:
        seen = await h.bring_up(h.place())
        other = await find(h.place(), seen.id)
        assert other is not None
        # how it came up is known to the place that saw it, and time goes on
        assert structs.replace(other, timings=seen.timings, ran_s=seen.ran_s) == seen

    @promise
    async def test_creating_twice_makes_one_machine(self, h: Harness) -> None:
        place, other, machine = h.place(), h.place(), h.machine_id()
        offer = await first_offer(place)
        await asyncio.gather(
            place.create(machine, offer, h.life_s(offer)), place.create(machine, offer, h.life_s(offer))
        )
        await other.create(machine, offer, h.life_s(offer))
        await h.until_up(place, machine)
        await other.create(machine, offer, h.life_s(offer))
        assert [seen.id for seen in await place.list(h.pool)] == [machine]

    @promise
    async def test_creating_again_leaves_the_jobs_alone(self, h: Harness) -> None:
        place = h.place()
        channel = h.channel(place, await h.bring_up(place))
        await channel.start(Job(AttemptId("t.0"), h.command(seconds=2 * h.unit_s, exit_code=7), h.long_s))
        await h.bring_up(h.place())
        assert (await channel.ended(AttemptId("t.0"))).exit_code == 7

    @promise
    async def test_list_shows_only_the_pool(self, h: Harness) -> None:
        place = h.place()
        offer = await first_offer(place)
        mine, other = h.machine_id(1), h.machine_id(1, f"{h.pool}x")
        for machine in (mine, other):
            await place.create(machine, offer, h.life_s(offer))
            await h.until_up(place, machine)
        assert [seen.id for seen in await place.list(h.pool)] == [mine]
        assert [seen.id for seen in await place.list(f"{h.pool}x")] == [other]
        assert not await place.list(h.pool[:-1])
        assert [seen.id for seen in await place.list(f"{h.pool}-abc123")] == [mine]

    # -- queues: machines of a service -----------------------------------------------------------

    @promise
    async def test_the_life_of_a_machine_begins_when_it_starts(self, h: Harness) -> None:
        """However long it waited: it is given `expires_s` from its start, and ends then by itself."""
        if h.kind != "service":
            return
        place, machine = h.place(), h.machine_id()
        await place.create(machine, await first_offer(place), 6 * h.unit_s)
        seen = await h.until(lambda: find(place, machine), has_started, f"{machine} is started")
        begun = asyncio.get_running_loop().time()
        ended = await h.until(lambda: find(place, machine), has_ended, f"{machine} ends by itself")
        lived_s = asyncio.get_running_loop().time() - begun
        ran_s = (seen.ran_s if seen is not None else None) or 0.0
        assert 5 * h.unit_s <= lived_s + ran_s
        # how soon we see its end does not count, where the place tells how long it ran
        told_s = ended.ran_s if ended is not None else None
        assert (lived_s + ran_s if told_s is None else told_s) <= 7 * h.unit_s

    @promise
    async def test_how_long_a_machine_ran_is_told_until_it_is_deleted(self, h: Harness) -> None:
        """Also after its end: whoever was away meanwhile must know what it cost."""
        if h.kind != "service":
            return
        place, machine = h.place(), h.machine_id()
        await place.create(machine, await first_offer(place), 6 * h.unit_s)
        queued = await find(place, machine)
        assert queued is None or queued.phase != "queued" or not queued.ran_s, "it waits, and has run"
        running = await h.until(lambda: find(place, machine), has_started, f"{machine} is started")
        assert running is not None
        assert running.start, "a start has a name: a service may start a machine anew"
        assert running.node, "a service tells where it runs"
        assert running.ran_s is not None
        await h.until(lambda: find(place, machine), has_ended, f"{machine} ends by itself")
        ended = await find(h.place(), machine)
        assert ended is not None, "what it cost is forgotten"
        assert ended.ran_s is not None
        assert abs(ended.ran_s - 6 * h.unit_s) <= h.unit_s

    # -- delete --------------------------------------------------------------------------------

    @promise
    async def test_a_deleted_machine_is_gone_for_good(self, h: Harness) -> None:
        place = h.place()
        machine = (await h.bring_up(place)).id
        await h.remove(place, machine)
        await h.wait(4)
        assert await find(h.place(), machine) is None

    @promise
    async def test_deleting_a_machine_that_is_not_up_yet(self, h: Harness) -> None:
        place, machine = h.place(), h.machine_id()
        offer = await first_offer(place)
        await place.create(machine, offer, h.life_s(offer))
        await h.remove(place, machine)

    @promise
    async def test_deleting_twice_or_what_never_was(self, h: Harness) -> None:
        place = h.place()
        machine = (await h.bring_up(place)).id
        other = h.place()
        for answer in await asyncio.gather(
            place.delete(machine), other.delete(machine), return_exceptions=True
        ):  # at the same time, one may be told to come back later
            assert answer is None or (isinstance(answer, PlaceError) and answer.transient), answer
        await h.remove(place, machine)
        await place.delete(machine)
        await h.place().delete(h.machine_id(99))

    @promise
    async def test_deleting_ends_what_runs(self, h: Harness) -> None:
        place = h.place()
        seen = await h.bring_up(place)
        job = Job(AttemptId("t.0"), h.command(seconds=6 * h.unit_s, mark="began", after="survived"), h.long_s)
        await h.channel(place, seen).start(job)
        await h.until(lambda: h.marks("began"), bool, "the job began")
        await h.remove(h.place(), seen.id)
        await h.wait(8)
        assert await h.marks("survived") == 0, "a job outlived its machine"

    @promise
    async def test_a_machine_that_is_gone_cannot_be_reached(self, h: Harness) -> None:
        place = h.place()
        seen = await h.bring_up(place)
        await h.remove(place, seen.id)
        channel = h.channel(place, seen)
        async with asyncio.timeout(3 * h.silent_s + h.patience_s):
            await raised(ChannelError, channel.start(Job(AttemptId("t.0"), h.command(mark="ran"), h.long_s)))
        assert await h.marks("ran") == 0

    # -- expiry --------------------------------------------------------------------------------

    @promise
    async def test_a_machine_ends_by_itself_at_its_expiry(self, h: Harness) -> None:
        place = h.place()
        if (await first_offer(place)).life.extendable:
            seen = await h.bring_up(place)
            unit_s = await _unit_s(h, h.place(), seen)
            await longer(place).extend(seen.id, 6 * unit_s)
        else:
            unit_s = h.unit_s
            seen = await h.bring_up(place, expires_s=6 * unit_s + h.boot_s)
        await _ends_with_its_machine(h, place, seen, AttemptId("t.0"), unit_s)

    @promise
    async def test_extend_moves_the_expiry(self, h: Harness) -> None:
        place = h.place()
        seen = await h.bring_up(place)
        if not (await first_offer(place)).life.extendable:
            if isinstance(place, Extendable):  # other offers of the place are
                refusal = await raised(PlaceError, place.extend(seen.id, h.life_s(await first_offer(place))))
                assert not refusal.transient, "it may seem to succeed later"
            return
        another = h.place()
        unit_s = await _unit_s(h, another, seen)
        channel = h.channel(place, seen)
        await channel.start(Job(AttemptId("t.0"), h.command(seconds=7 * unit_s, after="alive"), h.long_s))
        await longer(place).extend(seen.id, 5 * unit_s)
        await longer(another).extend(seen.id, 15 * unit_s)
        assert (await channel.ended(AttemptId("t.0"))).reason == "exited", "it ended at its old expiry"
        assert not has_ended(await find(place, seen.id)), "it ended at its old expiry"
        await _ends_with_its_machine(h, place, seen, AttemptId("t.1"), unit_s)

    @promise
    async def test_extend_makes_nothing(self, h: Harness) -> None:
        place = h.place()
        if not isinstance(place, Extendable):
            return
        with suppress(PlaceError):  # it may say that there is no such machine
            await place.extend(h.machine_id(99), h.long_s)
        assert not await place.list(h.pool)


def longer(place: Place) -> Extendable:
    """The place, whose offers say that it can make a machine's life longer."""
    assert isinstance(place, Extendable)
    return place


async def _unit_s(h: Harness, another: Place, machine: Machine) -> float:
    """The harness's unit, or longer where calls take longer: a busy computer must not miss an expiry."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    await longer(another).extend(machine.id, h.life_s(await first_offer(another)))
    return max(h.unit_s, loop.time() - begun)


async def _ends_with_its_machine(
    h: Harness, place: Place, machine: Machine, job: AttemptId, unit_s: float
) -> None:
    """Start a job that lasts longer than the machine: both end by the machine's expiry, nobody helping."""
    loop = asyncio.get_running_loop()
    command = h.command(seconds=14 * unit_s, mark="began", after="survived")
    begun = loop.time()
    await h.channel(place, machine).start(Job(job, command, h.long_s))
    await h.until(lambda: h.marks("began"), bool, "the job began")
    if not h.listed_when_expired:
        await h.until(lambda: find(place, machine.id), has_ended, f"{machine.id} ends by itself")
    await asyncio.sleep(max(0.0, begun + 15 * unit_s - loop.time()))
    assert await h.marks("survived") == 0, "a job outlived its machine's expiry"
