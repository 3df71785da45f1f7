"""The host: how busy it is (fractions of 1), which boot of it this is, and how that boot went."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time

from .files import read_file

TYPE_CHECKING = False  # importing typing would cost 3 ms
if TYPE_CHECKING:
    from typing import Any


def boot_id() -> str:
    return (read_file("/proc/sys/kernel/random/boot_id") or b"").decode()


NEVER = float("inf")
STEADY = getattr(time, "CLOCK_BOOTTIME", None)


def steady() -> float:
    """Seconds by a clock that nobody sets and that counts while the host is suspended, if it has one."""
    return time.monotonic() if STEADY is None else time.clock_gettime(STEADY)


class HostClock:
    """The clocks of this host: one that anybody may set, and one that nobody sets but a boot."""

    @property
    def boot(self) -> str:
        """Names what `steady` counts from."""
        return boot_id()

    @property
    def host(self) -> str:
        """Names the host: several may share a home, and each has booted at another time."""
        return os.uname().nodename

    def wall(self) -> float:
        return time.time()

    def steady(self) -> float:
        return steady()


CLOCK = HostClock()


def expiry_in(seconds: float, clock: HostClock = CLOCK) -> dict[str, Any]:
    """Return what to keep of a moment so many seconds from now. It is read after a restart or a reboot."""
    return {
        "steady": clock.steady() + seconds,
        "wall": clock.wall() + seconds,
        "boot": clock.boot,
        "host": clock.host,
        "life": seconds,
    }


def seconds_to(expiry: dict[str, Any], clock: HostClock = CLOCK, left: float = float("inf")) -> float:
    """Until then. `left` is how long it was known to be at some moment before the last reboot.

    After a reboot the wall clock tells, which may have been set back since: but at least as much has passed
    as the host is up. Where both clocks have gone on alike, the steady one was not set anew (of a host that
    is a namespace, say), and tells how much.
    """
    if expiry["boot"] != clock.boot:
        life = float(expiry.get("life", float("inf")))
        most = min(left, life)
        if expiry.get("host") == clock.host:
            up, gone = clock.steady(), life - (float(expiry["wall"]) - clock.wall())
            passed = up - (float(expiry.get("steady", float("inf"))) - life)
            most = min(left, life - passed) if abs(passed - gone) < 5 else most - up
        return min(float(expiry["wall"]) - clock.wall(), most)
    if "steady" not in expiry:  # of an earlier version
        return float(expiry["mono"]) - time.monotonic()
    return float(expiry["steady"]) - clock.steady()


def time_left(expiry: dict[str, Any], folder: str) -> float:
    """Return the seconds until a machine expires. Its folder holds what its supervisor last knew of that."""
    left = float("inf")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        left = float(json.loads(read_file(folder + "/beat.json") or b"{}")["life"])
    return seconds_to(expiry, CLOCK, left)


def cpu_times() -> tuple[float, float]:
    """(busy, total) of the host's processors since boot, in any unit."""
    line = (read_file("/proc/stat") or b"").partition(b"\n")[0].split()[1:9]
    if not line:
        return os.getloadavg()[0] * time.monotonic(), (os.cpu_count() or 1) * time.monotonic()
    times = list(map(int, line))
    return float(sum(times) - times[3] - times[4]), float(sum(times))


def memory_used() -> float:
    """Return the share of the memory in use; 0 where the host does not show it."""
    fields = dict(
        line.split(b":") for line in (read_file("/proc/meminfo") or b"").splitlines() if b":" in line
    )
    try:
        available, total = (int(fields[name].split()[0]) for name in (b"MemAvailable", b"MemTotal"))
    except (KeyError, ValueError):
        return 0.0
    return 1 - available / total


VIRTUAL = ("lo", "veth", "docker", "br-", "virbr", "tap", "tun", "cni", "flannel", "ifb")
"""Interfaces whose bytes stay on the host, or are another one's, too."""


