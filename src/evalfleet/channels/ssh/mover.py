"""Large files to a machine on a host, and home from it, as streams of processes over SSH."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import asyncssh

from evalfleet.channels.artefacts import STANDARD_CAPS, Caps
from evalfleet.channels.parcels import ParcelMover, Stage, pack_bundle
from evalfleet.channels.supervisor.parcel import BadParcel
from evalfleet.errors import SetupFailed
from evalfleet.model import Bundle, Collected

from .host_home import HostHome
from .hosts import Errors, converse
from .target import HostDown, HostLost

READ = 4 << 20
"""More than asyncssh holds before it pauses (2 MiB). What a read leaves there makes asyncssh let the host
send far more than was read: a big file would pile up in memory while our disk is slow."""
STALL_S = 45.0


class SshMover(ParcelMover):
    """A mover of files between here and one machine on a host."""

    interrupted = (HostDown, HostLost, BadParcel, asyncssh.Error)

    def __init__(
        self, host_home: HostHome, machine: str, secrets: Mapping[str, str], caps: Caps = STANDARD_CAPS
    ) -> None:
        super().__init__(secrets, caps)
        self._host_home = host_home
        self._machine = machine

    async def _send(self, bundle: Bundle, same: Mapping[str, str]) -> None:
        loop = asyncio.get_running_loop()
        async with self._host_home.host.process(self._host_home.command("put", self._machine)) as process:

            async def send(data: bytes) -> None:
                process.stdin.write(data)
                await process.stdin.drain()
                self.alive()

            def write(data: bytes) -> None:
                asyncio.run_coroutine_threadsafe(send(data), loop).result()

            with contextlib.suppress(BrokenPipeError):  # it has ended already, and tells why
                await send(self._host_home.request(self._machine, {"digest": bundle.digest}))
                await asyncio.to_thread(pack_bundle, bundle, same, write)
            said, errors = await converse(process)
            self._host_home.check(process.exit_status, errors)
        answer = self._host_home.answer(said)
        if answer.error:
            raise SetupFailed("files", f"{self._host_home.host.name}: {answer.detail}")

    async def _receive(self, caps: dict[str, Any], into: Path) -> Collected:
        stage = await asyncio.to_thread(Stage, into, self._caps)
        try:
            async with self._host_home.host.process(
                self._host_home.command("pack", self._machine)
            ) as process:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(self._host_home.request(self._machine, caps))
                async with Errors(process) as errors:
                    while data := await self._next(process):
                        self.alive()
                        await asyncio.to_thread(stage.unpacker.feed, data)
                await converse(process)
                self._host_home.check(process.exit_status, errors.end)
            return await asyncio.to_thread(stage.settle, self._values)
        except HostLost as err:
            if isinstance(err.__cause__, TimeoutError):
                raise err.__cause__ from None  # to ask again would not help
            raise
        finally:
            await asyncio.to_thread(stage.remove)

    async def _next(self, process: asyncssh.SSHClientProcess[bytes]) -> bytes:
        """What comes next of a stream. Raises TimeoutError if nothing does."""
        try:
            async with asyncio.timeout(STALL_S):
                return await process.stdout.read(READ)
        except TimeoutError:
            raise TimeoutError(
                f"{self._host_home.host.name}: nothing came of the files for {STALL_S:g} s"
            ) from None
