"""What all stand-ins share that are started by hand, as `python -m standins.NAME`: they say how they are
reached, and serve until they are told to end."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, TypeVar

from lab import Lab, LabError

T = TypeVar("T")
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PLACE = "places.standin"


class Guide(NamedTuple):
    """What somebody needs who wants to use a stand-in."""

    exports: Mapping[str, str]
    """Variables to set where clients run."""
    table: str
    """The name of a table for evalfleet.toml."""
    settings: Mapping[str, object]
    """What is in that table."""
    hints: Sequence[str]
    """What can be typed then, and what cannot work."""

    def __str__(self) -> str:
        exports = [f"export {name}={shlex.quote(value)}" for name, value in self.exports.items()]
        settings = [f"{key} = {json.dumps(value)}" for key, value in self.settings.items()]
        lines = ["# For the shell in which clients are started:", *exports, ""]
        lines += ["# For evalfleet.toml:", f"[{self.table}]", *settings, ""]
        lines += [f"# {hint}" for hint in self.hints]
        return "\n".join([*lines, "# Ctrl-C ends this stand-in; nothing of it is left then."])


def parser(name: str, about: str | None) -> argparse.ArgumentParser:
    """Of the command line of `python -m standins.NAME`."""
    return argparse.ArgumentParser(prog=f"python -m standins.{name}", description=about)


def wants_hosts(name: str, about: str | None, argv: Sequence[str], meaning: str) -> bool:
    """Does the command line ask for machines that are hosts of the lab? Exits with one line if there can be
    none here. `meaning`: what `--hosts` does, for its help."""
    commands = parser(name, about)
    commands.add_argument("--hosts", action="store_true", help=f"{meaning} (needs root)")
    wanted: bool = commands.parse_args(argv).hosts
    if wanted and (missing := Lab.missing()):
        commands.exit(2, f"standins.{name}: --hosts cannot work here: {missing}\n")
    return wanted


def told_to_end() -> threading.Event:
    """What is set when this process is told to end; until then it does not."""
    over = threading.Event()
    for signum in ENDS:
        # also SIGINT that is ignored, as in a background job of a script; but `nohup` means what it says
        if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, lambda signum, frame: over.set())
    return over


def serve(
    name: str,
    make: Callable[[], AbstractContextManager[T]],
    guide: Callable[[T], Guide],
    missing: str | None = None,
) -> int:
    """Start a stand-in, say how it is reached, and end it at Ctrl-C or SIGTERM. Returns the exit code.

    `missing`: why it cannot work here, if it cannot.
    """
    if missing:
        return _refused(name, missing)
    over = told_to_end()
    try:
        with make() as standin:
            print(guide(standin), flush=True)
            over.wait()
    except LabError as err:
        return _refused(name, str(err))
    return 0


def _refused(name: str, why: str) -> int:
    print(f"standins.{name}: it cannot work here: {why}", file=sys.stderr)
    return 2


def run_hints(lab: Lab | None = None) -> list[str]:
    """How a run is started there. `lab`: whose hosts the machines are, if they are hosts."""
    command = "evalfleet run BENCHMARK --on standin"
    if lab is None:
        return [f"Then: {command}"]
    return [
        "Its machines are reached from their own network only, so clients are started there, by root.",
        f"Then: {shlex.join(lab.prefix)} {command}",
    ]


def bucket_guide(exports: Mapping[str, str], url: str) -> Guide:
    """How evalfleet keeps a copy of its runs in a bucket."""
    hints = ["Then: evalfleet run BENCHMARK", "Each run is copied into the bucket, which is in memory only."]
    return Guide(exports, "defaults", {"store": f"{url}/runs"}, hints)


NO_HOSTS = (
    "Then: evalfleet doctor standin",
    "Its machines are records that nobody can log in to: a run needs --hosts.",
)
