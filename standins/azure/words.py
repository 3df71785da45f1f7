"""What is said to the stand-in and what it answers; names of resources."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from standins.cloud.words import Answer, Json

SUBSCRIPTION = "11111111-2222-3333-4444-555555555555"
TENANT = "99999999-8888-7777-6666-555555555555"


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


class ArmError(Exception):
    """A refusal or failure in ARM's shape."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        target: str = "",
        details: list[Json] | None = None,
        more: Json | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.status = status
        self.code = code
        self.message = message
        self.headers = headers or {}
        self._rest: Json = {}
        if target:
            self._rest["target"] = target
        if details:
            self._rest["details"] = details
        self._rest.update(more or {})

    def error(self) -> Json:
        return {"code": self.code, "message": self.message, **self._rest}

    def answer(self) -> Answer:
        return Answer(self.status, {"error": self.error()}, self.headers)


@dataclass(frozen=True)
class ResourceId:
    """Names keep the case they came in; `key` is how they compare."""

    subscription: str
    group: str
    namespace: str
    types: tuple[str, ...]
    names: tuple[str, ...]

    @property
    def type(self) -> str:
        return "/".join((self.namespace, *self.types))

    @property
    def name(self) -> str:
        return self.names[-1]

    @property
    def full_name(self) -> str:
        return "/".join(self.names)

    @property
    def key(self) -> str:
        return str(self).lower()

    @property
    def parent(self) -> ResourceId:
        return ResourceId(self.subscription, self.group, self.namespace, self.types[:-1], self.names[:-1])

    def child(self, kind: str, name: str) -> ResourceId:
        return ResourceId(
            self.subscription, self.group, self.namespace, (*self.types, kind), (*self.names, name)
        )

    def sibling(self, full_type: str, name: str) -> ResourceId:
        """Another resource of the same group."""
        namespace, *types = full_type.split("/")
        return ResourceId(self.subscription, self.group, namespace, tuple(types), tuple(name.split("/")))

    def __str__(self) -> str:
        words = [f"{kind}/{name}" for kind, name in zip(self.types, self.names, strict=True)]
        where = f"/subscriptions/{self.subscription}/resourceGroups/{self.group}"
        return "/".join((where, "providers", self.namespace, *words))


_RESOURCE = re.compile(
    r"/subscriptions/(?P<subscription>[^/]+)(?:/resourceGroups/(?P<group>[^/]+))?"
    r"/providers/(?P<namespace>[^/]+)/(?P<rest>.+)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Target:
    """What a path points to: a resource, or (`tail`) a list, an action or a part of one."""

    id: ResourceId
    tail: str


def parse_target(path: str) -> Target | None:
    found = _RESOURCE.fullmatch(path.rstrip("/"))
    if found is None:
        return None
    words = found["rest"].split("/")
    tail = words.pop() if len(words) % 2 else ""
    types, names = tuple(words[0::2]), tuple(words[1::2])
    group = found["group"] or ""
    return Target(ResourceId(found["subscription"], group, found["namespace"], types, names), tail)


def parse_id(text: object) -> ResourceId:
    """Of a reference in a body."""
    target = parse_target(text) if isinstance(text, str) else None
    if target is None or target.tail or not target.id.names or not target.id.group:
        raise ArmError(400, "LinkedInvalidPropertyId", f"Property id '{text}' at path '' is invalid.")
    return target.id
