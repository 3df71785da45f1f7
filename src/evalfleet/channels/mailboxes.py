"""Mailboxes for the machines of a service that nobody can connect to, in the service's own storage.

A place has them in a few lines. `boxes` are of a kind of storage, such as `places.azure.mailboxes`:

    pilot = await boxes.make(machine, life_s, queue_s)         # in `create`: what the job runs, with what
    boxes.channel(machine.id, fence, secrets, on_load)         # in `channel`
    started = await boxes.started(machine)                     # in `list`: has the pilot begun, and where?
    await boxes.remove(machine)                                # in `delete`, once the job has ended
    for box in await boxes.all(): ...                          # in `belongings`; `reap`: remove_kept(box)

The job runs `pilot.argv` with `pilot.environ`, which holds a token for this mailbox alone: it may read what
is there and create what is not, and nothing else. The node needs Python 3.8 and HTTPS to the storage.
Whatever the service starts a second time leaves at once, with exit code RESTARTED: the first has read mail.
A shell around `pilot.argv` must `exec` it: attempts of the same user could read the shell's environment.
"""

from __future__ import annotations

import abc
import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from evalfleet.errors import PlaceError
from evalfleet.model import MachineId
from evalfleet.ports import Fence

from .link import plain
from .mail_channel import MailChannel
from .mailbox import Mail
from .program import archive
from .session import OnLoad
from .supervisor.files import make_key
from .supervisor.mailbox import NoMail, opened

MAIL_SILENT_S, MAIL_LOST_S = 60.0, 900.0
"""For `Offer.silent_s` and `lost_s`: storage may be away for ten minutes. Whether a machine still lives, its
service tells meanwhile."""
VARIABLE = "EVALFLEET_MAILBOX"
LONGEST_S = 86_400e6
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
import hashlib, json, os, sys, time
from pathlib import Path
from urllib import error, request
with open(int(sys.argv[1]), "rb") as pipe:
    box = json.load(pipe)
way, until = box["way"], time.monotonic() + 600
query = way.get("query")
url = way["url"] + "/" + box["program"] + ("?" + query if query else "")
while True:
    try:
        with request.urlopen(request.Request(url, headers=way.get("headers") or {}), timeout=60) as answer:
            program = answer.read()
        break
    except error.HTTPError as err:
        if err.code < 500 and err.code not in (408, 429) or time.monotonic() > until:
            sys.exit("the mailbox refuses us: %d" % err.code)
    except OSError as err:
        if time.monotonic() > until:
            sys.exit("the mailbox does not answer: " + type(err).__name__)
    time.sleep(5)
if hashlib.sha256(program).hexdigest() != box["program"].rpartition("-")[2]:
    sys.exit("the supervisor in the mailbox is not the one that was sent")
folder = Path("evalfleet").absolute()
folder.mkdir(0o700, exist_ok=True)
(folder / "supervisor.pyz").write_bytes(program)
sys.path.insert(0, str(folder / "supervisor.pyz"))
from supervisor.pilot import main
sys.exit(main(box, folder / "machine"))
"""
"""The job's own program: it fetches the supervisor out of the mailbox, and becomes the pilot."""


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
    ran_s: float | None
    """How long it has run, if it has ended by itself."""


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

    def key(self, machine: MachineId) -> str:
        """The machine's key: it seals the mail, and never is in the storage."""
        self._folder.mkdir(0o700, exist_ok=True, parents=True)
        ours = make_key(str(self._folder))
        return hmac.new(bytes.fromhex(ours), machine.encode(), hashlib.sha256).hexdigest()

    async def make(
        self, machine: MachineId, life_s: float, queue_s: float, python: str = "python3"
    ) -> MailPilot:
        """The machine's mailbox, and what its job must run: for `life_s`, after `queue_s` at the latest.

        May be repeated; each time there is another token.
        """
        way = await self._open(machine, life_s + queue_s)
        program = archive()
        name = f"program-{hashlib.sha256(program).hexdigest()}"
        try:
            await self.mail(machine).create(name, program)
        except OSError as err:
            raise PlaceError(f"{machine}: {err}", transient=True, scope="place") from err
        box = {"way": way, "key": self.key(machine), "life_s": life_s, "program": name}
        return MailPilot((python, "-c", CONCEAL, BOOT), {VARIABLE: json.dumps(box, separators=(",", ":"))})

    def channel(
        self, machine: MachineId, fence: Fence, secrets: Mapping[str, str], on_load: OnLoad | None = None
    ) -> MailChannel:
        return MailChannel(self.mail(machine), self.key(machine), fence, secrets, on_load)

    async def started(self, machine: MachineId) -> PilotStart | None:
        """What the pilot has left of its start, and of its end; None if it has not begun."""
        start = await self._mark(machine, "start")
        if start is None:
            return None
        end = await self._mark(machine, "end") or {}
        try:
            ran_s = _seconds(end["ran_s"]) if "ran_s" in end else None
            name, node = plain(str(start["start"])), plain(str(start["node"]))
            return PilotStart(name, node, _seconds(start["at"]), ran_s)
        except (KeyError, TypeError, ValueError, OverflowError):
            return None

    async def _mark(self, machine: MachineId, name: str) -> dict[str, Any] | None:
        try:
            content = await self.mail(machine).read(name)
            return None if content is None else opened(self.key(machine), name, content)[0]
        except NoMail:
            return None  # somebody else's
        except OSError as err:
            raise PlaceError(f"{machine}: {err}", transient=True, scope="place") from err

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
        """Those of all homes in this storage."""

    @abc.abstractmethod
    async def remove_kept(self, box: KeptMailbox) -> None:
        """One that its home has left behind."""

    async def close(self) -> None:
        return None


def _seconds(told: Any) -> float:
    """A machine has sealed it, and may have written anything. Raises ValueError, TypeError, OverflowError."""
    seconds = float(told)
    if not abs(seconds) < LONGEST_S:
        raise ValueError(told)
    return seconds
