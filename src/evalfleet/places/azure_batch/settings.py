"""What `[places.NAME]` with kind = "azure_batch" may say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from evalfleet.errors import RequestError
from evalfleet.places.azure.settings import RESERVED_USERS, NodeSettings, az_subscription, empty_variables
from evalfleet.places.vm.settings import (
    VmAccount,
    file_of,
    is_user_name,
    owner_of,
    problems_of,
    source_problems,
)
from evalfleet.ports import PlaceContext

IMAGE = "canonical:ubuntu-24_04-lts:server:latest"
CONTAINER_IMAGE = "microsoft-dsvm:ubuntu-hpc:2404:latest"
"""Of nodes that run containers: one that Batch says to be able to."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ACCOUNT = re.compile(r"[a-z0-9]{3,24}\.[a-z][a-z0-9]*")
_IMAGE_ID = re.compile(r"/subscriptions/[^/]+/resourceGroups/.+/images/.+", re.IGNORECASE)
_REFERENCE = re.compile(r"[\w.-]+(:\d+)?(/[\w.-]+)*(:[\w.-]+)?(@sha256:[0-9a-f]{64})?")
_STORAGE = re.compile(r"[a-z0-9]{3,24}")
RESERVED_PORTS = range(50_000, 55_001)
LEAST_PORTS = 40


class AzureBatchSettings(NodeSettings, frozen=True, forbid_unknown_fields=True):
    """The settings of a place of Azure Batch. `account` and `ssh_from` must be given."""

    REMOVED: ClassVar[Mapping[str, str]] = {
        "creates_a_minute": "leave it out, since jobs wait in the queue of the service",
        "pool": "each machine gets a pool of its own that Batch deletes with its job",
        "registry": "the registry is the host in the name of `container`",
        "registry_password_file": "set `registry_password` to the name of a variable",
        "registry_identity": "set `registry_user` and `registry_password`",
    }

    account: Annotated[str, Meta(description="of Batch, as NAME.REGION; else by AZURE_BATCH_ENDPOINT")] = ""
    region: Annotated[str, Meta(description="of the account, if its name does not tell")] = ""
    image: Annotated[
        str, Meta(description="of nodes: publisher:offer:sku:version, or the id of a gallery image")
    ] = IMAGE
    node_agent: Annotated[
        str,
        Meta(description="Batch's name of its agent for the image (`az batch pool supported-images list`)"),
    ] = "batch.node.ubuntu 24.04"
    disk_gb: Annotated[int, Meta(ge=30, le=4095, description="the nodes' system disk")] = 128
    images: Annotated[
        tuple[str, ...], Meta(description="container images that a node pulls before it is used")
    ] = ()
    start_command: Annotated[str, Meta(description="run by `sh` as root on a node before it is used")] = ""
    reach: Annotated[
        Literal["ssh", "mailbox"],
        Meta(
            description="mailbox: nothing connects to nodes and no port is open; they ask for their work in "
            "a storage account"
        ),
    ] = "ssh"
    storage: Annotated[
        str, Meta(description="name of the storage account of mailboxes; else the Batch account's own")
    ] = ""
    container: Annotated[
        str,
        Meta(
            description="image of a container that machines are, with Python 3.8 or later; nodes pull it and "
            '`images` before they are used; needs reach = "mailbox"'
        ),
    ] = ""
    container_args: Annotated[
        str, Meta(description="more of `docker run` for it; --device=/dev/kvm comes by itself if needed")
    ] = ""
    registry_user: Annotated[str, Meta(description="logs in to the private registry of `container`")] = ""
    registry_password: Annotated[str, Meta(description="the variable that holds the password")] = ""
    ports: Annotated[
        tuple[int, int],
        Meta(description="of the public address that lead to the nodes' sshd: first and last"),
    ] = (49_000, 49_099)
    user: Annotated[str, Meta(description="made on the nodes, to come in as")] = "evalfleet"
    ssh_from: Annotated[
        tuple[str, ...], Meta(description="addresses or ranges that may connect, such as 203.0.113.7/32")
    ] = ()
    port: Annotated[int, Meta(ge=1, le=65535, description="of the nodes' sshd")] = 22
    max_vcpus: Annotated[int, Meta(ge=0, description="all machines of this home together; 0: no limit")] = 0
    lost_s: Annotated[
        float, Meta(ge=12, description="silence of so many seconds before a machine is given up")
    ] = 45.0
    teardown_s: Annotated[
        float, Meta(gt=0, description="so many seconds before the end of its time a machine is deleted")
    ] = 120.0
    management: Annotated[
        str, Meta(description="Azure's Resource Manager, for `doctor`, if it is not the public one")
    ] = ""


class BatchAccount(VmAccount, frozen=True, kw_only=True):
    """The Batch account that a place uses."""

    endpoint: str
    name: str
    region: str
    subscription: str
    """Empty: nobody knows, and nothing but some checks needs it."""


