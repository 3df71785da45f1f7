"""The place `slurm`: a machine is a job of the cluster. It runs our supervisor, which takes attempts one
after another.

Its folder is on a file system that the nodes share with this computer: bundles and artefacts are written and
read there directly. What is said to the supervisor goes through a step of the job (`srun --overlap`), or,
where steps are forbidden, through a mailbox in that folder.
"""

from __future__ import annotations

import asyncio
import fcntl
import functools
import hashlib
import json
import os
import shlex
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import unquote

from msgspec import Meta, Struct, structs

from evalfleet.channels.artefacts import LocalMover
from evalfleet.channels.link import OpenLink
from evalfleet.channels.mailbox import FolderMail, MailTransport, open_mail
from evalfleet.channels.program import archive
from evalfleet.channels.resident import Resident
from evalfleet.channels.samples import Samples
from evalfleet.channels.supervisor.files import job_name, make_key, read_key
from evalfleet.channels.supervisor.machine import DELETING, remove_tree
from evalfleet.errors import ChannelError, PlaceError, RequestError
from evalfleet.files import replace
from evalfleet.model import Machine, MachineId, Needs, Offer
from evalfleet.ports import Channel, Check, Fence, HostKey, PlaceContext, Preflight
from evalfleet.single_flight import SingleFlight

from .commands import NEVER_STARTS, TAKEN_BACK, Slurm, SlurmJob, limit
from .step import StepTransport, open_step

PILOT = Path(__file__).with_name("pilot.py")
KILL_WAIT_S = 60.0
"""How long Slurm may take to end a job: it asks first, and kills later."""
MARK_S = 60.0
"""So long a job may take from its start in Slurm's books to its pilot's mark: prologues run meanwhile."""
ORDER_POLLS = 6
MAIL = "mail"
"""The mailbox in a machine's folder, where no steps may be used. Its pilot looks whether there is one."""
MAIL_SILENT_S, MAIL_LOST_S = 60.0, 900.0
"""A file system may be away for ten minutes. Whether a machine still lives, Slurm tells meanwhile."""
REASONS = {
    "JobHeldUser": "held by its user: `scontrol release`",
    "JobHeldAdmin": "held by an administrator",
    "None": "",
}
CLOCKS_S = 5.0
"""So far a node's clock may be from ours before it is not believed."""
DETAIL_CAP = 300
STEP_END_S = 5.0
STEP_OPTIONS = (*("--overlap", "--nodes=1", "--ntasks=1", "--mem=0", "--quiet", "--unbuffered"),)
RELAY = """\
import os, socket, sys
sys.path.insert(0, sys.argv[1])
from supervisor.verbs import carry
os.chdir(sys.argv[2])
line = socket.socket(socket.AF_UNIX)
line.connect("supervisor.sock")
os.write(1, b"ok\\n")
carry(line)
"""
"""The program of a step: bytes both ways between its standard streams and the job's supervisor."""


class SlurmSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of `slurm`."""

    folder: Annotated[
        str, Meta(min_length=1, description="a folder that the nodes share with this computer; required")
    ] = ""
    partition: Annotated[str, Meta(description="where jobs go (default: the cluster's)")] = ""
    account: Annotated[str, Meta(description="who is charged (default: yours)")] = ""
    qos: Annotated[str, Meta(description="the quality of service (default: yours)")] = ""
    constraint: Annotated[str, Meta(description="features that nodes must have")] = ""
    time_limit_s: Annotated[float, Meta(ge=60, description="how long a job may run")] = 4 * 3600.0
    cpus: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="of a job (default: the cluster's)")
    ] = None
    memory_gb: Annotated[float, Meta(ge=0, description="of a job (0: the cluster's default)")] = 0.0
    gpus: Annotated[int, Meta(ge=0, description="of a job")] = 0
    max_jobs: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="never more than this at once")
    ] = None
    usd_per_hour: Annotated[float, Meta(ge=0, le=10_000, description="what a job costs, if it does")] = 0.0
    python: Annotated[str, Meta(min_length=1, description="a Python 3.8 or later on the nodes")] = "python3"
    queue_s: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="a job that waits for longer is given up (default: it may wait for ever)"),
    ] = None
    expected_queue_s: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(description="a job that waits for longer is told by the alert `queue_longer_than_planned`"),
    ] = None
    poll_s: Annotated[float, Meta(gt=0, description="squeue is asked no more often than this")] = 10.0
    sbatch: Annotated[tuple[str, ...], Meta(description="more options of sbatch")] = ()
    reach: Annotated[
        Literal["step", "mailbox"],
        Meta(description="how supervisors are reached: by steps (srun --overlap), or by files in `folder`"),
    ] = "step"
    isolation: Annotated[
        Literal["user", "container", "none"] | None, Meta(description="how attempts are kept apart")
    ] = None


class Start(Struct, frozen=True):
    """The mark that a pilot has left of its start."""

    start: str
    """Its name: the job, and how often Slurm had requeued it before."""
    node: str
    at: float
    """By the node's clock, which need not be ours."""

    @property
    def job(self) -> str:
        return self.start.partition(".")[0]


class Queue(Struct, frozen=True):
    """What one `squeue` said, and when it was asked."""

    asked_at: float
    by_id: Mapping[str, SlurmJob]
    by_name: Mapping[str, SlurmJob]
    """Of several jobs of one name, one that lives."""


