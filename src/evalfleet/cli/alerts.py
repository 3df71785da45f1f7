"""What somebody should look at: alerts."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evalfleet.planning.workspace import Workspace

TEST = "test"


def alerts_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        metavar="RUN",
        nargs="?",
        help="the run (default: the latest); `test` sends an alert to the addresses in [notify]",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def alerts(args: argparse.Namespace) -> int:
    """Show the alerts that a run has raised by the rules of [alerts], and those that they raise now.

    `evalfleet alerts test` sends an alert to the command, the webhook and the Apprise addresses of [notify],
    and says what came of it. No alert has anything in it that an agent wrote.
    """
    from evalfleet.api import runs
    from evalfleet.clock import WallClock
    from evalfleet.model import Alerting
    from evalfleet.planning.workspace import Workspace
    from evalfleet.views.alert_watch import ENDED, notice_of, read_notices, situation_of
    from evalfleet.views.alerts import holding
    from evalfleet.views.format import local_time

    workspace = Workspace.here()
    if args.run == TEST:
        return _test(workspace, as_json=args.json)
    run = runs.open_run(workspace, args.run)
    state, notify = run.state(), workspace.notify()
    alerting = notify.alerting or Alerting()
    told = read_notices(run.folder, state, alerting)
    now = holding(situation_of(run.home, state, WallClock().now(), alerting), alerting)
    holds = [notice_of(state, alert, alerting) for alert in now if alert.rule != ENDED]
    if args.json:
        print(json.dumps({"run": run.name, "told": told, "now": holds}))
        return 0
    for notice in told:
        print(f"{local_time(notice['at'])} {notice['text']}")
    known = {(notice["rule"], notice["subject"]) for notice in told}
    for notice in holds:
        if (notice["rule"], notice["subject"]) not in known:
            print(f"now: {notice['text']}")
    if not told and not holds:
        print(f"{run.name}: nothing to tell")
    return 0


def _test(workspace: Workspace, *, as_json: bool) -> int:
    import socket

    from evalfleet.errors import RequestError
    from evalfleet.version import __version__
    from evalfleet.views.format import iso
    from evalfleet.views.notify import told

    notify = workspace.notify()
    if not notify:
        raise RequestError("[notify] in evalfleet.toml names nobody: write a command, a webhook or apprise")
    text = "evalfleet: this is a test of alerts"
    problems = told(
        notify,
        {
            "event": "alert",
            "at": iso(workspace.now()),
            "host": socket.gethostname(),
            "version": __version__,
            "run": "",
            "rule": TEST,
            "severity": "info",
            "subject": TEST,
            "machine": None,
            "attempt": None,
            "act": None,
            "look": "evalfleet alerts",
            "link": notify.alerting.dashboard or None if notify.alerting is not None else None,
            "text": text,
        },
    )
    if as_json:
        print(json.dumps({"problems": problems}))
    elif not problems:
        print("the alert got through")
    for problem in problems if not as_json else ():
        print(f"evalfleet: {problem}", file=sys.stderr)
    return 1 if problems else 0
