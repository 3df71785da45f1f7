"""What an answer of a model's API says about tokens, whichever of the known APIs it came from.

Counts are always those of the whole: `in` includes what was read from or written to a cache, `out` includes
reasoning. What an answer does not tell, or tells in a way that cannot be true, is absent, never 0.
"""

from __future__ import annotations

import json
import re
from typing import Any, Callable, Mapping, NamedTuple, cast

MOST_TOKENS = 1_000_000_000
LONGEST_NAME = 200
LONGEST_EVENT = 16 << 20
MOST_IN_PICTURE = 50_000
MOST_ANSWERS = 128
KINDS = ("in", "cached", "cache_write", "out", "reasoning")
_TELLS = re.compile(rb'"(?:usage|usageMetadata)"\s*:\s*\{')
_BASE64 = re.compile(rb"(?<![A-Za-z0-9+/=_-])[A-Za-z0-9+/=_-]{4096,}")
MOST_VALUES = 2_000_000
"""Values in the body of one call. An empty list takes 3 bytes there, and 60 bytes of memory."""
LONGEST_NUMBER = 40
"""Digits. Before Python 3.11, reading a number takes time by the square of its digits."""
_BOUNDS = ("max_completion_tokens", "max_output_tokens", "max_tokens", "maxOutputTokens")


class Told(NamedTuple):
    """What an answer reports of itself. Parts that it does not report are empty."""

    id: str = ""
    model: str = ""
    tokens: Mapping[str, int] = {}

    def plus(self, later: Told) -> Told:
        """Both together: a stream's events, each of which may report a part."""
        tokens = {**self.tokens, **later.tokens}
        return Told(self.id or later.id, self.model or later.model, tokens)


def most_of(path: str, body: bytes, document: dict[str, Any], most_out: int) -> tuple[int, int]:
    """The most tokens that a call can put in, and out: for one whose answer never tells.

    A token has at least one byte, but for pictures: those cost what their size in pixels says. What a call
    puts out is bounded by what it asks for, else by `most_out`, for each of the answers that it wants.
    """
    count = len(body)
    for blob in _BASE64.finditer(body) if b"image/" in body else ():
        if b"image/" in body[max(0, blob.start() - 80) : blob.start()]:
            count -= max(0, blob.end() - blob.start() - MOST_IN_PICTURE)
    if "embed" in path.lower():
        return count, 0
    options = {**table(document.get("generationConfig")), **document}
    bounds = [options[key] for key in _BOUNDS if _is_count(options.get(key))]
    answers = (options[key] for key in ("n", "candidateCount") if _is_count(options.get(key)))
    return count, max(bounds, default=most_out) * max(1, min(next(answers, 1), MOST_ANSWERS))


def told_by(answer: bytes) -> list[Told]:
    """What a whole answer reports: one report; of the results of a batch, which are lines, one a line."""
    document = parse_json(answer)
    if isinstance(document, list):  # Gemini streams a list where its caller did not ask for events
        told = Told()
        for part in _items(document):
            told = told.plus(_told_by(table(part)))
        return [told]
    if document is None and answer.startswith(b"{"):
        return [
            told
            for told in (_told_by(table(parse_json(line))) for line in answer.splitlines())
            if told.tokens
        ]
    return [_told_by(table(document))]


def _told_by(document: dict[str, Any]) -> Told:
    """A batch itself sums up its results, which are counted when they are fetched."""
    response = table(document.get("response"))
    holders = [document, response, table(document.get("message"))]
    holders += [table(response.get("body")), table(table(document.get("result")).get("message"))]
    tokens: dict[str, int] = {}
    for holder in holders if document.get("object") != "batch" else ():
        if "usageMetadata" in holder:
            tokens = tokens or _gemini(table(holder["usageMetadata"]))
        elif "usage" in holder:
            tokens = tokens or _usage(table(holder["usage"]))
    models = [_word(holder.get("model")) or _word(holder.get("modelVersion")) for holder in holders]
    ids = [_word(holder.get("id")) for holder in holders]
    return Told(next(filter(None, ids), ""), next(filter(None, models), ""), tokens)


def _word(value: Any) -> str:
    return value[:LONGEST_NAME] if isinstance(value, str) else ""


