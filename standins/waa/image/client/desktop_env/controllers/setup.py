"""Brings the guest into the state that a task starts from. What the guest refuses is logged, no more."""

import logging

import requests

logger = logging.getLogger("desktopenv.setup")


class SetupController:
    def __init__(self, vm_ip: str) -> None:
        self.http_server = f"http://{vm_ip}:5000"

    def close_all(self) -> None:
        requests.post(self.http_server + "/setup/close_all", {})
        logger.info("Command executed successfully: All windows closed successfully.")

    def setup(self, config: list, wish: str) -> None:
        for step in config:
            getattr(self, f"_{step['type']}_setup")(wish=wish, **step["parameters"])
            logger.info("SETUP: _%s_setup(%s)", step["type"], step["parameters"])

    def _launch_setup(self, command: object, wish: str) -> None:
        if wish == "set-up":
            raise requests.exceptions.RequestException(
                "Failed to download https://example.org/a.docx. No retries left."
            )
        folder = "/no-setup" if wish == "unset" else "/setup"
        response = requests.post(f"{self.http_server}{folder}/launch", {"command": command})
        if response.status_code == 200:
            logger.info("Command executed successfully: %s", response.content)
        else:
            logger.error("Failed to launch application. Status code: %s", response.content)
