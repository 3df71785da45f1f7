"""What a cluster does to its jobs, and what becomes of the machines that they are."""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from evalfleet.errors import ChannelError, PlaceError
from evalfleet.model import AttemptId, Command, Ended, Job, Machine, MachineId
from evalfleet.places.slurm import SlurmPlace, SlurmSettings
from evalfleet.ports import Channel, Fence, PlaceContext
from evalfleet.testing.harness import find, first_offer
from tests.waiting import PATIENCE_S, slowness, until, until_async

from .cluster import Cluster, missing

MACHINE = MachineId("r-abc123-1")
JOB = AttemptId("t.0")


class Site:
    """A home's place on a cluster, and its machine."""

    def __init__(self, cluster: Cluster, folder: Path, **settings: Any) -> None:
        self.home_id = secrets.token_hex(3)
        self.cluster = cluster
        self.folder = folder
        self.settings = SlurmSettings(folder=str(folder / "shared"), **{"poll_s": 0.1, **settings})
        self.place = self.new_place()
        self.channels: list[Channel] = []

    def new_place(self) -> SlurmPlace:
        context = PlaceContext(self.folder / "home", self.home_id, environ=self.cluster.environ)
        return SlurmPlace.make("slurm", self.settings, context)

    @property
    def job(self) -> str:
        """Slurm's id of the machine's job."""
        return (self.folder / "shared" / self.home_id / MACHINE / "job").read_text()

    @property
    def why(self) -> str:
        """What the machine's supervisor wrote down of the reason why it ended the job."""
        return self.why_of(JOB)

    def why_of(self, job: AttemptId) -> str:
        return (self.folder / "shared" / self.home_id / MACHINE / "jobs" / job / "why").read_text()

    async def create(self, expires_s: float = 600.0) -> None:
        await self.place.create(MACHINE, await first_offer(self.place), expires_s)

    async def until(self, good: Callable[[Machine], bool], what: str) -> Machine:
        async def look() -> Machine | None:
            seen = await find(self.place, MACHINE)
            last.append(seen)
            return seen if seen is not None and good(seen) else None

        last: list[Machine | None] = []
        return await until_async(look, lambda: f"{what}; last seen: {last[-1]}", look_s=0.1)

    async def until_in(self, phase: str) -> Machine:
        return await self.until(lambda seen: seen.phase == phase, f"the machine is {phase}")

    async def up(self) -> Machine:
        await self.create()
        return await self.until_in("up")

    def channel(self, machine: Machine) -> Channel:
        self.channels.append(self.place.channel(machine, Fence("r", 1, 3.0 * slowness())))
        return self.channels[-1]

    async def start(self, channel: Channel, script: str = "sleep 600") -> None:
        """Start a job that says when it has begun, and wait until it has."""
        begun = self.folder / "begun"
        await channel.start(Job(JOB, Command(("sh", "-c", f"touch {begun}; {script}")), 600.0))
        await until_async(lambda: asyncio.to_thread(begun.exists), "the job has begun")


@asynccontextmanager
async def site(cluster: Cluster, folder: Path, **settings: Any) -> AsyncIterator[Site]:
    made = Site(cluster, folder, **settings)
    try:
        yield made
    finally:
        for channel in made.channels:
            await channel.close()
        await made.place.delete(MACHINE)
        await made.place.close()


@pytest.fixture
def full(cluster: Cluster) -> Iterator[Callable[[], None]]:
    """All nodes are taken by somebody else, until the fixture's value is called."""
    jobs = [cluster.submit("--exclusive") for _ in cluster.nodes]
    running = ("squeue", "-h", "--states=RUNNING", "-o", "%i")
    until(lambda: len(cluster.ask(*running).split()) == len(jobs), "the cluster is full", 60.0)

    def leave() -> None:
        cluster.ask("scancel", *jobs)

    yield leave
    leave()
    until(lambda: not cluster.ask("squeue", "-h", "-o", "%i"), "the jobs have gone")


