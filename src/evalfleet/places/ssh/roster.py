"""How each host has done lately, and which to try next. No I/O: `now` is an argument."""

from __future__ import annotations

from collections.abc import Iterable

SHORTEST_S = 2.0
LONGEST_S = 60.0
LONGEST_ASIDE_S = 1800.0
BAD_STREAK = 3


class HostHealth:
    """One host's. `down_since` is when it first did not answer, of late; `refusal` needs somebody's hand.

    `set_aside_s`: for how long it is set aside when it did badly; each time twice as long.
    """

    def __init__(self, order: int, set_aside_s: float) -> None:
        self.order = order
        self.refusal = ""
        self.problem = ""
        self.down_since: float | None = None
        self.retry_at = 0.0
        self.aside_until = 0.0
        self.aside = 0
        self._delay_s = SHORTEST_S
        self._set_aside_s = set_aside_s
        self._bad = 0

    # -- does it answer? ---------------------------------------------------------------------------

    def answered(self) -> None:
        self.down_since = None
        self.refusal = self.problem = ""
        self.retry_at = 0.0
        self._delay_s = SHORTEST_S

    def silent(self, now: float, problem: str, refusal: bool = False) -> None:
        """It did not answer, or refused us: it is not asked again for a while, each time longer."""
        self.problem = problem
        self.refusal = problem if refusal else ""
        if self.down_since is None:
            self.down_since = now
        self.retry_at = now + self._delay_s
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
        (each.aside > 0, each.down_since is not None, each.order, name)
        for name, each in standings
        if each.usable(now)
    ]
    return [name for _, _, _, name in sorted(usable)]
