"""A benchmark to begin with, made from a dataset: its file, an agent that answers nothing yet, its grader."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from evalfleet.errors import RequestError

from .datasets import kind_of, read_rows
from .tasks import MAX_PARAMS_BYTES, ROW_NUMBER

SCHEMA_FILE = "benchmark.schema.json"
SCHEMA_COMMENT = f"#:schema ./{SCHEMA_FILE}"
"""The first line of a file: editors with a TOML language server read the schema that it names."""

IDS = (
    "id",
    "task_id",
    "instance_id",
    "question_id",
    "problem_id",
    "qid",
    "uid",
    "uuid",
    "name",
    "idx",
    "index",
)
ANSWERS = (
    "answer", "answers", "target", "expected", "expected_output", "label", "gold", "reference", "solution",
    "canonical_solution", "output",
)  # fmt: skip
DOMAINS = ("domain", "category", "subject", "topic", "difficulty", "level", "type", "kind", "split")
MOST_DOMAINS = 100
SAMPLE = """\
{"id": "add_1", "question": "2 + 3", "answer": "5"}
{"id": "add_2", "question": "17 + 25", "answer": "42"}
{"id": "times_1", "question": "6 * 7", "answer": "42"}
"""

FILE = """\
{comment}
# Run it: evalfleet run {name}.toml --workers 4{test}
name = {name_text}
tasks = {tasks}
command = ["python3", "agent.py"]      # gets the params as JSON in $EVALFLEET_PARAMS
files = ["agent.py"]
timeout_s = 600
score = ["python3", "grade.py"]        # grades what the command left, once it has ended
score_files = {grader_files}
solution = ["python3", "grade.py", "--solve"]      # with --oracle, in place of the command
solution_files = {grader_files}
# secrets = ["OPENAI_API_KEY"]         # names of variables that the command gets from here
# setup = [["python3", "-m", "pip", "install", "-r", "requirements.txt"]]
"""

AGENT = '''\
"""The agent under test. Its answer is a file in $EVALFLEET_OUT; what it prints is its log."""
import json
import os

task = json.loads(os.environ["EVALFLEET_PARAMS"])  # {fields}
print("asked", task)
answer = ""  # call your agent here

with open(os.environ["EVALFLEET_OUT"] + "/answer.txt", "w") as file:
    file.write(answer)
'''

GRADER = '''\
"""Grades an answer by the dataset, which the agent does not get. With --solve it answers itself."""
{imports}import json
import os
import sys

rows = {rows}
row = {row}
expected = {expected}

if sys.argv[1:] == ["--solve"]:
    with open(os.environ["EVALFLEET_OUT"] + "/answer.txt", "w") as file:
        file.write(expected)
    sys.exit()

path = os.environ["EVALFLEET_GRADED_OUT"] + "/answer.txt"
answer = open(path).read().strip() if os.path.exists(path) else ""
print("expected", repr(expected), "and got", repr(answer))
score = {score}
with open(os.environ["EVALFLEET_OUT"] + "/result.json", "w") as file:
    json.dump({{"score": score}}, file)
'''


class Start(Struct, frozen=True):
    """What was made of a dataset: files by name, and how its fields were understood."""

    name: str
    files: dict[str, bytes]
    fields: dict[str, str]
    """What -> the field that was taken for it; empty if none was."""


def make_start(dataset: Path | None, name: str) -> Start:
    """The files of a new benchmark. RequestError if the dataset cannot be one."""
    file_name = dataset.name if dataset is not None else "tasks.jsonl"
    content = _content(dataset) if dataset is not None else SAMPLE.encode()
    default = file_name.partition(".")[0] if dataset is not None else "mybench"
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", name or default).strip("-._")[:60] or "mybench"
    rows = _rows(dataset) if dataset is not None else [json.loads(line) for line in SAMPLE.splitlines()]
    fields = guess(rows)
    params = [field for field in rows[0] if field not in fields.values()]
    too_large = max(len(json.dumps({field: row.get(field) for field in params})) for row in rows)
    if too_large > MAX_PARAMS_BYTES:
        raise RequestError(
            f"{dataset}: has a row of {too_large} bytes, more than {MAX_PARAMS_BYTES} that a task may have; "
            "put big data into files, and name them in the rows"
        )
    files = {
        f"{name}.toml": _file(name, file_name, fields, params),
        "agent.py": AGENT.format(fields=", ".join(params)),
        "grade.py": _grader(file_name, content, fields),
    }
    written = {path: text.encode() for path, text in files.items()}
    return Start(name, {**written, file_name: content}, fields)


def guess(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Which field is the id, the domain and the answer: by their names and by what is in them."""
    by_name = {field.lower(): field for field in reversed(rows[0])}
    common = {lower: field for lower, field in by_name.items() if all(field in row for row in rows)}

    def distinct(field: str) -> int:
        return len({json.dumps(row[field]) for row in rows})

    found = {"id": ROW_NUMBER, "domain": "", "answer": ""}
    for lower in IDS:
        if lower in common and distinct(common[lower]) == len(rows):
            found["id"] = common[lower]
            break
    found["answer"] = next((common[lower] for lower in ANSWERS if lower in common), "")
    for lower in DOMAINS:
        if lower in common and distinct(common[lower]) <= min(MOST_DOMAINS, max(len(rows) // 2, 1)):
            found["domain"] = common[lower]
            break
    return found


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = [row for _, row in read_rows(path, "the dataset")]
    if not rows:
        raise RequestError(f"{path}: has no rows; a benchmark needs a task at least")
    return rows


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as e:
        raise RequestError(f"{path}: cannot be read ({(e.strerror or str(e)).lower()})") from None


def _file(name: str, dataset: str, fields: dict[str, str], params: Sequence[str]) -> str:
    mapping = {"path": dataset, "id": fields["id"], "domain": fields["domain"], "params": list(params)}
    parts = (f"{key} = {json.dumps(value)}" for key, value in mapping.items() if value)
    return FILE.format(
        comment=SCHEMA_COMMENT,
        name=name,
        name_text=json.dumps(name),
        test=f"      Test it: evalfleet run {name}.toml --oracle" if fields["answer"] else "",
        tasks="{" + ", ".join(parts) + "}",
        grader_files=json.dumps(["grade.py", dataset]),
    )


def _grader(dataset: str, content: bytes, fields: dict[str, str]) -> str:
    kind, packed = kind_of(Path(dataset), "the dataset"), dataset.endswith(".gz")
    imports = ["gzip"] if packed else []
    file = f'{"gzip.open" if packed else "open"}({json.dumps(dataset)}, "rt", encoding="utf-8-sig")'
    if kind == ".jsonl":
        rows = f"[json.loads(line) for line in {file} if line.strip()]"
    elif kind == ".json":
        rows = _json_rows(f"json.load({file})", json.loads(gzip.decompress(content) if packed else content))
    else:
        tab = ', delimiter="\\t"' if kind == ".tsv" else ""
        rows, imports = f"list(csv.DictReader({file}{tab}))", ["csv", *imports]
    id, answer = json.dumps(fields["id"]), json.dumps(fields["answer"])
    if fields["id"] == ROW_NUMBER:
        row = 'rows[int(os.environ["EVALFLEET_TASK_ID"]) - 1]'
    else:
        row = f'next(row for row in rows if str(row[{id}]) == os.environ["EVALFLEET_TASK_ID"])'
    return GRADER.format(
        imports="".join(f"import {name}\n" for name in imports),
        rows=rows,
        row=row,
        expected=f"str(row[{answer}]).strip()" if fields["answer"] else '"anything"  # no field tells it',
        score="float(answer == expected)" if fields["answer"] else "float(bool(answer))  # how good is it?",
    )


def _json_rows(loaded: str, data: Any) -> str:
    """How the rows are found in a JSON file of that shape, as `read_rows` does."""
    if isinstance(data, list):
        return loaded
    lists = [key for key, value in data.items() if isinstance(value, list)]
    if lists:
        return f"{loaded}[{json.dumps(lists[0])}]"
    return f'[{{"id": id, **row}} for id, row in {loaded}.items()]'
