"""The channel ssh: lost connections, two controllers, upgrades, secrets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from evalfleet.channels.ssh.channel import SshChannel
from evalfleet.errors import ChannelError, StaleController
from evalfleet.model import AttemptId, Bundle, Command, Job, Machine, SetupStep
from evalfleet.places.ssh import SshPlace
from evalfleet.ports import Channel, Fence
from evalfleet.version import install_command
from tests.planted import UNIQUE, holding
from tests.pythons import python_3_8
from tests.waiting import PATIENCE_S, slowness

from .fleet import Fleet, bring_up
from .releases import Release

PLANTED = f"planted-{UNIQUE}-value"
OLD_PYTHON = python_3_8()


def shell(id: str, script: str, *secrets: str, timeout_s: float = PATIENCE_S, bundle: str = "") -> Job:
    command = Command(("sh", "-c", script), secrets=secrets)
    return Job(AttemptId(id), command, timeout_s, bundle, lease_s=300.0)


@contextlib.asynccontextmanager
async def machine(hosts: Fleet, **more: object) -> AsyncGenerator[tuple[SshPlace, Machine, Channel]]:
    place = hosts.place(**more)  # type: ignore[arg-type]
    made = await bring_up(place)
    channel = place.channel(made, Fence("run", 1, 20.0))
    try:
        yield place, made, channel
    finally:
        await channel.close()
        await place.delete(made.id)
        await place.close()


def on(hosts: Fleet, made: Machine) -> Path:
    host = next(host for host in hosts.hosts if host.name == made.address)
    return host.machine(made.id)


async def test_no_end_is_missed_when_connections_are_cut(hosts: Fleet) -> None:
    async with machine(hosts) as (_, made, channel):
        host = next(host for host in hosts.hosts if host.name == made.address)
        ends: list[asyncio.Task[object]] = []
        for n in range(4):
            await channel.start(shell(f"t{n}.0", f'sleep 0.{2 * n}; echo {{}} >"$EVALFLEET_OUT/result.json"'))
            ends.append(asyncio.create_task(channel.ended(AttemptId(f"t{n}.0"))))
        for _ in range(3):
            await asyncio.sleep(0.15)
            host.cut()
        for end in await asyncio.gather(*ends):
            assert end.reason == "exited"  # type: ignore[attr-defined]
            assert end.result == b"{}\n"  # type: ignore[attr-defined]


async def test_a_log_is_followed_by_another_process_while_connections_are_cut(hosts: Fleet) -> None:
    script = 'for i in 1 2 3; do echo "$i $KEY"; until [ -e "$EVALFLEET_OUT/$i" ]; do sleep 0.02; done; done'
    async with machine(hosts, secrets={"KEY": "s3cret"}) as (_, made, channel):
        await channel.start(shell("t.0", script, "KEY"))
        host = next(host for host in hosts.hosts if host.name == made.address)
        other = hosts.place(secrets={"KEY": "s3cret"})
        looker = other.channel(made, Fence("run", 0, 60.0, looks_on=True))
        shown, position = b"", 0
        try:
            async for piece in looker.follow(AttemptId("t.0")):
                assert piece.offset == position
                position = piece.next
                shown += piece.data
                if piece.data:
                    host.cut()
                    (on(hosts, made) / "jobs/t.0/out" / str(shown.count(b"\n"))).touch()
        finally:
            await looker.close()
            await other.close()
        assert shown == b"1 ***\n2 ***\n3 ***\n"
        assert (await channel.ended(AttemptId("t.0"))).exit_code == 0


async def test_who_waits_in_our_own_queue_is_not_silent(hosts: Fleet) -> None:
    async with machine(hosts) as (_, made, _):
        turns = asyncio.Semaphore(1)
        host_home = hosts.host_home(made.address, turns)
        silent_s = 4.0 * slowness()
        channel = SshChannel(host_home, made.id, Fence("run", 1, silent_s), {})
        async with turns:  # as if others were being connected to
            probe = asyncio.create_task(channel.probe(None))
            done, _ = await asyncio.wait((probe,), timeout=silent_s + 0.5)
            assert not done, "it was called silent"
        assert await probe
        await channel.close()
        await host_home.host.close()


async def test_a_silent_host_is_an_error_and_comes_back(hosts: Fleet) -> None:
    async with machine(hosts) as (place, made, _):
        channel = place.channel(made, Fence("run", 1, 1.5 * slowness()))
        host = next(host for host in hosts.hosts if host.name == made.address)
        await channel.start(shell("t.0", "sleep 0.5; exit 3"))
        host.pause()
        try:
            with pytest.raises(ChannelError, match="nothing heard"):
                await channel.ended(AttemptId("t.0"))
        finally:
            host.pause(signal.SIGCONT)
        assert (await channel.ended(AttemptId("t.0"))).exit_code == 3
        await channel.close()


async def test_a_stale_controller_is_refused_by_the_host(hosts: Fleet) -> None:
    async with machine(hosts) as (_, made, old):
        await old.start(shell("t.0", "sleep 0.6; exit 4"))
        other = hosts.place("b")
        newer = other.channel(made, Fence("run", 2, 20.0))
        waiting = asyncio.create_task(newer.ended(AttemptId("t.0")))
        assert await newer.probe(None)
        for call in (old.start(shell("u.0", "true")), old.stop(AttemptId("t.0"))):
            with pytest.raises(StaleController):
                await call
        assert (await waiting).exit_code == 4
        await newer.close()
        await other.close()


async def test_a_dead_supervisor_is_started_again_and_adopts(hosts: Fleet) -> None:
    async with machine(hosts) as (_, made, channel):
        await channel.start(shell("t.0", "sleep 0.7; exit 5"))
        waiting = asyncio.create_task(channel.ended(AttemptId("t.0")))
        pid = int((on(hosts, made) / "supervisor.pid").read_text().split()[0])
        os.kill(pid, signal.SIGKILL)
        assert (await waiting).exit_code == 5
        assert int((on(hosts, made) / "supervisor.pid").read_text().split()[0]) != pid


# -- upgrades ------------------------------------------------------------------------------------


def supervisor(hosts: Fleet, made: Machine) -> int:
    return int((on(hosts, made) / "supervisor.pid").read_text().split()[0])


def until(file: Path, then: str) -> str:
    """A script that waits for a file of the test's."""
    return f"while [ ! -e {file} ]; do sleep 0.02; done; {then}"


