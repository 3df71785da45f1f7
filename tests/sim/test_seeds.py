"""A handful of seeds in-process; `make test` runs 300 through the command line."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from evalfleet.events import AttemptGraded
from evalfleet.model import CAUSES, Cause, MachineId, Offer, Task, TaskId
from evalfleet.policy.decide import FOR_TROUBLE, is_calm
from evalfleet.state import RunState, apply
from sim.checks import run_seeds, violations
from sim.scenario import OFFERS, ClockStep, Period, Scenario, draw, draw_tiers
from sim.simulate import Parts, Simulated, simulate
from sim.world import Faults, SimMachine, World
from tests.sim.hangs import hangs


def test_no_seed_violates_an_invariant_and_the_seeds_exercise_what_they_claim_to() -> None:
    """A simulator that no longer crashes, resumes, naps or refuses would pass everything."""
    report = run_seeds(range(40))
    assert report.failures == {}
    scenarios = [draw(seed) for seed in range(40)]
    assert report.crashes > 20
    assert report.refusals > 0
    assert report.attempts > 200
    assert any(scenario.nap for scenario in scenarios)
    assert any(scenario.outage for scenario in scenarios)
    assert {what for scenario in scenarios for what in scenario.resumes} == {"broken", "unrun"}
    assert any(scenario.abandoned for scenario in scenarios)
    assert any(scenario.answers and scenario.faults.grader_fails for scenario in scenarios)
    assert any(scenario.steps and scenario.strobe and scenario.faults.reboots for scenario in scenarios)
    assert any(scenario.faults.lies for scenario in scenarios)
    assert any(scenario.faults.clocks_set_every_s and scenario.faults.clocks_strobe for scenario in scenarios)
    assert any(
        scenario.faults.host_reboots_every_s and "hosts" in scenario.plan.places for scenario in scenarios
    )
    assert any(scenario.api_loss and "service" in scenario.plan.places for scenario in scenarios)


@pytest.mark.parametrize("scenario", [draw(3), draw(9), draw_tiers(1)])
def test_rules_that_are_not_asked_while_all_is_calm_would_have_found_nothing(scenario: Scenario) -> None:
    sim = simulate(scenario)
    offers = [offer for each in (scenario.offers or OFFERS).values() for offer in each]
    state, asked = RunState(), Counter[bool]()
    for record in sim.store.read():
        apply(state, record.at, record.event)
        asked[is_calm(state)] += 1
        if is_calm(state):
            assert [rule for rule in FOR_TROUBLE if rule(state, record.at, offers)] == []
    assert asked[True] > 10


def calm(seed: int) -> Scenario:
    """The seed's run without faults and without bounds: it can only end with every task scored."""
    drawn = draw(seed)
    limits = structs.replace(drawn.plan.limits, budget_usd=None, max_duration_s=None)
    plan = structs.replace(drawn.plan, limits=limits)
    return Scenario(seed, plan, drawn.tasks, Faults())


def checked(scenario: Scenario) -> Simulated:
    sim = simulate(scenario)
    assert violations(sim) == []
    return sim


@pytest.mark.parametrize("seed", range(5))
def test_in_a_perfect_world_every_task_is_scored_at_its_first_attempt(seed: int) -> None:
    sim = checked(calm(seed))
    assert sim.state.status == "done"
    assert len(sim.state.attempts) == sim.state.scored == len(sim.scenario.tasks)


@pytest.mark.parametrize("seed", range(4))
def test_answers_are_graded_once_whatever_crashes_meanwhile(seed: int) -> None:
    crashes = Faults(controller_crashes=5, crash_every_s=300.0)
    sim = checked(replace(calm(seed), answers=True, faults=crashes))
    graded = [record.event for record in sim.store.read() if isinstance(record.event, AttemptGraded)]
    assert sim.crashes
    assert sim.state.status == "done"
    assert len(graded) == len(sim.scenario.tasks) == sim.state.scored + sim.state.broken
    assert all(len(known.attempts) == 1 for known in sim.state.tasks.values()), "no answer is asked for twice"


