"""Blobs of a storage account, by its key: containers of ours, what is in them, and tokens for them alone.

The key stays here. Requests have a shared access signature that is made of it, and so has a machine: one for
its own container, which ends with the machine.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import ssl
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote, unquote, urlencode
from xml.etree import ElementTree

from evalfleet.channels.mailbox import STORE_PACE_S
from evalfleet.channels.supervisor.mailbox import OBJECT_CAP
from evalfleet.clock import pauses
from evalfleet.places.vm.answers import Problem, table

from .answers import ArmFault

if TYPE_CHECKING:
    import aiohttp

VERSION = "2022-11-02"
"""Of the service: also the version by which signatures are made."""
ANSWER_S = 30.0
OWN_TOKEN_S = 3600.0
TAGS = "evalfleet"
"""The metadata of a container that holds its tags."""
RETRIES = 4
CREATE = {"If-None-Match": "*"}
PUT = {"x-ms-blob-type": "BlockBlob"}


class BlobKey(NamedTuple):
    """A storage account, with its key."""

    account: str
    key: str
    """As Azure writes it, in base64."""
    endpoint: str
    """Of its blobs, without a slash at the end."""

    def __repr__(self) -> str:
        return f"BlobKey({self.account!r}, ..., {self.endpoint!r})"


def account_token(key: BlobKey, until: float) -> str:
    """A query with all rights on the account's blobs."""
    rights, expiry = "rwdlac", _stamp(until)
    fields = (key.account, rights, "b", "sco", "", expiry, "", "", VERSION, "", "")
    signed = {"sv": VERSION, "ss": "b", "srt": "sco", "sp": rights, "se": expiry}
    return urlencode({**signed, "sig": _signature(key, fields)})


def token(key: BlobKey, rights: str, until: float, container: str, blob: str = "") -> str:
    """A query with these rights (r, c, w, d, l) on one container, or on one blob there."""
    expiry, kind = _stamp(until), "b" if blob else "c"
    resource = f"/blob/{key.account}/{container}" + (f"/{blob}" if blob else "")
    fields = (rights, "", expiry, resource, "", "", "", VERSION, kind, "", "", "", "", "", "", "")
    return urlencode({"sv": VERSION, "sr": kind, "sp": rights, "se": expiry, "sig": _signature(key, fields)})


def _signature(key: BlobKey, fields: Sequence[str]) -> str:
    digest = hmac.new(base64.b64decode(key.key), "\n".join(fields).encode(), "sha256").digest()
    return base64.b64encode(digest).decode()


