"""Asks HAL itself, in HAL's own Python, with its checkout as the current folder.

    python in_hal.py list|grade|args ORDER ANSWER

ORDER and ANSWER are JSON files. An answer has `problem` if nothing came of it, and `stage`: what was under
way. It ends with whoever started it, who holds its standard input open.
"""

import json
import os
import signal
import sys
import threading
import traceback


def main():
    verb, order_file, answer_file = sys.argv[1:]
    threading.Thread(target=end_with_parent, daemon=True).start()
    sys.path[0] = os.getcwd()
    with open(order_file, encoding="utf-8") as file:
        order = json.load(file)
    answer = {"stage": "import"}
    try:
        {"list": list_tasks, "grade": grade, "args": parse_args}[verb](order, answer)
        text = json.dumps(answer, default=plain)
    except (Exception, SystemExit) as err:
        traceback.print_exc()
        told = {"stage": answer["stage"], "problem": str(err) or type(err).__name__}
        told["kind"] = type(err).__name__
        told["module"] = getattr(err, "name", "") or "" if isinstance(err, ImportError) else ""
        told["known"] = answer.get("known", [])
        text = json.dumps(told)
    with open(answer_file + ".new", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(answer_file + ".new", answer_file)


def end_with_parent():
    while os.read(0, 4096):  # a reader of Python's own would hold a lock when the program ends
        pass
    os.killpg(0, signal.SIGKILL)


def plain(value):
    """What graders give beside JSON: numbers of numpy, sets, objects."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=str)
    if hasattr(value, "__dict__"):
        return vars(value)
    return str(value)


def made(order, answer):
    from hal.benchmark_manager import BenchmarkManager

    answer["stage"] = "benchmark"
    manager = BenchmarkManager(order["agent_dir"], {})
    answer["known"] = list(manager.list_benchmarks())
    benchmark = manager.get_benchmark(order["benchmark"])
    benchmark.agent_args = order.get("args", {})
    return benchmark


def list_tasks(order, answer):
    benchmark = made(order, answer)
    answer["stage"] = "tasks"
    answer["tasks"] = benchmark.get_dataset()
    script = getattr(benchmark, "setup_script", None)
    answer["setup_script"] = os.path.abspath(script) if script and os.path.exists(script) else ""


def grade(order, answer):
    benchmark = made(order, answer)
    benchmark.base_results_dir = order["results_dir"]
    benchmark.benchmark_results_dir = os.path.join(order["results_dir"], order["benchmark"])
    benchmark.get_run_dir(order["run_id"])
    answer["stage"] = "grading"
    answer["results"] = benchmark.evaluate_output(order["submissions"], order["run_id"])
    answer["stage"] = "metrics"
    answer["metrics"] = benchmark.get_metrics(answer["results"]) or {}
    answer["steps"] = steps_of(benchmark)
    prompts = benchmark.get_task_prompts() if hasattr(benchmark, "get_task_prompts") else {}
    answer["prompts"] = {task: prompts[task] for task in order["submissions"] if task in prompts}
    if order.get("wandb"):
        answer["wandb"] = traces(order["wandb"])


def steps_of(benchmark):
    """How many steps each task has, where a task has some: graders tell which of them are right."""
    tasks = getattr(benchmark, "benchmark", None)
    if not isinstance(tasks, dict):
        return {}
    told = {id: task.get("sub_steps") for id, task in tasks.items() if isinstance(task, dict)}
    return {id: len(steps) for id, steps in told.items() if isinstance(steps, list) and steps}


def traces(project):
    """What W&B has of a project, by HAL's own readers. Grades count without it."""
    try:
        import weave
        from hal.utils.weave_utils import get_total_cost, get_weave_calls

        client = weave.init(project)
        total_cost, total_usage = get_total_cost(client)
        calls, latencies = get_weave_calls(client)
        return {
            "total_cost": total_cost,
            "total_usage": total_usage,
            "raw_logging_results": calls,
            "latencies": latencies,
        }
    except Exception as err:  # weave's, HAL's or the network's: the answers are graded all the same
        traceback.print_exc()
        return {"problem": str(err) or type(err).__name__}


def parse_args(order, answer):
    """As HAL's command line reads `-A`: YAML, then lists with commas, words and numbers."""
    import yaml

    answer["args"] = {}
    for key, text in order["args"].items():
        try:
            value = yaml.safe_load(text)
            if isinstance(value, str):
                value = as_word(text)
        except yaml.YAMLError:
            value = text
        answer["args"][key.replace("-", "_")] = value


def as_word(text):
    if "," in text:
        return text.split(",")
    if text.lower() in ("none", "null", "nan"):
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


main()
