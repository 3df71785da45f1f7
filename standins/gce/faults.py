"""What goes wrong, by chance from a seed or by script."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from standins.cloud.faults import Asked, Failed, FaultRules, Late, Lost, Stuck
from standins.cloud.words import Answer

from .words import ApiError


@dataclass(frozen=True)
class Throttled:
    """403 `rateLimitExceeded`, or 429, as has been reported; nothing is done."""

    status: int = 403


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

    of_changes_only: ClassVar[bool] = True
    code: str
    message: str = "Failed by the test."


Effect = Throttled | Failed | Lost | Late | Stuck | Refused | FailsLate


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


class Faults(FaultRules[Effect]):
    """What goes wrong with Compute Engine."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.bucket: MinuteBucket | None = MinuteBucket(1500)
        """None: for tests that ask more often than Google bears."""
        self.denied: set[str] = set()
        """Permissions that the client lacks, such as compute.instances.create."""
        self.api_is_off = False
        self.boots_without_key: str = ""
        """Instances whose name has this (a regular expression) never tell their host key."""
        self.slow_boots: dict[str, float] = {}
        """By regular expression of a name: so many seconds longer."""

    def limited(self, call: Asked, now: float) -> Effect | None:
        return Throttled() if self.bucket is not None and not self.bucket.takes(now) else None

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
