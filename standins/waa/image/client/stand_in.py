"""What a test wants of each task. The plan is a JSON file, in the storage or in the image:

    {"scale": 0.003,               seconds here for a second there
     "calls": true,                the model is asked by HTTP, at OPENAI_BASE_URL
     "imports": [MODULE],           what the agent imports at its start
     "boot_s": 0.3, "install_s": 0.5, "boots": true,      of the guest
     "install_waits": true,                  for a file /storage/go
     "downloads": true,                      it needs no ISO, as an image on a newer base
     "install_fails": WORDS, "boot_fails": WORDS,         QEMU says them and ends; the container does not
     "tasks": {ID: WISH, ID: [WISH of trial 0, WISH of trial 1, ... and of all later ones]},
     "default": WISH}

A wish is {"do": ..., "score": 0.5, "seconds": 3, "steps": 4}; "seconds" are of this clock. What can be done
is below. Without one: a score by a hash of the id, and the time and the steps such tasks take, scaled.
"""

import hashlib
import json
import os
import re

PLACES = (os.path.join(os.environ.get("STORAGE", "/storage"), "plan.json"), "/plan.json")
SCALE = 1 / 300
RETRIES_S = 900.0  # of a call to the model

BEHAVIOURS = {
    "score": "ends with a score",
    "bad-exit": "ends with a score and exit code 1",
    "bad-result": "writes something else to result.txt",
    "no-result": "ends in the middle of the task without a word, exit code 0",
    "killed": "is killed in the middle, as by the kernel when memory is short",
    "hang": "stops doing anything; the guest is fine",
    "slow": "never gets done, step after step",
    "hang-guest": "the guest answers no more, and the client waits for it",
    "corrupt": "the same, and the guest's disk is broken: it boots no more",
    "guest-dies": "the guest is gone: nothing listens there any more",
    "unset": "a zero: the set-up was refused, and that was only logged",
    "unseen": "a zero: no observation could be had, and that was only logged",
    "unjudged": "a zero: the evaluator got no answer, and that was only logged",
    "gone": "a zero: the guest was gone when the evaluator asked",
    "controller": "Error: of the environment's controller",
    "set-up": "Error: of the task's set-up",
    "evaluator": "Error: of the evaluator",
    "recorder": "Error: the guest gave no observation",
    "agent": "Error: of the agent's own code",
    "unauthorized": "Error: of the model's client, 401",
    "throttled": "Error: of the model's client, 429",
    "quota": "Error: of the model's client, 429 for want of quota",
    "model-down": "Error: of the model's client, no connection",
}


class Wish:
    def __init__(self, task: str, given: dict, scale: float) -> None:
        digest = hashlib.sha256(task.encode()).digest()
        self.do = given.get("do", "score")
        if self.do not in BEHAVIOURS:
            raise SystemExit(f"the plan wants {self.do!r} of {task}: unknown")
        self.score = given.get("score", 1.0 if digest[0] < 100 else 0.0)
        self.steps = given.get("steps", 3 + digest[1] % 10)
        self.seconds = given.get("seconds", (10 + self.steps * (10 + digest[2] % 23)) * scale)
        self.retries_s = given.get("seconds", RETRIES_S * scale)


def plan() -> dict:
    for path in PLACES:
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                return json.load(file)
    return {}


def wish(task: str, trial: str) -> Wish:
    given = plan()
    wanted = given.get("tasks", {}).get(task, given.get("default", {}))
    if isinstance(wanted, list):
        number = int((re.findall(r"\d+", trial) or ["0"])[-1])
        wanted = wanted[min(number, len(wanted) - 1)]
    return Wish(task, wanted, float(given.get("scale", SCALE)))
