"""What is sent to Batch: a job that brings its own pool of one node, and its one task, the pilot. Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from evalfleet.channels.mail.boxes import MailPilot
from evalfleet.model import MachineId
from evalfleet.places.azure.names import plain
from evalfleet.places.azure.services import mail_pilot_environ, mail_pilot_script, pilot_script
from evalfleet.places.vm.answers import Json, rows

from .settings import AzureBatchSettings, image_of

PILOT = Path(__file__).with_name("pilot.py")
TASK = "pilot"
HOST_KEY = "wd/host-key"
START = "evalfleet-start"
LIFE = "evalfleet-life-s"
SPOT = "evalfleet-spot"
"""The tag of a job that is to have a spot node of a pool of the user's."""
PREFIX = "evalfleet"
"""How the names of the pools begin that Batch makes for our jobs."""
END_S = 60.0
"""How long Batch may take to end a task and, with its job, the node."""
BOOT_S = 900.0
"""A node that takes longer from its start to that of its task is not what we asked for."""
RESIZE_S = (300.0, 7 * 86_400.0)
"""So long Batch looks for a node at least, and at most; a quarter of an hour, unless it is told."""
NO_IMAGE, NO_PULL = 80, 81
"""Exit codes of a start task whose image is not there, or cannot be had for now."""
FIRST_PRIORITY = 150
KVM = "--device=/dev/kvm"
FOR_GOOD = "manifest unknown|manifest .*not found|denied|unauthorized|invalid reference"
"""What a registry says of an image that will not be there the next time, either."""
INSTALL_S = 900
LOCKED = "Could not get lock|Unable to acquire the dpkg frontend lock|is another process using it"
PULL = f"""\
begun=$(date +%s)
apt() {{
  until said=$(DEBIAN_FRONTEND=noninteractive apt-get -y -o DPkg::Lock::Timeout=60 "$@" 2>&1); do
    echo "$said" >&2
    echo "$said" | grep -qE '{LOCKED}' || exit {NO_PULL}
    [ $(($(date +%s) - begun)) -lt {INSTALL_S} ] || exit {NO_PULL}
    sleep 5
  done
}}
command -v docker >/dev/null || {{ apt update && apt install docker.io; }}
pull() {{
  for pause in 5 20 60 0; do
    said=$(docker pull "$1" 2>&1) && return 0
    echo "$said" >&2
    echo "$said" | grep -qiE '{FOR_GOOD}' && exit {NO_IMAGE}
    [ $pause = 0 ] || sleep $((pause + $$ % 7))
  done
  exit {NO_PULL}
}}
"""
"""What is transient is tried again, after pauses that differ from node to node. Images of Azure's install
updates at their first boot, and hold apt's locks meanwhile."""


def job_id(machine: MachineId, form: str) -> str:
    return plain(form.replace("{machine}", machine))


def duration(seconds: float) -> str:
    return f"PT{max(1, round(seconds))}S"


def constraints(most_s: float) -> Json:
    """Of a job, counted from its creation, or of a task, from its start."""
    return {"maxWallClockTime": duration(most_s), "maxTaskRetryCount": 0}


class NodeStart(Struct, frozen=True):
    """What is known of a machine's first start, kept with its job: whoever comes later knows it, too."""

    start: str
    """Its name: the node, and how often Batch had run the task before."""
    node: str
    allocated: float
    """When the node was had, from which on it is billed: in seconds since 1970, by Azure's clock."""
    address: str = ""
    """Where its sshd is reached; empty until we were there."""
    key: str = ""
    """Its host key, as the pilot told it through Batch."""


class JobBuild(Struct, frozen=True):
    """All that a job is made of."""

    machine: MachineId
    size: str
    spot: bool
    kvm: bool
    """Must the node be able to run virtual machines?"""
    key: str
    """Our public key."""
    life_s: float
    tags: Mapping[str, str]
    pilot: MailPilot | None = None
    """What it runs, if it is reached by a mailbox; else a pilot that lets us in."""
    registry: Json = {}
    """The login to the private registry of its container. It may hold a password."""


def job_body(settings: AzureBatchSettings, build: JobBuild) -> Json:
    """One call makes all of it, and the end of the job deletes all of it, whoever is there then."""
    spot = {SPOT: "1"} if build.spot else {}
    most_s = settings.queue_s + BOOT_S + build.life_s + END_S
    return {
        "id": job_id(build.machine, settings.name),
        "displayName": build.machine[:1024],
        "poolInfo": {"autoPoolSpecification": _pool(settings, build)},
        "constraints": constraints(most_s),
        "jobManagerTask": _pilot(settings, build),
        "metadata": metadata({**build.tags, **spot, LIFE: f"{build.life_s:.3f}"}),
    }


def metadata(items: Mapping[str, str]) -> list[Json]:
    return [{"name": name, "value": value} for name, value in items.items()]


def metadata_in(shown: Json) -> dict[str, str]:
    return {str(each.get("name")): str(each.get("value")) for each in rows(shown.get("metadata"))}


