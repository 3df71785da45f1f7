"""A template with its parameters, ready to be carried out."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from standins.cloud.words import Json

from .template import Expressions, Function, invalid_template
from .words import ResourceId, parse_id

if TYPE_CHECKING:
    from .cloud import Cloud

GROUP_TYPE = "Microsoft.Resources/resourceGroups"
KNOWN = (
    "$schema",
    "contentVersion",
    "parameters",
    "variables",
    "resources",
    "outputs",
    "apiProfile",
    "metadata",
)


@dataclass(frozen=True)
class Item:
    """`raw`: as in the template; its expressions may need what is made before it."""

    id: ResourceId
    raw: Json
    after: tuple[str, ...]


class Plan:
    """Raises ArmError (InvalidTemplate) for what ARM would refuse outright."""

    def __init__(self, cloud: Cloud, subscription: str, group: str, name: str, properties: Json) -> None:
        self._cloud = cloud
        self._subscription = subscription
        self._group = group
        self._name = name
        self._template = _checked(properties)
        functions: dict[str, Function] = {
            "parameters": self._parameter,
            "variables": self._variable,
            "resourceid": self._resource_id,
            "subscriptionresourceid": self._subscription_resource_id,
            "resourcegroup": self._resource_group,
            "subscription": lambda: {"id": f"/subscriptions/{subscription}", "subscriptionId": subscription},
            "deployment": lambda: {"name": name},
            "reference": self._reference,
        }
        self.expressions = Expressions(functions)
        self.items: list[Item] = []
        self.parameters = self._parameters(properties.get("parameters") or {})
        self.items = self._items()

    # -- parameters and variables --------------------------------------------------------------

    def _parameters(self, given: Json) -> Json:
        declared: Json = self._template.get("parameters") or {}
        for name in given:
            if name not in declared:
                raise invalid_template(
                    f"The template parameters '{name}' in the parameters file are not valid; "
                    "they are not present "
                    "in the original template"
                )
        values: Json = {}
        self.parameters = values
        for name, declaration in declared.items():
            if name in given:
                values[name] = given[name].get("value")
            elif "defaultValue" in declaration:
                values[name] = self.expressions.value(declaration["defaultValue"])
            else:
                raise invalid_template(f"The value for the template parameter '{name}' is not provided")
            allowed = declaration.get("allowedValues")
            if allowed and values[name] not in allowed:
                raise invalid_template(f"The provided value for the template parameter '{name}' is not valid")
        return values

    def shown_parameters(self) -> Json:
        """As everybody may see them: secure ones have a type, and no value."""
        declared: Json = self._template.get("parameters") or {}
        kinds = {name: str(declared[name].get("type", "string")) for name in self.parameters}
        return {
            name: {"type": kind} if kind.lower().startswith("secure") else {"type": kind, "value": value}
            for (name, value), kind in zip(self.parameters.items(), kinds.values(), strict=True)
        }

    def _parameter(self, name: str) -> Any:
        if name not in self.parameters:
            raise invalid_template(f"The template parameter '{name}' is not found")
        return self.parameters[name]

    def _variable(self, name: str) -> Any:
        variables: Json = self._template.get("variables") or {}
        if name not in variables:
            raise invalid_template(f"The template variable '{name}' is not found")
        return self.expressions.value(variables[name])

    # -- functions -----------------------------------------------------------------------------

    def _resource_id(self, *words: str) -> str:
        start = next(n for n, word in enumerate(words) if "/" in word)
        group = words[start - 1] if start else self._group
        names, types = words[start + 1 :], words[start].split("/")[1:]
        if len(names) != len(types):
            raise invalid_template(f"resourceId of '{words[start]}' needs {len(types)} names")
        namespace = words[start].split("/")[0]
        return str(ResourceId(self._subscription, group, namespace, tuple(types), tuple(names)))

    def _subscription_resource_id(self, type: str, *names: str) -> str:
        namespace, *types = type.split("/")
        pairs = "/".join(f"{kind}/{name}" for kind, name in zip(types, names, strict=True))
        return f"/subscriptions/{self._subscription}/providers/{namespace}/{pairs}"

    def _resource_group(self) -> Json:
        return self._cloud.need_group(self._group).show()

    def _reference(self, what: str, *more: str) -> Json:
        id = parse_id(what) if what.startswith("/") else self._named(what)
        shown = self._cloud.show(self._cloud.need(id))
        properties: Json = shown["properties"]
        return shown if "full" in [word.lower() for word in more] else properties

    def _named(self, name: str) -> ResourceId:
        for item in self.items:
            if item.id.full_name.lower() == name.lower():
                return item.id
        raise invalid_template(f"The resource '{name}' is not defined in the template")

    # -- resources -----------------------------------------------------------------------------

    def _items(self) -> list[Item]:
        found: list[Item] = []
        for raw in self._template["resources"]:
            if "copy" in raw:
                raise invalid_template("the stand-in knows no copy loops")
            for needed in ("type", "name", "apiVersion"):
                if not raw.get(needed):
                    raise invalid_template(f"a resource has no {needed}")
            if self.expressions.value(raw.get("condition", True)):
                full_type, full_name = raw["type"], self.expressions.value(raw["name"])
                namespace, *types = full_type.split("/")
                names = tuple(full_name.split("/"))
                if len(names) != len(types):
                    raise invalid_template(
                        f"The template resource '{full_name}' for type '{full_type}' has "
                        "incorrect segment lengths"
                    )
                id = ResourceId(self._subscription, self._group, namespace, tuple(types), names)
                after = tuple(self.expressions.value(raw.get("dependsOn") or []))
                found.append(Item(id, raw, after))
        return [self._linked(item, found) for item in found]

    def _linked(self, item: Item, items: list[Item]) -> Item:
        """With what it comes after as keys of ids."""
        keys: list[str] = []
        for after in item.after:
            target = _find(after, items)
            if target is not None:
                keys.append(target.id.key)
            elif not after.startswith("/"):
                raise invalid_template(f"The resource '{after}' is not defined in the template")
        return Item(item.id, item.raw, tuple(keys))

    def body(self, item: Item) -> Json:
        """What is put, its expressions evaluated now."""
        left_out = ("type", "name", "apiVersion", "dependsOn", "condition", "comments", "scope", "metadata")
        raw = {key: value for key, value in item.raw.items() if key not in left_out}
        body: Json = self.expressions.value(raw)
        return body

    def outputs(self) -> Json:
        declared: Json = self._template.get("outputs") or {}
        return {
            name: {"type": each.get("type"), "value": self.expressions.value(each.get("value"))}
            for name, each in declared.items()
        }


def _find(after: str, items: list[Item]) -> Item | None:
    wanted = after.lower()
    for item in items:
        short = f"{item.id.type}/{item.id.full_name}".lower()
        if wanted in (item.id.key, item.id.full_name.lower(), short):
            return item
    return None


def _checked(properties: Json) -> Json:
    template = properties.get("template")
    if not isinstance(template, dict):
        raise invalid_template("there is no template")
    if str(properties.get("mode")).capitalize() not in ("Incremental", "Complete"):
        raise invalid_template(f"mode is {properties.get('mode')!r}")
    for key in template:
        if key not in KNOWN:
            raise invalid_template(f"Could not find member '{key}' on object of type 'Template'")
    if not re.match(r"\d+\.\d+\.\d+\.\d+$", str(template.get("contentVersion"))):
        raise invalid_template("contentVersion is missing")
    if not template.get("$schema") or not isinstance(template.get("resources"), list):
        raise invalid_template("$schema or resources is missing")
    return template