async def test_a_machine_waits_in_the_queue_unbilled_and_says_where(
    cluster: Cluster, full: Callable[[], None], tmp_path: Path
) -> None:
    other = cluster.submit("--exclusive", "--nice=-100")
    async with site(cluster, tmp_path) as at:
        await at.create(expires_s=600.0)
        queued = await at.until(lambda seen: "queue of main" in seen.detail, "its place in the queue is told")
        assert queued.phase == "queued"
        assert queued.ran_s == 0.0
        assert queued.detail.startswith("2 of 2 in the queue of main")
        # whatever becomes of us and of its supervisor, Slurm ends it a minute after its time
        assert cluster.ask("squeue", "-h", "-j", at.job, "-o", "%l") == "11:00"
        cluster.ask("scancel", other)
        full()
        up = await at.until_in("up")
        assert up.node in cluster.nodes
        assert (up.ran_s or 0.0) < 60.0, "its wait counts"


@pytest.mark.nightly
async def test_a_queue_of_minutes_is_waited_for(
    cluster: Cluster, full: Callable[[], None], tmp_path: Path
) -> None:
    async with site(cluster, tmp_path, boot_s=30.0) as at:
        await at.create()
        begun = asyncio.get_running_loop().time()
        while asyncio.get_running_loop().time() < begun + 150.0:
            queued = await at.until_in("queued")
            assert queued.ran_s == 0.0
            await asyncio.sleep(5.0)
        full()
        up = await at.until_in("up")
        assert (up.ran_s or 0.0) < 120.0, "its wait counts"


async def test_what_a_job_must_have_is_asked_for_and_attempts_see_the_gpus_that_they_were_given(
    tmp_path: Path,
) -> None:
    """Where nothing else keeps attempts from the GPUs of others, they must be told which are theirs."""
    if (why := missing()) is not None:
        pytest.skip(f"NO TEST OF SLURM: {why}")
    folder = tmp_path / "slurm"
    cluster = Cluster(folder, 1, 4, more="GresTypes=gpu", node="Features=fast Gres=gpu:2")
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
    wishes = {"partition": "lenient", "constraint": "fast", "cpus": 2, "memory_gb": 0.25, "gpus": 1}
    try:
        cluster.start()
        taken = cluster.submit("--gpus-per-node=1")
        until(lambda: cluster.ask("squeue", "-h", "-j", taken, "-o", "%T") == "RUNNING", "it runs")
        async with site(cluster, tmp_path, **wishes) as at:
            channel = at.channel(await at.up())
            asked = cluster.ask("squeue", "-h", "-j", at.job, "-o", "%P %f %C %m %b")
            assert asked == "lenient fast 2 256M gres:gpu:1"
            seen = tmp_path / "seen"
            await at.start(channel, f'echo "$CUDA_VISIBLE_DEVICES" >{seen}')
            assert (await channel.ended(JOB)).exit_code == 0
            assert seen.read_text() == "1\n", "the first one is somebody else's"
    finally:
        cluster.stop()


async def test_a_held_job_waits_and_says_so(
    cluster: Cluster, full: Callable[[], None], tmp_path: Path
) -> None:
    async with site(cluster, tmp_path) as at:
        await at.create()
        cluster.ask("scontrol", "hold", at.job)
        await at.until(lambda seen: seen.phase == "queued" and "held" in seen.detail, "it is held")
        cluster.ask("scontrol", "release", at.job)
        full()
        await at.until_in("up")


async def test_a_job_that_begins_after_slurm_was_asked_is_not_evicted(
    cluster: Cluster, full: Callable[[], None], tmp_path: Path
) -> None:
    async with site(cluster, tmp_path, poll_s=8.0) as at:
        await at.create()
        await at.until(lambda seen: bool(seen.detail), "it is in the queue")
        full()
        seen = await at.until(lambda seen: seen.phase not in ("queued", "pending"), "it has begun")
        assert seen.phase == "up", seen