def test_answers_stay_when_the_grader_fails_and_are_graded_when_the_run_is_resumed() -> None:
    failing = replace(calm(1), answers=True, faults=Faults(grader_fails=0.2))
    left = checked(failing)
    assert left.state.answered
    assert left.state.status == "stopped"
    resumed = checked(replace(failing, resumes=("unrun", "unrun", "unrun")))
    assert resumed.state.answered < left.state.answered
    assert all(len(known.attempts) == 1 for known in resumed.state.tasks.values())


@pytest.mark.parametrize("seed", range(8))
def test_an_outage_of_our_own_network_costs_no_machine_and_no_attempt(seed: int) -> None:
    sim = checked(replace(calm(seed), outage=Period(60.0 + 90 * seed, 60.0 + 40 * seed)))
    assert sim.state.scored == len(sim.scenario.tasks) == len(sim.state.attempts)
    assert not any(machine.cause for machine in sim.state.machines.values() if machine.ready_at)


@pytest.mark.parametrize("seed", range(8))
def test_an_outage_while_machines_come_up_does_not_refuse_the_run(seed: int) -> None:
    """Three machines that cannot be set up stop a run; three that cannot be reached for a while do not."""
    scenario = calm(seed)
    vms = structs.replace(
        scenario.plan, places=("vms",), limits=structs.replace(scenario.plan.limits, canary=0)
    )
    sim = checked(replace(scenario, plan=vms, outage=Period(25.0 + 5 * seed, 300.0)))
    assert sim.state.scored == len(sim.scenario.tasks)
    assert not any(machine.cause is Cause.CONNECTION for machine in sim.state.machines.values())


def at_the_service(seed: int, faults: Faults, **limits: float) -> Scenario:
    scenario = calm(seed)
    plan = structs.replace(
        scenario.plan, places=("service",), limits=structs.replace(scenario.plan.limits, **limits)
    )
    return replace(scenario, plan=plan, faults=faults)


def test_a_service_that_queues_longer_than_a_task_may_take_scores_every_task() -> None:
    tasks = tuple(Task(TaskId(f"t{n}"), params={"index": n}, timeout_s=300.0) for n in range(8))
    scenario = at_the_service(0, Faults(queue_s=(900.0, 900.0)), workers=8)
    sim = checked(replace(scenario, tasks=tasks, durations=(200.0,) * 8))
    assert sim.state.scored == len(sim.state.attempts) == 8
    assert sim.state.spend.machines.spent < 8 * 0.5 * 400 / 3600, "nobody pays for the queue"


@pytest.mark.parametrize("seed", range(8))
def test_a_service_that_does_not_answer_for_a_while_costs_no_machine_and_no_attempt(seed: int) -> None:
    """Whether machines are silent or cannot be asked for: only the service is."""
    scenario = at_the_service(seed, Faults(queue_s=(0.0, 60.0)), canary=0)
    plan = structs.replace(scenario.plan, places=("vms", "service"), schedule="dynamic")
    offers = {**OFFERS, "vms": (structs.replace(OFFERS["vms"][0], spot=False, capacity=1),)}
    loss = Period(300.0 + 50 * seed, 60.0 + 40 * seed)
    sim = checked(replace(scenario, plan=plan, offers=offers, api_loss=loss))
    assert sim.state.scored == len(sim.scenario.tasks) == len(sim.state.attempts)
    assert not any(machine.cause for machine in sim.state.machines.values() if machine.ready_at)


def test_what_a_service_starts_anew_is_tried_again_and_uses_up_no_attempt() -> None:
    sims = [checked(at_the_service(seed, Faults(service_restarts_every_s=1500.0))) for seed in range(6)]
    assert all(sim.state.scored == len(sim.scenario.tasks) for sim in sims)
    causes = {cause for sim in sims for cause in sim.state.causes}
    assert Cause.EVICTED in causes
    assert all(CAUSES[Cause(cause)].free for cause in causes)


