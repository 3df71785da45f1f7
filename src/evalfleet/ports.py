"""What a plug-in may be (Benchmark, Place, Channel), and what the engine needs from the world.

Three kinds of place fit one protocol:

* machines we create (VMs): `create` makes one, `channel` reaches it, `delete` ends its billing;
* machines we are lent (SSH hosts): `create` takes a lock on a free host, `delete` gives it back clean;
* services that place work themselves (Slurm, Batch): a machine is one job of the service, which runs our
  supervisor and takes attempts one after another (a pilot). `create` submits the job, `list` shows it as
  `queued` until the service starts it, the channel reaches the supervisor, `delete` cancels the job.
"""

from __future__ import annotations

from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, runtime_checkable

from msgspec import Struct

from .events import Event, Record
from .model import (
    AttemptId,
    Bundle,
    Collected,
    Command,
    Ended,
    Grade,
    Isolated,
    Isolation,
    Job,
    KeptFiles,
    Machine,
    MachineId,
    Metering,
    Micros,
    Needs,
    Offer,
    Outcome,
    Piece,
    Scorer,
    Task,
    Trajectory,
)

if TYPE_CHECKING:
    import asyncio


class Benchmark(Protocol):
    """A description of work as data, which also reads results. It is pure once made, and never sees a
    machine."""

    @property
    def name(self) -> str: ...

    @property
    def needs(self) -> Needs: ...

    @property
    def bundle(self) -> Bundle:
        """What every machine gets once."""
        ...

    @property
    def probe(self) -> Command | None:
        """Succeeds on a machine that is ready for work, and fails on one that is not."""
        ...

    def command(self, task: Task, attempt: AttemptId) -> Command: ...

    def outcome(self, task: Task, ended: Ended, healthy: bool) -> Outcome:
        """What the end of an attempt means. `healthy`: the machine answered its probe afterwards."""
        ...


class Answer(Struct, frozen=True):
    """What one attempt has left to be graded."""

    task: Task
    attempt: AttemptId
    folder: Path
    """Its artefacts and its log, as they came home."""
    wanted: bool
    """False: it has a grade already, and is here for graders that must see all answers of a run."""


class Grader(Protocol):
    """What grades answers, where the controller is, in whatever environment the benchmark needs for it."""

    def grade(
        self, answers: Sequence[Answer], scratch: Path, secrets: Mapping[str, str]
    ) -> AsyncIterator[tuple[AttemptId, Grade]]:
        """The grade of each answer that is wanted, in any order, as soon as it is known.

        It may take hours, but must not hold up the event loop: what computes belongs into a process or a
        thread. Each grade is recorded when it is given, so after a crash only the others are asked for;
        `scratch` is a folder to make and to keep things in, which is then still there. An answer without a
        grade, or whose grade is `Broken`, is broken for good; by the cause `grading`, until `resume` or
        `grade` asks for its grade again. Whatever is raised leaves the answers as they
        are, to be graded later. Repeats of a task are told apart by their attempts only.
        """
        ...


@runtime_checkable
class Graded(Protocol):
    """A benchmark whose answers are graded after the last task."""

    @property
    def grader(self) -> Grader | None:
        """What grades its answers. None: `outcome` scores every attempt when it ends."""
        ...


@runtime_checkable
class HasGuest(Protocol):
    """A benchmark whose agents may work in a system inside its machines."""

    @property
    def guest(self) -> Guest | None:
        """That system. None: they work on the machines themselves."""
        ...


