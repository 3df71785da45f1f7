"""Who may ask, and what browsers may do with the answers.

A token is needed always: other users of a computer reach its loopback, too, and so does every page that a
browser shows.
"""

from __future__ import annotations

import hashlib
import hmac
import html
import ipaddress
import socket
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

CHANGE_HEADER = "x-evalfleet"
POLICY = "; ".join(
    (
        *("default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self' data: blob:"),
        *("connect-src 'self'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"),
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
LINK = "open the link that `evalfleet serve` has printed: it has the token"


class Guard:
    """Lets nothing through to the application that does not come from a page of its own, with the token."""

    def __init__(self, app: ASGIApp, token: str, host: str, read_only: bool) -> None:
        self._app = app
        self._token = token
        self._read_only = read_only
        # browsers send cookies to all ports of a host: two dashboards must not share one
        self.cookie = f"evalfleet-{hashlib.sha256(token.encode()).hexdigest()[:8]}"
        self._names = {"localhost", host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        answer = refusal if refusal is not None else self._entry(scope)

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("cache-control", "no-store")
            await send(message)

        if answer is None:
            scope = {**scope, "path": scope["raw_path"].decode("latin-1")}  # see _answered in server.py
        await (answer or self._app)(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if len(headers.getlist("host")) != 1 or not self._is_ours(host):
            return PlainTextResponse("this name is not the dashboard's: use the printed link", 421)
        origin = headers.get("origin")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            return _refused("a page of another origin asks", 403)
        site = headers.get("sec-fetch-site", "none")
        to_page = scope["method"] == "GET" and headers.get("sec-fetch-mode", "navigate") == "navigate"
        if site not in ("same-origin", "none") and not to_page:
            return _refused("a page of another site asks", 403)
        if scope["method"] in ("GET", "HEAD"):
            return None
        if headers.get(CHANGE_HEADER) != "1":
            return _refused("a change needs the header X-Evalfleet: 1", 403)
        if self._read_only:
            return _refused("this dashboard is read-only: it was started with --read-only", 403)
        return None

    def _is_ours(self, host: str) -> bool:
        """An address is: nobody can point that elsewhere, as a name can be."""
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        name = name.strip("[]").lower()
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self._names
        return True

    def _entry(self, scope: Scope) -> Response | None:
        """None for who shows the token; else what such a request gets."""
        headers = Headers(scope=scope)
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = [value for name, value in query if name == "token"]
        if given and scope["method"] == "GET":
            if not self._is_token(given[0]):
                return _page(f"the token is wrong: {LINK}", 401)
            return self._welcome(scope, [(name, value) for name, value in query if name != "token"])
        if self._is_token(_cookie(headers, self.cookie)):
            return None
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and self._is_token(bearer.strip()):
            return None
        if scope["path"].startswith("/api/"):
            return _refused(f"the token is missing: {LINK}", 401)
        return _page(f"the token is missing: {LINK}", 401)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())

    def _welcome(self, scope: Scope, query: list[tuple[str, str]]) -> Response:
        """The token becomes a cookie, and leaves the address."""
        path = "/" + quote(scope["raw_path"].decode("latin-1").lstrip("/"), safe="/%")
        path += f"?{urlencode(query)}" if query else ""
        answer: Response
        if Headers(scope=scope).get("sec-fetch-site", "none") in ("none", "same-origin"):
            answer = RedirectResponse(path, 303)
        else:  # after a redirect that another site began, browsers would hold the cookie back
            address = path.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
            refresh = f'<meta http-equiv="refresh" content="0;url={address}">'
            answer = HTMLResponse(f"<!doctype html><title>evalfleet</title>{refresh}")
        answer.set_cookie(self.cookie, self._token, httponly=True, samesite="strict", path="/")
        return answer


def _cookie(headers: Headers, name: str) -> str:
    for header in headers.getlist("cookie"):
        try:
            cookies = SimpleCookie(header)
        except CookieError:
            continue
        if name in cookies:
            return cookies[name].value
    return ""


def _page(why: str, code: int) -> Response:
    """A page with one line, for somebody who came with an old link."""
    head = '<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    scheme = '<meta name="color-scheme" content="light dark"><title>evalfleet</title>'
    return HTMLResponse(f"{head}{scheme}<h1>evalfleet</h1><p>{html.escape(why)}</p>", code)


def _refused(why: str, code: int) -> Response:
    return JSONResponse({"error": why}, code)
