"""A lab of hosts with the stand-in's engine, and the command line of evalfleet inside their network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from evalfleet.errors import FleetError
from evalfleet.events import Event
from evalfleet.journal import Store
from evalfleet.lab import Lab, NamespaceHost
from standins.waa.standin import ENGINE_ROOT, FEW, Tasks, build_docker, golden_storage, publish
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


class Arena:
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
        self.folder = folder
        self.home = folder / "results"
        self.share = folder / "share"
        self.tasks = tasks
        self.processes: list[subprocess.Popen[str]] = []
        self.share.mkdir()
        image = publish(self.share / "registry", tasks=tasks, plan=plan, **offer)
        self.checkout = image / "rootfs/client"
        self.golden = golden_storage(self.share / "golden")
        build_docker(self.share / "docker")
        (self.share / "engine.json").write_text(
            json.dumps({"registry": str(self.share / "registry"), **(engine or {})})
        )
        self.lab = Lab.create(hosts, expose=[self.share])
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
        for process in self.processes:
            if process.poll() is None:  # the test has failed
                process.kill()
                process.wait()
        self.lab.destroy()

    # -- the command line ------------------------------------------------------------------------

    def start(self, *words: str) -> subprocess.Popen[str]:
        environ = {key: value for key, value in os.environ.items() if not key.startswith("EVALFLEET_")}
        environ.update(EVALFLEET_HOME=str(self.home), HOME=str(self.folder), OPENAI_API_KEY=KEY)
        process = subprocess.Popen(
            [*self.lab.prefix, sys.executable, "-m", "evalfleet", *words],
            cwd=self.folder,
            env=environ,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.processes.append(process)
        return process

    def start_run(self, name: str, *words: str) -> subprocess.Popen[str]:
        workers = str(len(self.lab.hosts))
        asked = ("--on", "lab", "--workers", workers, "--model", "gpt-4o", "--name", name)
        # nothing listens there: that the model could not be checked is a note
        return self.start("run", "waa", *asked, "--set", "base_url=http://127.0.0.1:9/v1", *words)

    def run(self, name: str, *words: str, code: int = 0) -> str:
        return finish(self.start_run(name, *words), code)

    # -- what came of it -------------------------------------------------------------------------

    def events(self, run: str) -> list[Event]:
        """None as long as there is no such run."""
        try:
            store = Store.open(self.home, create=False, read_only=True)
            return [record.event for record in store.read(run)]
        except FleetError:
            return []

    def results(self, run: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.home / run / "results.json").read_text())
        return found


def finish(process: subprocess.Popen[str], code: int = 0, patience_s: float = PATIENCE_S) -> str:
    try:
        said, _ = process.communicate(timeout=patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"not done in time: {process.communicate()[0][-5000:]}")
    assert process.returncode == code, said
    assert "Traceback" not in said, said
    return said
