"""What `[places.NAME]` with kind = "azure_ml" may say."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from msgspec import Meta

from evalfleet.errors import RequestError
from evalfleet.places.azure.settings import NODE_SIZES, NodeSettings, az_subscription, empty_variables
from evalfleet.places.vm.settings import VmAccount, file_of, owner_of, problems_of
from evalfleet.ports import PlaceContext

IMAGE = "mcr.microsoft.com/azureml/openmpi5.0-ubuntu24.04:latest"
_WORKSPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{2,32}")
_CLUSTER = re.compile(r"[A-Za-z][A-Za-z0-9-]{1,31}")
_REGION = re.compile(r"[a-z][a-z0-9]*")
_SUBNET = re.compile(r"/subscriptions/.+/virtualNetworks/[^/]+/subnets/[^/]+", re.IGNORECASE)
_PERSON = re.compile(r"[0-9a-fA-F-]{36}/[0-9a-fA-F-]{36}")
REFERENCE = re.compile(r"[\w.-]+(:\d+)?(/[\w.-]+)*(:[\w.-]+)?(@sha256:[0-9a-f]{64})?")


class AzureMlSettings(NodeSettings, frozen=True, forbid_unknown_fields=True):
    """The settings of a place of Azure Machine Learning. `workspace` and `resource_group` must be given."""

    workspace: Annotated[str, Meta(description="of Azure Machine Learning; else AZUREML_WORKSPACE_NAME")] = ""
    resource_group: Annotated[
        str, Meta(description="that the workspace is in; else AZUREML_RESOURCE_GROUP")
    ] = ""
    region: Annotated[str, Meta(description="of the workspace; else it is asked")] = ""
    image: Annotated[
        str, Meta(description="of the container that machines are, with Python 3.8 or later")
    ] = IMAGE
    docker_args: Annotated[
        str, Meta(description="more of `docker run` for it; --device=/dev/kvm comes by itself if needed")
    ] = ""
    shm_gb: Annotated[int, Meta(ge=0, description="shared memory of the container; 0: what Azure gives")] = 0
    compute: Annotated[
        Literal["clusters", "instances"],
        Meta(
            description="instances: a compute instance is a machine, which SSH leads to and `pool` can stop"
        ),
    ] = "clusters"
    assigned_user: Annotated[
        str, Meta(description="of instances: TENANT/OBJECT, the ids of the person that they are for")
    ] = ""
    cluster: Annotated[
        str,
        Meta(description="a cluster of yours, which is neither resized nor deleted; else a run has its own"),
    ] = ""
    max_nodes: Annotated[
        int,
        Meta(ge=1, le=1000, description="of a cluster: so many machines at once, which count against quota"),
    ] = 6
    idle_s: Annotated[
        float, Meta(ge=60, description="for so long a node without a job is kept, and billed")
    ] = 120.0
    experiment: Annotated[str, Meta(description="under which jobs are shown in the studio")] = "evalfleet"
    start_s: Annotated[
        float,
        Meta(gt=0, description="a job that is said to run for longer without its container is given up"),
    ] = 600.0
    end_s: Annotated[
        float, Meta(gt=0, description="a job that takes longer to end loses its cluster, if none needs it")
    ] = 600.0
    lost_s: Annotated[float, Meta(ge=60, description="a machine that is silent for longer is given up")] = (
        600.0
    )


class MlAccount(VmAccount, frozen=True, kw_only=True):
    """The workspace that a place uses."""

    subscription: str
    group: str
    workspace: str

    @property
    def path(self) -> str:
        """Of the workspace, as the Resource Manager has it."""
        return (
            f"/subscriptions/{self.subscription}/resourceGroups/{self.group}"
            f"/providers/Microsoft.MachineLearningServices/workspaces/{self.workspace}"
        )


def account_of(name: str, settings: AzureMlSettings, context: PlaceContext) -> MlAccount:
    """The workspace that the settings and the environment name. Raises RequestError."""
    environ = context.environ
    for problem in [*_problems(settings), *empty_variables(environ)]:
        raise RequestError(f"place {name!r}: {problem}")
    workspace = settings.workspace or environ.get("AZUREML_WORKSPACE_NAME", "")
    group = settings.resource_group or environ.get("AZUREML_RESOURCE_GROUP", "")
    if not workspace or not group:
        raise RequestError(
            f"place {name!r}: no workspace is known; set `workspace` and `resource_group` (`az ml workspace "
            "list -o table` shows yours)"
        )
    if not _WORKSPACE.fullmatch(workspace):
        raise RequestError(
            f"place {name!r}: workspace = {workspace!r} must be 3 to 33 letters, digits, '-' and '_'"
        )
    subscription = settings.subscription or environ.get("AZURE_SUBSCRIPTION_ID") or az_subscription(environ)
    if not subscription:
        raise RequestError(
            f"place {name!r}: no subscription is known; set `subscription` or AZURE_SUBSCRIPTION_ID, or run "
            "`az login`"
        )
    return MlAccount(
        subscription=subscription,
        group=group,
        workspace=workspace,
        owner=owner_of(settings, environ),
        ca=file_of(name, "ca", settings.ca, context),
        key=file_of(name, "key", settings.key, context),
    )


def _problems(settings: AzureMlSettings) -> list[str]:
    found = problems_of(settings, settings.name, "A-Za-z0-9-")
    if not settings.sizes:
        found.append("`sizes` must not be empty")
    if not REFERENCE.fullmatch(settings.image):
        found.append(f"image: {settings.image!r} is no container image")
    if settings.cluster and not _CLUSTER.fullmatch(settings.cluster):
        found.append("`cluster` must be 2 to 32 letters, digits and '-', as in the studio's page Compute")
    if settings.cluster and len(settings.sizes) > 1 and settings.sizes != NODE_SIZES:
        found.append("with `cluster`, `sizes` must be the one size of its nodes: by it they are priced")
    if settings.region and not _REGION.fullmatch(settings.region):
        plain = re.sub(r"[^a-z0-9]", "", settings.region.lower())
        found.append(f"region: {settings.region!r} must be written as {plain!r}")
    if settings.subnet and not _SUBNET.fullmatch(settings.subnet):
        found.append("`subnet` must be a subnet's id, /subscriptions/.../virtualNetworks/NET/subnets/SUBNET")
    if not settings.public_ip and not settings.subnet:
        found.append("public_ip = false needs `subnet`: Azure makes such nodes in a network of yours only")
    if settings.cluster and settings.subnet:
        found.append("with `cluster`, the cluster itself says where its nodes are: leave out `subnet`")
    found += _instance_problems(settings)
    if settings.storage_endpoint and not settings.storage_endpoint.startswith("https://"):
        found.append("`storage_endpoint` must begin with https://: tokens are not sent in the clear")
    return found


def _instance_problems(settings: AzureMlSettings) -> list[str]:
    found: list[str] = []
    instances = settings.compute == "instances"
    if instances and settings.spot:
        found.append("compute instances are regular machines: leave out `spot`")
    if instances and settings.cluster:
        found.append('`cluster` is for jobs: leave it out with compute = "instances"')
    if settings.assigned_user and not _PERSON.fullmatch(settings.assigned_user):
        found.append("`assigned_user` must be TENANT/OBJECT, two ids (`az ad signed-in-user show` has yours)")
    for name in ("assigned_user", "key", "jump"):
        if getattr(settings, name) and not instances:
            found.append(f'`{name}` needs compute = "instances": nodes of clusters are reached by mailbox')
    return found
