"""The storage of a service's mailboxes goes away for good in the middle of a run: the account is deleted, or
lets us in no more, or somebody deletes what is in it. The run goes on at the next place, or ends.

The engine is in this process, so that its limits can be seconds; pilots, mailboxes and services are as in
other tests.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from evalfleet.clock import WallClock
from evalfleet.engine import Engine, Tempo
from evalfleet.errors import PlaceError
from evalfleet.events import (
    AttemptEnded,
    CircuitChanged,
    Event,
    MachineCondemned,
    RunPlanned,
    StopRequested,
    TasksPlanned,
)
from evalfleet.journal import Holder, Store
from evalfleet.model import AttemptId, Bundle, Command, Limits, Machine, Plan, Scored, Task, TaskId
from evalfleet.places.azure_batch import preflight as batch_preflight
from evalfleet.places.local import LocalPlace, LocalSettings
from evalfleet.ports import Estate, Place, PlaceContext
from evalfleet.state import RunState
from standins import azure_batch, azure_ml
from standins.azure_ml import Processes
from tests.cloud import batch_places, ml_places
from tests.cloud.mail_desk import nothing_left, seen
from tests.cloud.running import Sleepy
from tests.waiting import PATIENCE_S, until, until_async, until_seen

CANNOT = Processes.missing()
runs = pytest.mark.skipif(CANNOT is not None, reason=f"NO TEST OF JOBS: {CANNOT}")
RUN, TASKS, LOST_S = "run", 6, 4.0
MACHINES = 2
Service = azure_ml.StandIn | azure_batch.StandIn


def deleted(service: Service) -> None:
    service.storage.is_deleted = True


def closed(service: Service) -> None:
    service.storage.is_closed = True


def emptied(service: Service) -> None:
    for container in service.storage.containers.values():
        container.blobs.clear()


def restored(service: Service) -> None:
    service.storage.is_deleted = service.storage.is_closed = False


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_preflight, "LOST_S", LOST_S)


def place(service: Service, folder: Path, **more: Any) -> Place:
    if isinstance(service, azure_ml.StandIn):
        return ml_places.place(service, folder, lost_s=LOST_S, **more)
    mail: dict[str, Any] = {"reach": "mailbox", "ssh_from": (), "isolation": "none", "lost_s": LOST_S}
    return batch_places.place(service, folder, **mail, **more)


# -- on paper: what a place shows and deletes --------------------------------------------------------------


@pytest.fixture(params=["azure_ml", "azure_batch"])
def on_paper(request: pytest.FixtureRequest) -> Iterator[Service]:
    if request.param == "azure_ml":
        with azure_ml.StandIn(ml_timing=ml_places.FAST) as ml:
            yield ml
    else:
        with azure_batch.StandIn(timing=batch_places.FAST) as batch:
            yield batch


async def listed(made: Place, is_so: Callable[[Sequence[Machine]], bool]) -> Sequence[Machine]:
    """What the place shows, once that is so; while it cannot see, it shows nothing."""

    async def look() -> tuple[Sequence[Machine]] | None:
        try:
            found = await made.list("run")
        except PlaceError:
            return None
        return (found,) if is_so(found) else None

    return (await until_async(look, "it is shown so"))[0]


@pytest.mark.parametrize(
    ("gone", "told"),
    [
        (deleted, "the storage of its mailbox is gone: storage account standinstorage: az://"),
        (closed, "the storage of its mailbox is gone: storage account standinstorage: Server failed to"),
    ],
)
def test_a_machine_is_ended_and_seen_to_be_gone_without_its_storage(
    on_paper: Service, tmp_path: Path, gone: Callable[[Service], None], told: str
) -> None:
    id = ml_places.machine_id()
    offer = ml_places.offer() if isinstance(on_paper, azure_ml.StandIn) else batch_places.offer()

    async def act() -> None:
        made = place(on_paper, tmp_path)
        try:
            await made.create(id, offer, 3600.0)
            await seen(made, "pending")
            on_paper.do(lambda: gone(on_paper))
            machine = await listed(made, lambda found: bool(found) and found[0].phase == "gone")
            assert machine[0].detail.startswith(told)
            await made.delete(id)
            await listed(made, lambda found: not found)
            until(lambda: not on_paper.meters.running(), "a node costs money still")
            on_paper.do(lambda: restored(on_paper))
            assert not await made.list("run")
            assert isinstance(made, Estate)
            assert not await made.belongings(), "what could not be removed is removed later"
        finally:
            await made.close()

    asyncio.run(act())
    nothing_left(on_paper)


# -- whole runs --------------------------------------------------------------------------------------------


class Short(Sleepy):
    """Tasks of two seconds, without anything to set up."""

    bundle = Bundle()

    def command(self, task: Task, attempt: AttemptId) -> Command:
        return Command(("sh", "-c", 'sleep 2; echo \'{"score": 1}\' > "$EVALFLEET_OUT/result.json"'))


class TwoPlaces:
    """A run on a service, and on this computer after it, if that is wanted."""

    def __init__(self, service: Service, folder: Path, *, has_next: bool) -> None:
        self._store, self._folder = Store.open(folder), folder
        self.places: dict[str, Place] = {"first": place(service, folder, name_of_place="first")}
        if has_next:
            context = PlaceContext(folder, self._store.home_id, {}, {}, folder)
            self.places["next"] = LocalPlace.make("next", LocalSettings(), context)
        limits = Limits(workers=MACHINES, fleet_lost_s=LOST_S, outage_tries=2)
        plan = Plan(RUN, "sleepy", tuple(self.places), limits=limits, home=ml_places.HOME[:6], ordered=True)
        tasks = tuple(Task(TaskId(f"t_{n}"), "t", {}, 60) for n in range(TASKS))
        begin: list[Event] = [RunPlanned(plan, len(tasks)), TasksPlanned(tasks)]
        self._store.create_stream(RUN, "run", WallClock().now(), begin)

    async def play(self, act: Callable[[], None]) -> RunState:
        """Act once something was scored; returns when the run is over."""
        now = WallClock().now()
        journal, tempo = self._store.acquire(RUN, Holder.here(now), now), Tempo(survey_s=1.0, poll_cap_s=1.0)
        engine = Engine(journal, self.places, Short(), WallClock(), self._folder / RUN, tempo=tempo)
        running = asyncio.create_task(engine.run())
        try:
            await until_seen(lambda: engine.state.scored > 0, "a first score", look_s=0.05)
            act()
            async with asyncio.timeout(PATIENCE_S):
                await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await journal.close()
            for each in self.places.values():
                await each.close()
        return engine.state

    def events(self) -> Sequence[Event]:
        return [record.event for record in self._store.read(RUN)]

    def scores(self) -> Counter[str]:
        """How many each task has."""
        return Counter(
            event.attempt.rpartition(".")[0]
            for event in self.events()
            if isinstance(event, AttemptEnded) and isinstance(event.outcome, Scored)
        )

    def given_up(self) -> list[str]:
        """Why the machines of the first place that worked were given up."""
        why = [event.detail for event in self.events() if isinstance(event, MachineCondemned) and event.cause]
        return why[:MACHINES]


def only_mail_left(service: Service) -> None:
    """Nothing is billed, or will be; mailboxes are in a storage that nobody gets into."""
    until(
        lambda: not [name for name in service.left() if not name.startswith("evalfleet-")],
        lambda: f"nothing is left but {service.left()}",
    )
    assert not service.meters.running(), "a node costs money still"


@runs
@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("gone", [deleted, closed])
def test_a_run_whose_storage_is_gone_goes_on_at_the_next_place(
    service: Service, tmp_path: Path, gone: Callable[[Service], None]
) -> None:
    run = TwoPlaces(service, tmp_path, has_next=True)
    state = asyncio.run(run.play(lambda: service.do(lambda: gone(service))))
    assert run.scores() == {f"t_{n}": 1 for n in range(TASKS)}
    assert all(why.startswith("the storage of its mailbox is gone: ") for why in run.given_up())
    opened = [event for event in run.events() if isinstance(event, CircuitChanged) and event.phase == "open"]
    assert [event.place for event in opened][:1] == ["first"]
    assert "storage account standinstorage" in opened[0].detail
    assert state.circuits["first"].permanent == (gone is closed), "one may answer again"
    only_mail_left(service)


@runs
@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("gone", [deleted, closed])
def test_a_run_whose_storage_is_gone_ends_if_there_is_no_other_place(
    service: Service, tmp_path: Path, gone: Callable[[Service], None]
) -> None:
    run = TwoPlaces(service, tmp_path, has_next=False)
    state = asyncio.run(run.play(lambda: service.do(lambda: gone(service))))
    assert state.ended_at is not None
    assert set(run.scores().values()) == {1}
    (stop,) = [event for event in run.events() if isinstance(event, StopRequested)]
    assert stop.reason == "refused"
    assert "storage account standinstorage" in stop.detail
    only_mail_left(service)


@runs
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_machines_whose_mailboxes_are_deleted_are_replaced(service: Service, tmp_path: Path) -> None:
    run = TwoPlaces(service, tmp_path, has_next=False)
    asyncio.run(run.play(lambda: service.do(lambda: emptied(service))))
    assert run.scores() == {f"t_{n}": 1 for n in range(TASKS)}
    assert run.given_up() == ["its mailbox, a container, was deleted"] * MACHINES
    nothing_left(service)
