"""Whose models a run calls: `[model]` of evalfleet.toml and the benchmark tell, and calls are metered so."""

from __future__ import annotations

import importlib
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct, field

from evalfleet.channels.meter.accounts import Prices, price_of
from evalfleet.channels.meter.endpoints import route_of, split_target
from evalfleet.errors import RequestError
from evalfleet.model import SECOND, Metering, Micros, ModelApi, decodable
from evalfleet.names import hint
from evalfleet.toml_tables import convert
from evalfleet.version import install_command

KINDS = ("in", "cached", "cache_write", "out")
MILLION = 1e6
DEAREST = 1e5
_PROVIDERS_KEY = re.compile(r"\w+_API_KEY|AWS_(?:SECRET_ACCESS_KEY|BEARER_TOKEN_BEDROCK)")
_SECRET = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Vendor(Struct, frozen=True):
    """An API of models: where it is, how its key is sent, and what its clients read in the environment."""

    url: str
    header: str
    keys: tuple[str, ...]
    urls: Mapping[str, str]
    """Variable -> what comes after the address of the API."""
    endpoints: tuple[str, ...] = ()
    """The variables that may say where it is, if everybody has one of their own."""
    listed_as: str = ""
    """What genai-prices calls it."""


@cache
def vendors() -> Mapping[str, Vendor]:
    """The APIs that are known, by name: what `vendors.toml` beside this module says."""
    table = tomllib.loads(Path(__file__).with_name("vendors.toml").read_text("utf-8"))
    return msgspec.convert(table, decodable(dict[str, Vendor]))


GATEWAY = "gateway"
SMALLEST_IN, SMALLEST_OUT = 100, 10
"""Tokens of a call that is smaller than any agent's: a limit below it pays none."""
LIST_KEYS = {
    "in": "input_mtok",
    "cached": "cache_read_mtok",
    "cache_write": "cache_write_mtok",
    "out": "output_mtok",
}


