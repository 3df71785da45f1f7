"""What is decided about a pool: its machines come, stop, start and go because somebody said so."""

from __future__ import annotations

import pytest
from msgspec import structs

from evalfleet.errors import RequestError
from evalfleet.events import (
    Event,
    MachineCondemned,
    MachineDeleted,
    MachinePrepared,
    MachineReady,
    MachineRequested,
    MachineStopped,
    MachineUp,
    PoolPlanned,
    RunEnded,
)
from evalfleet.journal.holds import Hold
from evalfleet.model import SECOND, Cause, Limits, MachineId, Micros, Offer, Plan, after, seconds_between
from evalfleet.named_pools import Change, PoolView, changes
from evalfleet.policy import POOL, BringUp, Stop, TearDown, effects
from evalfleet.policy.pace import MINUTE_S
from evalfleet.policy.pool import given_up
from evalfleet.state import MachineState, RunState, accepts, apply
from evalfleet.views.stats import machines_usd

from .runs import FREE, PRICED, of
from .test_state import Watch

LIFE_S = 1000.0


class Pool:
    """A pool's engine without an engine."""

    def __init__(self, workers: int = 2, offer: Offer = FREE, prefix: str = "waa-eval") -> None:
        self.now: Micros = 1000 * SECOND
        self.offers = (offer,)
        self.state = RunState()
        self.holds: dict[MachineId, Hold] = {}
        self.watch = Watch()
        self.plan = Plan(
            "p", "", limits=Limits(workers=workers, lease_s=LIFE_S), home="h", machine_names=prefix
        )
        self.tell(PoolPlanned(self.plan))

    def tell(self, *events: Event) -> list[Event]:
        for event in events:
            apply(self.state, self.now, event)
            self.watch.check(self.state)
        decided: list[Event] = []
        while step := POOL.decide(self.state, self.now, self.offers):
            for event in step:
                apply(self.state, self.now, event)
                self.watch.check(self.state)
            decided += step
        return decided

    def ready(self) -> None:
        coming = list(self.state.coming)
        self.tell(*(MachineUp(m) for m in coming), *(MachineReady(m) for m in coming))

    def stopped(self) -> None:
        stopping = [m.id for m in self.machines() if m.phase == "stopping"]
        self.tell(*(MachineStopped(m) for m in stopping))

    def gone(self) -> None:
        leaving = [m.id for m in self.machines() if m.phase == "condemned"]
        self.tell(*(MachineDeleted(m, self.now) for m in leaving))

    def wait(self, seconds: float) -> None:
        self.now = after(self.now, seconds)

    def change(self, change: Change) -> list[Event]:
        return self.tell(*change.events)

    def held(self, machine: str, by: str = "r") -> None:
        id = MachineId(machine)
        self.holds[id] = Hold(id, "p", 1, by, MachineId("r-h-1"), 1, after(self.now, 3600.0))

    @property
    def view(self) -> PoolView:
        return PoolView("p", self.state, self.holds)

    def machines(self) -> list[MachineState]:
        return self.view.machines

    def phases(self) -> dict[str, str]:
        return {machine.name: machine.phase for machine in self.machines()}

    @property
    def usd(self) -> float:
        return machines_usd(self.state, self.now)


def a_ready_pool(workers: int = 2, offer: Offer = FREE) -> Pool:
    pool = Pool(workers, offer)
    pool.ready()
    return pool


def test_it_is_told_when_what_was_set_up_on_machines_ends() -> None:
    pool = a_ready_pool()
    assert pool.view.warning(pool.now) == ""
    ends = after(pool.now, 90 * 86_400)
    pool.tell(MachinePrepared(pool.machines()[0].id, "windows", {}, ends))
    assert pool.view.perishing(pool.now) == ""
    assert pool.view.perishing(after(ends, -9 * 86_400)) == (
        "what was set up on 1 of 2 machines of pool 'p' ends in 9 days, with its licence; "
        "`evalfleet pool do p clean` and `pool prepare` make it anew"
    )
    assert "ended 3 days ago" in pool.view.warning(after(ends, 3 * 86_400))
    pool.tell(MachinePrepared(pool.machines()[0].id, ""))
    assert pool.view.perishing(ends) == "", "it was undone"


def test_machines_get_the_name_that_a_benchmark_has_for_them_and_keep_their_ids() -> None:
    pool = Pool(prefix="worker")
    pool.ready()
    for machine in pool.machines():
        pool.tell(MachinePrepared(machine.id, "waa", prefix="waa-eval"))
    assert {m.name: m.id for m in pool.machines()} == {"waa-eval-1": "p-h-1", "waa-eval-2": "p-h-2"}
    pool.change(changes.resized(pool.view, pool.now, 3))
    assert [m.name for m in pool.machines()] == ["waa-eval-1", "waa-eval-2", "waa-eval-3"]


