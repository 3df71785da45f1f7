"""What cannot work on Azure ML is refused in one line that says what to do, and nothing is left of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from evalfleet.journal import Store
from evalfleet.model import MachineId
from evalfleet.places.azure.names import HOME, OWNER
from evalfleet.places.azure_ml.template import cluster_name, instance_name
from standins.azure_ml import StandIn
from standins.azure_ml.api import COMPUTE_NAME
from standins.azure_ml.instances import NAME
from tests.cloud import ml_places
from tests.cloud.services import desk

OTHER = "Standard_D8s_v3"


@pytest.fixture
def ml() -> Iterator[StandIn]:
    with StandIn(ml_timing=ml_places.FAST) as made:
        yield made


def test_azure_takes_the_name_of_every_cluster_and_every_instance() -> None:
    """Digits may not end a name after a hyphen."""
    assert not COMPUTE_NAME.fullmatch("ef-abc123-0123456789")
    for n in range(2000):
        home, machine = f"{n:012x}", MachineId(f"run-{n}-1")
        assert COMPUTE_NAME.fullmatch(cluster_name("run", home, ml_places.SIZE, spot=False))
        assert NAME.fullmatch(instance_name(machine, home))


@pytest.mark.parametrize("owner", ["somebody", ""])
def test_a_cluster_of_another_owner_is_neither_used_nor_touched(
    ml: StandIn, tmp_path: Path, owner: str
) -> None:
    """It has the name that the run's own would have."""
    at = desk(ml, tmp_path, 1)
    name = cluster_name("r", Store.open(at.home).home_id, ml_places.SIZE, spot=False)
    tags = {HOME: "ffffffffffff", OWNER: owner} if owner else {}
    inner = {"vmSize": ml_places.SIZE, "scaleSettings": {"minNodeCount": 0, "maxNodeCount": 2}}
    kind = {"computeType": "AmlCompute", "properties": inner}
    body = {"location": ml.region, "tags": tags, "properties": kind}
    ml.do(lambda: setattr(ml.service.add_cluster(name, body), "state", "Succeeded"))
    done = at("run", "b.toml", "--on", "p", "--workers", "1", "--name", "r")
    assert done.code == 4, done
    whose = " but somebody's" if owner else ""
    why = f"the cluster {name} is not this home's{whose}; choose another --name, or set `cluster` to use it"
    assert [line for line in done.out.splitlines() if line.endswith(f"stopping: p/: {why}")], done
    assert ml.left() == [name], "it is theirs, and stays"
    assert not ml.meters.spans, "nothing was billed"
