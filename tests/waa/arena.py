"""A lab of hosts with the stand-in's engine, and the command line of evalfleet inside their network."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab import Lab, NamespaceHost
from standins.waa.standin import ENGINE_ROOT, FEW, Tasks, build_docker, golden_storage, publish
from tests.desk import Desk, Process
from tests.planted import UNIQUE
from tests.waiting import PATIENCE_S

KEY = f"sk-a-key-that-nobody-may-see-{UNIQUE}"
DATA = "/root/evalfleet-waa"
HANG = """\
import http.client
guest = http.client.HTTPConnection("127.0.0.1", 5000, timeout=2)
guest.request("POST", "/execute_windows", '{"command": "HANG"}')
try:
    guest.getresponse().read()
except OSError:
    pass
"""


class Arena(Desk):
    """Every host has Docker, nothing pulled; the registry and golden storage are shown to all of them."""

    def __init__(
        self,
        folder: Path,
        hosts: int,
        *,
        tasks: Tasks = FEW,
        plan: Mapping[str, Any] | None = None,
        engine: Mapping[str, Any] | None = None,
        **offer: Any,
    ) -> None:
        super().__init__(folder, folder / "results", {"HOME": str(folder), "OPENAI_API_KEY": KEY})
        self.share = folder / "share"
        self.tasks = tasks
        self.share.mkdir()
        image = publish(self.share / "registry", tasks=tasks, plan=plan, **offer)
        self.checkout = image / "rootfs/client"
        self.golden = golden_storage(self.share / "golden")
        build_docker(self.share / "docker")
        (self.share / "engine.json").write_text(
            json.dumps({"registry": str(self.share / "registry"), **(engine or {})})
        )
        self.lab = Lab.create(hosts, expose=[self.share])
        self.prefix = tuple(self.lab.prefix)
        try:
            for host in self.lab.hosts:
                self._equip(host)
            self._write_config()
        except BaseException:
            self.lab.destroy()
            raise

    def _equip(self, host: NamespaceHost) -> None:
        script = f"""\
            cp {self.share}/docker /usr/local/bin/docker
            mkdir -p {ENGINE_ROOT}
            cp {self.share}/engine.json {ENGINE_ROOT}/engine.json"""
        host.run(["sh", "-ec", script])
        daemon = "setsid docker __daemon </dev/null >/dev/null 2>&1 &"
        subprocess.run(self.lab.client.ssh(host, daemon, user="root"), check=True, timeout=PATIENCE_S)

    def _write_config(self) -> None:
        client = self.lab.client
        hosts = json.dumps([host.address for host in self.lab.hosts])
        (self.folder / "evalfleet.toml").write_text(
            f'[places.lab]\nkind = "ssh"\nuser = "root"\nkey = "{client.key_path}"\n'
            f'known_hosts = "{client.known_hosts_path}"\nhosts = {hosts}\ngone_after_s = 5\n'
            f'[benchmarks.waa]\nwaa = "{self.checkout}"\ngolden = "{self.golden}"\nram = "1G"\n'
            "kvm = false\nfree_gb = 0\nboot_s = 60\nrestart_s = 3\nstop_s = 0\nlately_s = 4\n"
        )

    def destroy(self) -> None:
        self.sweep()
        self.lab.destroy()

    def start_run(self, name: str, *words: str) -> Process:
        asked = ("--on", "lab", "--model", "gpt-4o", "--name", name)
        # nothing listens there: that the model could not be checked is a note
        return self.start("run", "waa", *asked, "--set", "base_url=http://127.0.0.1:9/v1", *words)

    def run(self, name: str, *words: str, code: int = 0) -> str:
        return self.start_run(name, *words).finish(code)
