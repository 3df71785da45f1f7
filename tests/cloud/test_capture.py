"""A prepared machine becomes an image: later machines come up ready, and nothing is left half done."""

from __future__ import annotations

import http.server
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from lab.network import GATEWAY
from standins.azure import Hosts, StandIn, Timing
from standins.azure.galleries import VERSION
from standins.azure.vms import VM, Vm
from standins.waa import standin
from tests.cloud.desk import AzureDesk
from tests.desk import Process
from tests.lab.clients import needs_lab
from tests.waiting import until

REGIONS = ["eastus", "westus2"]
BOOT = "#!/bin/sh\nexec setsid docker __daemon\n"
MAPPING = '#!/bin/sh\npid=$1; shift; echo "$@" >/proc/$pid/{kind}_map\n'
SETTINGS = """
[benchmarks.waa]
waa = "{kit}/registry/{image}/rootfs/client"
golden = "http://{gateway}:{port}"
som_origin = "a11y"
base_url = "http://127.0.0.1:9/v1"
ram = "1G"
kvm = false
free_gb = 0
boot_s = 60
restart_s = 3
stop_s = 0
"""


class Store(http.server.ThreadingHTTPServer):
    """A blob store with golden storage, in the machines' network. Remembers what it handed out."""

    def __init__(self, azure: StandIn, folder: Path) -> None:
        self.folder, self.served = folder, list[str]()
        super().__init__((GATEWAY, 0), _Blobs, bind_and_activate=False)
        self.socket.close()
        self.socket = azure.hosts.lab.socket()
        self.server_bind()
        self.server_activate()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Blobs(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Store)
        file = self.server.folder / self.path.lstrip("/")
        if not file.is_file():
            return self.send_error(404)
        data = file.read_bytes()
        first, last = map(int, re.findall(r"\d+", self.headers["Range"]))
        part = data[first : last + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)
        self.server.served.append(file.name)
        return None

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def store(azure: StandIn, kit: Path) -> Iterator[Store]:
    made = Store(azure, kit / "golden")
    yield made
    made.close()


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan = {"default": {"do": "score", "score": 1.0, "steps": 1, "seconds": 0.05}, "boot_s": 0.05}
    return standin.build_kit(tmp_path_factory.mktemp("kit"), plan=plan)


@pytest.fixture
def azure(kit: Path) -> Iterator[StandIn]:
    slow = Timing(deallocate_s=(0.5, 0.5), copy_s=(1.0, 1.0))  # there must be time to kill
    with StandIn(Hosts(expose=[kit]), timing=slow) as made:
        yield made


@pytest.fixture
def desk(azure: StandIn, tmp_path: Path) -> Iterator[AzureDesk]:
    made = AzureDesk(azure, tmp_path / "desk", inside=True, regions=REGIONS)
    yield made
    made.sweep()


def equip(azure: StandIn, kit: Path) -> None:
    """Docker on all machines, back after a boot, and root's alone."""
    engine = {"registry": f"{kit}/registry", "all_users": True}
    files = {
        f"{standin.ENGINE_ROOT}/engine.json": json.dumps(engine),
        "/usr/local/bin/newuidmap": MAPPING.format(kind="uid"),
        "/usr/local/bin/newgidmap": MAPPING.format(kind="gid"),
        "/etc/rc.local": BOOT,
    }
    for vm in azure.resources(VM):
        host = azure.hosts.host(str(vm.id))
        host.run(["install", "-D", "-m", "750", f"{kit}/docker", "/usr/local/bin/docker"])
        for path, text in files.items():
            host.run(["install", "-D", "-m", "755", "/dev/stdin", path], text=text)
        host.run(["sh", "-c", "/etc/rc.local </dev/null >/dev/null 2>&1 &"])


def images_in(azure: StandIn) -> list[str]:
    """Where a copy is billed."""
    return sorted(span.location for span in azure.meters.running() if span.kind == "image")


@needs_lab
@pytest.mark.slow
def test_machines_from_the_image_download_nothing(
    azure: StandIn, desk: AzureDesk, kit: Path, store: Store
) -> None:
    image = next((kit / "registry").iterdir()).name
    about = SETTINGS.format(kit=kit, image=image, gateway=GATEWAY, port=store.server_port)
    toml = desk.folder / "evalfleet.toml"
    toml.write_text(toml.read_text() + about)
    desk.done("pool", "create", "dev", "--on", "azure")
    equip(azure, kit)
    done = desk.done("pool", "prepare", "dev", "waa", "--capture", "waa-2026")  # without a model's key
    (line,) = (line.strip() for line in done.out.splitlines() if line.strip().startswith("image = "))
    assert "Pool dev has one machine less" in done.out
    assert "/mnt" in done.err
    assert "data.img" in store.served
    assert azure.resources(VM) == []
    assert images_in(azure) == REGIONS
    (kept,) = azure.hosts.images.values()
    home = kept / "home/azureuser"
    assert (home / "evalfleet-waa/golden/data.img").is_file()
    assert not [*home.glob(".evalfleet"), *home.glob(".ssh/*"), *kept.glob("etc/ssh/ssh_host_*")]
    assert not list(kept.glob("var/lib/cloud/*")), "custom data had the host's key"

    (shown,) = json.loads(desk.say("machines", "--json"))
    assert (shown["image"], shown["machine"], shown["regions"]) == ("waa-2026", None, REGIONS)
    assert desk.say("reap", "--all-owners", "--yes", "--pools") == "nothing of ours has expired\n"

    store.served.clear()
    hidden = shutil.move(kit / "registry" / image / "image.json", kit / "hidden")  # nothing can be pulled
    desk.configure(regions=REGIONS, image=json.loads(line.partition(" = ")[2]))
    toml.write_text(toml.read_text() + about)
    asked = ("run", "waa", "--on", "azure", "--model", "m", "--name", "r", "--canary", "0", "--yes")
    desk.done(*asked, env={"OPENAI_API_KEY": "sk-nobody"})
    shutil.move(hidden, kit / "registry" / image / "image.json")
    assert store.served == []
    assert {task.status for task in desk.state().tasks.values()} == {"scored"}
    (machine,) = desk.state().machines.values()
    assert {"setup.image", "setup.golden"} <= machine.timings.keys()

    assert "would delete image waa-2026" in desk.done("machines", "--delete-image", "waa-2026", code=2).err
    assert images_in(azure) == REGIONS
    desk.done("machines", "--delete-image", "waa-2026", "--yes")
    assert azure.left() == []
    assert azure.meters.running() == []


def vm_of(azure: StandIn) -> Vm:
    (vm,) = azure.resources(VM)
    assert isinstance(vm, Vm)
    return vm


def kill_when(process: Process, fact: Callable[[], bool], what: str) -> None:
    def happened() -> bool:
        if fact():
            return True
        assert process.popen.poll() is None, f"ended before: {what}: {process.wait()}"
        return False

    until(happened, what, look_s=0.01)
    process.kill()


@pytest.mark.nightly
@needs_lab
def test_killed_at_any_step_the_next_one_goes_on(azure: StandIn, desk: AzureDesk) -> None:
    desk.bench(1)
    desk.done("pool", "create", "dev", "--on", "azure")
    asked = ("pool", "prepare", "dev", "./b.toml", "--capture", "b")
    (going,) = desk.state("dev").machines

    def vm() -> Vm:
        return vm_of(azure)

    steps: Sequence[tuple[str, Callable[[], bool]]] = (
        ("it is written down", lambda: desk.state("dev").machines[going].image == "b"),
        ("it rests", lambda: "evalfleet-rested-for" in vm().tags),
        ("it is cleaned", lambda: "evalfleet-cleaned-for" in vm().tags),
        ("it stops", lambda: vm().power != "running"),
        ("it is generalized", lambda: vm().generalized),
        ("it is copied", lambda: bool(azure.resources(VERSION))),
    )
    for what, fact in steps:
        kill_when(desk.start(*asked), fact, what)
    assert "azure  b " in desk.say("machines"), "what is half made is seen"
    done = desk.done(*asked)
    assert "image b is ready in eastus, westus2" in done.out
    assert images_in(azure) == REGIONS
    assert azure.resources(VM) == []
    assert len(azure.resources(VERSION)) == 1
    desk.done("machines", "--delete-image", "b", "--yes")
    assert azure.left() == []
    assert azure.meters.running() == []


@needs_lab
def test_given_up_half_way_the_machine_goes(azure: StandIn, desk: AzureDesk) -> None:
    desk.bench(1)
    desk.done("pool", "create", "dev", "--on", "azure")
    asked = ("pool", "prepare", "dev", "./b.toml", "--capture", "b")
    kill_when(desk.start(*asked), lambda: vm_of(azure).generalized, "it is generalized")
    desk.done("pool", "start", "dev")
    assert azure.resources(VM) == []
    assert desk.say("machines", "--delete-image", "b", "--yes").startswith("image b is deleted")
    assert azure.left() == []
