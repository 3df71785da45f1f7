"""Another release of evalfleet: a copy whose supervisor differs from ours, and processes that use it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec

import evalfleet
from evalfleet.model import Machine

from .fleet import HOME_ID, Fleet

CONTROLLER = Path(__file__).with_name("controller.py")
SPOKEN = "PROTOCOLS = (1,)\n"
ANSWER_S = 30.0


class Controller:
    """One that runs as a process of its own. A call that raises there is an AssertionError here."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def call(self, *words: str) -> object:
        answer = await self._ask(words)
        assert "returned" in answer, answer
        return answer["returned"]

    async def refused(self, *words: str) -> str:
        """What the call raised."""
        answer = await self._ask(words)
        assert "raised" in answer, answer
        return str(answer["raised"])

    async def _ask(self, words: tuple[str, ...]) -> dict[str, object]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(words).encode() + b"\n")
        async with asyncio.timeout(ANSWER_S):
            answer: dict[str, object] = json.loads(await self._process.stdout.readline())
        return answer


class Release:
    """`protocol`: the only one that its controllers and its supervisors speak."""

    def __init__(self, folder: Path, protocol: int = 1) -> None:
        self._folder = folder
        package = folder / "evalfleet"
        shutil.copytree(Path(evalfleet.__file__).parent, package)
        channels = package / "channels"
        for file in (channels / "session.py", channels / "supervisor" / "server.py"):
            source = file.read_text()
            assert SPOKEN in source
            file.write_text(source.replace(SPOKEN, f"PROTOCOLS = ({protocol},)  # as of another release\n"))

    @contextlib.asynccontextmanager
    async def controller(self, hosts: Fleet, made: Machine, epoch: int) -> AsyncGenerator[Controller]:
        home = hosts.folder / "home-of-another-release"
        home.mkdir(exist_ok=True)
        place = json.dumps({"settings": hosts.settings(), "home": str(home), "home_id": HOME_ID})
        about = (place, msgspec.json.encode(made).decode(), json.dumps(["run", epoch, 20.0]))
        environ = {**os.environ, "PYTHONPATH": str(self._folder)}
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(CONTROLLER), *about, stdin=PIPE, stdout=PIPE, env=environ
        )
        try:
            yield Controller(process)
            process.stdin.close()  # type: ignore[union-attr]
            async with asyncio.timeout(ANSWER_S):
                assert await process.wait() == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
