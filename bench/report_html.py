"""`report --format html`: 154 tasks with their last screenshots in one file, and what a browser asks for.

Screenshots are of 105 kB, as those of a desktop are. The file is opened from disk, and whatever goes over a
network is counted.
"""

from __future__ import annotations

import os
import random
import struct
import subprocess
import time
import zlib
from pathlib import Path

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
from evalfleet.journal import Store
from evalfleet.model import AttemptId, MachineId, Offer, Plan, Scored, Task, TaskId, after
from evalfleet.names import artefacts_folder

from .browser import Tab
from .result import Figures, Result, at_most, below, rounded
from .workspace import Workspace, console_script, environment

TASKS, STEPS, MACHINES, SHOT_BYTES = 154, 12, 10, 105_000
RUN = "arena"


def run(quick: bool) -> Result:
    tasks = 6 if quick else TASKS
    with Workspace() as space, Tab() as tab:
        now = time.time_ns() // 1000
        Store.open(space.home).create_stream(RUN, "run", now, _events(tasks, now))
        shot = _png(SHOT_BYTES)
        for n in range(tasks):
            folder = space.home / RUN / artefacts_folder(TaskId(f"task_{n}"), AttemptId(f"task_{n}.0"))
            folder.mkdir(parents=True)
            for step in range(STEPS if quick or n % 10 == 0 else 1):  # the last one counts
                (folder / f"step_{step}.png").write_bytes(shot)
            (folder / "evalfleet.log").write_text("a step was taken\n" * 2000)
        file = space.folder / "report.html"
        wall_s, cpu_s = _reported(space, file)
        size = file.stat().st_size
        opened = tab.load(file.as_uri())
        tab.page.goto(f"{file.as_uri()}#/runs/{RUN}/tasks/task_1")
        tab.page.wait_for_selector(".shot img")
        asked = [url for url in tab.requests if not url.startswith(("file:", "blob:", "data:"))]
        shown = file.read_bytes().count(b'id="image-')
    figures: Figures = {
        "tasks": tasks,
        "screenshots": shown,
        "report_s": rounded(wall_s),
        "report_cpu_s": rounded(cpu_s),
        "file_MB": rounded(size / 1e6),
        "opened": opened,
        "network_requests": len(asked),
        "load": os.getloadavg()[0],
    }
    aims = {
        "report_s": below(figures["report_s"], 5.0),
        "report_cpu_s": below(figures["report_cpu_s"], 5.0),
        "file_MB": at_most(figures["file_MB"], 25.0),
        "network_requests": at_most(figures["network_requests"], 0),
    }
    return Result("report-html", figures, aims)


def _reported(space: Workspace, file: Path) -> tuple[float, float]:
    """Wall and CPU seconds of the command."""
    command = (*console_script(), "report", RUN, "--format", "html", "-o", str(file))
    begun = time.perf_counter()
    env = environment(EVALFLEET_HOME=str(space.home))
    process = subprocess.Popen(command, env=env, cwd=space.folder, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"evalfleet report ended with {process.returncode}")
    return time.perf_counter() - begun, usage.ru_utime + usage.ru_stime


def _png(size: int) -> bytes:
    """A picture of 1280 by 800 that takes so many bytes: noise above, one shade below."""
    noise = random.Random(0)
    width, rows = 1280, size // 1280 - 1
    lines = [b"\0" + noise.randbytes(width) for _ in range(rows)] + [b"\0" + bytes(width)] * (800 - rows)
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, 800, 8, 0, 0, 0, 0)),
        (b"IDAT", zlib.compress(b"".join(lines))),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )


def _events(count: int, now: int) -> list[Event]:
    """A run on ten machines, some of whose tasks failed."""
    tasks = tuple(Task(TaskId(f"task_{n}"), f"domain_{n % 9}") for n in range(count))
    machines = [MachineId(f"{RUN}-abc123-{n:04d}") for n in range(MACHINES)]
    events: list[Event] = [
        RunPlanned(Plan(RUN, "bench", ("cloud",), model="m", home="abc123"), count),
        TasksPlanned(tasks),
        ControllerStarted("host", 1, "0"),
    ]
    for n, machine in enumerate(machines):
        offer = Offer("cloud", "D4", "east", 0.2)
        events += [
            MachineRequested(machine, f"worker-{n + 1}", n, offer, after(now, 14_400)),
            MachineUp(machine),
            MachineReady(machine),
        ]
    for n, task in enumerate(tasks):
        attempt = AttemptId(f"{task.id}.0")
        shots = tuple(f"step_{step}.png" for step in range(STEPS if n % 10 == 0 else 1))
        outcome = Scored(float(n % 2), bool(n % 2), STEPS, screenshots=shots)
        events += [
            AttemptStarted(attempt, task.id, machines[n % MACHINES]),
            AttemptEnded(attempt, outcome, 60.0),
            AttemptCollected(attempt),
        ]
    for machine in machines:
        events += [MachineCondemned(machine, "the run is over"), MachineDeleted(machine, now)]
    return [*events, RunEnded("done")]
