"""Microsoft.DevTestLab/schedules: a daily time at which Azure itself deallocates a virtual machine."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from standins.cloud.words import Json

from .kind import Kind
from .power import Power
from .store import Resource
from .vms import VM, Vm
from .words import ArmError, ResourceId, names, parse_id

if TYPE_CHECKING:
    from .cloud import Cloud

TASK = "ComputeVmShutdownTask"
PREFIX = "shutdown-computevm-"


class Schedules(Kind):
    """They outlive their machines, as Azure's do, and do nothing then."""

    type = "Microsoft.DevTestLab/schedules"
    is_long = False
    fields = names(
        "status taskType dailyRecurrence hourlyRecurrence weeklyRecurrence timeZoneId "
        "notificationSettings targetResourceId createdDate uniqueIdentifier"
    )

    def __init__(self, cloud: Cloud, power: Power) -> None:
        super().__init__(cloud)
        self._power = power
        self._waiting: dict[str, asyncio.Task[None]] = {}

    def check(self, id: ResourceId, body: Json, old: Resource | None) -> None:
        super().check(id, body, old)
        properties: Json = body.get("properties") or {}
        if properties.get("taskType") != TASK:
            raise _bad(f"Task type '{properties.get('taskType')}' is not supported.")
        if properties.get("timeZoneId") != "UTC":
            raise _bad("The time zone is invalid (the stand-in knows UTC alone).")
        if properties.get("status", "Enabled") not in ("Enabled", "Disabled"):
            raise _bad(f"The status '{properties.get('status')}' is invalid.")
        _time(properties)
        target = parse_id(properties.get("targetResourceId"))
        if id.name.lower() != f"{PREFIX}{target.name}".lower():
            raise _bad(f"The name of the schedule must be '{PREFIX}{target.name}'.")
        vm = self.cloud.store.get(target)
        if vm is None or target.type.lower() != VM.lower():
            raise ArmError(404, "ResourceNotFound", f"The virtual machine '{target}' was not found.")
        if vm.location != body["location"]:
            raise _bad("The schedule and its virtual machine must be in the same location.")

    def accept(self, resource: Resource, *, is_new: bool) -> None:
        resource.properties.setdefault("status", "Enabled")
        resource.properties["createdDate"] = self.cloud.clock.stamp(resource.created_at)
        self._forget_time(resource)
        if resource.properties["status"] == "Enabled":
            self._waiting[resource.id.key] = self.cloud.operations.spawn(self._wait(resource))

    def drop(self, resource: Resource) -> None:
        self._forget_time(resource)
        super().drop(resource)

    def _forget_time(self, resource: Resource) -> None:
        task = self._waiting.pop(resource.id.key, None)
        if task is not None:
            task.cancel()

    async def remove(self, resource: Resource) -> None:
        self.drop(resource)

    async def _wait(self, schedule: Resource) -> None:
        after = schedule.changed_at + self.cloud.timing.shutdown_lead_s
        while True:
            moment = next_time(_time(schedule.properties), after)
            await self.cloud.clock.sleep_until(moment)
            # apart: a change of the schedule must not stop a shutdown that has begun
            self.cloud.operations.spawn(self._shut_down(schedule))
            after = moment + 60.0

    async def _shut_down(self, schedule: Resource) -> None:
        vm = self.cloud.store.get(parse_id(schedule.properties["targetResourceId"]))
        if not isinstance(vm, Vm):
            return
        if vm.busy is not None:
            await vm.busy.done.wait()
        if vm.deleted_at is None and vm.power not in ("", "deallocated"):
            self._power.begin(vm, self._power.deallocate)


def next_time(hour_and_minute: tuple[int, int], after: float) -> float:
    """The first moment from `after` on at which a UTC clock shows this."""
    start = datetime.fromtimestamp(after, UTC)
    hour, minute = hour_and_minute
    moment = start.replace(hour=hour, minute=minute, second=0, microsecond=0)
    return (moment if moment >= start else moment + timedelta(days=1)).timestamp()


def _time(properties: Json) -> tuple[int, int]:
    text = (properties.get("dailyRecurrence") or {}).get("time")
    if not isinstance(text, str) or len(text) != 4 or not text.isdecimal():
        raise _bad(f"The time '{text}' of the daily recurrence is invalid: it is HHmm.")
    hour, minute = int(text[:2]), int(text[2:])
    if hour > 23 or minute > 59:
        raise _bad(f"The time '{text}' of the daily recurrence is invalid: it is HHmm.")
    return hour, minute


def _bad(message: str) -> ArmError:
    return ArmError(400, "InvalidScheduleProperties", message)
