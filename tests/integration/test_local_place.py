"""The place `local` and its channel: real directories, real processes, as a controller uses them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from evalfleet.channels.artefacts import Caps, bring_home
from evalfleet.channels.secrecy import Secrets
from evalfleet.channels.supervisor.processes import birth, marked, marker, parse_stat
from evalfleet.errors import ChannelError, PlaceError, RequestError, SetupFailed, StaleController
from evalfleet.model import (
    WANTS_FILE,
    AttemptId,
    Bundle,
    Collected,
    Command,
    Ended,
    Job,
    KeptFiles,
    LargeFile,
    Machine,
    MachineId,
    Needs,
    SetupStep,
)
from evalfleet.names import NOTE
from evalfleet.places.local import LocalPlace, LocalSettings
from evalfleet.ports import Channel, Fence
from tests.processes import parent_of
from tests.waiting import PATIENCE_S, slowness, suspend, until, until_seen

ONE = MachineId("pool-abc-1")
SECRETS = {"KEY": "hush-hush", "OTHER": "unused-value", "SHORT": "x"}
UNTIL_GO = 'while [ ! -e "$EVALFLEET_OUT/go" ]; do sleep 0.02; done; '


def sh(script: str, *secrets: str) -> Command:
    return Command(("sh", "-c", script), secrets=secrets)


def job(id: str, script: str, *secrets: str, timeout_s: float = PATIENCE_S, bundle: str = "") -> Job:
    return Job(AttemptId(id), sh(script, *secrets), timeout_s, bundle)


class World:
    """A place with one machine, and channels to it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.place = LocalPlace("local", LocalSettings(), root / "machines", SECRETS)
        self.channels: list[Channel] = []

    async def create(self, machine: MachineId = ONE) -> None:
        (offer,) = await self.place.offers(Needs())
        await self.place.create(machine, offer, 3600)

    async def machine(self) -> Machine:
        (machine,) = await self.place.list("pool")
        return machine

    async def channel(self, epoch: int = 1, silent_s: float = 30.0) -> Channel:
        channel = self.place.channel(await self.machine(), Fence("run", epoch, silent_s))
        self.channels.append(channel)
        return channel

    @property
    def directory(self) -> Path:
        return self.root / "machines" / ONE

    @property
    def supervisor(self) -> int:
        pid = parse_stat((self.directory / "supervisor.pid").read_bytes())[0]
        assert pid is not None
        return pid

    def file(self, id: str, name: str) -> Path:
        return self.directory / "jobs" / id / "out" / name

    async def pid(self, id: str) -> int:
        await until_seen(lambda: self.file(id, "pid").exists() and self.file(id, "pid").read_text())
        return int(self.file(id, "pid").read_text())

    def processes(self) -> list[int]:
        return marked(b"\0EVALFLEET_MACHINE=" + os.fsencode(self.root))


@asynccontextmanager
async def worlds(root: Path) -> AsyncIterator[World]:
    world = World(root)
    try:
        await world.create()
        yield world
    finally:
        for channel in world.channels:
            await channel.close()
        for machine in await world.place.list("pool"):
            await world.place.delete(machine.id)
        await world.place.close()
    assert world.processes() == []
    assert await world.place.list("pool") == ()


