"""`evalfleet run`: outcomes, exit codes, results, selection, limits."""

from __future__ import annotations

import csv
import io
import json
import re

import pytest

from evalfleet.events import AttemptEnded, MachineRequested
from evalfleet.model import Broken
from tests.e2e.harness import Fleet, task, tasks
from tests.waiting import slowness, until

KEYS = {
    *("run", "benchmark", "model", "status", "started_at", "ended_at", "total_tasks", "scored", "broken"),
    *(
        "unrun",
        "succeeded",
        "failed",
        "success_rate",
        "success_rate_ci",
        "by_domain",
        "causes",
        "cost",
        "tasks",
    ),
}
TASK_KEYS = {
    *("task_id", "domain", "success", "score", "num_steps", "duration_seconds", "error", "cause", "attempts"),
    *("machine", "screenshots", "artifacts"),
}
DOMAIN_KEYS = {"total", "scored", "succeeded", "success_rate", "success_rate_ci"}


def test_outcomes_and_results(fleet: Fleet) -> None:
    said = {"score": 1, "num_steps": 5, "screenshots": ["step_0.png"]}
    shot = f"touch $EVALFLEET_OUT/step_0.png; result '{json.dumps(said)}'"
    fleet.bench([task("n_1", shot), task("n_2", "score 0.5; exit 3"), task("m_1", "score 0")])
    done = fleet.run("--workers", "2", "--model", "gpt")
    assert done.code == 0, done
    found = fleet.results()
    assert found.keys() >= KEYS
    assert all(each.keys() >= TASK_KEYS for each in found["tasks"])
    assert found["by_domain"].keys() == {"n", "m"}
    assert all(each.keys() >= DOMAIN_KEYS for each in found["by_domain"].values())
    assert found["cost"].keys() == {"machines_usd", "models_usd", "per_task_usd", "prices_as_of"}
    counts = {
        key: found[key] for key in ("status", "model", "scored", "broken", "unrun", "succeeded", "failed")
    }
    assert counts == {
        **{"status": "done", "model": "gpt", "scored": 3, "broken": 0},
        **{"unrun": 0, "succeeded": 1, "failed": 2},
    }
    first = fleet.task("n_1")
    assert (first["success"], first["score"], first["num_steps"], first["screenshots"]) == (
        True,
        1.0,
        5,
        ["step_0.png"],
    )
    assert first["artifacts"] == "r/n_1/n_1.0/"
    assert (fleet.home / first["artifacts"] / "step_0.png").exists()
    assert (fleet.home / "latest").resolve() == (fleet.home / "r").resolve()
    aggregated = json.loads((fleet.home / "r" / "aggregated_results.json").read_text())
    assert aggregated.keys() == {"total_tasks", "succeeded", "failed", "success_rate", "tasks", "by_domain"}
    worker = json.loads((fleet.home / "r" / "worker-1_results.json").read_text())
    assert worker.keys() == {"worker_name", "run_id", "completed_at", "tasks", "summary"}
    fleet.settled()


def test_show_json_is_results_json(fleet: Fleet) -> None:
    fleet.bench(tasks(2))
    run = fleet.run("--json")
    assert run.code == 0
    assert all(json.loads(line) for line in run.out.splitlines())
    assert run.json == fleet.results() == fleet("show", "r", "--json").json


def test_broken_is_retried_elsewhere_and_is_no_zero(fleet: Fleet) -> None:
    fleet.bench([*tasks(2, "gate up; score 1"), task("x", "gate go; exit 7")])
    run = fleet.start_run("--workers", "3", "--attempts", "2")
    fleet.started("a_1.0", "a_2.0", "x.0")
    fleet.open_gate("up")
    fleet.recorded(AttemptEnded, 2)
    fleet.open_gate("go")  # two other machines are free now
    done = run.wait()
    assert done.code == 1, done
    found = fleet.results()
    assert (found["scored"], found["broken"], found["success_rate"]) == (2, 1, 1.0)
    broken = fleet.task("x")
    assert (broken["score"], broken["success"], broken["cause"], broken["attempts"]) == (
        None,
        None,
        "result",
        2,
    )
    assert "exit code 7" in broken["error"]
    detail = fleet("show", "r", "x", "--json").json
    assert len({attempt["machine"] for attempt in detail["attempts"]}) == 2
    assert fleet.starts().count("x.0") == fleet.starts().count("x.1") == 1


