"""What machines show: the newest screenshots of attempts, and their screens by VNC.

A screen is reached by a tunnel on a port of its own, under another name of this computer than the dashboard:
what a machine serves shares neither its origin nor its cookie.
"""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

from msgspec import ValidationError

from evalfleet.api.run import Run
from evalfleet.api.tunnels import Tunnel, carry
from evalfleet.errors import RequestError
from evalfleet.journal import Holds
from evalfleet.model import AttemptId, MachineId, Micros
from evalfleet.named_pools import look_at
from evalfleet.planning.plan_parts import appliance_of
from evalfleet.planning.workspace import Workspace
from evalfleet.state import MachineState, RunState
from evalfleet.views.dashboard.board import Board, ShotStep

from .files import checked_image

FRESH_S = 5.0
"""Where nothing tells whether an attempt has a newer screenshot, it is fetched as often."""
FETCH_S = 20.0
AT_ONCE = 8
MOST_KEPT = 64 << 20
LOOKED_BACK = 20
"""How many of a machine's attempts are looked at for its last screenshot."""


class _Shot(NamedTuple):
    """A screenshot, of which step, and when it was last asked for."""

    at: float
    step: ShotStep | None
    data: bytes
    kind: str


class Screens:
    """The newest screenshot of each attempt that somebody looks at. For threads."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, AttemptId], _Shot] = {}
        self._locks: dict[tuple[str, AttemptId], threading.Lock] = {}
        self._at_once = threading.Semaphore(AT_ONCE)

    def newest(self, run: Run, machine: MachineState, board: Board, now: Micros) -> tuple[bytes, str]:
        """The newest screenshot of what runs on the machine, or ran there last. Raises RequestError."""
        running = next(iter(machine.open), None)
        if running is not None:
            return self._of(run, running, board.newest_shot(running, now))
        attempts = [each.id for each in run.state().attempts.values() if each.machine == machine.id]
        for attempt in reversed(attempts[-LOOKED_BACK:]):
            try:
                return self._of(run, attempt, None)
            except RequestError:
                continue
        raise RequestError(f"there is no screenshot of {machine.name}")

    def _of(self, run: Run, attempt: AttemptId, newest: ShotStep | None) -> tuple[bytes, str]:
        """`newest`: of which step it must be, if that is known."""
        key = (run.name, attempt)
        with self._locks.setdefault(key, threading.Lock()):
            kept, now = self._kept.get(key), time.monotonic()
            is_newest = kept is not None and (
                now - kept.at < FRESH_S if newest is None else kept.step == newest
            )
            if kept is None or not is_newest:
                with self._at_once:
                    name, data = run.screenshot(attempt, FETCH_S)
                kept = _Shot(now, newest, *checked_image(data, name))
            elif newest is not None:
                kept = kept._replace(at=now)
            self._kept[key] = kept
            self._forget_some()
            return kept.data, kept.kind

    def _forget_some(self) -> None:
        oldest = sorted(self._kept.items(), key=lambda item: item[1].at)
        room = sum(len(kept.data) for _, kept in oldest)
        for key, kept in oldest[:-1]:
            if room <= MOST_KEPT:
                return
            room -= len(kept.data)
            self._kept.pop(key, None)
            self._locks.pop(key, None)


def has_screen(state: RunState) -> bool:
    """Return True if machines of the run have a screen. The benchmark of an imported run may be unknown."""
    try:
        appliance = appliance_of(state.plan)
    except (RequestError, ValidationError):
        return False
    return appliance is not None and appliance.screen is not None


class Tunnels:
    """Screens of machines by VNC, each on a port of this computer. A tunnel stays open until the end."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._open = AsyncExitStack()
        self._tunnels: dict[MachineId, Tunnel] = {}
        self._lock = asyncio.Lock()

    async def screen(self, state: RunState, machine: MachineState) -> int:
        """The port. Raises RequestError: the machine has no screen, or cannot be reached."""
        async with self._lock:
            if machine.id not in self._tunnels:
                self._tunnels[machine.id] = await self._opened(state, machine)
            return self._tunnels[machine.id].here

    async def _opened(self, state: RunState, machine: MachineState) -> Tunnel:
        appliance = appliance_of(state.plan)
        if appliance is None or appliance.screen is None:
            raise RequestError(f"machines of {state.plan.benchmark} have no screen")
        if machine.phase in ("condemned", "deleted"):
            raise RequestError(f"{machine.name} is gone, and its screen with it")
        plan = state.plan
        if plan.pool:
            plan, machine = await asyncio.to_thread(self._lender, state, machine)
        secrets, environ = self._workspace.secrets(plan)
        changed = self._workspace.changed_settings(plan)
        places = await self._open.enter_async_context(self._workspace.places(plan, secrets, environ, changed))
        port = appliance.screen.port
        tunnels = await self._open.enter_async_context(carry(places, [machine], [(port, port)], _ignore))
        return tunnels[0]

    def _lender(self, state: RunState, borrowed: MachineState) -> tuple[Any, MachineState]:
        """The plan of the pool that has lent the machine, and the machine there."""
        store = self._workspace.records()
        pool = look_at(store, state.plan.pool)
        for hold in Holds(store, state.plan.pool).all().values():
            if hold.borrower == borrowed.id:
                return pool.state.plan, pool.state.machines[hold.machine]
        raise RequestError(f"{borrowed.name} is no longer lent to this run")

    async def close(self) -> None:
        await self._open.aclose()


def _ignore(problem: str) -> None:
    """A connection that did not get through: the browser shows that it was closed."""


def other_name(host: str) -> str:
    """The other name of loopback: cookies of the dashboard do not go there."""
    name = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
    return "localhost" if name in ("127.0.0.1", "[::1]") else "127.0.0.1"
