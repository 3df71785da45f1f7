"""evalfleet from Python: scripts, notebooks, two runs at once."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.e2e.harness import Fleet, tasks


def python(fleet: Fleet, code: str, expect: int = 0) -> Any:
    """Run a script in the folder; what it printed last, as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=fleet.folder,
        env=fleet.environ,
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    assert done.returncode == expect, done.stderr
    assert "Traceback" not in done.stderr or expect, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) if done.stdout.strip() else None


def test_importing_loads_nothing_heavy(fleet: Fleet) -> None:
    loaded = python(fleet, "import sys, evalfleet, json; print(json.dumps(sorted(sys.modules)))")
    heavy = {"asyncio", "msgspec", "rich", "sqlite3", "subprocess", "argparse", "evalfleet.api.runs"}
    assert not heavy & set(loaded)


def test_the_help_loads_nothing_heavy(fleet: Fleet) -> None:
    code = "import sys, json, evalfleet.cli as c; c.main(['--help']); print(json.dumps(sorted(sys.modules)))"
    assert not {"asyncio", "msgspec", "rich", "sqlite3", "evalfleet.api.runs"} & set(python(fleet, code))


def test_run_and_read(fleet: Fleet) -> None:
    fleet.bench(tasks(3))
    code = """
import evalfleet, json
run = evalfleet.run("./b.toml", on="local", workers=2, name="r", agent={"t": 1})
found = run.wait()
again = evalfleet.open("r")
assert again.results() == found == run.results()
assert evalfleet.open().name == "r"
print(json.dumps([found["scored"], len(run.tasks()), run.cost()["machines_usd"], run.exit_code, run.status]))
"""
    assert python(fleet, code) == [3, 3, 0.0, 0, "done"]
    fleet.settled()


def test_in_a_running_loop(fleet: Fleet) -> None:
    """As in a notebook, whose cells run inside an event loop."""
    fleet.bench(tasks(3))
    code = """
import asyncio, evalfleet, json
async def cell():
    run = evalfleet.run("./b.toml", workers=2, name="r")
    return run.wait()["scored"]
print(json.dumps(asyncio.run(cell())))
"""
    assert python(fleet, code) == 3


def test_two_runs_in_one_process(fleet: Fleet) -> None:
    fleet.bench(tasks(3, "sleep 0.1; score 1"))
    code = """
import evalfleet, json
runs = [evalfleet.run("./b.toml", workers=2) for _ in range(2)]
print(json.dumps([run.wait()["scored"] for run in runs] + [len({run.name for run in runs})]))
"""
    assert python(fleet, code) == [3, 3, 2]
    fleet.settled()


def test_cancel_and_timeout(fleet: Fleet) -> None:
    fleet.bench(tasks(3, "gate never"))
    code = """
import evalfleet, json
run = evalfleet.run("./b.toml", workers=2, name="r")
waiting = run.wait(timeout_s=0.5)["status"]
evalfleet.open("r").cancel()
found = run.wait(timeout_s=240)
run.cancel()
print(json.dumps([waiting, found["status"], found["unrun"], run.exit_code]))
"""
    assert python(fleet, code) == ["running", "stopped", 3, 130]
    fleet.settled()


def test_wrong_requests_raise(fleet: Fleet) -> None:
    fleet.bench(tasks(1))
    code = """
import evalfleet, json
from evalfleet.errors import RequestError
said = []
for options in ({"workers": 0}, {"on": "mars"}, {"wrkers": 2}, {"workers": [1]}, {"tasks": "x"}):
    try:
        evalfleet.run("./b.toml", **options)
    except (RequestError, TypeError) as err:
        said.append(str(err))
for call in (lambda: evalfleet.open("none"), lambda: evalfleet.run("none")):
    try:
        call()
    except RequestError as err:
        said.append(str(err))
print(json.dumps(said))
"""
    said = python(fleet, code)
    assert len(said) == 7, said
    assert "wrkers" in said[2]


def test_a_script_that_ends_early_leaves_the_run_resumable(fleet: Fleet) -> None:
    fleet.bench(tasks(3, "gate go; score 1"))
    python(fleet, "import evalfleet; evalfleet.run('./b.toml', workers=2, name='r')")
    fleet.open_gate("go")
    assert fleet("resume", "r").code == 0
    assert fleet.results()["scored"] == 3
    assert len(fleet.starts()) == len(set(fleet.starts()))


def test_a_path_as_benchmark(fleet: Fleet) -> None:
    path = fleet.bench(tasks(1))
    code = f"import evalfleet, pathlib; print(evalfleet.run(pathlib.Path({str(path)!r})).wait()['scored'])"
    assert python(fleet, code) == 1
