"""What can be set of a place `slurm`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from msgspec import Meta, Struct


class SlurmSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of `slurm`."""

    REMOVED: ClassVar[Mapping[str, str]] = {
        "mailbox_role": "leave it out: addresses are signed with the keys of an IAM user",
    }

    folder: Annotated[
        str,
        Meta(min_length=1, description="a folder that the nodes share with the login node; required"),
    ] = ""
    login: Annotated[
        str, Meta(description="[user@]host[:port] of a login node (default: this computer is one)")
    ] = ""
    key: Annotated[str | None, Meta(description="a private key for it; else the agent's and ~/.ssh's")] = None
    known_hosts: Annotated[str | None, Meta(description="else the user's own; verified always")] = None
    jump: Annotated[str | None, Meta(description="[user@]host[:port][,...] to go through")] = None
    partition: Annotated[str, Meta(description="where jobs go (default: the cluster's)")] = ""
    account: Annotated[str, Meta(description="who is charged (default: yours)")] = ""
    qos: Annotated[str, Meta(description="the quality of service (default: yours)")] = ""
    constraint: Annotated[str, Meta(description="features that nodes must have")] = ""
    time_limit_s: Annotated[float, Meta(ge=60, description="how long a job may run")] = 4 * 3600.0
    boot_s: Annotated[
        float, Meta(gt=0, description="so long after its start a job's supervisor must answer")
    ] = 300.0
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
        Meta(description="seconds that a job is expected to wait in the queue; for estimates"),
    ] = None
    poll_s: Annotated[float, Meta(gt=0, description="squeue is asked no more often than this")] = 10.0
    sbatch: Annotated[tuple[str, ...], Meta(description="more options of sbatch")] = ()
    reach: Annotated[
        Literal["step", "mailbox"],
        Meta(description="how supervisors are reached: by steps (srun --overlap), or by files in `folder`"),
    ] = "step"
    mailbox: Annotated[
        str,
        Meta(description="s3://BUCKET/PREFIX: mail goes there, and nodes need share no folder with anybody"),
    ] = ""
    isolation: Annotated[
        Literal["user", "container", "none"] | None, Meta(description="how attempts are kept apart")
    ] = None
