"""The metadata server, 169.254.169.254, as instances see it; who asks is told by its address."""

from __future__ import annotations

import asyncio
import socket

from aiohttp import web

from standins.cloud import listener
from standins.cloud.hosts import Hosts

from .cloud import Cloud, Instance
from .instances import Instances

LOOK_S = 0.05


class Metadata:
    """What an instance can read of itself, and the guest attributes that it can write."""

    def __init__(self, cloud: Cloud, instances: Instances) -> None:
        self._cloud = cloud
        self._instances = instances
        self._hosts: Hosts | None = None
        self._runner: web.AppRunner | None = None

    async def listen(self, sock: socket.socket, hosts: Hosts) -> None:
        self._hosts = hosts
        app = web.Application()
        root = "/computeMetadata/v1/instance"
        app.router.add_get(f"{root}/preempted", self._preempted)
        app.router.add_get(f"{root}/attributes/{{key}}", self._attribute)
        app.router.add_get(f"{root}/service-accounts/default/token", self._token)
        app.router.add_put(f"{root}/guest-attributes/{{namespace}}/{{key}}", self._write)
        app.router.add_get(f"{root}/{{field:name|id|zone|machine-type}}", self._field)
        self._runner = await listener.begin(app, sock)

    async def close(self) -> None:
        if self._runner is not None:
            await listener.end(self._runner)

    def _asker(self, request: web.Request) -> Instance:
        if request.headers.get("Metadata-Flavor") != "Google":
            raise web.HTTPForbidden(text="Missing Metadata-Flavor:Google header.")
        assert self._hosts is not None
        holder = self._hosts.holder(request.remote or "")
        for instance in self._cloud.instances.values():
            if instance.path.lower() == holder or instance.inside == request.remote:
                return instance
        raise web.HTTPNotFound

    def _text(self, value: str) -> web.Response:
        return web.Response(text=value, headers={"Metadata-Flavor": "Google"})

    async def _preempted(self, request: web.Request) -> web.Response:
        instance = self._asker(request)
        before = instance.preempted
        if request.query.get("wait_for_change", "").lower() == "true":
            while instance.preempted == before and not instance.gone:
                await asyncio.sleep(LOOK_S)
        return self._text("TRUE" if instance.preempted else "FALSE")

    async def _attribute(self, request: web.Request) -> web.Response:
        value = self._asker(request).metadata.get(request.match_info["key"])
        if value is None:
            raise web.HTTPNotFound
        return self._text(value)

    async def _token(self, request: web.Request) -> web.Response:
        """Only an instance with a service account has one."""
        if not self._asker(request).body.get("serviceAccounts"):
            raise web.HTTPNotFound
        return web.json_response({"access_token": "guest", "expires_in": 3600, "token_type": "Bearer"})

    async def _write(self, request: web.Request) -> web.Response:
        instance, namespace, key = (
            self._asker(request),
            request.match_info["namespace"],
            request.match_info["key"],
        )
        value = (await request.read()).decode()
        if namespace != "hostkeys":
            instance.attributes[f"{namespace}/{key}"] = value
        elif not self._instances.tell_key(instance, key, value):
            raise web.HTTPForbidden(text="Guest attributes endpoint access is disabled.")
        return web.Response(status=200)

    async def _field(self, request: web.Request) -> web.Response:
        instance = self._asker(request)
        values = {
            "name": instance.name,
            "id": str(instance.id),
            "zone": f"projects/123456789012/zones/{instance.zone}",
            "machine-type": f"projects/123456789012/machineTypes/{instance.type}",
        }
        return self._text(values[request.match_info["field"]])
