"""The stand-in's guest and client behave as the arena's do, bad habits and all."""

from __future__ import annotations

import base64
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

from evalfleet.benchmarks.waa.task_folder import Reading, read_task
from standins.waa import standin
from tests.lab.clients import needs_lab
from tests.waa.conftest import TASKS, Docker
from tests.waiting import until

pytestmark = needs_lab

# what happens -> score, cause, part
ENDINGS: dict[str, tuple[float | None, str, str | None]] = {
    "score": (0.5, "", None),
    "controller": (None, "readiness", "controller"),
    "set-up": (None, "readiness", "set-up"),
    "evaluator": (None, "internal", "evaluator"),
    "recorder": (None, "internal", "client"),
    "agent": (0.0, "", "agent"),
    "unset": (None, "readiness", "set-up"),
    "unseen": (None, "readiness", "controller"),
    "unjudged": (None, "internal", "evaluator"),
    "unauthorized": (None, "model", "model"),
    "throttled": (None, "model", "model"),
    "quota": (None, "model", "model"),
    "model-down": (None, "model", "model"),
    "bad-result": (None, "result", None),
}
QUICK = {"seconds": 0.05, "steps": 3, "score": 0.5}


def collected(docker: Docker, into: Path) -> Path:
    """The container's results, here."""
    tar = docker.host.run(["sh", "-c", "docker cp winarena:/results - | base64"]).stdout
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(tar))) as archive:
        archive.extractall(into, filter="data")
    return into / "results/pyautogui/a11y_tree/m"


def run_tasks(docker: Docker, domain: str, *ids: str, trial: str = "0", flags: tuple[str, ...] = ()) -> int:
    docker.ok("exec", "-i", "winarena", "sh", "-c", "cat > /tmp/tasks.json", text=json.dumps({domain: ids}))
    return docker.client("--test_all_meta_path", "/tmp/tasks.json", "--trial_id", trial, *flags).returncode


def test_every_way_that_a_task_ends(docker: Docker, storage: Callable[..., None], tmp_path: Path) -> None:
    storage(tasks={name: {"do": name, **QUICK} for name in ENDINGS})
    docker.up()
    docker.await_guest()
    assert run_tasks(docker, "behaviours", *ENDINGS, flags=("--no_such_flag", "x")) == 0
    results = collected(docker, tmp_path) / "0" / "behaviours"
    found = {name: read_task(str(results / name)) for name in ENDINGS}
    assert {name: (each.score, each.cause, each.part) for name, each in found.items()} == ENDINGS
    scored: Reading = found["score"]
    assert scored.steps == 3
    assert len(scored.screenshots) == 4
    picture = (results / "score" / scored.screenshots[-1]).read_bytes()
    assert picture.startswith(b"\x89PNG\r\n")
    assert scored.seconds is not None
    assert 0.0 < scored.seconds < 60
    assert "401" in found["unauthorized"].error
    assert (results / "score/logs").is_dir()


def test_what_ends_without_a_word(docker: Docker, storage: Callable[..., None], tmp_path: Path) -> None:
    wishes = {"bad-exit": 1, "no-result": 0, "killed": 137, "guest-dies": 0}
    storage(tasks={name: {"do": name, **QUICK} for name in wishes})
    docker.up()
    docker.await_guest()
    assert {name: run_tasks(docker, "behaviours", name) for name in wishes} == wishes
    results = collected(docker, tmp_path) / "0" / "behaviours"
    assert read_task(str(results / "bad-exit")).score == 0.5
    assert read_task(str(results / "no-result")).error.startswith("no result.txt and no Error line")
    assert read_task(str(results / "killed")).cause == "result"
    assert read_task(str(results / "guest-dies")).part == "controller"


def test_hanging_until_the_guest_is_reset(
    docker: Docker, storage: Callable[..., None], tmp_path: Path
) -> None:
    """The second trial of the same task goes well, on a guest that was restarted."""
    storage(tasks={"one": [{"do": "hang-guest", **QUICK}, {"do": "score", **QUICK}]})
    docker.up()
    docker.await_guest()
    docker.client_in_background()
    until(lambda: not docker.probe())
    docker.ok("restart", "-t", "0", "winarena")
    docker.await_guest()
    assert run_tasks(docker, "notepad", "one", trial="1") == 0
    results = collected(docker, tmp_path)
    assert read_task(str(results / "0/notepad/one")).cause == "result"
    assert read_task(str(results / "1/notepad/one")).score == 0.5


def test_a_broken_disk_boots_only_when_it_is_restored(docker: Docker, storage: Callable[..., None]) -> None:
    storage(tasks={"one": {"do": "corrupt", **QUICK}})
    docker.up()
    docker.await_guest()
    docker.client_in_background()
    until(lambda: not docker.probe())
    docker.ok("restart", "-t", "0", "winarena")
    until(lambda: "failed to load Boot0001" in docker.ok("logs", "winarena"))
    assert not docker.probe()
    docker.ok("stop", "-t", "0", "winarena")
    storage()
    docker.ok("start", "winarena")
    docker.await_guest()


