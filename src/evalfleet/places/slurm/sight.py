"""What a machine is now, by its folder and by what Slurm says of its job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, TypeVar, cast
from urllib.parse import unquote

import msgspec
from msgspec import Struct, structs

from evalfleet.channels.link import plain, seconds_told
from evalfleet.errors import PlaceError
from evalfleet.model import SECOND, Machine, MachineId, decodable
from evalfleet.ports import Belonging

from .commands import NEVER_STARTS, TAKEN_BACK, SlurmJob

T = TypeVar("T")
MARK_S = 60.0
"""So long a job may take from its start in Slurm's books to its pilot's mark: prologues run meanwhile."""
REASONS = {
    "JobHeldUser": "held by its user: `scontrol release`",
    "JobHeldAdmin": "held by an administrator",
    "None": "",
}
CLOCKS_S = 5.0
"""So far a node's clock may be from ours before it is not believed."""


class StartMark(Struct, frozen=True):
    """The mark that a pilot has left of its start."""

    start: str
    """Its name: the job, and how often Slurm had requeued it before."""
    node: str
    at: float
    """By the node's clock, which need not be ours."""

    @property
    def job(self) -> str:
        return self.start.partition(".")[0]


class MachineFolder(Struct, frozen=True):
    """What the folder of a machine tells, as `folders.survey` reads it."""

    job: str = ""
    """Slurm's id of its job; empty until that is submitted."""
    start: StartMark | None = None
    ran_s: float | None = None
    """How long its pilot ran; None if it runs, or could not tell."""
    restarted: bool = False
    """Slurm has started its job again."""
    listens: bool = False
    """Its supervisor does."""
    deleting: bool = False
    pilot: str = ""
    """The pilot's last words, if it has left no mark."""
    owner: str = ""
    """Who made it: user@computer:/home."""
    life_s: float = 0.0
    """How long it may live from its start on."""
    made_at: float = 0.0
    of_pool: bool = False
    mail: bool = False
    """It is reached by a mailbox."""
    key: str = ""

    @property
    def jobs(self) -> set[str]:
        """Slurm's ids of its jobs: the one that is written down, and the one that has left a mark."""
        return {job for job in (self.job, self.start.job if self.start is not None else "") if job}


class MachinesTold(Struct, frozen=True):
    """The answer to `survey`: the folders of a home's machines, by name."""

    machines: dict[str, dict[str, Any]]
    now: float


class HomesTold(Struct, frozen=True):
    """The answer to `survey_all`: those of all homes, by home and name."""

    homes: dict[str, dict[str, dict[str, Any]]]


class PathTold(Struct, frozen=True):
    """The answer to `resolve` and `plant`."""

    path: str
    now: float = 0.0


class MissingTold(Struct, frozen=True):
    """The answer to `bring`: whether the file is not there, or another one is."""

    missing: bool


def as_told(answer: Mapping[str, Any], type: type[T]) -> T:
    """What the computer says that sees the folders, which need not be ours. Raises PlaceError."""
    try:
        return msgspec.convert(answer, decodable(type))
    except msgspec.ValidationError as err:
        problem = f"the login node answers nonsense about its folders ({err}); is it a login node?"
        raise PlaceError(problem, transient=True, scope="place") from None


class Queue(Struct, frozen=True):
    """What one `squeue` said, and when it was asked."""

    asked_at: float
    by_id: Mapping[str, SlurmJob]
    by_name: Mapping[str, SlurmJob]
    """Of several jobs of one name, one that lives."""


def queue_of(asked_at: float, jobs: Sequence[SlurmJob]) -> Queue:
    living_last = sorted(jobs, key=lambda job: (job.runs, job.waits))
    return Queue(asked_at, {job.id: job for job in jobs}, {job.name: job for job in living_last})


def folder_of(told: Mapping[str, Any]) -> MachineFolder:
    """A folder as a computer tells of it that is not ours: what is nonsense counts as not there."""
    start: StartMark | None = None
    mark, about = _fields(told.get("start")), _fields(told.get("about"))
    at = seconds_told(mark.get("at"))
    if at is not None and "start" in mark and "node" in mark:
        start = StartMark(_text(mark["start"]), _text(mark["node"]), at)
    return MachineFolder(
        job=_text(told.get("job")),
        start=start,
        ran_s=seconds_told(told.get("ran")),
        restarted=bool(told.get("restarted")),
        listens=bool(told.get("listens")),
        deleting=bool(told.get("deleting")),
        pilot=_text(told.get("pilot")),
        owner=_text(about.get("owner")),
        life_s=seconds_told(about.get("life_s")) or 0.0,
        made_at=seconds_told(about.get("at")) or seconds_told(told.get("made_at")) or 0.0,
        of_pool=bool(about.get("of_pool")),
        mail=bool(told.get("mail") or about.get("mail")),  # also while the mailbox is away
        key=_text(told.get("key")),
    )


