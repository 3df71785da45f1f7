"""How installed places and benchmarks are listed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from evalfleet.registry import PlugIn


def print_plugins(plugins: Sequence[PlugIn], *, as_json: bool) -> int:
    if as_json:
        print(json.dumps(msgspec.to_builtins(plugins)))
        return 0
    for plugin in plugins:
        print(f"{plugin.name}  {plugin.problem or plugin.summary}")
        for setting in plugin.settings:
            default = "required" if setting.default is None else f"default {setting.default}"
            print(
                f"    {setting.name:<18} {setting.type}, {default}{'; ' + setting.doc if setting.doc else ''}"
            )
    return 0