@pytest.mark.parametrize(
    ("flags", "code"),
    [(("--allow-broken", "1"), 0), (("--allow-broken", "25%"), 0), (("--allow-broken", "24%"), 1)],
)
def test_allow_broken(fleet: Fleet, flags: tuple[str, ...], code: int) -> None:
    fleet.bench([*tasks(3), task("x", "exit 7")])
    assert fleet.run("--attempts", "1", *flags).code == code


@pytest.mark.parametrize(("rate", "code"), [("0.5", 0), ("50%", 0), ("0.51", 1)])
def test_fail_under(fleet: Fleet, rate: str, code: int) -> None:
    fleet.bench([task("a"), task("b", "score 0.9")])
    assert fleet.run("--fail-under", rate).code == code


def test_a_task_that_hangs_is_scored_zero_and_its_children_die(fleet: Fleet) -> None:
    hang = "(setsid sleep 300 &) ; (nohup sleep 300 >/dev/null 2>&1 &) ; sleep 300"
    fleet.bench([task("h", hang), task("a")], timeout_s=300)
    done = fleet.run("--task-timeout", "1", "--workers", "2")
    assert done.code == 0, done
    found = fleet.task("h")
    assert (found["score"], found["success"], found["attempts"]) == (0.0, False, 1)
    assert "time limit" in found["error"]
    fleet.settled()


def test_what_a_task_leaves_running_dies_with_it(fleet: Fleet) -> None:
    fleet.bench([task("a", "(setsid sleep 300 &); score 1"), task("b", "gate go; score 1")])
    run = fleet.start_run("--workers", "2")
    until(lambda: fleet.home.exists() and "a_" not in run.out and "[1/2] a" in run.out)
    until(lambda: not [argv for argv in fleet.alive().values() if argv.startswith("sleep 300")])
    fleet.open_gate("go")
    assert run.wait().code == 0


GARBAGE = {
    "empty": "",
    "text": "score: 1",
    "list": "[1]",
    "null": "null",
    "none": "{}",
    "string": '{"score": "1"}',
    "bool": '{"score": true}',
    "high": '{"score": 1.1}',
    "low": '{"score": -0.1}',
    "nan": '{"score": NaN}',
    "huge": '{"score": 1e999}',
    "deep": "[" * 5000,
    "cut": '{"score": 1',
}


def test_results_that_say_nothing_are_broken(fleet: Fleet) -> None:
    bad = [task(f"g_{name}", f"result '{text}'") for name, text in GARBAGE.items()]
    odd = [
        task("o_latin", "printf '\\xff\\xfe{}' > $EVALFLEET_OUT/result.json"),
        task("o_folder", "mkdir $EVALFLEET_OUT/result.json"),
        task("o_link", "ln -s /etc/passwd $EVALFLEET_OUT/result.json"),
        task("o_dangling", "ln -s nowhere $EVALFLEET_OUT/result.json"),
        task("o_fifo", "mkfifo $EVALFLEET_OUT/result.json"),
        task("o_big", "head -c 30000000 /dev/zero > $EVALFLEET_OUT/result.json"),
        task("o_secret", "score 1; chmod 000 $EVALFLEET_OUT/result.json"),
    ]
    fleet.bench([task("good"), *bad, *odd], timeout_s=60)
    done = fleet.run("--workers", "3", "--attempts", "1")
    assert done.code == 1, done
    found = {each["task_id"]: each for each in fleet.results()["tasks"]}
    wrong = {id: each for id, each in found.items() if id != "good" and each["score"] is not None}
    assert not {id for id in wrong if id != "o_secret"}
    assert found["good"]["score"] == 1.0
    assert all(each["error"] for id, each in found.items() if id.startswith("g_"))


def test_odd_fields_never_break_a_score(fleet: Fleet) -> None:
    odd = {
        "score": 1,
        "num_steps": "many",
        "cost_usd": -1,
        "screenshots": ["../../x"],
        "error": 5,
        "success": "yes",
    }
    fleet.bench([task("a", f"result '{json.dumps(odd)}'")])
    assert fleet.run().code == 0
    found = fleet.task("a")
    assert (found["score"], found["num_steps"], found["screenshots"]) == (1.0, None, [])