# -- having machines -----------------------------------------------------------------------------


def test_all_machines_are_asked_for_at_once_and_then_nothing_happens() -> None:
    pool = Pool(3)
    assert [m.id for m in pool.machines()] == ["p-h-1", "p-h-2", "p-h-3"]
    assert {m.expires_at for m in pool.machines()} == {after(pool.now, LIFE_S)}
    assert not POOL.settled(pool.state)
    pool.ready()
    assert POOL.settled(pool.state)
    assert not effects(pool.state), "a pool leaves its machines alone"
    assert POOL.next_deadline(pool.state, pool.now) is None
    pool.wait(10 * LIFE_S)
    assert not pool.tell()


@pytest.mark.parametrize(
    ("workers", "prefix", "names"),
    [
        (1, "waa-eval", ["waa-eval-vm"]),
        (3, "waa-eval", ["waa-eval-1", "waa-eval-2", "waa-eval-3"]),
        (1, "mine", ["mine-vm"]),
        (2, "mine", ["mine-1", "mine-2"]),
    ],
)
def test_names(workers: int, prefix: str, names: list[str]) -> None:
    assert list(Pool(workers, prefix=prefix).phases()) == names


def test_names_that_came_free_come_again_and_ids_never() -> None:
    pool = a_ready_pool(3)
    pool.change(changes.resized(pool.view, pool.now, 1))
    pool.gone()
    pool.change(changes.resized(pool.view, pool.now, 2))
    assert {m.name: m.id for m in pool.machines()} == {"waa-eval-1": "p-h-1", "waa-eval-2": "p-h-4"}


def test_a_pool_of_one_that_grows_keeps_the_name_of_its_first() -> None:
    pool = a_ready_pool(1)
    pool.change(changes.resized(pool.view, pool.now, 3))
    assert list(pool.phases()) == ["waa-eval-vm", "waa-eval-2", "waa-eval-3"]


def refuse(pool: Pool, machine: str) -> list[Event]:
    detail = MachineCondemned(MachineId(machine), "full", Cause.PROVISIONING, scope="place")
    return pool.tell(detail)


def test_a_place_that_refuses_one_leaves_a_smaller_pool_which_start_completes() -> None:
    pool = Pool(2)
    assert not of(MachineRequested, refuse(pool, "p-h-2"))
    pool.gone()
    pool.ready()
    assert POOL.settled(pool.state), "it goes on with what it has"
    assert of(MachineRequested, pool.change(changes.started(pool.view, pool.now)))


def test_machines_that_cannot_be_set_up_are_not_bought_without_end() -> None:
    pool, asked = Pool(1), 1
    for _ in range(20):
        for machine in list(pool.state.coming):
            asked += len(of(MachineRequested, pool.tell(MachineCondemned(machine, "", Cause.BOOT))))
        pool.gone()
    assert asked == Limits().same_failure_machines
    assert POOL.settled(pool.state)


# -- a place that bounds how many machines may be asked for in a minute --------------------------

SLOW = structs.replace(PRICED, creates_a_minute=3)


def asked(pool: Pool) -> list[float]:
    """When its machines were, or will be, asked for, in seconds since the first one."""
    times = [machine.requested_at for machine in pool.machines()]
    return [seconds_between(times[0], each) for each in times]


def test_machines_are_asked_for_as_their_place_allows_and_it_is_not_over_before() -> None:
    pool = Pool(7, SLOW)
    assert len(pool.machines()) == 3
    pool.ready()
    assert not POOL.settled(pool.state), "four are still to come, also for a controller that comes anew"
    due = POOL.next_deadline(pool.state, pool.now)
    assert due == after(pool.now, MINUTE_S)
    pool.wait(MINUTE_S - 1)
    assert not pool.tell()
    pool.wait(1)
    assert len(of(MachineRequested, pool.tell())) == 3
    pool.wait(MINUTE_S)
    pool.tell()
    pool.ready()
    assert asked(pool) == [0, 0, 0, MINUTE_S, MINUTE_S, MINUTE_S, 2 * MINUTE_S]
    assert POOL.settled(pool.state)
    assert POOL.next_deadline(pool.state, pool.now) is None


def test_what_is_refused_is_not_waited_for() -> None:
    pool = Pool(5, SLOW)
    refuse(pool, "p-h-3")
    pool.gone()
    pool.ready()
    assert POOL.settled(pool.state), "it goes on with what it has"
    assert POOL.next_deadline(pool.state, pool.now) is None


