"""Mailboxes in a storage account of Azure's: a container each, as a signature is for a container alone.

Signatures are made with the account's key where the environment has it (AZURE_STORAGE_ACCOUNT_KEY), else with
a key that Azure lends to who is logged in, for seven days at most: that login needs the roles Storage Blob
Data Contributor and Storage Blob Delegator on the account. A place of Azure's has its mailboxes by

    login = ArmClient(ArmEndpoint("", scope=STORAGE_SCOPE), context.environ)
    boxes = BlobMailboxes(blob_account(name, context.environ), context, owner, login.token)
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import time
import xml.etree.ElementTree as ET
from collections.abc import Awaitable, Callable, Mapping, Sequence
from email.utils import formatdate
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

from msgspec import Struct

from evalfleet.channels.mailbox import Mail, StoreMail
from evalfleet.channels.mailboxes import KeptMailbox, Mailboxes
from evalfleet.clock import wall_seconds
from evalfleet.errors import PlaceError, RequestError
from evalfleet.model import MachineId
from evalfleet.ports import Objects, PlaceContext

from .names import moment, stamp

if TYPE_CHECKING:
    import aiohttp

VERSION = "2021-12-02"
STORAGE_SCOPE = "https://storage.azure.com/.default"
LENT_S = 7 * 86400.0
"""So long a key that Azure lends is good, and what is signed with it."""
EARLY_S = 900.0
"""Clocks differ: what begins to be good has begun this long ago."""
RENEW_S = 86400.0
CALL_S = 30.0
NODE_MAY, CONTROLLER_MAY = "rc", "rcwdl"
"""Read and create; and write, delete and list."""
PREFIX = "evalfleet-"
EXISTS = b"<Code>ContainerAlreadyExists</Code>"


class BlobAccount(Struct, frozen=True):
    """A storage account, and how it is reached."""

    name: str
    endpoint: str = ""
    """Empty: that of the public cloud."""
    key: str = ""
    """The account's key; empty: by the login."""

    @property
    def url(self) -> str:
        return (self.endpoint or f"https://{self.name}.blob.core.windows.net").rstrip("/")


def blob_account(name: str, environ: Mapping[str, str]) -> BlobAccount:
    """A storage account by its name, with what the environment says of it."""
    endpoint, key = (environ.get(f"AZURE_STORAGE_{what}", "") for what in ("ENDPOINT", "ACCOUNT_KEY"))
    return BlobAccount(name, endpoint, key)


class LentKey(Struct, frozen=True):
    """A key by which who is logged in may sign."""

    object_id: str
    tenant: str
    start: str
    expiry: str
    service: str
    version: str
    value: str


def container_of(home: str, machine: MachineId) -> str:
    """The name of a machine's container: Azure allows 63 letters, digits and single hyphens."""
    mark = hashlib.sha256(f"{home}/{machine}".encode()).hexdigest()[:10]
    words = re.sub(r"[^a-z0-9]+", "-", f"{home[:12]}-{machine}".lower()).strip("-")
    return f"{PREFIX}{words[:40].rstrip('-')}-{mark}"


def signature(account: BlobAccount, container: str, may: str, expiry: str, lent: LentKey | None) -> str:
    """The query of a shared access signature for one container."""
    resource = f"/blob/{account.name}/{container}"
    signed: dict[str, str] = {"sp": may, "se": expiry, "sv": VERSION, "sr": "c"}
    if lent is None:
        fields = (may, "", expiry, resource, "", "", "", VERSION, "c", *[""] * 7)
        key = account.key
    else:
        about = (lent.object_id, lent.tenant, lent.start, lent.expiry, lent.service, lent.version)
        fields = (may, "", expiry, resource, *about, *[""] * 5, VERSION, "c", *[""] * 7)
        key = lent.value
        signed |= dict(zip(("skoid", "sktid", "skt", "ske", "sks", "skv"), about, strict=True))
    digest = hmac.new(base64.b64decode(key), "\n".join(fields).encode(), "sha256").digest()
    return urlencode({**signed, "sig": base64.b64encode(digest).decode()})


