"""`run waa --on gce`: machines that can run virtual machines, at a discount, from an image with Docker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evalfleet.events import MachineRequested
from evalfleet.journal import Store
from standins.cloud.hosts import Hosts
from standins.gce import StandIn
from standins.waa import standin
from tests.cloud.desk import GceDesk
from tests.cloud.gce_places import FAST
from tests.lab.clients import needs_lab

pytestmark = [needs_lab, pytest.mark.slow]
IMAGE = "projects/debian-cloud/global/images/with-docker"
LIST_USD, DISK_USD, ADDRESS_USD = 0.19424, 0.1 * 128 / 730, 0.005
FILES = {
    "usr/local/bin/newuidmap": '#!/bin/sh\npid=$1; shift; echo "$@" >/proc/$pid/uid_map\n',
    "usr/local/bin/newgidmap": '#!/bin/sh\npid=$1; shift; echo "$@" >/proc/$pid/gid_map\n',
    "etc/rc.local": "#!/bin/sh\nexec setsid docker __daemon\n",
}
SETTINGS = """
[benchmarks.waa]
waa = "{kit}/registry/{image}/rootfs/client"
golden = "{kit}/golden"
base_url = "http://127.0.0.1:9/v1"
ram = "1G"
som_origin = "a11y"
free_gb = 0
boot_s = 60
restart_s = 3
stop_s = 0
"""


def with_docker(kit: Path, root: Path) -> Path:
    """The files of an image whose machines have Docker, and which come from the registry of `kit`."""
    engine = {"registry": f"{kit}/registry", "all_users": True}
    files = {**FILES, f"{standin.ENGINE_ROOT}/engine.json".lstrip("/"): json.dumps(engine)}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
        (root / name).chmod(0o755)
    docker = root / "usr/local/bin/docker"
    docker.write_bytes((kit / "docker").read_bytes())
    docker.chmod(0o755)
    return root


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    plan = {"default": {"do": "score", "score": 1.0, "steps": 1, "seconds": 0.05}, "boot_s": 0.05}
    (tmp_path / "kit").mkdir()
    return standin.build_kit(tmp_path / "kit", plan=plan)


@pytest.fixture
def google(kit: Path, tmp_path: Path) -> Iterator[StandIn]:
    """With an image whose machines have Docker."""
    root = with_docker(kit, tmp_path / "image")
    with StandIn(Hosts(expose=[kit]), timing=FAST) as made:
        debian = "projects/debian-cloud/global/images/debian-12-bookworm-v20261101"
        shown = {**made.cloud.images[debian], "name": "with-docker"}
        shown["selfLink"] = str(shown["selfLink"]).replace(debian, IMAGE)
        made.do(lambda: made.cloud.images.update({IMAGE: shown}))
        made.hosts.images[shown["selfLink"]] = root
        yield made


def test_waa_runs_on_machines_that_can_run_virtual_machines(
    google: StandIn, kit: Path, tmp_path: Path
) -> None:
    bodies: list[dict[str, Any]] = []
    check = google.api.instances.check

    def noted(zone: str, body: dict[str, Any]) -> Any:
        bodies.append(body)
        return check(zone, body)

    google.api.instances.check = noted  # type: ignore[method-assign]
    settings = SETTINGS.format(kit=kit, image=next((kit / "registry").iterdir()).name)
    desk = GceDesk(google, tmp_path / "desk")

    def configure(kvm: str, **more: Any) -> None:
        desk.configure(image=IMAGE, discounts={"n2": 0.5}, **more)
        toml = desk.folder / "evalfleet.toml"
        toml.write_text(f"{toml.read_text()}{settings}kvm = {kvm}\n")

    asked = ("run", "waa", "--on", "gce", "--model", "m", "--name", "r", "--canary", "0", "--yes")
    key = {"OPENAI_API_KEY": "sk-nobody"}
    usd = LIST_USD / 2 + DISK_USD + ADDRESS_USD
    try:
        configure("true", types=["e2-standard-4", "n2-standard-4"])
        planned = json.loads(desk.done(*asked, "--dry-run", "--json", env=key).out)
        (only,) = planned["offers"]
        assert only["size"] == "n2-standard-4", "E2 cannot"
        assert only["usd_per_hour"] == pytest.approx(usd, abs=1e-5)
        assert not bodies
        configure("false", types=["n2-standard-4"], nested=True)  # there is no KVM where the tests run
        desk.done(*asked, env=key)
    finally:
        desk.sweep()
    state = desk.state()
    assert {task.status for task in state.tasks.values()} == {"scored"}
    assert all(body["advancedMachineFeatures"] == {"enableNestedVirtualization": True} for body in bodies)
    records = Store.open(desk.home, create=False).read("r")
    offers = [each.event.offer for each in records if isinstance(each.event, MachineRequested)]
    assert [offer.cost.usd_per_hour for offer in offers] == [pytest.approx(usd, abs=1e-5)]
    cost = json.loads((desk.home / "r/results.json").read_text())["cost"]
    assert "discounted" in str(cost["prices_as_of"])
    (machine,) = state.machines.values()
    assert machine.gone_at is not None
    assert cost["machines_usd"] > 0
    assert not google.left()
    assert not google.meters.running()
