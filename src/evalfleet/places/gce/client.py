"""Requests to the Compute Engine API, and who we are to it: whatever google-auth knows.

Google's own libraries for Compute Engine are not needed: calls are JSON over HTTP, and google-auth, which is
small, gets the tokens. It asks for them in a thread, by a transport of ours.
"""

from __future__ import annotations

import asyncio
import http.client
import importlib
import random
import ssl
import time
import urllib.error
import urllib.request
import uuid
import warnings
from collections.abc import Callable, Mapping
from email.message import Message
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from evalfleet.clock import pauses, wall_seconds
from evalfleet.places.vm.answers import GOODBYE_S, Json, Problem, table
from evalfleet.places.vm.place import CallRate

from .answers import GoogleFault, fault_of, operation_fault

if TYPE_CHECKING:
    import aiohttp

PUBLIC = "https://compute.googleapis.com/compute/v1"
SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)
TRIES = 7
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.4, 20.0
CALL_S = 60.0
WAIT_S = 150.0
"""An operation's `wait` holds for two minutes at most."""
TOKEN_S = 30.0
AT_ONCE = 32
RATE = (200.0, 20.0)
"""So many calls at once, and so many a second: Google bears 1,500 a minute."""
PAGE = 500
SKEWED_S = 60.0
"""A clock that is wrong by less is not worth a word."""
NAMESPACE = uuid.UUID("8a5c7f0e-3c1f-4f6e-9b0a-6f1c9d7e2b44")


class ComputeEndpoint(Struct, frozen=True):
    """A project, and where the API that has it is reached."""

    project: str
    endpoint: str = ""
    """Empty: Google's own."""
    ca: str = ""
    """The file of the authorities to trust; empty: those that this computer trusts."""


def request_id(*words: object) -> str:
    """A request's own id: a call that is repeated with it is carried out once."""
    return str(uuid.uuid5(NAMESPACE, "/".join(map(str, words))))


