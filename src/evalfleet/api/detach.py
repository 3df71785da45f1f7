"""Runs that outlive the terminal: a controller in a session of its own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from evalfleet.controller import Order, folder_of
from evalfleet.errors import FleetError
from evalfleet.events import Event
from evalfleet.model import Notify

TAKEN = "taken"


class ControllerInput(msgspec.Struct, frozen=True):
    """What the controller's process is told on standard input: secrets are seen by no `ps`."""

    home: str
    run: str
    secrets: dict[str, str]
    environ: dict[str, str]
    take_over: bool
    first: tuple[Event, ...]
    notify: Notify
    settings: dict[str, dict[str, Any]]
    claims: bool = False

    def order(self) -> Order:
        return Order(
            Path(self.home),
            self.run,
            self.secrets,
            self.environ,
            self.take_over,
            self.first,
            self.notify,
            settings=self.settings,
            claims=self.claims,
        )


async def detach(order: Order) -> int:
    """Start the controller in a process of its own, whose id is returned once the run is its own."""
    return await asyncio.to_thread(_detach, order)


def _detach(order: Order) -> int:
    folder = folder_of(order.home, order.run)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "controller.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "evalfleet", "controller"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    errand = ControllerInput(
        str(order.home.absolute()),
        order.run,
        dict(order.secrets),
        dict(order.environ),
        order.take_over,
        order.first,
        order.notify,
        {name: dict(given) for name, given in order.settings.items()},
        order.claims,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(msgspec.json.encode(errand))
    process.stdin.close()
    answer = process.stdout.readline().decode().strip()
    process.stdout.close()
    if answer != TAKEN:
        refusal = FleetError(answer or f"the controller did not start: see {folder / 'controller.log'}")
        refusal.exit_code = process.wait() or 1
        raise refusal
    process.returncode = 0  # it outlives us, and is nobody's to wait for
    return process.pid


def let_go_of_output() -> None:
    """The caller waits for one line only; from then on nothing may be written to a pipe nobody reads."""
    sys.stdout.flush()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
