"""Machines that run but cannot be reached, and those that are taken back: what is decided about them."""

from __future__ import annotations

from msgspec import structs

from evalfleet.events import (
    AttemptEnded,
    MachineAnswered,
    MachineCondemned,
    MachineMending,
    MachineReady,
    MachineSilent,
    MachineUnreachable,
    MachineUp,
)
from evalfleet.model import Broken, Cause, Cost, MachineId, Offer, after
from evalfleet.policy import Mend, effects

from .runs import PRICED, Run, condemned, of, requested, started
from .test_policy_pool import Pool

MENDABLE = structs.replace(
    PRICED, mends=("restart", "redeploy"), cost=structs.replace(PRICED.cost, usd_per_hour=0.1)
)
ONE, TWO = MachineId("r-h-1"), MachineId("r-h-2")


def at_work(workers: int = 2) -> Run:
    run = Run(6, (MENDABLE,), workers=workers)
    run.turn()
    run.ready()
    return run


def falls_silent(run: Run, machine: MachineId = ONE, witness: MachineId | None = TWO) -> None:
    """As it is noticed: nothing was heard for `silent_s`; then another machine answers, if there is one."""
    run.tell(MachineSilent(machine, after(run.now, -8.0)))
    run.now = after(run.now, 1.0)
    if witness is not None:
        run.tell(MachineAnswered(witness))


def test_a_silent_machine_is_restarted_and_its_task_goes_elsewhere_at_once() -> None:
    run = at_work()
    falls_silent(run)
    decided = run.wait(3.0)
    (mending,) = of(MachineMending, decided)
    assert (mending.machine, mending.step) == (ONE, "restart")
    (ended,) = of(AttemptEnded, decided)
    assert isinstance(ended.outcome, Broken)
    assert ended.outcome.cause is Cause.CONNECTION
    assert effects(run.state)[ONE] == (Mend(ONE, "restart"),)
    assert started(run.score("t1.0"))[0] == ("t0.1", TWO), "it waited for the machine under repair"


def test_a_machine_under_repair_is_not_replaced_as_long_as_another_works() -> None:
    run = at_work()
    falls_silent(run)
    assert not requested(run.wait(3.0))
    run.tell(MachineReady(ONE, {"restart": 60.0}))
    assert ONE in run.open().values(), "it takes work again"
    assert run.machine(ONE).cause is None
    assert len(run.state.machines) == 2


def test_if_nothing_else_works_it_is_replaced_and_goes_when_it_is_one_too_many() -> None:
    run = at_work()
    falls_silent(run)
    run.wait(3.0)
    (new,) = requested(run.lose(TWO))
    run.gone(TWO)
    run.ready(new.machine)
    assert not run.state.coming, "one is kept for the machine under repair"
    run.tell(MachineReady(ONE, {"restart": 60.0}))
    assert not condemned(run.turn()), "there are two of two"


def test_each_step_is_tried_once_then_it_is_replaced() -> None:
    run = at_work()
    falls_silent(run)
    run.wait(3.0)
    (then,) = of(MachineMending, run.tell(MachineUnreachable(ONE, "still nothing", "ssh")))
    assert then.step == "redeploy"
    decided = run.tell(MachineUnreachable(ONE, "nothing at all", "ssh"))
    (gone,) = of(MachineCondemned, decided)
    assert (gone.cause, gone.step) == (Cause.CONNECTION, "ssh")
    assert gone.detail == "nothing at all; tried: restart, redeploy"
    assert len(requested(decided)) == 1, "another takes its place"


def test_a_mended_machine_that_falls_silent_again_is_redeployed() -> None:
    run = at_work()
    falls_silent(run)
    run.wait(3.0)
    run.tell(MachineReady(ONE, {"restart": 60.0}))
    run.now = after(run.now, 30.0)
    falls_silent(run)
    (mending,) = of(MachineMending, run.wait(3.0))
    assert mending.step == "redeploy"


def test_a_whole_fleet_that_is_silent_is_not_restarted() -> None:
    run = at_work()
    falls_silent(run, ONE, witness=None)
    falls_silent(run, TWO, witness=None)
    assert not of(MachineMending, run.wait(100.0))
    decided = run.wait(600.0)
    assert not of(MachineMending, decided)
    assert condemned(decided)[0] == ONE, "as before there was anything to mend with"


def test_a_machine_that_never_answered_is_mended_only_if_others_did() -> None:
    run = Run(6, (MENDABLE,), workers=1)
    run.turn()
    (lost,) = of(MachineCondemned, run.tell(MachineUnreachable(ONE, "no answer", "ssh")))
    assert (lost.cause, lost.step) == (Cause.BOOT, "ssh")
    run = at_work(3)
    run.lose(ONE)
    (new,) = run.state.coming
    run.tell(MachineUp(new))
    (mending,) = of(MachineMending, run.tell(MachineUnreachable(new, "no answer", "ssh")))
    assert mending.step == "restart"


