"""What is behind the container of a job: a record, or a process with all that it begins."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from lab.cgroups import remove_group
from standins.cloud.words import Json

KILLED = 137


class ContainerRun(Protocol):
    """The container of a job, under way."""

    async def wait(self) -> int:
        """Its exit code."""
        ...

    def kill(self) -> None:
        """At once, with all that runs there."""
        ...

    def log(self) -> bytes:
        """What it has said."""
        ...


class Nodes(Protocol):
    """What runs containers."""

    async def pull(self, image: str, login: Json) -> str:
        """Fetch a container's image with this login to its registry. Returns why that cannot be done."""
        ...

    async def run(
        self, job: str, command: str, environ: Mapping[str, str], image: str = "", docker_args: str = ""
    ) -> ContainerRun: ...

    async def close(self) -> None: ...


class PaperRun:
    """A container that runs until somebody ends it."""

    def __init__(self) -> None:
        self._end: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.said = b""

    async def wait(self) -> int:
        return await asyncio.shield(self._end)

    def kill(self) -> None:
        self.end(KILLED)

    def end(self, code: int, said: bytes = b"") -> None:
        if not self._end.done():
            self.said = said
            self._end.set_result(code)

    def log(self) -> bytes:
        return self.said


class Paper:
    """Containers that are records. `runs`: by job."""

    def __init__(self) -> None:
        self.runs: dict[str, PaperRun] = {}

    async def pull(self, image: str, login: Json) -> str:
        return ""

    async def run(
        self, job: str, command: str, environ: Mapping[str, str], image: str = "", docker_args: str = ""
    ) -> ContainerRun:
        run = self.runs[job] = PaperRun()
        return run

    async def close(self) -> None:
        pass


class ProcessRun:
    """A container that is a process in a namespace of its own, which takes all others along."""

    def __init__(self, process: asyncio.subprocess.Process, folder: tempfile.TemporaryDirectory[str]) -> None:
        self._process, self._folder = process, folder
        self._said = b""

    async def wait(self) -> int:
        code = await self._process.wait()
        with suppress(OSError):
            self._said = (Path(self._folder.name) / "std_log.txt").read_bytes()
        await asyncio.to_thread(self._clear)
        return code

    def _clear(self) -> None:
        """Also control groups of a machine in it, which are gone with a real container."""
        for where, _, names in os.walk(self._folder.name):  # others may still be at work there
            written = Path(where, "groups").read_bytes() if "groups" in names else b"[]"
            for group in map(Path, json.loads(written)):
                if group.name.startswith("evalfleet-machine-"):
                    remove_group(group)
        self._folder.cleanup()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)

    def log(self) -> bytes:
        return self._said


class Processes:
    """Containers that are processes of this computer. `within`: what enters the network that they are in."""

    def __init__(
        self, path: str = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", within: Sequence[str] = ()
    ) -> None:
        self.path, self._within = path, tuple(within)
        self._running: set[ProcessRun] = set()

    @staticmethod
    def missing() -> str | None:
        """Why it cannot be used here; None if it can."""
        try:
            subprocess.run([*_own_namespace(), "true"], check=True, capture_output=True)
        except OSError as err:
            return f"no namespaces of processes can be made: {err}"
        except subprocess.CalledProcessError as err:
            return f"no namespaces of processes can be made: {err.stderr.decode().strip()}"
        return None

    async def pull(self, image: str, login: Json) -> str:
        return ""

    async def run(
        self, job: str, command: str, environ: Mapping[str, str], image: str = "", docker_args: str = ""
    ) -> ContainerRun:
        folder = tempfile.TemporaryDirectory(prefix="azure-ml-job-", ignore_cleanup_errors=True)
        with open(Path(folder.name) / "std_log.txt", "wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(*self._within, *_own_namespace(), "sh", "-c", command),
                cwd=folder.name,
                env={"PATH": self.path, "HOME": folder.name, "TMPDIR": folder.name, **environ},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        run = ProcessRun(process, folder)
        self._running.add(run)
        return run

    async def close(self) -> None:
        await end_all(self._running)


async def end_all(runs: Collection[ContainerRun]) -> None:
    for run in runs:
        run.kill()
    await asyncio.gather(*(run.wait() for run in runs))


def _own_namespace() -> list[str]:
    """Whoever kills it kills all that was begun in it, as with a container; so does the end of the thread by
    which it was begun."""
    mine = [] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user"]
    # becoming root of a user namespace would undo the signal, so that comes first
    with_parent = ["setpriv", "--pdeathsig", "KILL"]
    return [*mine, *with_parent, "unshare", "--pid", "--mount-proc", "--fork", "--kill-child=KILL"]
