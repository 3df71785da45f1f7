"""Hosts reached by SSH keep the contract, with a real sshd."""

from __future__ import annotations

from evalfleet.ports import Place
from evalfleet.testing import ChannelContract, Harness, PlaceContract, ShellHarness
from evalfleet.testing.harness import Kind
from tests.waiting import PATIENCE_S, allow_for_load

from .fleet import Fleet


class SshHarness(ShellHarness):
    kind: Kind = "lent"
    unit_s = 0.3
    silent_s = 5.0
    patience_s = PATIENCE_S
    capacity = 2
    listed_when_expired = True  # its directory stays, with the results, until it is deleted

    def __init__(self) -> None:
        super().__init__()
        allow_for_load(self)
        self.fleet = Fleet(self.directory / "fleet", 2)

    def make_place(self) -> Place:
        return self.fleet.place()

    def close(self) -> None:
        left = [str(path) for host in self.fleet.hosts for path in host.ours.glob("**/*")]
        self.fleet.stop()
        super().close()
        assert not left, "something of ours is left on a host"


class TestSshPlace(PlaceContract, ChannelContract):
    def harness(self) -> Harness:
        return SshHarness()
