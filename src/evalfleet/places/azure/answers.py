"""Azure's answers: JSON with parts that may be missing, and what its errors mean: does asking again
help, and how much of Azure is the answer about? Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from evalfleet.errors import PlaceError, Scope
from evalfleet.places.vm.answers import (
    CloudFault,
    Json,
    Problem,
    meaning_of,
    means,
    plain_code,
    rows,
    seconds_in,
    table,
)


def tags_in(shown: Json) -> dict[str, str]:
    """The tags of a resource, with names in lower case: Azure ignores their case, and may change it."""
    return {key.lower(): str(value) for key, value in table(shown.get("tags")).items()}


class ArmFault(CloudFault):
    """An answer of Azure's that is a no, or none at all. Of its problems, the innermost comes first."""

    def refusal(self, what: str, *, have_some: bool = False, made: bool = False) -> PlaceError:
        if self.status in (0, 408, 429) or self.status >= 500:
            return self.refused(what, self.told, "place", transient=True)
        if self.status == 401 and "audience" in self.told.lower():
            return self.refused(what, f"{self.told}; {OTHER_SCOPE}", "place")
        if found := meaning_of(self, MEANINGS):
            meaning, problem = found
            if made and meaning.made_remedy:
                return self.refused(what, f"{self.told}; {meaning.made_remedy}", meaning.scope)
            told = f"{meaning.told}{_object(problem.message)} ({problem.code})" if meaning.told else self.told
            transient = meaning.transient or (meaning.frees and have_some)
            return self.refused(what, f"{told}; {meaning.remedy}", meaning.scope, transient=transient)
        if self.status == 401:
            return self.refused(what, f"{self.told}; {LOG_IN}", "place")
        if self.has("RequestDisallowedByPolicy"):
            why = f"denied by the policy {_denied_by(self)}; change the settings, or ask who keeps it"
            return self.refused(what, why, "region")
        if quota := _quota(self):
            scope: Scope = "region" if _is_regional(quota.message) else "family"
            return self.refused(what, f"{self.told}; {QUOTA_PAGE} raises it", scope, transient=have_some)
        if plain_code(self.problems[0].code) in SOON:
            return self.refused(what, self.told, "machine", transient=True)
        return self.refused(what, self.told, "offer")


def fault_of(status: int, body: object, retry_after: str | None = None) -> ArmFault:
    """The fault in an answer, or in the `error` of a deployment."""
    error = table(body)
    problems = tuple(_innermost_first(table(error.get("error", error)))) or (
        Problem("NoDetails", f"the answer was {status}"),
    )
    return ArmFault(status, problems, seconds_in(retry_after))


def _innermost_first(error: Json) -> Iterator[Problem]:
    """Also what deployments hide: below their API version 2022-09-01, details have their errors as text."""
    message = " ".join(_words(error).split())
    if hidden := _opened(message):
        yield from _innermost_first(hidden)
        message = ""
    for each in rows(error.get("details")):
        yield from _innermost_first(each)
    if error.get("code"):
        yield Problem(str(error["code"]), message, _policy(error))


def _words(error: Json) -> str:
    """The message; Batch's has a language, the number of the request below it, and the reason beside it."""
    told: object = error.get("message", "")
    if not isinstance(told, dict):
        return str(told)
    first = str(table(error["message"]).get("value", "")).partition("\n")[0]
    values = {str(each.get("key")): str(each.get("value")) for each in rows(error.get("values"))}
    if detail := values.get("AuthenticationErrorDetail"):
        return detail
    about = [values[key] for key in ("PropertyName", "Reason") if values.get(key)]
    return f"{first.rstrip('.')}: {', '.join(about)}" if about else first


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
LOG_IN = "run `az login`, or set AZURE_CLIENT_ID, AZURE_TENANT_ID and AZURE_CLIENT_SECRET"
OTHER_SCOPE = (
    "the token is for another service: remove `scope` from the place, or set it to the audience that the "
    "service names, followed by /.default"
)

