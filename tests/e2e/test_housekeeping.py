"""Runs that are measured, deleted, and carried from one home to another."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from evalfleet.api import home as homes
from evalfleet.api.archive import import_run
from evalfleet.errors import RequestError
from evalfleet.events import RunEnded, RunPlanned
from evalfleet.journal import Store
from evalfleet.model import Plan
from evalfleet.planning.workspace import Workspace
from tests.e2e.harness import Fleet, task, tasks


@pytest.fixture
def ran(fleet: Fleet) -> Fleet:
    fleet.bench([*tasks(2), task("big", 'head -c 300000 /dev/zero > "$EVALFLEET_OUT/big"; score 0')])
    assert fleet.run().code == 0
    return fleet


def test_the_room_that_runs_take_is_told(ran: Fleet) -> None:
    (run, rest) = ran("ls", "--size", "--json").json
    assert run["run"] == "r"
    assert run["files"] > 300_000
    assert run["journal"] > 1000
    assert rest["run"] == ""
    assert "0.3 MB" in ran("ls", "--size").out


def test_a_run_is_deleted_with_all_that_is_of_it(ran: Fleet) -> None:
    ran("gc", "r").failed(1, "delete 1 run with all results", "--yes")
    assert (ran.home / "r").is_dir()
    assert ran("gc", "r", "--yes").out == "r is deleted\n"
    assert not (ran.home / "r").exists()
    assert not (ran.home / "latest").is_symlink()
    assert ran("ls", "--json").json == []
    ran("show", "r").refused("there are no runs in", "start one with `evalfleet run BENCHMARK`")
    assert ran("ls", "--verify").out == ""
    assert ran.run().code == 0, "its name is free again"


def test_a_run_that_is_not_over_is_not_deleted(fleet: Fleet) -> None:
    fleet.bench(tasks(1, "gate go; score 1"))
    process = fleet.start_run()
    fleet.started("a_1.0")
    fleet("gc", "r", "--yes").refused("still has 1 machine", "evalfleet cancel r")
    process.kill()
    fleet("gc", "r", "--yes").refused("still has 1 machine", "evalfleet cancel r")
    fleet("cancel", "r")
    assert fleet("gc", "r", "--yes").code == 0


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
    assert ran("ls", "--verify", env=elsewhere).code == 0
    ran("resume", "r", "--only", "broken", env=elsewhere).refused("made in another home")
    ran("import", "r.tgz").refused("the name 'r' is taken")
    assert ran("import", "r.tgz", "--name", "copy").code == 0
    assert [run["run"] for run in ran("ls", "--json").json] == ["r", "copy"]
    ran.bench([task("bad", "exit 1")])
    ran.run("--name", "q", "--attempts", "1")
    assert "evalfleet resume q --only broken" in ran("show", "q").out
    assert ran("export", "q", "-o", "q.tgz").code == 0
    assert "evalfleet resume" not in ran("import", "q.tgz", env=elsewhere).out, "it would be refused"
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


Member = tuple[tarfile.TarInfo, bytes]


def members(path: Path) -> list[Member]:
    with tarfile.open(path) as archive:
        found = [(member, archive.extractfile(member)) for member in archive]
        return [(member, content.read()) for member, content in found if content is not None]


def member(name: str, content: bytes, kind: bytes = tarfile.REGTYPE) -> Member:
    made = tarfile.TarInfo(name)
    made.size, made.type = len(content), kind
    return made, content


def forged(path: Path, found: Sequence[Member]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for made, content in found:
            archive.addfile(made, io.BytesIO(content))
    return path


def test_what_no_run_records_is_not_imported_and_leaves_nothing(ran: Fleet, tmp_path: Path) -> None:
    assert ran("export", "r", "-o", "r.tgz").code == 0
    (_, header), (_, events), *files = members(ran.folder / "r.tgz")
    lines, far = events.splitlines(keepends=True), b'{"at":%d,' % 10**18
    workspace = Workspace.here(tmp_path / "elsewhere")

    def refused(words: str, *found: Member) -> None:
        bad = forged(tmp_path / "bad.tgz", found)
        with pytest.raises(RequestError, match=words) as told:
            import_run(workspace, bad)
        assert str(told.value).isprintable()
        assert homes.list_runs(workspace) == []
        assert not list(workspace.home.glob("*r*")) + list(workspace.home.glob(".r*"))

    def with_events(*changed: bytes) -> list[Member]:
        return [member("run.json", header), member("events.jsonl", b"".join(changed)), *files]

    def with_header(**changed: object) -> list[Member]:
        return [member("run.json", json.dumps({**json.loads(header), **changed}).encode())]

    ended = next(line for line in lines if b'"AttemptEnded"' in line)
    first = re.sub(rb'{"at":\d+,', far, lines[0])
    refused("event 1 has the time 1000000000000000000", *with_events(first, *lines[1:]))
    refused("event 1 does not belong there", *with_events(lines[-1]))
    refused("recorded before", *with_events(*(each * (1 + (each == ended)) for each in lines)))
    for score in (b"5", b"-1", b"1e308"):
        odd = events.replace(b'"score":1.0', b'"score":' + score)
        refused("scores are from 0 to 1", *with_events(odd))
    planned = json.loads(lines[0])
    planned["event"]["plan"].setdefault("limits", {})["workers"] = 10**12
    refused("a number that is too large", *with_events(json.dumps(planned).encode() + b"\n", *lines[1:]))
    refused("the run was made at", *with_header(created_at=10**18))
    refused("by a newer evalfleet", *with_header(format=99, version="9\x1b[31m\n"))
    refused("its events.jsonl unpacks to", *with_events(b"\n" * 100_000_000))
    long = member("files/x", b"0" * 100_000_000, tarfile.XHDTYPE)
    refused("a header of 100000256 bytes", *with_events(events), long)
    nested = b'{"at":1,"event":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"
    refused("is no run that evalfleet exported", *with_events(nested))
    pax = member("files/x", b"20 path=files/a\0b.c\n", tarfile.XHDTYPE)
    refused("embedded null byte", *with_events(events), pax, member("files/x", b"1"))
    names_of_names = [member("././@LongLink", b"files/x\0", tarfile.GNUTYPE_LONGNAME)] * 3000
    refused("is no run that evalfleet exported", *with_events(events), *names_of_names)
    # a file of ten terabytes, of which none is there
    for made, content in with_events(events):
        (tmp_path / made.name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / made.name).write_bytes(content)
    os.truncate(tmp_path / files[0][0].name, 10 << 40)
    names = ("run.json", "events.jsonl", files[0][0].name)
    subprocess.run(["tar", "-Sczf", "bad.tgz", *names], cwd=tmp_path, check=True)
    with pytest.raises(RequestError, match="its files unpack to"):
        import_run(workspace, tmp_path / "bad.tgz")
    assert homes.list_runs(workspace) == []
    # what an earlier version let in hides no other run
    assert import_run(workspace, ran.folder / "r.tgz").name == "r"
    store, at = workspace.store(), 10**18
    plan = Plan("bad", "b", places=("local",))
    store.create_past("bad", at, [(at, RunPlanned(plan, 0)), (at + 1, RunEnded("done"))])
    assert [run.run for run in homes.list_runs(workspace)] == ["bad", "r"]
    assert ran("ls", env={"EVALFLEET_HOME": str(workspace.home)}).code == 0
    assert ran("ls", "--size", env={"EVALFLEET_HOME": str(workspace.home)}).code == 0


def test_what_is_half_deleted_is_deleted_by_the_next(ran: Fleet) -> None:
    """Killed after the folder was put away, before the journal was changed."""
    (ran.home / ".removed").mkdir()
    (ran.home / "r").rename(ran.home / ".removed" / "r")
    homes.remove(Workspace.here(ran.home), "r")
    assert not Store.open(ran.home).streams()
    assert not (ran.home / ".removed" / "r").exists()
