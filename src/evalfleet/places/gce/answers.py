"""Google's answers: JSON with parts that may be missing, and what its errors mean: does asking again help,
and how much of Compute Engine is the answer about? Pure.

The same error may come as the answer to a call, or later, in the operation that the call began: both become
a GoogleFault.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

from msgspec import Struct

from evalfleet.errors import PlaceError, Scope

Json = dict[str, Any]


def table(value: object) -> Json:
    """An object; an empty one if there is none."""
    return cast("Json", value) if isinstance(value, dict) else {}


def rows(value: object) -> list[Json]:
    """The objects of a list; none if there is no list."""
    return [table(each) for each in cast("list[object]", value)] if isinstance(value, list) else []


class Problem(Struct, frozen=True):
    """One error in Google's words."""

    code: str
    """`quotaExceeded` in an answer, `QUOTA_EXCEEDED` in an operation."""
    message: str
    metric: str = ""
    """The quota that was exceeded, such as `N2_CPUS`; empty if it was none, or is not told."""


class GoogleFault(Exception):
    """An answer of Google's that is a no, or none at all."""

    def __init__(
        self, status: int, problems: tuple[Problem, ...], retry_after_s: float | None = None
    ) -> None:
        super().__init__("; ".join(f"{each.code}: {each.message}" for each in problems[:1]))
        self.status = status
        """Of HTTP; 0 if there was no answer."""
        self.problems = problems
        self.retry_after_s = retry_after_s

    def has(self, *codes: str) -> bool:
        """Is it one of these? `quotaExceeded` and `QUOTA_EXCEEDED` are the same."""
        wanted = {plain_code(code) for code in codes}
        return any(plain_code(each.code) in wanted for each in self.problems)


def plain_code(code: str) -> str:
    return code.replace("_", "").lower()


def fault_of(status: int, body: Json, retry_after: str | None = None) -> GoogleFault:
    """The fault in the answer to a call."""
    error = table(body.get("error"))
    message = " ".join(str(error.get("message", "")).split())
    problems = [
        Problem(str(each.get("reason", "")), " ".join(str(each.get("message", message)).split()))
        for each in rows(error.get("errors"))
    ]
    details = [each for each in rows(error.get("details")) if each.get("reason")]
    problems += [Problem(str(each["reason"]), message) for each in details]
    if not problems:
        problems = [Problem(str(error.get("status") or f"HTTP {status}"), message)]
    wait = float(retry_after) if retry_after and re.fullmatch(r"\d+(\.\d+)?", retry_after) else None
    return GoogleFault(status, tuple(problems), wait)


def operation_fault(operation: Json) -> GoogleFault | None:
    """The fault in an operation that is done; None if it did what it should. It is in an answer of 200."""
    errors = rows(table(operation.get("error")).get("errors"))
    if not errors:
        return None
    problems = tuple(
        Problem(str(each.get("code", "")), " ".join(str(each.get("message", "")).split()), _metric(each))
        for each in errors
    )
    return GoogleFault(int(operation.get("httpErrorStatusCode") or 409), problems)


def _metric(error: Json) -> str:
    """As `quotaInfo` has it: `compute.googleapis.com/n2_cpus` is a name of the service, `N2-CPUS-per-...` one
    of the limit. The message has the one that people know."""
    if found := re.search(r"Quota '(\w+)' exceeded", str(error.get("message", ""))):
        return found[1]
    infos = [table(each.get("quotaInfo")) for each in rows(error.get("errorDetails"))]
    names = [str(info.get("metricName", "")).rsplit("/", 1)[-1].upper() for info in infos if info]
    return names[0] if names else ""


# -- what they mean ------------------------------------------------------------------------------

QUOTA_PAGE = "https://console.cloud.google.com/iam-admin/quotas"
LOG_IN = (
    "log in with `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS to the key "
    "of a service account"
)


class Meaning(Struct, frozen=True):
    """What some of Google's codes mean to us."""

    codes: frozenset[str]
    """As `plain_code` has them."""
    scope: Scope
    """How much of the place the answer is about."""
    remedy: str = ""
    """What the user can do about it."""
    transient: bool = False
    """Does asking again help?"""
    told: str = ""
    """In place of Google's words, where those are long."""


def _mean(codes: str, scope: Scope, remedy: str = "", **more: Any) -> Meaning:
    return Meaning(frozenset(plain_code(code) for code in codes.split()), scope, remedy, **more)


