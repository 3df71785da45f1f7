"""The stand-in for Azure as a place of `evalfleet`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from standins.azure import StandIn

PLACE = "azure"
GROUP = "bench"
SIZE, REGION = "Standard_D4ds_v5", "eastus"


def settings(azure: StandIn, endpoint: str) -> dict[str, Any]:
    """Of a place `azure_vm`; everything else is as users have it."""
    return {
        "subscription": azure.subscription,
        "resource_group": GROUP,
        "sizes": [SIZE],
        "regions": [REGION],
        "ssh_from": ["*"],
        "owner": "bench",
        "endpoint": endpoint,
        "ca": str(azure.ca),
    }


def credentials(azure: StandIn, endpoint: str) -> dict[str, str]:
    """A service principal's."""
    return {
        "AZURE_TENANT_ID": azure.tenant,
        "AZURE_CLIENT_ID": azure.client_id,
        "AZURE_CLIENT_SECRET": azure.client_secret,
        "AZURE_AUTHORITY_HOST": endpoint,
    }


def write_place(folder: Path, azure: StandIn, endpoint: str, more: Mapping[str, Any] | None = None) -> None:
    """With its credentials in the file .env, which commands read by themselves."""
    given = {**settings(azure, endpoint), **(more or {})}
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in given.items())
    (folder / "evalfleet.toml").write_text(f'[places.{PLACE}]\nkind = "azure_vm"\n{lines}')
    secrets = credentials(azure, endpoint).items()
    (folder / ".env").write_text("".join(f"{key}={value}\n" for key, value in secrets))
