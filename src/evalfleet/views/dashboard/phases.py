"""What each machine did when: waiting, booting, each step of its set-up, ready, silent, on its way out."""

from __future__ import annotations

from collections.abc import Mapping

from evalfleet import events as ev
from evalfleet.model import MachineId, Micros

Phase = list[str | int | None]
"""Its name, since when and until when, in milliseconds since 1970; None: it lasts."""

_BEGINS: dict[type, str] = {
    ev.MachineQueued: "queued",
    ev.MachineHeard: "ready",
    ev.MachineStarting: "boot",
    ev.MachineStopping: "stopped",
    ev.MachineStopped: "stopped",
    ev.MachineCondemned: "ending",
}
NOTED = {
    *(ev.MachineRequested, ev.MachineAllocated, ev.MachineUp, ev.MachineReady, ev.MachineStep),
    *(ev.MachineMending, ev.MachineSilent, ev.MachineDeleted, *_BEGINS),
}
"""The events that begin or end a phase."""


class Phases:
    """The phases of a run's machines, gathered from its events in their order."""

    def __init__(self) -> None:
        self._of: dict[MachineId, list[Phase]] = {}

    def of(self, machine: MachineId) -> list[Phase]:
        return [list(phase) for phase in self._of.get(machine, ())]

    def note(self, at: Micros, event: ev.Event) -> None:
        """Take in an event, one of `NOTED`, that was written at `at`."""
        match event:
            case ev.MachineRequested(machine):
                self._of.setdefault(machine, [])
                self._begin(machine, "queued" if event.offer.life.queues else "boot", at)
            case ev.MachineAllocated(machine, started_at):
                self._begin(machine, "boot", max(self._since(machine), min(at, started_at)))
            case ev.MachineUp(machine) | ev.MachineReady(machine):
                self._divide(machine, at, event.timings)
                self._begin(machine, "set-up" if isinstance(event, ev.MachineUp) else "ready", at)
            case ev.MachineStep(machine, step) | ev.MachineMending(machine, step):
                self._begin(machine, step, at)
            case ev.MachineSilent(machine, since):
                self._begin(machine, "silent", since)
            case ev.MachineDeleted(machine, gone_at):
                self._end(machine, gone_at)
            case (
                ev.MachineQueued(machine)
                | ev.MachineHeard(machine)
                | ev.MachineStarting(machine)
                | ev.MachineStopping(machine)
                | ev.MachineStopped(machine)
                | ev.MachineCondemned(machine)
            ):
                self._begin(machine, _BEGINS[type(event)], at)
            case _:
                pass

    def _since(self, machine: MachineId) -> Micros:
        """When its newest phase began."""
        since = self._of[machine][-1][1]
        assert isinstance(since, int)
        return 1000 * since

    def _begin(self, machine: MachineId, name: str, at: Micros) -> None:
        phases = self._of[machine]
        if phases and phases[-1][0] == name and phases[-1][2] is None:
            return
        self._end(machine, at)
        phases.append([name, at // 1000, None])

    def _end(self, machine: MachineId, at: Micros) -> None:
        phases = self._of[machine]
        if phases and phases[-1][2] is None:
            since = phases[-1][1]
            assert isinstance(since, int)
            phases[-1][2] = max(since, at // 1000)
            if phases[-1][2] == since and phases[-1][0] in ("boot", "set-up"):
                phases.pop()  # it took no time worth a line

    def _divide(self, machine: MachineId, at: Micros, timings: Mapping[str, float]) -> None:
        """A phase of which only its end told the steps: they followed one another from its beginning on."""
        phases = self._of[machine]
        if not timings or not phases or phases[-1][0] not in ("boot", "set-up") or phases[-1][2] is not None:
            return
        name, since, _ = phases.pop()
        end = at // 1000
        assert isinstance(since, int)
        for step, seconds in timings.items():
            until = min(end, since + round(seconds * 1000))
            if until > since:
                phases.append([step, since, until])
                since = until
        phases.append([name, since, None])
