"""What every end-to-end test is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from evalfleet.cli import main
from tests.e2e.harness import Fleet
from tests.e2e.metered import Served, serving_models


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """A folder and a home of its own. Whatever a test does, nothing of it is left running."""
    made = Fleet.at(tmp_path / "f")
    yield made
    left = made.alive()
    made.sweep()
    logs = [path.read_text("utf-8", "replace") for path in made.home.glob("*/controller.log")]
    assert not left, f"left running: {left}"
    assert not any("Traceback" in log for log in logs), logs


@pytest.fixture
def say(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Runs a command in this process, which is not the run's controller, and returns what it prints."""
    monkeypatch.chdir(fleet.folder)
    monkeypatch.setenv("EVALFLEET_HOME", str(fleet.home))

    def run(*words: str, code: int = 0) -> str:
        assert main(words) == code, words
        told = capsys.readouterr()
        assert not code or told.err.count("\n") == 1, told.err
        return told.err if code else told.out

    return run


@pytest.fixture
def models(tmp_path: Path) -> Iterator[Served]:
    """A stand-in for the APIs of models."""
    with serving_models(tmp_path) as served:
        yield served
