"""evalfleet from Python: scripts, notebooks, two runs at once."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import evalfleet
from evalfleet.api.python import in_python
from evalfleet.planning.flags import flags, word_of
from tests.e2e.harness import Fleet, task, tasks
from tests.forked import Request, fork
from tests.waiting import PATIENCE_S


def python(fleet: Fleet, code: str) -> Any:
    """Run a script in the folder, with evalfleet loaded (tests/forked.py); what it printed last, as JSON."""
    out, err = fleet.folder / "script.out", fleet.folder / "script.err"
    request = Request((), str(fleet.folder), fleet.environ, code=code)
    with open(os.devnull, "rb") as nothing, out.open("wb") as out_file, err.open("wb") as err_file:
        returned = fork(request, (nothing, out_file, err_file)).wait(PATIENCE_S)
    return said_last(returned, out.read_text("utf-8"), err.read_text("utf-8"))


def new_python(fleet: Fleet, code: str) -> Any:
    """The same in a Python that has loaded nothing, and that clears its memory at its end."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=fleet.folder,
        env=fleet.environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return said_last(done.returncode, done.stdout, done.stderr)


def said_last(returned: int, out: str, err: str) -> Any:
    assert returned == 0, err
    assert "Traceback" not in err, err
    return json.loads(out.splitlines()[-1]) if out.strip() else None


def test_importing_loads_nothing_heavy(fleet: Fleet) -> None:
    loaded = new_python(fleet, "import sys, evalfleet, json; print(json.dumps(sorted(sys.modules)))")
    heavy = {"asyncio", "msgspec", "rich", "sqlite3", "subprocess", "argparse", "evalfleet.api.runs"}
    assert not heavy & set(loaded)


def test_the_help_loads_nothing_heavy(fleet: Fleet) -> None:
    code = "import sys, json, evalfleet.cli as c; c.main(['--help']); print(json.dumps(sorted(sys.modules)))"
    assert not {"asyncio", "msgspec", "rich", "sqlite3", "evalfleet.api.runs"} & set(new_python(fleet, code))


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
    assert new_python(fleet, code) == [3, 3, 0.0, 0, "done"]
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


def test_wrong_requests_raise_in_the_words_of_python(fleet: Fleet) -> None:
    fleet.bench(tasks(1))
    code = """
import evalfleet, json
said = []
def refused(call):
    try:
        call()
    except evalfleet.RequestError as err:
        said.append(str(err))
for options in (
    {"workers": 0}, {"on": "mars"}, {"wrkers": 2}, {"workers": [1]}, {"tasks": "x"}, {"only": "failed"},
    {"pool": "p", "on": "local"}, {"settings": {"local.x": 1}}, {"task_budget": 1}, {"domains": ["x"]},
):
    refused(lambda: evalfleet.run("./b.toml", **options))
refused(lambda: evalfleet.run("none"))
evalfleet.run("./b.toml", name="r").wait()
refused(lambda: evalfleet.open("none"))
refused(lambda: evalfleet.run("./b.toml", name="r"))
refused(lambda: evalfleet.resume("r", budget=-1))
refused(lambda: evalfleet.resume("r", only="broken"))
refused(lambda: evalfleet.rerun("r", only="lost"))
refused(lambda: evalfleet.runs(since="soon"))
print(json.dumps(said))
"""
    said = python(fleet, code)
    assert len(said) == 17, said
    assert said[0] == "`workers` is 0; write a whole number from 1 to 10000"
    assert said[2] == "run() has no parameter 'wrkers'; did you mean 'workers'?"
    assert said[3].startswith("`workers` is [1];")
    assert said[5] == "`only` chooses among the tasks of an earlier run; name it with from_run=RUN"
    assert said[6].startswith("`on` and `pool` exclude each other")
    assert said[7].startswith("settings['local.x']: place 'local' has no setting 'x'")
    assert said[12] == "the name 'r' is taken; choose another with `name`"
    assert not [text for text in said if "--" in text or "evalfleet " in text]


def test_every_flag_in_a_message_becomes_a_parameter() -> None:
    for name, flag in flags().items():
        spelt = flag.short or f"--{word_of(name).replace('_', '-')}"
        assert in_python(f"{spelt} is wrong") == f"`{name}` is wrong"
        assert "--" not in in_python(flag.help)
    assert in_python("`evalfleet resume r-1 --only broken` runs it") == (
        "`evalfleet.resume('r-1', only='broken')` runs it"
    )
    assert in_python("`evalfleet run BENCHMARK --from r --yes`") == (
        "`evalfleet.run(BENCHMARK, from_run='r', yes=True)`"
    )
    assert in_python("`evalfleet resume r --from s3://b` takes it back") == (
        "`evalfleet.resume('r', from_url='s3://b')` takes it back"
    )
    assert in_python("`evalfleet pool status p` shows it") == "`evalfleet pool status p` shows it"