@runtime_checkable
class FileBenchmark(Protocol):
    """A benchmark made of files, which each run keeps: what happens to them here later does not matter.

    Its tasks may have files, set-up steps and a score command of their own.
    """

    def keep(self, tasks: Sequence[Task], folder: Path, twins: Callable[[str], Path | None]) -> None:
        """Copy all that machines get for these tasks into the folder. Raises RequestError.

        `twins` tells where another run keeps the same bundle, by its digest.
        """
        ...

    def with_kept(self, folder: Path) -> Benchmark:
        """The same benchmark, with the files that were kept in the folder, if there are any."""
        ...

    def check_files(self, tasks: Sequence[Task]) -> None:
        """Raises RequestError if what machines get cannot be read, or is not what was planned."""
        ...

    def task_bundle(self, task: Task) -> Bundle:
        """What a machine gets before its first attempt at the task; one without a digest is nothing."""
        ...

    def scorer(self, task: Task, attempt: AttemptId) -> Scorer | None:
        """The command that scores the attempt on its machine. None: the attempt's own result counts."""
        ...

    def scored(self, task: Task, ended: Ended, scorer: Ended) -> Outcome:
        """What the end of an attempt and that of its score command mean."""
        ...


class Fence(Struct, frozen=True):
    """The caller of a machine, which obeys the highest epoch that it has seen and refuses lower ones."""

    run: str
    epoch: int
    silent_s: float
    """As the offer of the machine says: after so long without a word a call is given up."""
    looks_on: bool = False
    """It only follows files: it is no controller, takes nothing over, and keeps no lease alive."""


TellStep = Callable[[str, str], None]
"""A step of set-up, and what it says; nothing yet when it begins."""


class Channel(Protocol):
    """A way to one machine, in one of its starts. Jobs are detached and named by the caller.

    Every call may be repeated, by this controller or by its successor. A call that cannot reach the
    machine reconnects by itself, and raises ChannelError once nothing was heard for the fence's
    `silent_s`. StaleController means that, by what the machine says, a newer controller has been here.

    When a service has started the machine anew, jobs of the earlier start have ended as `evicted`, if that
    can be told, and everything else raises ChannelError.
    """

    async def prepare(
        self, bundle: Bundle, left: Path | None = None, tell: TellStep | None = None
    ) -> Mapping[str, float]:
        """Put the bundle's files on the machine and run its steps, each once. Raises SetupFailed.

        Returns the seconds of the steps that were run now. What a step that failed has left, its log and
        what it put into $EVALFLEET_OUT, is brought into `left`/STEP, if that can be done. `tell` is called
        with each step as it begins, and now and then with a line that it says meanwhile.
        """
        ...

    async def probe(self, command: Command | None) -> bool:
        """Does the machine answer and, if a command is given, does that succeed?"""
        ...

    async def start(self, job: Job) -> None:
        """Start the job, or do nothing if a job of this id was ever started here."""
        ...

    async def ended(self, job: AttemptId) -> Ended:
        """Wait until the job has ended. `lost` if the machine knows of no such job."""
        ...

    async def stop(self, job: AttemptId) -> None:
        """End the job and all its processes; return when they are gone."""
        ...

    async def collect(self, job: AttemptId, into: Path) -> Collected:
        """Bring an ended job's artefacts and log into a new directory `into`, whole or not at all."""
        ...

    def follow(self, job: AttemptId, path: str = "log", offset: int = 0) -> AsyncGenerator[Piece]:
        """What a file below the job's folder holds from `offset` on, and what is added, until the job ends.

        Its output is `log`, its artefacts are below `out`. A piece comes at once, if only to tell that there
        is nothing yet. Values of secrets are masked, also across pieces; a log that is cut leaves a gap in
        the offsets. Nothing comes if the machine knows no such job.
        """
        ...

    def forget(self, job: AttemptId) -> None:
        """The job's artefacts are safe here: the machine may drop them, some time. Never raises."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class Stepped(Protocol):
    """A benchmark whose attempts write their steps into a file, as they make them."""

    @property
    def steps(self) -> str:
        """The file, below an attempt's artefacts; empty if there is none."""
        ...

    def read_steps(self, data: bytes) -> Trajectory:
        """What the file says, or its first part does. Never raises."""
        ...