def _stamp(at: float) -> str:
    return datetime.fromtimestamp(int(at), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class BlobContainer(NamedTuple):
    """A container of ours."""

    name: str
    tags: Mapping[str, str]


class BlobClient:
    """The blobs of one account. All calls raise ArmFault."""

    def __init__(self, key: BlobKey, now: Callable[[], float], ca: str = "") -> None:
        """`now`: by Azure's clock, by which signatures expire. `ca`: authorities to trust, or empty."""
        self.key = key
        self._now, self._ca = now, ca
        self._session: aiohttp.ClientSession | None = None
        self._token, self._token_ends = "", 0.0

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    # -- containers ----------------------------------------------------------------------------

    async def make_container(self, name: str, tags: Mapping[str, str]) -> bool:
        """False if there is one of this name. Raises ArmFault, also while one is being deleted (409)."""
        headers = {f"x-ms-meta-{TAGS}": quote(json.dumps(tags))}
        try:
            await self._ask("PUT", name, {"restype": "container"}, headers=headers)
        except ArmFault as fault:
            if fault.has("ContainerAlreadyExists"):
                return False
            raise
        return True

    async def tags(self, name: str) -> Mapping[str, str] | None:
        """Those of a container; None if there is none."""
        try:
            _, headers = await self._ask("GET", name, {"restype": "container"})
        except ArmFault as fault:
            if fault.status == 404:
                return None
            raise
        return _tags(headers.get(f"x-ms-meta-{TAGS}", ""))

    async def containers(self, prefix: str) -> list[BlobContainer]:
        found: list[BlobContainer] = []
        for page in await self._pages("", {"comp": "list", "prefix": prefix, "include": "metadata"}):
            for each in page.iter("Container"):
                told = each.findtext(f"Metadata/{TAGS}") or ""
                found.append(BlobContainer(each.findtext("Name") or "", _tags(told)))
        return found

    async def delete_container(self, name: str) -> None:
        """With all that is in it. One that is gone, or going, is deleted."""
        try:
            await self._ask("DELETE", name, {"restype": "container"})
        except ArmFault as fault:
            if fault.status != 404 and not fault.has("ContainerBeingDeleted"):
                raise

    # -- blobs ---------------------------------------------------------------------------------

    async def names(self, container: str, below: str = "", *, whole: bool = True) -> list[str]:
        """Names of blobs that begin so; without `whole`, only those in the same folder."""
        query = {"restype": "container", "comp": "list", "prefix": below}
        if not whole:
            query["delimiter"] = "/"
        pages = await self._pages(container, query)
        return [each.findtext("Name") or "" for page in pages for each in page.iter("Blob")]

    async def read(self, container: str, name: str, most: int = OBJECT_CAP + 1) -> bytes | None:
        """None if there is none; no more than the first so many bytes."""
        try:
            return (await self._ask("GET", f"{container}/{name}", {}, most=most))[0]
        except ArmFault as fault:
            if fault.status == 404:
                return None
            raise

    async def write(self, container: str, name: str, content: bytes) -> None:
        await self._ask("PUT", f"{container}/{name}", {}, content, PUT)

    async def create(self, container: str, name: str, content: bytes) -> bool:
        """False if there is one of this name: nothing was written."""
        try:
            await self._ask("PUT", f"{container}/{name}", {}, content, {**PUT, **CREATE})
        except ArmFault as fault:
            if fault.has("BlobAlreadyExists", "UnauthorizedBlobOverwrite") or fault.status == 412:
                return False
            raise
        return True

    async def remove(self, container: str, name: str) -> None:
        try:
            await self._ask("DELETE", f"{container}/{name}", {})
        except ArmFault as fault:
            if fault.status != 404:
                raise

    # -- requests ------------------------------------------------------------------------------

    async def _pages(self, path: str, query: Mapping[str, str]) -> list[ElementTree.Element]:
        found: list[ElementTree.Element] = []
        marker = ""
        while True:
            body, _ = await self._ask("GET", path, {**query, **({"marker": marker} if marker else {})})
            try:
                found.append(ElementTree.fromstring(body.decode("utf-8-sig")))
            except (ElementTree.ParseError, UnicodeDecodeError) as err:
                raise ArmFault(0, (Problem("NoAnswer", "the storage answered no XML"),)) from err
            marker = found[-1].findtext("NextMarker") or ""
            if not marker:
                return found

    async def _ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        most: int = 1 << 30,
    ) -> tuple[bytes, Mapping[str, str]]:
        """429 and 5xx, and no answer, are asked again a few times."""
        rests = pauses(0.3, 5.0)
        for left in reversed(range(RETRIES)):
            try:
                return await self._ask_once(method, path, query, content, headers or {}, most)
            except ArmFault as fault:
                if left == 0 or (fault.status != 429 and 0 < fault.status < 500):
                    raise
                await asyncio.sleep(fault.retry_after_s or next(rests))
        raise AssertionError("the last try has raised")

    async def _ask_once(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        content: bytes | None,
        headers: Mapping[str, str],
        most: int,
    ) -> tuple[bytes, Mapping[str, str]]:
        import aiohttp
        from yarl import URL

        url = f"{self.key.endpoint}/{quote(path)}?{urlencode(query)}{'&' if query else ''}{self._own_token()}"
        try:
            session = self._open()
            async with session.request(
                method, URL(url, encoded=True), data=content, headers={"x-ms-version": VERSION, **headers}
            ) as response:
                body = await response.content.read(most) if most < 1 << 30 else await response.read()
                if response.status >= 400:
                    raise _fault(response.status, response.headers.get("x-ms-error-code", ""), body)
                return body, response.headers
        except (aiohttp.ClientError, OSError, TimeoutError) as err:
            why = f"the storage account {self.key.account} does not answer ({type(err).__name__})"
            raise ArmFault(0, (Problem("NoAnswer", why),)) from None  # no URL: it has a signature

    def _open(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None:
            trusted = ssl.create_default_context(cafile=self._ca or None)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=trusted),
                timeout=aiohttp.ClientTimeout(ANSWER_S),
                trust_env=True,
            )
        return self._session

    def _own_token(self) -> str:
        now = self._now()
        if now > self._token_ends - OWN_TOKEN_S / 2:
            self._token_ends = now + OWN_TOKEN_S
            self._token = account_token(self.key, self._token_ends)
        return self._token


class BlobMail:
    """A mailbox in a container of its own."""

    def __init__(self, blobs: BlobClient, container: str, pace_s: tuple[float, float] = STORE_PACE_S) -> None:
        self.pace_s = pace_s
        self._blobs, self._container = blobs, container

    async def create(self, name: str, content: bytes) -> bool:
        try:
            return await self._blobs.create(self._container, name, content)
        except ArmFault as fault:
            raise OSError(str(fault)) from fault

    async def read(self, name: str) -> bytes | None:
        try:
            return await self._blobs.read(self._container, name)
        except ArmFault as fault:
            raise OSError(str(fault)) from fault

    async def names(self, below: str) -> list[str]:
        try:
            return await self._blobs.names(self._container, f"{below}/")
        except ArmFault as fault:
            raise OSError(str(fault)) from fault

    async def remove(self, names: Sequence[str]) -> None:
        try:
            for name in names:
                await self._blobs.remove(self._container, name)
        except ArmFault as fault:
            raise OSError(str(fault)) from fault


def way_to(key: BlobKey, container: str, until: float) -> dict[str, object]:
    """How a machine reaches its mailbox, as `supervisor.mailbox.HttpPost` reads it."""
    return {
        "url": f"{key.endpoint}/{container}",
        "query": token(key, "rc", until, container),
        "headers": {"x-ms-version": VERSION, **PUT},
    }


def _tags(told: str) -> Mapping[str, str]:
    try:
        tags = table(json.loads(unquote(told))) if told else {}
    except ValueError:
        return {}
    return {str(name): str(value) for name, value in tags.items()}


def _fault(status: int, code: str, body: bytes) -> ArmFault:
    message = ""
    try:
        found = ElementTree.fromstring(body.decode("utf-8-sig"))
        code, message = code or found.findtext("Code") or "", found.findtext("Message") or ""
    except (ElementTree.ParseError, UnicodeDecodeError):
        pass
    return ArmFault(status, (Problem(code or f"HTTP{status}", message.partition("\n")[0]),))
