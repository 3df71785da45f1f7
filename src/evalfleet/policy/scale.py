"""How many machines there shall be, and of which offer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from evalfleet.events import Event, MachineCondemned, MachineRequested, StopRequested
from evalfleet.model import MachineId, Micros, Needs, Offer, Task, after
from evalfleet.names import machine_id
from evalfleet.state import Block, Circuit, RunState, kept_out, scopes

from .allowances import at_once
from .limits import any_task_s, grant_s, never_long_enough, time_is_short, worthwhile
from .pace import comes_too_late, turn_at, workers
from .schedule import does, free_lanes, has_lanes, has_tasks_of_its_own, live_that_do, most_first, surplus
from .silence import proven_online


def request(state: RunState, now: Micros, offers: Sequence[Offer]) -> list[Event]:
    """Ask for one more machine when there is work for it, and an offer and money to have it."""
    wanted = 0 if state.stop is not None else missing(state, now, offers)
    if not wanted:
        return []
    choices = _choices(state, now, offers)
    if not choices:
        return _out_of_time(state, now, offers)
    if choices[0].cost.usd_per_hour > 0 and _would_be_idle(state, now):
        return []
    granted = ((offer, grant_s(state, now, offer, sharers=wanted)) for offer in choices)
    found = next(((offer, seconds) for offer, seconds in granted if worthwhile(state, offer, seconds)), None)
    if found is None:
        return _out_of_money(state, choices[0])
    offer, seconds = found
    if now < turn_at(state, offer.area_key):
        return []  # then it is decided anew whether one would still come in time
    n = len(state.machines) + 1
    machine = machine_id(state.plan.run, state.plan.home, n)
    name = state.plan.machine_names.replace("{n}", str(n))
    if offer.lent:
        name = nameless(state, offer, n)
    return [MachineRequested(machine, name, offer, after(now, seconds))]


def nameless(state: RunState, offer: Offer, n: int) -> str:
    """Return what a lent machine is called until its place tells which one it is."""
    return f"machine {n} of {state.plan.pool or offer.place}"


def _would_be_idle(state: RunState, now: Micros) -> bool:
    """Would a machine come only for others to have done all? Where machines differ, nobody can tell."""
    return len(state.fresh) == 1 and bool(state.waiting) and comes_too_late(state, now)


def missing(state: RunState, now: Micros, offers: Sequence[Offer]) -> int:
    """How many machines are missing."""
    if not state.waiting or state.paused is not None:
        released = state.paused is not None and state.paused.release
        return 0 if released else int(_needs_witness(state))
    proved = state.proofs >= state.limits.canary
    ceiling = (workers(state, now, offers) if proved else 1) - state.live
    if ceiling <= 0:  # as nearly always
        return 0
    if (most := at_once(state)) is not None:
        ceiling = min(ceiling, -(-most // state.plan.slots) - state.live)
    if has_lanes(state):
        return max(0, min(ceiling, _lanes_without_machine(state)))
    useful = sum(max(0, many) for many in _lacking(state).values())
    return max(0, min(ceiling, useful) - _kept_for_mended(state))


def _lacking(state: RunState) -> Mapping[Needs | None, int]:
    """How many more machines of each kind would have something to do, that which is hardest to have first.

    A machine that has more than others works for those that need it before it works for the rest.
    """
    lacking: dict[Needs | None, int] = {}
    engaged = 0
    for kind in most_first(state):
        useful, live = -(-state.unsettled[kind] // state.plan.slots), live_that_do(state, kind)
        lacking[kind] = useful - (live if kind is not None else max(0, live - engaged))
        engaged += min(useful, live)
    return lacking


def _choices(state: RunState, now: Micros, offers: Sequence[Offer]) -> list[Offer]:
    """The best offers of the kinds of machines that are missing, that which is hardest to have first."""
    if len(state.kinds) == 1 or not state.waiting:
        return best_offers(state, now, offers)
    missing = (kind for kind, many in _lacking(state).items() if many > 0)
    fitting = ([each for each in offers if does(each, kind)] for kind in missing)
    return [offer for each in fitting for offer in best_offers(state, now, each)]


def _kept_for_mended(state: RunState) -> int:
    """A machine that is mended is replaced only when nothing helps, unless no other one works."""
    return len(state.mending) if state.live else 0


def _needs_witness(state: RunState) -> bool:
    """Are all machines silent, and has none told whether it is our network? A new one can."""
    if not state.silent or state.audible or state.coming or state.live >= state.limits.workers:
        return False
    first = state.machines[next(iter(state.silent))]
    # one that queues tells nothing soon
    return not first.offer.life.queues and not proven_online(state, first)


def _lanes_without_machine(state: RunState) -> int:
    """Return how many lanes of a static schedule nobody has, or will have soon; retries need any machine."""
    takers = [m for m in state.ready if m not in state.draining]
    free_hands = len(state.coming) + sum(
        not has_tasks_of_its_own(state, state.machines[machine]) for machine in takers
    )
    lanes = len(free_lanes(state))
    return lanes - free_hands if lanes else int(bool(state.retries) and not state.live)


def best_offers(state: RunState, now: Micros, offers: Sequence[Offer]) -> list[Offer]:
    """The first offer (they come cheapest first) that neither refuses us nor is used up.

    If its machines are taken back again and again, the first offer whose machines are not comes before it;
    it is used if that one is too dear, or there is none. Where places have an order, the first offers of the
    others come after it: one of them may be the cheaper.
    """
    fresh: dict[str, Offer] = {}  # by place
    tired: list[Offer] = []
    for offer in offers:
        full = offer.capacity is not None and (
            state.live_by_offer[offer.key] + len(kept_out(state, offer.place)) >= offer.capacity
        )
        if full or offer.place in fresh or _shut(state, now, offer) or _too_short(state, now, offer):
            continue
        if not _tired(state, offer):
            fresh[offer.place] = offer
            if not state.plan.ordered:
                break
        else:
            tired = tired or [offer]
    return [*fresh.values(), *tired]


def _shut(state: RunState, now: Micros, offer: Offer) -> bool:
    return _blocked(state, now, offer) or (
        offer.place in state.shaky and is_shut(state.circuits[offer.place], now)
    )


def is_shut(circuit: Circuit, now: Micros) -> bool:
    """Shall the place have no new machine now? One whose circuit is open has one, once its time has come."""
    if circuit.phase != "open":
        return circuit.phase == "draining"
    return circuit.permanent or circuit.probe is not None or now < circuit.until


def _too_short(state: RunState, now: Micros, offer: Offer) -> bool:
    """Do its machines live so short, or is the run's end so near, that a task may not end in time?"""
    return offer.bounded and (never_long_enough(state, offer) or time_is_short(state, now, offer))


