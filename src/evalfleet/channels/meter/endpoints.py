"""The allow-list of calls: the methods and paths of the models' APIs that are passed on with the real key.

A path is normalised before it is compared, and the upstream receives the normalised path. So no server or
gateway can read the path in a second way.
"""

from __future__ import annotations

import posixpath
import re
from typing import NamedTuple, Sequence
from urllib.parse import unquote

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
_NAME = r"[A-Za-z0-9_.@~+=,-]+"
_PATH = re.compile(r"(?:/[A-Za-z0-9_.@~+=,:-]+)+")
_VERSION = r"(?:/openai|/anthropic)?(?:/v1|/v1beta|/v1alpha)?(?:/openai)?"
_DEPLOYMENT = f"(?:/openai)?/deployments/(?P<model>{_NAME})"
_GEMINI = f"(?:/v1|/v1beta|/v1alpha)?/models/(?P<model>{_NAME}(?:/{_NAME})*)"
_OPENAI = (
    "(?:chat/completions|completions|responses|responses/compact|messages|embeddings|images/generations"
    "|images/edits|audio/speech|audio/transcriptions|audio/translations)"
)

_GENERATES = True
"""The call runs a model: it needs a price where money is limited, and an upper bound without usage."""
_ENDPOINTS = [
    (method, re.compile(path), generates)
    for method, path, generates in (
        ("POST", f"(?:{_VERSION}|{_DEPLOYMENT}|/models)/{_OPENAI}", _GENERATES),
        (
            "POST",
            f"{_GEMINI}:(?:generateContent|streamGenerateContent|embedContent|batchEmbedContents)",
            _GENERATES,
        ),
        ("POST", f"{_VERSION}/(?:moderations|messages/count_tokens|responses/input_tokens)", False),
        ("POST", f"{_GEMINI}:countTokens", False),
        ("POST", f"{_VERSION}/responses/(?P<stored>{_NAME})/cancel", False),
        ("GET", f"{_VERSION}/responses/(?P<stored>{_NAME})(?P<part>/input_items)?", False),
        ("GET", f"{_VERSION}/models(?:/[^/]+)*", False),
    )
]


class Route(NamedTuple):
    """Where a call goes, and what its path says about its cost."""

    path: str
    """The normalised path below the upstream's URL."""
    generates: bool
    model: str = ""
    """The model or deployment that the path names."""
    stored: str = ""
    """The stored answer that the call fetches. Its usage counts once, however often it is fetched."""
    is_free: bool = True
    """It costs nothing by itself."""


def split_target(path: str) -> tuple[str, str]:
    """The name of the upstream, and the path below it without escapes, `.`, `..` and empty parts."""
    name, _, rest = posixpath.normpath("/" + unquote(path).lstrip("/"))[1:].partition("/")
    return name, "/" + rest


def route_of(method: str, path: str, opened: Sequence[str] = ()) -> Route | None:
    """The route of a call; None if it is not allowed. `opened` are further paths, each with all below it."""
    if not _PATH.fullmatch(path):
        return None
    for allowed, pattern, generates in _ENDPOINTS:
        found = pattern.fullmatch(path) if method == allowed else None
        if found is not None:
            parts = found.groupdict()
            stored = "" if parts.get("part") else parts.get("stored") or ""
            return Route(path, generates, parts.get("model") or "", stored, is_free=not generates)
    if method in METHODS and any(path == each or path.startswith(each + "/") for each in opened):
        return Route(path, generates=False, stored="" if method == "POST" else path, is_free=False)
    return None
