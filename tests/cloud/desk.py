"""A desk with a place `azure`, which is the stand-in, and a benchmark whose tasks take a while."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from standins.azure import StandIn
from tests.cloud.places import GROUP, LOST_S, SETTLE_S, SIZE, environment
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


class AzureDesk(Desk):
    """With `inside`, processes are in the network of the stand-in's machines, and can reach them."""

    def __init__(
        self, azure: StandIn, folder: Path, owner: str = "tester", *, inside: bool = False, **more: Any
    ) -> None:
        prefix = azure.hosts.lab.prefix if inside else ()
        super().__init__(folder, environ=environment(azure, inside=inside), prefix=prefix)
        self._azure = azure
        self._inside = inside
        self.configure(owner=owner, **more)

    def configure(self, **more: Any) -> None:
        azure = self._azure
        given = {
            "kind": "azure_vm",
            "subscription": azure.subscription,
            "resource_group": GROUP,
            "endpoint": azure.endpoint_inside if self._inside else azure.endpoint,
            "ca": str(azure.ca),
            "sizes": [SIZE],
            "regions": ["eastus"],
            "ssh_from": ["*"],
            "settle_s": SETTLE_S,
            "lost_s": LOST_S,
            **more,
        }
        text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in given.items())
        (self.folder / "evalfleet.toml").write_text(f"[places.azure]\n{text}")

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
        return self.start("run", "b.toml", "--on", "azure", "--name", "r", "--canary", "0", *words)