def table(value: Any) -> dict[str, Any]:
    """A JSON object; empty if it is none."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _items(value: Any) -> list[Any]:
    return [*value] if isinstance(value, list) else []


def _usage(usage: dict[str, Any]) -> dict[str, int]:
    if "prompt_tokens" in usage or "completion_tokens" in usage:
        return _told(
            {
                "in": usage.get("prompt_tokens"),
                "cached": _detail(usage, "prompt_tokens_details", "cached_tokens"),
                "out": usage.get("completion_tokens", 0 if _is_embedding(usage) else None),
                "reasoning": _detail(usage, "completion_tokens_details", "reasoning_tokens"),
            }
        )
    if "input_tokens_details" in usage or "output_tokens_details" in usage or "total_tokens" in usage:
        return _told(
            {
                "in": usage.get("input_tokens"),
                "cached": _detail(usage, "input_tokens_details", "cached_tokens"),
                "out": usage.get("output_tokens"),
                "reasoning": _detail(usage, "output_tokens_details", "reasoning_tokens"),
            }
        )
    return _anthropic(usage)


def _is_embedding(usage: dict[str, Any]) -> bool:
    """Embeddings put nothing out, and say so by leaving it out."""
    return "total_tokens" in usage and usage["total_tokens"] == usage.get("prompt_tokens")


def _anthropic(usage: dict[str, Any]) -> dict[str, int]:
    """Its `input_tokens` leaves out what a cache was read or written for; ours is the whole."""
    parts = [
        usage.get(key) for key in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    ]
    plain, cached, written = parts
    whole: Any = None
    if plain is not None and all(_is_count(part) for part in (plain, cached or 0, written or 0)):
        whole = plain + (cached or 0) + (written or 0)
    return _told({"in": whole, "cached": cached, "cache_write": written, "out": usage.get("output_tokens")})


def _gemini(usage: dict[str, Any]) -> dict[str, int]:
    prompt, tools = usage.get("promptTokenCount"), usage.get("toolUsePromptTokenCount", 0)
    said, thought = usage.get("candidatesTokenCount"), usage.get("thoughtsTokenCount", 0)
    if said is None and _is_count(usage.get("totalTokenCount")):
        said = 0  # it leaves out a count of 0, e.g. when all it did was think
    sums = {
        "in": prompt + tools if _is_count(prompt) and _is_count(tools) else None,
        "out": said + thought if _is_count(said) and _is_count(thought) else None,
        "cached": usage.get("cachedContentTokenCount"),
        "reasoning": usage.get("thoughtsTokenCount"),
    }
    return _told(sums)


def _detail(usage: dict[str, Any], group: str, key: str) -> Any:
    return table(usage.get(group)).get(key)


def _told(counts: dict[str, Any]) -> dict[str, int]:
    """Only counts that can be true. Parts that exceed their whole make both of them unknown."""
    told = {kind: count for kind, count in counts.items() if _is_count(count)}
    for whole, parts in (("in", ("cached", "cache_write")), ("out", ("reasoning",))):
        if sum(told.get(part, 0) for part in parts) > told.get(whole, MOST_TOKENS):
            for kind in (whole, *parts):
                told.pop(kind, None)
    return told


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_TOKENS


class Events:
    """The events of a stream (text/event-stream), read as their bytes arrive.

    `feed` returns the bytes to pass on: all of them, at once; or, with `hide_usage`, whole events but for the
    one that exists only because we asked for it. `told` is what was told so far.
    """

    def __init__(self, *, hide_usage: bool = False) -> None:
        self.told = Told()
        self._hide = hide_usage
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        rest = self._rest + data
        events = re.split(rb"(?<=\n\n)|(?<=\r\n\r\n)", rest)
        self._rest = events.pop()
        if len(self._rest) > LONGEST_EVENT:  # nobody's event: pass it on, and count it no more
            events.append(self._rest)
            self._rest = b""
        shown = [event for event in events if not self._read(event)]
        return b"".join(shown) if self._hide else data

    def rest(self) -> bytes:
        """What came after the last whole event, once the stream is over."""
        rest, self._rest = self._rest, b""
        hidden = self._read(rest)
        return rest if self._hide and not hidden else b""

    def _read(self, event: bytes) -> bool:
        """Count an event. True if it is the one that only we asked for."""
        names_model = not self.told.model and b'"model' in event
        if not names_model and not _TELLS.search(event):
            return False
        document = table(parse_json(b"".join(_data(event))))
        told = _told_by(document)
        if not _is_last(document):  # what was put out so far is no count
            told = told._replace(
                tokens={kind: n for kind, n in told.tokens.items() if kind not in ("out", "reasoning")}
            )
        self.told = self.told.plus(told)
        return self._hide and document.get("choices") == [] and bool(told.tokens)


def _is_last(document: dict[str, Any]) -> bool:
    """Does this event tell the tokens of the whole stream? Some APIs begin to tell before the end."""
    if "candidates" in document:
        return any(table(each).get("finishReason") for each in _items(document["candidates"]))
    return document.get("type") != "message_start"


def _data(event: bytes) -> list[bytes]:
    return [line[5:].lstrip() for line in event.splitlines() if line.startswith(b"data:")]


def _integer(digits: str) -> float:
    return int(digits) if len(digits) < LONGEST_NUMBER else float("inf")


def parse_json(data: bytes, noted: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """None if it is none."""
    try:
        return json.loads(data, parse_int=_integer, object_pairs_hook=noted)
    except (ValueError, RecursionError):
        return None


def parse_call(body: bytes) -> dict[str, Any]:
    """What a call asks for; empty if that is no JSON object.

    Raises ValueError if it has a key twice: another reader may take the other value. Some ignore case.
    """
    if sum(map(body.count, (b",", b"[", b"{"))) > MOST_VALUES:
        raise ValueError(f"the body has more than {MOST_VALUES} values")
    last: list[tuple[str, Any]] = []

    def noted(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        last[:] = pairs  # the outermost object is the last to be read
        return dict(pairs)

    document, keys = table(parse_json(body, noted)), cast("set[str]", set())
    for key, _ in last if document else ():
        if key.casefold() in keys:
            raise ValueError(f"the body has the key {key[:80]!r} twice")
        keys.add(key.casefold())
    return document
