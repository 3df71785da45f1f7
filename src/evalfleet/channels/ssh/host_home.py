"""What is asked of a host. The supervisor, one file named by its content, is brought there when needed."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import re
import secrets
import shlex
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

import msgspec
from msgspec import Struct

from evalfleet.channels.link import UNREADABLE, plain
from evalfleet.channels.program import archive
from evalfleet.channels.session import PROTOCOLS
from evalfleet.channels.supervisor import facts
from evalfleet.channels.supervisor.files import job_name
from evalfleet.channels.supervisor.machine import LEFT
from evalfleet.channels.supervisor.server import content_hash
from evalfleet.model import decodable
from evalfleet.ports import Fence

from .hosts import SshHost, converse
from .target import AS_POOL, HostDown, HostLost, HostRefused, NoMachine

NO_MACHINE, NO_SUPERVISOR, OLD_PYTHON = 96, 97, 98
NO_COMMAND = (126, 127)
ANSWER_S = 60.0
LISTING_S = 8.0
FACTS_S = 30.0
MOST_GPUS, MOST_HELD = 1000, 100
UNWRITABLE = (
    b"Read-only file system",
    b"Permission denied",
    b"No space left on device",
    b"Disk quota exceeded",
)

Verb = Literal["take", "elevate", "extend", "halt", "remove", "connect", "pack", "put"]

# one line, without quotes of its own: it must survive whatever shell the user has there
_RECEIVE = (
    "import sys;sys.path.pop(0);"
    "sys.version_info<(3,8) and (sys.stderr.write(sys.version),sys.exit(98));"
    "import os,hashlib;os.makedirs(sys.argv[4],0o700,True);os.chdir(sys.argv[4]);"
    "d=sys.stdin.buffer.read();hashlib.sha256(d).hexdigest()==sys.argv[1] or sys.exit(99);"
    "t=sys.argv[2]+str(os.getpid());f=os.open(t,os.O_WRONLY|os.O_CREAT|os.O_EXCL,0o600);"
    "os.fdopen(os.dup(f),sys.argv[3]).write(d);os.fsync(f);os.rename(t,sys.argv[2])"
)
_NO_SUDO = (
    """{ echo '{"error": "sudo", "detail": "the login is not root, and may not sudo without a password"}'; """
    "exit 0; }"
)
_TELL = (
    "import sys;sys.path.pop(0);"
    "sys.version_info<(3,8) and (sys.stderr.write(sys.version),sys.exit(98));"
    "exec(sys.stdin.read())"
)
# an attempt that is the same user may have changed the file since it was brought
_START = (
    "import sys;"
    "sys.version_info<(3,8) and (sys.stderr.write(sys.version),sys.exit(98));"
    "import hashlib;digest,file,verb=sys.argv[1:];"
    "hashlib.sha256(open(file,'rb').read()).hexdigest()==digest or sys.exit(97);"
    "sys.path.insert(0,file);import supervisor.verbs;sys.exit(supervisor.verbs.verb(verb))"
)
_LIST = (
    'for d in *; do [ -d "$d" ] || continue; s=pending; e=; '
    'if [ -d "$d/jobs" ] && [ ! -e "$d/deleting" ]; then s=up; fi; '
    'if [ -e "$d/expiry" ]; then read -r e <"$d/expiry"; fi; echo "$s $d $e"; done; '
    'for d in .left-*; do if [ -e "$d" ]; then echo "left $d "; fi; done; exit 0'
)


class Supervisor(Struct, frozen=True):
    """The supervisor as it is shipped: its bytes, their hash (its name on hosts), and its sources' hash."""

    data: bytes
    digest: str
    content: str


@functools.cache
def shipped() -> Supervisor:
    data = archive()
    return Supervisor(data, hashlib.sha256(data).hexdigest(), content_hash())


class HostAnswer(Struct, frozen=True):
    """What a verb answers. `error` is a word: taken, deleting, unknown, io, supervisor.

    `cloud_init`: running or done, in so many seconds; empty if there is none, or nobody asked.
    """

    error: str = ""
    detail: str = ""
    cloud_init: str = ""
    cloud_init_s: float = 0.0
    left: str = ""
    """The path of what could not be removed of a machine; nothing of it runs."""
    kept: dict[str, str] = {}
    """Of a lent host, what its owner finds again: names in its home, and hashes of what logins run."""


class HostHolder(Struct, frozen=True):
    """A machine that holds a host, as the host tells it."""

    home: str
    folder: str
    owner: str = ""
    """Who made it, and where: `user@computer:/home`; empty where an earlier version made it."""
    since_s: float = 0.0

    @property
    def is_pool(self) -> bool:
        return self.owner.endswith(AS_POOL)

    def told(self, own_home: str) -> str:
        """Whose it is and since when, for people."""
        machine = unquote(self.folder)
        run = machine.rsplit("-", 2)[0]
        owner = self.owner.removesuffix(AS_POOL)
        whose = "this home" if self.home == own_home else owner or f"home {self.home}"
        run = f"pool {run}" if self.is_pool else run
        since = datetime.now(UTC) - timedelta(seconds=max(0.0, self.since_s))
        return plain(f"{run} of {whose}, since {since.astimezone().isoformat(' ', 'minutes')}")


class HostFacts(Struct, frozen=True):
    """What a host has, as its own Python tells it, and who holds it."""

    user: str
    python: str
    cpus: float
    memory_gb: float
    disk_gb: float
    gpus: tuple[str, ...] = ()
    kvm: bool = False
    writable: bool = True
    held: tuple[HostHolder, ...] = ()


class SeenMachine(Struct, frozen=True):
    """A machine as its host shows it. `expires_at` is by the host's wall clock; 0: it has expired."""

    folder: str
    up: bool
    expires_at: float


class Expiry(Struct, frozen=True):
    """What a machine's file `expiry` tells that can be used elsewhere."""

    wall: float = 0.0


class HostHome(Struct, frozen=True):
    """A home's share of a host: ~/.evalfleet/<home>. Raises HostDown, HostLost, HostRefused, NoMachine."""

    host: SshHost
    home: str

    async def ask(self, verb: Verb, machine: str, **request: Any) -> HostAnswer:
        if verb == "take":
            request["key"] = secrets.token_hex(32)  # kept, unless the machine is there already and has one
        await self.host.connect()
        try:
            async with asyncio.timeout(ANSWER_S):
                said = await self._run(verb, machine, self.request(machine, request))
        except NoMachine as err:
            return HostAnswer("unknown", str(err))
        except TimeoutError:
            raise HostLost(f"{self.host.name}: no answer within {ANSWER_S:g} s") from None
        return self.answer(said)

    def answer(self, said: bytes) -> HostAnswer:
        """The last line: a login shell may have said something before."""
        line = said.strip().rpartition(b"\n")[2]
        try:
            answer = msgspec.json.decode(line, type=decodable(HostAnswer))
        except UNREADABLE:
            raise HostLost(f"{self.host.name}: it answered {line[:200]!r}") from None
        return msgspec.structs.replace(
            answer, error=plain(answer.error, 80), detail=plain(answer.detail, 1000), left=answer.left[:1000]
        )

    async def machines(self) -> list[SeenMachine]:
        """What is there. Nothing is made for it, and no Python is started."""
        script = f"cd && cd {self._folder} 2>/dev/null || exit 0; {_LIST}"
        await self.host.connect()
        try:
            async with asyncio.timeout(LISTING_S):
                async with self.host.process(_sh(script)) as process:
                    said, errors = await converse(process)
                    if process.exit_status is None:
                        raise HostDown(f"{self.host.name}: the connection was lost")
                    if process.exit_status != 0:  # the script itself always succeeds
                        raise self._no_shell(process.exit_status, errors or said)
        except TimeoutError:
            raise HostDown(f"{self.host.name} does not answer: nothing within {LISTING_S:g} s") from None
        return self.machines_in(said)

    def machines_in(self, said: bytes) -> list[SeenMachine]:
        """The machines that a listing shows; a login shell may have said something, too."""
        lines = [line.split(b" ", 2) for line in said.splitlines()]
        return [_sight(*line) for line in lines if len(line) == 3 and line[0] in (b"up", b"pending", b"left")]

    async def facts(self) -> HostFacts:
        """What the host has. Nothing is put there."""
        python = shlex.quote(self.host.access.python)
        script = f"cd && exec {python} -E -S -c {shlex.quote(_TELL)}"
        await self.host.connect()
        try:
            async with asyncio.timeout(FACTS_S), self.host.process(_sh(script)) as process:
                said, errors = await converse(process, Path(facts.__file__).read_bytes())
                status = process.exit_status
        except TimeoutError:
            raise HostDown(f"{self.host.name} does not answer: nothing within {FACTS_S:g} s") from None
        self.check(status, errors)
        return self.facts_in(said)

    def facts_in(self, said: bytes) -> HostFacts:
        """The last line: a login shell may have said something before. Raises HostLost."""
        line = said.strip().rpartition(b"\n")[2]
        try:
            told = msgspec.json.decode(line, type=decodable(HostFacts))
        except UNREADABLE:
            raise HostLost(f"{self.host.name}: it answered {line[:200]!r}") from None
        gpus = tuple(plain(name, 80) for name in told.gpus[:MOST_GPUS])
        user, python, held = plain(told.user, 80), plain(told.python, 80), told.held[:MOST_HELD]
        return msgspec.structs.replace(told, user=user, python=python, gpus=gpus, held=held)

    def _no_shell(self, status: int, said: bytes) -> HostRefused:
        words = plain(said.decode("utf-8", "replace").strip()[-200:]) or "silence"
        what, detail = "its login shell runs no commands", f"exit code {status}: {words}"
        return HostRefused(self.host.name, what, "give the user a shell there", detail, "login")

    def request(self, machine: str, more: dict[str, Any]) -> bytes:
        return msgspec.json.encode({"home": self.home, "folder": job_name(machine), **more}) + b"\n"

    def connect_request(self, machine: str, fence: Fence) -> bytes:
        # who only looks on takes the supervisor as it is
        ours = None if fence.looks_on else shipped().content
        about = {"run": fence.run, "epoch": fence.epoch, "protocols": PROTOCOLS, "hash": ours}
        return self.request(machine, about)

    def command(self, verb: Verb, machine: str) -> str:
        """Runs a verb of the supervisor's, from the user's home, if its file is the one that was brought."""
        file = f"{self._folder}/{self._file}"
        python = shlex.quote(self.host.access.python)
        missing = f"exit {NO_SUPERVISOR}"
        if verb != "take":  # a machine that is gone needs no supervisor, which nobody would remove
            missing = f"{{ test -d {self._folder}/{job_name(machine)} && {missing}; exit {NO_MACHINE}; }}"
        folder = f"{self._folder}/{job_name(machine)}"
        if verb == "elevate":
            by = f"sudo -n true 2>/dev/null || {_NO_SUDO}; s='sudo -n --'"
        else:  # a machine that is not the login's own is root's, by sudo
            by = f"s=; if test -d {folder} && ! test -r {folder}; then s='sudo -n --'; fi"
        # by their whole names: sudo has a PATH of its own, and Python 3.8 finds modules in its file no more
        # once the directory has changed
        code = f"{shlex.quote(_START)} {shipped().digest}"
        run = f'p=$(command -v {python}) || p={python}; exec $s "$p" -I -S -c {code} "$PWD/{file}" {verb}'
        return _sh(f"cd && test -f {file} || {missing}; {by}; {run}")

    async def bring_supervisor(self) -> None:
        """Put the supervisor's file there, whole or not at all."""
        ours = shipped()
        python, code = shlex.quote(self.host.access.python), shlex.quote(_RECEIVE)
        script = (  # -E, not -I: an old Python shall be able to tell what it is
            f"cd && umask 077 && exec {python} -E -S -c {code} {ours.digest} {self._file} wb {self._folder}"
        )
        async with self.host.process(_sh(script)) as process:
            _, errors = await converse(process, ours.data)
            unwritable = [word for word in UNWRITABLE if word in (errors or b"")]
            if process.exit_status and unwritable:
                what = f"nothing can be written to ~/{self._folder} there ({unwritable[0].decode()})"
                raise HostRefused(self.host.name, what, "mend that, or take the host out of `hosts`")
            self.check(process.exit_status, errors)

    def check(self, status: int | None, errors: bytes | None) -> None:
        """Raise what an exit status means, if it is not 0."""
        said = (errors or b"").decode("utf-8", "replace").strip().splitlines()
        last = plain(said[-1], 300) if said else ""
        name, python = self.host.name, self.host.access.python
        if status in NO_COMMAND:
            raise HostRefused(
                name, f"it has no {python}", "install Python 3.8 or later there, or set `python`", last
            )
        if status == OLD_PYTHON:
            what = f"its {python} is {plain(' '.join(said), 80)}"
            remedy = "evalfleet needs 3.8 or later there: install one and set `python`"
            raise HostRefused(name, what, remedy)
        if status == NO_MACHINE:
            raise NoMachine(f"{name} has no such machine or job of ours")
        if status is None:
            raise HostLost(f"{name}: the connection was lost")
        if status != 0:
            raise HostLost(f"{name}: what we ran there ended with {status}: {last}")

    async def _run(self, verb: Verb, machine: str, request: bytes) -> bytes:
        for last in (False, False, True):  # the last machine of ours may be going at the same time
            async with self.host.process(self.command(verb, machine)) as process:
                said, errors = await converse(process, request)
                status = process.exit_status
            if status == NO_SUPERVISOR and not last:
                await self.bring_supervisor()
                continue
            self.check(status, errors)
            return said
        raise HostLost(f"{self.host.name}: the supervisor went away while it was brought")

    def path_of(self, machine: str, told: str = "") -> str:
        """Where a machine's folder is, or what the host tells is left of it, seen from the user's home."""
        folder = job_name(machine)
        last = told.rpartition("/")[2]
        aside = re.fullmatch(re.escape(f"{LEFT}{folder}-") + "[0-9]{1,20}", last)
        return f"{self._folder}/{last if aside else folder}"

    @property
    def _folder(self) -> str:
        return f".evalfleet/{self.home}"

    @property
    def _file(self) -> str:
        return f"supervisor-{shipped().digest[:16]}.pyz"


def _sight(state: bytes, folder: bytes, expiry: bytes) -> SeenMachine:
    try:
        expires_at = msgspec.json.decode(expiry, type=decodable(Expiry)).wall
    except UNREADABLE:
        expires_at = 0.0
    return SeenMachine(folder.decode("utf-8", "replace"), state == b"up", expires_at)


def _sh(script: str) -> str:
    """The command for any login shell: it starts POSIX's for the script."""
    return f"exec sh -c {shlex.quote(script)}"
