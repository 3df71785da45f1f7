"""What is sent to Azure Machine Learning: a cluster, an environment, and a machine's job. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from msgspec import Struct

from evalfleet.channels.mailboxes import MailPilot
from evalfleet.model import MachineId
from evalfleet.places.azure.names import plain
from evalfleet.places.azure.services import mail_pilot_environ, mail_pilot_script
from evalfleet.places.vm.answers import Json

from .settings import AzureMlSettings, MlAccount

ENVIRONMENT = "evalfleet"
END_S = 60.0
"""How long the pilot may take to end what runs on the machine, after its time."""
KVM = "--device=/dev/kvm"


def job_name(machine: MachineId, form: str) -> str:
    return plain(form.replace("{machine}", machine))


def cluster_name(pool: str, home: str, size: str, *, spot: bool) -> str:
    """Of the cluster of a run, or of a pool, for one size: 24 characters are what every version allows."""
    told = hashlib.sha256(f"{pool}/{home}/{size.lower()}/{spot}".encode()).hexdigest()
    return f"ef-{home[:6]}-{told[:10]}"


def duration(seconds: float) -> str:
    return f"PT{max(1, round(seconds))}S"


class MlJobBuild(Struct, frozen=True):
    """All that a machine's job is made of."""

    machine: MachineId
    cluster: str
    kvm: bool
    """Must the container be able to run virtual machines?"""
    pilot: MailPilot
    life_s: float
    environment: str
    """The id of the environment's version."""
    tags: Mapping[str, str]


def cluster_body(
    settings: AzureMlSettings, region: str, size: str, tags: Mapping[str, str], *, spot: bool
) -> Json:
    """A cluster that has no nodes while it has no jobs. Nobody can log in to its nodes."""
    properties: Json = {
        "osType": "Linux",
        "vmSize": size,
        "vmPriority": "LowPriority" if spot else "Dedicated",
        "scaleSettings": {
            "minNodeCount": 0,
            "maxNodeCount": settings.max_nodes,
            "nodeIdleTimeBeforeScaleDown": duration(settings.idle_s),
        },
        "remoteLoginPortPublicAccess": "Disabled",
        "enableNodePublicIp": settings.public_ip,
    }
    if settings.subnet:
        properties["subnet"] = {"id": settings.subnet}
    return {
        "location": region,
        "tags": dict(tags),
        "properties": {"computeType": "AmlCompute", "disableLocalAuth": True, "properties": properties},
    }


def environment_version(image: str) -> str:
    return hashlib.sha256(image.encode()).hexdigest()[:16]


def environment_body(image: str) -> Json:
    return {"properties": {"image": image, "osType": "Linux", "isAnonymous": True}}


def job_body(settings: AzureMlSettings, account: MlAccount, build: MlJobBuild) -> Json:
    """The job ends by itself when its time is over, whoever is there then."""
    resources: Json = {"instanceCount": 1}
    if args := " ".join(filter(None, (KVM if build.kvm else "", settings.docker_args))):
        resources["dockerArgs"] = args
    if settings.shm_gb:
        resources["shmSize"] = f"{settings.shm_gb}g"
    return {
        "properties": {
            "jobType": "Command",
            "displayName": build.machine,
            "experimentName": settings.experiment,
            "computeId": f"{account.path}/computes/{build.cluster}",
            "environmentId": build.environment,
            "command": mail_pilot_script(),
            "environmentVariables": mail_pilot_environ(build.pilot),
            "limits": {"jobLimitsType": "Command", "timeout": duration(build.life_s + END_S)},
            "resources": resources,
            "tags": dict(build.tags),
        }
    }
