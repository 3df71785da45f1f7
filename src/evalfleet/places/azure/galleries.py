"""Images of machines in a gallery of Azure: names, tags, and what is sent and read. Pure.

A home has one gallery in its resource group. An image is a definition there and one version of it, which has
a copy in every region of the place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from evalfleet.errors import RequestError
from evalfleet.model import MachineId
from evalfleet.names import home_in
from evalfleet.places.vm.answers import Json, rows, table
from evalfleet.ports import Image

from .answers import tags_in
from .names import HOME, OWNER
from .prices import AS_OF, IMAGE_USD_A_GB_MONTH
from .template import id_of

GALLERY = "Microsoft.Compute/galleries"
TYPES = (f"{GALLERY}/images", f"{GALLERY}/images/versions")
VERSION = "1.0.0"
IMAGE, SOURCE, SIZE = "evalfleet-image", "evalfleet-captured-from", "evalfleet-gb"
"""Tags of what belongs to an image. No machine's tag is among them: `reap` takes none for a machine."""
RESTED, CLEANED = "evalfleet-rested-for", "evalfleet-cleaned-for"
"""Tags of a machine that is to become this image: nothing of the benchmark runs any more; it was cleaned."""
STORAGE = "Standard_LRS"
HIDDEN = "hidden"
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,78}[A-Za-z0-9])?")


class ImageIds:
    """The ids of an image of this home: its gallery, its definition there, and the one version of that."""

    def __init__(self, root: str, home: str, image: str) -> None:
        # a gallery's name has no dashes
        self.gallery = id_of(root, GALLERY, f"evalfleet_{home[:6]}")
        self.definition = f"{self.gallery}/images/{image}"
        self.version = version_of(self.definition)


def version_of(definition: str) -> str:
    return f"{definition}/versions/{VERSION}"


def check_name(image: str) -> None:
    """Raises RequestError if Azure would not take the name."""
    if not _NAME.fullmatch(image):
        raise RequestError(
            f"an image cannot be called {image[:90]!r}: up to 80 letters, digits, '.', '_' and '-', "
            "with a letter or digit at both ends"
        )


def tags_of(image: str, machine: MachineId, shared: Mapping[str, str]) -> dict[str, str]:
    return {**shared, IMAGE: image, SOURCE: machine}


# -- what is sent ----------------------------------------------------------------------------------


def gallery(region: str, tags: Mapping[str, str]) -> Json:
    return {
        "location": region,
        "tags": dict(tags),
        "properties": {"description": "machines prepared by evalfleet"},
    }


def definition(region: str, tags: Mapping[str, str], image: str, vm: Json) -> Json:
    """The body of an image's definition. It is like its machine: generation 2 makes no generation 1."""
    properties: Json = vm["properties"]
    view = table(properties.get("instanceView"))
    security = table(properties.get("securityProfile")).get("securityType")
    trusted = [{"name": "SecurityType", "value": "TrustedLaunch"}] if security == "TrustedLaunch" else []
    told: Json = {
        "osType": "Linux",
        "osState": "Generalized",
        "hyperVGeneration": view.get("hyperVGeneration") or "V2",
        "architecture": "x64",
        "identifier": {"publisher": "evalfleet", "offer": tags[HOME][:6], "sku": image},
    }
    return {
        "location": region,
        "tags": dict(tags),
        "properties": {**told, **({"features": trusted} if trusted else {})},
    }


def version(vm: Json, tags: Mapping[str, str], gb: float, regions: Sequence[str]) -> Json:
    """The body of an image's version: a copy in each region, and in the machine's own, as Azure insists."""
    here = plain_region(vm["location"])
    targets = [
        {"name": each, "regionalReplicaCount": 1, "storageAccountType": STORAGE}
        for each in dict.fromkeys((here, *regions))
    ]
    properties = {
        "publishingProfile": {"targetRegions": targets, "storageAccountType": STORAGE},
        "storageProfile": {"source": {"virtualMachineId": vm["id"]}},
    }
    return {"location": here, "tags": {**tags, SIZE: f"{gb:.1f}"}, "properties": properties}


# -- what is read ----------------------------------------------------------------------------------


def plain_region(text: str) -> str:
    """A region as settings name it: Azure says `East US` in some places, and `eastus` in others."""
    return text.lower().replace(" ", "")


def regions_of(version: Json) -> tuple[str, ...]:
    """The regions in which a version has a copy."""
    profile = table(table(version.get("properties")).get("publishingProfile"))
    return tuple(plain_region(str(each["name"])) for each in rows(profile.get("targetRegions")))


def is_generalized(vm: Json) -> bool:
    statuses = rows(table(vm["properties"].get("instanceView")).get("statuses"))
    return any(str(each.get("code", "")).lower() == "osstate/generalized" for each in statuses)


def definitions_in(resources: list[Json]) -> list[Json]:
    """The definitions of images, each once, in a list of resources with an image's tag."""
    found: dict[str, Json] = {}
    for each in resources:
        if {HOME, IMAGE} <= tags_in(each).keys() and "/images/" in each["id"].lower():
            id = _definition_id(each["id"])
            found.setdefault(id.lower(), {**each, "id": id})
    return [found[key] for key in sorted(found)]


def _definition_id(id: str) -> str:
    return re.split("/versions/", id, flags=re.IGNORECASE)[0]


def read(definition: Json, version: Json | None) -> Image:
    """The image as users see it. One without a version keeps only the name, and costs nothing."""
    tags = tags_in(version or definition)
    regions = regions_of(version or {})
    gb = number(tags.get(SIZE, ""))
    reference = version_of(definition["id"])
    return Image(
        name=tags[IMAGE],
        home=tags[HOME],
        owner=tags.get(OWNER, ""),
        setting=f'image = "{reference}"',
        state=state_of(version),
        regions=regions,
        gb=gb,
        usd_per_month=round(gb * len(regions) * IMAGE_USD_A_GB_MONTH, 2),
        prices_as_of=AS_OF,
        parts=(definition["id"], *([reference] if version is not None else [])),
    )


def snapshot(shown: Json) -> Image | None:
    """A snapshot of a machine's disk, by the name of the disk; None: of another one. It is billed for what it
    holds, which is at most the disk's size."""
    properties = table(shown.get("properties"))
    source = str(table(properties.get("creationData")).get("sourceResourceId") or "")
    if not (home := home_in(source.rsplit("/", 1)[-1].lower())):
        return None
    gb = float(properties.get("diskSizeGB") or 0)
    return Image(
        name=str(shown.get("name")),
        home=home,
        owner=tags_in(shown).get(OWNER, ""),
        setting="",
        state=str(properties.get("provisioningState", "")).lower().replace("succeeded", "ready"),
        regions=(plain_region(str(shown.get("location", ""))),),
        gb=gb,
        usd_per_month=round(gb * IMAGE_USD_A_GB_MONTH, 2),
        prices_as_of=AS_OF,
        parts=(str(shown["id"]),),
        kind="snapshot",
    )


def state_of(version: Json | None) -> str:
    if version is None:
        return "empty"
    state = str(version["properties"].get("provisioningState", "")).lower()
    known = {"succeeded": "ready", "failed": "failed", "deleting": "being deleted", HIDDEN: HIDDEN}
    return known.get(state, "being made")


def hidden(definition: Json) -> Json:
    """What stands for a version that we may not look at."""
    return {"tags": definition["tags"], "properties": {"provisioningState": HIDDEN}}


def number(text: str) -> float:
    """The number in a tag; 0 if somebody has written something else there."""
    try:
        return max(0.0, float(text))
    except ValueError:
        return 0.0
