"""List the images that evalfleet has captured at the places of evalfleet.toml, or delete one.

`evalfleet pool prepare POOL BENCHMARK --capture NAME` makes them. An image costs money until it is
    deleted.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from evalfleet.api.places import FoundImage
    from evalfleet.planning.workspace import Workspace
    from evalfleet.ports import Image

HEAD = ("place", "image", "state", "regions", "GB", "cost", "owner")


def images_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--delete", metavar="NAME", help="delete this image in all regions")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--json", action="store_true", help="one JSON document")


async def images(args: argparse.Namespace) -> int:
    """List the images that evalfleet has captured at the places of evalfleet.toml, or delete one.

    `evalfleet pool prepare POOL BENCHMARK --capture NAME` makes them. An image costs money until it is
    deleted.
    """
    import json

    from evalfleet.api import places
    from evalfleet.api.documents import image_row
    from evalfleet.planning.workspace import Workspace

    workspace = Workspace.here()
    found = await places.images(workspace)
    if args.delete is not None:
        return await _delete(workspace, args.delete, found, sure=args.yes)
    if args.json:
        print(json.dumps([image_row(each) for each in found]))
    elif found:
        print(text(found))
        print("\n".join(["", *(f"{each.image.name}: {each.image.setting}" for each in found)]))
    else:
        print("there are no images of ours at the places of evalfleet.toml")
    return 0


def text(found: Sequence[FoundImage]) -> str:
    from evalfleet.views.format import table

    return table(HEAD, [_row(each.place, each.image) for each in found])


def _row(place: str, image: Image) -> list[Any]:
    where, gb = ", ".join(image.regions) or None, f"{image.gb:.1f}" if image.gb else None
    return [place, image.name, image.state, where, gb, monthly(image), image.owner or None]


def monthly(image: Image) -> str:
    """What it costs; nothing, if nothing is stored yet."""
    if not image.regions:
        return "$0.00 a month" if image.state == "empty" else "unknown"
    return f"${image.usd_per_month:.2f} a month (prices of {image.prices_as_of})"


async def _delete(workspace: Workspace, name: str, found: Sequence[FoundImage], *, sure: bool) -> int:
    from evalfleet.api import places
    from evalfleet.errors import RequestError
    from evalfleet.names import hint

    from .terminal import agreed

    own = [each for each in found if each.is_own]
    chosen = [each for each in own if each.image.name == name]
    if not chosen:
        raise RequestError(f"there is no image {name!r} of yours; {hint(name, [e.image.name for e in own])}")
    if len(chosen) > 1:
        parts = ", ".join(each.image.parts[0] for each in chosen)
        raise RequestError(f"there are {len(chosen)} images {name!r}: {parts}; go to the home that made it")
    where = ", ".join(chosen[0].image.regions) or chosen[0].place
    if not sure and not agreed(f"delete image {name} in {where}"):
        return 2
    await places.delete_image(workspace, chosen[0])
    print(f"image {name} is deleted; machines that were made from it stay")
    return 0
