"""Telling people how it went: one JSON document to a command's standard input or to a webhook, a line to
Apprise's addresses.

That something is to be told is marked in the run's folder when a controller takes the run, and the mark goes
when it was told. So whoever comes after a crash (`resume`, `cancel`, `reap`) tells it: at least once, and
twice only if the crash fell between the telling and the mark.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from evalfleet.errors import FleetError
from evalfleet.http_client import NoAnswer, ask
from evalfleet.journal import Store
from evalfleet.model import Micros, Notify
from evalfleet.names import safe_name
from evalfleet.state import RunState, fold
from evalfleet.version import __version__, install_command

from .format import iso, plural, usd
from .results import results

if TYPE_CHECKING:
    from .fleet_documents import AlertNotice, BelongingRow, LeftMachine, NoticeHead, ReapNotice, RunNotice

MARK = ".notify"
COMMAND_S = 30.0
WEBHOOK_S = 10.0
MARGIN_S = 5.0

log = logging.getLogger(__name__)


# -- when ------------------------------------------------------------------------------------------


def expect(notify: Notify, home: Path, run: str) -> None:
    """A controller has taken the run: its end is to be told."""
    if notify:
        folder = home / safe_name(run)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARK).touch()


def run_over(notify: Notify, home: Path, run: str, now: Micros, failure: str = "") -> None:
    """Tell how it went, if that is still to be told: it has ended, or its controller had to give up."""
    mark = home / safe_name(run) / MARK
    if not notify or not mark.exists():
        return
    state = fold(Store.open(home, create=False, read_only=True).read(run))
    if state.ended_at is None and not failure:
        return  # it was left, and can be resumed
    if _told(notify, of_run(state, home, now, failure)):
        mark.unlink(missing_ok=True)


def overdue(notify: Notify, home: Path, now: Micros) -> None:
    """Tell of runs that ended when nobody was there to tell it any more."""
    for mark in sorted(home.glob(f"*/{MARK}")) if notify else ():
        try:
            store = Store.open(home, create=False, read_only=True)
            names = [info.name for info in store.streams() if safe_name(info.name) == mark.parent.name]
            for name in names:
                if store.held(store.stream(name), now) is None:
                    run_over(notify, home, name, now)
        except FleetError as err:
            log.warning("what is to be told of %s cannot be read: %s", mark.parent.name, err)


def reaped(notify: Notify, found: Sequence[BelongingRow], problems: Sequence[str], now: Micros) -> None:
    """Tell that something was left behind. `found`: what, where, whose; `problems`: what stays, and why."""
    if not notify or not found:
        return
    many = plural(len(found), "machine")
    text = f"evalfleet reap: {many} left behind"
    text += f", {len(problems)} could not be deleted: {problems[0]}" if problems else ", deleted"
    notice: ReapNotice = {
        **_head("reaped", now),
        "left": list(found),
        "problems": list(problems),
        "text": text,
    }
    _told(notify, notice)


# -- what ------------------------------------------------------------------------------------------


def of_run(state: RunState, home: Path, now: Micros, failure: str = "") -> RunNotice:
    run = state.plan.run
    found = results(state, home / safe_name(run))
    left: list[LeftMachine] = [
        {"machine": m, "name": state.machines[m].name, "place": state.machines[m].offer.place}
        for m in state.undeleted
    ]
    document: RunNotice = {
        **_head("run_ended" if state.ended_at is not None else "run_left", now),
        "run": found["run"],
        "benchmark": found["benchmark"],
        "model": found["model"],
        "started_at": found["started_at"],
        "ended_at": found["ended_at"],
        "total_tasks": found["total_tasks"],
        "scored": found["scored"],
        "broken": found["broken"],
        "unrun": found["unrun"],
        "status": found["status"] if state.ended_at is not None else "left",
        "success_rate": found["success_rate"],
        "reason": failure or _reason(state),
        "cost": found["cost"],
        "left": left,
        "text": "",
    }
    document["text"] = _text(document)
    return document


def _head(event: str, now: Micros) -> NoticeHead:
    return {"event": event, "at": iso(now), "host": socket.gethostname(), "version": __version__}


def _reason(state: RunState) -> str | None:
    if state.stop is None or state.status == "done":
        return None
    return state.stop.detail or state.stop.reason


def _text(told: RunNotice) -> str:
    """One line, as chat rooms show it."""
    parts = [f"{told['scored']} of {told['total_tasks']} scored"]
    parts += [f"{n} {what}" for what, n in (("broken", told["broken"]), ("unrun", told["unrun"])) if n]
    parts.append(f"{usd(told['cost']['machines_usd'])} for machines")
    if told["left"]:
        parts.append(f"{plural(len(told['left']), 'machine')} left behind")
    why = f" ({told['reason']})" if told["reason"] else ""
    return f"evalfleet {told['run']}: {told['status']}{why}: {', '.join(parts)}"


# -- how -------------------------------------------------------------------------------------------


def told(notify: Notify, document: AlertNotice) -> list[str]:
    """Tell of an alert; what went wrong with that."""
    return _problems(notify, document)


def _told(notify: Notify, document: RunNotice | ReapNotice) -> bool:
    """Tell by all ways at once, in bounded time. What goes wrong becomes a note, which shows no secret."""
    problems = _problems(notify, document)
    for problem in problems:
        log.warning("the notification did not get through: %s", problem)
    return not problems


def _problems(notify: Notify, document: RunNotice | ReapNotice | AlertNotice) -> list[str]:
    body = msgspec.json.encode(document)
    ways: list[tuple[Callable[[], str], float]] = []
    if notify.command:
        ways.append((lambda: by_command(notify.command, body, COMMAND_S), COMMAND_S))
    if notify.webhook:
        ways.append((lambda: by_webhook(notify.webhook, body), WEBHOOK_S))
    if notify.apprise:
        ways.append((lambda: by_apprise(notify.apprise, document["text"]), COMMAND_S))
    calls = [_TimedCall(work, limit_s + MARGIN_S) for work, limit_s in ways]
    return [problem for call in calls if (problem := call.problem())]


class _TimedCall:
    """Work in a thread of its own, that is not waited for longer than `limit_s`."""

    def __init__(self, work: Callable[[], str], limit_s: float) -> None:
        self._answer = "no answer"
        self._limit_s = limit_s
        self._work = work
        self._thread = threading.Thread(target=self._run, name="notification", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._answer = self._work()

    def problem(self) -> str:
        self._thread.join(self._limit_s)
        return self._answer


def by_command(argv: Sequence[str], body: bytes, limit_s: float) -> str:
    """What went wrong; empty if nothing did."""
    try:
        null, pipe = subprocess.DEVNULL, subprocess.PIPE
        process = subprocess.Popen(argv, stdin=pipe, stdout=null, stderr=null, start_new_session=True)
    except OSError as err:
        return f"{argv[0]}: {err.strerror}"
    try:
        process.communicate(body, timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return f"{argv[0]} took longer than {limit_s:g} s, and was ended"
    return f"{argv[0]} ended with exit code {process.returncode}" if process.returncode else ""


def by_webhook(url: str, body: bytes) -> str:
    """The same. The address is a secret, so errors do not show it."""
    headers = {"Content-Type": "application/json", "User-Agent": f"evalfleet/{__version__}"}
    try:
        answer = ask(url, body, headers, timeout_s=WEBHOOK_S)
    except NoAnswer as err:
        return f"the webhook cannot be reached ({err})"
    return f"the webhook answered {answer.code}" if answer.code >= 300 else ""


def by_apprise(urls: Sequence[str], text: str) -> str:
    """The same, to whatever Apprise knows: chat rooms, e-mail, telephones. Errors show no address."""
    try:
        import apprise
    except ImportError:
        return f"Apprise is not installed: {install_command('alerts')}"
    teller: Any = apprise.Apprise()
    refused = sum(not teller.add(url) for url in urls)
    if refused:
        return f"Apprise does not understand {refused} of {len(urls)} addresses"
    logging.getLogger("apprise").setLevel(logging.CRITICAL)  # it would show addresses
    sent = teller.notify(title="evalfleet", body=text)
    return "" if sent else "Apprise could not deliver it to all of its addresses"
