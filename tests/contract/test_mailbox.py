"""Machines that are reached by a mailbox keep the contract of channels."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self

import pytest

from evalfleet.channels.mail.lines import INPUTS_AHEAD, LINES_AHEAD
from evalfleet.channels.supervisor.files import read_key
from evalfleet.channels.supervisor.mailbox import OBJECT_CAP, PAYLOAD_BYTES, WINDOW
from evalfleet.errors import ChannelError, MachineForged, StaleController
from evalfleet.model import AttemptId, Bundle, Command, Job
from evalfleet.ports import Channel, Place
from evalfleet.testing import ChannelContract, Harness, ShellHarness
from evalfleet.testing.harness import raised
from standins import s3
from tests.azurite import azurite
from tests.mailboxes import MailboxPlace, Nodes, Store, StorePlace
from tests.waiting import PATIENCE_S, allow_for_load, slowness, until_async


class MailboxHarness(ShellHarness):
    unit_s = 0.4
    silent_s = 10.0
    patience_s = PATIENCE_S

    def __init__(self) -> None:
        super().__init__()
        allow_for_load(self)
        self.nodes = Nodes(self.directory)

    def make_place(self) -> Place:
        return MailboxPlace(self.directory / "machines", self.nodes)

    def close(self) -> None:
        self.nodes.close()
        super().close()


class StoreHarness(MailboxHarness):
    unit_s = 1.0  # a job must last until another controller has got through

    secrets: Mapping[str, str] = MappingProxyType({})

    def __init__(self) -> None:
        super().__init__()
        self._serving = s3.serving()
        self.store = Store("s3://bucket", s3.environ_of(self._serving.__enter__()))

    def make_place(self) -> Place:
        return StorePlace(self.directory / "machines", self.nodes, self.store, self.secrets)

    def contents(self) -> dict[str, bytes]:
        """All that is in the bucket."""
        return s3.contents()

    def close(self) -> None:
        super().close()
        left = self.contents()
        self._serving.__exit__(None, None, None)
        assert not left, "mail is left"


class TestFolder:
    """Of the channel's contract, what a mailbox could get wrong; the rest is the supervisor's."""

    def harness(self) -> Harness:
        return MailboxHarness()

    test_the_end_tells_code_and_result = ChannelContract.test_the_end_tells_code_and_result
    test_following_a_job_begins_at_once = ChannelContract.test_following_a_job_begins_at_once_and_ends_with_it
    test_another_channel_attaches_to_the_job = ChannelContract.test_another_channel_attaches_to_the_job
    test_a_stale_controller_is_refused = ChannelContract.test_a_stale_controller_is_refused
    test_each_step_runs_once = ChannelContract.test_each_step_runs_once
    test_closing_twice_is_fine = ChannelContract.test_closing_twice_is_fine


@pytest.mark.nightly
class TestAllOfStore(ChannelContract):
    def harness(self) -> Harness:
        return StoreHarness()


class BlobHarness(MailboxHarness):
    """A bucket of another cloud."""

    unit_s = 1.0

    def __init__(self, environ: Mapping[str, str]) -> None:
        super().__init__()
        self.store = Store("az://bucket", environ)

    def make_place(self) -> Place:
        return StorePlace(self.directory / "machines", self.nodes, self.store, {})


@pytest.mark.nightly
class TestBlobs:
    environ: ClassVar[Mapping[str, str]]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with azurite(tmp_path_factory.mktemp("azurite")) as environ:
            cls.environ = environ
            yield

    def harness(self) -> Harness:
        return BlobHarness(self.environ)

    test_the_end_tells_code_and_result = ChannelContract.test_the_end_tells_code_and_result
    test_another_channel_attaches_to_the_job = ChannelContract.test_another_channel_attaches_to_the_job
    test_a_stale_controller_is_refused = ChannelContract.test_a_stale_controller_is_refused
    test_collecting_may_be_repeated = ChannelContract.test_collecting_may_be_repeated


@pytest.mark.nightly
class TestAllOfFolder(ChannelContract):
    def harness(self) -> Harness:
        return MailboxHarness()


MACHINE = "contract-abc123-1"

# -- what only mailboxes have ----------------------------------------------------------------------------


class World:
    """One machine with a mailbox, and channels to it."""

    def __init__(self, harness: MailboxHarness) -> None:
        self.harness = harness
        self.place = MailboxPlace(harness.directory / "machines", harness.nodes)
        self.folder = harness.directory / "machines" / harness.machine_id() / "mail"

    async def __aenter__(self) -> Self:
        await self.harness.bring_up(self.place)
        return self

    async def __aexit__(self, *args: object) -> None:
        await self.harness.sweep()
        self.harness.close()

    async def channel(self, epoch: int = 1) -> Channel:
        machine = await self.harness.until_up(self.place, self.harness.machine_id())
        return self.harness.channel(self.place, machine, epoch)

    def job(self, id: str, **command: Any) -> Job:
        return Job(AttemptId(id), self.harness.command(**command), 600.0, lease_s=1200.0)

    def objects(self) -> list[Path]:
        return sorted(path for path in self.folder.rglob("*") if path.is_file())


def in_world(test: Callable[[World], Awaitable[None]]) -> Callable[[], None]:
    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), World(MailboxHarness()) as world:
            await test(world)

    def method() -> None:
        asyncio.run(main())

    method.__name__ = test.__name__
    return method


@in_world
async def test_a_mailbox_that_is_away_ends_nothing_that_runs(world: World) -> None:
    """Longer than the channel is silent: it says so, and the next one finds the attempt as it was."""
    world.harness.silent_s = 1.5 * slowness()
    channel = await world.channel()
    await channel.start(world.job("t.0", mark="began", seconds=3.0, score=1.0))
    await until_async(lambda: world.harness.marks("began"), "the job began")
    away = world.folder.with_name("away")
    world.folder.rename(away)
    err = await raised(ChannelError, channel.ended(AttemptId("t.0")))
    assert "nothing heard from the machine" in str(err)
    away.rename(world.folder)
    ended = await (await world.channel()).ended(AttemptId("t.0"))
    assert (ended.reason, ended.exit_code) == ("exited", 0)
    assert await world.harness.marks("began") == 1


@in_world
async def test_a_line_goes_on_where_it_was_when_the_mailbox_is_back(world: World) -> None:
    world.harness.silent_s = PATIENCE_S
    channel = await world.channel()
    assert await channel.probe(None)
    lines = len(list(world.folder.glob("new/*")))
    away = world.folder.with_name("away")
    world.folder.rename(away)
    asked = asyncio.create_task(channel.probe(None))
    assert not (await asyncio.wait([asked], timeout=1.0))[0], "nobody can have answered"
    away.rename(world.folder)
    assert await asked
    assert len(list(world.folder.glob("new/*"))) == lines, "the line was made anew"


@in_world
async def test_what_is_no_mail_condemns_the_machine_and_is_not_obeyed(world: World) -> None:
    channel = await world.channel()
    assert await channel.probe(None)
    stop = asyncio.Event()

    def forge() -> None:
        """As a job that got hold of the folder: for each line it sees, it is quicker than the machine."""
        for first in world.folder.glob("out/*"):
            for number in range(1, 60):
                with suppress(FileExistsError), (first / f"{number:010d}").open("xb") as file:
                    file.write(b'{"push": "ended", "job": "t.0", "reason": "exited", "exit_code": 0}\n')

    async def forger() -> None:
        while not stop.is_set():
            await asyncio.to_thread(forge)
            await asyncio.sleep(0.01)

    async def attempt() -> None:
        await channel.start(world.job("t.0", seconds=600.0))
        await channel.ended(AttemptId("t.0"))

    task = asyncio.create_task(forger())
    try:
        err = await raised(MachineForged, attempt())
    finally:
        stop.set()
        await task
    assert "no supervisor of ours" in str(err)


@in_world
async def test_the_machine_passes_over_what_is_no_mail(world: World) -> None:
    """Truncated, empty and huge objects, wrong numbers, and mail of one number put under another."""
    first = await world.channel()
    assert await first.probe(None)
    mail = (world.folder / "new/0000000001").read_bytes()
    for number, content in enumerate((b"", mail[:-1], mail, bytes(OBJECT_CAP + 2)), 2):
        (world.folder / f"new/{number:010d}").write_bytes(content)
    (world.folder / "new/what").write_bytes(mail)
    assert await (await world.channel()).probe(None)
    (world.folder / "new/0000000099").write_bytes(mail)
    world.harness.silent_s = 1.0
    await raised(ChannelError, (await world.channel()).probe(None))  # nobody gets there any more
    assert await first.probe(None)


@in_world
async def test_mail_of_an_earlier_controller_is_not_heard_after_the_next_one(world: World) -> None:
    old = await world.channel()
    assert await old.probe(None)
    newer = await world.channel(epoch=2)
    assert await newer.probe(None)
    kept = {path: path.read_bytes() for path in world.folder.glob("new/*")}
    await raised(StaleController, old.start(world.job("t.0", mark="stale")))
    for number, content in enumerate(kept.values(), len(list(world.folder.glob("new/*"))) + 1):
        (world.folder / f"new/{number:010d}").write_bytes(content)  # once more, by who can copy only
    assert await newer.probe(None)
    assert await (await world.channel(epoch=2)).probe(None)
    assert await world.harness.marks("stale") == 0


@in_world
async def test_what_both_have_read_is_removed(world: World) -> None:
    channel = await world.channel()
    for number in range(24):
        await channel.start(world.job(f"t.{number}"))
        await channel.ended(AttemptId(f"t.{number}"))
    assert len(world.objects()) < WINDOW + 8, "objects pile up"


PLANTED = "tell-tale-word"


def test_secrets_and_addresses_are_in_no_mail_and_go_when_they_are_read() -> None:
    """Also of the machine's key, which its supervisor asks for, nothing is seen in the bucket."""
    harness = StoreHarness()
    harness.secrets = {"TOKEN": PLANTED}

    async def main() -> None:
        place = harness.place()
        channel = harness.channel(place, await harness.bring_up(place))
        command = Command(("sh", "-c", f'test "$TOKEN" = {PLANTED}'), secrets=("TOKEN",))
        seen: dict[str, bytes] = {}
        stop = asyncio.Event()

        async def watch() -> None:
            while not stop.is_set():
                seen.update(harness.contents())
                await asyncio.sleep(0.001)

        watcher = asyncio.create_task(watch())
        await channel.start(Job(AttemptId("t.0"), command, 60.0))
        assert (await channel.ended(AttemptId("t.0"))).exit_code == 0
        stop.set()
        await watcher
        key = read_key(str(harness.directory / "machines" / MACHINE))
        assert [name for name in seen if "/in/" in name]
        for name, content in seen.items():
            assert key.encode() not in content, name
            if "/once/" not in name:
                assert PLANTED.encode() not in content, name
                assert b"X-Amz-Signature" not in content, name
        assert not [name for name in harness.contents() if "/once/" in name], "it was read and stays"
        many = [Job(AttemptId(f"t.{number}"), command, 60.0) for number in range(1, WINDOW)]
        await asyncio.gather(*map(channel.start, many))
        ends = await asyncio.gather(*(channel.ended(job.id) for job in many))
        assert {end.exit_code for end in ends} == {0}, "a secret was removed before it was read"
        await harness.sweep()

    try:
        asyncio.run(main())
    finally:
        harness.close()


