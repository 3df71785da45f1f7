"""Homes in trouble: one clear line, the right exit code, nothing overwritten."""

from __future__ import annotations

import os
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.desk import Done
from tests.e2e.harness import Fleet, tasks

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")


def test_the_home_is_a_file(fleet: Fleet) -> None:
    fleet.bench(tasks(1))
    fleet.home.write_text("mine")
    for words in (
        ("run", "./b.toml"),
        ("run", "./b.toml", "--dry-run"),
        ("show",),
        ("resume",),
        ("cancel", "r"),
    ):
        fleet(*words).refused(str(fleet.home))
    assert fleet("ls").code in (0, 2)
    assert fleet.home.read_text() == "mine"


def test_a_damaged_journal(fleet: Fleet) -> None:
    fleet.bench(tasks(1))
    fleet.run()
    path = fleet.home / "fleet.db"
    path.write_bytes(b"not a database" * 100)
    for words in (
        ("ls",),
        ("show", "r"),
        ("run", "./b.toml"),
        ("run", "./b.toml", "--dry-run"),
        ("resume", "r"),
    ):
        fleet(*words).refused("fleet.db", "nothing was changed")
    assert path.read_bytes() == b"not a database" * 100


def test_damage_in_the_middle(fleet: Fleet) -> None:
    fleet.bench(tasks(5))
    fleet.run()
    path = fleet.home / "fleet.db"
    with closing(sqlite3.connect(path)) as conn:
        conn.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    path.write_bytes(content)
    for words in (("ls",), ("show", "r"), ("run", "./b.toml"), ("resume", "r"), ("logs", "r")):
        done = fleet(*words)
        done.refused("fleet.db")
    assert path.read_bytes() == bytes(content)


def test_a_journal_of_another_program(fleet: Fleet) -> None:
    fleet.bench(tasks(1))
    fleet.home.mkdir()
    with closing(sqlite3.connect(fleet.home / "fleet.db")) as conn:
        conn.execute("CREATE TABLE recipe (name)")
        conn.commit()
    before = (fleet.home / "fleet.db").read_bytes()
    for words in (("ls",), ("run", "./b.toml"), ("show", "r"), ("cancel", "r")):
        fleet(*words).refused("another program")
    assert (fleet.home / "fleet.db").read_bytes() == before


@pytest.fixture
def small(fleet: Fleet) -> Iterator[Path]:
    """A home with room for 3 MB."""
    fleet.home.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(fleet.home)], check=True)
    yield fleet.home
    fleet.sweep()
    subprocess.run(["umount", "-l", str(fleet.home)], check=True)


def one_line(done: Done, codes: tuple[int, ...]) -> None:
    lines = done.err.strip().splitlines()
    assert done.code in codes, done
    assert len(lines) == 1, done
    assert lines[0].startswith("evalfleet: "), done


@root_only
def test_a_disk_that_is_full_before(fleet: Fleet, small: Path) -> None:
    (small / "ballast").write_bytes(b"x" * 3_145_728)
    fleet.bench(tasks(1))
    one_line(fleet.run(), (1,))
    (small / "ballast").unlink()
    assert fleet("run", "./b.toml", "--name", "s").code == 0


@root_only
def test_a_disk_that_fills_up(fleet: Fleet, small: Path) -> None:
    """The run stops or goes on, but says so in one line, and can be resumed when there is room again."""
    fleet.bench(tasks(6, "gate go; score 1"))
    run = fleet.start_run("--workers", "2")
    fleet.started("a_1.0", "a_2.0")
    with (small / "ballast").open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 10, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    fleet.open_gate("go")
    done = run.wait()
    assert done.code in (0, 1), done
    (small / "ballast").unlink()
    if done.code == 1:
        assert "disk is full" in done.err or "No space" in done.err, done
        assert fleet("resume", "r").code in (0, 1)
    assert fleet("show", "r").code == 0


@root_only
def test_a_read_only_home(fleet: Fleet) -> None:
    fleet.bench(tasks(1))
    fleet.run()
    subprocess.run(["mount", "--bind", str(fleet.home), str(fleet.home)], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(fleet.home)], check=True)
        one_line(fleet("run", "./b.toml"), (1, 2))
        assert fleet("ls").code == 0
        assert fleet("show", "r").code == 0
        assert fleet("report", "r").code == 0
        assert fleet("run", "./b.toml", "--dry-run").code == 0
    finally:
        subprocess.run(["umount", "-l", str(fleet.home)], check=True)


@root_only
def test_a_home_that_cannot_be_made(fleet: Fleet) -> None:
    fleet.bench(tasks(1))
    one_line(fleet.run(env={"EVALFLEET_HOME": "/proc/evalfleet"}), (1, 2))
    one_line(fleet.run(env={"EVALFLEET_HOME": "x" * 300}), (1, 2))


def test_a_home_of_nobody(fleet: Fleet) -> None:
    fleet.bench(tasks(1))
    for words in (("ls",), ("run", "./b.toml"), ("show",)):
        fleet(*words, env={"EVALFLEET_HOME": "~nobody-here/x"}).refused("~nobody-here")
    fleet("run", "./b.toml", "--env-file", "~nobody-here/x").refused("~nobody-here")
    fleet("run", "~nobody-here/b.toml").refused("~nobody-here")


@pytest.mark.parametrize(
    "text", ["[1]", "{}", '{"benchmark": "b"}', '{"benchmark": "b", "tasks": [{"score": 1}]}']
)
def test_strange_results_of_others(fleet: Fleet, text: str) -> None:
    fleet.bench(tasks(1))
    (fleet.home / "other").mkdir(parents=True)
    (fleet.home / "other" / "results.json").write_text(text)
    assert fleet("run", "./b.toml", "--dry-run").code == 0
