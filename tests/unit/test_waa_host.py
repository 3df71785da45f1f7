"""What runs on machines of Windows Agent Arena, piece by piece, against real files, programs and servers."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from evalfleet.benchmarks.waa.benchmark import WaaBenchmark
from evalfleet.benchmarks.waa.host import attempt, download, golden, guest, image, iso, machine, qcow2, vm
from evalfleet.benchmarks.waa.host.attempt import Ending, verdict
from evalfleet.benchmarks.waa.host.config import HostConfig
from evalfleet.benchmarks.waa.host.docker import Docker
from evalfleet.benchmarks.waa.host.shell import Failed
from evalfleet.benchmarks.waa.settings import WaaSettings
from evalfleet.benchmarks.waa.task_folder import Reading
from standins.waa import standin
from tests.pythons import python_3_8
from tests.unit.blobs import Blobs, store

pytestmark = pytest.mark.usefixtures("own_home")

OLD_PYTHON = python_3_8()
DISK = os.urandom(3000) + bytes(4 << 20) + os.urandom(777)
NEW_YEAR_2024_S = 1_704_067_200.0


def config_of(tmp_path: Path, **settings: Any) -> HostConfig:
    made = WaaBenchmark(WaaSettings(data=str(tmp_path / "data"), **settings))
    probe = made.probe
    assert probe is not None
    return HostConfig(json.loads(probe.env["EVALFLEET_WAA"]))


def program(folder: Path, name: str, script: str) -> None:
    """A program of that name, found first."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


