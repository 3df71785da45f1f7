"""Model calls of attempts go through the machine's meter: counted, priced, and without the key."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from evalfleet.events import AttemptEnded, AttemptStarted, RunSteered
from evalfleet.journal import Store
from evalfleet.model import AttemptId, Broken
from standins.podman import LIMITS, lacking, podman_with
from tests.e2e.harness import Fleet, processes, task
from tests.e2e.metered import PRICES, Served, calls_of, metered, meters, models_usd, noticed, written
from tests.planted import holding, processes_holding, younger
from tests.waiting import until


def test_calls_are_counted_priced_and_kept_and_the_key_is_nowhere(fleet: Fleet, models: Served) -> None:
    show = "print(os.environ); gate('go'); "
    metered(
        fleet,
        models,
        [task("a", f"{show}[call() for _ in range(3)]; score(1)"), task("b", "call(); score(0)")],
    )
    fleet.forks = False  # its environment is looked at
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
    assert not (fleet.home / "r/a/a.0/calls").exists(), "nobody has asked for --keep-calls"
    results = fleet.results()
    assert results["cost"]["models_usd"] == pytest.approx(models.usd(), abs=1e-6)
    assert models.sums()["calls"] == 4
    assert not holding(fleet.home, models.key)
    fleet.settled()


@pytest.mark.skipif(os.geteuid() != 0, reason="NO TEST OF MEMORY: only root may read that of others")
def test_the_key_is_in_no_process_of_an_agent(fleet: Fleet, models: Served) -> None:
    """The controller, the supervisor and the meter hold it, also after another controller took over."""
    metered(fleet, models, [task("a", "call(); gate('go'); call(); score(1)")])
    (fleet.folder / ".env").write_text(f"OPENAI_API_KEY={fleet.environ.pop('OPENAI_API_KEY')}\n")
    (fleet.folder / ".env").chmod(0o600)
    run = fleet.start_run()
    fleet.started("a.0")
    until(lambda: models.sums()["calls"] == 1)
    (meter,) = meters(fleet)
    found = processes_holding(models.key, younger(models.pid))
    assert found.keys() <= {run.pid, meter, *fleet.supervisors().values()}, found
    assert meter in found
    run.kill()
    ((_, supervisor),) = fleet.supervisors().items()
    os.kill(supervisor, signal.SIGKILL)
    again = fleet.start("resume", "r")
    until(lambda: supervisor not in (alive := fleet.supervisors().values()) and alive)
    found = processes_holding(models.key, younger(models.pid))
    assert found.keys() <= {again.pid, meter, *fleet.supervisors().values()}, found
    assert meter in found
    fleet.open_gate("go")
    assert again.wait().code == 0
    assert not holding(fleet.home, models.key)
    assert models_usd(fleet) == pytest.approx(models.usd(), abs=1e-6)


LOOK = """
import glob, json, os, urllib.request
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
body = {"model": "any", "messages": []}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
request = urllib.request.Request(url, json.dumps(body).encode(), headers)
urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request).read()
looked, found = 0, []
paths = [path + name for path in glob.glob("/proc/[0-9]*") for name in ("/environ", "/mem")]
for path in [*paths, os.environ["EVALFLEET_OUT"].partition("/jobs/")[0] + "/meter"]:
    try:
        if os.stat(path).st_uid != os.getuid():
            looked += 1
            os.open(path, os.O_RDONLY)
            found.append(path)
    except OSError:
        pass  # it may not, or that process has just ended
result = {"score": int(looked > 0 and not found), "error": "%s of %s" % (found, looked)}
json.dump(result, open(os.environ["EVALFLEET_OUT"] + "/result.json", "w"))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="NO TEST OF ISOLATED AGENTS: only root can be other users")
def test_an_agent_that_is_isolated_as_a_user_finds_the_key_nowhere(fleet: Fleet, models: Served) -> None:
    """It looks into all processes that it sees, and for the socket by which the meter is steered."""
    metered(fleet, models, [task("a")], command=["python3", "agent.py"])
    (fleet.folder / "agent.py").write_text(LOOK)
    done = fleet.run("--set", "isolation=user", "--attempts", "1")
    assert done.code == 0, fleet("logs", "r", "a").out
    assert (fleet.results()["isolation"], models.sums()["calls"]) == (["user"], 1)
    assert fleet.task("a")["score"] == 1, fleet.task("a")["error"]
    assert "could have read the key" not in fleet("report", "r").out


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