class SlurmPlace(Preflight):
    """Jobs of a Slurm cluster, each a machine that takes task after task. Run it on a login node."""

    Settings = SlurmSettings
    default_isolation = "none"

    def __init__(self, name: str, settings: SlurmSettings, context: PlaceContext) -> None:
        self._name = name
        self._settings = settings
        self._slurm = Slurm(context.environ)
        shared = Path(os.path.realpath(context.base / os.path.expanduser(settings.folder)))
        self._root = shared / context.home_id
        self._prefix = f"evalfleet-{context.home_id}-"
        self._secrets = context.secrets
        self._samples = Samples(context.home)
        self._queue = Queue(-settings.poll_s, {}, {})
        self._ask_queue = SingleFlight(self._ask, self._pause_s)
        self._asked_for: set[str] = set()
        self._recorded: dict[str, set[str]] = {}
        self._books: dict[str, SlurmJob | None] = {}
        self._order: Mapping[str, str] = {}
        self._order_at = 0.0
        self._turns: dict[MachineId, asyncio.Lock] = {}
        self._taken = False
        self._lines: set[StepTransport | MailTransport] = set()

    @classmethod
    def make(cls, name: str, settings: SlurmSettings, context: PlaceContext) -> SlurmPlace:
        if not settings.folder:
            raise RequestError(
                f"place {name!r} has no 'folder'; name one that the nodes share with this computer, such as "
                'folder = "~/evalfleet"'
            )
        return cls(name, settings, context)

    @property
    def name(self) -> str:
        return self._name

    async def offers(self, needs: Needs) -> Sequence[Offer]:
        """One. Raises PlaceError if Slurm would never take such a job."""
        settings = self._settings
        if needs.strict and needs.gpus > settings.gpus:
            raise PlaceError(
                f"jobs of {self._name} have {settings.gpus} of {needs.gpus} GPUs; set `gpus` of the place",
                transient=False,
                scope="place",
            )
        if not self._taken:
            await self._check_settings()
            self._taken = True
        return (
            Offer(
                self._name,
                "job",
                region=settings.partition,
                usd_per_hour=settings.usd_per_hour,
                capacity=settings.max_jobs,
                teardown_s=KILL_WAIT_S,
                settle_s=settings.poll_s,
                queues=True,
                queue_s=settings.expected_queue_s,
                max_queue_s=settings.queue_s,
                extendable=False,
                max_life_s=settings.time_limit_s,
                silent_s=20.0 if settings.reach == "step" else MAIL_SILENT_S,
                lost_s=60.0 if settings.reach == "step" else MAIL_LOST_S,
            ),
        )

    async def _check_settings(self) -> str:
        """What Slurm says of such a job. Raises PlaceError if it would never start one."""
        settings = self._settings
        said = await self._slurm.would_take(self._wishes(settings.time_limit_s))
        longest_s = await self._slurm.longest_s(settings.partition)
        if (
            longest_s is not None and settings.time_limit_s > longest_s
        ):  # it would be taken, and wait for ever
            raise PlaceError(
                f"jobs of the partition may run for {longest_s:g} s, and time_limit_s is "
                f"{settings.time_limit_s:g}; change `time_limit_s` of the place",
                transient=False,
                scope="place",
            )
        return said

    # -- what exists ---------------------------------------------------------------------------------

    def _pause_s(self) -> float:
        return max(0.0, self._queue.asked_at + self._settings.poll_s - time.monotonic())

    async def _ask(self) -> Queue:
        asked_at = time.monotonic()
        try:
            jobs = await self._slurm.jobs()
        except PlaceError:
            self._queue = structs.replace(self._queue, asked_at=asked_at)
            raise
        jobs = [*jobs, *await self._forgotten({job.id for job in jobs})]
        if any(job.waits and job.name.startswith(self._prefix) for job in jobs):
            await self._look_at_order(asked_at)
        living_last = sorted(jobs, key=lambda job: (job.runs, job.waits))
        self._queue = Queue(asked_at, {job.id: job for job in jobs}, {job.name: job for job in living_last})
        return self._queue

    async def _forgotten(self, known: set[str]) -> Sequence[SlurmJob]:
        """The jobs of our machines that `squeue` does not show any more, if Slurm keeps books."""
        wanted = set[str]().union(*self._recorded.values()) - known
        self._books = {id: job for id, job in self._books.items() if id in wanted}
        if unread := sorted(wanted - self._books.keys()):
            found = {job.id: job for job in await self._slurm.ended(unread)}
            self._books.update({id: found.get(id) for id in unread})
        return [job for job in self._books.values() if job is not None]

    async def _look_at_order(self, now: float) -> None:
        """Where our jobs are in the queue is good to know, but no more: it is asked for less often."""
        if now < self._order_at:
            return
        self._order_at = now + ORDER_POLLS * self._settings.poll_s
        with suppress(PlaceError):
            self._order = await self._slurm.order()

    async def list(self, pool: str) -> Sequence[Machine]:
        """All that has a folder, or a job that lives. Where it is up, the folder tells without a poll."""
        prefix = job_name(f"{pool}-")
        names = {name for name in self._folders() if name.startswith(prefix)}
        # one that was submitted since the last poll is not missing from it
        recorded = {job for name in names if (job := _read(self._root / name / "job"))}
        self._recorded[pool] = recorded
        unknown = recorded - self._queue.by_id.keys() - self._asked_for
        if unknown or self._pause_s() == 0.0:
            await self._ask_queue.fresh()
            self._asked_for = (self._asked_for & recorded) | unknown
        jobs = self._queue.by_name
        ours = f"{self._prefix}{prefix}"
        names |= {
            job.name.removeprefix(self._prefix)
            for job in jobs.values()
            if job.name.startswith(ours) and (job.waits or job.runs)
        }
        return tuple(self._seen(name) for name in sorted(names))

    def _folders(self) -> Sequence[str]:
        try:
            with os.scandir(self._root) as entries:
                return [entry.name for entry in entries if entry.is_dir()]
        except FileNotFoundError:
            return []
        except OSError as err:
            raise PlaceError(f"{self._root} cannot be read: {err}", transient=True, scope="place") from err

    def _seen(self, name: str) -> Machine:
        folder, machine = self._root / name, MachineId(unquote(name))
        start = _start(folder)
        if start is not None:
            return self._seen_started(machine, folder, start)
        job = self._queue.by_name.get(self._prefix + name)
        if job is not None and job.waits and job.reason in NEVER_STARTS:
            why = f"Slurm will not start its job ({job.reason}); change `{NEVER_STARTS[job.reason]}`"
            return Machine(machine, "gone", ran_s=0.0, detail=f"{why} of the place")
        if job is not None and job.waits:
            told = (self._order.get(job.id, ""), REASONS.get(job.reason, job.reason))
            return Machine(machine, "queued", ran_s=0.0, detail=", ".join(filter(None, told)))
        if job is not None and job.runs:
            if job.ran_s < MARK_S:  # its pilot is about to leave its mark, by which its life is counted
                return Machine(machine, "queued", ran_s=0.0, detail=f"starts on {job.node}")
            return Machine(machine, "pending", node=job.node, start=f"{job.id}.0", ran_s=job.ran_s)
        if not (folder / "job").exists():
            return Machine(machine, "queued", ran_s=0.0, detail="being submitted")
        state = job.state.lower() if job is not None else "forgotten"
        detail = f"its job ended before it began ({state}) {_last_words(folder)}".strip()
        return Machine(machine, "gone", ran_s=job.ran_s if job is not None else 0.0, detail=detail)

    def _seen_started(self, machine: MachineId, folder: Path, start: Start) -> Machine:
        job = self._queue.by_id.get(start.job)
        seen = Machine(machine, "gone", str(folder), start.node, start=start.start)
        told_s = _ran_s(folder)
        if job is not None and job.runs and not (folder / "restarted").exists():
            # while it ends, Slurm does not say why yet
            up = told_s is None and job.state != "COMPLETING" and (folder / "supervisor.sock").exists()
            up = up and not (folder / DELETING).exists()
            return structs.replace(seen, phase="up" if up else "pending", ran_s=self._running_s(start, job))
        # one that waits although it has run was requeued
        taken_back = (folder / "restarted").exists() or (
            job is not None and (job.state in TAKEN_BACK or job.waits)
        )
        return structs.replace(
            seen,
            phase="evicted" if taken_back else "gone",
            ran_s=self._ended_s(start, job) if told_s is None else told_s,
            detail=f"Slurm: {job.state.lower()}" if job is not None else "",
        )

    def _running_s(self, start: Start, job: SlurmJob) -> float:
        """By the mark, which is exact, unless its clock is off: Slurm counts whole seconds."""
        by_slurm = job.ran_s + time.monotonic() - self._queue.asked_at
        return max(0.0, min(max(time.time() - start.at, by_slurm - CLOCKS_S), by_slurm + CLOCKS_S))

    def _ended_s(self, start: Start, job: SlurmJob | None) -> float:
        """Its pilot could not tell how long it ran. If Slurm has forgotten it, it may have run to its
        limit."""
        if job is not None and not job.waits:
            return job.ran_s
        return min(max(0.0, time.time() - start.at), self._settings.time_limit_s)

    # -- making and ending ------------------------------------------------------------------------------

    async def create(self, machine: MachineId, offer: Offer, expires_s: float) -> None:
        async with self._turns.setdefault(machine, asyncio.Lock()):
            folder = self._root / job_name(machine)
            if (folder / DELETING).exists():
                raise PlaceError(f"{machine} is being deleted", transient=True, scope="machine")
            if (folder / "job").exists():
                return
            self._make_room(folder)
            try:
                self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
                folder.mkdir(mode=0o700, exist_ok=True)
                make_key(str(folder))
                if self._settings.reach == "mailbox":
                    (folder / MAIL).mkdir(mode=0o700, exist_ok=True)
                supervisor = self._bring_supervisor()
            except OSError as err:
                raise PlaceError(f"{folder} cannot be made: {err}", transient=True, scope="place") from err
            queue = await self._ask_queue.fresh()
            job = queue.by_name.get(self._prefix + folder.name)
            # an earlier controller may have submitted it, and been gone before it wrote that down
            id = job.id if job is not None else await self._submit(folder, supervisor, expires_s)
            replace(folder / "job", id.encode())

    def _make_room(self, folder: Path) -> None:
        most = self._settings.max_jobs
        if most is not None and not folder.exists() and len(self._folders()) >= most:
            raise PlaceError(f"all {most} jobs of {self._name} are in use", transient=True)

    def _bring_supervisor(self) -> Path:
        """The supervisor, and beside it the pilot, as files that the nodes see. Raises OSError."""
        data, pilot = archive(), PILOT.read_bytes()
        digest = hashlib.sha256(data + pilot).hexdigest()[:16]
        target = self._root.parent / f"supervisor-{digest}.pyz"
        for path, content in ((target.with_suffix(".py"), pilot), (target, data)):
            if not path.exists():
                replace(path, content)
        return target

    async def _submit(self, folder: Path, supervisor: Path, expires_s: float) -> str:
        settings = self._settings
        options = (
            f"--job-name={self._prefix}{folder.name}",
            "--no-requeue",
            f"--output={str(folder).replace('%', '%%')}/pilot.log",
            "--open-mode=append",
            f"--chdir={folder}",
            "--export=ALL",
            *self._wishes(expires_s + KILL_WAIT_S),
        )
        argv = (settings.python, "-I", str(supervisor.with_suffix(".py")), str(folder), str(supervisor))
        script = f"#!/bin/sh\nexec {shlex.join((*argv, f'{expires_s:.3f}'))}\n"
        return await self._slurm.submit(options, script)

    def _wishes(self, seconds: float) -> Sequence[str]:
        settings = self._settings
        wishes = {
            "partition": settings.partition,
            "account": settings.account,
            "qos": settings.qos,
            "constraint": settings.constraint,
            "cpus-per-task": str(settings.cpus or ""),
            "mem": f"{settings.memory_gb * 1024:.0f}M" if settings.memory_gb else "",
            "gpus-per-node": str(settings.gpus or ""),
        }
        options = [f"--{name}={value}" for name, value in wishes.items() if value]
        return ("--nodes=1", "--ntasks=1", f"--time={limit(seconds)}", *options, *settings.sbatch)

    async def extend(self, machine: MachineId, expires_s: float) -> None:
        raise PlaceError(
            f"{machine}: Slurm does not let its users extend jobs", transient=False, scope="machine"
        )

    async def delete(self, machine: MachineId) -> None:
        self._samples.drop(machine)
        async with self._turns.setdefault(machine, asyncio.Lock()):
            folder = self._root / job_name(machine)
            if folder.exists():
                with suppress(FileNotFoundError):
                    (folder / DELETING).touch()
            await self._end(machine, self._prefix + folder.name)
            try:
                await asyncio.to_thread(remove_tree, folder)
            except FileNotFoundError:
                pass
            except OSError as err:
                raise PlaceError(
                    f"{folder} cannot be removed: {err}", transient=True, scope="machine"
                ) from err

    async def _end(self, machine: MachineId, name: str) -> None:
        """Cancel the machine's job, and wait until it is over. Raises PlaceError."""
        until = time.monotonic() + KILL_WAIT_S
        job = (await self._ask_queue.fresh()).by_name.get(name)
        while job is not None and (job.waits or job.runs):
            if time.monotonic() > until:
                raise PlaceError(f"{machine}: job {job.id} does not end", transient=True, scope="machine")
            if job.state != "COMPLETING":
                await self._slurm.cancel([job.id])
            job = (await self._ask_queue.fresh()).by_name.get(name)

    # -- reaching them -----------------------------------------------------------------------------------

    def channel(self, machine: Machine, fence: Fence) -> Channel:
        folder = Path(machine.address) if machine.address else self._root / job_name(machine.id)

        async def dial(protocol: asyncio.Protocol) -> OpenLink:
            start = _start(folder)
            if start is None or (folder / DELETING).exists():
                raise ChannelError(f"there is no machine at {folder}")
            if machine.start and start.start != machine.start:
                raise ChannelError(f"{machine.id} was started anew")
            if (folder / MAIL).is_dir():
                key = read_key(str(folder))
                mail = await open_mail(FolderMail(str(folder / MAIL)), key, protocol)
                self._keep_line(mail)
                return OpenLink(mail, key)
            code = (self._settings.python, "-I", "-c", RELAY, str(self._bring_supervisor()), str(folder))
            argv = ("srun", f"--jobid={start.job}", *STEP_OPTIONS, *code)
            transport = await open_step(argv, self._slurm.environ, protocol, self._slurm.answer_s)
            self._keep_line(transport)
            return OpenLink(transport, read_key(str(folder)))

        mover = LocalMover(folder, self._secrets)
        return Resident(dial, mover, fence, self._secrets, functools.partial(self._samples.keep, machine.id))

    def _keep_line(self, line: StepTransport | MailTransport) -> None:
        self._lines = {other for other in self._lines if not other.ended.is_set()} | {line}

    async def examine(self, needs: Needs, workers: int = 1) -> Sequence[Check]:
        """Do Slurm's commands answer, would it take such jobs, and can the folder be used?

        Whether nodes have the Python, see the folder and allow steps, only a job can tell.
        """
        checks: list[Check] = []
        try:
            version = await self._slurm.run("sinfo", "--version")
            mine = len([job for job in await self._slurm.jobs() if job.waits or job.runs])
            checks.append(Check("commands", "good", f"{version.strip()}; {mine} jobs of yours wait or run"))
            checks.append(Check("settings", "good", await self._check_settings()))
        except PlaceError as err:
            checks.append(Check("settings" if checks else "commands", "bad", str(err)))
        checks.append(await asyncio.to_thread(self._check_folder))
        return checks

    def _check_folder(self) -> Check:
        """Can files be made, linked and locked in the folder that the nodes share? Leaves nothing there."""
        shared = self._root.parent
        there = next(path for path in (shared, *shared.parents) if path.exists())
        try:
            with tempfile.TemporaryDirectory(prefix=".evalfleet-", dir=there) as folder:
                first, second = Path(folder, "first"), Path(folder, "second")
                first.touch()
                os.link(first, second)
                with second.open("r+b") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as err:
            found = f"{there} is of no use: {err.strerror or err}"
            remedy = "name a `folder` on a file system that the nodes share and that has links and locks"
            return Check("folder", "bad", found, remedy)
        return Check("folder", "good", f"{shared}: files can be made, linked and locked there")

    def trust(self, keys: Sequence[HostKey]) -> None:
        """Slurm knows its nodes: there are no keys to confirm."""

    async def close(self) -> None:
        """Lines end with their channels, which are closed by now: wait until they have."""
        try:
            async with asyncio.timeout(STEP_END_S):
                for line in self._lines:
                    await line.ended.wait()
        except TimeoutError:
            for line in self._lines:
                line.abort()
            for line in self._lines:
                await line.ended.wait()


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _start(folder: Path) -> Start | None:
    try:
        mark = json.loads((folder / "start").read_text())
        return Start(str(mark["start"]), str(mark["node"]), float(mark["at"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _ran_s(folder: Path) -> float | None:
    try:
        return float((folder / "ran").read_text())
    except (OSError, ValueError):
        return None


def _last_words(folder: Path) -> str:
    """What the pilot said before it ended, in one line."""
    lines = _read(folder / "pilot.log").split("\n")
    return next((line.strip()[:DETAIL_CAP] for line in reversed(lines) if line.strip()), "")
