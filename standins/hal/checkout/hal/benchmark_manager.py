"""Finds a benchmark by its name."""

from __future__ import annotations

from typing import Any

from .benchmarks.quiz import SHAPES, Quiz


class BenchmarkManager:
    """HAL's way to a benchmark. It takes names that it does not list."""

    def __init__(self, agent_dir: str = "agent/", config: dict[str, Any] | None = None) -> None:
        self.agent_dir = agent_dir
        self.config = config or {}

    def get_benchmark(self, benchmark_name: str, max_tasks: int | None = None) -> Quiz:
        if benchmark_name == "mlagentbench":
            from .benchmarks.mlagentbench import MLAgentBench

            return MLAgentBench(self.agent_dir, self.config)
        if benchmark_name not in SHAPES:
            raise ValueError(f"Unknown benchmark: {benchmark_name}")
        return Quiz(self.agent_dir, self.config, benchmark_name)

    def list_benchmarks(self) -> list[str]:
        return list(SHAPES)
