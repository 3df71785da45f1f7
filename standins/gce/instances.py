"""Instances: what an insert must have, and what becomes of one."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from datetime import datetime
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from standins.cloud.machines import Guest, MachineTrouble
from standins.cloud.words import Json

from . import firewalls
from .catalog import DISK_TYPES, HYPERDISK, HYPERDISK_ONLY, NO_HYPERDISK, TYPES, ZONES, MachineType
from .cloud import Cloud, Disk, Instance, link
from .words import PROJECT, ApiError, OperationError, invalid, not_found

NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
LABEL, LABEL_KEY = re.compile(r"[a-z0-9_-]{0,63}"), re.compile(r"[a-z][a-z0-9_-]{0,62}")
SHORTEST_S, LONGEST_S = 30.0, 120 * 86_400.0
METADATA_VALUE, METADATA_ALL = 256 * 1024, 512 * 1024
ANSWERS_ONLY = ("id", "status", "creationTimestamp", "selfLink", "resourceStatus", "cpuPlatform")
AGENT = (
    "import urllib.request as u\n"
    "kind, value = open('/etc/ssh/ssh_host_ed25519_key.pub').read().split()[:2]\n"
    "url = 'http://169.254.169.254/computeMetadata/v1/instance/guest-attributes/hostkeys/' + kind\n"
    "u.build_opener(u.ProxyHandler({})).open(u.Request(url, value.encode(), {'Metadata-Flavor': 'Google'}, "
    "method='PUT'), timeout=20)\n"
)
"""What cloud-init and the guest agent do at the first boot: tell the host's public key."""


def check_labels(labels: Any) -> dict[str, str]:
    if not isinstance(labels, dict) or len(labels) > 64:
        raise invalid("resource.labels", labels, "At most 64 labels are allowed.")
    for key, value in labels.items():
        if not LABEL_KEY.fullmatch(key) or not LABEL.fullmatch(str(value)):
            raise invalid(
                "resource.labels", f"{key}={value}", "Label keys and values must match [a-z0-9_-]{0,63}."
            )
    return dict(labels)


def check_scheduling(given: Json, now: float) -> Json:
    """What `gcloud` sends passes; what contradicts itself does not."""
    spot = given.get("provisioningModel") == "SPOT"
    duration, moment = given.get("maxRunDuration"), given.get("terminationTime")
    action = given.get("instanceTerminationAction")
    if duration and moment:
        raise invalid("resource.scheduling", "", "Only one of maxRunDuration and terminationTime may be set.")
    if (duration or moment) and not action:
        raise invalid("resource.scheduling.instanceTerminationAction", "", "It must be set with a run limit.")
    if action and not (duration or moment or spot):
        raise invalid(
            "resource.scheduling.instanceTerminationAction", action, "It needs a run limit or SPOT."
        )
    if spot and (given.get("automaticRestart", True) or given.get("onHostMaintenance") == "MIGRATE"):
        raise invalid(
            "resource.scheduling", "SPOT", "automaticRestart must be false, onHostMaintenance TERMINATE."
        )
    if given.get("preemptible") and not spot and given.get("provisioningModel"):
        raise invalid("resource.scheduling.preemptible", True, "It contradicts the provisioning model.")
    left_s = None
    if duration:
        if not isinstance(duration.get("seconds"), str):
            raise invalid(
                "resource.scheduling.maxRunDuration.seconds", duration.get("seconds"), "It is an int64."
            )
        left_s = float(duration["seconds"])
    if moment:
        try:
            left_s = datetime.fromisoformat(moment).timestamp() - now
        except ValueError:
            raise invalid("resource.scheduling.terminationTime", moment, "It is no RFC 3339 time.") from None
    if left_s is not None and not SHORTEST_S <= left_s <= LONGEST_S:
        raise invalid("resource.scheduling", left_s, "A run limit is 30 seconds to 120 days away.")
    return dict(given)


