"""Blobs of a storage account: containers of ours, what is in them, and tokens for them alone.

Requests and tokens are signed with the account's key where it is known. Else they are the login's: it asks
with its own token, and signs with a key that Azure lends it, for seven days at most. That login needs the
roles Storage Blob Data Contributor and Storage Blob Delegator on the account. Neither key leaves this
process: a machine has a token for its own container, which ends with the machine.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import json
import ssl
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote, unquote, urlencode
from xml.etree import ElementTree

from msgspec import Struct

from evalfleet.channels.mailbox import STORE_PACE_S, Mail
from evalfleet.channels.supervisor.mailbox import OBJECT_CAP
from evalfleet.clock import pauses
from evalfleet.places.vm.answers import GOODBYE_S, Problem, table

from .answers import ArmFault
from .names import stamp

if TYPE_CHECKING:
    import aiohttp

VERSION = "2021-12-02"
"""Of the service: also the version by which signatures are made."""
STORAGE_SCOPE = "https://storage.azure.com/.default"
ANSWER_S = 30.0
OWN_TOKEN_S = 3600.0
LENT_S = 7 * 86400.0
"""So long a key that Azure lends is good, and what is signed with it."""
RENEW_S = 86400.0
EARLY_S = 900.0
"""Clocks differ: what begins to be good has begun this long ago."""
BLOCK_S = 300.0
"""A block of a large blob may take so long."""
DIGEST = "sha256"
"""The metadata of a large blob that tells what is in it."""
TAGS = "evalfleet"
"""The metadata of a container that holds its tags."""
RETRIES = 4
REMOVE_AT_ONCE = 8
CREATE = {"If-None-Match": "*"}
PUT = {"x-ms-blob-type": "BlockBlob"}
KEY_WRONG = "StorageKeyWrong"
LOGIN_REFUSED = ("AuthorizationPermissionMismatch", "AuthorizationFailure", "NoAuthenticationInformation")
KEY_REFUSED = "KeyBasedAuthenticationNotPermitted"
"""The code by which an account refuses all that is signed with its key."""


class BlobAccount(Struct, frozen=True):
    """A storage account, and how it is reached."""

    name: str
    endpoint: str = ""
    """Of its blobs; empty: that of the public cloud."""
    key: str = ""
    """The account's key, as Azure writes it, in base64; empty: it is asked by the login."""

    @property
    def url(self) -> str:
        return (self.endpoint or f"https://{self.name}.blob.core.windows.net").rstrip("/")

    def __repr__(self) -> str:
        return f"BlobAccount({self.name!r}, {self.endpoint!r}, ...)"


def blob_account(name: str, environ: Mapping[str, str], endpoint: str = "") -> BlobAccount:
    """A storage account by its name, with what the environment says of it. Raises ArmFault."""
    told = {what: environ.get(f"AZURE_STORAGE_{what}", "") for what in ("ENDPOINT", "ACCOUNT_KEY")}
    try:
        base64.b64decode(told["ACCOUNT_KEY"], validate=True)
    except ValueError:
        why = f"storage account {name}: what AZURE_STORAGE_ACCOUNT_KEY holds is no key"
        raise ArmFault(403, (Problem(KEY_WRONG, why),)) from None
    return BlobAccount(name, endpoint or told["ENDPOINT"], told["ACCOUNT_KEY"])


class LentKey(Struct, frozen=True):
    """A key by which who is logged in may sign."""

    object_id: str
    tenant: str
    start: str
    expiry: str
    service: str
    version: str
    value: str


def account_token(account: BlobAccount, until: float) -> str:
    """A query with all rights on the account's blobs."""
    rights, expiry = "rwdlac", stamp(until)
    fields = (account.name, rights, "b", "sco", "", expiry, "", "", VERSION, "", "")
    signed = {"sv": VERSION, "ss": "b", "srt": "sco", "sp": rights, "se": expiry}
    return urlencode({**signed, "sig": _signature(account.key, fields)})


