"""What the machine was told, and where things are on it."""

from __future__ import annotations

import json
import os

CONTAINER = "winarena"
PORTS = {"vnc": 8006, "guest": 5000, "qmp": 7200}
"""Of the container, published on the machine's own loopback under the same numbers."""

ENVIRONMENT = "EVALFLEET_WAA"
FILE = "config.json"
POINTER = "~/.evalfleet-waa"
"""Says where our folder is to those who know nothing of the settings."""


class HostConfig:
    """From the job's environment; for people who look in, from the file that set-up left."""

    def __init__(self, given: dict[str, object]) -> None:
        self.given = given
        self.image = str(given["image"])
        self.registry_user = str(given["registry_user"])
        self.registry_password = str(given["registry_password"])
        self.golden = os.path.expanduser(str(given["golden"]))
        self.golden_token = str(given["golden_token"])
        self.iso = os.path.expanduser(str(given["iso"]))
        self.version = str(given["version"])
        self.ram = str(given["ram"])
        self.disk = str(given["disk"])
        self.cores = int(str(given["cores"])) or min(os.cpu_count() or 1, 8)
        self.kvm = bool(given["kvm"])
        self.memory_gb = float(str(given["memory_gb"]))
        self.free_gb = float(str(given["free_gb"]))
        self.boot_s = float(str(given["boot_s"]))
        self.stop_s = int(str(given["stop_s"]))
        self.restart_s = float(str(given["restart_s"]))
        self.data = os.path.abspath(os.path.expanduser(str(given["data"])))

    @classmethod
    def load(cls) -> HostConfig:
        text = os.environ.get(ENVIRONMENT)
        if text is None:
            with open(os.path.join(os.getcwd(), "..", FILE)) as file:
                text = file.read()
        return cls(json.loads(text))

    # -- places on the machine -------------------------------------------------------------------

    @property
    def golden_folder(self) -> str:
        """Pristine, and only ever copied."""
        own = not self.golden or self.golden.startswith("http")
        return os.path.join(self.data, "golden") if own else self.golden

    @property
    def storage(self) -> str:
        """What the container works on."""
        return os.path.join(self.data, "storage")

    def state(self, name: str) -> str:
        return os.path.join(self.data, "state", name)

    def run_words(self) -> list[str]:
        """The container as WAA's own script makes it, but reachable from this machine alone."""
        words = ["--name", CONTAINER, "--cap-add", "NET_ADMIN", "--stop-timeout", "120"]
        words += ["--device=/dev/kvm"] if self.kvm else ["-e", "KVM=N"]
        for port in PORTS.values():
            words += ["-p", f"127.0.0.1:{port}:{port}"]
        words += ["-v", f"{self.storage}:/storage", *self.guest_words()]
        return [*words, self.image, "-c", "./entry.sh --prepare-image false --start-client false"]

    def guest_words(self) -> list[str]:
        return [
            *("-e", f"RAM_SIZE={self.ram}"),
            *("-e", f"CPU_CORES={self.cores}"),
            *("-e", f"DISK_SIZE={self.disk}"),
            *("-e", f"VERSION={self.version}"),
            *("-e", f"ARGUMENTS=-qmp tcp:0.0.0.0:{PORTS['qmp']},server,nowait"),
        ]
