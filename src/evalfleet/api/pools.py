"""Pools as they are made and found."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from evalfleet.errors import RequestError, RunHeld
from evalfleet.events import PoolPlanned
from evalfleet.journal import Store
from evalfleet.model import Limits, Needs, Plan
from evalfleet.planning.plan import EXPIRES_S, PoolRequest, resolve_pool
from evalfleet.planning.workspace import Workspace
from evalfleet.policy import POOL
from evalfleet.pools import PoolView, changes, look_at, read_pool

from .pool import Pool
from .pool_machine import check_life


def create(request: PoolRequest, home: Path | None = None) -> Pool:
    """Write the pool down and begin to make its machines."""
    workspace = Workspace.here(home)
    store = workspace.store()
    plan, environ = resolve_pool(request, environ=workspace.environ, cwd=workspace.cwd, home_id=store.home_id)
    asyncio.run(_try_places(workspace, plan, environ))
    pool = Pool(store, plan.run)
    if _was_deleted(store, plan.run):
        pool.catch_up()
        pool.control(functools.partial(changes.made_anew, plan=plan))
    else:
        store.create_stream(plan.run, "pool", workspace.now(), [PoolPlanned(plan)])
        pool.control()
    return pool


def _was_deleted(store: Store, name: str) -> bool:
    kinds = {info.name: info.kind for info in store.streams()}
    return kinds.get(name) == "pool" and look_at(store, name).state.ended_at is not None


async def _try_places(workspace: Workspace, plan: Plan, environ: Mapping[str, str]) -> None:
    """Raises what keeps a place from being used, before anything is written down."""
    async with workspace.places(plan, environ=environ) as places:
        for place in places.values():
            check_life(await place.offers(Needs()), plan.limits.lease_s)


def keep_plan(plan: Plan, name: str) -> Plan:
    """The plan of the pool that a run makes and leaves, in the places of the run."""
    return Plan(
        run=name,
        benchmark="",
        places=plan.places,
        place_specs=plan.place_specs,
        limits=Limits(workers=plan.limits.workers, lease_s=EXPIRES_S),
        home=plan.home,
        machine_names=plan.machine_names.removesuffix("-{n}"),
    )


def tend(store: Store, name: str) -> None:
    """Go on with a pool whose machines are still to be made, unless somebody does."""
    pool = Pool(store, name)
    state = look_at(store, name).state
    if state.ended_at is None and (not state.machines or not POOL.settled(state)):
        with suppress(RunHeld):
            pool.control()


def open_pool(name: str, home: Path | None = None) -> Pool:
    """Raises RequestError when there is none."""
    store = Store.open(Workspace.here(home).home, create=False)
    read_pool(store, name)
    pool = Pool(store, name)
    pool.catch_up()
    return pool


def pools(home: Path | None = None) -> list[PoolView]:
    """All that exist, newest first."""
    store = Workspace.here(home).records_if_any()
    if store is None:
        return []  # nothing was ever made here
    found: list[PoolView] = []
    for info in reversed(store.streams()):
        try:
            if info.kind == "pool":
                found.append(read_pool(store, info.name))
        except RequestError:
            continue  # it was deleted
    return found
