"""The same stand-in in a real container engine: Debian's podman, as root."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from evalfleet.benchmarks.waa.benchmark import WaaBenchmark
from evalfleet.benchmarks.waa.settings import WaaSettings
from evalfleet.benchmarks.waa.task_folder import read_task
from standins.podman import LIMITS, Podman
from standins.waa import rootfs, standin
from tests.waiting import PATIENCE_S, until

IMAGE = "localhost/winarena:latest"


def lacking() -> str | None:
    if os.geteuid():
        return "that needs root"
    for program in ("podman", "runc"):
        if shutil.which(program) is None:
            return f"there is no {program} (Debian: apt install podman runc)"
    absent = rootfs.missing()
    return None if absent is None else f"there is no {absent} to put into an image"


CANNOT = lacking()
pytestmark = [
    pytest.mark.skipif(CANNOT is not None, reason=f"NO TEST WITH A REAL CONTAINER ENGINE: {CANNOT}"),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def podman() -> Iterator[Podman]:
    made = Podman(Path(tempfile.mkdtemp(prefix="waa-", dir="/tmp")))  # it takes no longer paths
    try:
        plan = {"tasks": {"two": {"do": "throttled", "seconds": 0.1}}}
        files = standin.build_files(made.folder / "files", plan=plan)
        made.import_image(IMAGE, files, standin.ENTRYPOINT, {"ARGUMENTS": standin.QMP})
        yield made
    finally:
        made.destroy()


@pytest.fixture
def running(podman: Podman) -> Iterator[Podman]:
    standin.golden_storage(podman.folder / "storage")
    flags = ("--network", "none", "--cap-add", "NET_ADMIN", "--stop-timeout", "1", *LIMITS)
    mounts = ("-v", f"{podman.folder}/storage:/storage", "-v", "/dev/null:/dev/kvm")
    command = "./entry.sh --prepare-image false --start-client false"
    key = ("-e", "OPENAI_API_KEY=sk-test")
    podman.ok("run", "-d", "--name", "winarena", *flags, *podman.grouped, *mounts, *key, IMAGE, "-c", command)
    yield podman
    podman("rm", "-f", "-t", "0", "winarena")


def await_guest(podman: Podman) -> None:
    probe = ("exec", "winarena", "curl", "-sf", "20.20.20.21:5000/probe")
    until(lambda: podman(*probe).returncode == 0, lambda: podman("logs", "winarena").stdout, look_s=0.1)


def test_from_boot_to_result(running: Podman) -> None:
    await_guest(running)
    running.ok("exec", "-i", "winarena", "sh", "-c", "cat > /tmp/t.json", text='{"notepad": ["one", "two"]}')
    flags = ("--test_all_meta_path", "/tmp/t.json", "--result_dir", "/results", "--model", "m", "--bogus")
    assert running("exec", "-w", "/client", "winarena", "python", "run.py", *flags).returncode == 0
    running.ok("cp", "winarena:/results", str(running.folder / "out"))
    found = running.folder / "out/pyautogui/a11y_tree/m/0/notepad"
    assert read_task(str(found / "one")).score in (0.0, 1.0)
    assert read_task(str(found / "two")).cause == "model"
    assert "VM started, server ready" in running.ok("logs", "--tail", "5", "winarena")


def test_what_the_engine_of_lab_hosts_imitates(running: Podman) -> None:
    """The same exit codes as in test_engine.py."""
    assert running("exec", "winarena", "sh", "-c", "exit 7").returncode == 7
    assert running("exec", "winarena", "nope").returncode == 127
    assert running("exec", "winarena", "/client/settings.json").returncode == 126
    assert running("exec", "winarena", "sh", "-c", "kill -9 $$").returncode == 137
    assert running("run", "-d", "--name", "winarena", *LIMITS, IMAGE, "-c", "true").returncode == 125
    assert running("run", "--gpu", IMAGE).returncode == 125
    began = time.monotonic()
    running.ok("stop", "winarena")
    assert time.monotonic() - began > 1
    assert running.ok("inspect", "-f", "{{.State.Running}} {{.State.ExitCode}}", "winarena") == "false 137\n"
    running.ok("start", "winarena")
    await_guest(running)


def test_the_list_of_tasks_is_told_as_the_image_has_it(podman: Podman, tmp_path: Path) -> None:
    """By the program on the machine, with podman by the name of docker."""
    script = tmp_path / "docker"
    script.write_text(f'#!/bin/sh\nexec {shlex.join(podman.argv)} "$@"\n')
    script.chmod(0o755)
    benchmark = WaaBenchmark(WaaSettings(image=IMAGE, data=str(tmp_path)))
    environ = {**os.environ, **benchmark.list_tasks.env, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, "-m", "evalfleet.benchmarks.waa.host", "tasks"],
        env={**environ, "EVALFLEET_OUT": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert podman.ok("ps", "-aq") == "", "what was made for it is gone"
    benchmark.keep_tasks((tmp_path / "result.json").read_bytes(), tmp_path / "home")
    loaded = WaaBenchmark.load("waa", WaaSettings(image=IMAGE), tmp_path, tmp_path / "home")
    assert [(task.id, task.domain) for task in loaded.tasks] == [
        (id, domain) for domain, ids in standin.FEW.items() for id in ids
    ]
    (origin,) = loaded.warnings
    assert origin.startswith(f"tasks: from {IMAGE}@sha256:")
