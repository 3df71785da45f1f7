"""What `[places.NAME]` with kind = "azure_vm" may say."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from msgspec import Meta, field

from evalfleet.errors import RequestError
from evalfleet.places.vm.settings import (
    PlaceSettings,
    VmAccount,
    VmSettings,
    file_of,
    is_user_name,
    owner_of,
    problems_of,
    source_problems,
)
from evalfleet.ports import PlaceContext

from .sizes import size_of

GROUP = "evalfleet"
IMAGE = "Canonical:ubuntu-24_04-lts:server:latest"
SIZES = ("Standard_D4ds_v5", "Standard_D4s_v5", "Standard_D4ds_v4", "Standard_D4s_v3", "Standard_D8ds_v5")
NODE_SIZES = ("Standard_D4s_v5", "Standard_D4ds_v5", "Standard_D4s_v3")
REGIONS = ("eastus", "westus2", "centralus", "eastus2")
_SUBNET = re.compile(
    r"/subscriptions/[^/]+/resourceGroups/[^/]+/providers/Microsoft\.Network/virtualNetworks/[^/]+/subnets/[^/]+",
    re.IGNORECASE,
)
_TAG = re.compile(r"[^<>%&\\?/]{1,512}")
_REGION = re.compile(r"[a-z][a-z0-9]*")
RESERVED_USERS = frozenset(
    [
        "administrator",
        "admin",
        "user",
        "user1",
        "test",
        "user2",
        "test1",
        "user3",
        "admin1",
        "1",
        "123",
        "a",
        "actuser",
        "adm",
        "admin2",
        "aspnet",
        "backup",
        "console",
        "david",
        "guest",
        "john",
        "owner",
        "root",
        "server",
        "sql",
        "support",
        "support_388945a0",
        "sys",
        "test2",
        "test3",
        "user4",
        "user5",
    ]
)
"""User names that Azure refuses."""
MOST_TAGS, OUR_TAGS = 50, 6
RESERVED_TAGS = ("microsoft", "azure", "windows", "evalfleet-", "hidden-")
LOGIN = ("AZURE_TENANT_ID", "AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET")
"""All three or none: a service principal."""


class AzureSettings(VmSettings, frozen=True, forbid_unknown_fields=True):
    """The settings of a place of Azure VMs. `ssh_from` must be given unless they have no public address."""

    subscription: Annotated[str, Meta(description="else AZURE_SUBSCRIPTION_ID, else the default of `az`")] = (
        ""
    )
    resource_group: Annotated[
        str, Meta(description="made if it is not there; else AZURE_DEFAULTS_GROUP, else evalfleet")
    ] = ""
    sizes: Annotated[tuple[str, ...], Meta(description="tried in order of price, if they fit")] = SIZES
    regions: Annotated[tuple[str, ...], Meta(description="where machines may be")] = REGIONS
    zones: Annotated[tuple[str, ...], Meta(description="such as 1, 2, 3; none: wherever there is room")] = ()
    image: Annotated[
        str, Meta(description="publisher:offer:sku:version, or the id of an image or gallery image")
    ] = IMAGE
    security_type: Annotated[
        Literal["Standard", "TrustedLaunch"], Meta(description="TrustedLaunch: for images that need it")
    ] = "Standard"
    disk_gb: Annotated[int, Meta(ge=30, le=4095, description="the system disk")] = 128
    disk: Annotated[
        Literal["Premium_LRS", "StandardSSD_LRS", "Standard_LRS"],
        Meta(description="what the system disk is: fast, slower or slow"),
    ] = "Premium_LRS"
    identity: Annotated[
        str, Meta(description="id of a managed identity for the machines; the agent under test can use it")
    ] = ""
    user: Annotated[str, Meta(description="made on the machines, to come in as")] = "azureuser"
    subnet: Annotated[str, Meta(description="id of a subnet of yours, in the one region of `regions`")] = ""
    tags: Annotated[Mapping[str, str], Meta(description="of your own, on everything that is made")] = field(
        default_factory=dict[str, str]
    )
    scope: Annotated[str, Meta(description="of the token; else <endpoint>/.default of the public cloud")] = ""
    sweep_s: Annotated[
        float,
        Meta(ge=0, description="a budget pays disk and address for so long after the expiry; then `reap`"),
    ] = 3600.0


class NodeSettings(PlaceSettings, frozen=True, forbid_unknown_fields=True):
    """The settings that services of Azure's have in common whose machines are jobs."""

    subscription: Annotated[str, Meta(description="else AZURE_SUBSCRIPTION_ID, else the default of `az`")] = (
        ""
    )
    sizes: Annotated[tuple[str, ...], Meta(description="of nodes, tried in order of price, if they fit")] = (
        NODE_SIZES
    )
    subnet: Annotated[str, Meta(description="id of a subnet of yours for the nodes")] = ""
    name: Annotated[str, Meta(description="of jobs; must have {machine} in it")] = "evalfleet-{machine}"
    time_limit_s: Annotated[float, Meta(ge=60, description="how long a job may run")] = 12 * 3600.0
    queue_s: Annotated[
        float, Meta(gt=0, description="a job that waits for a node for longer is given up")
    ] = 3600.0
    prepare_s: Annotated[
        float, Meta(gt=0, description="a machine whose image is not there for longer is given up")
    ] = 1200.0
    expected_queue_s: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(description="seconds that a job is expected to wait in the queue; for estimates"),
    ] = None
    poll_s: Annotated[
        float,
        Meta(gt=0, description="the service is asked no more often than this, or 2 s while a machine starts"),
    ] = 5.0
    scope: Annotated[str, Meta(description="of the token; else that of the public cloud")] = ""
    storage_endpoint: Annotated[str, Meta(description="of its blobs, if it is not the public one")] = ""