class ComputeClient:
    """A client of the Compute Engine API. All its calls raise GoogleFault.

    What Google is too busy for, and what is not answered, is asked again a few times; a change has an id, so
    that it is made once all the same. Paths begin with `projects/`.
    """

    def __init__(self, endpoint: ComputeEndpoint, environ: Mapping[str, str]) -> None:
        self._endpoint = endpoint
        self._login = GoogleLogin(environ, endpoint.ca)
        self._base = (endpoint.endpoint or PUBLIC).rstrip("/")
        self._session: aiohttp.ClientSession | None = None
        self._goodbye_s = 0.0
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._rate = CallRate(*RATE)
        self.ahead_s: float | None = None
        """By how much Google's clock is ahead of this computer's; None before the first answer."""

    @property
    def root(self) -> str:
        return f"projects/{self._endpoint.project}"

    @property
    def project(self) -> str:
        return self._endpoint.project

    def now(self) -> float:
        """The time as Google has it: what it is told to do at a time, it does by its own clock."""
        return wall_seconds() + self.skew_s

    @property
    def skew_s(self) -> float:
        """By how much this computer's clock is behind Google's, if that is worth a word; else 0."""
        return self.ahead_s if self.ahead_s is not None and abs(self.ahead_s) >= SKEWED_S else 0.0

    # -- reading -------------------------------------------------------------------------------

    async def get(self, path: str, **query: str) -> Json:
        return await self._send("GET", path, query)

    async def find(self, path: str, **query: str) -> Json | None:
        """None if it is not there."""
        try:
            return await self.get(path, **query)
        except GoogleFault as fault:
            if fault.status == 404:
                return None
            raise

    async def all(self, path: str, **query: str) -> list[Json]:
        """Every page of a list."""
        found: list[Json] = []
        query = {"maxResults": str(PAGE), **query}
        while True:
            answer = await self.get(path, **query)
            found += answer.get("items") or []
            if not (token := answer.get("nextPageToken")):
                return found
            query["pageToken"] = str(token)

    async def everywhere(self, what: str, **query: str) -> list[Json]:
        """All of a kind, in all zones and regions. A zone without any has a warning in its place."""
        found: list[Json] = []
        query = {"maxResults": str(PAGE), **query}
        while True:
            answer = await self.get(f"{self.root}/aggregated/{what}", **query)
            for scope in table(answer.get("items")).values():
                found += table(scope).get(what) or []
            if not (token := answer.get("nextPageToken")):
                return found
            query["pageToken"] = str(token)

    # -- changing ------------------------------------------------------------------------------

    async def begin(
        self, method: str, path: str, body: Json | None = None, *, id: str = "", **query: str
    ) -> Json:
        """Have something changed. Returns the operation, which goes on. `id`: the request's own."""
        return await self._send(method, path, {"requestId": id or str(uuid.uuid4()), **query}, body)

    async def change(
        self, method: str, path: str, body: Json | None = None, *, id: str = "", **query: str
    ) -> Json:
        """Have something changed. Returns the operation once it is done."""
        return await self.finish(await self.begin(method, path, body, id=id, **query))

    async def finish(self, operation: Json) -> Json:
        """Wait until an operation is done. Raises what it failed of."""
        while operation.get("status") != "DONE":
            operation = await self._send("POST", f"{path_of(operation)}/wait", {}, holds=True)
        if (fault := operation_fault(operation)) is not None:
            raise fault
        return operation

    # -- one call ------------------------------------------------------------------------------

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Json | None = None,
        *,
        holds: bool = False,
    ) -> Json:
        tries, renewed, backoffs = 0, False, pauses(FIRST_BACKOFF_S, LONGEST_BACKOFF_S, 2.0)
        while True:
            tries += 1
            try:
                return await self._exchange(method, path, query, body, holds=holds)
            except GoogleFault as fault:
                if fault.status == 401 and not renewed and not fault.has("NoCredentials"):
                    renewed = True
                    self._login.forget()
                    continue
                again = fault.status == 0 or fault.status >= 500 or fault.is_rate_limit
                if not again or tries >= TRIES or fault.has("NoToken"):
                    raise
                pause_s = fault.retry_after_s or next(backoffs) * (0.5 + random.random())
            await asyncio.sleep(min(pause_s, LONGEST_BACKOFF_S))

    async def _exchange(
        self, method: str, path: str, query: Mapping[str, str], body: Json | None, *, holds: bool
    ) -> Json:
        import aiohttp

        headers = await self._login.headers()
        await asyncio.sleep(self._rate.wait_s(time.monotonic()))
        session, turn = self._open(), asyncio.Semaphore() if holds else self._turns
        limit = aiohttp.ClientTimeout(WAIT_S if holds else CALL_S)
        try:
            async with (
                turn,
                session.request(
                    method, f"{self._base}/{path}", params=query, json=body, headers=headers, timeout=limit
                ) as response,
            ):
                data = await response.read()
        except asyncio.CancelledError:
            self._goodbye_s = GOODBYE_S
            raise
        except (aiohttp.ClientError, OSError, TimeoutError) as err:
            raise no_answer("Google does not answer", err) from err
        self._read_clock(response.headers.get("Date"))
        answer = _parsed(data)
        if response.status >= 400:
            raise fault_of(response.status, answer, response.headers.get("Retry-After"))
        return answer

    def _open(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None:
            trusted = ssl.create_default_context(cafile=self._endpoint.ca or None)
            connector = aiohttp.TCPConnector(ssl=trusted, limit=0)
            jar = aiohttp.DummyCookieJar()
            self._session = aiohttp.ClientSession(connector=connector, trust_env=True, cookie_jar=jar)
        return self._session

    def _read_clock(self, date: str | None) -> None:
        try:
            at = parsedate_to_datetime(date or "").timestamp()
        except ValueError:
            return
        self.ahead_s = at - wall_seconds()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
        await asyncio.sleep(self._goodbye_s)


def path_of(shown: Json) -> str:
    """The path of a resource, or of an operation, from its link."""
    return "projects/" + str(shown.get("selfLink", "")).partition("/projects/")[2]


def last_word(link: object) -> str:
    """`us-central1-a` of a link to that zone."""
    return str(link or "").rsplit("/", 1)[-1]


def no_answer(what: str, err: BaseException, code: str = "NoAnswer") -> GoogleFault:
    lines = [line.strip() for line in str(err).splitlines() if line.strip()]
    return GoogleFault(0, (Problem(code, f"{what}: {lines[0] if lines else type(err).__name__}"),))


def _parsed(data: bytes) -> Json:
    try:
        return table(msgspec.json.decode(data)) if data.strip() else {}
    except msgspec.DecodeError:
        return {}


# -- who we are ------------------------------------------------------------------------------------

KEY_FILE = "GOOGLE_APPLICATION_CREDENTIALS"
PROJECTS = "cloudresourcemanager.googleapis.com"


def credentials_file(environ: Mapping[str, str]) -> str:
    """Where application default credentials are: what the variable names, or what gcloud wrote, if any."""
    if given := environ.get(KEY_FILE):
        return given
    written = gcloud_folder(environ) / "application_default_credentials.json"
    return str(written) if written.is_file() else ""


def gcloud_folder(environ: Mapping[str, str]) -> Path:
    """Where gcloud keeps its files."""
    home = Path(environ.get("HOME") or "~").expanduser()
    return Path(environ.get("CLOUDSDK_CONFIG") or home / ".config" / "gcloud")


class GoogleLogin:
    """Application default credentials, and the tokens that they get. Raises GoogleFault."""

    def __init__(self, environ: Mapping[str, str], ca: str = "") -> None:
        self._environ = environ
        self._trusted = ca
        self._credentials: Any = None
        """Of one of the classes of google-auth, which have no types."""
        self._lock = asyncio.Lock()

    def forget(self) -> None:
        """The token that we have is not taken any more: get another one."""
        if self._credentials is not None:
            self._credentials.token = None

    async def headers(self) -> dict[str, str]:
        """What a request must have so that Google knows us."""
        from google.auth import exceptions

        async with self._lock:
            try:
                if self._credentials is None:
                    self._credentials = await asyncio.to_thread(self._load)
                if not self._credentials.valid:
                    await asyncio.to_thread(self._credentials.refresh, self._transport())
            except (exceptions.TransportError, exceptions.TimeoutError) as err:
                raise no_answer("no token can be had now", err, "NoToken") from err
            except exceptions.GoogleAuthError as err:
                if getattr(err, "retryable", False):
                    raise no_answer("no token can be had now", err, "NoToken") from err
                raise GoogleFault(401, (Problem("NoCredentials", _first_line(err)),)) from err
            except (ValueError, TypeError) as err:  # of google-auth: it was given a page of somebody else's
                raise no_answer("what gives tokens makes no sense", err, "NoToken") from err
            headers: dict[str, str] = {}
            self._credentials.apply(headers)
            return headers

    def _load(self) -> Any:
        google_auth: Any = importlib.import_module("google.auth")

        if not (file := credentials_file(self._environ)):
            found, _ = google_auth.default(scopes=SCOPES, request=self._transport())
            return found
        with warnings.catch_warnings():
            # the file is the user's own: that it may be of any kind is what we want
            warnings.simplefilter("ignore", DeprecationWarning)
            ask = without_projects(self._transport())
            loaded, _ = google_auth.load_credentials_from_file(file, scopes=SCOPES, request=ask)
        return loaded

    def _transport(self) -> Any:
        return transport(ssl.create_default_context(cafile=self._trusted or None))


def _first_line(err: BaseException) -> str:
    """An error of google-auth's may have the whole answer as its second argument."""
    lines = [line.strip() for line in str(err.args[0] if err.args else err).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(err).__name__


class _TokenAnswer(Struct):
    """What a server of tokens answered, as google-auth wants it."""

    status: int
    headers: Message
    """google-auth asks for them in small letters, whatever the server wrote."""
    data: bytes


def without_projects(ask: Callable[..., _TokenAnswer]) -> Callable[..., _TokenAnswer]:
    """A transport by which google-auth does not find out a workload's project.

    It asks another service of Google's for it, which must be on and reachable, and we know the project.
    """

    def ask_others(url: str, *words: Any, **more: Any) -> _TokenAnswer:
        if urlsplit(url).hostname == PROJECTS:
            return _TokenAnswer(404, Message(), b"{}")
        return ask(url, *words, **more)

    return ask_others


def transport(trusted: ssl.SSLContext) -> Callable[..., _TokenAnswer]:
    """What google-auth asks for tokens by: nothing but the standard library."""
    exceptions: Any = importlib.import_module("google.auth.exceptions")
    opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=trusted))

    def ask(
        url: str,
        method: str = "GET",
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        **_: object,
    ) -> _TokenAnswer:
        data = body.encode() if isinstance(body, str) else body
        request = urllib.request.Request(url, data, dict(headers or {}), method=method)
        try:
            with opener.open(request, timeout=timeout or TOKEN_S) as answer:
                return _TokenAnswer(answer.status, answer.headers, answer.read())
        except urllib.error.HTTPError as err:
            with err:
                return _TokenAnswer(err.code, err.headers, err.read())
        except (OSError, ValueError, http.client.HTTPException) as err:
            raise exceptions.TransportError(str(err)) from err

    return ask
