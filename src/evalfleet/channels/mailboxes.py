"""Mailboxes for the machines of a service that nobody can connect to, in the service's own storage.

A place has them in a few lines. `boxes` are those of a kind of storage:

    pilot = await boxes.make(machine, life_s, queue_s)         # in `create`: what the job runs, with what
    boxes.channel(machine.id, fence, secrets, on_load)         # in `channel`
    marks = await boxes.marks(machine, known)                  # in `list`: has the pilot begun, and where?
    await boxes.remove(machine)                                # in `delete`, once the job has ended
    for box in await boxes.all(): ...                          # in `belongings`; `reap`: remove_kept(box)

The job runs `pilot.argv` with `pilot.environ`, which holds a token for this mailbox alone: it may read what
is there and create what is not, and nothing else. The node needs Python 3.8 and HTTPS to the storage.
Whatever the service starts a second time leaves at once, with exit code RESTARTED: the first has read mail.
Beside the mail there are marks, each written once and sealed as mail is: what both ends must know of the
machine's life, also when nobody is there to be told.
A shell around `pilot.argv` must `exec` it: attempts of the same user could read the shell's environment.
"""

from __future__ import annotations

import abc
import contextlib
import hashlib
import hmac
import json
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from evalfleet.errors import PlaceError
from evalfleet.model import MachineId
from evalfleet.ports import Fence

from .link import plain, seconds_told
from .mail_channel import MailChannel
from .mailbox import Mail
from .program import archive
from .session import OnLoad
from .supervisor.files import make_key
from .supervisor.mailbox import NoMail, opened, sealed
from .supervisor.pilot import ALLOCATED, END, MARKS, RESTARTED, START, STOP

MAIL_SILENT_S, MAIL_LOST_S = 60.0, 900.0
"""For `Offer.silent_s` and `lost_s`: storage may be away for ten minutes. Whether a machine still lives, its
service tells meanwhile."""
VARIABLE = "EVALFLEET_MAILBOX"
WAY = f"{MARKS}/way"
"""Where a job takes its orders from, if it is told no more than that."""
KEYS = ".mailboxes"
"""The folder of a home that keeps what all its machines' keys are made of."""
CONCEAL = """\
import os, sys
read, write = os.pipe()
os.write(write, os.environ.pop("EVALFLEET_MAILBOX").encode())
os.close(write)
os.set_inheritable(read, True)
os.execv(sys.executable, [sys.executable, "-c", sys.argv[1], str(read)])
"""
"""Goes on with another program, which reads what was in the variable: attempts can look into the environment
that a process of the same user was started with, and into that of its children."""
BOOT = """\
import atexit, hashlib, json, os, shutil, signal, sys, tempfile, time
from pathlib import Path
from urllib import error, request
def ask(method, url, headers, data=None):
    until = time.monotonic() + 600
    while True:
        try:
            asked = request.Request(url, data, headers or {}, method=method)
            with request.urlopen(asked, timeout=60) as answer:
                return answer.status, answer.read()
        except error.HTTPError as err:
            err.close()
            if err.code < 500 and err.code not in (408, 429) or time.monotonic() > until:
                return err.code, b""
        except OSError as err:
            if time.monotonic() > until:
                sys.exit("the mailbox does not answer: " + type(err).__name__)
        time.sleep(5)
with open(int(sys.argv[1]), "rb") as pipe:
    box = json.load(pipe)
if box.get("tidy"):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    os.chdir(tempfile.mkdtemp(prefix="evalfleet-"))
    atexit.register(shutil.rmtree, os.getcwd(), True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
if "take" in box:
    take, headers, absent = box["take"], box["headers"], box.get("absent", 404)
    urls = take if isinstance(take, dict) else dict.fromkeys(("GET", "DELETE", "PUT"), take)
    status, content = ask("GET", urls["GET"], headers)
    if status not in (200, absent):
        sys.exit("the mailbox refuses us: %d" % status)
    if status == absent or not content or ask("DELETE", urls["DELETE"], headers)[0] not in (200, 202, 204):
        ask("PUT", urls["PUT"], headers, b"")
        sys.stderr.write("the service has run this job anew: what ran before is lost\\n")
        sys.exit(RESTARTED)
    box = json.loads(content)
way = box["way"]
query = way.get("query")
url = box.get("from") or way["url"] + "/" + box["program"] + ("?" + query if query else "")
status, program = ask("GET", url, way.get("headers"))
if status != 200:
    sys.exit("the mailbox refuses us: %d" % status)
if hashlib.sha256(program).hexdigest() != box["program"].rpartition("-")[2]:
    sys.exit("the supervisor in the mailbox is not the one that was sent")
folder = Path("evalfleet").absolute()
folder.mkdir(0o700, exist_ok=True)
(folder / "supervisor.pyz").write_bytes(program)
sys.path.insert(0, str(folder / "supervisor.pyz"))
from supervisor.pilot import main
sys.exit(main(box, folder / "machine"))
""".replace("RESTARTED", str(RESTARTED))
"""The job's own program: it fetches the supervisor out of the mailbox, and becomes the pilot. Where it was
told no more than an address to `take` its orders from, only the first start finds them; a later one leaves a
mark. `take` may be an address for each method, `absent` is what the store answers where nothing is, `from` is
where the supervisor is, and with `tidy` all is in a new folder that goes with the pilot."""


