"""A secret's value is seen by the job alone."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.harness import Fleet, processes, task, tasks
from tests.planted import UNIQUE, holding
from tests.waiting import until

VALUE = f"sesame-open-{UNIQUE}-1234567890"


def test_a_missing_secret_is_named_before_anything_starts(fleet: Fleet) -> None:
    fleet.bench(tasks(1), secrets=["KEY", "OTHER_KEY"])
    fleet.run(env={"KEY": VALUE}).refused("OTHER_KEY")
    fleet.run().refused("KEY, OTHER_KEY")
    assert not fleet.events()


def test_the_value_is_nowhere(fleet: Fleet) -> None:
    show = 'echo "key: $KEY"; echo "$KEY" >&2; echo "$KEY" > $EVALFLEET_OUT/leak.txt;'
    fleet.bench(
        [
            task("a", f'{show} gate go; result "{{\\"score\\": 1, \\"error\\": \\"with $KEY\\"}}"'),
            task("b", 'echo "$KEY" | note; echo "$KEY"; exit 3'),
        ],
        secrets=["KEY"],
    )
    run = fleet.start_run("--workers", "2", "--attempts", "1", "--json", env={"KEY": VALUE})
    fleet.started("a.0", "b.0")
    until(lambda: (fleet.folder / "notes" / "b").exists())
    seen = [
        (pid, argv)
        for pid, argv, environ in processes()
        if pid != run.pid and "\0EVALFLEET_JOB=" not in environ and VALUE in argv + environ
    ]
    assert not seen
    assert not [argv for _, argv, _ in processes() if VALUE in argv]
    live = [name for name in holding(fleet.home, VALUE) if not name.startswith(".machines/")]
    assert not live
    fleet.open_gate("go")
    done = run.wait()
    assert done.code == 1
    assert VALUE not in done.out + done.err
    assert fleet.note("b").strip() == VALUE
    assert not holding(fleet.home, VALUE)
    log = fleet("logs", "r", "a").out
    assert "key: ***" in log
    assert fleet("logs", "r", "b").out.strip() == "***"
    for words in (("show", "r", "a"), ("show", "r", "--json"), ("report", "r"), ("logs", "r")):
        assert VALUE not in fleet(*words).out


def test_a_followed_log_is_masked(fleet: Fleet) -> None:
    """While the task runs its log is still on its machine, as it was written."""
    fleet.forks = True
    fleet.bench([task("a", 'echo "key: $KEY"; gate go; score 1')], secrets=["KEY"])
    run = fleet.start_run(env={"KEY": VALUE})
    fleet.started("a.0")
    logs = fleet.start("logs", "r", "a", "-f", env={"KEY": VALUE})
    until(lambda: "key" in logs.out)
    assert VALUE not in logs.out
    fleet.open_gate("go")
    assert run.wait().code == 0
    assert logs.wait().code == 0


def test_a_detached_run_keeps_the_secret(fleet: Fleet) -> None:
    fleet.bench([task("a", 'gate go; echo "$KEY" | note; score 1')], secrets=["KEY"])
    path = fleet.folder / "keys.env"
    path.write_text(f"KEY='{VALUE}'\n")
    done = fleet.run("--detach", "--env-file", "keys.env")
    assert done.code == 0, done
    fleet.started("a.0")
    assert not [
        argv
        for pid, argv, environ in processes()
        if "EVALFLEET_JOB=" not in environ and VALUE in argv + environ
    ]
    fleet.open_gate("go")
    assert fleet("watch", "r").code == 0
    assert fleet.note("a").strip() == VALUE
    assert not holding(fleet.home, VALUE)
    until(lambda: not fleet.alive())


def test_env_files_are_never_uploaded(fleet: Fleet) -> None:
    fleet.bench([task("a", 'ls -a | note; test -n "$KEY" && score 1')], secrets=["KEY"])
    fleet.config("")
    (fleet.folder / ".env").write_text(f"KEY={VALUE}\n")
    assert fleet.run().code == 0
    assert ".env" not in fleet.note("a")
    assert not holding(fleet.home, VALUE)


def test_what_is_not_asked_for_is_not_passed_on(fleet: Fleet) -> None:
    fleet.forks = True
    fleet.bench([task("a", "env | note; score 1")])
    assert fleet.run(env={"AWS_SECRET_ACCESS_KEY": VALUE}).code == 0
    assert VALUE not in fleet.note("a")


def test_resume_needs_the_secret_again(fleet: Fleet) -> None:
    fleet.forks = True
    fleet.bench(tasks(2, "gate go; score 1"), secrets=["KEY"])
    run = fleet.start_run(env={"KEY": VALUE})
    fleet.started("a_1.0")
    run.kill()
    fleet("resume", "r").refused("KEY")
    fleet.open_gate("go")
    assert fleet("resume", "r", env={"KEY": VALUE}).code == 0
    assert not holding(Path(fleet.home), VALUE)


def test_a_log_is_not_followed_by_who_cannot_mask_it(fleet: Fleet) -> None:
    fleet.forks = True
    fleet.bench([task("a", 'echo "key: $KEY"; gate go; score 1')], secrets=["KEY"])
    run = fleet.start_run(env={"KEY": VALUE})
    fleet.started("a.0")
    logs = fleet.start("logs", "r", "a", "-f")
    until(lambda: "secrets are not set" in logs.err)
    fleet.open_gate("go")
    assert run.wait().code == 0
    assert logs.wait().out.strip() == "key: ***"
