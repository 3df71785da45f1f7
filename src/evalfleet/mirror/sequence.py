"""The journal of a run as a sequence of numbered objects, each of which is written once.

An object holds events as they are in the home's journal, with their checksums, and says who wrote it and
under which epoch. Whoever writes the next number has the run: taking it over is no more than that.

Many small objects are slow to read. So each SEGMENT of them are put together into one more object, a segment,
from which a computer that takes the run over reads them at once. Nothing depends on segments: where one is
missing or damaged, the objects themselves are read.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterable, Sequence, Set
from pathlib import PurePosixPath

import msgspec
from msgspec import Raw, Struct, structs

from evalfleet.errors import JournalForeign, RequestError
from evalfleet.journal import Holder
from evalfleet.journal.checksums import Row, seed
from evalfleet.journal.holder import local_time
from evalfleet.model import Micros, decodable
from evalfleet.names import check_run_name, safe_name
from evalfleet.ports import Objects

from .objects import ObjectExists

FORMAT = 1
FIRST_READS, READS_AT_ONCE = 8, 64
SEGMENT = 128
"""Objects that are put together."""
UNKNOWN = -1
_NUMBERED = re.compile(r"[0-9]{9}\.jsonl")


class Header(Struct, frozen=True, kw_only=True):
    """The first line of an object: who wrote it, and what the journal's newest event is with it."""

    format: int = FORMAT
    run: str
    number: int
    epoch: int
    home: str
    """The id of the home of the controller that wrote it."""
    holder: Holder
    created_at: Micros
    """When the run was made."""
    wrote_at: Micros
    seq: int = UNKNOWN
    """The number of the newest event in this object or an earlier one. Who takes a run over in a hurry, with
    an object that holds no events, does not know it yet."""
    checksum: str = ""
    """Of that event, in hexadecimal digits."""

    @property
    def who(self) -> str:
        return f"pid {self.holder.pid} on {self.holder.host}, at {local_time(self.wrote_at)},"


class _EventLine(Struct, frozen=True, array_like=True):
    seq: int
    epoch: int
    schema: int
    at: Micros
    kind: str
    body: Raw
    checksum: str


class JournalObject(Struct, frozen=True):
    """One object of the sequence."""

    header: Header
    rows: tuple[Row, ...]

    def encoded(self) -> bytes:
        lines = [msgspec.json.encode(self.header)]
        for row in self.rows:
            assert row.checksum is not None  # only earlier versions wrote some without
            line = _EventLine(
                row.seq,
                row.epoch,
                row.schema,
                row.at,
                row.kind.decode(),
                Raw(row.body),
                row.checksum.hex(),
            )
            lines.append(msgspec.json.encode(line))
        return b"\n".join([*lines, b""])


def decoded(content: bytes) -> JournalObject:
    """Raises msgspec.MsgspecError or ValueError if it is none of ours."""
    first, *lines = content.splitlines()
    rows: list[Row] = []
    for line in lines:
        event = msgspec.json.decode(line, type=decodable(_EventLine))
        checksum = bytes.fromhex(event.checksum)
        head = (event.seq, event.epoch, event.schema, event.at)
        rows.append(Row(*head, event.kind.encode(), bytes(event.body), checksum))
    return JournalObject(msgspec.json.decode(first, type=decodable(Header)), tuple(rows))


def _numbers_in(names: Iterable[str]) -> list[int]:
    """Names are such as RUN/journal/000000001.jsonl. Others are no objects of ours."""
    return [int(PurePosixPath(name).stem) for name in names if _NUMBERED.fullmatch(PurePosixPath(name).name)]


