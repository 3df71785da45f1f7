"""How much CPU the command line takes to answer, beside Python itself."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence

from .result import Figures, Result, below, rounded
from .workspace import EVALFLEET, Workspace, console_script, environment

ROUNDS = 25
AIM_S = 0.12
SHOWN = 10
_LINE = re.compile(r"import time: +(\d+) \| +(\d+) \| ( *)(\S+)")


def run(quick: bool) -> Result:
    script = console_script()
    ours: dict[str, tuple[str, ...]] = {
        "help": (*script, "--help"),
        "run_help": (*script, "run", "--help"),
        "module_help": (*EVALFLEET, "--help"),
        "ls": (*script, "ls"),
    }
    python: dict[str, tuple[str, ...]] = {
        "python_pass": (sys.executable, "-c", "pass"),
        "python_import_argparse": (sys.executable, "-c", "import argparse"),
    }
    with Workspace() as space:
        environ = environment(EVALFLEET_HOME=str(space.home))
        seconds = interleaved({**ours, **python}, environ, 1 if quick else ROUNDS)
        imports = _imports((*EVALFLEET, "ls"), environ)
    medians = {name: rounded(statistics.median(each)) for name, each in seconds.items()}
    figures: Figures = {f"{name}_cpu_s": medians[name] for name in ours}
    figures["help_over_python_pass"] = rounded(medians["help"] / medians["python_pass"], 3)
    rounds = len(seconds["help"])
    figures["measured"] = f"{' '.join(script[-2:])}; user + system, median of {rounds}, interleaved"
    return Result(
        "startup",
        {**figures, "imports_of_ls": imports},
        {"help_cpu_s": below(medians["help"], AIM_S)},
        {name: {"cpu_s": medians[name]} for name in python},
    )


def interleaved(
    commands: dict[str, tuple[str, ...]], environ: dict[str, str], rounds: int
) -> dict[str, list[float]]:
    """CPU seconds by command. One round before, unmeasured, compiles and caches."""
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(rounds + 1):
        for name, argv in commands.items():
            spent = _cpu_s(argv, environ)
            if number:
                seconds[name].append(spent)
    return seconds


def _cpu_s(argv: Sequence[str], environ: dict[str, str]) -> float:
    process = subprocess.Popen(argv, env=environ, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(argv)} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime


def _imports(argv: Sequence[str], environ: dict[str, str]) -> Figures:
    """Milliseconds that imports take, by who is imported; -X importtime itself makes them slower."""
    command = [argv[0], "-X", "importtime", *argv[1:]]
    told = subprocess.run(
        command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True, timeout=60
    )
    own: dict[str, int] = {}
    for match in _LINE.finditer(told.stderr):
        own[match[4]] = own.get(match[4], 0) + int(match[1])
    heaviest = sorted(own, key=lambda name: -own[name])[:SHOWN]
    return {
        "total_ms": _ms(own, ""),
        "evalfleet_ms": _ms(own, "evalfleet"),
        "msgspec_ms": _ms(own, "msgspec"),
        "rich_ms": _ms(own, "rich"),
        "modules": len(own),
        "heaviest_self_ms": {name: round(own[name] / 1000, 1) for name in heaviest},
    }


def _ms(own: dict[str, int], package: str) -> float:
    mine = (us for name, us in own.items() if not package or name.split(".")[0] == package)
    return round(sum(mine) / 1000, 1)
