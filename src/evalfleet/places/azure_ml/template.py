"""What is sent to Azure Machine Learning: a cluster, an environment, and a machine's job. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from evalfleet.model import MachineId
from evalfleet.places.azure.names import plain
from evalfleet.places.vm.answers import Json

from .settings import AzureMlSettings, MlAccount

PILOT = Path(__file__).with_name("pilot.py")
ENVIRONMENT = "evalfleet"
END_S = 60.0
"""How long the pilot may take to end what runs on the machine, after its time."""
KVM = "--device=/dev/kvm"
OLD_PYTHON, NO_PYTHON = 78, 79
NO_PYTHON_WORDS = "evalfleet: the image has no python3"
OLD_PYTHON_WORDS = "evalfleet: python3 of the image is older than 3.8"


def job_name(machine: MachineId, form: str) -> str:
    """Of a machine's job, and of the container of blobs that is its mailbox, which may have no two hyphens
    beside each other."""
    name = plain(form.replace("{machine}", machine))
    if "--" not in name:
        return name
    return f"{re.sub('-+', '-', name)[:50]}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"


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
    way: str
    """The address of the blob that tells the pilot all, with a token for it alone."""
    program: str
    """The same of the blob that is the pilot."""
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
            "command": command(),
            "environmentVariables": {"EVALFLEET_WAY": build.way, "EVALFLEET_PROGRAM": build.program},
            "limits": {"jobLimitsType": "Command", "timeout": duration(build.life_s + END_S)},
            "resources": resources,
            "tags": dict(build.tags),
        }
    }


def command() -> str:
    """Of the job: the pilot is fetched by it, so that the definition of the job stays small."""
    missing = f"{{ echo {NO_PYTHON_WORDS} >&2; exit {NO_PYTHON}; }}"
    old = f"{{ echo {OLD_PYTHON_WORDS} >&2; exit {OLD_PYTHON}; }}"
    fetch = 'import os, urllib.request as u; exec(u.urlopen(os.environ["EVALFLEET_PROGRAM"]).read())'
    return (
        f"command -v python3 >/dev/null || {missing}; "
        f"python3 -c 'import sys; sys.exit(sys.version_info < (3, 8))' || {old}; "
        f"exec python3 -I -c '{fetch}'"
    )
