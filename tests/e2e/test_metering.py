"""Model calls of attempts go through the machine's meter: counted, priced, limited, and without the key."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from evalfleet.channels.samples import read_newest
from evalfleet.events import AttemptEnded, AttemptStarted, BudgetPassed
from evalfleet.model import AttemptId, Broken, MachineId
from standins.podman import LIMITS, lacking, podman_with
from tests.e2e.harness import Fleet, processes, task
from tests.planted import holding, processes_holding
from tests.waiting import until

KEY = "sk-some-key"
PRICES = "[model.prices]\nany = {in = 2, cached = 1, cache_write = 3, out = 8}\n"
AGENT = """
import json, os, sys, time, urllib.request

def call(model="any", path="/chat/completions"):
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "say words"}]}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, body, headers)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
            answer.read()  # who hangs up before the end does not learn what the call used, nor does the meter
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code

def stream(model):
    body = {"model": model, "messages": [], "stream": True, "stream_options": {"include_usage": True}}
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
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


@pytest.fixture
def models(tmp_path: Path) -> Iterator[Served]:
    """Its key is in no environment: other tests on this computer may read all environments."""
    key = f"sk-real-key-{os.urandom(8).hex()}"
    (tmp_path / "key").write_text(key)
    command = (sys.executable, "-m", "standins.models")
    environ = {**os.environ, "MODELS_KEY": str(tmp_path / "key")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip().partition("=")[2].removesuffix("/v1")
            yield Served(process.pid, url, key)
        finally:
            process.kill()


def metered(
    fleet: Fleet, models: Served, tasks: list[dict[str, Any]], more: str = PRICES, **keys: Any
) -> None:
    fleet.environ["OPENAI_API_KEY"] = models.key
    fleet.config(f'[model]\nkey = "OPENAI_API_KEY"\nupstream = "{models.url}"\n{more}')
    keys = {"secrets": ["OPENAI_API_KEY"], **keys}
    command = [sys.executable, "agent.py", "{params.do}"]
    fleet.bench(tasks, command=command, files=["agent.py"], **keys)
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


def test_calls_are_counted_priced_and_kept_and_the_key_is_nowhere(fleet: Fleet, models: Served) -> None:
    show = "print(os.environ); gate('go'); "
    metered(
        fleet,
        models,
        [task("a", f"{show}[call() for _ in range(3)]; score(1)"), task("b", "call(); score(0)")],
    )
    run = fleet.start_run("--json", "--workers", "2")
    fleet.started("a.0")
    (meter, *_) = until(lambda: meters(fleet))
    alive = fleet.alive()
    having = {pid for pid, argv, environ in processes() if pid in alive and models.key in argv + environ}
    assert meter in alive
    assert having == {run.pid}
    assert not holding(fleet.home, models.key)
    fleet.open_gate("go")
    assert run.wait().code == 0
    assert models.key not in fleet("logs", "r", "a").out
    assert [call["status"] for call in calls_of(fleet, "a.0")] == [200, 200, 200]
    assert len(calls_of(fleet, "b.0")) == 1
    results = fleet.results()
    assert results["cost"]["models_usd"] == pytest.approx(models.usd(), abs=1e-6)
    assert models.sums()["calls"] == 4
    assert not holding(fleet.home, models.key)
    fleet.settled()


@pytest.mark.skipif(os.geteuid() != 0, reason="NO TEST OF MEMORY: only root may read that of others")
def test_the_key_is_in_no_memory_but_the_meters(fleet: Fleet, models: Served) -> None:
    """Also after another controller has told its orders, through another supervisor."""
    metered(fleet, models, [task("a", "call(); gate('go'); call(); score(1)")])
    (fleet.folder / ".env").write_text(f"OPENAI_API_KEY={fleet.environ.pop('OPENAI_API_KEY')}\n")
    (fleet.folder / ".env").chmod(0o600)
    run = fleet.start_run()
    fleet.started("a.0")
    until(lambda: models.sums()["calls"] == 1)
    (meter,) = meters(fleet)
    outside = {os.getpid(), models.pid}
    found = processes_holding(models.key)
    assert found.keys() - outside == {run.pid, meter}, found
    run.kill()
    ((_, supervisor),) = fleet.supervisors().items()
    os.kill(supervisor, signal.SIGKILL)
    again = fleet.start("resume", "r")
    until(lambda: supervisor not in (alive := fleet.supervisors().values()) and alive)
    found = processes_holding(models.key)
    assert found.keys() - outside == {again.pid, meter}, found
    fleet.open_gate("go")
    assert again.wait().code == 0
    assert not holding(fleet.home, models.key)
    assert models_usd(fleet) == pytest.approx(models.usd(), abs=1e-6)


def test_the_money_of_an_attempt_that_broke_is_counted(fleet: Fleet, models: Served) -> None:
    metered(fleet, models, [task("a", "call(); call(); score(1) if attempt else sys.exit(3)")])
    assert fleet.run().code == 0
    ended = fleet.recorded(AttemptEnded, 2)
    assert [each.metered.calls for each in ended if each.metered] == [2, 2]
    assert isinstance(ended[0].outcome, Broken)
    assert models_usd(fleet) == pytest.approx(models.usd(), abs=1e-6)


def test_the_money_of_an_attempt_that_was_cancelled_is_counted(fleet: Fleet, models: Served) -> None:
    metered(fleet, models, [task("a", "call(); call(); gate('never')"), task("b", "call(); score(1)")])
    run = fleet.start_run("--workers", "2")
    fleet.started("a.0")
    until(lambda: models.sums()["calls"] == 3)
    machine = fleet.state().attempts[AttemptId("a.0")].machine
    # its log is empty: that it asks its model is all that tells that it works
    until(lambda: noticed(fleet, machine, "a.0") == len(written(fleet, "a.0")) > 0, "a beat after its calls")
    assert fleet("cancel", "r").code == 0
    assert run.wait().code == 130
    results = fleet.results()
    assert results["cost"]["models_usd"] == pytest.approx(models.usd(), abs=1e-6)
    assert results["models"]["by_cause"]["cancelled"] == pytest.approx(models.usd() * 2 / 3, abs=1e-6)


def test_a_meter_that_is_killed_breaks_its_attempts_and_the_next_ones_get_another(
    fleet: Fleet, models: Served
) -> None:
    metered(fleet, models, [task("a", "call(); attempt or gate('never'); call(); score(1)")])
    run = fleet.start_run()
    fleet.started("a.0")
    until(lambda: b'"status":200' in written(fleet, "a.0"))
    (meter,) = meters(fleet)
    os.kill(meter, signal.SIGKILL)
    assert run.wait().code == 0
    first, second = fleet.recorded(AttemptEnded, 2)
    assert isinstance(first.outcome, Broken)
    assert (first.outcome.cause, first.outcome.detail) == (
        "internal",
        "the meter of its model calls was ended",
    )
    assert first.metered is not None
    assert second.metered is not None
    assert (first.metered.calls, second.metered.calls) == (1, 2)
    assert first.metered.usd + second.metered.usd == pytest.approx(models.usd(), abs=1e-6)
    fleet.settled()


def test_the_meter_outlives_supervisor_and_controller_and_is_found_again(
    fleet: Fleet, models: Served
) -> None:
    metered(fleet, models, [task("a", "call(); gate('go'); call(); score(1)"), task("b", "call(); score(1)")])
    run = fleet.start_run()
    fleet.started("a.0")
    until(lambda: models.sums()["calls"] == 1)
    run.kill()
    ((_, supervisor),) = fleet.supervisors().items()
    os.kill(supervisor, signal.SIGKILL)
    before = meters(fleet)
    fleet.open_gate("go")
    until(lambda: models.sums()["calls"] == 2)
    assert fleet("resume", "r").code == 0
    assert len(fleet.recorded(AttemptStarted, 2)) == 2
    ended = fleet.recorded(AttemptEnded, 2)
    assert sorted(each.metered.calls for each in ended if each.metered) == [1, 2]
    assert models_usd(fleet) == pytest.approx(models.usd(), abs=1e-6)
    assert len(before) == 1
    fleet.settled()


def test_a_stream_goes_on_though_controller_and_supervisor_are_killed_in_its_midst(
    fleet: Fleet, models: Served
) -> None:
    metered(fleet, models, [task("a", "lines = stream('any+hold'); score(int(b'DONE' in b''.join(lines)))")])
    run = fleet.start_run()
    fleet.started("streams.0")
    run.kill()
    ((_, supervisor),) = fleet.supervisors().items()
    os.kill(supervisor, signal.SIGKILL)
    assert models.sums()["calls"] == 0, "it is not over"
    urlopen(f"{models.url}/go").close()
    until(lambda: models.sums()["calls"] == 1)
    assert fleet("resume", "r").code == 0
    assert [task["score"] for task in fleet.results()["tasks"]] == [1.0]
    (ended,) = fleet.recorded(AttemptEnded)
    assert ended.metered is not None
    assert dict(ended.metered.tokens) == models.sums()["tokens"]
    fleet.settled()


def test_an_attempt_that_ends_while_it_waits_for_more_money_is_tried_again_and_is_no_zero(
    fleet: Fleet, models: Served
) -> None:
    """Its controller is dead: nobody can grant any."""
    impatient = (
        "import socket\ncall(); gate('go')\n"
        "attempt or socket.setdefaulttimeout(1)\n"
        "try:\n    call(); call(); call()\n"
        "except OSError:\n    pass\n"
        "score(attempt); open('FOLDER/marks/done', 'w').close()"
    )
    metered(fleet, models, [task("a", impatient.replace("FOLDER", str(fleet.folder)))])
    run = fleet.start_run("--budget", "1", "--task-budget", "0.0009")
    fleet.started("a.0")
    until(lambda: models.sums()["calls"] == 1)
    run.kill()
    fleet.open_gate("go")
    until((fleet.folder / "marks/done").exists)
    assert fleet("resume", "r").code == 0
    first, second = fleet.recorded(AttemptEnded, 2)
    assert isinstance(first.outcome, Broken)
    assert "waited for more money" in first.outcome.detail
    assert second.metered is not None
    assert (fleet.task("a")["score"], second.metered.calls) == (1, 4)
    assert models_usd(fleet) == pytest.approx(models.usd(), abs=1e-6)


def test_the_same_error_again_and_again_ends_the_attempt(fleet: Fleet, models: Served) -> None:
    metered(fleet, models, [task("a", "while attempt < 1: call('any+500')\ncall(); score(1)")])
    assert fleet.run().code == 0
    first, _ = fleet.recorded(AttemptEnded, 2)
    assert isinstance(first.outcome, Broken)
    assert first.outcome.cause == "model"
    assert "fail with 500" in first.outcome.detail
    assert fleet.results()["causes"] == {"model": 1}


def test_the_vendors_own_clients_find_the_meter(fleet: Fleet, models: Served) -> None:
    ask = "[{'role': 'user', 'content': 'say words'}]"
    clients = (
        "import anthropic, openai\n"
        "from google import genai\n"
        f"openai.OpenAI().chat.completions.create(model='any', messages={ask})\n"
        f"anthropic.Anthropic().messages.create(model='any', max_tokens=9, messages={ask})\n"
        "client = genai.Client()\n"
        "client.models.generate_content(model='any', contents='say words')\n"
        f"openai.AzureOpenAI(api_version='2024-10-21').chat.completions.create(model='any', messages={ask})\n"
        "score(1)"
    )
    metered(fleet, models, [task("a", clients)])
    done = fleet.run("--attempts", "1")
    assert done.code == 0, fleet("logs", "r", "a").out
    assert len(calls_of(fleet, "a.0")) == 4
    assert models_usd(fleet) == pytest.approx(models.usd(), abs=1e-6)


DOCKER = """#!/bin/sh
case "$1 $*" in
  network*Subnet*) echo 127.0.0.0/8 ;;
  run*) while [ "$1" != tiny ]; do shift; done; shift; exec "$@" ;;
esac
"""


def test_the_gateway_of_dockers_own_bridge_is_known_though_docker_does_not_tell_it(
    fleet: Fleet, models: Served
) -> None:
    """As the daemon does from its installation to its next start. This one has no network of its own."""
    (fleet.folder / "bin").mkdir()
    (fleet.folder / "bin/docker").write_text(DOCKER)
    (fleet.folder / "bin/docker").chmod(0o755)
    fleet.environ["PATH"] = f"{fleet.folder}/bin:{fleet.environ['PATH']}"
    image: dict[str, Any] = {"image": "tiny", "container": {"engine": "docker"}}
    metered(fleet, models, [task("a", "call(); score(1)")], **image)
    assert fleet.run("--attempts", "1").code == 0, fleet("logs", "r", "a").out
    assert len(calls_of(fleet, "a.0")) == 1


BASH_AGENT = r"""
url=${OPENAI_BASE_URL#http://}; place=${url%%/*}; body='{"model": "any", "messages": []}'
exec 3<>"/dev/tcp/${place%:*}/${place#*:}" || exit 1
printf '%s\r\n' "POST /${url#*/}/chat/completions HTTP/1.1" "Host: $place" "Connection: close" \
  "Authorization: Bearer $OPENAI_API_KEY" "Content-Length: ${#body}" "" >&3
printf %s "$body" >&3; read -r status <&3; cat <&3 >/dev/null; echo "$place $status"
[ "${status:9:3}" = 200 ]
"""
PROGRAMS = ("sh", "bash", "cat")
CANNOT = lacking(PROGRAMS)


@pytest.mark.skipif(CANNOT is not None, reason=f"NO TEST WITH A REAL CONTAINER ENGINE: {CANNOT}")
def test_a_container_reaches_the_meter_at_the_gateway_of_its_network(fleet: Fleet, models: Served) -> None:
    with podman_with(PROGRAMS) as podman:
        fleet.environ["PATH"] = f"{podman.folder}/bin:{fleet.environ['PATH']}"
        fleet.environ["OPENAI_API_KEY"] = models.key
        fleet.config(f'[model]\nkey = "OPENAI_API_KEY"\nupstream = "{models.url}"\n{PRICES}')
        fleet.bench(
            [{"id": "a", "params": {"do": BASH_AGENT}}],
            command=["bash", "-c", "{params.do}"],
            score_from="exit_code",
            secrets=["OPENAI_API_KEY"],
            image="localhost/tiny",
            container={"engine": "podman", "args": [*LIMITS, *podman.grouped]},
        )
        done = fleet.run("--attempts", "1", "--budget", "1")
        said = fleet("logs", "r", "a").out
        assert (done.code, fleet.task("a")["score"]) == (0, 1), (done, said)
        assert not said.startswith("127.")
        assert len(calls_of(fleet, "a.0")) == 1
        assert models_usd(fleet) == pytest.approx(models.usd(), abs=1e-6)


def test_the_budget_bounds_models_and_what_was_refused_is_unrun(fleet: Fleet, models: Served) -> None:
    """Each task needs 5 calls of $0.000796, and the budget pays for 12."""
    many = [task(f"a_{n}", "[call() for _ in range(5)]; score(1)") for n in range(1, 6)]
    metered(fleet, models, many)
    done = fleet.run("--budget", "0.0096")
    assert done.code == 3, done
    results = fleet.results()
    assert (results["scored"], results["broken"], results["unrun"]) == (2, 0, 3)
    assert models.usd() <= 0.0096 + 0.0008
    assert results["cost"]["models_usd"] == pytest.approx(models.usd(), abs=1e-6)
    assert [event.percent for event in fleet.recorded(BudgetPassed)] == [80]
    assert "is used up" in results["stop"]["detail"]
    assert fleet("resume", "r", "--budget", "1").code == 0
    assert fleet.results()["scored"] == 5
    assert models_usd(fleet) == pytest.approx(models.usd(), abs=1e-6)


def test_half_of_the_budget_and_four_fifths_are_told(fleet: Fleet, models: Served) -> None:
    """A call costs $0.000796: 29, 59 and 88 percent."""
    metered(fleet, models, [task(f"a_{n}", "call(); score(1)") for n in (1, 2, 3)])
    done = fleet.run("--budget", "0.0027", "--workers", "1")
    assert done.code == 0, done
    assert [event.percent for event in fleet.recorded(BudgetPassed)] == [50, 80]
    assert "50% of the budget of $0.00" in done.out
    assert "80% of the budget of $0.00" in done.out


def test_a_call_of_which_nobody_tells_uses_up_the_budget_by_what_it_can_have_cost(
    fleet: Fleet, models: Served
) -> None:
    """A call can put in 90 tokens or so, and put out 100: less than $0.0012, and the budget pays ten."""
    metered(
        fleet,
        models,
        [task(f"a_{n}", "[call('any+silent') for _ in range(5)]; score(1)") for n in range(1, 6)],
        'max_output_tokens = 100\n[model.prices]\n"any+silent" = {in = 2, cache_write = 3, out = 8}\n',
    )
    assert fleet.run("--budget", "0.0105").code == 3
    told = fleet.results()["models"]
    assert 5 <= told["unknown_calls"] == told["calls"] == models.sums()["requests"] <= 11
    assert (told["usd"], told["by_model"]["any+silent"]["unknown_usd"]) == (0, told["unknown_usd"])
    assert 0.0105 - 0.0012 <= told["unknown_usd"] <= 0.0105 + 0.0012
    line = calls_of(fleet, "a_1.0")[0]
    assert "usd" not in line
    assert 100 * 8e-6 < line["at_most_usd"] < 0.0012
    assert "(estimated)" in fleet("report", "r").out


def test_the_budget_bounds_what_a_score_command_asks_of_models(fleet: Fleet, models: Served) -> None:
    code = "[call() for _ in range(50)]; score(1)"
    metered(
        fleet,
        models,
        [task("a", "call(); call()")],
        score=[sys.executable, "agent.py", code],
    )
    assert fleet.run("--budget", "0.0096").code == 3
    assert models.sums()["calls"] == 13
    results = fleet.results()
    assert (results["scored"], results["unrun"]) == (0, 1)
    assert results["cost"]["models_usd"] == pytest.approx(models.usd(), abs=1e-6)
    assert fleet("resume", "r", "--budget", "1").code == 0
    assert models_usd(fleet) == pytest.approx(models.usd(), abs=1e-6)


def test_an_owners_runs_of_a_month_stay_within_their_cap(fleet: Fleet, models: Served) -> None:
    """Three calls cost $0.0024; the cap of a month pays four."""
    tasks = [task("a", "[call() for _ in range(3)]; score(1)")]
    metered(fleet, models, tasks, PRICES + '[owners]\nann = 0.0032\n"*" = 100\n')
    fleet.environ["EVALFLEET_OWNER"] = "ann"
    assert fleet.run("--name", "first").code == 0
    second = fleet.run("--name", "second")
    assert second.code == 3, second
    assert "$0.00 are left of ann's $0.0032" in second.out + second.err
    assert models.usd() <= 0.0032 + 0.0008
    fleet.run("--name", "third").refused("ann may spend this month are spent")
    fleet("resume", "second", "--budget", "1").refused("are left of ann's $0.0032")
    assert fleet.run("--name", "other", env={"EVALFLEET_OWNER": "bob"}).code == 0


def test_runs_that_are_started_at_once_do_not_share_what_is_left_of_their_owners_month(
    fleet: Fleet,
) -> None:
    fleet.bench([task("a", "gate go; score 1")])
    fleet.config("[owners]\nann = 5\n")
    fleet.environ["EVALFLEET_OWNER"] = "ann"
    runs = {
        name: fleet.start("run", "./b.toml", "--name", name, "--budget", "2")
        for name in ("r1", "r2", "r3", "r4")
    }
    until(lambda: all(fleet.records(name) or not run.lives for name, run in runs.items()))
    planned = [name for name in runs if fleet.records(name)]
    budgets = [fleet.state(name).limits.budget_usd or 0.0 for name in planned]
    assert 2 <= len(budgets) <= 3
    assert sum(budgets) <= 5, "each alone could have had its 2 dollars"
    for name in runs.keys() - planned:
        done = runs[name].wait()
        assert (done.code, "evalfleet: [owners]: " in done.err) == (2, True), done
    fleet.open_gate("go")
    assert [runs[name].wait().code for name in planned] == [0] * len(planned)


def test_tokens_are_bounded(fleet: Fleet, models: Served) -> None:
    metered(fleet, models, [task(f"a_{n}", "[call() for _ in range(5)]; score(1)") for n in (1, 2, 3)])
    assert fleet.run("--max-tokens", "1000").code == 3
    assert fleet.results()["scored"] == 1
    assert "--max-tokens" in fleet.results()["stop"]["detail"]


def test_a_model_without_a_price_is_refused_where_there_is_a_budget(fleet: Fleet, models: Served) -> None:
    metered(fleet, models, [task("a", "call('other'); score(1)")])
    assert fleet.run("--budget", "1").code == 3
    assert "no price is known for the model 'other'" in fleet.results()["stop"]["detail"]
    assert models.sums()["calls"] == 0


def test_the_report_tells_what_retries_and_models_cost(fleet: Fleet, models: Served) -> None:
    metered(fleet, models, [task("a", "call(); score(1) if attempt else sys.exit(3)")])
    assert fleet.run().code == 0
    told = fleet.results()["models"]
    half = pytest.approx(models.usd() / 2, abs=1e-6)
    assert told["metered"]
    assert (told["calls"], told["unknown_calls"], told["retries_usd"]) == (2, 0, half)
    assert told["by_cause"] == {"result": half, "scored": half}
    assert told["by_model"]["any"]["calls"] == 2
    assert fleet.task("a")["model_usd"] == pytest.approx(models.usd(), abs=1e-6)
    report = fleet("report", "r").out
    assert "2 model calls were metered" in report
    assert "went to attempts that did not decide" in report
    assert "Attempts were not isolated: an agent that is root could have read the key" in report


def test_an_agent_that_goes_round_the_meter_is_noticed(fleet: Fleet, models: Served) -> None:
    went_round = (
        "json.dump({'score': 1, 'cost_usd': 0.5}, open(os.environ['EVALFLEET_OUT'] + '/result.json', 'w'))"
    )
    metered(fleet, models, [task("a", went_round), task("b", "call(); score(1)")])
    assert fleet.run().code == 0
    assert fleet.results()["models"]["unseen"] == ["a.0"]
    assert "1 attempts tell of calls that the meter did not see" in fleet("report", "r").out


def test_a_budget_below_one_call_is_refused_before_anything_is_spent(fleet: Fleet, models: Served) -> None:
    """100 tokens in and 10 out cost $0.00028, and a call of this agent $0.0008."""
    metered(fleet, models, [task("a", "[call() for _ in range(20)]; score(1)")])
    fleet.run("--budget", "0.0002").refused("--budget 0.0002 pays no call of a model", "$0.00028")
    fleet.run("--budget", "1", "--task-budget", "0.0002").refused("--task-budget 0.0002 pays no call")
    fleet.run("--budget", "1", "--task-budget", "2").refused("--task-budget 2 is more than --budget 1")
    fleet.run("--max-tokens", "50").refused("--max-tokens 50 is less than one call", "110 or more")
    assert models.sums()["requests"] == 0
    assert not (fleet.home / "fleet.db").exists(), "no run was begun"
    assert fleet.run("--budget", "0.01").code == 3, "it pays 13 calls of 20"
    spent = models.usd()
    fleet("resume", "r", "--budget", "0.01").refused("has cost $0.01 already", "give more")
    fleet("resume", "r", "--budget", str(spent + 0.0001)).refused(
        "the rest does not pay one call of a model ($0.0008)"
    )
    assert fleet("resume", "r", "--budget", "1").code == 0
    fleet.run("--budget", "0.0005", "--name", "s").refused("one has cost $0.0008 on average in earlier runs")
    assert models.sums()["calls"] == 13 + 20


def test_a_run_that_is_not_metered_says_so(fleet: Fleet) -> None:
    fleet.bench([task("a")])
    done = fleet.run("--budget", "5")
    assert done.code == 0
    assert "models are not metered" in done.err + done.out
    assert "Models not metered." in fleet("report", "r").out


@pytest.mark.parametrize(
    ("config", "words", "told"),
    [
        ('[model]\nkey = "sk-abc/def"', (), "never its value"),
        ('[model]\nkey = "K"\nupstream = "http://models.example"', (), "begins with https://"),
        ('[model]\nupstream = "https://models.example"', (), "needs 'key'"),
        ('[model]\nkey = "OPENAI_API_KEY"\nrpm = 0', (), "above 0"),
        ('[model]\nkey = "OPENAI_API_KEY"\nsame_errors = 0', (), "above 0"),
        ('[model]\nkey = "OPENAI_API_KEY"\n[model.prices]\nany = {in = 0}', (), "dollars above 0"),
        ('[model]\nkey = "OPENAI_API_KEY"\n[model.prices]\nany = {out = 1}', (), "what input costs"),
        ('[model]\nkey = "OPENAI_API_KEY"\n[model.prices]\nany = {inn = 1}', (), "did you mean 'in'"),
        ('[model]\nkey = "OPENAI_API_KEY"\n[model.prices]\nany = {in = 1}', (), "what output costs"),
        ('[model]\nkey = "OPENAI_API_KEY"\n[model.prices]\nany = {in = -1, out = 1}', (), "dollars above 0"),
        ('[model]\nkey = "OTHER_KEY"', (), "the key of no API that is known"),
        ('[model]\nkey = "OPENAI_API_KEY"', ("--task-budget", "1"), "give --budget"),
        (
            '[model]\nkey = "OPENAI_API_KEY"\n[model.prices]\nany = {in = 1, out = 1}',
            ("--budget", "1", "--model", "anything"),
            "--model anything costs",
        ),
        ("[owners]\nann = 0", (), "write dollars a month, above 0"),
        ("[owners]\nann = 5", (), "[owners] does not name"),
        ("", ("--max-tokens", "5"), "nobody has said which secret"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(
    fleet: Fleet, config: str, words: tuple[str, ...], told: str
) -> None:
    fleet.config(config)
    fleet.bench([task("a")])
    fleet.run(*words, env={"OPENAI_API_KEY": KEY, "OTHER_KEY": KEY}).refused(told)
