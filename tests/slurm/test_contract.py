"""Jobs of a real Slurm keep the contract of machines and of channels."""

from __future__ import annotations

import secrets
from typing import ClassVar, Literal

import pytest

from evalfleet.places.slurm import SlurmPlace, SlurmSettings
from evalfleet.ports import Place, PlaceContext
from evalfleet.testing import ChannelContract, Harness, PlaceContract, ShellHarness
from evalfleet.testing.harness import Kind
from tests.waiting import PATIENCE_S, allow_for_load

from .cluster import Cluster


class SlurmHarness(ShellHarness):
    kind: Kind = "service"
    unit_s = 0.5
    silent_s = 8.0
    patience_s = PATIENCE_S
    boot_s = 2.0
    max_jobs: int | None = None
    reach: Literal["step", "mailbox"] = "step"

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        allow_for_load(self)
        self.cluster = cluster
        self.home_id = secrets.token_hex(3)  # Slurm remembers the jobs of the test before

    def make_place(self) -> Place:
        settings = SlurmSettings(
            folder=str(self.directory / "shared"), poll_s=0.1, max_jobs=self.max_jobs, reach=self.reach
        )
        context = PlaceContext(self.directory / "home", self.home_id, environ=self.cluster.environ)
        return SlurmPlace("slurm", settings, context)

    def close(self) -> None:
        left = list((self.directory / "shared" / self.home_id).glob("*"))
        super().close()
        assert not left, "files of machines are left"
        assert not self.cluster.ask("squeue", "-h"), "jobs are left"


class CappedHarness(SlurmHarness):
    capacity = 2
    max_jobs = 2


class MailboxHarness(SlurmHarness):
    reach: Literal["step", "mailbox"] = "mailbox"


@pytest.fixture(autouse=True)
def _on_cluster(cluster: Cluster) -> None:
    TestSlurmPlace.cluster = TestSlurmChannel.cluster = TestCappedSlurmPlace.cluster = cluster
    TestSlurmMailbox.cluster = cluster


class TestSlurmPlace(PlaceContract):
    """Of the channel's contract, what a step of a job could get wrong; the rest is the supervisor's."""

    cluster: ClassVar[Cluster]

    test_the_end_tells_code_and_result = ChannelContract.test_the_end_tells_code_and_result
    test_another_channel_attaches_to_the_job = ChannelContract.test_another_channel_attaches_to_the_job
    test_a_stale_controller_is_refused = ChannelContract.test_a_stale_controller_is_refused
    test_stop_ends_the_job_and_its_processes = ChannelContract.test_stop_ends_the_job_and_its_processes
    test_collecting_may_be_repeated = ChannelContract.test_collecting_may_be_repeated

    def harness(self) -> Harness:
        return SlurmHarness(self.cluster)


@pytest.mark.nightly
class TestSlurmChannel(ChannelContract):
    cluster: ClassVar[Cluster]

    def harness(self) -> Harness:
        return SlurmHarness(self.cluster)


@pytest.mark.nightly
class TestSlurmMailbox(ChannelContract):
    """Where no steps may be used. In every suite a whole run is made so (test_run.py)."""

    cluster: ClassVar[Cluster]

    def harness(self) -> Harness:
        return MailboxHarness(self.cluster)


class TestCappedSlurmPlace:
    """A place with a ceiling has no more jobs than that, and takes others when some have ended."""

    cluster: ClassVar[Cluster]

    def harness(self) -> Harness:
        return CappedHarness(self.cluster)

    test_no_more_machines_than_there_are = PlaceContract.test_no_more_machines_than_there_are
