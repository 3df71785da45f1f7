"""The guest as WAA's own client sees it: Windows in which nothing was done, a model's API, and faults.

It takes the place of `/guest/server.py`, which becomes `plain.py`. A request says which trial it is for (see
sitecustomize.py); the plan says what to do to it:

    {"tasks": {ID: WISH, ID: [WISH of trial 0, WISH of trial 1, ... and of all later ones]}, "default": WISH}

A wish is {"fault": ..., "steps": 2, "decision": "DONE", "file": "what every file holds"}.
"""

import json
import os
import signal
import time

import plain

Server, Viewer, picture = plain.Server, plain.Viewer, plain.picture  # QEMU's monitor takes them from here

NEVER_S = 3600.0
FAULTS = {
    "setup": "every call of the set-up is answered 500",
    "windows": "windows cannot be brought to the front or closed (500): harmless",
    "observation": "observations are answered 500",
    "later-observation": "the same, from the second on",
    "tree": "the accessibility tree is answered 500: navi gets no mark with som_origin=a11y",
    "update": "what the agent's actions stand on is never taken",
    "code": "the agent's own code fails: harmless",
    "evaluator": "what evaluators ask is answered 500",
    "dies": "Windows is gone as soon as an evaluator asks",
    "browser": "the browser is closed when evaluators ask: harmless",
    "model": "the model's API answers 400",
    "mute": "the model's API answers once, and then never",
}
SAYS_NO = {
    "/folder_exists": "Folder x does not exist in y.",
    "/file_exists": "File x does not exist in y.",
    "/is_details_view": "File Explorer is not in Details view",
    "/are_files_sorted_by_modified_time": "x: files are not sorted by modified time",
    "/is_directory_read_only_for_user": "x is not read-only for y",
    "/are_all_images_tagged": "a.png in x is not tagged with y",
    "/library_folders": "x does not exist",
    "/check_if_timer_started": "Timer does not exist",
    "/check_if_world_clock_exists": "World clock does not exist",
}
PATHS = {"/desktop_path": "C:\\Users\\Docker\\Desktop", "/documents_path": "C:\\Users\\Docker\\Documents"}
SHUTS = ("/setup/activate_window", "/setup/close_all", "/setup/close_window")
FAILED = {"status": "error", "message": "stand-in"}
PLANS = (os.path.join(os.environ.get("STORAGE", "/storage"), "plan.json"), "/plan.json")
asked: dict = {}  # how often, by trial and path


def wish(trial: str) -> dict:
    plan: dict = {}
    for path in reversed(PLANS):
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                plan = json.load(file)
    task, _, number = trial.rpartition(".")
    wanted = plan.get("tasks", {}).get(task, plan.get("default", {}))
    return wanted[min(int(number or 0), len(wanted) - 1)] if isinstance(wanted, list) else wanted


class Guest(plain.Guest):
    def do_GET(self) -> None:
        path, fault = self.begin()
        if path == "/obs_winagent" and (
            fault == "observation" or (fault == "later-observation" and self.count(path) > 1)
        ):
            self.answer(500, FAILED)
        elif path == "/accessibility":
            tree = {"AT": '<desktop name="desktop"></desktop>'}
            self.answer(*((500, FAILED) if fault == "tree" else (200, tree)))
        elif path == "/stand-in/9222":
            self.answer(404 if fault == "browser" and self.evaluates() else 200, {})
        else:
            super().do_GET()

    def do_POST(self) -> None:
        path, fault = self.begin()
        agents = path in ("/execute_windows", "/update_computer") or path.startswith(("/setup/", "/v1/"))
        if not agents and self.evaluates() and fault == "dies":
            os._exit(1)
        fails = (
            (fault == "setup" and path.startswith("/setup/"))
            or (fault == "windows" and path in SHUTS)
            or (fault == "update" and path == "/update_computer")
            or (fault == "code" and path == "/execute_windows")
            or (fault == "evaluator" and not agents and self.evaluates())
        )
        if fails:
            self.answer(500, FAILED)
        elif path == "/v1/chat/completions":
            self.complete(fault)
        else:
            self.tell(path)

    def begin(self) -> tuple:
        path = self.path.partition("?")[0]
        self.trial = self.headers.get("X-Trial", "")
        self.wish = wish(self.trial)
        if path == "/setup/close_all":  # a task begins
            for key in [key for key in asked if key[0] == self.trial]:
                del asked[key]
        key = (self.trial, path)
        asked[key] = asked.get(key, 0) + 1
        if self.command == "POST":
            self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return path, self.wish.get("fault", "")

    def count(self, path: str) -> int:
        return asked.get((self.trial, path), 0)

    def evaluates(self) -> bool:
        """The agent has had its turn."""
        return self.count("/v1/chat/completions") >= self.wish.get("steps", 1)

    def complete(self, fault: str) -> None:
        if fault == "model" or "max_tokens" not in json.loads(self.body):
            told = "Unsupported parameter: 'max_tokens' is not supported with this model."
            return self.answer(400, {"error": {"message": told}})
        if fault == "mute" and self.count("/v1/chat/completions") > 1:
            time.sleep(NEVER_S)
        done = self.evaluates()
        decision = f"```decision\n{self.wish.get('decision', 'DONE')}\n```" if done else ""
        text = f"```python\ncomputer.mouse.move_abs(x=0.5, y=0.5)\n```\n{decision}"
        return self.answer(200, {"choices": [{"message": {"role": "assistant", "content": text}}]})

    def tell(self, path: str) -> None:
        if path in SAYS_NO:
            self.answer(400, {"status": "error", "message": SAYS_NO[path]})
        elif path in PATHS:
            self.answer(200, {path[1:]: PATHS[path]})
        elif path == "/list_directory":
            self.answer(200, {"directory_tree": {"type": "directory", "name": "x", "children": []}})
        elif path == "/wallpaper":
            self.answer(404, {"error": "Wallpaper file not found"})  # pictures cannot be compared here
        elif path == "/file" and "file" in self.wish:
            self.answer(200, self.wish["file"])
        elif path == "/file":
            self.answer(404, {"error": "File not found"})
        elif path in ("/execute", "/setup/execute"):
            command = json.loads(self.body).get("command", "")
            output = "Windows\n" if "platform.system()" in str(command) else "C:\\nothing\n"
            self.answer(200, {"status": "success", "output": output, "error": "", "returncode": 0})
        else:
            self.answer(200, {"status": "success"})


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, plain.power_down)
    plain.Server(("0.0.0.0", 5000), Guest).serve_forever()
