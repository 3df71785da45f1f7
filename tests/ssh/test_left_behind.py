"""Clean-up that ends: what cannot be removed from a lent host is told, drains the host, and is listed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evalfleet.channels.ssh.channel import STALL_S, SshChannel
from evalfleet.channels.ssh.target import HostRefused
from evalfleet.errors import PlaceError
from evalfleet.model import AttemptId, MachineId, Needs
from evalfleet.places.ssh.examination import MOST_REFUSALS, NEVER, HostHealth
from evalfleet.places.ssh.fleet import MOST_REMOVALS
from evalfleet.places.ssh.records import Records
from evalfleet.ports import Fence
from tests.desk import Desk
from tests.waiting import PATIENCE_S, slowness, until, until_async

from .fleet import Fleet, bring_up, fleet
from .test_channel import machine, shell
from .test_first_contact import evalfleet
from .test_hostile import PACKS, host_of

JOB = AttemptId("t.0")
MAKE_AGAIN = """\
import os, sys
while True:
    try:
        os.makedirs(sys.argv[1] + "/again", exist_ok=True)
    except OSError:
        pass
"""
"""Much sooner than anybody can remove it."""


def make_immutable(path: Path) -> None:
    done = subprocess.run(["chattr", "+i", str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no immutable files here: {done.stderr.strip()}")


@pytest.mark.parametrize("where", ["jobs", "."])
async def test_an_immutable_file_drains_its_host_and_is_listed_with_the_command_to_finish(
    tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    with fleet(tmp_path, 1) as hosts:
        place = hosts.place()
        made = await bring_up(place)
        ours = hosts.hosts[0].machine(made.id)
        (ours / where / "stuck").write_text("x")
        make_immutable(ours / where / "stuck")
        left: list[Path] = []
        try:
            async with asyncio.timeout(PATIENCE_S):
                await place.delete(made.id)
                await place.delete(made.id)
                assert await place.list("pool-abc123") == ()
            left = list(ours.parent.glob(".left-*"))
            assert len(left) == 1
            (remains,) = place.remains()
            assert remains.machine == made.id
            assert f"sudo rm -rf .evalfleet/{ours.parent.name}/{left[0].name}" in remains.kept_by
            assert "cannot be removed" in caplog.text
            (offer,) = await place.offers(Needs())
            with pytest.raises(PlaceError, match="gets no machine until it is gone"):
                await place.create(MachineId("pool-abc123-2"), offer, 600.0)
        finally:
            for path in left:
                subprocess.run(["chattr", "-R", "-i", str(path)], check=True)
                shutil.rmtree(path)
        again = hosts.place()  # what a new controller of this home knows
        assert len(again.remains()) == 1
        other = await bring_up(again, 3)
        assert again.remains() == []
        await again.delete(other.id)
        await again.close()
        await place.close()


async def test_a_folder_that_is_made_again_and_again_ends_its_removal(tmp_path: Path) -> None:
    with fleet(tmp_path, 1) as hosts:
        place = hosts.place()
        made = await bring_up(place)
        ours = hosts.hosts[0].machine(made.id)
        maker = subprocess.Popen(["sh", "-c", 'while :; do mkdir -p "$1/again"; done', "sh", str(ours)])
        try:
            async with asyncio.timeout(PATIENCE_S):
                # A removal that is quicker than the maker has succeeded: then it is asked for again.
                while await place.list("pool-abc123") or not place.remains():
                    with contextlib.suppress(PlaceError):  # as a run does, which asks again
                        await place.delete(made.id)
            (remains,) = place.remains()
            assert "is made again" in remains.kept_by
        finally:
            maker.kill()
            maker.wait()
            for path in (ours, *ours.parent.glob(".left-*")):
                shutil.rmtree(path, ignore_errors=True)
            await place.close()


@pytest.mark.parametrize("late", [False, True])
async def test_a_folder_that_is_made_again_while_nobody_looks_is_no_machine(hosts: Fleet, late: bool) -> None:
    """It is told once, also if its host was looked at between its last removal and its return."""
    place = hosts.place()
    made = await bring_up(place)
    ours = host_of(hosts, made.address).machine(made.id)
    for _ in range(MOST_REMOVALS):
        ours.mkdir(parents=True, exist_ok=True)
        assert [each.id for each in await place.list("pool")] == [made.id]
        await place.delete(made.id)
    assert len(place.remains()) == 1
    assert await place.list("pool") == ()

    async def forgotten() -> bool:
        return not await place.list("pool") and not place.remains()

    if late:
        await until_async(forgotten, "it counts as finished by hand")
    ours.mkdir(parents=True)
    assert await place.list("pool") == ()
    assert len(place.remains()) == 1
    await place.close()
    shutil.rmtree(host_of(hosts, made.address).ours)
    place = hosts.place()  # its heir
    await until_async(forgotten, "it counts as finished by hand")
    await place.close()


async def test_a_machine_that_is_made_and_deleted_many_times_is_not_made_again_by_others(
    hosts: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    place = hosts.place()
    for _ in range(MOST_REMOVALS + 1):
        made = await bring_up(place)
        await place.delete(made.id)
    assert place.remains() == []
    assert "is made again" not in caplog.text
    await place.close()


def test_what_a_host_keeps_stays_known_when_its_lease_is_over_and_it_tells_of_it(tmp_path: Path) -> None:
    machine = MachineId("r-abc-1")
    records = Records(tmp_path, "lab", lambda: 0.0)
    records.keep(machine, "h", 60.0)
    held = records.get(machine)
    assert held is not None
    records.leave(held, ".evalfleet/abc/r-abc-1")
    later = Records(tmp_path, "lab", lambda: 1e6)
    assert later.get(machine) is None
    later.learn(machine, "h", 0.0)
    assert [held.left for held in later.left()] == [".evalfleet/abc/r-abc-1"]


def test_a_run_tells_within_a_minute_what_it_cannot_clean_up_ends_and_machines_lists_it(
    tmp_path: Path,
) -> None:
    """One host has an immutable file, and on another one a folder is made again and again."""
    with fleet(tmp_path / "fleet", 2) as hosts:
        folder = tmp_path / "f"
        folder.mkdir()
        wait = f"touch {tmp_path}/began.$EVALFLEET_TASK_ID; until [ -e {tmp_path}/go ]; do sleep 0.05; done"
        (folder / "b.toml").write_text(
            'name = "b"\ntasks = [{id = "t_1"}, {id = "t_2"}]\nscore_from = "exit_code"\ntimeout_s = 600\n'
            f"command = {json.dumps(['sh', '-c', wait])}\n"
        )
        keys = "".join(f"{key} = {json.dumps(value)}\n" for key, value in hosts.settings().items())
        (folder / "evalfleet.toml").write_text(f'[places.lab]\nkind = "ssh"\n{keys}')
        desk = Desk(folder, folder / "results")
        run = desk.start("run", "b.toml", "--on", "lab", "--workers", "2", "--name", "r")
        until(lambda: len(list(tmp_path.glob("began.*"))) == 2, lambda: f"two attempts: {run.said}")
        stuck, again = (next(host.ours.glob("*/r-*")) for host in hosts.hosts)
        (stuck / "stuck").write_text("x")
        make_immutable(stuck / "stuck")
        maker = subprocess.Popen([sys.executable, "-S", "-c", MAKE_AGAIN, str(again)])
        try:
            (tmp_path / "go").touch()
            freed = time.monotonic()
            until(lambda: run.said.count("; by hand: ssh ") == 2, lambda: f"both to be told: {run.said}")
            assert time.monotonic() - freed < 60 * slowness()
            assert run.wait().code == 0, run.said

            def listed() -> bool:
                """Is each named with its trouble? The one folder is gone for a moment, again and again."""
                told = desk.say("machines")
                named = all(f"{path.name}: " in told for path in (stuck, again))
                troubles = ("cannot be removed or is made again", "sudo rm -rf .evalfleet/")
                return named and all(told.count(words) == 2 for words in troubles)

            until(listed, lambda: f"what could not be cleaned: {desk.say('machines')}")
        finally:
            maker.kill()
            maker.wait()
            desk.sweep()
            for host in hosts.hosts:
                subprocess.run(["chattr", "-R", "-i", str(host.ours)], check=False, capture_output=True)
                shutil.rmtree(host.ours)
        assert "cannot be removed" not in desk.say("machines"), "somebody has finished it"


def test_a_run_that_is_over_does_not_wait_long_for_a_dead_host_and_machines_cleans_it_later(
    tmp_path: Path,
) -> None:
    with fleet(tmp_path / "fleet", 2) as hosts:
        folder = tmp_path / "f"
        folder.mkdir()
        command = f"test $EVALFLEET_TASK_ID = t_1 || until [ -e {tmp_path}/go ]; do sleep 0.05; done"
        (folder / "b.toml").write_text(
            'name = "b"\ntasks = [{id = "t_1"}, {id = "t_2"}]\nscore_from = "exit_code"\n'
            f"command = {json.dumps(['sh', '-c', command])}\n"
        )
        keys = "".join(f"{key} = {json.dumps(value)}\n" for key, value in hosts.settings().items())
        (folder / "evalfleet.toml").write_text(f'[places.lab]\nkind = "ssh"\n{keys}')
        desk = Desk(folder, folder / "results")
        run = desk.start("run", "b.toml", "--on", "lab", "--workers", "2", "--name", "r")
        until(lambda: "[1/2] t_1" in run.said, lambda: f"a score: {run.said}")
        until(lambda: sum(host.ours.exists() for host in hosts.hosts) == 2, "both hosts to be taken")
        host = next(host for host in hosts.hosts if f"t_1 on {host.name}:" in run.said)
        host.stop()
        (tmp_path / "go").touch()
        ended = time.monotonic()
        done = run.wait()
        assert (done.code, time.monotonic() - ended < 60 * slowness()) == (0, True), done
        assert "`evalfleet machines` removes what is left there" in done.err
        assert "costs" not in done.out.partition("the run is over")[0]
        host.start()
        until(lambda: "nothing of ours exists" in desk.say("machines"), "the host to be cleaned")
        assert not [*host.home.iterdir()]


async def test_what_a_task_left_in_the_home_of_a_lent_host_is_told(
    hosts: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with machine(hosts) as (_, made, channel):
        home = host_of(hosts, made.address).home
        (home / ".profile").write_text("before\n")
        script = "cd; echo evil >>.profile; touch 'new\x1b[2J'; mkdir .ssh; echo mine >.ssh/authorized_keys"
        await channel.start(shell(JOB, f"export HOME={home}; {script}"))
        await channel.ended(JOB)
    told = [record.getMessage() for record in caplog.records if "not as it was" in record.getMessage()]
    try:
        assert len(told) == 1, caplog.text
        assert ".profile" in told[0]
        assert ".ssh/authorized_keys" in told[0]
        assert "new\\x1b[2J" in told[0]
        assert "\x1b" not in told[0]
    finally:
        for name in (".profile", "new\x1b[2J"):
            (home / name).unlink(missing_ok=True)
        shutil.rmtree(home / ".ssh", ignore_errors=True)


async def test_a_crontab_that_a_task_has_changed_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with fleet(tmp_path, 1) as hosts:
        hosts.hosts[0].give_tool("crontab", f"cat {tmp_path}/crontab")
        (tmp_path / "crontab").write_text("@daily back-up\n")
        async with machine(hosts) as (*_, channel):
            await channel.start(shell(JOB, "true"))
            await channel.ended(JOB)
        assert "not as it was" not in caplog.text
        async with machine(hosts) as (*_, channel):
            await channel.start(shell(JOB, f"echo '@reboot evil' >>{tmp_path}/crontab"))
            await channel.ended(JOB)
    (told,) = [record.getMessage() for record in caplog.records if "not as it was" in record.getMessage()]
    assert "changed: crontab" in told


async def test_files_that_stop_coming_are_given_up(hosts: Fleet, tmp_path: Path) -> None:
    assert STALL_S < 60.0, "what hangs is told within a minute"
    (tmp_path / "python").write_text(PACKS.format(folder=tmp_path, does="exec sleep 600"))
    (tmp_path / "python").chmod(0o755)
    python = str(tmp_path / "python")
    async with machine(hosts, python=python) as (_, made, _):
        host_home = hosts.host_home(made.address, python=python)
        channel = SshChannel(host_home, made.id, Fence("run", 1, PATIENCE_S), {}, stall_s=1.0)
        await channel.start(shell(JOB, 'head -c 1000000 /dev/zero >"$EVALFLEET_OUT/big"'))
        await channel.ended(JOB)
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(TimeoutError, match="nothing came of the files for 1 s"):
                await channel.collect(JOB, tmp_path / "here" / "t.0")
        await channel.close()
        await host_home.host.close()
        assert (tmp_path / "tries").read_text() == "\n", "it was asked again"


@pytest.mark.nightly  # it waits as long as users do
def test_a_run_tells_within_a_minute_that_files_stopped_coming_and_ends_with_the_score(
    hosts: Fleet, tmp_path: Path
) -> None:
    (tmp_path / "python").write_text(PACKS.format(folder=tmp_path, does="exec sleep 600"))
    (tmp_path / "python").chmod(0o755)
    folder = tmp_path / "f"
    folder.mkdir()
    (folder / "b.toml").write_text(
        'name = "b"\ntasks = [{id = "t_1"}]\nscore_from = "exit_code"\n'
        'command = ["sh", "-c", "head -c 1000000 /dev/zero >$EVALFLEET_OUT/big"]\n'
    )
    given = {**hosts.settings(), "python": str(tmp_path / "python")}
    keys = "".join(f"{key} = {json.dumps(value)}\n" for key, value in given.items())
    (folder / "evalfleet.toml").write_text(f'[places.lab]\nkind = "ssh"\n{keys}')
    run = Desk(folder, folder / "results").start("run", "b.toml", "--on", "lab", "--name", "r")
    until(lambda: "t_1 on" in run.said, lambda: f"the score: {run.said}")
    scored = time.monotonic()
    until(lambda: "artefacts of t_1" in run.said, lambda: f"what hangs to be told: {run.said}")
    assert time.monotonic() - scored < 60.0 * slowness()
    done = run.wait()
    assert done.code == 0, done.said
    assert "are not complete: " in done.said
    assert "nothing came of the files for 45 s" in done.said
    assert "1/1" in done.said


# -- hosts that can never work ---------------------------------------------------------------------


async def test_a_login_without_a_shell_is_refused_with_its_reason(tmp_path: Path) -> None:
    with fleet(tmp_path, 1, "ForceCommand echo no login here; exit 1\n") as hosts:
        place = hosts.place()
        (offer,) = await place.offers(Needs())
        with pytest.raises(
            PlaceError, match=r"its login shell runs no commands \(exit code 1: no login here\)"
        ) as caught:
            await place.create(MachineId("pool-abc123-1"), offer, 600.0)
        assert not caught.value.transient
        await place.close()


READ_ONLY = """\
mount --bind "$1" "$1"
mount -o remount,bind,ro "$1"
shift
exec "$@"
"""


@pytest.mark.parametrize("fault", ["read-only home", "no shell"])
def test_a_run_does_without_a_host_that_can_never_work_and_ends_if_there_is_no_other(
    tmp_path: Path, fault: str
) -> None:
    with fleet(tmp_path / "fleet", 2) as hosts:
        bad, good = hosts.hosts
        bad.stop()
        if fault == "no shell":
            with open(bad.folder / "sshd_config", "a") as config:
                config.write("ForceCommand echo no login here; exit 1\n")
        else:
            bad.within = ("unshare", "--mount", "sh", "-ec", READ_ONLY, "sh", str(bad.home))
        bad.start()
        why = {
            "no shell": "its login shell runs no commands (exit code 1: no login here)",
            "read-only home": "nothing can be written to ~/.evalfleet/HOME there (Read-only file system)",
        }[fault]

        def run(folder: Path, *names: str) -> tuple[int, str]:
            code, said = evalfleet(folder, hosts, "run", "b.toml", "--on", "lab", "--name", "r", hosts=names)
            return code, re.sub(r"\.evalfleet/\w+", ".evalfleet/HOME", said)

        code, said = run(tmp_path / "both", bad.name, good.name)
        assert code == 0, said
        assert said.count(f"{bad.name}: {why}") == 1, said
        code, said = run(tmp_path / "alone", bad.name)
        assert code == 4, said
        assert f"stopping: lab/: {bad.name}: {why}" in said


def test_a_host_that_refuses_again_and_again_is_asked_no_more() -> None:
    health, now = HostHealth(0, 30.0), 0.0
    refusal = HostRefused("host", "it has no Python", "install one")
    for _ in range(MOST_REFUSALS):
        assert health.usable(now)
        health.silent(now, str(refusal), refusal)
        assert not health.usable(now)
        now = health.retry_at
    assert now == NEVER
    assert not health.usable(1e9)
    assert health.refusal is refusal
    health.answered()
    assert health.usable(0.0)
