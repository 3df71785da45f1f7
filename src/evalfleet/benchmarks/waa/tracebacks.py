"""Whose fault an exception of WAA's client was, by its traceback.

The client catches whatever a task raises and writes the traceback down; there is no other sign. Stdlib only,
Python 3.8: also runs on machines.
"""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Literal

    Part = Literal["controller", "set-up", "evaluator", "client", "machine", "model", "agent", "unknown"]

_FRAME = re.compile(r'^[ \t]*File "([^"]+)", line \d+, in (\S+)', re.M)
_RAISED = re.compile(r"^([A-Za-z_][\w.]*)(?:: ?(.*))?$")
_CHAINED = re.compile(r"^(?:During handling of the above|The above exception was the direct)[^\n]*\n", re.M)
_RETRIED = re.compile(r"state=finished raised (\w+)")

_AGENTS = "/mm_agents/"
_MODEL_CLIENTS = (
    "openai.",
    "anthropic.",
    "groq.",
    "dashscope.",
    "google.api_core.",
    "google.genai.",
    "google.generativeai.",
    "mistralai.",
    "litellm.",
    "azure.core.",
)
# How those libraries call what went wrong; tenacity's RetryError gives the name alone.
_MODEL_ERRORS = frozenset(
    {
        "APIConnectionError",
        "APIError",
        "APIStatusError",
        "APITimeoutError",
        "AuthenticationError",
        "BadRequestError",
        "ClientAuthenticationError",
        "ConflictError",
        "HttpResponseError",
        "InternalServerError",
        "NotFoundError",
        "OpenAIError",
        "OverloadedError",
        "PermissionDeniedError",
        "Phi3WrapperError",
        "RateLimitError",
        "ResourceExhausted",
        "ServiceUnavailableError",
        "UnprocessableEntityError",
    }
)
# What a model refuses because of what the agent said to it.
_AGENTS_WORDS = ("context_length_exceeded", "content_filter", "content_policy", "maximum context length")
_NETWORK = frozenset({"requests", "urllib3", "httpx", "httpcore", "aiohttp", "urllib", "playwright", "http"})
_NETWORK_ERRORS = frozenset(
    {
        "ConnectionError",
        "ConnectionAbortedError",
        "ConnectionRefusedError",
        "ConnectionResetError",
        "TimeoutError",
        "BrokenPipeError",
        "HTTPError",
        "URLError",
    }
)
_GUEST = re.compile(r":(?:5000|9222|1337|7200)\b|port=(?:5000|9222|1337|7200)\b|\bQMP\b")
_MACHINE_ERRORS = frozenset({"MemoryError", "ImportError", "ModuleNotFoundError"})
_MACHINE_WORDS = ("No space left on device", "Cannot allocate memory", "out of memory", "Too many open files")
_NO_PICTURE = ("UnidentifiedImageError",)  # the guest gave no screenshot

# By the deepest of the environment's files: the set-up calls the controller, an evaluator calls both.
_ENVIRONMENT: tuple[tuple[str, Part], ...] = (
    ("/desktop_env/evaluators/", "evaluator"),
    ("/desktop_env/controllers/setup.py", "set-up"),
    ("/desktop_env/controllers/", "controller"),
    ("/desktop_env/", "controller"),
)
_ENTRANCES: dict[str, Part] = {"evaluate": "evaluator", "reset": "set-up"}


class RaisedError:
    """One exception of a chain."""

    def __init__(self, block: str) -> None:
        self.frames: list[tuple[str, str]] = [
            (path.replace("\\", "/"), name) for path, name in _FRAME.findall(block)
        ]
        self.name, self.words = _last_words(block)
        self.short = self.name.rpartition(".")[2]
        self.package = self.name.partition(".")[0]

    def passes(self, folder: str) -> bool:
        return any(folder in path for path, _ in self.frames)


def part_of(traceback: str) -> Part:
    """Which part of WAA, or of what it stands on, the exception came out of."""
    chain = [RaisedError(block) for block in _CHAINED.split(traceback)]
    final = chain[-1]
    if not final.frames:
        return _by_words(chain)
    if any(_is_machine(raised) for raised in chain):
        return "machine"
    if final.passes(_AGENTS):
        return _agents(chain)
    return _environments(final)


def summary_of(traceback: str, exception: str) -> str:
    """The exception in a line: for a retried call what it ended with, not that it was retried."""
    chain = [RaisedError(block) for block in _CHAINED.split(traceback)] if traceback else []
    told = [raised for raised in chain if raised.name and raised.short != "RetryError"]
    if told:
        raised = told[-1]
        return f"{raised.name}: {raised.words}" if raised.words else raised.name
    return exception.partition("\n")[0].strip()


def _agents(chain: list[RaisedError]) -> Part:
    """Raised while the agent was thinking: its model, the guest it looked at, or itself."""
    for raised in chain:
        if _is_models(raised, chain[-1]):
            return "agent" if any(word in raised.words for word in _AGENTS_WORDS) else "model"
    if any(raised.short in _NO_PICTURE or _is_guests(raised) for raised in chain):
        return "controller"
    return "agent"


def _is_models(raised: RaisedError, final: RaisedError) -> bool:
    if raised.name.startswith(_MODEL_CLIENTS) or raised.short in _MODEL_ERRORS:
        return True
    retried = _RETRIED.search(raised.words)
    if retried and raised.short == "RetryError":
        return retried.group(1) in _MODEL_ERRORS
    # clients that speak HTTP themselves live in a folder of the agent's, or use a library for it
    asks = raised.passes("/gpt/") or final.passes("/gpt/") or raised.package in _NETWORK
    return asks and _is_network(raised) and not _GUEST.search(raised.words)


def _is_guests(raised: RaisedError) -> bool:
    return _is_network(raised) and bool(_GUEST.search(raised.words))


def _is_network(raised: RaisedError) -> bool:
    return raised.package in _NETWORK or raised.short in _NETWORK_ERRORS


def _is_machine(raised: RaisedError) -> bool:
    return raised.short in _MACHINE_ERRORS or any(word in raised.words for word in _MACHINE_WORDS)


def _environments(final: RaisedError) -> Part:
    for path, entrance in final.frames:
        if "/desktop_env/" in path and entrance in _ENTRANCES:
            return _ENTRANCES[entrance]
    for path, _ in reversed(final.frames):
        for folder, part in _ENVIRONMENT:
            if folder in path:
                return part
    return "client"


def _by_words(chain: list[RaisedError]) -> Part:
    """No frames were kept: only what names itself can be told."""
    models = any(_is_models(raised, chain[-1]) for raised in chain)
    return "model" if models else "controller" if any(_is_guests(raised) for raised in chain) else "unknown"


def _last_words(block: str) -> tuple[str, str]:
    """The line that names the exception: the last one at the margin that looks like one."""
    for line in _at_margin(block):
        found = _RAISED.match(line)
        if found and found.group(1) != "Traceback":
            return found.group(1), (found.group(2) or "").strip()
    return "", block.strip().partition("\n")[0]


def _at_margin(block: str) -> Iterator[str]:
    """After the last frame, from its start: a message may have many lines, and the name is on the first."""
    lines = block.strip("\n").splitlines()
    start = max((n for n, line in enumerate(lines) if line.startswith("  ")), default=-1)
    yield from (line for line in lines[start + 1 :] if line and not line.startswith(" "))
