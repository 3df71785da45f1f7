"""What `--dry-run` says of HAL's tasks on Google Cloud, beside what people hope that they cost."""

from __future__ import annotations

import json
import statistics
import subprocess
from typing import Any

from .result import Figures, Result, at_most, rounded
from .workspace import EVALFLEET, Workspace, environment

CASES = ((10, 5, 10, 0.50), (50, 10, 50, 2.00), (200, 15, 50, 15.00))
"""Tasks, minutes of each, machines, and the hope in US dollars."""
REGION = "us-central1"
COUNTED = (
    "machines alone, without models: `evalfleet run hal --dry-run --on gce`; every task as long as said, "
    "tried once, two minutes for a machine to boot, disks and addresses in it; list prices as they were "
    f"built in; spot_off: by the same list, in {REGION}, of machine types alone"
)
AGENT = "def run(input, **kwargs):\n    return {}\n"


def run(quick: bool) -> Result:
    figures: Figures = {}
    aims = {}
    with Workspace() as space:
        (space.folder / "agent").mkdir()
        (space.folder / "agent/main.py").write_text(AGENT)
        for tasks, minutes, machines, hope in CASES[:1] if quick else CASES:
            name = f"{tasks}_tasks_of_{minutes}_min"
            regular = _estimate(space, tasks, minutes, machines)
            spot = _estimate(space, tasks, minutes, machines, "--spot")
            figures[name] = {
                "machines": machines,
                "minutes": rounded(regular["duration_seconds"] / 60),
                "usd": rounded(regular["usd"]),
                "spot_usd": rounded(spot["usd"]),
                "hope_usd": hope,
            }
            aims[f"{name}_usd"] = at_most(figures[name]["usd"], hope)
        figures["spot_off"] = _spot_off(_told(space, "prices", "--json"))
    figures["counted"] = COUNTED
    return Result("hal-plan", figures, aims)


def _told(space: Workspace, *words: str) -> Any:
    done = subprocess.run(
        [*EVALFLEET, *words],
        cwd=space.folder,
        env=environment(EVALFLEET_HOME=str(space.home)),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)


def _estimate(space: Workspace, tasks: int, minutes: int, machines: int, *more: str) -> dict[str, Any]:
    listed = {f"t_{n}": {"prompt": "p", "answer": "a"} for n in range(tasks)}
    (space.folder / "tasks.json").write_text(json.dumps(listed))
    settings = ("tasks_file=tasks.json", "agent_dir=agent", "project=p", "ssh_from=203.0.113.7/32")
    words = ("run", "hal", "--on", "gce", *(f"--set={each}" for each in settings), *more)
    limits = ("--workers", str(machines), "--task-timeout", f"{minutes}m", "--dry-run", "--json")
    found: dict[str, Any] = _told(space, *words, *limits)["estimate"]
    return found


def _spot_off(tables: list[dict[str, Any]]) -> Figures:
    """By family, and the median over all types that the list has."""
    rows = [row for table in tables if table["place"] == "gce" for row in table["prices"]]
    off = {
        row["what"]: 1 - row["spot_usd_per_hour"] / row["usd_per_hour"]
        for row in rows
        if row["region"] == REGION and "-standard-" in row["what"] and row.get("spot_usd_per_hour")
    }
    families: dict[str, list[float]] = {}
    for what, share in off.items():
        families.setdefault(what.partition("-")[0], []).append(share)
    found = {family: rounded(statistics.median(shares), 2) for family, shares in sorted(families.items())}
    return {"median": rounded(statistics.median(off.values()), 2), **found}
