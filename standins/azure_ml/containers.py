"""Containers that are real ones, by Debian's podman: for tests in which the image matters."""

from __future__ import annotations

import asyncio
import itertools
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from standins.cloud.words import Json
from standins.podman import LIMITS, Podman

from .nodes import ContainerRun, end_all

CA = "/etc/stand-in-ca.pem"


class PodmanRun:
    """A container, under way. `log`: the file of what it says."""

    def __init__(self, process: asyncio.subprocess.Process, podman: Podman, name: str, log: Path) -> None:
        self._process, self._podman, self._name, self._log = process, podman, name, log

    async def wait(self) -> int:
        return await self._process.wait()

    def kill(self) -> None:
        if self._process.returncode is None:
            self._podman("kill", self._name)
            with suppress(ProcessLookupError):
                self._process.kill()

    def log(self) -> bytes:
        return self._log.read_bytes()


async def pull(podman: Podman, image: str, login: Json) -> str:
    """Why an image cannot be had. A name without a registry is one of this computer's own images."""
    if image.startswith("localhost/"):
        return ""
    creds = ("--creds", f"{login['username']}:{login['password']}") if login else ()
    done = await asyncio.to_thread(podman, "pull", "-q", "--tls-verify=false", *creds, image)
    return done.stderr.strip() or "the pull failed" if done.returncode else ""


async def start(
    podman: Podman, name: str, image: str, argv: Sequence[str], options: Sequence[str], log: Path
) -> PodmanRun:
    """Run a container in the network of this computer."""
    own = ("--rm", "--name", name, "--network", "host", "--init=false")
    command = ("run", *LIMITS, *podman.grouped, *own, *options, image, *argv)
    with open(log, "wb") as said:
        process = await asyncio.create_subprocess_exec(
            *podman.argv, *command, stdin=-3, stdout=said, stderr=said
        )
    return PodmanRun(process, podman, name, log)


def environment(ca: str, environ: Mapping[str, str]) -> list[str]:
    """Options that give a container these variables, and the stand-in's authority to trust."""
    told = {**environ, "SSL_CERT_FILE": CA}
    return [
        "-v",
        f"{ca}:{CA}:ro",
        *(word for key, value in told.items() for word in ("-e", f"{key}={value}")),
    ]


class PodmanNodes:
    """Nodes that run the containers of jobs by podman."""

    def __init__(self, podman: Podman) -> None:
        self._podman, self._numbers = podman, itertools.count(1)
        self._folder = tempfile.TemporaryDirectory(prefix="azure-ml-nodes-", ignore_cleanup_errors=True)
        self._running: set[PodmanRun] = set()

    async def pull(self, image: str, login: Json) -> str:
        return await pull(self._podman, image, login)

    async def run(
        self, job: str, command: str, environ: Mapping[str, str], image: str = "", docker_args: str = ""
    ) -> ContainerRun:
        number = next(self._numbers)
        options = [*environment(environ["SSL_CERT_FILE"], environ), *shlex.split(docker_args)]
        log = Path(self._folder.name) / f"{number}.log"
        run = await start(self._podman, f"job-{number}", image, ("sh", "-c", command), options, log)
        self._running.add(run)
        return run

    async def close(self) -> None:
        await end_all(self._running)
        self._folder.cleanup()
