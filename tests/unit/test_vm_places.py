"""What every place of VMs needs, as far as it needs no VM: keys, pace of snapshots, ceiling, price books."""

from __future__ import annotations

import asyncio
import shlex
import stat
import sys
from pathlib import Path

import pytest

from evalfleet.channels.samples import Samples
from evalfleet.errors import PlaceError, RequestError
from evalfleet.model import MachineId, Offer
from evalfleet.places.vm.place import (
    BURST,
    SPACING_S,
    OfferTrials,
    SnapshotPace,
    Snapshots,
    VcpuCeiling,
    check_installed,
)
from evalfleet.places.vm.price_book import PriceBook, Quote, load_prices, named_in, save_prices
from evalfleet.places.vm.ssh_access import SshAccess, SshKeys, SshLogin
from evalfleet.ports import Price, PriceTable
from evalfleet.version import install_command
from tests.waiting import PATIENCE_S

ONE, TWO = MachineId("p-abc123-1"), MachineId("p-abc123-2")


def test_keys_are_made_once_for_our_eyes_only(tmp_path: Path) -> None:
    keys, again = SshKeys(tmp_path, ""), SshKeys(tmp_path, "")
    machine = ONE
    assert not keys.has_host(machine)
    assert keys.of_host(machine) == again.of_host(machine)
    assert keys.of_host(machine).public != keys.login().public
    for path in (keys.login().path, keys.of_host(machine).path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    known = keys.known_hosts(machine, "192.0.2.1", 2222)
    assert known.read_text() == f"[192.0.2.1]:2222 {keys.of_host(machine).public}\n"
    keys.drop(machine)
    assert not keys.has_host(machine)
    assert not known.exists()


def test_snapshots_are_many_at_first_and_few_in_the_long_run() -> None:
    pace = SnapshotPace()
    now, waits = 100.0, []
    for _ in range(60):
        waits.append(pace.wait_s(now))
        now += waits[-1]
    assert waits[0] == SPACING_S
    assert waits[-1] > 0.5
    assert now - 100.0 > 60 - BURST - 5


def test_a_recent_snapshot_is_shared_and_an_old_one_taken_anew() -> None:
    taken: list[int] = []

    async def take() -> int:
        taken.append(len(taken))
        return taken[-1]

    async def use() -> None:
        snapshots = Snapshots(take)
        assert await snapshots.recent(60.0) == 0
        assert await snapshots.recent(60.0) == 0
        assert await snapshots.recent(0.0) == 1
        assert await snapshots.fresh() == 2

    asyncio.run(use())


def test_a_port_is_silent_until_somebody_listens(tmp_path: Path) -> None:
    async def use() -> None:
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        direct, behind = (
            SshAccess(
                SshLogin("tester", 22, jump, 10.0, None), SshKeys(tmp_path, ""), "home", {}, Samples(tmp_path)
            )
            for jump in ("", "bastion")
        )
        assert not await direct.is_silent(f"{host}:{port}")
        server.close()
        await server.wait_closed()
        assert await direct.is_silent(f"{host}:{port}")
        assert not await direct.is_silent("")  # nobody knows: it has no address yet
        assert not await behind.is_silent(f"{host}:{port}")

    asyncio.run(use())


def test_machines_that_are_being_made_count_against_the_ceiling() -> None:
    ceiling = VcpuCeiling(8)
    with ceiling.counting(ONE, 4):
        ceiling.check(ONE, {})
        with ceiling.counting(TWO, 4):
            ceiling.check(TWO, {ONE: 4})  # the first has been made meanwhile, and counts once
            with ceiling.counting(MachineId("p-abc123-3"), 1), pytest.raises(PlaceError) as told:
                ceiling.check(MachineId("p-abc123-3"), {})
            assert (told.value.transient, told.value.scope) == (True, "place")
    with ceiling.counting(ONE, 4), pytest.raises(PlaceError, match="5 of max_vcpus = 8"):
        ceiling.check(ONE, {TWO: 5})


def test_without_a_ceiling_nothing_is_too_much() -> None:
    ceiling = VcpuCeiling(0)
    with ceiling.counting(ONE, 1000):
        ceiling.check(ONE, {TWO: 1000})


async def _ask(trials: OfferTrials, answers: list[PlaceError | None], count: int) -> list[object]:
    """Ask for as many machines at once; each that gets through takes the next answer."""

    async def ask() -> None:
        async with trials.asking(Offer("cloud", "large", "here")):
            await asyncio.sleep(0)
            answer = answers.pop(0)
            if answer is not None:
                raise answer

    return await asyncio.gather(*(ask() for _ in range(count)), return_exceptions=True)


def test_who_waits_is_refused_for_good_as_the_first_one_was() -> None:
    answers: list[PlaceError | None] = [PlaceError("no room", transient=False, scope="offer")]
    told = asyncio.run(_ask(OfferTrials(), answers, 5))
    assert [str(each) for each in told] == ["no room"] * 5
    assert answers == [], "one was asked for"


def test_a_refusal_that_is_for_now_or_about_one_machine_is_not_shared() -> None:
    busy = PlaceError("busy", transient=True, scope="place")
    odd = PlaceError("odd", transient=False, scope="machine")
    told = asyncio.run(_ask(OfferTrials(), [busy, odd, None, None, None], 5))
    assert sorted(map(str, told)) == ["None", "None", "None", "busy", "odd"]


def test_an_offer_that_was_had_is_waited_for_no_more_and_a_slow_one_not_for_ever() -> None:
    async def main(trials: OfferTrials, *, first_ends: bool = False, has_room: bool = False) -> None:
        under_way = asyncio.Barrier(3)
        if first_ends:
            assert await _ask(trials, [None], 1) == [None]

        async def ask() -> None:
            async with trials.asking(Offer("cloud", "large", "here")) as had:
                if has_room:
                    had()
                await under_way.wait()  # all three are asked for at the same time

        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(ask(), ask(), ask())

    asyncio.run(main(OfferTrials(), first_ends=True))
    asyncio.run(main(OfferTrials(), has_room=True))
    asyncio.run(main(OfferTrials(patience_s=0.01)))


def test_one_that_goes_first_and_is_given_up_makes_way() -> None:
    async def main() -> None:
        trials = OfferTrials()

        async def hang() -> None:
            async with trials.asking(Offer("cloud", "large", "here")):
                await asyncio.Event().wait()

        first = asyncio.create_task(hang())
        await asyncio.sleep(0)
        second = asyncio.create_task(_ask(trials, [None], 1))
        await asyncio.sleep(0)
        first.cancel()
        async with asyncio.timeout(PATIENCE_S):
            assert await second == [None]

    asyncio.run(main())


def test_a_module_that_is_missing_is_named_with_the_extra_that_has_it() -> None:
    check_installed("cloud", ("json", "importlib.util"), "cloud")
    for missing in ("no_such_module", "no_such_package.module"):
        with pytest.raises(RequestError, match=rf"needs {missing}: pip install .+\[cloud\]"):
            check_installed("cloud", ("json", missing), "cloud")


@pytest.mark.parametrize(
    ("receipt", "tool"), [("uv-receipt.toml", "uv tool"), ("pipx_metadata.json", "pipx")]
)
def test_an_extra_is_added_by_the_installer_that_was_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, receipt: str, tool: str
) -> None:
    (tmp_path / receipt).touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    words = shlex.split(install_command("cloud"))
    assert words[:-1] == [*tool.split(), "install", "--force"]
    extras = words[-1].partition("[")[2].partition("]")[0].split(",")
    assert {"cloud", "ssh"} <= set(extras), "what is installed stays"


