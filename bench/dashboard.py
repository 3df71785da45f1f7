"""The dashboard's server: how soon a browser has what it shows, and what a hundred watchers cost.

A run of 2,000 and one of 20,000 tasks are asked for by a program and by a browser: `cold`, by a server that
was just started, and `warm`, again.
Then a live run is written as fast as given, and 100 streams are read: the time from an event being durable to
its arrival.
A real browser opens the same runs, and keeps one open while an hour's events are replayed in a minute.
A page's wall clock is from the click on its link until the numbers and the table of tasks are drawn
(`page_*_s`), then until a filter has taken effect (`filtered_s`) and a task's page is there (`opened_s`). The
browser's own start is not in it. CPU seconds are told beside it, which say more on a busy computer. All of it
is meant to take less than five minutes on a quiet one.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from playwright.sync_api import BrowserContext, CDPSession, Page, sync_playwright

from evalfleet.events import (
    AttemptCollected,
    AttemptEnded,
    AttemptStarted,
    ControllerStarted,
    Event,
    MachineCondemned,
    MachineDeleted,
    MachineReady,
    MachineRequested,
    MachineUp,
    RunEnded,
    RunPlanned,
    TasksPlanned,
)
from evalfleet.journal import Holder, Store
from evalfleet.model import (
    SECOND,
    AttemptId,
    Broken,
    Cause,
    Cost,
    Limits,
    MachineId,
    Micros,
    Offer,
    Plan,
    Scored,
    Task,
    TaskId,
    after,
)
from evalfleet.web.server import client_files

from .result import Aim, Figures, Result, below, rounded
from .workspace import Workspace, console_script, cpu_s, environment, memory_mb

LINK = re.compile(rb"http://127\.0\.0\.1:(\d+)/\?token=(\S+)")
RUNS = 1000
TASKS_A_RUN = 20
STARTED_AT = 1_800_000_000 * SECOND
SIZES = (2_000, 20_000)
LIVE_TASKS, MACHINES = 10_000, 100
WATCHERS, WATCHED_S, EVENTS_A_SECOND = 100, 30.0, 20
HOUR_TASKS, REPLAYED_S = 10_000, 60.0
"""A run of an hour: three events a task."""


def run(quick: bool) -> Result:
    sizes = (200,) if quick else SIZES
    with Workspace() as space:
        store = Store.open(space.home)
        now = time.time_ns() // 1000
        names = [f"run-{n:04d}" for n in range(20 if quick else RUNS)]
        store.create_streams(after(now, -RUNS), [(name, "run", run_events(name)) for name in names])
        figures: Figures = {"load": os.getloadavg()[0], "client_gzip_bytes": _client_bytes()}
        aims: dict[str, Aim] = {"client_gzip_bytes": below(figures["client_gzip_bytes"], 200_000)}
        # each is summed up when it ends; these were only written
        subprocess.run((*console_script(), "ls"), env=_env(space), stdout=subprocess.DEVNULL, check=True)
        with _Server(space) as server:
            for when in ("cold", "warm"):
                figures[f"runs_{when}_s"], cpu_s, figures["runs_gzip_bytes"] = server.get("/api/runs")
                figures[f"runs_{when}_cpu_s"] = cpu_s
                aims[f"runs_{when}_cpu_s"] = below(cpu_s, 0.3)
        for size in sizes:
            figures[f"tasks_{size}"] = found = _sized(space, store, size)
            for when, most in (("cold", 2.0), ("warm", 1.0)):
                aims[f"tasks_{size}.{when}_cpu_s"] = below(found[f"{when}_cpu_s"], most)
                aims[f"tasks_{size}.page_{when}_s"] = below(found[f"page_{when}_s"], most)
                aims[f"tasks_{size}.page_{when}_cpu_s"] = below(found[f"page_{when}_cpu_s"], most)
            aims[f"tasks_{size}.filtered_s"] = below(found["filtered_s"], 1.0)
            aims[f"tasks_{size}.cold_peak_mb"] = below(found["cold_peak_mb"], 200)
        seconds, watchers = (2.0, 5) if quick else (WATCHED_S, WATCHERS)
        figures["watched"] = watched = asyncio.run(_watched(space, store, watchers, seconds))
        aims["watched.p95_s"] = below(watched["p95_s"], 1.0)
        aims["watched.share_of_a_core"] = below(watched["share_of_a_core"], 0.25)
        aims["watched.rss_mb"] = below(watched["rss_mb"], 200)
        figures["replayed"] = replayed = _replayed(space, store, 30 if quick else HOUR_TASKS)
        aims["replayed.tab_mb"] = below(replayed["tab_mb"], 150)
        aims["replayed.first_load_kB"] = below(replayed["first_load_kB"], 200)
    return Result("dashboard", figures, aims)


def run_events(name: str) -> list[Event]:
    """A run on one machine in which every other task succeeded."""
    machine = MachineId(f"{name}-abc123-0001")
    tasks = tuple(Task(TaskId(f"t_{n}"), "t") for n in range(TASKS_A_RUN))
    events: list[Event] = [
        RunPlanned(Plan(name, "bench", model="m", home="abc123"), TASKS_A_RUN),
        TasksPlanned(tasks),
        ControllerStarted("host", 1, "0"),
        MachineRequested(machine, "worker-1", Offer("local", "process"), after(STARTED_AT, 14_400)),
        MachineUp(machine),
        MachineReady(machine),
    ]
    for n, task in enumerate(tasks):
        attempt = AttemptId(f"{task.id}.0")
        events += [
            AttemptStarted(attempt, task.id, machine),
            AttemptEnded(attempt, Scored(float(n % 2), bool(n % 2)), 1.0),
            AttemptCollected(attempt),
        ]
    events += [
        MachineCondemned(machine, "the run is over"),
        MachineDeleted(machine, STARTED_AT),
        RunEnded("done"),
    ]
    return events


def _client_bytes() -> int:
    """What a browser is sent of the client, charts included."""
    sent = ("index.html", "app.js", "style.css", "icon.svg", "vendor/uplot.js")
    return sum(len(client_files()[path].packed) for path in sent)


def _env(space: Workspace) -> dict[str, str]:
    return environment(EVALFLEET_HOME=str(space.home))


class _Server:
    """An `evalfleet serve` of its own."""

    def __init__(self, space: Workspace) -> None:
        self._space = space

    def __enter__(self) -> _Server:
        command = (*console_script(), "serve", "--port", "0")
        self.process = subprocess.Popen(command, env=_env(self._space), stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        link = LINK.search(self.process.stdout.readline())
        if link is None:
            raise RuntimeError("the dashboard did not start")
        self.port, self.token = int(link[1]), link[2].decode()
        return self

    def __exit__(self, *error: object) -> None:
        self.process.terminate()
        self.process.wait(30)
        if self.process.stdout is not None:
            self.process.stdout.close()

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}", "Accept-Encoding": "gzip"}

    def get(self, path: str) -> tuple[float, float, int]:
        """Wall and CPU seconds, and the bytes that came."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", headers=self.headers)
        cpu, begun = self.cpu_s(), time.perf_counter()
        with urllib.request.urlopen(request, timeout=600) as answer:
            size = len(answer.read())
        return rounded(time.perf_counter() - begun), rounded(self.cpu_s() - cpu), size

    def cpu_s(self) -> float:
        return cpu_s(self.process.pid)

    def waited_s(self) -> float:
        """How long its threads were ready to run, and others had the cores: not the dashboard's doing."""
        threads = Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")
        return sum(int(thread.read_text().split()[1]) for thread in threads) / 1e9

    def rss_mb(self) -> float:
        return memory_mb(self.process.pid)


