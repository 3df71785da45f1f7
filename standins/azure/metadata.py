"""Evictions, and the metadata service that tells machines of them."""

from __future__ import annotations

import socket
import uuid
from dataclasses import dataclass
from email.utils import formatdate
from typing import TYPE_CHECKING

from aiohttp import web

from standins.cloud import listener
from standins.cloud.words import Json

from .vms import VirtualMachines, Vm

if TYPE_CHECKING:
    from standins.cloud.hosts import Hosts

    from .cloud import Cloud


@dataclass(eq=False)
class Event:
    """A machine is to go at `at`, or as soon as it agrees."""

    id: str
    vm: Vm
    at: float
    agreed: bool = False


class Metadata:
    """169.254.169.254, as machines see it; who asks is told by its address."""

    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud
        self._events: dict[str, Event] = {}
        self._incarnation = 1
        self._runner: web.AppRunner | None = None
        self._hosts: Hosts | None = None

    # -- evictions -----------------------------------------------------------------------------

    def evict(self, vm: Vm, notice_s: float) -> None:
        """Announce it, then take the machine away as its eviction policy says."""
        if vm.evicting:
            return
        vm.evicting = True
        event = Event(str(uuid.uuid4()).upper(), vm, self._cloud.clock.now() + notice_s)
        self._events[event.id] = event
        self._incarnation += 1
        self._cloud.operations.spawn(self._take(event))

    async def _take(self, event: Event) -> None:
        while not event.agreed and (left := event.at - self._cloud.clock.now()) > 0:
            await self._cloud.clock.sleep(min(left, 0.5))
        vm = event.vm
        if vm.busy is not None and vm.state == "Deleting":
            await vm.busy.done.wait()
        elif vm.busy is not None:
            await self._cloud.operations.preempt(vm.busy)
        kind = self._cloud.kind(vm.id)
        assert isinstance(kind, VirtualMachines)
        if vm.deleted_at is None and vm.properties.get("evictionPolicy") == "Delete":
            await kind.destroy(vm)
        elif vm.deleted_at is None:
            await kind.unplace(vm)
            vm.state = "Succeeded"
        vm.evicting = False
        del self._events[event.id]
        self._incarnation += 1

    def document(self, vm: Vm) -> Json:
        """As scheduled events are told to a machine."""
        events = [self._shown(event) for event in self._events.values() if event.vm is vm]
        return {"DocumentIncarnation": self._incarnation, "Events": events}

    def _shown(self, event: Event) -> Json:
        return {
            "EventId": event.id,
            "EventType": "Preempt",
            "ResourceType": "VirtualMachine",
            "Resources": [event.vm.id.name],
            "EventStatus": "Started" if event.agreed else "Scheduled",
            "NotBefore": "" if event.agreed else formatdate(event.at, usegmt=True),
            "Description": "Spot virtual machine is being preempted.",
            "EventSource": "Platform",
            "DurationInSeconds": -1,
        }

    # -- HTTP ----------------------------------------------------------------------------------

    async def listen(self, sock: socket.socket, hosts: Hosts) -> None:
        self._hosts = hosts
        app = web.Application()
        app.router.add_get("/metadata/scheduledevents", self._get_events)
        app.router.add_post("/metadata/scheduledevents", self._agree)
        app.router.add_get("/metadata/instance", self._instance)
        self._runner = await listener.begin(app, sock)

    async def close(self) -> None:
        if self._runner is not None:
            await listener.end(self._runner)

    def _asker(self, request: web.Request) -> Vm:
        if request.headers.get("Metadata", "").lower() != "true" or "api-version" not in request.query:
            raise web.HTTPBadRequest(
                text='{"error": "Bad request. Needs Metadata: true and an api-version."}'
            )
        assert self._hosts is not None
        id = self._hosts.holder(request.remote or "")
        for each in self._cloud.store:
            if each.id.key == id and isinstance(each, Vm):
                return each
        raise web.HTTPNotFound

    async def _get_events(self, request: web.Request) -> web.Response:
        return web.json_response(self.document(self._asker(request)))

    async def _agree(self, request: web.Request) -> web.Response:
        vm = self._asker(request)
        for each in (await request.json()).get("StartRequests", []):
            event = self._events.get(str(each.get("EventId")))
            if event is not None and event.vm is vm:
                event.agreed = True
        return web.Response(status=200)

    async def _instance(self, request: web.Request) -> web.Response:
        vm = self._asker(request)
        tags = ";".join(f"{name}:{value}" for name, value in vm.tags.items())
        compute = {
            "name": vm.id.name,
            "resourceId": str(vm.id),
            "resourceGroupName": vm.id.group,
            "subscriptionId": vm.id.subscription,
            "location": vm.location,
            "vmSize": vm.size,
            "vmId": vm.details["vmId"],
            "priority": vm.properties.get("priority", ""),
            "evictionPolicy": vm.properties.get("evictionPolicy", ""),
            "tags": tags,
            "zone": (vm.extra.get("zones") or [""])[0],
        }
        return web.json_response({"compute": compute})
