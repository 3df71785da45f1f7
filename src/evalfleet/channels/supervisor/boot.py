"""How the host came up, as cloud-init tells it."""

from __future__ import annotations

import json
import os

from .files import read_file

TYPE_CHECKING = False  # importing typing would cost 3 ms
if TYPE_CHECKING:
    from typing import Any

FOLDER = "/run/cloud-init"


def cloud_init(folder: str = FOLDER) -> dict[str, Any]:
    """`cloud_init`: running or done, and how long it took; empty where there is none."""
    if not os.path.isdir(folder) or os.path.exists(folder + "/disabled"):
        return {}
    stages = stages_of(folder + "/status.json")
    begun = [float(each["start"]) for each in stages if each.get("start")]
    ended = [float(each["finished"]) for each in stages if each.get("finished")]
    if not os.path.exists(folder + "/result.json"):
        return {"cloud_init": "running"} if stages else {}
    seconds = round(max(ended) - min(begun), 3) if begun and ended else 0.0
    return {"cloud_init": "done", "cloud_init_s": max(seconds, 0.0)}


def stages_of(path: str) -> list[dict[str, Any]]:
    try:
        found: Any = json.loads(read_file(path) or b"{}")["v1"]
        return [each for each in found.values() if isinstance(each, dict)]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []
