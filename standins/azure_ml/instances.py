"""Compute instances of a workspace: computers of their own, which start, stop and can be entered by SSH."""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
import shlex
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from lab.network import GATEWAY
from standins.azure.cloud import Cloud
from standins.azure.words import ArmError
from standins.cloud.machines import Guest, MachineTrouble
from standins.cloud.words import Json

USER = "azureuser"
SSH_PORT = 22
"""On Azure it is 50000 and more: hosts of the lab have their own addresses."""
NAME = re.compile(r"(?!.*-[0-9]*$)[a-zA-Z][a-zA-Z0-9-]{1,22}[a-zA-Z0-9]")
"""There is a letter after the last hyphen."""
IDLE = re.compile(r"PT(\d+)M")
SHORTEST_IDLE, LONGEST_IDLE = 15, 3 * 24 * 60


FORWARD = """\
import socket, sys, threading
def pump(source, target):
    while data := source.recv(65536):
        target.sendall(data)
    target.shutdown(socket.SHUT_WR)
port = int(sys.argv[1])
listener = socket.create_server(("127.0.0.1", port))
listener.settimeout(60)
while True:
    near, _ = listener.accept()
    far = socket.create_connection((sys.argv[2], port))
    for ends in ((near, far), (far, near)):
        threading.Thread(target=pump, args=ends, daemon=True).start()
"""
"""Makes the storage account that clients reach at 127.0.0.1 be there for an instance, too."""


@dataclass(eq=False)
class Instance:
    """A compute of the kind ComputeInstance. `body`: what the client sent."""

    name: str
    body: Json
    created: float
    address: str
    state: str = "Creating"
    errors: list[Json] = field(default_factory=list[Json])
    is_there: bool = False
    """Is there a machine behind it?"""
    ends: asyncio.Task[None] | None = None
    """What stops it at its time."""
    operation: Json = field(default_factory=dict[str, object])

    @property
    def settings(self) -> Json:
        found: Json = self.body["properties"].get("properties") or {}
        return found

    @property
    def size(self) -> str:
        return str(self.settings.get("vmSize"))


