"""A pool as it is now: its journal, folded, and who has which of its machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from evalfleet.errors import RequestError
from evalfleet.journal import Hold, Holds, Store
from evalfleet.model import MachineId, Micros, after, seconds_between
from evalfleet.names import hint
from evalfleet.state import MachineState, RunState, fold

Standing = Literal["creating", "ready", "held", "mending", "stopping", "stopped", "expired", "leaving"]


NEAR_S = 2 * 86_400.0
"""Who is to look after a pool is told of its end so long ahead."""
PERISHING_S = 14 * 86_400.0
"""The same, of the end of what was set up on its machines."""


@dataclass(frozen=True)
class PoolView:
    name: str
    state: RunState
    holds: dict[MachineId, Hold]

    @property
    def machines(self) -> list[MachineState]:
        """The machines that exist."""
        return [self.state.machines[machine] for machine in self.state.undeleted]

    @property
    def failed(self) -> list[MachineState]:
        """The stopped machines that did not start, or that stopped although no user asked for it."""
        return [machine for machine in self.machines if machine.phase == "stopped" and machine.detail]

    @property
    def expires_at(self) -> Micros | None:
        """When the first of its machines ends by itself."""
        return min((machine.expires_at for machine in self.machines), default=None)

    def expiry(self, now: Micros) -> str:
        """What is to be said of its expiry, if it is near or over; else empty."""
        at = self.expires_at
        near_s = min(NEAR_S, self.state.limits.lease_s / 2)
        if at is None or now < after(at, -near_s):
            return ""
        if now >= at:
            hint = f"`evalfleet pool start {self.name}` brings its machines back, `pool delete` ends it"
            return f"pool {self.name!r} has expired; {hint}"
        left = _hours(seconds_between(now, at))
        return (
            f"pool {self.name!r} expires in {left}; `evalfleet pool set {self.name} --expires 14d` keeps it"
        )

    def perishing(self, now: Micros) -> str:
        """What is to be said of set-ups that end soon, such as licences, or have ended; else empty."""
        ends = [machine.good_until for machine in self.machines if machine.good_until is not None]
        near = [at for at in ends if now >= after(at, -PERISHING_S)]
        if not near:
            return ""
        left_s = seconds_between(now, min(near))
        when = f"ends in {_hours(left_s)}" if left_s > 0 else f"ended {_hours(-left_s)} ago"
        count = f"{len(near)} of {len(self.machines)} machines"
        hint = f"`evalfleet pool do {self.name} clean` and `pool prepare` make it anew"
        return f"what was set up on {count} of pool {self.name!r} {when}, with its licence; {hint}"

    def warning(self, now: Micros) -> str:
        """What whoever uses it should know now; else empty."""
        return "; ".join(filter(None, (self.expiry(now), self.perishing(now))))

    def machine(self, name: str) -> MachineState:
        """The machine with this name or id. Raises RequestError."""
        for machine in reversed(self.machines):
            if name in (machine.name, machine.id):
                return machine
        names = [machine.name for machine in self.machines]
        raise RequestError(f"pool {self.name!r} has no machine {name!r}; {hint(name, names)}")

    def holder(self, machine: MachineId, now: Micros) -> str | None:
        """The run that has it."""
        hold = self.holds.get(machine)
        return hold.holder if hold is not None and hold.held(now) and hold.holder != self.name else None

    def standing(self, machine: MachineState, now: Micros) -> Standing:
        match machine.phase:
            case "ready" | "stopped" if now > machine.expires_at:
                return "expired"
            case "ready":
                return "held" if self.holder(machine.id, now) else "ready"
            case "requested" | "queued" | "allocated" | "up":
                return "creating"
            case "mending" | "stopping" | "stopped":
                return machine.phase
            case _:
                return "leaving"

    @property
    def leaving(self) -> str:
        """What is wrong with using a pool whose deletion has begun; empty if it has not."""
        if self.state.stop is None:
            return ""
        return f"pool {self.name!r} is being deleted; `evalfleet pool delete {self.name}` goes on with that"

    def unusable(self, now: Micros) -> str:
        """Why no run can borrow anything now, and what to do about it; empty if one can."""
        if self.state.stop is not None:
            return self.leaving
        standings = {machine.id: self.standing(machine, now) for machine in self.machines}
        if not standings:
            return f"pool {self.name!r} has no machines; `evalfleet pool start {self.name}` makes them"
        if {"ready", "creating"} & set(standings.values()):
            return ""
        holders = sorted({who for machine in standings if (who := self.holder(machine, now)) is not None})
        if holders:
            run = holders[0]
            return (
                f"all machines of pool {self.name!r} are held by {', '.join(holders)}: wait until it ends, "
                f"go on with it (`evalfleet resume {run}`), or free them (`evalfleet cancel {run}`)"
            )
        return f"no machine of pool {self.name!r} is running; `evalfleet pool start {self.name}` starts them"


def _hours(seconds: float) -> str:
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 2 * 86_400 else f"{seconds / 86_400:.0f} days"


def read_pool(store: Store, name: str) -> PoolView:
    """The pool of this name. Raises RequestError when there is none, or none any more."""
    pools = {info.name for info in store.streams() if info.kind == "pool"}
    if name not in pools:
        raise RequestError(f"there is no pool {name!r}; {hint(name, pools)}")
    view = look_at(store, name)
    if view.state.ended_at is not None:
        raise RequestError(f"pool {name!r} was deleted; make another with `evalfleet pool create`")
    return view


def look_at(store: Store, name: str) -> PoolView:
    """The pool of this name, also one that was deleted: a run may remember machines of it."""
    return PoolView(name, fold(store.read(name)), Holds(store, name).all())
