"""Same seed, same journal, byte for byte: also in another process with other hashes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sim.checks import run_seeds
from sim.scenario import draw
from sim.simulate import simulate

SEEDS = range(12)
PROGRAM = f"""
from sim.checks import run_seeds
print(run_seeds(range({len(SEEDS)})).digest)
"""


@pytest.mark.parametrize("seed", range(0, 40, 8))
def test_a_seed_writes_the_same_bytes_each_time(seed: int) -> None:
    assert simulate(draw(seed)).store.rows == simulate(draw(seed)).store.rows


def test_other_seeds_write_other_bytes() -> None:
    assert simulate(draw(1)).store.digest() != simulate(draw(2)).store.digest()


def test_other_processes_write_the_same_bytes() -> None:
    root = Path(__file__).parents[2]
    told = set[str]()
    for hash_seed in ("0", "4711"):
        environ = {
            **os.environ,
            "PYTHONHASHSEED": hash_seed,
            "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}",
        }
        argv = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=True)
        told.add(done.stdout.strip())
    assert told == {run_seeds(SEEDS).digest}
