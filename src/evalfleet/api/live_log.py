"""The output of an attempt that runs, for processes that are not its controller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path

from evalfleet.errors import ChannelError, FleetError, RequestError
from evalfleet.journal import Store
from evalfleet.journal.holds import Holds
from evalfleet.model import Machine, Piece, Plan
from evalfleet.named_pools import look_at, machine_of
from evalfleet.planning.workspace import Workspace
from evalfleet.ports import Fence
from evalfleet.state import AttemptState, RunState

SILENT_S = 20.0


class LiveLog:
    """An attempt's output as its machine has it, with the values of secrets masked. To be closed.

    It is read by looking on: nothing is taken over from the run's controller. Once there is no more to come,
    `over` is set, and `problem` says why, if it is not that the attempt has ended.
    """

    def __init__(self, home: Path, state: RunState, attempt: AttemptState, file: str = "log") -> None:
        """`file`: another one below the attempt's folder on its machine."""
        self.over = False
        self.problem = ""
        self._home = home
        self._state = state
        self._attempt = attempt
        self._file = file
        self._runner = asyncio.Runner()
        self._open = AsyncExitStack()
        self._pieces: AsyncGenerator[Piece] | None = None
        self._next: asyncio.Task[Piece] | None = None

    def read(self, seconds: float) -> bytes:
        """What is new: all that is there, waited for so long."""
        return self._runner.run(self._read(seconds)) if not self.over else b""

    def close(self) -> None:
        self._runner.run(self._close())
        self._runner.close()

    async def _read(self, seconds: float) -> bytes:
        shown: list[bytes] = []
        deadline = asyncio.get_running_loop().time() + seconds
        try:
            pieces = self._pieces or await self._connect()
            while True:
                if self._next is None:
                    self._next = asyncio.ensure_future(anext(pieces))
                await asyncio.wait({self._next}, timeout=deadline - asyncio.get_running_loop().time())
                if not self._next.done():
                    break
                task, self._next = self._next, None
                piece = task.result()
                shown.append(piece.data)
                if piece.at_end:
                    break
        except StopAsyncIteration:
            self.over = True
        except (FleetError, OSError) as err:
            self.over, self.problem = True, str(err)
        return b"".join(shown)

    async def _connect(self) -> AsyncGenerator[Piece]:
        workspace, plan = Workspace.here(self._home), self._state.plan
        try:
            secrets, environ = workspace.secrets(plan)
        except RequestError as err:
            raise ChannelError("the run's secrets are not set here, and it may hold them") from err
        machine = self._state.machines[self._attempt.machine]
        place, there = machine.offer.place, machine_of(machine)
        if plan.pool:
            plan, there = self._lender(plan, there)
        changed = workspace.changed_settings(plan)
        places = await self._open.enter_async_context(workspace.places(plan, secrets, environ, changed))
        channel = places[place].channel(there, Fence(plan.run, 0, SILENT_S, looks_on=True))
        self._open.push_async_callback(channel.close)
        self._pieces = channel.follow(self._attempt.id, self._file)
        return self._pieces

    def _lender(self, plan: Plan, borrowed: Machine) -> tuple[Plan, Machine]:
        """The pool's plan, and its own name for the machine."""
        store = Store.open(self._home, create=False, read_only=True)
        pool = look_at(store, plan.pool)
        for hold in Holds(store, plan.pool).all().values():
            if hold.borrower == borrowed.id:
                return pool.state.plan, machine_of(pool.state.machines[hold.machine])
        return pool.state.plan, borrowed

    async def _close(self) -> None:
        if self._next is not None:
            self._next.cancel()
            await asyncio.wait({self._next})
        if self._pieces is not None:
            await self._pieces.aclose()
        await self._open.aclose()
