"""What cannot work on Azure ML is refused in one line that says what to do, and nothing is left of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from evalfleet.events import AttemptStarted
from evalfleet.journal import Store
from evalfleet.model import MachineId
from evalfleet.places.azure.names import HOME, OWNER
from evalfleet.places.azure_ml.template import cluster_name, instance_name
from standins.azure_ml import StandIn
from standins.azure_ml.api import COMPUTE_NAME
from standins.azure_ml.instances import NAME
from standins.azure_ml.service import Cluster
from tests.cloud import ml_places
from tests.cloud.mail_desk import nothing_left
from tests.cloud.test_ml_run import desk

OTHER = "Standard_D8s_v3"


@pytest.fixture
def ml() -> Iterator[StandIn]:
    with StandIn(ml_timing=ml_places.FAST) as made:
        yield made


def has_cluster(size: str) -> Callable[[StandIn], None]:
    """The workspace has a cluster `mine` of this size."""

    def make(ml: StandIn) -> None:
        scale = {"minNodeCount": 0, "maxNodeCount": 2}
        inner = {"vmSize": size, "scaleSettings": scale}
        body = {"location": ml.region, "properties": {"computeType": "AmlCompute", "properties": inner}}
        ml.do(lambda: _add(ml, body))

    return make


def _add(ml: StandIn, body: dict[str, Any]) -> Cluster:
    cluster = ml.service.add_cluster("mine", body)
    cluster.state = "Succeeded"
    return cluster


def nothing(ml: StandIn) -> None:
    """The stand-in is as it is."""


def no_rights(ml: StandIn) -> None:
    """The storage takes no key, and the login has no role there."""
    ml.service.has_key = False
    ml.storage.roles.clear()


def no_image(ml: StandIn) -> None:
    ml.service.troubles.pull_error = "Error: manifest for docker.io/me/agent:1 not found: manifest unknown"


@pytest.mark.parametrize(
    ("more", "trouble", "told"),
    [
        ({"workspace": "other"}, nothing, "there is no workspace other in the resource group evals; `az ml"),
        ({"resource_group": "nobodys"}, nothing, "nobodys"),
        ({"region": "westus2"}, nothing, 'set region = "eastus", or leave it out'),
        ({"cluster": "mine"}, nothing, "the workspace has no cluster mine; `az ml compute list"),
        ({"cluster": "mine"}, has_cluster(OTHER), f'set sizes = ["{OTHER}"]: by it they are priced'),
        ({"image": "me/agent:1"}, no_image, "name an `image`"),
        ({}, no_rights, "Storage Blob Data Contributor"),
        ({"name": "x"}, nothing, "must have {machine} in it"),
    ],
    ids=["workspace", "group", "region", "no cluster", "size", "image", "storage", "name"],
)
def test_a_run_is_refused_in_one_line(
    ml: StandIn, tmp_path: Path, more: dict[str, Any], trouble: Callable[[StandIn], None], told: str
) -> None:
    trouble(ml)
    at = desk(ml, tmp_path, 1, **more)
    done = at.start("run", "b.toml", "--on", "ml", "--workers", "1", "--name", "r").wait()
    assert done.code in (2, 4), done
    said = [line for line in (done.out + done.err).splitlines() if told in line]
    assert said, done
    if trouble is no_image:  # which only a node can tell
        (stopping,) = [line for line in said if " stopping: " in line]
        assert stopping.count(told) == 1, "the whole place says it, and so each size does not say it again"
    else:
        assert (done.out + done.err).splitlines() == said, "one line, and nothing was begun"
    assert not any(isinstance(event, AttemptStarted) for event in at.events())
    ml.do(lambda: ml.service.clusters.pop("mine", None))
    nothing_left(ml)


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
    done = at("run", "b.toml", "--on", "ml", "--workers", "1", "--name", "r")
    assert done.code == 4, done
    whose = " but somebody's" if owner else ""
    why = f"the cluster {name} is not this home's{whose}; choose another --name, or set `cluster` to use it"
    assert [line for line in done.out.splitlines() if line.endswith(f"stopping: ml/: {why}")], done
    assert ml.left() == [name], "it is theirs, and stays"
    assert not ml.meters.spans, "nothing was billed"
