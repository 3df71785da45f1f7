"""Screens and ports of a pool's machines, reached through the SSH connection alone."""

from __future__ import annotations

import re
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.desk import Process
from tests.e2e.harness import Fleet
from tests.lab.clients import needs_lab
from tests.lab.places import KIND, end
from tests.waiting import PATIENCE_S, until

PNG = b"\x89PNG\r\n\x1a\n"
# what a guest shows: a picture that tells which machine it is of; only the machine itself may ask
GUEST = (
    "mkdir -p /srv/guest; cd /srv/guest; printf '\\211PNG\\r\\n\\032\\n%s' $(hostname) >screenshot; "
    "for port in 5000 8006; do setsid -f python3 -m http.server --bind 127.0.0.1 $port >/dev/null 2>&1; done"
)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet.at(tmp_path)
    made.config(f'[places.lab]\nkind = "{KIND}"\n')
    assert made("pool", "create", "p", "--on", "lab", "--workers", "2").code == 0
    yield made
    for process in made.processes:
        if process.popen.poll() is None:
            process.kill()
    end(made.home)


def boot_guest(fleet: Fleet, machine: str) -> None:
    assert fleet("pool", "ssh", "p", machine, "--", "sh", "-c", GUEST).code == 0
    ready = "until python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 5000))'; do :; done"
    assert fleet("pool", "ssh", "p", machine, "--", "sh", "-c", ready).code == 0


def ports(process: Process, pattern: str) -> dict[str, int]:
    """What it prints: a port here by machine."""
    found = until(lambda: re.findall(pattern, process.out) if "Ctrl-C" in process.err else None, "its lines")
    return {machine: int(port) for machine, port in found}


def get(port: int) -> bytes:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{port}/screenshot", timeout=PATIENCE_S) as answer:
        content: bytes = answer.read()
    return content


@needs_lab
def test_tunnel_vnc_and_screenshot(fleet: Fleet) -> None:
    boot_guest(fleet, "worker-1")
    shots = fleet("pool", "vnc", "p", "--save", "shots")
    assert shots.code == 1, "one of the two shows nothing"
    assert shots.out == "shots/worker-1.png\n"
    assert re.match(r"evalfleet: worker-2: there is no Windows on it", shots.err)
    assert (fleet.folder / "shots/worker-1.png").read_bytes() == PNG + b"host-0"
    boot_guest(fleet, "worker-2")
    told = fleet("pool", "vnc", "p", "--save", "shots", "--json").json
    assert [(row["machine"], row["said"], row["problem"]) for row in told] == [
        ("worker-1", "shots/worker-1.png", None),
        ("worker-2", "shots/worker-2.png", None),
    ]

    tunnel = fleet.start("pool", "tunnel", "p", "--port", "18080:5000")
    here = ports(tunnel, r"(\S+): 127\.0\.0\.1:(\d+) is its port 5000")
    assert {machine: get(port) for machine, port in here.items()} == {
        "worker-1": PNG + b"host-0",
        "worker-2": PNG + b"host-1",
    }
    vnc = fleet.start("pool", "vnc", "p", "worker-2")
    (port,) = ports(vnc, r"(\S+): http://127\.0\.0\.1:(\d+)/").values()
    assert get(port) == PNG + b"host-1"
    assert "worker-2: nothing was prepared; `evalfleet pool prepare p waa`" in vnc.err
    link = f"http://127.0.0.1:{port}/"
    assert link in fleet("pool", "status", "p").out
    shown = {row["name"]: row["screen"] for row in fleet("pool", "status", "p", "--json").json["machines"]}
    assert shown == {"worker-1": None, "worker-2": link}
    killed = fleet.start("pool", "vnc", "p", "worker-1")
    ports(killed, r"(\S+): http://127\.0\.0\.1:(\d+)/")
    killed.kill()
    assert fleet("pool", "status", "p").out.count("http://") == 1, (
        "the link of one that was killed is no link"
    )
    with socket.create_connection(("127.0.0.1", port)):  # a browser that never hangs up
        for process in (tunnel, vnc):
            process.interrupt()
            assert process.wait().code == 0
    with pytest.raises(OSError, match="refused"):
        get(port)
    assert "http://" not in fleet("pool", "status", "p").out


@needs_lab
def test_what_cannot_be_reached_is_said(fleet: Fleet) -> None:
    fleet("pool", "tunnel", "p", "--port", "http").refused("--port http: give a port, or two as 8080:80")
    fleet("pool", "vnc", "p", "nobody").refused("no machine 'nobody'")
    tunnel = fleet.start("pool", "tunnel", "p", "worker-1", "--port", "18090:9", "--json")
    (port,) = ports(tunnel, r'"machine": "(\S+)", "here": (\d+), "there": 9').values()
    with pytest.raises(OSError, match=r"."):
        get(port)
    until(lambda: re.search(r"evalfleet: .* port 9: .*refused", tunnel.err), "a word of why")
    tunnel.interrupt()
    assert tunnel.wait().code == 0
    fleet("pool", "stop", "p")
    fleet("pool", "vnc", "p", "--save", "shots").refused(
        "no such machine of pool 'p' is running", "pool start p"
    )
