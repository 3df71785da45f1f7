"""The calls of the API that a fleet of instances needs, by path."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from typing import Any

from standins.cloud.faults import Stuck
from standins.cloud.words import Call, Json

from . import firewalls
from .catalog import LIMITS, PUBLIC_IMAGES, REGIONS, TYPES, ZONES, MachineType
from .cloud import Cloud, Instance, Operation, link
from .faults import Effect, FailsLate
from .instances import NAME, Instances, check_labels, check_scheduling
from .words import PROJECT, ApiError, OperationError, invalid, matches, not_found

GOOGLE = "https://www.googleapis.com/compute/v1/"
"""How links to images begin, whoever asks."""
SERIAL_BYTES = 1 << 20
Handler = Callable[..., Coroutine[Any, Any, Json]]
PERMISSIONS = {
    "instances.insert": "compute.instances.create",
    "instances.delete": "compute.instances.delete",
    "instances.list": "compute.instances.list",
    "firewalls.insert": "compute.firewalls.create",
    "firewalls.patch": "compute.firewalls.update",
    "images.insert": "compute.images.create",
    "projects.get": "compute.projects.get",
}


class Api:
    """Answers calls. Raises ApiError."""

    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud
        self.instances = Instances(cloud)
        p, z, name = r"projects/(?P<project>[^/]+)", r"/zones/(?P<zone>[^/]+)", r"/(?P<name>[^/]+)"
        scope = r"/(?P<scope>global|zones/[^/]+|regions/[^/]+)"
        one = rf"{p}{z}/instances{name}"
        table: list[tuple[str, str, Handler]] = [
            ("GET", p, self._project),
            ("GET", rf"{p}/regions", self._regions),
            ("GET", rf"{p}/regions{name}", self._region),
            ("GET", rf"{p}/zones", self._zones),
            ("GET", rf"{p}/zones{name}", self._zone),
            ("GET", rf"{p}{z}/machineTypes", self._types),
            ("GET", rf"{p}{z}/machineTypes{name}", self._type),
            ("GET", rf"{p}/aggregated/(?P<kind>instances|disks|operations)", self._aggregated),
            ("GET", rf"{p}{scope}/operations", self._operations),
            ("GET", rf"{p}{scope}/operations{name}", self._operation),
            ("POST", rf"{p}{scope}/operations{name}/wait", self._wait),
            ("GET", rf"{p}{z}/(?P<kind>instances|disks)", self._list),
            ("POST", rf"{p}{z}/instances", self._insert),
            ("GET", one, self._instance),
            ("DELETE", one, self._delete),
            ("POST", rf"{one}/(?P<verb>stop|start|reset)", self._power),
            ("POST", rf"{one}/setScheduling", self._set_scheduling),
            ("POST", rf"{one}/setLabels", self._set_labels),
            ("POST", rf"{one}/setMetadata", self._set_metadata),
            ("GET", rf"{one}/getGuestAttributes", self._guest_attributes),
            ("GET", rf"{one}/serialPort", self._serial),
            ("GET", rf"{p}{z}/disks{name}", self._disk),
            ("DELETE", rf"{p}{z}/disks{name}", self._delete_disk),
            ("GET", rf"{p}/global/(?P<kind>firewalls|networks|images|snapshots)", self._global_list),
            ("GET", rf"{p}/global/images/family/(?P<family>[^/]+)", self._family),
            ("GET", rf"{p}/global/(?P<kind>firewalls|networks|images){name}", self._global),
            ("POST", rf"{p}/global/firewalls", self._insert_firewall),
            ("PATCH", rf"{p}/global/firewalls{name}", self._patch_firewall),
            ("DELETE", rf"{p}/global/(?P<kind>firewalls|images){name}", self._delete_global),
            ("POST", rf"{p}/global/images", self._insert_image),
        ]
        self._table = [(method, re.compile(pattern), handler) for method, pattern, handler in table]
        self._furnish()

    def _furnish(self) -> None:
        """What every project has."""
        cloud = self._cloud
        path = f"projects/{PROJECT}/global/networks/default"
        cloud.networks[path] = {"name": "default", "autoCreateSubnetworks": True, "id": str(cloud.new_id())}
        for rule in firewalls.defaults():
            made = {**rule, "id": str(cloud.new_id())}
            cloud.firewalls[f"projects/{PROJECT}/global/firewalls/{rule['name']}"] = made
        for (project, family), (name, gb) in PUBLIC_IMAGES.items():
            image = f"projects/{project}/global/images/{name}"
            cloud.images[image] = self._new_image(image, name, family=family, diskSizeGb=str(gb))

    def _new_image(self, path: str, name: str, **more: Any) -> Json:
        cloud = self._cloud
        return {
            "kind": "compute#image",
            "id": str(cloud.new_id()),
            "name": name,
            "selfLink": f"{GOOGLE}{path}",
            "status": "READY",
            "creationTimestamp": cloud.stamp(),
            "archiveSizeBytes": str(1 << 30),
            **more,
        }

    async def answer(self, call: Call, effect: Effect | None = None) -> Json:
        for method, pattern, handler in self._table:
            if method == call.method and (found := pattern.fullmatch(call.path)):
                words = found.groupdict()
                project = words.pop("project")
                if project != PROJECT and "/images" not in call.path:
                    raise not_found(f"projects/{project}")
                if handler in (
                    self._insert,
                    self._delete,
                    self._power,
                    self._insert_firewall,
                    self._insert_image,
                ):
                    return await handler(call, effect=effect, **words)
                return await handler(call, **words)
        raise ApiError(404, "notFound", f"{call.method} {call.path}: the stand-in does not have that")

    # -- the project ---------------------------------------------------------------------------

    async def _project(self, call: Call) -> Json:
        self._cloud.faults.check("compute.projects.get", call.path)
        return {
            "kind": "compute#project",
            "id": "123456789012",
            "name": PROJECT,
            "creationTimestamp": self._cloud.stamp(1_750_000_000.0),
            "selfLink": link(call.base, call.path),
            "commonInstanceMetadata": {"kind": "compute#metadata"},
            "quotas": self._quotas("", ("CPUS_ALL_REGIONS",)),
        }

    def _quotas(self, region: str, metrics: tuple[str, ...]) -> list[Json]:
        used = self._cloud.usage(region)
        return [
            {
                "metric": metric,
                "limit": float(self._cloud.catalog.limit(region, metric)),
                "usage": float(used.get(metric, 0)),
            }
            for metric in metrics
        ]

    def _shown_region(self, call: Call, region: str) -> Json:
        path = f"projects/{PROJECT}/regions/{region}"
        zones = [f"projects/{PROJECT}/zones/{region}-{letter}" for letter in REGIONS[region]]
        return {
            "kind": "compute#region",
            "id": str(1000 + list(REGIONS).index(region)),
            "name": region,
            "status": "UP",
            "zones": [link(call.base, zone) for zone in zones],
            "quotas": self._quotas(region, tuple(LIMITS)),
            "selfLink": link(call.base, path),
        }

    async def _regions(self, call: Call) -> Json:
        rows = [self._shown_region(call, region) for region in REGIONS]
        return self._page(call, "compute#regionList", rows)

    async def _region(self, call: Call, name: str) -> Json:
        if name not in REGIONS:
            raise not_found(call.path)
        return self._shown_region(call, name)

    def _shown_zone(self, call: Call, zone: str) -> Json:
        region = zone.rpartition("-")[0]
        return {
            "kind": "compute#zone",
            "id": str(2000 + ZONES.index(zone)),
            "name": zone,
            "status": "UP",
            "region": link(call.base, f"projects/{PROJECT}/regions/{region}"),
            "selfLink": link(call.base, f"projects/{PROJECT}/zones/{zone}"),
        }

    async def _zones(self, call: Call) -> Json:
        return self._page(call, "compute#zoneList", [self._shown_zone(call, zone) for zone in ZONES])

    async def _zone(self, call: Call, name: str) -> Json:
        if name not in ZONES:
            raise not_found(call.path)
        return self._shown_zone(call, name)

    def _shown_type(self, call: Call, zone: str, type: MachineType) -> Json:
        return {
            "kind": "compute#machineType",
            "id": str(3000 + list(TYPES).index(type.name)),
            "name": type.name,
            "guestCpus": type.cpus,
            "memoryMb": type.memory_mb,
            "zone": zone,
            "selfLink": link(call.base, f"projects/{PROJECT}/zones/{zone}/machineTypes/{type.name}"),
        }

    async def _types(self, call: Call, zone: str) -> Json:
        if zone not in ZONES:
            raise not_found(f"projects/{PROJECT}/zones/{zone}")
        unsold = self._cloud.catalog.unsold
        rows = [
            self._shown_type(call, zone, type) for type in TYPES.values() if (zone, type.name) not in unsold
        ]
        return self._page(call, "compute#machineTypeList", rows)

    async def _type(self, call: Call, zone: str, name: str) -> Json:
        if zone not in ZONES or name not in TYPES or (zone, name) in self._cloud.catalog.unsold:
            raise not_found(call.path)
        return self._shown_type(call, zone, TYPES[name])

    # -- lists ---------------------------------------------------------------------------------

    def _page(self, call: Call, kind: str, rows: list[Json], path: str = "") -> Json:
        """One page of a list."""
        rows = [row for row in rows if matches(row, call.query.get("filter", ""))]
        size = min(500, int(call.query.get("maxResults") or 500))
        start = int(call.query.get("pageToken") or 0)
        shown: Json = {"kind": kind, "id": call.path, "selfLink": link(call.base, call.path)}
        if rows:
            shown["items"] = rows[start : start + size]
        if start + size < len(rows):
            shown["nextPageToken"] = str(start + size)
        return shown

    def _rows(self, call: Call, kind: str, zone: str = "") -> list[Json]:
        cloud = self._cloud
        if kind == "instances":
            cloud.faults.check("compute.instances.list", call.path)
            some = [each for each in cloud.instances.values() if zone in ("", each.zone)]
            return [self.instances.shown(each, call.base) for each in some]
        if kind == "disks":
            disks = [each for each in cloud.disks.values() if zone in ("", each.zone)]
            return [self.instances.shown_disk(each, call.base) for each in disks]
        return [self._shown_operation(call, each) for each in cloud.operations.values()]

    async def _list(self, call: Call, zone: str, kind: str) -> Json:
        if zone not in ZONES:
            raise not_found(f"projects/{PROJECT}/zones/{zone}")
        return self._page(call, f"compute#{kind[:-1]}List", self._rows(call, kind, zone))

    async def _aggregated(self, call: Call, kind: str) -> Json:
        """By zone; one without results has a warning in their place."""
        page = self._page(call, "", self._rows(call, kind))
        items: Json = {
            f"zones/{zone}": {
                "warning": {
                    "code": "NO_RESULTS_ON_PAGE",
                    "message": f"There are no results for scope 'zones/{zone}' on this page.",
                    "data": [{"key": "scope", "value": f"zones/{zone}"}],
                }
            }
            for zone in ZONES
        }
        for row in page.pop("items", []):
            scope = f"zones/{row['zone'].rsplit('/', 1)[-1]}" if "zone" in row else "global"
            if kind not in items.setdefault(scope, {}):
                items[scope] = {kind: []}
            items[scope][kind].append(row)
        return {**page, "kind": f"compute#{kind[:-1]}AggregatedList", "items": items}

    # -- operations ----------------------------------------------------------------------------

    def _shown_operation(self, call: Call, operation: Operation) -> Json:
        cloud = self._cloud
        path = f"projects/{PROJECT}/{operation.scope}/operations/{operation.name}"
        shown: Json = {
            "kind": "compute#operation",
            "id": str(operation.number),
            "name": operation.name,
            "operationType": operation.type,
            "targetLink": link(call.base, operation.target),
            "targetId": str(operation.target_id),
            "status": operation.status,
            "user": operation.user,
            "progress": 100 if operation.status == "DONE" else 0,
            "insertTime": cloud.stamp(operation.inserted),
            "selfLink": link(call.base, path),
        }
        if operation.scope.startswith("zones/"):
            shown["zone"] = link(call.base, f"projects/{PROJECT}/{operation.scope}")
        if operation.started:
            shown["startTime"] = cloud.stamp(operation.started)
        if operation.status == "DONE":
            shown["endTime"] = cloud.stamp(operation.ended)
        if operation.error is not None and operation.status == "DONE":
            shown["error"] = {"errors": [operation.error.shown()]}
            shown["httpErrorStatusCode"] = operation.error.status
            shown["httpErrorMessage"] = {403: "FORBIDDEN", 503: "SERVICE UNAVAILABLE"}.get(
                operation.error.status, "CONFLICT"
            )
        return shown

    async def _operations(self, call: Call, scope: str) -> Json:
        some = [each for each in self._cloud.operations.values() if each.scope == scope]
        return self._page(call, "compute#operationList", [self._shown_operation(call, each) for each in some])

    def _find_operation(self, call: Call, scope: str, name: str) -> Operation:
        operation = self._cloud.operations.get(name)
        if operation is None or operation.scope != scope:
            raise not_found(call.path.removesuffix("/wait"))
        return operation

    async def _operation(self, call: Call, scope: str, name: str) -> Json:
        return self._shown_operation(call, self._find_operation(call, scope, name))

    async def _wait(self, call: Call, scope: str, name: str) -> Json:
        """Holds until it is done, or for a while; now and then it returns before either."""
        operation = self._find_operation(call, scope, name)
        hold_s = self._cloud.timing.wait * (0.1 if self._cloud.random.random() < 0.1 else 1.0)
        try:
            async with asyncio.timeout(hold_s):
                await operation.done.wait()
        except TimeoutError:
            pass
        return self._shown_operation(call, operation)

    def _begin(
        self,
        call: Call,
        type: str,
        scope: str,
        target: str,
        target_id: int,
        work: Coroutine[Any, Any, None],
        effect: Effect | None = None,
    ) -> Json:
        error = OperationError(effect.code, effect.message) if isinstance(effect, FailsLate) else None
        operation = self._cloud.operate(
            type,
            scope,
            target,
            target_id,
            work,
            request=call.query.get("requestId", ""),
            hold_s=effect.seconds if isinstance(effect, Stuck) else 0.0,
            error=error,
        )
        return self._shown_operation(call, operation)

    def _repeat(self, call: Call) -> Json | None:
        operation = self._cloud.repeated(call.query.get("requestId", ""))
        return self._shown_operation(call, operation) if operation is not None else None

    # -- instances -----------------------------------------------------------------------------

    def _find(self, call: Call, zone: str, name: str) -> Instance:
        path = f"projects/{PROJECT}/zones/{zone}/instances/{name}"
        instance = self._cloud.instances.get(path)
        if instance is None:
            raise not_found(path)
        return instance

    async def _insert(self, call: Call, zone: str, effect: Effect | None) -> Json:
        cloud = self._cloud
        if (repeated := self._repeat(call)) is not None:
            return repeated
        cloud.faults.check("compute.instances.create", f"projects/{PROJECT}/zones/{zone}/instances")
        type, scheduling = self.instances.check(zone, call.body)
        region = zone.rpartition("-")[0]
        needed = self.instances.needed(type, scheduling, call.body, region)
        if cloud.catalog.refuses_quota_at_once and (metric := cloud.exceeded(region, needed)):
            raise ApiError(403, "quotaExceeded", self.instances.quota_error(metric, region).message)
        path = f"projects/{PROJECT}/zones/{zone}/instances/{call.body['name']}"
        work = self.instances.insert(zone, call.body, type, scheduling)
        return self._begin(call, "insert", f"zones/{zone}", path, cloud.new_id(), work, effect)

    async def _instance(self, call: Call, zone: str, name: str) -> Json:
        return self.instances.shown(self._find(call, zone, name), call.base)

    async def _delete(self, call: Call, zone: str, name: str, effect: Effect | None) -> Json:
        if (repeated := self._repeat(call)) is not None:
            return repeated
        instance = self._find(call, zone, name)
        self._cloud.faults.check("compute.instances.delete", instance.path)
        if instance.body.get("deletionProtection"):
            raise invalid("resource", name, "Resource cannot be deleted if it's protected against deletion.")
        work = self.instances.delete(instance)
        return self._begin(call, "delete", f"zones/{zone}", instance.path, instance.id, work, effect)

    async def _power(self, call: Call, zone: str, name: str, verb: str, effect: Effect | None) -> Json:
        if (repeated := self._repeat(call)) is not None:
            return repeated
        instance = self._find(call, zone, name)
        if instance.status == "STOPPING":
            raise ApiError(400, "resourceNotReady", f"The resource '{instance.path}' is not ready")
        self._cloud.faults.check(f"compute.instances.{verb}", instance.path)
        acts = {"stop": self.instances.stop, "start": self.instances.power_on, "reset": self.instances.reset}
        return self._begin(
            call, verb, f"zones/{zone}", instance.path, instance.id, acts[verb](instance), effect
        )

    async def _set_scheduling(self, call: Call, zone: str, name: str) -> Json:
        instance = self._find(call, zone, name)
        if instance.status != "TERMINATED":
            raise invalid(
                "scheduling", name, "Scheduling can be changed only while the instance is TERMINATED."
            )
        scheduling = check_scheduling(call.body, self._cloud.clock.now())

        async def work() -> None:
            instance.scheduling = scheduling

        return self._begin(call, "setScheduling", f"zones/{zone}", instance.path, instance.id, work())

    async def _set_labels(self, call: Call, zone: str, name: str) -> Json:
        instance = self._find(call, zone, name)
        labels = check_labels(call.body.get("labels") or {})
        if call.body.get("labelFingerprint") != self.instances.shown(instance, "")["labelFingerprint"]:
            raise ApiError(
                412, "conditionNotMet", "Labels fingerprint either invalid or resource labels have changed"
            )

        async def work() -> None:
            instance.labels = labels
            instance.fingerprint += 1

        return self._begin(call, "setLabels", f"zones/{zone}", instance.path, instance.id, work())

    async def _set_metadata(self, call: Call, zone: str, name: str) -> Json:
        """All of it is replaced, by whoever has seen what is there."""
        instance, cloud = self._find(call, zone, name), self._cloud
        cloud.faults.check("compute.instances.setMetadata", instance.path)
        self.instances.check_metadata(call.body)
        shown = self.instances.shown(instance, "").get("metadata") or {}
        if call.body.get("fingerprint", "") != shown.get("fingerprint", ""):
            message = "Supplied fingerprint does not match current metadata fingerprint."
            raise ApiError(412, "conditionNotMet", message)

        async def work() -> None:
            instance.body = {**instance.body, "metadata": {"items": call.body.get("items") or []}}
            instance.metadata_version += 1
            cloud.spawn(self.instances.take_up_keys(instance))

        return self._begin(call, "setMetadata", f"zones/{zone}", instance.path, instance.id, work())

    async def _guest_attributes(self, call: Call, zone: str, name: str) -> Json:
        instance = self._find(call, zone, name)
        query = call.query.get("queryPath", "")
        found = {key: value for key, value in instance.attributes.items() if key.startswith(query)}
        if not found:
            raise not_found(f"{instance.path}/{query}")
        items = [
            {"namespace": key.partition("/")[0], "key": key.partition("/")[2], "value": value}
            for key, value in found.items()
        ]
        return {
            "kind": "compute#guestAttributes",
            "queryPath": query,
            "queryValue": {"items": items},
            "selfLink": link(call.base, f"{call.path}"),
        }

    async def _serial(self, call: Call, zone: str, name: str) -> Json:
        instance = self._find(call, zone, name)
        data = self._cloud.machines.log(instance.path)
        start = max(int(call.query.get("start") or 0), len(data) - SERIAL_BYTES, 0)
        return {
            "kind": "compute#serialPortOutput",
            "contents": data[start:],
            "start": str(start),
            "next": str(len(data)),
            "selfLink": link(call.base, call.path),
        }

    # -- disks ---------------------------------------------------------------------------------

    async def _disk(self, call: Call, zone: str, name: str) -> Json:
        disk = self._cloud.disks.get(f"projects/{PROJECT}/zones/{zone}/disks/{name}")
        if disk is None:
            raise not_found(call.path)
        return self.instances.shown_disk(disk, call.base)

    async def _delete_disk(self, call: Call, zone: str, name: str) -> Json:
        if (repeated := self._repeat(call)) is not None:
            return repeated
        disk = self._cloud.disks.get(f"projects/{PROJECT}/zones/{zone}/disks/{name}")
        if disk is None:
            raise not_found(call.path)
        if disk.users:
            message = f"The disk resource '{disk.path}' is already being used by '{disk.users[0]}'"
            raise ApiError(400, "resourceInUseByAnotherResource", message)

        async def work() -> None:
            await self._cloud.clock.sleep(self._cloud.span(self._cloud.timing.other))
            self.instances.drop_disk(disk)

        return self._begin(call, "delete", f"zones/{zone}", disk.path, disk.id, work())

    # -- firewalls, networks, images -----------------------------------------------------------

    def _kind(self, kind: str) -> dict[str, Json]:
        return {
            "firewalls": self._cloud.firewalls,
            "networks": self._cloud.networks,
            "images": self._cloud.images,
            "snapshots": self._cloud.snapshots,
        }[kind]

    def _shown_global(self, call: Call, kind: str, path: str) -> Json:
        shown = {"kind": f"compute#{kind[:-1]}", "selfLink": link(call.base, path), **self._kind(kind)[path]}
        if kind == "firewalls":
            shown["network"] = link(call.base, "projects/" + str(shown["network"]).partition("projects/")[2])
        return shown

    async def _global_list(self, call: Call, kind: str) -> Json:
        project = call.path.split("/")[1]
        paths = [path for path in self._kind(kind) if path.startswith(f"projects/{project}/")]
        rows = [self._shown_global(call, kind, path) for path in paths]
        return self._page(call, f"compute#{kind[:-1]}List", rows)

    async def _global(self, call: Call, kind: str, name: str) -> Json:
        if call.path not in self._kind(kind):
            raise not_found(call.path)
        return self._shown_global(call, kind, call.path)

    async def _family(self, call: Call, family: str) -> Json:
        try:
            return self.instances.image(call.path)
        except ApiError:
            raise not_found(call.path) from None

    async def _insert_firewall(self, call: Call, effect: Effect | None) -> Json:
        if (repeated := self._repeat(call)) is not None:
            return repeated
        cloud, body = self._cloud, call.body
        cloud.faults.check("compute.firewalls.create", f"projects/{PROJECT}/global/firewalls")
        path = f"projects/{PROJECT}/global/firewalls/{body.get('name')}"
        if not NAME.fullmatch(str(body.get("name", ""))):
            raise invalid("resource.name", body.get("name"), "It is no name.")
        if path in cloud.firewalls:
            raise ApiError(409, "alreadyExists", f"The resource '{path}' already exists")
        if ("allowed" in body) == ("denied" in body):
            raise ApiError(400, "invalid", "Exactly one of allowed and denied must be set.")
        asked = str(body.get("network") or "global/networks/default")
        network = f"projects/{asked.rpartition('projects/')[2]}"
        if asked.startswith("global/"):
            network = f"projects/{PROJECT}/{asked}"
        if network not in cloud.networks:
            raise not_found(network)
        number, body = cloud.new_id(), {**body, "network": network}

        async def work() -> None:
            await cloud.clock.sleep(cloud.span(cloud.timing.other))
            cloud.firewalls[path] = {**body, "id": str(number), "creationTimestamp": cloud.stamp()}
            await firewalls.apply(cloud)

        return self._begin(call, "insert", "global", path, number, work(), effect)

    async def _patch_firewall(self, call: Call, name: str) -> Json:
        cloud = self._cloud
        cloud.faults.check("compute.firewalls.update", call.path)
        if call.path not in cloud.firewalls:
            raise not_found(call.path)

        async def work() -> None:
            await cloud.clock.sleep(cloud.span(cloud.timing.other))
            cloud.firewalls[call.path] = {**cloud.firewalls[call.path], **call.body}
            await firewalls.apply(cloud)

        return self._begin(call, "patch", "global", call.path, int(cloud.firewalls[call.path]["id"]), work())

    async def _delete_global(self, call: Call, kind: str, name: str) -> Json:
        if (repeated := self._repeat(call)) is not None:
            return repeated
        cloud, rows = self._cloud, self._kind(kind)
        if call.path not in rows:
            raise not_found(call.path)

        async def work() -> None:
            await cloud.clock.sleep(cloud.span(cloud.timing.other))
            gone = rows.pop(call.path, None)
            if kind == "images" and gone is not None:
                cloud.machines.forget_image(gone["selfLink"])
                cloud.meters.stop("image", call.path, cloud.clock.now())
            elif kind == "firewalls":
                await firewalls.apply(cloud)

        return self._begin(call, "delete", "global", call.path, int(rows[call.path]["id"]), work())

    async def _insert_image(self, call: Call, effect: Effect | None) -> Json:
        """Of a disk whose instance does not run, unless that is forced."""
        if (repeated := self._repeat(call)) is not None:
            return repeated
        cloud, body = self._cloud, call.body
        cloud.faults.check("compute.images.create", f"projects/{PROJECT}/global/images")
        path = f"projects/{PROJECT}/global/images/{body.get('name')}"
        check_labels(body.get("labels") or {})
        if path in cloud.images:
            raise ApiError(409, "alreadyExists", f"The resource '{path}' already exists")
        disk = cloud.disks.get("projects/" + str(body.get("sourceDisk", "")).partition("projects/")[2])
        if disk is None:
            raise not_found(str(body.get("sourceDisk")))
        used = [cloud.instances[user] for user in disk.users if user in cloud.instances]
        if any(each.status != "TERMINATED" for each in used) and call.query.get("forceCreate") != "true":
            message = f"The disk resource '{disk.path}' is already being used by '{disk.users[0]}'"
            raise ApiError(400, "resourceInUseByAnotherResource", message)
        made = self._new_image(path, body["name"], diskSizeGb=str(disk.gb), status="PENDING")
        made |= {key: value for key, value in body.items() if key not in made}
        made["labelFingerprint"] = "AAAAAAAAAAE="

        async def work() -> None:
            cloud.images[path] = made
            cloud.meters.start("image", path, "", "us", cloud.clock.now())
            await cloud.clock.sleep(cloud.span(cloud.timing.insert))
            if used:
                await cloud.machines.capture(used[0].path, made["selfLink"])
            made["status"] = "READY"

        return self._begin(call, "insert", "global", path, int(made["id"]), work(), effect)