def test_three_machines_that_never_answer_stop_the_run() -> None:
    run = Run(6, (MENDABLE,), workers=1)
    run.turn()
    for _ in range(3):
        (machine,) = run.state.coming
        run.tell(MachineUnreachable(machine, "no answer; its console ends with ...", "ssh"))
    assert run.stop.reason == "refused"
    assert "boot ssh" in run.stop.detail
    assert "its console ends with" in run.stop.detail


def test_a_place_that_cannot_mend_gives_up_as_before() -> None:
    run = Run(6, (structs.replace(MENDABLE, mends=()),), workers=2)
    run.turn()
    run.ready()
    falls_silent(run)
    decided = run.wait(3.0)
    assert condemned(decided) == [ONE]
    assert not of(MachineMending, decided)


def test_repairs_end_with_the_work() -> None:
    run = Run(2, (MENDABLE,), workers=2)
    run.turn()
    run.ready()
    falls_silent(run)
    run.wait(3.0)
    run.score("t1.0")
    assert run.machine(ONE).phase == "condemned", "the retry runs elsewhere, and nothing else waits"


def test_the_lane_of_a_static_schedule_is_served_by_another() -> None:
    run = Run(6, (MENDABLE,), workers=2, schedule="slices")
    run.turn()
    run.ready()
    falls_silent(run)
    decided = run.wait(3.0)
    (new,) = requested(decided)
    assert started(run.ready(new.machine)) == [("t0.1", new.machine)]
    assert started(run.score("t0.1")) == [("t1.0", new.machine)]
    decided = run.tell(MachineReady(ONE, {"restart": 60.0}))
    assert condemned(decided) == [ONE], "there is nothing for a third of two workers"


def test_a_pools_machine_is_mended_also_if_it_is_the_only_one() -> None:
    pool = Pool(1, MENDABLE)
    (machine,) = pool.state.coming
    for step in ("restart", "redeploy"):
        (mending,) = of(MachineMending, pool.tell(MachineUnreachable(machine, "no answer", "ssh")))
        assert mending.step == step
        assert pool.phases() == {"waa-eval-vm": "mending"}
        assert pool.view.standing(pool.machines()[0], pool.now) == "mending"
    decided = pool.tell(MachineUnreachable(machine, "no answer", "ssh"))
    assert condemned(decided) == [machine]
    assert len(requested(decided)) == 1


# -- taken back ------------------------------------------------------------------------------------

SPOT, OTHER_SPOT, REGULAR = (
    Offer("cloud", "D4", region, spot=spot, cost=Cost(usd_per_hour=usd))
    for region, usd, spot in (("east", 0.1, True), ("west", 0.11, True), ("east", 0.4, False))
)
OFFERS = (SPOT, OTHER_SPOT, REGULAR)


def replaced(run: Run) -> Offer:
    """A machine is taken back; what comes instead."""
    machine = next(iter(run.state.ready))
    (new,) = requested(run.lose(machine, Cause.EVICTED))
    run.gone(machine)
    run.ready(new.machine)
    return new.offer


def test_spot_machines_that_are_taken_back_again_and_again_give_way_to_regular_ones() -> None:
    run = Run(20, OFFERS, workers=2)
    assert [each.offer for each in requested(run.turn())] == [SPOT, SPOT]
    run.ready()
    assert [replaced(run) for _ in range(4)] == [SPOT, OTHER_SPOT, REGULAR, REGULAR]


def test_many_workers_bear_more_evictions() -> None:
    run = Run(100, OFFERS, workers=20)
    run.turn()
    run.ready()
    assert [replaced(run) for _ in range(5)] == [SPOT, *[OTHER_SPOT] * 3, REGULAR]


def test_where_there_is_nothing_else_spot_machines_are_used_on() -> None:
    run = Run(20, (SPOT,), workers=2)
    run.turn()
    run.ready()
    assert [replaced(run) for _ in range(4)] == [SPOT] * 4


def test_regular_machines_only_within_the_budget() -> None:
    dear = structs.replace(
        REGULAR,
        cost=structs.replace(REGULAR.cost, usd_per_hour=1e6),
        life=structs.replace(REGULAR.life, teardown_s=10.0),
    )
    run = Run(20, (SPOT, dear), workers=1, budget_usd=5.0)
    run.turn()
    run.ready()
    assert [replaced(run) for _ in range(4)] == [SPOT] * 4
