"""A cluster whose nodes share no folder with anybody: mail goes through a bucket, as S3 has them."""

from __future__ import annotations

import asyncio
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from evalfleet.channels.s3_mailboxes import S3Mailboxes, s3_bucket
from evalfleet.channels.supervisor.mailbox import HttpPost, aws_headers
from evalfleet.errors import RequestError
from evalfleet.events import MachineAllocated
from evalfleet.mirror import open_objects
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
grep -ls '"si[g]n"' /proc/[0-9]*/environ /proc/[0-9]*/cmdline >"$EVALFLEET_OUT/seen"
grep -rls --exclude=supervisor.pyz '"si[g]n"' {nodes}/ >>"$EVALFLEET_OUT/seen"
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
    assert {path.read_text() for path in results.glob("t*/t*.*/seen")} == {""}, "jobs can read the token"
    scripts = "".join(path.read_text() for path in results.glob("t*/t*.*/told"))
    addresses = re.findall(r'"GET":"([^"]+)"', scripts)
    assert addresses, "Slurm tells jobs of their scripts"
    assert bucket.environ["AWS_SECRET_ACCESS_KEY"] not in scripts
    assert {_status(address) for address in addresses} == {403}, "what it told leads somewhere"
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


async def test_a_token_is_for_its_mailbox_alone(bucket: Bucket, tmp_path: Path) -> None:
    boxes, mine, other = _boxes(bucket, tmp_path), MachineId("r-abc123-1"), MachineId("r-abc123-2")
    await boxes.make(mine, 600.0, 60.0)
    await boxes.make(other, 600.0, 60.0)
    box = json.loads(await boxes.mail(mine).read("mark/way") or b"")
    theirs = boxes.name("0a1b2c", other)

    def use() -> None:
        way: dict[str, Any] = box["way"]
        post = HttpPost(way)
        assert post.create("out/a/1", b"one")
        assert not post.create("out/a/1", b"two"), "it was overwritten"
        assert post.read("out/a/1") == b"one"
        assert post.read("out/a/2") is None
        root = way["url"].rpartition("/0a1b2c/")[0]
        for method, url in (
            ("GET", f"{root}/{theirs}/about"),
            ("PUT", f"{root}/{theirs}/new/0000000001"),
            ("PUT", f"{way['url']}/out/a/1"),  # without the header that makes it create only
            ("DELETE", f"{way['url']}/out/a/1"),
            ("GET", root.rpartition("/")[0]),
        ):
            headers = aws_headers(way["sign"], method, url, b"x" if method == "PUT" else b"")
            data = b"x" if method == "PUT" else None
            assert _status(urllib.request.Request(url, data, headers, method=method)) == 403, (method, url)
        late = HttpPost({**way})
        late.ahead_s = -4000.0  # as on a node whose clock is an hour behind
        assert late.create("out/a/2", b"late")

    await asyncio.to_thread(use)
    for machine in (mine, other):
        await boxes.remove(machine)
    assert await boxes.all() == []


def _boxes(bucket: Bucket, folder: Path) -> S3Mailboxes:
    context = PlaceContext(folder, "0a1b2c")
    objects = open_objects(URL, bucket.environ)
    return S3Mailboxes(s3_bucket(URL, bucket.environ), objects, context, "me", time.time)


def _status(asked: str | urllib.request.Request) -> int:
    try:
        with urllib.request.urlopen(asked) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as err:
        with err:
            return err.code


def _place(environ: Mapping[str, str], folder: Path, **settings: Any) -> SlurmPlace:
    context = PlaceContext(folder, "0a1b2c", environ=environ, open_objects=open_objects)
    made = SlurmSettings(folder=str(folder / "shared"), poll_s=0.1, **{"mailbox": URL, **settings})
    return SlurmPlace.make("hpc", made, context)


def test_doctor_looks_whether_nodes_reach_the_mailbox(
    cluster: Cluster, tmp_path: Path, bucket: Bucket
) -> None:
    at = away(cluster, tmp_path / "f", bucket, 1)
    done = at("doctor", "hpc")
    assert done.code == 0, done
    assert f"{URL} can be used, with a token for each machine" in done.said, done
    assert f"sees {URL}" in done.said, done
    assert bucket.names() == []
    deaf = tmp_path / "deaf"
    command(deaf, 'exec unshare -n python3 "$@"')  # as on a node without a network
    role, of = "arn:aws:iam::123456789012:role/mail", {**bucket.environ, **cluster.environ}

    async def examined(**settings: Any) -> str:
        place = _place(of, tmp_path, **settings)
        return " ".join(map(str, await place.examine(Needs())))

    async def tried(**settings: Any) -> str:
        return " ".join(map(str, await _place(of, tmp_path, **settings).try_out(Needs())))

    assert "with a token for each machine" in asyncio.run(examined(mailbox_role=role))
    told = asyncio.run(examined(mailbox_role="nobody"))
    assert "STS gives no token for one mailbox alone (AccessDenied" in told, told
    assert "name a role in `mailbox_role` of the place" in told
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
        ({"mailbox": "gs://bucket/mail"}, "", "lasts an hour"),
        ({"mailbox": "ftp://x"}, "", "s3://BUCKET/PREFIX"),
        ({"mailbox": "s3:///mail"}, "", "is no bucket's URL"),
        ({"mailbox": "s3://bucket/a b"}, "", "letters, digits"),
        ({"time_limit_s": 40 * 3600.0}, "", "lower `time_limit_s`"),
        ({"mailbox_role": "arn", "time_limit_s": 13 * 3600.0}, "", "a token of S3's lasts 43200 s"),
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
