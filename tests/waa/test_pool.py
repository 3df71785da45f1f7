"""A machine for debugging: prepared once, looked at, and brought back to golden."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

import pytest

from lab import NamespaceHost
from standins.waa.standin import BOOTED_FILES, ENGINE_ROOT, FEW, IMAGE, STORAGE_FILES, write_iso
from tests.lab.clients import needs_lab
from tests.waa.arena import DATA, HANG, Arena
from tests.waiting import until

pytestmark = [
    needs_lab,
    pytest.mark.slow,
    pytest.mark.timeout(400),  # each runs a dozen commands or more, which a busy machine makes slow
]

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    made = Arena(tmp_path, 1, tasks=FEW, plan={"default": {"do": "score"}, "boot_s": 0.05})
    yield made
    made.destroy()


def pool(arena: Arena, verb: str, *words: str, code: int = 0) -> str:
    return arena.start("pool", verb, "dev", *words).finish(code)


def shown_ready(arena: Arena) -> tuple[str | None, bool]:
    """What the pool's file says of its machine to programs that hand out tasks by it."""
    (worker,) = json.loads((arena.home / "dev/vm_pool_registry.json").read_bytes())["workers"]
    assert worker["status"] == "ready"
    return worker["docker_container"], worker["waa_ready"]


def test_prepared_looked_at_and_reset(arena: Arena) -> None:
    pool(arena, "create", "--on", "lab")
    assert "there is no Windows on it; `evalfleet pool prepare dev waa`" in pool(
        arena, "do", "reset", "198.18.1.1", code=1
    )
    refused = pool(arena, "prepare", "waa", "--capture", "image", code=2)
    assert refused.startswith("evalfleet: machines of lab cannot be captured as an image"), "nothing was done"
    assert "there is no Windows on it; `evalfleet pool prepare dev waa`" in pool(
        arena, "vnc", "--save", ".", code=1
    )
    assert pool(arena, "status", "--probe").rstrip().endswith("-         ok"), "the machine itself answers"
    assert shown_ready(arena) == (None, False)
    assert "198.18.1.1 is prepared for waa" in pool(arena, "prepare", "waa")
    assert shown_ready(arena) == ("winarena", True)
    status = pool(arena, "status", "--probe")
    assert "waa       ok\n" in status
    assert "`evalfleet pool vnc dev` opens these screens:\n198.18.1.1  http://127.0.0.1:8006/\n" in status
    assert pool(arena, "vnc", "--save", "shots") == "shots/198.18.1.1.png\n"
    assert (arena.folder / "shots/198.18.1.1.png").read_bytes().startswith(PNG)

    host = arena.lab.hosts[0]
    host.run(["touch", f"{DATA}/storage/left-by-hand"])
    model = "/root/.cache/huggingface/bert"
    host.run(["docker", "exec", "winarena", "touch", model])
    host.run(["python3", "-c", HANG])
    assert "Windows does not answer" in pool(arena, "status", "--probe", code=1)
    (arena.folder / "shots/198.18.1.1.png").unlink()
    assert pool(arena, "vnc", "--save", "shots") == "shots/198.18.1.1.png\n", "QEMU shows it, too"
    assert (arena.folder / "shots/198.18.1.1.png").read_bytes().startswith(PNG)

    said = pool(arena, "do", "reset", "198.18.1.1")
    assert said == "198.18.1.1: Windows is as it was installed, and answers\n"
    host.run(["docker", "exec", "winarena", "ls", model])  # no container needs to fetch it again
    assert "left-by-hand" not in str(host.run(["ls", f"{DATA}/storage"]).stdout)

    assert "this would delete Windows and all else of WAA on 198.18.1.1: say --yes" in pool(
        arena, "do", "clean", code=2
    )
    assert pool(arena, "do", "clean", "--yes") == "198.18.1.1 is clean\n"
    assert shown_ready(arena) == (None, False)
    assert host.run(["ls", "-A", DATA, "/root/.evalfleet-waa"], check=False).stdout == ""
    assert host.run(["docker", "ps", "-aq"]).stdout == ""
    assert host.run(["docker", "images", "-q"]).stdout == ""
    assert host.run(["ls", f"{ENGINE_ROOT}/volumes"]).stdout == ""
    assert (arena.golden / "data.img").exists(), "golden storage that was there before stays"
    assert pool(arena, "do", "clean", "--yes") == "198.18.1.1 had nothing of WAA on it\n"
    assert "198.18.1.1 is prepared for waa" in pool(arena, "prepare", "waa"), "it is set up anew"
    pool(arena, "delete", "--yes")


