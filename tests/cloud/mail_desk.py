"""What tests of machines that are jobs of a service have in common, Batch's and Azure ML's: a desk with short
tasks and one place whose machines are reached by mailboxes, and the contract's harness for them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from evalfleet.events import AttemptStarted, MachineAllocated, MachineCondemned, MachineRequested
from evalfleet.model import Broken, Cause, Machine
from evalfleet.ports import Place
from evalfleet.testing import ShellHarness
from evalfleet.testing.harness import Kind
from standins.cloud.meters import Meters
from tests.desk import Desk
from tests.waiting import PATIENCE_S, allow_for_load, until, until_async

BENCH = """\
name = "b"
tasks = "tasks.jsonl"
command = ["sh", "run.sh"]
files = ["run.sh"]
timeout_s = 60
"""


def mail_desk(
    folder: Path,
    place: str,
    settings: Mapping[str, Any],
    environ: Mapping[str, str],
    count: int,
    *,
    sleeps: float = 0.5,
) -> Desk:
    score = 'echo \'{"score": 1}\' >"$EVALFLEET_OUT/result.json"'
    (folder / "b.toml").write_text(BENCH)
    (folder / "run.sh").write_text(f"sleep {sleeps}\n{score}\n")
    (folder / "tasks.jsonl").write_text("".join(json.dumps({"id": f"t{n}"}) + "\n" for n in range(count)))
    given = {**settings, "poll_s": 0.2, "settle_s": 0.5}
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in given.items())
    (folder / "evalfleet.toml").write_text(f"[places.{place}]\n{text}")
    return Desk(folder, folder / "results", environ)


class JobService(Protocol):
    """A stand-in of a service that runs jobs."""

    @property
    def meters(self) -> Meters: ...
    def left(self) -> Sequence[str]: ...


P = TypeVar("P", bound=Place)


def play(make: Callable[[], P], act: Callable[[P], Awaitable[None]]) -> None:
    """Act with a place, and close it."""

    async def main() -> None:
        made = make()
        try:
            await act(made)
        finally:
            await made.close()

    asyncio.run(main())


async def seen(made: Place, *phases: str) -> Machine:
    """The one machine, once it is in one of these phases."""

    async def look() -> Machine | None:
        found = await made.list("run")
        return found[0] if found and found[0].phase in phases else None

    return await until_async(look, f"it is {phases}")


def nothing_left(service: JobService) -> None:
    until(lambda: not service.left(), lambda: f"nothing is left but {service.left()}")
    assert not service.meters.running(), "a node costs money still"


def killed_and_resumed(at: Desk, place: str) -> None:
    """A run whose controller is killed is done by another one, which takes its two machines over."""
    words = ("--workers", "2", "--canary", "0", "--name", "r", "--budget", "5")  # both are asked for at once
    run = at.start("run", "b.toml", "--on", place, *words)
    results = at.folder / "results/r"
    until(lambda: list(results.glob("t*/t*.0/result.json")) or None, lambda: f"a first score: {run.said}")
    run.kill()
    asked = [event.machine for event in at.events() if isinstance(event, MachineRequested)]
    assert len(asked) == 2
    done = at("resume", "r")
    assert done.code == 0, done
    told = json.loads((results / "results.json").read_text())
    assert (told["scored"], told["broken"], told["status"]) == (4, 0, "done")
    events = at.events()
    assert [event.machine for event in events if isinstance(event, MachineRequested)] == asked, events
    begun = [event.machine for event in events if isinstance(event, MachineAllocated)]
    assert sorted(begun) == sorted(set(begun)), "a machine began twice"
    ends = {event.detail for event in events if isinstance(event, MachineCondemned)}
    assert ends == {"nothing left to do"}, "the second controller did not take the machines over"


def evicted_once(at: Desk, place: str, preempt: Callable[[], None]) -> None:
    """Of a run of two tasks on one machine, the first attempt is cut off. No score is lost or made twice."""
    run = at.start("run", "b.toml", "--on", place, "--workers", "1", "--name", "r")
    until(lambda: any(isinstance(each, AttemptStarted) for each in at.events()), lambda: run.said)
    preempt()
    run.popen.wait()
    told = json.loads((at.folder / "results/r/results.json").read_text())
    assert (told["scored"], told["broken"], told["status"]) == (2, 0, "done"), run.said
    attempts = at.state("r").attempts.values()
    broken = [each.outcome.cause for each in attempts if isinstance(each.outcome, Broken)]
    assert broken == [Cause.EVICTED], "the attempt that was cut off, and no other"


class MailHarness(ShellHarness):
    """Its machines take seconds to start, and each word goes through the storage."""

    kind: Kind = "service"
    unit_s = 3.0
    silent_s = 30.0
    patience_s = PATIENCE_S
    boot_s = 10.0

    def __init__(self, service: JobService, make: Callable[[Path], Place]) -> None:
        super().__init__()
        allow_for_load(self)
        self._service, self._make = service, make

    def make_place(self) -> Place:
        return self._make(self.directory)

    def close(self) -> None:
        super().close()
        nothing_left(self._service)
