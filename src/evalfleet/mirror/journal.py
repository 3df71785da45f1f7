"""A journal whose events are durable only when they are in a store, too.

They are written here first, then put into the store as the next object of the run's sequence. If somebody
else has written that object, the run is theirs, and this controller stops. What was written here and not
put there, because the store was away or this controller was killed, is put by the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from evalfleet.clock import WallClock, pauses
from evalfleet.errors import JournalError, LeaseLost, RequestError
from evalfleet.events import AttemptCollected, Event, Record, StopRequested, decode
from evalfleet.files import to_json
from evalfleet.journal import Holder, SqliteJournal, Store
from evalfleet.journal.checksums import Row
from evalfleet.model import AttemptId, Micros
from evalfleet.names import safe_name
from evalfleet.ports import Request

from .objects import ObjectExists, StoreAway, StoreRefused, open_objects
from .sequence import UNKNOWN, Header, JournalObject, JournalSequence
from .uploads import RunFiles

LOOK_S = 15.0
"""A controller that has nothing to write looks so often whether somebody took its run over."""
RESULTS_S = 10.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 15.0
MOST_ROWS = 5000
"""Events in one object."""
CLAIMS_AT_ONCE, MOST_CLAIMS = 4, 256
DRAIN = -1
"""The number of a request that nobody has made: to drain, because the store is away for too long."""
DROPPED = "events-not-taken.jsonl"

log = logging.getLogger(__name__)


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
        mine = {"run": self.run, "home": self.store.home_id, "host": Holder.here(0).host}
        name = f"{safe_name(self.run)}/run.json"
        try:
            await self._objects.create(name, to_json(mine))
        except ObjectExists:
            if await self._objects.read(name) != to_json(mine):
                raise RequestError(
                    f"{self.sequence.where} is another home's run: choose another --name"
                ) from None

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

        await asyncio.gather(*(write(number) for number in numbers))

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

    # -- once it is --------------------------------------------------------------------------------

    async def open(
        self, local: SqliteJournal, holder: Holder, life_s: Callable[[], float | None]
    ) -> MirroredJournal:
        """The journal that writes to the store, too. The run is ours when this returns.

        Raises LeaseLost if somebody else was faster.
        """
        journal = MirroredJournal(local, self, holder, life_s)
        await self.files.send_kept_files()
        await journal.take()
        return journal

    def open_alone(
        self, local: SqliteJournal, holder: Holder, life_s: Callable[[], float | None], err: Exception
    ) -> MirroredJournal:
        """The same while the store is away, for a run that is to be stopped: it is told when it is back."""
        journal = MirroredJournal(local, self, holder, life_s)
        journal.stay_alone(err)
        return journal


class MirroredJournal:
    """A stream of this home and its copy in a store: ports.Journal."""

    def __init__(
        self, local: SqliteJournal, mirror: Mirror, holder: Holder, life_s: Callable[[], float | None]
    ) -> None:
        """`life_s`: for how long the machine lives that expires first; None if there is none."""
        self._local = local
        self._mirror = mirror
        self._holder = holder
        self._life_s = life_s
        self._created_at = mirror.store.stream(mirror.run).created_at
        self._written, _ = mirror.store.head(mirror.run)
        self._put = 0 if mirror.newest is None else mirror.newest.seq
        self._wake = asyncio.Event()
        self._news = asyncio.Event()
        self._failure: JournalError | None = None
        self._away_since: float | None = None
        self._patience_s: float | None = None
        self._alone = False
        self._stopping = False
        self._work: list[asyncio.Task[None]] = []

    @property
    def epoch(self) -> int:
        return self._local.epoch

    def read(self) -> Iterable[Record]:
        return self._local.read()

    async def append(self, at: Micros, events: Sequence[Event], answered: Sequence[int] = ()) -> bool:
        """See ports.Journal. While the store is away this waits, unless the run is to be stopped."""
        self._check()
        await self._local.append(at, events, answered)
        self._written += len(events)
        self._stopping |= any(isinstance(event, StopRequested) for event in events)
        upto = self._written
        self._wake.set()
        while self._put < upto and self._failure is None and not self._alone:
            await self._changed()
        self._check()
        return self._put >= upto

    async def requests(self) -> Sequence[Request]:
        """See ports.Journal. While the store is away, here is found out whether to go on without it."""
        self._check()
        asked = await self._local.requests()
        if self._away_since is None or self._alone:
            return asked
        away_s = time.monotonic() - self._away_since
        if self._stopping or any(isinstance(request.event, StopRequested) for request in asked):
            self._go_alone()
        elif self._patience_s is not None and away_s > self._patience_s:
            self._go_alone()
            detail = f"{self._mirror.sequence.where} has been away for {away_s / 60:.0f} minutes"
            return [*asked, Request(DRAIN, StopRequested("store", detail, drain=True))]
        return asked

    async def keep(self, attempt: AttemptId) -> None:
        """Put what an attempt left into the store. While that is away this waits, as `append` does."""
        for pause_s in pauses(FIRST_PAUSE_S, LONGEST_PAUSE_S, 2):
            try:
                await self._mirror.files.send_artefacts(attempt)
                return
            except (StoreAway, StoreRefused) as err:
                self._note_away(err)
            if self._alone or self._failure is not None:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed(), pause_s)

    async def close(self) -> None:
        """Let go of the stream, with the newest results in the store. It never raises."""
        if self._failure is None and self._away_since is None and self._work:
            try:
                await self._mirror.files.send_results()
            except (StoreAway, StoreRefused, OSError) as err:
                log.warning("the results are not in the store: %s", err)
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        if self._failure is None and (missing := self._written - self._put) > 0:
            log.warning(
                "%d events of run %s are not in %s: `evalfleet resume %s` puts them there",
                *(missing, self._mirror.run, self._mirror.sequence.where, self._mirror.run),
            )
        await self._local.close()

    # -- taking the run ----------------------------------------------------------------------------

    async def take(self) -> None:
        """Write the next object, with all that the store has not: from then on the run is ours."""
        await self._put_next(await self._rows(), once=True)
        self._begin()

    def stay_alone(self, err: Exception) -> None:
        """Begin without the store."""
        self._note_away(err)
        self._alone = True
        self._begin()

    def _begin(self) -> None:
        self._work = [asyncio.create_task(self._put_all()), asyncio.create_task(self._put_results())]

    # -- beside the engine -------------------------------------------------------------------------

    async def _put_all(self) -> None:
        try:
            if self._alone:
                await self._find_place()
            while True:
                while self._written > self._put:
                    await self._put_next(await self._rows())
                self._wake.clear()
                try:
                    await asyncio.wait_for(self._wake.wait(), LOOK_S)
                except TimeoutError:
                    await self._look()
        except JournalError as err:
            self._failure = err
        except RequestError as err:  # found after a time alone: it was taken over
            self._failure = LeaseLost(str(err))
        except Exception as err:  # a defect of ours: without this, the run would wait for ever
            self._failure = JournalError(f"the copy in the store failed ({err!r}): please report this")
            self._failure.__cause__ = err
        self._tell()

    async def _find_place(self) -> None:
        """Once the store is back, find out where to go on."""
        for pause_s in pauses(FIRST_PAUSE_S, LONGEST_PAUSE_S, 2):
            try:
                newest = await self._mirror.sequence.newest()
                break
            except (StoreAway, StoreRefused):
                await asyncio.sleep(pause_s)
        else:  # pragma: no cover
            return
        self._mirror.newest = newest
        if newest is not None:
            ours = newest.home == self._mirror.store.home_id
            if not ours or newest.epoch >= self.epoch:
                raise self._lost(newest)
            self._put = newest.seq
        await self._put_next(await self._rows())

    async def _look(self) -> None:
        with contextlib.suppress(StoreAway, StoreRefused):
            if (other := await self._mirror.sequence.read(self._next)) is not None:
                raise self._lost(other.header)

    async def _put_results(self) -> None:
        while True:
            await asyncio.sleep(RESULTS_S)
            with contextlib.suppress(StoreAway, StoreRefused, OSError):
                await self._mirror.files.send_results()

    # -- one object --------------------------------------------------------------------------------

    @property
    def _next(self) -> int:
        return 1 if self._mirror.newest is None else self._mirror.newest.number + 1

    async def _rows(self) -> list[Row]:
        return await asyncio.to_thread(self._mirror.store.rows, self._mirror.run, self._put, MOST_ROWS)

    async def _put_next(self, rows: Sequence[Row], *, once: bool = False) -> None:
        """Write the next object, however long that takes. Raises LeaseLost if somebody else has.

        With `once`, a store that is away is an error.
        """
        seq, checksum = (rows[-1].seq, rows[-1].checksum or b"") if rows else await self._head()
        header = Header(
            run=self._mirror.run,
            number=self._next,
            epoch=self.epoch,
            home=self._mirror.store.home_id,
            holder=self._holder,
            created_at=self._created_at,
            wrote_at=WallClock().now(),
            seq=seq,
            checksum=checksum.hex(),
        )
        written = JournalObject(header, tuple(rows))
        for pause_s in pauses(FIRST_PAUSE_S, LONGEST_PAUSE_S, 2):
            try:
                await self._send_what_was_collected(rows)
                await self._create(written)
                break
            except (StoreAway, StoreRefused) as err:
                if once:
                    raise
                self._note_away(err)
                await asyncio.sleep(pause_s)
        self._mirror.newest, self._put = header, seq
        self._note_back()
        self._tell()

    async def _head(self) -> tuple[int, bytes]:
        return await asyncio.to_thread(self._mirror.store.head, self._mirror.run)

    async def _create(self, written: JournalObject) -> None:
        try:
            await self._mirror.sequence.create(written)
        except ObjectExists:
            other = await self._mirror.sequence.read(written.header.number)
            if other is None or other.encoded() != written.encoded():
                raise self._lost(None if other is None else other.header) from None
            # else it is ours: the answer to an earlier try was lost

    async def _send_what_was_collected(self, rows: Sequence[Row]) -> None:
        """No event says that artefacts are home while they are not in the store."""
        for row in rows:
            event = decode(row.body, row.schema) if row.kind == _COLLECTED else None
            if isinstance(event, AttemptCollected):
                await self._mirror.files.send_artefacts(event.attempt)

    def _lost(self, other: Header | None) -> LeaseLost:
        who = "another controller" if other is None else other.who
        run, where = self._mirror.run, self._mirror.sequence.where
        return LeaseLost(
            f"{who} took over {run!r} through {where}: this controller records and does nothing more"
        )

    # -- away and back -----------------------------------------------------------------------------

    def _note_away(self, err: Exception) -> None:
        if self._away_since is None:
            self._away_since = time.monotonic()
            life_s = self._life_s()
            self._patience_s = None if life_s is None else life_s / 2
            until = "" if life_s is None else f"; after {life_s / 120:.0f} minutes it drains"
            log.warning("%s: run %s waits for it%s", err, self._mirror.run, until)

    def _note_back(self) -> None:
        if self._away_since is not None:
            away_s = time.monotonic() - self._away_since
            log.warning("%s is back after %.0f s", self._mirror.sequence.where, away_s)
        self._away_since, self._alone = None, False

    def _go_alone(self) -> None:
        self._alone = True
        self._tell()

    def _check(self) -> None:
        if self._failure is not None:
            copy = type(self._failure)(*self._failure.args)
            copy.__cause__ = self._failure.__cause__
            raise copy

    async def _changed(self) -> None:
        await self._news.wait()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


_COLLECTED = b"AttemptCollected"
