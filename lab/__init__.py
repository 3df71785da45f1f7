"""Disposable real hosts on one machine, that tests can break: power loss, partition, full disk and so on.

    with Lab.create(20) as lab:            # needs root, iproute2 and openssh-server
        lab.hosts[3].power_off()

`LoopbackLab` needs no root and can do less. `python -m lab 50` shows what hosts cost.
"""

from __future__ import annotations

from .cgroups import HostLimits
from .client import AnyLab
from .host import Host, HostProcess
from .hosts import NamespaceHost
from .lab import Lab
from .loopback import LoopbackLab
from .system import LabError

__all__ = ["AnyLab", "Host", "HostLimits", "HostProcess", "Lab", "LabError", "LoopbackLab", "NamespaceHost"]