ODD = ["../x", "a b", "日本_é", "x" * 200, "-rf", "~", "a/b/c", "%2e", "CON", "a'b\"c$d", "x.0", "x"]
ODD += ["results.json", "worker-1_results.json", "vm_pool_registry.json"]


def test_odd_ids(fleet: Fleet) -> None:
    """Each comes home into the run's own folder, under its own name."""
    write = ["bash", "-c", "echo '{\"score\": 1}' > $EVALFLEET_OUT/result.json"]
    fleet.bench([task(id) for id in ODD], command=write)
    done = fleet.run("--workers", "2")
    assert done.code == 0, done
    found = fleet.results()["tasks"]
    assert [each["task_id"] for each in found] == ODD
    folders = [(fleet.home / each["artifacts"]).resolve() for each in found]
    assert len(set(folders)) == len(ODD)
    for id, folder in zip(ODD, folders, strict=True):
        assert folder.is_relative_to((fleet.home / "r").resolve())
        assert (folder / "result.json").exists()
        assert fleet.task(id)["score"] == 1.0
    assert fleet("show", "--", "r", "-rf").code == 0
    assert fleet("logs", "r", "../x").code == 0


def test_a_huge_log_is_capped(fleet: Fleet) -> None:
    fleet.bench([task("a", "echo first; head -c 120000000 /dev/zero | tr '\\0' x; echo; echo last; score 1")])
    assert fleet.run().code == 0
    log = fleet.home / "r" / "a" / "a.0" / "log.txt"
    logs = [path for path in (fleet.home / "r" / "a" / "a.0").iterdir() if path.stat().st_size > 1000]
    assert logs, list(log.parent.iterdir())
    content = logs[0].read_bytes()
    assert len(content) < 60_000_000
    assert content.startswith(b"first")
    assert content.rstrip().endswith(b"last")


def test_a_result_over_the_cap_is_called_so(fleet: Fleet) -> None:
    fleet.bench([task("a", 'head -c 2000000 /dev/zero >"$EVALFLEET_OUT/result.json"')])
    assert fleet.run("--attempts", "1").code == 1
    (told,) = [each.outcome for each in fleet.recorded(AttemptEnded)]
    assert isinstance(told, Broken)
    assert told.detail.startswith("result.json is larger than 1 MB (exit code 0)")


def test_an_agents_output_does_not_command_the_terminal(fleet: Fleet) -> None:
    fleet.bench([task("a", "printf 'red \\033[31m\\007\\302\\233 tab\\tend\\n'; score 1")])
    assert fleet.run().code == 0
    assert fleet("logs", "r", "a").out == "red ^[[31m^G\\x9b tab\tend\n"


def test_selection(fleet: Fleet) -> None:
    fleet.bench([*tasks(4), *tasks(4, prefix="z")])

    def chosen(*flags: str) -> list[str]:
        plan = fleet("run", "./b.toml", "--dry-run", "--json", *flags)
        assert plan.code == 0, plan
        ids: list[str] = plan.json["tasks"]
        return ids

    assert chosen("--first", "3") == ["a_1", "a_2", "a_3"]
    assert chosen("--task", "z_1", "--task", "a_2") in (["z_1", "a_2"], ["a_2", "z_1"])
    assert chosen("--domain", "z") == ["z_1", "z_2", "z_3", "z_4"]
    assert len(chosen("--repeat", "3", "--first", "1")) == 3
    sample = chosen("--tasks", "4", "--seed", "1")
    assert sample == chosen("--tasks", "4", "--seed", "1")
    assert sum(id.startswith("a") for id in sample) == 2
    assert any(chosen("--tasks", "4", "--seed", str(seed)) != sample for seed in range(2, 6))
    fleet("run", "./b.toml", "--task", "z_9").refused("z_9")
    fleet("run", "./b.toml", "--domain", "q").refused("q")