@runtime_checkable
class HostChannel(Protocol):
    """A channel to a host with a supervisor of ours, which one run after another uses.

    The host remembers how it was set up, can keep its jobs apart, and can meter their calls of models.
    """

    async def isolate(self, wanted: Isolation) -> Isolated:
        """How attempts will be kept apart there. Raises SetupFailed if that is not what must be."""
        ...

    async def clear(self, once: str = "") -> None:
        """End all jobs and drop what they left; what was set up stays.

        Does nothing if `once` is not empty and was said at the last call.
        """
        ...

    async def forget_set_up(self) -> None:
        """Let the next `prepare` run all steps of the set-up again."""
        ...

    async def meter(self, metering: Metering) -> None:
        """See to it that the machine has a meter with these orders (`Job.metering`). Raises SetupFailed."""
        ...


class Objects(Protocol):
    """Objects with names such as `a/b`, below one URL. All calls raise FleetError: `evalfleet.mirror`, which
    opens them, has kinds of it for a store that is away and for one that refuses us."""

    @property
    def url(self) -> str: ...

    async def create(self, name: str, content: bytes | Path) -> None:
        """Write the object unless there is one of this name. Raises FileExistsError.

        Of all who try at the same time, one succeeds. It is durable when this returns.
        """
        ...

    async def replace(self, name: str, content: bytes | Path) -> None:
        """Write the object, whatever was there."""
        ...

    async def read(self, name: str, most: int | None = None) -> bytes | None:
        """What is in it, or the first `most` bytes of it; None if there is no such object."""
        ...

    async def fetch(self, name: str, path: Path) -> None:
        """Write what is in it into a new file."""
        ...

    async def remove(self, names: Sequence[str]) -> None:
        """Remove those of them that are there."""
        ...

    async def names(self, below: str, after: str = "") -> list[str]:
        """The names of all objects below a prefix, in order, or of those that come after a name."""
        ...

    async def folders(self) -> list[str]:
        """The first parts of all names."""
        ...


class Bucket(Objects, Protocol):
    """Objects of a cloud's storage, which can be reached by signed addresses."""

    async def replace(self, name: str, content: bytes | Path | AsyncIterable[bytes]) -> None:
        """Write the object, whatever was there. No part of it can be read before all of it is written."""
        ...

    async def sign(self, method: str, names: Sequence[str], seconds: float) -> list[str]:
        """Return addresses that let their holder do this with each object for so long."""
        ...


class OpenBucket(Protocol):
    """How the objects below a bucket's URL are opened.

    Where the URL and the environment do not say how to log in, `token` returns a token of the login. `ca` is
    a file with certificate authorities to trust. Raises RequestError.
    """

    def __call__(
        self,
        url: str,
        environ: Mapping[str, str],
        token: Callable[[], Awaitable[str]] | None = None,
        ca: str = "",
    ) -> Bucket: ...


@dataclass(frozen=True)
class PlaceContext:
    """What a place may know of us. `base` is where relative paths in its settings start.

    `secrets` are the values that jobs may ask for by name, and nothing else: they are masked wherever they
    turn up. `environ` is the environment as resolved (.env and --env-file too), for the clouds' variables.
    `for_pool`: what is made there is a named pool's, which outlives runs. `open_bucket`: how objects below a
    bucket's URL are reached, for a place whose machines are reached by them.
    """

    home: Path
    home_id: str
    secrets: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    environ: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    base: Path = field(default_factory=Path)
    for_pool: bool = False
    open_bucket: OpenBucket | None = None


