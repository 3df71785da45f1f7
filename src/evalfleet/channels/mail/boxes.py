"""Mailboxes for the machines of a service that nobody can connect to, below one prefix of a bucket.

A place uses them in a few lines:

    pilot = await boxes.make(machine, life_s, queue_s)         # in `create`: what the job runs
    boxes.channel(machine.id, fence, secrets, on_load)         # in `channel`
    marks = await boxes.marks(machine, known)                  # in `list`: has the pilot begun, and where?
    await boxes.remove(machine)                                # in `delete`, once the job has ended
    for box in await boxes.all(): ...                          # in `belongings`; `reap`: remove_named

The job runs `pilot.argv` with `pilot.environ`. Whoever may look at jobs can read both, so they hold no more
than signed addresses of one object, the job's orders. The first start reads the orders and removes them. They
hold the machine's key and the addresses of what the machine reads and writes next. The node needs Python 3.8
and HTTPS to the bucket. A second start of the job finds no orders and exits with the code RESTARTED.

Beside the mail there are marks, each written once and signed as mail is. They record the machine's life for a
controller that comes later. A shell around `pilot.argv` must `exec` it: attempts of the same user could read
the shell's environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

from evalfleet.channels.link import plain, seconds_told
from evalfleet.channels.program import archive
from evalfleet.channels.session import OnLoad
from evalfleet.channels.supervisor.files import make_key
from evalfleet.channels.supervisor.mailbox import NoMail, opened, sealed
from evalfleet.channels.supervisor.pilot import ALLOCATED, END, MARKS, RESTARTED, START, STOP
from evalfleet.errors import FleetError, PlaceError, RequestError
from evalfleet.model import MachineId
from evalfleet.ports import Bucket, Fence, PlaceContext

from .channel import MailChannel
from .lines import ADDRESSES_S, LINES_AHEAD, Mail, StoreMail, first_uses, signed

log = logging.getLogger(__name__)
MAIL_SILENT_S, MAIL_LOST_S = 60.0, 900.0
"""For `Lifetime.silent_s`, `lost_s`: storage may be away for ten minutes. Whether a machine still lives, its
service tells meanwhile."""
VARIABLE = "EVALFLEET_MAILBOX"
WAY = f"{MARKS}/way"
"""The object that a job takes its orders from."""
ABOUT = "about"
"""Below this name is an object for each mailbox, which says whose it is."""
ABOUT_BYTES = 1 << 16
PROBE = ".evalfleet-probes"
SPARE_S = 900.0
"""Addresses outlast their machine by so much: its last words are written, and clocks differ."""
GONE = 1.4
"""A bucket counts as gone after so many times the seconds that a machine may be silent: before those that are
all silent at once are given up, so that the reason is shown."""
PROGRAM = "program"
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
def ask(method, url, data=None):
    until = time.monotonic() + 600
    headers = {} if data is None else {"x-ms-blob-type": "BlockBlob"}
    while True:
        try:
            asked = request.Request(url, data, headers, method=method)
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
    take = json.load(pipe)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
os.chdir(tempfile.mkdtemp(prefix="evalfleet-", dir=None if os.getcwd() == "/" else os.getcwd()))
atexit.register(shutil.rmtree, os.getcwd(), True)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
status, content = ask("GET", take["GET"])
if status not in (200, 404):
    sys.exit("the mailbox refuses us: %d" % status)
if status == 404 or not content or ask("DELETE", take["DELETE"])[0] not in (200, 202, 204):
    ask("PUT", take["PUT"], b"")
    sys.stderr.write("the service has run this job anew: what ran before is lost\\n")
    sys.exit(RESTARTED)
box = json.loads(content)
status, program = ask("GET", box["from"])
if status != 200:
    sys.exit("the mailbox refuses us: %d" % status)
if hashlib.sha256(program).hexdigest() != box["digest"]:
    sys.exit("the supervisor in the mailbox is not the one that was sent")
folder = Path("evalfleet").absolute()
folder.mkdir(0o700, exist_ok=True)
(folder / "supervisor.pyz").write_bytes(program)
sys.path.insert(0, str(folder / "supervisor.pyz"))
from supervisor.pilot import main
sys.exit(main(box, folder / "machine"))
""".replace("RESTARTED", str(RESTARTED))
"""The job's own program: it takes the orders, fetches the supervisor, and becomes the pilot, all in a new
folder that is removed at its end. It is below the current folder, or in TMPDIR for a job that begins in /.
A later start finds no orders and leaves a mark."""


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
    """A mailbox that exists, as the object about it says."""

    machine: MachineId
    home: str
    owner: str
    expires_at: float | None
    """When its machine is over at the latest, in seconds since 1970."""
    name: str
    """Its prefix in the bucket."""
    for_pool: bool = False


