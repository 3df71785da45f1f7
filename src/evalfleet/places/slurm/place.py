"""The place `slurm`: a machine is a job of the cluster. It runs our supervisor, which takes attempts one
after another.

Its folder is on a file system that the nodes share with this computer: bundles and artefacts are written and
read there directly. What is said to the supervisor goes through a step of the job (`srun --overlap`).
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import unquote

from msgspec import Meta, Struct, structs

from evalfleet.channels.artefacts import LocalMover
from evalfleet.channels.link import OpenLink
from evalfleet.channels.program import archive
from evalfleet.channels.resident import Resident
from evalfleet.channels.samples import Samples
from evalfleet.channels.supervisor.files import job_name, make_key, read_key
from evalfleet.channels.supervisor.machine import DELETING
from evalfleet.errors import ChannelError, PlaceError, RequestError
from evalfleet.files import replace
from evalfleet.model import Machine, MachineId, Needs, Offer
from evalfleet.ports import Channel, Check, Fence, PlaceContext
from evalfleet.single_flight import SingleFlight

from .commands import ANSWER_S, TAKEN_BACK, Slurm, SlurmJob, limit
from .step import open_step

PILOT = Path(__file__).with_name("pilot.py")
KILL_WAIT_S = 60.0
"""How long Slurm may take to end a job: it asks first, and kills later."""


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
    cpus: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="of a job (default: as needed)")] = (
        None
    )
    memory_gb: Annotated[float, Meta(ge=0, description="of a job (0: the cluster's default)")] = 0.0
    gpus: Annotated[int, Meta(ge=0, description="of a job")] = 0
    max_jobs: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="never more than this at once")
    ] = None
    usd_per_hour: Annotated[float, Meta(ge=0, le=10_000, description="what a job costs, if it does")] = 0.0
    python: Annotated[str, Meta(min_length=1, description="a Python 3.8 or later on the nodes")] = "python3"
    poll_s: Annotated[float, Meta(gt=0, description="squeue is asked no more often than this")] = 10.0
    sbatch: Annotated[tuple[str, ...], Meta(description="more options of sbatch")] = ()
    isolation: Annotated[
        Literal["user", "container", "none"] | None, Meta(description="how attempts are kept apart")
    ] = None


class Start(Struct, frozen=True):
    """The mark that a pilot has left of its start."""

    start: str
    node: str
    at: float


class SlurmPlace:
    """Jobs of a Slurm cluster, each a machine that takes task after task. Run it on a login node."""

    Settings = SlurmSettings
    default_isolation = "none"

    def __init__(self, name: str, settings: SlurmSettings, context: PlaceContext) -> None:
        self._name = name
        self._settings = settings
        self._slurm = Slurm(context.environ)
        self._root = (
            Path(os.path.realpath(context.base / os.path.expanduser(settings.folder))) / context.home_id
        )
        self._secrets = context.secrets
        self._samples = Samples(context.home)
        self._asked_at = -settings.poll_s
        self._jobs = SingleFlight(self._ask, self._pause_s)
        self._turns: dict[MachineId, asyncio.Lock] = {}
        self._submitted: dict[MachineId, str] = {}

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
        settings = self._settings
        if needs.strict and needs.gpus > settings.gpus:
            raise PlaceError(
                f"jobs of {self._name} have {settings.gpus} of {needs.gpus} GPUs; set `gpus` of the place",
                transient=False,
                scope="place",
            )
        return (
            Offer(
                self._name,
                "job",
                region=settings.partition,
                usd_per_hour=settings.usd_per_hour,
                capacity=settings.max_jobs,
                teardown_s=KILL_WAIT_S,
                queues=True,
                extendable=False,
                max_life_s=settings.time_limit_s,
                silent_s=20.0,
                lost_s=60.0,
            ),
        )

    # -- what exists ---------------------------------------------------------------------------------

    def _pause_s(self) -> float:
        return max(0.0, self._asked_at + self._settings.poll_s - time.monotonic())

    async def _ask(self) -> Mapping[str, SlurmJob]:
        """Job by name. Of several of one name, one that lives goes before one that does not."""
        self._asked_at = time.monotonic()
        jobs = await self._slurm.jobs()
        return {job.name: job for job in sorted(jobs, key=lambda job: (job.lives, job.waits))}

    def _names(self) -> list[str]:
        try:
            with os.scandir(self._root) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir())
        except FileNotFoundError:
            return []
        except OSError as err:
            raise PlaceError(f"{self._root} cannot be read: {err}", transient=True, scope="place") from err

    async def list(self, pool: str) -> Sequence[Machine]:
        prefix = job_name(f"{pool}-")
        names = [name for name in self._names() if name.startswith(prefix)]
        jobs = await self._jobs.fresh() if names else {}
        return tuple(self._seen(name, jobs.get(self._job(name))) for name in names)

    def _seen(self, name: str, job: SlurmJob | None) -> Machine:
        folder, machine = self._root / name, MachineId(unquote(name))
        start = _start(folder)
        if start is None:
            if job is None or not (job.waits or job.lives):
                gone = (folder / "job").exists()  # it was submitted, and has ended before it began
                return Machine(machine, "gone" if gone else "queued", ran_s=0.0)
            return Machine(machine, "queued" if job.waits else "pending", node=job.node, ran_s=job.ran_s)
        told_s = _ran_s(folder)
        seen = Machine(machine, "gone", address=str(folder), node=start.node, start=start.start, ran_s=told_s)
        if told_s is None and job is not None and job.lives:
            up = (folder / "jobs").exists() and not (folder / DELETING).exists()
            return structs.replace(seen, phase="up" if up else "pending", ran_s=time.time() - start.at)
        if told_s is None:
            seen = structs.replace(seen, ran_s=self._most_s(start) if job is None else job.ran_s)
        taken_back = job is not None and job.state in TAKEN_BACK
        return structs.replace(seen, phase="evicted") if taken_back else seen

    def _most_s(self, start: Start) -> float:
        """Slurm has forgotten the job, and the job could not tell: it may have run to its limit."""
        return min(max(0.0, time.time() - start.at), self._settings.time_limit_s)

    def _job(self, folder: str) -> str:
        """What the machine's job is called. Homes that share a cluster do not meet."""
        return f"evalfleet-{self._root.name}-{folder}"

    # -- making and ending ------------------------------------------------------------------------------

    async def create(self, machine: MachineId, offer: Offer, expires_s: float) -> None:
        async with self._turns.setdefault(machine, asyncio.Lock()):
            folder = self._root / job_name(machine)
            if (folder / DELETING).exists():
                raise PlaceError(f"{machine} is being deleted", transient=True, scope="machine")
            if machine in self._submitted or (folder / "job").exists():
                return
            self._make_room(folder)
            try:
                self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
                folder.mkdir(mode=0o700, exist_ok=True)
                make_key(str(folder))
                supervisor = self._bring_supervisor()
            except OSError as err:
                raise PlaceError(f"{folder} cannot be made: {err}", transient=True, scope="place") from err
            known = (await self._jobs.fresh()).get(self._job(folder.name))
            if known is None or not (known.waits or known.lives):
                job = await self._submit(folder, supervisor, expires_s)
            else:
                job = (
                    known.id
                )  # an earlier controller has submitted it, and was gone before it wrote that down
            self._submitted[machine] = job
            replace(folder / "job", job.encode())

    def _make_room(self, folder: Path) -> None:
        most = self._settings.max_jobs
        if most is not None and not folder.exists() and len(self._names()) >= most:
            raise PlaceError(f"all {most} jobs of {self._name} are in use", transient=True)

    def _bring_supervisor(self) -> Path:
        """The supervisor and the pilot, as files that the nodes see."""
        import hashlib

        data = archive()
        target = self._root.parent / f"supervisor-{hashlib.sha256(data).hexdigest()[:16]}.pyz"
        pilot = target.with_suffix(".py")
        for path, content in ((target, data), (pilot, PILOT.read_bytes())):
            if not path.exists():
                replace(path, content)
        return target

    async def _submit(self, folder: Path, supervisor: Path, expires_s: float) -> str:
        settings = self._settings
        options = [
            f"--job-name={self._job(folder.name)}",
            "--no-requeue",
            "--nodes=1",
            "--ntasks=1",
            f"--time={limit(expires_s + KILL_WAIT_S)}",
            f"--output={folder}/pilot.log",
            "--open-mode=append",
            f"--chdir={folder}",
            "--export=NONE",
            *(f"--{flag}={value}" for flag, value in self._wishes() if value),
            *settings.sbatch,
        ]
        argv = (settings.python, "-I", str(supervisor.with_suffix(".py")), str(folder), str(supervisor))
        script = f"#!/bin/sh\nexec {shlex.join((*argv, f'{expires_s:.3f}'))}\n"
        return await self._slurm.submit(options, script)

    def _wishes(self) -> Sequence[tuple[str, str]]:
        settings = self._settings
        return (
            ("partition", settings.partition),
            ("account", settings.account),
            ("qos", settings.qos),
            ("constraint", settings.constraint),
            ("cpus-per-task", str(settings.cpus or "")),
            ("mem", f"{settings.memory_gb * 1024:.0f}M" if settings.memory_gb else ""),
            ("gpus-per-node", str(settings.gpus or "")),
        )

    async def extend(self, machine: MachineId, expires_s: float) -> None:
        raise PlaceError(
            f"{machine}: Slurm lets users not extend jobs that run", transient=False, scope="machine"
        )

    async def delete(self, machine: MachineId) -> None:
        self._samples.drop(machine)
        async with self._turns.setdefault(machine, asyncio.Lock()):
            folder = self._root / job_name(machine)
            if not folder.exists():
                return
            with suppress(FileNotFoundError):
                (folder / DELETING).touch()
            await self._end(machine, self._job(folder.name))
            self._submitted.pop(machine, None)
            try:
                await asyncio.to_thread(shutil.rmtree, folder)
            except FileNotFoundError:
                pass
            except OSError as err:
                raise PlaceError(
                    f"{folder} cannot be removed: {err}", transient=True, scope="machine"
                ) from err

    async def _end(self, machine: MachineId, name: str) -> None:
        """Cancel the machine's job, and wait until it is over. Raises PlaceError."""
        until = time.monotonic() + KILL_WAIT_S
        job = (await self._jobs.fresh()).get(name)
        while job is not None and (job.waits or job.lives):
            if time.monotonic() > until:
                raise PlaceError(f"{machine}: job {job.id} does not end", transient=True, scope="machine")
            if job.state != "COMPLETING":
                await self._slurm.cancel([job.id])
            job = (await self._jobs.fresh()).get(name)

    # -- reaching them -----------------------------------------------------------------------------------

    def channel(self, machine: Machine, fence: Fence) -> Channel:
        folder = Path(machine.address) if machine.address else self._root / job_name(machine.id)

        async def dial(protocol: asyncio.Protocol) -> OpenLink:
            if not folder.exists() or (folder / DELETING).exists():
                raise ChannelError(f"there is no machine at {folder}")
            start = _start(folder)
            if start is None or (machine.start and start.start != machine.start):
                raise ChannelError(f"{machine.id} was started anew, or has ended")
            supervisor = self._bring_supervisor()
            argv = self._step(start.start.partition(".")[0], supervisor, folder)
            transport = await open_step(argv, self._slurm.environ, protocol, ANSWER_S)
            return OpenLink(transport, read_key(str(folder)))

        mover = LocalMover(folder, self._secrets)
        return Resident(dial, mover, fence, self._secrets, functools.partial(self._samples.keep, machine.id))

    def _step(self, job: str, supervisor: Path, folder: Path) -> Sequence[str]:
        """A step of the job that carries bytes between here and its supervisor."""
        relay = (
            "import os,socket,sys;sys.path.insert(0,sys.argv[1]);from supervisor.verbs import carry;"
            "os.chdir(sys.argv[2]);s=socket.socket(socket.AF_UNIX);s.connect('supervisor.sock');"
            "os.write(1,b'ok\\n');carry(s)"
        )
        options = (
            "--overlap",
            "--nodes=1",
            "--ntasks=1",
            "--quiet",
            "--unbuffered",
            "--mem=0",
            "--cpu-bind=none",
        )
        return (
            "srun",
            f"--jobid={job}",
            *options,
            self._settings.python,
            "-I",
            "-c",
            relay,
            str(supervisor),
            str(folder),
        )

    async def examine(self, needs: Needs, workers: int = 1) -> Sequence[Check]:
        """Do Slurm's commands answer, and would it take a job with these settings?"""
        try:
            await self._slurm.jobs()
            options = [f"--{flag}={value}" for flag, value in self._wishes() if value]
            said = await self._slurm.run(
                *("sbatch", "--test-only", f"--time={limit(self._settings.time_limit_s)}", *options),
                given="#!/bin/sh\ntrue\n",
            )
        except PlaceError as err:
            return (Check("slurm", "bad", str(err)),)
        return (Check("slurm", "good", said.strip() or "it takes jobs with these settings"),)

    async def close(self) -> None:
        """Steps end with their channels."""


def _start(folder: Path) -> Start | None:
    try:
        told = json.loads((folder / "start").read_text())
        return Start(str(told["start"]), str(told["node"]), float(told["at"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _ran_s(folder: Path) -> float | None:
    try:
        return float((folder / "ran").read_text())
    except (OSError, ValueError):
        return None
