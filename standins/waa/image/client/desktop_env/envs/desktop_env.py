"""The environment, as the agent's loop sees it."""

import time

from desktop_env.controllers.python import PythonController
from desktop_env.controllers.setup import SetupController
from desktop_env.controllers.vm import VMController
from desktop_env.evaluators.metrics.general import exact_match


class DesktopEnv:
    def __init__(self, emulator_ip: str) -> None:
        self.controller = PythonController(emulator_ip)
        self.setup_controller = SetupController(emulator_ip)
        self.vm_controller = VMController()
        self.vm_controller.get_status()
        self.wish = None

    def reset(self, task_config: dict) -> dict:
        self.controller.http_server = self.setup_controller.http_server
        self.setup_controller.close_all()
        self.setup_controller.setup(task_config.get("config", []), fails=self.wish.do == "set-up")
        return self._get_obs()

    def _get_obs(self) -> dict:
        title, rect = self.controller.get_obs_winagent()
        return {
            "screenshot": self.vm_controller.take_screenshot(),
            "accessibility_tree": self.controller.get_accessibility_tree(),
            "window_title": title,
            "window_rect": rect,
        }

    def step(self, action: str, pause: float) -> tuple:
        if action not in ("WAIT", "FAIL", "DONE"):
            self.controller.execute_python_windows_command(action)
        time.sleep(pause)
        if self.wish.do == "controller":
            self.controller.http_server = self.controller.http_server.replace(":5000", ":1")
        return self._get_obs(), action in ("FAIL", "DONE")

    def evaluate(self) -> float:
        self.setup_controller.setup([], fails=False)
        return exact_match(self.wish.score, {} if self.wish.do == "evaluator" else {"rules": 1})
