"""Finding the keeper of a home's lab, starting one, and asking it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec

import evalfleet
from evalfleet.channels.supervisor.files import job_name
from evalfleet.errors import PlaceError
from evalfleet.model import decodable

from .keeper import READY, locked
from .lab import Lab
from .protocol import Add, KeeperAnswer, KeeperOrders, KeeperRecord, Question, Shape

FOLDER = ".lab"
ANSWER_S = 90.0
BURIAL_S = 15.0
STARTS = 3
CHECKOUT = Path(__file__).resolve().parents[1]
PACKAGES = (CHECKOUT, Path(evalfleet.__file__).resolve().parents[1])

# Nobody waits for the keeper, so that it outlives who started it. One that is killed leaves its hosts to the
# shell, which sweeps them away.
LAUNCH = '{ "$@" || exec "$0" -P -m lab --sweep >/dev/null; } &'


class KeeperClient:
    """A client of whatever keeper the home has now, found by its record; it lives if its socket answers."""

    def __init__(self, home: Path, place: str) -> None:
        self._folder = home.absolute() / FOLDER
        self._name = job_name(place)
        self._place = place
        self._starting = asyncio.Lock()

    def record(self) -> KeeperRecord | None:
        """Of the keeper of now, or of the last one if it was killed."""
        try:
            return msgspec.json.decode(self._path("json").read_bytes(), type=decodable(KeeperRecord))
        except (OSError, msgspec.DecodeError):
            return None

    async def add(self, question: Add) -> KeeperAnswer:
        """Starts a keeper if there is none. Raises PlaceError."""
        for _ in range(STARTS):
            answer = await self.ask(question)
            if answer is not None:
                return answer
            async with self._starting:
                await asyncio.to_thread(self._start, question.shape)
        raise self._trouble("its keeper ends as soon as it is started")

    async def ask(self, question: Question) -> KeeperAnswer | None:
        """None: no keeper lives, and neither does any machine. Raises PlaceError if that is unclear."""
        record = self.record()
        if record is None:
            return None
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await _ask(record, question)
        except TimeoutError:
            raise self._trouble(f"its keeper (process {record.pid}) does not answer") from None
        except OSError as err:
            raise self._trouble(f"its keeper (process {record.pid}) cannot be asked: {err}") from err
        if answer is not None and answer.refusal != "closing":
            return answer
        await self._bury(record)
        return None

    async def _bury(self, record: KeeperRecord) -> None:
        """Hosts outlive a keeper that was killed, until they are swept away."""
        deadline = time.monotonic() + BURIAL_S
        while os.path.exists(record.lab):
            await asyncio.to_thread(Lab.sweep)
            if time.monotonic() > deadline:
                raise self._trouble(f"the remains of a dead keeper stay in {record.lab}")
            await asyncio.sleep(0.05)  # somebody else may be at it

    # -- starting ------------------------------------------------------------------------------

    def _start(self, shape: Shape) -> None:
        """Returns when one lives, whoever started it."""
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            with locked(str(self._path("lock"))):
                record = self.record()
                if record is None or not _listens(record.socket):
                    self._launch(shape)
        except OSError as err:
            raise self._trouble(f"its keeper cannot be started: {err}") from err

    def _launch(self, shape: Shape) -> None:
        errand = KeeperOrders(str(self._path("json")), str(self._path("lock")), shape)
        python = [sys.executable, "-P", "-m", "lab.keeper"]
        # of the environment it gets nothing: there may be secrets in it
        environ = {"PATH": os.defpath, "LANG": "C.UTF-8", "PYTHONPATH": os.pathsep.join(map(str, PACKAGES))}
        with open(self._path("log"), "wb") as log:
            process = subprocess.Popen(
                ["/bin/sh", "-c", LAUNCH, sys.executable, *python, msgspec.json.encode(errand).decode()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd="/",
                env=environ,
                start_new_session=True,
            )
        with process:
            assert process.stdout is not None
            said = process.stdout.readline().decode().strip()
        if said != READY:
            why = f"the lab of {self._place!r} does not start; `--on local` needs none: "
            raise PlaceError(why + (said or self._last_words()), transient=False, scope="place")

    def _last_words(self) -> str:
        lines = self._path("log").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "its keeper died without a word"

    def _path(self, kind: str) -> Path:
        return self._folder / f"{self._name}.{kind}"

    def _trouble(self, why: str) -> PlaceError:
        return PlaceError(f"the lab of {self._place!r}: {why}", transient=True, scope="place")


async def _ask(record: KeeperRecord, question: Question) -> KeeperAnswer | None:
    """None if the keeper is dead, or dies over it."""
    try:
        reader, writer = await asyncio.open_unix_connection(record.socket)
    except (FileNotFoundError, ConnectionRefusedError):
        return None
    try:
        writer.write(msgspec.json.encode(question) + b"\n")
        said = await reader.read()
    except ConnectionError:
        return None
    finally:
        writer.close()
    return msgspec.json.decode(said, type=decodable(KeeperAnswer)) if said else None


def _listens(path: str) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(path)
        return True
    return False
