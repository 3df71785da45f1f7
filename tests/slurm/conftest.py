"""A cluster a worker: it is up in a second, and each test leaves it empty."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.waiting import until

from .cluster import Cluster, missing

NO_SLURM = missing()


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if NO_SLURM is not None:
        pytest.skip(f"NO TEST OF SLURM: {NO_SLURM}")
    with _started(tmp_path_factory.mktemp("slurm"), 3) as made:
        yield made


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[Cluster]:
    """One for a test that breaks it."""
    if NO_SLURM is not None:
        pytest.skip(f"NO TEST OF SLURM: {NO_SLURM}")
    with _started(tmp_path / "slurm", 2) as made:
        yield made


@contextmanager
def _started(folder: Path, nodes: int) -> Iterator[Cluster]:
    made = Cluster(folder, nodes)
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    yield shared_cluster
    until(lambda: "COMPLETING" not in _jobs(shared_cluster), "that jobs have ended")
    left = _jobs(shared_cluster)
    if left:
        shared_cluster.cancel_all()
    assert not left, "a test left jobs"


def _jobs(cluster: Cluster) -> str:
    return cluster.ask("squeue", "-h", "-o", "%i %T %j")
