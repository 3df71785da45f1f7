"""Machines of Azure Batch on the stand-in: what its states mean, and that nothing is left."""

from __future__ import annotations

import asyncio
import functools
import importlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evalfleet.channels.mail.boxes import MailPilot
from evalfleet.errors import PlaceError
from evalfleet.model import Needs
from evalfleet.places.azure.services import (
    NO_PYTHON,
    NO_PYTHON_WORDS,
    OLD_PYTHON,
    OLD_PYTHON_WORDS,
    REFUSALS,
)
from evalfleet.places.azure_batch import AzureBatchPlace, AzureBatchSettings
from evalfleet.places.azure_batch.pilot import NO_KVM
from evalfleet.places.azure_batch.registry import registry_login
from evalfleet.places.azure_batch.template import NO_IMAGE, NO_PULL, JobBuild, job_body
from standins.azure_batch import StandIn, Timing
from standins.azure_batch.nodes import PaperRun
from tests.cloud.batch_places import (
    FAST,
    HOME,
    QUICK,
    examine,
    machine_id,
    offer,
    place,
    play,
)
from tests.cloud.mail_desk import seen
from tests.waiting import slowness, until, until_async

LIFE_S = 3600.0
ONE = machine_id()


@pytest.fixture
def batch() -> Iterator[StandIn]:
    """Without hosts, and fast."""
    with StandIn(timing=FAST) as made:
        yield made


def ended_alone(batch: StandIn) -> bool:
    """Nobody asks: has all gone that costs money?"""
    return not batch.meters.running() and not batch.do(lambda: list(batch.service.pools))


# -- what is sent, by the types of Microsoft's own client ------------------------------------------


@pytest.mark.parametrize("spot", [False, True])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"images": ("docker.io/a/b:1",)},
        {"reach": "mailbox"},
        {"reach": "mailbox", "public_ip": False, "subnet": "/s"},
        {"reach": "mailbox", "container": "docker.io/a/b:1", "images": ("c",)},
        {"reach": "mailbox", "container": "r.azurecr.io/b:1", "registry_user": "r", "registry_password": "P"},
    ],
)
def test_what_is_sent_is_what_batch_knows(spot: bool, more: dict[str, Any]) -> None:
    models: Any = importlib.import_module("azure.batch.models")
    settings = AzureBatchSettings(account="a.eastus", ssh_from=("203.0.113.7/32",), **more)
    pilot = MailPilot((), {"EVALFLEET_MAILBOX": "{}"}) if "reach" in more else None
    registry = registry_login(settings, {"P": "a password"})
    build = JobBuild(ONE, "Standard_D4s_v5", spot, True, "key", LIFE_S, {"a": "b"}, pilot, registry)
    body = job_body(settings, build)
    _check(models.BatchJobCreateOptions, body, "job")


def _check(kind: Any, body: dict[str, Any], where: str) -> None:
    """All keys of what is sent must be fields of the client's type, down to the last."""
    read = kind(body)
    known = {field._rest_name: name for name, field in kind._attr_to_rest_field.items()}
    for key, value in body.items():
        assert key in known, f"{where} has no {key}"
        inner = getattr(read, known[key])
        first = inner[0] if isinstance(inner, list) and inner else inner
        of = value[0] if isinstance(value, list) and value else value
        if isinstance(of, dict):
            _check(type(first), of, f"{where}.{key}")


# -- what the states mean --------------------------------------------------------------------------


def test_a_refused_resize_is_told_in_batchs_words_with_its_remedy(batch: StandIn, tmp_path: Path) -> None:
    batch.service.quota["dedicated"] = 3

    async def act(made: AzureBatchPlace) -> None:
        await made.create(ONE, offer(), LIFE_S)
        gone = await seen(made, "gone")
        assert "AccountCoreQuotaReached" in gone.detail
        assert "ask for more dedicated cores" in gone.detail
        assert not gone.start, "it never ran, and another one would fare alike"
        await made.delete(ONE)

    play(batch, tmp_path, act)
    until(lambda: not batch.left(), "all is gone")


def test_a_start_task_that_fails_and_a_node_of_no_use_are_told(batch: StandIn, tmp_path: Path) -> None:
    async def act(made: AzureBatchPlace) -> None:
        batch.faults.start_tasks_fail = True
        await made.create(ONE, offer(), LIFE_S)
        gone = await seen(made, "gone")
        assert "starttaskfailed" in gone.detail
        assert "FailureExitCode" in gone.detail
        assert "exit code 1: E: Unable to locate package docker.io; see `start_command`" in gone.detail
        assert gone.ran_s, "its node was billed"
        await made.delete(ONE)
        await until_async(lambda: _absent(made), "it is gone")
        batch.faults.start_tasks_fail, batch.faults.nodes_unusable = False, True
        await made.create(ONE, offer(), LIFE_S)
        assert "NodePreparationError" in (await seen(made, "gone")).detail
        await made.delete(ONE)

    play(batch, tmp_path, act, start_command="true")
    until(lambda: not batch.left(), "all is gone")


