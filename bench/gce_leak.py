"""A controller is killed at 200 moments: what is left at Compute Engine, and costs money, after `reap`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from . import leak
from .leak import QUICK, SEED
from .result import Figures, Result, at_most, rounded

BENCH = "gce-leak"
REAP_AFTER_S, LOOK_AFTER_S = 60.0, 86_400.0
COUNTED = (
    "a process that makes, stops, starts and deletes two machines through the place is killed (kill -9) at a "
    "request chosen by a seed, which is either never carried out or carried out unheard; the stand-in's "
    f"clock then moves to {REAP_AFTER_S:g} s after the last expiry that was decided, `reap` runs on a "
    "computer without a home, and a day later the stand-in's books are read; vm, address: billed after the "
    "expiry; disk: billed after reap had ended; lives_past_limit: machines told to end after their expiry"
)


class ComputeEngine:
    """Compute Engine, where machines end by a limit that Google knows."""

    kind = "gce"
    modules = ("evalfleet.places.gce",)

    def __init__(self) -> None:
        from standins.gce import StandIn, Timing

        timing = Timing(insert=(0.05, 0.1), boot=QUICK, delete=QUICK, power=QUICK, other=QUICK, wait=5.0)
        self.standin = StandIn(timing=timing, seed=SEED)

    def settings(self) -> dict[str, Any]:
        google = self.standin
        return {
            "project": google.project,
            "types": ["e2-standard-4"],
            "zones": ["us-central1-a"],
            "ssh_from": ["*"],
            "owner": "bench",
            "endpoint": google.endpoint,
            "ca": str(google.ca),
            "jump": "127.0.0.1:1",
            "answer_s": 0.3,
        }

    def environment(self) -> dict[str, str]:
        return self.standin.environment

    def account(self, expires_at: float, reap: Callable[[], None]) -> Mapping[str, float]:
        google = self.standin
        lives = sum((instance.ends_at or 0.0) > expires_at for instance in google.instances())
        google.jump(max(0.0, expires_at + REAP_AFTER_S - google.clock.now()))
        reap()
        reaped_at = google.clock.now()
        google.jump(LOOK_AFTER_S)
        now, seconds = google.clock.now(), google.meters.seconds
        return {
            "left": len(google.left()),
            "vm_s": seconds("vm", now, since=expires_at),
            "disk_s": seconds("disk", now, since=reaped_at),
            "address_s": seconds("address", now, since=expires_at),
            "lives": lives,
        }


def run(quick: bool) -> Result:
    try:
        import standins.gce  # noqa: F401
    except ModuleNotFoundError as err:
        return Result(BENCH, {"error": f"{err.name} is not installed: pip install -e '.[dev]'"}, {})
    return measure(quick)


def measure(quick: bool) -> Result:
    leaks = leak.measure(ComputeEngine, quick)
    billed = {kind: rounded(leaks.total(f"{kind}_s")) for kind in ("vm", "disk", "address")}
    figures: Figures = {
        **leaks.figures(),
        "billed_s_past_expiry": billed,
        "lives_past_limit": leaks.total("lives"),
        "counted": COUNTED,
    }
    aims = {
        "resources_left": at_most(figures["resources_left"], 0),
        "lives_past_limit": at_most(figures["lives_past_limit"], 0),
        **{f"{kind}_s_past_expiry": at_most(seconds, 0) for kind, seconds in billed.items()},
    }
    return Result(BENCH, figures, aims)
