"""The answers of a cloud's API: JSON with parts that may be missing, and errors as faults. Pure.

What an error means (does asking again help, and how much of the cloud is it about?) each cloud's place says.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any, cast

from msgspec import Struct

from evalfleet.errors import PlaceError, Scope

Json = dict[str, Any]
GOODBYE_S = 0.25
"""So long a client waits when it is closed, if one of its calls was cancelled: TLS ends such a connection a
moment later, and aiohttp forgets that it is there. Python complains about it if the loop ends meanwhile."""


def table(value: object) -> Json:
    """An object; an empty one if there is none."""
    return cast("Json", value) if isinstance(value, dict) else {}


def rows(value: object) -> list[Json]:
    """The objects of a list; none if there is no list."""
    return [table(each) for each in cast("list[object]", value)] if isinstance(value, list) else []


class Problem(Struct, frozen=True):
    """One error in a cloud's words."""

    code: str
    message: str
    names: str = ""
    """What it is about, if that is told: the policy that denied it, or the quota that was exceeded."""


class CloudFault(Exception):
    """An answer of a cloud's API that is a no, or none at all."""

    def __init__(
        self, status: int, problems: tuple[Problem, ...], retry_after_s: float | None = None
    ) -> None:
        super().__init__("; ".join(f"{each.code}: {each.message}" for each in problems[:1]))
        self.status = status
        """Of HTTP; 0 if there was no answer."""
        self.problems = problems
        """The one that tells most comes first."""
        self.retry_after_s = retry_after_s

    def has(self, *codes: str) -> bool:
        wanted = {plain_code(code) for code in codes}
        return any(plain_code(each.code) in wanted for each in self.problems)

    @property
    def told(self) -> str:
        """In the cloud's words: the first error, and its code."""
        first = self.problems[0]
        return f"{first.message.rstrip('.')} ({first.code})" if first.message else first.code

    @abstractmethod
    def refusal(self, what: str, *, have_some: bool = False, made: bool = False) -> PlaceError:
        """What it means to us.

        `have_some`: are there machines of ours in that region, whose end would give quota back? `made`: is it
        about a machine that exists, which cannot go elsewhere?
        """

    def refused(self, what: str, why: str, scope: Scope, *, transient: bool = False) -> PlaceError:
        """The error to raise once it is known what it means."""
        wait = self.retry_after_s if transient else None
        return PlaceError(f"{what}: {why}", transient=transient, scope=scope, retry_after_s=wait)


def plain_code(code: str) -> str:
    """Clouds write the same code as `quotaExceeded`, `QuotaExceeded` and `QUOTA_EXCEEDED`."""
    return code.replace("_", "").lower()


def seconds_in(retry_after: str | None) -> float | None:
    """What a Retry-After says, if it is a number."""
    return float(retry_after) if retry_after and re.fullmatch(r"\d+(\.\d+)?", retry_after) else None


@contextmanager
def as_refusal(what: str, *, made: bool = False) -> Generator[None]:
    """Raise PlaceError, with what it means, where a cloud's answer raises CloudFault."""
    try:
        yield
    except CloudFault as fault:
        raise fault.refusal(what, made=made) from fault


class Meaning(Struct, frozen=True):
    """What some of a cloud's codes mean to us."""

    codes: frozenset[str]
    """As `plain_code` has them."""
    scope: Scope
    """How much of the place the answer is about."""
    remedy: str = ""
    """What the user can do about it."""
    transient: bool = False
    """Does asking again help?"""
    frees: bool = False
    """Does the end of a machine of ours there help?"""
    told: str = ""
    """In place of the cloud's words, where those mislead or are long."""
    made_remedy: str = ""
    """For a machine that exists, which cannot go elsewhere. It comes with the cloud's own words."""


def means(codes: str, scope: Scope, remedy: str = "", **more: Any) -> Meaning:
    return Meaning(frozenset(map(plain_code, codes.split())), scope, remedy, **more)


def meaning_of(fault: CloudFault, meanings: Iterable[Meaning]) -> tuple[Meaning, Problem] | None:
    """Of the first problem that has one."""
    for problem in fault.problems:
        for meaning in meanings:
            if plain_code(problem.code) in meaning.codes:
                return meaning, problem
    return None
