"""Microsoft.Resources: groups, lists over all kinds, tags; and locks on any of them."""

from __future__ import annotations

import asyncio
import re

from standins.cloud.words import Answer, Call, Json

from .arm import Arm, page, scope_of, within
from .cloud import Cloud, check_tags
from .store import Group, Resource
from .words import ArmError, parse_id

GROUP_NAME = re.compile(r"[-\w().]{0,89}[-\w()]")


class Groups:
    def __init__(self, cloud: Cloud, arm: Arm) -> None:
        self._cloud = cloud
        root = "/subscriptions/{subscription}"
        one = f"{root}/resourceGroups/{{group}}"
        arm.route("GET", f"{root}/resourceGroups", self._list)
        for method, handler in (
            ("GET", self._get),
            ("HEAD", self._head),
            ("PUT", self._put),
            ("PATCH", self._patch),
            ("DELETE", self._delete),
        ):
            arm.route(method, one, handler)
        arm.route("GET", f"{root}/resources", self._resources)
        arm.route("GET", f"{one}/resources", self._resources)
        tags = "(?P<scope>/subscriptions/.+)/providers/Microsoft.Resources/tags/default"
        for method in ("GET", "PUT", "PATCH"):
            arm.route(method, tags, self._tags)

    # -- groups --------------------------------------------------------------------------------

    async def _list(self, call: Call, found: re.Match[str]) -> Answer:
        groups = [group.show() for group in self._cloud.store.groups.values()]
        wanted = tag_filter(call.asks("$filter"))
        return page(call, [each for each in groups if has_tag(each, wanted)], self._cloud.page_size)

    async def _get(self, call: Call, found: re.Match[str]) -> Answer:
        return Answer(200, self._cloud.need_group(found["group"]).show())

    async def _head(self, call: Call, found: re.Match[str]) -> Answer:
        return Answer(204 if self._cloud.store.group(found["group"]) else 404)

    async def _put(self, call: Call, found: re.Match[str]) -> Answer:
        name = found["group"]
        old = self._cloud.store.group(name)
        if not GROUP_NAME.fullmatch(name):
            raise ArmError(400, "InvalidResourceGroupName", f"The resource group name '{name}' is invalid.")
        if old is not None and old.state == "Deleting":
            raise ArmError(
                409,
                "ResourceGroupBeingDeleted",
                f"The resource group '{name}' is in deprovisioning state and cannot perform this operation.",
            )
        type = "Microsoft.Resources/subscriptions/resourceGroups"
        location = self._cloud.catalog.region(call.body.get("location"), type)
        if old is not None and old.location != location:
            raise ArmError(
                409,
                "InvalidResourceGroupLocation",
                f"Invalid resource group location '{location}'. The Resource group already "
                "exists in location "
                f"'{old.location}'.",
            )
        check_tags(call.body.get("tags"))
        id = f"/subscriptions/{found['subscription']}/resourceGroups/{name}"
        self._cloud.faults.check_policies(type, id, call.body)
        group = old or Group(id, name, location, {})
        group.tags = dict(call.body.get("tags") or {})
        self._cloud.store.groups[name.lower()] = group
        return Answer(200 if old else 201, group.show())

    async def _patch(self, call: Call, found: re.Match[str]) -> Answer:
        group = self._cloud.need_group(found["group"])
        check_tags(call.body.get("tags"))
        group.tags = dict(call.body.get("tags") or group.tags)
        return Answer(200, group.show())

    async def _delete(self, call: Call, found: re.Match[str]) -> Answer:
        group = self._cloud.need_group(found["group"])
        group.state = "Deleting"
        where = f"/subscriptions/{found['subscription']}"
        operation = self._cloud.operations.start(where, self.empty(group))
        headers = self._cloud.operations.headers(call, operation, location=True)
        headers.pop("Azure-AsyncOperation")
        return Answer(202, None, headers)

    async def empty(self, group: Group) -> None:
        """Everything in it goes, then the group; unless something outside holds something in it."""
        while left := self._inside(group):
            await asyncio.gather(*(self._try_delete(each) for each in left))
            if len(self._inside(group)) >= len(left):
                group.state = "Succeeded"
                stays = ", ".join(str(each.id) for each in left)
                raise ArmError(
                    409,
                    "ResourceGroupDeletionBlocked",
                    f"Deletion of resource group '{group.name}' failed: resources with identifiers '{stays}' "
                    "could not be deleted. The provisioning state of the group will be rolled back.",
                )
        del self._cloud.store.groups[group.name.lower()]
        for listener in self._cloud.on_group_gone:
            listener(group.name)

    def _inside(self, group: Group) -> list[Resource]:
        """Top-level ones: children go with them."""
        return [
            each
            for each in self._cloud.store
            if each.id.group.lower() == group.name.lower() and len(each.id.types) == 1
        ]

    async def _try_delete(self, resource: Resource) -> None:
        try:
            operation = await self._cloud.delete(resource.id)
            if operation is not None:
                await operation.outcome()
        except ArmError:
            return  # something holds it; that goes, too, and then this

    # -- everything ----------------------------------------------------------------------------

    async def _resources(self, call: Call, found: re.Match[str]) -> Answer:
        group = found.groupdict().get("group") or ""
        if group:
            self._cloud.need_group(group)
        text = call.asks("$filter")
        wanted, kind = tag_filter(text), equals(text, "resourceType")
        group = group or equals(text, "resourceGroup")
        listed = self._cloud.store.listed(self._cloud.clock.now())
        shown: list[Json] = []
        for each in listed:
            is_part = len(each.id.types) > 1 and not each.location  # of another resource, like a subnet
            if is_part or (group and each.id.group.lower() != group.lower()):
                continue
            if kind and each.id.type.lower() != kind.lower():
                continue
            if has_tag(each.summary(), wanted):
                shown.append(self._shown(call, each, with_tags=wanted is None))
        return page(call, shown, self._cloud.page_size)

    def _shown(self, call: Call, resource: Resource, *, with_tags: bool) -> Json:
        """Azure says no tags when asked for a tag and its value, and need not when asked for a tag."""
        shown = {**resource.summary(), "name": resource.id.full_name}
        if not with_tags:
            shown.pop("tags", None)
        holder = resource.details.get("vm")
        if holder and resource.id.type.endswith("disks"):
            shown["managedBy"] = holder
        expand = call.asks("$expand").lower()
        if "createdtime" in expand:
            shown["createdTime"] = self._cloud.clock.stamp(resource.created_at)
        if "changedtime" in expand:
            shown["changedTime"] = self._cloud.clock.stamp(resource.changed_at or resource.created_at)
        if "provisioningstate" in expand:
            shown["provisioningState"] = resource.state
        return shown

    # -- tags ----------------------------------------------------------------------------------

    async def _tags(self, call: Call, found: re.Match[str]) -> Answer:
        holder = self._tagged(found["scope"])
        given: dict[str, str] = (call.body.get("properties") or {}).get("tags") or {}
        check_tags(given)
        match call.method, call.body.get("operation", "Replace"):
            case "GET", _:
                pass
            case "PATCH", "Merge":
                check_tags({**holder.tags, **given})
                holder.tags.update(given)
            case "PATCH", "Delete":
                for name in given:
                    holder.tags.pop(name, None)
            case _:
                holder.tags.clear()
                holder.tags.update(given)
        shown = {
            "id": f"{found['scope']}/providers/Microsoft.Resources/tags/default",
            "name": "default",
            "type": "Microsoft.Resources/tags",
            "properties": {"tags": holder.tags},
        }
        return Answer(200, shown)

    def _tagged(self, scope: str) -> Resource | Group:
        group = re.fullmatch(r"/subscriptions/[^/]+/resourceGroups/([^/]+)", scope, re.IGNORECASE)
        return self._cloud.need_group(group[1]) if group else self._cloud.need(parse_id(scope))