def network_bytes() -> tuple[int, int]:
    """(received, sent) over the host's own interfaces since boot."""
    received = sent = 0
    for line in (read_file("/proc/net/dev") or b"").decode("ascii", "replace").splitlines():
        name, colon, counts = line.partition(":")
        fields = counts.split()
        if colon and len(fields) >= 9 and not name.strip().startswith(VIRTUAL):
            received += int(fields[0])
            sent += int(fields[8])
    return received, sent


class ContainerEngine:
    """The host's container engine, asked at one beat and heard at the next: it may hang, and nobody waits.

    It is asked only where its daemon runs: a mere connection would start one that is started on demand.
    """

    DOWN = -1
    _ANSWER_CAP = 1 << 20

    def __init__(self, address: str = "/var/run/docker.sock", pid: str = "/var/run/docker.pid") -> None:
        self._address = address
        self._pid = pid
        self._link: socket.socket | None = None

    def containers(self) -> int | None:
        """Return how many run. `DOWN`: it did not answer. None: no engine, or nothing is known yet."""
        asked = self._link is not None
        answer = self._answer()
        if not os.path.exists(self._pid):
            return None
        try:
            self._ask()
        except PermissionError:
            return None
        except OSError:
            return self.DOWN
        if not asked:
            return None
        return answer.count(b'"ImageID":') if b" 200 " in answer[:20] else self.DOWN

    def _ask(self) -> None:
        link = socket.socket(socket.AF_UNIX)
        try:
            link.setblocking(False)
            link.connect(self._address)
            link.send(b"GET /containers/json HTTP/1.0\r\nHost: docker\r\n\r\n")
        except OSError:
            link.close()
            raise
        self._link = link

    def _answer(self) -> bytes:
        link, self._link, answer = self._link, None, b""
        if link is not None:
            try:
                while len(answer) < self._ANSWER_CAP and (block := link.recv(1 << 16)):
                    answer += block
            except OSError:
                pass  # no more has come
            link.close()
        return answer


class LoadMeter:
    """A meter of how busy the host has been since the last beat."""

    def __init__(self) -> None:
        self._engine = ContainerEngine()
        self._cpu, self._network, self._at = cpu_times(), network_bytes(), time.monotonic()

    def measured(self) -> dict[str, Any]:
        """Shares of CPU, memory and disk in use, bytes a second, and containers that run, if known."""
        (busy, total), network, now = cpu_times(), network_bytes(), time.monotonic()
        share = (busy - self._cpu[0]) / max(total - self._cpu[1], 1e-9)
        seconds = max(now - self._at, 1e-3)
        received, sent = ((new - old) / seconds for new, old in zip(network, self._network))
        self._cpu, self._network, self._at = (busy, total), network, now
        disk = os.statvfs(".")
        return {
            "cpu": round(min(max(share, 0.0), 1.0), 3),
            "memory": round(memory_used(), 3),
            "disk": round(1 - disk.f_bavail / max(disk.f_blocks, 1), 3),
            "received": round(max(received, 0.0)),
            "sent": round(max(sent, 0.0)),
            "containers": self._engine.containers(),
        }


# -- how it came up, as cloud-init tells it ----------------------------------------------------------

FOLDER = "/run/cloud-init"


def cloud_init(folder: str = FOLDER) -> dict[str, Any]:
    """Return `cloud_init` (running or done) and how long it took. Empty where there is no cloud-init."""
    if not os.path.isdir(folder) or os.path.exists(folder + "/disabled"):
        return {}
    stages = stages_of(folder + "/status.json")
    begun = [float(stage["start"]) for stage in stages if stage.get("start")]
    ended = [float(stage["finished"]) for stage in stages if stage.get("finished")]
    if not os.path.exists(folder + "/result.json"):
        return {"cloud_init": "running"} if stages else {}
    seconds = round(max(ended) - min(begun), 3) if begun and ended else 0.0
    return {"cloud_init": "done", "cloud_init_s": max(seconds, 0.0)}


def stages_of(path: str) -> list[dict[str, Any]]:
    try:
        stages: Any = json.loads(read_file(path) or b"{}")["v1"]
        return [stage for stage in stages.values() if isinstance(stage, dict)]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []
