"""Windows Agent Arena on compute instances of Azure ML, as its own `run_azure.py` has it: a pool of them is
made, prepared, used, stopped, started, used again and deleted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from standins.azure_ml import StandIn
from standins.cloud.hosts import Hosts
from standins.waa import standin
from tests.cloud.ml_places import FAST, SIZE
from tests.desk import Desk
from tests.lab.clients import needs_lab
from tests.waa.test_on_gce import FILES, SETTINGS
from tests.waiting import until

pytestmark = [needs_lab, pytest.mark.slow, pytest.mark.nightly]
IMAGE = "with-docker"


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    plan = {"default": {"do": "score", "score": 1.0, "steps": 1, "seconds": 0.05}, "boot_s": 0.05}
    (tmp_path / "kit").mkdir()
    return standin.build_kit(tmp_path / "kit", plan=plan)


@pytest.fixture
def ml(kit: Path, tmp_path: Path) -> Iterator[StandIn]:
    """Compute instances have Docker."""
    root = tmp_path / "image"
    engine = {"registry": f"{kit}/registry", "all_users": True}
    files = {**FILES, f"{standin.ENGINE_ROOT}/engine.json".lstrip("/"): json.dumps(engine)}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
        (root / name).chmod(0o755)
    docker = root / "usr/local/bin/docker"
    docker.write_bytes((kit / "docker").read_bytes())
    docker.chmod(0o755)
    with StandIn(machines=Hosts(expose=[kit]), ml_timing=FAST) as made:
        made.service.instances.image = IMAGE
        made.hosts.images[IMAGE] = root
        yield made


def test_a_pool_of_compute_instances_is_prepared_once_and_runs_waa_twice(
    ml: StandIn, kit: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "desk"
    folder.mkdir()
    lines = {
        "kind": "azure_ml",
        "compute": "instances",
        "workspace": ml.workspace,
        "resource_group": ml.group,
        "endpoint": ml.endpoint_inside,
        "storage_endpoint": ml.storage_endpoint_inside,
        "ca": str(ml.ca),
        "sizes": [SIZE],
        "isolation": "none",
        "settle_s": 0.5,
    }
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in lines.items())
    settings = SETTINGS.format(kit=kit, image=next((kit / "registry").iterdir()).name)
    (folder / "evalfleet.toml").write_text(f"[places.arena]\n{text}{settings}kvm = false\n")
    environ = {**ml.service_principal(), "AZURE_AUTHORITY_HOST": ml.endpoint_inside}
    desk = Desk(folder, environ=environ, prefix=ml.hosts.lab.prefix, forks=True)
    key = {"OPENAI_API_KEY": "sk-nobody"}
    try:
        desk.done("pool", "create", "p", "--on", "arena", "--workers", "1")
        desk.done("pool", "prepare", "p", "waa", env=key)
        for name in ("first", "second"):
            desk.done("run", "waa", "--pool", "p", "--model", "m", "--name", name, "--yes", env=key)
            assert {task.status for task in desk.state(name).tasks.values()} == {"scored"}
            if name == "first":
                desk.done("pool", "stop", "p")
                until(lambda: not ml.meters.running(), "a stopped pool costs no machine's price")
                desk.done("pool", "start", "p")
        desk.done("pool", "delete", "p", "--yes")
    finally:
        desk.sweep()
    until(lambda: not ml.left(), lambda: f"{ml.left()}")
    assert not ml.meters.running()
