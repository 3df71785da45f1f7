"""A workspace with what belongs to it: its region, and its storage account."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from evalfleet.channels.mail.boxes import MailStore
from evalfleet.errors import PlaceError
from evalfleet.model import KeptFiles
from evalfleet.places.azure.arm import ArmClient, ArmEndpoint
from evalfleet.places.azure.blobs import STORAGE_SCOPE, BlobStorage
from evalfleet.places.azure.uploads import FolderUpload
from evalfleet.places.vm.answers import Json, as_refusal
from evalfleet.ports import Bucket, OpenBucket

from .service import MlClient
from .settings import AzureMlSettings, MlAccount

KEPT = "evalfleet"
"""The folder of the datastore that is ours."""


class MlWorkspace:
    """A workspace with its storage, asked for once and when they are needed.

    All raise ArmFault and FleetError.
    """

    def __init__(
        self,
        client: MlClient,
        settings: AzureMlSettings,
        account: MlAccount,
        environ: Mapping[str, str],
        open_bucket: OpenBucket | None,
    ) -> None:
        self.client = client
        # its tokens are for storage
        self._login = ArmClient(ArmEndpoint("", settings.endpoint, STORAGE_SCOPE, account.ca), environ)
        self._settings, self._account = settings, account
        self._open_bucket = open_bucket
        self._storage: BlobStorage | None = None
        self._container = ""
        self._region = settings.region
        self._lock = asyncio.Lock()

    async def region(self) -> str:
        if not self._region:
            self._region = _region_of(await self._found())
        return self._region

    async def check(self) -> None:
        """Ask for it, and for its storage: somebody may have deleted one, or taken our rights away."""
        region, named = _region_of(await self._found()), self._settings.region
        if named and named != region:
            why = f'the workspace is in {region}, not in {named}; set region = "{region}", or leave it out'
            raise PlaceError(why, transient=False, scope="place")
        await (await self.storage()).check(self._container)

    async def _found(self) -> Json:
        shown = await self.client.workspace()
        if shown is None:
            why = (
                f"there is no workspace {self._account.workspace} in the resource group "
                f"{self._account.group}; `az ml workspace list -o table` shows yours"
            )
            raise PlaceError(why, transient=False, scope="place")
        return shown

    async def storage(self) -> BlobStorage:
        """Return the workspace's storage account, with a container for people's files."""
        async with self._lock:
            if self._storage is None:
                account = await self.client.storage(self._settings.storage_endpoint)
                storage = BlobStorage(account, self._open_bucket, self._login.token, self._account.ca)
                self._container = await self.client.datastore()
                await storage.check(self._container)
                self._storage = storage
        return self._storage

    async def folder(self, name: str) -> Bucket:
        """Return the blobs of a folder of ours in the workspace's datastore."""
        storage = await self.storage()
        return storage.bucket(self._container, f"{KEPT}/{name}".rstrip("/"))

    async def mail(self) -> MailStore:
        """Return where mailboxes are. Raises FleetError."""
        with as_refusal("the storage of mailboxes"):
            bucket, storage = await self.folder("mail"), await self.storage()
        return MailStore(bucket, storage.account.key if storage.by_key else "")

    async def keep_files(
        self, files: KeptFiles, lasts_s: float, tell: Callable[[str], None]
    ) -> Mapping[str, str]:
        """Put files into the workspace's own datastore, unless they are there. Returns the address of each,
        by which it can be read for so long. Raises RequestError, too."""
        bucket = await self.folder("")
        await FolderUpload(bucket, files, tell).bring()
        names = sorted(files.paths)
        urls = await bucket.sign("GET", [f"{files.name}/{name}" for name in names], lasts_s)
        return dict(zip(names, urls, strict=True))

    async def close(self) -> None:
        await self._login.close()


def _region_of(workspace: Json) -> str:
    return str(workspace.get("location") or "").replace(" ", "").lower()
