"""What each attempt has called and spent: an account with its own key, a limit, and a file of its calls."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import time
from typing import Any, Callable, Mapping, NamedTuple

from .endpoints import Route
from .usage import Told

SAME_ERROR_TIMES = 20
SAME_ERROR_S = 600.0
FEW = 3  # errors over a long time: this many at least, so that two unlucky calls an hour apart are no pattern
ERROR_CHARS = 500
MOST_MODELS = 50
OTHERS = "others"
"""What models are called together beyond so many of one attempt: their names are the caller's words."""
OK = 400  # statuses below it
MOST_STORED = 10_000
RESPONSES = "/responses"
NO_CALLS = {"calls": 0, "usd": 0.0, "unknown": 0, "unknown_usd": 0.0}
_DATED = re.compile(r"[-@](\d{8}|\d{4}-\d{2}-\d{2}|\d{4}|latest)$")

Prices = Mapping[str, Mapping[str, float]]
"""US dollars for a token, by model and kind of token: `in`, `cached`, `cache_write`, `out`."""


class Most(NamedTuple):
    """The most tokens that a call can use, as far as what was asked tells."""

    tokens_in: int
    tokens_out: int


NOTHING = Most(0, 0)
NOWHERE = Route("", generates=False)


class ErrorRule:
    """How often, or for how long, the same error may come before it ends an attempt."""

    times = SAME_ERROR_TIMES
    seconds = SAME_ERROR_S


