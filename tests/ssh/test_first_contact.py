"""The first contact with hosts: unknown keys, dead ones, too small ones, and what people are told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S

from .fleet import Fleet, fleet

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


def evalfleet(folder: Path, made: Fleet, *words: str, said: str = "", **settings: object) -> tuple[int, str]:
    """The exit code and all that is printed by a command that has a place `lab` and a benchmark `b.toml`."""
    folder.mkdir(exist_ok=True)
    (folder / "b.toml").write_text(BENCH)
    given = {**made.settings(), **settings}
    keys = "".join(f"{key} = {json.dumps(value)}\n" for key, value in given.items())
    (folder / "evalfleet.toml").write_text(f'[places.lab]\nkind = "ssh"\n{keys}')
    done = subprocess.run(
        [sys.executable, "-m", "evalfleet", *words],
        cwd=folder,
        env={**os.environ, "EVALFLEET_HOME": str(folder / "results")},
        input=said,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=PATIENCE_S,
        check=False,
    )
    return done.returncode, done.stdout


def test_a_run_ends_at_once_when_every_host_that_answers_needs_somebody(
    strangers: Fleet, tmp_path: Path
) -> None:
    strangers.hosts[2].stop()
    code, said = evalfleet(tmp_path / "f", strangers, "run", "b.toml", "--on", "lab", "--name", "r")
    assert code == 4, said
    stranger, other, dead = (host.name for host in strangers.hosts)
    why = f"2 hosts ({stranger}, {other}): its host key is unknown; `evalfleet doctor lab --trust` shows"
    assert f"stopping: lab/: {why}" in said
    assert f"{dead} does not answer" in said
    assert len(said.splitlines()) < 20, said
    assert "up to 3 machines" in said, "without --workers, all hosts are asked for"


def test_hosts_that_need_somebody_are_told_once_and_the_others_work(strangers: Fleet, tmp_path: Path) -> None:
    good = strangers.hosts[1]
    strangers.known_hosts.write_text(good.known)
    code, said = evalfleet(tmp_path / "f", strangers, "run", "b.toml", "--on", "lab", "--name", "r")
    assert code == 0, said
    notes = [line for line in said.splitlines() if line.startswith("evalfleet: note:")]
    assert len(notes) == 1, said
    assert "2 hosts" in notes[0]
    assert f"t_1 on {good.name}: success" in said, "machines are called by their host's name"


def test_the_key_of_a_single_host_can_be_pasted(strangers: Fleet, tmp_path: Path) -> None:
    host = strangers.hosts[0]
    code, said = evalfleet(
        tmp_path / "f", strangers, "run", "b.toml", "--on", "lab", "--name", "r", hosts=[host.name]
    )
    assert code == 4
    line = " ".join(host.known.split()[:3])  # without the comment
    assert said.count(line) >= 2, "the key was cut"
    assert "evalfleet doctor lab --trust" in said
