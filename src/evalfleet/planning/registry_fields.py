"""What places and benchmarks say of themselves in `vm_pool_registry.json`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from evalfleet.benchmarks.appliance import Appliance
from evalfleet.errors import RequestError
from evalfleet.model import Plan

from .plugins import POOL_KEYS, WORKER_KEYS, benchmark_kind, place_kind


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
        appliance = _appliance(kind) or _appliance(prepared)
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
