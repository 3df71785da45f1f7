"""An agent that does what its task tells it."""

from __future__ import annotations

import os
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


def _slow() -> None:
    time.sleep(600)


def _model() -> None:
    import openai

    client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=0)
    client.chat.completions.create(model="any", messages=[])
