"""Tasks from the datasets that people have: JSONL, JSON and CSV, packed or not, by a mapping of names."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from evalfleet.benchmarks.benchmark_file import load_benchmark
from evalfleet.benchmarks.command import CommandBenchmark
from evalfleet.benchmarks.tasks import own_of
from evalfleet.errors import RequestError
from evalfleet.model import AttemptId, Needs, Task

HEAD = 'name = "b"\ncommand = ["echo", "{params.prompt}"]\n'
ROWS = [
    {"task_id": "Eval/0", "prompt": "one", "level": "easy", "limit": 7, "labels": ["x", "y"]},
    {"task_id": 1, "prompt": "two", "level": "hard", "limit": 8, "labels": []},
]
MAPPED = (
    'tasks = {path = "@", id = "task_id", domain = "level", params = ["prompt"], timeout_s = "limit", '
    'tags = "labels", metadata = ["level"]}'
)


def load(folder: Path, text: str, name: str, content: bytes) -> tuple[Task, ...]:
    (folder / name).write_bytes(content)
    (folder / "b.toml").write_text(HEAD + text.replace("@", name))
    return load_benchmark(folder / "b.toml").tasks


def written(name: str) -> bytes:
    """The rows in the format that the name says."""
    if ".jsonl" in name:
        raw = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    elif name.startswith("wrapped"):
        raw = json.dumps({"version": "1.1", "data": ROWS}).encode()
    elif name.startswith("by-id"):
        raw = json.dumps({str(row["task_id"]): row for row in ROWS}).encode()
    else:
        raw = json.dumps(ROWS).encode()
    return gzip.compress(raw) if name.endswith(".gz") else raw


@pytest.mark.parametrize(
    "name", ["d.jsonl", "d.jsonl.gz", "d.json", "wrapped.json", "by-id.json", "d.json.gz", "D.JSONL"]
)
def test_a_dataset_is_read_by_a_mapping_of_its_fields(tmp_path: Path, name: str) -> None:
    first, second = load(tmp_path, MAPPED, name, written(name.lower()))
    assert (first.id, first.domain, first.params, first.timeout_s) == ("Eval/0", "easy", {"prompt": "one"}, 7)
    assert (first.tags, first.metadata) == (("x", "y"), {"level": "easy"})
    assert (second.id, second.domain, second.tags) == ("1", "hard", ())


@pytest.mark.parametrize(("name", "comma"), [("d.csv", ","), ("d.tsv", "\t")])
def test_a_table_is_read_by_a_mapping_of_its_columns(tmp_path: Path, name: str, comma: str) -> None:
    rows = [["task_id", "prompt", "level", "limit", "labels"], ["a", '"o\nne"', "easy", "7.5", '"x, y"']]
    content = "\ufeff" + "".join(comma.join(row) + "\r\n" for row in rows) + "\r\n"
    (task,) = load(tmp_path, MAPPED, name, content.encode())
    assert (task.id, task.params, task.timeout_s) == ("a", {"prompt": "o\nne"}, 7.5)
    assert task.tags == ("x", "y")


def test_without_a_mapping_all_other_fields_are_params_and_the_benchmark_is_the_domain(
    tmp_path: Path,
) -> None:
    first, _ = load(tmp_path, 'tasks = {path = "@", id = "task_id"}', "d.jsonl", written("d.jsonl"))
    assert first.domain == "b"
    assert first.params == {"prompt": "one", "level": "easy", "limit": 7, "labels": ["x", "y"]}


def test_params_can_be_renamed_or_held_by_one_field(tmp_path: Path) -> None:
    (task,) = load(
        tmp_path,
        'tasks = {path = "@", params = {prompt = "question"}}',
        "d.jsonl",
        b'{"id": "a", "question": "why?", "answer": "42"}',
    )
    assert task.params == {"prompt": "why?"}
    (task,) = load(
        tmp_path, 'tasks = {path = "@", params = "p"}', "d.jsonl", b'{"id": "a", "p": {"prompt": "why?"}}'
    )
    assert task.params == {"prompt": "why?"}


def test_a_table_with_the_keys_of_tasks_needs_no_mapping(tmp_path: Path) -> None:
    content = b"id,domain,timeout_s,prompt,tags\na_1,,60,one,x y\na_2,other,,two,\n"
    first, second = load(tmp_path, 'tasks = "@"', "d.csv", content)
    assert (first.domain, first.timeout_s, first.params, first.tags) == (
        "a",
        60,
        {"prompt": "one"},
        ("x", "y"),
    )
    assert (second.domain, second.timeout_s, second.tags) == ("other", 3600, ())
    (task,) = load(tmp_path, 'tasks = "@"', "d.json", b'[{"id": "a_1", "params": {"prompt": "one"}}]')
    assert task.params == {"prompt": "one"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.jsonl", b'{"id": "a"}', "d.jsonl:1: has no field 'task_id', which 'tasks.id' names; "),
        ("d.csv", b"task_id,prompt\na\n", "d.csv:2: has 1 cells, but there are 2 columns"),
        ("d.csv", b"", "d.csv:1: has no line with the names of its columns; write one"),
        ("d.csv", b'task_id,prompt\na,"b', "d.csv:2: not CSV (unexpected end of data)"),
        ("d.csv", b"task_id\n\xff", "d.csv: byte 8 is not UTF-8; save the file as UTF-8"),
        ("d.json", b"3", "d.json: must be a list of objects, or an object with one such list"),
        ("d.json", b"[3]", "d.json: task 1: must be a JSON object"),
        ("d.json", b"[", "d.json: not JSON (Input data was truncated); write a list of objects"),
        ("d.jsonl", b"[]", "d.jsonl:1: must be a JSON object, one a line"),
        ("d.jsonl.gz", b"{}", "d.jsonl.gz cannot be read (not a gzipped file"),
        ("d.parquet", b"PAR1", "d.parquet is a Parquet file; write it as .jsonl or .csv"),
        ("d.jsonl", b'{"task_id": null, "prompt": ""}', "d.jsonl:1: key 'id' is empty; "),
    ],
)
def test_a_wrong_dataset_is_refused_with_its_place(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    with pytest.raises(RequestError) as caught:
        load(tmp_path, 'tasks = {path = "@", id = "task_id"}', name, content)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_run_needs_what_its_tasks_need_together() -> None:
    joined = Needs(cpus=4, gpus=1).joined(Needs(cpus=2, memory_gb=8, nested_virtualization=True))
    assert joined == Needs(cpus=4, memory_gb=8, nested_virtualization=True, gpus=1)


def test_what_a_task_has_for_itself_survives_a_journal(tmp_path: Path) -> None:
    (tmp_path / "q").write_text("?")
    line = b'{"id": "a", "params": {"prompt": "x"}, "env": {"N": 3}, "files": ["q"], "needs": {"gpus": 2}}'
    (task,) = load(tmp_path, 'tasks = "@"', "d.jsonl", line)
    assert task.needs == Needs(gpus=2)
    own = own_of(task)
    assert (own.env, own.files) == ({"N": "3"}, ("q",))
    bench = CommandBenchmark.from_spec(load_benchmark(tmp_path / "b.toml").spec)
    assert bench.command(task, AttemptId("a.0")).env["N"] == "3"
    assert bench.task_bundle(task).digest == own.digest
    (tmp_path / "q").write_text("!")
    with pytest.raises(RequestError, match="have changed since the run was planned"):
        CommandBenchmark(bench.spec).task_bundle(task)
