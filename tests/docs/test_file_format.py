"""docs/benchmarks-as-files.md says of every mistake what is said about it, and knows every key."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from evalfleet.benchmarks.benchmark_file import BenchmarkFile, load_benchmark
from evalfleet.benchmarks.containers import ContainerSettings
from evalfleet.benchmarks.results import DECLARABLE
from evalfleet.benchmarks.tasks import TaskLine, TaskSource
from evalfleet.errors import RequestError
from evalfleet.model import Needs
from tests.docs.pages import ROOT, matches

PAGE = (ROOT / "docs" / "benchmarks-as-files.md").read_text(encoding="utf-8")
GOOD = {"name": '"b"', "command": '["true"]', "tasks": '[{id = "a_1"}]'}
Fault = Callable[[Path], object]


def told(section: str) -> list[str]:
    """The messages in the second column of the table under a heading."""
    table = PAGE.split(f"\n### {section}\n")[1].split("\n#")[0]
    return re.findall(r"^\| .* \| `+ ?(.*?) ?`+ \|$", table, re.MULTILINE)


def keys(**changes: str) -> Fault:
    """A file with these keys; an empty one is left out."""

    def write(folder: Path) -> None:
        found = {**GOOD, **changes}
        text = "".join(f"{key} = {value}\n" for key, value in found.items() if value)
        (folder / "b.toml").write_text(text, encoding="utf-8")

    return write


def text(content: str) -> Fault:
    return lambda folder: (folder / "b.toml").write_text(content, encoding="utf-8")


def lines(content: str, command: str = '["true"]') -> Fault:
    def write(folder: Path) -> None:
        (folder / "t.jsonl").write_text(content, encoding="utf-8")
        keys(tasks='"t.jsonl"', command=command)(folder)

    return write


def listed(name: str, make: Fault) -> Fault:
    def write(folder: Path) -> None:
        make(folder)
        keys(files=f'["{name}"]')(folder)

    return write


def beside(name: str, **changes: str) -> Fault:
    """An empty file of that name, and a benchmark with these keys."""

    def write(folder: Path) -> None:
        (folder / name).touch()
        keys(**changes)(folder)

    return write


REFUSED: list[Fault] = [
    lambda folder: None,
    text("name = \n"),
    keys(tasks=""),
    keys(comand='["true"]'),
    keys(timeout_s='"60"'),
    keys(name='"my bench"'),
    keys(command="[]"),
    keys(command='["a\\u0000"]'),
    keys(stall_s="-1"),
    keys(timeout_s="0"),
    keys(on_timeout='"fail"'),
    keys(score_from='"exit"'),
    keys(isolation='"jail"'),
    keys(isolation='"container"'),
    keys(isolation='"user"', image='"tiny"'),
    keys(image='"my image"'),
    keys(container="{cpus = -1}"),
    beside("grade.py", score_files='["grade.py"]'),
    beside("solve.py", solution_files='["solve.py"]'),
    beside("grade.py", score='["true"]', score_files='["grade.py"]', files='["grade.py"]'),
    keys(env='{"a-b" = "c"}'),
    keys(env='{EVALFLEET_OUT = "c"}'),
    keys(env='{TOKEN = "c"}', secrets='["TOKEN"]'),
    keys(slots="0"),
    keys(secrets='["sk-123"]'),
    keys(settings='{"a b" = 1}'),
    keys(needs="{cpus = 0}"),
    keys(tasks="[]"),
    keys(tasks="[1]"),
    keys(tasks='"none.jsonl"'),
    beside("d.csv", tasks='{path = "d.csv"}'),
    lines('{"id": "a_1"\n'),
    lines("[1]\n"),
    lines('{"id": "a_1", "parms": {}}\n'),
    lines('{"domain": "a"}\n'),
    lines('{"id": "a_1"}\n{"id": "a_1"}\n'),
    lines('{"id": ""}\n'),
    lines('{"id": "a\\u0007"}\n'),
    lines('{"id": " a"}\n'),
    lines('{"id": "' + "a" * 201 + '"}\n'),
    lines('{"id": "a_1", "timeout_s": -1}\n'),
    keys(tasks='[{id = "a_1", params = {day = 2026-01-01}}]'),
    lines('{"id": "a_1", "params": {"x": "' + "x" * 100_001 + '"}}\n'),
    lines('{"id": "a_1"}\n', '["echo", "{params.n}"]'),
    lines('{"id": "a_1", "params": {"n": "\\u0000"}}\n', '["echo", "{params.n}"]'),
    listed("gone.py", lambda folder: None),
    listed(".", lambda folder: None),
    listed("../x", lambda folder: None),
    listed("link", lambda folder: os.symlink("/etc/passwd", folder / "link")),
    listed("pipe", lambda folder: os.mkfifo(folder / "pipe")),
    listed(".env", lambda folder: (folder / ".env").write_text("A=b\n")),
]
DOUBTED: list[Fault] = [
    keys(command='["echo", "{taskid}"]'),
    keys(command='["sh", "-c", "echo ${task_id}"]'),
    keys(setup='[["echo", "{task_id}"]]'),
    keys(env='{API_KEY = "x"}'),
    keys(command='["python3", "gone.py"]'),
    beside("run.sh", command='["sh", "run.sh"]'),
    beside("go", command='["go"]', files='["go"]'),
    beside("go", command='["./go"]', files='["go"]'),
]


def refusal(folder: Path) -> str:
    with pytest.raises(RequestError) as caught:
        load_benchmark(folder / "b.toml")
    return str(caught.value).replace(f"{folder}/", "")


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_the_table_of_refusals_tells_this_mistake(number: int, tmp_path: Path) -> None:
    REFUSED[number](tmp_path)
    said = refusal(tmp_path)
    assert any(matches(message, said) for message in told("Refused")), said


def test_the_table_of_refusals_tells_nothing_else(tmp_path: Path) -> None:
    said: list[str] = []
    for number, fault in enumerate(REFUSED):
        folder = tmp_path / str(number)
        folder.mkdir()
        fault(folder)
        said.append(refusal(folder))
    unknown = [message for message in told("Refused") if not any(matches(message, one) for one in said)]
    assert not unknown


@pytest.mark.parametrize("number", range(len(DOUBTED)))
def test_the_table_of_notes_tells_this_doubt(number: int, tmp_path: Path) -> None:
    DOUBTED[number](tmp_path)
    (said,) = load_benchmark(tmp_path / "b.toml").warnings
    said = said.replace(f"{tmp_path}/", "")
    assert any(matches(message, said) for message in told("Told, not refused")), said


def test_every_key_is_documented() -> None:
    for type_ in (BenchmarkFile, TaskLine, TaskSource, Needs, ContainerSettings):
        for field in msgspec.structs.fields(type_):
            assert re.search(rf"^\| [^|]*`{field.encode_name}`[^|]* \|", PAGE, re.MULTILINE), (
                field.encode_name
            )
    for cause in DECLARABLE:
        assert f'"{cause}"' in PAGE
