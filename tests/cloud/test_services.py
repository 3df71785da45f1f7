"""Machines that are jobs of a service, Batch or Azure ML, in whole runs: pilots and mailboxes are real."""

from __future__ import annotations

from pathlib import Path

import pytest

from evalfleet.events import AttemptStarted, MachineCondemned
from evalfleet.model import Scored
from evalfleet.testing import ChannelContract, Harness, PlaceContract
from standins import azure_batch, azure_ml
from standins.azure_ml import Failed, Processes
from tests.cloud.mail_desk import MailHarness, evicted_once, killed_and_resumed, nothing_left
from tests.cloud.services import Service, desk, place
from tests.desk import Desk, Process
from tests.waiting import slowness, until

CANNOT = Processes.missing()
pytestmark = pytest.mark.skipif(CANNOT is not None, reason=f"NO TEST OF PILOTS: {CANNOT}")
FIRST = "-1"
"""The names of jobs end with the number of their machine."""


# -- the contract ------------------------------------------------------------------------------------------


class ServiceMachines:
    @pytest.fixture(autouse=True)
    def _its_service(self, service: Service) -> None:
        self._service = service

    def harness(self) -> Harness:
        return MailHarness(self._service, lambda home: place(self._service, home))


class TestServices(ServiceMachines):
    """What a service of jobs could get wrong; the rest is promised nightly."""

    test_creating_twice_makes_one_machine = PlaceContract.test_creating_twice_makes_one_machine
    test_deleting_before_it_is_up = PlaceContract.test_deleting_a_machine_that_is_not_up_yet
    test_the_life_begins_with_the_start = PlaceContract.test_the_life_of_a_machine_begins_when_it_starts


@pytest.mark.nightly
class TestAllOfServices(ServiceMachines, PlaceContract, ChannelContract):
    """The whole contract: its machines take seconds to start, and minutes in all."""


# -- runs ----------------------------------------------------------------------------------------------------


def begin(at: Desk, *more: str, workers: int = 1) -> Process:
    return at.start("run", "b.toml", "--on", "p", "--workers", str(workers), "--name", "r", *more)


def hangs_once(folder: Path) -> None:
    """The first attempt, of whichever task, takes longer than anybody waits."""
    score = (folder / "run.sh").read_text()
    (folder / "run.sh").write_text(f"if mkdir {folder}/begun; then sleep 1000; fi\n{score}")


def scored_elsewhere(service: Service, at: Desk, run: Process, tasks: int = 1) -> str:
    """Wait until all is scored, and nothing is left. Returns why the first machine was given up."""
    assert run.wait().code == 0, run.said
    assert at.results("r")["scored"] == tasks
    nothing_left(service)
    return next(event.detail for event in at.events() if isinstance(event, MachineCondemned) and event.detail)


def test_a_killed_controller_is_resumed_and_nothing_is_left(service: Service, tmp_path: Path) -> None:
    """Batch's machines are in a private network, and its storage takes no keys: mail goes by the login."""
    if isinstance(service, azure_batch.StandIn):
        service.storage.takes_keys = False
        at = desk(service, tmp_path, 4, public_ip=False, subnet="/subscriptions/s/subnets/private")
    else:
        at = desk(service, tmp_path, 4)
    killed_and_resumed(at, "p")
    assert 0 < at.results("r")["cost"]["machines_usd"] < 1
    nothing_left(service)


@pytest.mark.nightly
def test_a_job_that_is_run_anew_costs_no_score_and_gives_no_second_one(
    service: Service, tmp_path: Path
) -> None:
    at = desk(service, tmp_path, 2, sleeps=3, spot=True, spot_only=True)
    evicted_once(at, "p", lambda: service.preempt("r-"))
    nothing_left(service)


@pytest.mark.parametrize("what", ["storage", "api"])
def test_a_storage_or_an_api_that_is_away_for_a_while_ends_nothing(
    service: Service, tmp_path: Path, what: str
) -> None:
    at = desk(service, tmp_path, 3, sleeps=2)
    run = begin(at)
    until(lambda: any(isinstance(each, AttemptStarted) for each in at.events()), lambda: run.said)
    if what == "storage":
        service.storage.is_away = True
        until(lambda: service.storage.refused >= 20, "both ends have asked in vain")
        service.storage.is_away = False
    else:
        away = service.faults.add(Failed(503), times=10)
        until(lambda: away.times == 0, "it was asked in vain")
    assert run.wait().code == 0, run.said
    told = at.results("r")
    assert (told["scored"], told["broken"], told["status"]) == (3, 0, "done"), run.said
    state = at.state("r")
    assert len(state.machines) == 1, "it was not given up"
    assert all(isinstance(each.outcome, Scored) for each in state.attempts.values())
    nothing_left(service)


def test_a_container_that_never_starts_though_its_job_is_said_to_run_is_given_up(
    service: Service, tmp_path: Path
) -> None:
    """As happened for eight hours with nothing done. Its task runs on another machine."""
    if isinstance(service, azure_ml.StandIn):
        service.troubles_of_jobs.only = lambda name: name.endswith(FIRST)
        service.troubles_of_jobs.stuck = {"Running"}
        at, told = desk(service, tmp_path, 1, sleeps=0, start_s=2), "but its container has not started"
    else:
        service.faults.mute = FIRST
        at = desk(service, tmp_path, 1, sleeps=0, answer_s=5 * slowness())
        told = "but the pilot has not answered: the pilot has not come to its mailbox"
    assert told in scored_elsewhere(service, at, begin(at))


@pytest.mark.nightly
def test_a_node_whose_memory_or_disk_is_used_up_is_replaced_by_what_its_supervisor_tells(
    service: Service, tmp_path: Path
) -> None:
    """Each computer uses a thousandth of its memory, and so this one does all the time."""
    at = desk(service, tmp_path, 1)
    with (tmp_path / "evalfleet.toml").open("a") as rules:
        rules.write("[alerts.compute_node_unhealthy]\nafter_s = 10\nshare = 0.001\n")
    hangs_once(tmp_path)
    why = scored_elsewhere(service, at, begin(at))
    assert "memory of" in why or "disk of" in why, why
    assert "compute_node_unhealthy" in at.results("r")["machines"][0]["detail"]
