"""What a host has and who holds it, as a line of JSON.

It is sent to the host's Python as text and imports nothing of ours: nothing is put there only to look.
"""

from __future__ import annotations

import glob
import json
import os
import pwd
import subprocess
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

GIB = 1 << 30
GPUS_S = 10.0
OWNER_CAP = 1000


def read(path: str, most: int = 1 << 16) -> str:
    """Return the beginning of a file; empty if it cannot be read."""
    try:
        with open(path, errors="replace") as file:
            return file.read(most)
    except OSError:
        return ""


def cpus() -> float:
    """Return how many CPUs a process may use. A container may be given less than the host has."""
    count = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    quota = read("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit() and int(quota[1]) > 0:
        count = min(count, int(quota[0]) / int(quota[1]))
    return count


def memory_gb() -> float:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = read("/sys/fs/cgroup/memory.max").strip()
    return min(total, int(limit)) / GIB if limit.isdigit() else total / GIB


def disk_gb() -> float:
    """Return the GB that may still be written to the user's home."""
    disk = os.statvfs(".")
    return disk.f_bavail * disk.f_frsize / GIB


def gpus() -> list[str]:
    """Return the names of NVIDIA's GPUs, or a word for each device where the tool is missing."""
    try:
        listing = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=GPUS_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        listing = None
    if listing is None or listing.returncode != 0:
        return ["GPU" for _ in glob.glob("/dev/nvidia[0-9]*")]
    return [
        line.strip()[:80] for line in listing.stdout.decode("utf-8", "replace").splitlines() if line.strip()
    ]


def seconds_to(expiry: dict[str, Any]) -> float:
    """The seconds until then by the clock that nobody sets, if the host has not booted since."""
    boot = read("/proc/sys/kernel/random/boot_id")
    if boot and expiry.get("boot") == boot and hasattr(time, "CLOCK_BOOTTIME"):
        return float(expiry.get("steady", "inf")) - time.clock_gettime(time.CLOCK_BOOTTIME)
    return float(expiry["wall"]) - time.time()


def holders() -> list[dict[str, Any]]:
    """The machines that hold the host, of whatever home. Times are in seconds from now."""
    held: list[dict[str, Any]] = []
    for folder in sorted(glob.glob(".evalfleet/*/[!.]*/")):
        try:
            expiry = json.loads(read(folder + "expiry"))
            left_s = seconds_to(expiry)
            since_s = max(time.time() - os.stat(folder + "key").st_mtime, 0.0)
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if left_s > 0 and not os.path.exists(folder + "expired"):
            _, home, machine, _ = folder.split("/")
            owner = read(folder + "owner", OWNER_CAP)
            held.append({"home": home, "folder": machine, "owner": owner, "since_s": since_s})
    return held


def main() -> None:
    facts = {
        "user": pwd.getpwuid(os.geteuid()).pw_name,
        "python": ".".join(map(str, sys.version_info[:3])),
        "cpus": cpus(),
        "memory_gb": memory_gb(),
        "disk_gb": disk_gb(),
        "gpus": gpus(),
        "kvm": os.access("/dev/kvm", os.R_OK | os.W_OK),
        "writable": os.access(".", os.W_OK | os.X_OK),
        "held": holders(),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
