"""A login node that is reached by SSH: commands, folders and lines to supervisors over one connection.

What runs on the cluster needs none of it: when the connection is cut, jobs go on.
"""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evalfleet.channels.link import plain
from evalfleet.channels.ssh.channel import Bridge, SshChannel, SshTransport
from evalfleet.channels.ssh.host_home import HostHome, Verb
from evalfleet.channels.ssh.hosts import PooledConnection, SshHost, converse
from evalfleet.channels.ssh.target import Access, HostDown, HostKeyUnknown, HostLost, HostRefused, target
from evalfleet.channels.supervisor.files import job_name
from evalfleet.errors import PlaceError
from evalfleet.model import Isolation
from evalfleet.ports import Channel

from . import folders
from .login import MachineWay, Spoken

FOLDERS_S = 60.0
HANG_UP_S = 10.0
"""A command that hangs there is ended this long after we have given it up."""
BEGIN = "evalfleet-begin"
"""What comes before it was said by a login shell."""
NO_COMMAND = 127
_RUN = "import sys;n=int(sys.stdin.readline());exec(compile(sys.stdin.read(n),'folders','exec'))"
_PROFILE = "for f in /etc/profile ~/.profile; do [ ! -r $f ] || . $f; done >/dev/null 2>&1"
"""Where Slurm's commands are not in the PATH that SSH gives, a login's profile may add them."""


class LoginHome(HostHome, frozen=True):
    """A home's machines as a login node sees them, for the files that are too large for messages."""

    root: str
    supervisor: str

    def request(self, machine: str, more: dict[str, Any]) -> bytes:
        return super().request(machine, {**more, "folder": f"{self.root}/{job_name(machine)}"})

    def command(self, verb: Verb, machine: str) -> str:
        argv = (self.host.access.python, "-I", "-S", self.supervisor, verb)
        return _sh(f"exec {shlex.join(argv)}")


class LoginChannel(SshChannel):
    """A machine whose supervisor is dialled through a step, and whose files are seen by the login node."""

    async def _elevate(self, wanted: Isolation) -> str:
        return "the supervisor is not root"


class StepLine(SshTransport):
    """One of many lines over a connection: when this one is dropped, the others stay."""

    def abort(self) -> None:
        if not self._session.lost:
            self._session.channel.abort()


class LoginNode:
    """A login node of the cluster, and the connection to it."""

    def __init__(self, name: str, access: Access, place: str, home: str) -> None:
        self._host = SshHost(target(name), access, asyncio.Semaphore(1))
        self._place = place
        self._home = home

    async def unknown_key(self) -> HostKeyUnknown | None:
        """What keeps us from the node, if that is a key which nobody has confirmed."""
        try:
            await self._host.connect()
        except HostKeyUnknown as err:
            return err
        except (HostDown, HostRefused):
            return None
        return None

    async def run(self, argv: Sequence[str], given: str, answer_s: float) -> Spoken:
        command, words = shlex.quote(argv[0]), shlex.join(argv)
        until = f"timeout -k 5 {answer_s + HANG_UP_S:.0f}"
        script = f"command -v {command} >/dev/null 2>&1 || {{ {_PROFILE}; }}; echo {BEGIN}"
        spoken = await self._said(f"{script}; exec {until} {words}", given.encode(), answer_s)
        if spoken.code == NO_COMMAND:
            raise PlaceError(
                f"{self._host.name} has no {argv[0]}: name a login node of the cluster in `login` of the "
                "place, or see to it that the login finds Slurm's commands",
                transient=False,
                scope="place",
            )
        return spoken

    async def perform(self, request: Mapping[str, Any]) -> dict[str, Any]:
        source = Path(folders.__file__).read_text()
        given = f"{len(source)}\n{source}{json.dumps(request)}\n"
        argv = (self._host.access.python, "-I", "-S", "-c", _RUN)
        script = f"echo {BEGIN}; exec {shlex.join(argv)}"
        try:
            spoken = await self._said(script, given.encode(), FOLDERS_S)
        except TimeoutError as err:
            raise PlaceError(
                f"{self._host.name}: folders have not answered for {FOLDERS_S:g} s; does `ls` answer there?",
                transient=True,
                scope="place",
            ) from err
        try:
            answer: dict[str, Any] | None = json.loads(spoken.out)
            if not isinstance(answer, dict):
                raise ValueError
        except (ValueError, RecursionError):
            words = plain(spoken.errors.decode("utf-8", "replace").strip()[-300:]) or "it says nothing"
            raise PlaceError(
                f"{self._host.name}: {self._host.access.python} does not work there ({words}); evalfleet "
                "needs Python 3.8 or later: set `python` of the place",
                transient=spoken.code == 0,
                scope="place",
            ) from None
        return answer

    async def _said(self, script: str, given: bytes, answer_s: float) -> Spoken:
        try:
            async with asyncio.timeout(answer_s), self._host.process(_sh(script)) as process:
                out, errors = await converse(process, given)
                code = process.exit_status
        except HostRefused as err:
            hint = ""
            if isinstance(err, HostKeyUnknown):
                hint = f"; `evalfleet doctor {self._place} --trust` shows the fingerprint and writes it down"
            raise PlaceError(f"{err}{hint}", transient=False, scope="place") from err
        except (HostDown, HostLost) as err:
            raise PlaceError(f"the login node: {err}", transient=True, scope="place") from err
        if code is None:
            raise PlaceError(
                f"the login node: {self._host.name}: the connection was lost", transient=True, scope="place"
            )
        return Spoken(code, out.partition(f"{BEGIN}\n".encode())[2], errors)

    async def open_step(
        self, argv: Sequence[str], protocol: asyncio.Protocol, patience_s: float
    ) -> asyncio.WriteTransport:
        command = _sh(f"command -v srun >/dev/null 2>&1 || {{ {_PROFILE}; }}; exec {shlex.join(argv)}")
        wire, bridge = await self._host.session(lambda: Bridge(b""), command)
        _count_until_lost(wire, bridge)
        line = StepLine(self._host, wire, bridge)
        try:
            async with asyncio.timeout(patience_s):
                if await bridge.ready:
                    bridge.carry_for(protocol)
                    return line
        except BaseException:
            line.abort()
            raise
        if bridge.flood:
            raise self._host.flooded()
        said = plain(bridge.errors.decode("utf-8", "replace").strip()) or "it ended without a word"
        raise OSError(f"{argv[0]}: {said}")

    def channel(self, way: MachineWay, secrets: Mapping[str, str]) -> Channel:
        root = way.folder.rpartition("/")[0]
        home = LoginHome(self._host, self._home, root, way.supervisor)
        return LoginChannel(home, way.machine, way.fence, secrets, way.on_load, connect=way.dial)

    async def close(self) -> None:
        await self._host.close()


def _count_until_lost(wire: PooledConnection, bridge: Bridge) -> None:
    def release() -> None:
        wire.used -= 1

    if bridge.lost:
        release()
    else:
        bridge.at_end.append(release)


def _sh(script: str) -> str:
    """For any login shell: POSIX's is started for the script."""
    return f"exec sh -c {shlex.quote(script)}"
