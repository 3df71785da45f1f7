"""How installed places and benchmarks are listed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from evalfleet.planning.plugins import PlugIn


def print_plugins(plugins: Sequence[PlugIn], *, as_json: bool) -> int:
    if as_json:
        print(json.dumps(msgspec.to_builtins(plugins)))
        return 0
    for plugin in plugins:
        print(f"{plugin.name}  {plugin.problem or plugin.summary}")
        width = max((len(setting.name) for setting in plugin.settings), default=0)
        for setting in plugin.settings:
            default = "required" if setting.default is None else f"default {setting.default}"
            told = "; ".join(filter(None, (f"{_words(setting.type)}, {default}", setting.doc)))
            print(f"    {setting.name:<{width}}  {told}")
    return 0


WORDS = {
    "str": "text",
    "int": "whole number",
    "float": "number",
    "bool": "true or false",
    "tuple[str, ...]": "list",
    "str | None": "text",
    "int | None": "whole number",
}


def _words(type_: str) -> str:
    """A Python type as people who write `--set` know it."""
    if type_.startswith("Literal["):
        return "one of " + type_.removeprefix("Literal[").rstrip("]").replace("'", "").replace(", ", "|")
    return "table" if type_.startswith("Mapping[") else WORDS.get(type_, type_)
