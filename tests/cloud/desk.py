"""Desks with a place that is a stand-in of a cloud, and a benchmark whose tasks take a while."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from standins import azure, gce
from tests.cloud import gce_places, places
from tests.cloud.places import GROUP, SETTLE_S, SIZE, lost_s
from tests.desk import Desk, Process

BENCH = """\
name = "b"
tasks = "tasks.jsonl"
command = ["sh", "run.sh", "{params.seconds}"]
files = ["run.sh"]
timeout_s = TIMEOUT_S
"""
SCRIPT = """\
hostname >"$EVALFLEET_OUT/host"
sleep "$1"
echo '{"score": 1}' >"$EVALFLEET_OUT/result.json"
"""


def _toml(value: Any) -> str:
    if not isinstance(value, dict):
        return json.dumps(value)
    return "{" + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + "}"


class CloudDesk(Desk):
    """A desk with one place, a cloud's, whose name is the cloud's.

    With `inside`, processes are in the network of the stand-in's machines, and can reach them.
    """

    place: ClassVar[str]

    def __init__(
        self, cloud: azure.StandIn | gce.StandIn, environ: dict[str, str], folder: Path, *, inside: bool
    ) -> None:
        prefix = cloud.hosts.lab.prefix if inside else ()
        super().__init__(folder, environ=environ, prefix=prefix, forks=True)
        self._endpoint = cloud.endpoint_inside if inside else cloud.endpoint
        self._ca = str(cloud.ca)

    def configure(self, **more: Any) -> None:
        """Write `evalfleet.toml` anew."""
        given = {"endpoint": self._endpoint, "ca": self._ca, "ssh_from": ["*"], "settle_s": SETTLE_S}
        given |= {"lost_s": lost_s(), "owner": "tester", **more}
        text = "".join(f"{key} = {_toml(value)}\n" for key, value in given.items())
        (self.folder / "evalfleet.toml").write_text(f"[places.{self.place}]\n{text}")

    def bench(
        self, tasks: int, seconds: float = 0.1, *, first: Sequence[float] = (), timeout_s: float = 60.0
    ) -> None:
        """Tasks that take so long; the first ones as long as each of them says."""
        (self.folder / "b.toml").write_text(BENCH.replace("TIMEOUT_S", f"{timeout_s:g}"))
        (self.folder / "run.sh").write_text(SCRIPT)
        lasting = [*first, *[seconds] * (tasks - len(first))]
        lines = [{"id": f"t_{n}", "params": {"seconds": each}} for n, each in enumerate(lasting)]
        (self.folder / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def start_run(self, *words: str) -> Process:
        return self.start("run", "b.toml", "--on", self.place, "--name", "r", "--canary", "0", *words)


class AzureDesk(CloudDesk):
    """A desk with a place `azure`, which is the stand-in."""

    place = "azure"

    def __init__(
        self, cloud: azure.StandIn, folder: Path, owner: str = "tester", *, inside: bool = False, **more: Any
    ) -> None:
        super().__init__(cloud, places.environment(cloud, inside=inside), folder, inside=inside)
        self._subscription = cloud.subscription
        self.configure(owner=owner, **more)

    def configure(self, **more: Any) -> None:
        given = {"kind": "azure_vm", "subscription": self._subscription, "resource_group": GROUP}
        super().configure(**{**given, "sizes": [SIZE], "regions": ["eastus"], **more})


class GceDesk(CloudDesk):
    """A desk with a place `gce`, which is the stand-in."""

    place = "gce"

    def __init__(self, cloud: gce.StandIn, folder: Path, *, inside: bool = True, **more: Any) -> None:
        environ = cloud.environment_inside if inside else cloud.environment
        super().__init__(cloud, environ, folder, inside=inside)
        self.configure(**more)

    def configure(self, **more: Any) -> None:
        super().configure(**{"types": [gce_places.TYPE], "zones": [gce_places.ZONE], **more})
