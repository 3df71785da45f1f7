"""Builds the stand-in: the image's files, a registry that offers it, and the engine for hosts without one."""

from __future__ import annotations

import json
import marshal
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lab.host import Host

HERE = Path(__file__).parent
STUBS = HERE / "stubs"
IMAGE = "windowsarena/winarena:latest"
ENTRYPOINT = (
    "/bin/bash",
    "-c",
)  # as the original: `docker run IMAGE -c './entry.sh ...'` and without the -c both work
SHEBANG = b"#!/usr/bin/python3 -IS\n"  # a host's own Python, quick to start
MAIN = "import sys\nfrom engine.commands import main\nsys.exit(main(sys.argv[1:]))\n"
STORAGE_FILES = ("windows.base", "windows.boot", "windows.mac", "windows.rom", "windows.vars", "windows.ver")
BOOTED_FILES = (
    *("windows.base", "windows.boot", "windows.mac", "windows.mode", "windows.ver"),
    *("windows_secure.rom", "windows_secure.vars"),
)
"""What becomes of them at the first boot after the installation."""
QMP = "-qmp tcp:0.0.0.0:7200,server,nowait"
ISO_MARK_AT = 16 * 2048 + 1
DISK_MARK = b"stand-in disk\n"
PROC_FLAGS = "ro,nosuid,nodev,noexec"
ENGINE_ROOT = "/var/lib/stand-in-docker"

Tasks = Mapping[str, Sequence[str]]
FEW: Tasks = {"notepad": ("one", "two"), "vlc": ("three",)}


def build_files(
    root: Path, tasks: Tasks = FEW, plan: Mapping[str, Any] | None = None, checkout: Path | None = None
) -> Path:
    """The files of the image, under `root`: what is in image/, the tasks, and the plan of what they do.

    With a checkout of WAA: its own client, unchanged, with its own tasks, on stubs of the libraries it needs.
    """
    shutil.copytree(
        HERE / "image", root, dirs_exist_ok=True, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
    )
    programs = root / "opt/stand-in/bin"
    programs.mkdir(parents=True)
    (programs / "python").symlink_to("/usr/bin/python3")
    (root / "plan.json").write_text(json.dumps(plan or {}))
    if checkout is not None:
        _use_own_client(root, checkout)
        return root
    examples = root / "client/evaluation_examples_windows"
    for level in ("examples", "examples_noctxt"):
        for domain, ids in tasks.items():
            (examples / level / domain).mkdir(parents=True)
            for task in ids:
                (examples / level / domain / f"{task}.json").write_text(json.dumps(_example(domain, task)))
    (examples / "test_all.json").write_text(json.dumps({domain: list(ids) for domain, ids in tasks.items()}))
    return root


def _use_own_client(root: Path, checkout: Path) -> None:
    """The client of a checkout in place of the stand-in's, and the guest that it can be run against."""
    shutil.rmtree(root / "client")
    shutil.copytree(checkout / "src/win-arena-container/client", root / "client")
    shutil.copytree(STUBS, root / "opt/stand-in/stubs", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "guest/server.py").rename(root / "guest/plain.py")
    (root / "opt/stand-in/stubs/guest.py").rename(root / "guest/server.py")
    python = root / "opt/stand-in/bin/python"
    python.unlink()
    python.write_text('#!/bin/sh\nPYTHONPATH=/opt/stand-in/stubs exec /usr/bin/python3 "$@"\n')
    python.chmod(0o755)


def _example(domain: str, task: str) -> dict[str, Any]:
    return {
        "id": task,
        "snapshot": domain,
        "instruction": f"Do what {task} asks in {domain}.",
        "config": [{"type": "launch", "parameters": {"command": domain}}],
        "evaluator": {"func": "exact_match"},
    }


def publish(
    registry: Path,
    reference: str = IMAGE,
    *,
    tasks: Tasks = FEW,
    plan: Mapping[str, Any] | None = None,
    checkout: Path | None = None,
    **offer: Any,
) -> Path:
    """Offer the image in `registry`. `offer`: pull_s (how long it takes), pull_fails (words), private."""
    folder = registry / quote(reference, safe="")
    build_files(folder / "rootfs", tasks, plan, checkout)
    path = "/opt/stand-in/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    image = {
        "reference": reference,
        "entrypoint": list(ENTRYPOINT),
        "env": [f"PATH={path}", "RAM_SIZE=8G", "CPU_CORES=8", "DISK_SIZE=30G", f"ARGUMENTS={QMP}"],
        "workdir": "/",
        "size": 25_000_000_000,
        **offer,
    }
    (folder / "image.json").write_text(json.dumps(image))
    return folder


def build_docker(path: Path) -> Path:
    """The engine as one executable file."""
    with path.open("wb") as file:
        file.write(SHEBANG)
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(
                "__main__.py", "import sys\nfrom engine.commands import main\nsys.exit(main(sys.argv[1:]))\n"
            )
            for module in sorted((HERE / "engine").glob("*.py")):
                archive.write(module, f"engine/{module.name}")
                archive.writestr(f"engine/{module.stem}.pyc", _compiled(module))
    path.chmod(0o755)
    return path


def _compiled(module: Path) -> bytes:
    """Where the host's Python is of our version, it need not compile at every call."""
    code = compile(module.read_bytes(), module.name, "exec", dont_inherit=True)
    unchecked = (1).to_bytes(4, "little")
    return MAGIC_NUMBER + unchecked + bytes(8) + marshal.dumps(code)


def build_kit(folder: Path, **image: Any) -> Path:
    """All that hosts of a lab need, to be exposed to them: docker, a registry with the image, golden/."""
    build_docker(folder / "docker")
    publish(folder / "registry", **image)
    golden_storage(folder / "golden")
    (folder / "engine.json").write_text(json.dumps({"registry": str(folder / "registry")}))
    return folder


def equip(host: Host, kit: Path, *, kvm: bool = True) -> None:
    """Install docker on a host, which sees `kit` at the same path as we do.

    Hosts of a lab have parts of /proc masked; with a second one in sight, containers may have their own, and
    what runs there sees its processes by their right numbers. That one is gone after a reboot.
    /dev/kvm is a plain file: hosts of a lab may make no devices, and this engine asks only whether it exists.
    """
    steps = (
        f"mkdir -p {ENGINE_ROOT} /usr/local/bin",
        f"cp {kit}/engine.json {ENGINE_ROOT}/",
        f"rm -f /usr/local/bin/docker && cp {kit}/docker /usr/local/bin/docker",
        f"mkdir -p {ENGINE_ROOT}/proc",
        f"(mountpoint -q {ENGINE_ROOT}/proc || mount -t proc -o {PROC_FLAGS} proc {ENGINE_ROOT}/proc)",
        "touch /dev/kvm" if kvm else "rm -f /dev/kvm",
    )
    host.run(["sh", "-c", " && ".join(steps)])


def write_iso(path: Path, megabytes: int = 101) -> Path:
    """What passes for an ISO with Windows on it: the mark of ISO 9660, and nothing."""
    with path.open("wb") as file:
        file.seek(ISO_MARK_AT)
        file.write(b"CD001\x01")
        file.truncate(megabytes << 20)
    return path


def golden_storage(path: Path, plan: Mapping[str, Any] | None = None) -> Path:
    """A prepared Windows: boots at once. A plan in it counts more than the image's."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "data.img").write_bytes(DISK_MARK)
    for name in STORAGE_FILES:
        (path / name).write_text("0.00\n" if name == "windows.ver" else f"{name}\n")
    if plan is not None:
        (path / "plan.json").write_text(json.dumps(plan))
    return path
