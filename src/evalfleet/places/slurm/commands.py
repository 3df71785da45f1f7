"""Slurm's own commands, and what they say."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from msgspec import Struct

from evalfleet.channels.link import plain
from evalfleet.errors import PlaceError

from .login import Login

ANSWER_S = 30.0
SAID_CAP = 500
LINE_CAP = 1 << 16
LONGEST_S = 1e9
"""No job has run for longer, whatever a login node says."""
COLUMNS = "%i|%T|%M|%N|%P|%r|%j"
WAITS = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
RUNS = frozenset(
    {"CONFIGURING", "RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING", "COMPLETING"}
)
TAKEN_BACK = frozenset({"PREEMPTED", "NODE_FAIL", "REVOKED"})
NEVER_STARTS = {
    "PartitionTimeLimit": "time_limit_s",
    "PartitionNodeLimit": "partition",
    "BadConstraints": "constraint",
    "InvalidAccount": "account",
    "InvalidQOS": "qos",
    "QOSMaxWallDurationPerJobLimit": "time_limit_s",
    "AssocMaxWallDurationPerJobLimit": "time_limit_s",
}
"""Reasons to wait that end only if the job is changed, and the setting that would change it."""
FOR_GOOD = {
    "partition": re.compile(r"invalid partition|partition.*(not available|does not exist)", re.IGNORECASE),
    "account": re.compile(r"invalid account", re.IGNORECASE),
    "qos": re.compile(r"invalid qos|qos.*(not permitted|specification)", re.IGNORECASE),
    "time_limit_s": re.compile(r"time limit.*(invalid|exceed)|requested time limit", re.IGNORECASE),
    "constraint": re.compile(r"invalid feature|invalid constraint", re.IGNORECASE),
    "gpus": re.compile(r"invalid generic resource|invalid gres", re.IGNORECASE),
    "cpus, memory_gb, gpus or constraint": re.compile(
        r"node configuration is not available|memory specification can not be satisfied"
        r"|more processors requested than permitted|cpu count.*can not be satisfied",
        re.IGNORECASE,
    ),
}
"""What sbatch says when asking again does not help, by the setting that is wrong."""
CLOCKS = re.compile(r"(expired|rewound) credential|munge decode failed", re.IGNORECASE)


class SlurmJob(Struct, frozen=True):
    """A job as `squeue` shows it."""

    id: str
    state: str
    ran_s: float
    node: str
    partition: str
    reason: str
    """Why it waits, in Slurm's one word."""
    name: str

    @property
    def waits(self) -> bool:
        return self.state in WAITS

    @property
    def runs(self) -> bool:
        return self.state in RUNS