def _parts(numbers: Iterable[int], segments: Sequence[int]) -> list[list[int]]:
    """These objects, in order: those that are in one of the segments together, which their last one names."""
    parts, lasts = dict[int, list[int]](), set(segments)
    for number in numbers:
        last = -(-number // SEGMENT) * SEGMENT
        parts.setdefault(last if last in lasts else -number, []).append(number)
    return list(parts.values())


def _split(segment: bytes) -> list[bytes]:
    """The objects in a segment. A header is the only line that is no list."""
    objects: list[list[bytes]] = []
    for line in segment.splitlines(keepends=True):
        if not objects or not line.startswith(b"["):
            objects.append([])
        objects[-1].append(line)
    return [b"".join(lines) for lines in objects]


class JournalSequence:
    """The objects of one run's journal. Reading raises StoreAway, StoreRefused or JournalForeign."""

    def __init__(self, objects: Objects, run: str) -> None:
        self._objects = objects
        self._turn = asyncio.Semaphore(READS_AT_ONCE)
        self._unsealed: dict[int, bytes] = {}
        """What we wrote and is in no segment yet, by number."""
        self.run = run

    @property
    def where(self) -> str:
        return f"{self._objects.url}/{safe_name(self.run)}"

    def name_of(self, number: int) -> str:
        return f"{safe_name(self.run)}/journal/{number:09}.jsonl"

    async def create(self, written: JournalObject) -> None:
        """Write the next object. Raises ObjectExists if somebody else was faster."""
        content = written.encoded()
        await self._objects.create(self.name_of(written.header.number), content)
        self._unsealed[written.header.number] = content

    async def seal(self) -> None:
        """Write the segments that became complete by what we wrote."""
        complete = max(self._unsealed, default=0) // SEGMENT
        for segment in sorted({(number - 1) // SEGMENT for number in self._unsealed}):
            if segment < complete:
                await self._seal(range(segment * SEGMENT + 1, (segment + 1) * SEGMENT + 1))

    async def _seal(self, numbers: range) -> None:
        others = [number for number in numbers if number not in self._unsealed]
        found = await asyncio.gather(*(self._objects.read(self.name_of(number)) for number in others))
        contents = dict(zip(others, found, strict=True)) | self._unsealed
        if all(contents[number] for number in numbers):  # else one is missing, of which others will tell
            whole = b"".join(contents[number] or b"" for number in numbers)
            with contextlib.suppress(ObjectExists):  # by another controller: it holds the same
                await self._objects.create(self._segment_name(numbers[-1]), whole)
        for number in numbers:
            self._unsealed.pop(number, None)

    def _segment_name(self, last: int) -> str:
        return f"{safe_name(self.run)}/segments/{last:09}.jsonl"

    async def read(self, number: int) -> JournalObject | None:
        """One object; None if it is not written yet."""
        content = await self._objects.read(self.name_of(number))
        return None if content is None else self._checked(number, content)

    def _checked(self, number: int, content: bytes) -> JournalObject:
        try:
            found = decoded(content)
        except (msgspec.MsgspecError, RecursionError, ValueError) as err:
            raise self._damaged(number, f"is no part of a journal ({err})") from err
        if found.header.format > FORMAT:
            raise JournalForeign(f"{self.where} was written by a newer evalfleet: upgrade evalfleet")
        if (found.header.run, found.header.number) != (self.run, number):
            raise self._damaged(number, f"is object {found.header.number} of {found.header.run!r}")
        return found

    async def newest(self) -> Header | None:
        """The header of the last object, with the newest event that is known; None if there is none."""
        numbers = await self.numbers()
        if not numbers:
            return None
        found = last = await self._there(numbers.pop())
        while found.header.seq == UNKNOWN and numbers:
            found = await self._there(numbers.pop())
        return structs.replace(last.header, seq=found.header.seq, checksum=found.header.checksum)

    async def numbers(self) -> list[int]:
        """The numbers of all objects, in order. One may be missing for a moment while somebody takes over."""
        numbers, _ = await self._numbers_and_segments()
        return numbers

    async def _numbers_and_segments(self) -> tuple[list[int], list[int]]:
        """All objects, and the last ones of all segments. What came before a segment need not be listed: no
        number is left free, and thousands of names are slow to list."""
        base = safe_name(self.run)
        segments = _numbers_in(await self._objects.names(f"{base}/segments/"))
        sealed = segments[-1] if segments else 0
        after = self.name_of(sealed) if sealed else ""
        later = _numbers_in(await self._objects.names(f"{base}/journal/", after))
        return [*range(1, sealed + 1), *later], segments

    async def since(self, known: Set[tuple[int, str]]) -> tuple[Header | None, list[JournalObject]]:
        """The objects that follow the newest one whose last event is known, and that one's header.

        `known`: events that the caller has, by number and checksum. Each event is compared with its checksum.
        """
        try:
            return await self._since(known, with_segments=True)
        except JournalForeign:  # a segment may be damaged, where what it was made of is not
            return await self._since(known, with_segments=False)

    async def _since(
        self, known: Set[tuple[int, str]], *, with_segments: bool
    ) -> tuple[Header | None, list[JournalObject]]:
        found, width = list[JournalObject](), FIRST_READS
        numbers, segments = await self._numbers_and_segments()
        parts = _parts(numbers, segments if with_segments else ())
        while parts:
            parts, page = parts[:-width], parts[-width:]
            width = min(2 * width, READS_AT_ONCE)
            for part in reversed(await asyncio.gather(*(self._read_part(numbers) for numbers in page))):
                for each in reversed(part):
                    if (each.header.seq, each.header.checksum) in known:
                        self._verify(found[::-1], bytes.fromhex(each.header.checksum))
                        return each.header, found[::-1]
                    found.append(each)
        self._verify(found[::-1], seed(self.run))
        return None, found[::-1]

    async def _read_part(self, numbers: Sequence[int]) -> list[JournalObject]:
        """One object, or those of a segment; they must be there."""
        if len(numbers) == 1:
            return [await self._there(numbers[0])]
        async with self._turn:
            contents = _split(await self._objects.read(self._segment_name(numbers[-1])) or b"")
        if len(contents) != len(numbers):
            raise self._damaged(numbers[-1], f"ends a segment of {len(contents)}")
        return [self._checked(number, content) for number, content in zip(numbers, contents, strict=True)]

    async def _there(self, number: int) -> JournalObject:
        async with self._turn:
            found = await self.read(number)
        if found is None:
            raise self._damaged(number, "is missing")
        return found

    def _verify(self, objects: Sequence[JournalObject], before: bytes) -> None:
        epoch = 0
        for each in objects:
            for row in each.rows:
                if not row.follows(before):
                    raise self._damaged(each.header.number, f"has an event ({row.seq}) that does not fit")
                before = row.checksum or b""
            if each.header.seq == UNKNOWN:
                continue  # it only takes the number
            if each.header.epoch < epoch or each.header.checksum != before.hex():
                raise self._damaged(each.header.number, "does not follow on the one before it")
            epoch = each.header.epoch

    def _damaged(self, number: int, what: str) -> JournalForeign:
        return JournalForeign(f"{self.where} is damaged: object {number} of the journal {what}")


async def runs_below(objects: Objects) -> list[str]:
    """The runs that a store holds."""
    return [folder for folder in await objects.folders() if _is_run(folder)]


def _is_run(folder: str) -> bool:
    try:
        return check_run_name(folder) == folder
    except RequestError:
        return False


async def the_run(objects: Objects, name: str | None) -> str:
    """The run of this name in the store, or the only one. Raises RequestError."""
    found = await runs_below(objects)
    if name is None and len(found) == 1:
        return found[0]
    if name is not None and name in found:
        return name
    if not found:
        raise RequestError(f"{objects.url} holds no run: name what `run --store` was given")
    shown = ", ".join(found[:5]) + (", ..." if len(found) > 5 else "")
    if name is None:
        raise RequestError(f"{objects.url} holds several runs: name one of {shown}")
    raise RequestError(f"{objects.url} holds no run {name!r}: it has {shown}")