def test_the_log_of_a_task_that_runs_tells_why_its_pilot_does_not_answer(
    batch: StandIn, tmp_path: Path
) -> None:
    """It never tells its host key. What is long ago in a long log is not read."""
    log = b"long ago \x1b[31m\n" * 20_000 + b"sshd: no host keys\x1b[0m available\n\n"
    batch.paper.contents["stderr.txt"] = log

    async def act(made: AzureBatchPlace) -> None:
        await made.create(ONE, offer(), LIFE_S)
        gone = await seen(made, "gone")
        told = "the pilot has not answered: the pilot has not told its host key yet; its log ends: "
        assert gone.detail.endswith(f"{told}sshd: no host keys?[0m available"), gone.detail
        await made.delete(ONE)

    play(batch, tmp_path, act, answer_s=2.0 * slowness())
    until(lambda: not batch.left(), "all is gone")


def test_an_image_that_is_not_there_ends_the_place_and_a_registry_that_is_away_only_the_node(
    batch: StandIn, tmp_path: Path
) -> None:
    async def act(made: AzureBatchPlace) -> None:
        batch.faults.start_tasks_hang = True
        await made.create(machine_id(3), offer(), LIFE_S)

        async def pulls() -> bool:
            (pulling,) = await made.list("run")
            return (pulling.step, pulling.detail) == ("pull", "Batch: the node is waitingforstarttask")

        await until_async(pulls, "it is told that it pulls")
        await made.delete(machine_id(3))
        await until_async(lambda: _absent(made), "it is gone")
        batch.faults.start_tasks_hang, batch.faults.start_tasks_fail = False, True
        batch.faults.start_task_code = NO_PULL
        await made.create(ONE, offer(), LIFE_S)
        gone = await seen(made, "gone")
        assert gone.start, "the next node may have more luck"
        assert "FailureExitCode" in gone.detail
        await made.delete(ONE)
        await until_async(lambda: _absent(made), "it is gone")
        batch.faults.start_task_code = NO_IMAGE
        await made.create(ONE, offer(), LIFE_S)
        assert not (await seen(made, "gone")).start
        with pytest.raises(PlaceError, match="`images`, or `container`, is not there") as refused:
            await made.create(machine_id(2), offer(), LIFE_S)
        assert (refused.value.transient, refused.value.scope) == (False, "place")
        await made.delete(ONE)

    play(batch, tmp_path, act, images=("docker.io/a/b:1",))
    until(lambda: not batch.left(), "all is gone")


@pytest.mark.parametrize(
    ("said", "code", "tries"),
    [
        ("manifest for a/b:1 not found: manifest unknown: manifest unknown", NO_IMAGE, 1),
        ("pull access denied for a/b, repository does not exist or may require 'docker login'", NO_IMAGE, 1),
        ("toomanyrequests: You have reached your pull rate limit", NO_PULL, 4),
        ("received unexpected HTTP status: 503 Service Unavailable", NO_PULL, 4),
        ("", 0, 1),
    ],
)
def test_a_pull_that_fails_is_tried_again_unless_the_registry_says_that_it_never_will_work(
    tmp_path: Path, said: str, code: int, tries: int
) -> None:
    """The start task's script, with a `docker` that says what registries say, and a `sleep` that does not."""
    _program(tmp_path / "docker", f"echo x >> {tmp_path}/tries\n{_says(said)}")
    done = _start(tmp_path, f"{tmp_path}:{os.environ['PATH']}")
    assert (done.returncode, (tmp_path / "tries").read_text().count("x")) == (code, tries)
    assert said in done.stderr


