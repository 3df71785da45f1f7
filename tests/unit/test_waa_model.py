"""The model is checked before money is spent: by one call to an API, here a real server."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evalfleet.api import runs
from evalfleet.benchmarks.waa.benchmark import WaaBenchmark
from evalfleet.benchmarks.waa.settings import WaaSettings
from evalfleet.errors import RequestError
from evalfleet.model import Metering
from evalfleet.planning.request import RunRequest
from evalfleet.planning.workspace import Workspace
from evalfleet.ports import Check

KEY = "sk-good"


class Api(http.server.BaseHTTPRequestHandler):
    """Tells of gpt-4o alone, and answers as others, too: as Azure, which lists no deployments."""

    def do_GET(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {KEY}":
            self._answer(401, {"error": {"message": "Incorrect API key provided"}})
        else:
            known = self.path == "/v1/models/gpt-4o"
            self._answer(200 if known else 404, {"id": "gpt-4o"} if known else {"error": {}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/chat/completions" and self.headers.get("Authorization") != f"Bearer {KEY}":
            self._answer(401, {"error": {"message": "Incorrect API key provided"}})
        elif self.path == "/v1/chat/completions":
            self._complete(body)
        elif self.path != "/openai/deployments/mine/chat/completions?api-version=1":
            self._answer(404, {"error": {"code": "DeploymentNotFound"}})
        elif self.headers.get("api-key") == KEY:
            assert body["max_tokens"] == 1
            self._answer(200, {"choices": []})
        else:
            self._answer(429, {"error": {"code": "insufficient_quota"}})

    def _complete(self, body: dict[str, Any]) -> None:
        """As models that think do: they refuse what navi always sends."""
        if body["model"] == "thinker" and "max_tokens" in body:
            message = "Unsupported parameter: 'max_tokens' is not supported with this model."
            self._answer(400, {"error": {"message": message, "param": "max_tokens"}})
        elif body["model"] == "odd":
            self._answer(422, {"detail": "temperature must be 1"})
        elif body["model"] not in ("gpt-4o", "org/deployed", "thinker"):
            self._answer(404, {"error": {"code": "DeploymentNotFound"}})
        else:
            asked = (body.get("max_tokens"), body.get("max_completion_tokens"), body.get("temperature"))
            thinks = body["model"] == "thinker"
            assert asked in (((None, None, None), (None, 4096, 0.25)) if thinks else ((4096, None, 0.25),))
            self._answer(200, {"choices": []})

    def _answer(self, code: int, what: object) -> None:
        raw = json.dumps(what).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture(scope="module")
def origin() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Api)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def check(model: str, secrets: dict[str, str], metering: Metering | None = None, **settings: Any) -> Check:
    made = WaaBenchmark(WaaSettings(**settings), model=model)
    (found,) = asyncio.run(made.examine(secrets, metering))
    assert not [value for value in secrets.values() if value in found.found + found.remedy]
    return found


@pytest.mark.parametrize(
    ("model", "key", "verdict", "words"),
    [
        ("gpt-4o", KEY, "good", "gpt-4o answers"),
        ("org/deployed", KEY, "good", "answers"),
        ("gpt-5o", KEY, "bad", "has no model 'gpt-5o'"),
        ("thinker", KEY, "bad", "(answer 400): Unsupported parameter: 'max_tokens' is not supported"),
        ("odd", KEY, "bad", """(answer 422): {"detail": "temperature must be 1"}"""),
        ("gpt-4o", "sk-wrong", "bad", "refuses OPENAI_API_KEY (answer 401)"),
        ("", KEY, "bad", "no model is named"),
    ],
)
def test_an_api_like_openais(origin: str, model: str, key: str, verdict: str, words: str) -> None:
    found = check(model, {"OPENAI_API_KEY": key}, base_url=f"{origin}/v1", temperature=0.25)
    assert found.verdict == verdict
    assert words in found.found


def test_a_model_that_refuses_max_tokens_can_be_run_by_way_of_a_meter_that_renames_it(origin: str) -> None:
    told: dict[str, Any] = {"base_url": f"{origin}/v1", "temperature": 0.25}
    found = check("thinker", {"OPENAI_API_KEY": KEY}, **told)
    assert found.remedy.startswith("set max_completion_tokens = true under [model]")
    found = check("thinker", {"OPENAI_API_KEY": KEY}, Metering((), renames_max_tokens=True), **told)
    assert (found.verdict, found.found) == ("good", f"thinker answers at {origin}/v1")


@pytest.mark.parametrize(("model", "verdict"), [("thinker", "good"), ("gpt-5o", "bad")])
def test_another_agents_model_is_asked_a_question_where_the_api_does_not_tell_of_it(
    origin: str, model: str, verdict: str
) -> None:
    found = check(model, {"OPENAI_API_KEY": KEY}, base_url=f"{origin}/v1", agent="mine")
    assert found.verdict == verdict


@pytest.mark.parametrize(
    ("deployment", "key", "verdict", "words"),
    [
        ("mine", KEY, "good", "answers at AZURE_ENDPOINT"),
        ("other", KEY, "bad", "has no model"),
        ("mine", "sk-poor", "bad", "out of quota"),
    ],
)
def test_azures(origin: str, deployment: str, key: str, verdict: str, words: str) -> None:
    endpoint = f"{origin}/openai/deployments/{deployment}/chat/completions?api-version=1"
    found = check("gpt-4o", {"AZURE_API_KEY": key, "AZURE_ENDPOINT": endpoint}, api="azure")
    assert found.verdict == verdict
    assert words in found.found


def test_no_answer_is_a_note_and_no_refusal() -> None:
    found = check("gpt-4o", {"OPENAI_API_KEY": KEY}, base_url="http://127.0.0.1:1/v1")
    assert (found.verdict, "could not be checked" in found.found) == ("warn", True)
    assert check("x", {}, api="none").verdict == "warn"


def test_a_run_with_a_wrong_key_is_refused_and_nothing_is_written(
    origin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_all.json").write_text('{"notepad": ["n1"]}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVALFLEET_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OPENAI_API_KEY", "sk-wrong")
    settings = {"waa": ".", "golden": "/g", "base_url": f"{origin}/v1"}
    request = RunRequest(benchmark="waa", model="gpt-4o", settings=settings, repeat=2)
    resolved = runs.resolve_request(Workspace.here(), request, "dry run")
    with pytest.raises(RequestError, match="refuses OPENAI_API_KEY") as refusal:
        asyncio.run(runs.vet(resolved))
    assert refusal.value.exit_code == 2
    assert not (tmp_path / "home").exists()
