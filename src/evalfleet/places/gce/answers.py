"""Google's answers: JSON with parts that may be missing, and what its errors mean: does asking again help,
and how much of Compute Engine is the answer about? Pure.

The same error may come as the answer to a call, or later, in the operation that the call began: both become
a GoogleFault.
"""

from __future__ import annotations

import re

from evalfleet.errors import PlaceError, Scope
from evalfleet.places.vm.answers import CloudFault, Json, Problem, meaning_of, means, rows, seconds_in, table


class GoogleFault(CloudFault):
    """An answer of Google's that is a no, or none at all."""

    @property
    def is_rate_limit(self) -> bool:
        """Is it a matter of waiting? By the documentation it is 403, by reports 429: both count."""
        return self.has(*RATE_CODES) or (self.status == 429 and not self.has(*QUOTA_CODES))

    def refusal(self, what: str, *, have_some: bool = False, made: bool = False) -> PlaceError:
        if self.is_rate_limit or self.status in (0, 408):
            return self.refused(what, self.told, "place", transient=True)
        if self.has(*QUOTA_CODES):
            metric = next((each.names for each in self.problems if each.names), "") or _quota_in(self.told)
            why = f"{self.told}; ask for more: {QUOTA_PAGE}"
            return self.refused(what, why, quota_scope(metric), transient=have_some)
        if found := meaning_of(self, MEANINGS):
            meaning, problem = found
            if made and meaning.made_remedy:
                return self.refused(what, f"{self.told}; {meaning.made_remedy}", meaning.scope)
            words = f"{meaning.told} ({problem.code})" if meaning.told else self.told
            remedy = f"; {meaning.remedy}" if meaning.remedy else ""
            return self.refused(what, f"{words}{remedy}", meaning.scope, transient=meaning.transient)
        if self.status >= 500:
            return self.refused(what, self.told, "place", transient=True)
        if self.status == 401:
            return self.refused(what, f"{self.told}; {LOG_IN}", "place")
        if self.status == 403:
            return self.refused(what, self.told, "place")
        if self.status == 412:
            return self.refused(what, f"{self.told}; {POLICY}", "place")
        return self.refused(what, self.told, "place" if is_about_settings(self.told) else "offer")


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
    return GoogleFault(status, tuple(problems), seconds_in(retry_after))


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
POLICY = (
    "an organisation policy forbids it: change the settings, or ask who keeps it (`gcloud resource-manager "
    "org-policies list --project PROJECT`)"
)
RATE_CODES = (
    "rateLimitExceeded",
    "userRateLimitExceeded",
    "CONCURRENT_OPERATIONS_QUOTA_EXCEEDED",
    "RATE_LIMIT_EXCEEDED",
)
QUOTA_CODES = ("QUOTA_EXCEEDED", "quotaExceeded")
MEANINGS = (
    means("NoCredentials authError UNAUTHENTICATED required ACCESS_TOKEN_EXPIRED", "place", LOG_IN),
    means(
        "accessNotConfigured SERVICE_DISABLED",
        "place",
        "switch it on: `gcloud services enable compute.googleapis.com`",
        told="the Compute Engine API is off in this project",
    ),
    means(
        "BILLING_DISABLED", "place", "link a billing account: `gcloud billing projects link PROJECT "
        "--billing-account ID`",
    ),
    means("CONDITION_NOT_MET POLICY_VIOLATION", "place", POLICY),
    means(
        "forbidden IAM_PERMISSION_DENIED PERMISSION_DENIED PERMISSIONS_ERROR",
        "place",
        "ask for the role roles/compute.admin: `gcloud projects add-iam-policy-binding PROJECT --member "
        "user:YOU --role roles/compute.admin`",
    ),
    means(
        "ZONE_RESOURCE_POOL_EXHAUSTED ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS",
        "offer",
        "other zones, regions and machine types are tried",
        told="the zone has no room for it",
        made_remedy="start it again later",
    ),
    means(
        "UNSUPPORTED_OPERATION", "offer", "it was taken back while it was being made; other zones are tried",
        transient=True,
    ),
    means("RESOURCE_NOT_READY", "machine", transient=True),
    means("RESOURCE_IN_USE_BY_ANOTHER_RESOURCE", "machine", transient=True),
    means("INTERNAL_ERROR backendError", "machine", transient=True),
    means("Canceled", "machine", transient=True),
)  # fmt: skip


def quota_scope(metric: str) -> Scope:
    """What a quota that is used up is about. Families with a quota of their own leave the others alone."""
    if metric.endswith("_ALL_REGIONS"):
        return "place"
    if metric.startswith("HDB_"):
        return "offer"  # of disks that other machine types do not have
    return "family" if metric.endswith("_CPUS") else "region"


def _quota_in(message: str) -> str:
    found = re.search(r"Quota '(\w+)'", message)
    return found[1] if found else ""


def is_about_settings(message: str) -> bool:
    """Is it about what all machines share (project, network, image), so that no other zone would help?"""
    return (
        re.search(r"'?projects/[^/']+/global/(images|networks|firewalls)|subnetworks/", message) is not None
    )
