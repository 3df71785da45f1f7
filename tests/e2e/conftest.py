"""What every end-to-end test is given."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import Fleet


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
