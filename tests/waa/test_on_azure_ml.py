"""Windows Agent Arena on compute instances of Azure ML, as its own `run_azure.py` has it: a pool of them is
made, prepared with golden storage of the workspace's datastore, used, stopped, started, used again and
deleted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from lab.network import GATEWAY
from standins.azure.blobs import ACCOUNT, BlobContainer, container_token
from standins.azure_ml import StandIn
from standins.cloud.hosts import Hosts
from standins.waa import standin
from tests.cloud.ml_places import FAST, SIZE
from tests.desk import Desk
from tests.lab.clients import needs_lab
from tests.waa.test_on_gce import SETTINGS, with_docker
from tests.waiting import until

pytestmark = [needs_lab, pytest.mark.slow, pytest.mark.nightly]
IMAGE = "with-docker"
DATASTORE = "azureml-blobstore-00000000"
AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    plan = {"default": {"do": "score", "score": 1.0, "steps": 1, "seconds": 0.05}, "boot_s": 0.05}
    (tmp_path / "kit").mkdir()
    return standin.build_kit(tmp_path / "kit", plan=plan)


@pytest.fixture
def ml(kit: Path, tmp_path: Path) -> Iterator[StandIn]:
    """Compute instances have Docker."""
    with StandIn(machines=Hosts(expose=[kit]), ml_timing=FAST) as made:
        made.service.instances.image = IMAGE
        root = made.hosts.images[IMAGE] = with_docker(kit, tmp_path / "image")
        # as if an authority that everybody trusts had signed for the workspace's storage
        authorities = root / AUTHORITIES.relative_to("/")
        authorities.parent.mkdir(parents=True)
        authorities.write_bytes(AUTHORITIES.read_bytes() + made.ca.read_bytes())
        yield made


def in_datastore(ml: StandIn, folder: Path) -> tuple[str, str]:
    """Put golden storage where WAA's guide has it, in the workspace's datastore. Returns its URL and a token
    to read it. Hosts of the lab do not trust the stand-in's authority, so it is plain http."""

    async def listen() -> int:
        sock = ml.hosts.lab.socket()
        sock.bind((GATEWAY, 0))
        port: int = sock.getsockname()[1]
        await ml.storage.listen(sock, None)
        return port

    port = asyncio.run_coroutine_threadsafe(listen(), ml._loop).result()
    files = {f"storage/{file.name}": file.read_bytes() for file in folder.iterdir() if file.is_file()}
    ml.do(lambda: ml.storage.containers.__setitem__(DATASTORE, BlobContainer({}, files)))
    return f"http://{GATEWAY}:{port}/{ACCOUNT}/{DATASTORE}/storage", container_token(DATASTORE)


def desk_of(ml: StandIn, kit: Path, folder: Path, golden: str) -> Desk:
    """Whose place is the workspace, and whose Windows comes from there. `golden`: lines of settings."""
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
    settings = settings.replace(f'golden = "{kit}/golden"', golden)
    assert golden in settings
    (folder / "evalfleet.toml").write_text(f"[places.arena]\n{text}{settings}kvm = false\n")
    environ = {**ml.service_principal(), "AZURE_AUTHORITY_HOST": ml.endpoint_inside}
    return Desk(folder, environ=environ, prefix=ml.hosts.lab.prefix, forks=True)


def run_waa(desk: Desk, name: str, environ: Mapping[str, str]) -> None:
    desk.done("run", "waa", "--pool", "p", "--model", "m", "--name", name, "--yes", env=environ)
    assert {task.status for task in desk.state(name).tasks.values()} == {"scored"}


def test_a_pool_of_compute_instances_is_prepared_once_and_runs_waa_twice(
    ml: StandIn, kit: Path, tmp_path: Path
) -> None:
    golden, token = in_datastore(ml, kit / "golden")
    lines = f'golden = "{golden}"\ngolden_token = "GOLDEN_SAS"'
    desk = desk_of(ml, kit, tmp_path / "desk", lines)
    key = {"OPENAI_API_KEY": "sk-nobody", "GOLDEN_SAS": token}
    try:
        desk.done("pool", "create", "p", "--on", "arena", "--workers", "1")
        desk.done("pool", "prepare", "p", "waa", env=key)
        run_waa(desk, "first", key)
        desk.done("pool", "stop", "p")
        until(lambda: not ml.meters.running(), "a stopped pool costs no machine's price")
        desk.done("pool", "start", "p")
        run_waa(desk, "second", key)
        desk.done("pool", "delete", "p", "--yes")
    finally:
        desk.sweep()
    asked = [path for method, path, status in ml.storage.calls if "/storage/" in path and status == 206]
    assert asked, "golden storage came from the datastore"
    assert len([path for path in asked if path.endswith("data.img")]) <= 2, "and came once"
    until(lambda: not ml.left(), lambda: f"{ml.left()}")
    assert not ml.meters.running()


def test_golden_storage_of_this_computer_is_sent_to_the_datastore_once_and_fetched_from_there(
    ml: StandIn, kit: Path, tmp_path: Path
) -> None:
    desk = desk_of(ml, kit, tmp_path / "desk", f'golden = "here:{kit}/golden"')
    key = {"OPENAI_API_KEY": "sk-nobody"}
    refused = desk.done("run", "waa", "--on", "arena", "--model", "m", "--yes", env=key, code=2)
    assert "make a pool, prepare it, and say --pool POOL" in refused.err

    def sent() -> list[str]:
        calls = ml.do(lambda: list(ml.storage.calls))
        return [path for method, path, _ in calls if method == "PUT" and f"{DATASTORE}/" in path]

    try:
        desk.done("pool", "create", "p", "--on", "arena", "--workers", "1")
        first = desk.done("pool", "prepare", "p", "waa")
        assert f"is sent to az://{DATASTORE}/evalfleet/golden-" in first.err + first.out
        many = len(sent())
        assert many > 2, "the files, and their list"
        again = desk.done("pool", "prepare", "p", "waa")
        assert "already" in again.err + again.out
        assert len(sent()) == many, "nothing is sent twice"
        run_waa(desk, "first", key)
        desk.done("pool", "delete", "p", "--yes")
    finally:
        desk.sweep()
    read = [path for method, path, status in ml.storage.calls if "/golden-" in path and status == 206]
    assert read, "machines fetched it from the datastore"
    written = "".join(path.read_text("utf-8", "replace") for path in desk.home.rglob("*") if path.is_file())
    assert "sig=" not in written, "the token is written down nowhere"
    until(lambda: not ml.left(), lambda: f"{ml.left()}")
