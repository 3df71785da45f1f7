"""Tasks of an earlier run are run again: chosen by name or by how they went."""

from __future__ import annotations

import json
import shutil
import subprocess

from tests.e2e.harness import Fleet, task

ALL = [
    task("a_1", "score 1"),
    task("a_2", "score 0"),
    task("a_3", "exit 3"),
    task("b_1", "score 0"),
    task("b_2", "score 1"),
]


def ids(fleet: Fleet, run: str) -> list[str]:
    return [each["task_id"] for each in fleet.results(run)["tasks"]]


def test_tasks_are_chosen_from_an_earlier_run_by_how_they_went(fleet: Fleet) -> None:
    fleet.bench(ALL)
    assert fleet.run("--attempts", "1").code == 1

    def dry(*words: str) -> list[str]:
        done = fleet("run", "./b.toml", "--dry-run", "--json", *words)
        assert done.code == 0, done
        chosen: list[str] = done.json["tasks"]
        return chosen

    assert dry("--from", "r", "--only", "failed") == ["a_2", "b_1"]
    assert dry("--from", "r", "--only", "broken,failed", "--exclude", "b_*") == ["a_2", "a_3"]
    assert dry("--from", "r", "--only", "passed", "--domain", "b") == ["b_2"]
    assert len(dry("--from", "r", "--only", "slow")) == 1
    (fleet.folder / "mine.txt").write_text("# those that matter\n\na_1..2\n  b_2 \n")
    assert dry("--tasks-file", "mine.txt", "--task", "a_3") == ["a_1", "a_2", "a_3", "b_2"]
    fleet.run("--name", "x", "--only", "failed").refused("--from RUN")
    fleet.run("--name", "x", "--from", "r", "--only", "flaky").refused("'flaky' is no outcome", "failed")
    fleet.run("--name", "x", "--from", "nix").refused("nix")
    fleet.run("--name", "x", "--from", "r", "--only", "unrun").refused("has no tasks that are unrun")
    fleet.run("--name", "x", "--tasks-file", "no.txt").refused("no.txt", "cannot be read")
    fleet.bench(ALL[:2])
    fleet.run("--name", "x", "--from", "r").refused("has no task 'a_3'")


def test_rerun_makes_a_new_run_of_some_tasks_and_leaves_the_earlier_one_alone(fleet: Fleet) -> None:
    fleet.bench(ALL)
    assert fleet.run("--attempts", "1", "--model", "m", "-A", "k=v").code == 1
    before = (fleet.home / "r" / "results.json").read_bytes()
    assert (
        fleet(
            "run", "--from", "r", "--task", "a_*", "--only", "failed,passed", "--name", "again", "--json"
        ).code
        == 0
    )
    again = fleet.results("again")
    assert [each["task_id"] for each in again["tasks"]] == ["a_1", "a_2"]
    assert (again["rerun_of"], again["model"], again["scored"]) == ("r", "m", 2)
    plan, earlier = fleet.state("again").plan, fleet.state("r").plan
    assert (plan.agent, plan.limits, plan.benchmark_spec) == (
        earlier.agent,
        earlier.limits,
        earlier.benchmark_spec,
    )
    assert (fleet.home / "r" / "results.json").read_bytes() == before
    assert "rerun of r" in " ".join(fleet("show", "again").out.split())

    fleet("run", "--from", "r", "--task", "z_*").refused("matches no task")
    fleet("run", "--from", "r", "--task", "a_1", "--only", "failed").refused(
        "none of the tasks named is failed"
    )
    fleet("run", "--from", "r", "--name", "again").refused("is taken")
    fleet("run", "--from", "nix").refused("nix")
    fleet("run", "--from", "r", "--model", "x").refused("--model needs BENCHMARK")
    fleet("run", "--only", "failed").refused("name the benchmark to run")
    made = fleet("run", "--from", "r", "--only", "broken", "--workers", "2", "--json").json
    assert (made["total_tasks"], made["workers"], made["run"] != "r") == (1, 2, True)


