"""What `[places.NAME]` with kind = "gce" may say."""

from __future__ import annotations

import configparser
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, field

from evalfleet.errors import RequestError
from evalfleet.places.vm.answers import table
from evalfleet.places.vm.settings import (
    VmAccount,
    VmSettings,
    file_of,
    is_user_name,
    owner_of,
    problems_of,
    source_problems,
)
from evalfleet.ports import PlaceContext

from .client import KEY_FILE, credentials_file, gcloud_folder
from .machine_types import KNOWN_REGIONS, REGION, ZONE, region_of, strange, type_of, zones_of
from .names import LABEL, LABEL_KEY, label

IMAGE = "projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-amd64"
TYPES = ("e2-standard-4", "n2-standard-4", "n1-standard-4", "n2d-standard-4", "n2-standard-8")
REGIONS = ("us-central1", "us-east1", "us-west1")
CREDENTIAL_KINDS = frozenset(
    (
        "authorized_user",
        "service_account",
        "external_account",
        "external_account_authorized_user",
        "impersonated_service_account",
        "gdch_service_account",
    )
)
"""What google-auth can log in with."""
_PROJECT = re.compile(r"(?:[a-z0-9.-]+:)?[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?")
_SHORT_IMAGE = re.compile(r"projects/[^/]+/global/images/(family/)?[a-z]([-a-z0-9]*[a-z0-9])?")
MOST_LABELS, OUR_LABELS = 64, 7


class GceSettings(VmSettings, frozen=True, forbid_unknown_fields=True):
    """The settings of a place of Compute Engine VMs. `ssh_from` must be given unless they have no public
    address."""

    project: Annotated[
        str, Meta(description="else GOOGLE_CLOUD_PROJECT, CLOUDSDK_CORE_PROJECT, or what gcloud is set to")
    ] = ""
    types: Annotated[
        tuple[str, ...], Meta(description="machine types, tried in order of price, if they fit")
    ] = TYPES
    regions: Annotated[
        tuple[str, ...],
        Meta(description="where machines may be; else CLOUDSDK_COMPUTE_REGION, else three of the USA"),
    ] = ()
    zones: Annotated[
        tuple[str, ...] | Literal["nearest"],
        Meta(
            description="such as us-central1-a; else CLOUDSDK_COMPUTE_ZONE, else all of `regions`; "
            '"nearest": those of the region of `regions` that answers soonest'
        ),
    ] = ()
    distance_by: Annotated[
        Mapping[str, str],
        Meta(
            description='for `nearest`: HOST:PORT to measure a region by, as { us-east1 = "10.0.0.9:443" }, '
            "else Google's own endpoint there"
        ),
    ] = field(default_factory=dict[str, str])
    creates_a_minute: Annotated[
        int, Meta(ge=1, description="so many machines of one region are asked for in a minute at most")
    ] = 750  # Google allows 1,500 changes a minute and project: half is left for deletions, and for others
    image: Annotated[
        str, Meta(description="projects/PROJECT/global/images/NAME, or .../images/family/NAME")
    ] = IMAGE
    disk_gb: Annotated[int, Meta(ge=10, le=65536, description="the system disk")] = 128
    disk: Annotated[
        Literal["pd-ssd", "pd-balanced", "pd-standard"],
        Meta(description="the system disk: fast, slower or slow; C4, N4 and newer get hyperdisk-balanced"),
    ] = "pd-balanced"
    nested: Annotated[
        bool | None,
        Meta(description="virtual machines can run on the machines; else so if the benchmark needs it"),
    ] = None
    service_account: Annotated[
        str, Meta(description="e-mail of one for the machines; the agent under test can use it")
    ] = ""
    network: Annotated[str, Meta(description="the VPC network; our rules there are about our machines")] = (
        "default"
    )
    subnet: Annotated[str, Meta(description="name of a subnet, needed if the network makes none itself")] = ""
    labels: Annotated[Mapping[str, str], Meta(description="of your own, on machines and disks")] = field(
        default_factory=dict[str, str]
    )
    discounts: Annotated[
        Mapping[str, Annotated[float, Meta(ge=0, lt=1)]],
        Meta(description="shares off the list price of regular machines by family, as { n2 = 0.2 }"),
    ] = field(default_factory=dict[str, float])


class GoogleAccount(VmAccount, frozen=True, kw_only=True):
    """The project that a place uses, and where in it."""

    project: str
    zones: tuple[str, ...]
    """All zones that machines may be in; with `zones = "nearest"`, those to choose from."""


def account_of(name: str, settings: GceSettings, context: PlaceContext) -> GoogleAccount:
    """The account that the settings and the environment name. Raises RequestError."""
    environ = context.environ
    for problem in (*_problems(settings), *_credential_problems(environ)):
        raise RequestError(f"place {name!r}: {problem}")
    project = settings.project or _project_of(environ)
    if not project:
        raise RequestError(
            f"place {name!r}: no project is known; set `project` or GOOGLE_CLOUD_PROJECT, or run "
            "`gcloud config set project PROJECT`"
        )
    if not _PROJECT.fullmatch(project):
        raise RequestError(
            f"place {name!r}: {project!r} is no id of a project (its name is not its id); "
            "`gcloud projects list` shows them"
        )

    return GoogleAccount(
        project=project,
        zones=_zones(name, settings, environ),
        owner=owner_of(settings, environ),
        ca=file_of(name, "ca", settings.ca, context),
        key=file_of(name, "key", settings.key, context),
    )


