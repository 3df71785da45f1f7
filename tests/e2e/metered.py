"""A benchmark whose agent calls models through the machine's meter, and a stand-in for the models' APIs."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from evalfleet.channels.samples import read_newest
from evalfleet.model import MachineId
from tests.desk import SRC
from tests.e2e.harness import Fleet
from tests.forked import Request, fork
from tests.waiting import until

ROOT = Path(__file__).parents[2]
PRICES = "[model.prices]\nany = {in = 2, cached = 1, cache_write = 3, out = 8}\n"
AGENT = """
import json, os, sys, time
sys.modules["ssl"] = None  # to load it takes as long as an agent takes for all else
import http.client
del sys.modules["ssl"]

def asked(path, **body):
    _, _, host, way = os.environ["OPENAI_BASE_URL"].split("/", 3)
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    connection = http.client.HTTPConnection(host)
    connection.request("POST", "/" + way + path, json.dumps(body), headers)
    return connection.getresponse()

def call(model="any", path="/chat/completions", asks="say words"):
    answer = asked(path, model=model, messages=[{"role": "user", "content": asks}])
    answer.read()  # who hangs up before the end does not learn what the call used, nor does the meter
    return answer.status

def stream(model):
    options = {"include_usage": True}
    answer = asked("/chat/completions", model=model, messages=[], stream=True, stream_options=options)
    assert answer.status == 200, answer.status
    lines = [answer.readline()]
    open("FOLDER/marks/streams.%s.%s" % (attempt, os.getpid()), "w").close()
    return lines + answer.readlines()

def score(value):
    with open(os.environ["EVALFLEET_OUT"] + "/result.json", "w") as file:
        json.dump({"score": value}, file)

def gate(name):
    while not os.path.exists("FOLDER/gates/" + name):
        time.sleep(0.03)

attempt = int(os.environ["EVALFLEET_ATTEMPT"])
open("FOLDER/marks/%s.%s.%s" % (os.environ["EVALFLEET_TASK_ID"], attempt, os.getpid()), "w").close()
exec(sys.argv[1])
"""


class Served:
    """The stand-in for the models' APIs, as a process."""

    def __init__(self, pid: int, url: str, key: str) -> None:
        self.pid, self.url, self.key = pid, url, key

    def sums(self) -> dict[str, Any]:
        with urlopen(f"{self.url}/served") as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def usd(self) -> float:
        tokens = self.sums()["tokens"]
        cached, written = tokens.get("cached", 0), tokens.get("cache_write", 0)
        plain = tokens.get("in", 0) - cached - written
        return float(plain * 2 + cached * 1 + written * 3 + tokens.get("out", 0) * 8) / 1e6


@contextmanager
def serving_models(folder: Path) -> Iterator[Served]:
    """Its key is in no environment: other tests on this computer may read all environments."""
    key = f"sk-real-key-{os.urandom(8).hex()}"
    (folder / "key").write_text(key)
    environ = {**os.environ, "PYTHONPATH": str(SRC), "MODELS_KEY": str(folder / "key")}
    request = Request((), str(ROOT), environ, module="standins.models")
    with (folder / "models.out").open("wb") as out, open(os.devnull, "rb") as nothing:
        process = fork(request, (nothing, out, out))
        try:
            address = re.compile(r"^export OPENAI_BASE_URL=(.*)/v1$", re.MULTILINE)
            url = until(lambda: address.search(Path(out.name).read_text()), "an address")
            yield Served(process.pid, url[1], key)
        finally:
            process.kill()
            process.wait()


def metered(
    fleet: Fleet, models: Served, tasks: list[dict[str, Any]], more: str = PRICES, **keys: Any
) -> None:
    fleet.environ["OPENAI_API_KEY"] = models.key
    fleet.forks = True
    fleet.config(f'[model]\nkey = "OPENAI_API_KEY"\nupstream = "{models.url}"\n{more}')
    command = [sys.executable, "agent.py", "{params.do}"]
    keys = {"secrets": ["OPENAI_API_KEY"], "command": command, "files": ["agent.py"], **keys}
    fleet.bench(tasks, **keys)
    (fleet.folder / "agent.py").write_text(AGENT.replace("FOLDER", str(fleet.folder)))
    for name in ("marks", "gates"):
        (fleet.folder / name).chmod(0o777)


def calls_of(fleet: Fleet, attempt: str) -> list[dict[str, Any]]:
    path = fleet.home / f"r/{attempt.rpartition('.')[0]}/{attempt}/calls.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if "status" in line]


def models_usd(fleet: Fleet) -> Any:
    results = fleet.results()
    assert results["status"] == "done", (results["status"], results["cost"], fleet.state().status)
    return results["cost"]["models_usd"]


def written(fleet: Fleet, attempt: str) -> bytes:
    """The list of an attempt's calls while it runs."""
    found = (fleet.home / ".machines").glob(f"*/jobs/{attempt}/meter/calls.jsonl")
    return b"".join(path.read_bytes() for path in found)


def noticed(fleet: Fleet, machine: MachineId, attempt: str) -> int | None:
    """How much an attempt has written, its calls included, as far as the controller was told."""
    newest = read_newest(fleet.home, machine)
    return newest.jobs[attempt].written if newest is not None and attempt in newest.jobs else None


def meters(fleet: Fleet) -> list[int]:
    return [int(path.read_text().split()[0]) for path in (fleet.home / ".machines").glob("*/meter/pid")]
