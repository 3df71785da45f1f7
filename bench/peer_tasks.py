"""Run by the Python of another tool's environment: the same commands, given to that tool.

`python -P peer_tasks.py TOOL COUNT WORKERS FOLDER` writes FOLDER/told.json. Workers are processes of this
computer and warm: each has run something before the clock starts. Nothing of evalfleet can be imported here.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

COMMANDS = {"true": ["true"], "sleep": ["sleep", "0.05"]}
WARM = ["sleep", "0.3"]


def task(argv: list[str]) -> int:
    import subprocess  # here: Parsl ships the function without its module

    return subprocess.run(argv, check=True).returncode


class Ray:
    """`num_cpus` is the number of tasks that run at once; each gets a process."""

    def __init__(self, workers: int, folder: str) -> None:
        self._ray: Any = importlib.import_module("ray")
        self._ray.init(
            num_cpus=workers,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            object_store_memory=100 << 20,
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
        )
        self._task = self._ray.remote(task)

    def map(self, argv: list[str], count: int) -> None:
        self._ray.get([self._task.remote(argv) for _ in range(count)])

    def close(self) -> None:
        self._ray.shutdown()


class Dask:
    def __init__(self, workers: int, folder: str) -> None:
        distributed: Any = importlib.import_module("distributed")
        self._cluster = distributed.LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            processes=True,
            host="127.0.0.1",
            dashboard_address=None,
            worker_dashboard_address=None,
            local_directory=folder,
        )
        self._client = distributed.Client(self._cluster)

    def map(self, argv: list[str], count: int) -> None:
        futures = [self._client.submit(task, argv, pure=False) for _ in range(count)]
        self._client.gather(futures)

    def close(self) -> None:
        self._client.close()
        self._cluster.close()


class Parsl:
    def __init__(self, workers: int, folder: str) -> None:
        self._parsl: Any = importlib.import_module("parsl")
        executors: Any = importlib.import_module("parsl.executors")
        providers: Any = importlib.import_module("parsl.providers")
        executor = executors.HighThroughputExecutor(
            address="127.0.0.1",
            loopback_address="127.0.0.1",
            max_workers_per_node=workers,
            cores_per_worker=0.001,
            encrypted=False,
            provider=providers.LocalProvider(init_blocks=1, min_blocks=1, max_blocks=1),
        )
        config = self._parsl.Config(executors=[executor], run_dir=folder, usage_tracking=0, strategy="none")
        self._parsl.load(config)
        self._task = self._parsl.python_app(task)

    def map(self, argv: list[str], count: int) -> None:
        for future in [self._task(argv) for _ in range(count)]:
            future.result()

    def close(self) -> None:
        self._parsl.dfk().cleanup()
        self._parsl.clear()


TOOLS: dict[str, Callable[[int, str], Ray | Dask | Parsl]] = {"ray": Ray, "dask": Dask, "parsl": Parsl}


def main(name: str, count: int, workers: int, folder: str) -> dict[str, Any]:
    began = time.perf_counter()
    tool = TOOLS[name](workers, folder)
    try:
        tool.map(WARM, 3 * workers)
        told: dict[str, Any] = {"ready_s": time.perf_counter() - began}
        for kind, argv in COMMANDS.items():
            start, cpu = time.perf_counter(), time.process_time()
            tool.map(argv, count)
            told[kind] = {
                "makespan_s": time.perf_counter() - start,
                "driver_cpu_ms": 1000 * (time.process_time() - cpu) / count,
            }
        return told
    finally:
        tool.close()


if __name__ == "__main__":
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    found = main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    with open(os.path.join(sys.argv[4], "told.json"), "w") as file:
        json.dump(found, file)
