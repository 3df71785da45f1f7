"""Runs on the stand-in's machines: the engine in this process, and a hand that breaks things meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from evalfleet.clock import WallClock
from evalfleet.engine import Engine
from evalfleet.events import Event, RunPlanned, TasksPlanned
from evalfleet.journal import Holder, Store
from evalfleet.model import (
    AttemptId,
    Broken,
    Bundle,
    Cause,
    Command,
    Ended,
    Limits,
    Needs,
    Outcome,
    Plan,
    Scored,
    SetupStep,
    Task,
    TaskId,
)
from evalfleet.ports import Place
from evalfleet.state import RunState
from tests.waiting import PATIENCE_S, until_seen

RUN = "pool"
SETUP = SetupStep("scratch", Command(("sh", "-c", "sudo sh -c 'echo made >> /mnt/made'; echo x >> ~/runs")))


class Sleepy:
    """Tasks that sleep as long as they say, then score; the set-up puts something on the local disk."""

    name = "sleepy"
    needs = Needs()
    bundle = Bundle("scratch-1", {}, (SETUP,))
    probe: Command | None = None

    def command(self, task: Task, attempt: AttemptId) -> Command:
        score = 'test -e /mnt/made && echo \'{"score": 1}\' > "$EVALFLEET_OUT/result.json"'
        return Command(("sh", "-c", f"sleep {task.params['seconds']}; {score}"))

    def outcome(self, task: Task, ended: Ended, healthy: bool) -> Outcome:
        if ended.result is not None:
            return Scored(1.0, True)
        reasons = {"evicted": Cause.EVICTED, "lost": Cause.MACHINE_LOST}
        return Broken(reasons.get(ended.reason, Cause.RESULT), f"{ended.reason}: {ended.detail}")


class Stage:
    """One run, under way while the test's `act` is; ended afterwards."""

    def __init__(self, place: Place, home: Path, workers: int, seconds: list[float]) -> None:
        self._store = Store.open(home)
        limits = Limits(workers=workers)
        plan = Plan(RUN, "sleepy", ("azure",), limits=limits, home=self._store.home_id[:6])
        tasks = tuple(Task(TaskId(f"t_{n}"), "t", {"seconds": s}, 600) for n, s in enumerate(seconds))
        now = WallClock().now()
        self._store.create_stream(RUN, "run", now, [RunPlanned(plan, len(tasks)), TasksPlanned(tasks)])
        self._place, self._home = place, home

    async def play(self, act: Callable[[RunState], Coroutine[Any, Any, None]]) -> RunState:
        now = WallClock().now()
        journal = self._store.acquire(RUN, Holder.here(now), now)
        engine = Engine(journal, {"azure": self._place}, Sleepy(), WallClock(), self._home / RUN)
        running = asyncio.create_task(engine.run())
        acting = asyncio.create_task(act(engine.state))
        try:
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.gather(running, acting)
        finally:
            for task in (running, acting):
                task.cancel()
            await asyncio.gather(running, acting, return_exceptions=True)
            await journal.close()
        return engine.state

    def events(self) -> list[Event]:
        return [record.event for record in self._store.read(RUN)]

    def moments(self, *kinds: type) -> list[tuple[float, Event]]:
        """Seconds, and what was recorded then."""
        return [(r.at / 1e6, r.event) for r in self._store.read(RUN) if isinstance(r.event, kinds)]


async def when(fact: Callable[[], bool], what: str) -> None:
    """Once it is so."""
    await until_seen(fact, what, look_s=0.05)
