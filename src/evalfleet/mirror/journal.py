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
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Self

from evalfleet.clock import WallClock, pauses
from evalfleet.errors import JournalError, LeaseLost, RequestError
from evalfleet.events import AttemptCollected, Event, Record, StopRequested, decode
from evalfleet.journal import Holder, SqliteJournal
from evalfleet.journal.checksums import Row
from evalfleet.model import AttemptId, Micros
from evalfleet.ports import Request

from .mirror import Mirror
from .objects import ObjectExists, StoreAway, StoreRefused
from .sequence import Header, JournalObject

LOOK_S = 15.0
"""A controller that has nothing to write looks so often whether somebody took its run over."""
RESULTS_S = 10.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 15.0
ANSWER_S = 20.0
"""A store that has not answered for so long is away. A call is given up later: it may be a large file's."""
MOST_ROWS = 5000
"""Events in one object."""
DRAIN = -1
"""The number of a request that nobody has made: to drain, because the store is away for too long."""

log = logging.getLogger(__name__)


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
        self._kept_files: asyncio.Task[None] | None = None
        self._fetching: asyncio.Task[None] | None = None
        self._work: list[asyncio.Task[None]] = []

    @classmethod
    async def open(
        cls, local: SqliteJournal, mirror: Mirror, holder: Holder, life_s: Callable[[], float | None]
    ) -> Self:
        """The run is ours when this returns. Raises LeaseLost if somebody else was faster."""
        journal = cls(local, mirror, holder, life_s)
        await mirror.files.send_kept_files()
        await journal._put_next(await journal._rows(), once=True)  # with all that the store has not
        journal._begin()
        return journal

    @classmethod
    def open_alone(
        cls,
        local: SqliteJournal,
        mirror: Mirror,
        holder: Holder,
        life_s: Callable[[], float | None],
        err: Exception,
    ) -> Self:
        """The same while the store is away, for a run that is to be stopped: it is told when it is back."""
        journal = cls(local, mirror, holder, life_s)
        journal._note_away(err)
        journal._alone = True
        journal._begin()
        return journal

    def _begin(self) -> None:
        self._work += [asyncio.create_task(self._put_all()), asyncio.create_task(self._put_results())]

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
                await self._mirror.check_there()
                await self._mirror.files.send_artefacts(attempt)
                return
            except (StoreAway, StoreRefused) as err:
                self._note_away(err)
            if self._alone or self._failure is not None:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed(), pause_s)

    # -- what a run has on another computer --------------------------------------------------------

    @property
    def lacks_files(self) -> bool:
        return self._mirror.files.lacks_files

    def fetch(self, collected: Mapping[AttemptId, int], check: Callable[[], None]) -> None:
        """Bring here, beside the run, what machines get, and then what these attempts left: so many files
        each. `check` raises RequestError if what machines get is not all there."""
        self._kept_files = asyncio.create_task(self._fetch_kept_files(check))
        self._fetching = asyncio.create_task(self._fetch(collected))
        self._work += [self._kept_files, self._fetching]

    async def _fetch_kept_files(self, check: Callable[[], None]) -> None:
        """Raises RequestError if they are damaged or missing, or there is no room for them."""
        for pause_s in pauses(FIRST_PAUSE_S, LONGEST_PAUSE_S, 2):
            try:
                await self._mirror.files.fetch_kept_files()
                break
            except (StoreAway, StoreRefused) as err:
                log.info("what machines get is not here yet: %s", err)
                await asyncio.sleep(pause_s)
            except OSError as err:
                raise RequestError(f"what machines get cannot be brought here: {err}") from err
        try:
            await asyncio.to_thread(check)
        except RequestError as err:
            where = f"{self._mirror.sequence.where}/files"
            raise RequestError(f"{where} has no archive of what machines get: put it back ({err})") from err

    async def has_files(self) -> None:
        """Wait until what machines get is here, also while the store is away. Raises RequestError."""
        if self._kept_files is not None:
            await asyncio.shield(self._kept_files)

    async def _fetch(self, collected: Mapping[AttemptId, int]) -> None:
        try:
            await self.has_files()
        except RequestError:
            return  # who waits for them is told; the next `resume` tries again
        for pause_s in pauses(FIRST_PAUSE_S, LONGEST_PAUSE_S, 2):
            try:
                await self._mirror.files.fetch_artefacts(collected)
                return
            except (StoreAway, StoreRefused) as err:
                log.info("artefacts are not here yet: %s", err)
                await asyncio.sleep(pause_s)
            except (RequestError, OSError) as err:
                log.warning("not all artefacts could be brought here: %s; the next `resume` tries again", err)
                return

    async def fetched(self) -> None:
        """Wait for what `fetch` brings, unless the store is away and the run goes on without it."""
        while self._fetching is not None and not self._fetching.done():
            if self._alone or self._failure is not None:
                return
            await asyncio.wait([self._fetching], timeout=FIRST_PAUSE_S)

    async def close(self) -> None:
        """Let go of the stream, with the newest results in the store. It never raises."""
        if self._failure is None and self._away_since is None and self._work:
            try:
                await self._send_results()
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
        rests = pauses(FIRST_PAUSE_S, LONGEST_PAUSE_S, 2)
        while True:
            try:
                await self._mirror.check_there()
                newest = await self._mirror.sequence.newest()
                break
            except (StoreAway, StoreRefused):
                await asyncio.sleep(next(rests))
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
                await self._send_results()

    async def _send_results(self) -> None:
        await self._mirror.check_there()
        await self._mirror.files.send_results()
        await self._mirror.sequence.seal()

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
                async with self._watched():
                    await self._mirror.check_there()
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

    @contextlib.asynccontextmanager
    async def _watched(self) -> AsyncGenerator[None]:
        """While something is put: a store that takes it and does not answer is away, too, long before the
        call is given up."""
        slow = StoreAway(f"{self._mirror.sequence.where} has not answered for {ANSWER_S:g} s")
        timer = asyncio.get_running_loop().call_later(ANSWER_S, self._note_away, slow)
        try:
            yield
        finally:
            timer.cancel()

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
