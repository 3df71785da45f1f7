"""What exists: resource groups and resources, and what lists say of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from standins.cloud.words import Json

from .words import ResourceId

if TYPE_CHECKING:
    from .operations import Operation

SUMMARY = ("id", "name", "type", "location", "tags", "sku", "kind", "plan", "identity", "managedBy")
NOT_EXTRA = ("id", "name", "type", "location", "tags", "properties")


@dataclass(eq=False)
class Group:
    id: str
    name: str
    location: str
    tags: dict[str, str]
    state: str = "Succeeded"

    def show(self) -> Json:
        shown: Json = {
            "id": self.id,
            "name": self.name,
            "type": "Microsoft.Resources/resourceGroups",
            "location": self.location,
            "properties": {"provisioningState": self.state},
        }
        return {**shown, "tags": self.tags} if self.tags else shown


@dataclass(eq=False)
class Resource:
    """`extra`: what a body has beside the usual, such as sku and zones. `busy`: what is being done to it."""

    id: ResourceId
    location: str
    tags: dict[str, str]
    properties: Json
    extra: Json
    created_at: float
    state: str = "Creating"
    deleted_at: float | None = None
    busy: Operation | None = None
    changed_at: float = 0.0
    details: Json = field(default_factory=dict[str, Any])

    def show(self) -> Json:
        shown: Json = {"id": str(self.id), "name": self.id.name, "type": self.id.type}
        if self.location:
            shown["location"] = self.location
        if self.tags:
            shown["tags"] = dict(self.tags)
        return {**shown, **self.extra, "properties": {**self.properties, "provisioningState": self.state}}

    def summary(self) -> Json:
        """As in lists of resources of all kinds."""
        return {key: value for key, value in self.show().items() if key in SUMMARY}


def extra_of(body: Json) -> Json:
    return {key: value for key, value in body.items() if key not in NOT_EXTRA}


class Store:
    """Single resources are seen at once; lists may lag behind, by `lag_s`, in both directions."""

    def __init__(self) -> None:
        self.groups: dict[str, Group] = {}
        self.lag_s = 0.0
        self._resources: dict[str, Resource] = {}
        self._gone: list[Resource] = []

    def group(self, name: str) -> Group | None:
        return self.groups.get(name.lower())

    def get(self, id: ResourceId) -> Resource | None:
        return self._resources.get(id.key)

    def add(self, resource: Resource) -> None:
        self._resources[resource.id.key] = resource

    def remove(self, resource: Resource, now: float) -> None:
        if self._resources.get(resource.id.key) is resource:
            del self._resources[resource.id.key]
            resource.deleted_at = now
            self._gone.append(resource)

    def discard(self, resource: Resource) -> None:
        """It was refused after all: no list ever shows it."""
        self._resources.pop(resource.id.key, None)

    def __iter__(self) -> Iterator[Resource]:
        """What there is, without lag."""
        return iter(list(self._resources.values()))

    def of_type(self, full_type: str, group: str = "") -> list[Resource]:
        wanted, group = full_type.lower(), group.lower()
        return [
            each
            for each in self
            if each.id.type.lower() == wanted and (not group or each.id.group.lower() == group)
        ]

    def children(self, parent: ResourceId, kind: str) -> list[Resource]:
        prefix = f"{parent.key}/{kind.lower()}/"
        return [each for key, each in self._resources.items() if key.startswith(prefix)]

    def listed(self, now: float) -> list[Resource]:
        """As a list shows it now."""
        since = now - self.lag_s
        late = [each for each in self._gone if (each.deleted_at or 0.0) > since and each.created_at <= since]
        self._gone = [each for each in self._gone if (each.deleted_at or 0.0) > since]
        return [
            each for each in self._resources.values() if not self.lag_s or each.created_at <= since
        ] + late
