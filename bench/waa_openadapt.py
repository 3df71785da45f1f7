"""Run by the Python of openadapt-evals' own environment: its pool runs tasks on hosts that are ready.

`python -P waa_openadapt.py REGISTRY TASKS`. Nothing of evalfleet can be imported here.
"""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

PACKAGE = "openadapt_evals.infrastructure"


def main(registry: str, tasks: str) -> None:
    pool: Any = importlib.import_module(f"{PACKAGE}.pool")
    monitor: Any = importlib.import_module(f"{PACKAGE}.vm_monitor")
    machines = SimpleNamespace(ssh_username="root")  # all that a run asks of a cloud
    manager = pool.PoolManager(vm_manager=machines, registry=monitor.VMPoolRegistry(registry))
    print(manager.run(tasks=int(tasks), model="gpt-4o", api_key="sk-none"))


if __name__ == "__main__":
    main(*sys.argv[1:])
