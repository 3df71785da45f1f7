"""A cluster a worker: it is up in a second, and each test leaves it empty."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .cluster import Cluster, missing

NO_SLURM = missing()


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if NO_SLURM is not None:
        pytest.skip(f"NO TEST OF SLURM: {NO_SLURM}")
    made = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    yield shared_cluster
    left = shared_cluster.ask("squeue", "-h", "-o", "%i %T %j")
    if left:
        shared_cluster.cancel_all()
    assert not left, "a test left jobs"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that the nodes see: they are this computer."""
    made = tmp_path / "shared"
    made.mkdir()
    return made
