"""What is behind the nodes of a pool: records, or hosts of the lab whose tasks are real processes."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import shlex
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Protocol

from lab import LabError
from lab.network import GATEWAY
from standins.azure_ml.nodes import ContainerRun, Processes
from standins.cloud.hosts import Hosts
from standins.cloud.machines import Guest
from standins.cloud.standin import bound
from standins.cloud.words import Json

ROOT = PurePosixPath("/mnt/batch/tasks")
KILLED = 137


class TaskRun(Protocol):
    """A task under way on a node."""

    async def wait(self) -> int:
        """Its exit code."""
        ...

    async def kill(self) -> None: ...


class Nodes(Protocol):
    """What nodes are made of."""

    async def create(self, node: str) -> str:
        """Boot it; returns its private address."""
        ...

    async def destroy(self, node: str) -> None: ...

    async def reboot(self, node: str) -> None: ...

    async def run(
        self, node: str, folder: str, argv: Sequence[str], env: dict[str, str], admin: bool, container: Json
    ) -> TaskRun:
        """Start a task in its folder, with standard output and errors in files there. `container`: what it is
        to be, if it is one."""
        ...

    async def pull(self, image: str, login: Json) -> str:
        """Fetch a container's image with this login to its registry. Returns why that cannot be done."""
        ...

    async def files(self, node: str, folder: str) -> list[str]:
        """The files below a task's folder."""
        ...

    async def read(self, node: str, folder: str, path: str) -> bytes | None: ...

    async def open_port(self, port: int, node: str, backend: int, rules: Sequence[dict[str, object]]) -> str:
        """Lead this port to the node's; returns the public address."""
        ...

    def close_port(self, port: int) -> None: ...

    async def close(self) -> None: ...


class PaperRun:
    """A task that runs until somebody ends it."""

    def __init__(self) -> None:
        self._end: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def wait(self) -> int:
        return await asyncio.shield(self._end)

    async def kill(self) -> None:
        self.end(KILLED)

    def end(self, code: int) -> None:
        if not self._end.done():
            self._end.set_result(code)


class Paper:
    """Nodes that are records. `contents`: what the files of tasks hold, by path below a task's folder."""

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}
        self.runs: dict[str, PaperRun] = {}
        """By folder."""
        self._made = 0

    async def create(self, node: str) -> str:
        self._made += 1
        return str(ipaddress.ip_address("10.0.0.3") + self._made)

    async def destroy(self, node: str) -> None:
        pass

    async def reboot(self, node: str) -> None:
        pass

    async def run(
        self, node: str, folder: str, argv: Sequence[str], env: dict[str, str], admin: bool, container: Json
    ) -> TaskRun:
        run = self.runs[folder] = PaperRun()
        if "startup" in folder:
            run.end(0)
        return run

    async def pull(self, image: str, login: Json) -> str:
        return ""

    async def files(self, node: str, folder: str) -> list[str]:
        return sorted({"stdout.txt", "stderr.txt", *self.contents})

    async def read(self, node: str, folder: str, path: str) -> bytes | None:
        return self.contents.get(path, b"" if path in ("stdout.txt", "stderr.txt") else None)

    async def open_port(self, port: int, node: str, backend: int, rules: Sequence[dict[str, object]]) -> str:
        return "203.0.113.9"

    def close_port(self, port: int) -> None:
        pass

    async def close(self) -> None:
        pass


class ProcessRun:
    """A task that is a process on a host of the lab."""

    def __init__(self, process: asyncio.subprocess.Process, lab: LabNodes, node: str, folder: str) -> None:
        self._process, self._lab, self._node, self._folder = process, lab, node, folder

    async def wait(self) -> int:
        return await self._process.wait()

    async def kill(self) -> None:
        """The whole tree: its session, and those that it has begun below its folder's mark."""
        script = 'kill -9 $(grep -lsa "AZ_BATCH_TASK_DIR=$1" /proc/[0-9]*/environ | cut -d/ -f3)'
        await self._lab.execute(self._node, ["sh", "-c", script, "kill", self._folder])
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


class JailedRun:
    """A task that is a process of this computer, in a namespace of its own."""

    def __init__(self, run: ContainerRun) -> None:
        self._run = run
        self._end = asyncio.ensure_future(run.wait())

    async def wait(self) -> int:
        return await asyncio.shield(self._end)

    async def kill(self) -> None:
        self._run.kill()
        await self.wait()

    def said(self) -> bytes:
        return self._run.log()


class ProcessNodes:
    """Nodes of which there is nothing but their tasks, which are processes of this computer: for pilots that
    are reached by mailboxes. `environ`: what tasks find besides what Batch tells them. `within`: what enters
    the network that they are in."""

    def __init__(self, within: Sequence[str] = ()) -> None:
        self.environ: dict[str, str] = {}
        self._processes = Processes(within=within)
        self._runs: dict[str, dict[str, JailedRun]] = {}
        """By node and folder."""

    async def create(self, node: str) -> str:
        self._runs[node] = {}
        return "10.0.0.4"

    async def destroy(self, node: str) -> None:
        await self.reboot(node)
        self._runs.pop(node, None)

    async def reboot(self, node: str) -> None:
        for run in self._runs.get(node, {}).values():
            await run.kill()

    async def run(
        self, node: str, folder: str, argv: Sequence[str], env: dict[str, str], admin: bool, container: Json
    ) -> TaskRun:
        run = JailedRun(await self._processes.run(folder, shlex.join(argv), {**self.environ, **env}))
        self._runs[node][folder] = run
        return run

    async def pull(self, image: str, login: Json) -> str:
        return ""

    async def files(self, node: str, folder: str) -> list[str]:
        return ["stdout.txt", "stderr.txt"]

    async def read(self, node: str, folder: str, path: str) -> bytes | None:
        run = self._runs.get(node, {}).get(folder)
        return run.said() if run is not None and path == "stderr.txt" else None

    async def open_port(self, port: int, node: str, backend: int, rules: Sequence[dict[str, object]]) -> str:
        raise AssertionError("nothing leads to these nodes")

    def close_port(self, port: int) -> None:
        pass

    async def close(self) -> None:
        for node in list(self._runs):
            await self.destroy(node)
        await self._processes.close()


