"""Windows back to golden: a thin layer over its disk, beside a copy of it."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from evalfleet.benchmarks.waa.benchmark import WaaBenchmark
from evalfleet.benchmarks.waa.host import golden, machine
from evalfleet.benchmarks.waa.host.config import HostConfig
from evalfleet.benchmarks.waa.settings import WaaSettings

from .result import Figures, Result, at_most
from .workspace import Workspace

BENCH = "waa-fresh"
GIGABYTES = "WAA_FRESH_GB"
USUAL_GB, QUICK_GB = 8.0, 0.05
TIMES = 3
BLOCK = 1 << 20
COUNTED = (
    "golden storage with a disk full of data that does not compress; storage is made from it as a reset "
    f"does, {TIMES} times, the best one counts, with what was written flushed to the disk; seconds are the "
    "reset's own work without the boot of Windows, bytes are those that this process and its children wrote "
    "(rusage); nothing of the golden disk is held in memory on purpose, nor dropped from it"
)


def run(quick: bool) -> Result:
    gigabytes = float(os.environ.get(GIGABYTES) or (QUICK_GB if quick else USUAL_GB))
    with Workspace() as space:
        folder = _golden(space.folder / "golden", int(gigabytes * (1 << 30)))
        layer, copy = (_measure(space.folder / kind, folder, kind) for kind in ("overlay", "copy"))
        checked = _checked_by_qemu(space.folder / "overlay/storage/data.qcow2", folder)
    figures: Figures = {
        "disk_gb": gigabytes,
        "overlay": layer,
        "copy": copy,
        "times_faster": round(copy["seconds"] / layer["seconds"], 1),
        "checked_by_qemu_img": checked,
        "counted": COUNTED,
    }
    written = at_most(layer["bytes_written"] / copy["bytes_written"], 0.01)
    return Result(BENCH, figures, {"seconds": at_most(layer["seconds"], 2.0), "written": written})


def _golden(folder: Path, size: int) -> Path:
    folder.mkdir()
    for name in (*golden.NEEDED, *golden.OTHERS):
        (folder / name).write_text(name)
    block = os.urandom(BLOCK)
    with (folder / golden.DISKS[0]).open("wb") as file:
        for at in range(0, size, BLOCK):
            file.write(at.to_bytes(8, "big") + block[8:])
        os.fsync(file.fileno())
    return folder


def _measure(data: Path, folder: Path, storage: str) -> Figures:
    made = WaaBenchmark(
        msgspec.convert({"golden": str(folder), "storage": storage, "data": str(data)}, WaaSettings)
    )
    config = HostConfig(json.loads(made.bundle.steps[0].command.env["EVALFLEET_WAA"]))
    with contextlib.redirect_stdout(sys.stderr):
        machine.step_disk(config)
    found: list[tuple[float, int]] = []
    for _ in range(TIMES):
        begun, written = time.monotonic(), _written()
        with contextlib.redirect_stdout(sys.stderr):
            golden.restore(config)
        for path in Path(config.storage).iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        found.append((time.monotonic() - begun, _written() - written))
    seconds, count = min(found)
    taken = sum(path.stat().st_blocks * 512 for path in Path(config.storage).iterdir())
    return {"seconds": round(seconds, 4), "bytes_written": count, "bytes_on_disk": taken}


def _written() -> int:
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(resource.getrusage(kind).ru_oublock for kind in kinds) * 512


def _checked_by_qemu(layer: Path, folder: Path) -> bool | None:
    """None where qemu-img is not installed."""
    if shutil.which("qemu-img") is None:
        return None
    disk = folder / golden.DISKS[0]
    subprocess.run(["qemu-img", "rebase", "-u", "-F", "raw", "-b", disk, layer], check=True, timeout=60)
    subprocess.run(["qemu-img", "check", "-q", layer], check=True, timeout=60)
    same = subprocess.run(
        ["qemu-img", "compare", "-q", "-f", "raw", "-F", "qcow2", disk, layer], timeout=3600
    )
    return same.returncode == 0