class Place(Protocol):
    """A place that machines come from. `list` is the only truth about what exists.

    `create` and `delete` are idempotent by id and need not wait for completion. A place ends a machine by
    itself at its expiry, given as a duration from now, also if no controller lives.

    Where machines queue (`Lifetime.queues`), the duration given to `create` counts from their start, and
    what it has run counts if the service starts it anew. While it waits it costs nothing. `list` tells the
    name of its start and how long it has run (`Machine.start`, `ran_s`), also after its end, until it is
    deleted: a machine that was queued and is not listed any more has never run.
    """

    @property
    def name(self) -> str: ...

    async def offers(self, needs: Needs) -> Sequence[Offer]: ...

    async def create(self, machine: MachineId, offer: Offer, expires_s: float) -> None: ...

    async def list(self, pool: str) -> Sequence[Machine]:
        """All that exists here of machines whose id starts with `<pool>-`."""
        ...

    async def delete(self, machine: MachineId) -> None:
        """End the machine, everything that runs on it and everything that came with it."""
        ...

    def channel(self, machine: Machine, fence: Fence) -> Channel: ...

    async def close(self) -> None: ...


Dialled: TypeAlias = "tuple[asyncio.StreamReader, asyncio.StreamWriter]"


# -- what some places can do besides: `isinstance` tells -------------------------------------------


@runtime_checkable
class Extendable(Protocol):
    """A place whose machines can live longer than they were made for, as their offers say."""

    async def extend(self, machine: MachineId, expires_s: float) -> None:
        """Move the expiry. Raises PlaceError."""
        ...


@runtime_checkable
class Stoppable(Protocol):
    """A place whose machines can be switched off for a while."""

    async def stop(self, machine: MachineId) -> None:
        """Stop it: it is no longer billed, and its disk is kept. `create` starts it again.

        Idempotent. Returns when the machine runs no more. Raises PlaceError.
        """
        ...


@runtime_checkable
class Reachable(Protocol):
    """A place whose machines are computers that people and programs can connect to."""

    def shell(self, machine: Machine, command: Sequence[str]) -> Sequence[str]:
        """Return what to execute here to get a shell there, or to run `command` there."""
        ...

    async def dial(self, machine: Machine, port: int) -> Dialled:
        """Connect to 127.0.0.1:`port` as the machine sees it, which is open to nobody else.

        Raises OSError, ChannelError.
        """
        ...


@runtime_checkable
class Mendable(Protocol):
    """A place whose offers name `mends`: it can act on machines that run but cannot be reached."""

    async def mend(self, machine: MachineId, step: str, expires_s: float) -> None:
        """Do this step of the offer's `mends`. All that runs on the machine ends; its disk stays.

        Returns when it can be reached again, set up or not. Raises MachineMute if it still cannot,
        PlaceError. May be repeated.
        """
        ...


@runtime_checkable
class LeavesRemains(Protocol):
    """A place whose machines stay when they are given back, and may keep what cannot be removed."""

    def remains(self) -> Sequence[Belonging]:
        """What could not be removed of machines that are gone; `kept_by` says how to finish that by hand."""
        ...


class Check(Struct, frozen=True, omit_defaults=True):
    """One thing that was looked at before money is spent. `bad`: machines cannot be had so."""

    name: str
    verdict: Literal["good", "warn", "bad"]
    found: str
    remedy: str = ""
    facts: Mapping[str, str] = {}
    """Of a host: what is known of it, by what that is. All hosts of a place have the same."""
    room: Mapping[str, int] = {}
    """Of a quota: size -> how many more machines of it can be had; without a name, of all sizes together."""


class Made(Struct, frozen=True, omit_defaults=True):
    """Something that a place would make, in words."""

    kind: str
    name: str
    where: str = ""
    detail: str = ""


class HostKey(Struct, frozen=True):
    """The key of a host that nobody has confirmed yet."""

    host: str
    fingerprint: str
    file: str
    """The file of known hosts where it would be written."""
    line: str
    is_jump: bool = False
    """Others are reached through the host: their keys are seen once its own is known."""


@runtime_checkable
class Checked(Protocol):
    """A place that can be looked at before anything is run there."""

    async def examine(self, needs: Needs, workers: int = 1) -> Sequence[Check]:
        """Whether so many machines can be had. Spends nothing and makes nothing.

        Raises nothing: what cannot be found out is a check, too.
        """
        ...


