"""The state of the stand-in: what exists, operations, quota, and time."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from standins.cloud.background import Background
from standins.cloud.clock import Clock
from standins.cloud.machines import Machines
from standins.cloud.meters import Meters
from standins.cloud.words import Json

from .catalog import DISK_TYPES, LIMITS, TYPES, Catalog
from .faults import Faults
from .words import PREFIX, PROJECT, ApiError, OperationError

Span = tuple[float, float]
ZERO_ID = "00000000-0000-0000-0000-000000000000"


@dataclass(frozen=True)
class Timing:
    """How long things take, in seconds, from and to."""

    insert: Span = (4.0, 12.0)
    boot: Span = (1.0, 3.0)
    """After an instance runs, before its system comes up."""
    delete: Span = (10.0, 30.0)
    power: Span = (2.0, 10.0)
    other: Span = (1.0, 3.0)
    limit_late: Span = (0.0, 30.0)
    """How much later than it was told to Google ends an instance."""
    wait: float = 120.0
    """How long an operation's `wait` holds."""


@dataclass(eq=False)
class Operation:
    """Something that goes on. `scope`: `zones/us-central1-a`, `regions/...` or `global`."""

    number: int
    type: str
    scope: str
    target: str
    target_id: int
    inserted: float
    user: str = "tester@stand-in-project.iam.gserviceaccount.com"
    status: str = "PENDING"
    started: float = 0.0
    ended: float = 0.0
    error: OperationError | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        return f"operation-{self.number}"


@dataclass(eq=False)
class Disk:
    """A disk. `users`: the links of instances that it is attached to."""

    name: str
    zone: str
    id: int
    type: str
    gb: int
    labels: dict[str, str]
    description: str
    image: str
    created: float
    users: list[str] = field(default_factory=list[str])
    fingerprint: int = 1

    @property
    def path(self) -> str:
        return f"projects/{PROJECT}/zones/{self.zone}/disks/{self.name}"


@dataclass(eq=False)
class Instance:
    """An instance. `body`: what the client sent."""

    name: str
    zone: str
    id: int
    type: str
    body: Json
    created: float
    status: str = "PROVISIONING"
    labels: dict[str, str] = field(default_factory=dict[str, str])
    scheduling: Json = field(default_factory=dict[str, Any])
    fingerprint: int = 1
    metadata_version: int = 1
    address: str = ""
    """Public, if it has one; on flat networks its only one."""
    inside: str = ""
    ends_at: float | None = None
    """When its limit ends it; None while it does not run."""
    start: int = 0
    """Counts its starts."""
    disk: Disk | None = None
    preempted: bool = False
    attributes: dict[str, str] = field(default_factory=dict[str, str])
    """Guest attributes, by `namespace/key`."""
    started_at: float = 0.0
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)
    gone: bool = False
    booted: asyncio.Task[None] | None = None
    up_at: float = 0.0
    """When its system had come up."""

    @property
    def path(self) -> str:
        return f"projects/{PROJECT}/zones/{self.zone}/instances/{self.name}"

    @property
    def region(self) -> str:
        return self.zone.rpartition("-")[0]

    @property
    def spot(self) -> bool:
        return self.scheduling.get("provisioningModel") == "SPOT"

    @property
    def is_public(self) -> bool:
        return any(each.get("accessConfigs") for each in self.body["networkInterfaces"])

    @property
    def metadata(self) -> dict[str, str]:
        items = (self.body.get("metadata") or {}).get("items") or []
        return {each["key"]: each.get("value", "") for each in items}

    @property
    def tags(self) -> list[str]:
        return list((self.body.get("tags") or {}).get("items") or [])