class BlobMailboxes(Mailboxes):
    """The mailboxes of a home in a storage account. `token`: of the login, for STORAGE_SCOPE."""

    def __init__(
        self,
        account: BlobAccount,
        context: PlaceContext,
        owner: str,
        token: Callable[[], Awaitable[str]] | None = None,
    ) -> None:
        super().__init__(context.home)
        if not account.key and token is None:
            raise RequestError(f"{account.name}: log in, or set AZURE_STORAGE_ACCOUNT_KEY")
        self._account, self._context, self._owner, self._token = account, context, owner, token
        self._session: aiohttp.ClientSession | None = None
        self._lent: LentKey | None = None
        self._lent_at = 0.0
        self._objects: dict[MachineId, tuple[float, Objects]] = {}

    # -- the contract of mailboxes -----------------------------------------------------------------

    async def _open(self, machine: MachineId, seconds: float) -> Mapping[str, Any]:
        if not self._account.key and seconds > LENT_S - RENEW_S:
            raise PlaceError(
                f"{machine} may wait and run for {seconds:g} s, which outlasts any token of a login; set "
                "AZURE_STORAGE_ACCOUNT_KEY, or a shorter time",
                transient=False,
                scope="place",
            )
        container, expires_at = self._container(machine), wall_seconds() + seconds + EARLY_S
        about = {
            "machine": machine,
            "home": self._context.home_id,
            "owner": base64.b64encode(self._owner.encode()).decode(),
            "expires": stamp(expires_at),
        }
        headers = {f"x-ms-meta-evalfleet_{name}": value for name, value in about.items()}
        await self._ask("PUT", f"/{container}", {"restype": "container"}, headers, fine=(201,))
        return {
            "url": f"{self._account.url}/{container}",
            "query": await self._signature(container, NODE_MAY, expires_at),
            "create": {"If-None-Match": "*", "x-ms-blob-type": "BlockBlob"},
        }

    def mail(self, machine: MachineId) -> Mail:
        async def opened() -> Objects:
            until, objects = self._objects.get(machine) or (0.0, None)
            if objects is None or wall_seconds() > until:
                objects = await self._open_objects(machine)
            return objects

        return StoreMail(opened)

    async def remove(self, machine: MachineId) -> None:
        self._objects.pop(machine, None)
        await self._delete(self._container(machine))

    async def all(self) -> Sequence[KeptMailbox]:
        found: list[KeptMailbox] = []
        marker = ""
        while True:
            query = {"comp": "list", "include": "metadata", "prefix": PREFIX}
            page = await self._ask("GET", "/", {**query, **({"marker": marker} if marker else {})})
            tree = _parsed(page)
            found += filter(None, map(_kept, tree.iter("Container")))
            marker = tree.findtext("NextMarker") or ""
            if not marker:
                return found

    async def remove_kept(self, box: KeptMailbox) -> None:
        await self._delete(box.name)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    # -- how -----------------------------------------------------------------------------------------

    def _container(self, machine: MachineId) -> str:
        return container_of(self._context.home_id, machine)

    async def _delete(self, container: str) -> None:
        await self._ask("DELETE", f"/{container}", {"restype": "container"}, fine=(202, 404))

    async def _open_objects(self, machine: MachineId) -> Objects:
        container, until = self._container(machine), wall_seconds() + LENT_S - RENEW_S
        environ = {
            "AZURE_STORAGE_ACCOUNT_NAME": self._account.name,
            "AZURE_STORAGE_ENDPOINT": self._account.url,
            "AZURE_STORAGE_SAS_TOKEN": await self._signature(container, CONTROLLER_MAY, until),
        }
        objects = self._context.open_objects(f"az://{container}", environ)
        self._objects[machine] = (until - RENEW_S, objects)
        return objects

    async def _signature(self, container: str, may: str, expires_at: float) -> str:
        lent = None if self._account.key else await self._borrowed_key()
        return signature(self._account, container, may, stamp(expires_at), lent)

    async def _borrowed_key(self) -> LentKey:
        if self._lent is None or time.monotonic() - self._lent_at > RENEW_S / 2:
            now = wall_seconds()
            body = (
                f"<KeyInfo><Start>{stamp(now - EARLY_S)}</Start>"
                f"<Expiry>{stamp(now + LENT_S - 2 * EARLY_S)}</Expiry></KeyInfo>"
            )
            query = {"restype": "service", "comp": "userdelegationkey"}
            tree = _parsed(await self._ask("POST", "/", query, body=body.encode()))
            names = ("Oid", "Tid", "Start", "Expiry", "Service", "Version")
            told = [tree.findtext(name) or "" for name in (*(f"Signed{name}" for name in names), "Value")]
            self._lent = LentKey(*told)
            self._lent_at = time.monotonic()
        return self._lent

    async def _ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        fine: Sequence[int] = (200,),
    ) -> bytes:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(
                trust_env=True,
                timeout=aiohttp.ClientTimeout(CALL_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("Content-Type",),  # it would have to be signed
            )
        told = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": VERSION, **(headers or {})}
        told["Authorization"] = await self._authorization(method, path, query, told, len(body))
        url = f"{self._account.url}{path}?{urlencode(query)}"
        try:
            async with self._session.request(method, url, headers=told, data=body or None) as answer:
                content = await answer.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as err:
            why = f"storage account {self._account.name} does not answer: {err}"
            raise PlaceError(why, transient=True, scope="place") from err
        if answer.status not in fine and EXISTS not in content:
            raise self._refusal(answer.status, content)
        return content

    async def _authorization(
        self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str], length: int
    ) -> str:
        if not self._account.key:
            assert self._token is not None
            return f"Bearer {await self._token()}"
        ours = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
        asked = "".join(f"\n{name}:{query[name]}" for name in sorted(query))
        resource = f"/{self._account.name}{urlsplit(self._account.url).path}{path}{asked}"
        text = f"{method}\n\n\n{length or ''}\n\n\n\n\n\n\n\n\n{ours}{resource}"
        digest = hmac.new(base64.b64decode(self._account.key), text.encode(), "sha256").digest()
        return f"SharedKey {self._account.name}:{base64.b64encode(digest).decode()}"

    def _refusal(self, status: int, content: bytes) -> PlaceError:
        code = re.search(rb"<Code>(\w{1,80})</Code>", content)
        said = f"storage account {self._account.name} answers {status}" + (
            f" ({code[1].decode()})" if code else ""
        )
        if status in (401, 403):
            said += "; the login needs the roles Storage Blob Data Contributor and Storage Blob Delegator"
        # 409: a container of this name is being deleted
        return PlaceError(said, transient=status in (409, 429) or status >= 500, scope="place")


def _kept(container: ET.Element) -> KeptMailbox | None:
    about = {each.tag.lower(): each.text or "" for each in container.iterfind("Metadata/*")}
    machine, name = about.get("evalfleet_machine"), container.findtext("Name")
    if not machine or not name:
        return None
    owner = about.get("evalfleet_owner", "")
    try:
        owner = base64.b64decode(owner, validate=True).decode()
    except ValueError:
        owner = ""
    expires_at = moment(about.get("evalfleet_expires", ""))
    return KeptMailbox(MachineId(machine), about.get("evalfleet_home", ""), owner, expires_at, name)


def _parsed(content: bytes) -> ET.Element:
    try:
        return ET.fromstring(content)
    except ET.ParseError as err:
        raise PlaceError("the storage account answers no XML", transient=True, scope="place") from err