class MailStore(NamedTuple):
    """The bucket of a place's mailboxes.

    The keys of machines are derived from `secret`, so that another computer with the same login can derive
    them, too. Without it, they are derived from a key that the home keeps.
    """

    bucket: Bucket
    secret: str = ""


class Mailboxes:
    """The mailboxes of a home's machines. All calls raise PlaceError.

    `opened` opens the bucket. `lost_s` is how long a machine may be silent. A bucket that is away for
    longer counts as gone in `seen`, with all that is in it.
    """

    def __init__(
        self,
        context: PlaceContext,
        owner: str,
        opened: Callable[[], Awaitable[MailStore]],
        now: Callable[[], float] = time.time,
        lost_s: float = MAIL_LOST_S,
    ) -> None:
        self.gone = ""
        """Why nothing is expected of the bucket any more, until it answers again."""
        self._folder = context.home / KEYS
        self._home, self._owner, self._for_pool = context.home_id, owner, context.for_pool
        self._opened, self._now = opened, now
        self._gone_s, self._heard_at = GONE * lost_s, time.monotonic()
        self._known: dict[str, KeptMailbox | None] = {}
        self._unremoved: set[str] = set()
        """Mailboxes that could not be removed, as the bucket was gone."""

    @staticmethod
    def name(home: str, machine: MachineId) -> str:
        """Return the prefix of a machine's mailbox, in which no character must be quoted."""
        words = re.sub(r"[^A-Za-z0-9.-]", "_", machine)[:80]
        return f"{home}/{words}-{hashlib.sha256(machine.encode()).hexdigest()[:10]}"

    async def key(self, machine: MachineId) -> str:
        """Return the machine's key, which signs the mail and is in no mail."""
        with _explained("the mailbox"):
            secret = (await self._opened()).secret
        if not secret:
            self._folder.mkdir(0o700, exist_ok=True, parents=True)
            secret = make_key(str(self._folder))
        own = f"evalfleet/{self.name(self._home, machine)}"
        return hmac.new(secret.encode(), own.encode(), hashlib.sha256).hexdigest()

    async def make(
        self, machine: MachineId, life_s: float, queue_s: float, python: str = "python3", *, kvm: bool = False
    ) -> MailPilot:
        """Return what the machine's job must run, for `life_s`, after `queue_s` at the latest.

        `kvm`: it leaves, with exit code NO_KVM, where no virtual machine can be made.
        """
        seconds = life_s + queue_s + SPARE_S
        if seconds > ADDRESSES_S:
            raise PlaceError(
                f"{machine} may wait and run for {life_s + queue_s:g} s, which outlasts its addresses in the "
                f"mailbox ({ADDRESSES_S - SPARE_S:g} s); set shorter times",
                transient=False,
                scope="place",
            )
        name, program = self.name(self._home, machine), archive()
        about = {"machine": machine, "home": self._home, "owner": self._owner, "pool": self._for_pool}
        uses = first_uses(range(1, LINES_AHEAD + 1))
        uses += [("GET", START), ("PUT", START), ("PUT", END), ("GET", ALLOCATED), ("GET", STOP)]
        own = await self.key(machine)
        with _explained(f"the mailbox of {machine}"):
            bucket = (await self._opened()).bucket
            until = self._now() + life_s + queue_s
            await bucket.replace(f"{ABOUT}/{name}", json.dumps({**about, "until": until}).encode())
            await bucket.replace(f"{name}/{PROGRAM}", program)
            urls = await signed(bucket, f"{name}/", [*uses, ("GET", PROGRAM)], seconds)
            box = {
                "way": {"urls": urls},
                "key": own,
                "life_s": life_s,
                "from": urls[f"GET {PROGRAM}"],
                "digest": hashlib.sha256(program).hexdigest(),
                "kvm": kvm,
            }
            await bucket.replace(f"{name}/{WAY}", json.dumps(box).encode())
            take = [(method, WAY) for method in ("GET", "DELETE", "PUT")]
            taken = await signed(bucket, f"{name}/", take, seconds)
        told = {about.partition(" ")[0]: url for about, url in taken.items()}
        return MailPilot((python, "-c", CONCEAL, BOOT), {VARIABLE: json.dumps(told, separators=(",", ":"))})

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
        """Return False if it was said before, or there is no mailbox."""
        own = await self.key(machine)
        with _explained(machine):
            bucket = (await self._opened()).bucket
            if await bucket.read(f"{ABOUT}/{self.name(self._home, machine)}") is None:
                return False
        with _as_transient(machine):
            return await self.mail(machine).create(name, sealed(own, name, said))

    async def _mark(self, machine: MachineId, name: str) -> dict[str, Any]:
        """Empty if it is not there, or somebody else's."""
        own = await self.key(machine)
        with _as_transient(machine):
            content = await self.mail(machine).read(name)
        try:
            return {} if content is None else opened(own, name, content)[0]
        except NoMail:
            return {}

    # -- what there is -----------------------------------------------------------------------------------

    def mail(self, machine: MachineId) -> Mail:
        """Return the controller's end of a mailbox."""

        async def opened() -> Bucket:
            return (await self._opened()).bucket

        return StoreMail(opened, self.name(self._home, machine))

    async def marks_of(self, machines: Mapping[MachineId, PilotMarks]) -> Mapping[MachineId, PilotMarks]:
        """Return the marks of several machines at once."""
        marks = await asyncio.gather(*(self.marks(machine, known) for machine, known in machines.items()))
        return dict(zip(machines, marks, strict=True))

    async def seen(self) -> Sequence[KeptMailbox]:
        """Return this home's mailboxes, and none where the bucket is gone."""
        try:
            boxes = await self._all(f"{self._home}/")
        except PlaceError as err:
            silent_s = time.monotonic() - self._heard_at
            if silent_s < self._gone_s:
                raise
            if not self.gone:
                log.warning("the storage of mailboxes is gone: %s", err)
            why = f"the storage of its mailbox is gone: {err}"
            self.gone = f"{why} (for {silent_s / 60:.0f} min)" if err.transient else why
            return ()
        self.gone, self._heard_at = "", time.monotonic()
        for box in boxes:
            if box.name in self._unremoved:
                await self.remove_named(box.name)
        boxes = [box for box in boxes if box.name not in self._unremoved]
        self._unremoved.clear()
        return boxes

    async def all(self) -> Sequence[KeptMailbox]:
        """Return the mailboxes of all homes in this bucket."""
        return await self._all("")

    async def left(self) -> Sequence[KeptMailbox]:
        """Return those of all homes, and none where the bucket is away: other parts of machines can be found
        without them."""
        try:
            return await self.all()
        except PlaceError as err:
            log.warning("mailboxes cannot be seen: %s", err)
            return ()

    async def _all(self, below: str) -> list[KeptMailbox]:
        with _explained("mailboxes cannot be seen"):
            bucket = (await self._opened()).bucket
            names = await bucket.names(f"{ABOUT}/{below}")
            unknown = [name for name in names if name not in self._known]
            contents = await asyncio.gather(*(bucket.read(name, ABOUT_BYTES) for name in unknown))
        self._known.update(zip(unknown, map(_kept, unknown, contents), strict=True))
        # one may have been removed, and forgotten, while the others were read
        return [box for name in names if (box := self._known.get(name)) is not None]

    async def remove(self, machine: MachineId) -> None:
        """Remove a machine's mailbox with all that is in it, if it is there."""
        name = self.name(self._home, machine)
        try:
            await self.remove_named(name)
        except PlaceError:
            if not self.gone:
                raise
            self._unremoved.add(name)

    async def remove_named(self, name: str) -> None:
        """Remove a mailbox of any home by its name."""
        about = f"{ABOUT}/{name}"
        with _explained(f"mailbox {name}"):
            bucket = (await self._opened()).bucket
            if names := await bucket.names(f"{name}/"):
                await bucket.remove(names)
            # it goes last: a controller that is killed meanwhile leaves nothing that cannot be found
            await bucket.remove([about])
        self._known.pop(about, None)

    # -- for doctor ------------------------------------------------------------------------------------

    async def plant(self, probe: str, seconds: float) -> str:
        """Return the address of a new object, which nodes must be able to read."""
        with _explained("the mailbox"):
            bucket = (await self._opened()).bucket
            await bucket.replace(f"{PROBE}/{probe}", b"seen")
            return (await bucket.sign("GET", [f"{PROBE}/{probe}"], seconds))[0]

    async def uproot(self, probe: str) -> None:
        with _explained("the mailbox"):
            await (await self._opened()).bucket.remove([f"{PROBE}/{probe}"])


@contextlib.contextmanager
def _explained(what: str) -> Generator[None]:
    try:
        yield
    except PlaceError:
        raise
    except FleetError as err:
        refused = isinstance(err, RequestError)
        raise PlaceError(f"{what}: {err}", transient=not refused, scope="place") from err


def _kept(name: str, content: bytes | None) -> KeptMailbox | None:
    try:
        about = json.loads(content or b"")
        machine, home, owner = (str(about[word]) for word in ("machine", "home", "owner"))
        until, for_pool = float(about["until"]), bool(about["pool"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return KeptMailbox(MachineId(machine), home, owner, until, name.removeprefix(f"{ABOUT}/"), for_pool)


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
