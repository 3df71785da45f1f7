"""A lab host with the stand-in's docker, and the image in its registry."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lab import Lab
from lab.host import Host
from standins.waa import standin
from tests.waiting import PATIENCE_S, until

TASKS = {
    "notepad": ("one", "two"),
    "vlc": ("three",),
    "behaviours": (
        *("score", "controller", "set-up", "evaluator", "recorder", "agent", "unauthorized", "throttled"),
        *(
            "unset",
            "unseen",
            "unjudged",
            "quota",
            "model-down",
            "bad-result",
            "bad-exit",
            "no-result",
            "killed",
            "guest-dies",
        ),
    ),
}
UP = (
    *(
        "run",
        "-d",
        "--name",
        "winarena",
        "--device=/dev/kvm",
        "--cap-add",
        "NET_ADMIN",
        "--stop-timeout",
        "1",
    ),
    *("-p", "8006:8006", "-p", "5000:5000", "-v", "/data/storage:/storage", "-e", "OPENAI_API_KEY=sk-test"),
)
CLIENT = ("-w", "/client", "winarena", "python", "run.py", "--result_dir", "/results", "--model", "m")
COMMAND = ("-c", "./entry.sh --prepare-image false --start-client false")


class Docker:
    """`docker` on one host."""

    def __init__(self, host: Host) -> None:
        self.host = host

    def __call__(self, *argv: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        return self.host.run(["docker", *argv], text=text, check=False, timeout_s=PATIENCE_S)

    def ok(self, *argv: str, text: str | None = None) -> str:
        done = self(*argv, text=text)
        assert done.returncode == 0, f"docker {argv}: {done.returncode}: {done.stderr or done.stdout}"
        return done.stdout

    def up(self, *more: str, command: tuple[str, ...] = COMMAND) -> None:
        """The container, as a fleet runner starts it."""
        self.ok(*UP, *more, standin.IMAGE, *command)

    def probe(self) -> bool:
        asked = ["curl", "-s", "-m", "2", "-o", "/dev/null", "-w", "%{http_code}", "localhost:5000/probe"]
        return self.host.run(asked, check=False).stdout == "200"

    def await_guest(self) -> None:
        until(self.probe, lambda: f"the guest to answer: {self('logs', 'winarena').stdout}", look_s=0.05)

    def client(self, *flags: str) -> subprocess.CompletedProcess[str]:
        return self("exec", *CLIENT, *flags)

    def client_in_background(self) -> None:
        self.ok("exec", "-d", *CLIENT)

    def clean(self) -> None:
        """As after the first boot, but for the image."""
        self.host.run(
            ["sh", "-c", "docker rm -f $(docker ps -aq); rm -rf /data"], check=False, timeout_s=PATIENCE_S
        )


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return standin.build_kit(tmp_path_factory.mktemp("kit"), tasks=TASKS)


@pytest.fixture(scope="module")
def lab(kit: Path) -> Iterator[Lab]:
    with Lab.create(1, expose=[kit]) as made:
        standin.equip(made.hosts[0], kit)
        made.hosts[0].run(["docker", "pull", "-q", standin.IMAGE])
        yield made


@pytest.fixture
def docker(lab: Lab) -> Iterator[Docker]:
    made = Docker(lab.hosts[0])
    yield made
    made.clean()


@pytest.fixture
def storage(docker: Docker, kit: Path) -> Callable[..., None]:
    """Put a golden storage on the host, with a plan."""

    def put(**plan: Any) -> None:
        copy = f"rm -rf /data/storage; mkdir -p /data; cp -r {kit}/golden /data/storage"
        docker.host.run(["sh", "-c", f"{copy}; cat > /data/storage/plan.json"], text=json.dumps(plan))

    return put
