"""Each rule of alerts, replayed: seconds from its cause until a webhook has it.

What happens to the run is a replay under a clock of its own, a look every few seconds as the controller has
them; what is told goes to a real server, by the real thread, and takes its real time.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from msgspec import structs

from evalfleet import events as ev
from evalfleet.alert_rules import DEFAULTS
from evalfleet.channels.samples import Sample
from evalfleet.journal import Store
from evalfleet.model import (
    SECOND,
    Alerting,
    AttemptId,
    Broken,
    Cause,
    Cost,
    Lifetime,
    Limits,
    MachineId,
    Micros,
    Notify,
    Offer,
    Outcome,
    Plan,
    Scored,
    Task,
    TaskId,
    after,
)
from evalfleet.names import machine_id
from evalfleet.state import RunState, apply
from evalfleet.views.alert_watch import ENDED, LOOK_S, AlertWatch, read_alerts
from evalfleet.views.alerts import Situation
from evalfleet.views.progress import Progress

from .result import Figures, Result, at_least, at_most, rounded

START: Micros = 1_767_364_252 * SECOND
LATEST_S = 300.0
AFTERWARDS_S = 600.0
"""So long the replay goes on after an alert: it must not be told again."""
DELIVERY_S = 30.0
BUDGET_USD = 1.0


class Replay:
    """A run of two machines under a clock of its own, and what can be seen of it from outside."""

    def __init__(self, home: Path, queued: bool = False, ready: bool = True) -> None:
        self.state, self.second = RunState(), 0.0
        self.home = home
        self.idle_since: dict[AttemptId, float] = {}
        self.full_since: float | None = None
        self.asleep_since: float | None = None
        self.machines = [machine_id("r", "abcdef", n) for n in (1, 2)]
        limits = Limits(workers=2, attempts=3, budget_usd=BUDGET_USD)
        self.tell(ev.RunPlanned(Plan("r", "b", ("cloud",), limits=limits, home="abcdef"), 40))
        self.tell(ev.TasksPlanned(tuple(Task(TaskId(f"t_{n}")) for n in range(40))))
        offer = Offer("cloud", "D4", "east", cost=Cost(usd_per_hour=0.36), life=Lifetime(queues=queued))
        for n, machine in enumerate(self.machines):
            self.tell(ev.MachineRequested(machine, f"worker-{n + 1}", offer, after(self.now, 3 * 86_400)))
            if ready:
                self.tell(ev.MachineUp(machine))
                self.tell(ev.MachineReady(machine))

    @property
    def now(self) -> Micros:
        return after(START, self.second)

    def tell(self, event: ev.Event) -> None:
        apply(self.state, self.now, event)

    def start(self, task: int, machine: MachineId | None = None) -> AttemptId:
        known = self.state.tasks[TaskId(f"t_{task}")]
        attempt = AttemptId(f"t_{task}.{len(known.attempts)}")
        self.tell(ev.AttemptStarted(attempt, TaskId(f"t_{task}"), machine or self.machines[0]))
        return attempt

    def attempt(self, task: int, outcome: Outcome) -> None:
        self.tell(ev.AttemptEnded(self.start(task), outcome, 60.0))

    def situation(self) -> Situation:
        series: dict[MachineId, list[Sample]] = {}
        for since, load in ((self.full_since, (0.1, 0.1, 0.99)), (self.asleep_since, (0.01, 0.1, 0.1))):
            if since is not None:
                ages = range(int(self.second - since) // 10 * 10, -1, -10)
                series[self.machines[0]] = [Sample(self.now - age * SECOND, *load) for age in ages]
        progress = {
            attempt: Progress(3, idle_s=self.second - since) for attempt, since in self.idle_since.items()
        }
        return Situation(self.state, self.now, self.now, progress, series)


Happening = Callable[[Replay], float]
"""Does what the rule is about, and says after how many seconds that is so for as long as the rule wants."""


def _after_s(rule: str) -> float:
    return DEFAULTS[rule].after_s


def _stuck(run: Replay) -> float:
    run.idle_since[run.start(0)] = run.second
    return _after_s("job_stuck_no_progress")


def _lifeless(run: Replay) -> float:
    run.idle_since[run.start(0)] = run.asleep_since = run.second
    return _after_s("no_sign_of_life")


def _startup(run: Replay) -> float:
    return _after_s("container_startup_timeout")


def _unhealthy(run: Replay) -> float:
    run.full_since = run.second
    return _after_s("compute_node_unhealthy")


def _slow(run: Replay) -> float:
    for task in range(5):
        run.attempt(task, Scored(1.0, True))
    run.start(9)
    return 2 * 60.0


def _retries(run: Replay) -> float:
    for _ in range(3):
        run.attempt(0, Broken(Cause.RESULT, "no result"))
    for task in range(1, 8):
        run.attempt(task, Scored(1.0, True))
    return 0.0


def _pull(run: Replay) -> float:
    run.tell(ev.MachineUp(run.machines[0]))
    run.tell(ev.MachineStep(run.machines[0], "image", "fetching"))
    return _after_s("docker_pull_slow")


def _spent(share: float) -> Happening:
    def spend(run: Replay) -> float:
        # two machines cost 0.72 dollars an hour together
        return share * BUDGET_USD / 0.72 * 3600

    return spend


def _promise(run: Replay) -> float:
    run.state.limits = structs.replace(run.state.limits, deadline_s=600.0)
    for task in range(5):
        run.attempt(task, Scored(1.0, True))
    return 0.0


def _left(run: Replay) -> float:
    run.tell(ev.MachineCondemned(run.machines[0], "the run is over"))
    run.tell(ev.MachineDeleteRefused(run.machines[0], "a lock"))
    return 0.0


def _undeleted(run: Replay) -> float:
    run.tell(ev.MachineCondemned(run.machines[0], "the run is over"))
    return _after_s("machines_left")


def _ended(run: Replay) -> float:
    for machine in run.machines:
        run.tell(ev.MachineCondemned(machine, "the run is over"))
        run.tell(ev.MachineDeleted(machine, run.now))
    run.tell(ev.StopRequested("user", "asked"))
    run.tell(ev.RunEnded("stopped"))
    return 0.0


CASES: dict[str, tuple[str, Happening]] = {
    "job_stuck_no_progress": ("job_stuck_no_progress", _stuck),
    "no_sign_of_life": ("no_sign_of_life", _lifeless),
    "container_startup_timeout": ("container_startup_timeout", _startup),
    "compute_node_unhealthy": ("compute_node_unhealthy", _unhealthy),
    "slow_task_execution": ("slow_task_execution", _slow),
    "high_retry_rate": ("high_retry_rate", _retries),
    "docker_pull_slow": ("docker_pull_slow", _pull),
    "budget 50%": ("budget", _spent(0.5)),
    "budget 80%": ("budget", _spent(0.8)),
    "budget 100%": ("budget", _spent(1.0)),
    "promise_at_risk": ("promise_at_risk", _promise),
    "machines_left": ("machines_left", _left),
    "machines_left, not deleted": ("machines_left", _undeleted),
    "run_ended": (ENDED, _ended),
}
OF_A_SERVICE = {"no_sign_of_life"}
"""The machines of these are a service's."""
NOT_READY = {"container_startup_timeout", "docker_pull_slow"}
"""The machines of these are not there yet."""