MEANINGS = (
    means(
        "InvalidAuthenticationTokenTenant",
        "place",
        "log in to the directory that the subscription is in: `az login --tenant NAME`, or AZURE_TENANT_ID",
    ),
    means(
        "AuthenticationFailed ExpiredAuthenticationToken InvalidAuthenticationToken NoCredentials "
        "AuthenticationFailedMissingToken AuthenticationFailedInvalidHeader",
        "place",
        LOG_IN,
    ),
    means(
        "AuthorizationFailed LinkedAuthorizationFailed RoleAssignmentMissing LinkedAccessCheckFailed "
        "AuthorizationFailedForManagedIdentity",
        "place",
        "ask for the role Contributor on the resource group",
        told="we may not do that",
    ),
    means(
        "SubscriptionNotFound InvalidSubscriptionId ReadOnlyDisabledSubscription SubscriptionNotRegistered "
        "DisallowedOperation",
        "place",
        "check `subscription`",
    ),
    means("MissingSubscriptionRegistration", "place", "`az provider register --namespace NAME` registers it"),
    means(
        "ScopeLocked",
        "place",
        "`az lock list -g GROUP` shows the lock; whoever set it can remove it (`az lock delete`)",
        told="a lock forbids it",
    ),
    means(
        "RequestDisallowedByAzure",
        "region",
        "Azure does not let this kind of subscription (student, free trial) use that region: name others in "
        "`regions`",
    ),
    means(
        "PoolQuotaReached ActiveJobAndScheduleQuotaReached",
        "place",
        "fewer --workers, or ask for more: the account's page Quotas in the portal",
        frees=True,
    ),
    means(
        "AuthorizationFailure InsufficientAccountPermissions",
        "place",
        "ask for the role `Azure Batch Data Contributor` on the account",
    ),
    means("StorageMissing", "place", "set `storage` to one of yours"),
    means(
        "ContainerMissing",
        "place",
        "make the container: `az storage container create`",
    ),
    means(
        "StorageLoginRefused",
        "place",
        "the login needs the roles Storage Blob Data Contributor and Storage Blob Delegator there",
    ),
    means(
        "StorageKeyWrong",
        "place",
        "correct AZURE_STORAGE_ACCOUNT_KEY (`az storage account keys list`), or unset it and log in",
    ),
    means(
        "StorageKeyMissing KeyBasedAuthenticationNotPermitted",
        "place",
        "set AZURE_STORAGE_ACCOUNT_KEY, or log in with the roles Storage Blob Data Contributor and Storage "
        "Blob Delegator there",
    ),
    means(
        "ClusterCoreQuotaReached ClusterMinNodesExceedCoreQuota SubscriptionCoreQuotaReached",
        "family",
        "ask for more cores for Azure Machine Learning: the studio's page Quota",
        frees=True,
    ),
    means("LocationNotAvailableForResourceType", "region", "name other `regions`"),
    means(
        "DeploymentQuotaExceeded",
        "place",
        "the group has the records of 800 deployments: delete old ones (`az deployment group delete`), or "
        "set another `resource_group`",
    ),
    means("PlatformImageNotFound GalleryImageNotFound ImageNotFound", "place", "check `image`"),
    means("MarketplacePurchaseEligibilityFailed ResourcePurchaseValidationFailed", "place", "check `image`"),
    means(
        "PublicIPCountLimitReached StaticPublicIPCountLimitReached StandardSkuPublicIPCountLimitReached "
        "IPv4StandardSkuPublicIpCountLimitReached PublicIpAddressQuotaExceeded",
        "region",
        f"fewer machines a region, public_ip = false, or more addresses: {QUOTA_PAGE}",
        frees=True,
    ),
    means(
        "AllocationFailed ZonalAllocationFailed OverconstrainedAllocationRequest "
        "OverconstrainedZonalAllocationRequest SkuNotAvailable VMSizeNotSupported",
        "offer",
        "asking again would not help: other sizes, zones and regions are tried",
        told="Azure has no room for it there",
        made_remedy="start it again later",
    ),
)
SOON = frozenset(
    plain_code(code)
    for code in (
        "Conflict",
        "OperationPreempted",
        "AnotherOperationInProgress",
        "ComputeBeingDeleted",
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


def _object(message: str) -> str:
    """What is locked, or which action is not allowed, as Azure's long sentences say; empty for others."""
    if found := re.search(r"locked: '([^']+)'", message):
        return f" on {'/'.join(found[1].split('/')[-2:])}"
    found = re.search(r"perform action '([^']+)'", message)
    return f": {found[1]}" if found else ""


def _denied_by(fault: ArmFault) -> str:
    for each in fault.problems:
        if each.names:
            return repr(each.names)
        if found := re.search(r'policyAssignment":\{"name":"([^"]+)"', each.message):
            return repr(found[1])
    return "named here: " + fault.told


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