class Cloud(Background):
    """Everything there is, and the operations that change it. Belongs to the server's thread."""

    def __init__(self, clock: Clock, machines: Machines, timing: Timing, seed: int) -> None:
        super().__init__()
        self.clock = clock
        self.machines = machines
        self.timing = timing
        self.random = random.Random(seed)
        self.faults = Faults(seed)
        self.catalog = Catalog()
        self.meters = Meters()
        self.instances: dict[str, Instance] = {}
        """By path, as disks and the others are."""
        self.disks: dict[str, Disk] = {}
        self.firewalls: dict[str, Json] = {}
        self.networks: dict[str, Json] = {}
        self.images: dict[str, Json] = {}
        self.snapshots: dict[str, Json] = {}
        self.operations: dict[str, Operation] = {}
        self.by_request: dict[str, Operation] = {}
        self.clients_are_inside = False
        """Do clients connect from inside the network, so that no public address is needed?"""
        self._ids = itertools.count(4_000_000_000_000_000_001)

    # -- operations ----------------------------------------------------------------------------

    def new_id(self) -> int:
        return next(self._ids)

    def operate(
        self,
        type: str,
        scope: str,
        target: str,
        target_id: int,
        work: Coroutine[Any, Any, None],
        *,
        request: str = "",
        hold_s: float = 0.0,
        error: OperationError | None = None,
    ) -> Operation:
        """Begin something. `hold_s`: it begins so much later; `error`: it fails with that."""
        operation = Operation(self.new_id(), type, scope, target, target_id, self.clock.now())
        self.operations[operation.name] = operation
        if request:
            self.by_request[request] = operation
        self.spawn(self._run(operation, work, hold_s, error))
        return operation

    async def _run(
        self,
        operation: Operation,
        work: Coroutine[Any, Any, None],
        hold_s: float,
        error: OperationError | None,
    ) -> None:
        try:
            if hold_s:
                await self.clock.sleep(hold_s)
            operation.status, operation.started = "RUNNING", self.clock.now()
            if error is not None:
                await self.clock.sleep(self.span(self.timing.insert))
                raise error
            await work
        except OperationError as failed:
            operation.error = failed
        except ApiError as refused:
            operation.error = OperationError(refused.reason, refused.message, status=refused.status)
        finally:
            work.close()
            operation.status, operation.ended = "DONE", self.clock.now()
            operation.done.set()

    def note(self, type: str, scope: str, target: str, target_id: int) -> None:
        """Something that Google has done by itself, as its operations show it."""
        now = self.clock.now()
        operation = Operation(self.new_id(), type, scope, target, target_id, now, user="system")
        operation.status, operation.started, operation.ended = "DONE", now, now
        operation.done.set()
        self.operations[operation.name] = operation

    def repeated(self, request: str) -> Operation | None:
        """The operation that a request of this id has begun."""
        if request == ZERO_ID:
            raise ApiError(
                400, "invalid", "Invalid value for field 'requestId': the zero UUID is not supported."
            )
        return self.by_request.get(request) if request else None

    def span(self, span: Span) -> float:
        return self.random.uniform(*span)

    # -- quota ---------------------------------------------------------------------------------

    def usage(self, region: str) -> dict[str, int]:
        """What the instances and disks of a region use of each quota; of all regions, if it is empty."""
        used = dict.fromkeys(LIMITS, 0)
        grants_spot = self.catalog.limit(region, "PREEMPTIBLE_CPUS") > 0
        for each in self.instances.values():
            if region and each.region != region:
                continue
            used["INSTANCES"] += 1
            if each.status in ("TERMINATED",):
                continue
            type = TYPES[each.type]
            used["PREEMPTIBLE_CPUS" if each.spot and grants_spot else type.metric] += type.cpus
            used["IN_USE_ADDRESSES"] += each.is_public
        for disk in self.disks.values():
            if not region or disk.zone.rpartition("-")[0] == region:
                used[DISK_TYPES[disk.type]] += disk.gb
        used["CPUS_ALL_REGIONS"] = sum(
            TYPES[each.type].cpus for each in self.instances.values() if each.status != "TERMINATED"
        )
        return used

    def exceeded(self, region: str, extra: dict[str, int]) -> str:
        """The first quota that would be passed by so much more; empty if none would."""
        used, everywhere = self.usage(region), self.usage("")
        for metric, more in extra.items():
            if used.get(metric, 0) + more > self.catalog.limit(region, metric):
                return metric
        cpus = sum(more for metric, more in extra.items() if metric.endswith("CPUS"))
        if everywhere["CPUS_ALL_REGIONS"] + cpus > self.catalog.limit("", "CPUS_ALL_REGIONS"):
            return "CPUS_ALL_REGIONS"
        return ""

    # -- words ---------------------------------------------------------------------------------

    def stamp(self, at: float | None = None) -> str:
        """As Google writes times: with milliseconds."""
        text = self.clock.stamp(at)
        return text if "." in text else text.replace("Z", ".000Z")


def link(base: str, path: str) -> str:
    return f"{base}{PREFIX}{path}"


Handler = Callable[..., Any]
