"""Completion of commands, flags, runs and tasks, asked of a real bash."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.harness import Fleet, tasks

ASK = """\
eval "$(register-python-argcomplete evalfleet)"
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
COMP_LINE="$*"
COMP_POINT=${#COMP_LINE}
COMP_TYPE=9
_python_argcomplete evalfleet
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def ran(fleet: Fleet) -> Fleet:
    fleet.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), fleet.environ["PATH"]))
    fleet.bench(tasks(2))
    assert fleet.run().code == 0
    return fleet


def offered(fleet: Fleet, *words: str) -> set[str]:
    done = subprocess.run(
        ["bash", "-c", ASK, "bash", "evalfleet", *words],
        cwd=fleet.folder,
        env=fleet.environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert not done.stderr
    return set(done.stdout.split())


def test_commands_flags_runs_tasks_and_places_are_offered(ran: Fleet) -> None:
    assert {"report", "reap"} <= offered(ran, "re")
    assert offered(ran, "show", "") == {"latest", "r"}
    assert offered(ran, "show", "r", "") == {"a_1", "a_2"}
    assert offered(ran, "report", "r", "--form") == {"--format"}
    assert {"start", "status", "stop"} <= offered(ran, "pool", "st")
    ran.config('[places.mine]\nkind = "local"\n[places.most]\nkind = "local"\n')
    assert offered(ran, "run", "b.toml", "--on", "mi") == {"mine"}


def test_an_unknown_run_offers_nothing_and_prints_no_error(ran: Fleet) -> None:
    assert offered(ran, "show", "nothing", "") == set()
