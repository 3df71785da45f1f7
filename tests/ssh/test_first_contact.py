"""The first contact with hosts: unknown keys, dead ones, too small ones, and what people are told."""

from __future__ import annotations

import getpass
import json
import re
import socket
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from evalfleet.channels.ssh.host_home import HostFacts
from evalfleet.errors import PlaceError
from evalfleet.model import Needs
from evalfleet.places.ssh.examination import missing
from tests.desk import Desk

from .fleet import HOME_ID, Fleet, bring_up, fleet, keygen

BENCH = """\
name = "b"
tasks = [{id = "t_1"}, {id = "t_2"}, {id = "t_3"}]
command = ["true"]
score_from = "exit_code"
timeout_s = 60
"""


@pytest.fixture
def strangers(tmp_path: Path) -> Iterator[Fleet]:
    """Three hosts whose keys nobody has confirmed."""
    with fleet(tmp_path / "fleet", 3) as made:
        made.known_hosts.write_text("")
        yield made


def evalfleet(folder: Path, made: Fleet, *words: str, **settings: object) -> tuple[int, str]:
    """The exit code and all that is printed by a command that has a place `lab` and a benchmark `b.toml`."""
    folder.mkdir(exist_ok=True)
    (folder / "b.toml").write_text(BENCH)
    given = {**made.settings(), **settings}
    keys = "".join(f"{key} = {json.dumps(value)}\n" for key, value in given.items())
    (folder / "evalfleet.toml").write_text(f'[places.lab]\nkind = "ssh"\n{keys}')
    done = Desk(folder, folder / "results").start(*words).wait()
    return done.code, done.said


def test_a_run_ends_at_once_when_every_host_that_answers_needs_somebody(
    strangers: Fleet, tmp_path: Path
) -> None:
    strangers.hosts[2].stop()
    code, said = evalfleet(tmp_path / "f", strangers, "run", "b.toml", "--on", "lab", "--name", "r")
    assert code == 4, said
    stranger, other, dead = (host.name for host in strangers.hosts)
    why = f"2 hosts ({stranger}, {other}): the host key is unknown; `evalfleet doctor lab --trust` shows"
    assert f"stopping: lab/: {why}" in said
    assert f"{dead} does not answer" in said
    assert len(said.splitlines()) < 20, said
    assert "up to 3 machines" in said, "without --workers, all hosts are asked for"


async def test_a_dead_host_on_which_something_is_left_keeps_nobody_waiting(strangers: Fleet) -> None:
    dead = strangers.hosts[0]
    strangers.known_hosts.write_text(dead.known)
    earlier = strangers.place("mine", hosts=[dead.name])
    made = await bring_up(earlier)
    dead.stop()
    with pytest.raises(PlaceError, match="does not answer") as silent:
        await earlier.delete(made.id)
    assert silent.value.transient, "what is left there is removed when it answers"
    await earlier.close()
    later = strangers.place("mine")
    with pytest.raises(PlaceError, match=r"2 hosts .* the host key is unknown") as caught:
        await bring_up(later, 2)
    assert not caught.value.transient, "the other hosts need somebody, and the dead one is no reason to wait"
    await later.close()


def test_hosts_that_need_somebody_are_told_once_and_the_others_work(strangers: Fleet, tmp_path: Path) -> None:
    good = strangers.hosts[1]
    strangers.known_hosts.write_text(good.known)
    code, said = evalfleet(tmp_path / "f", strangers, "run", "b.toml", "--on", "lab", "--name", "r")
    assert code == 0, said
    notes = [line for line in said.splitlines() if line.startswith("evalfleet: note:")]
    assert len(notes) == 1, said
    assert "2 hosts" in notes[0]
    assert f"t_1 on {good.name}: pass" in said, "machines are called by their host's name"


def test_the_key_of_a_single_host_can_be_pasted(strangers: Fleet, tmp_path: Path) -> None:
    host = strangers.hosts[0]
    code, said = evalfleet(
        tmp_path / "f", strangers, "run", "b.toml", "--on", "lab", "--name", "r", hosts=[host.name]
    )
    assert code == 4
    line = " ".join(host.known.split()[:3])  # without the comment
    assert said.count(line) >= 2, "the key was cut"
    assert "evalfleet doctor lab --trust" in said