class Instances:
    """All compute instances, and what Azure does with them. Belongs to the server's thread."""

    def __init__(self, cloud: Cloud, span: tuple[float, float], ca: Path, region: str) -> None:
        self.cloud, self._span, self._ca, self._region = cloud, span, ca, region
        self.all: dict[str, Instance] = {}
        self.fails = ""
        """How the next one ends: CreateFailed, SetupFailed or Unusable; StartFailed if it is started."""
        self.tells_starts = True
        """Does a start answer where its end can be asked for? Azure's description does not promise it."""
        self.image = ""
        """What their disks are copies of: on Azure, computers with Docker."""

    def add(self, name: str, body: Json) -> Instance:
        check(name, body)
        taken = {instance.address for instance in self.all.values()}
        instance = Instance(name, body, self.cloud.clock.now(), self.cloud.machines.new_address(taken))
        self.all[name.lower()] = instance
        return instance

    def schedule(self, instance: Instance, schedules: Json) -> None:
        """Change when it starts and stops."""
        stops_of({"schedules": schedules})
        instance.settings["schedules"] = schedules
        if instance.state == "Running":
            self._watch(instance)

    async def bring(self, instance: Instance) -> Json | None:
        await self.cloud.pause(self._span)
        if instance.state != "Creating":
            return None
        if self.fails == "CreateFailed":
            return self._failed(instance, "AllocationFailed", "No room for the size in the region.")
        guest = Guest(
            instance.name,
            instance.name,
            instance.address,
            USER,
            (),
            b"",
            has_temp_disk=True,
            image=self.image,
        )
        self.cloud.meters.start(
            "vm", instance.name, instance.size, self._region, self.cloud.clock.now(), spot=False
        )
        await self.cloud.really(self.cloud.machines.create(guest))
        instance.is_there = True
        if instance.state != "Creating":  # it was deleted meanwhile
            return None
        instance.state = "SettingUp"
        if problem := await self._set_up(instance):
            return self._failed(instance, "SetupScriptFailed", problem)
        if instance.state == "SettingUp":
            self._run(instance)
        return None

    def _failed(self, instance: Instance, code: str, message: str) -> Json | None:
        instance.state = self.fails or "SetupFailed"
        instance.errors = [{"error": {"code": code, "message": message}}]
        self.fails = ""
        return None

    async def _set_up(self, instance: Instance) -> str:
        """Run the creation script, as root. Returns what went wrong."""
        if self.fails == "SetupFailed":
            return "The creation script has failed."
        scripts = (instance.settings.get("setupScripts") or {}).get("scripts") or {}
        data = (scripts.get("creationScript") or {}).get("scriptData")
        if not data:
            return ""
        script = base64.b64decode(data).decode()
        trust = (
            f"printf %s {shlex.quote(self._ca.read_text())} >/tmp/ca.pem; export SSL_CERT_FILE=/tmp/ca.pem\n"
        )
        if loopback := re.search(r"https://127\.0\.0\.1:(\d+)/", script):
            port = shlex.quote(loopback[1])
            trust += f"python3 -c {shlex.quote(FORWARD)} {port} {GATEWAY} >/dev/null 2>&1 &\nsleep 0.3\n"
        with self.cloud.clock.hold():
            code, _, said = await self.cloud.machines.execute(instance.name, trust + script)
        return f"The creation script has ended with {code}: {said[-300:]}" if code else ""

    def _run(self, instance: Instance) -> None:
        instance.state = "Running"
        self._watch(instance)

    def _watch(self, instance: Instance) -> None:
        if instance.ends is not None:
            instance.ends.cancel()
        instance.ends = self.cloud.operations.spawn(self._end(instance))

    async def _end(self, instance: Instance) -> None:
        """Stop it by its schedule, or when nobody has used it for as long as it says."""
        now = self.cloud.clock.now()
        waits = [("Schedule", stop - now) for stop in stops_of(instance.settings)]
        if idle := IDLE.fullmatch(str(instance.settings.get("idleTimeBeforeShutdown") or "")):
            waits.append(("IdleShutdown", float(idle[1]) * 60))
        if not waits:
            return
        by, wait_s = min(waits, key=lambda wait: wait[1])
        await self.cloud.clock.sleep(max(0.0, wait_s))
        instance.ends = None
        await self.stop(instance, by)

    async def stop(self, instance: Instance, by: str = "User") -> Json | None:
        if instance.ends is not None:
            instance.ends.cancel()
            instance.ends = None
        instance.state = "Stopping"
        await self.cloud.pause(self._span)
        await self.cloud.really(self.cloud.machines.power_off(instance.name))
        self.cloud.meters.stop("vm", instance.name, self.cloud.clock.now())
        if instance.state == "Stopping":
            instance.state = "Stopped"
        instance.operation = {"operationName": "Stop", "operationStatus": "Succeeded", "operationTrigger": by}
        return None

    async def start(self, instance: Instance) -> Json | None:
        instance.state = "Starting"
        await self.cloud.pause(self._span)
        if self.fails == "StartFailed":
            refusal = ArmError(409, "AllocationFailed", "Allocation failed. Please try again later.")
            self.fails, instance.state = "", "Stopped"
            instance.errors = [{"error": {"code": refusal.code, "message": refusal.message}}]
            instance.operation = {
                "operationName": "Start",
                "operationTime": self.cloud.clock.stamp(self.cloud.clock.now()),
                "operationStatus": "StartFailed",
            }
            raise refusal
        self.cloud.meters.start(
            "vm", instance.name, instance.size, self._region, self.cloud.clock.now(), spot=False
        )
        await self._power_on(instance)
        return None

    async def restart(self, instance: Instance) -> Json | None:
        instance.state = "Restarting"
        await self.cloud.really(self.cloud.machines.power_off(instance.name))
        await self._power_on(instance)
        return None

    async def _power_on(self, instance: Instance) -> None:
        on = self.cloud.machines.power_on(instance.name, instance.address, fresh_temp_disk=True)
        try:
            await self.cloud.really(on)
        except MachineTrouble:
            instance.state = "Unusable"
            return
        if instance.state in ("Starting", "Restarting"):
            self._run(instance)

    async def delete(self, instance: Instance) -> Json | None:
        if instance.ends is not None:
            instance.ends.cancel()
        instance.state = "Deleting"
        await self.cloud.pause(self._span)
        await self.cloud.really(self.cloud.machines.destroy(instance.name))
        self.cloud.meters.stop("vm", instance.name, self.cloud.clock.now())
        if self.all.get(instance.name.lower()) is instance:
            del self.all[instance.name.lower()]
        return None

    def show(self, root: str, provider: str, instance: Instance) -> Json:
        stamp = self.cloud.clock.stamp
        ssh = instance.settings.get("sshSettings") or {}
        done = instance.state not in ("Creating", "SettingUp", "Deleting", "CreateFailed", "SetupFailed")
        provisioning = {"Deleting": "Deleting", "CreateFailed": "Failed", "SetupFailed": "Failed"}
        kept = {
            key: value
            for key, value in instance.settings.items()
            if key not in ("sshSettings", "setupScripts")
        }
        return {
            "id": f"{root}/computes/{instance.name}",
            "name": instance.name,
            "type": f"{provider}/workspaces/computes",
            "location": self._region,
            "tags": instance.body.get("tags") or {},
            "properties": {
                "computeType": "ComputeInstance",
                "computeLocation": self._region,
                "createdOn": stamp(instance.created),
                "modifiedOn": stamp(instance.created),
                "provisioningState": "Succeeded" if done else provisioning.get(instance.state, "Creating"),
                "isAttachedCompute": False,
                "disableLocalAuth": bool(instance.body["properties"].get("disableLocalAuth")),
                "properties": {
                    **kept,
                    "state": instance.state,
                    "sshSettings": {**ssh, "adminUserName": USER, "sshPort": SSH_PORT},
                    **({"errors": instance.errors} if instance.errors else {}),
                    **({"lastOperation": instance.operation} if instance.operation else {}),
                    "connectivityEndpoints": (
                        {"publicIpAddress": instance.address, "privateIpAddress": instance.address}
                        if instance.state in ("Running", "SettingUp")
                        else {}
                    ),
                },
            },
        }


