"""The plan of a named pool."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from evalfleet.errors import RequestError
from evalfleet.model import (
    Limits,
    Plan,
)
from evalfleet.names import check_run_name

from .config import (
    config_of,
    environment,
)
from .plan_parts import plain
from .sources import (
    PlaceSpec,
    place_settings,
    place_sources,
)

EXPIRES_S = 14 * 86_400.0
PREFIX = "worker"
"""What a pool's machines are called, unless somebody says otherwise or knows what they are for."""


class PoolRequest(Struct, frozen=True, kw_only=True):
    """What `evalfleet pool create` was given. Names of machines start with `prefix`."""

    name: str
    on: str = "local"
    workers: int | None = None
    """None: all machines of a place that lists them, else one."""
    expires_s: float = EXPIRES_S
    prefix: str | None = None
    settings: Mapping[str, str] = {}
    config: str | None = None


def resolve_pool(
    request: PoolRequest, *, environ: Mapping[str, str], cwd: Path, home_id: str
) -> tuple[Plan, dict[str, str]]:
    """A pool's plan, and the environment that its places may read. RequestError says what to change."""
    config = config_of(request.config, environ, cwd)
    merged = environment(environ, cwd, config)
    sources = place_sources((request.on,), config)
    if len(sources) > 1:
        names = " or ".join(source.name for source in sources)
        raise RequestError(
            f"--on {request.on} names {len(sources)} places, and a pool is at one: --on {names}"
        )
    (place,) = place_settings(request.settings, sources)
    if place.listed and request.prefix:
        raise RequestError(f"machines of {place.name} are called by their hosts: leave out --prefix")
    plan = Plan(
        run=check_run_name(request.name),
        benchmark="",
        places=(place.name,),
        place_specs=plain({place.name: PlaceSpec(place.kind_name, str(place.base), place.settings)}),
        limits=Limits(workers=request.workers or place.listed or 1, lease_s=request.expires_s),
        home=home_id,
        machine_names=check_run_name(request.prefix or PREFIX),
    )
    return plan, merged
