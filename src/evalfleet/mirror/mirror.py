"""The copy of one run in a store, as a controller of this home finds it, and how it takes the run over."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from evalfleet.clock import WallClock
from evalfleet.errors import LeaseLost, RequestError
from evalfleet.files import to_json
from evalfleet.journal import Holder, Store
from evalfleet.journal.checksums import Row
from evalfleet.model import Micros
from evalfleet.names import safe_name

from .objects import ObjectExists, StoreAway, check_creates_once, open_objects
from .sequence import UNKNOWN, Header, JournalObject, JournalSequence
from .uploads import RunFiles

CLAIMS_AT_ONCE, MOST_CLAIMS = 4, 256
DROPPED = "events-not-taken.jsonl"


class Mirror:
    """The copy of one run in a store, as a controller of this home finds it.

    `claims`: the run may be another home's; it is taken over.
    """

    def __init__(
        self, url: str, environ: Mapping[str, str], store: Store, run: str, folder: Path, *, claims: bool
    ) -> None:
        self._objects = open_objects(url, environ)
        self.sequence = JournalSequence(self._objects, run)
        self.files = RunFiles(self._objects, run, folder)
        self.store, self.run, self.claims = store, run, claims
        self._folder = folder
        self._claims: set[int] = set()
        """The objects by which we have taken the run."""
        self.newest: Header | None = None
        """Of the object that was written last, as far as it is known."""
        self._mark = f"{safe_name(run)}/run.json"
        """The object that reserves the name."""

    async def check_there(self) -> None:
        """Raises StoreAway if what was written last is not in the store. A folder that was unmounted is an
        empty one on another disk."""
        last = self._mark if self.newest is None else self.sequence.name_of(self.newest.number)
        if await self._objects.read(last, 1) is None:
            raise StoreAway(f"{self._objects.url} holds no {last} any more: mount it, or put that back")

    async def is_taken(self) -> bool:
        """Return True if another home has the run now. Raises StoreAway, StoreRefused."""
        newest = await self.sequence.newest()
        return newest is not None and newest.home != self.store.home_id

    # -- before there is a run ---------------------------------------------------------------------

    async def reserve(self, *, dry: bool) -> None:
        """Make sure that a new run of this name can be kept in the store. Raises RequestError."""
        if (there := await self.sequence.newest()) is not None:
            raise RequestError(
                f"{self.sequence.where} holds a run already, of {there.holder.host}: choose another "
                f"--name, or take that one over with `evalfleet resume {self.run} --from {self._objects.url}`"
            )
        if dry:
            return
        mine = to_json({"run": self.run, "home": self.store.home_id, "host": Holder.here(0).host})
        try:
            await self._objects.create(self._mark, mine)
        except ObjectExists:
            if await self._objects.read(self._mark) != mine:
                raise RequestError(
                    f"{self.sequence.where} is another home's run: choose another --name"
                ) from None
        await check_creates_once(self._objects, self._mark, mine)

    # -- before the stream is ours -----------------------------------------------------------------

    async def catch_up(self, holder: Holder) -> None:
        """Find out who wrote last. If we claim the run, it is ours from now on, as the store has it.

        Raises RequestError if it is another home's, RunHeld if a controller of this home is at work.
        """
        if self.claims:
            await self._claim(holder)
            await self.bring()
            return
        self.newest = await self.sequence.newest()
        if self.newest is None:
            await self.check_there()
            return
        ours = self.newest.home == self.store.home_id
        if not ours or not await asyncio.to_thread(self._is_part_of_ours, self.newest):
            raise self._not_ours(self.newest)
        await self._fill(msgspec.structs.replace(self.newest, seq=UNKNOWN, checksum=""))
        await asyncio.to_thread(self.store.raise_epoch, self.run, self.newest.epoch)

    async def _claim(self, holder: Holder) -> None:
        """Write the next object of the sequence, however fast another controller writes. Raises LeaseLost.

        Such objects have no events, so that nothing must be read before they can be written. Several numbers
        are tried at once: each of them exists afterwards, by us or by the other one, which comes no further
        than to the first of ours. Whoever has the last one of all has the run.
        """
        newest = await self.sequence.newest()
        if newest is None:
            raise RequestError(f"{self.sequence.where} holds no journal: the run was never started")
        last_name = self.sequence.name_of(newest.number)
        await check_creates_once(self._objects, last_name, await self._objects.read(last_name) or b"")
        claim = Header(
            run=self.run,
            number=newest.number,
            epoch=newest.epoch + 1,
            home=self.store.home_id,
            holder=holder,
            created_at=newest.created_at,
            wrote_at=WallClock().now(),
        )
        upto, width = newest.number, CLAIMS_AT_ONCE
        while not self._claims:
            await self._write_claims(claim, range(upto + 1, upto + 1 + width))
            upto, width = upto + width, min(2 * width, MOST_CLAIMS)
        last = await self._fill(claim)
        if last not in self._claims:
            other = await self.sequence.read(last)
            who = other.header.who if other else "another controller"
            raise LeaseLost(f"{who} took over {self.run!r} at the same time")

    async def _fill(self, claim: Header) -> int:
        """Leave no number free: one that a controller was killed before it wrote it would be free for the one
        whose run it wanted to take. Returns the highest number."""
        numbers = await self.sequence.numbers()
        await self._write_claims(claim, sorted(set(range(1, numbers[-1])) - set(numbers)))
        return numbers[-1]

    async def _write_claims(self, claim: Header, numbers: Sequence[int]) -> None:
        async def write(number: int) -> None:
            with contextlib.suppress(ObjectExists):
                header = msgspec.structs.replace(claim, number=number)
                await self.sequence.create(JournalObject(header, ()))
                self._claims.add(number)

        # All have ended before one that failed is told: else another one would take the run from its
        # controller after we said that we could not.
        ends = await asyncio.gather(*(write(number) for number in numbers), return_exceptions=True)
        for end in ends:
            if end is not None:
                raise end

    async def bring(self) -> None:
        """Bring what the store has of the run, and this home has not. Raises RequestError or RunHeld.

        What this home has, and the store has not, stays if it was this home that wrote there last.
        """
        here = await asyncio.to_thread(self.store.rows, self.run)
        known = {(row.seq, (row.checksum or b"").hex()) for row in here}
        common, objects = await self.sequence.since(known)
        headers = [*([common] if common else []), *(each.header for each in objects)]
        if not headers:
            raise RequestError(f"{self.sequence.where} holds no journal: the run was never started")
        keep, rows = common.seq if common else 0, [row for each in objects for row in each.rows]
        if not keep and here and rows and here[0].checksum != rows[0].checksum:
            raise RequestError(
                f"this home has another run called {self.run!r}: use another home, with EVALFLEET_HOME"
            )
        wrote_last = [header.home for header in headers if header.number not in self._claims][-1:]
        if rows or wrote_last != [self.store.home_id]:
            await asyncio.to_thread(self._replace, headers[0].created_at, here[keep:], keep, rows)
        await asyncio.to_thread(self.store.raise_epoch, self.run, headers[-1].epoch)
        last = rows[-1] if rows else here[keep - 1]
        self.newest = msgspec.structs.replace(
            headers[-1], seq=last.seq, checksum=(last.checksum or b"").hex()
        )

    def _is_part_of_ours(self, newest: Header) -> bool:
        """Does this home's journal go on from what is in the store?"""
        rows = self.store.rows(self.run, newest.seq - 1, 1) if newest.seq else []
        return not newest.seq or (bool(rows) and (rows[0].checksum or b"").hex() == newest.checksum)

    def _not_ours(self, newest: Header) -> RequestError:
        back = f"`evalfleet resume {self.run} --from {self._objects.url}` takes it back"
        if newest.home == self.store.home_id:
            return RequestError(f"{self.sequence.where} has events that this home has lost: {back}")
        return RequestError(f"{newest.who} took {self.run!r} over: {back}")

    def _replace(self, created_at: Micros, dropped: Sequence[Row], keep: int, rows: Sequence[Row]) -> None:
        if dropped:
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / DROPPED).open("ab") as file:  # the attempts' files stay, too
                file.writelines(row.body + b"\n" for row in dropped)
        self.store.adopt(self.run, created_at, keep, rows, WallClock().now())