def signature(
    account: BlobAccount,
    rights: str,
    until: float,
    container: str,
    blob: str = "",
    lent: LentKey | None = None,
) -> str:
    """A query with these rights (r, c, w, d, l) on one container, or on one blob there."""
    expiry, kind = stamp(until), "b" if blob else "c"
    resource = f"/blob/{account.name}/{container}" + (f"/{blob}" if blob else "")
    signed = {"sp": rights, "se": expiry, "sv": VERSION, "sr": kind}
    if lent is None:
        fields = (rights, "", expiry, resource, "", "", "", VERSION, kind, *[""] * 7)
        return urlencode({**signed, "sig": _signature(account.key, fields)})
    about = (lent.object_id, lent.tenant, lent.start, lent.expiry, lent.service, lent.version)
    fields = (rights, "", expiry, resource, *about, *[""] * 5, VERSION, kind, *[""] * 7)
    signed |= dict(zip(("skoid", "sktid", "skt", "ske", "sks", "skv"), about, strict=True))
    return urlencode({**signed, "sig": _signature(lent.value, fields)})


def _signature(key: str, fields: Sequence[str]) -> str:
    digest = hmac.new(base64.b64decode(key), "\n".join(fields).encode(), "sha256").digest()
    return base64.b64encode(digest).decode()


class BlobContainer(NamedTuple):
    """A container of ours."""

    name: str
    tags: Mapping[str, str]


