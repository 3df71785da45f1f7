"""A look into a pool's machines for those who want to know something before a run."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

from evalfleet.errors import FleetError
from evalfleet.journal import Store

from .pool import Pool

AT_MOST = 3
"""Machines that are asked: what three do not know, the others will not."""


class PoolMachines:
    """Asked over their own connection, beside whoever has them; nothing is written down."""

    def __init__(self, home: Path, pool: str) -> None:
        self._home = home
        self._name = pool

    def output(self, command: Sequence[str], most: int, limit_s: float) -> bytes | None:
        try:
            pool = Pool(Store.open(self._home, create=False, read_only=True), self._name)
            shells = [pool.shell(each.name, command) for each in pool.running()[:AT_MOST]]
        except (FleetError, OSError):
            return None  # none runs, or there is no way into them
        found = (_output(argv, most, limit_s) for argv in shells)
        return next((data for data in found if data is not None), None)


def _output(argv: Sequence[str], most: int, limit_s: float) -> bytes | None:
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
    except OSError:
        return None
    limit = threading.Timer(limit_s, process.kill)
    limit.start()
    try:
        with process:
            assert process.stdout is not None
            data = process.stdout.read(most + 1)
            if len(data) > most:
                process.kill()
    finally:
        limit.cancel()
    return data if process.returncode == 0 and len(data) <= most else None
