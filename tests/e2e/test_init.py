"""`evalfleet init`: a benchmark that runs at once, from a dataset; and `--oracle`, which tests one."""

from __future__ import annotations

import gzip
import json
import tomllib
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from evalfleet.benchmarks.start import guess
from tests.e2e.harness import Fleet, task

ROWS = [{"qid": n, "question": f"{n} + 1", "answer": n + 1, "level": "easy"} for n in (1, 2)]
DATASETS = {
    "sums.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS),
    "sums.csv": "question,answer\n1 + 1,2\n2 + 1,3\n",
    "sums.tsv": "id\tquestion\tanswer\na\t1 + 1\t2\n",
    "list.json": json.dumps(ROWS),
    "wrapped.json": json.dumps({"version": 2, "rows": ROWS}),
    "by-id.json.gz": json.dumps({"a": {"question": "1 + 1", "answer": "2"}}),
}


@pytest.mark.parametrize("name", DATASETS)
def test_a_start_from_a_dataset_solves_itself_and_waits_for_an_agent(fleet: Fleet, name: str) -> None:
    content = DATASETS[name].encode()
    (fleet.folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    written = fleet("init", name)
    assert written.code == 0, written
    stem = name.partition(".")[0]
    path = f"{stem}/{stem}.toml"
    (step,) = (line.removeprefix("next: ") for line in written.out.splitlines() if line.startswith("next: "))
    assert step.endswith(f"evalfleet run {path} --oracle")
    (fleet.folder / "open.csv").write_text("question\nWhy?\n")
    assert "--oracle" not in fleet("init", "open.csv", "--into", "open").out, "its grader accepts anything"
    oracle = fleet("run", path, "--oracle", "--name", "o", "--json")
    assert (oracle.code, oracle.json["success_rate"]) == (0, 1.0), oracle
    assert oracle.json["benchmark"] == f"{stem}-oracle"
    if name == "sums.jsonl":
        agent = fleet("run", path, "--name", "a", "--json")
        assert (agent.code, agent.json["success_rate"]) == (0, 0.0), agent
        assert set(agent.json["by_domain"]) == {"easy"}
        # the agent is told the question, and not the answer
        graded = "expected '2' and got ''"
        asked = "asked {'question': '1 + 1'}\n"
        assert fleet("logs", "a", "1").out == f"{asked}--- its grader ---\n{graded}\n"
        assert graded in fleet("show", "a", "1").out


def test_a_start_without_a_dataset_and_its_schema_fit_together(fleet: Fleet) -> None:
    assert fleet("init", "--name", "mine", "--into", "here").code == 0
    text = (fleet.folder / "here" / "mine.toml").read_text()
    directive, _, schema_file = text.splitlines()[0].partition(" ./")
    assert directive == "#:schema"
    schema = json.loads((fleet.folder / "here" / schema_file).read_text())
    check = jsonschema.Draft202012Validator(schema)
    assert not list(check.iter_errors(tomllib.loads(text)))
    wrong = tomllib.loads(text.replace("command =", "comand ="))
    assert {error.validator for error in check.iter_errors(wrong)} == {"required", "additionalProperties"}
    assert fleet("run", "here/mine.toml", "--oracle").code == 0


def test_nothing_that_is_there_is_overwritten(fleet: Fleet) -> None:
    assert fleet("init").code == 0
    (fleet.folder / "mybench" / "agent.py").write_text("mine")
    fleet("init").refused("mybench/agent.py is there already; choose another folder with --into")
    assert (fleet.folder / "mybench" / "agent.py").read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.csv", "question,answer\n", "has no rows"),
        ("wrong.jsonl", "{", "wrong.jsonl:1: not JSON"),
        ("large.jsonl", json.dumps({"question": "x" * 100_001}), "put big data into files"),
        ("", "", "nowhere.csv: cannot be read (no such file or directory)"),
    ],
)
def test_what_is_no_dataset_is_refused(fleet: Fleet, name: str, content: str, words: str) -> None:
    if name:
        (fleet.folder / name).write_text(content)
    fleet("init", name or "nowhere.csv").refused(words)


def test_fields_are_guessed_by_name_and_by_what_is_in_them() -> None:
    rows = [
        {"id": 1, "task_id": f"T/{n}", "Target": n, "category": n % 2, "split": "test", "text": "?"}
        for n in range(6)
    ]
    assert guess(rows) == {"id": "task_id", "domain": "category", "answer": "Target"}
    assert guess([{"text": "a"}, {"text": "b"}]) == {"id": "#", "domain": "", "answer": ""}


def test_an_oracle_that_fails_a_task_fails_the_run_and_needs_no_keys(fleet: Fleet) -> None:
    (fleet.folder / "answers").write_text("b_1\n")
    fleet.bench(
        [task("b_1", "exit 1"), task("b_2", "exit 1")],
        secrets=["OPENAI_API_KEY"],
        model_key="OPENAI_API_KEY",
        score_from="exit_code",
        solution=["grep", "-q", "{task_id}", "answers"],
        solution_files=["answers"],
    )
    fleet.run().refused("needs OPENAI_API_KEY")
    done = fleet.run("--oracle")
    assert done.code == 1, done
    assert (fleet.task("b_1")["score"], fleet.task("b_2")["score"]) == (1, 0)


def test_a_benchmark_without_solutions_has_no_oracle(fleet: Fleet) -> None:
    fleet.bench([task("a_1")])
    fleet.run("--oracle").refused("--oracle: benchmark 'b' has no solutions of its own", "'solution'")


def test_an_oracle_goes_on_with_new_files_and_is_still_one(fleet: Fleet) -> None:
    keys: dict[str, Any] = {"score_from": "exit_code", "solution": ["true"]}
    fleet.bench([task("b_1", "exit 1")], **keys, setup=[["false"]])
    assert fleet.run("--oracle").code == 4
    fleet.bench([task("b_1", "exit 1")], **keys)
    done = fleet("resume", "r", "--with-new-files")
    assert done.code == 0, done
    assert fleet.task("b_1")["score"] == 1
