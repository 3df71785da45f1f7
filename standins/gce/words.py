"""Calls, answers and errors as the Compute Engine API has them, and filters of lists."""

from __future__ import annotations

import re
from typing import Any

from standins.cloud.words import Answer, Json

PROJECT = "stand-in-project"
PREFIX = "/compute/v1/"


DOMAINS = {
    "rateLimitExceeded": "usageLimits",
    "quotaExceeded": "usageLimits",
    "accessNotConfigured": "usageLimits",
}


class ApiError(Exception):
    """An error as the answer to a call. `info`: the reason of its ErrorInfo, if it has one."""

    def __init__(
        self, status: int, reason: str, message: str, *, info: str = "", headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.reason, self.message, self.info = status, reason, message, info
        self.headers = headers or {}

    def answer(self) -> Answer:
        item = {"message": self.message, "domain": DOMAINS.get(self.reason, "global"), "reason": self.reason}
        error: Json = {"code": self.status, "message": self.message, "errors": [item]}
        if self.info:
            kind = "type.googleapis.com/google.rpc.ErrorInfo"
            error["details"] = [{"@type": kind, "reason": self.info, "domain": "googleapis.com"}]
        return Answer(self.status, {"error": error}, self.headers)


class OperationError(Exception):
    """An error of an operation, which comes late, in an answer of 200."""

    def __init__(
        self, code: str, message: str, *, status: int = 409, details: list[Json] | None = None
    ) -> None:
        super().__init__(message)
        self.code, self.message, self.status = code, message, status
        self.details = details or []

    def shown(self) -> Json:
        error: Json = {"code": self.code, "message": self.message}
        return {**error, "errorDetails": self.details} if self.details else error


def invalid(field: str, value: object, why: str) -> ApiError:
    return ApiError(400, "invalid", f"Invalid value for field '{field}': '{value}'. {why}")


def not_found(path: str) -> ApiError:
    return ApiError(404, "notFound", f"The resource '{path}' was not found")


# -- filters ---------------------------------------------------------------------------------------

_TERM = re.compile(r"""([\w.-]+)\s*(!=|=|:|eq\b|ne\b)\s*("[^"]*"|'[^']*'|[^\s()]+)""")


def matches(row: Json, text: str) -> bool:
    """Does a row of a list fit a filter? Terms are joined by AND, said or not; OR is not known here.

    Values of `=` are compared as a whole; `:` tells whether the field has the word, `:*` whether it is there.
    """
    if not text.strip():
        return True
    left = re.sub(r"\bAND\b|[()\s]", "", _TERM.sub("", text))
    if left:
        raise ApiError(
            400, "invalid", f"Invalid value for field 'filter': '{text}'. Invalid list filter expression."
        )
    return all(_term(row, *found) for found in _TERM.findall(text))


def _term(row: Json, name: str, operator: str, wanted: str) -> bool:
    wanted = wanted.strip("\"'")
    value: Any = row
    first, _, rest = name.partition(".")
    for part in [first, rest] if first == "labels" else name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if operator == ":":
        return value is not None if wanted == "*" else wanted in str(value or "")
    same = value is not None and str(value) == wanted
    if operator in ("eq", "ne"):
        same = re.fullmatch(wanted, str(value or "")) is not None
    return same if operator in ("=", "eq") else not same