class Account:
    """An attempt's calls, tokens and money, and how much of both it may use."""

    def __init__(
        self,
        attempt: str,
        folder: str,
        prices: Prices,
        rule: ErrorRule,
        stored: dict[str, Call | None],
    ) -> None:
        self.attempt = attempt
        self.folder = folder
        self.calls = 0
        self.tokens: dict[str, int] = {}
        self.usd = 0.0
        self.unknown = 0  # calls whose tokens, or whose model's price, nobody knows
        self.unknown_usd = 0.0  # the most that those can have cost, and used; not in `usd` and `tokens`
        self.unknown_tokens = 0
        self.throttled = 0
        self.allowed_usd: float | None = None
        self.allowed_tokens: int | None = None
        self.models: dict[str, dict[str, Any]] = {}  # calls, tokens and money by model
        self.refused = ""  # why a call was refused: the allowance that is used up
        self.wedged = ""  # the error that came again and again
        self.last_at = 0.0
        self.connections = 0
        self.held = 0  # bytes of calls that have come, and have not ended
        self._prices = prices
        self._rule = rule
        self._stored = stored
        self._answered = False  # a call of it has got an answer
        self._turned_away = ""  # why a call was not passed on, though there was money for it
        self._same: tuple[str, float, int] = ("", 0.0, 0)  # an error, since when, how often
        self._under_way: dict[int, Call] = {}
        os.makedirs(folder, mode=0o700, exist_ok=True)
        self._file = os.open(
            os.path.join(folder, "calls.jsonl"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
        )

    @property
    def in_flight(self) -> int:
        return len(self._under_way)

    def used_up(self) -> str:
        """Return the allowance that is used up, or "" if another call may begin.

        What that call will cost is known only when it has ended.
        """
        tokens = sum(self.tokens.get(kind, 0) for kind in ("in", "out")) + self.unknown_tokens
        if self.allowed_usd is not None and self.usd + self.unknown_usd >= self.allowed_usd:
            return f"the ${self.allowed_usd:.3g} that it may cost are used up"
        if self.allowed_tokens is not None and tokens >= self.allowed_tokens:
            return f"the {self.allowed_tokens} tokens that it may use are used up"
        return ""

    def begin(self, model: str, most: Most = NOTHING, route: Route = NOWHERE) -> Call:
        """`most`: what the call can use. It is written down first, for whoever reads the list of a meter that
        was killed meanwhile."""
        self.calls += 1
        call = self._under_way[self.calls] = Call(self, self.calls, model, most, route)
        self.write({"n": call.n, "at": call.at, "model": model, **self._at_most(call)})
        return call

    def turn_away(self, model: str, status: int, why: str) -> None:
        """A call that is not passed on. It costs nothing, and is an error of the attempt's like any other."""
        self._turned_away = why
        self.begin(model).end(status, why)

    def end(self, call: Call) -> None:
        if self._under_way.pop(call.n, None) is None:
            return  # the account was closed before
        self.last_at = time.time()
        self._answered = self._answered or call.status in range(1, OK)
        earlier = self._fetched(call) if call.route.stored and call.tokens else None
        usd = self._usd(call)
        call.at_most = self._at_most(call) if usd is None else {}
        if call.told and call.route.path.endswith(RESPONSES):
            self._store(call.told[0].id, call if usd is None else None)
        self._name(call)
        self._count(call, usd)
        self.throttled += call.status == 429
        self._notice(call)
        self.write({**call.line(usd), **({"of": earlier.n} if earlier is not None else {})})

    def _fetched(self, call: Call) -> Call | None:
        """Let a stored answer count once, when it is complete.

        Returns the call that began it, if that counted as unknown until now and is in the same list of calls.
        """
        key, known = call.route.stored, call.route.stored in self._stored
        begun = self._stored.get(key)
        if not {"in", "out"} <= call.tokens.keys() or (
            known and not (begun and begun.account.take_back(begun))
        ):
            call.told = []
            return None
        self._store(key, None)
        if begun is None:
            return None
        call.model = begun.model
        return begun if begun.account is self else None

    def take_back(self, call: Call) -> bool:
        """Count an unknown call no more: its answer was fetched, and counts. False: its account is closed."""
        if self._file >= 0:
            self._count(call, None, -1)
        return self._file >= 0

    def _store(self, key: str, call: Call | None) -> None:
        self._stored[key] = call
        if len(self._stored) > MOST_STORED:
            del self._stored[next(iter(self._stored))]

    def _name(self, call: Call) -> None:
        """Count a call by the model that its price is of."""
        used = call.told[0].model if call.told else ""
        price = price_of(self._prices, used)
        if not call.model or (price is not None and price is not price_of(self._prices, call.model)):
            call.model = used

    def _count(self, call: Call, usd: float | None, sign: int = 1) -> None:
        most_usd = call.at_most.get("at_most_usd", 0.0)
        for kind, count in call.tokens.items():
            self.tokens[kind] = self.tokens.get(kind, 0) + sign * count
        self.usd += sign * (usd or 0.0)
        if usd is None:
            self.unknown += sign
            self.unknown_usd += sign * most_usd
            told = call.tokens.get("in", 0) + call.tokens.get("out", 0)
            self.unknown_tokens += sign * max(0, call.at_most["at_most_tokens"] - told)
        if not call.counts:
            return
        name = call.model if call.model in self.models or len(self.models) < MOST_MODELS else OTHERS
        sums = self.models.setdefault(name, {**NO_CALLS, "tokens": {}})
        sums["calls"] += sign
        sums["usd"] += sign * (usd or 0.0)
        sums["unknown"] += sign * (usd is None)
        sums["unknown_usd"] += sign * most_usd
        for kind, count in call.tokens.items():
            sums["tokens"][kind] = sums["tokens"].get(kind, 0) + sign * count

    def can_price(self, model: str) -> bool:
        """Where money is limited, a call whose cost nobody could tell must not begin."""
        return self.allowed_usd is None or price_of(self._prices, model) is not None

    def _at_most(self, call: Call) -> dict[str, Any]:
        """What a call can have used whose usage or price is unknown."""
        if not call.counts:
            return {}
        tokens, usd = 0, 0.0
        for told in call.told or [Told()]:
            tokens_in = told.tokens.get("in", call.most.tokens_in)
            tokens_out = told.tokens.get("out", call.most.tokens_out)
            tokens += tokens_in + tokens_out
            price = self._price(told, call)
            if price is None:
                usd = math.nan
                continue
            dearest = max(price["in"], price.get("cache_write", 0.0))
            usd += tokens_in * dearest + tokens_out * price.get("out", max(price.values()))
        return {"at_most_tokens": tokens, **({} if math.isnan(usd) else {"at_most_usd": round(usd, 9)})}

    def _price(self, told: Told, call: Call) -> Mapping[str, float] | None:
        """By what the upstream says that it used, else by what was asked for."""
        return price_of(self._prices, told.model) or price_of(self._prices, call.model)

    def _usd(self, call: Call) -> float | None:
        """None where tokens or price are unknown. A call that was refused, or never sent, costs nothing."""
        refused = call.status >= OK and not call.tokens and not call.unanswered
        if not call.counts or refused or not call.sent:
            return 0.0
        costs = [_cost(told.tokens, self._price(told, call)) for told in call.told or [Told()]]
        return None if None in costs else sum(filter(None, costs))

    def _notice(self, call: Call) -> None:
        """An error that comes again and again, with no success between, will not go away by itself."""
        if call.status < OK:
            self._same = ("", 0.0, 0)
            return
        error, since, times = self._same
        now = time.monotonic()
        told = f"{call.status} {call.error}".strip()
        self._same = (told, since, times + 1) if told == error else (told, now, 1)
        _, since, times = self._same
        if times >= self._rule.times or (times >= FEW and now - since >= self._rule.seconds):
            self.wedged = told

    def write(self, line: dict[str, Any]) -> None:
        """A full disk costs lines of the file, not calls: the sums are kept here."""
        with contextlib.suppress(OSError):
            os.write(self._file, json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def close(self) -> None:
        """What is still under way is counted as far as it has told. What it tells later is not counted."""
        for call in [*self._under_way.values()]:
            call.end(0, "its attempt had ended")
        if not self._answered:
            self.wedged = self.wedged or self._turned_away
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def state(self) -> dict[str, Any]:
        """What the supervisor is told."""
        names = (
            "attempt",
            "calls",
            "in_flight",
            "tokens",
            "usd",
            "models",
            "unknown",
            "unknown_usd",
            "unknown_tokens",
            "throttled",
            "refused",
            "wedged",
            "last_at",
        )
        return {name: getattr(self, name) for name in names}


class Call:
    """One call of a model, from its beginning to its end."""

    def __init__(self, account: Account, n: int, model: str, most: Most, route: Route) -> None:
        self.n = n
        self.account = account
        self.most = most
        self.route = route
        self.at = round(time.time(), 3)
        self.model = model
        self.status = 0
        self.told: list[Told] = []
        self.at_most: dict[str, Any] = {}  # what it can have used, if that is unknown at its end
        self.error = ""
        self.sent = False  # has any of it gone to the upstream?
        self.unanswered = False  # it was sent, and the upstream did not say what became of it
        self._began = time.monotonic()
        self._first: float | None = None

    @property
    def tokens(self) -> Mapping[str, int]:
        sums: dict[str, int] = {}
        for told in self.told:
            for kind, count in told.tokens.items():
                sums[kind] = sums.get(kind, 0) + count
        return sums

    @property
    def counts(self) -> bool:
        """Return True if the call can use tokens, or has used some."""
        return self.most is not NOTHING or bool(self.tokens)

    def first_byte(self) -> None:
        if self._first is None:
            self._first = time.monotonic()

    def end(self, status: int, error: str = "") -> None:
        self.status = status
        self.error = error[:ERROR_CHARS]
        self.account.end(self)

    def line(self, usd: float | None) -> dict[str, Any]:
        """The call as a line of calls.jsonl. What is not known is left out."""
        line: dict[str, Any] = {
            "n": self.n,
            "at": self.at,
            "model": self.model,
            "status": self.status,
            **self.tokens,
        }
        line["ms"] = round(1000 * (time.monotonic() - self._began), 1)
        if self._first is not None:
            line["first_ms"] = round(1000 * (self._first - self._began), 1)
        if self.error:
            line["error"] = self.error
        if usd is not None:
            line["usd"] = round(usd, 9)
        return {**line, **self.at_most}


def _cost(tokens: Mapping[str, int], price: Mapping[str, float] | None) -> float | None:
    """None where it is unknown."""
    if price is None or "in" not in tokens or "out" not in tokens or (tokens["out"] and "out" not in price):
        return None
    plain = tokens["in"]
    usd = tokens["out"] * price.get("out", 0.0)
    for kind in ("cached", "cache_write"):
        part = tokens.get(kind, 0)
        plain -= part
        usd += part * price.get(kind, price["in"])
    return usd + plain * price["in"]


def price_of(prices: Prices, model: str) -> Mapping[str, float] | None:
    """A model's price by its name, also with a vendor before it or a date behind it."""
    name = model.rpartition("/")[2]
    undated = _DATED.sub("", name)  # a date alone: `gpt-4o-mini` is another model than `gpt-4o`
    return next((prices[known] for known in (model, name, undated) if known in prices), None)


class Accounts:
    """The attempts of a machine by their keys."""

    def __init__(self, prices: Prices, tell: Callable[[dict[str, Any]], None]) -> None:
        self.prices = dict(prices)  # the accounts read these two: they are changed, never replaced
        self.rule = ErrorRule()
        self._stored: dict[str, Call | None] = {}
        """The answers that can be fetched again: the call that began them, while their usage is unknown."""
        self._by_key: dict[str, Account] = {}
        self._tell = tell

    def open(self, key: str, attempt: str, folder: str) -> Account:
        """An attempt's account; if it was opened before, that one, which this key opens from now on, too."""
        account = self.of(attempt) or Account(attempt, folder, self.prices, self.rule, self._stored)
        self._by_key[key] = account
        return account

    def of_key(self, key: str) -> Account | None:
        return self._by_key.get(key)

    def of(self, attempt: str) -> Account | None:
        return next((account for account in self._by_key.values() if account.attempt == attempt), None)

    def close(self, attempt: str) -> dict[str, Any] | None:
        account = self.of(attempt)
        if account is None:
            return None
        self._by_key = {key: each for key, each in self._by_key.items() if each is not account}
        account.close()
        return account.state()

    def to_be_ended(self) -> list[Account]:
        """Return the attempts that are to be ended."""
        every = {account.attempt: account for account in self._by_key.values()}
        return [account for account in every.values() if account.refused or account.wedged]

    def tell(self, account: Account, what: str) -> None:
        self._tell({"tell": what, **account.state()})
