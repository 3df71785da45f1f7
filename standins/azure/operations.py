"""Long-running operations as ARM has them."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from standins.cloud.background import Background
from standins.cloud.clock import Clock
from standins.cloud.words import Answer, Call, Json

from .words import ArmError

PREEMPTED = ArmError(
    409, "OperationPreempted", "The operation has been preempted by a more recent operation."
)


@dataclass(eq=False)
class Operation:
    """`where`: the path its status is at, but for the last two words."""

    id: str
    where: str
    started: float
    status: str = "InProgress"
    error: ArmError | None = None
    ended: float = 0.0
    result: Json | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    def end(self, status: str, now: float, error: ArmError | None = None) -> None:
        if not self.done.is_set():
            self.status, self.error, self.ended = status, error, now
            self.done.set()

    async def outcome(self) -> None:
        """Wait for it; raises what it failed of."""
        await self.done.wait()
        if self.error is not None:
            raise self.error


class Operations(Background):
    """`retry_after_s`: what clients are told to wait between two looks; None leaves it to them."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._known: dict[str, Operation] = {}
        self._seed = itertools.count(1)
        self.retry_after_s: int | None = 1

    def start(self, where: str, work: Coroutine[Any, Any, Json | None]) -> Operation:
        id = str(uuid.uuid5(uuid.NAMESPACE_URL, f"operation {next(self._seed)}"))
        operation = self._known[id] = Operation(id, where, self._clock.now())
        operation.task = self.spawn(self._run(operation, work))
        return operation

    async def _run(self, operation: Operation, work: Coroutine[Any, Any, Json | None]) -> None:
        try:
            operation.result = await work
        except ArmError as error:
            operation.end("Failed", self._clock.now(), error)
        except asyncio.CancelledError:
            operation.end("Canceled", self._clock.now(), PREEMPTED)
            raise
        except Exception as err:
            operation.end("Failed", self._clock.now(), ArmError(500, "InternalExecutionError", repr(err)))
            raise
        else:
            operation.end("Succeeded", self._clock.now())

    async def preempt(self, operation: Operation) -> None:
        """End it where it is."""
        if operation.task is not None and not operation.task.done():
            operation.task.cancel()
            await asyncio.gather(operation.task, return_exceptions=True)
        # one that had not begun yet was never told
        operation.end("Canceled", self._clock.now(), PREEMPTED)

    # -- HTTP ----------------------------------------------------------------------------------

    def headers(self, call: Call, operation: Operation, *, location: bool) -> dict[str, str]:
        version = f"?api-version={call.asks('api-version')}"
        status = f"{call.base}{operation.where}/operations/{operation.id}{version}"
        headers = {"Azure-AsyncOperation": status}
        if location:
            headers["Location"] = f"{call.base}{operation.where}/operationResults/{operation.id}{version}"
        return {**headers, **self._pace()}

    def _pace(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}

    def find(self, path: str) -> Operation | None:
        words = path.rstrip("/").split("/")
        kinds = ("operations", "operationresults", "operationstatuses")
        return self._known.get(words[-1]) if len(words) > 2 and words[-2].lower() in kinds else None

    def answer(self, call: Call, operation: Operation) -> Answer:
        if "/operationresults/" in call.path.lower():
            return self._result(call, operation)
        shown: Json = {
            "name": operation.id,
            "status": operation.status,
            "startTime": self._clock.stamp(operation.started),
        }
        if operation.done.is_set():
            shown["endTime"] = self._clock.stamp(operation.ended)
        if operation.error is not None:
            shown["error"] = operation.error.error()
        if operation.result is not None:
            shown["properties"] = {"output": operation.result}
        return Answer(200, shown, {} if operation.done.is_set() else self._pace())

    def _result(self, call: Call, operation: Operation) -> Answer:
        if not operation.done.is_set():
            here = f"{call.base}{call.path}?api-version={call.asks('api-version')}"
            return Answer(202, None, {"Location": here, **self._pace()})
        if operation.error is not None:
            return operation.error.answer()
        return Answer(200, operation.result) if operation.result is not None else Answer(204)