def check(name: str, body: Json) -> None:
    """Raises ArmError."""
    inner = (body.get("properties") or {}).get("properties") or {}
    if not NAME.fullmatch(name):
        raise ArmError(400, "InvalidResourceName", f"Invalid name {name} of a compute instance.")
    if not inner.get("vmSize"):
        raise ArmError(400, "BadArgument", "vmSize must be given.")
    if "idleTimeBeforeShutdown" in inner and inner["idleTimeBeforeShutdown"] is not None:
        idle = IDLE.fullmatch(str(inner["idleTimeBeforeShutdown"]))
        if idle is None or not SHORTEST_IDLE <= int(idle[1]) <= LONGEST_IDLE:
            raise ArmError(400, "BadArgument", "idleTimeBeforeShutdown must be PT15M to PT4320M.")
    scripts = (inner.get("setupScripts") or {}).get("scripts") or {}
    script = scripts.get("creationScript") or {}
    if script.get("scriptSource") == "inline":
        try:
            base64.b64decode(str(script.get("scriptData")), validate=True)
        except binascii.Error:
            raise ArmError(400, "BadArgument", "scriptData of an inline script must be base64.") from None
    stops_of(inner)


def stops_of(settings: Json) -> list[float]:
    """When its schedules stop it. Raises ArmError for what the stand-in does not know."""
    found: list[float] = []
    for each in (settings.get("schedules") or {}).get("computeStartStop") or ():
        if each.get("status", "Enabled") != "Enabled":
            continue
        words = str((each.get("cron") or {}).get("expression") or "").split()
        if each.get("action") != "Stop" or len(words) != 5 or words[4] != "*":
            raise ArmError(400, "BadArgument", "Only schedules that stop at one time of a date are known.")
        minute, hour, day, month = map(int, words[:4])
        year = int(str(each["cron"].get("startTime"))[:4])
        found.append(datetime(year, month, day, hour, minute, tzinfo=UTC).timestamp())
    return found
