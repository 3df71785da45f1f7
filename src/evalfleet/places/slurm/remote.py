"""A login node that is reached by SSH: commands, folders and lines to supervisors over one connection.

What runs on the cluster needs none of it: when the connection is cut, jobs go on. Where steps are forbidden,
a program of ours on the login node reads and writes the mailboxes there.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from evalfleet.channels.link import UNREADABLE, plain
from evalfleet.channels.mailbox import Mail, MailTransport, open_mail
from evalfleet.channels.ssh.channel import Bridge, SshChannel, SshTransport
from evalfleet.channels.ssh.host_home import HostHome, Verb
from evalfleet.channels.ssh.hosts import PooledConnection, SshHost, converse
from evalfleet.channels.ssh.target import Access, HostDown, HostKeyUnknown, HostLost, HostRefused, target
from evalfleet.channels.supervisor.files import job_name
from evalfleet.channels.supervisor.mailbox import OBJECT_CAP
from evalfleet.errors import ChannelError, PlaceError
from evalfleet.model import Isolation, decodable
from evalfleet.ports import Channel

from . import folders
from .login import MachineWay, Spoken

FOLDERS_S = 60.0
HANG_UP_S = 10.0
"""A command that hangs there is ended this long after we have given it up."""
BEGIN = "evalfleet-begin"
"""What comes before it was said by a login shell."""
NO_COMMAND = 127
LINE_END_S = 5.0
ANSWER_CAP = 2 * OBJECT_CAP
CLERK = """\
import sys
sys.path.insert(0, sys.argv[1])
from supervisor.mailbox import serve_folders
serve_folders()
"""
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


class MailAnswer(Struct, frozen=True):
    """What the program says that looks after mailboxes on a login node."""

    n: int
    made: bool = False
    content: str | None = None
    names: tuple[str, ...] = ()
    error: str = ""


class MailClerk(asyncio.Protocol):
    """A program on the login node that does what is asked with the mailboxes there: one for all machines."""

    def __init__(self, open_line: Callable[[asyncio.Protocol], Awaitable[asyncio.WriteTransport]]) -> None:
        self._open_line = open_line
        self._line: asyncio.WriteTransport | None = None
        self._opening = asyncio.Lock()
        self._asked: dict[int, asyncio.Future[MailAnswer]] = {}
        self._count = 0
        self._rest = bytearray()

    async def ask(self, op: str, **about: Any) -> MailAnswer:
        """Raises OSError: not now, perhaps later."""
        try:
            async with asyncio.timeout(FOLDERS_S):
                async with self._opening:
                    if self._line is None:
                        self._rest.clear()
                        self._line = await self._open_line(self)
                self._count = n = self._count + 1
                self._asked[n] = asyncio.get_running_loop().create_future()
                try:
                    self._line.write(json.dumps({"n": n, "op": op, **about}).encode() + b"\n")
                    answer = await self._asked[n]
                finally:
                    del self._asked[n]
        except (ChannelError, HostDown, HostLost, HostRefused, TimeoutError) as err:
            raise OSError(f"the login node: {err}") from err
        if answer.error:
            raise OSError(plain(answer.error))
        return answer

    def data_received(self, data: bytes) -> None:
        self._rest += data
        *lines, rest = self._rest.split(b"\n")
        self._rest = bytearray(rest)
        if len(rest) > ANSWER_CAP and self._line is not None:
            self._line.abort()  # no mail is so long
        for line in lines:
            try:
                answer = msgspec.json.decode(line, type=decodable(MailAnswer))
            except UNREADABLE:
                continue  # who asked is not answered, and asks again
            future = self._asked.get(answer.n)
            if future is not None and not future.done():
                future.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        self._line = None
        for future in self._asked.values():
            if not future.done():
                future.set_exception(OSError("the connection to the login node was lost"))

    def close(self) -> None:
        if self._line is not None:
            self._line.close()


class LoginMail(Mail):
    """A mailbox in a folder that the login node sees."""

    pace_s = (0.5, 2.0)

    def __init__(self, clerk: MailClerk, folder: str) -> None:
        self._clerk, self._folder = clerk, folder

    async def create(self, name: str, content: bytes) -> bool:
        coded = base64.b64encode(content).decode()
        return (await self._clerk.ask("create", folder=self._folder, name=name, content=coded)).made

    async def read(self, name: str) -> bytes | None:
        answer = await self._clerk.ask("read", folder=self._folder, name=name)
        try:
            return None if answer.content is None else base64.b64decode(answer.content)
        except ValueError:
            return b""  # which is no mail

    async def names(self, below: str) -> list[str]:
        return list((await self._clerk.ask("names", folder=self._folder, name=below)).names)

    async def remove(self, names: Sequence[str]) -> None:
        await self._clerk.ask("remove", folder=self._folder, names=list(names))


class LoginNode:
    """A login node of the cluster, and the connection to it."""

    def __init__(self, name: str, access: Access, place: str, home: str) -> None:
        self._host = SshHost(target(name), access, asyncio.Semaphore(1))
        self._place = place
        self._home = home
        self._clerk: MailClerk | None = None
        self._mail: set[MailTransport] = set()

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

    async def open_mail(
        self, folder: str, supervisor: str, key: str, protocol: asyncio.Protocol
    ) -> asyncio.WriteTransport:
        if self._clerk is None:
            argv = (self._host.access.python, "-I", "-S", "-c", CLERK, supervisor)

            async def open_line(clerk: asyncio.Protocol) -> asyncio.WriteTransport:
                return await self.open_step(argv, clerk, FOLDERS_S)

            self._clerk = MailClerk(open_line)
        line = await open_mail(LoginMail(self._clerk, folder), key, protocol)
        self._mail = {other for other in self._mail if not other.ended.is_set()} | {line}
        return line

    def channel(self, way: MachineWay, secrets: Mapping[str, str]) -> Channel:
        root = way.folder.rpartition("/")[0]
        home = LoginHome(self._host, self._home, root, way.supervisor)
        return LoginChannel(home, way.machine, way.fence, secrets, way.on_load, connect=way.dial)

    async def close(self) -> None:
        """Lines of mailboxes end with their channels, which are closed by now: that, too, is told."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINE_END_S):
                for line in self._mail:
                    await line.ended.wait()
        for line in self._mail:
            line.abort()
        if self._clerk is not None:
            self._clerk.close()
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