# -- by hand ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["reset", "clean"])
def test_two_at_once_are_not_in_each_others_way(tmp_path: Path, verb: str) -> None:
    config = config_of(tmp_path)
    (tmp_path / "data/state").mkdir(parents=True)
    folder = os.open(config.data, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "evalfleet.benchmarks.waa.host", verb],
            env={**os.environ, "EVALFLEET_WAA": json.dumps(config.given)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(folder)
    assert done.returncode == 1
    assert done.stderr == "waa: a reset is under way there already; try again when it is over\n"


# -- the machine -----------------------------------------------------------------------------------


def test_a_device_that_is_there_and_does_nothing_is_not_taken_for_kvm(tmp_path: Path) -> None:
    (tmp_path / "kvm").touch()
    with pytest.raises(Failed, match=r"cannot be used \(no virtual machine can be made.*kvm=false"):
        machine.step_kvm(str(tmp_path / "kvm"))
    with pytest.raises(Failed, match="No such file or directory"):
        machine.step_kvm(str(tmp_path / "nothing"))


def test_a_disk_that_is_wiped_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    config.data = "/dev/shm/evalfleet-test"
    try:
        with pytest.raises(Failed, match="wiped when the machine is stopped"):
            machine.step_disk(config)
    finally:
        os.removedirs("/dev/shm/evalfleet-test/state")


def test_too_little_memory_or_disk_is_told_in_figures(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(Failed, match=r"GB of memory, and 1500 are needed"):
        machine.step_room(config_of(tmp_path, ram="1000G"), lambda: False)
    with pytest.raises(Failed, match=r"GB free on .*, and 1e\+06 are needed"):
        machine.step_room(config_of(tmp_path, ram="1M", free_gb=1e6), lambda: False)
    machine.step_room(config_of(tmp_path, ram="1M", free_gb=1e6), lambda: True)


def test_docker_is_installed_once_the_locks_of_apt_are_free(tmp_path: Path, programs: Path) -> None:
    program(programs, "sudo", 'shift; exec "$@"')
    program(programs, "cloud-init", "true")
    program(programs, "systemctl", "true")
    program(programs, "docker", f"test -e {tmp_path}/installed")
    locked = 'echo "E: Could not get lock /var/lib/dpkg/lock-frontend. It is held" >&2; exit 100'
    count = f'echo "$DEBIAN_FRONTEND $*" >>{tmp_path}/apt'
    install = f'case "$*" in *install*) touch {tmp_path}/installed;; esac'
    program(programs, "apt-get", f"{count}\n[ $(wc -l <{tmp_path}/apt) -gt 2 ] || {{ {locked}; }}\n{install}")
    machine.step_docker(Docker(str(tmp_path / "note")), look_s=0.01)
    lines = (tmp_path / "apt").read_text().splitlines()
    assert len(lines) == 4, "twice locked, then update, then install"
    assert lines[-1].startswith("noninteractive -y")
    assert lines[-1].endswith("docker.io")
    assert (tmp_path / "note").read_text() == "docker"


def test_a_failure_of_apt_is_told_and_not_waited_for(tmp_path: Path, programs: Path) -> None:
    program(programs, "cloud-init", "true")
    program(programs, "docker", "exit 1")
    program(programs, "systemctl", "exit 1")
    program(programs, "sudo", 'shift; exec "$@"')
    program(programs, "apt-get", "echo 'E: Unable to locate package docker.io' >&2; exit 100")
    with pytest.raises(Failed, match="apt-get update: exit code 100: E: Unable to locate package"):
        machine.step_docker(Docker(str(tmp_path / "note")))


# -- the image -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "server"),
    [
        ("windowsarena/winarena:latest", ""),
        ("mine.azurecr.io/winarena:1", "mine.azurecr.io"),
        ("localhost:5000/w", "localhost:5000"),
        ("winarena", ""),
    ],
)
def test_the_registry_of_an_image(name: str, server: str) -> None:
    assert image.server_of(name) == server


def test_a_login_goes_by_standard_input_and_leaves_nothing(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(
        programs,
        "docker",
        f"""echo "$*" >>{tmp_path}/argv
        case "$*" in
          *version*) exit 0;;
          *inspect*) exit 1;;
          *login*) cat >{tmp_path}/stdin; echo {{}} >$2/config.json; echo $2 >{tmp_path}/folder;;
          *pull*) test -e $2/config.json && echo 'a1: Pulling fs layer' && echo 'a1: Pull complete';;
        esac""",
    )
    monkeypatch.setenv("PW", "s3cret-value")
    config = config_of(tmp_path, image="mine.azurecr.io/w:1", registry_user="me", registry_password="PW")
    image.step_image(config, Docker())
    assert (tmp_path / "stdin").read_text() == "s3cret-value"
    argv = (tmp_path / "argv").read_text()
    assert "s3cret-value" not in argv
    assert "login -u me --password-stdin mine.azurecr.io" in argv
    assert not Path((tmp_path / "folder").read_text().strip()).exists()


@pytest.mark.parametrize(
    ("said", "words", "pulls"),
    [
        ("Error: pull access denied for w", "the registry refuses the pull", 1),
        ("manifest for w:9 not found: manifest unknown", "there is no such image", 1),
        ("net/http: TLS handshake timeout", "cannot be pulled", 3),
    ],
)
def test_a_pull_that_fails_is_repeated_only_if_that_may_help(
    tmp_path: Path, programs: Path, said: str, words: str, pulls: int
) -> None:
    script = f"""case "$*" in
        *version*) exit 0;;
        *pull*) echo >>{tmp_path}/pulls; echo '{said}' >&2;;
        esac; exit 1"""
    program(programs, "docker", script)
    with pytest.raises(Failed, match=words):
        image.step_image(config_of(tmp_path), Docker(), retry_s=0.0)
    assert len((tmp_path / "pulls").read_text()) == pulls


def test_progress_of_a_pull() -> None:
    lines = ["latest: Pulling from w", "a1: Pulling fs layer", "b2: Pulling fs layer", "c3: Already exists"]
    assert image.progress([*lines, "a1: Download complete", "a1: Pull complete"]) == "2 of 3 layers"


# -- golden storage --------------------------------------------------------------------------------


@pytest.fixture
def blobs() -> Iterator[tuple[str, type[Blobs]]]:
    files = {f"/g/{name}": name.encode() for name in standin.STORAGE_FILES}
    with store({**files, "/g/data.img": DISK}) as (url, mine):
        yield f"{url}/g", mine


def test_golden_storage_comes_from_a_store_whole_and_sparse(
    tmp_path: Path, blobs: tuple[str, type[Blobs]], programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, _ = blobs
    program(programs, "docker", "true")
    monkeypatch.setenv("SAS", "sig=ok")
    config = config_of(tmp_path, golden=url, golden_token="SAS", storage="copy")
    machine.step_disk(config)
    golden.step_golden(config, Docker())
    for folder in (config.golden_folder, config.storage):
        assert Path(folder, "data.img").read_bytes() == DISK
        assert Path(folder, "windows.rom").read_bytes() == b"windows.rom"
        assert os.stat(f"{folder}/data.img").st_blocks * 512 < len(DISK) // 2, "zeros take no room"
    assert golden.is_there(config)
    assert golden.installed_at(config) == NEW_YEAR_2024_S, "a copy is as old as what it is a copy of"
    Path(config.storage, "data.img").write_bytes(b"spoilt")
    golden.restore(config)
    assert Path(config.storage, "data.img").read_bytes() == DISK
    Path(config.golden_folder, "data.img").write_bytes(b"short")
    assert not golden.is_there(config), "a golden storage of another size is not the one that came"


def test_another_golden_storage_replaces_the_one_that_is_there(tmp_path: Path, programs: Path) -> None:
    program(programs, "docker", f'echo "$*" >>{tmp_path}/argv')
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        for file in (*standin.STORAGE_FILES, "data.img"):
            (tmp_path / name / file).write_text(name)
        config = config_of(tmp_path, golden=str(tmp_path / name), storage="copy")
        machine.step_disk(config)
        assert not golden.is_there(config)
        golden.step_golden(config, Docker())
        assert golden.is_there(config)
        assert Path(config.storage, "data.img").read_text() == name
    assert (tmp_path / "argv").read_text().count("rm -f winarena") == 2, "it must not run meanwhile"


def test_a_download_that_broke_off_goes_on_where_it_stopped(
    tmp_path: Path, blobs: tuple[str, type[Blobs]]
) -> None:
    url, store = blobs
    path = tmp_path / "data.img"

    def bring() -> None:
        download.Download(f"{url}/data.img", "sig=ok", str(path), piece=1 << 20, tries=1).bring()

    store.breaks = 1
    with pytest.raises(Failed, match="bytes came of"):
        bring()
    assert not path.exists(), "complete under its name, or not at all"
    came = len(store.asked)
    bring()
    assert path.read_bytes() == DISK
    assert came == 5, "the disk has five pieces"
    assert len(store.asked) == came + 1, "what was there was not brought again"
    asked = len(store.asked)
    bring()
    assert len(store.asked) == asked


def test_a_refused_or_missing_golden_storage_is_told_without_its_token(
    tmp_path: Path, blobs: tuple[str, type[Blobs]]
) -> None:
    url, store = blobs
    with pytest.raises(Failed, match="answer 403; check the URL and its token") as refusal:
        golden.fetch(url, "sig=wrong", str(tmp_path / "a"))
    assert "sig" not in str(refusal.value)
    store.files.pop("/g/windows.boot")
    with pytest.raises(Failed, match=r"windows\.boot is not there"):
        golden.fetch(url, "sig=ok", str(tmp_path / "b"))


def test_a_golden_folder_that_lacks_something_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "prepared"
    folder.mkdir()
    (folder / "windows.rom").write_text("")
    config = config_of(tmp_path, golden=str(folder))
    machine.step_disk(config)
    with pytest.raises(Failed, match=r"has no windows\.boot, windows\.vars, data\.img"):
        golden.step_golden(config, Docker())


def prepared(folder: Path, disk: str = "data.img") -> Path:
    """Golden storage with a disk of 1 GB."""
    folder.mkdir()
    for name in standin.STORAGE_FILES:
        (folder / name).write_text(name)
    with (folder / disk).open("wb") as file:
        file.write(b"Windows")
        file.truncate(1 << 30)
    return folder


def test_storage_is_a_thin_layer_over_golden_that_nothing_writes_to(tmp_path: Path, programs: Path) -> None:
    program(programs, "docker", "true")
    config = config_of(tmp_path, golden=str(prepared(tmp_path / "prepared")))
    machine.step_disk(config)
    golden.step_golden(config, Docker())
    assert golden.is_there(config)
    layer = Path(config.storage, "data.qcow2")
    assert set(os.listdir(config.storage)) == {"data.qcow2", *standin.STORAGE_FILES}
    assert layer.stat().st_blocks * 512 < 1 << 17, "it holds nothing yet"
    found = qcow2.Disk(str(layer))
    assert (found.size, found.backing) == (1 << 30, "/golden/data.img")
    words = config.run_words()
    assert f"{tmp_path}/prepared:/golden:ro" in words, "the container finds it there"
    layer.write_bytes(b"what an attempt left")
    golden.restore(config)
    assert qcow2.Disk(str(layer)).backing == "/golden/data.img"
    os.utime(tmp_path / "prepared/data.img", (1, 1))
    assert not golden.is_there(config), "a layer over another disk is good for nothing"


@pytest.mark.skipif(shutil.which("qemu-img") is None, reason="qemu-img is not installed (qemu-utils)")
@pytest.mark.parametrize("kind", ["raw", "qcow2"])
def test_qemu_takes_our_layer_for_its_own(tmp_path: Path, kind: str) -> None:
    below = tmp_path / "below"
    subprocess.run(["qemu-img", "create", "-q", "-f", kind, below, "30G"], check=True, timeout=60)
    subprocess.run(["qemu-io", "-f", kind, "-c", "write -P 5 3G 1M", below], check=True, timeout=60)
    layer = tmp_path / "layer.qcow2"
    qcow2.write_layer(str(layer), qcow2.Disk(str(below)), str(below))
    subprocess.run(["qemu-img", "check", "-q", layer], check=True, timeout=60)
    script = ["-c", "read -P 5 3G 1M", "-c", "write -P 7 29G 1M", "-c", "read -P 7 29G 1M"]
    done = subprocess.run(["qemu-io", *script, layer], capture_output=True, text=True, check=True, timeout=60)
    assert "Pattern verification failed" not in done.stdout
    told = json.loads(subprocess.check_output(["qemu-img", "info", "--output=json", layer], timeout=60))
    assert (told["virtual-size"], told["backing-filename-format"]) == (30 << 30, kind)
    subprocess.run(["qemu-img", "check", "-q", layer], check=True, timeout=60)


def test_golden_storage_may_be_one_disk(tmp_path: Path, programs: Path) -> None:
    program(programs, "docker", "true")
    disk = tmp_path / "golden.qcow2"
    whole = qcow2.Disk(str(prepared(tmp_path / "prepared") / "data.img"))
    qcow2.write_layer(str(disk), whole, "/elsewhere/base.img")
    config = config_of(tmp_path, golden=str(disk))
    machine.step_disk(config)
    with pytest.raises(Failed, match=r"a disk that is a layer over /elsewhere/base.img"):
        golden.step_golden(config, Docker())
    with disk.open("r+b") as file:
        file.seek(8)
        file.write(bytes(8))
    golden.step_golden(config, Docker())
    assert golden.is_there(config)
    assert set(os.listdir(config.storage)) == {"data.qcow2", "windows.boot"}
    assert os.path.samefile(disk, f"{config.golden_folder}/data.qcow2"), "it takes no room twice"
    assert golden.installed_at(config) == disk.stat().st_mtime


def test_the_age_of_a_licence_is_told(tmp_path: Path) -> None:
    folder = prepared(tmp_path / "prepared")
    config = config_of(tmp_path, golden=str(folder))
    for days, words in (
        (0, ""),
        (40, "40 days old, 50 are left"),
        (80, "WARNING: its licence is 80 days old"),
    ):
        at = time.time() - days * 86400 - 60
        os.utime(folder / "windows.boot", (at, at))
        assert words in golden.licence_words(config)
    os.utime(folder / "windows.boot", (1e9, 1e9))
    assert "its licence lasted 90: make it anew" in golden.licence_words(config)


# -- the ISO ---------------------------------------------------------------------------------------


def test_without_anything_to_install_from_the_first_steps_say_what_to_do(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with pytest.raises(Failed, match=r"Evaluation ISO from https://.*90 days.*iso=PATH.*golden=.*waa-auto"):
        iso.step_iso(config, has_golden=False)
    iso.step_iso(config, has_golden=True)
    iso.step_iso(config_of(tmp_path, preset="waa-auto"), has_golden=False)
    iso.step_iso(config_of(tmp_path, golden="/there"), has_golden=False)


def test_an_iso_of_the_machine_is_checked(tmp_path: Path) -> None:
    path = standin.write_iso(tmp_path / "windows.iso")
    assert iso.bring(config_of(tmp_path, iso=f"host:{path}")) == str(path)
    standin.write_iso(path, 99)
    with pytest.raises(Failed, match="has only 99 MB: no Windows fits on it"):
        iso.bring(config_of(tmp_path, iso=f"host:{path}"))
    path.write_bytes(bytes(1 << 20))
    with pytest.raises(Failed, match="is no ISO"):
        iso.bring(config_of(tmp_path, iso=f"host:{path}"))
    with pytest.raises(Failed, match=r"cannot be read \(No such file"):
        iso.bring(config_of(tmp_path, iso="host:/nowhere.iso"))


def test_an_iso_from_a_url_has_the_checksum_that_was_given(
    tmp_path: Path, blobs: tuple[str, type[Blobs]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(iso, "LEAST_BYTES", 2 << 20)  # to bring 100 MB three times takes seconds
    url, store = blobs
    data = standin.write_iso(tmp_path / "windows.iso", 3).read_bytes()
    store.files["/g/windows.iso"] = data
    store.token = ""
    good = f"{url}/windows.iso#sha256={hashlib.sha256(data).hexdigest()}"
    path = iso.bring(config_of(tmp_path, iso=good))
    assert Path(path).read_bytes() == data
    bad = config_of(tmp_path, iso=f"{url}/windows.iso#sha256={'0' * 64}")
    with pytest.raises(Failed, match="is not the ISO that was meant"):
        iso.bring(bad)
    assert not os.path.exists(bad.iso_file)


# -- the guest -------------------------------------------------------------------------------------


def test_a_screen_dump_becomes_a_png() -> None:
    pixels = bytes(range(2 * 3 * 3))
    png = guest.png_of(b"P6\n2 3\n255\n" + pixels)
    assert png.startswith(guest.PNG)
    assert struct.unpack(">II", png[16:24]) == (2, 3)
    size = struct.unpack(">I", png[33:37])[0]
    rows = zlib.decompress(png[41 : 41 + size])
    assert rows == b"".join(b"\0" + pixels[at : at + 6] for at in (0, 6, 12))


def test_a_guest_that_is_not_there_does_not_answer() -> None:
    begun = time.monotonic()
    assert not guest.answers(port=1)
    assert time.monotonic() - begun < 60


def test_the_container_is_reachable_from_its_machine_alone(tmp_path: Path) -> None:
    words = config_of(tmp_path, golden="/golden", cores=4).run_words()
    assert "--device=/dev/kvm" in words
    published = [words[at + 1] for at, word in enumerate(words) if word == "-p"]
    assert published == ["127.0.0.1:8006:8006", "127.0.0.1:5000:5000"], "QMP's would lead to Windows"
    assert {"RAM_SIZE=8G", "CPU_CORES=4", "DISK_SIZE=30G"} < set(words)
    assert words[-2:] == ["-c", "./entry.sh --prepare-image false --start-client false"]


def test_a_log_is_folded_and_its_error_found() -> None:
    said = [
        "\x1b[1;31m❯ ERROR: ISO file not found or is empty.\x1b[0m",
        "",
        *["Waiting..."] * 3,
        "\x1b[1;34m❯ Bye",
    ]
    lines = vm.folded(said)
    assert lines == ["❯ ERROR: ISO file not found or is empty.", "Waiting... (3 times)", "❯ Bye"]
    assert vm.last_error(lines) == "ERROR: ISO file not found or is empty."
    ended = ["❯ ERROR: no room", "❯ ERROR: Forcefully terminating Windows, reason: 15..."]
    assert vm.last_error(ended) == "ERROR: no room"
    assert vm.last_error(ended[1:]).startswith("ERROR: Forcefully")
    assert vm.last_error(["fine"]) == ""


@pytest.mark.parametrize(
    ("processes", "lives"),
    [
        ("/bin/bash -c ./entry.sh\n/usr/bin/tini -s /run/entry.sh\nbash /run/entry.sh", True),
        ("/bin/bash -c ./entry.sh\n/usr/bin/qemu-system-x86_64 -nodefaults -cpu host", True),
        ("/usr/bin/tini -s -- /run/start_with_evaluate.sh /entry.sh\ncurl 20.20.20.21:5000\nsleep 5", False),
    ],
)
def test_a_virtual_machine_is_known_by_its_processes(programs: Path, processes: str, lives: bool) -> None:
    program(programs, "docker", f"[ $1 = version ] || printf '{processes}\\n'")
    assert vm.lives(Docker(), "winarena") is lives
    program(programs, "docker", "[ $1 = version ]")
    assert vm.lives(Docker(), "winarena") is None


# -- what an attempt means -------------------------------------------------------------------------


def reading_of(**known: Any) -> Reading:
    made = Reading()
    made.cause, made.error = "result", "no result.txt"
    for name, value in known.items():
        setattr(made, name, value)
    return made


def ending_of(code: int, seconds: float, **seen: bool | str) -> Ending:
    made = Ending(code, seconds, 60.0)
    for name, value in seen.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("reading", "ending", "expected"),
    [
        (reading_of(score=0.5, steps=3), ending_of(0, 10.0), {"score": 0.5, "num_steps": 3, "seconds": 10.0}),
        (reading_of(score=1.0), ending_of(124, 60.1), {"score": 1.0}),
        (reading_of(part="model", cause="model", error="401"), ending_of(0, 9.0), {"broken": "model"}),
        (reading_of(score=0.0), ending_of(0, 9.0), {"score": 0.0}),
        (reading_of(score=0.0), ending_of(0, 9.0, guest_answers=False), {"broken": "stuck"}),
        (reading_of(score=0.5), ending_of(0, 9.0, guest_answers=False), {"score": 0.5}),
        (reading_of(), ending_of(124, 60.1), {"score": 0.0, "limit_s": 60.0}),
        (reading_of(), ending_of(124, 60.1, guest_answers=False), {"broken": "stuck"}),
        (reading_of(), ending_of(124, 60.1, grew_lately=False), {"broken": "stuck"}),
        (reading_of(), ending_of(124, 60.1, model_trouble="429"), {"broken": "model"}),
        (reading_of(), ending_of(124, 60.1, model_trouble="429", guest_answers=False), {"broken": "stuck"}),
        (reading_of(score=1.0), ending_of(124, 60.1, model_trouble="429"), {"score": 1.0}),
        (reading_of(), ending_of(9, 9.0, model_trouble="429"), {"broken": "readiness"}),
        (reading_of(), ending_of(137, 9.0), {"broken": "readiness"}),
        (reading_of(), ending_of(0, 9.0), {"broken": "readiness"}),
    ],
)
def test_what_an_attempt_means(reading: Reading, ending: Ending, expected: dict[str, object]) -> None:
    told = verdict(reading, ending, 60.0)
    assert {key: told.get(key) for key in expected} == expected
    assert ("score" in told) != ("broken" in told)


CALLED = 'x INFO _client/1025] HTTP Request: POST https://api.openai.com/v1/chat/completions "HTTP/1.1 {}"\n'
AGAIN = "x [2026-11-15 INFO _base_client/1058] Retrying request to /chat/completions in 0.9 seconds\n"
REFUSED = CALLED.format("429 Too Many Requests")


def test_a_client_that_dies_at_its_start_says_why_and_windows_is_not_to_blame() -> None:
    made = ending_of(1, 3.0)
    said = b'Loading...\nTraceback (most recent call last):\n  File "/client/run.py", line 9\n'
    made.last_words = attempt.last_words(
        said + b"ValueError: Unknown agent name: x, key sk-1\n\nbye\n", ["sk-1", ""]
    )
    assert made.last_words == "ValueError: Unknown agent name: x, key *** (run.py:9)"
    told = verdict(reading_of(), made, 60.0)
    assert told["broken"] == "readiness", "the task had begun"
    made.began_task = False
    told = verdict(reading_of(), made, 60.0)
    words = (
        "the client died at its start (exit code 1): ValueError: Unknown agent name: x, key *** (run.py:9)"
    )
    assert (told["broken"], told["error"]) == ("internal", f"{words}; check --set agent")
    made.last_words = attempt.last_words(
        b"OSError: We couldn't connect to 'https://huggingface.co' to load", []
    )
    assert "give the machine a route, or som_origin=a11y" in str(verdict(reading_of(), made, 60.0)["error"])
    refused = "run.py: error: argument --max_steps: invalid int value: 'x'"
    assert attempt.last_words(f"usage: run.py [-h]\n{refused}\n".encode(), []) == refused


def test_the_client_of_the_other_arena_is_not_started(tmp_path: Path) -> None:
    (tmp_path / "client").mkdir()
    (tmp_path / "client/run.py").write_text("print('started')")
    script = attempt.CLIENT.replace("/client", f"{tmp_path}/client").replace(attempt.FOLDER, f"{tmp_path}/f")

    def started() -> str:
        argv = ["sh", "-c", script, "evalfleet", f"{tmp_path}/f/1", "60"]
        return subprocess.run(argv, input="{}\n\n", capture_output=True, text=True, timeout=60).stdout

    assert started() == "started\n"
    (tmp_path / "client/check_setup.py").touch()
    assert started().startswith("the image has the client of WindowsAgentArena-V2")


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ((REFUSED + AGAIN) * 2 + REFUSED + CALLED.format("200 OK"), ""),
        (CALLED.format("200 OK") + (REFUSED + AGAIN) * 2 + REFUSED, ""),
        (CALLED.format("200 OK") + (REFUSED + AGAIN) * 4, "its last answer was 429"),
        (CALLED.format("401 Unauthorized") * 3, "its last answer was 401"),
        (CALLED.format("401 Unauthorized") * 6, "its last answer was 401"),
        (REFUSED + AGAIN * 8, "it does not answer"),
        (CALLED.format("400 Bad Request") * 9, "its last answer was 400"),
        (CALLED.format("422 Unprocessable Entity") * 9, "its last answer was 422"),
        ("\0\n" * 2_000_000 + REFUSED * 6, "its last answer was 429"),
        ("", ""),
    ],
)
def test_a_models_api_that_was_failing_when_time_was_up(tmp_path: Path, log: str, expected: str) -> None:
    assert attempt.model_trouble(str(tmp_path)) == ""
    (tmp_path / "client_logs").mkdir()
    (tmp_path / "client_logs/normal-0-20261115@120000.log").write_text(log)
    assert attempt.model_trouble(str(tmp_path)) == expected


def test_navi_that_got_no_answer_until_the_time_was_up(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    lines = ("Environment setup complete.", "Agent: Thinking...")
    text = "".join(f"[2026-11-15 12:00:00,1 INFO lib_run_single/9-Main] {line}\n" for line in lines)
    (tmp_path / "logs/task-0-20261115@120000.log").write_text(text)
    assert attempt.model_trouble(str(tmp_path), is_navi=True) == "it answered no call"
    assert attempt.model_trouble(str(tmp_path)) == "", "others may log no calls"
    path = tmp_path / "logs/task-0-20261115@120000.log"
    path.write_text(text + "[2026-11-15 12:00:09,1 INFO lib_run_single/9-Main] Step 1: computer.click()\n")
    assert attempt.model_trouble(str(tmp_path), is_navi=True) == "", "it acted, so it was answered"


# -- on an old machine -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "python",
    [
        sys.executable,
        pytest.param(
            OLD_PYTHON, marks=pytest.mark.skipif(OLD_PYTHON is None, reason="NOT RUN: there is no Python 3.8")
        ),
    ],
)
def test_the_program_as_shipped_needs_nothing_of_ours(tmp_path: Path, python: str) -> None:
    made = WaaBenchmark(WaaSettings(data=str(tmp_path / "data"), ram="1M", free_gb=0, kvm=False))
    for name, source in made.bundle.files.items():
        (tmp_path / "bundle" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, tmp_path / "bundle" / name)
    said = ""
    for step in made.bundle.steps[:3]:
        argv = [python, *step.command.argv[1:]]
        environ = {**os.environ, **step.command.env}
        done = subprocess.run(
            argv, cwd=tmp_path / "bundle", env=environ, capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, ""), step.name
        said += done.stdout
    assert re.findall(r"step (\w+) is done", said) == ["kvm", "disk", "room"]
    modules = "from waa.host import attempt, download, golden, guest, image, machine"
    subprocess.run([python, "-S", "-c", modules], cwd=tmp_path / "bundle", check=True, timeout=60)


# -- what Windows has ------------------------------------------------------------------------------


class Windows(BaseHTTPRequestHandler):
    """Runs what it is asked to, as the guest's server does; `sick`: it answers something else."""

    sick = b""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        done = subprocess.run(
            [sys.executable, *asked["command"][1:]], capture_output=True, text=True, timeout=30
        )
        told = json.dumps({"status": "success", "output": done.stdout, "error": done.stderr}).encode()
        self.send_response(500 if self.sick else 200)
        self.end_headers()
        self.wfile.write(self.sick or told)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def windows() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Windows)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()
    Windows.sick = b""


def test_windows_names_the_programs_that_it_lacks(
    windows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "Programs" / r"VideoLAN\VLC\vlc.exe"
    installed.parent.mkdir()
    installed.touch()
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    program(tmp_path, "soffice", "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    asked = ["LibreOffice", "VLC", "VS Code", "GIMP"]
    assert guest.missing_programs(asked, windows) == ["VS Code", "GIMP"]
    assert guest.missing_programs([], windows) == []


@pytest.mark.parametrize("answer", [b"<h1>Internal Server Error</h1>", b"{}", b'{"output": "1"}'])
def test_a_windows_that_cannot_tell_is_believed_to_have_all(windows: int, answer: bytes) -> None:
    Windows.sick = answer
    assert guest.missing_programs(["LibreOffice"], windows) == []