class ModelTable(Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of `[model]`."""

    key: str | tuple[str, ...] = ()
    upstream: str = ""
    prices: Mapping[str, Any] = field(default_factory=dict[str, Any])
    rpm: float | None = None
    tpm: float | None = None
    concurrency: int | None = None
    max_output_tokens: int | None = None
    same_errors: int | None = None
    port: int | None = None
    paths: tuple[str, ...] = ()
    max_completion_tokens: bool = False


def read_model_table(table: Mapping[str, Any], where: str) -> ModelTable:
    """RequestError names the key. What stands under `key` is never shown: it may be a value."""
    found = convert(dict(table), ModelTable, where)
    if not all(_SECRET.fullmatch(name) for name in names_of(found.key)):
        raise RequestError(
            f"{where}: 'key' must be the name of a variable such as \"OPENAI_API_KEY\", never its value"
        )
    for name in ("rpm", "tpm", "concurrency", "max_output_tokens", "same_errors"):
        value = getattr(found, name)
        if value is not None and not 0 < value < 1e12:
            raise RequestError(f"{where}: {name!r} is {value}; write a number above 0, or leave it out")
    if found.port is not None and not 0 < found.port < 65536:
        raise RequestError(f"{where}: 'port' is {found.port}; write one from 1 to 65535, or leave it out")
    for path in found.paths:
        if path == "/" or split_target(f"/x{path}") != ("x", path) or route_of("PUT", path, [path]) is None:
            raise RequestError(
                f"{where}: 'paths' has {path[:80]!r}; write paths of the API such as \"/v1/files\""
            )
    if found.upstream:
        check_url(found.upstream, f"{where}: 'upstream'")
    if found.upstream and not found.key:
        raise RequestError(f"{where}: 'upstream' needs 'key', the name of the variable that holds its key")
    _prices(found.prices, where)
    return found


def names_of(key: str | Sequence[str]) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else tuple(key)


def check_url(url: str, where: str) -> None:
    parts = urlsplit(url)
    if parts.scheme == "http" and parts.hostname in ("127.0.0.1", "localhost", "::1"):
        return
    if parts.scheme != "https" or not parts.hostname:
        raise RequestError(f"{where} is {url[:80]!r}; write an address that begins with https://")
    if parts.username or parts.password:
        raise RequestError(f"{where} has a user or password in it; name its key under 'key' instead")


def _prices(table: Mapping[str, Any], where: str) -> dict[str, dict[str, float]]:
    """US dollars for a token; the table has them for a million, as price lists do."""
    found: dict[str, dict[str, float]] = {}
    for model, given in table.items():
        at = f"{where[:-1] if where.endswith(']') else where}.prices]: {model!r}"
        if not isinstance(given, dict):
            raise RequestError(f"{at} must be a table such as {{in = 2.50, out = 10}}, for a million tokens")
        told = cast("dict[str, Any]", given)
        for kind, usd in told.items():
            if kind not in KINDS:
                raise RequestError(f"{at} has {kind!r}; {hint(kind, KINDS)}")
            number = isinstance(usd, int | float) and not isinstance(usd, bool) and math.isfinite(usd)
            if not number or not 0 < usd <= DEAREST:
                raise RequestError(f"{at}: {kind!r} is {usd!r}; write dollars above 0 for a million tokens")
        if "in" not in told:
            raise RequestError(f"{at} does not say what input costs; write in = DOLLARS")
        if "out" not in told and "embed" not in model:
            raise RequestError(f"{at} does not say what output costs; write out = DOLLARS")
        found[model] = {kind: usd / MILLION for kind, usd in told.items()}
    return found


def listed_prices(apis: Sequence[ModelApi], at: Micros) -> tuple[dict[str, dict[str, float]], str]:
    """Prices by the list of genai-prices as of a day, if that is installed, and which list it is.

    Where a price has tiers, the first one counts.
    """
    try:
        providers: list[Any] = importlib.import_module("genai_prices.data").providers  # slow; few need it
    except ModuleNotFoundError:
        return {}, ""
    day = datetime.fromtimestamp(at / SECOND, UTC)
    names = {api.name for api in apis}
    wanted = {vendors()[name].listed_as for name in (vendors() if GATEWAY in names else names)}
    from importlib.metadata import version  # here, because it takes a while

    found: dict[str, dict[str, float]] = {}
    for provider in providers:
        for model in provider.models if provider.id in wanted else ():
            told = model.get_prices(day)
            usd = {kind: _per_token(getattr(told, key, None)) for kind, key in LIST_KEYS.items()}
            price = {kind: value for kind, value in usd.items() if value}
            if "in" in price:
                found[model.id] = price
    return found, f"genai-prices {version('genai-prices')}"


def _per_token(listed: Any) -> float:
    return float(getattr(listed, "base", listed) or 0.0) / MILLION


def metering_of(
    table: ModelTable | None,
    named: Sequence[str],
    secrets: Sequence[str],
    environ: Mapping[str, str],
    *,
    urls: Mapping[str, str],
    where: str,
    now: Micros = 0,
    keep_calls: bool = False,
) -> Metering | None:
    """How the run's calls are metered; None if nobody has named a secret that is a model's key.

    `named` are those that the benchmark names, `secrets` all that it needs. A key of `[model]` that the
    benchmark does not ask for is metered if there is a value for it. `urls` says where the API of a key is,
    if it is not at its vendor's; `upstream` of `[model]` goes before it.
    """
    table = table or ModelTable()
    wanted = [name for name in names_of(table.key) if name in secrets or environ.get(name)]
    wanted = list(dict.fromkeys((*wanted, *named)))
    if not wanted:
        return None
    if table.upstream:
        if len(wanted) > 1:
            raise RequestError(f"{where}: 'upstream' takes one key; name one under 'key', not {len(wanted)}")
        apis = [_gateway(table.upstream, wanted[0])]
    else:
        apis = [_api(name, urls.get(name, ""), environ, where) for name in wanted]
    listed, source = listed_prices(apis, now)
    sources = (["[model.prices]"] if table.prices else []) + ([source] if listed else [])
    return Metering(
        tuple({api.name: api for api in apis}.values()),
        {**listed, **_prices(table.prices, where)},
        ", ".join(sources),
        keep_calls,
        table.concurrency,
        table.rpm,
        table.tpm,
        table.max_output_tokens,
        same_errors=table.same_errors,
        port=table.port,
        paths=table.paths,
        renames_max_tokens=table.max_completion_tokens,
    )


def unmetered_keys(metering: Metering, secrets: Sequence[str]) -> list[str]:
    """The secrets that look like the key of a provider whose calls do not go through the meter."""
    metered = {name for api in metering.apis for name in api.env}
    return [name for name in secrets if _PROVIDERS_KEY.fullmatch(name) and name not in metered]


class ModelBounds(NamedTuple):
    """What the command line says model calls may use."""

    budget_usd: float | None
    task_budget_usd: float | None
    max_tokens: int | None


def check_bounds(
    bounds: ModelBounds, metering: Metering, models: Sequence[str], listed: Sequence[str]
) -> None:
    """RequestError if a bound cannot be held, or pays no call at all: nothing has been spent yet.

    `models` are those that are named by `--model`, `listed` those of `[model.prices]`.
    """
    if bounds.max_tokens is not None and bounds.max_tokens < SMALLEST_IN + SMALLEST_OUT:
        raise RequestError(
            f"--max-tokens {bounds.max_tokens} is less than one call of a model uses; "
            f"write {SMALLEST_IN + SMALLEST_OUT} or more"
        )
    if bounds.budget_usd is None:
        if bounds.task_budget_usd is not None:
            raise RequestError("--task-budget says how --budget is shared out; give --budget, too")
        return
    _refuse_unpriced(metering, models)
    if bounds.task_budget_usd is not None and bounds.task_budget_usd > bounds.budget_usd:
        raise RequestError(
            f"--task-budget {bounds.task_budget_usd:g} is more than --budget {bounds.budget_usd:g}, "
            "from which it is taken"
        )
    prices = {model: metering.prices[model] for model in listed if not any(models)} or metering.prices
    for flag, usd in (("--budget", bounds.budget_usd), ("--task-budget", bounds.task_budget_usd)):
        if usd is not None:
            refuse_below_one_call(flag, usd, prices, models)


def _refuse_unpriced(metering: Metering, models: Sequence[str]) -> None:
    """Of a call without a price nobody could say whether the budget pays it."""
    if not metering.prices:
        how = f"write it under [model.prices], or {install_command('models')}"
        raise RequestError(f"--budget needs to know what the models cost; {how}")
    for model in models:
        if model and price_of(metering.prices, model) is None:
            known = hint(model, metering.prices)
            raise RequestError(
                f"--budget needs to know what --model {model} costs; write it under [model.prices]; {known}"
            )


def refuse_below_one_call(flag: str, usd: float, prices: Prices, models: Sequence[str]) -> None:
    """RequestError if `usd` is less than a very small call costs, of the dearest of these models.

    Where none of them is named, it is the cheapest of all that have a price: nobody knows which are called.
    """
    named = {model: price for model in models if (price := price_of(prices, model)) is not None}
    costs = [
        (SMALLEST_IN * price["in"] + SMALLEST_OUT * price["out"], model)
        for model, price in (named or prices).items()
        if "out" in price
    ]
    if not costs:
        return
    least_usd, model = max(costs) if named else min(costs)
    if usd < least_usd:
        raise RequestError(
            f"{flag} {usd:g} pays no call of a model: {SMALLEST_IN} tokens in and {SMALLEST_OUT} out of "
            f"{model!r} cost ${least_usd:.2g}; give more"
        )


def _api(secret: str, given: str, environ: Mapping[str, str], where: str) -> ModelApi:
    """The vendor whose key this is, by the name of the variable; or one like it, at the address `given`."""
    for name, vendor in vendors().items():
        if secret in vendor.keys and given:
            check_url(given, "the address of the model's API")
            variables = {secret: "{key}", **dict.fromkeys(vendor.urls, f"{{url}}/{name}")}
            return ModelApi(name, given.rstrip("/"), secret, vendor.header, variables)
        if secret in vendor.keys and vendor.endpoints:
            return _own_endpoint(name, vendor, secret, environ)
        if secret in vendor.keys:
            variables = {secret: "{key}", **_urls(vendor, name)}
            return ModelApi(name, vendor.url, secret, vendor.header, variables)
    known = ", ".join(key for vendor in vendors().values() for key in vendor.keys)
    raise RequestError(
        f"{where}: {secret} is the key of no API that is known ({known}); say under 'upstream' where it is"
    )


def _own_endpoint(name: str, vendor: Vendor, secret: str, environ: Mapping[str, str]) -> ModelApi:
    """An API at an address that the environment tells: its root, or that of one model below `/openai/`."""
    variable = next((each for each in vendor.endpoints if environ.get(each)), "")
    if not variable:
        raise RequestError(f"{secret} is the key of an API at ${vendor.endpoints[0]}; set that, too")
    check_url(environ[variable], f"${variable}")
    root, slash, below = environ[variable].partition("/openai/")
    told = {variable: f"{{url}}/{name}{slash}{below}"}
    variables = {secret: "{key}", **_urls(vendor, name), **told}
    return ModelApi(name, root.rstrip("/"), secret, vendor.header, variables)


def _gateway(url: str, secret: str) -> ModelApi:
    """One that speaks for all vendors, by whatever API it is asked."""
    variables = {secret: "{key}"}
    for vendor in vendors().values():
        variables |= {vendor.keys[0]: "{key}", **_urls(vendor, GATEWAY)}
    return ModelApi(GATEWAY, url.rstrip("/").removesuffix("/v1"), secret, "authorization", variables)


def _urls(vendor: Vendor, name: str) -> dict[str, str]:
    return {variable: f"{{url}}/{name}{path}" for variable, path in vendor.urls.items()}