class AzureAccount(VmAccount, frozen=True, kw_only=True):
    """The subscription and the resource group that a place uses."""

    subscription: str
    group: str
    """The name of the resource group."""


def account_of(name: str, settings: AzureSettings, context: PlaceContext) -> AzureAccount:
    """The account that the settings and the environment name. Raises RequestError."""
    environ = context.environ
    _check(name, [*_problems(settings), *empty_variables(environ)])
    subscription = settings.subscription or environ.get("AZURE_SUBSCRIPTION_ID") or az_subscription(environ)
    if not subscription:
        raise RequestError(
            f"place {name!r}: no subscription is known; set `subscription` or AZURE_SUBSCRIPTION_ID, or run "
            "`az login`"
        )

    group = settings.resource_group or environ.get("AZURE_DEFAULTS_GROUP") or GROUP
    return AzureAccount(
        subscription=subscription,
        group=group,
        owner=owner_of(settings, environ),
        ca=file_of(name, "ca", settings.ca, context),
        key=file_of(name, "key", settings.key, context),
    )


def _check(name: str, problems: list[str]) -> None:
    for problem in problems:
        raise RequestError(f"place {name!r}: {problem}")


def _problems(settings: AzureSettings) -> list[str]:
    found = source_problems(settings.ssh_from, must=settings.public_ip)
    found += problems_of(settings, settings.name, "A-Za-z0-9._-")
    if not settings.sizes or not settings.regions:
        found.append("`sizes` and `regions` must not be empty")
    for region in settings.regions:
        if not _REGION.fullmatch(region):
            plain = re.sub(r"[^a-z0-9]", "", region.lower())
            found.append(f"regions: {region!r} must be written as {plain!r} (`az account list-locations`)")
    if not is_user_name(settings.user) or settings.user in RESERVED_USERS:
        found.append(
            f"Azure refuses the user {settings.user!r}: up to 32 small letters, digits, '_' and '-', and "
            "none of admin, administrator, root, user, test, guest and the like"
        )
    if settings.subnet and not _SUBNET.fullmatch(settings.subnet):
        found.append("`subnet` must be a subnet's id, /subscriptions/.../virtualNetworks/NET/subnets/SUBNET")
    if settings.subnet and len(settings.regions) > 1:
        found.append("with `subnet`, `regions` must be the one region that it is in")
    if settings.image.count(":") != 3 and not settings.image.startswith("/subscriptions/"):
        found.append("`image` must be publisher:offer:sku:version, or an id /subscriptions/...")
    found += _tag_problems(settings)
    if settings.disk == "Premium_LRS":
        found += [
            f'{name} cannot have Premium disks: set disk = "StandardSSD_LRS", or use a size with an s'
            for name in settings.sizes
            if (size := size_of(name)) is not None and not size.premium
        ]
    return found


def _tag_problems(settings: AzureSettings) -> list[str]:
    tags = settings.tags
    found = [f"tag {key!r} cannot be used" for key in tags if not _TAG.fullmatch(key)]
    found += [
        f"tag {key!r} cannot be used: names that begin with {word!r} are taken"
        for key in tags
        for word in RESERVED_TAGS
        if key.lower().startswith(word)
    ]
    found += [f"tag {key!r}: its value has more than 256 characters" for key in tags if len(tags[key]) > 256]
    if len({key.lower() for key in tags}) < len(tags):
        found.append("tags: to Azure, names that differ in upper and lower case only are one")
    if len(tags) > MOST_TAGS - OUR_TAGS:
        found.append(f"tags: no more than {MOST_TAGS - OUR_TAGS}, since Azure allows {MOST_TAGS} in all")
    return found


def empty_variables(environ: Mapping[str, str]) -> list[str]:
    """A secret that CI does not have becomes an empty variable."""
    empty = [name for name in LOGIN if not environ.get(name, "").strip()]
    given = [name for name in LOGIN if name not in empty]
    told = [name for name in empty if name in environ]
    if not given or not told:
        return []
    return [
        f"{told[0]} is empty although {given[0]} is set: give it a value, or unset all of {', '.join(LOGIN)}"
    ]


def az_folder(environ: Mapping[str, str]) -> str:
    """Where `az` keeps its files."""
    return environ.get("AZURE_CONFIG_DIR") or str(Path(environ.get("HOME") or "~").expanduser() / ".azure")


def az_subscription(environ: Mapping[str, str]) -> str:
    """The subscription that `az account set` chose."""
    folder = az_folder(environ)
    try:
        profile = cast(
            "dict[str, Any]", json.loads((Path(folder) / "azureProfile.json").read_text("utf-8-sig"))
        )
        chosen = [each["id"] for each in profile["subscriptions"] if each.get("isDefault")]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return str(chosen[0]) if chosen else ""