async def test_another_version_takes_over_between_attempts(hosts: Fleet, tmp_path: Path) -> None:
    release, go = Release(tmp_path / "release"), tmp_path / "go"
    async with machine(hosts) as (_, made, old):
        await old.start(shell("t.0", until(go, 'echo {} >"$EVALFLEET_OUT/result.json"; exit 6')))
        first = supervisor(hosts, made)
        async with release.controller(hosts, made, epoch=2) as newer:
            assert await newer.call("probe")
            assert supervisor(hosts, made) == first, "it was replaced while a job ran"
            go.touch()
            assert await newer.call("ended", "t.0") == [6, "{}\n"]
            await newer.call("start", "u.0", "exit 7")
            assert await newer.call("ended", "u.0") == [7, ""]
            second = supervisor(hosts, made)
            assert second != first, "it was not replaced between jobs"
            assert await newer.call("ended", "t.0") == [6, "{}\n"]
        async with release.controller(hosts, made, epoch=3) as again:
            assert await again.call("ended", "t.0") == [6, "{}\n"]
            assert supervisor(hosts, made) == second, "one of its own version was replaced"


async def test_without_a_common_protocol_running_jobs_are_adopted(hosts: Fleet, tmp_path: Path) -> None:
    release, go = Release(tmp_path / "release", protocol=99), tmp_path / "go"
    async with machine(hosts) as (_, made, old):
        await old.start(shell("t.0", until(go, "exit 6")))
        first = supervisor(hosts, made)
        async with release.controller(hosts, made, epoch=2) as newer:
            assert await newer.call("probe")
            assert supervisor(hosts, made) != first
            go.touch()
            assert await newer.call("ended", "t.0") == [6, ""]


async def test_a_stale_controller_cannot_replace_the_supervisor(hosts: Fleet, tmp_path: Path) -> None:
    release = Release(tmp_path / "release")
    async with machine(hosts) as (place, made, _):
        newer = place.channel(made, Fence("run", 3, 20.0))
        assert await newer.probe(None)
        first = supervisor(hosts, made)
        async with release.controller(hosts, made, epoch=2) as late:
            assert (await late.refused("probe")).startswith("StaleController: ")
        assert supervisor(hosts, made) == first
        await newer.close()


# -- set-up and secrets --------------------------------------------------------------------------