def run(quick: bool) -> Result:
    seconds: dict[str, float | None] = {}
    again = 0
    with _webhook() as (url, took):
        for name in CASES:
            with tempfile.TemporaryDirectory() as folder:
                seconds[name], told = _replay(name, Path(folder), url, took)
                again += max(told - 1, 0)
    missing = [rule for rule in DEFAULTS if not any(rule == case for case, _ in CASES.values())]
    late = [value if value is not None else 1e9 for value in seconds.values()]
    figures: Figures = {
        "rules": len(DEFAULTS),
        "looks_every_s": LOOK_S,
        "seconds_after_its_cause": {
            name: None if value is None else rounded(value, 3) for name, value in seconds.items()
        },
        "worst_s": rounded(max(late), 3),
        "told_again": again,
        "counted": "from when it has been so for as long as the rule wants until a webhook has it; of "
        "run_ended until it is in the run's file, since the run's own notice tells it",
    }
    aims = {
        "worst_s": at_most(max(late), LATEST_S),
        "told_again": at_most(again, 0),
        "rules_replayed": at_least(len(DEFAULTS) - len(missing), len(DEFAULTS)),
    }
    return Result("alerts", figures, aims)


def _replay(
    name: str, home: Path, url: str, arrived: list[tuple[float, str, str]]
) -> tuple[float | None, int]:
    """Seconds from the cause to delivery, and how often it was told."""
    rule, cause = CASES[name]
    store = Store.open(home)
    replay = Replay(home, queued=name in OF_A_SERVICE, ready=name not in NOT_READY)
    store.create_stream("r", "run", replay.now, [ev.RunPlanned(replay.state.plan, 40)])
    notify = Notify(webhook=url, alerting=Alerting())
    watch = AlertWatch(home, store, "r", notify, lambda: replay.now)
    arrived.clear()
    wanted = replay.second + cause(replay)
    subject = name.partition(" ")[2] if rule == "budget" else ""
    found: float | None = None
    replay.second += LOOK_S / 2  # looks do not fall on the moment
    while replay.second <= wanted + (AFTERWARDS_S if found is not None else LATEST_S):
        begun = time.monotonic()
        watch.judge(replay.situation())
        if found is None and _holds(home, rule, subject):
            delivered = _await(arrived, rule, subject) if rule != ENDED else begun
            found = None if delivered is None else replay.second - wanted + delivered - begun
        replay.second += LOOK_S
    watch.close(RunState())
    told = Counter((had, about) for _, had, about in arrived if had == rule and subject in about)
    return found, max(told.values(), default=1)


def _holds(home: Path, rule: str, subject: str) -> bool:
    return any(alert.rule == rule and subject in alert.subject for alert in read_alerts(home / "r"))


def _await(arrived: list[tuple[float, str, str]], rule: str, subject: str) -> float | None:
    """When the webhook had it."""
    until = time.monotonic() + DELIVERY_S
    while time.monotonic() < until:
        for at, had, about in list(arrived):
            if had == rule and subject in about:
                return at
        time.sleep(0.002)
    return None


@contextmanager
def _webhook() -> Iterator[tuple[str, list[tuple[float, str, str]]]]:
    """A real one: its address, and what came, with when."""
    arrived: list[tuple[float, str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            arrived.append((time.monotonic(), body.get("rule", body["event"]), body.get("subject", "")))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/", arrived
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
