"""Stands for the arena's client: its flags, files and habits. What each task does is in stand_in.py."""

import argparse
import datetime
import json
import logging
import os
import shutil
import signal
import sys
import time
import traceback

import lib_run_single
import requests
import stand_in
from desktop_env.envs.desktop_env import DesktopEnv
from mm_agents.navi.agent import NaviAgent

STARTED = datetime.datetime.now().strftime("%Y%m%d@%H%M%S")
FLAGS = (
    ("action_space", str, "pyautogui"),
    ("screen_width", int, 1920),
    ("screen_height", int, 1200),
    ("sleep_after_execution", float, 3),
    ("max_steps", int, 15),
    ("a11y_backend", str, "uia"),
    ("agent_name", str, "navi"),
    ("som_origin", str, "oss"),
    ("max_trajectory_length", int, 3),
    ("test_config_base_dir", str, "evaluation_examples_windows"),
    ("model", str, "gpt-4-vision-preview"),
    ("temperature", float, 1.0),
    ("top_p", float, 0.9),
    ("max_tokens", int, 1500),
    ("stop_token", str, None),
    ("domain", str, "all"),
    ("emulator_ip", str, "20.20.20.21"),
    ("test_all_meta_path", str, "evaluation_examples_windows/test_all.json"),
    ("result_dir", str, "./results"),
    ("trial_id", str, "0"),
    ("worker_id", int, 0),
    ("num_workers", int, 1),
    ("diff_lvl", str, "normal"),
)
logger = logging.getLogger("desktopenv.experiment")


def config() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--headless", action="store_true")
    parser.add_argument(
        "--observation_type",
        choices=["screenshot", "a11y_tree", "screenshot_a11y_tree", "som"],
        default="a11y_tree",
    )
    for name, kind, default in FLAGS:
        parser.add_argument(f"--{name}", type=kind, default=default)
    return parser.parse_known_args()[0]  # a flag it does not know goes unnoticed


def log_to(path: str) -> logging.Handler:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("[%(asctime)s %(levelname)s %(module)s/%(lineno)d] %(message)s"))
    logging.getLogger().addHandler(handler)
    return handler


def wait_for_server(address: str) -> None:
    while True:  # without end, as in the original
        try:
            requests.get(f"http://{address}:5000/probe", timeout=7)
            return
        except requests.exceptions.RequestException as err:
            print("Failed to get hello:", err, flush=True)
            time.sleep(0.5)


def unfinished(target: str, tasks: list) -> list:
    """Tasks without a result.txt; what is left of an earlier try at them is wiped."""
    left = []
    for domain, task in tasks:
        path = os.path.join(target, domain, task)
        if os.path.exists(os.path.join(path, "result.txt")):
            continue
        shutil.rmtree(path, ignore_errors=True)
        left.append((domain, task))
    return left


def my_slice(tasks: list, worker: int, workers: int) -> list:
    each, extra = divmod(len(tasks), workers)
    start = worker * each + min(worker, extra)
    return tasks[start : start + each + (worker < extra)]


def test(args: argparse.Namespace, tasks: list, target: str) -> None:
    if args.agent_name != "navi":
        raise ValueError(f"Unknown agent name: {args.agent_name}")
    agent = NaviAgent(model=args.model)
    env = DesktopEnv(args.emulator_ip)
    scores: list = []
    for domain, task in tasks:
        level = {"normal": "examples", "hard": "examples_noctxt"}.get(args.diff_lvl)
        if level is None:
            sys.exit("Invalid value for arg --diff_lvl. Choose 'normal' or 'hard'.")
        with open(
            os.path.join(args.test_config_base_dir, level, domain, f"{task}.json"), encoding="utf-8"
        ) as f:
            example = json.load(f)
        folder = os.path.join(target, domain, task)
        os.makedirs(folder, exist_ok=True)
        handler = log_to(os.path.join(folder, "logs", f"task-{args.worker_id}-{STARTED}.log"))
        wish = agent.wish = env.wish = stand_in.wish(task, args.trial_id)
        try:
            lib_run_single.run_single_example(agent, env, example, args, folder, scores, wish)
        except Exception as err:
            logger.error(f"Exception in {domain}/{task}: {err}")
            told = traceback.format_exc()
            with open(os.path.join(folder, "traj.jsonl"), "a", encoding="utf-8") as f:
                words = {"Error": f"Exception in {domain}/{task}", "Exception": str(err), "Traceback": told}
                f.write(json.dumps(words) + "\n")
            with open(os.path.join(folder, "traj.html"), "a", encoding="utf-8") as f:
                f.write(f"<h1>Error: Exception in {domain}/{task}</h1><p>{err}</p><pre>{told}</pre>")
        finally:
            logging.getLogger().removeHandler(handler)
            handler.close()
    print(f"Average score: {sum(scores) / len(scores)}" if scores else "No examples finished.", flush=True)


def main() -> None:
    for name in ("SIGTERM", "SIGHUP", "SIGINT"):
        signal.signal(getattr(signal, name), lambda *_: sys.exit(0))
    args = config()
    logging.getLogger().setLevel(logging.INFO)
    log_to(os.path.join(args.result_dir, "logs", f"normal-{args.worker_id}-{STARTED}.log"))
    print("Waiting for the server to start...", flush=True)
    wait_for_server(args.emulator_ip)
    with open(args.test_all_meta_path, encoding="utf-8") as f:
        listed = json.load(f)
    if args.domain != "all":
        listed = {args.domain: listed[args.domain]}
    tasks = [(domain, task) for domain in listed for task in listed[domain]]
    target = os.path.join(
        args.result_dir, args.action_space, args.observation_type, args.model, args.trial_id
    )
    if args.num_workers == 1:
        tasks = unfinished(target, tasks)
    logger.info("Args: %s", args)
    test(args, my_slice(tasks, args.worker_id, args.num_workers), target)


if __name__ == "__main__":
    main()