def test_the_money_of_attempts_that_were_superseded_or_lost_is_counted_or_told_to_be_unknown(
    fleet: Fleet, models: Served
) -> None:
    """The machine of one attempt is replaced after it has written a score, that of the other vanishes."""
    first = "call(); call(); score(1); gate('never')"
    tasks = [task(name, f'exec("{first}") if attempt == 0 else call() and score(0)') for name in "ab"]
    metered(fleet, models, tasks)
    run = fleet.start_run("--workers", "2")
    fleet.started("a.0", "b.0")
    until(lambda: models.sums()["calls"] == 4)
    machines = {str(each.task): each.machine for each in fleet.state().attempts.values()}
    Store.open(fleet.home).ask("r", RunSteered("replace", "an alert", machine=machines["a"]), 0)
    until(lambda: fleet.state().steered, "the machine's replacement")
    lost = fleet.home / ".machines" / machines["b"]
    os.kill(fleet.supervisors()[lost.name], signal.SIGKILL)
    shutil.rmtree(lost)
    done = run.wait()
    assert done.code == 0, done
    results, told = fleet.results(), fleet.results()["models"]
    assert [each["score"] for each in results["tasks"]] == [0, 0], "what came too late does not count"
    call_usd = models.usd() / 6
    assert told["by_cause"] == pytest.approx({"superseded": 2 * call_usd, "scored": 2 * call_usd}, abs=1e-6)
    assert told["retries_usd"] == pytest.approx(2 * call_usd, abs=1e-6)
    assert (told["calls"], told["untold"]) == (4, ["b.0"])
    assert "what b.0 on lost machines used is unknown" in fleet("report", "r").out
    assert "1 attempt on lost machines told nothing" in fleet("show", "r").out
    fleet.open_gate("never")  # no supervisor is left that could end it
    fleet.settled()


def test_a_meter_that_is_killed_in_the_midst_of_a_stream_leaves_it_unknown_and_not_zero(
    fleet: Fleet, models: Served
) -> None:
    """What was put in and the words so far were told to the caller; what the call cost nobody knows.

    A neighbour may have ended the meter, so the first such end uses up no attempt.
    """
    metered(
        fleet,
        models,
        [task("a", "call(); stream('any+hold' if attempt == 0 else 'any'); score(1)")],
        PRICES + '"any+hold" = {in = 2, cache_write = 3, out = 8}\n',
    )
    run = fleet.start_run("--budget", "5", "--attempts", "1")
    fleet.started("streams.0")
    (meter,) = meters(fleet)
    os.kill(meter, signal.SIGKILL)
    assert run.wait().code == 0
    first, second = fleet.recorded(AttemptEnded, 2)
    assert isinstance(first.outcome, Broken)
    detail = "the meter of its model calls was ended"
    assert (first.outcome.cause, first.outcome.detail) == ("machine_lost", detail)
    assert first.metered is not None
    assert second.metered is not None
    assert (first.metered.calls, first.metered.unknown, second.metered.unknown) == (2, 1, 0)
    assert first.metered.unknown_usd > 0.26, "32768 tokens put out"
    assert first.metered.usd + second.metered.usd == pytest.approx(models.usd(), abs=1e-6)
    assert fleet.results()["models"]["by_model"]["any+hold"]["unknown_calls"] == 1
    fleet.settled()


