"""How busy the host is, and which boot of it this is. Fractions of 1."""

from __future__ import annotations

import os
import time

from .files import read_file


def boot_id() -> str:
    return (read_file("/proc/sys/kernel/random/boot_id") or b"").decode()


def cpu_times() -> tuple[float, float]:
    """(busy, total) of the host's processors since boot, in any unit."""
    line = (read_file("/proc/stat") or b"").partition(b"\n")[0].split()[1:9]
    if not line:
        return os.getloadavg()[0] * time.monotonic(), (os.cpu_count() or 1) * time.monotonic()
    times = list(map(int, line))
    return float(sum(times) - times[3] - times[4]), float(sum(times))


def memory_used() -> float:
    fields = dict(
        line.split(b":") for line in (read_file("/proc/meminfo") or b"").splitlines() if b":" in line
    )
    try:
        available, total = (int(fields[name].split()[0]) for name in (b"MemAvailable", b"MemTotal"))
    except (KeyError, ValueError):
        return 0.0
    return 1 - available / total