def play(tmp_path: Path, test: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(PATIENCE_S), worlds(tmp_path) as world:
            await test(world)

    asyncio.run(whole())


async def run(channel: Channel, what: Job) -> Ended:
    await channel.start(what)
    return await channel.ended(what.id)


# -- the place ---------------------------------------------------------------------------------


def test_an_offer_says_what_the_settings_say(tmp_path: Path) -> None:
    place = LocalPlace("here", LocalSettings(1.5, 60.0, 3), tmp_path)
    (offer,) = asyncio.run(place.offers(Needs()))
    assert (offer.place, offer.size, offer.cost.usd_per_hour, offer.cost.billing_step_s, offer.capacity) == (
        "here",
        "process",
        1.5,
        60.0,
        3,
    )


def test_machines_are_made_listed_and_deleted_any_number_of_times(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        pid = world.supervisor
        await world.create()
        assert world.supervisor == pid
        await world.create(MachineId("pool2-abc-1"))
        machine = await world.machine()
        assert (machine.id, machine.phase, machine.address) == (ONE, "up", str(world.directory))
        assert world.directory.stat().st_mode & 0o777 == 0o700
        assert [m.id for m in await world.place.list("pool2")] == ["pool2-abc-1"]
        assert await world.place.list("other") == ()
        for _ in range(2):
            await world.place.delete(ONE)
            await world.place.delete(MachineId("pool2-abc-1"))
            await world.place.delete(MachineId("never-was-0"))
        assert not world.directory.exists()
        assert world.processes() == []

    play(tmp_path, test)


def test_nothing_lives_after_delete(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        channel = await world.channel()
        await channel.start(
            job("a", "setsid sleep 300 & env -i setsid sleep 301 & echo $! > $EVALFLEET_OUT/pid; sleep 302")
        )
        pid = await world.pid("a")
        read_only = world.directory / "jobs" / "a" / "out" / "d"
        read_only.mkdir()
        (read_only / "f").touch(0o400)
        read_only.chmod(0o500)
        await world.place.delete(ONE)
        assert not world.directory.exists()
        assert world.processes() == []
        assert birth(pid) is None  # found also without a mark in its environment, as our child

    play(tmp_path, test)


@pytest.mark.parametrize("signum", [pytest.param(signal.SIGSTOP, marks=pytest.mark.slow), signal.SIGKILL])
def test_a_machine_whose_supervisor_does_not_answer_is_deleted(tmp_path: Path, signum: int) -> None:
    async def test(world: World) -> None:
        channel = await world.channel()
        await channel.start(job("a", "setsid sleep 300 & echo $! > $EVALFLEET_OUT/pid; sleep 300"))
        pids = [await world.pid("a"), world.supervisor]
        await channel.close()
        os.kill(world.supervisor, signum)
        await world.place.delete(ONE)
        await until_seen(lambda: [birth(pid) for pid in pids] == [None, None])  # killed is not yet reaped
        assert not world.directory.exists()

    play(tmp_path, test)


def test_what_bears_no_mark_goes_with_its_job_when_the_supervisor_is_dead(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        channel = await world.channel()
        await channel.start(job("a", "env -i sleep 300 & echo $! > $EVALFLEET_OUT/pid; sleep 300"))
        pid = await world.pid("a")
        await until_seen(lambda: b"EVALFLEET" not in Path(f"/proc/{pid}/environ").read_bytes())
        await channel.close()
        os.kill(world.supervisor, signal.SIGKILL)
        await world.place.delete(ONE)
        await until_seen(lambda: birth(pid) is None)

    play(tmp_path, test)


def test_an_interrupted_delete_shows_and_can_be_repeated(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        (world.directory / "deleting").touch()
        assert (await world.machine()).phase == "pending"
        with pytest.raises(PlaceError):
            await world.create()
        os.kill(world.supervisor, signal.SIGKILL)
        with pytest.raises(ChannelError):
            await (await world.channel(silent_s=0.5)).probe(None)
        await world.place.delete(ONE)

    play(tmp_path, test)


def test_extend_sets_the_expiry_and_revives(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        await world.place.extend(ONE, 0.1)
        await until_seen(lambda: (world.directory / "expired").exists() and birth(world.supervisor) is None)
        assert (await world.machine()).phase == "up"
        await world.place.extend(ONE, 3600)
        assert (await run(await world.channel(), job("a", "true"))).exit_code == 0
        with pytest.raises(PlaceError, match="no machine"):
            await world.place.extend(MachineId("never-was-0"), 1.0)

    play(tmp_path, test)


# -- the channel -------------------------------------------------------------------------------


def test_an_attempt_from_start_to_forgotten(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        channel = await world.channel()
        ended = await run(channel, job("a/b.0", "echo hi; echo '{}' > $EVALFLEET_OUT/result.json"))
        assert (ended.reason, ended.exit_code, ended.result) == ("exited", 0, b"{}\n")
        into = tmp_path / "results" / "deep" / "a"
        assert await channel.collect(AttemptId("a/b.0"), into) == Collected(1, 3, 0)
        assert sorted(path.name for path in into.iterdir()) == ["evalfleet.log", "result.json"]
        assert (into / "evalfleet.log").read_text() == "hi\n"
        assert await channel.collect(AttemptId("a/b.0"), into) == Collected(1, 3, 0)
        # a successor that crashed before it wrote the end down asks again
        assert await (await world.channel(epoch=2)).ended(AttemptId("a/b.0")) == ended
        world.channels[1].forget(AttemptId("a/b.0"))
        await until_seen(lambda: not list((world.directory / "jobs").iterdir()))
        assert (await world.channels[1].ended(AttemptId("a/b.0"))).reason == "lost"

    play(tmp_path, test)


def test_many_at_once_and_waiters_that_give_up(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        channel = await world.channel()
        jobs = [job(f"t{n}", f"exit {n}") for n in range(20)]
        ends = await asyncio.gather(*(run(channel, each) for each in jobs))
        assert [ended.exit_code for ended in ends] == list(range(20))
        await channel.start(job("slow", UNTIL_GO))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await channel.ended(AttemptId("slow"))
        waiting = [asyncio.create_task(channel.ended(AttemptId("slow"))) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        world.file("slow", "go").touch()
        assert [ended.exit_code for ended in await asyncio.gather(*waiting[1:])] == [0, 0]

    play(tmp_path, test)


def test_an_unknown_job_is_lost_and_may_be_stopped(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        channel = await world.channel()
        assert (await channel.ended(AttemptId("never"))).reason == "lost"
        await channel.stop(AttemptId("never"))
        channel.forget(AttemptId("never"))
        with pytest.raises(ChannelError):
            await channel.collect(AttemptId("never"), tmp_path / "never")
        assert not (tmp_path / "never").exists()

    play(tmp_path, test)


def test_a_supervisor_killed_while_we_wait_is_replaced(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        channel = await world.channel()
        await channel.start(job("a", "echo $$ > $EVALFLEET_OUT/pid;" + UNTIL_GO + "exit 6"))
        await world.pid("a")
        waiting = asyncio.create_task(channel.ended(AttemptId("a")))
        first = world.supervisor
        os.kill(first, signal.SIGKILL)
        await until_seen(lambda: world.supervisor != first)
        assert not waiting.done()
        world.file("a", "go").touch()
        assert (await waiting).exit_code == 6

    play(tmp_path, test)


def test_an_end_that_was_told_to_nobody_is_not_missed(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        channel = await world.channel()
        await channel.start(job("a", "echo $$ > $EVALFLEET_OUT/pid;" + UNTIL_GO + "exit 6"))
        pid = await world.pid("a")
        os.kill(world.supervisor, signal.SIGKILL)
        world.file("a", "go").touch()
        await until_seen(lambda: birth(pid) is None)
        assert (await channel.ended(AttemptId("a"))).exit_code == 6

    play(tmp_path, test)


@pytest.mark.slow
def test_a_machine_that_falls_silent_is_told_in_time_and_found_again(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        silent_s = 5.0 * slowness()
        channel = await world.channel(silent_s=silent_s)
        await channel.start(job("a", UNTIL_GO))
        waiting = asyncio.create_task(channel.ended(AttemptId("a")))
        await asyncio.sleep(silent_s + 1.0)
        assert not waiting.done()  # no job ends for long, yet the machine is heard
        suspend(world.supervisor)
        with pytest.raises(ChannelError):
            await waiting
        with pytest.raises(ChannelError):
            await channel.probe(None)
        os.kill(world.supervisor, signal.SIGCONT)
        world.file("a", "go").touch()
        assert (await channel.ended(AttemptId("a"))).exit_code == 0

    play(tmp_path, test)


def test_who_waits_keeps_the_lease(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        slow = slowness()
        channel = await world.channel(silent_s=4.0 * slow)  # a word each second, if it is quick
        kept = Job(AttemptId("a"), sh(f"sleep {7 * slow}"), PATIENCE_S, lease_s=5.0 * slow)
        assert (await run(channel, kept)).reason == "exited"

    play(tmp_path, test)


def test_a_successor_needs_no_secret_for_what_runs(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        await (await world.channel()).start(job("a", "echo $KEY;" + UNTIL_GO, "KEY"))
        poor = LocalPlace("local", LocalSettings(), world.root / "machines")
        channel = poor.channel(await world.machine(), Fence("run", 2, 20.0))
        world.channels.append(channel)
        await channel.start(job("a", "ignored", "KEY"))
        world.file("a", "go").touch()
        assert (await channel.ended(AttemptId("a"))).exit_code == 0
        with pytest.raises(RequestError, match="KEY"):
            await channel.start(job("b", "true", "KEY"))

    play(tmp_path, test)


def test_a_machine_that_is_gone_is_told_at_once(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        channel = await world.channel()
        await channel.start(job("a", "sleep 300"))
        waiting = asyncio.create_task(channel.ended(AttemptId("a")))
        await asyncio.sleep(0)
        await world.place.delete(ONE)
        with contextlib.suppress(ChannelError):  # it may have heard how the job was stopped
            assert (await waiting).reason == "stopped"
        with pytest.raises(ChannelError):
            await channel.start(job("b", "true"))

    play(tmp_path, test)


def test_two_controllers_the_older_must_stop(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        old, new = await world.channel(epoch=1), await world.channel(epoch=2)
        await old.start(job("a", UNTIL_GO))
        waiting = asyncio.create_task(old.ended(AttemptId("a")))
        await asyncio.sleep(0)
        await new.start(job("a", "never runs"))
        with pytest.raises(StaleController):
            await waiting
        for call in (
            old.start(job("b", "true")),
            old.ended(AttemptId("a")),
            old.probe(None),
            old.stop(AttemptId("a")),
        ):
            with pytest.raises(StaleController):
                await call
        world.file("a", "go").touch()
        assert (await new.ended(AttemptId("a"))).exit_code == 0

    play(tmp_path, test)


def test_probes(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        channel = await world.channel()
        assert await channel.probe(None) is True
        assert await channel.probe(sh("true")) is True
        assert await channel.probe(sh("exit 1")) is False
        assert await channel.probe(Command(("no-such-thing",))) is False
        assert list((world.directory / "jobs").iterdir()) == []

    play(tmp_path, test)


def test_closing_ends_the_waiting(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        channel = await world.channel()
        await channel.start(job("a", "sleep 300"))
        waiting = asyncio.create_task(channel.ended(AttemptId("a")))
        await asyncio.sleep(0)
        await channel.close()
        with pytest.raises(ChannelError):
            await waiting
        await channel.close()

    play(tmp_path, test)


# -- set-up ------------------------------------------------------------------------------------


def test_a_bundle_is_prepared_once(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "tool").write_text("#!/bin/sh\ncat made")
    (tmp_path / "source" / "tool").chmod(0o755)
    files = {"bin/tool": str(tmp_path / "source" / "tool"), "all": str(tmp_path / "source")}
    steps = (SetupStep("make", sh("echo made >> made")), SetupStep("see", sh("test -x bin/tool")))
    bundle = Bundle("d1", files, steps)

    async def test(world: World) -> None:
        channel = await world.channel()
        await channel.prepare(bundle)
        await channel.prepare(bundle)
        await (await world.channel(epoch=2)).prepare(bundle)
        ended = await run(world.channels[1], job("a", "bin/tool; ls", bundle="d1"))
        assert ended.detail == "made\nall\nbin\nmade\n"
        assert await world.channels[1].probe(sh("test -x bin/tool"))

    play(tmp_path, test)


def test_steps_are_told_as_they_begin_and_what_they_say_meanwhile(tmp_path: Path) -> None:
    says = 'printf "3 of 9\\r4 of 9, for $KEY\\n"; until [ -e heard ]; do sleep 0.05; done'
    steps = (SetupStep("files", sh("true")), SetupStep("image", sh(says, "KEY")))
    told: list[tuple[str, str]] = []

    async def test(world: World) -> None:
        channel = await world.channel()

        def tell(step: str, said: str) -> None:
            told.append((step, said))
            if said:
                (world.directory / "bundles/d/heard").touch()

        await channel.prepare(Bundle("d", {}, steps), tell=tell)
        assert told == [("files", ""), ("image", ""), ("image", "4 of 9, for ***")]
        await (await world.channel(epoch=2)).prepare(Bundle("d", {}, steps), tell=tell)
        assert len(told) == 3, "what is behind the machine is not told of"

    play(tmp_path, test)


def test_a_step_that_fails_is_told_and_may_be_run_anew(tmp_path: Path) -> None:
    ok = tmp_path / "ok"
    two = f'echo no luck; echo seen >"$EVALFLEET_OUT/evidence"; test -e {ok}'
    steps = (SetupStep("one", sh("echo 1 >> ones")), SetupStep("two", sh(two)))
    slow = (SetupStep("slow", sh("sleep 300"), timeout_s=0.2),)

    async def test(world: World) -> None:
        channel = await world.channel()
        for _ in range(2):
            with pytest.raises(SetupFailed, match="exit code 1: no luck") as failure:
                await channel.prepare(Bundle("d", {}, steps), tmp_path / "left")
            assert failure.value.step == "two"
            assert (tmp_path / "left/two/evidence").read_text() == "seen\n"
            (tmp_path / "left/two/evidence").unlink()
        ok.touch()
        timings = await channel.prepare(Bundle("d", {}, steps))
        assert list(timings) == ["two"], "only what was run now"
        assert 0 <= timings["two"] < 30
        assert (world.directory / "bundles" / "d" / "ones").read_text() == "1\n"
        with pytest.raises(SetupFailed, match=r"not done after 0\.2 s"):
            await channel.prepare(Bundle("e", {}, slow))
        with pytest.raises(SetupFailed, match="nowhere"):
            await channel.prepare(Bundle("f", {"x": str(tmp_path / "nowhere")}))
        with pytest.raises(SetupFailed, match="inside"):
            await channel.prepare(Bundle("g", {"../x": str(ok)}))
        await channel.prepare(Bundle())

    play(tmp_path, test)


def test_a_step_that_asks_for_its_file_is_sent_it_in_parts_that_are_not_sent_again(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"aaaabbbbcc")
    look = f"test -e ../x-2.part/part || exit {WANTS_FILE}; cat ../x-?.part/part; echo; test -e {tmp_path}/ok"
    told: list[tuple[str, str]] = []

    async def test(world: World) -> None:
        channel = await world.channel()
        steps = (
            SetupStep("plain", sh("true")),
            SetupStep("iso", sh(look), 60.0, LargeFile("x", str(path), 10, 4)),
        )
        bundle = Bundle("d", {}, steps)
        with pytest.raises(SetupFailed, match="exit code 1: aaaabbbbcc"):
            await channel.prepare(bundle, tell=lambda step, said: told.append((step, said)))
        assert [said for step, said in told if "sent" in said] == ["sent 0 of 0 MB"] * 3
        parts = world.directory / "bundles"
        (parts / "x-0.part/part").write_text("AAAA")
        shutil.rmtree(parts / "x-2.part")
        with pytest.raises(SetupFailed, match="exit code 1: AAAAbbbbcc"):
            await channel.prepare(bundle)
        (tmp_path / "ok").touch()
        path.unlink()
        await channel.prepare(bundle)
        assert await channel.probe(sh("test ! -e part")), "a part is not the bundle that was prepared last"
        shutil.rmtree(parts / "x-2.part")
        with pytest.raises(SetupFailed, match="large: No such file"):
            await channel.prepare(msgspec.structs.replace(bundle, digest="e"))

    play(tmp_path, test)


def test_a_step_that_asks_for_files_of_its_place_is_told_their_address_and_no_other_is(
    tmp_path: Path,
) -> None:
    there = tmp_path / "there"
    fetch = f'test -e {there} && exit 0; test "$KEY" = hush-hush || exit {WANTS_FILE}; touch {there}'

    def bundle(digest: str, variable: str) -> Bundle:
        kept = KeptFiles("golden storage", "g1", {}, {}, variable)
        return Bundle(digest, {}, (SetupStep("golden", sh(fetch), kept=kept),))

    async def test(world: World) -> None:
        channel = await world.channel()
        with pytest.raises(SetupFailed, match=f"exit code {WANTS_FILE}"):
            await channel.prepare(bundle("d", "NOBODY_TOLD"))
        assert not there.exists()
        await channel.prepare(bundle("d", "KEY"))
        assert there.exists()
        await (await world.channel()).prepare(bundle("e", "NOBODY_TOLD"))

    play(tmp_path, test)


def test_a_step_that_is_interrupted_is_resumed(tmp_path: Path) -> None:
    go = tmp_path / "go"
    count = tmp_path / "count"
    steps = (SetupStep("wait", sh(f"echo x >> {count}; while [ ! -e {go} ]; do sleep 0.02; done")),)

    async def test(world: World) -> None:
        first = asyncio.create_task((await world.channel()).prepare(Bundle("d", {}, steps)))
        await until_seen(count.exists)
        first.cancel()
        os.kill(world.supervisor, signal.SIGKILL)
        second = asyncio.create_task((await world.channel(epoch=2)).prepare(Bundle("d", {}, steps)))
        go.touch()
        await second
        assert count.read_text() == "x\n"

    play(tmp_path, test)


# -- secrets and artefacts ---------------------------------------------------------------------


def test_secrets_come_back_masked_or_not_at_all(tmp_path: Path) -> None:
    script = (
        "echo the key is $KEY; cd $EVALFLEET_OUT; mkdir d; echo $KEY > d/leak; echo fine > ok;"
        'rm ../job.json; echo \'{"id": "a", "secret_names": []}\' > ../job.json;'
        'echo "{\\"error\\": \\"$KEY\\"}" > result.json; echo OTHER=$OTHER; exit 1'
    )

    async def test(world: World) -> None:
        ended = await run(await world.channel(), job("a", script, "KEY"))
        assert ended.detail == "the key is ***\nOTHER=\n"
        assert json.loads(ended.result or b"") == {"error": "***"}
        collected = await world.channels[0].collect(AttemptId("a"), tmp_path / "a")
        assert (collected.files, collected.left_out) == (1, 2)
        assert "secret" in collected.problem
        for path in tmp_path.glob("a/**/*"):
            assert not path.is_file() or b"hush-hush" not in path.read_bytes()
        listed = json.loads((tmp_path / "a" / "left_out.json").read_text())
        assert [item["name"] for item in listed] == ["result.json", "d/leak"]
        with pytest.raises(RequestError, match="NOT_SET"):
            await world.channels[0].start(job("b", "true", "NOT_SET"))

    play(tmp_path, test)


def test_a_secret_is_found_wherever_it_lies(tmp_path: Path) -> None:
    secrets = Secrets({"A": "tops3cret", "B": 'quo"ted', "C": "abc"}, ["A", "B", "C"])
    edge = b"x" * ((1 << 20) - 4) + b"tops3cret" + b"y" * 100
    (tmp_path / "f").write_bytes(edge)
    with open(tmp_path / "f", "rb") as file:
        assert secrets.found_in(file)
    with open(tmp_path / "f", "rb") as file, open(tmp_path / "g", "wb") as copy:
        secrets.copy_masked(file, copy)
    assert (tmp_path / "g").read_bytes() == edge.replace(b"tops3cret", b"***")
    assert secrets.mask(b'{"e": "quo\\"ted abc"}') == b'{"e": "*** abc"}'
    assert not Secrets({"A": "x"}, ["A"])


def make_artefacts(folder: Path) -> None:
    out = folder / "out"
    (out / "sub").mkdir(parents=True)
    (out / "result.json").write_text("{}")
    (out / "sub" / "real").write_text("real")
    (out / "sub" / "inside").symlink_to("real")
    (out / "sub" / "up").symlink_to("../result.json")
    (out / "outside").symlink_to("/etc/passwd")
    (out / "sneaky").symlink_to("sub/../../../../x")
    (out / "back").symlink_to(out / "result.json")
    os.mkfifo(out / "fifo")
    (out / "evalfleet.log").write_text("not ours")
    (out / os.fsdecode(b"odd\xff\n name")).write_text("odd")
    (folder / "log").write_text("log")


EXPECTED_LEFT_OUT = {"outside", "sneaky", "back", "fifo", "evalfleet.log"}


@pytest.mark.parametrize("elsewhere", [False, True])
def test_what_must_not_come_home_is_listed(tmp_path: Path, elsewhere: bool) -> None:
    make_artefacts(tmp_path / "job")
    shm = Path("/dev/shm")
    if elsewhere and (not shm.is_dir() or shm.stat().st_dev == tmp_path.stat().st_dev):
        pytest.skip("no second file system")
    base = Path(tempfile.mkdtemp(dir=shm if elsewhere else tmp_path))
    try:
        into = base / "a" / "b"
        collected = bring_home(tmp_path / "job", into, Secrets({}, ()), Caps())
        assert (collected.files, collected.left_out) == (5, 5)
        listed = json.loads((into / "left_out.json").read_text())
        assert {item["name"] for item in listed} == EXPECTED_LEFT_OUT
        assert (into / "evalfleet.log").read_text() == "log"
        assert (into / os.fsdecode(b"odd\xff\n name")).read_text() == "odd"
        assert (into / "sub" / "up").read_text() == "{}"
        assert (tmp_path / "job" / "result.json").read_text() == "{}"
        assert bring_home(tmp_path / "job", into, Secrets({}, ()), Caps()) == collected
        assert [path.name for path in into.parent.iterdir()] == ["b"]
    finally:
        shutil.rmtree(base)


def test_a_collection_that_was_interrupted_is_repeated(tmp_path: Path) -> None:
    make_artefacts(tmp_path / "job")
    (tmp_path / "blocked").write_text("a file where a directory must be")
    with pytest.raises(OSError, match="blocked"):
        bring_home(tmp_path / "job", tmp_path / "blocked" / "x", Secrets({}, ()), Caps())
    into = tmp_path / "into"
    first = bring_home(tmp_path / "job", into, Secrets({}, ()), Caps())
    (tmp_path / f"into{NOTE}").write_bytes((into / "left_out.json").read_bytes())
    os.rename(into, tmp_path / "job" / "out")  # as it was just before it was moved
    assert bring_home(tmp_path / "job", into, Secrets({}, ()), Caps()) == first
    assert (into / "evalfleet.log").read_text() == "log"


def test_an_interrupted_collection_with_nothing_left_out_is_repeated(tmp_path: Path) -> None:
    (tmp_path / "job" / "out").mkdir(parents=True)
    (tmp_path / "job" / "out" / "result.json").write_text("{}")
    (tmp_path / "job" / "log").write_text("log")
    into = tmp_path / "into"
    first = bring_home(tmp_path / "job", into, Secrets({}, ()), Caps())
    os.rename(into, tmp_path / "job" / "out")
    assert bring_home(tmp_path / "job", into, Secrets({}, ()), Caps()) == first == Collected(1, 2, 0)
    assert (into / "evalfleet.log").read_text() == "log"


def test_caps(tmp_path: Path) -> None:
    out = tmp_path / "job" / "out"
    out.mkdir(parents=True)
    for number in range(10):
        (out / f"a{number}").write_bytes(b"x" * 10)
    (out / "result.json").write_bytes(b"{}")
    collected = bring_home(tmp_path / "job", tmp_path / "few", Secrets({}, ()), Caps(files=4))
    assert (collected.files, collected.left_out) == (4, 7)
    assert (tmp_path / "few" / "result.json").exists()
    shutil.rmtree(tmp_path / "job")
    out.mkdir(parents=True)
    (out / "big").write_bytes(b"x" * 100)
    (out / "small").write_bytes(b"x" * 10)
    collected = bring_home(tmp_path / "job", tmp_path / "light", Secrets({}, ()), Caps(bytes=50))
    assert (collected.files, collected.bytes, collected.left_out) == (1, 10, 1)


@pytest.mark.parametrize("turns", range(10))
def test_a_create_that_is_cancelled_as_its_starter_ends_is_cancelled(tmp_path: Path, turns: int) -> None:
    """It became an error that is tried again: the machine was made anew after it had been deleted."""

    async def test() -> None:
        place = LocalPlace("local", LocalSettings(), tmp_path)
        directory = tmp_path / ONE
        directory.mkdir()
        os.mkfifo(directory / "supervisor.log")  # who becomes the supervisor waits for its reader
        (offer,) = await place.offers(Needs())
        creating = asyncio.create_task(place.create(ONE, offer, 600.0))
        mark = marker("EVALFLEET_MACHINE", str(directory))
        both = await until_seen(lambda: found if len(found := marked(mark)) == 2 else None)
        starter, heir = sorted(both, key=lambda pid: parent_of(pid) != os.getpid())
        os.kill(starter, signal.SIGKILL)  # first: it would end by itself once its heir is gone
        os.kill(heir, signal.SIGKILL)
        until(lambda: not Path(f"/proc/{starter}").exists() and not marked(mark), "the end of both")
        for _ in range(turns):  # the loop hears of it step by step
            await asyncio.sleep(0)
        under_way = creating.cancel()
        with pytest.raises(asyncio.CancelledError if under_way else PlaceError):
            await creating
        await place.delete(ONE)
        assert await place.list("pool-abc") == ()

    asyncio.run(test())
