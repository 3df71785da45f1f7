"""A cluster whose nodes share no folder with anybody: mail goes through a bucket, as S3 has them."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from evalfleet.errors import RequestError
from evalfleet.events import MachineAllocated
from evalfleet.mirror import open_bucket, open_objects
from evalfleet.model import Machine, MachineId, Needs
from evalfleet.places.slurm import SlurmPlace, SlurmSettings
from evalfleet.ports import Fence, PlaceContext
from evalfleet.testing.harness import find, first_offer
from standins.s3 import environ_of
from tests.by_hand import started_by_hand
from tests.desk import Desk
from tests.waiting import until, until_async

from .cluster import Cluster
from .test_login import LoginNode, login
from .test_run import command, desk, nothing_left

__all__ = ["login"]  # a fixture
URL = "s3://bucket/mail"
LOOK = """\
export SLURM_CONF={config}
for id in $(squeue -h -o %i); do scontrol write batch_script $id -; done >"$EVALFLEET_OUT/told"
grep -ls 'X-Amz-[S]ignature' /proc/[0-9]*/environ /proc/[0-9]*/cmdline >"$EVALFLEET_OUT/seen"
grep -rls --exclude=told 'X-Amz-[S]ignature' {nodes}/ >>"$EVALFLEET_OUT/seen"
echo '{{"score": 1}}' >"$EVALFLEET_OUT/result.json"
"""


class Bucket(NamedTuple):
    environ: Mapping[str, str]

    def names(self) -> list[str]:
        return asyncio.run(open_objects(URL, self.environ).names(""))


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    with started_by_hand(tmp_path_factory.mktemp("s3"), "s3") as s3:
        yield Bucket(s3.exports)


def away(cluster: Cluster, folder: Path, bucket: Bucket, count: int, settings: str = "") -> Desk:
    """A desk whose nodes cannot see its folder: their Python has nothing there.

    Their own files are in a folder of this desk, as neighbours have some in /tmp.
    """
    alone, nodes = folder.with_name("python-without-folders"), nodes_of(folder)
    nodes.mkdir()
    at = desk(cluster, folder, count, f'mailbox = "{URL}"\npython = "{alone}"\n{settings}')
    script = f'mount -t tmpfs none {folder} && exec env TMPDIR={nodes} python3 "$@"'
    command(alone, f"exec unshare -m sh -c '{script}' sh \"$@\"")
    at.environ.update(bucket.environ)
    return at


def nodes_of(folder: Path) -> Path:
    """Where nodes of the desk with this folder keep what no other computer sees."""
    return folder.with_name("nodes")


def test_a_run_goes_by_bucket_is_resumed_and_leaves_nothing(
    cluster: Cluster, tmp_path: Path, bucket: Bucket
) -> None:
    """Jobs find no token: neither in what Slurm tells of them, nor in processes or files."""
    at = away(cluster, tmp_path / "f", bucket, 4)
    nodes = nodes_of(tmp_path / "f")
    (tmp_path / "f/run.sh").write_text(LOOK.format(config=cluster.config, nodes=nodes))
    run = at.start("run", "b.toml", "--on", "hpc", "--workers", "2", "--name", "r")
    results = tmp_path / "f/results/r"
    until(lambda: list(results.glob("t*/t*.0/result.json")) or None, lambda: f"a first score: {run.said}")
    assert list(nodes.glob("evalfleet-*/evalfleet")), "the nodes have their files elsewhere"
    steps = cluster.ask("squeue", "--steps", "--noheader", "--format=%i").split()
    assert steps, "no job runs"
    assert all(step.endswith(".batch") for step in steps), "a step was made"
    assert not list(tmp_path.glob("f/shared/*/*/jobs")), "the nodes have written into the folder"
    run.kill()
    done = at("resume", "r")
    assert done.code == 0, done
    told = json.loads((results / "results.json").read_text())
    assert (told["scored"], told["broken"], told["status"]) == (4, 0, "done")
    assert len([event for event in at.events() if isinstance(event, MachineAllocated)]) == 2
    assert {path.read_text() for path in results.glob("t*/t*.*/seen")} == {""}, "jobs can read an address"
    scripts = "".join(path.read_text() for path in results.glob("t*/t*.*/told"))
    addresses = re.findall(r'"GET":"([^"]+)"', scripts)
    assert addresses, "Slurm tells jobs of their scripts"
    assert bucket.environ["AWS_SECRET_ACCESS_KEY"] not in scripts
    assert {_status(address) for address in addresses} == {404}, "what it told leads somewhere"
    nothing_left(cluster, tmp_path / "f")
    assert bucket.names() == []
    assert not list(nodes.glob("evalfleet-*/evalfleet"))


@pytest.mark.nightly
def test_a_run_over_ssh_goes_by_bucket_when_the_connection_is_cut(
    login: LoginNode, cluster: Cluster, tmp_path: Path, bucket: Bucket
) -> None:
    """Mail does not go through the login node, which sees nothing but jobs and their records."""
    at = away(cluster, tmp_path / "f", bucket, 2, login.settings())
    toml = tmp_path / "f/evalfleet.toml"
    toml.write_text(toml.read_text().replace('"shared"', '"~/shared"'))
    del at.environ["SLURM_CONF"]
    gate = tmp_path / "gate"
    score = """echo '{"score": 1}' >"$EVALFLEET_OUT/result.json"\n"""
    (tmp_path / "f/run.sh").write_text(
        f"touch {gate}-$EVALFLEET_TASK_ID\nuntil [ -e {gate} ]; do sleep 0.1; done\n{score}"
    )
    run = at.start("run", "b.toml", "--on", "hpc", "--workers", "2", "--name", "r")
    until(lambda: len(list(tmp_path.glob("gate-*"))) == 2, lambda: run.said)
    login.sshd.cut()
    gate.touch()
    assert run.wait().code == 0, run.said
    assert at.results("r")["scored"] == 2
    assert len([event for event in at.events() if isinstance(event, MachineAllocated)]) == 2
    nothing_left(cluster, login.sshd.home)
    assert bucket.names() == []


def _status(asked: str | urllib.request.Request) -> int:
    try:
        with urllib.request.urlopen(asked) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as err:
        with err:
            return err.code


def _place(environ: Mapping[str, str], folder: Path, **settings: Any) -> SlurmPlace:
    context = PlaceContext(folder, "0a1b2c", environ=environ, open_bucket=open_bucket)
    made = SlurmSettings(folder=str(folder / "shared"), poll_s=0.1, **{"mailbox": URL, **settings})
    return SlurmPlace.make("hpc", made, context)


def test_doctor_looks_whether_nodes_reach_the_mailbox(
    cluster: Cluster, tmp_path: Path, bucket: Bucket
) -> None:
    at = away(cluster, tmp_path / "f", bucket, 1)
    done = at("doctor", "hpc")
    assert done.code == 0, done
    assert f"{URL} can be used, with signed addresses for each machine" in done.said, done
    assert f"sees {URL}" in done.said, done
    assert bucket.names() == []
    deaf = tmp_path / "deaf"
    command(deaf, 'exec unshare -n python3 "$@"')  # as on a node without a network
    of = {**bucket.environ, **cluster.environ}

    async def examined(**settings: Any) -> str:
        place = _place(of, tmp_path, **settings)
        return " ".join(map(str, await place.examine(Needs())))

    async def tried(**settings: Any) -> str:
        return " ".join(map(str, await _place(of, tmp_path, **settings).try_out(Needs())))

    assert "there is no such bucket" in asyncio.run(examined(mailbox="s3://absent/mail"))
    told = asyncio.run(tried(python=str(deaf)))
    assert "does not see s3://bucket/mail" in told, told
    assert "by HTTPS" in told
    assert bucket.names() == []


async def test_a_requeued_machine_is_gone_and_its_next_start_does_nothing(
    cluster: Cluster, tmp_path: Path, bucket: Bucket
) -> None:
    """Its mail is in the bucket, and what it was told to take is gone: a second start leaves at once."""
    place = _place({**bucket.environ, **cluster.environ}, tmp_path, sbatch=("--requeue",))
    machine, name = MachineId("r-abc123-1"), "evalfleet-0a1b2c-r-abc123-1"
    await place.create(machine, await first_offer(place), 600.0)

    async def until_in(phase: str) -> Machine:
        async def look() -> Machine | None:
            seen = await find(place, machine)
            return seen if seen is not None and seen.phase == phase else None

        return await until_async(look, phase, look_s=0.2)

    up = await until_in("up")
    job = cluster.job_of(name)
    assert (up.node in cluster.nodes, up.start) == (True, f"{job}.0")
    channel = place.channel(up, Fence("r", 1, 30.0))
    assert await channel.probe(None)
    await channel.close()
    cluster.ask("scontrol", "requeue", job)
    assert (await until_in("gone")).start == up.start
    cluster.ask("scontrol", "update", f"jobid={job}", "StartTime=now")  # else in two minutes
    # it fails, as it must not go on, or Slurm has just revoked its credential
    until(lambda: cluster.states()[name] == "FAILED", lambda: f"it started again: {cluster.states()}")
    assert (await until_in("gone")).ran_s
    await place.delete(machine)
    await place.close()
    assert await asyncio.to_thread(bucket.names) == []


@pytest.mark.parametrize(
    ("settings", "lacking", "words"),
    [
        ({"mailbox": "gs://bucket/mail"}, "", "s3://BUCKET/PREFIX"),
        ({"mailbox": "ftp://x"}, "", "s3://BUCKET/PREFIX"),
        ({"time_limit_s": 8 * 86_400.0}, "", "lower `time_limit_s`"),
        ({}, "AWS_SECRET_ACCESS_KEY", "needs AWS_SECRET_ACCESS_KEY"),
        ({}, "AWS_REGION", "needs AWS_REGION"),
    ],
)
def test_a_mailbox_that_can_be_none_is_refused_in_one_line(
    tmp_path: Path, settings: dict[str, Any], lacking: str, words: str
) -> None:
    environ = {name: value for name, value in environ_of("http://127.0.0.1:1").items() if name != lacking}
    with pytest.raises(RequestError, match=words) as told:
        _place(environ, tmp_path, **settings)
    assert "\n" not in str(told.value)
