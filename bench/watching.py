"""What watching costs: a picture of 100 machines, and a look by the rules of alerts, as shares of a core."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from evalfleet.channels.samples import Load, Samples
from evalfleet.events import (
    AttemptEnded,
    AttemptStarted,
    Event,
    MachineReady,
    MachineRequested,
    MachineUp,
    RunPlanned,
    TasksPlanned,
)
from evalfleet.model import (
    SECOND,
    Alerting,
    AttemptId,
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
from evalfleet.names import machine_id
from evalfleet.state import RunState, apply
from evalfleet.views.alert_watch import LOOK_S, situation_of
from evalfleet.views.alerts import holding
from evalfleet.views.frame import FrameSize, frame
from evalfleet.views.progress import ProgressReader
from evalfleet.views.terminal import SELDOM_S

from .result import Result, below, rounded

MACHINES, TASKS, SCORED = 100, 1000, 300
START: Micros = 1_767_364_252 * SECOND


def run(quick: bool) -> Result:
    times = 2 if quick else 50
    state, now = _busy_run()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        samples = Samples(home)
        for machine in state.ready:
            logged = {str(attempt): 5 for attempt in state.machines[machine].open}
            for n in range(60):
                samples.keep(machine, Load(0.5, 0.5, 0.5), logged, now=START + 10 * n * SECOND)
        reader = ProgressReader(home, every_s=0.0)
        progress = reader(state)
        read_s = _cpu_s(lambda: reader(state), times)
        draw_s = _cpu_s(lambda: frame(state, now, FrameSize(80, 120), (), False, progress), times)
        look_s = _cpu_s(lambda: holding(situation_of(home, state, now, Alerting()), Alerting()), times)
    often = max(0.1, min(51 * draw_s, SELDOM_S + draw_s))  # as the display does
    watch_share = read_s + draw_s / often
    alerts_share = look_s / LOOK_S
    figures = {
        "machines": MACHINES,
        "read_progress_ms": rounded(read_s * 1000),
        "draw_ms": rounded(draw_s * 1000),
        "watch_share_of_a_core": rounded(watch_share),
        "alerts_look_ms": rounded(look_s * 1000),
        "alerts_share_of_a_core": rounded(alerts_share),
    }
    aims = {
        "watch_share_of_a_core": below(watch_share, 0.03),
        "alerts_share_of_a_core": below(alerts_share, 0.01),
    }
    return Result("watching", figures, aims)


def _cpu_s(work: Callable[[], object], times: int) -> float:
    begun = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - begun) / times


def _busy_run() -> tuple[RunState, Micros]:
    state, now = RunState(), START

    def tell(event: Event) -> None:
        apply(state, now, event)

    offer = Offer("cloud", "D4", "east", 0.2)
    tell(RunPlanned(Plan("r", "b", ("cloud",), limits=Limits(workers=MACHINES), home="abcdef"), TASKS))
    tell(TasksPlanned(tuple(Task(TaskId(f"t_{n}")) for n in range(TASKS))))
    machines: list[MachineId] = []
    for n in range(MACHINES):
        machine = machine_id("r", "abcdef", n + 1)
        machines.append(machine)
        tell(MachineRequested(machine, f"worker-{n + 1}", n, offer, after(now, 14_400)))
        tell(MachineUp(machine))
        tell(MachineReady(machine))
    for n in range(SCORED + MACHINES):
        attempt = AttemptId(f"t_{n}.0")
        tell(AttemptStarted(attempt, TaskId(f"t_{n}"), machines[n % MACHINES]))
        if n < SCORED:
            now = after(now, 1.0)
            tell(AttemptEnded(attempt, Scored(1.0, True), 60.0 + n % 30))
    return state, now
