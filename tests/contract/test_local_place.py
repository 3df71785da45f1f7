"""Processes of this computer keep the contract, with real commands."""

from __future__ import annotations

import pytest

from evalfleet.places.local import LocalPlace, LocalSettings
from evalfleet.ports import Place
from evalfleet.testing import ChannelContract, Harness, PlaceContract, ShellHarness
from tests.waiting import PATIENCE_S, allow_for_load


class LocalHarness(ShellHarness):
    unit_s = 0.4
    silent_s = 3.0
    patience_s = PATIENCE_S
    listed_when_expired = True  # its directory stays, with the results, until it is deleted

    def __init__(self) -> None:
        super().__init__()
        allow_for_load(self)

    def make_place(self) -> Place:
        return LocalPlace("local", LocalSettings(), self.directory / "machines")


class TestLocalPlace(PlaceContract, ChannelContract):
    def harness(self) -> Harness:
        return LocalHarness()

    @pytest.mark.slow
    def test_a_machine_ends_by_itself_at_its_expiry(self) -> None:
        super().test_a_machine_ends_by_itself_at_its_expiry()

    @pytest.mark.slow
    def test_extend_moves_the_expiry(self) -> None:
        super().test_extend_moves_the_expiry()


class CappedHarness(LocalHarness):
    capacity = 2

    def make_place(self) -> Place:
        return LocalPlace("local", LocalSettings(max_machines=2), self.directory / "machines")


class TestCappedLocalPlace:
    """A place with a ceiling lends no more than that, and lends again what came back."""

    def harness(self) -> Harness:
        return CappedHarness()

    test_no_more_machines_than_there_are = PlaceContract.test_no_more_machines_than_there_are
