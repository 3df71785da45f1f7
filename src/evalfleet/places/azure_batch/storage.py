"""The Batch account as Azure's Resource Manager shows it, and the storage account of its mailboxes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from evalfleet.channels.mail.boxes import MailStore
from evalfleet.places.azure.answers import ArmFault
from evalfleet.places.azure.arm import ArmClient, ArmEndpoint
from evalfleet.places.azure.blobs import STORAGE_SCOPE, BlobStorage, blob_account
from evalfleet.places.vm.answers import Json, Problem, as_refusal, table
from evalfleet.ports import OpenBucket

from .settings import AzureBatchSettings, BatchAccount

ACCOUNTS = "2025-06-01"
CONTAINER = "evalfleet"
"""The container of mailboxes, which its owner has made."""


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
        open_bucket: OpenBucket | None,
    ) -> None:
        self._settings, self._account, self._environ = settings, account, environ
        self._open_bucket = open_bucket
        endpoint = ArmEndpoint("", settings.endpoint, STORAGE_SCOPE, account.ca)
        self._login = ArmClient(endpoint, environ)
        self._store: MailStore | None = None
        self._lock = asyncio.Lock()

    async def opened(self) -> MailStore:
        """Raises FleetError."""
        async with self._lock:
            if self._store is None:
                with as_refusal("the storage of mailboxes"):
                    name = self._settings.storage or await self._own()
                    account = blob_account(name, self._environ, self._settings.storage_endpoint)
                storage = BlobStorage(account, self._open_bucket, self._login.token, self._account.ca)
                await storage.check(CONTAINER)
                secret = account.key if storage.by_key else ""
                self._store = MailStore(storage.bucket(CONTAINER, "batch"), secret)
        return self._store

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
        await self._login.close()


def _no_storage(why: str) -> ArmFault:
    return ArmFault(404, (Problem("StorageMissing", why),))
