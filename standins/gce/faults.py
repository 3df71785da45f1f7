"""What goes wrong, by chance from a seed or by script."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from .words import Answer, ApiError, Call


@dataclass(frozen=True)
class Throttled:
    """403 `rateLimitExceeded`, or 429, as has been reported; nothing is done."""

    status: int = 403


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
    """The call is accepted, but its operation does not begin before so many seconds."""

    seconds: float = 1e9


@dataclass(frozen=True)
class Refused:
    """A refusal of this shape, at once."""

    status: int
    reason: str
    message: str = "Refused by the test."
    info: str = ""


@dataclass(frozen=True)
class FailsLate:
    """The call is accepted, and its operation fails with this code."""

    code: str
    message: str = "Failed by the test."


Effect = Throttled | Failed | Lost | Late | Stuck | Refused | FailsLate


@dataclass
class Rule:
    """Applies to calls of `method` whose path has `path` (a regular expression)."""

    effect: Effect
    method: str = ""
    path: str = ""
    rate: float = 1.0
    times: int | None = None
    after: int = 0
    """So many calls that fit are spared."""

    def fits(self, call: Call) -> bool:
        if self.times == 0 or (self.method and self.method != call.method):
            return False
        changes = call.method != "GET" and not call.path.endswith("/wait")
        if isinstance(self.effect, Stuck | FailsLate) and not changes:
            return False
        if re.search(self.path, call.path) is None:
            return False
        self.after -= 1
        return self.after < 0


class MinuteBucket:
    """As Google limits calls: so many a minute, refilled at the start of the next one."""

    def __init__(self, a_minute: int) -> None:
        self._size = a_minute
        self._minute, self._used = 0, 0

    def takes(self, now: float) -> bool:
        minute = int(now // 60)
        if minute != self._minute:
            self._minute, self._used = minute, 0
        self._used += 1
        return self._used <= self._size


class Faults:
    """The first rule that fits a call, and that chance picks, has its effect."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self.rules: list[Rule] = []
        self.bucket: MinuteBucket | None = MinuteBucket(1500)
        """None: for tests that ask more often than Google bears."""
        self.met: list[tuple[Effect, str, str]] = []
        self.denied: set[str] = set()
        """Permissions that the client lacks, such as compute.instances.create."""
        self.api_is_off = False
        self.boots_without_key: str = ""
        """Instances whose name has this (a regular expression) never tell their host key."""
        self.slow_boots: dict[str, float] = {}
        """By regular expression of a name: so many seconds longer."""

    def add(
        self,
        effect: Effect,
        *,
        method: str = "",
        path: str = "",
        rate: float = 1.0,
        times: int | None = None,
        after: int = 0,
    ) -> Rule:
        rule = Rule(effect, method, path, rate, times, after)
        self.rules.append(rule)
        return rule

    def pick(self, call: Call, now: float) -> Effect | None:
        if self.bucket is not None and not self.bucket.takes(now):
            self.met.append((Throttled(), call.method, call.path))
            return Throttled()
        for rule in self.rules:
            if rule.fits(call) and (rule.rate >= 1.0 or self._random.random() < rule.rate):
                if rule.times is not None:
                    rule.times -= 1
                self.met.append((rule.effect, call.method, call.path))
                return rule.effect
        return None

    def check(self, permission: str, path: str) -> None:
        if permission in self.denied:
            message = f"Required '{permission}' permission for '{path}'"
            raise ApiError(403, "forbidden", message, info="IAM_PERMISSION_DENIED")

    def boot_delay_s(self, name: str) -> float:
        return sum(seconds for pattern, seconds in self.slow_boots.items() if re.search(pattern, name))

    def tells_key(self, name: str) -> bool:
        return not self.boots_without_key or re.search(self.boots_without_key, name) is None


def refusal(effect: Throttled | Failed | Refused) -> Answer:
    match effect:
        case Throttled(status):
            message = "Quota exceeded for quota metric 'Queries' and limit 'Queries per minute'."
            return ApiError(status, "rateLimitExceeded", message, info="RATE_LIMIT_EXCEEDED").answer()
        case Failed(status):
            return ApiError(status, "backendError", "Backend Error. Please try again.").answer()
        case Refused(status, reason, message, info):
            return ApiError(status, reason, message, info=info).answer()
