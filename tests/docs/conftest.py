from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from evalfleet.channels.supervisor.machine import remove_machine
from tests.docs.pages import ROOT

PATIENT_TIMEOUT = """#!/bin/bash
# timeout -s KILL SECONDS evalfleet run ... --name RUN: kills at the run's first score, however long that
# takes, so that a slow computer sees what the page shows, too.
shift 3; name="${*: -1}"
"$@" & run=$!
trap 'kill -9 $run' EXIT
until ls benchmark_results/"$name"/*/*/result.json >/dev/null 2>&1; do
  kill -0 $run || exit 1
  sleep 0.05
done
trap - EXIT; kill -9 $run; wait $run
"""


@pytest.fixture
def environment(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """As a newcomer has it: `evalfleet` and Pythons on the path, and nothing of ours in the variables."""
    folder = tmp_path_factory.mktemp("bin")
    for name, words in (("evalfleet", " -m evalfleet"), ("python", "")):  # that of the virtual environment
        shim = folder / name
        shim.write_text(f'#!/bin/sh\nexec "{sys.executable}"{words} "$@"\n', encoding="utf-8")
        shim.chmod(0o755)
    (folder / "python3").symlink_to(sys.executable)
    patient = folder / "timeout"
    patient.write_text(PATIENT_TIMEOUT, encoding="utf-8")
    patient.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("EVALFLEET_")}
    path = os.pathsep.join((str(folder), kept.get("PATH", os.defpath)))
    return {
        **kept,
        "PATH": path,
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "COLUMNS": "100",
        "TERM": "dumb",
    }


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: Mapping[str, str]) -> Iterator[Path]:
    """Where a page's commands and code run. A page that fails half-way leaves no machines behind."""
    for name in [name for name in os.environ if name.startswith("EVALFLEET_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", environment["PATH"])
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for machine in tmp_path.glob("*/.machines/*"):
        remove_machine(machine)
