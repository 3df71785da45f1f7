"""The place `slurm`: a machine is a job of the cluster. It runs our supervisor, which takes attempts one
after another.

Its folder is on a file system that the nodes share with the login node, which is this computer or is reached
by SSH. What is said to the supervisor goes through a step of the job (`srun --overlap`), or, where steps are
forbidden, through a mailbox in that folder. Where nodes share no folder with anybody, it is in a bucket.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import getpass
import hashlib
import os
import secrets
import shlex
import socket
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from msgspec import Struct, structs

from evalfleet.channels.link import OpenLink
from evalfleet.channels.mail.boxes import MAIL_LOST_S, MAIL_SILENT_S
from evalfleet.channels.program import archive
from evalfleet.channels.samples import Samples
from evalfleet.channels.supervisor.files import job_name
from evalfleet.errors import ChannelError, PlaceError, RequestError
from evalfleet.model import Cost, Lifetime, Machine, MachineId, Needs, Offer
from evalfleet.ports import Belonging, Channel, Check, Fence, HostKey, PlaceContext
from evalfleet.single_flight import SingleFlight
from evalfleet.version import install_command

from .bucket import PROBE as BUCKET_PROBE
from .bucket import REACH_IT, BucketMail, bucket_mail
from .commands import Slurm, SlurmJob, limit
from .folders import MAIL
from .login import Login, MachineWay, ThisComputer
from .node_probe import PROBE, SHARE, TRY_AGAIN, TRY_S, probed, with_hint
from .settings import SlurmSettings
from .sight import (
    HomesTold,
    MachineFolder,
    MachinesTold,
    MissingTold,
    PathTold,
    Queue,
    Sight,
    as_told,
    belonging,
    folder_of,
    queue_of,
)

if TYPE_CHECKING:
    from .remote import LoginNode

PILOT = Path(__file__).with_name("pilot.py")
KILL_WAIT_S = 60.0
"""How long Slurm may take to end a job: it asks first, and kills later."""
SOON_S = 2.0
"""While a job is being submitted or ended, `squeue` is asked this often, if `poll_s` is longer."""
ORDER_POLLS = 6
REMOTE_LOOK_S = 2.0
"""Folders of a login node are looked at no more often than this: each time costs it a process."""
NOWHERE = "/nowhere"
"""Where the folder of a machine would be that has none yet."""
STEP_OPTIONS = ("--overlap", "--nodes=1", "--ntasks=1", "--mem=0", "--quiet", "--unbuffered")
RELAY = """\
import os, socket, sys
sys.path.insert(0, sys.argv[1])
from supervisor.verbs import carry
os.chdir(sys.argv[2])
line = socket.socket(socket.AF_UNIX)
line.connect("supervisor.sock")
os.write(1, b"ok  \\n")
carry(line)
"""
"""The program of a step: bytes both ways between its standard streams and the job's supervisor."""


class Site(Struct, frozen=True):
    """Where this home's files are, in the names of the computer that sees them."""

    shared: str
    root: str
    supervisor: str
    """The supervisor as one file, named by its content."""


@functools.cache
def site_at(root: str) -> Site:
    """What is where below the folder of a home."""
    return Site(os.path.dirname(root), root, f"{root}/supervisor-{digest()[:16]}.pyz")


@functools.cache
def digest() -> str:
    """What the supervisor's file must be. Attempts that are the same user can write it."""
    return hashlib.sha256(archive()).hexdigest()


class Survey(Struct, frozen=True):
    """What the folders of all machines told at one time."""

    folders: Mapping[str, MachineFolder]
    now: float
    looked_at: float
    marked_at: Mapping[str, float] = {}
    """When the mark of each start was first seen, by our own clock."""


