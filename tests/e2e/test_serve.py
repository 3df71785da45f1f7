"""The dashboard's server, asked over HTTP, of real runs."""

from __future__ import annotations

import os
import re
import socket
import sqlite3
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from evalfleet.web.triage import fingerprint
from tests.e2e.dashboard import Dashboard, Tables, dashboard, part
from tests.e2e.harness import Fleet, task
from tests.waiting import until

PNG = (
    b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
    + (head := struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0))
    + struct.pack(">I", zlib.crc32(b"IHDR" + head))
)
MARKUP = "<img src=x onerror=alert(1)>\"'`&amp;"
NASTY = f"a/../{MARKUP}"
HOSTILE = r"""
printf '\033[2J\033]0;title\007 <script>alert(1)</script> \xe2\x80\xae gnirts \xff\n'
head -c 1100000 /dev/zero | tr '\0' x; echo
cd "$EVALFLEET_OUT"
ln -s /etc/passwd passwd; ln -s / root; mkfifo pipe; mkdir sub; echo inner > 'sub/<b>"q".html'
printf '<svg onload=alert(1)>' > fake.png
echo '{"n": 1, "action": "<b>click</b>", "screenshot": "../../../../etc/passwd", "x": 3, "y": 4}' > traj.jsonl
echo '{"n": 2, "action": "type", "screenshot": "real.png", "error": "<i>"}' >> traj.jsonl
cp "{folder}/real.png" "{folder}/huge.png" .
result '{{"score": 0, "error": "<script>alert(2)</script>"}}'
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, Dashboard]]:
    """A run that is over, one of whose tasks is hostile, and a dashboard of it."""
    fleet = Fleet.at(tmp_path_factory.mktemp("dashboard") / "f")
    (fleet.folder / "real.png").write_bytes(PNG)
    (fleet.folder / "huge.png").write_bytes(PNG[:16] + struct.pack(">II", 60_000, 60_000) + PNG[24:])
    hostile = HOSTILE.replace("{folder}", str(fleet.folder)).replace("{{", "{").replace("}}", "}")
    fleet.bench(
        [
            task(NASTY, hostile, domain=MARKUP),
            *(task(f"good_{n}", "score 1", domain="d") for n in range(3)),
            *(task(f"bad_{n}", f"echo 500 from /setup/{n} id {n}abcdef{n}9 >&2; exit 3") for n in range(3)),
            task("zero", "score 0", domain="d"),
        ],
        steps="traj.jsonl",
    )
    done = fleet.run("--workers", "2", "--attempts", "2")
    assert done.code == 1, done
    folder = fleet.home / fleet.task(NASTY)["artifacts"]
    for name, where in (("passwd", "/etc/passwd"), ("root", "/")):  # a machine's own do not come home
        (folder / name).symlink_to(where)
    os.mkfifo(folder / "pipe")
    opened = dashboard(fleet)
    yield fleet, opened
    opened.process.interrupt()
    opened.process.wait()
    fleet.sweep()


PAUSE = {"verb": "set", "arguments": {"workers": 0}}


def outcomes(tables: Tables) -> dict[str, str]:
    return {id: row["outcome"] for id, row in tables.tasks.items()}


def test_a_page_tells_what_it_will_ask_for(finished: tuple[Fleet, Dashboard]) -> None:
    """A browser that had to find that out by itself would ask four times in a row, each time for more.

    The script comes whole, but for what only charts need.
    """
    _, opened = finished
    told = re.findall(r"<([^>]*)>; rel=(\w+)", opened.ask("/runs/r/tasks/a%2Fb").headers["link"])
    assert told[0] == ("/api/runs/r", "preload")
    assert told[1:] == [("/client/app.js", "modulepreload")]
    script = opened.ask("/client/app.js").body.decode()
    assert 'modules["pages/run.js"] =' in script
    assert 'import("/client/vendor/uplot.js")' in script
    assert "\nimport " not in script
    assert {opened.ask(path).code for path, _ in told} == {200}
    assert not re.search("/api/", opened.ask("/").headers["link"])


# -- numbers -----------------------------------------------------------------------------------------


def test_every_number_of_a_run_is_that_of_show(finished: tuple[Fleet, Dashboard]) -> None:
    fleet, opened = finished
    shown, tables = fleet("show", "r", "--json").json, opened.snapshot()
    run = tables.run
    assert (run["status"], run["live"], run["benchmark"]) == (shown["status"], False, "b")
    assert run["counts"] == {
        **{"total": 8, "pass": shown["succeeded"], "fail": shown["failed"], "broken": shown["broken"]},
        **{"answered": 0, "running": 0, "waiting": 0},
    }
    assert (run["rate"], [run["low"], run["high"]]) == (shown["success_rate"], shown["success_rate_ci"])
    assert (run["attempts"], run["retries"]) == (shown["attempts"], shown["retries"])
    assert dict(run["causes"]) == shown["causes"]
    assert run["money"]["machine_usd"] == shown["cost"]["machines_usd"]
    assert run["provenance"] == shown["provenance"]
    assert {row[0]: [row[1], row[4], row[5]] for row in run["domains"]} == {
        name: [part["succeeded"], part["total"], part["success_rate"]]
        for name, part in shown["by_domain"].items()
    }
    for each in shown["tasks"]:
        row = tables.tasks[each["task_id"]]
        assert row["score"] == each["score"]
        assert row["attempts"] == each["attempts"]
        assert row["seconds"] == each["duration_seconds"]
        assert row["cause"] == each["cause"]
        assert row["domain"] == each["domain"]
        assert tables.machines[row["machine"]]["name"] == each["machine"]
    busy = {row["machine"] for row in tables.attempts.values()}
    assert busy
    for machine in shown["machines"]:  # one that was slow to come up may have found nothing left to do
        row = tables.machines[machine["id"]]
        assert row["phase"] == machine["phase"]
        phases = [phase[0] for phase in row["phases"]]
        assert phases[-1] == "ending"
        assert phases[-2] == "ready" or machine["id"] not in busy
        assert all(phase[2] is not None and phase[1] <= phase[2] for phase in row["phases"])
    attempts = sum(1 for row in tables.attempts.values() if row["outcome"] == "broken")
    assert attempts == sum(shown["causes"].values())

    detail = opened.get(f"/api/runs/r/tasks/{part('bad_0')}")
    assert detail == fleet("show", "r", "bad_0", "--json").json
    (listed,) = opened.get("/api/runs")["runs"]["rows"]
    (ls,) = fleet("ls", "--json").json
    columns = opened.get("/api/runs")["runs"]["columns"]
    row = dict(zip(columns, listed, strict=True))
    assert (row["name"], row["status"], row["total"], row["broken"]) == ("r", "done", 8, ls["broken"])
    assert (row["rate"], row["low"]) == (ls["success_rate"], shown["success_rate_ci"][0])


def stop(opened: Dashboard) -> None:
    opened.process.interrupt()
    opened.process.wait()


def test_failures_that_are_the_same_are_one_group(finished: tuple[Fleet, Dashboard]) -> None:
    _, opened = finished
    triage = opened.get("/api/runs/r/triage")
    first = triage["groups"][0]
    assert first["count"] == len(first["attempts"]) == 6, "three tasks, two attempts each, one fault"
    assert {attempt.partition(".")[0] for attempt in first["attempts"]} == {"bad_0", "bad_1", "bad_2"}
    assert "500 from <path>" in first["text"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("HTTP 500 at /a/b/7 after 3.2 s", "HTTP 500 at /c after 11 s"),
        ("2026-01-02T03:04:05Z boom 0xdead", "2026-11-12 13:14:15,123 boom 0xbeef01"),
        ("vm worker-12 at 10.0.0.4:22 is gone", "vm worker-3 at 10.0.0.99:2222 is gone"),
        ("id 6f1c2b3a-0000-4000-8000-123456789abc", "id ffffffff-1111-4222-8333-cba987654321"),
        ("a\n\n  last   line 5", "b\nlast line 77"),
        ("click at 102,330 in 450 ms, reward 120", "click at 7,9 in 80 ms, reward 1.5"),
    ],
)
def test_numbers_ids_and_paths_do_not_tell_failures_apart(one: str, other: str) -> None:
    assert fingerprint(one).splitlines()[-1] == fingerprint(other).splitlines()[-1]
    assert fingerprint("HTTP 500 from x") != fingerprint("HTTP 404 from x")


def test_a_line_that_names_the_task_does_not_tell_failures_apart() -> None:
    one = fingerprint("click-menu, seed 1: select Terza\ngave up", ["click-menu"])
    assert one == fingerprint("buy-ticket, seed 1: buy it\ngave up", ["buy-ticket"]) == "gave up"
    assert fingerprint("error: no click-menu", ["click-menu"]) == "error: no <task>"


def test_two_runs_are_compared_as_on_the_command_line(finished: tuple[Fleet, Dashboard]) -> None:
    fleet, opened = finished
    fleet.run("--name", "r2", "--workers", "2", "--attempts", "1", "--first", "4")
    assert opened.get("/api/compare?a=r&b=r2") == fleet("compare", "r", "r2", "--json").json
    opened.ask("/api/compare?a=r&b=r").refused(404, "with itself")
    opened.ask("/api/compare?a=r").refused(404, "two runs")
    assert opened.get("/api/pools") == []
    assert opened.get("/api/machines") == []
    assert {row[0] for row in opened.get("/api/money")["runs"]["rows"]} == {"r", "r2"}
    fleet("gc", "r2", "--yes")
    opened.ask("/api/runs/r2").refused(404, "no run or pool 'r2'")


# -- what agents wrote -------------------------------------------------------------------------------


def test_a_hostile_attempt_is_shown_and_leads_nowhere(finished: tuple[Fleet, Dashboard]) -> None:
    _, opened = finished
    tables = opened.snapshot()
    assert tables.tasks[NASTY]["domain"] == MARKUP
    number = tables.tasks[NASTY]["attempt"]
    base = f"/api/runs/r/attempts/{part(f'{NASTY}.{number}')}"
    found = opened.get(base)
    assert found["attempt"]["task"] == NASTY
    files = dict(found["files"])
    assert 'sub/<b>"q".html' in files
    assert not {"passwd", "pipe"} & set(files)
    assert not any(path.startswith("root") for path in files)
    assert found["steps"][0]["point"] == [3, 4]

    log = opened.get(f"{base}/log?from=0&most=400")
    assert "^[[2J^[]0;title^G <script>alert(1)</script> \\u202e gnirts \ufffd" in log["text"]
    assert (log["from"], log["to"], log["live"]) == (0, 400, False)
    whole = "".join(
        opened.get(f"{base}/log?from={start}&most=500000")["text"] for start in range(0, log["size"], 500_000)
    )
    assert "x" * 1_100_000 in whole
    assert opened.get(f"{base}/log?from=-5")["to"] == log["size"]

    image = opened.ask(f"{base}/image/real.png")
    assert (image.code, image.headers["content-type"]) == (200, "image/png")
    assert image.headers["x-content-type-options"] == "nosniff"
    opened.ask(f"{base}/image/fake.png").refused(404, "no PNG")
    opened.ask(f"{base}/image/huge.png").refused(413, "too large")
    page = opened.ask(f"{base}/file/{part('sub/<b>' + chr(34) + 'q' + chr(34) + '.html')}")
    assert page.body == b"inner\n"
    assert page.headers["content-type"] == "application/octet-stream"
    assert page.headers["content-disposition"].startswith("attachment;")
    for path in (
        *("passwd", "root/etc/passwd", "pipe", "sub", "../../../../../etc/passwd", "..%2f..%2fresults.json"),
        *(
            "%2e%2e/%2e%2e/results.json",
            "/etc/passwd",
            "%2fetc%2fpasswd",
            "sub/../../../results.json",
            "a%00b",
        ),
    ):
        for kind in ("file", "image"):
            opened.ask(f"{base}/{kind}/{path}").refused(404)
    opened.ask(f"/api/runs/{part('../..')}").refused(404)
    opened.ask("/client/..%2f..%2fserver.py").refused(404)
    opened.ask("/client/%2e%2e/server.py").refused(404)


# -- safety ------------------------------------------------------------------------------------------


def test_only_who_has_the_link_gets_in(finished: tuple[Fleet, Dashboard]) -> None:
    _, opened = finished
    opened.ask("/api/runs", token=False).refused(401, "token is missing", "evalfleet serve")
    asked = opened.ask("/", token=False)
    asked.refused(401, "token is missing")
    assert asked.headers["content-type"].startswith("text/html")
    opened.ask("/?token=wrong", token=False).refused(401, "token is wrong")
    entered = opened.ask(f"/runs/r?step=2&token={opened.token}", token=False)
    assert (entered.code, entered.headers["location"]) == (303, "/runs/r?step=2")
    cookie = entered.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    by_cookie = {"Cookie": cookie.partition(";")[0]}
    answer = opened.ask("/api/runs", headers=by_cookie, token=False)
    assert answer.code == 200
    assert "script-src 'self'" in answer.headers["content-security-policy"]
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["cache-control"] == "no-store"
    assert not any(name.startswith("access-control") for name in answer.headers)
    from_elsewhere = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    entered = opened.ask(f"/?token={opened.token}", headers=from_elsewhere, token=False)
    assert (entered.code, b'content="0;url=/"' in entered.body) == (200, True)


def test_pages_of_others_reach_nothing(finished: tuple[Fleet, Dashboard]) -> None:
    _, opened = finished
    for host in (
        "evil.example",
        "evil.example:80",
        f"evil.example:{opened.port}",
        "127.0.0.1.evil.example",
        "",
    ):
        opened.ask("/api/runs", headers={"Host": host}).refused(421, "printed link")
    for host in (f"localhost:{opened.port}", "127.0.0.1:9", "[::1]:8765"):  # as by `ssh -L 9:...`
        assert opened.ask("/api/runs", headers={"Host": host}).code == 200
    for origin in ("http://evil.example", "null", f"http://127.0.0.1:{opened.port + 1}"):
        opened.ask("/api/runs", headers={"Origin": origin}).refused(403, "another origin")
    opened.ask("/api/runs", headers={"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"}).refused(403)
    opened.ask("/api/runs/r/steer", "POST", {}, PAUSE).refused(403, "X-Evalfleet")
    preflight = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    opened.ask("/api/runs", "OPTIONS", preflight).refused(403)
    opened.change("/api/runs/r/steer", PAUSE).refused(400, "is over")
    opened.change("/api/runs/r/steer", {"verb": "explode"}).refused(400, "'explode'", "there are")
    opened.change("/api/runs/r/steer", ["set"]).refused(400, "no change")
    opened.change("/api/runs/r/steer", {"verb": "set", "reason": "x" * 100_000}).refused(400, "too much")


# -- live --------------------------------------------------------------------------------------------


def see_inside(opened: Dashboard) -> None:
    """The output, the step and the screen of an attempt that runs, and the machine that it runs on."""

    def log() -> bool:
        return "begun" in opened.get("/api/runs/r/attempts/a.0/log")["text"]

    until(log, "the output of an attempt that runs")
    screens = until(lambda: [row for row in opened.get("/api/runs/r/wall")["screens"] if row[2]], "a screen")
    ((machine, attempt, _, _, url),) = screens
    assert (attempt, opened.ask(url).body) == ("a.0", PNG)
    found = opened.get(f"/api/runs/r/machines/{part(machine)}")
    assert (found["machine"]["attempt"], found["machine"]["step"]) == ("a.0", 1)
    assert found["series"]["columns"][0] == "at"
    assert [row[1] for row in found["attempts"]["rows"]] == ["a"]
    tunnel = f"/api/runs/r/machines/{part(machine)}/screen-tunnel"
    opened.change(tunnel, {}).refused(400, "machines of b have no screen")


def test_a_live_run_is_followed_steered_and_nothing_is_missed(fleet: Fleet) -> None:
    (fleet.folder / "real.png").write_bytes(PNG)
    step = """echo '{"n": 1, "action": "click", "screenshot": "real.png"}' > $EVALFLEET_OUT/traj.jsonl"""
    first = f"echo begun; cp {fleet.folder}/real.png $EVALFLEET_OUT; {step}; gate 1; score 1"
    fleet.bench([task("a", first), task("b", "gate 2; score 0"), task("c")], steps="traj.jsonl")
    run = fleet.start_run("--workers", "2")
    fleet.started("a.0", "b.0")
    opened = dashboard(fleet)
    shared = dashboard(fleet, "--read-only")
    shared.change("/api/runs/r/steer", PAUSE).refused(403, "read-only")
    assert shared.get("/api/session")["read_only"] is True
    tables = opened.snapshot()
    assert tables.run["live"]
    assert outcomes(tables)["c"] == "waiting"
    (row,) = opened.get("/api/runs")["runs"]["rows"]
    assert row[5:7] == ["running", True]

    see_inside(opened)
    with opened.stream(after=tables.seq) as stream:
        said = opened.change("/api/runs/r/steer", {**PAUSE, "reason": "to look"})
        assert said.code == 202, said
        while not tables.run["paused"]:
            tables.take(stream.next()[1])
        assert tables.run["steering"][-1]["reason"] == "to look"
        (note,) = tables.run["notes"]
        assert re.fullmatch(r"paused by \S+: to look", note)
        listed = opened.get("/api/machines")
        assert {(row["machine"], row["run"], row["phase"]) for row in listed} == {
            ("worker-1", "r", "ready"),
            ("worker-2", "r", "ready"),
        }
        fleet.open_gate("1")
        while outcomes(tables)["a"] != "pass":
            tables.take(stream.next()[1])
    # the stream is cut, and the server is another one when it is taken up again
    opened.process.kill()
    opened = dashboard(fleet)
    opened.change("/api/runs/r/steer", {"verb": "set", "arguments": {"workers": 2}})
    fleet.open_gate("2")
    run.finish()
    with opened.stream(after=tables.seq) as stream:
        while tables.run["status"] == "running":
            tables.take(stream.next()[1])
        assert outcomes(tables) == {"a": "pass", "b": "fail", "c": "pass"}
        whole = opened.snapshot()
        assert tables.tasks == whole.tasks
        assert tables.attempts == whole.attempts
        assert {id: row["phase"] for id, row in tables.machines.items()} == {
            id: row["phase"] for id, row in whole.machines.items()
        }
        fleet("gc", "r", "--yes")
        while (event := stream.next())[0] != "gone":
            pass
        assert event == ("gone", {})
    opened.ask("/api/runs/r").refused(404, "there is no run")
    for each in (opened, shared):
        each.process.interrupt()
        each.process.wait()


def test_the_server_ends_in_silence_while_pages_are_open(fleet: Fleet) -> None:
    fleet.bench([task("a")])
    fleet.run()
    for after in (None, dashboard_seq(fleet)):
        opened = dashboard(fleet)
        with opened.stream(after=after):
            opened.process.interrupt()
            done = opened.process.wait()
        assert done.err == "", done


def dashboard_seq(fleet: Fleet) -> int:
    """Show the run once, so that it is kept, and return the number of its last event."""
    opened = dashboard(fleet)
    seq = opened.snapshot().seq
    opened.process.interrupt()
    opened.process.wait()
    return seq


# -- bad input ---------------------------------------------------------------------------------------


def test_what_cannot_be_served_is_said_in_one_line(fleet: Fleet, say: Callable[..., str]) -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"port {port} is taken: name another with --port" in say("serve", "--port", port, code=2)
    assert "it must be from 0 to 65535" in say("serve", "--port", "70000", code=2)
    assert "say --yes, or reach this one by `ssh -L`" in say("serve", "--host", "0.0.0.0", code=2)
    assert "no address of this computer" in say("serve", "--host", "no.such.invalid", "--yes", code=2)
    missing = fleet.folder / "without" / "starlette"
    missing.mkdir(parents=True)
    (missing / "__init__.py").write_text("raise ModuleNotFoundError(name='starlette')")
    path = os.pathsep.join((str(missing.parent), fleet.environ["PYTHONPATH"]))
    fleet("serve", env={"PYTHONPATH": path}).refused("starlette", "pip install", "[web]")

    opened = dashboard(fleet)
    assert "there are no runs here yet" in until(lambda: opened.process.out.splitlines()[1:], "a line")[0]
    assert opened.get("/api/runs")["runs"]["rows"] == []
    opened.ask("/api/runs/r").refused(404, "nothing was run")
    fleet.bench([task("a")])
    fleet.run()
    assert outcomes(opened.snapshot()) == {"a": "pass"}, "a run that was started later is there"
    with closing(sqlite3.connect(fleet.home / "fleet.db")) as db:
        db.execute("PRAGMA user_version = 99")
    opened.ask("/api/runs").refused(409, "newer evalfleet")
    opened.process.interrupt()
    opened.process.wait()
    assert "newer evalfleet" in say("serve", "--port", "0", code=2)
