"""The environment, as the agent's loop sees it. Most of what fails here is logged, and ends as a zero."""

import logging
import time

from desktop_env.controllers.python import PythonController
from desktop_env.controllers.setup import SetupController
from desktop_env.controllers.vm import VMController
from desktop_env.evaluators.metrics.general import exact_match

logger = logging.getLogger("desktopenv.env")


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
        logger.info("Setting up environment...")
        self.setup_controller.setup(task_config.get("config", []), self.wish.do)
        logger.info("Environment setup complete.")
        return self._get_obs()

    def _get_obs(self, refused: bool = False) -> dict:
        if refused:
            logger.error("Failed to get the observations for the agent from the server. Status code: %d", 500)
            return None
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
        return self._get_obs(self.wish.do == "unseen"), action in ("FAIL", "DONE")

    def evaluate(self) -> float:
        self.setup_controller.setup([], self.wish.do)
        if self.wish.do == "gone":
            self.controller.execute_python_windows_command("DIE")
        if self.wish.do in ("unjudged", "gone"):
            try:
                if self.wish.do == "unjudged":
                    self.controller.http_server = self.controller.http_server.replace(":5000", ":1")
                self.controller.get_obs_winagent()
            except Exception as err:
                logger.error(f"An unexpected error occurred: {err}")
                return 0
        if self.wish.do in ("unset", "unseen"):
            return 0.0
        return exact_match(self.wish.score, {} if self.wish.do == "evaluator" else {"rules": 1})