def account_of(name: str, settings: AzureBatchSettings, context: PlaceContext) -> BatchAccount:
    """The account that the settings and the environment name. Raises RequestError."""
    environ = context.environ
    for problem in [*_problems(settings), *empty_variables(environ)]:
        raise RequestError(f"place {name!r}: {problem}")
    endpoint, account, region = _endpoint(name, settings, environ)
    return BatchAccount(
        endpoint=endpoint,
        name=account,
        region=settings.region or region,
        subscription=settings.subscription
        or environ.get("AZURE_SUBSCRIPTION_ID")
        or az_subscription(environ),
        owner=owner_of(settings, environ),
        ca=file_of(name, "ca", settings.ca, context),
        key=file_of(name, "key", settings.key, context),
    )


def _endpoint(name: str, settings: AzureBatchSettings, environ: Mapping[str, str]) -> tuple[str, str, str]:
    """Its address, its name and its region."""
    told = environ.get("AZURE_BATCH_ENDPOINT", "").removeprefix("https://").rstrip("/")
    account = settings.account or told.removesuffix(".batch.azure.com")
    if not account:
        raise RequestError(
            f'place {name!r}: no Batch account is known; set account = "NAME.REGION" (`az batch account list '
            "--query [].accountEndpoint`), or AZURE_BATCH_ENDPOINT"
        )
    if not _ACCOUNT.fullmatch(account):
        raise RequestError(
            f"place {name!r}: account = {account!r} must be NAME.REGION, such as evals.eastus: small letters "
            "and digits, as `az batch account list --query [].accountEndpoint` begins"
        )
    short, _, region = account.partition(".")
    return settings.endpoint or f"https://{account}.batch.azure.com", short, region


def _problems(settings: AzureBatchSettings) -> list[str]:
    by_ssh = settings.reach == "ssh"
    found = source_problems(settings.ssh_from, must=by_ssh and settings.public_ip)
    found += problems_of(settings, settings.name, "A-Za-z0-9_-")
    if not settings.sizes:
        found.append("`sizes` must not be empty")
    if not is_user_name(settings.user) or settings.user in RESERVED_USERS:
        found.append(
            f"the user {settings.user!r} cannot be made: up to 32 small letters, digits, '_' and '-'"
        )
    if settings.image.count(":") != 3 and not _IMAGE_ID.fullmatch(settings.image):
        found.append("`image` must be publisher:offer:sku:version, or an id /subscriptions/.../images/NAME")
    first, last = settings.ports
    reserved = first <= RESERVED_PORTS[-1] and last >= RESERVED_PORTS[0]
    if not 1 <= first <= last <= 65_534 or last - first + 1 < LEAST_PORTS or reserved:
        found.append(
            f"`ports` must be a first and a last port, {LEAST_PORTS} or more, none of 50000 to 55000"
        )
    if len(settings.ssh_from) > 24:
        found.append("`ssh_from` has more than the 24 entries that Batch takes: join some to ranges")
    found += [
        f"images: {each!r} is no container image"
        for each in settings.images
        if not _REFERENCE.fullmatch(each)
    ]
    if not settings.public_ip and not settings.jump and by_ssh:
        found.append(
            'nodes without public addresses cannot be reached from here: set reach = "mailbox", by which '
            "they ask for their work in a storage account, or `jump` to a host that reaches them"
        )
    found += [*_mailbox_problems(settings), *_registry_problems(settings)]
    if not settings.public_ip and not settings.subnet:
        found.append("public_ip = false needs `subnet`: Batch makes such nodes in a network of yours only")
    return found


def _registry_problems(settings: AzureBatchSettings) -> list[str]:
    """Return what is wrong with the registry's settings. A password in place of its name is not shown."""
    problems: list[str] = []
    if settings.registry_password and not _VARIABLE.fullmatch(settings.registry_password):
        problems.append("`registry_password` is the name of a variable, never the password itself")
    if bool(settings.registry_password) != bool(settings.registry_user):
        problems.append("a registry needs `registry_user` with `registry_password`")
    if settings.registry_user and not settings.container:
        problems.append("`registry_user` needs `container`: anyone could read a password in the start task")
    return problems


def _mailbox_problems(settings: AzureBatchSettings) -> list[str]:
    found: list[str] = []
    if settings.container and settings.reach != "mailbox":
        found.append('`container` needs reach = "mailbox": nothing connects to a container of Batch')
    if settings.container and not _REFERENCE.fullmatch(settings.container):
        found.append(f"container: {settings.container!r} is no container image")
    if settings.container_args and not settings.container:
        found.append("`container_args` needs `container`")
    if settings.storage and not _STORAGE.fullmatch(settings.storage):
        found.append(f"storage: {settings.storage!r} must be 3 to 24 small letters and digits")
    if settings.storage_endpoint and not settings.storage_endpoint.startswith("https://"):
        found.append("`storage_endpoint` must begin with https://: tokens are not sent in the clear")
    return found


def image_of(settings: AzureBatchSettings) -> str:
    """Of nodes: containers need another one than we take by ourselves."""
    return CONTAINER_IMAGE if settings.container and settings.image == IMAGE else settings.image
