"""What is sent to Azure Machine Learning: a cluster, an environment, and a machine's job. Pure."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from msgspec import Struct

from evalfleet.channels.mail.boxes import MailPilot
from evalfleet.model import MachineId
from evalfleet.places.azure.names import plain
from evalfleet.places.azure.services import mail_pilot_environ, mail_pilot_script
from evalfleet.places.vm.answers import Json

from .settings import AzureMlSettings, MlAccount

ADMIT = Path(__file__).with_name("admit.py")
ENVIRONMENT = "evalfleet"
END_S = 60.0
"""How long the pilot may take to end what runs on the machine, after its time."""
KVM = "--device=/dev/kvm"


def job_name(machine: MachineId, form: str) -> str:
    return plain(form.replace("{machine}", machine))


def cluster_name(pool: str, home: str, size: str, *, spot: bool) -> str:
    """Of the cluster of a run, or of a pool, for one size: 24 characters are what every version allows.

    After the last hyphen, Azure wants a letter.
    """
    told = hashlib.sha256(f"{pool}/{home}/{size.lower()}/{spot}".encode()).hexdigest()
    return f"ef-{home[:6]}-c{told[:10]}"


def duration(seconds: float) -> str:
    return f"PT{max(1, round(seconds))}S"


_DURATION = re.compile(r"P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+(?:\.\d+)?)S)?)?")


def seconds_of(duration: object) -> float | None:
    """The seconds of a duration as Azure writes it; None if it is none."""
    found = _DURATION.fullmatch(str(duration))
    if found is None or not any(found.groups()):
        return None
    days, hours, minutes, seconds = (float(each or 0.0) for each in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


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


class ComputeInstanceBuild(Struct, frozen=True, kw_only=True):
    """All that a compute instance is made of."""

    region: str
    size: str
    setup: str
    """The address of the blob that is its creation program, with a token for it alone."""
    stops_at: float
    """When Azure is to stop it, by Azure's clock."""
    tags: Mapping[str, str]


def instance_name(machine: MachineId, home: str) -> str:
    """Of a machine's compute instance: names are the region's, and have 24 characters at most."""
    return f"ef-{home[:6]}-i{hashlib.sha256(f'{home}/{machine}'.encode()).hexdigest()[:12]}"


def instance_schedules(stops_at: float) -> Json:
    """The one schedule of a compute instance: Azure stops it at this time, by Azure's clock."""
    # by the minute, and never sooner than its end: a time that is over would come again in a year
    stops = datetime.fromtimestamp(math.ceil(stops_at / 60 + 1) * 60, UTC)
    stop = {
        "action": "Stop",
        "status": "Enabled",
        "triggerType": "Cron",
        "cron": {
            "startTime": stops.strftime("%Y-%m-%dT00:00:00"),
            "timeZone": "UTC",
            "expression": f"{stops.minute} {stops.hour} {stops.day} {stops.month} *",
        },
    }
    return {"computeStartStop": [stop]}


def instance_body(settings: AzureMlSettings, build: ComputeInstanceBuild) -> Json:
    """A compute instance that Azure itself stops at its end. SSH is open to whoever has our key.

    It has no `idleTimeBeforeShutdown`: SSH does not count as use, so Azure would stop it during a run.
    """
    fetch = f"python3 -c \"import urllib.request as u; exec(u.urlopen('{build.setup}').read())\""
    script = base64.b64encode(f"#!/bin/bash\n{fetch}\n".encode()).decode()
    properties: Json = {
        "vmSize": build.size,
        "applicationSharingPolicy": "Personal",
        "computeInstanceAuthorizationType": "personal",
        "sshSettings": {"sshPublicAccess": "Enabled" if settings.public_ip else "Disabled"},
        "enableNodePublicIp": settings.public_ip,
        "schedules": instance_schedules(build.stops_at),
        "setupScripts": {
            "scripts": {"creationScript": {"scriptSource": "inline", "scriptData": script, "timeout": "10m"}}
        },
    }
    if settings.subnet:
        properties["subnet"] = {"id": settings.subnet}
    if settings.assigned_user:
        tenant, _, person = settings.assigned_user.partition("/")
        user = {"assignedUser": {"tenantId": tenant, "objectId": person}}
        properties["personalComputeInstanceSettings"] = user
    return {
        "location": build.region,
        "tags": dict(build.tags),
        "properties": {
            "computeType": "ComputeInstance",
            "disableLocalAuth": not settings.public_ip,
            "properties": properties,
        },
    }


def instance_setup(user: str, key: str, tells: str) -> str:
    """The program that a compute instance runs when it is made. `tells`: where it is to tell its host key."""
    return f"{ADMIT.read_text()}\n\nmain({user!r}, {key!r}, {tells!r})\n"


def environment_version(image: str) -> str:
    return hashlib.sha256(image.encode()).hexdigest()[:16]


def environment_body(image: str) -> Json:
    return {"properties": {"image": image, "osType": "Linux"}}


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
