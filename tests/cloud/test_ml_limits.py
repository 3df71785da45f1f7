"""Limits of Azure Machine Learning that fire in whole runs: each ends the machine, tells why in the service's
words, and the task is scored on another one. Pilots and mailboxes are real."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from evalfleet.events import AttemptStarted, MachineCondemned
from standins.azure_ml import Processes, StandIn
from tests.cloud import ml_places
from tests.cloud.mail_desk import nothing_left
from tests.cloud.services import desk
from tests.desk import Desk, Process
from tests.waiting import until

CANNOT = Processes.missing()
pytestmark = pytest.mark.skipif(CANNOT is not None, reason=f"NO TEST OF AZURE ML'S JOBS: {CANNOT}")
FIRST = "-1"
"""The names of jobs end with the number of their machine."""


@pytest.fixture
def ml() -> Iterator[StandIn]:
    with StandIn(Processes(), ml_timing=ml_places.FAST) as made:
        made.troubles_of_jobs.only = lambda name: name.endswith(FIRST)
        yield made


def limited(ml: StandIn, folder: Path, count: int, rule: str = "", **more: float) -> Desk:
    """A desk whose place has these limits, and a rule for alerts."""
    at = desk(ml, folder, count, sleeps=0, **more)
    toml = folder / "evalfleet.toml"
    toml.write_text(f"{toml.read_text()}\n{rule}")
    return at


def statuses(ml: StandIn) -> list[str]:
    """Of all jobs."""
    return ml.do(lambda: [job.status for job in ml.service.jobs.values()])


def hangs_once(folder: Path) -> None:
    """The first attempt, of whichever task, takes longer than anybody waits."""
    score = 'echo \'{"score": 1}\' >"$EVALFLEET_OUT/result.json"'
    (folder / "run.sh").write_text(f"if mkdir {folder}/begun; then sleep 1000; fi\n{score}\n")


def begin(at: Desk, *more: str, workers: int = 1) -> Process:
    return at.start("run", "b.toml", "--on", "p", "--workers", str(workers), "--name", "r", *more)


def scored_elsewhere(ml: StandIn, at: Desk, run: Process, tasks: int = 1) -> str:
    """Wait until all is scored, and nothing is left. Returns why the first machine was given up."""
    assert run.wait().code == 0, run.said
    assert at.results("r")["scored"] == tasks
    nothing_left(ml)
    return next(event.detail for event in at.events() if isinstance(event, MachineCondemned) and event.detail)


def at_work(at: Desk) -> str:
    """The machine that has got a task last."""
    return [event.machine for event in at.events() if isinstance(event, AttemptStarted)][-1]


def alerts(at: Desk) -> list[dict[str, str]]:
    lines = (at.home / "r/.alerts.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_pull_that_takes_long_is_told_and_one_that_does_not_end_is_given_up(
    ml: StandIn, tmp_path: Path
) -> None:
    ml.troubles_of_jobs.stuck = {"Preparing"}
    rule = "[alerts.docker_pull_slow]\nafter_s = 1\n"
    at = limited(ml, tmp_path, 1, rule, prepare_s=12)
    why = scored_elsewhere(ml, at, begin(at))
    assert why == "Azure ML: preparing for 0 min, but its image is not there"
    told = [alert["text"] for alert in alerts(at) if alert["rule"] == "docker_pull_slow"]
    assert told, alerts(at)
    assert "has been fetching its image for" in told[0]


@pytest.mark.parametrize("status", ["Finalizing", "CancelRequested"])
def test_a_job_that_does_not_end_holds_up_no_task_and_its_node_goes_with_the_cluster(
    ml: StandIn, tmp_path: Path, status: str
) -> None:
    """The 12 hours of `Finalizing` and the 40 of `CancelRequested`. Its container ends, or never began."""
    ml.troubles_of_jobs.stuck = {status} if status == "Finalizing" else {"Running", status}
    at = limited(ml, tmp_path, 2, start_s=5, end_s=3)
    if status == "Finalizing":
        hangs_once(tmp_path)
    run = begin(at)
    if status == "Finalizing":
        until((tmp_path / "begun").exists, lambda: run.said)
        container = ml.job(FIRST).run
        assert container is not None
        ml.do(container.kill)
    until(lambda: status in statuses(ml), lambda: run.said)
    why = scored_elsewhere(ml, at, run, tasks=2)
    told = (
        "Azure ML: finalizing" if status == "Finalizing" else "running for 0 min, but its container has not"
    )
    assert told in why
    first = at.results("r")["machines"][0]
    assert told in first["detail"]
    billed_s = max(span.seconds(ml.clock.now()) for span in ml.meters.spans)
    assert first["uptime_seconds"] >= billed_s - 10, "it held its node, and so it is counted"
    assert told in at("show", "r").out


def test_a_job_that_stays_in_its_queue_is_given_up_unbilled(ml: StandIn, tmp_path: Path) -> None:
    """An hour of it, in seconds."""
    ml.troubles_of_jobs.stuck = {"Queued"}
    at = limited(ml, tmp_path, 1, queue_s=3)
    run = begin(at)
    assert run.wait().code == 0, run.said
    assert at.results("r")["scored"] == 1
    first = next(machine for machine in at.state("r").machines.values())
    assert first.allocated_at is None
    assert first.closed_usd < 0.001, "a moment that nobody looked at is counted"
    assert "queue" in first.detail, first.detail
    nothing_left(ml)


@pytest.mark.nightly
def test_a_node_that_becomes_unusable_is_replaced(ml: StandIn, tmp_path: Path) -> None:
    at = desk(ml, tmp_path, 1)
    hangs_once(tmp_path)
    run = begin(at)
    until((tmp_path / "begun").exists, lambda: run.said)
    ml.spoil(at_work(at))
    why = scored_elsewhere(ml, at, run)
    assert why.startswith("Azure ML: running, but its node tvmps_")
    assert why.endswith("is unusable")


@pytest.mark.nightly
def test_a_node_of_which_nothing_comes_is_replaced_though_its_pilot_beats(
    ml: StandIn, tmp_path: Path
) -> None:
    """Whatever else this computer does, its processors count as idle here."""
    rule = "[alerts.no_sign_of_life]\nafter_s = 10\nshare = 1.0\n"
    at = limited(ml, tmp_path, 1, rule)
    hangs_once(tmp_path)
    why = scored_elsewhere(ml, at, begin(at))
    assert "no_sign_of_life" in why, why
    assert "has written nothing, made no step and asked no model for 10s" in why, why


@pytest.mark.nightly
@pytest.mark.parametrize("measured", [False, True], ids=["silent", "measured by Azure Monitor"])
def test_a_container_that_dies_silently_is_given_up(ml: StandIn, tmp_path: Path, measured: bool) -> None:
    """Azure says `Running`. Where its node is used up, Azure Monitor tells it, and sooner."""
    rule = "[alerts.compute_node_unhealthy]\nafter_s = 20\n"
    at = limited(ml, tmp_path, 2, rule, lost_s=600 if measured else 60)
    bench = tmp_path / "b.toml"
    bench.write_text(bench.read_text().replace("timeout_s = 60", "timeout_s = 600"))
    (tmp_path / "run.sh").write_text(
        f"if mkdir {tmp_path}/first; then echo $EVALFLEET_OUT >{tmp_path}/hangs; sleep 1000\n"
        f"elif mkdir {tmp_path}/second; then sleep 160; fi\n"
        'echo \'{"score": 1}\' >"$EVALFLEET_OUT/result.json"\n'
    )
    run = begin(at, "--canary", "0", workers=2)
    until((tmp_path / "hangs").exists, lambda: run.said)
    started = [event for event in at.events() if isinstance(event, AttemptStarted)]
    (machine,) = [each.machine for each in started if each.attempt in (tmp_path / "hangs").read_text()]
    job = ml.job(machine).name
    if measured:
        full = {"CpuMemoryUtilizationPercentage": 99.0}
        ml.do(lambda: ml.service.loads.__setitem__(job, full))
    ml.kill(job)
    why = scored_elsewhere(ml, at, run, tasks=2)
    assert ("memory of" if measured else "nothing heard of it for") in why, why


def _no_kvm_node(ml: StandIn) -> None:
    ml.service.has_kvm = False


def _no_kvm_in_container(ml: StandIn) -> None:
    """The device is there, and is of no use: the pilot's own try tells."""
    ml.service.prelude = "touch /dev/kvm && mount --bind /dev/null /dev/kvm || exit 1; "


@pytest.mark.parametrize("trouble", [_no_kvm_node, _no_kvm_in_container])
def test_a_node_on_which_no_virtual_machine_can_be_made_refuses_the_place_before_any_task(
    ml: StandIn, tmp_path: Path, trouble: Callable[[StandIn], None]
) -> None:
    trouble(ml)
    at = desk(ml, tmp_path, 1)
    bench = tmp_path / "b.toml"
    bench.write_text(bench.read_text() + "[needs]\nnested_virtualization = true\n")
    done = begin(at).wait()
    assert done.code == 4, done
    assert "/dev/kvm" in done.err + done.out
    assert "name other `sizes`" in done.err + done.out
    assert not any(isinstance(event, AttemptStarted) for event in at.events())
    nothing_left(ml)