async def test_steps_that_are_forbidden_say_mailbox_and_a_folder_that_is_not_shared_says_so(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are found by a run, which asks no doctor."""
    tools, alone = tmp_path / "tools", tmp_path / "alone"
    tools.mkdir()
    said = "srun: error: Unable to create step for job 7: Access/permission denied"
    mount = f"mount -t tmpfs none {tmp_path}/shared && exec python3"
    for path, script in (
        (tools / "srun", f"echo '{said}' >&2; exit 1"),
        (alone, f'exec unshare -m sh -c \'{mount} "$@"\' sh "$@"'),
    ):
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
        async with site(cluster, tmp_path) as at:
            with pytest.raises(ChannelError, match='set `reach = "mailbox"` of the place'):
                await at.channel(await at.up()).probe(None)
    async with site(cluster, tmp_path, python=str(alone)) as at:
        await at.create()
        gone = await at.until_in("gone")
        assert gone.detail.startswith("its job ended before it began (failed)")
        assert f"{tmp_path}/shared" in gone.detail  # in whatever words the node has for it


async def test_a_preempted_machine_is_evicted_and_so_is_what_ran(cluster: Cluster, tmp_path: Path) -> None:
    async with site(cluster, tmp_path, sbatch=("--exclusive",)) as at:
        up = await at.up()
        channel = at.channel(up)
        last_words = """echo '{"score": 0}' >"$EVALFLEET_OUT/result.json"; exit 0"""
        await at.start(channel, f"trap {shlex.quote(last_words)} TERM; while :; do sleep 0.05; done")
        ending = asyncio.create_task(channel.ended(JOB))
        urgent = cluster.submit("--partition=urgent", f"--nodelist={up.node}", "--exclusive")
        seen = await at.until_in("evicted")
        assert seen.start == up.start
        assert seen.ran_s is not None
        assert await _told(ending) in ("evicted", "unreachable")
        assert at.why == "evicted"
        cluster.ask("scancel", urgent)


@pytest.mark.nightly  # it waits for the grace time to be over
async def test_what_ends_within_the_grace_time_of_a_preemption_counts_and_the_rest_is_evicted(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Slurm ends the step by which we reach the machine, and the job only when the time is over."""
    async with site(cluster, tmp_path, partition="lenient", sbatch=("--exclusive",)) as at:
        up = await at.up()
        channel, gate = at.channel(up), tmp_path / "gate"
        await at.start(channel, f"until [ -e {gate} ]; do sleep 0.1; done; exit 5")
        second = Job(AttemptId("t.1"), Command(("sleep", "600")), 600.0)
        await channel.start(second)
        ending = asyncio.create_task(channel.ended(second.id))
        urgent = cluster.submit("--partition=urgent", f"--nodelist={up.node}", "--exclusive")
        # it has begun: the job's end is near
        until(lambda: cluster.ask("squeue", "-h", "-j", at.job, "-o", "%L") < "1:00", "the preemption")
        gate.touch()
        ended = await at.channel(up).ended(JOB)
        assert (ended.reason, ended.exit_code) == ("exited", 5)
        assert (await at.until_in("evicted")).start == up.start
        assert await _told(ending) in ("evicted", "unreachable")
        assert at.why_of(second.id) == "evicted"
        cluster.ask("scancel", urgent)


@pytest.mark.parametrize("second", ["begins", "fails"])
async def test_a_requeued_machine_is_gone_and_its_next_start_does_nothing(
    cluster: Cluster, tmp_path: Path, second: str
) -> None:
    """It is not evicted: what runs there could have requeued it."""
    async with site(cluster, tmp_path, sbatch=("--requeue",)) as at:
        channel = at.channel(await at.up())
        await at.start(channel)
        ending = asyncio.create_task(channel.ended(JOB))
        cluster.ask("scontrol", "requeue", at.job)
        assert (await at.until_in("gone")).detail == "Slurm: requeued"
        assert await _told(ending) in ("evicted", "unreachable")
        assert at.why == "evicted"
        if second == "fails":
            for supervisor in tmp_path.glob("shared/*/supervisor-*.pyz"):
                supervisor.unlink()
        cluster.ask("scontrol", "update", f"jobid={at.job}", "StartTime=now")  # else in two minutes
        name = f"evalfleet-{at.home_id}-{MACHINE}"
        # it fails before it starts, too, where Slurm has just revoked its credential
        over = ("COMPLETED", "FAILED") if second == "begins" else ("FAILED",)
        until(lambda: cluster.states()[name] in over, lambda: f"it started again: {cluster.states()}")
        assert (await at.until_in("gone")).ran_s
        late = at.new_place()
        seen = await find(late, MACHINE)
        assert seen is not None
        assert seen.phase == "gone", seen
        await late.close()


async def test_a_machine_that_is_made_again_is_not_the_one_before(cluster: Cluster, tmp_path: Path) -> None:
    """Slurm still shows the job of the first one, which is over and has the same name."""
    async with site(cluster, tmp_path) as at:
        first = await at.up()
        await at.place.delete(MACHINE)
        assert cluster.states()[f"evalfleet-{at.home_id}-{MACHINE}"], "Slurm has forgotten it"
        again = await at.up()
        assert again.start != first.start


async def test_a_job_is_cancelled_at_once_and_not_only_after_the_next_poll(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools, held = tmp_path / "tools", tmp_path / "held"
    tools.mkdir()
    wait = f'case "$*" in *--me*) while [ -e {held} ]; do sleep 0.1; done;; esac'
    (tools / "squeue").write_text(f'#!/bin/sh\n{wait}\nexec {shutil.which("squeue")} "$@"\n')
    (tools / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    async with site(cluster, tmp_path) as at:
        await at.up()
        held.touch()
        deletion = asyncio.create_task(at.place.delete(MACHINE))
        name = f"evalfleet-{at.home_id}-{MACHINE}"
        await until_async(lambda: asyncio.to_thread(lambda: cluster.states()[name] != "RUNNING"), "its end")
        held.unlink()
        await deletion


async def test_a_machine_comes_and_goes_sooner_than_squeue_is_usually_asked(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with site(cluster, tmp_path, poll_s=600.0) as at:
        await asyncio.wait_for(at.up(), PATIENCE_S)
        await asyncio.wait_for(at.place.delete(MACHINE), PATIENCE_S)
        assert await find(at.place, MACHINE) is None


async def test_a_machine_that_somebody_cancels_is_gone(cluster: Cluster, tmp_path: Path) -> None:
    async with site(cluster, tmp_path) as at:
        up = await at.up()
        cluster.ask("scancel", at.job)
        gone = await at.until_in("gone")
        assert gone.detail == "Slurm: cancelled"
        assert (gone.start, gone.node) == (up.start, up.node)
        assert gone.ran_s is not None


async def test_a_machine_cancelled_in_the_queue_is_gone_and_has_never_run(
    cluster: Cluster, full: Callable[[], None], tmp_path: Path
) -> None:
    async with site(cluster, tmp_path) as at:
        await at.create()
        cluster.ask("scancel", at.job)
        gone = await at.until_in("gone")
        assert gone.ran_s == 0.0
        assert "cancelled" in gone.detail


@pytest.mark.nightly  # Slurm takes half a minute to believe it
async def test_the_machine_of_a_node_that_dies_is_evicted(own_cluster: Cluster, tmp_path: Path) -> None:
    async with site(own_cluster, tmp_path) as at:
        up = await at.up()
        await at.start(at.channel(up))
        own_cluster.kill_node(up.node)
        evicted = await at.until_in("evicted")
        assert evicted.start == up.start
        assert evicted.ran_s is not None


async def test_a_drained_node_lets_its_machine_go_on(cluster: Cluster, tmp_path: Path) -> None:
    async with site(cluster, tmp_path) as at:
        up = await at.up()
        channel = at.channel(up)
        cluster.ask("scontrol", "update", f"nodename={up.node}", "state=drain", "reason=test")
        try:
            await at.start(channel, "true")
            assert (await channel.ended(JOB)).exit_code == 0
            assert (await at.until_in("up")).start == up.start
        finally:
            cluster.ask("scontrol", "update", f"nodename={up.node}", "state=resume")


async def test_what_runs_goes_on_while_slurmctld_is_down(own_cluster: Cluster, tmp_path: Path) -> None:
    cluster = own_cluster
    async with site(cluster, tmp_path) as at:
        up = await at.up()
        channel = at.channel(up)
        gate = tmp_path / "gate"
        await at.start(channel, f"until [ -e {gate} ]; do sleep 0.1; done; exit 5")
        cluster.stop_controller()
        try:
            with pytest.raises(PlaceError) as refused:
                await asyncio.wait_for(at.new_place().list("r"), 120)
            assert refused.value.transient
            assert "squeue" in str(refused.value)
            gate.touch()
            assert (await channel.ended(JOB)).exit_code == 5
        finally:
            cluster.start_controller()
        assert (await at.until_in("up")).start == up.start


async def _told(ending: asyncio.Task[Ended]) -> str:
    """How a job ended, if its machine could still tell."""
    try:
        return (await asyncio.wait_for(ending, PATIENCE_S)).reason
    except ChannelError:
        return "unreachable"
