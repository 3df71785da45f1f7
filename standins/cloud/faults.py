"""What can go wrong with any cloud's API, by chance from a seed or by script."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar


@dataclass(frozen=True)
class Failed:
    """A 5xx, nothing is done."""

    status: int = 503


@dataclass(frozen=True)
class Lost:
    """It is done, but the connection breaks before the client hears of it."""


@dataclass(frozen=True)
class Late:
    """The client's connection breaks; it is done some seconds later."""

    delay_s: float


@dataclass(frozen=True)
class Stuck:
    """The call is accepted, but its long-running operation does not begin before so many seconds."""

    of_changes_only: ClassVar[bool] = True
    seconds: float = 1e9


class Asked(Protocol):
    """A call of a client."""

    @property
    def method(self) -> str: ...

    @property
    def path(self) -> str: ...


E = TypeVar("E")


@dataclass
class Rule(Generic[E]):
    """Applies to calls of `method` whose path has `path` (a regular expression, any case)."""

    effect: E
    method: str = ""
    path: str = ""
    rate: float = 1.0
    times: int | None = None
    after: int = 0
    """So many calls that fit are spared."""

    def fits(self, call: Asked) -> bool:
        if self.times == 0 or (self.method and self.method != call.method):
            return False
        changes = call.method not in ("GET", "HEAD") and not call.path.endswith("/wait")
        if getattr(self.effect, "of_changes_only", False) and not changes:
            return False
        if re.search(self.path, call.path, re.IGNORECASE) is None:
            return False
        self.after -= 1
        return self.after < 0


class FaultRules(Generic[E]):
    """The first rule that fits a call, and that chance picks, has its effect, after a cloud's limits."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self.rules: list[Rule[E]] = []
        self.met: list[tuple[E, str, str]] = []
        """What has happened: the effect, and the method and the path of the call."""
        self.script: Callable[[Asked], E | None] | None = None
        """Decides alone what happens to each call, where it is set."""

    def add(
        self,
        effect: E,
        *,
        method: str = "",
        path: str = "",
        rate: float = 1.0,
        times: int | None = None,
        after: int = 0,
    ) -> Rule[E]:
        rule = Rule(effect, method, path, rate, times, after)
        self.rules.append(rule)
        return rule

    def pick(self, call: Asked, now: float) -> E | None:
        """What happens to a call; None: it is answered."""
        if self.script is not None:
            return self.script(call)
        if (effect := self.limited(call, now)) is not None:
            return self.meet(effect, call)
        return self.by_rules(call)

    def limited(self, call: Asked, now: float) -> E | None:
        """What is said to a call that is one too many; None: it is not."""
        return None

    def by_rules(self, call: Asked) -> E | None:
        for rule in self.rules:
            if rule.fits(call) and (rule.rate >= 1.0 or self._random.random() < rule.rate):
                if rule.times is not None:
                    rule.times -= 1
                return self.meet(rule.effect, call)
        return None

    def meet(self, effect: E, call: Asked) -> E:
        self.met.append((effect, call.method, call.path))
        return effect
