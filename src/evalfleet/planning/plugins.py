"""Name | entry point | dotted path -> plug-in. A plug-in needs no edit of ours and is imported when used.

A place is a class that declares what `PlaceKind` lists: `Settings` (a msgspec Struct that forbids unknown
fields: the keys of `[places.NAME]` and of `--set`) and `make`, a classmethod. A benchmark is a class that
declares what `benchmarks.loaded.BenchmarkKind` lists. The rest has defaults.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal, TypeVar, get_origin, get_type_hints

import msgspec
from msgspec import NODEFAULT, Struct

from evalfleet.benchmarks.loaded import Appliance, BenchmarkKind
from evalfleet.errors import RequestError
from evalfleet.model import Isolation, Plan
from evalfleet.names import hint
from evalfleet.ports import Place, PlaceContext, PriceList
from evalfleet.toml_tables import is_struct_type

Group = Literal["place", "benchmark"]
BUILT_IN: Mapping[Group, Mapping[str, str]] = {
    "place": {
        "azure_batch": "evalfleet.places.azure_batch:AzureBatchPlace",
        "azure_ml": "evalfleet.places.azure_ml:AzureMlPlace",
        "azure_vm": "evalfleet.places.azure:AzurePlace",
        "gce": "evalfleet.places.gce:GcePlace",
        "local": "evalfleet.places.local:LocalPlace",
        "slurm": "evalfleet.places.slurm:SlurmPlace",
        "ssh": "evalfleet.places.ssh:SshPlace",
    },
    "benchmark": {
        "command": "evalfleet.benchmarks.command:CommandBenchmark",
        "hal": "evalfleet.benchmarks.hal.benchmark:HalBenchmark",
        "waa": "evalfleet.benchmarks.waa.benchmark:WaaBenchmark",
    },
}
MOVED: Mapping[str, str] = {
    "lab": 'it is not part of the package; from a checkout, set kind = "lab.place:LabPlace" (docs/lab.md)'
}
"""Places that were built in -> where they are."""
POOL_KEYS: Mapping[str, object] = {"resource_group": ""}
WORKER_KEYS: Mapping[str, object] = {"docker_container": None, "waa_ready": False}
"""Keys of vm_pool_registry.json that some kind gives a value, and that all files must have."""

_CONTRACT: Mapping[Group, tuple[str, ...]] = {
    "place": ("Settings", "make"),
    "benchmark": ("Settings", "load", "from_spec"),
}


@dataclass(frozen=True)
class PlaceKind:
    """A kind of places, as its class declares it."""

    Settings: type[Struct]
    make: Callable[[str, Any, PlaceContext], Place]
    default_isolation: Isolation = "auto"
    """How attempts are kept apart on its machines, if neither its settings nor the benchmark say."""
    default_canary: int = 0
    """How many attempts must end on the first machine before others are created."""
    machine_list: tuple[str, str] | None = None
    """Its setting that lists machines, and the one that says how many each of these is. Without --workers,
    all of them are used."""
    machine_s: float = 0.0
    """How long it takes, about, until a machine is ready."""
    changeable: tuple[str, ...] = ()
    """Settings that may change while machines live: they are read from evalfleet.toml anew."""
    extra: str = ""
    """The extra of evalfleet that brings what it needs."""
    registry_settings: tuple[str, ...] = ()
    """Settings that `vm_pool_registry.json` shows."""
    price_list: PriceList | None = None
    """What its machines cost, if there is a list."""


KindT = TypeVar("KindT", PlaceKind, BenchmarkKind)


class Setting(Struct, frozen=True):
    """One key of a plug-in. `default` is as it would be written; None when the key is required."""

    name: str
    type: str
    default: str | None
    doc: str


class PlugIn(Struct, frozen=True):
    """What a listing shows. `problem` says why it cannot be used, if so."""

    name: str
    target: str
    summary: str = ""
    settings: tuple[Setting, ...] = ()
    problem: str = ""


def place_kind(name: str) -> PlaceKind:
    """RequestError if there is none of this name, or it cannot be imported."""
    return _declared(_find("place", name), PlaceKind)


def benchmark_kind(name: str) -> BenchmarkKind:
    """RequestError if there is none of this name, or it cannot be imported."""
    return _declared(_find("benchmark", name), BenchmarkKind)


def places() -> tuple[PlugIn, ...]:
    return _listing("place")


def benchmarks() -> tuple[PlugIn, ...]:
    return _listing("benchmark")


def known(group: Group) -> dict[str, str]:
    """Name -> dotted path of all that is installed; imports nothing. Ours win over others of that name."""
    from importlib.metadata import entry_points  # here, because it takes a while

    others = {entry.name: entry.value for entry in entry_points(group=f"evalfleet.{group}s")}
    return {**others, **BUILT_IN[group]}


def is_known(group: Group, name: str) -> bool:
    """As `name in known(group)`, but ours are found at once."""
    return name in BUILT_IN[group] or name in known(group)


def unknown(group: Group, name: str, options: Iterable[str]) -> RequestError:
    """Return the error for a name that is not among the options."""
    moved = MOVED.get(name) if group == "place" else None
    return RequestError(f"{group} {name!r} is unknown; {moved or hint(name, options)}")


def settings_of(kind: PlaceKind | BenchmarkKind) -> tuple[Setting, ...]:
    """The keys of a plug-in, from the fields of its Settings."""
    hints = get_type_hints(kind.Settings, include_extras=True)
    return tuple(_setting(info, hints[info.name]) for info in msgspec.structs.fields(kind.Settings))


def _find(group: Group, name: str) -> object:
    target = BUILT_IN[group].get(name, name)
    if ":" not in target:  # all that is installed is looked through only for others' names: that takes long
        options = known(group)
        if name not in options:
            raise unknown(group, name, options)
        target = options[name]
    return _checked(group, target, _import(group, target))


def _import(group: Group, target: str) -> object:
    module_name, _, attribute = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        raise RequestError(
            f"{group} {target!r} needs the module {e.name!r}; install it, or set PYTHONPATH to where it is"
        ) from e
    except Exception as e:  # a plug-in is anyone's code: what it raises at import is its own affair
        raise RequestError(
            f"{group} {target!r} cannot be imported ({type(e).__name__}: {e}); mend or update it"
        ) from e
    found: object = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [known for known in vars(found) if not known.startswith("_")]
            raise RequestError(f"{group} {target!r}: {module_name} has no {part!r}; {hint(part, names)}")
        found = getattr(found, part)
    return found


def _checked(group: Group, target: str, found: object) -> object:
    for attribute in _CONTRACT[group]:
        if not hasattr(found, attribute):
            raise RequestError(f"{target!r} is not a {group}: it has no {attribute!r}; add it")
    settings = getattr(found, "Settings", None)
    if not (is_struct_type(settings) and settings.__struct_config__.forbid_unknown_fields):
        raise RequestError(
            f"{target!r} is not a {group}: make its Settings a msgspec.Struct, forbid_unknown_fields=True"
        )
    return found


def _declared(found: object, kind: type[KindT]) -> KindT:
    """Return what the class declares, with defaults for the rest."""
    names = [each.name for each in fields(kind)]
    return kind(**{name: getattr(found, name) for name in names if hasattr(found, name)})


def _listing(group: Group) -> tuple[PlugIn, ...]:
    return tuple(_described(group, name, target) for name, target in sorted(known(group).items()))


def _described(group: Group, name: str, target: str) -> PlugIn:
    try:
        found = _find(group, name)
    except RequestError as e:  # one that is broken must not hide the others
        return PlugIn(name, target, problem=str(e))
    doc = (found.__doc__ or "").strip().partition("\n")[0]
    kind = _declared(found, PlaceKind) if group == "place" else _declared(found, BenchmarkKind)
    return PlugIn(name, target, doc, settings_of(kind))


def _setting(info: msgspec.structs.FieldInfo, annotated: Any) -> Setting:
    meta = getattr(annotated, "__metadata__", ())
    doc = next((m.description for m in meta if isinstance(m, msgspec.Meta) and m.description), "")
    plain = annotated.__origin__ if meta else annotated
    name = plain.__name__ if isinstance(plain, type) and get_origin(plain) is None else str(plain)
    name = re.sub(r"\b(?:[A-Za-z_]\w*\.)+", "", name)  # Mapping, not collections.abc.Mapping
    return Setting(info.encode_name, name, _default(info), doc)


def _default(info: msgspec.structs.FieldInfo) -> str | None:
    if info.default is not NODEFAULT:
        value = info.default
    elif info.default_factory is not NODEFAULT:
        value = info.default_factory()
    else:
        return None
    return msgspec.json.encode(value, enc_hook=str).decode()


class KindFields:
    """The fields that kinds of places and benchmarks give. Every file has the keys of the schema."""

    def of_pool(self, plan: Plan) -> Mapping[str, object]:
        fields = dict(POOL_KEYS)
        for spec in reversed(list(plan.place_specs.values())):  # the first place wins
            settings: Mapping[str, object] = spec.get("settings", {})
            shown = _registry_settings(spec.get("kind", ""))
            fields.update({key: settings[key] for key in shown if key in settings})
        return fields

    def of_worker(self, plan: Plan, prepared: str, *, ready: bool) -> Mapping[str, object]:
        """`prepared`: the name of the benchmark that a pool's machine was set up for."""
        kind: str = plan.benchmark_spec.get("kind", plan.benchmark)
        appliance = _appliance(kind) or (_appliance(prepared) if prepared else None)
        if appliance is None:
            return WORKER_KEYS
        state = {appliance.ready_key: ready} if appliance.ready_key else {}
        return {**WORKER_KEYS, **appliance.registry, **state}


@cache
def _registry_settings(kind: str) -> tuple[str, ...]:
    try:
        return place_kind(kind).registry_settings
    except RequestError:  # a plug-in that was there when the plan was made
        return ()


@cache
def _appliance(benchmark: str) -> Appliance | None:
    try:
        return benchmark_kind(benchmark).appliance
    except RequestError:
        return None