def _fields(told: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", told) if isinstance(told, dict) else {}


def _text(told: Any) -> str:
    return plain(str(told or "").strip())


def belonging(
    shared: str, home: str, name: str, folder: MachineFolder, job: SlurmJob | None, us: str, now: float
) -> Belonging:
    """A machine of whatever home. One whose job waits has no expiry; one without a living job is over.

    `now`: by our own clock. The mark of its start is by its node's, which is believed only as far as Slurm's
    count of the seconds since bears it out: else what runs would seem to be over.
    """
    lives = job is not None and (job.waits or job.runs)
    ends_at: float | None = folder.made_at + (0.0 if folder.job else MARK_S)
    if job is not None and lives:
        began_at = now - job.ran_s
        ends_at = None
        if folder.start is not None:
            ends_at = min(max(folder.start.at, began_at), began_at + MARK_S) + folder.life_s
    parts = [f"job {job.id} ({job.state.lower()})"] if job is not None and lives else []
    if folder.made_at:
        parts.append(f"{shared}/{home}/{name}")
    return Belonging(
        MachineId(unquote(name)),
        home,
        folder.owner or us,
        job.partition if job is not None else "",
        None if ends_at is None else int(ends_at * SECOND),
        tuple(parts),
        folder.start.node if folder.start is not None else "",
        folder.of_pool,
    )


class Sight(Struct, frozen=True):
    """One look at the cluster: by it, each machine is judged."""

    queue: Queue
    order: Mapping[str, str]
    """Where jobs are in the queue, in words."""
    now: float
    """By the clock of the computer that sees the folders."""
    asked_ago_s: float
    longest_s: float
    begun: Set[str] = frozenset()
    """The starts whose marks were first seen after Slurm was asked."""

    def machine(self, id: MachineId, path: str, name: str, folder: MachineFolder) -> Machine:
        """`name`: its job's."""
        if folder.start is not None:
            return self._started(id, path, folder, folder.start)
        job = self.queue.by_id.get(folder.job) or self.queue.by_name.get(name)
        if job is not None and job.waits and job.reason in NEVER_STARTS:
            why = f"Slurm will not start its job ({job.reason}); change `{NEVER_STARTS[job.reason]}`"
            return Machine(id, "gone", ran_s=0.0, detail=f"{why} of the place")
        if job is not None and job.waits:
            told = (self.order.get(job.id, ""), REASONS.get(job.reason, job.reason))
            return Machine(id, "queued", ran_s=0.0, detail=", ".join(filter(None, told)))
        if job is not None and job.runs:
            if job.ran_s < MARK_S:  # its pilot is about to leave its mark, by which its life is counted
                return Machine(id, "queued", ran_s=0.0, detail=f"starts on {job.node}")
            return Machine(id, "pending", node=job.node, start=f"{job.id}.0", ran_s=job.ran_s)
        if not folder.job:
            return Machine(id, "queued", ran_s=0.0, detail="being submitted")
        state = job.state.lower() if job is not None else "forgotten"
        words = folder.pilot
        if state == "failed" and not words:
            words = "without a word: do nodes see `folder`, or reach `mailbox`? `evalfleet doctor` looks"
        detail = f"its job ended before it began ({state}) {words}".strip()
        return Machine(id, "gone", ran_s=job.ran_s if job is not None else 0.0, detail=detail)

    def _started(self, id: MachineId, path: str, folder: MachineFolder, start: StartMark) -> Machine:
        job = self.queue.by_id.get(start.job)
        seen = Machine(id, "gone", path, start.node, start=start.start)
        begun = job is not None and job.waits and start.start in self.begun
        if job is not None and (job.runs or begun) and not folder.restarted:
            # while it ends, Slurm does not say why yet
            up = folder.ran_s is None and job.state != "COMPLETING" and folder.listens and not folder.deleting
            return structs.replace(seen, phase="up" if up else "pending", ran_s=self._running_s(start, job))
        # What runs on the machine can write its folder and requeue its job. Slurm's own reason alone counts.
        taken_back = job is not None and job.state in TAKEN_BACK
        requeued = folder.restarted or (job is not None and job.waits)
        state = "requeued" if requeued else job.state.lower() if job is not None else ""
        return structs.replace(
            seen,
            phase="evicted" if taken_back else "gone",
            ran_s=self._ended_s(start, job) if folder.ran_s is None else folder.ran_s,
            detail=f"Slurm: {state}" if state else "",
        )

    def _running_s(self, start: StartMark, job: SlurmJob) -> float:
        """By the mark, which is exact, unless its clock is off: Slurm counts whole seconds."""
        if job.waits:  # it did when Slurm was asked
            return min(max(0.0, self.now - start.at), self.asked_ago_s)
        by_slurm = job.ran_s + self.asked_ago_s
        return max(0.0, min(max(self.now - start.at, by_slurm - CLOCKS_S), by_slurm + CLOCKS_S))

    def _ended_s(self, start: StartMark, job: SlurmJob | None) -> float:
        """Its pilot could not tell how long it ran. If Slurm has forgotten it, it may have run to its
        limit."""
        if job is not None and not job.waits:
            return job.ran_s
        return min(max(0.0, self.now - start.at), self.longest_s)
