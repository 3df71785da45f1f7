"""What cannot work on Azure Batch is refused in one line that says what to do, before anything is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from standins.azure_batch import StandIn
from tests.cloud import batch_places
from tests.cloud.test_batch_mailbox import desk

SUBNET = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Network/virtualNetworks/n/subnets/private"
OLD_IMAGE = "canonical:ubuntuserver:18.04-lts:latest"
NOWHERE = "https://127.0.0.1:1"
"""In place of the host of an account in another region, which has no address: nobody answers here, either."""
ELSEWHERE = 'the Batch account standin is in eastus, not in westus2; set account = "standin.eastus"'
WRONG_TOKEN = (
    "wrong audience or resource 'https://batch.core.windows.net'. It should exactly match (including forward "
    "slash) with one of the allowed audiences 'https://batch.core.windows.net/' (AuthenticationFailed); the "
    "token is for another service: remove `scope` from the place"
)


@pytest.fixture
def batch() -> Iterator[StandIn]:
    with StandIn(timing=batch_places.FAST) as made:
        yield made


def nothing(batch: StandIn) -> None:
    """The stand-in is as it is."""


def no_storage(batch: StandIn) -> None:
    batch.service.has_storage = False


def no_rights(batch: StandIn) -> None:
    """The storage takes no key, and the login has no role there."""
    batch.storage.takes_keys = False
    batch.storage.roles.clear()


def test_an_image_of_nodes_that_batch_does_not_have_any_more_ends_the_place_with_the_remedy(
    batch: StandIn, tmp_path: Path
) -> None:
    """That of old guides. Batch says no when the first machine is asked for, and nothing was billed."""
    old: dict[str, Any] = {"image": OLD_IMAGE, "node_agent": "batch.node.ubuntu 18.04"}
    done = desk(batch, tmp_path, 1, **old)("run", "b.toml", "--on", "batch", "--workers", "1", "--name", "r")
    assert done.code == 4, done
    (said,) = [line for line in done.out.splitlines() if " stopping: " in line]
    assert "18.04-lts:latest: " in said
    assert said.endswith("set `image` and `node_agent` to what `az batch pool supported-images list` shows")
    assert not batch.meters.spans


@pytest.mark.parametrize(
    ("more", "trouble", "told"),
    [
        ({"account": "standin.westus2"}, nothing, ELSEWHERE),
        ({"account": "standin.westus2", "endpoint": NOWHERE}, nothing, ELSEWHERE),
        ({"scope": "https://batch.core.windows.net/.default"}, nothing, WRONG_TOKEN),
        ({}, no_storage, "the Batch account standin has no storage account of its own (StorageMissing); set"),
        ({}, no_rights, "the login needs the roles Storage Blob Data Contributor and Storage Blob Delegator"),
        ({"pool": "mine"}, nothing, "was removed; each machine gets a pool of its own"),
        ({"reach": "ssh", "public_ip": False, "subnet": SUBNET}, nothing, 'set reach = "mailbox", by which'),
    ],
    ids=[
        "region",
        "host of a region",
        "scope",
        "storage",
        "rights",
        "pool",
        "private network",
    ],
)
def test_a_run_is_refused_in_one_line(
    batch: StandIn, tmp_path: Path, more: dict[str, Any], trouble: Callable[[StandIn], None], told: str
) -> None:
    trouble(batch)
    done = desk(batch, tmp_path, 1, **more)("run", "b.toml", "--on", "batch", "--workers", "1", "--name", "r")
    assert done.code in (2, 4), done
    (said,) = (done.out + done.err).splitlines()
    assert told in said
    assert not batch.do(lambda: list(batch.service.jobs)), "nothing was begun"