def test_machines_are_started_as_their_place_allows_and_cost_nothing_before() -> None:
    pool = a_ready_pool(3, SLOW)
    for _ in range(2):
        pool.change(changes.resized(pool.view, pool.now, len(pool.machines()) + 2))
        pool.wait(MINUTE_S)
        pool.tell()
    pool.ready()
    pool.change(changes.stopped(pool.view, pool.now))
    pool.stopped()
    pool.wait(2 * MINUTE_S)
    paid = pool.usd
    pool.change(changes.started(pool.view, pool.now))
    assert asked(pool) == [0, 0, 0, MINUTE_S, MINUTE_S, MINUTE_S, 2 * MINUTE_S]
    assert effects(pool.state) == {m.id: (BringUp(m.id),) for m in pool.machines()}
    pool.wait(10)
    assert pool.usd - paid == pytest.approx(3 * 10.0), "three run, at a dollar a second"
    pool.change(changes.resized(pool.view, pool.now, 8))
    assert len(pool.machines()) == 7, "those that are to start come before one that is made"
    pool.wait(2 * MINUTE_S)
    assert of(MachineRequested, pool.tell())


# -- stop, start, delete, resize -----------------------------------------------------------------


def test_stop_and_start() -> None:
    pool = a_ready_pool()
    change = changes.stopped(pool.view, pool.now)
    assert change.holds == ["p-h-1", "p-h-2"], "it must have them to itself"
    pool.change(change)
    assert effects(pool.state) == {m.id: (Stop(m.id),) for m in pool.machines()}
    assert not POOL.settled(pool.state)
    pool.stopped()
    assert POOL.settled(pool.state)
    assert not effects(pool.state)
    change = changes.started(pool.view, pool.now)
    assert change.holds == ["p-h-1", "p-h-2"]
    assert not of(MachineRequested, pool.change(change)), "those that were stopped are there"
    assert effects(pool.state) == {m.id: (BringUp(m.id),) for m in pool.machines()}
    pool.ready()
    assert set(pool.phases().values()) == {"ready"}


def test_a_machine_that_does_not_start_again_is_stopped_and_replaced_only_when_asked() -> None:
    pool = a_ready_pool()
    pool.change(changes.stopped(pool.view, pool.now))
    pool.stopped()
    pool.change(changes.started(pool.view, pool.now))
    first, second = pool.machines()
    told = pool.tell(
        given_up(first, MachineCondemned(first.id, "no room", Cause.PROVISIONING)),
        MachineUp(second.id),
        MachineReady(second.id),
    )
    pool.stopped()
    assert pool.phases() == {first.name: "stopped", second.name: "ready"}
    assert (pool.view.failed, of(MachineRequested, told)) == ([first], [])
    assert POOL.settled(pool.state)
    pool.change(changes.replaced(pool.view, pool.now))
    assert effects(pool.state)[first.id] == (TearDown(first.id),)
    assert [machine.phase for machine in pool.machines()] == ["condemned", "ready", "requested"]
    (*_, new) = pool.machines()
    why = MachineCondemned(new.id, "no room", Cause.PROVISIONING)
    assert given_up(new, why) is why, "nothing is on its disk yet"


def test_a_stopped_machine_costs_nothing() -> None:
    pool = a_ready_pool(1, PRICED)  # a dollar a second
    pool.wait(10)
    pool.change(changes.stopped(pool.view, pool.now))
    pool.wait(2)
    pool.stopped()
    assert pool.usd == pytest.approx(12.0)
    assert pool.state.spend.machines.reserved == pytest.approx(0.0)
    pool.wait(500)
    assert pool.usd == pytest.approx(12.0)
    pool.change(changes.started(pool.view, pool.now))
    pool.wait(5)
    assert pool.usd == pytest.approx(17.0)
    pool.ready()
    pool.change(changes.deleted(pool.view, pool.now))
    pool.wait(3)
    pool.gone()
    assert pool.usd == pytest.approx(20.0)
    assert pool.state.spend.machines.reserved == 0.0


def test_a_stopped_machine_that_is_deleted_has_cost_nothing_more() -> None:
    pool = a_ready_pool(2, PRICED)
    pool.wait(10)
    pool.change(changes.stopped(pool.view, pool.now))
    pool.stopped()
    pool.wait(100)
    pool.change(changes.deleted(pool.view, pool.now))
    assert effects(pool.state) == {m.id: (TearDown(m.id),) for m in pool.machines()}
    pool.wait(100)
    assert pool.usd == pytest.approx(20.0)
    pool.gone()
    assert pool.usd == pytest.approx(20.0)
    assert pool.state.ended_at is not None