@pytest.mark.parametrize("seed", range(8))
def test_a_controller_whose_computer_slept_keeps_what_ended_meanwhile(seed: int) -> None:
    """Shorter than the lease: machines live on, and what they finished counts."""
    sim = checked(replace(calm(seed), nap=Period(100.0 + 50 * seed, 2500.0)))
    assert sim.state.scored == len(sim.scenario.tasks)
    assert not any(machine.cause is Cause.STUCK for machine in sim.state.machines.values())


@pytest.mark.parametrize("seed", range(6))
def test_a_controller_that_slept_past_every_expiry_starts_over(seed: int) -> None:
    sim = checked(replace(calm(seed), nap=Period(300.0, 100_000.0)))
    assert sim.state.scored == len(sim.scenario.tasks)


@pytest.mark.parametrize("seed", range(7))  # of 7, the first controller dies before it has written a word
def test_a_wall_clock_that_is_set_changes_nothing(seed: int) -> None:
    """Hours either way, while a controller runs and between two of them: the same journal, byte for byte."""
    crashes = Faults(controller_crashes=3, crash_every_s=300.0)
    plain = replace(calm(seed), faults=crashes)
    steps = tuple(ClockStep(200.0 + 400 * n, hours * 3600.0) for n, hours in enumerate((-2, 5, -100, 0, 9)))
    expected = checked(plain)
    assert expected.crashes
    for strobe in (None, (0.7, 7200.0)):
        sim = checked(replace(plain, steps=steps, strobe=strobe))
        assert sim.store.digest() == expected.store.digest()


@pytest.mark.parametrize("seed", range(8))
def test_a_wall_clock_of_a_machine_that_is_set_changes_nothing(seed: int) -> None:
    """Every minute, by days either way, and to and fro between: the same journal, byte for byte."""
    faults = replace(draw(seed).faults, clocks_set_every_s=0.0, clocks_strobe=0.0, host_reboots_every_s=0.0)
    plain = replace(draw(seed), faults=faults)
    jumping = replace(faults, clocks_set_every_s=60.0, clocks_set_by_s=100 * 3600.0, clocks_strobe=0.5)
    assert checked(replace(plain, faults=jumping)).store.digest() == checked(plain).store.digest()


class BelievesItsWallClock(World):
    """A world of hosts that ask their wall clock when they have booted anew, and nothing else."""

    def life_left_s(self, machine: SimMachine) -> float:
        left_s = super().life_left_s(machine)
        if machine.expiry is None or machine.expiry["boot"] == machine.clock.boot:
            return left_s
        return float(machine.expiry["wall"]) - machine.clock.wall()


def test_a_host_that_boots_with_a_clock_that_went_back_is_free_again_at_its_expiry() -> None:
    """It may be late by the time that it was off. Hosts that ask their wall clock only are later."""

    def left(seed: int, world: type[World]) -> list[str]:
        faults = Faults(host_reboots_every_s=4000.0, clocks_set_every_s=3000.0, clocks_set_by_s=100 * 3600.0)
        scenario = replace(calm(seed), faults=replace(faults, controller_crashes=1), abandoned=True)
        plan = structs.replace(scenario.plan, places=("hosts",))
        return violations(simulate(replace(scenario, plan=plan), Parts(world=world)))

    assert not any(left(seed, World) for seed in range(8))
    told = [line for seed in range(8) for line in left(seed, BelievesItsWallClock)]
    assert any("expiry" in line for line in told)


