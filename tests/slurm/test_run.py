"""`evalfleet run ... --on hpc` on a real Slurm."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from evalfleet.errors import PlaceError
from evalfleet.events import AttemptEnded, MachineAllocated, MachineCondemned, MachineQueued, StopRequested
from evalfleet.model import Broken, Cause, MachineId, Needs, Scored
from evalfleet.places.slurm import SlurmPlace, SlurmSettings
from evalfleet.ports import PlaceContext
from evalfleet.testing.harness import first_offer
from tests.desk import Desk
from tests.e2e.harness import Fleet, task
from tests.e2e.metered import PRICES, metered, serving_models
from tests.waiting import PATIENCE_S, until

from .cluster import Cluster

BENCH = """\
name = "b"
tasks = "tasks.jsonl"
command = ["sh", "run.sh"]
files = ["run.sh"]
timeout_s = 60
"""
SCRIPT = """\
sleep 0.5
echo '{"score": 1}' >"$EVALFLEET_OUT/result.json"
"""


def desk(cluster: Cluster, folder: Path, count: int, settings: str = "") -> Desk:
    folder.mkdir(exist_ok=True)
    (folder / "b.toml").write_text(BENCH)
    (folder / "run.sh").write_text(SCRIPT)
    (folder / "tasks.jsonl").write_text("".join(json.dumps({"id": f"t{n}"}) + "\n" for n in range(count)))
    (folder / "evalfleet.toml").write_text(
        f'[places.hpc]\nkind = "slurm"\nfolder = "shared"\npoll_s = 0.2\n{settings}'
    )
    return Desk(folder, folder / "results", dict(cluster.environ))


def nothing_left(cluster: Cluster, folder: Path) -> None:
    assert not cluster.ask("squeue", "-h"), "jobs are left"
    assert not list(folder.glob("shared/*/*")), "files of machines are left"


def test_a_killed_controller_is_resumed_and_nothing_is_left(cluster: Cluster, tmp_path: Path) -> None:
    at = desk(cluster, tmp_path / "f", 12, "usd_per_hour = 3.6\n")
    run = at.start("run", "b.toml", "--on", "hpc", "--workers", "2", "--name", "r", "--budget", "90")
    results = tmp_path / "f/results/r"
    until(lambda: list(results.glob("t*/t*.0/result.json")) or None, lambda: f"a first score: {run.said}")
    run.kill()
    done = at("resume", "r")
    assert done.code == 0, done
    told = json.loads((results / "results.json").read_text())
    assert (told["scored"], told["broken"], told["status"]) == (12, 0, "done")
    events = at.events()
    begun = [event for event in events if isinstance(event, MachineAllocated)]
    assert len(begun) == 2, "the second controller did not take the machines over"
    assert all(event.node in cluster.nodes for event in begun)
    assert 0 < told["cost"]["machines_usd"] < 1
    nothing_left(cluster, tmp_path / "f")


def test_where_steps_are_forbidden_a_run_goes_by_mailbox_and_is_resumed(
    cluster: Cluster, tmp_path: Path
) -> None:
    at = desk(cluster, tmp_path / "f", 6, 'reach = "mailbox"\n')
    run = at.start("run", "b.toml", "--on", "hpc", "--workers", "2", "--name", "r")
    results = tmp_path / "f/results/r"
    until(lambda: list(results.glob("t*/t*.0/result.json")) or None, lambda: f"a first score: {run.said}")
    steps = cluster.ask("squeue", "--steps", "--noheader", "--format=%i").split()
    assert steps, "no job runs"
    assert all(step.endswith(".batch") for step in steps), "a step was made"
    run.kill()
    done = at("resume", "r")
    assert done.code == 0, done
    told = json.loads((results / "results.json").read_text())
    assert (told["scored"], told["broken"], told["status"]) == (6, 0, "done")
    events = at.events()
    assert len([event for event in events if isinstance(event, MachineAllocated)]) == 2, events
    nothing_left(cluster, tmp_path / "f")


SABOTAGE = {
    "folder": 'rm -rf "$EVALFLEET_MACHINE"; sleep 60',
    "requeue": "$own requeue=1; $slurm scontrol requeue $job; sleep 60",
    "mark": """echo '{"start": "1.0", "node": "n1", "at": 1}' >"$EVALFLEET_MACHINE/start"; sleep 60""",
    "restarted": 'touch "$EVALFLEET_MACHINE/restarted"; sleep 60',
}


@pytest.mark.parametrize("way", SABOTAGE)
def test_a_task_that_ends_its_own_machine_is_forgiven_once(
    cluster: Cluster, tmp_path: Path, way: str
) -> None:
    at = desk(cluster, tmp_path / "f", 1)
    slurm = f"env SLURM_CONF={cluster.config}"
    job = 'job=$(cat "$EVALFLEET_MACHINE/job")'
    own = f'own="{slurm} scontrol update jobid=$job"'
    (tmp_path / "f/run.sh").write_text(f'slurm="{slurm}"; {job}; {own}\n{SABOTAGE[way]}\n')
    done = at("run", "b.toml", "--on", "hpc", "--name", "r", "--attempts", "1")
    assert done.code == 1, done
    ended = [event.outcome for event in at.events() if isinstance(event, AttemptEnded)]
    assert [outcome.cause for outcome in ended if isinstance(outcome, Broken)] == 2 * [Cause.MACHINE_LOST]
    nothing_left(cluster, tmp_path / "f")


def test_a_supervisor_that_a_task_has_changed_is_written_again(cluster: Cluster, tmp_path: Path) -> None:
    """The machines of a home share its file, and a task is the same user."""
    at = desk(cluster, tmp_path / "f", 1)
    mark = tmp_path / "mark"
    forge = f"for f in ../../../../supervisor-*.pyz; do [ -e $f ] && echo x >$f && touch {mark}; done"
    spoil = f'[ -e {mark} ] || {{ {forge}; rm -rf "$EVALFLEET_MACHINE"; sleep 60; }}'
    (tmp_path / "f/run.sh").write_text(f"{spoil}\n{SCRIPT}")
    done = at("run", "b.toml", "--on", "hpc", "--name", "r")
    assert done.code == 0, done
    assert mark.exists(), "nothing was changed"
    nothing_left(cluster, tmp_path / "f")


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_a_mailbox_that_is_away_for_ten_minutes_ends_nothing_that_runs(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The attempt ends meanwhile; the next one begins when the mailbox is back."""
    at = desk(cluster, tmp_path / "f", 2, 'reach = "mailbox"\n')
    (tmp_path / "f/run.sh").write_text(f"sleep 30\n{SCRIPT}")
    run = at.start("run", "b.toml", "--on", "hpc", "--name", "r")
    (pid,) = until(lambda: list(tmp_path.glob("f/shared/*/*/jobs/t0.0/pid")), lambda: run.said)
    mail = pid.parents[2] / "mail"
    mail.rename(mail.with_name("away"))
    time.sleep(600.0)
    assert run.lives, run.said
    mail.with_name("away").rename(mail)
    assert run.wait().code == 0, run.said
    ended = [event for event in at.events() if isinstance(event, AttemptEnded)]
    assert len(ended) == 2, "an attempt was ended"
    assert all(isinstance(event.outcome, Scored) for event in ended)
    assert len([event for event in at.events() if isinstance(event, MachineAllocated)]) == 1
    nothing_left(cluster, tmp_path / "f")


