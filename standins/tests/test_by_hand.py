"""`python -m standins.NAME`: what each prints is enough to use it, and it ends when told, without a trace."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from evalfleet.events import AttemptStarted
from evalfleet.mirror import open_objects
from lab import Lab
from standins.azure_ml import Processes
from tests.by_hand import ROOT, ByHand, started_by_hand
from tests.desk import Desk
from tests.waiting import PATIENCE_S

NO_HOSTS, NO_JOBS = Lab.missing(), Processes.missing()
hosts = pytest.mark.skipif(NO_HOSTS is not None, reason=f"NO TEST OF REAL HOSTS: {NO_HOSTS}")
jobs = pytest.mark.skipif(NO_JOBS is not None, reason=f"NO TEST OF JOBS THAT ARE PROCESSES: {NO_JOBS}")
BENCH = 'name = "b"\ntasks = "tasks.jsonl"\ncommand = ["sh", "-c", {}]\ntimeout_s = 60\n'
SCORE = 'echo \'{"score": 1}\' >"$EVALFLEET_OUT/result.json"'

ASK = """\
import os, urllib.request as web
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
request = web.Request(url, b'{"model": "any", "messages": []}', headers)
web.build_opener(web.ProxyHandler({})).open(request).read()
"""


def desk(standin: ByHand, folder: Path, script: str = SCORE) -> Desk:
    """A desk of somebody who has typed what the stand-in says."""
    at = Desk(folder, environ=standin.exports, prefix=standin.prefix, forks=True)
    at.config(standin.config)
    (folder / "b.toml").write_text(BENCH.format(json.dumps(script)))
    (folder / "tasks.jsonl").write_text('{"id": "t1"}\n')
    return at


def typed(standin: ByHand) -> list[str]:
    """The words after `evalfleet` that the stand-in says to type."""
    words = standin.command[standin.command.index("evalfleet") + 1 :]
    return ["b.toml" if word == "BENCHMARK" else word for word in words]


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["azure", "--hosts"], marks=[hosts, pytest.mark.nightly]),
        pytest.param(["azure_batch"], marks=jobs),
        pytest.param(["azure_batch", "--hosts"], marks=[hosts, pytest.mark.nightly]),
        pytest.param(["azure_ml"], marks=jobs),
        pytest.param(["azure_ml", "--hosts"], marks=[hosts, pytest.mark.nightly]),
        pytest.param(["gce", "--hosts"], marks=hosts),
        ["gcs"],
        ["s3"],
    ],
    ids=" ".join,
)
def test_a_run_works_with_what_it_prints(flags: list[str], tmp_path: Path) -> None:
    with started_by_hand(tmp_path / "standin", *flags) as standin:
        at = desk(standin, tmp_path / "desk")
        bucket = ("--store", "gs://bucket/runs") if flags[0] == "gce" else ()
        at.done(*typed(standin), "--workers", "1", "--name", "r", *bucket)
        assert at.results()["scored"] == 1
        if bucket:
            at.use_home(tmp_path / "other")
            at("resume", "r", "--from", bucket[1]).refused("no unrun tasks")
        if flags[0] in ("gcs", "s3"):
            store = standin.config.split('"')[1]
            names = asyncio.run(open_objects(store, standin.exports).names(""))
            assert any(name.startswith("r/journal/") for name in names), names
        standin.end()


def test_calls_of_models_are_metered_with_what_it_prints(tmp_path: Path) -> None:
    """The meter counts the one call of the agent."""
    with started_by_hand(tmp_path / "standin", "models") as standin:
        at = desk(standin, tmp_path / "desk", f"{sys.executable} -c {shlex.quote(ASK)} && {SCORE}")
        with (at.folder / "b.toml").open("a") as bench:
            bench.write('secrets = ["OPENAI_API_KEY"]\n')
        at.done(*typed(standin), "--workers", "1", "--name", "r")
        models = at.results()["models"]
        assert (at.results()["scored"], models["calls"]) == (1, 1)
        standin.end()


@pytest.mark.parametrize("name", ["azure", "gce"])
def test_machines_that_are_records_are_examined(name: str, tmp_path: Path) -> None:
    with started_by_hand(tmp_path / "standin", name, before=()) as standin:
        done = desk(standin, tmp_path / "desk").done(*typed(standin))
        assert "credentials" in done.out
        if name == "azure":
            check_refusal(standin)
        standin.end(signal.SIGTERM)


def check_refusal(azure: ByHand) -> None:
    """Whoever has no token is refused, as by Azure."""
    context = ssl.create_default_context(cafile=azure.exports["REQUESTS_CA_BUNDLE"])
    url = f"{azure.exports['AZURE_AUTHORITY_HOST']}/subscriptions?api-version=2022-12-01"
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(url, context=context, timeout=PATIENCE_S)
    assert refused.value.code == 401
    refused.value.close()


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["azure", "--hosts"], marks=hosts),
        pytest.param(["azure_ml"], marks=[jobs, pytest.mark.nightly]),
    ],
    ids=" ".join,
)
def test_nothing_is_left_if_it_ends_in_the_middle_of_a_run(flags: list[str], tmp_path: Path) -> None:
    with started_by_hand(tmp_path / "standin", *flags, before=()) as standin:
        at = desk(standin, tmp_path / "desk", "sleep 1000")
        run = at.start(*typed(standin), "--workers", "1", "--name", "r")
        at.recorded(AttemptStarted)
        run.kill()
        standin.end()


@jobs
@pytest.mark.parametrize(
    ("argv", "environ", "why"),
    [
        (["azure", "--hosts"], {}, "root"),
        (["azure_batch", "--hosts"], {}, "root"),
        (["azure_ml", "--hosts"], {}, "root"),
        (["gce", "--hosts"], {}, "root"),
        (["azure_batch"], {"PATH": "/nowhere"}, "setpriv"),
        (["azure_ml"], {"PATH": "/nowhere"}, "setpriv"),
    ],
    ids=str,
)
def test_what_is_missing_is_said_in_one_line(argv: list[str], environ: dict[str, str], why: str) -> None:
    """In a user namespace of its own, nobody is the computer's root."""
    before = () if environ else ("unshare", "--user")
    done = subprocess.run(
        [*before, sys.executable, "-m", f"standins.{argv[0]}", *argv[1:]],
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"standins.{argv[0]}: ")
    assert why in line