class SlurmPlace:
    """Jobs of a Slurm cluster, each a machine that takes task after task."""

    Settings = SlurmSettings
    default_isolation = "none"

    def __init__(
        self, name: str, settings: SlurmSettings, context: PlaceContext, node: LoginNode | None = None
    ) -> None:
        self._name = name
        self._bucket: BucketMail | None = bucket_mail(name, settings, context, self.owner)
        self._settings = settings
        self._context = context
        self._node = node
        self._login: Login = node or ThisComputer(context.environ)
        self._slurm = Slurm(self._login)
        self._prefix = f"evalfleet-{context.home_id}-"
        self._samples = Samples(context.home)
        self._site: Site | None = None
        self._brought = False
        self._queue = Queue(-settings.poll_s, {}, {})
        self._ask_queue = SingleFlight(self._ask, self._pause_s)
        self._survey = Survey({}, 0.0, 0.0)
        self._look_around = SingleFlight(self._look, self._rest_s)
        self._asked_for: set[str] = set()
        self._recorded: dict[str, set[str]] = {}
        self._books: dict[str, SlurmJob | None] = {}
        self._order: Mapping[str, str] = {}
        self._order_at = 0.0
        self._turns: dict[MachineId, asyncio.Lock] = {}
        self._taken = False
        self._waiting = 0

    @classmethod
    def make(cls, name: str, settings: SlurmSettings, context: PlaceContext) -> SlurmPlace:
        if not settings.folder:
            raise RequestError(
                f"place {name!r} has no 'folder'; name one that the nodes share with the login node, such as "
                'folder = "~/evalfleet"'
            )
        if "://" in settings.folder:
            raise RequestError(
                f"place {name!r}: 'folder' is {settings.folder!r}; machines of Slurm need a folder of a file "
                "system that the nodes share, buckets are of no use to them"
            )
        if not settings.login:
            return cls(name, settings, context)
        if settings.reach == "mailbox":
            raise RequestError(
                f"place {name!r}: a mailbox in `folder` is not reached through `login`; set "
                'mailbox = "s3://BUCKET/PREFIX", or run evalfleet on the login node'
            )
        try:
            from .remote import LoginNode
        except ModuleNotFoundError as err:
            if err.name != "asyncssh":
                raise
            raise RequestError(f"place {name!r} needs asyncssh: {install_command('ssh')}") from err
        from evalfleet.places.ssh.place import SshSettings, access_of

        by_ssh = SshSettings(
            (settings.login,),
            key=settings.key,
            known_hosts=settings.known_hosts,
            jump=settings.jump,
            python=settings.python,
        )
        node = LoginNode(settings.login, access_of(name, by_ssh, context), name, context.home_id)
        return cls(name, settings, context, node)

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
                settings.partition,
                capacity=settings.max_jobs,
                cost=Cost(usd_per_hour=settings.usd_per_hour),
                life=Lifetime(
                    teardown_s=KILL_WAIT_S,
                    settle_s=settings.poll_s,
                    queues=True,
                    queue_s=settings.expected_queue_s,
                    max_queue_s=settings.queue_s if self._bucket is None else self._bucket.max_queue_s,
                    extendable=False,
                    max_life_s=settings.time_limit_s,
                    boot_s=settings.boot_s,
                    silent_s=MAIL_SILENT_S if self._by_mail else 20.0,
                    lost_s=MAIL_LOST_S if self._by_mail else 60.0,
                ),
            ),
        )

    @property
    def _by_mail(self) -> bool:
        return self._settings.reach == "mailbox" or self._bucket is not None

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

    # -- folders -------------------------------------------------------------------------------------

    async def _do(self, verb: str, scope: str = "place", **about: Any) -> dict[str, Any]:
        """Something with folders, where they are seen. Raises PlaceError."""
        answer = await self._login.perform({"verb": verb, **about})
        if error := answer.get("error"):
            raise PlaceError(str(error), transient=True, scope="machine" if scope == "machine" else "place")
        return answer

    async def _here(self) -> Site:
        """Where our files are. Raises PlaceError."""
        if self._site is None:
            path = self._settings.folder
            if self._node is None:
                path = str(self._context.base / os.path.expanduser(path))
            shared = as_told(await self._do("resolve", path=path), PathTold).path
            self._site = site_at(f"{shared}/{self._context.home_id}")
        return self._site

    def _rest_s(self) -> float:
        far = self._node is not None or self._bucket is not None
        pause_s = min(REMOTE_LOOK_S, self._settings.poll_s) if far else 0.0
        return max(0.0, self._survey.looked_at + pause_s - time.monotonic())

    async def _look(self) -> Survey:
        site = await self._here()
        answer = as_told(await self._do("survey", root=site.root), MachinesTold)
        folders = {name: folder_of(told) for name, told in answer.machines.items()}
        if self._bucket is not None:
            folders = await self._bucket.seen(folders, self._queue)
        looked_at, known = time.monotonic(), self._survey.marked_at
        marks = [it.start.start for it in folders.values() if it.start is not None]
        marked_at = {mark: known.get(mark, looked_at) for mark in marks}
        self._survey = Survey(folders, answer.now, looked_at, marked_at)
        return self._survey

    async def _bring_supervisor(self, site: Site) -> None:
        """The supervisor as a file that the nodes see, written again if it was changed. Raises PlaceError."""
        file = {"path": site.supervisor, "digest": digest()}
        if as_told(await self._do("bring", **file), MissingTold).missing:
            await self._do("bring", **file, content=base64.b64encode(archive()).decode())
        self._brought = True

    # -- what exists ---------------------------------------------------------------------------------

    def _pause_s(self) -> float:
        pause_s = min(SOON_S, self._settings.poll_s) if self._waiting else self._settings.poll_s
        return max(0.0, self._queue.asked_at + pause_s - time.monotonic())

    @contextmanager
    def _soon(self) -> Generator[None]:
        """Meanwhile a job is about to change, and its machine waits for the word."""
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

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
        self._queue = queue_of(asked_at, jobs)
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
        site, survey = await self._here(), await self._look_around.fresh()
        recorded = {job for name, it in survey.folders.items() if name.startswith(prefix) for job in it.jobs}
        self._recorded[pool] = recorded
        unknown = recorded - self._queue.by_id.keys() - self._asked_for
        if unknown or self._pause_s() == 0.0:
            with self._soon() if unknown else nullcontext():
                await self._ask_queue.fresh()
            self._asked_for = (self._asked_for & recorded) | unknown
            survey = await self._look_around.fresh()  # what Slurm says of a job must not be newer
        ours = f"{self._prefix}{prefix}"
        names = {name for name in survey.folders if name.startswith(prefix)} | {
            job.name.removeprefix(self._prefix)
            for job in self._queue.by_name.values()
            if job.name.startswith(ours) and (job.waits or job.runs)
        }
        sight = self._sight(survey)
        return tuple(
            sight.machine(
                MachineId(unquote(name)),
                f"{site.root}/{name}",
                self._prefix + name,
                self._as_asked(survey.folders.get(name) or MachineFolder()),
            )
            for name in sorted(names)
        )

    def _as_asked(self, folder: MachineFolder) -> MachineFolder:
        """A job that was submitted after Slurm was asked, and may have begun, is not missing there."""
        unknown = folder.jobs - self._queue.by_id.keys() - self._asked_for
        return structs.replace(folder, job="", start=None) if unknown else folder

    def _sight(self, survey: Survey) -> Sight:
        asked_at = self._queue.asked_at
        begun = {mark for mark, seen_at in survey.marked_at.items() if seen_at > asked_at}
        ago_s = time.monotonic() - asked_at
        return Sight(self._queue, self._order, survey.now, ago_s, self._settings.time_limit_s, begun)

    # -- making and ending ------------------------------------------------------------------------------

    async def create(self, machine: MachineId, offer: Offer, expires_s: float) -> None:
        async with self._turns.setdefault(machine, asyncio.Lock()):
            site, name = await self._here(), job_name(machine)
            told = await self._do(
                "make",
                root=site.root,
                name=name,
                most=self._settings.max_jobs,
                mail=self._settings.reach == "mailbox" and self._bucket is None,
                key=secrets.token_hex(32),
                about={
                    "owner": self.owner,
                    "life_s": expires_s,
                    "at": time.time(),
                    "of_pool": self._context.for_pool,
                    "mail": self._by_mail,
                },
            )
            if told.get("full"):
                raise PlaceError(
                    f"all {self._settings.max_jobs} jobs of {self._name} are in use", transient=True
                )
            folder = folder_of(told)
            if folder.deleting:
                raise PlaceError(f"{machine} is being deleted", transient=True, scope="machine")
            if folder.job:
                return
            await self._bring_supervisor(site)
            queue = await self._ask_queue.fresh()
            job = queue.by_name.get(self._prefix + name)
            # An earlier controller may have submitted it, and been gone before it wrote that down. One that
            # is over was that of an earlier machine of this name, or has done nothing.
            lives = job is not None and (job.waits or job.runs)
            id = job.id if job is not None and lives else await self._submit(site, machine, expires_s)
            await self._do("record", "machine", root=site.root, name=name, job=id)
            # the end of this home's last machine, at the same time, may have taken the file away
            await self._bring_supervisor(site)

    @property
    def owner(self) -> str:
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a container may have no name for its user
            user = str(os.getuid())
        return f"{user}@{socket.gethostname()}"

    async def _submit(self, site: Site, machine: MachineId, expires_s: float) -> str:
        name = job_name(machine)
        folder = f"{site.root}/{name}"
        by_folder = (f"--output={folder.replace('%', '%%')}/pilot.log", f"--chdir={folder}")
        options = (
            f"--job-name={self._prefix}{name}",
            "--no-requeue",
            "--open-mode=append",
            "--export=ALL",
            *(by_folder if self._bucket is None else ("--output=/dev/null", "--chdir=/")),
            *self._wishes(expires_s + KILL_WAIT_S),
        )
        if self._bucket is not None:
            return await self._slurm.submit(options, await self._bucket.script(machine, expires_s))
        pilot = (self._settings.python, "-I", "-c", PILOT.read_text())
        command = shlex.join((*pilot, folder, site.supervisor, digest(), f"{expires_s:.3f}"))
        return await self._slurm.submit(options, f"#!/bin/sh\nexec {command}\n")

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

    async def delete(self, machine: MachineId) -> None:
        self._samples.drop(machine)
        await self._delete(self._context.home_id, machine)

    async def _delete(self, home: str, machine: MachineId) -> None:
        async with self._turns.setdefault(machine, asyncio.Lock()):
            site, name = await self._here(), job_name(machine)
            about = {"root": f"{site.shared}/{home}", "name": name}
            await self._do("doom", "machine", **about)
            with self._soon():
                await self._end(machine, f"evalfleet-{home}-{name}")
            if self._bucket is not None:
                await self._bucket.remove(home, machine)
            await self._do("remove", "machine", **about, supervisor=site.supervisor)

    async def _end(self, machine: MachineId, name: str) -> None:
        """Cancel the machine's job, and wait until it is over. Raises PlaceError."""
        until = time.monotonic() + KILL_WAIT_S
        seen = self._queue.by_name.get(name)
        if seen is not None and (seen.waits or seen.runs):
            with suppress(PlaceError):  # it may be over by now; the next poll, which tells, is seconds off
                await self._slurm.cancel([seen.id])
        job = (await self._ask_queue.fresh()).by_name.get(name)
        while job is not None and (job.waits or job.runs):
            if time.monotonic() > until:
                raise PlaceError(f"{machine}: job {job.id} does not end", transient=True, scope="machine")
            if job.state != "COMPLETING":
                await self._slurm.cancel([job.id])
            job = (await self._ask_queue.fresh()).by_name.get(name)

    # -- what other homes have left ------------------------------------------------------------------------

    async def belongings(self) -> Sequence[Belonging]:
        """Jobs and folders of all homes that use this folder, and jobs of this user whose folder is gone."""
        site = await self._here()
        # in the other order than they are made: what comes up meanwhile must not look over
        boxes = () if self._bucket is None else await self._bucket.boxes.all()
        told = as_told(await self._do("survey_all", shared=site.shared), HomesTold)
        queue = await self._ask_queue.fresh()
        folders = {
            (home, name): folder_of(folder)
            for home, machines in told.homes.items()
            for name, folder in machines.items()
        }
        for box in boxes:
            folders.setdefault((box.home, job_name(box.machine)), MachineFolder(owner=box.owner))
        for job in queue.by_name.values():
            mark, _, rest = job.name.partition("-")
            home, _, name = rest.partition("-")
            if mark == "evalfleet" and name and (job.waits or job.runs):
                folders.setdefault((home, name), MachineFolder())
        jobs, us, now = queue.by_name, self.owner, time.time()
        return [
            belonging(site.shared, home, name, folder, jobs.get(f"evalfleet-{home}-{name}"), us, now)
            for (home, name), folder in sorted(folders.items())
        ]

    async def reap(self, belonging: Belonging) -> None:
        await self._delete(belonging.home, belonging.machine)

    # -- reaching them -----------------------------------------------------------------------------------

    def channel(self, machine: Machine, fence: Fence) -> Channel:
        folder = machine.address or f"{NOWHERE}/{job_name(machine.id)}"
        site = site_at(os.path.dirname(folder))

        async def dial(protocol: asyncio.Protocol) -> OpenLink:
            if not machine.address:
                raise ChannelError(f"{machine.id} has not started")
            try:
                told = folder_of(await self._do("look", "machine", folder=folder))
                if not self._brought:
                    await self._bring_supervisor(site)
            except PlaceError as err:
                raise OSError(str(err)) from err
            if told.start is None or told.deleting:
                raise ChannelError(f"there is no machine at {folder}")
            if machine.start and told.start.start != machine.start:
                raise ChannelError(f"{machine.id} was started anew")
            if told.mail:
                if not isinstance(self._login, ThisComputer):
                    raise ChannelError(f"{machine.id} has a mailbox; run evalfleet on the login node")
                return await self._login.open_mail(f"{folder}/{MAIL}", told.key, protocol)
            code = (self._settings.python, "-I", "-c", RELAY, site.supervisor, folder)
            argv = ("srun", f"--jobid={told.start.job}", *STEP_OPTIONS, *code)
            try:
                line = await self._login.open_step(argv, protocol, self._slurm.answer_s)
            except OSError as err:
                raise OSError(with_hint(str(err))) from err
            return OpenLink(line, told.key)

        on_load = functools.partial(self._samples.keep, machine.id)
        if self._bucket is not None:
            return self._bucket.boxes.channel(machine.id, fence, self._context.secrets, on_load)
        way = MachineWay(machine.id, folder, site.supervisor, dial, fence, on_load)
        return self._login.channel(way, self._context.secrets)

    async def examine(self, needs: Needs, workers: int = 1) -> Sequence[Check]:
        """Do Slurm's commands answer, would it take such jobs, and can the folder be used?"""
        checks: list[Check] = []
        try:
            version = await self._slurm.run("sinfo", "--version")
            mine = len([job for job in await self._slurm.jobs() if job.waits or job.runs])
            checks.append(Check("commands", "good", f"{version.strip()}; {mine} jobs of yours wait or run"))
            checks.append(Check("settings", "good", await self._check_settings()))
        except PlaceError as err:
            checks.append(Check("settings" if checks else "commands", "bad", str(err)))
        try:
            site = await self._here()
            await self._do("check", path=site.shared)
            found = f"{site.shared}: files can be made, linked and locked there"
            checks.append(Check("folder", "good", found))
        except PlaceError as err:
            checks.append(Check("folder", "bad", str(err), SHARE))
        return [*checks, *(() if self._bucket is None else await self._bucket.examine())]

    async def try_out(self, needs: Needs) -> Sequence[Check]:
        """What only a job can tell: Python on a node, the shared folder (or the mailbox) as seen from there,
        the right to start steps, clocks. The job takes seconds, and nothing of it is left."""
        settings, name = self._settings, f"{self._prefix}doctor-{secrets.token_hex(4)}"
        try:
            shared = (await self._here()).shared
            told = as_told(await self._do("plant", path=shared), PathTold)
            planted, now, remedy, program, seen = told.path, told.now, SHARE, PROBE, told.path
            if self._bucket is not None:
                program, seen = BUCKET_PROBE, await self._bucket.boxes.plant(name, 4 * TRY_S)
                shared, remedy = self._bucket.url, REACH_IT
        except PlaceError:
            return ()  # `examine` tells
        argv = (
            *("srun", f"--job-name={name}", "--quiet", f"--immediate={TRY_S:.0f}"),
            *(*self._wishes(60.0), "--", settings.python, "-I", "-c", program, seen),
        )
        try:
            return probed(settings, await self._login.run(argv, "", 2 * TRY_S), now, shared, remedy)
        except TimeoutError:
            return (Check("nodes", "warn", f"no node was free within {2 * TRY_S:.0f} s", TRY_AGAIN),)
        except PlaceError as err:
            return (Check("nodes", "bad", str(err)),)
        finally:
            with suppress(PlaceError):
                await self._slurm.cancel([job.id for job in await self._slurm.jobs() if job.name == name])
            with suppress(PlaceError):
                await self._do("uproot", path=planted)
            with suppress(PlaceError):
                if self._bucket is not None:
                    await self._bucket.boxes.uproot(name)

    async def unknown_keys(self) -> Sequence[HostKey]:
        """The login node's; Slurm knows its nodes."""
        if self._node is None:
            return ()
        from evalfleet.places.ssh.examination import host_key

        err = await self._node.unknown_key()
        return () if err is None else (host_key(err, self._settings.login),)

    def trust(self, keys: Sequence[HostKey]) -> None:
        from evalfleet.places.ssh.examination import write_down

        write_down(keys)

    async def close(self) -> None:
        await self._login.close()