def test_what_was_asked_and_answered_is_kept_with_all_secrets_masked(fleet: Fleet, models: Served) -> None:
    """An agent that prints its environment into a prompt, and a secret that JSON writes otherwise."""
    token = f'tok"en-{os.urandom(6).hex()}-\u00e9'
    metered(
        fleet,
        models,
        [task("a", "call(asks=os.environ['TOKEN'] + os.environ['OPENAI_API_KEY']); stream('any'); score(1)")],
        secrets=["OPENAI_API_KEY", "TOKEN"],
    )
    done = fleet.run("--keep-calls", env={"TOKEN": token})
    assert done.code == 0, done
    kept = fleet.home / "r/a/a.0/calls"
    names = ["000001.request", "000001.response", "000002.request", "000002.response"]
    assert sorted(path.name for path in kept.iterdir()) == names
    asked = json.loads((kept / "000001.request").read_text())
    assert asked["messages"][0]["content"].startswith("***ef-"), "the attempt's own key is no secret"
    assert json.loads((kept / "000001.response").read_text())["usage"]["completion_tokens"] > 0
    assert b"data: [DONE]" in (kept / "000002.response").read_bytes()
    assert not holding(fleet.home, models.key, token, json.dumps(token)[1:-1])


def test_a_port_that_is_taken_on_the_machine_is_named(fleet: Fleet, models: Served) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        metered(fleet, models, [task("a", "call(); score(1)")], f"port = {port}\n{PRICES}")
        done = fleet.run()
        assert (done.code, fleet.results()["unrun"]) == (4, 1)
        why = fleet.results()["stop"]["detail"]
        assert f"the meter cannot listen at port {port}: Address already in use; name another" in why
        assert "\n" not in why
    assert fleet("resume", "r").code == 0
    assert models.sums()["calls"] == 1


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


def test_the_same_error_again_and_again_ends_the_attempt(fleet: Fleet, models: Served) -> None:
    metered(fleet, models, [task("a", "while attempt < 1: call('any+500')\ncall(); score(1)")])
    assert fleet.run().code == 0
    first, _ = fleet.recorded(AttemptEnded, 2)
    assert isinstance(first.outcome, Broken)
    assert first.outcome.cause == "model"
    assert "fail with 500" in first.outcome.detail
    assert fleet.results()["causes"] == {"model": 1}


def test_calls_without_a_price_end_neither_the_run_nor_count_as_a_zero(fleet: Fleet, models: Served) -> None:
    """A free call, a misspelt model, and an attempt that called nothing else."""
    odd = "call(path='/moderations'); call('anny'); call(); score(1)"
    tasks = [task("a", odd), task("b", "call(); score(1)"), task("c", "call('anny'); score(0)")]
    metered(fleet, models, tasks)
    done = fleet.run("--budget", "5", "--attempts", "1")
    results = fleet.results()
    assert (results["status"], results["unrun"], done.code) == ("done", 0, 1), done
    assert [each["score"] for each in results["tasks"]] == [1, 1, None]
    assert fleet.task("c")["cause"] == "model"
    assert "no price is known for the model 'anny'; add it to [model.prices]" in fleet.task("c")["error"]
    assert results["cost"]["models_usd"] == pytest.approx(models.usd(), abs=1e-6)


@pytest.mark.skipif(os.geteuid() != 0, reason="NO TEST OF ISOLATED AGENTS: only root can be other users")
def test_where_attempts_are_isolated_the_meter_has_a_control_group_of_its_own(
    fleet: Fleet, models: Served
) -> None:
    metered(fleet, models, [task("a")], command=["python3", "agent.py"])
    stream = '{"model": "any+hold", "messages": [], "stream": true}'
    (fleet.folder / "agent.py").write_text(
        LOOK.partition("looked,")[0].replace("json.dumps(body)", repr(stream))
    )
    run = fleet.start_run("--set", "isolation=user", "--attempts", "1")
    until(lambda: models.sums()["requests"] == 1, "a call")
    (meter,) = meters(fleet)
    groups = json.loads(next((fleet.home / ".machines").glob("*/groups")).read_text())
    assert all(meter in map(int, (Path(top) / "meter/cgroup.procs").read_text().split()) for top in groups)
    limits = [
        path
        for top in groups
        for path in Path(top, "meter").glob("memory.*")
        if path.name in ("memory.max", "memory.limit_in_bytes")
    ]
    assert all(int(path.read_text()) < 1 << 50 for path in limits)
    urlopen(f"{models.url}/go").close()
    run.wait()
    assert not [top for top in groups if Path(top).exists()]


