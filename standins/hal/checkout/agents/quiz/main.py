"""An agent that does what its task tells it."""

from __future__ import annotations

import json
import os
import subprocess
import time
from typing import Any

from helper import second


def run(input: dict[str, Any], **kwargs: Any) -> Any:
    ((task_id, task),) = input.items()
    with open("seen.txt", "w", encoding="utf-8") as file:
        found = (os.path.join(folder, name) for folder, _, names in os.walk(".") for name in names)
        file.write("\n".join(sorted(found)))
    do = task["do"]
    if do.startswith("answer"):
        return {task_id: second(do)}
    if do.startswith("measured"):
        return {task_id: {"answer": second(do), "metrics": {"step_count": 7, "total_cost": 0.25}}}
    if do.startswith("more"):
        return {"notes": "kept", task_id: second(do)}
    return globals()["_" + do]()


def _crash() -> None:
    raise ValueError("the agent's own fault")


def _exit() -> None:
    os._exit(0)


def _nothing() -> None:
    return None


def _other() -> dict[str, str]:
    return {"right": "5"}


def _stdin() -> dict[str, str]:
    return {"stdin": input("? ")}


def _usage() -> dict[str, str]:
    """Leaves what a model answered, one of it twice, as traces do."""
    usage = {"prompt_tokens": 1000, "completion_tokens": 100, "prompt_tokens_details": {"cached_tokens": 400}}
    first = {"id": "chatcmpl-1", "model": "o3-mini", "usage": usage}
    with open("calls.jsonl", "w", encoding="utf-8") as file:
        file.write(json.dumps(first) + "\n" + json.dumps({"span": [first]}) + "\n")
    with open("trace.json", "w", encoding="utf-8") as file:
        usage = {"input_tokens": 1000, "output_tokens": 10}
        json.dump({"turns": [{"id": "msg-2", "model": "gpt-4o", "usage": usage}, {"usage": usage}]}, file)
    return {"usage": "7"}


def _flood() -> dict[str, str]:
    """Prints more than anybody wants to keep, and leaves a process behind."""
    for _ in range(60):
        print("x" * (1 << 20))
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    return {"flood": "8"}


def _gigabyte() -> dict[str, str]:
    for _ in range(1 << 10):
        print("x" * (1 << 20))
    return {"gigabyte": "8"}


def _bomb() -> dict[str, str]:
    """Goes off only in a group of processes with a limit, which it has read back; and then not far."""
    groups = (os.path.join(folder, "pids.max") for folder, _, _ in os.walk("/sys/fs/cgroup"))
    own = [path for path in groups if path.endswith(f"/{os.getuid()}/pids.max") and os.path.exists(path)]
    with open(own[0], encoding="utf-8") as file:
        limit = int(file.read())  # "max" is no number
    if limit > 4096:
        raise ValueError(f"a limit of {limit} is none")
    for _ in range(8):  # each process becomes two: 256, and none of them ends by itself
        if os.fork() == 0:
            os.setsid()
            own = []
    if not own:
        time.sleep(600)
    return {"bomb": "8"}


def _slow() -> None:
    time.sleep(600)


def _model() -> None:
    import openai

    client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=0)
    client.chat.completions.create(model="any", messages=[])