class Instances:
    """What the API does with instances and their disks."""

    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud

    # -- insert --------------------------------------------------------------------------------

    def check(self, zone: str, body: Json) -> tuple[MachineType, Json]:
        """Refuse what Google refuses at once. Returns the machine type and the scheduling."""
        if zone not in ZONES:
            raise not_found(f"projects/{PROJECT}/zones/{zone}")
        name = str(body.get("name", ""))
        if not NAME.fullmatch(name):
            raise invalid(
                "resource.name", name, "Must be a match of regex '(?:[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?)'"
            )
        type = TYPES.get(str(body.get("machineType", "")).rsplit("/", 1)[-1])
        if type is None or (zone, type.name) in self._cloud.catalog.unsold:
            why = f"Machine type with name '{body.get('machineType')}' does not exist in zone '{zone}'."
            raise invalid("resource.machineType", body.get("machineType"), why)
        check_labels(body.get("labels") or {})
        scheduling = check_scheduling(body.get("scheduling") or {}, self._cloud.clock.now())
        features = body.get("advancedMachineFeatures") or {}
        if features.get("enableNestedVirtualization") and not type.nests:
            raise invalid(
                "resource.advancedMachineFeatures", type.name, "Nested virtualization is not supported."
            )
        self.check_metadata(body.get("metadata") or {})
        self._check_interfaces(zone, body)
        self._check_disks(type, body)
        if f"projects/{PROJECT}/zones/{zone}/instances/{name}" in self._cloud.instances:
            path = f"projects/{PROJECT}/zones/{zone}/instances/{name}"
            raise ApiError(409, "alreadyExists", f"The resource '{path}' already exists")
        return type, scheduling

    def check_metadata(self, metadata: Json) -> None:
        items = metadata.get("items") or []
        sizes = [len(str(each.get("value", ""))) for each in items]
        if any(size > METADATA_VALUE for size in sizes) or sum(sizes) > METADATA_ALL:
            raise invalid("resource.metadata", "", "Metadata is too large.")
        if len({each["key"] for each in items}) < len(items):
            raise invalid("resource.metadata", "", "Metadata has duplicate key.")

    def _check_interfaces(self, zone: str, body: Json) -> None:
        interfaces = body.get("networkInterfaces") or []
        if not interfaces:
            raise ApiError(400, "required", "Required field 'resource.networkInterfaces' not specified")
        for each in interfaces:
            name = str(each.get("network") or "default").rsplit("/", 1)[-1]
            network = self._cloud.networks.get(f"projects/{PROJECT}/global/networks/{name}")
            if network is None:
                raise not_found(f"projects/{PROJECT}/global/networks/{name}")
            if not network.get("autoCreateSubnetworks") and not each.get("subnetwork"):
                raise invalid("resource.networkInterfaces[0]", name, "Subnetwork should be specified.")

    def _check_disks(self, machine: MachineType, body: Json) -> None:
        disks = body.get("disks") or []
        if len(disks) != 1 or not disks[0].get("boot"):
            raise ApiError(400, "required", "A boot disk must be specified.")
        made = disks[0].get("initializeParams") or {}
        image = self.image(str(made.get("sourceImage", "")))
        check_labels(made.get("labels") or {})
        size = made.get("diskSizeGb")
        if size is not None and (not isinstance(size, str) or int(size) < int(image["diskSizeGb"])):
            why = f"Requested disk size cannot be smaller than the image size ({image['diskSizeGb']} GB)"
            raise invalid("resource.disks[0].initializeParams.diskSizeGb", size, why)
        type = str(made.get("diskType") or "pd-standard").rsplit("/", 1)[-1]
        if type not in DISK_TYPES:
            raise invalid(
                "resource.disks[0].initializeParams.diskType", type, "The referenced disk type is unknown."
            )
        if machine.family in (NO_HYPERDISK if type == HYPERDISK else HYPERDISK_ONLY):
            why = f"[{type}, {machine.name}] features are not compatible for creating instance."
            raise ApiError(400, "badRequest", why)

    def image(self, text: str) -> Json:
        """An image by its link, or by that of its family."""
        path = "projects/" + text.partition("projects/")[2]
        if path in self._cloud.images:
            return self._cloud.images[path]
        project, _, family = path.partition("/global/images/family/")
        of_family = [
            each
            for where, each in self._cloud.images.items()
            if where.startswith(f"{project}/") and family and each.get("family") == family
        ]
        if not of_family:
            raise invalid(
                "resource.disks[0].initializeParams.sourceImage", text, f"The resource '{path}' was not found"
            )
        return of_family[-1]

    def needed(self, type: MachineType, scheduling: Json, body: Json, region: str) -> dict[str, int]:
        spot = scheduling.get("provisioningModel") == "SPOT"
        granted = spot and self._cloud.catalog.limit(region, "PREEMPTIBLE_CPUS") > 0
        made = body["disks"][0].get("initializeParams") or {}
        kind = str(made.get("diskType") or "pd-standard").rsplit("/", 1)[-1]
        public = any(each.get("accessConfigs") for each in body["networkInterfaces"])
        return {
            "PREEMPTIBLE_CPUS" if granted else type.metric: type.cpus,
            "IN_USE_ADDRESSES": int(public),
            DISK_TYPES[kind]: int(made.get("diskSizeGb") or 10),
            "INSTANCES": 1,
        }

    def quota_error(self, metric: str, region: str) -> OperationError:
        limit = self._cloud.catalog.limit("" if metric.endswith("_ALL_REGIONS") else region, metric)
        where = "globally" if metric.endswith("_ALL_REGIONS") else f"in region {region}"
        info = {
            "metricName": f"compute.googleapis.com/{metric.lower()}",
            "limitName": metric.replace("_", "-"),
            "dimensions": {"region": region},
            "limit": float(limit),
        }
        message = f"Quota '{metric}' exceeded.  Limit: {limit:.1f} {where}."
        return OperationError("QUOTA_EXCEEDED", message, status=403, details=[{"quotaInfo": info}])

    async def insert(self, zone: str, body: Json, type: MachineType, scheduling: Json) -> None:
        """The work of the operation."""
        cloud, region = self._cloud, zone.rpartition("-")[0]
        if metric := cloud.exceeded(region, self.needed(type, scheduling, body, region)):
            await cloud.clock.sleep(cloud.span(cloud.timing.other))
            raise self.quota_error(metric, region)
        instance = Instance(body["name"], zone, cloud.new_id(), type.name, body, cloud.clock.now())
        if instance.path in cloud.instances:
            raise OperationError("RESOURCE_ALREADY_EXISTS", f"The resource '{instance.path}' already exists")
        instance.labels, instance.scheduling = dict(body.get("labels") or {}), scheduling
        async with instance.busy:
            cloud.instances[instance.path] = instance
            await cloud.clock.sleep(cloud.span(cloud.timing.insert) / 2)
            try:
                self._check_room(instance)
            except OperationError:
                del cloud.instances[instance.path]
                raise
            self._attach(instance)
            instance.status = "STAGING"
            await cloud.clock.sleep(cloud.span(cloud.timing.insert) / 2)
            await self._run(instance)

    def _check_room(self, instance: Instance) -> None:
        """Raises what Google says, to an instance that is made or started, if the zone is full."""
        cloud, zone = self._cloud, instance.zone
        there = [each for each in cloud.instances.values() if each.zone == zone and each.status == "RUNNING"]
        alike = [each for each in there if each.type == instance.type]
        room = cloud.catalog.room
        if len(alike) >= room(zone, instance.type) or len(there) >= room(zone, ""):
            raise OperationError(
                "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS",
                f"The zone 'projects/{PROJECT}/zones/{zone}' does not have enough resources available to "
                f"fulfill the request. '(resource type:compute)'.",
                status=503,
            )

    def _attach(self, instance: Instance) -> None:
        """A disk of the instance's name that is there is attached, in place of a new one."""
        cloud, given = self._cloud, instance.body["disks"][0]
        made = given.get("initializeParams") or {}
        name = made.get("diskName") or instance.name
        disk = cloud.disks.get(f"projects/{PROJECT}/zones/{instance.zone}/disks/{name}")
        if disk is None:
            image = self.image(str(made.get("sourceImage", "")))
            disk = Disk(
                name=name,
                zone=instance.zone,
                id=cloud.new_id(),
                type=str(made.get("diskType") or "pd-standard").rsplit("/", 1)[-1],
                gb=int(made.get("diskSizeGb") or image["diskSizeGb"]),
                labels=dict(made.get("labels") or {}),
                description=str(made.get("description", "")),
                image=str(image["selfLink"]),
                created=cloud.clock.now(),
            )
            cloud.disks[disk.path] = disk
            cloud.meters.start("disk", disk.path, disk.type, disk.zone, cloud.clock.now())
        disk.users = [instance.path]
        instance.disk = disk

    # -- running -------------------------------------------------------------------------------

    async def _run(self, instance: Instance) -> None:
        """It runs: it is billed, its limit counts, its system comes up."""
        cloud, now = self._cloud, self._cloud.clock.now()
        taken = {each.address for each in cloud.instances.values()} | {
            each.inside for each in cloud.instances.values()
        }
        if cloud.machines.is_flat:
            instance.address = instance.inside = instance.inside or cloud.machines.new_address(taken)
        else:
            instance.inside = instance.inside or f"10.128.{len(taken) // 250}.{len(taken) % 250 + 2}"
            instance.address = cloud.machines.new_address(taken) if instance.is_public else ""
        instance.status, instance.started_at = "RUNNING", now
        instance.start += 1
        instance.preempted = False
        cloud.meters.start("vm", instance.path, instance.type, instance.zone, now, spot=instance.spot)
        if instance.is_public:
            cloud.meters.start("address", instance.path, "", instance.zone, now)
        duration, moment = (
            instance.scheduling.get("maxRunDuration"),
            instance.scheduling.get("terminationTime"),
        )
        instance.ends_at = now + float(duration["seconds"]) if duration else None
        if moment:
            instance.ends_at = datetime.fromisoformat(moment).timestamp()
        if instance.ends_at is not None:
            cloud.spawn(self._limit(instance, instance.start, instance.ends_at))
        instance.booted = cloud.spawn(self._boot(instance, instance.start))

    async def _boot(self, instance: Instance, start: int) -> None:
        cloud = self._cloud
        await cloud.clock.sleep(cloud.span(cloud.timing.boot) + cloud.faults.boot_delay_s(instance.name))
        if instance.gone or instance.start != start or instance.status != "RUNNING":
            return
        try:
            if start == 1:
                await cloud.machines.create(self._guest(instance))
            else:
                await cloud.machines.power_on(instance.path, instance.inside, fresh_temp_disk=False)
            await cloud.machines.protect(instance.path, firewalls.rules(cloud, instance))
            instance.up_at = cloud.clock.now()
        except MachineTrouble as err:
            if not instance.gone and instance.status == "RUNNING" and instance.start == start:
                cloud.troubles.append(err)
            return
        if not cloud.machines.is_flat and start == 1:  # no host that could tell it itself
            self.tell_key(instance, "ssh-ed25519", base64.b64encode(instance.name.encode()).decode())

    def tell_key(self, instance: Instance, kind: str, value: str) -> bool:
        """As the guest agent does, through the metadata server. Is it allowed?"""
        if instance.metadata.get("enable-guest-attributes", "").upper() != "TRUE":
            return False
        if self._cloud.faults.tells_key(instance.name):
            instance.attributes[f"hostkeys/{kind}"] = value
        return True

    def _guest(self, instance: Instance) -> Guest:
        """What the image makes of the metadata: a user with our key, who may become root."""
        user, keys = self._login(instance)
        image = instance.disk.image if instance.disk is not None else ""
        return Guest(
            instance.path, instance.name, instance.inside, user, keys, _first_boot(instance), False, image
        )

    def _login(self, instance: Instance) -> tuple[str, tuple[str, ...]]:
        """Who may log in by the metadata, and with which keys."""
        lines = instance.metadata.get("ssh-keys", "").splitlines()
        pairs = [line.split(":", 1) for line in lines if ":" in line]
        oslogin = instance.metadata.get("enable-oslogin", "").upper() == "TRUE"
        user = pairs[0][0] if pairs and not oslogin else ""
        return user, tuple(key for name, key in pairs if name == user and user)

    async def take_up_keys(self, instance: Instance) -> None:
        """As the guest agent does, which waits for changes of the metadata: these keys, and no others."""
        cloud = self._cloud
        await cloud.clock.sleep(cloud.span(cloud.timing.other))
        if instance.status != "RUNNING" or instance.gone or not instance.up_at:
            return
        try:
            await cloud.machines.authorize(instance.path, *self._login(instance))
        except MachineTrouble as err:
            if not instance.gone and instance.status == "RUNNING":
                cloud.troubles.append(err)

    async def _limit(self, instance: Instance, start: int, ends_at: float) -> None:
        """Google ends it by itself, up to half a minute late."""
        cloud = self._cloud
        await cloud.clock.sleep_until(ends_at + cloud.span(cloud.timing.limit_late))
        if instance.start == start and instance.status == "RUNNING" and not instance.gone:
            await self.end(instance)

    async def end(self, instance: Instance) -> None:
        """As its termination action says: stopped, or deleted with its disk."""
        if instance.scheduling.get("instanceTerminationAction") == "DELETE":
            await self.delete(instance)
        else:
            await self.stop(instance)

    async def preempt(self, instance: Instance, notice_s: float) -> None:
        cloud, start = self._cloud, instance.start
        instance.preempted = True
        await cloud.clock.sleep(notice_s)
        if instance.gone or instance.start != start or instance.status != "RUNNING":
            return
        cloud.note("compute.instances.preempted", f"zones/{instance.zone}", instance.path, instance.id)
        await self.end(instance)

    # -- down ----------------------------------------------------------------------------------

    async def delete(self, instance: Instance) -> None:
        async with instance.busy:
            if instance.gone:
                return
            await self._off(instance, self._cloud.timing.delete)
            await self._cloud.machines.destroy(instance.path)
            instance.gone = True
            self._cloud.instances.pop(instance.path, None)
            disk = instance.disk
            if disk is not None:
                disk.users = []
                if instance.body["disks"][0].get("autoDelete"):
                    self.drop_disk(disk)

    async def stop(self, instance: Instance) -> None:
        async with instance.busy:
            if instance.gone or instance.status == "TERMINATED":
                return
            await self._off(instance, self._cloud.timing.power)
            instance.status = "TERMINATED"

    async def _off(self, instance: Instance, span: tuple[float, float]) -> None:
        """The meter stops when it has stopped, not when that is asked for."""
        cloud, was = self._cloud, instance.status
        instance.status = "STOPPING"
        if was == "RUNNING":
            await cloud.clock.sleep(cloud.span(span))
            if instance.booted is not None:
                await asyncio.wait([instance.booted])
            await cloud.machines.power_off(instance.path)
        instance.ends_at = None
        if not cloud.machines.is_flat:
            instance.address = ""
        now = cloud.clock.now()
        cloud.meters.stop("vm", instance.path, now)
        cloud.meters.stop("address", instance.path, now)

    async def power_on(self, instance: Instance) -> None:
        cloud = self._cloud
        async with instance.busy:
            if instance.gone or instance.status == "RUNNING":
                return
            moment = instance.scheduling.get("terminationTime")
            if moment and datetime.fromisoformat(moment).timestamp() <= cloud.clock.now():
                raise OperationError("INVALID_USAGE", "The termination time of the instance is in the past.")
            type = TYPES[instance.type]
            if metric := cloud.exceeded(instance.region, {type.metric: type.cpus}):
                raise self.quota_error(metric, instance.region)
            self._check_room(instance)
            instance.status = "STAGING"
            await cloud.clock.sleep(cloud.span(cloud.timing.power))
            cloud.machines.mend(instance.path)  # it starts on other hardware
            await self._run(instance)

    async def reset(self, instance: Instance) -> None:
        """As pressing a button: the disk, the address and the limit stay."""
        cloud = self._cloud
        async with instance.busy:
            if instance.gone or instance.status != "RUNNING":
                raise OperationError("RESOURCE_NOT_READY", "The instance is not running.")
            await cloud.clock.sleep(cloud.span(cloud.timing.power))
            if instance.booted is not None:
                await asyncio.wait([instance.booted])
            await cloud.machines.power_off(instance.path)
            await cloud.machines.power_on(instance.path, instance.inside, fresh_temp_disk=False)
            await cloud.machines.protect(instance.path, firewalls.rules(cloud, instance))

    def drop_disk(self, disk: Disk) -> None:
        self._cloud.disks.pop(disk.path, None)
        self._cloud.meters.stop("disk", disk.path, self._cloud.clock.now())

    # -- shown ---------------------------------------------------------------------------------

    def shown(self, instance: Instance, base: str) -> Json:
        cloud, body = self._cloud, instance.body
        zone = link(base, f"projects/{PROJECT}/zones/{instance.zone}")
        shown: Json = {
            **{key: value for key, value in body.items() if key not in ANSWERS_ONLY},
            "kind": "compute#instance",
            "id": str(instance.id),
            "creationTimestamp": cloud.stamp(instance.created),
            "status": instance.status,
            "zone": zone,
            "machineType": f"{zone}/machineTypes/{instance.type}",
            "selfLink": link(base, instance.path),
            "labels": instance.labels,
            "labelFingerprint": _print(instance.fingerprint),
            "fingerprint": _print(instance.fingerprint),
            "scheduling": instance.scheduling,
            "disks": [self._shown_disk(instance, base)],
            "networkInterfaces": [self._shown_interface(instance, base)],
            "cpuPlatform": "Intel Cascade Lake",
            "resourceStatus": {"scheduling": {}},
        }
        if "tags" in body:
            shown["tags"] = {**body["tags"], "fingerprint": _print(1)}
        if "metadata" in body:
            shown["metadata"] = {
                **body["metadata"],
                "kind": "compute#metadata",
                "fingerprint": _print(instance.metadata_version),
            }
        if instance.started_at:
            shown["lastStartTimestamp"] = cloud.stamp(instance.started_at)
        if instance.status == "RUNNING" and instance.ends_at is not None:
            shown["resourceStatus"]["scheduling"]["terminationTimestamp"] = cloud.stamp(instance.ends_at)
        return shown

    def _shown_disk(self, instance: Instance, base: str) -> Json:
        given = instance.body["disks"][0]
        disk: Json = {
            "kind": "compute#attachedDisk",
            "type": "PERSISTENT",
            "mode": "READ_WRITE",
            "boot": True,
            "autoDelete": bool(given.get("autoDelete")),
            "index": 0,
            "deviceName": "persistent-disk-0",
        }
        if instance.disk is not None:
            disk |= {"source": link(base, instance.disk.path), "diskSizeGb": str(instance.disk.gb)}
        return disk

    def _shown_interface(self, instance: Instance, base: str) -> Json:
        given = instance.body["networkInterfaces"][0]
        network = str(given.get("network") or "default").rsplit("/", 1)[-1]
        interface: Json = {
            "kind": "compute#networkInterface",
            "name": "nic0",
            "network": link(base, f"projects/{PROJECT}/global/networks/{network}"),
        }
        if instance.inside:
            interface["networkIP"] = instance.inside
        if instance.is_public:
            access: Json = {"kind": "compute#accessConfig", "type": "ONE_TO_ONE_NAT", "name": "External NAT"}
            if instance.address and instance.status == "RUNNING":
                access["natIP"] = instance.address
            interface["accessConfigs"] = [access]
        return interface

    def shown_disk(self, disk: Disk, base: str) -> Json:
        zone = link(base, f"projects/{PROJECT}/zones/{disk.zone}")
        return {
            "kind": "compute#disk",
            "id": str(disk.id),
            "name": disk.name,
            "description": disk.description,
            "creationTimestamp": self._cloud.stamp(disk.created),
            "sizeGb": str(disk.gb),
            "status": "READY",
            "zone": zone,
            "type": f"{zone}/diskTypes/{disk.type}",
            "selfLink": link(base, disk.path),
            "sourceImage": disk.image,
            "labels": disk.labels,
            "labelFingerprint": _print(disk.fingerprint),
            **({"users": [link(base, user) for user in disk.users]} if disk.users else {}),
        }


def _print(number: int) -> str:
    return base64.b64encode(number.to_bytes(8, "big")).decode()


def _first_boot(instance: Instance) -> bytes:
    """What the image does by itself at its first boot, in the words of cloud-init: it makes its host key."""
    key = ed25519.Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    ).decode()
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    config: Json = {
        "ssh_keys": {"ed25519_private": private, "ed25519_public": public.decode()},
        "runcmd": [["python3", "-c", AGENT]],
    }
    if script := instance.metadata.get("startup-script"):
        config["bootcmd"] = [["sh", "-c", script]]
    return b"#cloud-config\n" + json.dumps(config).encode()
