"""Brings the guest into the state that a task starts from."""

import requests


class SetupController:
    def __init__(self, vm_ip: str) -> None:
        self.http_server = f"http://{vm_ip}:5000"

    def close_all(self) -> None:
        requests.post(self.http_server + "/setup/close_all", {})

    def setup(self, config: list, fails: bool) -> None:
        for step in config:
            getattr(self, f"_{step['type']}_setup")(fails=fails, **step["parameters"])

    def _launch_setup(self, command: object, fails: bool) -> None:
        if fails:
            raise requests.exceptions.RequestException(
                "Failed to download https://example.org/a.docx. No retries left."
            )
        requests.post(self.http_server + "/setup/launch", {"command": command})