class MailPilot(NamedTuple):
    """What the job of a machine runs on its node. `environ` is secret, and only for this command."""

    argv: tuple[str, ...]
    environ: Mapping[str, str]


class PilotStart(NamedTuple):
    """That a pilot has begun."""

    start: str
    """The name of this start."""
    node: str
    at: float
    """Seconds since 1970, by the node's clock."""


class PilotEnd(NamedTuple):
    """That a pilot has ended by itself, or was ended and had time to say so."""

    why: str
    """`expired`, `evicted`, `stopped`, or what went wrong."""
    code: int
    """The job's exit code."""
    ran_s: float
    at: float
    """Seconds since 1970, by the node's clock."""


class PilotMarks(NamedTuple):
    """What is written down of a machine's life in its mailbox."""

    allocated: float | None = None
    """When its node was had, in seconds since 1970, as the first that saw it wrote down."""
    start: PilotStart | None = None
    end: PilotEnd | None = None
    restarted: bool = False
    """Has the service run its job anew?"""
    stop: bool = False
    """Has somebody asked the pilot to leave?"""


UNMARKED = PilotMarks()


class KeptMailbox(NamedTuple):
    """A mailbox that exists, by what is written with it."""

    machine: MachineId
    home: str
    owner: str
    expires_at: float | None
    """When its machine is over at the latest, in seconds since 1970."""
    name: str
    """What the storage calls it."""


