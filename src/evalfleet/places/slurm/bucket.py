"""Machines whose nodes share no folder with the login node: their mail and their marks are in a bucket. The
folder of such a machine is seen by the login node alone."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Mapping, Sequence
from urllib.parse import unquote, urlsplit

from msgspec import structs

from evalfleet.channels.mail.boxes import SPARE_S, Mailboxes, MailStore, PilotMarks
from evalfleet.channels.mail.lines import ADDRESSES_S
from evalfleet.errors import PlaceError, RequestError
from evalfleet.model import MachineId
from evalfleet.ports import Check, PlaceContext

from .settings import SlurmSettings
from .sight import MachineFolder, Queue, StartMark

REACH_IT = "nodes must reach the bucket by HTTPS; else share a `folder` with them and leave `mailbox` out"
RIGHTS = "make the bucket, or give these keys s3:GetObject, PutObject, DeleteObject and ListBucket"
SCRIPT = """\
#!/bin/sh
{variables}
export {names}
exec {command}
"""
KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
PROBE = """\
import json, platform, sys, time
from urllib import request
try:
    with request.urlopen(sys.argv[1], timeout=20) as answer:
        sees, why = answer.read() == b"seen", ""
except OSError as err:
    sees, why = False, str(getattr(err, "reason", err))[:200]
print(json.dumps({"python": sys.version.split()[0], "old": sys.version_info < (3, 8), "node": platform.node(),
    "at": time.time(), "sees": sees, "why": why}))
"""
"""The program of the job by which doctor looks at a node, for any Python 3."""


class BucketMail:
    """The mailboxes of a place, and what they have told."""

    def __init__(self, boxes: Mailboxes, settings: SlurmSettings) -> None:
        self.boxes = boxes
        self._settings = settings
        self._marks: dict[str, PilotMarks] = {}
        self._states: dict[str, str] = {}
        """Of machines' jobs, when their marks were looked at."""

    @property
    def url(self) -> str:
        return self._settings.mailbox

    @property
    def max_queue_s(self) -> float:
        """A job that waits for longer has addresses that do not last for its machine's life."""
        longest_s = ADDRESSES_S - self._settings.time_limit_s - 2 * SPARE_S
        return longest_s if self._settings.queue_s is None else self._settings.queue_s

    async def script(self, machine: MachineId, life_s: float) -> str:
        """What the machine's job runs. Raises PlaceError."""
        pilot = await self.boxes.make(machine, life_s, self.max_queue_s + SPARE_S, self._settings.python)
        variables = [f"{name}={shlex.quote(value)}" for name, value in pilot.environ.items()]
        python, *rest = pilot.argv
        return SCRIPT.format(
            variables="\n".join(variables),
            names=" ".join(pilot.environ),
            command=shlex.join((python, "-I", *rest)),
        )

    async def seen(self, folders: Mapping[str, MachineFolder], queue: Queue) -> dict[str, MachineFolder]:
        """The folders, with what the machines' pilots have written down. Raises PlaceError."""
        self._marks = {name: marks for name, marks in self._marks.items() if name in folders}
        self._states = {name: state for name, state in self._states.items() if name in folders}
        wanted = {
            MachineId(unquote(name)): self._marks.get(name, PilotMarks())
            for name, folder in folders.items()
            if folder.job and self._may_have_news(name, folder.job, queue)
        }
        found = await self.boxes.marks_of(wanted)
        for name, folder in folders.items():
            if (marks := found.get(MachineId(unquote(name)))) is not None:
                self._marks[name] = marks
                self._states[name] = _state(folder.job, queue)
        return {name: _with_marks(folder, self._marks.get(name)) for name, folder in folders.items()}

    def _may_have_news(self, name: str, job: str, queue: Queue) -> bool:
        known, job_now = self._marks.get(name), queue.by_id.get(job)
        if known is None or known.start is None:
            return job_now is None or not job_now.waits
        # once it has begun, whatever it writes down comes with a change that Slurm tells, too
        return not known.restarted and self._states.get(name) != _state(job, queue)

    async def remove(self, home: str, machine: MachineId) -> None:
        await self.boxes.remove_named(self.boxes.name(home, machine))

    async def examine(self) -> Sequence[Check]:
        """Check that the bucket can be written, and that addresses can be signed."""
        probe = secrets.token_hex(4)
        try:
            await self.boxes.plant(probe, SPARE_S)
            await self.boxes.uproot(probe)
        except PlaceError as err:
            return (Check("mailbox", "bad", str(err), RIGHTS),)
        return (Check("mailbox", "good", f"{self.url} can be used, with signed addresses for each machine"),)


def _state(job: str, queue: Queue) -> str:
    found = queue.by_id.get(job)
    return "" if found is None else found.state


def _with_marks(folder: MachineFolder, marks: PilotMarks | None) -> MachineFolder:
    if marks is None or marks.start is None:
        return folder
    return structs.replace(
        folder,
        start=StartMark(marks.start.start, marks.start.node, marks.start.at),
        ran_s=None if marks.end is None else marks.end.ran_s,
        restarted=marks.restarted,
        listens=marks.end is None,
    )


def bucket_mail(name: str, settings: SlurmSettings, context: PlaceContext, owner: str) -> BucketMail | None:
    """None if the place has no `mailbox`. Raises RequestError."""
    url = settings.mailbox
    if not url:
        return None
    if urlsplit(url).scheme != "s3" or context.open_bucket is None:
        raise RequestError(
            f"place {name!r}: mailbox {url!r} cannot be used; write s3://BUCKET/PREFIX, or "
            'leave it out and set reach = "mailbox" for a mailbox in `folder`'
        )
    if context.environ.get("AWS_SESSION_TOKEN"):
        raise RequestError(
            f"place {name!r}: addresses in {url} that the keys of a session sign end with it; unset "
            "AWS_SESSION_TOKEN and use the keys of an IAM user"
        )
    lacking = [key for key in KEYS if not context.environ.get(key)]
    if not (context.environ.get("AWS_REGION") or context.environ.get("AWS_DEFAULT_REGION")):
        lacking.append("AWS_REGION")
    if lacking:
        raise RequestError(
            f"place {name!r}: mailbox {url!r} needs {', '.join(lacking)}; set them, or use .env"
        )
    most_s = settings.time_limit_s + (settings.queue_s or 0.0)
    if most_s + 2 * SPARE_S > ADDRESSES_S:
        raise RequestError(
            f"place {name!r}: jobs may wait and run for {most_s:g} s, and signed addresses last "
            f"{ADDRESSES_S:g} s; lower `time_limit_s` or `queue_s`"
        )
    secret = context.environ["AWS_SECRET_ACCESS_KEY"]
    store = MailStore(context.open_bucket(url.rstrip("/"), context.environ), secret)

    async def opened() -> MailStore:
        return store

    return BucketMail(Mailboxes(context, owner, opened), settings)
