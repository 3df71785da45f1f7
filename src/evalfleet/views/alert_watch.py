"""Watching a live run by the rules, and telling.

It works beside the engine, from the journal: whatever becomes of it, or of whom it tells, the run goes on.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec
from msgspec import structs

from evalfleet.alert_rules import DEFAULTS, LIFELESS, UNHEALTHY
from evalfleet.channels.samples import ENGINE_DOWN, EVERY_S, Newest, Sample, read_newest, read_series
from evalfleet.errors import FleetError
from evalfleet.events import RunSteered
from evalfleet.journal import Store
from evalfleet.model import Alerting, MachineId, Micros, Notify, decodable
from evalfleet.names import safe_name
from evalfleet.state import RunState, objection
from evalfleet.version import __version__

from . import notify as telling
from .alerts import Alert, Raised, Situation, act_of, holding, is_quiet
from .format import iso, url_part
from .progress import read_progress

if TYPE_CHECKING:
    from .fleet_documents import AlertNotice

FILE = ".alerts.jsonl"
LOOK_S = 5.0
LINE_BYTES = 80
"""A line of a machine's series is shorter."""
SPARE_S = 300.0
"""So much more of a series is read than a rule looks back."""
PATIENCE_S = 5.0
"""How long the end of a run waits for what is still to be told."""
MOST_WAITING = 100
ENDED = "run_ended"
"""Whom [notify] names is told it in any case, in a document of its own: see `notify.run_over`."""

log = logging.getLogger(__name__)


def situation_of(home: Path, state: RunState, now: Micros, alerting: Alerting | None = None) -> Situation:
    """What rules look at, read from the files beside the journal."""
    wall = time.time_ns() // 1000
    rules = (alerting or Alerting()).rules
    used_up, lifeless = (rules.get(name, DEFAULTS[name]) for name in (UNHEALTHY, LIFELESS))
    last_bytes = round((max(used_up.after_s, lifeless.after_s) + SPARE_S) / EVERY_S * LINE_BYTES)
    progress = read_progress(home, state, wall)
    series: dict[MachineId, list[Sample]] = {
        machine: read_series(home, machine, last_bytes)
        for machine in state.ready
        if _is_busy(read_newest(home, machine), used_up.share)
        or is_quiet(state, machine, progress, lifeless.after_s)
    }
    return Situation(state, now, wall, progress, series)


def _is_busy(newest: Newest | None, share: float) -> bool:
    """May the machine be unhealthy? Of others, the series need not be read."""
    if newest is None:
        return True
    return max(newest.cpu, newest.memory, newest.disk) >= share or newest.containers == ENGINE_DOWN


def read_alerts(folder: Path) -> list[Alert]:
    """What was told of a run, oldest first. Lines that cannot be read are left out."""
    try:
        lines = (folder / FILE).read_bytes().splitlines()
    except OSError:
        return []
    alerts: list[Alert] = []
    for line in lines:
        with suppress(msgspec.MsgspecError):
            alerts.append(msgspec.json.decode(line, type=decodable(Alert)))
    return alerts


def read_notices(folder: Path, state: RunState, alerting: Alerting | None = None) -> list[AlertNotice]:
    """What was told of a run, oldest first, as documents. For views: it reads the run's folder only."""
    return [notice_of(state, alert, alerting) for alert in read_alerts(folder) if _is_of(state, alert)]


def _is_of(state: RunState, alert: Alert) -> bool:
    machine = alert.machine is None or alert.machine in state.machines
    return machine and (alert.attempt is None or alert.attempt in state.attempts)


DONE = {
    "pause": "the run is paused",
    "drain": "the machine is drained",
    "replace": "the machine is replaced",
    "end": "the attempt is ended",
}


def notice_of(state: RunState, alert: Alert, alerting: Alerting | None = None) -> AlertNotice:
    """The alert as it is told. It says what was done about it."""
    run = state.plan.run
    task = f" {state.attempts[alert.attempt].task}" if alert.attempt is not None else ""
    done = f"; {DONE[alert.act]}" if alert.act in DONE else ""
    return {
        "event": "alert",
        "at": iso(alert.at),
        "host": socket.gethostname(),
        "version": __version__,
        "run": run,
        "rule": alert.rule,
        "severity": alert.severity,
        "subject": alert.subject,
        "machine": None if alert.machine is None else state.machines[alert.machine].name,
        "attempt": alert.attempt,
        "act": alert.act or None,
        "look": f"evalfleet show {run}{task}",
        "link": _link(state, alert, alerting.dashboard) if alerting and alerting.dashboard else None,
        "text": f"evalfleet {run}: {alert.severity}: {alert.text} ({alert.rule}){done}",
    }


