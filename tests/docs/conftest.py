from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from evalfleet.channels.supervisor.removal import remove_machine
from tests.docs.pages import ROOT


@pytest.fixture
def environment(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """As a newcomer has it: `evalfleet` and `python3` on the path, and nothing of ours in the variables."""
    folder = tmp_path_factory.mktemp("bin")
    shim = folder / "evalfleet"
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m evalfleet "$@"\n', encoding="utf-8")
    shim.chmod(0o755)
    (folder / "python3").symlink_to(sys.executable)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("EVALFLEET_")}
    path = os.pathsep.join((str(folder), kept.get("PATH", os.defpath)))
    return {**kept, "PATH": path, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "100", "TERM": "dumb"}


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
