"""Machines whose nodes share no folder with anybody: their mail, and what they tell of themselves, is in a
bucket. The folder of such a machine is seen by the login node alone."""

from __future__ import annotations

import secrets
import shlex
import time
from collections.abc import Mapping, Sequence
from urllib.parse import unquote, urlsplit

from msgspec import structs

from evalfleet.channels.mailboxes import KeptMailbox, PilotMarks
from evalfleet.channels.s3_mailboxes import S3Mailboxes, s3_bucket
from evalfleet.errors import PlaceError, RequestError
from evalfleet.model import MachineId
from evalfleet.ports import Check, PlaceContext

from .settings import SlurmSettings
from .sight import MachineFolder, Queue, StartMark

SPARE_S = 900.0
"""A token outlasts its machine by so much: the machine's last words are written, and clocks differ."""
REACH_IT = "nodes must reach the bucket by HTTPS; else share a `folder` with them and leave `mailbox` out"
SCRIPT = """\
#!/bin/sh
{variables}
export {names}
exec {command}
"""
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

    def __init__(self, boxes: S3Mailboxes, settings: SlurmSettings) -> None:
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
        """A job that waits for longer has a token that does not last for its machine's life."""
        longest_s = self.boxes.bucket.longest_s - self._settings.time_limit_s - SPARE_S
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
        name = self.boxes.name(home, machine)
        await self.boxes.remove_kept(KeptMailbox(machine, home, "", None, name))

    async def examine(self) -> Sequence[Check]:
        """Can it be written, and is there a token for one mailbox alone?"""
        probe = secrets.token_hex(4)
        try:
            await self.boxes.plant(probe, SPARE_S)
            await self.boxes.uproot(probe)
        except PlaceError as err:
            remedy = (
                "make the bucket, or give these keys s3:GetObject, PutObject, DeleteObject and ListBucket"
            )
            return (Check("mailbox", "bad", str(err), "" if "STS" in str(err) else remedy),)
        return (Check("mailbox", "good", f"{self.url} can be used, with a token for each machine"),)


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
    scheme = urlsplit(url).scheme
    if scheme == "gs":
        raise RequestError(
            f"place {name!r}: mailbox {url!r} cannot be used: a token of Cloud Storage for one mailbox alone "
            "lasts an hour, and jobs wait and run for longer; use s3://, or a `folder` that nodes share"
        )
    if scheme != "s3" or context.open_objects is None:
        raise RequestError(
            f"place {name!r}: mailbox {url!r} is of no kind that Slurm's machines can use; write "
            's3://BUCKET/PREFIX, or leave it out and set reach = "mailbox" for one in `folder`'
        )
    bucket = s3_bucket(url, context.environ, settings.mailbox_role)
    most_s = settings.time_limit_s + (settings.queue_s or 0.0)
    if most_s + SPARE_S > bucket.longest_s:
        raise RequestError(
            f"place {name!r}: jobs may wait and run for {most_s:g} s, "
            f"and a token of S3's lasts {bucket.longest_s:g} s; lower `time_limit_s` or `queue_s`"
        )
    objects = context.open_objects(url.rstrip("/"), context.environ)
    return BucketMail(S3Mailboxes(bucket, objects, context, owner, time.time), settings)
