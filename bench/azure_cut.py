"""The moment at which a controller dies: at one request to the stand-in, which is carried out or not."""

from __future__ import annotations

from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import Synchronized

from standins.azure import Failed, Lost
from standins.azure.faults import Effect, Faults
from standins.azure.words import Call


class Cut(Faults):
    """Kills the process that asks. `seen`: how many requests each phase had."""

    def __init__(
        self, phase: Synchronized[int], phases: int, at: tuple[int, int], done: bool, process: BaseProcess
    ) -> None:
        super().__init__()
        self._phase = phase
        self._at = at
        self._done = done
        self._process = process
        self.seen = [0] * phases
        self.struck = False

    def pick(self, call: Call, now: float) -> Effect | None:
        phase, n = self._at
        now_in = self._phase.value
        if self.struck or not 1 <= now_in <= len(self.seen):
            return None
        self.seen[now_in - 1] += 1
        if phase == 0 or now_in < phase or (now_in == phase and self.seen[phase - 1] < n):
            return None
        # a phase may have fewer requests than the last time: then it dies as soon as it is over
        self.struck = True
        self._process.kill()
        return Lost() if self._done else Failed()
