"""Lab hosts as a place that `evalfleet run --on hosts` uses, with the controller inside the lab's network.

And the stand-in for Azure as a place.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalfleet.events import AttemptEnded, AttemptStarted, Record
from evalfleet.journal import Store
from evalfleet.model import Scored
from lab import Lab

from .workspace import EVALFLEET, Workspace

if TYPE_CHECKING:
    from standins.azure import StandIn

PLACE = "hosts"
AZURE = "azure"
GROUP = "bench"
SIZE, REGION = "Standard_D4ds_v5", "eastus"


@contextmanager
def lab_of(count: int) -> Iterator[Lab]:
    """Gone afterwards, whatever happened. What a killed benchmark left is removed by the next one."""
    with Lab.create(count) as lab:
        yield lab


def settings(lab: Lab) -> dict[str, Any]:
    """Of a place `ssh` that consists of the lab's hosts; everything else is as users have it."""
    return {
        "hosts": [host.address for host in lab.hosts],
        "user": lab.hosts[0].users[0],
        "key": str(lab.client.key_path),
        "known_hosts": str(lab.client.known_hosts_path),
    }


def write_place(folder: Path, lab: Lab) -> None:
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings(lab).items())
    (folder / "evalfleet.toml").write_text(f'[places.{PLACE}]\nkind = "ssh"\n{lines}')


def start_run(space: Workspace, lab: Lab, benchmark: Path, workers: int) -> subprocess.Popen[bytes]:
    """`nsenter` becomes the command that it starts, so the process is the controller itself."""
    write_place(space.folder, lab)
    words = ("run", str(benchmark), "--on", PLACE, "--workers", str(workers), "--name", "run")
    return space.start(*lab.prefix, *EVALFLEET, *words)


@contextmanager
def pool_of(space: Workspace, lab: Lab) -> Iterator[str]:
    """All hosts as a pool: supervisors are there, as the workers of others are warm. Deleted afterwards."""
    write_place(space.folder, lab)
    words = ("--on", PLACE, "--workers", str(len(lab.hosts)))
    pool = (*lab.prefix, *EVALFLEET, "pool")
    space.finish(space.start(*pool, "create", "warm", *words))
    try:
        yield "warm"
    finally:
        space.finish(space.start(*pool, "delete", "warm", "--yes"))


def start_pool_run(
    space: Workspace, lab: Lab, benchmark: Path, pool: str, *more: str, name: str = "run"
) -> subprocess.Popen[bytes]:
    words = ("run", str(benchmark), "--pool", pool, "--name", name, *more)
    return space.start(*lab.prefix, *EVALFLEET, *words)


def records(space: Workspace, run: str = "run") -> list[Record]:
    return list(Store.open(space.home, create=False).read(run))


def first_start_and_last_end(told: Sequence[Record], attempts: int) -> tuple[int, int]:
    """In microseconds. Checks, too, that every attempt was made and scored: what did not run is not fast."""
    starts = [record.at for record in told if isinstance(record.event, AttemptStarted)]
    ends = [
        record.at
        for record in told
        if isinstance(record.event, AttemptEnded) and isinstance(record.event.outcome, Scored)
    ]
    if len(ends) != attempts:
        raise RuntimeError(f"{len(ends)} attempts scored instead of {attempts}")
    return starts[0], ends[-1]


def cannot(bench: str) -> Mapping[str, str] | None:
    """Why there can be no lab here, as a figure; None if there can."""
    problem = Lab.missing()
    return {"error": f"{bench} needs lab hosts: {problem}"} if problem else None


# -- the stand-in for Azure ---------------------------------------------------------------------


def azure_settings(azure: StandIn, endpoint: str) -> dict[str, Any]:
    """Of a place `azure_vm`; everything else is as users have it."""
    return {
        "subscription": azure.subscription,
        "resource_group": GROUP,
        "sizes": [SIZE],
        "regions": [REGION],
        "ssh_from": ["*"],
        "owner": "bench",
        "endpoint": endpoint,
        "ca": str(azure.ca),
    }


def azure_credentials(azure: StandIn, endpoint: str) -> dict[str, str]:
    """A service principal's."""
    return {
        "AZURE_TENANT_ID": azure.tenant,
        "AZURE_CLIENT_ID": azure.client_id,
        "AZURE_CLIENT_SECRET": azure.client_secret,
        "AZURE_AUTHORITY_HOST": endpoint,
    }


def write_azure(folder: Path, azure: StandIn, endpoint: str, more: Mapping[str, Any] | None = None) -> None:
    """With its credentials in the file .env, which commands read by themselves."""
    given = {**azure_settings(azure, endpoint), **(more or {})}
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in given.items())
    (folder / "evalfleet.toml").write_text(f'[places.{AZURE}]\nkind = "azure_vm"\n{lines}')
    secrets = azure_credentials(azure, endpoint).items()
    (folder / ".env").write_text("".join(f"{key}={value}\n" for key, value in secrets))
