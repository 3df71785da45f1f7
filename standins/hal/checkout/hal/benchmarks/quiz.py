"""The quiz: tasks from a file, with paths as seen from the checkout; grades in the shape of any benchmark."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

Outputs = dict[str, Any]


class Quiz:
    """A benchmark as HAL's are: `benchmark` has the answers, `get_dataset` strips them."""

    setup_script = "hal/benchmarks/quiz_setup.sh"
    requires_sandbox = False

    def __init__(self, agent_dir: str, config: dict[str, Any], benchmark_name: str) -> None:
        if not os.path.exists("data/quiz.json"):
            raise FileNotFoundError("Have you decrypted quiz.json.gpg?\nUse the following command: gpg ...")
        with open("data/quiz.json", encoding="utf-8") as file:
            self.benchmark: dict[str, dict[str, Any]] = json.load(file)
        for task in self.benchmark.values():
            if "files" in task:
                task["files"] = {to: os.path.abspath(source) for to, source in task["files"].items()}
            if benchmark_name == "scicode":
                task["sub_steps"] = ["1.1", "1.2"]
        self.benchmark_name = benchmark_name
        self.base_results_dir = "results"
        self.benchmark_results_dir = os.path.join("results", benchmark_name)
        self.agent_args: dict[str, Any] = {}

    def get_dataset(self) -> dict[str, Any]:
        return {
            name: {key: value for key, value in task.items() if key != "truth"}
            for name, task in self.benchmark.items()
        }

    def get_run_dir(self, run_id: str) -> str:
        run_dir = os.path.join(self.benchmark_results_dir, run_id)
        os.makedirs(run_dir, exist_ok=True)
        return run_dir

    def get_task_prompts(self) -> dict[str, str]:
        return {name: task["prompt"] for name, task in self.benchmark.items()}

    def evaluate_output(self, agent_output: Outputs, run_id: str) -> Any:
        with open("graded.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(sorted(agent_output)) + "\n")
        while os.path.exists("hold"):
            time.sleep(0.05)
        if os.path.exists("no_docker"):
            raise RuntimeError("Error while fetching server API version: docker is not there")
        plain = {name: self._answer(output) for name, output in agent_output.items()}
        if "poison" in plain.values() and not os.path.exists("antidote"):
            raise TypeError("unsupported operand type(s): the grader did not expect that")
        right = {name: plain[name] == self.benchmark[name]["truth"] for name in plain}
        return SHAPES[self.benchmark_name](right, agent_output)

    def get_metrics(self, eval_results: Any) -> dict[str, Any]:
        if self.benchmark_name.startswith(("colbench", "appworld", "scienceagentbench")):
            return {}
        right = RIGHT[self.benchmark_name](eval_results) if self.benchmark_name in RIGHT else []
        tasks = list(self.benchmark)
        return {
            "accuracy": len(right) / len(tasks),
            "successful_tasks": right,
            "failed_tasks": [name for name in tasks if name not in right],
        }

    def _answer(self, output: Any) -> Any:
        return output["answer"] if isinstance(output, dict) and "answer" in output else output


Right = dict[str, bool]


def _gaia(right: Right, outputs: Outputs) -> Any:
    return {
        name: {"score": int(good), "reward": int(good), "explanation": ""} for name, good in right.items()
    }


def _corebench(right: Right, outputs: Outputs) -> Any:
    return {
        name: {
            "correct_written_answers": 1 + good,
            "correct_vision_answers": 0,
            "total_written_questions": 2,
            "total_vision_questions": 0,
        }
        for name, good in right.items()
    }


def _submissions(right: Right, outputs: Outputs) -> Any:
    return outputs


def _usaco(right: Right, outputs: Outputs) -> Any:
    graded = {name: [{"result": {"fraction_passed": 1.0 if good else 0.5}}] for name, good in right.items()}
    return {"rdict": {}, "sdict": graded, "rs": [], "ss": []}


def _swebench(right: Right, outputs: Outputs) -> Any:
    return {"resolved_ids": [name for name, good in right.items() if good], "error_ids": []}


def _scicode(right: Right, outputs: Outputs) -> Any:
    return {"details": {name: ["1.1", "1.2"] if good else ["1.1"] for name, good in right.items()}}


def _scienceagentbench(right: Right, outputs: Outputs) -> Any:
    return {"agent_output": outputs, "eval_result": {n: {"success_rate": int(g)} for n, g in right.items()}}


def _assistantbench(right: Right, outputs: Outputs) -> Any:
    return {"scores": [float(good) for good in right.values()], "answers": []}


def _colbench(right: Right, outputs: Outputs) -> Any:
    return [1.0 if good else 0.25 for good in right.values()]


def _replicatorbench(right: Right, outputs: Outputs) -> Any:
    return {name: {"correct": good, "overall_score": 1.0 if good else 0.75} for name, good in right.items()}


SHAPES: dict[str, Callable[[Right, Outputs], Any]] = {
    "gaia": _gaia,
    "corebench_easy": _corebench,
    "taubench_airline": _submissions,
    "appworld_test_normal": _submissions,
    "usaco": _usaco,
    "swebench_verified_mini": _swebench,
    "scicode": _scicode,
    "scienceagentbench": _scienceagentbench,
    "assistantbench": _assistantbench,
    "colbench_backend_programming": _colbench,
    "replicatorbench": _replicatorbench,
}
RIGHT: dict[str, Callable[[Any], list[str]]] = {
    "gaia": lambda results: [name for name, told in results.items() if told["score"] == 1],
    "corebench_easy": lambda results: [
        n for n, told in results.items() if told["correct_written_answers"] == 2
    ],
    "scicode": lambda results: [name for name, told in results["details"].items() if len(told) == 2],
}
"""Which tasks succeeded, where the metrics are made of that."""
