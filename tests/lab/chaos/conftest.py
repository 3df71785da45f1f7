"""A lab for every scenario: hosts cost 15 ms each, and what one scenario broke must not reach the next.

All that a scenario draws comes from its seed, which is told when it fails. To replay it, or to try others:

    EVALFLEET_CHAOS_SEED=7 pytest tests/lab/chaos -k power_loss
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab import Lab

from .arena import Arena

HOSTS = 20
SEED = os.environ.get("EVALFLEET_CHAOS_SEED", "1")


@pytest.fixture
def arena(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Arena]:
    scenario = str(request.node.name)
    print(f"to replay: EVALFLEET_CHAOS_SEED={SEED} pytest {request.node.nodeid}")
    with Lab.create(HOSTS) as lab:
        made = Arena(lab, tmp_path / "arena", random.Random(f"{SEED} {scenario}"))
        try:
            yield made
        finally:
            made.desk.sweep()
