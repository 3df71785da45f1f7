"""What a watcher sees: the picture at any size, plain lines, JSON lines, tables."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalfleet import events as ev
from evalfleet.model import AttemptId, Broken, Cause, Scored, Task, TaskId
from evalfleet.planning.values import parse_duration
from evalfleet.state import RunState, apply
from evalfleet.views import format
from evalfleet.views.format import interval, pairs, table
from evalfleet.views.frame import FrameSize, as_text, frame
from evalfleet.views.lines import BURST
from evalfleet.views.notable import notable
from evalfleet.views.progress import Progress
from evalfleet.views.results import results
from evalfleet.views.stats import wilson
from evalfleet.views.terminal import Display, JsonLines, PlainLines, is_screen, json_lines, picture, view_for
from sim.scenario import draw
from sim.simulate import simulate
from tests.unit.views_feed import Feed, a_mixed_run


def busy(machines: int) -> Feed:
    """So many machines, some of them booting, with a task each."""
    feed = Feed(tasks=machines * 3, machines=machines)
    for n in range(1, machines + 1):
        if n % 10 != 3:
            feed.start(f"t_{n}", n)
    feed.wait(75)
    for n in range(machines + 1, machines + 3):
        feed.machine(n, ready=False)
    return feed


@pytest.mark.parametrize("machines", [1, 8, 1000])
@pytest.mark.parametrize(
    "size", [FrameSize(80, 24), FrameSize(120, 40), FrameSize(200, 60), FrameSize(40, 10), FrameSize(20, 5)]
)
def test_the_picture_fits_any_terminal(machines: int, size: FrameSize) -> None:
    feed = busy(machines)
    events = [line for record in feed.records if (line := notable(feed.state, record))]
    lines = picture(feed.state, feed.now, size, events).split("\n")
    assert max(format.cells(line) for line in lines) < size.width
    assert len(lines) < size.height


def test_what_does_not_fit_is_summed_up() -> None:
    feed = busy(1000)
    text = picture(feed.state, feed.now, FrameSize(80, 24))
    assert text.endswith("\n... and 986 more: 886 running, 98 idle, 2 booting")
    assert "worker-1 " in text


def test_of_100_machines_those_in_trouble_are_shown_and_no_line_is_cut_at_80_columns() -> None:
    feed = Feed(tasks=1000, machines=100, usd_per_hour=0.2)
    feed.add(ev.RunSteered("set", "ann", budget_usd=50.0))
    for n in range(100):
        feed.start(f"t_{n}", n + 1)
    for n in range(20):
        feed.end(AttemptId(f"t_{n}.0"), Scored(1.0, True))
    feed.lose(70, Cause.CONNECTION)
    feed.wait(900)
    shown = as_text(frame(feed.state, feed.now, FrameSize(80, 24)))
    assert ".." not in shown.replace("... and", "")
    assert [line.split()[0] for line in shown.splitlines() if " leaving " in line] == ["worker-70"]
    assert shown.endswith("... and 85 more: 79 running, 6 idle")
    assert len(shown.splitlines()) < 24


def test_the_interval_of_a_run_with_repeats_is_that_of_its_report() -> None:
    feed = Feed(tasks=0, machines=1)
    tasks = (Task(TaskId(f"{of}~{n}"), origin=of, repeat=n) for of in ("a", "b", "c") for n in range(1, 7))
    feed.add(ev.TasksPlanned(tuple(tasks)))
    for known in list(feed.state.tasks.values()):
        feed.attempt(known.task.id, Scored(float(known.task.origin == "a"), known.task.origin == "a"))
    document = results(feed.state, Path("/h/run1"))
    live = as_text(frame(feed.state, feed.now, FrameSize(80, 24)))
    assert f"95% interval {interval(document['success_rate_ci'])})" in live
    assert document["pass_at_k"]["1"]["ci"] == pytest.approx(document["success_rate_ci"], abs=1e-5)
    assert f"95% interval {interval(wilson(6, 18))}" not in live


def test_the_picture_of_a_small_run() -> None:
    feed = Feed(tasks=10, machines=2, usd_per_hour=3.6)
    feed.attempt("t_0", Scored(1.0, True))
    feed.attempt("t_1", Broken(Cause.RESULT, "nothing written"))
    feed.start("t_2")
    feed.wait(30)
    assert picture(feed.state, feed.now, FrameSize(80, 24)) == (
        "run1  bench, m-1 on lab                                           running 2m30s\n"
        "██████▚▚▚▚▚▚▚▒▒▒▒▒▒▒░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░ 2/10  20%\n"
        "1 pass  0 fail  1 broken  1 running  7 waiting\n"
        "pass rate        100.0%  (1 of 1; 95% interval 20.7% to 100.0%)\n"
        "pace             24.0 an hour, about 7m30s left\n"
        "cost             $0.30, about $1.20 in all, $7.20 an hour\n"
        "broken attempts  result 1\n"
        "\n"
        "worker-1  running   t_2                        30s  1 scored of 3         $0.15\n"
        "worker-2  idle                                      0 scored of 0         $0.15"
    )


def test_a_machine_that_is_set_up_shows_the_step_and_what_it_says() -> None:
    feed = Feed(tasks=1, machines=0)
    machine = feed.machine(1, ready=False)
    feed.add(ev.MachineUp(machine, "10.0.0.1"))

    def shown() -> str:
        return picture(feed.state, feed.now, FrameSize(80, 24)).splitlines()[-1]

    feed.add(ev.MachineStep(machine, "image"))
    assert shown().startswith("worker-1  preparing image  ")
    feed.add(ev.MachineStep(machine, "image", "pulling for 60 s"))
    assert shown().startswith("worker-1  preparing image: pulling for 60 s  ")
    feed.add(ev.MachineReady(machine))
    assert shown().startswith("worker-1  idle    ")
    assert "image" not in shown()


def test_names_cannot_move_the_cursor() -> None:
    feed = Feed(tasks=1, machines=0)
    nasty = Task(TaskId("a\x1b[2J\r\nb\u202e日本"), "d")
    feed.add(ev.TasksPlanned((nasty,)))
    machine = feed.machine(1)
    feed.add(ev.AttemptStarted(AttemptId("x"), nasty.id, machine))
    text = picture(feed.state, feed.now, FrameSize(80, 24))
    assert not [c for c in text if not c.isprintable() and c != "\n"]
    assert "日本" in text


@pytest.mark.parametrize("seed", range(20))
def test_any_run_can_be_watched_from_its_first_event(seed: int) -> None:
    state, said = RunState(), list[str]()
    plain = PlainLines(said.append)
    for record in simulate(draw(seed)).store.read():
        apply(state, record.at, record.event)
        picture(state, record.at, FrameSize(80, 24))
        plain.update(state, record.at, [record])
    plain.close(state)
    assert said
    assert all("\n" not in line and line.isprintable() for line in said)


def test_plain_lines_tell_each_end_and_each_trouble() -> None:
    feed = Feed(tasks=5, machines=2)
    said: list[str] = []
    plain = PlainLines(lambda line: said.append(line[9:]))
    plain.update(feed.state, feed.now, feed.records)
    begun = len(feed.records)
    feed.attempt("t_0", Scored(1.0, True))
    feed.attempt("t_1", Scored(0.25))
    lost = feed.start("t_2", 2)
    feed.lose(2)
    feed.end(lost, Broken(Cause.EVICTED, "taken back"))
    feed.finish()
    plain.update(feed.state, feed.now, feed.records[begun:])
    assert said[0] == "run1: 5 tasks of bench with m-1 on lab, up to 2 machines"
    assert said[-5:] == [
        "[1/5] t_0 on worker-1: pass in 1m00s",
        "[2/5] t_1 on worker-1: fail (score 0.25) in 1m00s",
        "worker-2 given up (evicted): the place took it back",
        "[2/5] t_2 on worker-2: evicted (taken back), to be retried",
        "the run is over: done",
    ]


def test_plain_lines_are_few_when_much_happens() -> None:
    feed = Feed(tasks=3000, machines=1)
    said: list[str] = []
    plain = PlainLines(said.append)
    plain.update(feed.state, feed.now, feed.records)
    for second in range(20):
        begun = len(feed.records)
        for n in range(100):
            feed.end(feed.start(f"t_{100 * second + n}"), Scored(1.0, True))
        feed.wait(1)
        plain.update(feed.state, feed.now, feed.records[begun:])
    plain.close(feed.state, feed.now)
    assert len(said) <= BURST + 2 * 20 + 8
    assert "scored, " in said[-1]
    assert "2,000 of 3,000 settled" in said[-1]
    told = sum(int(m[1].replace(",", "")) for line in said if (m := re.search(r" ([\d,]+) scored,", line)))
    assert told + sum(" on worker-1: " in line for line in said) == 2000


def test_who_comes_late_is_told_where_the_run_stands() -> None:
    feed = Feed(tasks=100, machines=1)
    for n in range(50):
        feed.attempt(f"t_{n}", Scored(1.0, True))
    feed.wait(30)
    said: list[str] = []
    PlainLines(said.append).update(feed.state, feed.now, feed.records)
    assert len(said) == 2
    assert "50 of 100 settled, pass rate 100.0%, about 50m00s left" in said[1]


def test_json_lines_are_one_object_each() -> None:
    objects = [json.loads(line) for line in json_lines(a_mixed_run().records)]
    assert objects[0]["kind"] == "RunPlanned"
    assert objects[1] == {"seq": 2, "at": "2026-01-02T14:30:52Z", "kind": "TasksPlanned", "count": 5}
    assert [o["seq"] for o in objects] == list(range(1, len(objects) + 1))
    requested = next(o for o in objects if o["kind"] == "MachineRequested")
    assert requested["expires_at"] == "2026-01-02T18:30:52Z"
    ended = next(o for o in objects if o["kind"] == "AttemptEnded")
    assert ended["outcome"]["type"] == "scored"


class Screen(io.StringIO):
    """Something that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_the_view_suits_where_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    assert isinstance(view_for(Screen()), Display)
    assert isinstance(view_for(io.StringIO()), PlainLines)
    assert isinstance(view_for(Screen(), json=True), JsonLines)
    monkeypatch.setenv("TERM", "dumb")
    assert not is_screen(Screen())