@runtime_checkable
class TriedOut(Protocol):
    """A place where a machine can be had for seconds and nothing, to tell what only a machine can tell."""

    async def try_out(self, needs: Needs) -> Sequence[Check]:
        """Try a machine out, and leave nothing of it. Raises nothing."""
        ...


@runtime_checkable
class Outlined(Protocol):
    """A place that makes things, and can name them before it does."""

    def outline(self, machines: Sequence[tuple[MachineId, Offer]]) -> Sequence[Made]:
        """What would be made for these machines. Asks nobody."""
        ...


@runtime_checkable
class Doubted(Protocol):
    """A place that can foresee what may go wrong with a run."""

    async def doubts(self, lasts_s: float) -> Sequence[str]:
        """What may go wrong with a run of so many seconds, and what to do.

        Raises PlaceError if the place refuses us for good, so that nothing need be begun to find out.
        """
        ...


@runtime_checkable
class KeepsFiles(Protocol):
    """A place with a storage of its own that its machines can read."""

    async def keep_files(
        self, files: KeptFiles, lasts_s: float, tell: Callable[[str], None]
    ) -> Mapping[str, str]:
        """Put files there, unless they are there already. Returns an address for each, by which machines read
        it for so many seconds.

        Repeated, it goes on where it was; nobody sees half of it. Raises PlaceError and RequestError.
        """
        ...


@runtime_checkable
class TrustsKeys(Protocol):
    """A place whose hosts have keys of their own, which the user must confirm."""

    async def unknown_keys(self) -> Sequence[HostKey]:
        """The keys that its hosts show and nobody has confirmed. Raises nothing."""
        ...

    def trust(self, keys: Sequence[HostKey]) -> None:
        """Write these keys down: from now on hosts with other keys are refused. Raises OSError."""
        ...


class Price(Struct, frozen=True, omit_defaults=True):
    """What an hour of something costs in a region. `what` is a size, or what comes with a machine.

    `estimated`: no list says so.
    """

    what: str
    region: str
    usd_per_hour: float
    spot_usd_per_hour: float | None = None
    estimated: bool = False


class PriceTable(Struct, frozen=True):
    """List prices of one kind of place, as of a day, and where they are from."""

    as_of: str
    source: str
    prices: tuple[Price, ...]


class PriceList(Protocol):
    """The list prices of a kind of place. `tables` are the settings of the places of this kind."""

    @property
    def source(self) -> str:
        """The address that they are fetched from."""
        ...

    def prices(self, home: Path) -> PriceTable:
        """The prices that are in force in this home."""
        ...

    def wanted(self, tables: Sequence[Mapping[str, object]]) -> Sequence[tuple[str, str]]:
        """What of them, and in which region, these places would use."""
        ...

    async def update(
        self,
        home: Path,
        tables: Sequence[Mapping[str, object]],
        source: str,
        today: str,
        environ: Mapping[str, str],
    ) -> PriceTable:
        """Fetch them and keep them in the home. Raises PlaceError; then the old ones stay in force.

        `environ`: has the login, for lists that want one.
        """
        ...


class Guest(Protocol):
    """A system inside a benchmark's machines, in which agents work: Windows, for one.

    It knows what it cannot do without, and tells the benchmark's tasks.
    """

    @property
    def least_needs(self) -> Needs:
        """What machines must have, whatever earlier runs used."""
        ...

    async def examine(self, secrets: Mapping[str, str], metering: Metering | None = None) -> Sequence[Check]:
        """Whether attempts would come to nothing (a wrong key). Spends nothing worth speaking of. Raises
        nothing."""
        ...

    @property
    def list_tasks(self) -> Command:
        """Writes the list of tasks into result.json on a machine that was set up, and changes nothing."""
        ...

    def keep_tasks(self, listed: bytes, home: Path) -> None:
        """Keep that result.json for later runs of this home. Raises RequestError if it is no list."""
        ...

    def good_until(self, listed: bytes) -> Micros | None:
        """When the set-up of the machine that told this list ends (a licence, for one); None: it stays."""
        ...