class Slurm:
    """The commands, with a limit on how long each may take: those of a cluster that is ill hang."""

    def __init__(self, login: Login, answer_s: float = ANSWER_S) -> None:
        self._login = login
        self.answer_s = answer_s

    async def jobs(self) -> Sequence[SlurmJob]:
        """All jobs of this user that Slurm still knows, also those that have ended. Raises PlaceError."""
        said = await self.run("squeue", "--me", "--noheader", "--states=all", f"--format={COLUMNS}")
        return [job for line in said.splitlines() if (job := _job(line)) is not None]

    async def order(self) -> Mapping[str, str]:
        """The place in its partition's queue of each job that waits, whoever's it is. Raises PlaceError."""
        said = await self.run("squeue", "--noheader", "--states=PENDING", "--sort=-p,i", "--format=%i|%P")
        queues: dict[str, list[str]] = {}
        for line in said.splitlines():
            job, _, partition = line.partition("|")
            queues.setdefault(partition, []).append(job)
        return {
            job: f"{number} of {len(queue)} in the queue of {partition}"
            for partition, queue in queues.items()
            for number, job in enumerate(queue, 1)
        }

    async def ended(self, jobs: Sequence[str]) -> Sequence[SlurmJob]:
        """What Slurm's books tell of jobs that `squeue` has forgotten; nothing where it keeps no books."""
        try:
            said = await self.run(
                *("sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={','.join(jobs)}"),
                "--format=JobIDRaw,State,ElapsedRaw,NodeList,Partition,JobName",
            )
        except PlaceError:
            return ()
        found: list[SlurmJob] = []
        for line in said.splitlines():
            job, state, ran, node, partition, name = (*line.split("|", 5), "", "", "", "", "")[:6]
            # `CANCELLED by 1000` is a state, too
            found.append(SlurmJob(job, state.split(" ")[0], _number(ran), node, partition, "", name))
        return found

    async def submit(self, options: Sequence[str], script: str) -> str:
        """The id of the new job. Raises PlaceError."""
        said = await self.run("sbatch", "--parsable", *options, given=script)
        return said.strip().split(";")[0]

    async def would_take(self, options: Sequence[str]) -> str:
        """When and where such a job would start, in Slurm's words. Submits nothing. Raises PlaceError."""
        said = await self.run(
            "sbatch", "--test-only", *options, given="#!/bin/sh\ntrue\n", says_by_stderr=True
        )
        return said.removeprefix("sbatch: ").strip()

    async def longest_s(self, partition: str) -> float | None:
        """How long jobs of the partition (or the default one) may run; None: for ever. Raises PlaceError."""
        said = await self.run("sinfo", "--noheader", "--format=%P|%l")
        limits = dict(line.split("|", 1) for line in said.splitlines() if "|" in line)
        default = next((name for name in limits if name.endswith("*")), "")
        text = limits.get(partition) or limits.get(f"{partition}*") or limits.get(default, "")
        return elapsed_s(text) or None

    async def cancel(self, jobs: Sequence[str]) -> None:
        if jobs:
            await self.run("scancel", *jobs)

    async def run(self, *argv: str, given: str = "", says_by_stderr: bool = False) -> str:
        """What a command prints. Raises PlaceError."""
        try:
            spoken = await self._login.run(argv, given, self.answer_s)
        except TimeoutError as err:
            raise PlaceError(
                f"{argv[0]} has not answered for {self.answer_s:g} s; does `{argv[0]}` answer you there?",
                transient=True,
                scope="place",
            ) from err
        if spoken.code:
            raise refusal(argv[0], spoken.errors.decode("utf-8", "replace"))
        said = (spoken.errors if says_by_stderr else spoken.out).decode("utf-8", "replace")
        return "\n".join(plain(line, LINE_CAP) for line in said.splitlines())


def refusal(command: str, said: str) -> PlaceError:
    """What a command that failed means: whether asking again can help, and which setting to change."""
    text = plain(" ".join(said.split()), SAID_CAP) or "no reason given"
    text = text.removeprefix(f"{command}: ").removeprefix("error: ")
    if CLOCKS.search(text):
        hint = "the clocks of this computer and of the cluster are apart, or their munge keys differ"
        return PlaceError(f"{command}: {text}; {hint}", transient=True, scope="place")
    for setting, pattern in FOR_GOOD.items():
        if command == "sbatch" and pattern.search(text):
            told = f"{text}; change `{setting}` of the place"
            return PlaceError(f"{command}: {told}", transient=False, scope="place")
    return PlaceError(f"{command}: {text}", transient=True, scope="place")


def _job(line: str) -> SlurmJob | None:
    parts = line.split("|", 6)
    if len(parts) != 7:
        return None
    job, state, ran, node, partition, reason, name = parts
    return SlurmJob(job, state, elapsed_s(ran), node, partition, reason, name)


def _number(text: str) -> float:
    try:
        return max(0.0, min(float(text), LONGEST_S))
    except ValueError:
        return 0.0


def elapsed_s(text: str) -> float:
    """Slurm's [[DAYS-]HOURS:]MINUTES:SECONDS."""
    days, _, rest = text.rpartition("-")
    try:
        seconds = 0
        for part in rest.split(":"):
            seconds = seconds * 60 + int(part)
        return max(0.0, min(float(seconds + 86400 * int(days or 0)), LONGEST_S))
    except (ValueError, OverflowError):
        return 0.0


def limit(seconds: float) -> str:
    """A time limit as sbatch takes it, in whole minutes: Slurm would round a part of one down."""
    return str(max(1, -(-int(seconds) // 60)))
