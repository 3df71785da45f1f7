"""A calm run violates nothing; what is wrong is named. Otherwise the scenarios would prove little."""

from __future__ import annotations

import subprocess

from tests.lab.clients import needs_lab
from tests.waiting import until

from . import workload
from .arena import RUN, Arena
from .invariants import violations

pytestmark = needs_lab


def test_what_is_wrong_is_named(arena: Arena) -> None:
    arena.run()
    arena.finish()
    assert arena.broken() == []
    assert violations(arena) == []
    arena.settle_s = 0.5
    first, second, *_ = arena.hosts
    ran = arena.starts(first)[0]
    first.run(["sh", "-c", f"echo {ran} >>{workload.STARTS}; mkdir {workload.HOME}/.evalfleet"])
    second.run(["sh", "-c", f"echo {ran} t_0.9 | tr ' ' '\\n' >>{workload.STARTS}"])
    (arena.home / RUN / "t_1" / "t_1.0" / "blob").write_bytes(b"cut sho")
    (arena.home / RUN / "t_2" / "t_2.0" / "started").unlink()
    (arena.home / RUN / "t_3.partial").touch()
    left = subprocess.Popen(arena.lab.client.ssh(second, "exec sleep 987"), stdin=subprocess.DEVNULL)
    try:
        until(lambda: bool(second.workload()))
        found = violations(arena)
    finally:
        left.kill()
        left.wait()
    assert found == [
        f"{ran} ran 3 times",
        f"{ran} ran on {second.name}, which is not where the journal sent it",
        f"t_0.9 ran on {second.name}, and the journal does not know it",
        "t_1.0: blob is not what the attempt wrote",
        "t_2.0: started is not what the attempt wrote",
        f"{arena.home / RUN / 't_3.partial'} is left of a collection",
        f"{first.name}: ['{workload.HOME}/.evalfleet']",
        f"{second.name}: ['sleep 987']",
    ]