def test_repeats_are_tasks_of_their_own(fleet: Fleet) -> None:
    fleet.bench(tasks(1))
    assert fleet.run("--repeat", "2").code == 0
    assert sorted(each["task_id"] for each in fleet.results()["tasks"]) == ["a_1~1", "a_1~2"]


def test_the_command_sees_what_was_asked(fleet: Fleet) -> None:
    settings = {"split": "train", "n": 2, "shuffle": True}
    fleet.bench([task("a_1", "env | grep ^EVALFLEET_ | note; score 1")], settings=settings)
    done = fleet.run("--model", "m-1", "-A", "temperature=0.2", "--set", "split=test", "--set", "n=3")
    assert done.code == 0, done
    seen = dict(line.split("=", 1) for line in fleet.note("a_1").splitlines())
    assert (seen["EVALFLEET_MODEL"], seen["EVALFLEET_TASK_ID"], seen["EVALFLEET_ATTEMPT"]) == (
        "m-1",
        "a_1",
        "0",
    )
    assert json.loads(seen["EVALFLEET_AGENT"]) == {"temperature": "0.2"}
    assert json.loads(seen["EVALFLEET_SETTINGS"]) == {"split": "test", "n": "3", "shuffle": "true"}
    assert "do" in json.loads(seen["EVALFLEET_PARAMS"])


@pytest.mark.parametrize("schedule", ["dynamic", "round-robin", "slices"])
def test_schedules(fleet: Fleet, schedule: str) -> None:
    fleet.bench([task(f"a_{n}", "score 1") for n in range(6)])
    assert fleet.run("--workers", "2", "--schedule", schedule).code == 0
    machines = [each["machine"] for each in fleet.results()["tasks"]]
    if schedule == "slices":
        assert len(set(machines[:3])) == len(set(machines[3:])) == 1
    if schedule == "round-robin":
        assert len(set(machines[::2])) == len(set(machines[1::2])) == 1


def test_dry_run_writes_nothing(fleet: Fleet) -> None:
    fleet.bench(tasks(3), settings={"split": "test"})
    before = {path for path in fleet.folder.rglob("*") if ".outputs-" not in str(path)}
    more = ("--set", "max_machines=2", "-A", "temperature=0")
    done = fleet("run", "./b.toml", "--dry-run", "--workers", "3", *more)
    assert done.code == 0, done
    assert "3 in 1 domain" in done.out
    assert "3 tasks / 2 at once x" in done.out, "the place has two machines"
    assert re.search(r"^settings +split=test$", done.out, re.MULTILINE)
    assert re.search(r"^agent +temperature=0$", done.out, re.MULTILINE)
    assert {path for path in fleet.folder.rglob("*") if ".outputs-" not in str(path)} == before


def test_dry_run_in_a_home_with_runs(fleet: Fleet) -> None:
    fleet.bench(tasks(1))
    fleet.run()
    before = fleet("ls", "--json").json
    assert fleet("run", "./b.toml", "--dry-run").code == 0
    fleet("run", "./b.toml", "--dry-run", "--name", "r").refused("'r'", "taken")
    assert fleet("ls", "--json").json == before


def test_name_taken(fleet: Fleet) -> None:
    fleet.bench(tasks(1))
    assert fleet.run().code == 0
    fleet.run().refused("'r'", "taken")
    assert len(fleet("ls", "--json").json) == 1


PRICED = '[places.lab]\nkind = "local"\nusd_per_hour = 3600\n'


def test_the_budget_stops_the_run(fleet: Fleet) -> None:
    """A dollar a second: two tasks of a second do not both fit."""
    fleet.config(PRICED)
    fleet.bench(tasks(8, "sleep 0.7; score 1"))
    done = fleet.run("--on", "lab", "--budget", "3", "--yes")
    assert done.code == 3, done
    found = fleet.results()
    assert found["status"] == "stopped"
    assert found["unrun"] > 0
    assert 0 < found["cost"]["machines_usd"] <= 3.0 + slowness(), "its machine is deleted within a second"
    fleet.settled()


def test_max_duration_stops_the_run(fleet: Fleet) -> None:
    fleet.bench([task("a"), task("b", "gate never"), task("c", "gate never")])
    done = fleet.run("--max-duration", "3s")
    assert done.code == 3, done
    found = fleet.results()
    assert found["scored"] <= 1, "the others wait for ever"
    assert found["unrun"] == 3 - found["scored"]
    fleet.settled()


