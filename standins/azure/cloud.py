"""The world behind the protocol: what exists and what is done to it, all in the server's thread."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

from standins.cloud.clock import Clock
from standins.cloud.machines import Machines
from standins.cloud.meters import Meters
from standins.cloud.words import Json

from .catalog import Catalog
from .faults import Faults
from .kind import Kind, canonical
from .operations import Operation, Operations
from .quota import Capacity, Quota
from .store import Group, Resource, Store, extra_of
from .words import SUBSCRIPTION, ArmError, ResourceId

Range = tuple[float, float]
NAMESPACES = (
    "Microsoft.Resources",
    "Microsoft.Compute",
    "Microsoft.Network",
    "Microsoft.DevTestLab",
    "Microsoft.Authorization",
)
RESERVED = re.compile(r"microsoft|windows|^login|^xbox", re.IGNORECASE)
MOST_TAGS = 50


@dataclass
class Timing:
    """Seconds, from and to. `boot_s`: from allocation until the guest's sshd answers."""

    network_s: Range = (0.01, 0.05)
    allocation_s: Range = (0.05, 0.1)
    boot_s: Range = (0.2, 0.4)
    deallocate_s: Range = (0.1, 0.2)
    delete_s: Range = (0.1, 0.2)
    shutdown_lead_s: float = 1800.0
    """A schedule set less than this ahead of its time first acts on the next day."""
    run_command_s: Range = (0.1, 0.2)
    """Until a script runs inside a machine; on Azure 20 seconds at least."""
    copy_s: Range = (0.1, 0.2)
    """From a machine's disk to an image's copies."""


class Put(NamedTuple):
    resource: Resource
    operation: Operation | None
    created: bool


