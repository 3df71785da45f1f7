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

import msgspec

from evalfleet.channels.samples import Sample, read_series
from evalfleet.errors import FleetError
from evalfleet.events import RunSteered
from evalfleet.journal import Store
from evalfleet.model import Alerting, MachineId, Micros, Notify
from evalfleet.names import safe_name
from evalfleet.state import RunState
from evalfleet.version import __version__

from . import notify as telling
from .alerts import CHECKS, Alert, Raised, Situation, holding
from .follow import Follower
from .format import iso
from .progress import read_progress

if TYPE_CHECKING:
    from .documents import AlertNotice

FILE = ".alerts.jsonl"
LOOK_S = 5.0
SERIES_BYTES = 4096
"""So much of a machine's series is more than ten minutes of it."""
PATIENCE_S = 5.0
"""How long the end of a run waits for what is still to be told."""
MOST_WAITING = 100

log = logging.getLogger(__name__)


def situation_of(home: Path, state: RunState, now: Micros) -> Situation:
    """What rules look at, read from the files beside the journal."""
    wall = time.time_ns() // 1000
    series: dict[MachineId, list[Sample]] = {
        machine: read_series(home, machine, SERIES_BYTES) for machine in state.ready
    }
    return Situation(state, now, wall, read_progress(home, state, wall), series)


def read_alerts(folder: Path) -> list[Alert]:
    """What was told of a run, oldest first. Lines that cannot be read are left out."""
    try:
        lines = (folder / FILE).read_bytes().splitlines()
    except OSError:
        return []
    alerts: list[Alert] = []
    for line in lines:
        with suppress(msgspec.MsgspecError):
            alerts.append(msgspec.json.decode(line, type=Alert))
    return alerts


def notice_of(state: RunState, alert: Alert, act: str = "") -> AlertNotice:
    run = state.plan.run
    task = f" {state.attempts[alert.attempt].task}" if alert.attempt is not None else ""
    does = {"pause": "the run is paused", "drain": "the machine is drained", "end": "the attempt is ended"}
    done = f"; {does[act]}" if act else ""
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
        "act": act or None,
        "look": f"evalfleet show {run}{task}",
        "text": f"evalfleet {run}: {alert.severity}: {alert.text} ({alert.rule}){done}",
    }


class AlertWatch:
    """Looks at a run by the rules every few seconds, tells what is new, and does what a rule says."""

    def __init__(
        self, home: Path, store: Store, run: str, notify: Notify, clock: Callable[[], Micros]
    ) -> None:
        self._home, self._store, self._run = home, store, run
        self._notify, self._alerting = notify, notify.alerting or Alerting()
        self._clock = clock
        self._folder = home / safe_name(run)
        self._follower = Follower(store, run)
        self._raised = Raised(read_alerts(self._folder))
        self._done = threading.Event()
        self._letters: queue.Queue[AlertNotice | None] = queue.Queue(MOST_WAITING)
        self._watcher = threading.Thread(target=self._watch, name=f"alerts {run}", daemon=True)
        self._teller = threading.Thread(target=self._tell, name=f"alerts {run}: telling", daemon=True)

    def start(self) -> None:
        self._watcher.start()
        self._teller.start()

    def close(self) -> None:
        """Look once more, and give what is to be told a moment. Never raises."""
        self._done.set()
        self._watcher.join(PATIENCE_S)
        with suppress(queue.Full):
            self._letters.put_nowait(None)
        self._teller.join(PATIENCE_S)

    def _watch(self) -> None:
        while True:
            over = self._done.wait(LOOK_S)
            try:
                self._look()
            except (FleetError, OSError) as err:
                log.warning("alerts: %s", err)
            if over:
                return

    def _look(self) -> None:
        self._follower.poll()
        state, now = self._follower.state, self._clock()
        alerts = holding(situation_of(self._home, state, now), self._alerting)
        for alert in self._raised.new(alerts, now, self._alerting.cool_down_s):
            self._raise(state, alert)

    def _raise(self, state: RunState, alert: Alert) -> None:
        rule = self._alerting.rules.get(alert.rule, CHECKS[alert.rule][1])
        act = rule.act if self._can(rule.act, alert) else ""
        with open(self._folder / FILE, "ab") as file:
            file.write(msgspec.json.encode(alert) + b"\n")
        try:
            self._letters.put_nowait(notice_of(state, alert, act))
        except queue.Full:
            log.warning("alerts: whom they are told to is too slow; `evalfleet alerts %s` has all", self._run)
        if act:
            self._store.ask(self._run, self._steering(act, alert), self._clock())

    def _can(self, act: str, alert: Alert) -> bool:
        wanted = {"pause": True, "drain": alert.machine is not None, "end": alert.attempt is not None}
        return wanted.get(act, False)

    def _steering(self, act: str, alert: Alert) -> RunSteered:
        by, why = f"alert {alert.rule}", alert.text
        if act == "drain":
            return RunSteered("drain", by, why, machine=alert.machine)
        if act == "end":
            return RunSteered("end", by, why, attempt=alert.attempt)
        return RunSteered("pause", by, why)

    def _tell(self) -> None:
        while (letter := self._letters.get()) is not None:
            for problem in telling.told(self._notify, letter):
                log.warning("an alert did not get through: %s", problem)