RATE_CODES = (
    "rateLimitExceeded",
    "userRateLimitExceeded",
    "CONCURRENT_OPERATIONS_QUOTA_EXCEEDED",
    "RATE_LIMIT_EXCEEDED",
)
QUOTA_CODES = ("QUOTA_EXCEEDED", "quotaExceeded")
MEANINGS = (
    _mean("NoCredentials authError UNAUTHENTICATED required ACCESS_TOKEN_EXPIRED", "place", LOG_IN),
    _mean(
        "accessNotConfigured SERVICE_DISABLED",
        "place",
        "switch it on: `gcloud services enable compute.googleapis.com`",
        told="the Compute Engine API is off in this project",
    ),
    _mean(
        "BILLING_DISABLED", "place", "link a billing account: `gcloud billing projects link PROJECT "
        "--billing-account ID`",
    ),
    _mean(
        "CONDITION_NOT_MET conditionNotMet POLICY_VIOLATION",
        "place",
        "an organisation policy forbids it: change the settings, or ask who keeps it "
        "(`gcloud resource-manager org-policies list --project PROJECT`)",
    ),
    _mean(
        "forbidden IAM_PERMISSION_DENIED PERMISSION_DENIED PERMISSIONS_ERROR",
        "place",
        "ask for the role roles/compute.admin: `gcloud projects add-iam-policy-binding PROJECT --member "
        "user:YOU --role roles/compute.admin`",
    ),
    _mean(
        "ZONE_RESOURCE_POOL_EXHAUSTED ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS",
        "offer",
        "other zones, regions and machine types are tried",
        told="the zone has no room for it",
    ),
    _mean(
        "UNSUPPORTED_OPERATION", "offer", "it was taken back while it was being made; other zones are tried",
        transient=True,
    ),
    _mean("RESOURCE_NOT_READY resourceNotReady", "machine", transient=True),
    _mean("RESOURCE_IN_USE_BY_ANOTHER_RESOURCE resourceInUseByAnotherResource", "machine", transient=True),
    _mean("INTERNAL_ERROR internalError backendError", "machine", transient=True),
    _mean("Canceled", "machine", transient=True),
)  # fmt: skip


def is_rate_limit(fault: GoogleFault) -> bool:
    """Is it a matter of waiting? By the documentation it is 403, by reports 429; both are treated alike."""
    return fault.has(*RATE_CODES) or (fault.status == 429 and not fault.has(*QUOTA_CODES))


def refusal(fault: GoogleFault, what: str, *, have_some: bool = False) -> PlaceError:
    """What a fault means to us.

    `have_some`: are there machines of ours in that region, whose end would give quota back?
    """

    def no(why: str, scope: Scope, *, transient: bool = False) -> PlaceError:
        wait = fault.retry_after_s if transient else None
        return PlaceError(f"{what}: {why}", transient=transient, scope=scope, retry_after_s=wait)

    told = told_by(fault)
    if is_rate_limit(fault) or fault.status in (0, 408):
        return no(told, "place", transient=True)
    if fault.has(*QUOTA_CODES):
        metric = next((each.metric for each in fault.problems if each.metric), "") or _quota_in(told)
        return no(f"{told}; ask for more: {QUOTA_PAGE}", quota_scope(metric), transient=have_some)
    for problem in fault.problems:
        for meaning in MEANINGS:
            if plain_code(problem.code) in meaning.codes:
                words = f"{meaning.told} ({problem.code})" if meaning.told else told
                remedy = f"; {meaning.remedy}" if meaning.remedy else ""
                return no(f"{words}{remedy}", meaning.scope, transient=meaning.transient)
    if fault.status >= 500:
        return no(told, "place", transient=True)
    if fault.status == 401:
        return no(f"{told}; {LOG_IN}", "place")
    if fault.status == 403:
        return no(told, "place")
    if fault.status == 412:
        return no(f"{told}; {MEANINGS[3].remedy}", "place")
    return no(told, "place" if is_about_settings(told) else "offer")


def quota_scope(metric: str) -> Scope:
    """What a quota that is used up is about. Families with a quota of their own leave the others alone."""
    if metric.endswith("_ALL_REGIONS"):
        return "place"
    return "family" if metric.endswith("_CPUS") else "region"


def _quota_in(message: str) -> str:
    found = re.search(r"Quota '(\w+)'", message)
    return found[1] if found else ""


def is_about_settings(message: str) -> bool:
    """Is it about what all machines share (project, network, image), so that no other zone would help?"""
    return (
        re.search(r"'?projects/[^/']+/global/(images|networks|firewalls)|subnetworks/", message) is not None
    )


def told_by(fault: GoogleFault) -> str:
    """In Google's words: the first error, and its code."""
    first = fault.problems[0]
    return f"{first.message.rstrip('.')} ({first.code})" if first.message else first.code


@contextmanager
def as_refusal(what: str) -> Generator[None]:
    """Raise PlaceError, with what it means, where Google's answer raises GoogleFault."""
    try:
        yield
    except GoogleFault as fault:
        raise refusal(fault, what) from fault
