"""Machines and images at the places of evalfleet.toml: machines, reap."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from evalfleet.api.places import FoundBelonging, FoundImage
    from evalfleet.planning.workspace import Workspace
    from evalfleet.ports import Image
    from evalfleet.views.fleet_documents import BelongingRow


HEAD = ("place", "machine", "where", "owner", "expires", "parts", "to be reaped")
IMAGES_HEAD = ("place", "image", "kind", "state", "regions", "GB", "cost", "owner")


def machines_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--images", action="store_true", help="list images only, with their settings")
    parser.add_argument("--delete-image", metavar="NAME", help="delete this image in all regions")
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


async def machines(args: argparse.Namespace) -> int:
    """List everything of evalfleet's that exists at the places of evalfleet.toml, by what the places say.

    The command needs no journal. It finds machines, their remains and images by their tags. `evalfleet pool
    prepare POOL BENCHMARK --capture NAME` makes images. An image costs money until it is deleted. Snapshots
    that users made of machines' disks are listed with their cost, and are never deleted.
    """
    import json

    from evalfleet.api import places
    from evalfleet.api.documents import belonging_row, image_belonging_row
    from evalfleet.planning.workspace import Workspace

    workspace = Workspace.here()
    if args.delete_image is not None:
        captured = await places.images(workspace)
        return await _delete(workspace, args.delete_image, captured, sure=args.yes, as_json=args.json)
    if args.images:
        _show_images(await places.images(workspace), as_json=args.json)
        return 0
    found, kept = await places.machines(workspace), await places.images(workspace)
    if args.json:
        print(json.dumps([*map(belonging_row, found), *map(image_belonging_row, kept)]))
        return 0
    if found or not kept:
        show(found, "nothing of ours exists at the places of evalfleet.toml", as_json=False)
    if kept:
        print(f"{'' if not found else chr(10)}{images_table(kept)}")
    return 0


def show(found: Sequence[FoundBelonging], nothing: str, *, as_json: bool) -> None:
    import json

    from evalfleet.api.documents import belonging_row
    from evalfleet.views.format import table

    rows = [belonging_row(each) for each in found]
    if as_json:
        print(json.dumps(rows))
    elif not rows:
        print(nothing)
    else:
        print(table(HEAD, [_cells(row) for row in rows]))
        for row in rows:
            if row["trouble"] and row["expires_at"] is None:
                print(f"{row['machine']}: {row['trouble']}")  # of a lent host: nothing of it runs, or costs
            elif row["trouble"]:
                print(f"{row['machine']} cannot be deleted, and costs on until it is: {row['trouble']}")


def _cells(row: BelongingRow) -> list[object]:
    from evalfleet.views.format import local_time

    texts = (row["place"], row["machine"], row["where"], row["owner"], local_time(row["expires_at"]))
    return [*(text or None for text in texts), len(row["parts"]), row["why"] or None]


def reap_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    parser.add_argument(
        "--all-owners", action="store_true", help="also delete what others own and has expired; asks first"
    )
    parser.add_argument(
        "--pools", action="store_true", help="also delete expired pools, including those of your other homes"
    )
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


async def reap(args: argparse.Namespace) -> int:
    """Delete what is ours and has expired, and what a run of this home that has ended left behind.

    It never deletes what evalfleet did not make, nor another home's machines before they expire. It needs
    nothing but their tags.
    """
    from evalfleet.api import places, runs
    from evalfleet.api.documents import belonging_row
    from evalfleet.planning.workspace import Workspace

    workspace = Workspace.here()
    if not args.dry_run:
        await runs.tell_overdue(workspace)
    found = await places.machines(workspace, all_owners=args.all_owners, pools=args.pools)
    going = [each for each in found if each.why]
    show(going, "nothing of ours has expired", as_json=args.json)
    if args.dry_run or not going:
        return 0
    others = sum(not each.is_own for each in going)
    if others and not args.yes and not _agreed(others):
        return 2
    answers = await places.reap(workspace, going)
    for machine, problem in answers.items():
        if problem:
            print(f"evalfleet: {machine}: {problem}", file=sys.stderr)
    problems = [f"{machine}: {problem}" for machine, problem in answers.items() if problem]
    await runs.tell_reaped(workspace, [belonging_row(each) for each in going], problems)
    left = sum(bool(problem) for problem in answers.values())
    if not args.json:
        print(f"deleted: {len(answers) - left}" + (f"; still there: {left}" if left else ""))
    return 1 if left else 0


def _agreed(many: int) -> bool:
    """Only `yes` is yes. Where nobody can answer, nothing is deleted."""
    if not sys.stdin.isatty():
        print(f"evalfleet: {many} of these are not yours: say --yes", file=sys.stderr)
        return False
    from .terminal import ask

    return ask(f"{many} of these are not yours. Type yes to delete them: ") == "yes"


def _show_images(images: Sequence[FoundImage], *, as_json: bool) -> None:
    import json

    from evalfleet.api.documents import image_row

    if as_json:
        print(json.dumps([image_row(image) for image in images]))
    elif images:
        print(images_table(images))
        settings = [f"{kept.image.name}: {kept.image.setting}" for kept in images if kept.image.setting]
        print("\n".join(["", *settings]) if settings else "")
    else:
        print("there are no images of ours at the places of evalfleet.toml")


def images_table(found: Sequence[FoundImage]) -> str:
    from evalfleet.views.format import table

    return table(IMAGES_HEAD, [_row(each.place, each.image) for each in found])


def _row(place: str, image: Image) -> list[Any]:
    where, gb = ", ".join(image.regions) or None, f"{image.gb:.1f}" if image.gb else None
    return [place, image.name, image.kind, image.state, where, gb, monthly(image), image.owner or None]


def monthly(image: Image) -> str:
    """What it costs; nothing, if nothing is stored yet."""
    if not image.regions:
        return "$0.00 a month" if image.state == "empty" else "unknown"
    return f"${image.usd_per_month:.2f} a month (prices of {image.prices_as_of})"


async def _delete(
    workspace: Workspace, name: str, found: Sequence[FoundImage], *, sure: bool, as_json: bool
) -> int:
    import json

    from evalfleet.api import places
    from evalfleet.api.documents import image_row
    from evalfleet.errors import RequestError
    from evalfleet.names import hint

    from .terminal import agreed

    own = [each for each in found if each.is_own and each.image.kind == "image"]
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
    if as_json:
        print(json.dumps([image_row(chosen[0])]))
    else:
        print(f"image {name} is deleted; machines that were made from it stay")
    return 0