class Image(Struct, frozen=True, omit_defaults=True):
    """A machine's disk, kept to make others from, as its tags tell. It costs money until it is deleted.

    `setting`: the line of a place's settings by which machines are made from it. `state`: ready, or what
    it is instead.
    """

    name: str
    home: str
    owner: str
    setting: str
    state: str
    regions: tuple[str, ...] = ()
    gb: float = 0.0
    usd_per_month: float = 0.0
    prices_as_of: str = ""
    parts: tuple[str, ...] = ()
    kind: Literal["image", "snapshot"] = "image"
    """A snapshot is a copy that somebody made of a machine's disk. We make none, and delete none."""


class Belonging(Struct, frozen=True, omit_defaults=True):
    """A machine, or what is left of one, as its tags tell: no journal is needed to know whose it is.

    `of_pool`: of a named pool; what was made before there was a tag for that does not tell.
    `kept_by`: what would keep its place from deleting it (a lock), and what to do about that.
    `of_this_computer`: no other computer sees it.
    """

    machine: MachineId
    home: str
    owner: str
    where: str
    expires_at: Micros | None
    parts: tuple[str, ...]
    node: str = ""
    of_pool: bool = False
    kept_by: str = ""
    of_this_computer: bool = False


@runtime_checkable
class Estate(Protocol):
    """A place that knows what machines evalfleet has made there, whichever home did."""

    @property
    def owner(self) -> str:
        """Who we are there, as in the tags of what we make."""
        ...

    async def belongings(self) -> Sequence[Belonging]:
        """Machines, and what is left of some. Raises PlaceError."""
        ...

    async def reap(self, belonging: Belonging) -> None:
        """Delete all of it. Raises PlaceError."""
        ...


@runtime_checkable
class ImageMaker(Estate, Protocol):
    """A place that makes images of machines, and machines from those."""

    async def reserve(self, machine: MachineId, image: str) -> None:
        """Reserve the name, and whatever the image needs besides the machine and costs nothing. Idempotent.

        Raises RequestError if the name cannot be used or has been, PlaceError.
        """
        ...

    async def capture(
        self,
        machine: Machine,
        image: str,
        rest: Callable[[], Awaitable[None]],
        tell: Callable[[str], None],
    ) -> Image:
        """Make an image of it. It can be used no more from the beginning of this, and shall be deleted.

        `rest` is awaited before anything is done to the machine, once, while its channel works. Returns when
        machines can be made from the image. Raises PlaceError, ChannelError; then it may be repeated, also
        by another process, and goes on.
        """
        ...

    async def images(self) -> Sequence[Image]:
        """All that evalfleet has made there, whichever home did, and what snapshots of its machines' disks
        others have made. Raises PlaceError."""
        ...

    async def drop_image(self, image: Image) -> None:
        """Delete it, everywhere; machines that were made from it stay. Raises PlaceError."""
        ...


class Request(Struct, frozen=True):
    """Something asked of a run from outside its controller (cancel), waiting in the store."""

    id: int
    event: Event


class Journal(Protocol):
    """One stream, open for writing by this controller alone."""

    @property
    def epoch(self) -> int: ...

    def read(self) -> Iterable[Record]: ...

    async def append(self, at: Micros, events: Sequence[Event], answered: Sequence[int] = ()) -> bool:
        """Durable when it returns, together with the mark that these requests are answered.

        False: on this computer alone, because the run is to be stopped while its store is away. Nothing may
        be started then, and no machine forget anything.
        Raises LeaseLost when another controller has taken the stream, JournalError when it cannot
        be written (disk full); either way nothing of it was written.
        """
        ...

    async def requests(self) -> Sequence[Request]:
        """What was asked from outside and is not answered yet."""
        ...


class Clock(Protocol):
    """What tells the time of a run."""

    def now(self) -> Micros: ...
