"""What kinds of resources have in common, and where they differ."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from standins.cloud.words import Answer, Call, Json

from .store import Resource
from .words import ArmError, ResourceId

if TYPE_CHECKING:
    from .cloud import Cloud

Action = Callable[[Resource, Call, float], Awaitable[Answer]]
"""A POST to a resource. The number: start that much later."""


class Kind:
    """Of resources. A kind overrides what it does differently."""

    type = ""
    creating = "Creating"
    is_long = True
    """Is a PUT a long-running operation?"""
    has_location = True
    can_be_preempted = False
    """May a DELETE end what is under way?"""
    names = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,78}[A-Za-z0-9_]|[A-Za-z0-9]")
    fields: frozenset[str] = frozenset()
    """What `properties` may have; empty: anything."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud
        self.actions: Mapping[str, Action] = {}

    def check(self, id: ResourceId, body: Json, old: Resource | None) -> None:
        """Raises what is wrong, before anything happens."""
        self.check_name(id)
        self.check_fields(body)

    def preflight(self, id: ResourceId, body: Json) -> None:
        """Raises what is wrong with a resource of a template before the deployment begins."""

    def check_name(self, id: ResourceId) -> None:
        if not self.names.fullmatch(id.name):
            raise ArmError(
                400,
                "InvalidResourceName",
                f"Resource name {id.name} is invalid.",
                target=id.type.split("/")[-1],
            )

    def check_fields(self, body: Json) -> None:
        unknown = sorted(set(body.get("properties") or {}) - self.fields - {"provisioningState"})
        if self.fields and unknown:
            raise no_member(unknown[0], self.type.rsplit("/", 1)[-1])

    def make(self, id: ResourceId, location: str, now: float) -> Resource:
        return Resource(id, location, {}, {}, {}, now)

    def keep(self, properties: Json, old: Resource | None) -> Json:
        """What stays of the properties a client sent."""
        return properties

    def accept(self, resource: Resource, *, is_new: bool) -> None:
        """It is in the store: take what it needs at once."""

    async def bring(self, resource: Resource, is_new: bool) -> None:
        """What takes time. An ArmError makes it a failed resource."""
        await self.cloud.pause(self.cloud.timing.network_s)

    def finish(self, resource: Resource) -> None:
        """It is there now."""

    def check_delete(self, resource: Resource) -> None:
        """Raises why it cannot be deleted."""

    async def remove(self, resource: Resource) -> None:
        await self.cloud.pause(self.cloud.timing.network_s)
        self.drop(resource)

    def drop(self, resource: Resource) -> None:
        """At once, with what it holds."""
        self.cloud.forget(resource)

    def show(self, resource: Resource) -> Json:
        return resource.show()

    def part(self, resource: Resource, tail: str) -> Json | None:
        """A GET below the resource; None: there is no such thing."""
        return None

    def patch(self, resource: Resource, body: Json) -> Json:
        """The body of a PUT that a PATCH amounts to."""
        shown = {**resource.extra, "location": resource.location, "tags": resource.tags}
        shown["properties"] = resource.properties
        return merged(shown, body)

    def is_busy(self, resource: Resource) -> ArmError:
        return ArmError(
            429,
            "AnotherOperationInProgress",
            f"Another operation on this or dependent resource is in progress. Resource: {resource.id}.",
            headers={"Retry-After": "1"},
        )


ENUMS: Mapping[str, tuple[str, ...]] = {
    "priority": ("Regular", "Spot", "Low"),
    "evictionPolicy": ("Deallocate", "Delete"),
    "deleteOption": ("Delete", "Detach"),
    "createOption": ("FromImage", "Attach", "Empty", "Copy"),
    "publicIPAllocationMethod": ("Static", "Dynamic"),
    "privateIPAllocationMethod": ("Static", "Dynamic"),
    "storageAccountType": (
        "Premium_LRS",
        "Premium_ZRS",
        "StandardSSD_LRS",
        "StandardSSD_ZRS",
        "Standard_LRS",
    ),
    "status": ("Enabled", "Disabled"),
}
"""What these fields may say. To Azure, case does not matter, and it shows its own."""
SKUS = ("Basic", "Standard")


def canonical(value: Any, field: str = "") -> Any:
    """The same with all that is in ENUMS as Azure writes it; what is null is not there."""
    if isinstance(value, dict):
        given: Json = {key: below for key, below in value.items() if below is not None}
        return {
            key: canonical(below, f"{field}.{key}" if field == "sku" else key) for key, below in given.items()
        }
    if isinstance(value, list):
        return [canonical(each) for each in value]
    names = SKUS if field == "sku.name" else ENUMS.get(field, ())
    return next((name for name in names if isinstance(value, str) and name.lower() == value.lower()), value)


def merged(old: Json, new: Json) -> Json:
    """As JSON Merge Patch, but tags are replaced as a whole."""
    result = dict(old)
    for key, value in new.items():
        before = result.get(key)
        if key != "tags" and isinstance(value, dict) and isinstance(before, dict):
            result[key] = merged(before, value)
        else:
            result[key] = value
    return result


def no_member(name: str, type: str) -> ArmError:
    return ArmError(
        400,
        "InvalidRequestContent",
        f"The request content was invalid and could not be deserialized: 'Could not find member '{name}' on "
        f"object of type '{type}'. Path 'properties.{name}'.'.",
    )


def invalid(message: str, target: str) -> ArmError:
    return ArmError(400, "InvalidParameter", message, target=target)


def check_keys(value: object, known: Mapping[str, Any], where: str) -> None:
    """`known` maps a key to None (anything goes), to the keys below it, or to a list of one such mapping."""
    if isinstance(value, dict):
        for key, below in value.items():
            if key not in known:
                raise no_member(key, where)
            _check_below(below, known[key], key)


def _check_below(value: object, known: Any, where: str) -> None:
    if isinstance(known, list) and isinstance(value, list):
        for each in value:
            check_keys(each, known[0], where)
    elif isinstance(known, dict):
        check_keys(value, known, where)


def reference(value: object) -> str:
    """The id in `{"id": ...}`; empty if there is none."""
    if isinstance(value, dict) and isinstance(value.get("id"), str):
        found: str = value["id"]
        return found
    return ""