def _zones(name: str, settings: GceSettings, environ: Mapping[str, str]) -> tuple[str, ...]:
    given = settings.zones if settings.zones != "nearest" else ()
    assert not isinstance(given, str)
    if not given and not settings.regions and settings.zones != "nearest":
        zone, region = environ.get("CLOUDSDK_COMPUTE_ZONE"), environ.get("CLOUDSDK_COMPUTE_REGION")
        given = (zone,) if zone and ZONE.fullmatch(zone) else ()
        if not given and region and REGION.fullmatch(region):
            return tuple(zones_of(region))
    default = KNOWN_REGIONS if settings.zones == "nearest" else REGIONS
    regions = settings.regions or tuple(dict.fromkeys(region_of(zone) for zone in given)) or default
    for zone in given:
        if region_of(zone) not in regions:
            raise RequestError(
                f"place {name!r}: the zone {zone} is in none of `regions` ({', '.join(regions)}): leave it "
                f"out, or add {region_of(zone)}"
            )
    return tuple(given) or tuple(zone for region in regions for zone in zones_of(region))


def _problems(settings: GceSettings) -> list[str]:
    found = source_problems(settings.ssh_from, must=settings.public_ip)
    found += problems_of(settings, settings.name, "a-z0-9-")
    if not settings.types:
        found.append("`types` must not be empty")
    found += [f"{name} is no machine type; Google's are as n2-standard-4" for name in strange(settings.types)]
    found += _where_problems(settings)
    if not is_user_name(settings.user) or settings.user == "root":
        found.append(
            f"user = {settings.user!r}: up to 32 small letters, digits, '_' and '-', and not root, whom "
            "Google's images do not let in"
        )
    if not _SHORT_IMAGE.fullmatch(settings.image):
        found.append(
            "`image` must be projects/PROJECT/global/images/NAME, or .../global/images/family/NAME "
            "(`gcloud compute images list`)"
        )
    if settings.nested:
        found += [
            f"{name} cannot run virtual machines: leave it out of `types` (Intel's can, but not E2)"
            for name in settings.types
            if (type := type_of(name)) is not None and not type.nested
        ]
    found += _label_problems(settings)
    return found


def _where_problems(settings: GceSettings) -> list[str]:
    zones = settings.zones if settings.zones != "nearest" else ()
    found = [
        f"regions: {each!r} is no region; they are as us-central1 (`gcloud compute regions list`)"
        for each in settings.regions
        if not REGION.fullmatch(each)
    ]
    return (
        found
        + [
            f"zones: {each!r} is no zone; they are as us-central1-a (`gcloud compute zones list`)"
            for each in zones
            if not ZONE.fullmatch(each)
        ]
        + [
            f"distance_by: {where!r} is no HOST:PORT for the region {region}"
            for region, where in settings.distance_by.items()
            if not re.fullmatch(r"[^\s:/]+:\d{1,5}", where)
        ]
    )


def _label_problems(settings: GceSettings) -> list[str]:
    labels = settings.labels
    found = [
        f"label {key!r}: up to 63 small letters, digits, '_' and '-', the first a letter"
        for key in labels
        if not LABEL_KEY.fullmatch(key)
    ]
    found += [
        f"label {key!r}: its value must be up to 63 small letters, digits, '_' and '-'"
        for key, value in labels.items()
        if not LABEL.fullmatch(value)
    ]
    found += [
        f"label {key!r} cannot be used: names that begin with {word!r} are taken"
        for key in labels
        for word in ("evalfleet-", "goog-")
        if key.startswith(word)
    ]
    if len(labels) > MOST_LABELS - OUR_LABELS:
        found.append(
            f"labels: no more than {MOST_LABELS - OUR_LABELS}, since Google allows {MOST_LABELS} in all"
        )
    if settings.owner and not LABEL.fullmatch(settings.owner):
        found.append(
            f"owner = {settings.owner!r} makes no label: up to 63 small letters, digits, '_' and '-', such "
            f"as {label(settings.owner)!r}"
        )
    return found


def _credential_problems(environ: Mapping[str, str]) -> list[str]:
    """What can be said of the credentials without asking anybody."""
    file = credentials_file(environ)
    if not file:
        return []
    source = KEY_FILE if environ.get(KEY_FILE) else "gcloud's default credentials"
    try:
        kind = table(json.loads(Path(file).read_text("utf-8"))).get("type")
    except OSError:
        return [f"{source}: {file} cannot be read; correct the path, or unset it"]
    except ValueError:
        return [f"{source}: {file} is no JSON; download the key anew"]
    if kind not in CREDENTIAL_KINDS:
        return [
            f"{source}: {file} holds credentials of the kind {kind!r}, which cannot log in; make a service "
            "account's key, or run `gcloud auth application-default login`"
        ]
    return []


def _project_of(environ: Mapping[str, str]) -> str:
    """As Google's own tools look for it: variables, what gcloud is set to, the project of the key."""
    for variable in ("GOOGLE_CLOUD_PROJECT", "CLOUDSDK_CORE_PROJECT", "GCLOUD_PROJECT"):
        if given := environ.get(variable):
            return given
    if chosen := _of_gcloud(environ):
        return chosen
    try:
        key = table(json.loads(Path(credentials_file(environ)).read_text("utf-8")))
    except (OSError, ValueError):
        return ""
    return str(key.get("project_id") or key.get("quota_project_id") or "")


def _of_gcloud(environ: Mapping[str, str]) -> str:
    folder = gcloud_folder(environ)
    try:
        active = environ.get("CLOUDSDK_ACTIVE_CONFIG_NAME") or (folder / "active_config").read_text().strip()
    except OSError:
        active = "default"
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(folder / "configurations" / f"config_{active}")
        return parser.get("core", "project", fallback="")
    except (OSError, configparser.Error):
        return ""
