"""The client's model calls go through the machine's meter, out of a real container: Debian's podman, as root.

All of it is in a network of its own: the container's ports are those of every such machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from standins.podman import Podman, lacking
from standins.waa import rootfs, standin
from tests.desk import SRC, Desk
from tests.planted import UNIQUE, holding
from tests.waiting import PATIENCE_S

CANNOT = lacking(rootfs.PROGRAMS)
pytestmark = [
    pytest.mark.skipif(CANNOT is not None, reason=f"NO TEST WITH A REAL CONTAINER ENGINE: {CANNOT}"),
    pytest.mark.slow,
]
KEY = f"sk-the-models-real-key-{UNIQUE}"
IMAGE = "localhost/winarena:latest"
# /sys shows the network of whoever mounts it, and podman needs the control groups that are below it
NETWORK = """\
ip link set lo up && mkdir "$1" && mount --rbind /sys/fs/cgroup "$1" && mount -t sysfs sysfs /sys
mount --rbind "$1" /sys/fs/cgroup && echo ready && exec sleep infinity
"""
PLAN = {
    "calls": True,
    "boot_s": 0.05,
    "default": {"do": "score", "score": 1.0, "steps": 3, "seconds": 0.05},
    "tasks": {"two": {"do": "score", "score": 1.0, "steps": 200, "seconds": 0.05}},
}
CONFIG = """\
[model]
key = "OPENAI_API_KEY"
[model.prices]
any = {in = 2, cached = 1, cache_write = 3, out = 8}
[benchmarks.waa]
"""


@contextmanager
def private_network(folder: Path) -> Iterator[tuple[str, ...]]:
    """What goes before a command that is to run in a network of its own."""
    argv = ("unshare", "--net", "--mount", "sh", "-c", NETWORK, "network", str(folder / "cgroup"))
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "ready\n"
            yield ("nsenter", f"--target={holder.pid}", "--net", "--mount", f"--wd={folder}")
        finally:
            holder.kill()


class Meterable(Desk):
    """A machine that is this computer, in its private network, with podman by the name of docker."""

    def __init__(self, folder: Path, podman: Podman, prefix: tuple[str, ...]) -> None:
        super().__init__(folder, folder / "results", {"HOME": str(folder)}, prefix)
        self.environ["PATH"] = f"{folder}/bin:{self.environ['PATH']}"
        (folder / ".env").write_text(f"OPENAI_API_KEY={KEY}\n")
        (folder / ".env").chmod(0o600)
        (folder / "key").write_text(KEY)
        self._models = subprocess.Popen[str](
            [*prefix, sys.executable, "-m", "standins.models"],
            env={**self.environ, "MODELS_KEY": str(folder / "key"), "PYTHONPATH": f"{SRC}:{SRC.parent}"},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._models.stdout is not None
        address = next(line for line in self._models.stdout if "OPENAI_BASE_URL=" in line)
        self.url = address.strip().partition("=")[2].removesuffix("/v1")
        golden = standin.golden_storage(folder / "golden", PLAN)
        settings: dict[str, Any] = {
            "image": IMAGE,
            "waa": str(podman.folder / "files/client"),
            "golden": str(golden),
            "data": str(folder / "data"),
            "base_url": f"{self.url}/v1",
            "ram": "256M",
            "kvm": False,
            "free_gb": 0,
            "boot_s": 60,
            "stop_s": 0,
        }
        self.config(CONFIG + "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items()))

    def served(self) -> dict[str, Any]:
        argv = [*self.prefix, "curl", "-sf", f"{self.url}/served"]
        done = subprocess.run(argv, capture_output=True, check=True, timeout=PATIENCE_S)
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def destroy(self) -> None:
        self.sweep()
        self._models.kill()
        self._models.communicate()


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Meterable]:
    podman = Podman(Path(tempfile.mkdtemp(prefix="waa-", dir="/tmp")))  # it takes no longer paths
    folder = tmp_path_factory.mktemp("metered")
    with private_network(folder) as prefix:
        podman.argv = (*prefix, *podman.argv)
        try:
            files = standin.build_files(podman.folder / "files")
            podman.import_image(IMAGE, files, standin.ENTRYPOINT, {"ARGUMENTS": standin.QMP})
            with podman.as_docker(folder / "bin/docker", prefix):
                made = Meterable(folder, podman, prefix)
                yield made
                made.destroy()
        finally:
            podman.destroy()


def test_calls_from_inside_the_container_are_counted_and_limited(desk: Meterable) -> None:
    run = ("run", "waa", "--on", "local", "--model", "any", "--workers", "1")
    done = desk(*run, "--name", "paid", "--task", "one", "--task", "three", "--budget", "1")
    assert done.code == 0, done
    told, served = desk.results("paid")["models"], desk.served()
    assert (told["metered"], told["calls"], told["unknown_calls"]) == (True, 6, 0)
    assert served["calls"] == 7, "the controller has asked once, whether the model answers"
    lines = (desk.home / "paid/one/one.0/calls.jsonl").read_text().splitlines()
    assert [json.loads(line).get("status") for line in lines] == [None, 200] * 3
    assert desk.results("paid")["cost"]["models_usd"] == pytest.approx(told["usd"])
    each = told["usd"] / 6

    done = desk(*run, "--name", "refused", "--task", "two", "--budget", f"{4.5 * each:f}")
    assert done.code == 3, done
    results = desk.results("refused")
    assert (results["scored"], results["broken"], results["unrun"]) == (0, 0, 1)
    assert results["models"]["calls"] == desk.served()["calls"] - served["calls"] - 1 == 5
    assert sorted(holding(desk.folder, KEY)) == [".env", "key"]
