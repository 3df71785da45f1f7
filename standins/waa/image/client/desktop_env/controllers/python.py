"""What is asked of the guest's server. Without time limits, where the original has none."""

import requests


class PythonController:
    def __init__(self, vm_ip: str) -> None:
        self.http_server = f"http://{vm_ip}:5000"

    def get_screenshot(self) -> bytes:
        return requests.get(self.http_server + "/screenshot").content

    def get_accessibility_tree(self) -> str:
        return requests.get(self.http_server + "/accessibility?backend=uia", timeout=300).json()["AT"]

    def get_obs_winagent(self) -> tuple:
        found = requests.get(self.http_server + "/obs_winagent").json()
        return found["window_title"], found["rect"]

    def update_computer(self) -> None:
        requests.post(self.http_server + "/update_computer", {"rects": [], "scale": [1, 1]})

    def execute_python_windows_command(self, command: str) -> None:
        try:
            requests.post(self.http_server + "/execute_windows", {"command": command}, timeout=90)
        except requests.exceptions.RequestException as err:
            print("An error occurred while trying to execute the command:", err, flush=True)
