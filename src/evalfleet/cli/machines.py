"""List everything of evalfleet's that exists at the places of evalfleet.toml, by what the places say.

No journal is needed: machines, what is left of them, and images are known by their tags.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from evalfleet.api.places import FoundBelonging, FoundImage

HEAD = ("place", "machine", "where", "owner", "expires", "parts", "to be reaped")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON document")


def main(args: argparse.Namespace) -> int:
    import json

    from evalfleet.api import places
    from evalfleet.cli import images

    found, kept = places.machines(round(time.time() * 1e6)), places.images()
    if args.json:
        print(json.dumps([*map(document, found), *map(image_document, kept)]))
        return 0
    if found or not kept:
        show(found, "nothing of ours exists at the places of evalfleet.toml", as_json=False)
    if kept:
        print(f"{'' if not found else chr(10)}{images.text(kept)}")
    return 0


def image_document(found: FoundImage) -> dict[str, Any]:
    """With what a machine's has, so that whoever looks for what is left sees it."""
    from evalfleet.cli import images

    shown = images.document(found)
    return {**shown, "machine": None, "where": ", ".join(shown["regions"]), "expires_at": None, "why": ""}


def show(found: Sequence[FoundBelonging], nothing: str, *, as_json: bool) -> None:
    import json

    from evalfleet.views.text_table import table

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


def document(found: FoundBelonging) -> dict[str, Any]:
    from evalfleet.views.format import iso

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