class BlobClient:
    """The blobs of one account. All calls raise ArmFault."""

    def __init__(
        self,
        account: BlobAccount,
        now: Callable[[], float],
        ca: str = "",
        login: Callable[[], Awaitable[str]] | None = None,
    ) -> None:
        """`now`: by Azure's clock, by which signatures expire. `ca`: authorities to trust, or empty. `login`
        gives its token, for STORAGE_SCOPE."""
        self.account = account
        self._now, self._ca, self._login = now, ca, login
        self._session: aiohttp.ClientSession | None = None
        self._goodbye_s = 0.0
        self._by_key = bool(account.key)
        self._token, self._token_ends = "", 0.0
        self._lent: LentKey | None = None
        self._lent_at = 0.0

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
        await asyncio.sleep(self._goodbye_s)

    # -- containers ----------------------------------------------------------------------------

    async def make_container(self, name: str, tags: Mapping[str, str]) -> bool:
        """False if there is one of this name. Raises ArmFault, also while one is being deleted (409)."""
        try:
            await self._ask("PUT", name, {"restype": "container"}, headers=_with(tags))
        except ArmFault as fault:
            if fault.has("ContainerAlreadyExists"):
                return False
            raise
        return True

    async def set_tags(self, name: str, tags: Mapping[str, str]) -> None:
        """Replace those of a container."""
        await self._ask("PUT", name, {"restype": "container", "comp": "metadata"}, headers=_with(tags))

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

    # a large blob, block by block: nobody sees it before it is put together

    async def digest(self, container: str, name: str) -> str | None:
        """That which a large blob was put together with; None if there is none."""
        try:
            _, headers = await self._ask("HEAD", f"{container}/{name}", {})
        except ArmFault as fault:
            if fault.status == 404:
                return None
            raise
        return headers.get(f"x-ms-meta-{DIGEST}") or None

    async def blocks(self, container: str, name: str) -> set[str]:
        """The ids of those that were sent for a blob and not put together yet. Azure keeps them a week."""
        try:
            query = {"comp": "blocklist", "blocklisttype": "uncommitted"}
            body, _ = await self._ask("GET", f"{container}/{name}", query)
        except ArmFault as fault:
            if fault.status == 404:
                return set()
            raise
        found = _parsed(body).findall("UncommittedBlocks/Block/Name")
        return {each.text or "" for each in found}

    async def put_block(self, container: str, name: str, block: str, content: bytes) -> None:
        query = {"comp": "block", "blockid": block}
        await self._ask("PUT", f"{container}/{name}", query, content, answer_s=BLOCK_S)

    async def put_together(self, container: str, name: str, blocks: Sequence[str], digest: str) -> None:
        listed = "".join(f"<Latest>{block}</Latest>" for block in blocks)
        body = f'<?xml version="1.0" encoding="utf-8"?><BlockList>{listed}</BlockList>'
        headers = {f"x-ms-meta-{DIGEST}": digest}
        await self._ask("PUT", f"{container}/{name}", {"comp": "blocklist"}, body.encode(), headers)

    async def remove(self, container: str, name: str) -> None:
        try:
            await self._ask("DELETE", f"{container}/{name}", {})
        except ArmFault as fault:
            if fault.status != 404:
                raise

    # -- tokens --------------------------------------------------------------------------------

    @property
    def by_key(self) -> bool:
        """Is it the account's key that lets us in?"""
        return self._by_key

    @property
    def longest_s(self) -> float | None:
        """For how long tokens can be had at most; None: for as long as one likes."""
        return None if self._by_key else LENT_S - RENEW_S

    async def token(self, rights: str, until: float, container: str, blob: str = "") -> str:
        """A query with these rights (r, c, w, d, l) on one container, or on one blob there."""
        lent = None if self._by_key else await self._borrowed_key()
        return signature(self.account, rights, until, container, blob, lent)

    async def _borrowed_key(self) -> LentKey:
        now = self._now()
        if self._lent is None or now - self._lent_at > RENEW_S / 2:
            ends = stamp(now + LENT_S - 2 * EARLY_S)
            body = f"<KeyInfo><Start>{stamp(now - EARLY_S)}</Start><Expiry>{ends}</Expiry></KeyInfo>"
            query = {"restype": "service", "comp": "userdelegationkey"}
            tree = _parsed((await self._ask("POST", "", query, body.encode()))[0])
            names = ("Oid", "Tid", "Start", "Expiry", "Service", "Version")
            told = [tree.findtext(name) or "" for name in (*(f"Signed{name}" for name in names), "Value")]
            self._lent, self._lent_at = LentKey(*told), now
        return self._lent

    # -- requests ------------------------------------------------------------------------------

    async def _pages(self, path: str, query: Mapping[str, str]) -> list[ElementTree.Element]:
        found: list[ElementTree.Element] = []
        marker = ""
        while True:
            body, _ = await self._ask("GET", path, {**query, **({"marker": marker} if marker else {})})
            found.append(_parsed(body))
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
        answer_s: float = ANSWER_S,
    ) -> tuple[bytes, Mapping[str, str]]:
        """429 and 5xx, and no answer, are asked again a few times; and once by the login, where the account's
        key lets nobody in."""
        rests = pauses(0.3, 5.0)
        for left in reversed(range(RETRIES)):
            try:
                return await self._ask_once(method, path, query, content, headers or {}, most, answer_s)
            except ArmFault as fault:
                if self._by_key and self._login is not None and fault.has(KEY_REFUSED) and left:
                    self._by_key = False
                    continue
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
        answer_s: float,
    ) -> tuple[bytes, Mapping[str, str]]:
        import aiohttp
        from yarl import URL

        own, told = self._own_token(), {"x-ms-version": VERSION, **headers}
        if not own:
            told["Authorization"] = await self._bearer()
        asked = "&".join(filter(None, (urlencode(query), own)))
        url = f"{self.account.url}/{quote(path)}?{asked}"
        try:
            session = self._open()
            target, limit = URL(url, encoded=True), aiohttp.ClientTimeout(answer_s)
            async with session.request(method, target, data=content, headers=told, timeout=limit) as response:
                body = await _first(response, most)
                if response.status >= 400:
                    raise self._fault(response.status, response.headers.get("x-ms-error-code", ""), body)
                return body, response.headers
        except asyncio.CancelledError:
            self._goodbye_s = GOODBYE_S
            raise
        except (aiohttp.ClientError, OSError, TimeoutError) as err:
            why = f"the storage account {self.account.name} does not answer ({type(err).__name__})"
            raise ArmFault(0, (Problem("NoAnswer", why),)) from None  # no URL: it has a signature

    def _open(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None:
            trusted = ssl.create_default_context(cafile=self._ca or None)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=trusted),
                trust_env=True,
            )
        return self._session

    def _own_token(self) -> str:
        """Empty if it is the login that asks."""
        if not self._by_key:
            return ""
        now = self._now()
        if now > self._token_ends - OWN_TOKEN_S / 2:
            self._token_ends = now + OWN_TOKEN_S
            self._token = account_token(self.account, self._token_ends)
        return self._token

    async def _bearer(self) -> str:
        if self._login is None:
            why = f"no key of the storage account {self.account.name} is known"
            raise ArmFault(403, (Problem("StorageKeyMissing", why),))
        return f"Bearer {await self._login()}"

    def _fault(self, status: int, code: str, body: bytes) -> ArmFault:
        message = ""
        try:
            found = ElementTree.fromstring(body.decode("utf-8-sig"))
            code = code or found.findtext("Code") or ""
            message = found.findtext("AuthenticationErrorDetail") or found.findtext("Message") or ""
        except (ElementTree.ParseError, UnicodeDecodeError):
            pass
        message = message.partition("\n")[0].rstrip(".")
        if status in (401, 403):
            message = f"storage account {self.account.name}: {message or 'it does not let us in'}"
            code = "StorageLoginRefused" if not self._by_key and code in LOGIN_REFUSED else code
            code = KEY_WRONG if self._by_key and code == "AuthenticationFailed" else code
        return ArmFault(status, (Problem(code or f"HTTP{status}", message),))