def test_nobody_reading_does_not_end_the_run() -> None:
    class Gone(io.StringIO):
        def write(self, s: str) -> int:
            raise BrokenPipeError

    feed = a_mixed_run()
    view_for(Gone()).update(feed.state, feed.now, feed.records)


@pytest.mark.parametrize("no_color", [True, False])
def test_a_display_draws_and_leaves(monkeypatch: pytest.MonkeyPatch, no_color: bool) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    out, feed = Screen(), Feed(tasks=3, machines=1)
    display = Display(out)
    display.update(feed.state, feed.now, feed.records)
    feed.start("t_0")
    display.update(feed.state, feed.now)
    drawn = len(out.getvalue())
    display.update(feed.state, feed.now)
    assert len(out.getvalue()) == drawn  # nothing changed, nothing drawn
    display.close(feed.state, feed.now)
    display.close()
    assert ("\x1b[32m" in out.getvalue()) == (not no_color)
    assert out.getvalue().rstrip().endswith("\x1b[?25h")  # the cursor is back


@given(st.text(max_size=40), st.integers(0, 30))
def test_padding_is_exact(text: str, width: int) -> None:
    assert format.cells(format.pad(format.clean(text), width)) == width


def test_tables_are_aligned_and_cut_to_size() -> None:
    rows = [("a", 3, "short"), ("日本", 12345, None), ("long", 1, "x" * 60)]
    whole = table(["name", "n", "what"], rows, right=["n"])
    assert whole.split("\n")[:3] == ["name      n  what", "a         3  short", "日本  12345  -"]
    cut = table(["name", "n", "what"], rows, right=["n"], width=40)
    assert max(format.cells(line) for line in cut.split("\n")) == 40
    assert cut.split("\n")[3].endswith("..")
    assert pairs([("a", 1), ("long", "x")]) == "a     1\nlong  x"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (4.25, "4.2s"),
        (9.97, "10s"),
        (37.2, "37s"),
        (59.6, "1m00s"),
        (3725, "1h02m"),
        (100_000, "27h46m"),
        (None, "-"),
    ],
)
def test_durations_are_read_at_a_glance(seconds: float | None, text: str) -> None:
    assert format.duration(seconds) == text


