"""The load of nodes as Azure Monitor tells it, for machines that do not tell it themselves.

A node whose memory or processors are used up may have no time for our supervisor. Azure's own agent measures
it by the minute, and the figures come a few minutes late.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

from evalfleet.channels.samples import Load
from evalfleet.places.azure.answers import ArmFault
from evalfleet.places.azure.arm import ArmClient
from evalfleet.places.vm.answers import Json, rows, table

VERSION = "2021-05-01"
CPU, MEMORY = "CpuUtilizationPercentage", "CpuMemoryUtilizationPercentage"
DISK_USED, DISK_FREE = "DiskUsedMegabytes", "DiskAvailMegabytes"
METRICS = (CPU, MEMORY, DISK_USED, DISK_FREE)
LOOK_S = 15.0
"""So often it is asked, while a machine does not tell its load itself."""
BACK_S = 300.0
"""Figures that are older are no news."""
MOST_JOBS = 20
"""So many are asked for at once: the filter has each one's name."""

log = logging.getLogger(__name__)


class MlMonitor:
    """What Azure Monitor knows of the nodes of a workspace's jobs."""

    def __init__(self, arm: ArmClient, workspace: str) -> None:
        self._arm, self._path = arm, f"{workspace}/providers/Microsoft.Insights/metrics"

    async def loads(self, jobs: Sequence[str]) -> Mapping[str, Load]:
        """The newest load of the node of each job, where it is known. Raises ArmFault."""
        found: dict[str, Load] = {}
        for first in range(0, len(jobs), MOST_JOBS):
            asked = jobs[first : first + MOST_JOBS]
            now = self._arm.now()
            query = {
                "timespan": f"{_stamp(now - BACK_S)}/{_stamp(now)}",
                "interval": "PT1M",
                "metricnames": ",".join(METRICS),
                "aggregation": "Average",
                "top": str(MOST_JOBS),
                "$filter": " or ".join(f"RunId eq '{job}'" for job in asked),
            }
            found.update(loads_of(await self._arm.send("GET", self._path, VERSION, query=query)))
        return found


def _stamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def loads_of(answer: Json) -> Mapping[str, Load]:
    """By job, the newest figure of each metric. A disk of which one figure is missing counts as empty."""
    newest: dict[str, dict[str, float]] = {}
    for metric in rows(answer.get("value")):
        name = str(table(metric.get("name")).get("value"))
        for series in rows(metric.get("timeseries")):
            dimensions = {
                str(table(each.get("name")).get("value")).lower(): str(each.get("value"))
                for each in rows(series.get("metadatavalues"))
            }
            figures = [point["average"] for point in rows(series.get("data")) if "average" in point]
            if figures and "runid" in dimensions and isinstance(figures[-1], (int, float)):
                newest.setdefault(dimensions["runid"], {})[name] = float(figures[-1])
    return {job: _load(known) for job, known in newest.items()}


def _load(known: Mapping[str, float]) -> Load:
    used, free = known.get(DISK_USED), known.get(DISK_FREE)
    disk = used / (used + free) if used is not None and free is not None and used + free > 0 else 0.0
    return Load(known.get(CPU, 0.0) / 100, known.get(MEMORY, 0.0) / 100, disk)


class QuietMachines:
    """Asks Azure Monitor for the load of machines that have not told theirs for a while, and hands it on."""

    def __init__(
        self, monitor: MlMonitor, quiet: Callable[[], Mapping[str, str]], keep: Callable[[str, Load], None]
    ) -> None:
        """`quiet` tells machines and their jobs; `keep` takes a machine's load."""
        self._monitor, self._quiet, self._keep = monitor, quiet, keep
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if quiet := self._quiet():
                try:
                    loads = await self._monitor.loads(sorted(quiet.values()))
                except ArmFault as fault:  # who may not read it does without
                    log.debug("Azure Monitor: %s", fault)
                    continue
                for machine, job in quiet.items():
                    if job in loads:
                        self._keep(machine, loads[job])

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
