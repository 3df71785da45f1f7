"""ARM's requests about resources: which resource, which verb."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlencode

from standins.cloud.words import Answer, Call, Json

from .cloud import Cloud
from .store import Resource
from .vms import VirtualMachines, Vm
from .words import ArmError, ResourceId, Target, parse_target

Handler = Callable[[Call, "re.Match[str]"], Awaitable[Answer]]


class Arm:
    """Answers calls. Routes come first: whatever is no plain resource."""

    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud
        self._routes: list[tuple[str, re.Pattern[str], Handler]] = []

    def route(self, method: str, pattern: str, handler: Handler) -> None:
        """`{name}` in a pattern is one word of the path."""
        regex = re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", pattern)
        self._routes.append((method, re.compile(regex + "/?", re.IGNORECASE), handler))

    async def answer(self, call: Call, hold_s: float = 0.0) -> Answer:
        """Never raises ArmError."""
        try:
            self._check(call)
            operation = self._cloud.operations.find(call.path)
            if operation is not None and call.method == "GET":
                return self._cloud.operations.answer(call, operation)
            for method, pattern, handler in self._routes:
                found = pattern.fullmatch(call.path)
                if found is not None and method == call.method:
                    return await handler(call, found)
            return await self._resource(call, hold_s)
        except ArmError as error:
            return error.answer()

    def _check(self, call: Call) -> None:
        if not call.asks("api-version"):
            raise ArmError(
                400,
                "MissingApiVersionParameter",
                "The api-version query parameter (?api-version=) is required for all requests.",
            )
        words = call.path.split("/")
        is_ours = (
            len(words) < 3 or words[1].lower() != "subscriptions" or words[2] == self._cloud.subscription
        )
        if not is_ours:
            raise ArmError(404, "SubscriptionNotFound", f"The subscription '{words[2]}' could not be found.")
        self._check_rights(call)
        self._check_locks(call)

    def _check_locks(self, call: Call) -> None:
        """A lock holds for all that is below its scope; and nothing goes that has something locked in it."""
        path = call.path.lower()
        if call.method in ("GET", "HEAD") or "/microsoft.authorization/locks" in path:
            return
        deletes = call.method == "DELETE"
        for lock in self._cloud.locks.values():
            level, scope = lock["properties"]["level"], scope_of(lock)
            forbids = deletes and level != "NotSpecified" and (within(path, scope) or within(scope, path))
            if forbids or (level == "ReadOnly" and within(path, scope)):
                verb = "delete" if deletes else "write"
                raise ArmError(
                    409,
                    "ScopeLocked",
                    f"The scope '{call.path}' cannot perform {verb} operation because following scope(s) are "
                    f"locked: '{scope_of(lock, lower=False)}'. Please remove the lock and try again.",
                )

    def _check_rights(self, call: Call) -> None:
        action = action_of(call)
        denied_actions = self._cloud.faults.denied_actions
        if self._is_outside(call):
            denied_actions = [*denied_actions, "*"]
        for denied in denied_actions:
            if re.fullmatch(re.escape(denied).replace(r"\*", ".*"), action, re.IGNORECASE):
                raise ArmError(
                    403,
                    "AuthorizationFailed",
                    "The client 'standin' with object id '0000' does not have authorization to "
                    "perform action "
                    f"'{action}' over scope '{call.path}' or the scope is invalid. If access was recently "
                    "granted, please refresh your credentials.",
                )

    def _is_outside(self, call: Call) -> bool:
        """Of the one group that the client has rights on? Everybody may see the subscription itself."""
        root = f"/subscriptions/{self._cloud.subscription}"
        if not self._cloud.faults.only_group or call.path == root or self._cloud.operations.find(call.path):
            return False
        return not within(call.path.lower(), f"{root}/resourceGroups/{self._cloud.faults.only_group}".lower())

    async def _resource(self, call: Call, hold_s: float) -> Answer:
        target = parse_target(call.path)
        if target is None:
            raise ArmError(404, "NotFound", f"There is nothing at {call.path}.")
        match call.method:
            case "GET":
                return self._get(call, target)
            case "HEAD":
                return Answer(204 if self._cloud.store.get(target.id) else 404)
            case "PUT" if not target.tail:
                return self._put(call, target.id, call.body, hold_s)
            case "PATCH" if not target.tail:
                old = self._cloud.need(target.id)
                body = self._cloud.kind(target.id).patch(old, call.body)
                return self._put(call, target.id, body, hold_s)
            case "DELETE" if not target.tail:
                return await self._delete(call, target.id, hold_s)
            case "POST" if target.tail:
                return await self._post(call, target, hold_s)
            case _:
                raise ArmError(405, "MethodNotAllowed", f"{call.method} is not possible here.")

    # -- verbs ---------------------------------------------------------------------------------

    def _get(self, call: Call, target: Target) -> Answer:
        if not target.tail:
            return Answer(200, self._shown(call, self._cloud.need(target.id)))
        if target.id.names:
            kind = self._cloud.kinds.get(target.id.type.lower())
            owner = self._cloud.need(target.id)
            part = kind.part(owner, target.tail) if kind else None
            if part is not None:
                return Answer(200, part)
        return self._list(call, target)

    def _list(self, call: Call, target: Target) -> Answer:
        id = target.id
        wanted = "/".join((id.namespace, *id.types, target.tail)).lower()
        if wanted not in self._cloud.kinds:
            raise ArmError(404, "InvalidResourceType", f"The resource type '{wanted}' could not be found.")
        if id.group:
            self._cloud.need_group(id.group)
        prefix = f"{id.key}/{target.tail}/".lower() if id.names else ""
        found = [
            self._shown(call, each)
            for each in self._cloud.store.listed(self._cloud.clock.now())
            if each.id.type.lower() == wanted
            and (not id.group or each.id.group.lower() == id.group.lower())
            and each.id.key.startswith(prefix)
        ]
        return page(call, found, self._cloud.page_size)

    def _shown(self, call: Call, resource: Resource) -> Json:
        shown = self._cloud.show(resource)
        wants_view = "instanceview" in call.asks("$expand").lower() or call.asks("statusOnly") == "true"
        if wants_view and isinstance(resource, Vm):
            kind = self._cloud.kind(resource.id)
            assert isinstance(kind, VirtualMachines)
            shown["properties"]["instanceView"] = kind.instance_view(resource)
        return shown

    def _put(self, call: Call, id: ResourceId, body: Json, hold_s: float) -> Answer:
        put = self._cloud.put(id, body, call.asks("api-version"), hold_s)
        status = 201 if put.created else 200
        headers = {}
        if put.operation is not None:
            headers = self._cloud.operations.headers(call, put.operation, location=False)
        return Answer(status, self._cloud.show(put.resource), headers)

    async def _delete(self, call: Call, id: ResourceId, hold_s: float) -> Answer:
        self._cloud.kind(id)
        operation = await self._cloud.delete(id, hold_s)
        if operation is None:
            return Answer(204)
        return Answer(202, None, self._cloud.operations.headers(call, operation, location=True))

    async def _post(self, call: Call, target: Target, hold_s: float) -> Answer:
        kind = self._cloud.kind(target.id)
        action = kind.actions.get(target.tail.lower())
        if action is None:
            raise ArmError(404, "InvalidAction", f"There is no action '{target.tail}' of {kind.type}.")
        return await action(self._cloud.need(target.id), call, hold_s)


def scope_of(lock: Json, *, lower: bool = True) -> str:
    """The id of what a lock is on."""
    scope = str(lock["id"]).rsplit("/providers/Microsoft.Authorization/locks/", 1)[0]
    return scope.lower() if lower else scope


def within(path: str, scope: str) -> bool:
    """Is it the scope, or below it? Both in lower case."""
    return path == scope or path.startswith(f"{scope}/")


def action_of(call: Call) -> str:
    """As in role definitions: `Microsoft.Compute/virtualMachines/write`."""
    target = parse_target(call.path)
    if target is None:
        type, tail = "Microsoft.Resources/subscriptions/resourceGroups", ""
    else:
        tail = target.tail if call.method == "POST" else ""
        types = (
            target.id.types if call.method == "POST" or not target.tail else (*target.id.types, target.tail)
        )
        type = "/".join((target.id.namespace, *types))
    verbs = {"GET": "read", "HEAD": "read", "PUT": "write", "PATCH": "write", "DELETE": "delete"}
    return f"{type}/{verbs[call.method]}" if call.method in verbs else f"{type}/{tail}/action"


def page(call: Call, items: list[Any], size: int) -> Answer:
    """A list as ARM gives it, a piece at a time."""
    start = int(call.asks("$skiptoken") or 0)
    top = int(call.asks("$top") or size)
    shown: Json = {"value": items[start : start + min(size, top)]}
    if start + size < len(items) and top >= size:
        rest = {key: value for key, value in call.query.items() if key.lower() != "$skiptoken"}
        rest["$skiptoken"] = str(start + size)
        shown["nextLink"] = f"{call.base}{call.path}?{urlencode(rest)}"
    return Answer(200, shown)
