"""A storage account of Azure's, whose containers obstore reaches.

The account's key lets us in where it is known. Else the login does: it needs the roles Storage Blob Data
Contributor and Storage Blob Delegator on the account. Machines get neither, but signed addresses.
"""

from __future__ import annotations

import base64
import contextlib
import re
from collections.abc import AsyncIterable, Awaitable, Callable, Generator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from evalfleet.errors import FleetError, PlaceError, RequestError
from evalfleet.places.vm.answers import Problem
from evalfleet.ports import Bucket, OpenBucket

from .answers import ArmFault

STORAGE_SCOPE = "https://storage.azure.com/.default"
KEY_WRONG = "StorageKeyWrong"
KEY_REFUSED = "KeyBasedAuthenticationNotPermitted"
"""The code by which an account refuses all that is signed with its key."""
PROBE = "evalfleet-probe"
"""The name of a blob that is not there."""
ACCOUNT_KEY = "AZURE_STORAGE_ACCOUNT_KEY"


class BlobAccount(Struct, frozen=True):
    """A storage account, and how it is reached."""

    name: str
    endpoint: str = ""
    """Of its blobs. Empty: that of the public cloud."""
    key: str = ""
    """The account's key, as Azure writes it, in base64. Empty: the login is used."""

    @property
    def url(self) -> str:
        return (self.endpoint or f"https://{self.name}.blob.core.windows.net").rstrip("/")

    def __repr__(self) -> str:
        return f"BlobAccount({self.name!r}, {self.endpoint!r}, ...)"


def blob_account(name: str, environ: Mapping[str, str], endpoint: str = "") -> BlobAccount:
    """Return a storage account by its name, with what the environment says of it. Raises ArmFault."""
    key = environ.get(ACCOUNT_KEY, "")
    try:
        base64.b64decode(key, validate=True)
    except ValueError:
        why = f"storage account {name}: {ACCOUNT_KEY} holds no key in base64"
        raise ArmFault(403, (Problem(KEY_WRONG, why),)) from None
    return BlobAccount(name, endpoint or environ.get("AZURE_STORAGE_ENDPOINT", ""), key)


class BlobStorage:
    """The containers of a storage account. `login` returns a token for STORAGE_SCOPE, or raises ArmFault."""

    def __init__(
        self,
        account: BlobAccount,
        open_bucket: OpenBucket | None,
        login: Callable[[], Awaitable[str]],
        ca: str = "",
    ) -> None:
        self.account, self.by_key = account, bool(account.key)
        self._open_bucket, self._login, self._ca = open_bucket, login, ca

    def bucket(self, container: str, below: str = "") -> Bucket:
        """Return the blobs of a container, or those below a prefix. Its calls raise PlaceError."""
        if self._open_bucket is None:
            raise RequestError("blobs cannot be reached from here: the place was made without buckets")
        environ = {
            "AZURE_STORAGE_ACCOUNT_NAME": self.account.name,
            "AZURE_STORAGE_ENDPOINT": self.account.url,
            **({ACCOUNT_KEY: self.account.key} if self.by_key else {}),
        }
        token = None if self.by_key else self._token
        url = f"az://{container}/{below}".rstrip("/")
        return AccountBucket(self._open_bucket(url, environ, token, self._ca), self)

    async def check(self, container: str) -> None:
        """Read from the container, and sign an address there. An account that takes no keys is asked by the
        login from then on. Raises PlaceError."""
        try:
            await self.bucket(container).read(PROBE, 1)
        except PlaceError as err:
            if not self.by_key or KEY_REFUSED not in str(err):
                raise
            self.by_key = False
            await self.bucket(container).read(PROBE, 1)
        await self.bucket(container).sign("GET", [PROBE], 60.0)

    async def _token(self) -> str:
        try:
            return await self._login()
        except ArmFault as fault:
            refusal = fault.refusal(f"the login to {self.account.name}")
            raise refusal if refusal.transient else RequestError(str(refusal)) from fault

    def refusal(self, err: FleetError) -> PlaceError:
        """Return what an error of obstore's means for a place, with its remedy."""
        what = f"storage account {self.account.name}"
        if not isinstance(err, RequestError):
            return PlaceError(f"{what}: {err}", transient=True, scope="place")
        answer = str(err.__cause__)  # with the XML that Azure has sent
        code, message = (_element(name, answer) for name in ("Code", "Message"))
        if "no such bucket" in str(err):
            code = "ContainerMissing"
        elif self.by_key and code == "AuthenticationFailed":
            code = KEY_WRONG
        elif not self.by_key:
            code = "StorageLoginRefused"
        return ArmFault(403, (Problem(code or "StorageRefused", message.rstrip(".") or str(err)),)).refusal(
            what
        )


def _element(name: str, text: str) -> str:
    found = re.search(f"<{name}>([^<\n]*)", text)
    return found[1] if found else ""


class AccountBucket:
    """Blobs of an account. All calls raise PlaceError."""

    def __init__(self, bucket: Bucket, storage: BlobStorage) -> None:
        self._bucket, self._storage = bucket, storage

    @property
    def url(self) -> str:
        return self._bucket.url

    async def create(self, name: str, content: bytes | Path) -> None:
        with self._explained():
            await self._bucket.create(name, content)

    async def replace(self, name: str, content: bytes | Path | AsyncIterable[bytes]) -> None:
        with self._explained():
            await self._bucket.replace(name, content)

    async def read(self, name: str, most: int | None = None) -> bytes | None:
        with self._explained():
            return await self._bucket.read(name, most)

    async def fetch(self, name: str, path: Path) -> None:
        with self._explained():
            await self._bucket.fetch(name, path)

    async def remove(self, names: Sequence[str]) -> None:
        with self._explained():
            await self._bucket.remove(names)

    async def names(self, below: str, after: str = "") -> list[str]:
        with self._explained():
            return await self._bucket.names(below, after)

    async def folders(self) -> list[str]:
        with self._explained():
            return await self._bucket.folders()

    async def sign(self, method: str, names: Sequence[str], seconds: float) -> list[str]:
        with self._explained():
            return await self._bucket.sign(method, names, seconds)

    @contextlib.contextmanager
    def _explained(self) -> Generator[None]:
        try:
            yield
        except FleetError as err:
            raise self._storage.refusal(err) from err
