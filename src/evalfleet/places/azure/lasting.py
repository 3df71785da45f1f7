"""How long we stay logged in: what a token tells of itself, and whether another one will be had. Pure.

A service principal's secret or certificate, a managed identity and a workload's token file get new tokens by
themselves. `az` renews a person's for as long as the organisation lets the session live: no token tells that.
A federated token that was handed to `az login` (CI) is good for minutes: after it, none can be had.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import cast

from .words import Json, rows, table

ADVICE = "set AZURE_TENANT_ID, AZURE_CLIENT_ID and AZURE_CLIENT_SECRET for long runs"
ENTRIES = "service_principal_entries.json"
"""Where `az` keeps service principals, in its folder."""


def claims_of(token: str) -> Json:
    """Empty if the token does not say anything."""
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