def test_the_vendors_own_clients_find_the_meter(fleet: Fleet, models: Served) -> None:
    ask = "[{'role': 'user', 'content': 'say words'}]"
    clients = (
        "import anthropic, openai\n"
        "from google import genai\n"
        f"openai.OpenAI().chat.completions.create(model='any', messages={ask})\n"
        f"anthropic.Anthropic().messages.create(model='any', max_tokens=9, messages={ask})\n"
        "client = genai.Client()\n"
        "client.models.generate_content(model='any', contents='say words')\n"
        # as LiteLLM makes a Gemini URL out of its variable
        "import urllib.request as http\n"
        "url = os.environ['GEMINI_API_BASE'] + '/models/any:generateContent'\n"
        "request = http.Request(url, b'{}', {'x-goog-api-key': os.environ['GEMINI_API_KEY']})\n"
        "http.build_opener(http.ProxyHandler({})).open(request).read()\n"
        f"openai.AzureOpenAI(api_version='2024-10-21').chat.completions.create(model='any', messages={ask})\n"
        "score(1)"
    )
    metered(fleet, models, [task("a", clients)])
    done = fleet.run("--attempts", "1")
    assert done.code == 0, fleet("logs", "r", "a").out
    assert len(calls_of(fleet, "a.0")) == 5
    assert models_usd(fleet) == pytest.approx(models.usd(), abs=1e-6)


def test_an_api_at_the_whole_address_of_a_deployment_is_metered(fleet: Fleet, models: Served) -> None:
    """Some clients read no other."""
    ask = (
        "import urllib.request\n"
        "key, url = os.environ['AZURE_API_KEY'], os.environ['AZURE_ENDPOINT']\n"
        "request = urllib.request.Request(url, b'{\"messages\": []}', {'api-key': key})\n"
        "urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request).read(); score(1)"
    )
    metered(fleet, models, [task("a", ask)], secrets=["AZURE_API_KEY"])
    fleet.config(f'[model]\nkey = "AZURE_API_KEY"\n{PRICES}')
    address = f"{models.url}/openai/deployments/any/chat/completions?api-version=2024-10-21"
    fleet.environ |= {"AZURE_API_KEY": fleet.environ.pop("OPENAI_API_KEY"), "AZURE_ENDPOINT": address}
    done = fleet.run("--attempts", "1", "--budget", "1")
    assert done.code == 0, fleet("logs", "r", "a").out
    assert [(call["model"], call["status"]) for call in calls_of(fleet, "a.0")] == [("any", 200)]
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
    assert "| result | $0.0008 |" in report
    assert "2 calls, $0.0008 for attempts that did not decide their task" in fleet("show", "r").out
    assert fleet("show", "r", "a").out.count("model cost  $0.0008, 1 call") == 2
    assert "Attempts were not isolated: an agent that is root could have read the key" in report


def test_an_agent_that_goes_round_the_meter_is_noticed(fleet: Fleet, models: Served) -> None:
    went_round = (
        "json.dump({'score': 1, 'cost_usd': 0.5}, open(os.environ['EVALFLEET_OUT'] + '/result.json', 'w'))"
    )
    metered(fleet, models, [task("a", went_round), task("b", "call(); score(1)")])
    assert fleet.run().code == 0
    assert fleet.results()["models"]["unseen"] == ["a.0"]
    assert (
        "The agent went round the meter: a.0 told of calls that it did not see." in fleet("report", "r").out
    )
    assert "1 attempt went round the meter" in fleet("show", "r").out


def test_a_key_that_is_not_metered_beside_one_that_is_gets_a_note(fleet: Fleet, models: Served) -> None:
    metered(fleet, models, [task("a", "score(1)")], secrets=["OPENAI_API_KEY", "OPENROUTER_API_KEY"])
    done = fleet.run("--budget", "5", "--dry-run", env={"OPENROUTER_API_KEY": "sk-or"})
    assert "--budget does not bound what is called with OPENROUTER_API_KEY" in done.out + done.err


def test_a_run_that_is_not_metered_says_so(fleet: Fleet) -> None:
    fleet.bench([task("a")])
    done = fleet.run("--budget", "5")
    assert done.code == 0
    assert "models are not metered" in done.err + done.out
    assert "Models not metered." in fleet("report", "r").out