def _link(state: RunState, alert: Alert, dashboard: str) -> str:
    """The dashboard's page of what the alert is about."""
    page = f"{dashboard}/runs/{quote(state.plan.run, safe='')}"
    if alert.attempt is not None:
        attempt = state.attempts[alert.attempt]
        number = alert.attempt.rpartition(".")[2]
        return f"{page}/tasks/{url_part(attempt.task)}?attempt={number}"
    return page if alert.machine is None else f"{page}/machines/{quote(alert.machine, safe='')}"


def steering_of(act: str, alert: Alert) -> RunSteered | None:
    """What a rule that acts asks of the run; None if the alert is about nothing that it could act on."""
    by, why = f"alert {alert.rule}", alert.text
    match act:
        case "pause":
            return RunSteered("set", by, why, workers=0)
        case "drain" | "replace" if alert.machine is not None:
            return RunSteered(act, by, why, machine=alert.machine)
        case "end" if alert.attempt is not None:
            return RunSteered("end", by, why, attempt=alert.attempt)
        case _:
            return None


class AlertWatch:
    """Looks at a run by the rules every few seconds, writes down what is new, tells it to whom [notify]
    names, and does what a rule says.

    What is new is written down for every run, so that `evalfleet alerts` and the dashboard show it. It is
    told while the run goes on only if evalfleet.toml has a section [alerts]. `tick` and `close` are called
    from one thread; telling has a thread of its own.
    """

    def __init__(
        self, home: Path, store: Store, run: str, notify: Notify, clock: Callable[[], Micros]
    ) -> None:
        self._home, self._store, self._run = home, store, run
        self._notify, self._alerting = notify, notify.alerting or Alerting()
        self._clock = clock
        self._folder = home / safe_name(run)
        earlier = read_alerts(self._folder)
        self._raised = Raised(earlier)
        self._acted = {(alert.rule, alert.subject) for alert in earlier if alert.act}
        self._next = time.monotonic() + LOOK_S
        self._letters: queue.Queue[AlertNotice | None] | None = None
        if notify and notify.alerting is not None:
            self._letters = queue.Queue(MOST_WAITING)
            self._teller = threading.Thread(
                target=self._tell, args=(self._letters,), name=f"alerts {run}: telling", daemon=True
            )
            self._teller.start()

    def tick(self, state: RunState) -> None:
        """Look, if it is time for it. Never raises for what goes wrong with a file or the store."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + LOOK_S
            try:
                self._look(state)
            except (FleetError, OSError) as err:
                log.warning("alerts: %s", err)

    def close(self, state: RunState) -> None:
        """Look once more, and give what is to be told a moment. Never raises."""
        self._next = 0.0
        self.tick(state)
        if self._letters is not None:
            with suppress(queue.Full):
                self._letters.put_nowait(None)
            self._teller.join(PATIENCE_S)

    def _look(self, state: RunState) -> None:
        if state.planned_at == 0:
            return  # nothing of the run was read yet
        self.judge(situation_of(self._home, state, self._clock(), self._alerting))

    def judge(self, situation: Situation) -> None:
        """Raise what is new in this situation. May raise FleetError or OSError.

        A rule that knows by itself when to act may come to that long after it has told what it found: a node
        is busy at once, but only later has nothing come of it for long. Then it is told again, with the act.
        """
        alerts = holding(situation, self._alerting)
        new = {
            (alert.rule, alert.subject)
            for alert in self._raised.new(alerts, situation.now, self._alerting.cool_down_s)
        }
        for alert in alerts:
            key = (alert.rule, alert.subject)
            rule = self._alerting.rules.get(alert.rule, DEFAULTS[alert.rule])
            if key not in new and (rule.act != "auto" or key in self._acted):
                continue
            act = act_of(situation, rule, alert)
            asked = steering_of(act, alert)
            if asked is not None and not objection(situation.state, asked):
                self._acted.add(key)
                self._raise(situation.state, structs.replace(alert, act=act))
                self._store.ask(self._run, asked, self._clock())
            elif key in new:
                self._raise(situation.state, alert)

    def _raise(self, state: RunState, alert: Alert) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with open(self._folder / FILE, "ab") as file:
            file.write(msgspec.json.encode(alert) + b"\n")
        if alert.rule != ENDED and self._letters is not None:
            try:
                self._letters.put_nowait(notice_of(state, alert, self._alerting))
            except queue.Full:
                log.warning("alerts: whom they are told to is too slow; see `evalfleet alerts %s`", self._run)

    def _tell(self, letters: queue.Queue[AlertNotice | None]) -> None:
        while (letter := letters.get()) is not None:
            for problem in telling.told(self._notify, letter):
                log.warning("an alert did not get through: %s", problem)