LEVELS = {"cannotdelete": "CanNotDelete", "readonly": "ReadOnly", "notspecified": "NotSpecified"}


class Locks:
    """Microsoft.Authorization/locks: what nobody may delete, or change, while somebody's lock is on it."""

    def __init__(self, cloud: Cloud, arm: Arm) -> None:
        self._cloud = cloud
        root = "(?P<scope>/subscriptions/.+?)/providers/Microsoft.Authorization/locks"
        arm.route("GET", root, self._list)
        for method, handler in (("PUT", self._put), ("GET", self._get), ("DELETE", self._delete)):
            arm.route(method, f"{root}/{{name}}", handler)

    async def _list(self, call: Call, found: re.Match[str]) -> Answer:
        """Those at the scope and below it; with atScope(), at it and above."""
        scope = found["scope"].lower()
        at_scope = "atscope" in call.asks("$filter").lower()
        shown = [
            lock
            for lock in self._cloud.locks.values()
            if (within(scope, scope_of(lock)) if at_scope else within(scope_of(lock), scope))
        ]
        return page(call, shown, self._cloud.page_size)

    async def _put(self, call: Call, found: re.Match[str]) -> Answer:
        level = str((call.body.get("properties") or {}).get("level", "")).lower()
        if level not in LEVELS:
            raise ArmError(400, "InvalidLockLevel", f"The lock level '{level}' is invalid.")
        properties = {**call.body["properties"], "level": LEVELS[level]}
        lock: Json = {
            "id": f"{found['scope']}/providers/Microsoft.Authorization/locks/{found['name']}",
            "name": found["name"],
            "type": "Microsoft.Authorization/locks",
            "properties": properties,
        }
        known = lock["id"].lower() in self._cloud.locks
        self._cloud.locks[lock["id"].lower()] = lock
        return Answer(200 if known else 201, lock)

    async def _get(self, call: Call, found: re.Match[str]) -> Answer:
        lock = self._cloud.locks.get(call.path.lower())
        if lock is None:
            raise ArmError(404, "LockNotFound", f"The lock '{found['name']}' could not be found.")
        return Answer(200, lock)

    async def _delete(self, call: Call, found: re.Match[str]) -> Answer:
        return Answer(200 if self._cloud.locks.pop(call.path.lower(), None) else 204)


Tag = tuple[str, str | None]


def equals(text: str, field: str) -> str:
    """Of an OData filter: the value that a field is to have; empty if it does not matter."""
    found = re.search(rf"\b{field}\s+eq\s+'((?:[^']|'')*)'", text, re.IGNORECASE)
    return found[1].replace("''", "'") if found else ""


def tag_filter(text: str) -> Tag | None:
    name = equals(text, "tagName")
    has_value = re.search(r"\btagValue\s+eq\b", text, re.IGNORECASE) is not None
    return (name, equals(text, "tagValue") if has_value else None) if name else None


def has_tag(shown: Json, wanted: Tag | None) -> bool:
    if wanted is None:
        return True
    tags = {key.lower(): value for key, value in (shown.get("tags") or {}).items()}
    value = tags.get(wanted[0].lower())
    return value is not None and wanted[1] in (None, value)
