"""A workspace with what belongs to it: its region, and its storage account."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from evalfleet.errors import PlaceError
from evalfleet.model import KeptFiles
from evalfleet.places.azure.arm import ArmClient, ArmEndpoint
from evalfleet.places.azure.blobs import STORAGE_SCOPE, BlobClient
from evalfleet.places.azure.uploads import FolderUpload
from evalfleet.places.vm.answers import Json

from .service import MlClient
from .settings import AzureMlSettings, MlAccount

KEPT = "evalfleet"
"""The folder of the datastore that is ours."""


class MlWorkspace:
    """A workspace with its storage, asked for once and when they are needed.

    All raise ArmFault; PlaceError where there is no such workspace.
    """

    def __init__(
        self, client: MlClient, settings: AzureMlSettings, account: MlAccount, environ: Mapping[str, str]
    ) -> None:
        self.client = client
        # its tokens are for storage
        self._login = ArmClient(ArmEndpoint("", settings.endpoint, STORAGE_SCOPE, account.ca), environ)
        self._settings, self._account = settings, account
        self._blobs: BlobClient | None = None
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
        await (await self.blobs()).containers(KEPT)

    async def _found(self) -> Json:
        shown = await self.client.workspace()
        if shown is None:
            why = (
                f"there is no workspace {self._account.workspace} in the resource group "
                f"{self._account.group}; `az ml workspace list -o table` shows yours"
            )
            raise PlaceError(why, transient=False, scope="place")
        return shown

    async def blobs(self) -> BlobClient:
        async with self._lock:
            if self._blobs is None:
                account = await self.client.storage(self._settings.storage_endpoint)
                self._blobs = BlobClient(account, self.client.arm.now, self._account.ca, self._login.token)
        return self._blobs

    async def keep_files(
        self, files: KeptFiles, lasts_s: float, tell: Callable[[str], None]
    ) -> tuple[str, str]:
        """Put files into the workspace's own datastore, unless they are there. Returns their address, and a
        token to read what is in the datastore, whose names one must know. Raises RequestError, too."""
        blobs, container = await self.blobs(), await self.client.datastore()
        upload = FolderUpload(blobs, container, KEPT, files, tell)
        await upload.bring()
        token = await blobs.token("r", self.client.arm.now() + lasts_s, container)
        return f"{blobs.account.url}/{container}/{upload.folder}", token

    async def close(self) -> None:
        if self._blobs is not None:
            await self._blobs.close()
        await self._login.close()


def _region_of(workspace: Json) -> str:
    return str(workspace.get("location") or "").replace(" ", "").lower()