@pytest.mark.parametrize(
    ("said", "code", "tries"),
    [
        ("E: Could not get lock /var/lib/apt/lists/lock. It is held by process 7 (apt-get)", 0, 4),
        ("E: Unable to locate package docker.io", NO_PULL, 1),
    ],
)
def test_docker_is_installed_once_the_locks_of_apt_are_free(
    tmp_path: Path, said: str, code: int, tries: int
) -> None:
    """Azure's images install updates at their first boot. The locks are free at the third try."""
    docker = f"printf '#!/bin/sh\\n' >{tmp_path}/docker; chmod +x {tmp_path}/docker"
    refuse = f"[ $(wc -l <{tmp_path}/tries) -gt 2 ] || {{ echo '{said}' >&2; exit 100; }}"
    install = f'case "$*" in *install*) {docker};; esac'
    _program(tmp_path / "apt-get", f'echo "$*" >>{tmp_path}/tries\n{refuse}\n{install}')
    for name in ("sh", "date", "grep", "wc", "chmod"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    done = _start(tmp_path, str(tmp_path))
    assert done.returncode == code, done.stderr
    lines = (tmp_path / "tries").read_text().splitlines()
    assert (len(lines), said in done.stderr) == (tries, True)


def _program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def _start(programs: Path, path: str) -> subprocess.CompletedProcess[str]:
    """Run the script of a start task, with a `sleep` that does not."""
    _program(programs / "sleep", "")
    settings = AzureBatchSettings(account="a.eastus", images=("docker.io/a/b:1",))
    body = job_body(settings, JobBuild(ONE, "Standard_D4s_v5", False, False, "key", LIFE_S, {}))
    start = body["poolInfo"]["autoPoolSpecification"]["pool"]["startTask"]
    argv = shlex.split(start["commandLine"])
    return subprocess.run(argv, env={"PATH": path}, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("python", "code", "told"),
    [
        ("", NO_PYTHON, NO_PYTHON_WORDS),
        ("#!/bin/sh\nexit 1\n", OLD_PYTHON, OLD_PYTHON_WORDS),
        ("#!/bin/sh\nexit 0\n", 0, ""),
    ],
)
def test_an_image_without_python_is_told_by_its_own_shell(
    tmp_path: Path, python: str, code: int, told: str
) -> None:
    """The pilot's task, in a shell that finds no Python, an old one, or one that is good."""
    if python:
        (tmp_path / "python3").write_text(python)
        (tmp_path / "python3").chmod(0o755)
    settings = AzureBatchSettings(account="a.eastus", reach="mailbox", container="a/b:1")
    build = JobBuild(ONE, "Standard_D4s_v5", False, False, "", LIFE_S, {}, MailPilot((), {}))
    line = job_body(settings, build)["jobManagerTask"]["commandLine"]
    done = subprocess.run(shlex.split(line), env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (code, told)
    assert code == 0 or REFUSALS[code].startswith("the image")


def _says(words: str) -> str:
    return f"echo {shlex.quote(words)} >&2; exit 1" if words else "exit 0"


async def _absent(made: AzureBatchPlace) -> bool:
    return not await made.list("run")


def test_a_task_that_batch_runs_anew_is_an_eviction_and_never_a_second_run(
    batch: StandIn, tmp_path: Path
) -> None:
    """Another controller, which has never seen the first start, is told so, too."""

    async def act(made: AzureBatchPlace) -> None:
        await made.create(ONE, offer(spot=True), LIFE_S)
        first = await seen(made, "pending")
        until(lambda: batch.job(ONE).tasks["pilot"].state == "running", "it runs")
        await asyncio.to_thread(batch.preempt, ONE)
        evicted = await seen(made, "evicted")
        assert evicted.start == first.start, "the new start is nobody's"
        other = place(batch, tmp_path / "other")
        assert (await seen(other, "evicted")).start == first.start
        await other.close()
        await made.delete(ONE)

    play(batch, tmp_path, act, spot=True)
    until(lambda: not batch.left(), "all is gone")


def test_where_no_virtual_machine_can_be_made_the_size_is_refused(batch: StandIn, tmp_path: Path) -> None:
    async def act(made: AzureBatchPlace) -> None:
        await made.offers(Needs(nested_virtualization=True))
        await made.create(ONE, offer(), LIFE_S)
        run = await until_async(lambda: _run_of(batch), "the pilot runs")
        batch.do(lambda: run.end(NO_KVM))
        gone = await seen(made, "gone")
        assert "/dev/kvm" in gone.detail
        assert not gone.start
        with pytest.raises(PlaceError, match="/dev/kvm") as refused:
            await made.create(machine_id(2), offer(), LIFE_S)
        assert (refused.value.transient, refused.value.scope) == (False, "offer")
        await made.delete(ONE)

    play(batch, tmp_path, act)
    (sent,) = [each["value"] for each in _pilot_settings(batch) if each["name"] == "EVALFLEET_KVM"]
    assert sent == "1", "the pilot is told to try it"


SENT: list[dict[str, Any]] = []


def _pilot_settings(batch: StandIn) -> list[dict[str, Any]]:
    return SENT[-1]["environmentSettings"]  # type: ignore[no-any-return]


async def _run_of(batch: StandIn) -> PaperRun | None:
    runs = [run for folder, run in batch.paper.runs.items() if "workitems" in folder]
    if runs:
        SENT.append(batch.job(ONE).tasks["pilot"].body)
    return runs[0] if runs else None


# -- nothing is left -------------------------------------------------------------------------------


def test_all_that_costs_money_ends_by_itself_and_what_is_left_can_be_reaped(
    batch: StandIn, tmp_path: Path
) -> None:
    """Once with a pilot that runs, and once with a job that waits for a node that never comes."""

    async def make(made: AzureBatchPlace) -> None:
        await made.create(ONE, offer(), LIFE_S)
        await seen(made, "pending")
        batch.service.quota["dedicated"] = 4
        await made.create(machine_id(2), offer(), LIFE_S)

    play(batch, tmp_path, make)
    begun = batch.clock.now()
    batch.jump(LIFE_S + 61)
    until(lambda: not batch.meters.running(), "its node is gone")
    assert batch.meters.seconds("vm", batch.clock.now()) < LIFE_S + 120
    batch.jump(2 * 3600.0)
    until(lambda: ended_alone(batch), "the job that waited is gone, too")
    assert batch.clock.now() - begun < 4 * LIFE_S

    async def reap(stranger: AzureBatchPlace) -> None:
        found = await stranger.belongings()
        assert [each.machine for each in found] == [ONE, machine_id(2)]
        assert {each.home for each in found} == {HOME}
        assert all((each.expires_at or 0) / 1e6 < batch.clock.now() for each in found), "it has expired"
        for each in found:
            await stranger.reap(each)

    play(batch, tmp_path / "stranger", reap, home_id="ffffffffffff")
    until(lambda: not batch.left(), "all is gone")


@pytest.mark.parametrize("fault", ["start_tasks_hang", "start_tasks_fail"])
def test_a_node_that_never_comes_to_its_task_ends_with_the_machines_life(
    batch: StandIn, tmp_path: Path, fault: str
) -> None:
    """The pilot, which has its own limit, does not run there, and whoever looked at it first is gone."""
    setattr(batch.faults, fault, True)

    async def make(made: AzureBatchPlace) -> None:
        await made.create(ONE, offer(), LIFE_S)
        await seen(made, "pending", "gone")

    play(batch, tmp_path, make, start_command="true")
    batch.jump(LIFE_S + 61)
    until(lambda: ended_alone(batch), "job, pool and node are gone")
    assert batch.meters.seconds("vm", batch.clock.now()) < LIFE_S + 70


@pytest.mark.parametrize(("queue_s", "comes"), [(7200.0, True), (1800.0, False)])
def test_a_queue_of_an_hour_is_waited_for_as_long_as_the_place_says(
    tmp_path: Path, queue_s: float, comes: bool
) -> None:
    """Batch itself would give up after a quarter of an hour."""

    async def act(batch: StandIn, made: AzureBatchPlace) -> None:
        await made.create(ONE, offer(), LIFE_S)
        waits = await seen(made, "queued")
        assert (waits.ran_s, waits.detail) == (0.0, "Batch: resizing")
        await asyncio.to_thread(batch.jump, 1750.0)
        assert (await seen(made, "queued")).ran_s == 0.0
        await asyncio.to_thread(batch.jump, 1900.0)
        found = await seen(made, "pending" if comes else "gone")
        assert comes or "AllocationTimedout" in found.detail
        await made.delete(ONE)

    with StandIn(timing=Timing((3600.0, 3600.0), QUICK, QUICK)) as account:
        play(account, tmp_path, functools.partial(act, account), queue_s=queue_s)
        until(lambda: not account.left(), "all is gone")


# -- before money is spent -------------------------------------------------------------------------


def test_doctor_looks_at_account_image_network_quotas_and_storage(batch: StandIn, tmp_path: Path) -> None:
    batch.service.quota["spot"] = 0
    found = examine(batch, tmp_path, workers=30, spot=True)
    assert {name: check.verdict for name, check in found.items()} == {
        "account": "good",
        "prices": "good",
        "image": "good",
        "network": "good",
        "spot quota": "bad",
        "dedicated quota": "good",
        "workers": "warn",
        "storage": "good",
    }
    assert "Quotas" in found["spot quota"].remedy
    assert found["workers"].found.startswith("25 of 30 machines")