def test_an_expensive_run_asks(fleet: Fleet) -> None:
    fleet.config(PRICED)
    fleet.bench(tasks(2))
    fleet.run("--on", "lab").refused("--yes")
    assert not fleet.events()


def test_a_setup_that_fails_everywhere_is_exit_4(fleet: Fleet) -> None:
    fleet.bench(tasks(4), setup=[["bash", "-c", "echo no such image >&2; exit 9"]])
    done = fleet.run("--workers", "2")
    assert done.code == 4, done
    assert "no such image" in done.out + done.err
    assert fleet.results()["status"] == "failed"
    fleet.settled()


def test_a_setup_that_says_it_would_fail_on_any_machine_ends_the_run_and_resume_asks_again(
    fleet: Fleet,
) -> None:
    broken = "echo some noise; test -e {0} || {{ echo bring {0}; exit 78; }}".format(fleet.folder / "cure")
    fleet.bench(tasks(1), setup=[["sh", "-c", broken]])
    done = fleet.run()
    assert done.code == 4, done
    assert f"failed: bring {fleet.folder}/cure)" in done.out
    assert len(fleet.recorded(MachineRequested)) == 1
    (fleet.folder / "cure").touch()
    assert fleet("resume", "r").code == 0


def test_setup_probe_and_files(fleet: Fleet) -> None:
    (fleet.folder / "data").mkdir()
    (fleet.folder / "data" / "x.txt").write_text("from home")
    fleet.bench(
        tasks(3, "cat data/x.txt made.txt | note; score 1"),
        files=["run.sh", "data/"],
        setup=[["bash", "-c", "echo made > made.txt"]],
        probe=["test", "-e", "made.txt"],
    )
    assert fleet.run("--workers", "2").code == 0
    assert fleet.note("a_3") == "from homemade\n"


def test_profile_environment_and_defaults(fleet: Fleet) -> None:
    fleet.config("[defaults]\nworkers = 2\n[profiles.quick]\nfirst = 1\nmax-duration = '1h'\n")
    fleet.bench(tasks(3))
    plan = fleet("run", "./b.toml", "--dry-run", "--json", "--profile", "quick").json
    assert plan["tasks"] == ["a_1"]
    assert plan["plan"]["limits"]["max_duration_s"] == 3600
    assert fleet("run", "./b.toml", "--dry-run", "--json").json["plan"]["limits"]["workers"] == 2
    near = fleet("run", "./b.toml", "--dry-run", "--json", env={"EVALFLEET_WORKERS": "3"}).json
    assert near["plan"]["limits"]["workers"] == 3
    fleet("run", "./b.toml", "--profile", "quik").refused("quik", "quick")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--workers", "0"), ("--workers",)),
        (("--workers", "many"), ("--workers",)),
        (("--budget", "-1"), ("--budget",)),
        (("--max-duration", "soon"), ("--max-duration",)),
        (("--attempts", "0"), ("--attempts",)),
        (("--schedule", "fair"), ("fair",)),
        (("--on", "mars"), ("mars",)),
        (("--first", "1", "--tasks", "2"), ()),
        (("--name", "a/b"), ("a/b",)),
        (("--name", ""), ()),
        (("--set", "novalue"), ("--set",)),
        (("--config", "none.toml"), ("none.toml",)),
        (("--env-file", "none.env"), ("none.env",)),
        (("--fail-under", "2"), ("--fail-under",)),
        (("--allow-broken", "x"), ("--allow-broken",)),
        (("--nonsense",), ("--nonsense",)),
        (("--task-timeout", "0"), ("--task-timeout",)),
    ],
)
def test_wrong_requests_are_one_line(fleet: Fleet, flags: tuple[str, ...], words: tuple[str, ...]) -> None:
    fleet.bench(tasks(2))
    fleet("run", "./b.toml", *flags).refused(*words)
    assert not fleet.home.exists() or fleet("ls", "--json").json == []


