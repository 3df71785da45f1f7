"""Who we are to Azure, and how long we stay logged in: what a token tells, and whether another will be had.

A service principal's secret or certificate, a managed identity and a workload's token file get new tokens by
themselves. `az` renews a person's for as long as the organisation lets the session live: no token tells that.
A federated token that was handed to `az login` (CI) is good for minutes: after it, none can be had.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, cast

from .json import Json, rows, table
from .settings import az_folder

if TYPE_CHECKING:
    from azure.core.credentials_async import AsyncTokenCredential

ADVICE = "set AZURE_TENANT_ID, AZURE_CLIENT_ID and AZURE_CLIENT_SECRET for long runs"
ENTRIES = "service_principal_entries.json"
"""Where `az` keeps service principals, in its folder."""


def credential_of(environ: Mapping[str, str], ca: str, *, own_cloud: bool) -> AsyncTokenCredential:
    """A service principal's, if the environment (.env files too) names one; else whatever there is.

    `own_cloud`: a cloud of somebody's own is not among those that Microsoft's directory of clouds knows.
    """
    from azure.identity.aio import ClientSecretCredential, DefaultAzureCredential

    names = ("AZURE_TENANT_ID", "AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET")
    tenant, client, secret = (environ.get(name, "") for name in names)
    if not (tenant and client and secret):
        return DefaultAzureCredential()
    more: Json = {"authority": environ["AZURE_AUTHORITY_HOST"]} if environ.get("AZURE_AUTHORITY_HOST") else {}
    if ca:
        more["connection_verify"] = ca
    return ClientSecretCredential(tenant, client, secret, disable_instance_discovery=own_cloud, **more)


def claims_of(token: str) -> Json:
    """What a token says of itself; empty if it does not."""
    words = token.split(".")
    if len(words) != 3:
        return {}
    try:
        body = base64.urlsafe_b64decode(words[1] + "=" * (-len(words[1]) % 4))
        return table(json.loads(body))
    except (binascii.Error, ValueError):
        return {}


def is_renewed(environ: Mapping[str, str]) -> bool:
    """Does the environment hold what new tokens can be had with, without `az`?"""
    names = (
        "AZURE_CLIENT_SECRET",
        "AZURE_CLIENT_CERTIFICATE_PATH",
        "AZURE_FEDERATED_TOKEN_FILE",
        "IDENTITY_ENDPOINT",
    )
    return any(environ.get(name) for name in names)


def is_handed_over(claims: Json, entries: str) -> bool:
    """Was `az` given a federated token for this client? `entries`: the text of its file."""
    try:
        known = rows(cast("object", json.loads(entries)))
    except ValueError:
        return False
    client = claims.get("appid", claims.get("azp"))
    return any(each.get("client_id") == client and bool(each.get("client_assertion")) for each in known)


async def login_doubt(
    claims: Callable[[], Awaitable[Json]], environ: Mapping[str, str], now: float, lasts_s: float
) -> str:
    """Why the login may not last for so long; empty if nothing is known against it.

    `claims` asks for a token, and is called only where that tells something. Raises what it raises.
    """
    if is_renewed(environ):
        return ""
    try:
        entries = (Path(az_folder(environ)) / ENTRIES).read_text("utf-8")
    except OSError:
        entries = ""
    token = await claims()
    return doubt(token, now, lasts_s, handed_over=is_handed_over(token, entries))


def doubt(claims: Json, now: float, lasts_s: float, *, handed_over: bool) -> str:
    """What to tell before a run of so many seconds; empty if nothing is known against it."""
    ends = claims.get("exp")
    if not isinstance(ends, int) or ends >= now + lasts_s:
        return ""
    at = datetime.fromtimestamp(ends, UTC).strftime("%Y-%m-%d %H:%M UTC")
    if handed_over:
        return (
            f"the Azure login ends at {at}, before this run may: `az` was given a federated token, which it "
            f"cannot renew; {ADVICE}"
        )
    if claims.get("idtyp") == "user" or "scp" in claims:
        who = str(claims.get("upn") or claims.get("unique_name") or "a person")
        return (
            f"you are logged in to Azure as {who}: the token ends at {at}, before this run may, and is "
            f"renewed only as long as your organisation lets the session live; {ADVICE}"
        )
    return ""
