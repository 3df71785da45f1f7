"""What unit tests share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """For what leaves a file in the home of whoever runs it: not in that of who runs the tests."""
    folder = tmp_path / "own-home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    return folder
