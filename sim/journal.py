"""A journal in memory with the manners of the real one: commits take time, and a crash may fall between."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Sequence

from evalfleet.errors import LeaseLost
from evalfleet.events import AttemptStarted, Event, MachineRequested, Record, decode, encode
from evalfleet.model import Micros
from evalfleet.ports import Request

from .world import Life, World


class SimStore:
    """What is on disk, which outlives controllers."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.epoch = 0
        self.rows: list[tuple[int, Micros, bytes]] = []
        self.asked: list[Request] = []
        self.answered: set[int] = set()

    def write(self, epoch: int, at: Micros, events: Sequence[Event]) -> None:
        for event in events:
            self.rows.append((epoch, at, encode(event)))
            if isinstance(event, AttemptStarted):
                self.world.durable.add(event.attempt)
            elif isinstance(event, MachineRequested):
                self.world.durable.add(event.machine)

    def read(self) -> Iterator[Record]:
        for seq, (epoch, at, body) in enumerate(self.rows, start=1):
            yield Record(seq, epoch, at, decode(body))

    def ask(self, event: Event) -> None:
        self.asked.append(Request(len(self.asked) + 1, event))

    def digest(self) -> str:
        digest = hashlib.sha256()
        for epoch, at, body in self.rows:
            digest.update(b"%d %d %b\n" % (epoch, at, body))
        return digest.hexdigest()[:12]


class SimJournal:
    """One controller's hold on the store."""

    def __init__(self, store: SimStore, life: Life) -> None:
        store.epoch += 1
        life.epoch = store.epoch
        self._store, self._life = store, life
        self._epoch = store.epoch

    @property
    def epoch(self) -> int:
        return self._epoch

    def read(self) -> Iterator[Record]:
        return self._store.read()

    async def append(self, at: Micros, events: Sequence[Event], answered: Sequence[int] = ()) -> bool:
        world = self._store.world
        world.tick(self._life)
        done = world.loop.create_future()
        commit_s = world.rng.uniform(*world.faults.commit_s)
        world.loop.call_later(commit_s, self._commit, done, at, events, answered)
        await done
        world.tick(self._life)
        return True

    def _commit(
        self, done: asyncio.Future[None], at: Micros, events: Sequence[Event], answered: Sequence[int]
    ) -> None:
        lost_in_crash = not self._life.alive and self._store.world.rng.random() < 0.5
        if self._store.epoch != self._epoch or lost_in_crash:
            if not done.done():
                done.set_exception(LeaseLost(f"epoch {self._epoch} was replaced by {self._store.epoch}"))
            return
        self._store.write(self._epoch, at, events)
        self._store.answered.update(answered)
        if not done.done():
            done.set_result(None)

    async def requests(self) -> Sequence[Request]:
        await self._store.world.call(self._life)
        return [request for request in self._store.asked if request.id not in self._store.answered]