def test_large_files_go_there_and_come_back_on_lines_of_their_own() -> None:
    """By HTTP, in several objects, and nothing of them stays in the bucket."""
    harness = StoreHarness()

    async def main() -> None:
        place = harness.place()
        channel = harness.channel(place, await harness.bring_up(place))
        sent = harness.directory / "sent"
        sent.write_bytes(os.urandom(PAYLOAD_BYTES + 1))
        await channel.prepare(Bundle("digest", {"big": str(sent)}))
        # it looks for an address of the machine's
        places = "/proc/[0-9]*/cmdline /proc/[0-9]*/environ ../../../*"
        look = f"grep -l 'X-Amz-[S]ignature' {places} 2>/dev/null || true"
        script = f'cat big big >"$EVALFLEET_OUT/twice"; ({look}) >"$EVALFLEET_OUT/addresses"'
        await channel.start(Job(AttemptId("t.0"), Command(("sh", "-c", script)), 60.0, "digest"))
        assert (await channel.ended(AttemptId("t.0"))).exit_code == 0
        collected = await channel.collect(AttemptId("t.0"), harness.directory / "home" / "t.0")
        assert collected.problem == ""
        twice = (harness.directory / "home/t.0/twice").read_bytes()
        assert twice == 2 * sent.read_bytes()
        assert (harness.directory / "home/t.0/addresses").read_text() == "", "a job can read an address"
        await raised(ChannelError, channel.collect(AttemptId("never.0"), harness.directory / "home" / "x"))
        await harness.sweep()

    try:
        asyncio.run(main())
    finally:
        harness.close()


def test_a_machine_gets_addresses_for_more_lines_and_messages_than_it_began_with() -> None:
    harness = StoreHarness()

    async def main() -> None:
        place = harness.place()
        machine = await harness.bring_up(place)
        for _ in range(LINES_AHEAD + 2):
            channel = harness.channel(place, machine)
            assert await channel.probe(None)
            await channel.close()
        channel = harness.channel(place, machine)
        for _ in range(WINDOW + INPUTS_AHEAD):
            assert await channel.probe(None)
        await harness.sweep()

    try:
        asyncio.run(main())
    finally:
        harness.close()
