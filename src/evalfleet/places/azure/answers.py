"""Azure's answers: JSON with parts that may be missing, and what its errors mean: does asking again
help, and how much of Azure is the answer about? Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator
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


def tags_in(shown: Json) -> dict[str, str]:
    """The tags of a resource, with names in lower case: Azure ignores their case, and may change it."""
    return {key.lower(): str(value) for key, value in table(shown.get("tags")).items()}


class Problem(Struct, frozen=True):
    """One error in Azure's words."""

    code: str
    message: str
    policy: str = ""
    """The name of the policy that denied it, if one did."""


class ArmFault(Exception):
    """An answer of Azure's that is a no, or none at all."""

    def __init__(
        self, status: int, problems: tuple[Problem, ...], retry_after_s: float | None = None
    ) -> None:
        super().__init__("; ".join(f"{each.code}: {each.message}" for each in problems[:1]))
        self.status = status
        """Of HTTP; 0 if there was no answer."""
        self.problems = problems
        """The innermost first."""
        self.retry_after_s = retry_after_s

    def has(self, *codes: str) -> bool:
        wanted = {code.lower() for code in codes}
        return any(each.code.lower() in wanted for each in self.problems)


def fault_of(status: int, body: object, retry_after: str | None = None) -> ArmFault:
    """The fault in an answer, or in the `error` of a deployment."""
    error = table(body)
    problems = tuple(_innermost_first(table(error.get("error", error)))) or (
        Problem("NoDetails", f"the answer was {status}"),
    )
    wait = float(retry_after) if retry_after and re.fullmatch(r"\d+(\.\d+)?", retry_after) else None
    return ArmFault(status, problems, wait)


def _innermost_first(error: Json) -> Iterator[Problem]:
    """Also what deployments hide: below their API version 2022-09-01, details have their errors as text."""
    message = " ".join(str(error.get("message", "")).split())
    if hidden := _opened(message):
        yield from _innermost_first(hidden)
        message = ""
    for each in rows(error.get("details")):
        yield from _innermost_first(each)
    if error.get("code"):
        yield Problem(str(error["code"]), message, _policy(error))


def _opened(message: str) -> Json:
    """The error in a message that is JSON; nothing if it is none."""
    if not message.startswith("{"):
        return {}
    try:
        body = table(json.loads(message))
    except ValueError:
        return {}
    error = table(body.get("error")) or body
    return error if error.get("code") or error.get("details") else {}


def _policy(error: Json) -> str:
    for each in rows(error.get("additionalInfo")):
        info = table(each.get("info"))
        if each.get("type") == "PolicyViolation":
            return str(info.get("policyAssignmentDisplayName") or info.get("policyAssignmentName") or "")
    return ""


# -- what they mean ------------------------------------------------------------------------------

QUOTA_PAGE = "https://portal.azure.com/#view/Microsoft_Azure_Capacity/QuotaMenuBlade/~/myQuotas"


class Meaning(Struct, frozen=True):
    """What some of Azure's codes mean to us."""

    codes: frozenset[str]
    """In lower case."""
    scope: Scope
    """How much of Azure the answer is about."""
    remedy: str = ""
    """What the user can do about it."""
    transient: bool = False
    """Does asking again help?"""
    frees: bool = False
    """Does the end of a machine of ours there help?"""
    told: str = ""
    """In place of Azure's words, where those mislead."""


def _mean(codes: str, scope: Scope, remedy: str = "", **more: Any) -> Meaning:
    return Meaning(frozenset(codes.lower().split()), scope, remedy, **more)