def test_a_rerun_of_repeats_runs_them_as_they_were(fleet: Fleet) -> None:
    fleet.bench([task("a", 'echo "$EVALFLEET_TASK_ID $EVALFLEET_REPEAT" | note; score 0'), task("b")])
    assert fleet.run("--repeat", "2").code == 0
    assert fleet("run", "--from", "r", "--task", "a~2", "--name", "again").code == 0
    (only,) = fleet.results("again")["tasks"]
    assert (only["task_id"], only["origin"], only["repeat"]) == ("a~2", "a", 2)
    assert fleet.note("a") == "a 2\n"
    chosen = fleet("run", "./b.toml", "--from", "r", "--only", "failed", "--dry-run", "--json").json
    assert chosen["tasks"] == ["a"]


def test_a_rerun_has_the_files_of_the_earlier_run_whatever_became_of_them(fleet: Fleet) -> None:
    fleet.bench([task("a")])
    assert fleet.run().code == 0
    (fleet.folder / "run.sh").write_text("exit 1")
    assert fleet("run", "--from", "r", "--name", "again").code == 0
    assert fleet.results("again")["success_rate"] == 1.0
    for run in ("r", "again"):
        shutil.rmtree(fleet.home / run / ".files")
    fleet("run", "--from", "r").refused("have changed", "--from r")
    assert len(json.loads(fleet("ls", "--json").out)) == 2


def test_show_and_the_report_name_outcomes_failures_first(fleet: Fleet) -> None:
    fleet.bench(ALL)
    assert fleet.run("--attempts", "1").code == 1

    def shown(*words: str) -> list[str]:
        lines = fleet("show", "r", *words).out.splitlines()
        return [line.split()[0] for line in lines[3:]]

    assert shown("--failed") == ["a_2", "b_1"]
    assert shown("--failed", "--broken", "--domain", "a") == ["a_2", "a_3"]
    assert shown("--sort", "task") == ["a_1", "a_2", "a_3", "b_1", "b_2"]
    assert shown("--sort", "outcome") == ["a_2", "b_1", "a_3", "a_1", "b_2"]
    by_score = fleet("show", "r", "--sort", "score").out.splitlines()
    assert by_score[2].split()[:3] == ["task", "outcome", "score"]
    assert [line.split()[2] for line in by_score[3:5]] == ["0.0", "0.0"]
    assert shown("--sort", "domain") == ["a_2", "a_3", "a_1", "b_1", "b_2"]
    assert fleet("show", "r", "--broken", "--json").json["tasks"][0]["task_id"] == "a_3"
    fleet("show", "r", "--domain", "z").refused("no domain 'z'")
    fleet("show", "r", "a_1", "--failed").refused("leave the flags out")
    report = fleet("report", "r").out
    places = [report.index(f"\n| {name} | ") for name in ("a_2", "a_3", "a_1", "b_1", "b_2")]
    assert places == sorted(places)
    assert "### a: " in report
    assert "| a_2 | fail | 0.000 |" in report
    job = fleet.folder / "summary.md"
    printed = fleet("report", "r", "--format", "github", env={"GITHUB_STEP_SUMMARY": str(job)}).out
    assert "::warning title=a_2%3A fail (0)::" in printed
    assert job.read_text() == report.removesuffix("\n")


def test_results_tell_what_the_run_was_made_of(fleet: Fleet) -> None:
    fleet.bench(ALL, settings={"k": ""})
    git = ["git", "-C", str(fleet.folder), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    (fleet.folder / ".gitignore").write_text("home\nmarks\n.outputs*\n")
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    choice = ("--tasks", "2", "--seed", "7", "--exclude", "a_3", "--budget", "9")
    assert fleet.run(*choice, "--set", "k=v", "-A", "t=0").code == 0
    made = fleet.results()["provenance"]
    assert made["settings"] == {"k": "v"}
    assert made["agent"] == {"t": "0"}
    assert made["seed"] == 7
    assert made["selection"] == {"tasks": 2, "seed": 7, "exclude": ["a_3"]}
    assert made["limits"]["budget_usd"] == 9
    assert (made["commit"], made["uncommitted"]) == (head.stdout.strip(), False)
    assert made["versions"].keys() == {"evalfleet", "python", "system"}
    assert made["digests"].keys() == {"tasks", "files"}
    assert head.stdout.strip() in fleet("report", "r").out

    (fleet.folder / "run.sh").write_text((fleet.folder / "run.sh").read_text() + "#\n")
    assert fleet.run("--name", "again", *choice).code == 0
    changed = fleet.results("again")["provenance"]
    assert changed["uncommitted"]
    assert changed["digests"]["files"] != made["digests"]["files"]
    assert changed["digests"]["tasks"] == made["digests"]["tasks"]
