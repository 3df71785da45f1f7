"""Artefacts, kept files and results: on their way into a store, and back to another computer."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from urllib.parse import quote, unquote

from evalfleet.errors import RequestError
from evalfleet.files import changed_at
from evalfleet.model import AttemptId
from evalfleet.names import artefacts_folder, safe_name
from evalfleet.ports import Objects
from evalfleet.state import RunState

from .objects import ObjectExists

AT_ONCE = 16
RESULTS = ("results.json", "aggregated_results.json")
KEPT_FILES = ".files"
SCORE = ".score"
FETCHING = ".store-fetching"
"""A file that is there as long as not all others are."""
MOST_NAMED = 5
_PLAIN = " !'()+,-.:;=@_~"

log = logging.getLogger(__name__)


class RunFiles:
    """The files of one run, in its folder here and in a store. All calls raise StoreAway or StoreRefused."""

    def __init__(self, objects: Objects, run: str, folder: Path) -> None:
        self._objects = objects
        self._base = safe_name(run)
        self._folder = folder
        self._turn = asyncio.Semaphore(AT_ONCE)
        self._sent: set[AttemptId] = set()
        self._results: dict[str, int | None] = {}

    async def send_artefacts(self, attempt: AttemptId) -> None:
        """Put what an attempt left into the store, unless that was done already."""
        if attempt in self._sent:
            return
        home = self._folder / _home_of(attempt)
        files = [file for folder in (home, _score_of(home)) for file in _plain_files(folder)]
        await asyncio.gather(*(self._send(file) for file in files))
        self._sent.add(attempt)

    async def _send(self, file: Path) -> None:
        parts = file.relative_to(self._folder).parts
        name = "/".join((self._base, "artefacts", *(quote(part, safe=_PLAIN) for part in parts)))
        async with self._turn:
            if file.exists():  # else somebody has tidied up
                await self._objects.replace(name, file)

    async def send_kept_files(self) -> None:
        """Put what machines get into the store: one archive for each digest, written once.

        Its name has the checksum of the archive, too, so that one that is damaged there is never used.
        """
        there = {_digest_in(name) for name in await self._objects.names(f"{self._base}/files/")}
        for folder in sorted((self._folder / KEPT_FILES).glob("*")):
            if folder.name in there:
                continue
            with tempfile.NamedTemporaryFile(prefix=".store-", dir=self._folder, suffix=".tar") as scratch:
                checksum = await asyncio.to_thread(_pack, folder, Path(scratch.name))
                name = f"{self._base}/files/{folder.name}-{checksum}.tar"
                try:
                    await self._objects.create(name, Path(scratch.name))
                except ObjectExists:
                    log.debug("%s was put by another controller", name)

    async def send_results(self) -> None:
        """Put those files of results into the store that have changed."""
        for file in RESULTS:
            path = self._folder / file
            changed = changed_at(path)
            if changed is not None and self._results.get(file) != changed:
                await self._objects.replace(f"{self._base}/{file}", await asyncio.to_thread(path.read_bytes))
                self._results[file] = changed

    # -- and back --------------------------------------------------------------------------------

    async def fetch_kept_files(self) -> None:
        """Bring what machines get here. What is here already stays. Raises RequestError if it is damaged."""
        for name in await self._objects.names(f"{self._base}/files/"):
            target = self._folder / KEPT_FILES / _digest_in(name)
            if target.exists():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".store-", dir=self._folder) as scratch:
                packed = Path(scratch) / "packed.tar"
                await self._objects.fetch(name, packed)
                await asyncio.to_thread(_unpack, packed, Path(scratch) / "files", name)
                (Path(scratch) / "files").rename(target)

    @property
    def lacks_files(self) -> bool:
        return lacks_files(self._folder)

    def note_lack(self) -> None:
        """The run is brought here; what machines get, and what its attempts left, comes once it is ours."""
        (self._folder / FETCHING).touch()

    async def fetch_artefacts(self, collected: Mapping[AttemptId, int]) -> None:
        """Bring what these attempts left here, so many files each. What is here already stays; what the store
        has no longer is told."""
        absent = {
            home: files
            for attempt, files in collected.items()
            if not (self._folder / (home := _home_of(attempt))).exists()
        }
        below, wanted = f"{self._base}/artefacts/", dict[str, list[tuple[str, Path]]]()
        for name in await self._objects.names(below) if absent else ():
            parts = [unquote(part) for part in name[len(below) :].split("/")]
            home = "/".join(parts[:2]).removesuffix(SCORE)
            safe = not any(part in ("", ".", "..") or "/" in part or "\0" in part for part in parts)
            if home in absent and safe and len(parts) > 2:
                wanted.setdefault("/".join(parts[:2]), []).append((name, Path(*parts[2:])))
        await asyncio.gather(*(self._fetch(home, files) for home, files in wanted.items()))
        if lost := [home for home, files in absent.items() if len(wanted.get(home, ())) < files]:
            more = ", ..." if len(lost) > MOST_NAMED else ""
            names = ", ".join(PurePosixPath(home).name for home in lost[:MOST_NAMED])
            where = f"{self._objects.url}/{below}"
            log.warning("%s does not hold all that %d attempts left: %s%s", where, len(lost), names, more)
        (self._folder / FETCHING).unlink(missing_ok=True)

    async def _fetch(self, home: str, files: list[tuple[str, Path]]) -> None:
        """The folder appears whole, so that what is there is complete."""
        target = self._folder / home
        scratch = target.with_name(f".store-{target.name}")
        shutil.rmtree(scratch, ignore_errors=True)
        for name, path in files:
            (scratch / path).parent.mkdir(parents=True, exist_ok=True)
            async with self._turn:
                await self._objects.fetch(name, scratch / path)
        os.replace(scratch, target)


def lacks_files(folder: Path) -> bool:
    """Was the run of this folder brought here without its files, and not all of them are here since?"""
    return (folder / FETCHING).exists()


def collected_in(state: RunState) -> dict[AttemptId, int]:
    """The attempts whose artefacts some controller has collected, and how many files those were, at least."""
    return {
        attempt.id: attempt.collected.files
        for attempt in state.attempts.values()
        if attempt.collected is not None
    }


def _home_of(attempt: AttemptId) -> str:
    return artefacts_folder(attempt.rpartition(".")[0], attempt)


def _score_of(home: Path) -> Path:
    return home.with_name(home.name + SCORE)


def _plain_files(folder: Path) -> Iterator[Path]:
    """Somebody may tidy up meanwhile: `Path.rglob` would fail."""
    for file in sorted(Path(where, name) for where, _, names in os.walk(folder) for name in names):
        if file.is_file() and not file.is_symlink():
            yield file


def _digest_in(name: str) -> str:
    """The digest of the files in an archive, by its name: RUN/files/DIGEST-CHECKSUM.tar."""
    return PurePosixPath(name).stem.partition("-")[0]


def _pack(folder: Path, path: Path) -> str:
    """Returns the archive's checksum."""
    import tarfile  # late, here and below: few runs have a store

    with tarfile.open(path, "w") as archive:
        archive.add(folder, ".")
    return _checksum(path)


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]


def _unpack(path: Path, folder: Path, name: str) -> None:
    import tarfile

    expected = PurePosixPath(name).stem.partition("-")[2]
    if expected and expected != _checksum(path):  # earlier versions wrote none
        raise RequestError(f"{name} in the store is damaged: its checksum is another than its name says")
    try:
        with tarfile.open(path, "r") as archive:
            archive.extractall(folder, filter="tar")
    except tarfile.TarError as err:
        raise RequestError(
            f"{name} in the store is no archive of evalfleet's, or is damaged ({err})"
        ) from err
