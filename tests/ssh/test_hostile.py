"""Hosts that are not on our side: their supervisor's place is taken, their logins and streams never end."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from evalfleet.channels.ssh.target import HostRefused
from evalfleet.errors import ChannelError
from evalfleet.events import MachineCondemned
from evalfleet.journal import Store
from evalfleet.model import AttemptId
from tests import parcels
from tests.desk import Done
from tests.waiting import PATIENCE_S

from .fleet import Fleet, Sshd
from .test_channel import machine, shell
from .test_run import results, start

JOB = AttemptId("t.0")
BENCH = """\
name = "b"
tasks = "tasks.jsonl"
command = ["sh", "run.sh", "{task_id}"]
files = ["run.sh", "takeover.py"]
timeout_s = 60
"""
SCRIPT = """\
if [ "$1" = evil ]; then
    setsid python3 takeover.py "${EVALFLEET_OUT%/jobs/*}" VICTIM MODE &
    [ MODE = speak ] && wait || sleep 50
fi
echo '{"score": 1}' >"$EVALFLEET_OUT/result.json"
"""


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A file of the controller's user, which is afterwards as it was."""
    home = tmp_path / "user"
    home.mkdir()
    (home / "authorized_keys").write_text("precious\n")
    before = parcels.seen(home)
    yield home / "authorized_keys"
    assert parcels.seen(home) == before


def run(folder: Path, hosts: Fleet, victim: Path, mode: str) -> Done:
    folder.mkdir()
    (folder / "b.toml").write_text(BENCH)
    (folder / "run.sh").write_text(SCRIPT.replace("VICTIM", str(victim)).replace("MODE", mode))
    (folder / "takeover.py").write_text(Path(__file__).with_name("takeover.py").read_text())
    ids = ["evil", *(f"good_{n}" for n in range(4))]
    (folder / "tasks.jsonl").write_text("".join(json.dumps({"id": id}) + "\n" for id in ids))
    keys = "".join(f"{key} = {json.dumps(value)}\n" for key, value in hosts.settings().items())
    (folder / "evalfleet.toml").write_text(f'[places.lab3]\nkind = "ssh"\n{keys}')
    words = ("run", "b.toml", "--on", "lab3", "--workers", "3", "--name", "r", "--attempts", "1")
    process = start(folder, *words)
    try:
        return process.wait()
    finally:
        process.kill()  # nothing, if it has ended


def test_a_supervisor_that_an_agent_replaced_cannot_reach_our_files(
    hosts: Fleet, tmp_path: Path, victim: Path
) -> None:
    folder = tmp_path / "f"
    done = run(folder, hosts, victim, "parcel")
    said = done.said
    assert done.code == 0, said
    told = results(folder)
    assert (told["scored"], told["broken"], told["status"]) == (5, 0, "done")
    assert "artefacts of evil.0 are not complete: 'log' has no place at its top" in said
    assert list((folder / "results/r/evil").iterdir()) == []


def test_an_agent_that_speaks_as_a_controller_is_not_heard(
    hosts: Fleet, tmp_path: Path, victim: Path
) -> None:
    folder = tmp_path / "f"
    done = run(folder, hosts, victim, "speak")
    said = done.said
    assert done.code == 0, said
    told = results(folder)
    assert (told["scored"], told["broken"], told["status"]) == (5, 0, "done")
    heard = json.loads((folder / "results/r/evil/evil.0/heard.json").read_text())
    assert [answer["error"] for answer in heard] == ["key"] * 4


NONSENSE = {
    "nonsense": ("no supervisor of ours", "nonsense"),
    "endless": ("no supervisor of ours", "a line of more than"),
    "stale": ("the machine obeys another controller", "epoch 999"),
}


@pytest.mark.parametrize("mode", NONSENSE)
def test_a_supervisor_that_talks_nonsense_costs_its_own_machine_alone(
    hosts: Fleet, tmp_path: Path, victim: Path, mode: str
) -> None:
    folder = tmp_path / "f"
    done = run(folder, hosts, victim, mode)
    said = done.said
    assert done.code == 1, said
    told = results(folder)
    assert (told["scored"], told["broken"]) == (4, 1)
    store = Store.open(folder / "results", create=False, read_only=True)
    events = [record.event for record in store.read("r")]
    details = [event.detail for event in events if isinstance(event, MachineCondemned) and event.cause]
    assert len(details) == 1, details
    assert all(words in details[0] for words in NONSENSE[mode])


# -- what does not end ------------------------------------------------------------------------------


