"""Trajectories in the shapes that agents write them, and the loads that machines tell."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from evalfleet.benchmarks.steps import LONGEST, read_steps
from evalfleet.benchmarks.waa.benchmark import WaaBenchmark
from evalfleet.channels.samples import FINE_S, Load, Sample, Samples, read_newest, read_series, thin
from evalfleet.channels.supervisor.host import ContainerEngine
from evalfleet.model import SECOND, NewestStep, Step, after
from evalfleet.names import STEPS
from evalfleet.views.progress import read_progress
from tests.unit.views_feed import Feed
from tests.waiting import PATIENCE_S

NOON = 1_767_355_200  # 2026-01-02T12:00:00Z


def lines(*steps: Any) -> bytes:
    return b"".join(json.dumps(step).encode() + b"\n" for step in steps)


def test_lines_in_our_own_words() -> None:
    raw = {"n": 3, "at": NOON, "action": "click 'ok'", "ok": True, "x": 7, "y": 8.5, "tokens": 120}
    assert read_steps(lines(raw)).steps == (
        Step(3, float(NOON), "click 'ok'", ok=True, x=7.0, y=8.5, tokens=120),
    )


def test_absurd_times_and_numbers_are_left_out() -> None:
    times = ("0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", "1960-01-01", 1e300, -5, 10**30)
    for at in times:
        found = read_steps(lines({"n": 1, "at": at, "x": 10**400, "y": -1e300, "tokens": 10**400}))
        assert found.steps == (Step(1),)


def test_lines_as_the_client_of_windows_agent_arena_writes_them() -> None:
    taken = {
        "step_num": 1,
        "action_timestamp": "20260102@120000",
        "action": "computer.click()",
        "reward": 0,
        "done": False,
        "screenshot_file": "screenshot-step_1_20260102@120000.png",
    }
    assert WaaBenchmark.steps == "traj.jsonl"
    found = read_steps(lines(taken, {"Error": "Traceback: no such window"}))
    shot = "screenshot-step_1_20260102@120000.png"
    assert found.steps[0] == Step(1, float(NOON), "computer.click()", screenshot=shot)
    assert found.steps[1].error == "Traceback: no such window"
    assert not found.problem


def test_a_trajectory_in_atif_has_the_agents_steps_with_tools_and_tokens() -> None:
    document = {
        "schema_version": "ATIF-v1.4",
        "agent": {"name": "a", "version": "1"},
        "steps": [
            {"step_id": 1, "source": "user", "message": "do it"},
            {
                "step_id": 2,
                "source": "agent",
                "timestamp": "2026-01-02T12:00:00Z",
                "message": "I will",
                "tool_calls": [{"tool_call_id": "c", "function_name": "bash", "arguments": {"cmd": "ls"}}],
                "metrics": {"prompt_tokens": 100, "completion_tokens": 20},
            },
            {"step_id": 3, "source": "agent", "message": "done"},
        ],
    }
    assert read_steps(json.dumps(document).encode()).steps == (
        Step(2, float(NOON), "bash(cmd=ls)", tokens=120),
        Step(3, action="done"),
    )


@pytest.mark.parametrize(
    ("data", "steps", "problem"),
    [
        (b"", 0, ""),
        (b'{"n": 1}\n{"n": ', 1, ""),
        (b'not json\n{"n": 1}\n', 1, "line 1 of the trajectory is no JSON object"),
        (b"[1, 2]\n\xff\xfe\n", 0, "line 1 of the trajectory is no JSON object"),
        (b'{"steps": [1, null, {"source": "agent"}]}', 1, ""),
        (b'{"n": "x", "at": "yesterday", "ok": "yes", "x": true, "tokens": -3}\n', 1, ""),
        (b"[" * 5000 + b"\n", 0, "line 1 of the trajectory is no JSON object"),
    ],
)
def test_nonsense_is_left_out_and_named_in_a_line(data: bytes, steps: int, problem: str) -> None:
    found = read_steps(data)
    assert (len(found.steps), found.problem) == (steps, problem)


def test_what_an_agent_says_is_bounded() -> None:
    (step,) = read_steps(lines({"action": "x" * 100_000, "n": 10**30})).steps
    assert len(step.action) == LONGEST
    assert step.n == 0


def test_samples_are_kept_as_a_series_every_ten_seconds_and_since_when_a_job_is_quiet(tmp_path: Path) -> None:
    samples, start = Samples(tmp_path), NOON * SECOND
    for second in range(0, 60, 5):
        size = min(second, 20)
        samples.keep("m-1", Load(0.5, 0.25, 0.1), {"t.0": size}, now=start + second * SECOND)
    series = read_series(tmp_path, "m-1")
    assert [(sample.at - start) // SECOND for sample in series] == [0, 10, 20, 30, 40, 50]
    assert series[0] == Sample(start, 0.5, 0.25, 0.1)
    newest = read_newest(tmp_path, "m-1")
    assert newest is not None
    assert newest.jobs["t.0"].grew_at == start + 20 * SECOND
    another = Samples(tmp_path)  # of the next controller
    another.keep("m-1", Load(0.5, 0.25, 0.1), {"t.0": 20}, now=start + 100 * SECOND)
    newest = read_newest(tmp_path, "m-1")
    assert newest is not None
    assert newest.jobs["t.0"].grew_at == start + 20 * SECOND, "it knows since when the job is quiet"
    another.drop("m-1")
    assert read_newest(tmp_path, "m-1") is None
    assert len(read_series(tmp_path, "m-1")) == 7, "the series outlives the machine"


def test_a_sample_has_the_network_and_the_container_engine_and_older_lines_are_still_read(
    tmp_path: Path,
) -> None:
    start, samples = NOON * SECOND, Samples(tmp_path)
    samples.keep("m", Load(0.5, 0.25, 0.1, 1_500_000.0, 20.0, 3), now=start)
    samples.keep("m", Load(0.5, 0.25, 0.1, None, None, -1), now=start + 10 * SECOND)
    with open(tmp_path / ".samples" / "m.series", "a", encoding="ascii") as file:
        file.write(f"{start + 20 * SECOND} 0.1 0.2 0.3\nnonsense\n")
    assert read_series(tmp_path, "m") == [
        Sample(start, 0.5, 0.25, 0.1, 1_500_000.0, 20.0, 3),
        Sample(start + 10 * SECOND, 0.5, 0.25, 0.1, None, None, -1),
        Sample(start + 20 * SECOND, 0.1, 0.2, 0.3),
    ]
    newest = read_newest(tmp_path, "m")
    assert newest is not None
    assert newest.containers == -1


def test_an_engine_is_asked_how_many_containers_run_and_nobody_waits_for_it(tmp_path: Path) -> None:
    address, pid = str(tmp_path / "sock"), tmp_path / "pid"
    engine = ContainerEngine(address, str(pid))
    assert engine.containers() is None, "there is no engine"
    pid.write_text("1")
    assert engine.containers() == ContainerEngine.DOWN
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        assert engine.containers() is None, "it is asked"
        server.settimeout(PATIENCE_S)
        link, _ = server.accept()
        assert link.recv(1000).startswith(b"GET /containers/json HTTP/1.0\r\n")
        link.sendall(b'HTTP/1.0 200 OK\r\n\r\n[{"Id":"a","ImageID":"x"},{"Id":"b","ImageID":"x"}]')
        link.close()
        assert engine.containers() == 2
        assert engine.containers() == ContainerEngine.DOWN, "it takes connections, and says nothing"
        pid.unlink()
        assert engine.containers() is None, "it was ended"


def test_a_clock_that_is_set_back_does_not_stop_the_series(tmp_path: Path) -> None:
    samples = Samples(tmp_path)
    samples.keep("m", Load(0.1, 0.1, 0.1), now=(NOON + 9000) * SECOND)
    samples.keep("m", Load(0.2, 0.1, 0.1), now=NOON * SECOND)
    assert [sample.cpu for sample in read_series(tmp_path, "m")] == [0.1, 0.2]


def test_a_clock_that_jumps_makes_nobody_idle_for_years_or_for_less_than_nothing(tmp_path: Path) -> None:
    feed = Feed(tasks=1, machines=1)
    attempt = feed.start("t_0")
    folder = tmp_path / "run1" / STEPS
    folder.mkdir(parents=True)
    step = NewestStep(feed.now, 1, Step(1, at=NOON * 1.0 + 1e9))
    (folder / f"{attempt}.json").write_bytes(msgspec.json.encode(step))
    for seconds, idle_s in ((30, 30.0), (-3600, 0.0)):
        progress = read_progress(tmp_path, feed.state, after(feed.now, seconds))
        assert progress[attempt].idle_s == idle_s, "what the machine's own clock says does not count"


def test_after_a_day_the_series_is_by_the_minute_and_it_is_bounded() -> None:
    now = (NOON + 10 * 86_400) * SECOND
    samples = [Sample(NOON * SECOND + n * 10 * SECOND, n % 2, 0.5, 0.5) for n in range(10 * 8640)]
    thinned = thin(samples, now)
    day = round(FINE_S * SECOND)
    assert sum(sample.at >= now - day for sample in thinned) == 8640
    assert len(thinned) <= 8640 + 6 * 1440 + 1
    assert thinned[0].cpu == 0.5, "a minute's mean"
    assert thinned == sorted(thinned)