class Mailboxes(abc.ABC):
    """The mailboxes of a home's machines. All calls raise PlaceError.

    The keys of machines are made of one that the home keeps: whoever has the home can read all of them.
    """

    def __init__(self, home: Path) -> None:
        self._folder = home / KEYS

    async def key(self, machine: MachineId) -> str:
        """The machine's key: it seals the mail, and never is in the storage."""
        self._folder.mkdir(0o700, exist_ok=True, parents=True)
        ours = make_key(str(self._folder))
        return hmac.new(bytes.fromhex(ours), machine.encode(), hashlib.sha256).hexdigest()

    async def make(
        self, machine: MachineId, life_s: float, queue_s: float, python: str = "python3", *, kvm: bool = False
    ) -> MailPilot:
        """The machine's mailbox, and what its job must run: for `life_s`, after `queue_s` at the latest.

        `kvm`: it leaves, with exit code NO_KVM, where no virtual machine can be made. May be repeated; each
        time there is another token.
        """
        way = await self._open(machine, life_s + queue_s)
        program = archive()
        name = f"program-{hashlib.sha256(program).hexdigest()}"
        with _as_transient(machine):
            await self.mail(machine).create(name, program)
        own = await self.key(machine)
        box = {"way": way, "key": own, "life_s": life_s, "program": name, "kvm": kvm}
        told = await self._hand_over(machine, box, life_s + queue_s)
        return MailPilot((python, "-c", CONCEAL, BOOT), {VARIABLE: json.dumps(told, separators=(",", ":"))})

    async def _hand_over(
        self, machine: MachineId, box: Mapping[str, Any], seconds: float
    ) -> Mapping[str, Any]:
        """What the job's variable holds: all of it, where none but the job can read that."""
        return box

    def channel(
        self, machine: MachineId, fence: Fence, secrets: Mapping[str, str], on_load: OnLoad | None = None
    ) -> MailChannel:
        async def own() -> str:
            try:
                return await self.key(machine)
            except PlaceError as err:
                raise OSError(str(err)) from err

        return MailChannel(self.mail(machine), own, fence, secrets, on_load)

    # -- marks -----------------------------------------------------------------------------------------

    async def marks(self, machine: MachineId, known: PilotMarks = UNMARKED) -> PilotMarks:
        """What is written down by now: what is `known`, which was written once, is not read again."""
        with _as_transient(machine):
            names = set(await self.mail(machine).names(MARKS))
        allocated, start, end = known.allocated, known.start, known.end
        if allocated is None and ALLOCATED in names:
            allocated = _allocated(await self._mark(machine, ALLOCATED))
        if start is None and START in names:
            start = _start(await self._mark(machine, START))
        if end is None and END in names:
            end = _end(await self._mark(machine, END))
        # the first start has taken its orders away: what is there again was left by a second one
        restarted = known.restarted or (WAY in names and start is not None)
        return PilotMarks(allocated, start, end, restarted, known.stop or STOP in names)

    async def mark_allocated(self, machine: MachineId, at: float) -> float:
        """Write down when its node was had. Of all that look, the first one's word counts: it is returned."""
        if await self._tell(machine, ALLOCATED, {"at": at}):
            return at
        first = _allocated(await self._mark(machine, ALLOCATED))
        return at if first is None else first

    async def ask_to_stop(self, machine: MachineId) -> None:
        """Have the pilot leave, whatever its service does. Nothing, if there is no mailbox."""
        await self._tell(machine, STOP, {})

    async def _tell(self, machine: MachineId, name: str, said: dict[str, Any]) -> bool:
        """False if it was said before, or there is no mailbox."""
        own = await self.key(machine)
        with _as_transient(machine):
            try:
                return await self.mail(machine).create(name, sealed(own, name, said))
            except FileNotFoundError:
                return False

    async def _mark(self, machine: MachineId, name: str) -> dict[str, Any]:
        """Empty if it is not there, or somebody else's."""
        own = await self.key(machine)
        with _as_transient(machine):
            content = await self.mail(machine).read(name)
        try:
            return {} if content is None else opened(own, name, content)[0]
        except NoMail:
            return {}

    # -- what each kind of storage does in its own way ---------------------------------------------------

    @abc.abstractmethod
    async def _open(self, machine: MachineId, seconds: float) -> Mapping[str, Any]:
        """Make the mailbox if there is none. Returns the way to it, with a token for so long."""

    @abc.abstractmethod
    def mail(self, machine: MachineId) -> Mail:
        """The controller's end of it."""

    @abc.abstractmethod
    async def remove(self, machine: MachineId) -> None:
        """With all that is in it, if it is there."""

    @abc.abstractmethod
    async def all(self) -> Sequence[KeptMailbox]:
        """The mailboxes of all homes in this storage."""

    @abc.abstractmethod
    async def remove_kept(self, box: KeptMailbox) -> None:
        """One that its home has left behind."""

    async def close(self) -> None:
        return None


@contextlib.contextmanager
def _as_transient(machine: MachineId) -> Generator[None]:
    try:
        yield
    except OSError as err:
        raise PlaceError(f"{machine}: {err}", transient=True, scope="place") from err


def _allocated(told: Mapping[str, Any]) -> float | None:
    return seconds_told(told.get("at"))


def _start(told: Mapping[str, Any]) -> PilotStart | None:
    """The machine has sealed it, and may have written anything."""
    at = seconds_told(told.get("at"))
    if at is None or "start" not in told or "node" not in told:
        return None
    return PilotStart(plain(str(told["start"])), plain(str(told["node"])), at)


def _end(told: Mapping[str, Any]) -> PilotEnd | None:
    ran_s, at = seconds_told(told.get("ran_s")), seconds_told(told.get("at"))
    try:
        code, why = int(told["code"]), plain(str(told["why"]))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return None if ran_s is None or at is None else PilotEnd(why, code, ran_s, at)
