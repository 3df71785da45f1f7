"""`run waa --on azure_batch`: nodes pull its image beforehand, and /dev/kvm is tried before any task."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from evalfleet.events import AttemptStarted
from standins.azure_batch import StandIn
from standins.azure_batch.nodes import LabNodes
from standins.cloud.hosts import Hosts
from standins.waa import standin
from tests.cloud.batch_places import FAST, SIZE
from tests.desk import Desk
from tests.lab.clients import needs_lab
from tests.waa.test_on_gce import SETTINGS, with_docker
from tests.waa.test_on_gce import kit as kit
from tests.waiting import until

pytestmark = [needs_lab, pytest.mark.slow, pytest.mark.nightly]
IMAGE = "with-docker"
KEY = {"OPENAI_API_KEY": "sk-nobody"}
ASKED = ("run", "waa", "--on", "batch", "--model", "m", "--canary", "0", "--yes")


@pytest.fixture
def batch(kit: Path, tmp_path: Path) -> Iterator[StandIn]:
    """Its nodes have Docker."""
    with StandIn(Hosts(expose=[kit]), timing=FAST) as made:
        nodes = made.service.nodes
        assert isinstance(nodes, LabNodes)
        nodes.image = IMAGE
        made.hosts.images[IMAGE] = with_docker(kit, tmp_path / "image")
        yield made


def test_waa_runs_on_nodes_that_have_pulled_its_image_and_kvm_is_tried_before_any_task(
    batch: StandIn, kit: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "desk"
    folder.mkdir()
    place = {
        "kind": "azure_batch",
        "account": f"{batch.account}.{batch.region}",
        "endpoint": batch.endpoint_inside,
        "management": batch.endpoint_inside,
        "ca": str(batch.ca),
        "ssh_from": ["*"],
        "sizes": [SIZE],
        "images": [standin.IMAGE],
        "poll_s": 0.2,
        "settle_s": 0.5,
    }
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in place.items())
    settings = SETTINGS.format(kit=kit, image=next((kit / "registry").iterdir()).name)
    desk = Desk(
        folder,
        environ=batch.service_principal(inside=True),
        prefix=batch.hosts.lab.prefix,
        forks=True,
    )

    def configure(kvm: str) -> None:
        (folder / "evalfleet.toml").write_text(f"[places.batch]\n{text}{settings}kvm = {kvm}\n")

    try:
        configure("true")  # hosts of the lab have none
        refused = desk(*ASKED, "--name", "refused", env=KEY)
        assert refused.code != 0, refused
        assert "no virtual machine can be made on its node (/dev/kvm); name other `sizes`" in refused.out
        assert not any(isinstance(each, AttemptStarted) for each in desk.events("refused"))
        until(lambda: not batch.left(), lambda: f"{batch.left()}")
        configure("false")
        desk.done(*ASKED, "--name", "r", env=KEY)
    finally:
        desk.sweep()
    assert {task.status for task in desk.state("r").tasks.values()} == {"scored"}
    until(lambda: not batch.left(), lambda: f"{batch.left()}")
    assert not batch.meters.running()