@pytest.mark.nightly
def test_no_task_is_started_that_would_outlast_its_job_and_the_rest_goes_to_a_new_one(
    cluster: Cluster, tmp_path: Path
) -> None:
    at = desk(cluster, tmp_path / "f", 12, "time_limit_s = 130\nboot_s = 10\n")
    (tmp_path / "f/run.sh").write_text(f"sleep 4\n{SCRIPT}")
    toml = tmp_path / "f/b.toml"
    toml.write_text(toml.read_text().replace("timeout_s = 60", "timeout_s = 15"))
    done = at("run", "b.toml", "--on", "hpc", "--workers", "1", "--name", "r")
    assert done.code == 0, done
    ended = [event for event in at.events() if isinstance(event, AttemptEnded)]
    assert len(ended) == 12, "an attempt was ended with its job"
    assert all(isinstance(event.outcome, Scored) for event in ended)
    assert len([event for event in at.events() if isinstance(event, MachineAllocated)]) > 1
    nothing_left(cluster, tmp_path / "f")


def test_squeue_is_asked_once_for_all_machines_and_no_more_often_than_poll_s(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools, asked = tmp_path / "tools", tmp_path / "asked"
    tools.mkdir()
    real = shutil.which("squeue")
    command(tools / "squeue", f'case "$*" in *--me*) date +%s.%N >>{asked};; esac; exec {real} "$@"')
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    poll_s, machines = 1.5, [MachineId(f"r-abc123-{number}") for number in range(1, 4)]
    settings = SlurmSettings(folder=str(tmp_path / "shared"), poll_s=poll_s)
    place = SlurmPlace.make("hpc", settings, PlaceContext(tmp_path, "a5ced0", environ=cluster.environ))

    async def live() -> None:
        offer = await first_offer(place)
        await asyncio.gather(*(place.create(machine, offer, 600.0) for machine in machines))
        patience = time.monotonic() + PATIENCE_S
        seen = await place.list("r")
        while not all(machine.phase == "up" for machine in seen):
            assert time.monotonic() < patience, seen
            assert not any(machine.phase in ("gone", "evicted") for machine in seen), seen
            _, *_, seen = await asyncio.gather(*(place.list("r") for _ in range(20)))
        await asyncio.gather(*(place.delete(machine) for machine in machines))
        await place.close()

    asyncio.run(live())
    times = [float(line) for line in asked.read_text().split()]
    # a process may be slow to start, but the next one is asked for so much later
    assert all(later - earlier > 0.5 * poll_s for earlier, later in itertools.pairwise(times)), times
    assert times[-1] - times[0] > 0.9 * poll_s * (len(times) - 1) - 1.0, times
    assert SlurmSettings(folder="shared").poll_s == 10.0, "the default is not kind to a cluster"


def test_a_budget_that_is_used_up_cancels_the_jobs_and_says_why(cluster: Cluster, tmp_path: Path) -> None:
    """Models and machines share it: a task needs 5 calls of $0.000796, and after two tasks little is left.
    The jobs could have run for hours."""
    fleet = Fleet.at(tmp_path / "f")
    fleet.environ.update(cluster.environ)
    hpc = '[places.hpc]\nkind = "slurm"\nfolder = "shared"\npoll_s = 0.2\nusd_per_hour = 0.0001\n'
    with serving_models(tmp_path) as models:
        many = [task(f"a_{n}", "[call() for _ in range(5)]; score(1)") for n in range(1, 6)]
        metered(fleet, models, many, PRICES + hpc)
        done = fleet.run("--on", "hpc", "--workers", "2", "--budget", "0.0104", "--task-budget", "0.0041")
        assert done.code == 3, done
        spent_usd = models.usd()
    results = fleet.results()
    assert results["scored"] in (1, 2)
    assert (results["broken"], results["unrun"]) == (0, 5 - results["scored"])
    (stop,) = fleet.recorded(StopRequested)
    assert stop.reason == "budget"
    assert "the budget of $0.0104 does not pay another attempt" in stop.detail
    assert results["stop"]["detail"] == stop.detail
    assert 0 < results["cost"]["machines_usd"] + spent_usd <= 0.0104 + 2 * 0.0008
    begun = fleet.recorded(MachineAllocated)
    states = cluster.states()
    ended = {state for name, state in states.items() if name.endswith(tuple(it.machine for it in begun))}
    assert ended == {"CANCELLED"}, states
    nothing_left(cluster, tmp_path / "f")


def test_what_another_home_has_left_is_shown_and_reaped(cluster: Cluster, tmp_path: Path) -> None:
    gone = desk(cluster, tmp_path / "f", 1)
    (tmp_path / "f/run.sh").write_text("sleep 600\n")
    run = gone.start("run", "b.toml", "--on", "hpc", "--name", "r")
    until(lambda: list(tmp_path.glob("f/shared/*/*/jobs/t0.0/pid")), lambda: run.said)
    run.kill()
    at = Desk(tmp_path / "f", tmp_path / "other", dict(cluster.environ))
    (seen,) = at.done("machines", "--json").json
    assert seen["machine"].startswith("r-"), seen
    assert "(running)" in str(seen), "its job is not shown"
    assert "nothing of ours has expired" in at("reap", "--yes").said, "what is in use is no leftover"
    cluster.ask("scancel", cluster.ask("squeue", "-h", "-o", "%i"))
    until(lambda: not cluster.ask("squeue", "-h"), "its end")
    assert at("reap", "--yes").code == 0
    assert at.done("machines", "--json").json == []
    nothing_left(cluster, tmp_path / "f")


def test_a_machine_that_waits_too_long_is_given_up(cluster: Cluster, tmp_path: Path) -> None:
    jobs = [cluster.submit("--exclusive") for _ in cluster.nodes]
    running = ("squeue", "-h", "--states=RUNNING", "-o", "%i")
    until(lambda: len(cluster.ask(*running).split()) == len(jobs), "the cluster is full")
    at = desk(cluster, tmp_path / "f", 1, "queue_s = 1\nexpected_queue_s = 60\n")
    (offer,) = at.done("run", "b.toml", "--on", "hpc", "--dry-run", "--json").json["offers"]
    assert (offer["queue_s"], offer["max_queue_s"]) == (60.0, 1.0), "what alerts go by; what ends the wait"
    run = at.start("run", "b.toml", "--on", "hpc", "--name", "r")
    try:
        given_up = at.recorded(MachineCondemned)[0]
        run.interrupt()
        run.wait()
    finally:
        cluster.ask("scancel", *jobs)
    assert given_up.detail.startswith("it waited for 1 s in the queue (queue_s)")
    assert given_up.cause is Cause.PROVISIONING
    waits = [event.detail for event in at.events() if isinstance(event, MachineQueued)]
    assert any("of 1 in the queue of main" in detail for detail in waits), waits
    until(lambda: not cluster.ask("squeue", "-h"), "the jobs have gone")
    nothing_left(cluster, tmp_path / "f")


def test_what_slurm_would_never_take_is_told_in_one_line_before_anything_is_queued(
    cluster: Cluster, tmp_path: Path
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    failed = "sbatch: error: Batch job submission failed: Invalid"
    account = f"*account=nope*) echo '{failed} account or account/partition combination specified'"
    qos = f"*qos=nope*) echo '{failed} qos specification'"
    real = f'*) exec {shutil.which("sbatch")} "$@"'  # a cluster with accounting, in Slurm's own words
    command(tools / "sbatch", f"case $* in {account};; {qos};; {real};; esac >&2; exit 1")
    never: dict[str, tuple[dict[str, Any], str]] = {
        "invalid partition": ({"partition": "nope"}, "partition"),
        "may run for 600 s": ({"partition": "short"}, "time_limit_s"),
        "feature": ({"constraint": "nope"}, "constraint"),
        "generic resource": ({"gpus": 1}, "gpus"),
        "node configuration": ({"cpus": 99}, "cpus"),
        "account": ({"account": "nope"}, "account"),
        "qos": ({"qos": "nope"}, "qos"),
    }
    environ = {**cluster.environ, "PATH": f"{tools}:{os.environ['PATH']}"}

    async def refusal_of(settings: dict[str, Any]) -> str:
        context = PlaceContext(tmp_path, "home", environ=environ)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATH", environ["PATH"])
            place = SlurmPlace.make("hpc", SlurmSettings(folder=str(tmp_path), **settings), context)
            with pytest.raises(PlaceError) as refused:
                await place.offers(Needs())
        assert not refused.value.transient
        return str(refused.value)

    for words, (settings, setting) in never.items():
        told = asyncio.run(refusal_of(settings))
        assert words in told.lower(), told
        assert f"change `{setting}" in told
        assert "\n" not in told
    for line, parts in {
        'partition = "nope"': ("invalid partition", "change `partition`"),
        "time_limit_s = 120": ("machines of hpc end after 120 s", "300 s to start", "may take 60 s"),
    }.items():
        done = desk(cluster, tmp_path / "f", 1, f"{line}\n")("run", "b.toml", "--on", "hpc")
        assert done.code == 4, done
        assert all(word in done.said for word in parts), done
        assert len(done.err.strip().splitlines()) <= 1, done
    nothing_left(cluster, tmp_path / "f")


def test_doctor_looks_at_the_cluster_and_leaves_nothing(cluster: Cluster, tmp_path: Path) -> None:
    at = desk(cluster, tmp_path / "f", 1)
    done = at("doctor", "hpc")
    assert done.code == 0, done
    assert "commands: slurm" in done.said
    assert "to start at" in done.said, "it does not say when a job would start"
    assert "files can be made, linked and locked there" in done.said
    assert "steps: srun reaches" in done.said
    assert f"sees {tmp_path}/f/shared" in done.said
    assert "python: python3 of" in done.said
    assert not (tmp_path / "f/shared").exists(), "doctor has left the folder"
    alone, late, refused = (tmp_path / name for name in ("alone", "late", "refused"))
    mount = f"mount -t tmpfs none {tmp_path}/f && exec python3"
    command(alone, f'exec unshare -m sh -c \'{mount} "$@"\' sh "$@"')
    behind = "import time; t = time.time; time.time = lambda: t() - 900"
    command(late, f'shift 2; exec python3 -c "{behind}; $1" "$2"')
    refused.mkdir()
    said = "srun: error: Unable to create step for job 7: Access/permission denied"
    command(refused / "srun", f"echo '{said}' >&2; exit 1")
    bad = at("doctor", "hpc", env={"PATH": f"{refused}:{os.environ['PATH']}"})
    assert bad.code != 0
    assert 'set `reach = "mailbox"` of the place' in bad.said, bad

    async def examined(**settings: Any) -> str:
        context = PlaceContext(tmp_path, "home", environ=cluster.environ)
        place = SlurmPlace.make("hpc", SlurmSettings(folder=str(tmp_path / "f/shared"), **settings), context)
        checks = [*await place.examine(Needs()), *await place.try_out(Needs())]
        return " ".join(f"{check.verdict}: {check}" for check in checks)

    for settings, verdict, words in (
        ({"partition": "nope"}, "bad", "change `partition` of the place"),
        ({"python": "/no/python"}, "bad", "nodes have no /no/python"),
        ({"python": str(alone)}, "bad", "it is not shared"),
        ({"python": str(late)}, "warn", "s behind"),
    ):
        told = asyncio.run(examined(**settings))
        assert words in told, told
        assert f"{verdict}: " in told, told
    nothing_left(cluster, tmp_path / "f")


def command(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_a_cluster_whose_commands_are_not_here_is_told_in_one_line(tmp_path: Path, cluster: Cluster) -> None:
    at = desk(cluster, tmp_path / "f", 1)
    done = at("run", "b.toml", "--on", "hpc", env={"PATH": str(tmp_path)})
    done.failed(4, "sbatch cannot be run", "login node")
