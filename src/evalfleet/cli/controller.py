"""The process of a detached run. Reads its errand from standard input; not meant to be typed."""

from __future__ import annotations

import argparse
import signal
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None: everything comes on standard input."""


def main(args: argparse.Namespace) -> int:
    import msgspec

    from evalfleet.api import runs
    from evalfleet.api.detach import TAKEN, ControllerInput, let_go_of_output
    from evalfleet.errors import FleetError

    errand = msgspec.json.decode(sys.stdin.buffer.read(), type=ControllerInput)
    try:
        run = runs.control(errand.order())
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
