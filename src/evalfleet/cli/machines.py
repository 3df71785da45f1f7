"""List everything of evalfleet's that exists at the places of evalfleet.toml, by what the places say.

No journal is needed: machines, and what is left of them, are known by their tags.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from evalfleet.surveying import Found

HEAD = ("place", "machine", "where", "owner", "expires", "parts", "to be reaped")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON document")


def main(args: argparse.Namespace) -> int:
    from evalfleet import surveying

    nothing = "nothing of ours exists at the places of evalfleet.toml"
    show(surveying.machines(round(time.time() * 1e6)), nothing, as_json=args.json)
    return 0


def show(found: Sequence[Found], nothing: str, *, as_json: bool) -> None:
    import json

    from evalfleet.views.tables import table

    rows = [document(each) for each in found]
    if as_json:
        print(json.dumps(rows))
    elif not rows:
        print(nothing)
    else:
        keys = ("place", "machine", "where", "owner", "expires_at", "parts", "why")
        print(
            table(
                HEAD,
                [[len(row[key]) if key == "parts" else row[key] or None for key in keys] for row in rows],
            )
        )


def document(found: Found) -> dict[str, Any]:
    from evalfleet.views.words import iso

    each = found.belonging
    return {
        "place": found.place,
        "machine": each.machine,
        "home": each.home,
        "owner": each.owner,
        "is_own": found.is_own,
        "where": each.where,
        "expires_at": iso(each.expires_at),
        "parts": list(each.parts),
        "why": found.why,
    }
