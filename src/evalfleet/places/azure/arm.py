"""Requests to Azure's Resource Manager, through Microsoft's own pipeline, and who we are to it.

Tokens: a service principal's secret or certificate, a managed identity and a workload's token file get new
ones by themselves. `az` renews a person's for as long as the organisation lets the session live: no token
tells that. A federated token that was handed to `az login` (CI) is good for minutes: after it, none can be
had.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import logging
import re
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from msgspec import Struct

from evalfleet.clock import pauses, wall_seconds
from evalfleet.places.vm.answers import GOODBYE_S, Json, Problem, rows, table
from evalfleet.places.vm.place import CallRate

from .answers import ArmFault, fault_of
from .settings import az_folder

if TYPE_CHECKING:
    from azure.core.credentials_async import AsyncTokenCredential
    from azure.core.rest import AsyncHttpResponse
    from azure.mgmt.resource.resources.aio import ResourceManagementClient

PUBLIC = "https://management.azure.com"
RETRIES = 5
LONGEST_BACKOFF_S = 20.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
"""Between two looks at an operation."""
AT_ONCE = 24
DOWNLOAD_S = 20.0
AZ_S = 60.0
"""How long `az` may take for a token: on a busy computer, the ten seconds that are usual are too few."""
SKEWED_S = 60.0
"""A clock that is wrong by less is not worth a word; the times that we tell Azure are minutes."""
VM_LIMITS = {"DELETE": (10.0, 4 / 60), "GET": (30.0, 12 / 60)}
"""By method: what may be asked of one VM at once, and a second. Azure bears 12 and 36 at once."""
MOST_BYTES = 4 << 20
LOG_BYTES = 64 << 10


class ArmEndpoint(Struct, frozen=True):
    """A subscription, and where the Resource Manager that has it is reached."""

    subscription: str
    endpoint: str = ""
    """Empty: that of the public cloud."""
    scope: str = ""
    """Of the tokens; empty: that of the public cloud."""
    ca: str = ""
    """The file of the authorities to trust; empty: those that this computer trusts."""
    content_type: str = "application/json"
    """Of what is sent: some services of Azure's want a certain kind of JSON."""


_VM = re.compile(r"/providers/Microsoft\.Compute/virtualMachines/[^/?]+", re.IGNORECASE)


class _ArmAnswer(NamedTuple):
    """What Azure answers."""

    body: Json
    operation: str
    """Where to ask about what has only begun; empty if it is done."""
    text: str


class ArmClient:
    """A client of Azure's Resource Manager. All its calls raise ArmFault.

    429 and 5xx are asked again, after the time that Azure says, a few times. What is asked of one VM stays
    below what Azure bears.
    """

    def __init__(self, endpoint: ArmEndpoint, environ: Mapping[str, str]) -> None:
        self._endpoint = endpoint
        self._environ = environ
        self._client: ResourceManagementClient | None = None
        self._credential: AsyncTokenCredential | None = None
        self._goodbye_s = 0.0
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._vm_calls: dict[tuple[str, str], CallRate] = {}
        self.ahead_s: float | None = None
        """By how much Azure's clock is ahead of this computer's; None before the first answer."""

    @property
    def root(self) -> str:
        return f"/subscriptions/{self._endpoint.subscription}"

    def now(self) -> float:
        """The time as Azure has it: what it is told to do at a time, it does by its own clock."""
        return wall_seconds() + self.skew_s

    @property
    def skew_s(self) -> float:
        """By how much this computer's clock is behind Azure's, if that is worth a word; else 0."""
        return self.ahead_s if self.ahead_s is not None and abs(self.ahead_s) >= SKEWED_S else 0.0

    async def get(self, path: str, version: str, **query: str) -> Json:
        return await self.send("GET", path, version, query=query)

    async def find(self, path: str, version: str) -> Json | None:
        """None if it is not there."""
        try:
            return await self.get(path, version)
        except ArmFault as fault:
            if fault.status == 404:
                return None
            raise

    async def all(self, path: str, version: str, **query: str) -> list[Json]:
        """Every page of a list."""
        answer = await self.get(path, version, **query)
        found: list[Json] = list(answer.get("value") or [])
        while link := answer.get("nextLink") or answer.get("odata.nextLink"):
            answer = await self.send("GET", str(link), "")
            found += answer.get("value") or []
        return found

    async def read(self, path: str, version: str) -> str:
        """The text of what is there, which need not be JSON; of a long one the last LOG_BYTES."""
        return (await self._exchange("GET", path, version, None, None, raw=True)).text

    async def send(
        self,
        method: str,
        path: str,
        version: str,
        body: Json | None = None,
        query: Mapping[str, str] | None = None,
    ) -> Json:
        return (await self._exchange(method, path, version, body, query)).body

    async def begin(self, path: str, version: str, method: str = "POST", body: Json | None = None) -> str:
        """Have something done that takes time. Returns where to ask how it goes; empty: it is done."""
        return (await self._exchange(method, path, version, body, None)).operation

    async def finish(self, operation: str) -> Json:
        """Wait for an operation; empty: it is done. Returns what Azure tells of it."""
        rests = pauses(FIRST_PAUSE_S, LONGEST_PAUSE_S, 1.4)
        while operation:
            shown = await self.send("GET", operation, "")
            if shown.get("status") == "Succeeded":
                return shown
            if shown.get("status") in ("Failed", "Canceled"):
                raise fault_of(409, shown.get("error") or {"code": "Canceled"})
            await asyncio.sleep(next(rests))
        return {}

    async def _exchange(
        self,
        method: str,
        path: str,
        version: str,
        body: Json | None,
        query: Mapping[str, str] | None,
        *,
        raw: bool = False,
    ) -> _ArmAnswer:
        """`raw`: it need not be JSON, which the pipeline would otherwise insist on."""
        from azure.core.exceptions import AzureError, ClientAuthenticationError
        from azure.core.rest import HttpRequest

        client = self._open()
        given = {**({"api-version": version} if version else {}), **(query or {})}
        kind = {"Content-Type": self._endpoint.content_type} if body is not None else {}
        request = HttpRequest(method, path, params=given, json=body, headers=kind)
        await self._spare(method, path)
        try:
            async with self._turns:
                response = await client.send_request(request, stream=raw)
                text = (await _end_of(response)) if raw else response.text()
        except asyncio.CancelledError:
            self._goodbye_s = GOODBYE_S
            raise
        except ClientAuthenticationError as err:
            raise login_fault(err) from err
        except (AzureError, OSError, TimeoutError) as err:
            raise ArmFault(0, (Problem("NoAnswer", f"Azure does not answer: {_first_line(err)}"),)) from err
        self._read_clock(response.headers.get("Date"))
        answer = _parsed(text)
        if response.status_code >= 400:
            raise fault_of(response.status_code, answer, response.headers.get("Retry-After"))
        return _ArmAnswer(answer, response.headers.get("Azure-AsyncOperation") or "", text)

    async def _spare(self, method: str, path: str) -> None:
        """Wait until Azure bears another call of this kind about the VM that it is about, if it is."""
        vm, limit = _VM.search(path), VM_LIMITS.get(method)
        if vm is None or limit is None:
            return
        calls = self._vm_calls.setdefault((method, vm[0].lower()), CallRate(*limit))
        await asyncio.sleep(calls.wait_s(time.monotonic()))

    def _read_clock(self, date: str | None) -> None:
        try:
            at = parsedate_to_datetime(date or "").timestamp()
        except ValueError:
            return
        self.ahead_s = at - wall_seconds()

    async def download(self, url: str) -> str:
        """What a link that Azure gave us leads to. It has its own signature, and gets no token."""
        import aiohttp

        trusted = ssl.create_default_context(cafile=self._endpoint.ca or None)
        try:
            async with (
                aiohttp.ClientSession(trust_env=True, timeout=aiohttp.ClientTimeout(DOWNLOAD_S)) as session,
                session.get(url, ssl=trusted) as response,
            ):
                data = await response.content.read(MOST_BYTES)
        except (aiohttp.ClientError, OSError, TimeoutError) as err:
            raise ArmFault(0, (Problem("NoAnswer", _first_line(err)),)) from err
        return data.decode("utf-8", "replace")

    async def claims(self) -> Json:
        """What our token says of itself; empty if it does not. Raises ArmFault."""
        return claims_of(await self.token())

    async def token(self) -> str:
        """A token for the endpoint's scope. Raises ArmFault."""
        from azure.core.exceptions import AzureError, ClientAuthenticationError

        self._open()
        assert self._credential is not None
        try:
            token = await self._credential.get_token(self._scope)
        except ClientAuthenticationError as err:
            raise login_fault(err) from err
        except (AzureError, OSError, TimeoutError) as err:
            raise ArmFault(0, (Problem("NoAnswer", _first_line(err)),)) from err
        return token.token

    @property
    def _scope(self) -> str:
        return self._endpoint.scope or f"{PUBLIC}/.default"

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
        if self._credential is not None:
            await self._credential.close()
        await asyncio.sleep(self._goodbye_s)

    def _open(self) -> ResourceManagementClient:
        if self._client is None:
            from azure.mgmt.resource.resources.aio import ResourceManagementClient

            own_cloud = bool(self._endpoint.endpoint)
            self._credential = credential_of(self._environ, self._endpoint.ca, own_cloud=own_cloud)
            endpoint = self._endpoint.endpoint or PUBLIC
            more: Json = {"transport": _transport(self._endpoint.ca)} if self._endpoint.ca else {}
            self._client = ResourceManagementClient(
                self._credential,
                self._endpoint.subscription,
                endpoint,
                credential_scopes=[self._scope],
                retry_total=RETRIES,
                retry_backoff_max=LONGEST_BACKOFF_S,
                **more,
            )
        return self._client


