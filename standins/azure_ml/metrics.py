"""Azure Monitor's metrics of a workspace: what its agents tell of the nodes that jobs run on."""

from __future__ import annotations

import re
from datetime import datetime

from standins.azure.arm import Arm
from standins.azure.words import ArmError
from standins.cloud.words import Answer, Call, Json

from .service import Service

METRICS = (
    "CpuUtilizationPercentage",
    "CpuMemoryUtilizationPercentage",
    "DiskUsedMegabytes",
    "DiskAvailMegabytes",
)
VERSIONS = ("2018-01-01", "2021-05-01", "2023-10-01", "2024-02-01")
LATE_S = 60
"""The newest minute that is told is over for so long."""
_RUN = re.compile(r"RunId eq '([^']*)'")


class Metrics:
    """What the call for metrics answers. A test says by `service.loads` what is measured."""

    def __init__(self, arm: Arm, service: Service) -> None:
        self._service = service
        workspace = (
            "/subscriptions/{subscription}/resourceGroups/{group}/providers/{provider}/workspaces/{name}"
        )
        arm.route("GET", f"{workspace}/providers/Microsoft.Insights/metrics", self._metrics)

    async def _metrics(self, call: Call, found: re.Match[str]) -> Answer:
        if call.asks("api-version") not in VERSIONS:
            raise ArmError(400, "BadRequest", f"The api-version {call.asks('api-version')} is not supported.")
        names = call.asks("metricnames").split(",")
        if wrong := [name for name in names if name not in METRICS]:
            raise ArmError(400, "BadRequest", f"Failed to find metric configuration for: {wrong[0]}.")
        begin, end = (_moment(word) for word in (call.asks("timespan") + "/").split("/")[:2])
        runs = _RUN.findall(call.asks("$filter"))
        if not runs or " or ".join(f"RunId eq '{run}'" for run in runs) != call.asks("$filter"):
            raise ArmError(400, "BadRequest", "Only filters such as RunId eq 'a' or RunId eq 'b' are known.")
        value = [self._metric(call.path, name, runs, int(begin), int(end)) for name in names]
        told = {"cost": 0, "timespan": call.asks("timespan"), "interval": "PT1M", "value": value}
        return Answer(200, {**told, "namespace": "Microsoft.MachineLearningServices/workspaces"})

    def _metric(self, path: str, name: str, runs: list[str], begin: int, end: int) -> Json:
        stamp = self._service.clock.stamp
        series: list[Json] = []
        for run in runs:
            figure = self._service.loads.get(run, {}).get(name)
            data: list[Json] = []
            for at in range(begin - begin % 60, end, 60):
                # a minute that nobody has measured yet is there, without a figure
                measured = figure is not None and at + 60 + LATE_S <= end
                data.append({"timeStamp": stamp(at), **({"average": figure} if measured else {})})
            if figure is not None:
                run_id = {"name": {"value": "runid", "localizedValue": "runid"}, "value": run}
                series.append({"metadatavalues": [run_id], "data": data})
        return {
            "id": f"{path}/{name}",
            "type": "Microsoft.Insights/metrics",
            "name": {"value": name, "localizedValue": name},
            "unit": "Count",
            "errorCode": "Success",
            "timeseries": series,
        }


def _moment(text: str) -> float:
    """Raises ArmError."""
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except ValueError:
        raise ArmError(400, "BadRequest", f"Invalid time {text!r} in timespan.") from None
