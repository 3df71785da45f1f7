"""What goes wrong, by chance from a seed or by script."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from standins.cloud.faults import Asked, Failed, FaultRules, Late, Lost, Stuck
from standins.cloud.words import Answer, Call, Json

from .words import ArmError


@dataclass(frozen=True)
class Throttled:
    """429, nothing is done."""

    retry_after_s: int = 1


@dataclass(frozen=True)
class Refused:
    """A refusal of this shape."""

    status: int
    code: str
    message: str = "Refused by the test."


Effect = Throttled | Failed | Lost | Late | Stuck | Refused


@dataclass
class SlowBoot:
    """Machines whose name has `name` (a regular expression) take so much longer to boot, and are billed."""

    name: str
    seconds: float
    times: int | None = None


@dataclass(frozen=True)
class Policy:
    """An Azure Policy that denies: resources of `type` whose body `denies` says so."""

    name: str
    type: str
    required_tag: str = ""
    locations: tuple[str, ...] = ()

    def denies(self, type: str, body: Json) -> bool:
        if type.lower() != self.type.lower():
            return False
        tags = {key.lower() for key in body.get("tags") or {}}
        lacks_tag = bool(self.required_tag) and self.required_tag.lower() not in tags
        elsewhere = bool(self.locations) and body.get("location") not in self.locations
        return lacks_tag or elsewhere or not (self.required_tag or self.locations)


class Bucket:
    """As ARM limits a subscription's writes: so many at once, refilled at a rate."""

    def __init__(self, size: int, per_s: float) -> None:
        self._size = size
        self._per_s = per_s
        self._left = float(size)
        self._at = 0.0

    def wait_s(self, now: float) -> int:
        """0: there was a token, and it is taken."""
        self._left = min(self._size, self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._left >= 1.0:
            self._left -= 1.0
            return 0
        return math.ceil((1.0 - self._left) / self._per_s)


VM_RATES = {"DELETE": (12, 4 / 60), "GET": (36, 12 / 60)}
"""By method: so many at once, and so many a second."""


class VmLimits:
    """As Azure limits what is asked about one machine: so many calls at once, then some a minute."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[str, str], Bucket] = {}

    def wait_s(self, call: Asked, now: float) -> int:
        """0: it is answered."""
        found = re.match(r"(.+/Microsoft\.Compute/virtualMachines/[^/]+)", call.path, re.IGNORECASE)
        rate = VM_RATES.get(call.method)
        if found is None or rate is None:
            return 0
        bucket = self._buckets.setdefault((call.method, found[1].lower()), Bucket(*rate))
        return bucket.wait_s(now)


class Faults(FaultRules[Effect]):
    """What goes wrong with Azure."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.policies: list[Policy] = []
        self.slow_boots: list[SlowBoot] = []
        self.denied_actions: list[str] = []
        self.failing_deletes: list[str] = []
        """Types whose deletion is taken, and fails afterwards."""
        self.only_group = ""
        """The one resource group that the client has rights on; empty: on the whole subscription."""
        self.writes: Bucket | None = None
        self.vm_limits: VmLimits | None = VmLimits()
        """None: for tests that look more often than Azure bears."""

    def limited(self, call: Asked, now: float) -> Effect | None:
        writes = call.method not in ("GET", "HEAD")
        if self.writes is not None and writes and (wait_s := self.writes.wait_s(now)):
            return Throttled(wait_s)
        if self.vm_limits is not None and (wait_s := self.vm_limits.wait_s(call, now)):
            return Throttled(wait_s)
        return None

    def hold_s(self, method: str, path: str) -> float:
        """For what Azure does by itself in a deployment: only rules that name a path can make that stuck."""
        call = Call(method, path)
        for rule in self.rules:
            if isinstance(rule.effect, Stuck) and rule.path and rule.fits(call):
                if rule.times is not None:
                    rule.times -= 1
                self.meet(rule.effect, call)
                return rule.effect.seconds
        return 0.0

    def boot_delay_s(self, name: str) -> float:
        for slow in self.slow_boots:
            if slow.times != 0 and re.search(slow.name, name):
                if slow.times is not None:
                    slow.times -= 1
                return slow.seconds
        return 0.0

    def check_policies(self, type: str, id: str, body: Json) -> None:
        for policy in self.policies:
            if policy.denies(type, body):
                raise disallowed(policy, id, body)


def disallowed(policy: Policy, id: str, body: Json) -> ArmError:
    name = id.rsplit("/", 1)[-1]
    assignment = f"/subscriptions/x/providers/Microsoft.Authorization/policyAssignments/{policy.name}"
    identifiers = f'[{{"policyAssignment":{{"name":"{policy.name}","id":"{assignment}"}}}}]'
    info = {"policyAssignmentName": policy.name, "policyAssignmentId": assignment}
    return ArmError(
        403,
        "RequestDisallowedByPolicy",
        f"Resource '{name}' was disallowed by policy. Policy identifiers: '{identifiers}'.",
        target=name,
        more={"additionalInfo": [{"type": "PolicyViolation", "info": info}]},
    )


def refusal(effect: Throttled | Failed | Refused) -> Answer:
    match effect:
        case Throttled(retry_after_s):
            message = "The request is being throttled as the limit has been reached."
            wait = {"Retry-After": str(retry_after_s)}
            return ArmError(429, "TooManyRequests", message, headers=wait).answer()
        case Failed(status):
            return ArmError(status, "ServerError", "The server encountered an error. Please retry.").answer()
        case Refused(status, code, message):
            return ArmError(status, code, message).answer()