async def test_the_same_bundle_is_sent_once(hosts: Fleet, tmp_path: Path) -> None:
    (tmp_path / "data" / "deep").mkdir(parents=True)
    (tmp_path / "data" / "deep" / "odd \n name").write_text("odd")
    (tmp_path / "data" / "link").symlink_to("deep")
    (tmp_path / "run.sh").write_text("#!/bin/sh\ncat data/link/odd*\n")
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "big").write_bytes(os.urandom(3 << 20))
    small = {"run.sh": str(tmp_path / "run.sh"), "data": str(tmp_path / "data")}
    steps = (SetupStep("look", Command(("./run.sh",))),)
    async with machine(hosts) as (_, made, channel):
        for digest, files in (("small", small), ("big", {**small, "x/y/big": str(tmp_path / "big")})):
            for _ in range(2):
                await channel.prepare(Bundle(digest, files, steps))
            bundles = on(hosts, made) / "bundles"
            assert sorted(path.name for path in bundles.iterdir()) == sorted({"small", digest})
            stamp = (bundles / digest).stat().st_ino
            await channel.prepare(Bundle(digest, files, steps))
            assert (bundles / digest).stat().st_ino == stamp
        assert (bundles / "big/x/y/big").read_bytes() == (tmp_path / "big").read_bytes()
        await channel.start(shell("t.0", "./run.sh", bundle="big"))
        ended = await channel.ended(AttemptId("t.0"))
        assert (ended.exit_code, ended.detail) == (0, "odd")


async def test_a_secret_is_nowhere_but_in_the_job(hosts: Fleet, tmp_path: Path) -> None:
    script = (
        'echo "$TOKEN"; echo "$TOKEN" >"$EVALFLEET_OUT/leak.txt"; echo fine >"$EVALFLEET_OUT/fine.txt"; '
        'sleep 0.6; echo {} >"$EVALFLEET_OUT/result.json"'
    )
    async with machine(hosts, secrets={"TOKEN": PLANTED}) as (_, made, channel):
        await channel.start(shell("t.0", script, "TOKEN"))
        seen = subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True, check=True)
        assert PLANTED not in seen.stdout
        home = on(hosts, made).parent
        own = {"leak.txt", "log"}  # what the job itself wrote
        assert [path for path in holding(home, PLANTED) if Path(path).name not in own] == []
        await channel.ended(AttemptId("t.0"))
        into = tmp_path / "t" / "t.0"
        collected = await channel.collect(AttemptId("t.0"), into)
        assert "secret" in collected.problem
        assert (into / "fine.txt").read_text() == "fine\n"
        assert not (into / "leak.txt").exists()
        assert holding(into, PLANTED) == []
        assert sorted(path.name for path in into.parent.iterdir()) == ["t.0"]


async def test_many_channels_share_few_connections(hosts: Fleet) -> None:
    async with machine(hosts) as (place, made, _):
        host = next(host for host in hosts.hosts if host.name == made.address)
        channels = [place.channel(made, Fence("run", 1, 20.0)) for _ in range(12)]
        assert all(await asyncio.gather(*(channel.probe(None) for channel in channels)))
        assert len(host.sessions()) <= 2 * 2  # a connection may be two processes
        for channel in channels:
            assert isinstance(channel, SshChannel)
            await channel.close()


@pytest.mark.skipif(OLD_PYTHON is None, reason="NOT RUN: there is no Python 3.8 here")
async def test_python_3_8_will_do(hosts: Fleet, tmp_path: Path) -> None:
    async with machine(hosts, python=str(OLD_PYTHON)) as (_, _, channel):
        await channel.prepare(Bundle("d", {"here": str(Path(__file__).parent)}))
        await channel.start(
            shell("t.0", 'cp -r here/. "$EVALFLEET_OUT"; mkdir "$EVALFLEET_OUT/d"', bundle="d")
        )
        assert (await channel.ended(AttemptId("t.0"))).exit_code == 0
        await channel.collect(AttemptId("t.0"), tmp_path / "t.0")
        assert (tmp_path / "t.0" / "fleet.py").exists()


def test_the_module_loads_without_asyncssh() -> None:
    code = (
        "import sys; sys.modules['asyncssh'] = None\n"
        "from evalfleet.planning.plugins import place_kind, places\n"
        "assert not [place.problem for place in places() if place.problem]\n"
        "kind = place_kind('ssh')\n"
        "try: kind.make('lab', kind.Settings(hosts=('a',)), None)\n"
        "except Exception as e: print(type(e).__name__, e)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"RequestError place 'lab' needs asyncssh: {install_command('ssh')}\n"
