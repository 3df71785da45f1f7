"""What each attempt has called and spent: an account with its own key, a limit, and a file of its calls."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from typing import Any, Callable, Mapping, NamedTuple

SAME_ERROR_TIMES = 20
SAME_ERROR_S = 600.0
FEW = 3  # errors over a long time: this many at least, so that two unlucky calls an hour apart are no pattern
ERROR_CHARS = 500
MOST_MODELS = 50
OTHERS = "others"
"""What models are called together beyond so many of one attempt: their names are the caller's words."""
OK = 400  # statuses below it
NO_CALLS = {"calls": 0, "usd": 0.0, "unknown": 0, "unknown_usd": 0.0}
_DATED = re.compile(r"[-@](\d{8}|\d{4}-\d{2}-\d{2}|\d{4}|latest)$")

Prices = Mapping[str, Mapping[str, float]]
"""US dollars for a token, by model and kind of token: `in`, `cached`, `cache_write`, `out`."""


class Most(NamedTuple):
    """The most tokens that a call can use, as far as what was asked tells."""

    tokens_in: int
    tokens_out: int


NOTHING = Most(0, 0)


class ErrorRule:
    """How often, or for how long, the same error may come before it ends an attempt."""

    times = SAME_ERROR_TIMES
    seconds = SAME_ERROR_S


class Account:
    """An attempt's calls, tokens and money, and how much of both it may use."""

    def __init__(self, attempt: str, folder: str, prices: Prices, rule: ErrorRule) -> None:
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
        self.wanting = False  # a call waits for more money
        self.refused = ""  # why a call was refused for want of money
        self.wedged = ""  # the error that came again and again
        self.last_at = 0.0
        self._prices = prices
        self._rule = rule
        self._same: tuple[str, float, int] = ("", 0.0, 0)  # an error, since when, how often
        self._under_way: dict[int, Call] = {}
        os.makedirs(folder, mode=0o700, exist_ok=True)
        self._file = os.open(
            os.path.join(folder, "calls.jsonl"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
        )

    @property
    def in_flight(self) -> int:
        return len(self._under_way)

    def has_room(self) -> bool:
        """May another call begin? What it will cost is known only when it has ended."""
        tokens = sum(self.tokens.get(kind, 0) for kind in ("in", "out")) + self.unknown_tokens
        return (self.allowed_usd is None or self.usd + self.unknown_usd < self.allowed_usd) and (
            self.allowed_tokens is None or tokens < self.allowed_tokens
        )

    def begin(self, model: str, most: Most = NOTHING) -> Call:
        """`most`: what the call can use. It is written down first, for whoever reads the list of a meter that
        was killed meanwhile."""
        self.calls += 1
        call = self._under_way[self.calls] = Call(self, self.calls, model, most)
        self.write({"n": call.n, "at": call.at, "model": model, **self._at_most(call)})
        return call

    def _at_most(self, call: Call) -> dict[str, Any]:
        """What a call of which nobody tells more can have used."""
        if not call.counts:
            return {}
        most = Most(call.tokens.get("in", call.most.tokens_in), call.tokens.get("out", call.most.tokens_out))
        line: dict[str, Any] = {"at_most_tokens": most.tokens_in + most.tokens_out}
        price = price_of(self._prices, call.model)
        if price is not None:
            dearest = max(price["in"], price.get("cache_write", 0.0))
            usd = most.tokens_in * dearest + most.tokens_out * price.get("out", max(price.values()))
            line["at_most_usd"] = round(usd, 9)
        return line

    def end(self, call: Call) -> None:
        if self._under_way.pop(call.n, None) is None:
            return  # the account was closed before
        self.last_at = time.time()
        for kind, count in call.tokens.items():
            self.tokens[kind] = self.tokens.get(kind, 0) + count
        usd = self._usd(call)
        most = self._at_most(call) if usd is None else {}
        if usd is not None:
            self.usd += usd
        else:
            self.unknown += 1
            self.unknown_usd += most.get("at_most_usd", 0.0)
            told = call.tokens.get("in", 0) + call.tokens.get("out", 0)
            self.unknown_tokens += max(0, most["at_most_tokens"] - told)
        if call.counts:
            self._by_model(call, usd, most.get("at_most_usd", 0.0))
        self.throttled += call.status == 429
        self._notice(call)
        self.write({**call.line(usd), **most})

    def _by_model(self, call: Call, usd: float | None, most_usd: float) -> None:
        name = call.model if call.model in self.models or len(self.models) < MOST_MODELS else OTHERS
        sums = self.models.setdefault(name, {**NO_CALLS, "tokens": {}})
        sums["calls"] += 1
        sums["usd"] += usd or 0.0
        sums["unknown"] += usd is None
        sums["unknown_usd"] += most_usd
        for kind, count in call.tokens.items():
            sums["tokens"][kind] = sums["tokens"].get(kind, 0) + count

    def can_price(self, model: str) -> bool:
        """Where money is limited, a call whose cost nobody could tell must not begin."""
        return self.allowed_usd is None or price_of(self._prices, model) is not None

    def _usd(self, call: Call) -> float | None:
        """None where tokens or price are unknown. A call that was refused, or never sent, costs nothing."""
        refused = call.status >= OK and not call.tokens and not call.unanswered
        if not call.counts or refused or not call.sent:
            return 0.0
        price = price_of(self._prices, call.model)
        if price is None or "in" not in call.tokens or "out" not in call.tokens:
            return None
        if call.tokens["out"] and "out" not in price:
            return None
        plain = call.tokens["in"]
        usd = call.tokens["out"] * price.get("out", 0.0)
        for kind in ("cached", "cache_write"):
            part = call.tokens.get(kind, 0)
            plain -= part
            usd += part * price.get(kind, price["in"])
        return usd + plain * price["in"]

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
            "wanting",
            "refused",
            "wedged",
            "last_at",
        )
        return {name: getattr(self, name) for name in names}


class Call:
    """One call of a model, from its beginning to its end."""

    def __init__(self, account: Account, n: int, model: str, most: Most) -> None:
        self.n = n
        self.most = most
        self.at = round(time.time(), 3)
        self.model = model
        self.status = 0
        self.tokens: dict[str, int] = {}
        self.error = ""
        self.counts = most is not NOTHING  # does a call like this cost tokens?
        self.sent = False  # has any of it gone to the upstream?
        self.unanswered = False  # it was sent, and the upstream did not say what became of it
        self._account = account
        self._began = time.monotonic()
        self._first: float | None = None

    def first_byte(self) -> None:
        if self._first is None:
            self._first = time.monotonic()

    def end(self, status: int, error: str = "") -> None:
        self.status = status
        self.error = error[:ERROR_CHARS]
        self._account.end(self)

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
        return line


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
        self._by_key: dict[str, Account] = {}
        self._tell = tell

    def open(self, key: str, attempt: str, folder: str) -> Account:
        """An attempt's account; if it was opened before, that one, which this key opens from now on, too."""
        account = self.of(attempt) or Account(attempt, folder, self.prices, self.rule)
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

    def waiting(self) -> list[Account]:
        """The jobs that have asked for something that nobody has answered yet."""
        every = {account.attempt: account for account in self._by_key.values()}
        return [each for each in every.values() if each.wanting or each.refused or each.wedged]

    def tell(self, account: Account, what: str) -> None:
        self._tell({"tell": what, **account.state()})