@pytest.mark.parametrize(
    ("toml", "lines", "words"),
    [
        ("name = ", "", ("b.toml",)),
        ('name = "b"\n', "", ("b.toml",)),
        ('name = "b"\ntasks = "no.jsonl"\ncommand = ["true"]\n', "", ("no.jsonl",)),
        ('name = "b"\ntasks = "tasks.jsonl"\ncommand = ["true"]\n', "", ("tasks",)),
        ('name = "b"\ntasks = "tasks.jsonl"\ncommand = ["true"]\n', "{", ("tasks.jsonl:1",)),
        ('name = "b"\ntasks = "tasks.jsonl"\ncommand = ["true"]\n', '{"id": "a"}\n{"id": "a"}\n', ("'a'",)),
        ('name = "b"\ntasks = "tasks.jsonl"\ncommand = ["true", "{params.x}"]\n', '{"id": "a"}\n', ("x",)),
        ('name = "b"\ntasks = "tasks.jsonl"\ncomand = ["true"]\n', '{"id": "a"}\n', ("comand", "command")),
        ('name = "b"\ntasks = "tasks.jsonl"\ncommand = "true"\n', '{"id": "a"}\n', ("command",)),
        ('name = "b"\ntasks = "tasks.jsonl"\ncommand = ["true"]\nfiles = ["no"]\n', '{"id": "a"}\n', ("no",)),
    ],
)
def test_wrong_benchmarks_are_one_line(fleet: Fleet, toml: str, lines: str, words: tuple[str, ...]) -> None:
    (fleet.folder / "b.toml").write_text(toml)
    (fleet.folder / "tasks.jsonl").write_text(lines)
    fleet("run", "./b.toml").refused(*words)


def test_unknown_benchmarks(fleet: Fleet) -> None:
    fleet("run", "./none.toml").refused("none.toml")
    fleet("run", "none").refused("none")
    fleet("run", "no.such:thing").refused("no.such")
    fleet("run", ".").refused()


def test_own_metrics_tokens_and_metadata_are_kept_and_shown(fleet: Fleet) -> None:
    def told(lines: int, secret: str = "") -> str:
        more = f'"metrics": {{"lines": {lines}, "o|n": 1}}, "tokens": {{"in": {lines}}}, "cost_usd": 0.5'
        text = f'{{"score": 1, {more}, "metadata": {{"commit": "abc{secret}"}}}}'
        return f"printf '{text}' > $EVALFLEET_OUT/result.json"

    broken = """printf '{"broken": "model", "tokens": {"in": 100}}' > $EVALFLEET_OUT/result.json"""
    fleet.bench(
        [task("a_1", told(10)), task("b_1", told(20, "'$KEY'")), task("b_2", broken)], secrets=["KEY"]
    )
    fleet.forks = True
    fleet.run("--attempts", "1", env={"KEY": "s3cret-value-of-key"})
    found = fleet.results()
    assert found["metrics"]["lines"] == {"count": 2, "mean": 15.0, "min": 10.0, "max": 20.0, "total": 30.0}
    assert found["tokens"]["in"]["total"] == 130
    assert found["by_domain"]["b"]["metrics"]["lines"]["mean"] == 20.0
    one, two, _ = found["tasks"]
    assert (one["metrics"]["lines"], one["tokens"], one["cost_usd"]) == (10.0, {"in": 10}, 0.5)
    assert one["metadata"] == {"commit": "abc"}
    assert "s3cret" not in json.dumps(two)
    assert two["metadata"]["commit"].startswith("abc")
    assert "lines 15" in fleet("show", "r").out
    assert "in 130, mean 43" in fleet("show", "r").out
    shown = fleet("show", "r", "a_1").out
    assert all(words in shown for words in ("lines 10", "in 10", '"commit": "abc"', "$0.50"))
    report = fleet("report", "r").out
    assert all(words in report for words in ("| lines | 2 | 15 | 10 | 20 |", "| in | 130 |", "o\\|n"))
    rows = list(csv.DictReader(io.StringIO(fleet("report", "r", "--format", "csv").out)))
    assert [row["metrics.lines"] for row in rows] == ["10.0", "20.0", ""]
    assert (rows[0]["tokens.in"], rows[2]["tokens.in"], rows[0]["cost_usd"]) == ("10", "100", "0.5")
    assert json.loads(rows[0]["metadata"]) == {"commit": "abc"}