def test_what_is_done_to_the_guest_stays_on_its_disk(docker: Docker, storage: Callable[..., None]) -> None:
    storage(default=QUICK)
    docker.up()
    docker.await_guest()
    golden = docker.host.run(["cat", "/data/storage/data.img"]).stdout
    run_tasks(docker, "vlc", "three")
    assert docker.host.run(["cat", "/data/storage/data.img"]).stdout != golden


def test_without_an_iso_there_is_no_windows_and_the_container_outlives_its_virtual_machine(
    docker: Docker,
) -> None:
    docker.up(command=("-c", "./entry.sh --prepare-image true"))
    until(lambda: "ERROR: ISO file not found or is empty." in docker.ok("logs", "winarena"))
    until(lambda: "Waiting for a response from the windows server" in docker.ok("logs", "winarena"))
    until(lambda: "qemu-system" not in docker.host.run(["ps", "-eo", "args"]).stdout)
    assert docker.ok("inspect", "-f", "{{.State.Running}}", "winarena") == "true\n"


QMP = "import socket; s = socket.create_connection(('127.0.0.1', 7200), 9); print(s.recv(99)[:6])"


def test_the_monitor_is_reached_from_inside_the_container_or_as_a_port_of_its_host(
    docker: Docker, storage: Callable[..., None]
) -> None:
    storage()
    docker.up("-p", "7200:7200")
    docker.await_guest()
    assert docker.ok("exec", "winarena", "python", "-c", QMP) == "b'{\"QMP\"'\n"
    assert docker.host.run(["python3", "-c", QMP]).stdout == "b''\n", "Windows does not listen there"
    docker.ok("rm", "-f", "winarena")
    docker.up("-p", "7200:7200", "-e", "HOST_PORTS=7200")
    docker.await_guest()
    assert docker.host.run(["python3", "-c", QMP]).stdout == "b'{\"QMP\"'\n"


def test_windows_is_installed_once(docker: Docker) -> None:
    docker.host.run(["sh", "-c", "mkdir -p /data; echo iso >/data/windows.iso"])
    docker.up("-v", "/data/windows.iso:/custom.iso", command=("-c", "./entry.sh --prepare-image true"))
    until(lambda: not docker.ok("ps", "-q"))
    assert "Installing Windows" in docker.ok("logs", "winarena")
    made = set(docker.host.run(["ls", "/data/storage"]).stdout.split())
    assert made == {"data.img", *standin.STORAGE_FILES}
    docker.ok("rm", "winarena")
    docker.up()
    docker.await_guest()
    logged = docker.ok("logs", "winarena")
    assert "Installing Windows" not in logged
    assert "Booting Windows securely" in logged
    made = set(docker.host.run(["ls", "/data/storage"]).stdout.split())
    assert made == {"data.img", *standin.BOOTED_FILES}


def test_entry_loops_on_a_flag_it_does_not_know(docker: Docker, storage: Callable[..., None]) -> None:
    storage()
    docker.up(command=("-c", "./entry.sh --prepare-imag false"))
    until(lambda: "Starting WinArena" in docker.ok("logs", "winarena"))
    assert docker.ok("logs", "winarena").splitlines() == ["Starting WinArena..."]
    assert docker.ok("inspect", "-f", "{{.State.Running}}", "winarena") == "true\n"


def test_without_a_key_the_client_does_not_start(docker: Docker, storage: Callable[..., None]) -> None:
    storage()
    docker.up("-e", "OPENAI_API_KEY=")
    docker.await_guest()
    done = docker.client()
    assert (done.returncode, "openai.OpenAIError" in done.stderr) == (1, True)


def test_its_own_sharding(docker: Docker, storage: Callable[..., None], tmp_path: Path) -> None:
    storage(default=QUICK)
    docker.up()
    docker.await_guest()
    tasks = json.dumps(TASKS)
    docker.ok("exec", "-i", "winarena", "sh", "-c", "cat > /tmp/tasks.json", text=tasks)
    flags = ("--test_all_meta_path", "/tmp/tasks.json", "--num_workers", "2")
    docker.client(*flags, "--worker_id", "1")
    found = collected(docker, tmp_path) / "0"
    done = sorted(path.parent.name for path in found.glob("*/*/result.txt"))
    every = [task for ids in TASKS.values() for task in ids]
    assert done == sorted(every[-(len(every) // 2) :])


def test_the_guests_answers(docker: Docker, storage: Callable[..., None]) -> None:
    storage()
    docker.up()
    docker.await_guest()
    asked = ("/probe", "/accessibility", "/obs_winagent", "/terminal", "/platform", "/cursor_position")
    for path in asked:
        assert docker.host.run(["curl", "-sf", f"localhost:5000{path}"]).stdout
    posted = ("/execute", "/execute_windows", "/update_computer", "/setup/launch")
    for path in posted:
        body = json.dumps({"command": ["python", "-V"]})
        assert docker.host.run(["curl", "-sf", "-d", body, f"localhost:5000{path}"]).stdout
    status = ("curl", "-s", "-o", "/dev/null", "-w", "%{http_code}")
    assert docker.host.run([*status, "-d", "file_path=C:/a", "localhost:5000/file"]).stdout == "404"