class LabNodes:
    """Nodes that are hosts of the lab."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self.image = ""
        """What the disks of nodes are copies of, if it is one of the hosts' images."""
        self._ports: dict[int, asyncio.Server] = {}
        self._lines: set[asyncio.Task[None]] = set()

    async def create(self, node: str) -> str:
        address = self._hosts.new_address(set())
        await self._hosts.create(
            Guest(node, node.replace("_", "-"), address, "_azbatch", (), b"", True, self.image)
        )
        return address

    async def destroy(self, node: str) -> None:
        await self._hosts.destroy(node)

    async def reboot(self, node: str) -> None:
        host = self._hosts.host(node)
        await self._hosts.power_off(node)
        await self._hosts.power_on(node, host.address, fresh_temp_disk=False)

    def _enter(self, node: str) -> list[str]:
        pid = self._hosts.host(node)._need_power()
        return ["nsenter", f"--target={pid}", "--all", "--root", "--wd", "--"]

    async def execute(self, node: str, argv: Sequence[str]) -> tuple[int, bytes]:
        try:
            enter = self._enter(node)
        except (KeyError, LabError):
            return 1, b""  # its host is off, or is just being removed
        process = await asyncio.create_subprocess_exec(
            *enter,
            *argv,
            stdin=-3,
            stdout=-1,
            stderr=-3,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
        )
        said, _ = await process.communicate()
        return process.returncode or 0, said

    async def run(
        self, node: str, folder: str, argv: Sequence[str], env: dict[str, str], admin: bool, container: Json
    ) -> TaskRun:
        by = "" if admin else "setpriv --reuid=65534 --regid=65534 --clear-groups "
        script = (
            f"mkdir -p {folder}/wd && cd {folder}/wd && exec setsid --wait {by}{shlex.join(argv)} "
            f">>{folder}/stdout.txt 2>>{folder}/stderr.txt </dev/null"
        )
        environ = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", **env}
        process = await asyncio.create_subprocess_exec(
            *self._enter(node), "sh", "-c", script, folder, stdin=-3, stdout=-3, stderr=-3, env=environ
        )
        return ProcessRun(process, self, node, folder)

    async def pull(self, image: str, login: Json) -> str:
        return ""

    async def files(self, node: str, folder: str) -> list[str]:
        _, said = await self.execute(node, ["sh", "-c", 'cd "$1" && find . -type f', "files", folder])
        return [line.decode().removeprefix("./") for line in said.splitlines()]

    async def read(self, node: str, folder: str, path: str) -> bytes | None:
        code, said = await self.execute(node, ["cat", f"{folder}/{path}"])
        return said if code == 0 else None

    # -- the load balancer -----------------------------------------------------------------------

    async def open_port(self, port: int, node: str, backend: int, rules: Sequence[dict[str, object]]) -> str:
        inside = self._hosts.host(node).address
        sock = bound(self._hosts.lab.socket(), GATEWAY, port)

        async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if not lets_in(rules, writer.get_extra_info("peername")[0]):
                writer.transport.abort()
                return
            await self._carry(reader, writer, inside, backend)

        self._ports[port] = await asyncio.start_server(meet, sock=sock)
        return GATEWAY

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str, port: int
    ) -> None:
        line = self._hosts.lab.socket()
        line.setblocking(False)
        try:
            await asyncio.wait_for(asyncio.get_running_loop().sock_connect(line, (address, port)), 10)
            there, back = await asyncio.open_connection(sock=line)
        except (OSError, TimeoutError):
            line.close()
            writer.transport.abort()
            return
        pumps = [asyncio.create_task(_pump(reader, back)), asyncio.create_task(_pump(there, writer))]
        self._lines.update(pumps)
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
                self._lines.discard(pump)
            for end in (writer, back):
                end.transport.abort()

    def close_port(self, port: int) -> None:
        if (server := self._ports.pop(port, None)) is not None:
            server.close()

    async def close(self) -> None:
        for port in list(self._ports):
            self.close_port(port)
        for line in list(self._lines):
            line.cancel()


def lets_in(rules: Sequence[dict[str, object]], peer: str) -> bool:
    """By the rules of a security group, the lowest priority first; without rules everybody is let in."""
    for rule in sorted(rules, key=lambda rule: int(str(rule["priority"]))):
        source = str(rule["sourceAddressPrefix"])
        network = "0.0.0.0/0" if source in ("*", "Internet") else source
        if ipaddress.ip_address(peer) in ipaddress.ip_network(network, strict=False):
            return rule["access"] == "allow"
    return not rules


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
