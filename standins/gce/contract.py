"""The stand-in against Google's discovery document, both ways: what clients send and what they are answered.

The document is Google's, and not ours to copy: `GOOGLE_CONTRACTS` says where it is. Without it nothing is
checked, and tests say so.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from standins.cloud.words import Json

TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "array": (list,),
    "object": (dict,),
    "any": (object,),
}


def document_path() -> Path | None:
    """The discovery document, if there is one on this computer."""
    folder = os.environ.get("GOOGLE_CONTRACTS") or ""
    path = Path(folder) / "compute.v1.json" if folder else None
    return path if path is not None and path.is_file() else None


@cache
def load(path: Path) -> Contract:
    return Contract(json.loads(path.read_text()))


def _is_a(kind: str, value: object) -> bool:
    """Python's True is an int; JSON's is not."""
    return isinstance(value, TYPES[kind]) and not (kind in ("integer", "number") and isinstance(value, bool))


class Contract:
    """Google's own description of the API."""

    def __init__(self, document: Json) -> None:
        self._schemas: Json = document["schemas"]
        self._common: Json = document["parameters"]
        self._methods = list(_methods(document["resources"]))

    def method(self, verb: str, path: str) -> Json | None:
        """What the document says of a call; None if there is no such call."""
        fitting = [
            each for pattern, each in self._methods if each["httpMethod"] == verb and pattern.fullmatch(path)
        ]
        # two may fit, as `images/family/{family}` and `images/{image}/x`: the one with more own words counts
        return max(fitting, key=lambda each: len(re.sub(r"\{\w+\}", "", each["path"])), default=None)

    def problems_of_call(self, verb: str, path: str, query: Mapping[str, str], body: Any) -> list[str]:
        method = self.method(verb, path)
        if method is None:
            return [f"{verb} {path}: there is no such method"]
        known = {**method.get("parameters", {}), **self._common}
        found = [f"{verb} {path}: no parameter {name!r}" for name in query if name not in known]
        request = method.get("request", {}).get("$ref")
        if body is not None:
            if request is None:
                found.append(f"{verb} {path}: it takes no body")
            else:
                found += [f"{verb} {path}: {each}" for each in self.problems(request, body, sent=True)]
        return found

    def problems_of_answer(self, verb: str, path: str, body: Json) -> list[str]:
        method = self.method(verb, path)
        response = (method or {}).get("response", {}).get("$ref")
        return (
            [f"{verb} {path}: answer: {each}" for each in self.problems(response, body)] if response else []
        )

    def problems(self, schema: str, value: Any, *, sent: bool = False) -> list[str]:
        return list(self._check({"$ref": schema}, value, schema, sent))

    def _check(self, schema: Json, value: Any, where: str, sent: bool) -> Iterator[str]:
        while "$ref" in schema:
            schema = self._schemas[schema["$ref"]]
        kind = schema.get("type", "object")
        if not _is_a(kind, value):
            yield f"{where} is {value!r}, no {kind}"
        elif kind == "object":
            yield from self._object(schema, value, where, sent)
        elif kind == "array":
            for n, item in enumerate(value):
                yield from self._check(schema["items"], item, f"{where}[{n}]", sent)
        elif kind == "string":
            yield from _text(schema, value, where)

    def _object(self, schema: Json, value: Json, where: str, sent: bool) -> Iterator[str]:
        properties, others = schema.get("properties", {}), schema.get("additionalProperties")
        for key, item in value.items():
            known = properties.get(key, others)
            if known is None:
                yield f"{where}.{key} is unknown"
                continue
            if sent and _is_output(known):
                yield f"{where}.{key} is for answers only"
            yield from self._check(known, item, f"{where}.{key}", sent)


def _is_output(schema: Json) -> bool:
    return str(schema.get("description", "")).startswith(("[Output Only]", "Output only"))


def _text(schema: Json, value: str, where: str) -> Iterator[str]:
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where} is {value!r}, none of {schema['enum']}"
    if "pattern" in schema and re.fullmatch(schema["pattern"], value) is None:
        yield f"{where} is {value!r}, which {schema['pattern']} does not fit"
    if schema.get("format") in ("int64", "uint64") and re.fullmatch(r"-?\d+", value) is None:
        yield f"{where} is {value!r}, no number"


def _methods(resources: Json) -> Iterator[tuple[re.Pattern[str], Json]]:
    for resource in resources.values():
        for method in resource.get("methods", {}).values():
            path = re.sub(r"\\\{\\?\+?(\w+)\\\}", r"[^/]+", re.escape(method["path"]))
            yield re.compile(path), method
        yield from _methods(resource.get("resources", {}))