class Asked(World):
    """Keeps how long machines were to live."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lives_s: list[float] = []

    def bring_up(self, machine: MachineId, offer: Offer, expires_s: float, boot_s: float) -> None:
        self.lives_s.append(expires_s)
        super().bring_up(machine, offer, expires_s, boot_s)

    def extend(self, machine: MachineId, expires_s: float) -> None:
        self.lives_s.append(expires_s)
        super().extend(machine, expires_s)


@pytest.mark.parametrize("hours", [-2, -100])
def test_after_a_reboot_with_a_clock_that_went_back_no_absurd_life_is_asked_for(hours: int) -> None:
    crashes = Faults(controller_crashes=4, crash_every_s=300.0, reboots=1.0)
    asked: list[float] = []
    for seed in range(8):
        scenario = replace(calm(seed), faults=crashes, steps=(ClockStep(1.0, hours * 3600.0),))
        sim = simulate(scenario, Parts(world=Asked))
        assert violations(sim) == []
        assert sim.state.scored == len(scenario.tasks)
        assert isinstance(sim.world, Asked)
        lease_s = scenario.plan.limits.lease_s
        asked += [life_s - lease_s for life_s in sim.world.lives_s]
    assert asked
    assert max(asked) <= 0


@pytest.mark.parametrize("seed", range(6))
def test_machines_that_lie_lose_their_own_tasks_and_no_others(seed: int) -> None:
    sim = checked(replace(calm(seed), faults=Faults(lies=0.3)))
    honest = [m for m in sim.state.machines.values() if m.id not in sim.world.liars]
    assert not any(machine.cause for machine in honest)
    if sim.state.stop is None:
        assert sim.state.status == "done"


@pytest.mark.parametrize("seed", range(6))
def test_machines_that_were_never_ours_are_not_bought_without_end(seed: int) -> None:
    scenario = replace(calm(seed), faults=Faults(forges=1.0))
    sim = checked(scenario)
    assert sim.state.stop is not None
    assert "something else than our supervisor answered" in sim.state.stop.detail
    few = scenario.plan.limits.same_failure_machines
    requested = Counter(machine.offer.key for machine in sim.state.machines.values())
    # those that were asked for at the same time as the last one that counted are under way already
    assert max(requested.values()) < few + scenario.plan.limits.workers


@pytest.mark.parametrize("seed", range(6))
def test_a_machine_that_is_ours_makes_up_for_those_that_never_were(seed: int) -> None:
    sim = checked(replace(calm(seed), faults=Faults(forges=0.2)))
    assert sim.state.stop is not None or sim.state.status == "done"
    known = sim.state.machines
    assert not any(known[machine].ready_at for machine in sim.world.forged if machine in known)


@pytest.mark.parametrize("seed", range(6))
def test_broken_tasks_are_run_again_on_request_and_no_others(seed: int) -> None:
    broken_world = Faults(job_breaks=0.7)
    before = checked(replace(calm(seed), faults=broken_world))
    after = checked(replace(calm(seed), faults=broken_world, resumes=("broken",)))
    again = [task for task, known in before.state.tasks.items() if known.status == "broken"]
    for task, known in before.state.tasks.items():
        later = after.state.tasks[task]
        assert later.attempts[: len(known.attempts)] == known.attempts
        assert (len(later.attempts) > len(known.attempts)) == (task in again)


def test_invariants_hold_where_one_of_several_places_fails_goes_away_and_comes_back() -> None:
    report = run_seeds(range(24), scenario=draw_tiers)
    assert report.failures == {}
    assert report.attempts > 300


@pytest.mark.parametrize("kind", hangs())
def test_every_task_is_scored_whatever_hangs(kind: str) -> None:
    sim = checked(hangs()[kind])
    assert sim.state.scored == len(sim.state.tasks)


def test_a_job_that_runs_for_ever_without_its_container_is_given_up_in_the_words_of_its_service() -> None:
    """The eight-hour hang: the task runs elsewhere within a quarter of an hour."""
    sim = checked(hangs()["running_never_started"])
    assert sim.state.scored == len(sim.state.tasks)
    given_up = [
        m for m in sim.state.machines.values() if m.offer.place == "service" and m.cause is Cause.BOOT
    ]
    assert given_up
    assert all(m.detail.endswith("has not started there; the service says: running") for m in given_up)