def _transport(ca: str) -> object:
    """One that trusts the authorities in a file.

    Told by `connection_verify`, it would read the file for each request, and use no connection twice.
    """
    import aiohttp
    from azure.core.pipeline.transport import AioHttpTransport

    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=ca)),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=True,
        auto_decompress=False,
    )
    return AioHttpTransport(session=session)


def _parsed(text: str) -> Json:
    try:
        answer: object = json.loads(text) if text.strip() else {}
    except ValueError:
        return {}
    if isinstance(answer, list):
        return {"value": answer}
    return cast("Json", answer) if isinstance(answer, dict) else {}


async def _end_of(response: AsyncHttpResponse) -> str:
    """The text of an answer, or the end of it: a log may be of any length."""
    end = b""
    async for piece in response.iter_bytes():
        end = (end + piece)[-LOG_BYTES:]
    return end.decode("utf-8", "replace")


def _first_line(err: BaseException) -> str:
    lines = [line.strip() for line in str(err).splitlines() if line.strip()]
    return lines[0] if lines else type(err).__name__


# -- who we are, and for how long --------------------------------------------------------------------

ADVICE = "set AZURE_TENANT_ID, AZURE_CLIENT_ID and AZURE_CLIENT_SECRET for long runs"
ENTRIES = "service_principal_entries.json"
"""Where `az` keeps service principals, in its folder."""


def credential_of(environ: Mapping[str, str], ca: str, *, own_cloud: bool) -> AsyncTokenCredential:
    """A service principal's, if the environment (.env files too) names one; else whatever there is.

    `own_cloud`: a cloud of somebody's own is not among those that Microsoft's directory of clouds knows.
    """
    from azure.identity.aio import ClientSecretCredential, DefaultAzureCredential

    # its warning of a dozen lines is what we tell in one, with the remedy
    logging.getLogger("azure.identity").setLevel(logging.ERROR)

    names = ("AZURE_TENANT_ID", "AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET")
    tenant, client, secret = (environ.get(name, "") for name in names)
    if not (tenant and client and secret):
        # a variable that is empty is not set; the library would take it for somebody's name
        unset = any(environ.get(name) == "" for name in names)
        return DefaultAzureCredential(
            process_timeout=round(AZ_S), exclude_environment_credential=unset or None
        )
    more: Json = {"authority": environ["AZURE_AUTHORITY_HOST"]} if environ.get("AZURE_AUTHORITY_HOST") else {}
    if ca:
        more["connection_verify"] = ca
    return ClientSecretCredential(tenant, client, secret, disable_instance_discovery=own_cloud, **more)


_HICCUP = re.compile(
    r"timed? ?out|max retries exceeded|NewConnectionError|name resolution|name or service not known"
    r"|getaddrinfo|network is unreachable|no route to host|connection (aborted|reset|refused|error)"
    r"|temporar(y|ily)|failed to establish|cannot connect to host|server disconnected"
    r"|AADSTS(90033|90024|50196|90012)\b",
    re.IGNORECASE,
)
_ELSEWHERE = re.compile(r"ManagedIdentity|IMDS|169\.254\.|metadata", re.IGNORECASE)
"""Who has no managed identity is told so by a timeout, each time."""


def login_fault(err: Exception) -> ArmFault:
    """What it means that there is no token: a computer that is offline for a moment is not logged out."""
    lines = [line for line in str(err).splitlines() if not _ELSEWHERE.search(line)]
    hiccup = next((line.strip() for line in lines if _HICCUP.search(line)), "")
    logged_out = any(re.search(r"az login|AADSTS(?!90033|90024|50196|90012)", line) for line in lines)
    if hiccup and not logged_out:
        return ArmFault(0, (Problem("NoAnswer", f"no token can be had now: {hiccup}"),))
    return ArmFault(401, (Problem("NoCredentials", _first_line(err)),))


def claims_of(token: str) -> Json:
    """What a token says of itself; empty if it does not."""
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


async def login_doubt(
    claims: Callable[[], Awaitable[Json]], environ: Mapping[str, str], now: float, lasts_s: float
) -> str:
    """Why the login may not last for so long; empty if nothing is known against it.

    `claims` asks for a token, and is called only where that tells something. Raises what it raises.
    """
    if is_renewed(environ):
        return ""
    try:
        entries = (Path(az_folder(environ)) / ENTRIES).read_text("utf-8")
    except OSError:
        entries = ""
    token = await claims()
    return doubt(token, now, lasts_s, handed_over=is_handed_over(token, entries))


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