@pytest.mark.nightly
def test_without_a_checkout_a_prepared_machine_tells_the_list(arena: Arena) -> None:
    config = arena.folder / "evalfleet.toml"
    lines = config.read_text().splitlines(keepends=True)
    config.write_text("".join(line for line in lines if not line.startswith("waa =")))
    installed_s = time.time() - 80.75 * 86_400
    os.utime(arena.golden / "windows.boot", (installed_s, installed_s))
    pool(arena, "create", "--on", "lab")
    asked = ("--pool", "dev", "--model", "m", "--set", "base_url=http://127.0.0.1:9/v1")
    said = arena.start("run", "waa", *asked, "--dry-run").finish(2)
    assert "`git clone --depth 1 " in said
    assert "`evalfleet pool prepare POOL waa`" in said

    assert "198.18.1.1 is prepared for waa" in pool(arena, "prepare", "waa")
    ends = "what was set up on 1 of 1 machines of pool 'dev' ends in 9 days, with its licence"
    assert ends in pool(arena, "status")
    (row,) = json.loads(pool(arena, "status", "--json"))["machines"]
    licence_ends = datetime.fromtimestamp(installed_s + 90 * 86_400, UTC)
    assert row["good_until"].startswith(f"{licence_ends:%Y-%m-%dT%H:%M:%S}")
    host = arena.lab.hosts[0]
    assert str(host.run(["docker", "ps", "-aq"]).stdout).count("\n") == 1, "nothing but Windows is left"
    said = arena.start("run", "waa", *asked, "--task", "one", "--task", "three", "--name", "r").finish()
    assert f"note: tasks: from {IMAGE}@sha256:" in said
    assert ends in said
    assert f"the licence of the Windows in golden={arena.golden} ends in 9 days" in said
    assert {task["task_id"] for task in arena.results("r")["tasks"]} == {"one", "three"}
    assert arena.results("r")["scored"] == 2
    said = arena.start("run", "waa", *asked, "--task", "four", "--dry-run").finish(2)
    assert "--task 'four' is not a task of the benchmark" in said

    shutil.rmtree(arena.home / ".waa")
    assert "198.18.1.1 is prepared for waa" in pool(arena, "prepare", "waa"), "nothing is set up again"
    arena.start("run", "waa", *asked, "--task", "two", "--dry-run").finish()

    host.run(["sh", "-c", f"rm -r {ENGINE_ROOT}/images/*/rootfs/client/evaluation_examples_windows"])
    said = pool(arena, "prepare", "waa")
    assert "198.18.1.1 is prepared for waa" in said, "somebody may have a checkout"
    assert "198.18.1.1: it tells no list of tasks: " in said
    arena.start("run", "waa", *asked, "--task", "two", "--dry-run").finish()
    pool(arena, "delete", "--yes")


@pytest.mark.nightly
def test_windows_is_installed_from_an_iso_that_is_sent_once(arena: Arena) -> None:
    config = arena.folder / "evalfleet.toml"
    lines = config.read_text().splitlines(keepends=True)
    config.write_text("".join(line for line in lines if not line.startswith("golden =")))
    write_iso(arena.folder / "windows.iso")
    pool(arena, "create", "--on", "lab")
    refused = pool(arena, "prepare", "waa", code=1)
    assert "198.18.1.1: iso\n" in refused
    assert "nothing that Windows could be installed from: get the Windows 11 Enterprise Evaluation" in refused
    host = arena.lab.hosts[0]
    assert host.run(["docker", "images", "-q"]).stdout == "", "nothing was pulled in vain"

    said = pool(arena, "prepare", "waa", "--set", "iso=windows.iso")
    assert "iso: sent 64 of 101 MB" in said
    assert "198.18.1.1 is prepared for waa" in said
    assert host.run(["ls", f"{DATA}/golden"]).stdout.split() == sorted(["data.img", *STORAGE_FILES])
    assert host.run(["ls", f"{DATA}/storage"]).stdout.split() == sorted(["data.qcow2", *BOOTED_FILES])
    again = pool(arena, "prepare", "waa", "--set", "iso=windows.iso", "--set", "boot_s=59")
    assert "198.18.1.1 is prepared for waa" in again
    assert "sent" not in again
    assert pool(arena, "do", "reset", "198.18.1.1").endswith("Windows is as it was installed, and answers\n")
    pool(arena, "delete", "--yes")


def shown_in_browsers(host: NamespaceHost) -> bool:
    return "noVNC" in str(host.run(["curl", "-sm", "2", "127.0.0.1:8006"], check=False).stdout)


@pytest.mark.nightly
def test_an_installation_that_fails_says_why_and_can_be_looked_at(arena: Arena) -> None:
    config = arena.folder / "evalfleet.toml"
    config.write_text(config.read_text().replace(f'golden = "{arena.golden}"', 'iso = "windows.iso"'))
    write_iso(arena.folder / "windows.iso")
    plan = json.dumps({"install_waits": True, "install_fails": "Not enough free space in /storage"})
    (arena.share / "registry" / quote(IMAGE, safe="") / "rootfs/plan.json").write_text(plan)
    pool(arena, "create", "--on", "lab")
    prepare = arena.start("pool", "prepare", "dev", "waa")
    host = arena.lab.hosts[0]
    until(lambda: shown_in_browsers(host), "the installation can be seen")
    assert pool(arena, "vnc", "--save", ".") == "198.18.1.1.png\n"
    assert (arena.folder / "198.18.1.1.png").read_bytes().startswith(PNG)
    assert prepare.lives
    host.run(["touch", f"{DATA}/golden.new/go"])
    said = prepare.finish(1)
    why = "Windows was not installed: its virtual machine has ended: ERROR: Not enough free space in /storage"
    assert why in said
    pool(arena, "delete", "--yes")