def checks_of(said: str) -> dict[str, Any]:
    """Host -> what `doctor --json` found there."""
    return {check["name"]: check for check in json.loads(said.splitlines()[0])["lab"]}


def test_doctor_reaches_every_host_and_says_what_to_do(strangers: Fleet, tmp_path: Path) -> None:
    known, stranger, dead = strangers.hosts
    strangers.known_hosts.write_text(known.known)
    dead.stop()
    code, said = evalfleet(tmp_path / "f", strangers, "doctor", "--json")
    found = checks_of(said)
    assert code == 4
    assert found[known.name]["verdict"] == "good"
    facts = found[known.name]["facts"]
    assert (facts["key"], facts["login"], facts["held by"]) == ("known", getpass.getuser(), "nobody")
    assert int(facts["cpus"]) >= 1
    assert facts["python"].startswith("3.")
    assert found[stranger.name]["facts"]["key"] == "unknown"
    assert "evalfleet doctor lab --trust" in found[stranger.name]["remedy"]
    assert found[dead.name]["found"].startswith("does not answer")
    assert not [path for host in strangers.hosts for path in host.home.iterdir()], "it left something there"


def test_doctor_trusts_after_a_yes_and_not_before(strangers: Fleet, tmp_path: Path) -> None:
    code, said = evalfleet(tmp_path / "f", strangers, "doctor", "lab", "--trust")
    assert code == 4
    assert "no key was written down" in said
    assert strangers.known_hosts.read_text() == ""
    for host in strangers.hosts:
        file = str(host.folder / "host_key.pub")
        print_of = subprocess.run(["ssh-keygen", "-lf", file], capture_output=True, text=True, check=True)
        assert print_of.stdout.split()[1] in said, "a fingerprint was not shown"
    code, said = evalfleet(tmp_path / "f", strangers, "doctor", "lab", "--trust", "--yes")
    assert code == 0, said
    assert "3 host keys written down" in said
    keys = sorted(line.split()[:3] for line in strangers.known_hosts.read_text().splitlines())
    assert keys == sorted(host.known.split()[:3] for host in strangers.hosts)
    code, said = evalfleet(tmp_path / "f", strangers, "run", "b.toml", "--on", "lab")
    assert code == 0, said


def test_trust_goes_through_a_jump_host_and_makes_the_file(strangers: Fleet, tmp_path: Path) -> None:
    inner, jump, _ = strangers.hosts
    new = tmp_path / "not/there/yet"
    settings = {"hosts": [inner.name], "jump": jump.name, "known_hosts": str(new)}
    code, said = evalfleet(tmp_path / "f", strangers, "doctor", "lab", "--trust", "--yes", **settings)
    assert code == 0, said
    assert [line.split()[0] for line in new.read_text().splitlines()] == [
        f"[{host.address}]:{host.port}" for host in (jump, inner)
    ]


def test_a_changed_key_cannot_be_trusted_away(strangers: Fleet, tmp_path: Path) -> None:
    strangers.learn()
    changed = strangers.hosts[0]
    changed.stop()
    keygen(changed.folder / "host_key")
    changed.start()
    before = strangers.known_hosts.read_text()
    code, said = evalfleet(tmp_path / "f", strangers, "doctor", "lab", "--trust", "--yes", "--json")
    assert code == 4
    check = checks_of(said)[changed.name]
    assert (check["facts"]["key"], check["found"]) == ("CHANGED", "THE HOST KEY HAS CHANGED")
    assert strangers.known_hosts.read_text() == before