class Cloud:
    def __init__(self, clock: Clock, machines: Machines, timing: Timing, seed: int) -> None:
        self.clock = clock
        self.machines = machines
        self.timing = timing
        self.random = random.Random(seed)
        self.faults = Faults(seed)
        self.store = Store()
        self.operations = Operations(clock)
        self.meters = Meters()
        self.catalog = Catalog()
        self.quota = Quota()
        self.capacity = Capacity()
        self.subscription = SUBSCRIPTION
        self.locks: dict[str, Json] = {}
        """Id in lower case -> the lock."""
        self.features: set[str] = set()
        """Of Microsoft.Compute that the subscription has registered, in lower case."""
        self.registered = {name.lower() for name in NAMESPACES}
        self.disks_inherit_tags = True
        self.clients_are_inside = False
        """Are clients in the machines' virtual network, as a controller in Azure or behind a VPN is?"""
        self.page_size = 100
        self.kinds: dict[str, Kind] = {}
        self.on_rules: list[Callable[[], None]] = []
        self.on_group_gone: list[Callable[[str], None]] = []

    def add_kind(self, kind: Kind) -> None:
        self.kinds[kind.type.lower()] = kind

    def kind(self, id: ResourceId) -> Kind:
        found = self.kinds.get(id.type.lower())
        if found is None:
            raise ArmError(
                404,
                "InvalidResourceType",
                f"The resource type '{'/'.join(id.types)}' could not be found in the namespace "
                f"'{id.namespace}' for api version.",
            )
        return found

    async def really(self, deed: Awaitable[None]) -> None:
        """Something is done to a real machine: the clock does not jump meanwhile."""
        with self.clock.hold():
            await deed

    async def pause(self, span: Range) -> None:
        await self.clock.sleep(self.random.uniform(*span))

    def rules_changed(self) -> None:
        """Of a security group, or of who has one."""
        for listener in self.on_rules:
            listener()

    # -- reading -------------------------------------------------------------------------------

    def need(self, id: ResourceId) -> Resource:
        """Raises as a GET of it does."""
        self.need_group(id.group)
        found = self.store.get(id)
        if found is None:
            what = f"{id.type}/{id.full_name}"
            raise ArmError(
                404,
                "ResourceNotFound",
                f"The Resource '{what}' under resource group '{id.group}' was not found. For more details "
                "please go to https://aka.ms/ARMResourceNotFoundFix",
            )
        return found

    def need_group(self, name: str) -> Group:
        group = self.store.group(name)
        if group is None:
            raise ArmError(404, "ResourceGroupNotFound", f"Resource group '{name}' could not be found.")
        return group

    def show(self, resource: Resource) -> Json:
        return self.kind(resource.id).show(resource)

    # -- writing -------------------------------------------------------------------------------

    def put(self, id: ResourceId, body: Json, version: str, hold_s: float = 0.0) -> Put:
        """Validate by this version of the API, keep, and start what takes longer.

        `hold_s`: it starts that much later.
        """
        kind = self.kind(id)
        body = canonical(body)
        self._may_write(id, body)
        old = self.store.get(id)
        if old is not None and old.busy is not None and not old.busy.done.is_set():
            raise kind.is_busy(old)
        location = self._location(kind, id, body, old)
        kind.check(id, {**body, "location": location, "apiVersion": version}, old)
        resource = old or kind.make(id, location, self.clock.now())
        resource.properties = kind.keep(body.get("properties") or {}, old)
        resource.extra = extra_of(body)
        resource.tags = dict(body.get("tags") or {})
        resource.changed_at = self.clock.now()
        resource.state = "Updating" if old else kind.creating
        self.store.add(resource)
        try:
            kind.accept(resource, is_new=old is None)
        except ArmError:
            if old is None:
                self.store.discard(resource)
            raise
        if not kind.is_long and not hold_s:
            kind.finish(resource)
            resource.state = "Succeeded"
            return Put(resource, None, old is None)
        work = self._bring(kind, resource, old is None, hold_s)
        resource.busy = self.operations.start(self._where(resource), work)
        return Put(resource, resource.busy, old is None)

    async def _bring(self, kind: Kind, resource: Resource, is_new: bool, hold_s: float) -> None:
        try:
            if hold_s:
                await self.clock.sleep(hold_s)
            await kind.bring(resource, is_new)
            kind.finish(resource)
        except ArmError:
            resource.state = "Failed"
            raise
        resource.state = "Succeeded"

    async def delete(self, id: ResourceId, hold_s: float = 0.0) -> Operation | None:
        """None if it is not there."""
        if self.store.group(id.group) is None:
            return None
        resource = self.store.get(id)
        if resource is None:
            return None
        kind = self.kind(id)
        busy = resource.busy
        if busy is not None and not busy.done.is_set():
            if resource.state == "Deleting":
                return busy
            if not kind.can_be_preempted:
                raise kind.is_busy(resource)
            await self.operations.preempt(busy)
        kind.check_delete(resource)
        resource.state = "Deleting"
        resource.busy = self.operations.start(self._where(resource), self._remove(kind, resource, hold_s))
        return resource.busy

    async def _remove(self, kind: Kind, resource: Resource, hold_s: float) -> None:
        if hold_s:
            await self.clock.sleep(hold_s)
        if resource.id.type in self.faults.failing_deletes:
            resource.state = "Failed"
            raise ArmError(
                409,
                "DeleteOperationFailed",
                f"The deletion of '{resource.id.name}' was begun, and could not be completed.",
            )
        # nothing that is being deleted may survive half-way, whoever loses patience
        await asyncio.shield(self.operations.spawn(kind.remove(resource)))

    def forget(self, resource: Resource) -> None:
        """It is gone."""
        self.store.remove(resource, self.clock.now())
        self.quota.release(resource.id.key)

    def _where(self, resource: Resource) -> str:
        id = resource.id
        place = resource.location or "eastus"
        return f"/subscriptions/{id.subscription}/providers/{id.namespace}/locations/{place}"

    def _location(self, kind: Kind, id: ResourceId, body: Json, old: Resource | None) -> str:
        if not kind.has_location:
            return ""
        location = self.catalog.region(body.get("location"), id.type)
        if old is not None and old.location != location:
            raise ArmError(
                409,
                "InvalidResourceLocation",
                f"The resource '{id.name}' already exists in location '{old.location}' in resource group "
                f"'{id.group}'. A resource with the same name cannot be created in location '{location}'. "
                "Please select a new resource name.",
            )
        return location

    def _may_write(self, id: ResourceId, body: Json) -> None:
        if self.need_group(id.group).state == "Deleting":
            raise ArmError(
                409,
                "ResourceGroupBeingDeleted",
                f"The resource group '{id.group}' is in deprovisioning state and cannot perform "
                "this operation.",
            )
        if id.namespace.lower() not in self.registered:
            raise ArmError(
                409,
                "MissingSubscriptionRegistration",
                f"The subscription is not registered to use namespace '{id.namespace}'. See "
                "https://aka.ms/rps-not-found for how to register subscriptions.",
            )
        if RESERVED.search(id.name):
            raise ArmError(
                400,
                "ReservedResourceName",
                f"The resource name '{id.name}' or a part of the name is a trademarked or reserved word.",
            )
        check_tags(body.get("tags"))
        self.faults.check_policies(id.type, str(id), body)


def check_tags(tags: object) -> None:
    if tags is None:
        return
    if not isinstance(tags, dict):
        raise ArmError(400, "InvalidRequestContent", "The request content was invalid: tags is no object.")
    if len(tags) > MOST_TAGS:
        raise ArmError(400, "TagsLimitExceeded", f"Number of tags exceeds the limit of {MOST_TAGS}.")
    for name, value in tags.items():
        if not isinstance(value, str) or len(value) > 256:
            raise ArmError(
                400,
                "InvalidTagValueLength",
                f"Tag value of '{name}' is too long. The limit is 256 characters.",
            )
        if len(name) > 512 or re.search(r"[<>%&\\?/]", name):
            raise ArmError(400, "InvalidTagNameCharacters", f"The tag name '{name}' has reserved characters.")