MEANINGS = (
    _mean(
        "InvalidAuthenticationTokenTenant",
        "place",
        "log in to the directory that the subscription is in: `az login --tenant NAME`, or AZURE_TENANT_ID",
    ),
    _mean(
        "AuthenticationFailed ExpiredAuthenticationToken InvalidAuthenticationToken NoCredentials "
        "AuthenticationFailedMissingToken AuthenticationFailedInvalidHeader",
        "place",
        "run `az login`, or set AZURE_CLIENT_ID, AZURE_TENANT_ID and AZURE_CLIENT_SECRET",
    ),
    _mean(
        "AuthorizationFailed LinkedAuthorizationFailed RoleAssignmentMissing LinkedAccessCheckFailed "
        "AuthorizationFailedForManagedIdentity",
        "place",
        "ask for the role Contributor on the resource group",
        told="we may not do that",
    ),
    _mean(
        "SubscriptionNotFound InvalidSubscriptionId ReadOnlyDisabledSubscription SubscriptionNotRegistered "
        "DisallowedOperation",
        "place",
        "check `subscription`",
    ),
    _mean("MissingSubscriptionRegistration", "place", "`az provider register --namespace NAME` registers it"),
    _mean(
        "ScopeLocked",
        "place",
        "`az lock list -g GROUP` shows the lock; whoever set it can remove it (`az lock delete`)",
        told="a lock forbids it",
    ),
    _mean(
        "RequestDisallowedByAzure",
        "region",
        "Azure does not let this kind of subscription (student, free trial) use that region: name others in "
        "`regions`",
    ),
    _mean("LocationNotAvailableForResourceType", "region", "name other `regions`"),
    _mean(
        "DeploymentQuotaExceeded",
        "place",
        "the group has the records of 800 deployments: delete old ones (`az deployment group delete`), or "
        "set another `resource_group`",
    ),
    _mean("PlatformImageNotFound GalleryImageNotFound ImageNotFound", "place", "check `image`"),
    _mean("MarketplacePurchaseEligibilityFailed ResourcePurchaseValidationFailed", "place", "check `image`"),
    _mean(
        "PublicIPCountLimitReached StaticPublicIPCountLimitReached StandardSkuPublicIPCountLimitReached "
        "IPv4StandardSkuPublicIpCountLimitReached PublicIpAddressQuotaExceeded",
        "region",
        f"fewer machines a region, public_ip = false, or more addresses: {QUOTA_PAGE}",
        frees=True,
    ),
    _mean(
        "AllocationFailed ZonalAllocationFailed OverconstrainedAllocationRequest "
        "OverconstrainedZonalAllocationRequest SkuNotAvailable VMSizeNotSupported",
        "offer",
        "asking again would not help: other sizes, zones and regions are tried",
        told="Azure has no room for it there",
    ),
)
SOON = frozenset(
    code.lower()
    for code in (
        "Conflict",
        "OperationPreempted",
        "AnotherOperationInProgress",
        "RetryableError",
        "DeploymentActive",
        "DeploymentNotFound",
        "ResourceGroupBeingDeleted",
        "OSProvisioningTimedOut",
        "InternalExecutionError",
        "InUseNetworkSecurityGroupCannotBeDeleted",
        "Canceled",
        "ReferencedResourceNotProvisioned",
        "InternalServerError",
        "InternalOperationError",
        "NetworkingInternalOperationError",
        "ServerError",
        "ServiceUnavailable",
        "TooManyRequests",
        "RequestTimeout",
        "GatewayTimeout",
    )
)
"""Codes by which asking again soon helps, if no other error is hidden below them."""


def refusal(fault: ArmFault, what: str, *, have_some: bool = False) -> PlaceError:
    """What a fault means to us.

    `have_some`: are there machines of ours in that region, whose end would give quota back?
    """

    def no(why: str, scope: Scope, *, transient: bool = False) -> PlaceError:
        wait = fault.retry_after_s if transient else None
        return PlaceError(f"{what}: {why}", transient=transient, scope=scope, retry_after_s=wait)

    told = told_by(fault)
    if fault.status in (0, 408, 429) or fault.status >= 500:
        return no(told, "place", transient=True)
    if found := _meaning(fault):
        meaning, problem = found
        if meaning.told:
            told = f"{meaning.told}{_object(problem.message)} ({problem.code})"
        transient = meaning.transient or (meaning.frees and have_some)
        return no(f"{told}; {meaning.remedy}", meaning.scope, transient=transient)
    if fault.status == 401:
        return no(f"{told}; {MEANINGS[1].remedy}", "place")
    if fault.has("RequestDisallowedByPolicy"):
        return no(
            f"denied by the policy {_denied_by(fault)}; change the settings, or ask who keeps it", "region"
        )
    if quota := _quota(fault):
        scope: Scope = "region" if _is_regional(quota.message) else "family"
        return no(f"{told}; {QUOTA_PAGE} raises it", scope, transient=have_some)
    if fault.problems[0].code.lower() in SOON:
        return no(told, "machine", transient=True)
    return no(told, "offer")


def _meaning(fault: ArmFault) -> tuple[Meaning, Problem] | None:
    """Of the innermost problem that has one."""
    for problem in fault.problems:
        for meaning in MEANINGS:
            if problem.code.lower() in meaning.codes:
                return meaning, problem
    return None


@contextmanager
def as_refusal(what: str) -> Generator[None]:
    """Raise PlaceError, with what it means, where Azure raises ArmFault."""
    try:
        yield
    except ArmFault as fault:
        raise refusal(fault, what) from fault


def _object(message: str) -> str:
    """What is locked, or which action is not allowed, as Azure's long sentences say; empty for others."""
    if found := re.search(r"locked: '([^']+)'", message):
        return f" on {'/'.join(found[1].split('/')[-2:])}"
    found = re.search(r"perform action '([^']+)'", message)
    return f": {found[1]}" if found else ""


def told_by(fault: ArmFault) -> str:
    """In Azure's words: the innermost error, and its code."""
    first = fault.problems[0]
    return f"{first.message.rstrip('.')} ({first.code})" if first.message else first.code


def _denied_by(fault: ArmFault) -> str:
    for each in fault.problems:
        if each.policy:
            return repr(each.policy)
        if found := re.search(r'policyAssignment":\{"name":"([^"]+)"', each.message):
            return repr(found[1])
    return "named here: " + told_by(fault)


def _quota(fault: ArmFault) -> Problem | None:
    for each in fault.problems:
        if each.code in ("QuotaExceeded", "ResourceQuotaExceeded") or (
            each.code == "OperationNotAllowed" and "quota" in each.message.lower()
        ):
            return each
    return None


def _is_regional(message: str) -> bool:
    """Else it is a family's, or that of all spot machines."""
    return re.search(r"Regional|public IP|Disk", message, re.IGNORECASE) is not None
