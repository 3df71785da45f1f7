"""Nodes whose tasks are real containers, by Debian's podman: for tests in which the image matters."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path

from standins.azure_ml import containers
from standins.cloud.words import Json
from standins.podman import Podman

from .nodes import JailedRun, ProcessNodes, TaskRun


class PodmanNodes(ProcessNodes):
    """Nodes that run container tasks by podman, in the network of this computer, and no others."""

    def __init__(self, podman: Podman) -> None:
        super().__init__()
        self._podman, self._numbers = podman, itertools.count(1)
        self._folder = tempfile.TemporaryDirectory(prefix="batch-nodes-", ignore_cleanup_errors=True)

    async def pull(self, image: str, login: Json) -> str:
        return await containers.pull(self._podman, image, login)

    async def run(
        self, node: str, folder: str, argv: Sequence[str], env: dict[str, str], admin: bool, container: Json
    ) -> TaskRun:
        assert container, "a node of containers takes no other tasks"
        number = next(self._numbers)
        below = Path(self._folder.name) / str(number)
        (below / "wd").mkdir(parents=True)
        options = [
            *containers.environment(self.environ["SSL_CERT_FILE"], env),
            *("-v", f"{below}:{folder}", "-w", f"{folder}/wd"),
            *container.get("containerRunOptions", "").split(),
        ]
        name, image = f"task-{number}", container["imageName"]
        run = JailedRun(await containers.start(self._podman, name, image, argv, options, below / "log"))
        self._runs[node][folder] = run
        return run

    async def close(self) -> None:
        await super().close()
        self._folder.cleanup()