def test_expired_machines_are_started_again_for_another_life() -> None:
    pool = a_ready_pool(1, PRICED)
    pool.wait(LIFE_S + 500)
    (machine,) = pool.machines()
    assert pool.view.standing(machine, pool.now) == "expired"
    assert "pool start p" in pool.view.unusable(pool.now)
    assert pool.usd == pytest.approx(LIFE_S), "its place ended it"
    pool.change(changes.started(pool.view, pool.now))
    pool.ready()
    assert pool.view.standing(machine, pool.now) == "ready"
    assert machine.expires_at == after(pool.now, LIFE_S)
    pool.wait(7)
    assert pool.usd == pytest.approx(LIFE_S + 7)


def test_delete_ends_the_pool_when_all_are_gone_and_may_be_repeated() -> None:
    pool = a_ready_pool(2)
    pool.change(changes.deleted(pool.view, pool.now))
    assert set(pool.phases().values()) == {"condemned"}
    assert not POOL.settled(pool.state)
    again = changes.deleted(pool.view, pool.now)
    assert again.holds == ["p-h-1", "p-h-2"]
    pool.change(again)
    pool.tell(MachineDeleted(MachineId("p-h-1"), pool.now))
    assert pool.state.ended_at is None
    assert of(RunEnded, pool.tell(MachineDeleted(MachineId("p-h-2"), pool.now)))
    assert POOL.settled(pool.state)


def test_a_pool_whose_deletion_has_begun_takes_no_other_change() -> None:
    pool = a_ready_pool()
    pool.change(changes.deleted(pool.view, pool.now))
    for change in (changes.started, changes.stopped):
        with pytest.raises(RequestError, match="is being deleted; `evalfleet pool delete p`"):
            change(pool.view, pool.now)
    with pytest.raises(RequestError, match="is being deleted"):
        changes.resized(pool.view, pool.now, 5)
    assert "is being deleted" in pool.view.unusable(pool.now)


def test_a_deleted_pool_is_made_anew_without_using_an_id_twice() -> None:
    pool = a_ready_pool(2)
    with pytest.raises(RequestError, match="taken by a pool"):
        changes.made_anew(pool.view, pool.now, pool.plan)
    pool.change(changes.deleted(pool.view, pool.now))
    pool.gone()
    pool.change(changes.made_anew(pool.view, pool.now, pool.plan))
    assert {m.name: m.id for m in pool.machines()} == {"waa-eval-1": "p-h-3", "waa-eval-2": "p-h-4"}
    assert pool.view.state.ended_at is None


def test_resize_lets_the_newest_go_that_nobody_has() -> None:
    pool = a_ready_pool(3)
    pool.held("p-h-3")
    change = changes.resized(pool.view, pool.now, 2)
    assert change.holds == ["p-h-2"]
    pool.change(change)
    pool.gone()
    assert list(pool.phases()) == ["waa-eval-1", "waa-eval-3"]
    pool.held("p-h-1", "q")
    with pytest.raises(RequestError, match="cannot have 1: 2 are held by q, r"):
        changes.resized(pool.view, pool.now, 1)
    more = pool.change(changes.resized(pool.view, pool.now, 4))
    assert [event.name for event in of(MachineRequested, more)] == ["waa-eval-2", "waa-eval-4"]


# -- how it stands -------------------------------------------------------------------------------


def test_how_machines_stand() -> None:
    pool = Pool(2)
    assert [pool.view.standing(m, pool.now) for m in pool.machines()] == ["creating"] * 2
    assert pool.view.unusable(pool.now) == "", "a run may wait for them"
    pool.ready()
    pool.held("p-h-1")
    assert [pool.view.standing(m, pool.now) for m in pool.machines()] == ["held", "ready"]
    pool.held("p-h-2")
    assert "held by r: wait until it ends" in pool.view.unusable(pool.now)
    pool.held("p-h-2", by="p")
    assert pool.view.holder(MachineId("p-h-2"), pool.now) is None, "the pool itself is no run"
    pool.wait(7200)
    assert pool.view.holder(MachineId("p-h-1"), pool.now) is None, "holds end"


def test_a_machine_is_found_by_name_or_id_and_a_hint_is_given() -> None:
    pool = a_ready_pool(2)
    assert pool.view.machine("waa-eval-2") is pool.view.machine("p-h-2")
    with pytest.raises(RequestError, match="no machine 'waa-eval-3'; did you mean"):
        pool.view.machine("waa-eval-3")


def test_what_is_news_of_a_machine_depends_on_its_phase() -> None:
    pool = a_ready_pool(1)
    stopped = MachineStopped(MachineId("p-h-1"))
    assert not accepts(pool.state, stopped)
    pool.change(changes.stopped(pool.view, pool.now))
    assert accepts(pool.state, stopped)
    assert accepts(pool.state, MachineCondemned(MachineId("p-h-1"), "it is gone"))
