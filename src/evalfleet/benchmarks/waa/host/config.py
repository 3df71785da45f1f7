"""What the machine was told, and where things are on it."""

from __future__ import annotations

import json
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

CONTAINER = "winarena"
INSTALLER = "winarena-prepare"
PORTS = {"vnc": 8006, "guest": 5000, "qmp": 7200}
"""Of the container, published on the machine's own loopback; but for QMP's, which would lead to Windows."""

MODELS = "evalfleet-waa-models"
"""A volume of Docker's for the models that agents fetch from Hugging Face. It outlives the container. What
the image has in that folder already, Docker copies into the new volume."""
MODELS_INSIDE = "/root/.cache/huggingface"
GOLDEN_INSIDE = "/golden"
"""Where the container finds the disk that its own is a layer over."""
ON_MACHINE = "machine"
"""`golden` of machines that have Windows already: made from an image, or set up before."""

SENT = "sent:"
"""What `golden` of a machine begins with that fetches it from the storage of its place, then a digest."""
SENT_FROM = "EVALFLEET_GOLDEN_ADDRESSES"
"""The variable that holds the address of each file there, as JSON."""

V2_MARK = "check_setup.py"
"""Beside the client of WindowsAgentArena-V2, which we do not run, and of no other that we know."""
ENVIRONMENT = "EVALFLEET_WAA"
FILE = "config.json"
PROGRAM = "program"
POINTER = "~/.evalfleet-waa"
"""Says where our folder is to those who know nothing of the settings."""


class HostConfig:
    """The settings of a host, from the job's environment or, for people who look in, from the file that
    set-up left."""

    def __init__(self, given: dict[str, object]) -> None:
        self.given = given
        self.image = str(given["image"])
        self.preset = str(given.get("preset") or "original")  # earlier versions knew no other
        self.registry_user = str(given["registry_user"])
        self.registry_password = str(given["registry_password"])
        self.golden = os.path.expanduser(str(given["golden"]))
        self.layered = given.get("storage", "copy") == "overlay"
        self.golden_token = str(given["golden_token"])
        self.iso = str(given["iso"])
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
        self.client = os.path.expanduser(str(given.get("client") or ""))
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
        """Pristine, and only ever read."""
        return os.path.join(self.data, "golden") if self.owns_golden else self.golden

    @property
    def owns_golden(self) -> bool:
        """Is golden storage made here? One that is given as a folder of the machine is somebody else's."""
        return self.golden in ("", ON_MACHINE) or self.golden.startswith(("http", SENT)) or self.is_one_file

    @property
    def is_one_file(self) -> bool:
        return self.golden.endswith(".qcow2")

    @property
    def needs_iso(self) -> bool:
        """The original image downloads no Windows."""
        return self.preset == "original" and not self.golden

    @property
    def iso_file(self) -> str:
        return os.path.join(self.data, "iso", "windows.iso")

    @property
    def storage(self) -> str:
        """What the container works on."""
        return os.path.join(self.data, "storage")

    def state(self, name: str) -> str:
        return os.path.join(self.data, "state", name)

    # -- the container -----------------------------------------------------------------------------

    def run_words(self) -> list[str]:
        more = ["-v", f"{self.golden_folder}:{GOLDEN_INSIDE}:ro"] if self.layered else []
        more += ["-v", f"{MODELS}:{MODELS_INSIDE}"]
        more += ["-v", f"{self.client}:/client"] if self.client else []
        return self._words(CONTAINER, self.storage, prepare=False, more=more)

    def install_words(self, storage: str, iso: str) -> list[str]:
        """The words for a container that installs Windows into `storage`, shuts it down and ends."""
        more = ["-v", f"{iso}:/custom.iso:ro"] if iso else []
        return self._words(INSTALLER, storage, prepare=True, more=more)

    def _words(self, name: str, storage: str, prepare: bool, more: Sequence[str] = ()) -> list[str]:
        """The container as WAA's own script makes it, but reachable from this machine alone."""
        words = ["--name", name, "--cap-add", "NET_ADMIN", "--stop-timeout", "120"]
        words += ["--device=/dev/kvm"] if self.kvm else ["-e", "KVM=N"]
        for port in (PORTS["vnc"], PORTS["guest"]):
            words += ["-p", f"127.0.0.1:{port}:{port}"]
        words += ["-v", f"{storage}:/storage", *more]
        guest = {
            "RAM_SIZE": self.ram,
            "CPU_CORES": self.cores,
            "DISK_SIZE": self.disk,
            "VERSION": self.version,
        }
        guest["ARGUMENTS"] = f"-qmp tcp:0.0.0.0:{PORTS['qmp']},server,nowait"
        for key, value in guest.items():
            words += ["-e", f"{key}={value}"]
        entry = ["--prepare-image", "true" if prepare else "false", "--start-client", "false"]
        if self.preset == "original":
            return [*words, "--entrypoint", "/bin/bash", self.image, "-c", f"./entry.sh {' '.join(entry)}"]
        return [*words, self.image, "/entry.sh", *entry]