def test_money_and_counts() -> None:
    assert [format.usd(x) for x in (0.0, 0.00001, 0.0072, 1204.5, None)] == [
        "$0.00",
        "under $0.0001",
        "$0.0072",
        "$1,204.50",
        "unknown",
    ]
    assert format.counted({"evicted": 2, "machine_lost": 1200, "boot": 0}) == "machine lost 1,200, evicted 2"
    assert format.plural(2, "retry") == "2 retries"


def test_a_line_of_a_machine_has_the_step_the_idle_time_and_the_cost() -> None:
    feed = Feed(tasks=200, machines=100, usd_per_hour=3.6)
    attempts = [feed.start(f"t_{n}", machine=n + 1) for n in range(100)]
    feed.wait(600)
    progress = {attempt: Progress(n, idle_s=45.0 * (n % 2)) for n, attempt in enumerate(attempts)}
    rows = frame(feed.state, feed.now, FrameSize(80, 120), (), True, progress)
    lines = as_text(rows).splitlines()
    assert all(len(line) <= 79 for line in lines)
    assert len([line for line in lines if "running" in line and "step" in line]) == 100
    (line,) = (line for line in lines if line.startswith("worker-8 "))
    assert line.split() == ["worker-8", "running", "t_7", "10m00s", "step", "7", "idle", "45s", "$0.60"]


def test_the_time_left_has_a_range_and_money_is_shown_against_the_budget() -> None:
    feed = Feed(tasks=20, machines=2, usd_per_hour=3.6)
    feed.add(ev.RunSteered("set", "ann", budget_usd=1.0))
    for n in range(6):
        feed.attempt(f"t_{n}", Scored(1.0, True), seconds=20.0 * (1 + n % 3))
    text = picture(feed.state, feed.now, FrameSize(100, 24))
    (pace,) = (line for line in text.splitlines() if line.startswith("pace"))
    low, middle, high = eta_parts(pace)
    assert low < middle < high
    (cost,) = (line for line in text.splitlines() if line.startswith("cost"))
    assert " of $1.00 (" in cost


def eta_parts(pace: str) -> tuple[float, float, float]:
    found = re.search(r"about (\S+) left \((\S+) to (\S+)\)", pace)
    assert found is not None, pace
    middle, low, high = (parse_duration(word, "pace") if word != "0s" else 0.0 for word in found.groups())
    return low, middle, high
