"""A machine without a benchmark: nothing to set up, nothing to run."""

from __future__ import annotations

from evalfleet.model import AttemptId, Broken, Bundle, Cause, Command, Ended, Needs, Outcome, Task


class Bare:
    """What a pool's machines are made for before anybody says what they are for."""

    name = ""
    needs = Needs()
    bundle = Bundle()
    probe: Command | None = None

    def command(self, task: Task, attempt: AttemptId) -> Command:
        raise NotImplementedError("a pool runs no tasks")

    def outcome(self, task: Task, ended: Ended, healthy: bool) -> Outcome:
        return Broken(Cause.INTERNAL, "a pool runs no tasks")
