"""A pool of the user's that rests at zero nodes: it is raised by one for each machine, and goes back to zero.

It is raised by an autoscale formula that holds the time at which each machine is over, and asks for no more
nodes than there are tasks, so that they go also if no controller lives. The formula is made of nothing but
the jobs that are active in the pool: whoever looks, of whatever home, comes to the same one. A pool with
nodes, or a formula, of its own stays as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from evalfleet.places.azure.answers import ArmFault
from evalfleet.places.azure.names import EXPIRES, HOME, moment, stamp
from evalfleet.places.vm.answers import Json, table

from .service import BatchClient
from .template import SPOT, duration, metadata_in

MINE = "evalfleetDedicated = "
"""How a formula begins that is ours."""
PENDING = (
    "evalfleetPending = $PendingTasks.GetSamplePercent(180 * TimeInterval_Second) < 70 ? 100000 : "
    "max($PendingTasks.GetSample(180 * TimeInterval_Second));\n"
)
"""No more nodes than tasks that run or wait: a pilot that has ended needs none, though nobody says so."""
EVALUATED_S = 300.0
"""So often Batch evaluates a formula, at best."""
NOT_IDLE = ("running", "leavingpool")
LATER = (
    "AutoScaleTooManyRequestsToEnable",
    "PoolResizing",
    "OperationInvalidForCurrentState",
    "ConditionNotMet",
)
"""Answers by which the pool is being changed just now: the next look tries again."""


def formula_of(jobs: Iterable[Json], pool: str) -> str:
    """As many nodes as there are machines in the pool, each until it is over at the latest."""
    ends: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}
    for job in jobs:
        tags = metadata_in(job)
        until = moment(tags.get(EXPIRES, ""))
        inside = str(table(job.get("poolInfo")).get("poolId", "")).lower() == pool.lower()
        if inside and HOME in tags and until is not None:
            ends[SPOT in tags][stamp(until)] += 1
    return (
        f"{MINE}{_sum(ends[False])};\n"
        f"evalfleetSpot = {_sum(ends[True])};\n"
        f"{PENDING}"
        "$TargetDedicatedNodes = min(evalfleetDedicated, evalfleetPending);\n"
        "$TargetLowPriorityNodes = min(evalfleetSpot, evalfleetPending);\n"
        "$NodeDeallocationOption = taskcompletion;\n"
    )


def _sum(ends: Counter[str]) -> str:
    terms = (f'(time() < time("{end}") ? {many} : 0)' for end, many in sorted(ends.items()))
    return " + ".join(terms) or "0"


NONE = formula_of((), "")


def is_at_rest(pool: Json) -> bool:
    """Has it no nodes, and are none wanted?"""
    counts = (
        "targetDedicatedNodes",
        "targetLowPriorityNodes",
        "currentDedicatedNodes",
        "currentLowPriorityNodes",
    )
    return not any(int(pool.get(name) or 0) for name in counts)


def is_raised(pool: Json) -> bool:
    return str(pool.get("autoScaleFormula") or "").startswith(MINE)


class OwnPool:
    """The pool that `pool` names."""

    def __init__(self, client: BatchClient, pool: str) -> None:
        self._client, self._pool = client, pool

    async def keep(self) -> tuple[Json, bool]:
        """Give it as many nodes as its machines need, if that is for us to do. Returns the pool, if what it
        shows has come of that and not of something earlier, and whether nothing is left to be done. Raises
        ArmFault."""
        pool = await self._client.pool(self._pool)
        if pool is None or str(pool.get("state")).lower() != "active":
            return {}, True
        if not (is_raised(pool) or (is_at_rest(pool) and not pool.get("enableAutoScale"))):
            return {}, True
        wanted = formula_of(await self._client.active_jobs(), self._pool)
        try:
            if wanted != (pool.get("autoScaleFormula") or NONE):
                await self._client.scale(self._pool, wanted, duration(EVALUATED_S))
                return {}, True
            if wanted == NONE and is_raised(pool) and is_at_rest(pool):
                await self._client.stop_scaling(self._pool)
        except ArmFault as fault:
            if not fault.has(*LATER):
                raise
            return {}, False
        return pool, True

    async def idle_nodes(self) -> Sequence[str]:
        """Its nodes that have nothing to do and are not leaving, if it has them for our machines. Raises
        ArmFault."""
        pool = await self._client.pool(self._pool)
        if pool is None or not is_raised(pool):
            return ()
        nodes = await self._client.nodes(self._pool)
        return [str(node.get("id")) for node in nodes if str(node.get("state")).lower() not in NOT_IDLE]
