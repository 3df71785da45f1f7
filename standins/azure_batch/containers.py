"""Nodes whose tasks are real containers, by Debian's podman: for tests in which the image matters."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from standins.cloud.words import Json
from standins.podman import LIMITS, Podman

from .nodes import JailedRun, ProcessNodes, TaskRun

CA = "/etc/stand-in-ca.pem"


class PodmanRun:
    """The container of a task, under way."""

    def __init__(self, process: asyncio.subprocess.Process, podman: Podman, name: str, log: Path) -> None:
        self._process, self._podman, self._name, self._log = process, podman, name, log

    async def wait(self) -> int:
        return await self._process.wait()

    def kill(self) -> None:
        self._podman("kill", self._name)
        with suppress(ProcessLookupError):
            self._process.kill()

    def log(self) -> bytes:
        return self._log.read_bytes()


class PodmanNodes(ProcessNodes):
    """Nodes that run container tasks by podman, in the network of this computer, and no others."""

    def __init__(self, podman: Podman) -> None:
        super().__init__()
        self._podman, self._numbers = podman, itertools.count(1)
        self._folder = tempfile.TemporaryDirectory(prefix="batch-nodes-", ignore_cleanup_errors=True)

    async def pull(self, image: str, login: Json) -> str:
        """A name without a registry is one of this computer's own images."""
        if image.startswith("localhost/"):
            return ""
        creds = ("--creds", f"{login['username']}:{login['password']}") if login else ()
        asked = ("pull", "-q", "--tls-verify=false", *creds, image)
        done = await asyncio.to_thread(self._podman, *asked)
        return done.stderr.strip() or "the pull failed" if done.returncode else ""

    async def run(
        self, node: str, folder: str, argv: Sequence[str], env: dict[str, str], admin: bool, container: Json
    ) -> TaskRun:
        assert container, "a node of containers takes no other tasks"
        number = next(self._numbers)
        below = Path(self._folder.name) / str(number)
        (below / "wd").mkdir(parents=True)
        told = {**env, "SSL_CERT_FILE": CA}
        options = [
            *("--rm", "--name", f"task-{number}", "--network", "host", "--init=false"),
            *(
                "-v",
                f"{self.environ['SSL_CERT_FILE']}:{CA}:ro",
                "-v",
                f"{below}:{folder}",
                "-w",
                f"{folder}/wd",
            ),
            *(word for key, value in told.items() for word in ("-e", f"{key}={value}")),
            *container.get("containerRunOptions", "").split(),
        ]
        command = ("run", *LIMITS, *self._podman.grouped, *options, container["imageName"], *argv)
        with open(below / "log", "wb") as log:
            process = await asyncio.create_subprocess_exec(
                *self._podman.argv, *command, stdin=-3, stdout=log, stderr=log
            )
        run = JailedRun(PodmanRun(process, self._podman, f"task-{number}", below / "log"))
        self._runs[node][folder] = run
        return run

    async def close(self) -> None:
        await super().close()
        self._folder.cleanup()
