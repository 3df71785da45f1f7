"""traj.jsonl, traj.html and a file for each thing seen or thought."""

import datetime
import json
import os


class TrajectoryRecorder:
    def __init__(self, result_dir: str) -> None:
        self.result_dir = result_dir

    def save_dict(self, things: dict, step, at: str) -> dict:
        saved = {}
        for key in things:
            value = things[key]
            kind = (
                "txt"
                if key in ("accessibility_tree", "user_question", "plan_result")
                else "png"
                if isinstance(value, bytes)
                else "json"
                if isinstance(value, dict)
                else ""
            )
            if not kind:
                saved[key] = value
                continue
            saved[key] = f"{key}-step_{step}_{at}.{kind}"
            data = (
                value if isinstance(value, bytes) else value if isinstance(value, str) else json.dumps(value)
            )
            with open(os.path.join(self.result_dir, saved[key]), "wb") as f:
                f.write(data if isinstance(data, bytes) else data.encode())
        return saved

    def record_init(self, obs: dict, example: dict, at: str) -> None:
        saved = self.save_dict(obs, "reset", at)
        self.write({"step_num": 0, "action_timestamp": at, "action": None, **saved})
        self.page(f"<pre>\n{json.dumps(example)}\n</pre><pre>\n{example['instruction']}\n</pre>")

    def record_step(self, obs, logs, step: int, at: str, elapsed: str, action: str, done: bool) -> None:
        saved = {**self.save_dict(obs, step, at), **self.save_dict(logs, step, at)}
        line = {
            "step_num": step + 1,
            "action_timestamp": at,
            "action": action,
            "reward": 0,
            "done": done,
            "info": {},
        }
        self.write({**line, **saved})
        self.page(f"<h3>Step {step + 1} ({elapsed})</h3><pre>\n{action}\n</pre>")

    def record_end(self, result: float, started: datetime.datetime) -> None:
        self.page(f"<h1>Result: {result}</h1><h1>Elapsed Time: {datetime.datetime.now() - started}</h1>")

    def write(self, line: dict) -> None:
        with open(os.path.join(self.result_dir, "traj.jsonl"), "a", encoding="utf-8") as f:
            f.write(json.dumps(line) + "\n")

    def page(self, html: str) -> None:
        with open(os.path.join(self.result_dir, "traj.html"), "a", encoding="utf-8") as f:
            f.write(html)
