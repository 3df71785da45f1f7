"""Expressions of ARM templates: `[concat(parameters('name'), '-nic')]`, as far as sane ones need them."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from .words import ArmError

TOKEN = re.compile(
    r"\s*(?:(?P<word>[A-Za-z_]\w*)|(?P<number>-?\d+)|(?P<text>'(?:[^']|'')*')|(?P<mark>[()\[\],.]))"
)
Function = Callable[..., Any]


def invalid_template(message: str) -> ArmError:
    return ArmError(400, "InvalidTemplate", f"Deployment template validation failed: '{message}'.")


class Expressions:
    """`functions`: what depends on the deployment, such as `parameters`; names in lower case."""

    def __init__(self, functions: Mapping[str, Function]) -> None:
        self._functions = {**PLAIN, **functions}

    def value(self, given: Any) -> Any:
        """With every expression in it replaced by its value."""
        if isinstance(given, dict):
            return {self.value(key): self.value(each) for key, each in given.items()}
        if isinstance(given, list):
            return [self.value(each) for each in given]
        if isinstance(given, str) and given.startswith("[["):
            return given[1:]
        if isinstance(given, str) and given.startswith("[") and given.endswith("]"):
            return _Reader(given[1:-1], self._functions).all()
        return given


class _Reader:
    """Evaluates while it reads; `if` therefore evaluates both its branches."""

    def __init__(self, text: str, functions: Mapping[str, Function]) -> None:
        self._text = text
        self._functions = functions
        self._tokens = list(self._split(text))

    def _split(self, text: str) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        at = 0
        while at < len(text.rstrip()):
            token = TOKEN.match(text, at)
            if token is None:
                raise invalid_template(f"Unable to parse language expression '{text}'")
            kind = str(token.lastgroup)
            found.append((kind, token[kind]))
            at = token.end()
        return found

    def all(self) -> Any:
        value = self._expression()
        if self._tokens:
            raise invalid_template(f"Unable to parse language expression '{self._text}'")
        return value

    def _expression(self) -> Any:
        value = self._primary()
        while self._next() in (".", "["):
            if self._take() == ".":
                value = self._member(value, self._take())
            else:
                value = self._member(value, self._expression())
                self._expect("]")
        return value

    def _primary(self) -> Any:
        if not self._tokens:
            raise invalid_template(f"Unable to parse language expression '{self._text}'")
        kind, token = self._tokens.pop(0)
        if kind == "number":
            return int(token)
        if kind == "text":
            return token[1:-1].replace("''", "'")
        if kind != "word" or self._next() != "(":
            raise invalid_template(f"Unable to parse language expression '{self._text}' at '{token}'")
        function = self._functions.get(token.lower())
        if function is None:
            raise invalid_template(f"The template function '{token}' is not valid.")
        arguments = self._arguments()
        try:
            return function(*arguments)
        except (TypeError, ValueError, KeyError, IndexError) as err:
            raise invalid_template(f"Unable to evaluate template language function '{token}': {err}") from err

    def _arguments(self) -> list[Any]:
        self._expect("(")
        found: list[Any] = []
        while self._next() != ")":
            found.append(self._expression())
            if self._next() == ",":
                self._take()
        self._expect(")")
        return found

    def _member(self, value: Any, key: Any) -> Any:
        try:
            return value[key]
        except (TypeError, KeyError, IndexError) as err:
            message = f"The language expression property '{key}' doesn't exist in '{self._text}'"
            raise invalid_template(message) from err

    def _next(self) -> str:
        return self._tokens[0][1] if self._tokens else ""

    def _take(self) -> str:
        return self._tokens.pop(0)[1] if self._tokens else ""

    def _expect(self, mark: str) -> None:
        if self._take() != mark:
            raise invalid_template(f"Unable to parse language expression '{self._text}': expected '{mark}'")


# -- functions -------------------------------------------------------------------------------------


def _concat(*parts: Any) -> Any:
    if parts and isinstance(parts[0], list):
        return [each for part in parts for each in part]
    return "".join(_text(part) for part in parts)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _format(pattern: str, *values: Any) -> str:
    return re.sub(r"\{(\d+)(?::[^}]*)?\}", lambda found: _text(values[int(found[1])]), pattern)


def _unique(*parts: str) -> str:
    return hashlib.sha256("-".join(parts).encode()).hexdigest()[:13]


def _guid(*parts: str) -> str:
    digest = hashlib.sha256("-".join(parts).encode()).hexdigest()
    return "-".join((digest[:8], digest[8:12], digest[12:16], digest[16:20], digest[20:32]))


def _union(first: Any, *others: Any) -> Any:
    if isinstance(first, list):
        return [*first, *(each for other in others for each in other if each not in first)]
    return {key: value for each in (first, *others) for key, value in each.items()}


def _pairs(*words: Any) -> dict[str, Any]:
    return dict(zip(words[0::2], words[1::2], strict=True))


def _coalesce(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _empty(value: Any) -> bool:
    return value is None or value in ("", [], {})


PLAIN: dict[str, Function] = {
    "concat": _concat,
    "format": _format,
    "string": _text,
    "int": int,
    "bool": lambda value: str(value).lower() in ("true", "1"),
    "tolower": lambda text: text.lower(),
    "toupper": lambda text: text.upper(),
    "trim": lambda text: text.strip(),
    "replace": lambda text, old, new: text.replace(old, new),
    "substring": lambda text, start, *length: text[start:][slice(*(length or (None,)))],
    "split": lambda text, mark: text.split(mark),
    "first": lambda value: value[0],
    "last": lambda value: value[-1],
    "length": len,
    "empty": _empty,
    "contains": lambda value, wanted: wanted in value,
    "equals": lambda one, other: one == other,
    "not": lambda value: not value,
    "and": lambda *values: all(values),
    "or": lambda *values: any(values),
    "if": lambda condition, yes, no: yes if condition else no,
    "coalesce": _coalesce,
    "union": _union,
    "createobject": _pairs,
    "createarray": lambda *values: list(values),
    "json": json.loads,
    "base64": lambda text: base64.b64encode(text.encode()).decode(),
    "base64tostring": lambda text: base64.b64decode(text).decode(),
    "uniquestring": _unique,
    "guid": _guid,
    "null": lambda: None,
    "true": lambda: True,
    "false": lambda: False,
}