def test_the_names_at_the_top_and_their_parameters_can_be_seen(fleet: Fleet) -> None:
    assert set(dir(evalfleet)) == set(evalfleet.__all__)
    assert {"run", "resume", "rerun", "open", "runs", "pools", "compare", "Run"} <= set(dir(evalfleet))
    for name in dir(evalfleet):
        assert getattr(evalfleet, name) is not None
    seen = inspect.signature(evalfleet.run).parameters
    assert set(seen) == {"benchmark", "home", *flags()}
    documented = inspect.getdoc(evalfleet.run) or ""
    assert [name for name in flags() if f"\n{name} " not in documented] == []
    # what resume and rerun have in common with run is spelt alike
    for verb in ("resume", "rerun"):
        own = set(inspect.signature(getattr(evalfleet, verb)).parameters)
        assert {"budget", "max_duration", "workers", "env_file"} <= own & set(seen)
    # a package of this name would hide the function once it is imported
    loaded = (
        "import evalfleet, evalfleet.cli.run, evalfleet.api.python as p; print(evalfleet.pools is p.pools)"
    )
    done = subprocess.run([sys.executable, "-c", loaded], env=fleet.environ, capture_output=True, text=True)
    assert done.stdout == "True\n", done


def test_awaiting_a_run_and_following_its_events(fleet: Fleet) -> None:
    fleet.bench([task("a_1", "gate go; score 1"), task("a_2", "score 0")])
    code = """
import asyncio, evalfleet, json
from pathlib import Path

async def main():
    run = evalfleet.run("./b.toml", workers=2, name="r")
    kinds, ticks = [], 0
    async def tick():  # the caller's loop goes on meanwhile
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.01)
    ticking = asyncio.create_task(tick())
    async for event in run:
        kinds.append(event["kind"])
        if event["kind"] == "AttemptEnded":
            Path("gates/go").touch()
    found = await run
    again = await evalfleet.open("r")
    ticking.cancel()
    assert list(evalfleet.open("r").events())[0]["schema_version"] == 1
    assert [event["kind"] for event in run.events()] == kinds
    return [kinds[0], kinds.count("AttemptEnded"), kinds[-1], found == again, found["scored"], ticks > 5]

print(json.dumps(asyncio.run(main())))
"""
    assert python(fleet, code) == ["RunPlanned", 2, "RunEnded", True, 2, True]


def test_who_stops_waiting_stops_nothing(fleet: Fleet) -> None:
    fleet.bench(tasks(2, "gate go; score 1"))
    code = """
import asyncio, evalfleet, json
from pathlib import Path

async def main():
    run = evalfleet.run("./b.toml", workers=2, name="r")
    try:
        await asyncio.wait_for(run.ended(), 0.3)
    except TimeoutError:
        pass
    async for event in run:
        break
    status = run.status
    Path("gates/go").touch()
    return [status, (await run)["succeeded"]]

print(json.dumps(asyncio.run(main())))
"""
    assert python(fleet, code) == ["running", 2]


def test_resume_rerun_runs_and_pools(fleet: Fleet) -> None:
    fleet.bench([task("a_1", "[ -e fixed ] || exit 3; score 1", files=[]), task("a_2", "score 0")])
    code = """
import evalfleet, json
run = evalfleet.run("./b.toml", workers=2, name="r", attempts=1)
first = run.wait()
again = evalfleet.resume(run, only="broken", workers=1).wait()
failed = evalfleet.rerun(run, only="failed", name="again")
failed.wait()
kept = evalfleet.run("./b.toml", task_ids=["a_2"], name="k", keep=True)
kept.wait()
listed = evalfleet.runs()
print(json.dumps([
    first["broken"], again["broken"], again["attempts"], [task["task_id"] for task in failed.tasks()],
    sorted(each.run for each in listed), [each.run for each in evalfleet.runs(benchmark="none")],
    [each.run for each in evalfleet.runs(status="done", since=3600)] == [each.run for each in listed],
    [(pool["pool"], len(pool["machines"])) for pool in evalfleet.pools()],
]))
"""
    assert python(fleet, code) == [1, 1, 3, ["a_2"], ["again", "k", "r"], [], True, [["k-pool", 1]]]
    assert fleet("pool", "delete", "k-pool", "--yes").code == 0


def test_notes_of_the_command_line_are_warnings(fleet: Fleet) -> None:
    fleet.bench(tasks(1))
    code = """
import evalfleet, json, os, warnings
os.environ["EVALFLEET_WORKRES"] = "3"
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    evalfleet.run("./b.toml", name="r").wait()
print(json.dumps([[str(each.message), each.filename] for each in caught]))
"""
    (said,) = python(fleet, code)
    assert "EVALFLEET_WORKRES" in said[0]
    assert said[1] == "<string>"  # where it was called