def _sized(space: Workspace, store: Store, size: int) -> Figures:
    name = f"sized-{size}"
    store.create_past(name, time.time_ns() // 1000, list(_events(name, size)))
    (space.home / name).mkdir()
    path, found = f"/api/runs/{name}", Figures()
    with _Server(space) as server:
        found["cold_s"], found["cold_cpu_s"], found["gzip_bytes"] = server.get(path)
        found["cold_rss_mb"] = rounded(server.rss_mb())
        found["cold_peak_mb"] = rounded(memory_mb(server.process.pid, "VmHWM"))
        found["warm_s"], found["warm_cpu_s"], _ = server.get(path)
    with _Server(space) as server, Tab() as tab:
        for when in ("cold", "warm"):
            token = "" if when == "warm" else f"?token={server.token}"
            before = server.cpu_s()
            page = tab.load(f"http://127.0.0.1:{server.port}/runs/{name}{token}")
            found[f"page_{when}_s"] = page["wall_s"]
            found[f"page_{when}_cpu_s"] = rounded(page["page_cpu_s"] + server.cpu_s() - before)
        found["tab_mb"] = rounded(tab.memory_mb())
        found["filtered_s"] = tab.click(".chip:has-text('fail')", until=".tasks header >> text= of ")
        found["opened_s"] = tab.click(".grid-body .grid-row a >> nth=0", until=".verdict")
    return found


# -- runs --------------------------------------------------------------------------------------------


def _beginning(name: str, size: int) -> Iterator[Event]:
    tasks = [Task(TaskId(f"task_{n:06d}"), f"domain_{n % 12}") for n in range(size)]
    plan = Plan(name, "bench", ("cloud",), model="m", home="abc123", limits=Limits(workers=MACHINES))
    yield RunPlanned(plan, size)
    for start in range(0, size, 1000):
        yield TasksPlanned(tuple(tasks[start : start + 1000]))
    yield ControllerStarted("host", 1, "0")
    for n in range(MACHINES):
        expires = after(time.time_ns() // 1000, 14_400)
        offer = Offer("cloud", "D4", "east", cost=Cost(usd_per_hour=0.2))
        yield MachineRequested(_machine(name, n), f"worker-{n + 1}", offer, expires)
        yield MachineUp(_machine(name, n), timings={"boot": 30.0})
        yield MachineReady(_machine(name, n), timings={"install": 5.0})


def _machine(name: str, n: int) -> MachineId:
    return MachineId(f"{name}-abc123-{n % MACHINES:04d}")


def _attempt(name: str, n: int) -> list[Event]:
    attempt = AttemptId(f"task_{n:06d}.0")
    outcome = Broken(Cause.TIMEOUT, "no end") if n % 50 == 0 else Scored(float(n % 2), bool(n % 2), n % 15)
    return [
        AttemptStarted(attempt, TaskId(f"task_{n:06d}"), _machine(name, n)),
        AttemptEnded(attempt, outcome, 60.0),
        AttemptCollected(attempt),
    ]


def _events(name: str, size: int) -> Iterator[tuple[Micros, Event]]:
    """A run that took an hour, and is over."""
    at = time.time_ns() // 1000 - 4000 * SECOND
    for event in _beginning(name, size):
        yield at, event
    for n in range(size):
        at += 3600 * SECOND // size
        for event in _attempt(name, n):
            yield at, event
    for n in range(MACHINES):
        yield at, MachineCondemned(_machine(name, n), "the run is over")
        yield at, MachineDeleted(_machine(name, n), at)
    yield at, RunEnded("done")


# -- watchers ----------------------------------------------------------------------------------------


async def _watched(space: Workspace, store: Store, watchers: int, seconds: float) -> Figures:
    name = "live"
    store.create_stream(name, "run", time.time_ns() // 1000, list(_beginning(name, LIVE_TASKS)))
    (space.home / name).mkdir()
    now = time.time_ns() // 1000
    journal = store.acquire(name, Holder.here(now), now)
    durable: dict[int, float] = {}
    arrived: list[dict[int, float]] = [{} for _ in range(watchers)]
    try:
        with _Server(space) as server:
            await asyncio.to_thread(server.get, f"/api/runs/{name}")
            seq = sum(1 for _ in store.read(name))
            readers = [asyncio.create_task(_read(server, name, seq, each)) for each in arrived]
            await asyncio.sleep(2.0)
            cpu, waited, begun, n = server.cpu_s(), server.waited_s(), time.perf_counter(), 0
            while time.perf_counter() - begun < seconds:
                events = _attempt(name, n)
                await journal.append(time.time_ns() // 1000, events)
                seq, n = seq + len(events), n + 1
                durable[seq] = time.perf_counter()
                await asyncio.sleep(len(events) / EVENTS_A_SECOND)
            share = (server.cpu_s() - cpu) / (time.perf_counter() - begun)
            waited = server.waited_s() - waited
            await asyncio.sleep(3.0)
            rss = server.rss_mb()
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
    finally:
        await journal.close()
    delays = sorted(_delays(durable, arrived))
    missed = watchers * len(durable) - len(delays)
    return {
        "watchers": watchers,
        "seconds": seconds,
        "events": 3 * n,
        "tasks": LIVE_TASKS,
        "p50_s": rounded(delays[len(delays) // 2]),
        "p95_s": rounded(delays[int(0.95 * len(delays))]),
        "max_s": rounded(delays[-1]),
        "missed": missed,
        "share_of_a_core": rounded(share),
        "waited_for_a_core_s": rounded(waited),
        "rss_mb": rounded(rss),
    }


def _replayed(space: Workspace, store: Store, tasks: int) -> Figures:
    """A tab that stays open while a run of an hour goes by in a minute."""
    name = "replayed"
    store.create_stream(name, "run", time.time_ns() // 1000, list(_beginning(name, tasks)))
    (space.home / name).mkdir()

    async def write() -> None:
        now = time.time_ns() // 1000
        journal = store.acquire(name, Holder.here(now), now)
        try:
            for n in range(tasks):
                await journal.append(time.time_ns() // 1000, _attempt(name, n))
                await asyncio.sleep(REPLAYED_S / HOUR_TASKS)
        finally:
            await journal.close()

    with _Server(space) as server, Tab() as tab:
        first = tab.load(f"http://127.0.0.1:{server.port}/?token={server.token}", until=".runs li")
        tab.load(f"http://127.0.0.1:{server.port}/runs/{name}")
        begun, events = tab.memory_mb(), 3 * tasks
        writer = threading.Thread(target=lambda: asyncio.run(write()))
        writer.start()
        done = (
            f"{tasks - len(range(0, tasks, 50)):,} "  # every fiftieth is broken, and waits to be tried again
        )
        tab.page.locator(".figures dd", has_text=done).first.wait_for(timeout=600_000)
        writer.join()
        return {
            "tasks": tasks,
            "events": events,
            "first_load_kB": first["kB"],
            "tab_mb_at_first": rounded(begun),
            "tab_mb": rounded(tab.memory_mb()),
        }


async def _read(server: _Server, run: str, after: int, arrived: dict[int, float]) -> None:
    """Notes when each number came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 24)
    lines = "".join(f"{name}: {value}\r\n" for name, value in server.headers.items())
    path = f"/api/runs/{run}/events?after={after}"
    writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{lines}\r\n".encode())
    try:
        while line := await reader.readline():
            if line.startswith(b"id: "):
                arrived.setdefault(int(line[4:]), time.perf_counter())
    finally:
        writer.close()


def _delays(durable: dict[int, float], arrived: list[dict[int, float]]) -> Iterator[float]:
    """From an event being durable to the first message that has it, of each watcher."""
    for each in arrived:
        numbers = iter(sorted(each))
        number = next(numbers, None)
        for seq, at in durable.items():
            while number is not None and number < seq:
                number = next(numbers, None)
            if number is not None:
                yield max(0.0, each[number] - at)


# -- a browser ---------------------------------------------------------------------------------------

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
LIMIT_MS = 300_000
FIRST_ROW = ".grid-body .grid-row"
"""What a run's page shows last: the first task of its table."""
BLANK = """data:text/html,<p>words</p><canvas></canvas>
<script>document.querySelector("canvas").getContext("2d").fillText("words", 9, 9)</script>"""
"""A page of a little of everything: the browser's own start, and that of what draws, is in no figure."""
DRAWN = "() => new Promise((done) => requestAnimationFrame(() => setTimeout(() => done(performance.now()))))"


class Tab:
    """One tab of a browser that has never seen anything: `warm` loads find what the first one left."""

    def __enter__(self) -> Self:
        self._playwright = sync_playwright().start()
        self._browser = self._playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        self.context: BrowserContext = self._browser.new_context(viewport={"width": 1280, "height": 900})
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(LIMIT_MS)
        self._session: CDPSession = self.context.new_cdp_session(self.page)
        self._session.send("Performance.enable", {"timeDomain": "threadTicks"})
        self._session.send("Network.enable")
        self.bytes = 0
        self.requests: list[str] = []
        self._session.on("Network.loadingFinished", self._loaded)
        self.page.goto(BLANK)
        self.page.evaluate(DRAWN)
        self.page.on("request", lambda request: self.requests.append(request.url))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._browser.close()
        self._playwright.stop()

    def _loaded(self, event: dict[str, Any]) -> None:
        self.bytes += int(event["encodedDataLength"])

    def load(self, url: str, until: str = FIRST_ROW) -> Figures:
        """Seconds until the page can be used, the CPU seconds of its main thread, and the bytes that came."""
        self.bytes, before = 0, self._cpu_s()
        self.page.goto(url, wait_until="commit")
        if self._cpu_s() < before:
            before = 0.0  # a new page has a counter of its own
        self.page.wait_for_selector(until)
        wall_s = float(self.page.evaluate(DRAWN)) / 1000
        return {
            "wall_s": rounded(wall_s),
            "page_cpu_s": rounded(self._cpu_s() - before),
            "kB": rounded(self.bytes / 1000),
        }

    def click(self, on: str, until: str) -> float:
        """Seconds from a click until what it leads to is drawn."""
        self.page.wait_for_selector(on)
        begun = float(self.page.evaluate("performance.now()"))
        self.page.click(on)
        self.page.wait_for_selector(until)
        return rounded((float(self.page.evaluate(DRAWN)) - begun) / 1000)

    def _cpu_s(self) -> float:
        metrics = self._session.send("Performance.getMetrics")["metrics"]
        return float(next(each["value"] for each in metrics if each["name"] == "TaskDuration"))

    def memory_mb(self) -> float:
        """What the tab's process has for itself, after what it no longer needs is gone."""
        self._session.send("HeapProfiler.collectGarbage")
        whole = self._browser.new_browser_cdp_session()
        processes = whole.send("SystemInfo.getProcessInfo")["processInfo"]
        whole.detach()
        tabs = [int(each["id"]) for each in processes if each["type"] == "renderer"]
        return max(map(_private_mb, tabs))


def _private_mb(pid: int) -> float:
    """Pages that no other process shares: the browser's own program is not counted for each tab."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024
