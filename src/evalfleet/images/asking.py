"""Asking a registry: its login, its redirects, its refusals."""

from __future__ import annotations

import base64
import http.client
import ipaddress
import re
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from email.message import Message
from typing import IO, NamedTuple

from msgspec import Struct

from .manifests import decoded
from .streams import Unreadable, one_line

ANSWER_S = 30.0
MOST_TOKEN = 1 << 20
_WORD = re.compile(r'(\w+)="([^"]*)"')


class Login(NamedTuple):
    """Nobody, if there is no name."""

    user: str = ""
    password: str = ""

    def __repr__(self) -> str:
        return f"Login({self.user!r})"

    @property
    def basic(self) -> str:
        return f"Basic {base64.b64encode(f'{self.user}:{self.password}'.encode()).decode()}"


class Refused(Unreadable):
    """The registry has answered no; `code` says what."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Answered(Struct, frozen=True):
    """What a token service says. Docker Hub gives the first, ACR the second."""

    token: str = ""
    access_token: str = ""


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Never out of TLS. What was added as unredirected, our authorization, does not go along."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> urllib.request.Request | None:
        if not is_private(newurl):
            return None
        return super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]


class Asking:
    """One registry, as one user."""

    def __init__(self, server: str, login: Login) -> None:
        self.server = server
        self._login = login
        self._opener = urllib.request.build_opener(_Redirects)
        self._authorization = ""
        self._base = ""

    def get(
        self, path: str, headers: Mapping[str, str] | None = None, method: str = "GET"
    ) -> http.client.HTTPResponse:
        """Raises Refused, Unreadable."""
        url = f"{self._find_base()}{path}"
        try:
            return self._call(url, headers or {}, method, self._authorization)
        except urllib.error.HTTPError as err:
            err.close()
            if err.code != 401:
                raise self._refused(err.code) from None
            challenge = err.headers.get("WWW-Authenticate", "")
        self._authorization = self._authorized(challenge)
        try:
            return self._call(url, headers or {}, method, self._authorization)
        except urllib.error.HTTPError as err:
            err.close()
            raise self._refused(err.code) from None

    def _find_base(self) -> str:
        """As Docker does: a registry on this computer may do without TLS, others may not."""
        if not self._base:
            self._base = f"https://{self.server}"
            if is_loopback(self.server) and not self._has_tls():
                self._base = f"http://{self.server}"
        return self._base

    def _has_tls(self) -> bool:
        try:
            self._opener.open(f"{self._base}/v2/", timeout=ANSWER_S).close()
        except urllib.error.HTTPError as err:
            err.close()
        except http.client.HTTPException:
            return True  # whatever it is, it has understood TLS
        except OSError as err:
            reason = getattr(err, "reason", err)
            if isinstance(reason, ssl.SSLCertVerificationError):
                return True
            return not isinstance(reason, (ssl.SSLError, ConnectionResetError))
        return True

    def _call(
        self, url: str, headers: Mapping[str, str], method: str, authorization: str
    ) -> http.client.HTTPResponse:
        """Raises HTTPError, Unreadable."""
        request = urllib.request.Request(url, headers=dict(headers), method=method)
        if authorization:
            request.add_unredirected_header("Authorization", authorization)
        try:
            answer: http.client.HTTPResponse = self._opener.open(request, timeout=ANSWER_S)
            return answer
        except urllib.error.HTTPError:
            raise
        except (OSError, http.client.HTTPException, ValueError) as err:
            raise Unreadable(f"{self.server} cannot be reached ({reason_of(err)})") from None

    # -- logging in ------------------------------------------------------------------------------

    def _authorized(self, challenge: str) -> str:
        scheme, _, rest = challenge.partition(" ")
        if scheme.lower() == "basic" and self._login.user:
            return self._login.basic
        told = dict(_WORD.findall(rest))
        realm = told.pop("realm", "")
        if scheme.lower() != "bearer" or not is_private(realm):
            raise self._refused(401)
        asked = {key: value for key, value in told.items() if key in ("service", "scope")}
        url = f"{realm}{'&' if '?' in realm else '?'}{urllib.parse.urlencode(asked)}"
        try:
            with self._call(url, {}, "GET", self._login.basic if self._login.user else "") as answer:
                given = decoded(answer.read(MOST_TOKEN), Answered, f"the token of {self.server}")
        except urllib.error.HTTPError as err:
            err.close()
            raise self._refused(err.code) from None
        except (OSError, http.client.HTTPException) as err:
            raise Unreadable(f"{self.server} gives no token ({reason_of(err)})") from None
        token = given.token or given.access_token
        if not (token.isascii() and token.isprintable()):
            raise Unreadable(f"{self.server} gives no token that can be used")
        return f"Bearer {token}" if token else ""

    def _refused(self, code: int) -> Refused:
        who = f"{self._login.user} is" if self._login.user else "nobody is"
        refuses = f"refuses it (answer {code}; {who} logged in)"
        known = {401: refuses, 403: refuses, 404: "has no such image", 429: "has given too much (answer 429)"}
        return Refused(code, f"{self.server} {known.get(code, f'answers {code}')}")


def is_private(url: str) -> bool:
    """What goes there nobody reads on the way: TLS, or within this computer."""
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError:
        return False
    return parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.netloc))


def is_loopback(server: str) -> bool:
    try:
        host = urllib.parse.urlsplit(f"//{server}").hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def reason_of(err: BaseException) -> str:
    """In a few words, without URLs."""
    reason = getattr(err, "reason", None) or err
    if isinstance(reason, ssl.SSLCertVerificationError):
        return "its certificate is of nobody we trust: SSL_CERT_FILE names the file of another authority"
    if isinstance(reason, ValueError | http.client.HTTPException):
        return type(reason).__name__  # its words may hold a URL, which may be signed
    return one_line(getattr(reason, "strerror", None) or str(reason) or type(reason).__name__)
