"""Runs that are measured, deleted, and carried from one home to another."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from evalfleet.api import home as homes
from evalfleet.journal import Store
from evalfleet.planning.workspace import Workspace
from tests.e2e.harness import Fleet, task, tasks


@pytest.fixture
def ran(fleet: Fleet) -> Fleet:
    fleet.bench([*tasks(2), task("big", 'head -c 300000 /dev/zero > "$EVALFLEET_OUT/big"; score 0')])
    assert fleet.run().code == 0
    return fleet


def test_the_room_that_runs_take_is_told(ran: Fleet) -> None:
    (run, rest) = ran("du", "--json").json
    assert run["run"] == "r"
    assert run["files"] > 300_000
    assert run["journal"] > 1000
    assert rest["run"] == ""
    assert "0.3 MB" in ran("du").out


def test_a_run_is_deleted_with_all_that_is_of_it(ran: Fleet) -> None:
    ran("rm", "r").failed(1, "delete 1 run with all results", "--yes")
    assert (ran.home / "r").is_dir()
    assert ran("rm", "r", "--yes").out == "r is deleted\n"
    assert not (ran.home / "r").exists()
    assert not (ran.home / "latest").is_symlink()
    assert ran("ls", "--json").json == []
    ran("show", "r").refused("there are no runs in", "start one with `evalfleet run BENCHMARK`")
    assert ran("verify").out == ""
    assert ran.run().code == 0, "its name is free again"


def test_a_run_that_is_not_over_is_not_deleted(fleet: Fleet) -> None:
    fleet.bench(tasks(1, "gate go; score 1"))
    process = fleet.start_run()
    fleet.started("a_1.0")
    fleet("rm", "r", "--yes").refused("still has 1 machine", "evalfleet cancel r")
    process.kill()
    fleet("rm", "r", "--yes").refused("still has 1 machine", "evalfleet cancel r")
    fleet("cancel", "r")
    assert fleet("rm", "r", "--yes").code == 0


def test_old_runs_lose_their_files_or_all_of_it(ran: Fleet) -> None:
    assert ran("gc", "--older", "30d", "--yes").out == "nothing is that old\n"
    assert ran("gc", "--older", "0.001s", "--keep-scores", "--dry-run").out == (
        "this would delete the files of 1 run: r\n"
    )
    before = ran("show", "r", "--json").json
    assert ran("gc", "--older", "0.001s", "--keep-scores", "--yes").code == 0
    assert not [path for path in (ran.home / "r").iterdir() if path.is_dir()]
    assert ran("show", "r", "--json").json == before
    assert ran("gc", "--older", "0.001s", "--keep-scores", "--yes").out == "nothing is that old\n", "nor left"
    assert ran.results()["scored"] == 3
    assert ran("gc", "--older", "0.001s", "--yes").out == "r: it is deleted\n"
    assert ran("ls", "--json").json == []


def test_a_run_is_carried_to_another_home(ran: Fleet, tmp_path: Path) -> None:
    assert ran("export", "r", "-o", "r.tgz").code == 0
    ran("export", "r", "-o", "r.tgz").refused("r.tgz exists")
    elsewhere = {"EVALFLEET_HOME": str(tmp_path / "elsewhere")}
    assert ran("import", "r.tgz", env=elsewhere).code == 0
    assert ran("show", "r", "--json", env=elsewhere).json == ran("show", "r", "--json").json
    assert (tmp_path / "elsewhere/r/big/big.0/big").stat().st_size == 300_000
    assert ran("verify", env=elsewhere).code == 0
    ran("resume", "r", "--only", "broken", env=elsewhere).refused("made in another home")
    ran("import", "r.tgz").refused("the name 'r' is taken")
    assert ran("import", "r.tgz", "--name", "copy").code == 0
    assert [run["run"] for run in ran("ls", "--json").json] == ["r", "copy"]
    ran("import", "nothing.tgz").refused("nothing.tgz is no file")
    ran("import", "b.toml").refused("b.toml is no run that evalfleet exported")


def test_nothing_of_an_archive_lands_outside_its_run(ran: Fleet, tmp_path: Path) -> None:
    assert ran("export", "r", "-o", "r.tgz").code == 0
    with tarfile.open(ran.folder / "r.tgz") as source, tarfile.open(ran.folder / "bad.tgz", "w:gz") as bad:
        for name in ("run.json", "events.jsonl"):
            member = source.getmember(name)
            bad.addfile(member, source.extractfile(member))
        for name in ("files/../../out", "/out", "out", "files/ok"):
            member = tarfile.TarInfo(name)
            member.size = 4
            bad.addfile(member, io.BytesIO(b"data"))
        link = tarfile.TarInfo("files/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        bad.addfile(link)
    home = tmp_path / "elsewhere"
    assert ran("import", "bad.tgz", env={"EVALFLEET_HOME": str(home)}).code == 0
    assert [path.name for path in (home / "r").iterdir()] == ["ok"]
    assert not (tmp_path / "out").exists()
    assert not (home / "out").exists()


def test_what_is_half_deleted_is_deleted_by_the_next(ran: Fleet) -> None:
    """Killed after the folder was put away, before the journal was changed."""
    (ran.home / ".removed").mkdir()
    (ran.home / "r").rename(ran.home / ".removed" / "r")
    homes.remove(Workspace.here(ran.home), "r")
    assert not Store.open(ran.home).streams()
    assert not (ran.home / ".removed" / "r").exists()