def _pilot(settings: AzureBatchSettings, build: JobBuild) -> Json:
    if build.pilot is not None:
        return {
            **_task(build, mail_pilot_script(), mail_pilot_environ(build.pilot)),
            **_container(settings, build),
        }
    environ = {
        "EVALFLEET_PILOT": PILOT.read_text("utf-8"),
        "EVALFLEET_USER": settings.user,
        "EVALFLEET_KEY": build.key,
        "EVALFLEET_KVM": "1" if build.kvm else "",
        "EVALFLEET_LIFE_S": f"{build.life_s:.3f}",
    }
    return _task(build, pilot_script('python3 -I -c "$EVALFLEET_PILOT"'), environ)


def _container(settings: AzureBatchSettings, build: JobBuild) -> Json:
    """In a pool with containerConfiguration every task must be a container, and so must the pilot."""
    if not settings.container:
        return {}
    args = " ".join(filter(None, (KVM if build.kvm else "", settings.container_args)))
    container: Json = {"imageName": settings.container, "containerRunOptions": args}
    return {"containerSettings": container}


def _task(build: JobBuild, script: str, environ: Mapping[str, str]) -> Json:
    return {
        "id": TASK,
        "commandLine": shlex.join(("/bin/sh", "-c", script)),
        "environmentSettings": metadata(environ),
        "constraints": constraints(build.life_s + END_S),
        "userIdentity": _root(),
        "killJobOnCompletion": True,
        "runExclusive": True,
        "allowLowPriorityNode": True,
    }


def _root() -> Json:
    return {"autoUser": {"scope": "pool", "elevationLevel": "admin"}}


def _pool(settings: AzureBatchSettings, build: JobBuild) -> Json:
    target = "targetLowPriorityNodes" if build.spot else "targetDedicatedNodes"
    machine: Json = {
        "imageReference": _image(image_of(settings)),
        "nodeAgentSKUId": settings.node_agent,
        "osDisk": {"diskSizeGB": settings.disk_gb},
    }
    if settings.container:  # nodes pull all of these before they take a task
        names = list(dict.fromkeys((settings.container, *settings.images)))
        contained: Json = {"type": "dockerCompatible", "containerImageNames": names}
        if build.registry:
            contained["containerRegistries"] = [build.registry]
        machine["containerConfiguration"] = contained
    pool: Json = {
        "vmSize": build.size,
        "virtualMachineConfiguration": machine,
        "taskSlotsPerNode": 1,
        target: 1,
        "resizeTimeout": duration(min(max(settings.queue_s, RESIZE_S[0]), RESIZE_S[1])),
        "metadata": metadata(build.tags),
    }
    if network := _network(settings):
        pool["networkConfiguration"] = network
    if start := _start_script(settings):
        line = shlex.join(("/bin/sh", "-c", start))
        pool["startTask"] = {
            "commandLine": line,
            "waitForSuccess": True,
            "maxTaskRetryCount": 1 if settings.start_command else 0,  # pulls are tried again by the script
            "userIdentity": _root(),
        }
    return {"autoPoolIdPrefix": PREFIX, "poolLifetimeOption": "job", "keepAlive": False, "pool": pool}


def _image(image: str) -> Json:
    if image.startswith("/"):
        return {"virtualMachineImageId": image}
    return dict(zip(("publisher", "offer", "sku", "version"), image.split(":"), strict=True))


def _network(settings: AzureBatchSettings) -> Json:
    """Nobody is let in but those whom `ssh_from` names, and only to sshd."""
    network: Json = {"subnetId": settings.subnet} if settings.subnet else {}
    if not settings.public_ip:
        return {**network, "publicIPAddressConfiguration": {"provision": "nopublicipaddresses"}}
    if settings.reach == "mailbox":
        return network
    sources = ["0.0.0.0/0" if each == "*" else each for each in settings.ssh_from]
    rules = [
        {"priority": FIRST_PRIORITY + n, "access": "allow", "sourceAddressPrefix": source}
        for n, source in enumerate(sources)
    ]
    rules.append({"priority": FIRST_PRIORITY + len(rules), "access": "deny", "sourceAddressPrefix": "*"})
    nat = {
        "name": "ssh",
        "protocol": "tcp",
        "backendPort": settings.port,
        "frontendPortRangeStart": settings.ports[0],
        "frontendPortRangeEnd": settings.ports[1],
        "networkSecurityGroupRules": rules,
    }
    return {**network, "endpointConfiguration": {"inboundNATPools": [nat]}}


def _start_script(settings: AzureBatchSettings) -> str:
    """Container images are pulled by the start task: in a pool with containerConfiguration, which could
    prefetch them, every task must be a container. Where the pilot is one, the pool does so."""
    images = () if settings.container else settings.images
    pulls = "".join(f"pull {shlex.quote(image)}\n" for image in images)
    return (PULL + pulls if pulls else "") + settings.start_command


def mark_of(start: NodeStart) -> str:
    return json.dumps({name: value for name in start.__struct_fields__ if (value := getattr(start, name))})
