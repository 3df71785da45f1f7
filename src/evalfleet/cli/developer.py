"""The verb that is not meant to be typed by users: controller."""

from __future__ import annotations

import argparse
import signal
import sys

from .terminal import result_of


def controller_arguments(parser: argparse.ArgumentParser) -> None:
    """It has no arguments: everything comes on standard input."""


def controller(args: argparse.Namespace) -> int:
    """The process of a detached run. It reads its order from standard input, and is not meant to be typed."""
    from pathlib import Path

    import msgspec

    from evalfleet.api import runs
    from evalfleet.api.runs import TAKEN, ControllerInput, let_go_of_output
    from evalfleet.errors import FleetError
    from evalfleet.planning.workspace import Workspace

    errand = msgspec.json.decode(sys.stdin.buffer.read(), type=ControllerInput)
    try:
        run = result_of(runs.control(Workspace.here(Path(errand.home)), errand.order()))
    except FleetError as err:
        print(str(err), flush=True)
        return err.exit_code
    print(TAKEN, flush=True)
    let_go_of_output()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda signum, frame: run.drain())
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    run.wait()
    return run.exit_code
