"""Seconds until a fleet of cloud machines is ready, beside the slowest alone. `--place NAME`: one cloud."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from evalfleet.events import MachineReady, Record
from evalfleet.journal import Store

from .hosts import AZURE, cannot, write_azure
from .result import Aim, Figures, Result, below, rounded
from .workspace import EVALFLEET, Workspace

BENCH = "fleet"
SIZES, QUICK_SIZES = (20, 100), (3,)
BOOT_S, QUICK_BOOT_S = (20.0, 40.0), (0.2, 0.4)
SEED = 4
AIM = 1.3
POOL = "fleet"
LIMIT_S = 300.0
COUNTED = (
    "ready_s: from the start of `evalfleet pool create` until the last machine is ready, by the journal: SSH "
    "answers, the supervisor is there and has taken it; slowest_vm_s: of the stand-in's own books, from the "
    "machine's creation until it runs; machines are lab hosts with a real sshd, all on these cores; "
    "after_last_boot_s: from the moment the last one runs until all are ready; requests: all that the "
    "stand-in was asked, per machine"
)


@dataclass(frozen=True)
class Fleet:
    """By the wall clock, in seconds since 1970."""

    began: float
    created: Sequence[float]
    running: Sequence[float]
    ready: Sequence[float]
    requests: int
    busy: float
    load: float

    @property
    def slowest_s(self) -> float:
        return max(up - made for made, up in zip(self.created, self.running, strict=True))

    @property
    def ready_s(self) -> float:
        return max(self.ready) - self.began


def run(quick: bool, place: str | None = None) -> Result:
    if (error := cannot(BENCH)) is not None:
        return Result(BENCH, dict(error), {})
    sizes, boot_s = (QUICK_SIZES, QUICK_BOOT_S) if quick else (SIZES, BOOT_S)
    figures: Figures = {"boot_s": list(boot_s), "counted": COUNTED}
    aims: dict[str, Aim] = {}
    for name in PLACES if place is None else (place,):
        figures[name] = {}
        for count in sizes:
            fleet = CLOUDS[name](count, boot_s)
            figures[name][f"{count}_machines"] = figures_of(fleet)
            aims[f"{name}.ready_over_slowest_{count}"] = below(rounded(fleet.ready_s / fleet.slowest_s), AIM)
    return Result(BENCH, figures, aims)


def figures_of(fleet: Fleet) -> Figures:
    return {
        "ready_s": rounded(fleet.ready_s),
        "slowest_vm_s": rounded(fleet.slowest_s),
        "first_request_to_create_s": rounded(min(fleet.created) - fleet.began),
        "creations_spread_over_s": rounded(max(fleet.created) - min(fleet.created)),
        "last_boot_s": rounded(max(fleet.running) - fleet.began),
        "after_last_boot_s": rounded(max(fleet.ready) - max(fleet.running)),
        "requests_a_machine": rounded(fleet.requests / len(fleet.created)),
        "load_before": fleet.load,
        "cpu_busy_share": rounded(fleet.busy),
    }


def _azure(count: int, boot_s: tuple[float, float]) -> Fleet:
    from standins.azure import Hosts, StandIn, Timing
    from standins.azure.vms import VM, Vm

    with StandIn(Hosts(), timing=Timing(boot_s=boot_s), seed=SEED) as azure, Workspace() as space:
        write_azure(space.folder, azure, azure.endpoint_inside, {"settle_s": 1.0})
        pool = (*azure.hosts.lab.prefix, *EVALFLEET, "pool")
        load, busy, began = os.getloadavg()[0], CpuShare(), time.time()
        words = ("--on", AZURE, "--workers", str(count))
        space.finish(space.start(*pool, "create", POOL, *words), LIMIT_S)
        share, requests = busy.share(), len(azure.server.calls)
        vms = [vm for vm in azure.resources(VM) if isinstance(vm, Vm)]
        told = list(Store.open(space.home, create=False).read(POOL))
        space.finish(space.start(*pool, "delete", POOL, "--yes"), LIMIT_S)
        if azure.meters.running() or azure.left():
            raise RuntimeError(f"left behind: {azure.left()}")
    created, running = [vm.created_at for vm in vms], [vm.power_since for vm in vms]
    return Fleet(began, created, running, ready_at(told, count), requests, share, load)


def _gce(count: int, boot_s: tuple[float, float]) -> Fleet:
    from standins.gce import Hosts, StandIn, Timing

    with StandIn(Hosts(), timing=Timing(boot=boot_s), seed=SEED) as google, Workspace() as space:
        place = {
            "kind": "gce",
            "types": ["e2-standard-4"],
            "zones": ["us-central1-a"],
            "ssh_from": ["*"],
            "owner": "bench",
            "endpoint": google.endpoint_inside,
            "ca": str(google.ca),
            "settle_s": 1.0,
        }
        lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in place.items())
        (space.folder / "evalfleet.toml").write_text(f"[places.gce]\n{lines}")
        variables = "".join(f"{key}={value}\n" for key, value in google.environment_inside.items())
        (space.folder / ".env").write_text(variables)
        pool = (*google.hosts.lab.prefix, *EVALFLEET, "pool")
        load, busy, began = os.getloadavg()[0], CpuShare(), time.time()
        words = ("--on", "gce", "--workers", str(count))
        space.finish(space.start(*pool, "create", POOL, *words), LIMIT_S)
        share, requests = busy.share(), len(google.server.calls)
        instances = google.instances()
        told = list(Store.open(space.home, create=False).read(POOL))
        space.finish(space.start(*pool, "delete", POOL, "--yes"), LIMIT_S)
        if google.meters.running() or google.left():
            raise RuntimeError(f"left behind: {google.left()}")
    created = [instance.created for instance in instances]
    running = [instance.up_at for instance in instances]
    return Fleet(began, created, running, ready_at(told, count), requests, share, load)


CLOUDS: Mapping[str, Callable[[int, tuple[float, float]], Fleet]] = {"azure_vm": _azure, "gce": _gce}
PLACES = tuple(CLOUDS)


def ready_at(told: Sequence[Record], count: int) -> list[float]:
    """Checks, too, that all are: what did not come up is not fast."""
    found = [record.at / 1e6 for record in told if isinstance(record.event, MachineReady)]
    if len(found) != count:
        raise RuntimeError(f"{len(found)} machines are ready instead of {count}")
    return found


class CpuShare:
    """How busy this computer's cores were since, whoever kept them busy."""

    def __init__(self) -> None:
        self._idle, self._all = self._read()

    def share(self) -> float:
        idle, everything = self._read()
        return 1.0 - (idle - self._idle) / max(1.0, everything - self._all)

    @staticmethod
    def _read() -> tuple[float, float]:
        with open("/proc/stat") as file:
            ticks = [float(word) for word in file.readline().split()[1:9]]
        return ticks[3] + ticks[4], sum(ticks)
