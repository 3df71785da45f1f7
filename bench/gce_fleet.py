"""How long until a fleet of Compute Engine's machines can be used, beside the slowest of them alone."""

from __future__ import annotations

import json
import os
import time

from evalfleet.journal import Store

from .azure_fleet import CpuShare, Fleet, ready_at, told_of
from .hosts import cannot
from .result import Aim, Figures, Result, below, rounded
from .workspace import EVALFLEET, Workspace

BENCH = "gce-fleet"
SIZES, QUICK_SIZES = (20, 100), (3,)
BOOT_S, QUICK_BOOT_S = (20.0, 40.0), (0.2, 0.4)
SEED = 4
AIM = 1.3
POOL = "fleet"
LIMIT_S = 300.0
COUNTED = (
    "ready_s: from the start of `evalfleet pool create` until the last machine is ready, by the journal: "
    "its host key is read, SSH answers, the supervisor is there and has taken it; slowest_vm_s: by the "
    "stand-in's books, from the insert until the host's system has come up; machines are lab hosts with a "
    "real sshd, all on these cores; requests: all that the stand-in was asked, per machine"
)


def run(quick: bool) -> Result:
    if (error := cannot(BENCH)) is not None:
        return Result(BENCH, dict(error), {})
    try:
        import standins.gce  # noqa: F401
    except ModuleNotFoundError as err:
        return Result(BENCH, {"error": f"{err.name} is not installed: pip install -e '.[dev]'"}, {})
    return measure(quick)


def measure(quick: bool) -> Result:
    sizes, boot_s = (QUICK_SIZES, QUICK_BOOT_S) if quick else (SIZES, BOOT_S)
    figures: Figures = {"boot_s": list(boot_s), "counted": COUNTED}
    aims: dict[str, Aim] = {}
    for count in sizes:
        fleet = _bring_up(count, boot_s)
        figures[f"{count}_machines"] = told_of(fleet)
        aims[f"ready_over_slowest_{count}"] = below(rounded(fleet.ready_s / fleet.slowest_s), AIM)
    return Result(BENCH, figures, aims)


def _bring_up(count: int, boot_s: tuple[float, float]) -> Fleet:
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
    created = [each.created for each in instances]
    running = [each.up_at for each in instances]
    return Fleet(began, created, running, ready_at(told, count), requests, share, load)