OLD = PriceTable("2025-01", "built in", (Price("small", "east", 2.0, 0.5), Price("disk", "east", 0.1)))
NEW = PriceTable("2026-01", "https://prices", (Price("Small", "east", 3.0), Price("small", "west", 4.0)))


def test_what_the_newer_list_does_not_have_is_in_the_one_behind() -> None:
    book = PriceBook(NEW, PriceBook(OLD))
    assert book.quote("small", "east") == Quote(3.0, "2026-01")
    assert book.quote("small", "east", spot=True) == Quote(0.5, "2025-01")
    assert book.quote("disk", "east") == Quote(0.1, "2025-01")
    assert book.quote("small", "west", spot=True) is None
    assert PriceBook(None, PriceBook(OLD)).quote("small", "east") == Quote(2.0, "2025-01")


def test_a_price_list_is_kept_and_one_that_is_damaged_is_none(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "prices.json"
    assert load_prices(path) is None
    save_prices(path, NEW)
    assert load_prices(path) == NEW
    assert [file.name for file in path.parent.iterdir()] == ["prices.json"]
    path.write_bytes(path.read_bytes()[:-10])
    assert load_prices(path) is None


def test_prices_are_of_what_places_name() -> None:
    tables = [{"sizes": ["b", "a"]}, {"sizes": ["a"]}, {}]
    assert named_in(tables, "sizes", ("d",)) == ["b", "a", "d"]
    assert named_in([], "sizes", ("d",)) == ["d"]
