"""What runs cost now beside an earlier commit of this repository, by the benchmarks of each."""

from __future__ import annotations

import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from .result import Figures, Result, at_most, rounded
from .startup import interleaved
from .workspace import console_script, environment

ROOT = Path(__file__).resolve().parent.parent
COMMIT = "b711ad01"
"""The last one before the source was made smaller. BENCH_BEFORE names another one."""
LIMIT_S = 900.0
ORDER = ("then", "now", "now", "then")
"""A file system on which others have just deleted much is slower from one run to the next, by as much as the
first took: so each comes as early, in all, as the other."""

MEASURED: dict[str, dict[str, tuple[str, ...]]] = {
    "recovery": {"first_attach": ("attach", "first_attach_s")},
    "dispatch": {"controller_and_supervisors": ("controller_and_supervisors_ms",)},
    "ssh-dispatch": {"true_command": ("true", "command_s"), "sleep_command": ("sleep", "command_s")},
    "lost-host": {
        "power_loss": ("power_loss", "others_busy", "median_s"),
        "partition": ("partition", "others_busy", "median_s"),
    },
    "sim-scale": {"simulated": ("100000_tasks_on_1000_machines", "cpu_s")},
}
"""Benchmark -> figures of it that are compared; those of recovery and lost-host are times, the others CPU."""
STARTS = {"help": "--help", "ls": "ls"}
"""Commands whose start is measured: its CPU time is nearly all that they take."""
ROUNDS = 50
"""How often each commit is started. A computer's speed differs from one minute to the next by more than the
difference that is looked for, so the commits take turns."""


def run(quick: bool) -> Result:
    commit = "HEAD" if quick else os.environ.get("BENCH_BEFORE", COMMIT)
    found = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True)
    if found.returncode:
        why = found.stderr.decode(errors="replace").strip() or "git archive failed"
        return Result("before", {"error": f"{commit} cannot be had: {why}"}, {})
    figures: Figures = {
        "commit": commit,
        "counted": "as each benchmark counts; startup: CPU, medians; ratio: now over then",
    }
    with tempfile.TemporaryDirectory(prefix="evalfleet-bench-") as folder:
        with tarfile.open(fileobj=io.BytesIO(found.stdout)) as archive:
            archive.extractall(folder, filter="data")
        trees = {"then": Path(folder), "now": ROOT}
        figures |= _starts(trees, 1 if quick else ROUNDS)
        if not quick:
            for name, wanted in MEASURED.items():
                figures |= _compared(name, wanted, trees)
    ratios = {name: figure["ratio"] for name, figure in figures.items() if isinstance(figure, dict)}
    return Result("before", figures, {name: at_most(ratio, 1.10) for name, ratio in ratios.items()})


def _starts(trees: dict[str, Path], rounds: int) -> Figures:
    with tempfile.TemporaryDirectory(prefix="evalfleet-bench-") as folder:
        commands = {
            f"{label} {which}": (
                *("env", f"PYTHONPATH={tree / 'src'}", f"EVALFLEET_HOME={folder}/{which}"),
                *(*console_script(), word),
            )
            for label, word in STARTS.items()
            for which, tree in trees.items()
        }
        seconds = interleaved(commands, environment(), rounds)
    figures: Figures = {}
    for label in STARTS:
        each = {which: statistics.median(seconds[f"{label} {which}"]) for which in trees}
        figures[f"startup_{label}"] = {
            **{which: rounded(median) for which, median in each.items()},
            "ratio": rounded(each["now"] / each["then"], 3),
        }
    return figures


def _compared(name: str, wanted: dict[str, tuple[str, ...]], trees: dict[str, Path]) -> Figures:
    told: dict[str, list[Figures]] = {which: [] for which in trees}
    for which in ORDER:
        told[which].append(_told(name, trees[which]))
    figures: Figures = {}
    for label, path in wanted.items():
        each = {which: [_at(its, path) for its in all_told] for which, all_told in told.items()}
        ratio = sum(each["now"]) / sum(each["then"])
        figures[f"{name}_{label}"] = {**each, "ratio": rounded(ratio, 3)}
    return figures


def _told(name: str, tree: Path) -> Figures:
    """What the tree's own benchmark says. It runs that tree's source, whatever is installed."""
    paths = os.pathsep.join((str(tree), str(tree / "src")))
    argv = [sys.executable, "-m", "bench", name, "--json"]
    done = subprocess.run(
        argv, cwd=tree, env=environment(PYTHONPATH=paths), stdout=subprocess.PIPE, timeout=LIMIT_S, check=True
    )
    figures: Figures = json.loads(done.stdout.splitlines()[-1])["figures"]
    return figures


def _at(figures: Figures, path: tuple[str, ...]) -> float:
    *groups, name = path
    for group in groups:
        figures = figures[group]
    return float(figures[name])