def in_little_memory(test: Callable[[], Coroutine[Any, Any, None]]) -> Coroutine[Any, Any, None]:
    async def measured() -> None:
        tracemalloc.start()
        try:
            await test()
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert most < 40_000_000, f"{most} bytes of memory"

    return measured()


@pytest.mark.parametrize("where", ["", " >&2"])
async def test_a_login_that_prints_without_end_is_refused(hosts: Fleet, where: str) -> None:
    async def test() -> None:
        profile = hosts.hosts[0].home / ".bashrc"
        profile.write_text(f"yes spam{where}\n")
        host_home = hosts.host_home(hosts.hosts[0].name)
        try:
            for call in (host_home.machines(), host_home.ask("halt", "pool-abc123-1")):
                with pytest.raises(HostRefused, match=r"printed more than 1 MB .*bashrc"):
                    await call
        finally:
            profile.unlink()
            await host_home.host.close()

    await in_little_memory(test)


async def test_a_login_that_begins_to_print_without_end_is_refused(hosts: Fleet) -> None:
    async with machine(hosts) as (_, made, channel):
        host = host_of(hosts, made.address)

        async def test() -> None:
            profile = host.home / ".bashrc"
            profile.write_text("yes spam\n")
            try:
                with pytest.raises(HostRefused, match="printed more than 1 MB"):
                    await channel.probe(None)
            finally:
                profile.unlink()

        await in_little_memory(test)


async def test_a_login_that_prints_some_lines_is_borne(hosts: Fleet) -> None:
    for host in hosts.hosts:
        (host.home / ".bashrc").write_text("seq 1000; seq 10 >&2\n")
    try:
        async with machine(hosts) as (_, _, channel):
            await channel.start(shell(JOB, "exit 3"))
            assert (await channel.ended(JOB)).exit_code == 3
    finally:
        for host in hosts.hosts:
            (host.home / ".bashrc").unlink()


FORGE = """\
import glob, os, signal, sys, zipfile
for path in glob.glob(os.path.expanduser("~/.evalfleet/*/supervisor-*.pyz")):
    with zipfile.ZipFile(path) as whole:
        files = {name: whole.read(name) for name in whole.namelist()}
    files["supervisor/verbs.py"] += f"open({sys.argv[1]!r}, 'w').close()".encode()
    with zipfile.ZipFile(path, "w") as forged:
        for name, content in files.items():
            forged.writestr(name, content)
pid = open(os.environ["EVALFLEET_MACHINE"] + "/supervisor.pid").read().split()[0]
os.kill(int(pid), signal.SIGKILL)
"""


async def test_a_supervisor_that_a_job_has_changed_is_never_started(hosts: Fleet, tmp_path: Path) -> None:
    forge, ran = tmp_path / "forge.py", tmp_path / "ran"
    forge.write_text(FORGE)
    async with machine(hosts) as (_, _, channel):
        await channel.start(shell(JOB, f"python3 {forge} {ran}; exit 3"))
        assert (await channel.ended(JOB)).exit_code == 3
        assert await channel.probe(None)
        assert not ran.exists()


def host_of(hosts: Fleet, address: str) -> Sshd:
    return next(host for host in hosts.hosts if host.name == address)


PACKS = """#!/bin/sh
case "$*" in
*.pyz\\ pack) cd {folder}; echo >>tries; {does} ;;
*) exec python3 "$@" ;;
esac
"""


@pytest.mark.parametrize(
    ("does", "problem"),
    [
        ("cat parcel", "has no place at its top"),
        ("yes >&2", "printed more than 1 MB"),
        ("yes", "not a record"),
        ("tr '\\\\0' x </dev/zero", "a record is too long"),
    ],
)
async def test_a_stream_of_another_making(
    hosts: Fleet, tmp_path: Path, victim: Path, does: str, problem: str
) -> None:
    there, into = tmp_path / "there", tmp_path / "here" / "t.0"
    there.mkdir()
    top = parcels.link("left_out.json", str(victim))
    (there / "parcel").write_bytes(parcels.parcel(top, left_out=[["a", "b", 1]]))
    (there / "python").write_text(PACKS.format(folder=there, does=does))
    (there / "python").chmod(0o755)
    async with machine(hosts, python=str(there / "python")) as (_, _, channel):
        await channel.start(shell(JOB, 'head -c 1000000 /dev/zero >"$EVALFLEET_OUT/big"'))
        await channel.ended(JOB)

        async def test() -> None:
            async with asyncio.timeout(PATIENCE_S):
                with pytest.raises((ChannelError, OSError), match=problem):
                    await channel.collect(JOB, into)

        await in_little_memory(test)
        assert list(into.parent.iterdir()) == []
        assert (there / "tries").read_text() == "\n", "it was asked again for what can never be right"