OFFER_EVICTIONS = 2
RUN_EVICTIONS = 3


def _tired(state: RunState, offer: Offer) -> bool:
    """Were so many of its machines taken back that regular ones are cheaper in the end?

    Twice of one offer: its place is short of that size there, and another may do. Three times in all, or as
    often as a quarter of the workers, if that is more: each eviction costs the attempt that ran, and a boot
    and a set-up elsewhere, and places run short of spot machines for hours.
    """
    if not offer.spot or not state.evictions:
        return False
    most = max(RUN_EVICTIONS, state.limits.workers // 4)
    return state.evictions[offer.key] >= OFFER_EVICTIONS or state.evictions.total() >= most


def _blocks(state: RunState, offer: Offer) -> list[Block]:
    if not state.blocks:
        return []
    return [state.blocks[key] for key in scopes(offer).values() if key in state.blocks]


def _blocked(state: RunState, now: Micros, offer: Offer) -> bool:
    return any(block.permanent or block.until > now for block in _blocks(state, offer))


def task_without_offer(tasks: Iterable[Task], offers: Sequence[Offer]) -> str | None:
    """Which task needs more than any machine that is offered has, if one does."""
    for task in tasks:
        if task.needs is not None and not any(does(offer, task.needs) for offer in offers):
            return (
                f"no machine that is offered has the {task.needs.in_words()} that task {task.id} needs; "
                "choose another place with --on, leave the task out with --exclude, or lower its `needs`"
            )
    return None


def useful_offers(state: RunState, offers: Sequence[Offer]) -> list[Offer]:
    """The offers whose machines suit a task that is left."""
    left = [kind for kind in state.kinds if state.unsettled[kind] > 0]
    return [offer for offer in offers if any(does(offer, kind) for kind in left)]


def refused_for_good(state: RunState, offers: Sequence[Offer]) -> bool:
    """Every offer said no, and asking again does not help, or did not help often enough.

    What others have only borrowed (an offer with a capacity) will be free again some time. A whole place that
    answers nothing for now has an outage: that is waited for, for hours, because it costs nothing.
    """
    return all(is_final(state, offer) for offer in useful_offers(state, offers))


def is_final(state: RunState, offer: Offer) -> bool:
    if offer.place in state.circuits and state.circuits[offer.place].permanent:
        return True
    for scope, key in scopes(offer).items():
        block = state.blocks.get(key)
        if block is None:
            continue
        outage = scope == "place"
        most = state.limits.outage_tries if outage else state.limits.offer_tries
        if block.permanent or ((outage or offer.capacity is None) and block.failures >= most):
            return True
    return False


def _out_of_time(state: RunState, now: Micros, offers: Sequence[Offer]) -> list[Event]:
    """Stop once no machine is left, and a new one of any offer would have to end before a task may."""
    if state.undeleted or not offers or not all(_too_short(state, now, offer) for offer in offers):
        return []
    longest = f"the longest task may take {state.longest_s:g} s"
    if any(time_is_short(state, now, offer) for offer in offers):
        return [StopRequested("time", f"too little time is left for another machine: {longest}")]
    best = max(offers, key=lambda offer: offer.life.max_life_s or 0.0)
    why = (
        f"machines of {best.place} end after {best.life.max_life_s or 0.0:g} s, and "
        f"{any_task_s(state, best):g} s are needed: {state.limits.boot_limit_s(best):g} s to start, "
        f"{longest}, and the rest is for their end; raise the place's limit, or lower the time to start "
        "or the task's"
    )
    return [StopRequested("refused", f"no machine that is offered lives long enough: {why}")]


def _out_of_money(state: RunState, offer: Offer) -> list[Event]:
    """Stop once no machine is left, nor a node of one, whose end could free some of the budget."""
    if state.limits.budget_usd is None or state.undeleted:
        return []
    detail = f"the budget of ${state.limits.budget_usd:g} does not pay another machine"
    if offer.life.least_life_s:
        minutes = offer.life.least_life_s / 60
        detail += f" for the {minutes:.0f} minutes after which {offer.place} can stop it by itself"
    return [StopRequested("budget", detail)]


def trim(state: RunState, now: Micros, offers: Sequence[Offer]) -> list[Event]:
    """One machine too many goes: one that was replaced while it was mended and came back, one that is not
    there yet, or, since fewer workers are wanted, the newest that has nothing under way."""
    if state.live <= state.limits.workers:
        return []
    back = (machine for machine in state.idle if state.machines[machine].mends)
    if (mended := next(back, None)) is not None:
        return [MachineCondemned(mended, "replaced while it was mended")]
    unused = [machine for machine in surplus(state) if not state.machines[machine].open]
    leaving = next(reversed(state.coming), unused[-1] if unused else None)
    wanted = f"the run is to have {state.limits.workers} at once, and others came first"
    return [] if leaving is None else [MachineCondemned(leaving, wanted)]


def release(state: RunState, now: Micros, offers: Sequence[Offer]) -> list[Event]:
    """Give back machines that have nothing left to do. Those that cost nothing stay for retries."""
    if state.retries or state.stop is not None or (state.paused is not None and state.waiting):
        return []
    if state.waiting and not has_lanes(state):
        return []
    if not state.waiting and (early := [*state.mending, *_coming_for_nothing(state)]):
        return [MachineCondemned(machine, "nothing left to do") for machine in early]
    if has_lanes(state) and free_lanes(state):
        return []
    return [
        MachineCondemned(machine, "nothing left to do")
        for machine in state.idle
        if state.machines[machine].offer.cost.usd_per_hour > 0 and _spare(state, machine)
    ]


def _coming_for_nothing(state: RunState) -> list[MachineId]:
    """Machines that would be given back on arrival. One that never arrives must not be counted on later:
    what breaks after all others have left gets a machine of its own at once.

    While machines are silent a new one is to tell whether it is our network.
    """
    if state.silent:
        return []
    return [machine for machine in state.coming if state.machines[machine].offer.cost.usd_per_hour > 0]


def _spare(state: RunState, machine: MachineId) -> bool:
    known = state.machines[machine]
    return not known.open and not (has_lanes(state) and has_tasks_of_its_own(state, known))
