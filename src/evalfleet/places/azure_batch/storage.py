"""The Batch account as Azure's Resource Manager shows it, and the storage account of its mailboxes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from evalfleet.places.azure.answers import ArmFault
from evalfleet.places.azure.arm import ArmClient, ArmEndpoint
from evalfleet.places.azure.blobs import STORAGE_SCOPE, BlobClient, blob_account
from evalfleet.places.vm.answers import Json, Problem, table

from .settings import AzureBatchSettings, BatchAccount

ACCOUNTS = "2025-06-01"


async def managed_account(
    settings: AzureBatchSettings, account: BatchAccount, environ: Mapping[str, str]
) -> Json | None:
    """None if the subscription has no such account. Raises ArmFault."""
    endpoint = ArmEndpoint(account.subscription, settings.management, ca=account.ca)
    arm = ArmClient(endpoint, environ)
    try:
        shown = await arm.all(f"{arm.root}/providers/Microsoft.Batch/batchAccounts", ACCOUNTS)
    finally:
        await arm.close()
    return next((each for each in shown if str(each.get("name")).lower() == account.name), None)


class MailStorage:
    """The storage account of a place's mailboxes, asked for once and when it is needed."""

    def __init__(
        self,
        settings: AzureBatchSettings,
        account: BatchAccount,
        environ: Mapping[str, str],
        arm: ArmClient,
    ) -> None:
        self._settings, self._account, self._environ, self._arm = settings, account, environ, arm
        endpoint = ArmEndpoint("", settings.endpoint, STORAGE_SCOPE, account.ca)
        self._login = ArmClient(endpoint, environ)
        self._blobs: BlobClient | None = None
        self._lock = asyncio.Lock()

    async def blobs(self) -> BlobClient:
        """Raises ArmFault."""
        async with self._lock:
            if self._blobs is None:
                name = self._settings.storage or await self._own()
                account = blob_account(name, self._environ, self._settings.storage_endpoint)
                self._blobs = BlobClient(account, self._arm.now, self._account.ca, self._login.token)
        return self._blobs

    async def _own(self) -> str:
        """The name of the storage account that the Batch account has by itself."""
        name = self._account.name
        if not self._account.subscription:
            raise _no_storage(f"the storage account of {name} is not known without its subscription")
        shown = await managed_account(self._settings, self._account, self._environ)
        if shown is None:
            raise _no_storage(f"{name} is not in the subscription {self._account.subscription}")
        own = table(table(shown.get("properties")).get("autoStorage")).get("storageAccountId")
        if not own:
            raise _no_storage(f"the Batch account {name} has no storage account of its own")
        return str(own).rpartition("/")[2]

    async def close(self) -> None:
        if self._blobs is not None:
            await self._blobs.close()
        await self._login.close()


def _no_storage(why: str) -> ArmFault:
    return ArmFault(404, (Problem("StorageMissing", why),))
