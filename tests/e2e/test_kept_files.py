"""What machines get is kept with each run: it can be taken up whatever became of the benchmark's folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from evalfleet.events import MachineRequested, RunResumed
from tests.desk import Process
from tests.e2e.harness import Fleet, tasks
from tests.waiting import until


def left(fleet: Fleet, count: int = 3, **keys: object) -> None:
    """A run whose controller is gone while its first two tasks wait at the gate `go`."""
    fleet.bench(tasks(count, "gate go; score 1"), **keys)
    run: Process = fleet.start_run("--workers", "2")
    fleet.started("a_1.0", "a_2.0")
    run.kill()


def copies(fleet: Fleet, name: str = "run.sh", run: str = "r") -> list[Path]:
    return sorted((fleet.home / run / ".files").glob(f"*/{name}"))


def requested(fleet: Fleet) -> int:
    return sum(isinstance(event, MachineRequested) for event in fleet.events())


def test_resume_has_the_files_that_the_run_was_planned_with(fleet: Fleet) -> None:
    left(fleet, count=4)
    (fleet.folder / "run.sh").write_text("exit 1")
    (fleet.folder / "b.toml").unlink()
    fleet.open_gate("go")
    resumed = fleet("resume", "r")
    assert resumed.code == 0
    assert "has changed" not in resumed.err, "there is no benchmark any more to take new files from"
    assert fleet.results()["scored"] == 4
    assert fleet.starts() == ["a_1.0", "a_2.0", "a_3.0", "a_4.0"]
    fleet.settled()


def test_caches_and_what_git_ignores_stay_here(fleet: Fleet) -> None:
    lib = fleet.folder / "lib"
    for name in (
        "__pycache__/m.pyc",
        ".git/config",
        "data/big.log",
        "data/kept.log",
        "data/a.txt",
        "m.py",
        "notes.md",
    ):
        (lib / name).parent.mkdir(parents=True, exist_ok=True)
        (lib / name).write_text(name)
    (fleet.folder / ".gitignore").write_text("*.log\n!kept.log\n/wanted\n")
    (fleet.folder / ".evalfleetignore").write_text("*.md\n")
    (fleet.folder / "wanted").write_text("listed by its name")
    fleet.bench(tasks(1, "find -L . -type f | sort | note; score 1", "a"), files=["run.sh", "lib/", "wanted"])
    done = fleet.run()
    assert done.code == 0
    assert "an ignore file keeps lib/data/big.log, lib/notes.md from being sent" in done.err
    sent = "./lib/data/a.txt ./lib/data/kept.log ./lib/m.py ./run.sh ./wanted"
    assert fleet.note("a_1").split() == sent.split()
    (lib / "__pycache__" / "n.pyc").write_text("new")
    (lib / "data" / "big.log").write_text("longer")
    again = fleet("run", "./b.toml", "--name", "again")
    assert again.code == 0
    (first,), (second,) = copies(fleet, "lib/m.py"), copies(fleet, "lib/m.py", "again")
    assert first.parents[1].name == second.parents[1].name
    assert first.samefile(second), "what two runs have in common takes room once"


def test_a_folder_of_which_git_ignores_everything_is_refused(fleet: Fleet) -> None:
    (fleet.folder / "data").mkdir()
    (fleet.folder / "data" / "a.txt").write_text("x")
    (fleet.folder / ".gitignore").write_text("*\n")
    fleet.bench(tasks(1), files=["run.sh", "data"])
    fleet.run().refused("'data'", ".gitignore leaves nothing of it")


def test_files_of_a_run_that_were_changed_are_told_before_a_machine_is_asked_for(fleet: Fleet) -> None:
    left(fleet)
    before = requested(fleet)
    (copy,) = copies(fleet)
    good = copy.read_bytes()
    copy.write_text("exit 1")
    fleet("resume", "r").refused("that the run keeps", "were changed", "--with-new-files")
    assert requested(fleet) == before
    copy.write_bytes(good)
    fleet.open_gate("go")
    assert fleet("resume", "r").code == 0
    assert fleet.results()["scored"] == 3


def test_a_run_of_an_earlier_version_needs_its_files_as_they_were(fleet: Fleet) -> None:
    left(fleet)
    shutil.rmtree(fleet.home / "r" / ".files")
    good = (fleet.folder / "run.sh").read_bytes()
    (fleet.folder / "run.sh").write_text("exit 1")
    before = requested(fleet)
    fleet("resume", "r").refused("have changed", "has no copy of them")
    assert requested(fleet) == before
    (fleet.folder / "run.sh").write_bytes(good)
    fleet.open_gate("go")
    assert fleet("resume", "r").code == 0
    until(lambda: not fleet.alive())


def test_a_run_that_is_deleted_takes_no_files_from_others(fleet: Fleet) -> None:
    fleet.bench(tasks(1))
    assert fleet.run().code == 0
    assert fleet("run", "./b.toml", "--name", "s").code == 0
    assert fleet("gc", "r", "--yes").code == 0
    (fleet.folder / "run.sh").write_text("exit 1")
    assert fleet("run", "--from", "s", "--name", "t").code == 0
    assert fleet("export", "s", "-o", "s.tgz").code == 0
    assert fleet("gc", "s", "t", "--yes").code == 0
    assert fleet("import", "s.tgz").code == 0
    assert fleet("run", "--from", "s", "--name", "u").code == 0


def test_resume_with_new_files_runs_what_is_left_with_them_and_records_it(fleet: Fleet) -> None:
    left(fleet, count=4)
    fleet.open_gate("go")
    until(lambda: not [argv for argv in fleet.alive().values() if "run.sh" in argv])
    fleet.bench(tasks(5, "score 0.5"), env={"MORE": "1"})
    with (fleet.folder / "run.sh").open("a") as script:
        script.write("# new\n")
    done = fleet("resume", "r", "--with-new-files", "--workers", "2")
    assert done.code == 0
    assert "with new files for what is left (changed: run.sh, key 'env' and 2 tasks)" in done.err
    assert [each["score"] for each in fleet.results()["tasks"]] == [1.0, 1.0, 0.5, 0.5]
    assert fleet.starts() == ["a_1.0", "a_2.0", "a_3.0", "a_4.0"]
    (resumed,) = fleet.recorded(RunResumed)
    assert resumed.new_files is not None
    assert [task.id for task in resumed.new_files.tasks] == ["a_3", "a_4"]
    assert "new_files={changed:('run.sh', \"key 'env'\"),tasks:['a_3', 'a_4']}" in fleet("logs", "r").out
    assert len(copies(fleet)) == 2
    fleet.settled()


def test_a_set_up_that_failed_is_mended_with_new_files(fleet: Fleet) -> None:
    (fleet.folder / "setup.sh").write_text("exit 7")
    keys = {"files": ["run.sh", "setup.sh"], "setup": [["bash", "setup.sh"]]}
    fleet.bench(tasks(2), **keys)
    failed = fleet.run()
    assert failed.code == 4
    assert "evalfleet resume r --with-new-files" in failed.out
    assert "has changed" not in fleet("resume", "r").err
    (fleet.folder / "setup.sh").write_text("exit 0")
    again = fleet("resume", "r")
    assert again.code == 4
    assert "the benchmark has changed since" in again.err
    assert "`--with-new-files` takes the new ones" in again.err
    assert fleet("resume", "r", "--with-new-files").code == 0
    assert fleet.results()["scored"] == 2


def test_new_files_that_do_not_fit_the_run_are_refused(fleet: Fleet) -> None:
    left(fleet)
    before = requested(fleet)
    fleet.bench(tasks(2, "gate go; score 1"))
    fleet("resume", "r", "--with-new-files").refused("'a_3'", "not in its benchmark any more")
    fleet.bench(tasks(3, "gate go; score 1"), name="other")
    fleet("resume", "r", "--with-new-files").refused("'other' now")
    assert requested(fleet) == before
    fleet.bench(tasks(3, "gate go; score 1"))
    fleet.open_gate("go")
    done = fleet("resume", "r", "--with-new-files")
    assert done.code == 0
    assert "no file of the benchmark has changed" in done.err