def test_tasks_as_a_data_frame(fleet: Fleet) -> None:
    pytest.importorskip("pandas")
    told = '{"score": 1, "metrics": {"turns": 4}, "tokens": {"in": 7}, "metadata": {"seen": "x"}}'
    fleet.bench([task("a_1", f"result '{told}'"), task("a_2", "score 0")])
    code = """
import evalfleet, json
run = evalfleet.run("./b.toml", workers=2, name="r")
run.wait()
df = run.df()
one = df.loc["a_1"]
print(json.dumps([list(df.index), df["score"].mean(), one["metrics.turns"], df["tokens.in"].sum(),
                  one["metadata"], bool(df.loc["a_2", "success"]), int(df["metrics.turns"].isna().sum())]))
"""
    assert python(fleet, code) == [["a_1", "a_2"], 0.5, 4.0, 7.0, {"seen": "x"}, False, 1]


def test_without_pandas_one_line_says_what_to_do(fleet: Fleet) -> None:
    fleet.bench(tasks(1))
    code = """
import sys; sys.modules["pandas"] = None  # as if it were not installed
import evalfleet, json
run = evalfleet.run("./b.toml", name="r")
run.wait()
try:
    run.df()
except evalfleet.RequestError as err:
    print(json.dumps(str(err)))
"""
    assert (
        python(fleet, code) == "df() needs pandas: pip install pandas; tasks() has the same rows without it"
    )


GOOD = """
import asyncio
from pathlib import Path

import evalfleet


def plainly() -> float | None:
    run = evalfleet.run(Path("b.toml"), on=["local"], workers=2, max_duration="2h", settings={"a": 1})
    results = run.wait(timeout_s=60)
    names: list[str] = [task["task_id"] for task in run.tasks()]
    print(names, [each.status for each in evalfleet.runs(since="7d")])
    print([pool["pool"] for pool in evalfleet.pools()])
    return results["success_rate"]


async def with_a_loop() -> int:
    run = evalfleet.resume("r", only="broken", budget=5)
    async for event in run:
        print(event["kind"])
    return (await run)["scored"]


try:
    asyncio.run(with_a_loop())
except evalfleet.RequestError as error:
    print(error)
"""
BAD = {
    'evalfleet.run("b.toml", wrkers=2)': 'did you mean "workers"?',
    'evalfleet.run("b.toml", workers=[2])': 'expected "int | str"',
    'evalfleet.run("b.toml", task_ids=3)': 'expected "Sequence[str]"',
    "evalfleet.run()": 'Missing positional argument "benchmark"',
    'evalfleet.resume("r", only="failed")': "Literal['broken']",
    'evalfleet.run("b.toml").wait()["succes_rate"]': 'TypedDict "Results" has no key "succes_rate"',
    'evalfleet.runs(status="gone")': 'Argument "status" to "runs"',
    "evalfleet.rnu": 'Module has no attribute "rnu"',
}
# The rest of evalfleet is not looked at: that takes longer, and finds the same.
MYPY = """
[mypy]
strict = true
follow_imports = skip
[mypy-evalfleet,evalfleet.api.python,evalfleet.api.run,evalfleet.planning.flags,evalfleet.views.*,evalfleet.errors,evalfleet.model]
follow_imports = silent
"""


def test_a_type_checker_sees_the_parameters(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "bad.py").write_text("\n".join(["import evalfleet", *BAD]))
    (tmp_path / "mypy.ini").write_text(MYPY)
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "good.py", "bad.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(Path(evalfleet.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    errors = [line for line in checked.stdout.splitlines() if ": error: " in line]
    assert len(errors) == len(BAD), checked.stdout
    for number, (line, complaint) in enumerate(BAD.items(), start=2):
        said = [error for error in errors if error.startswith(f"bad.py:{number}: ")]
        assert len(said) == 1, (line, checked.stdout)
        assert complaint in said[0]


def test_a_script_that_ends_early_leaves_the_run_resumable(fleet: Fleet) -> None:
    fleet.bench(tasks(3, "gate go; score 1"))
    new_python(fleet, "import evalfleet; evalfleet.run('./b.toml', workers=2, name='r')")
    fleet.open_gate("go")
    assert fleet("resume", "r").code == 0
    assert fleet.results()["scored"] == 3
    assert len(fleet.starts()) == len(set(fleet.starts()))


def test_a_path_as_benchmark(fleet: Fleet) -> None:
    path = fleet.bench(tasks(1))
    code = f"import evalfleet, pathlib; print(evalfleet.run(pathlib.Path({str(path)!r})).wait()['scored'])"
    assert python(fleet, code) == 1
