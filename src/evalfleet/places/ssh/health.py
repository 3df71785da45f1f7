"""How one host has done of late, and which of several to try first."""

from __future__ import annotations

from collections.abc import Iterable

from evalfleet.channels.ssh.target import HostRefused

SHORTEST_S = 2.0
REFUSED_S = 15.0
"""A host that refused us is asked again after so long at first: nobody mends anything sooner."""
LONGEST_S = 60.0
LONGEST_ASIDE_S = 1800.0
BAD_STREAK = 3
MOST_REFUSALS = 6
"""A host that refuses us so many times in a row, over minutes, needs somebody's hand; it is left alone."""
NEVER = float("inf")


class HostHealth:
    """One host's. `down_since` is when it first did not answer, of late; `refusal` needs somebody's hand.

    `set_aside_s`: for how long it is set aside when it did badly; each time twice as long.
    """

    def __init__(self, order: int, set_aside_s: float) -> None:
        self.order = order
        self.refusal: HostRefused | None = None
        self.problem = ""
        self.worked = False
        """It has done something for us since this process began."""
        self.late = False
        """It has not answered yet, while others have."""
        self.down_since: float | None = None
        self.retry_at = 0.0
        self.aside_until = 0.0
        self.aside = 0
        self._delay_s = SHORTEST_S
        self._set_aside_s = set_aside_s
        self._bad = 0
        self._refusals = 0

    # -- does it answer? ---------------------------------------------------------------------------

    def answered(self) -> None:
        self.down_since = None
        self.worked, self.late = True, False
        self._refusals = 0
        self.refusal, self.problem = None, ""
        self.retry_at = 0.0
        self._delay_s = SHORTEST_S

    def silent(self, now: float, problem: str, refusal: HostRefused | None = None) -> None:
        """It did not answer, or refused us: it is not asked again for a while, each time longer."""
        self.problem = problem
        self.refusal = refusal
        self.late = False
        if self.down_since is None:
            self.down_since = now
        self._refusals = self._refusals + 1 if refusal is not None else 0
        if refusal is not None:
            self._delay_s = max(self._delay_s, REFUSED_S)
        self.retry_at = now + self._delay_s if self._refusals < MOST_REFUSALS else NEVER
        self._delay_s = min(self._delay_s * 2, LONGEST_S)

    # -- does it do well? --------------------------------------------------------------------------

    def did(self, well: bool) -> None:
        self._bad = 0 if well else self._bad + 1
        if well:
            self.aside = 0

    def given_up(self, now: float) -> bool:
        """A machine on it was deleted. True: it did badly, so it is set aside for a while."""
        if self._bad < BAD_STREAK and self.down_since is None:
            return False
        self._bad = 0
        self.aside += 1
        self.aside_until = now + min(self._set_aside_s * 2 ** (self.aside - 1), LONGEST_ASIDE_S)
        return True

    def usable(self, now: float) -> bool:
        return now >= self.retry_at and now >= self.aside_until

    def due(self) -> float:
        return max(self.retry_at, self.aside_until)


def in_order(standings: Iterable[tuple[str, HostHealth]], now: float) -> list[str]:
    """Hosts to try, best first: those that did well, then those that were in trouble and are due again."""
    usable = [
        (each.aside > 0, each.late or each.down_since is not None, each.order, name)
        for name, each in standings
        if each.usable(now)
    ]
    return [name for _, _, _, name in sorted(usable)]