class BlobMail(Mail):
    """A mailbox in a container of its own; `opened` tells the account, which may have to be asked for first.

    One that is gone is empty, and nothing can be put there: FileNotFoundError.
    """

    def __init__(
        self,
        opened: Callable[[], Awaitable[BlobClient]],
        container: str,
        pace_s: tuple[float, float] = STORE_PACE_S,
    ) -> None:
        self.pace_s = pace_s
        self._opened, self._container = opened, container

    async def create(self, name: str, content: bytes) -> bool:
        with _away():
            return await (await self._opened()).create(self._container, name, content)

    async def read(self, name: str) -> bytes | None:
        with _away():
            return await (await self._opened()).read(self._container, name)

    async def names(self, below: str) -> list[str]:
        try:
            with _away():
                return await (await self._opened()).names(self._container, f"{below}/")
        except FileNotFoundError:
            return []

    async def remove(self, names: Sequence[str]) -> None:
        with _away():
            blobs, turns = await self._opened(), asyncio.Semaphore(REMOVE_AT_ONCE)

            async def one(name: str) -> None:
                async with turns:
                    await blobs.remove(self._container, name)

            await asyncio.gather(*map(one, names))


@contextlib.contextmanager
def _away() -> Generator[None]:
    try:
        yield
    except ArmFault as fault:
        gone = fault.status == 404 or fault.has("ContainerBeingDeleted")
        raise (FileNotFoundError if gone else OSError)(str(fault)) from fault


async def _first(response: aiohttp.ClientResponse, most: int) -> bytes:
    """So many bytes of what comes: one read gives no more than what has come already."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) >= most:
            break
    return bytes(body[:most])


def _with(tags: Mapping[str, str]) -> dict[str, str]:
    """The headers that give a container these tags."""
    return {f"x-ms-meta-{TAGS}": quote(json.dumps(tags))}


def _tags(told: str) -> Mapping[str, str]:
    try:
        tags = table(json.loads(unquote(told))) if told else {}
    except ValueError:
        return {}
    return {str(name): str(value) for name, value in tags.items()}


def _parsed(content: bytes) -> ElementTree.Element:
    try:
        return ElementTree.fromstring(content.decode("utf-8-sig"))
    except (ElementTree.ParseError, UnicodeDecodeError) as err:
        raise ArmFault(0, (Problem("NoAnswer", "the storage answered no XML"),)) from err
