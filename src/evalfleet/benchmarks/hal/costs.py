"""What an agent's models cost: usage that it left, by the price table of HAL's own checkout."""

from __future__ import annotations

import ast
import operator
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

from msgspec import Struct

TABLE = "hal/utils/weave_utils.py"
_PRICES, _CACHED = "MODEL_PRICES_DICT", "CACHED_PRICE_OVERRIDES"
_ARITHMETIC: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Div: lambda one, other: one / other,
    ast.Mult: operator.mul,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
}


class ModelPrice(Struct, frozen=True):
    """What one token costs, in US dollars."""

    input: float
    output: float
    cached: float
    """Of input that the API had seen before."""


class TokenUsage(Struct, frozen=True):
    """Tokens that a model took and gave; `cached` ones are among those that went in."""

    input: int = 0
    output: int = 0
    cached: int = 0


@cache
def price_table(repo: Path) -> Mapping[str, ModelPrice]:
    """HAL's own prices, read from its source without running it. Empty if it is not as we know it."""
    try:
        tree = ast.parse((repo / TABLE).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return {}
    tables = dict[str, dict[str, Any]]()
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name in (_PRICES, _CACHED) and isinstance(value := _value(node.value), dict):
                tables[name] = value
    cached = tables.get(_CACHED, {})
    found = dict[str, ModelPrice]()
    for model, row in tables.get(_PRICES, {}).items():
        prices = cast("dict[str, Any]", row) if isinstance(row, dict) else {}
        if isinstance(prices.get("prompt_tokens"), int | float):
            into, out = float(prices["prompt_tokens"]), float(prices.get("completion_tokens") or 0.0)
            again = cached.get(model)
            found[model] = ModelPrice(into, out, float(again) if isinstance(again, int | float) else into)
    return found


def _value(node: ast.expr) -> Any:
    """What a literal stands for, with arithmetic in it; None for all else."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Dict):
        keys = [_value(key) if key is not None else None for key in node.keys]
        return {key: _value(value) for key, value in zip(keys, node.values, strict=True) if key is not None}
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        left, right = _value(node.left), _value(node.right)
        if isinstance(left, int | float) and isinstance(right, int | float) and right:
            return _ARITHMETIC[type(node.op)](left, right)
    return None


def priced(usage: Mapping[str, TokenUsage], table: Mapping[str, ModelPrice]) -> float | None:
    """None if there is no usage, or a model without a price: unknown, not nothing."""
    total = 0.0
    for model, tokens in usage.items():
        price = table.get(model) or table.get(model.removeprefix("together_ai/"))
        if price is None:
            return None
        fresh = max(0, tokens.input - tokens.cached)
        total += fresh * price.input + tokens.cached * price.cached + tokens.output * price.output
    return total if usage else None


def traced_costs(wandb: Mapping[str, Any], table: Mapping[str, ModelPrice]) -> dict[str, float]:
    """Task -> what its calls cost, by W&B's traces as HAL reads them.

    HAL names one model a task. If that does not add up to the tokens that it counted by model, tasks have
    asked several, and nobody can tell what each one cost: then it is empty.
    """
    spent, total = dict[str, tuple[str, TokenUsage]](), Counter[tuple[str, str]]()
    for task, traced in _rows(wandb.get("raw_logging_results")).items():
        calls = traced.get("call_metadata")
        listed = cast("list[dict[str, Any]]", calls) if isinstance(calls, list) else []
        each = [_tokens(call.get("usage")) for call in listed]
        told = TokenUsage(*(sum(counts) for counts in zip((0, 0, 0), *each, strict=True)))
        model = str(traced.get("model"))
        spent[task] = model, told
        total[model, "prompt_tokens"] += told.input
        total[model, "completion_tokens"] += told.output
    counted = {
        (model, kind): usage.get(kind, 0)
        for model, usage in _rows(wandb.get("total_usage")).items()
        for kind in ("prompt_tokens", "completion_tokens")
    }
    if counted != dict(total):
        return {}
    costs = {task: priced({model: usage}, table) for task, (model, usage) in spent.items()}
    return {task: usd for task, usd in costs.items() if usd is not None}


def _rows(value: object) -> dict[str, dict[str, Any]]:
    """The entries of a table that are tables themselves."""
    entries = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    return {key: row for key, row in entries.items() if isinstance(row, dict)}


def _tokens(usage: object) -> tuple[int, int, int]:
    """The tokens that went in and out, and of the former those that the API had seen before."""
    told = cast("dict[str, Any]", usage) if isinstance(usage, dict) else {}
    details = told.get("prompt_tokens_details")
    cached = cast("dict[str, Any]", details).get("cached_tokens") if isinstance(details, dict) else 0
    counts = (told.get("prompt_tokens"), told.get("completion_tokens"), cached)
    into, out, again = (count if isinstance(count, int) else 0 for count in counts)
    return into, out, again