async def test_a_held_host_says_whose_it_is_and_since_when(strangers: Fleet, tmp_path: Path) -> None:
    strangers.learn()
    theirs = strangers.place("theirs", "fff999", hosts=[strangers.hosts[0].name])
    await bring_up(theirs)
    mine = strangers.place("mine", hosts=[strangers.hosts[0].name])
    whose = f"{getpass.getuser()}@{socket.gethostname()}:{strangers.folder / 'home-theirs'}"
    with pytest.raises(PlaceError, match="no host of lab is free now") as caught:
        await bring_up(mine)
    since = rf"{datetime.now(UTC):%Y-%m-%d} \d\d:\d\d UTC"
    assert re.search(rf"is held by pool-{HOME_ID}-1 of {re.escape(whose)} since {since}", str(caught.value))
    check, *_ = await mine.examine(Needs())
    assert check.verdict == "warn"
    assert check.facts["held by"].startswith(f"pool of {whose}, since ")
    await theirs.delete((await theirs.list("pool"))[0].id)
    check, *_ = await mine.examine(Needs())
    assert (check.verdict, check.facts["held by"]) == ("good", "nobody")
    await theirs.close()
    await mine.close()


def test_a_host_that_has_too_little_gets_no_machine(strangers: Fleet, tmp_path: Path) -> None:
    strangers.learn()
    folder = tmp_path / "f"
    folder.mkdir()
    (folder / "big.toml").write_text(BENCH + "needs = {cpus = 4096, gpus = 0}\n")
    code, said = evalfleet(folder, strangers, "run", "big.toml", "--on", "lab", "--name", "r")
    assert code == 4, said
    assert "3 hosts" in said
    assert "of 4096 CPUs; take it out of `hosts`, or lower the benchmark's `needs`" in said
    assert len(said.splitlines()) < 20, said
    (folder / "small.toml").write_text(BENCH + "needs = {cpus = 1, memory_gb = 0.01, disk_gb = 0.01}\n")
    code, said = evalfleet(folder, strangers, "run", "small.toml", "--on", "lab", "--name", "s")
    assert code == 0, said


def test_tasks_that_need_more_go_to_hosts_that_have_it_and_the_others_anywhere(
    strangers: Fleet, tmp_path: Path
) -> None:
    strangers.learn()
    strangers.hosts[1].give_tool("nvidia-smi", "echo NVIDIA A100")
    folder = tmp_path / "f"
    folder.mkdir()
    tasks = [f"{{id = 'plain_{n}'}}" for n in range(6)] + [
        f"{{id = 'gpu_{n}', needs = {{gpus = 1}}}}" for n in range(2)
    ]
    listed = BENCH.replace(BENCH.splitlines()[1], f"tasks = [{', '.join(tasks)}]")
    (folder / "gpu.toml").write_text(listed.replace('["true"]', '["sleep", "0.2"]'))
    code, said = evalfleet(folder, strangers, "run", "gpu.toml", "--on", "lab", "--name", "r")
    assert code == 0, said
    where = dict(re.findall(r"(\w+) on (\S+): pass", said))
    assert len(where) == 8, said
    assert {where[f"gpu_{n}"] for n in range(2)} == {strangers.hosts[1].name}
    assert len(set(where.values())) > 1, "the other hosts do for the other tasks"
    (folder / "more.toml").write_text(listed.replace("gpus = 1", "gpus = 2"))
    code, said = evalfleet(folder, strangers, "run", "more.toml", "--on", "lab", "--name", "s")
    assert code == 4, said
    assert "no host of lab does for some tasks; 3 hosts" in said
    assert "less than 2 GPUs" in said
    assert len(re.findall(r"plain_\d on \S+: pass", said)) == 6, "what can be run is run"


def test_what_a_host_lacks_is_named() -> None:
    told = HostFacts("me", "3.11.2", 8.0, 15.5, 100.0, ("A100",))
    assert missing(told, Needs(8, 16.0, 100.0, gpus=1)) == "", "16 GB are sold, and 15.5 shown"
    short = missing(told, Needs(16, 64.0, 500.0, nested_virtualization=True, gpus=2))
    assert short == (
        "it has only 8 of 16 CPUs, 15.5 of 64 GB of memory, 100 of 500 GB of free disk, 1 of 2 GPUs, "
        "no /dev/kvm that we may use"
    )
