"""The lab's network: a namespace without uplink, a bridge in it, and a cable from the bridge to each host.

The bridge is 198.18.0.1; that is who a controller is that joins. Ranges may repeat between labs.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from . import system
from .system import LabError

GATEWAY = "198.18.0.1"
GATEWAY_MAC = "02:00:c6:12:00:01"
MOST_HOSTS = 1000  # a bridge has 1024 ports
# router solicitations to every port from every host would be most of the traffic
QUIET = "for f in all default; do echo 1 > /proc/sys/net/ipv6/conf/$f/disable_ipv6; done 2>/dev/null; "


class Cable(NamedTuple):
    """The cable of one host: its name at the bridge and the address at its other end."""

    name: str
    address: str
    mac: str


def cable(index: int) -> Cable:
    high, low = 1 + index // 250, 1 + index % 250
    return Cable(f"h{index}", f"198.18.{high}.{low}", f"02:00:c6:12:{high:02x}:{low:02x}")


def host_side(wire: Cable) -> str:
    """What the host itself tells `ip` when it boots.

    Neighbours are fixed on both sides: the kernel's table is one for all namespaces and holds 1,024
    others, and a dead host is silence then, as behind a router, rather than `no route to host`.
    """
    return (
        "link set lo up\n"
        f"addr add {wire.address}/16 dev eth0\n"
        "link set eth0 up\n"
        f"neigh replace {GATEWAY} lladdr {GATEWAY_MAC} dev eth0 nud permanent\n"
    )


class Network:
    """The network of a lab. `path` is its namespace, a file that `nsenter --net` and `setns` take."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def make(self) -> None:
        self.path.touch()
        lines = (
            "link set lo up\n"
            f"link add br0 address {GATEWAY_MAC} type bridge mcast_snooping 0\n"
            f"addr add {GATEWAY}/16 dev br0\n"
            "link set br0 up\n"
        )
        system.run(["unshare", f"--net={self.path}", "sh", "-c", f"{QUIET} exec ip -batch -"], lines)

    @property
    def prefix(self) -> tuple[str, ...]:
        """Before a command: it runs in the lab's network. Not `ip netns exec`, which hides control groups."""
        return ("nsenter", f"--net={self.path}", "--")

    def inside(self) -> AbstractContextManager[None]:
        return system.network_namespace(self.path)

    def socket(self) -> socket.socket:
        """A TCP socket of the lab's network, not connected yet; usable from anywhere in this process."""
        with self.inside():
            return socket.socket(socket.AF_INET, socket.SOCK_STREAM)

    def attach(self, ends: Iterable[tuple[Cable, int]]) -> None:
        """Give each process's network namespace its `eth0`."""
        lines: list[str] = []
        for wire, pid in ends:
            lines += [
                f"link add {wire.name} type veth peer name eth0 address {wire.mac} netns {pid}",
                f"link set {wire.name} master br0 up",
                f"neigh replace {wire.address} lladdr {wire.mac} dev br0 nud permanent",
            ]
        self._ip(lines)

    def detach(self, wire: Cable) -> None:
        """Remove the cable by its name, and now: the kernel does so some time after a host's death."""
        try:
            self._ip([f"link del {wire.name}"])
        except LabError:
            if self.has(wire):  # else the kernel was faster
                raise

    def has(self, wire: Cable) -> bool:
        with self.inside():
            return wire.name in (name for _, name in socket.if_nameindex())

    def plug(self, wire: Cable, connected: bool) -> None:
        """An unplugged cable: nothing arrives, nothing is told."""
        self._ip([f"link set {wire.name} {'up' if connected else 'down'}"])

    def slow(self, wire: Cable, pid: int, kbit: int | None) -> None:
        """Both directions. None: as fast as it goes."""
        _pace(self.prefix, wire.name, kbit)
        _pace(("nsenter", f"--net=/proc/{pid}/ns/net", "--"), "eth0", kbit)

    def _ip(self, lines: Sequence[str]) -> None:
        system.run([*self.prefix, "ip", "-batch", "-"], "".join(f"{line}\n" for line in lines))


def _pace(prefix: Sequence[str], device: str, kbit: int | None) -> None:
    if system.find("tc") is None:
        raise LabError("a slow link needs tc, of iproute2")
    argv = [*prefix, "tc", "qdisc"]
    if kbit is not None:
        burst = max(4096, kbit // 2)  # what a fast link sends between two ticks of the clock
        shape = ["tbf", "rate", f"{kbit}kbit", "burst", f"{burst}b", "latency", "400ms"]
        system.run([*argv, "replace", "dev", device, "root", *shape])
    elif "tbf" in system.run([*argv, "show", "dev", device]):
        system.run([*argv, "del", "dev", device, "root"])


def lose(pid: int, percent: float) -> None:
    """Drop packets at the host's end, each way. Replaces the filter rules of the host's network."""
    rules = ""
    if percent:
        drop = f"-m statistic --mode random --probability {percent / 100:.6f} -j DROP"
        rules = f"-A INPUT -i eth0 {drop}\n-A OUTPUT -o eth0 {drop}\n"
    said = "iptables is not installed"
    # either may be what this kernel supports
    for tool in ("iptables-restore", "iptables-legacy-restore"):
        if system.find(tool) is None:
            continue
        try:
            argv = ["nsenter", f"--net=/proc/{pid}/ns/net", "--", tool]
            system.run(argv, f"*filter\n:INPUT ACCEPT\n:FORWARD ACCEPT\n:OUTPUT ACCEPT\n{rules}COMMIT\n")
        except LabError as err:
            said = str(err)
        else:
            return
    raise LabError(f"packet loss is not possible here: {said}")
