"""Files of running jobs, followed over real supervisors: what is added is told, once, in order and masked."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import signal
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import pytest

from evalfleet.channels.supervisor.follow import MOST
from evalfleet.model import AttemptId, Command, Job, MachineId, Needs
from evalfleet.places.local import LocalPlace, LocalSettings
from evalfleet.ports import Channel, Fence
from tests.waiting import PATIENCE_S, until

from .test_supervisor import UNTIL_GO, Host, Peer, hosting

VALUE = "s3cret-value-of-mine"
JOB = AttemptId("a.0")


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with hosting(tmp_path / "machine") as made:
        yield made


def follow(peer: Peer, job: str, path: str = "log", offset: int = 0, number: int = 1) -> dict[str, Any]:
    return peer.ask("follow", job=job, path=path, offset=offset, follower=number)


def piece(peer: Peer, number: int = 1) -> dict[str, Any]:
    """The next one of a follower."""
    while True:
        for message in peer.pushed:
            if message.get("push") == "piece" and message["follower"] == number:
                peer.pushed.remove(message)
                return {**message, "data": base64.b64decode(message["data"])}
        peer.pushed.append(peer.read())


def to_the_end(peer: Peer, number: int = 1) -> list[dict[str, Any]]:
    pieces = [piece(peer, number)]
    while not pieces[-1]["over"]:
        pieces.append(piece(peer, number))
    return pieces


def test_what_is_there_comes_at_once_and_the_rest_as_it_is_written(host: Host) -> None:
    peer, looker = host.peer(), host.peer(run=None)
    peer.shell("a.0", "echo before; " + UNTIL_GO + "echo after")
    until(lambda: (host.job("a.0") / "log").read_text() == "before\n")
    assert follow(looker, "a.0", offset=2)["state"] == "following"
    first = piece(looker)
    assert (first["offset"], first["data"], first["at_end"], first["over"]) == (2, b"fore\n", True, False)
    host.go("a.0")
    rest = to_the_end(looker)
    assert b"".join(each["data"] for each in rest) == b"after\n"
    assert rest[0]["offset"] == 7
    assert follow(looker, "nobody.0")["state"] == "unknown"


def test_artefacts_are_followed_and_one_that_is_not_there_yet(host: Host) -> None:
    peer = host.peer()
    peer.shell("a.0", UNTIL_GO + "mkdir $EVALFLEET_OUT/d; echo '{\"n\": 1}' >$EVALFLEET_OUT/d/traj.jsonl")
    follow(peer, "a.0", "out/d/traj.jsonl")
    assert piece(peer)["data"] == b""
    host.go("a.0")
    assert b"".join(each["data"] for each in to_the_end(peer)) == b'{"n": 1}\n'


@pytest.mark.parametrize("path", ["../../key", "/etc/passwd", "out/../../../key", "", ".", "out//x", "a\0b"])
def test_a_path_that_leads_out_of_the_jobs_folder_is_refused(host: Host, path: str) -> None:
    peer = host.peer()
    peer.shell("a.0", UNTIL_GO)
    assert follow(peer, "a.0", path)["error"] == "bad"


@pytest.mark.parametrize("made", ["ln -s /etc/passwd x", "mkfifo x", "mkdir x", "ln -s /etc y; x=y/passwd"])
def test_what_a_job_made_instead_of_a_file_is_not_read(host: Host, made: str) -> None:
    peer = host.peer()
    peer.shell("a.0", f"cd $EVALFLEET_OUT; {made}; touch made; {UNTIL_GO}")
    until((host.job("a.0") / "out" / "made").exists)
    follow(peer, "a.0", "out/y/passwd" if "y" in made.split()[-1] else "out/x")
    host.go("a.0")
    assert b"".join(each["data"] for each in to_the_end(peer)) == b""


def test_a_log_that_is_cut_leaves_a_gap_and_its_end_comes(host: Host) -> None:
    peer = host.peer()
    peer.shell(
        "a.0", UNTIL_GO + "seq 100000; echo last; " + UNTIL_GO.replace("/go", "/on"), log_cap_bytes=20_000
    )
    host.go("a.0")
    log = host.job("a.0") / "log"
    until(lambda: log.stat().st_size == 588_895 + 5 and log.stat().st_blocks * 512 < 40_000, "the cut")
    follow(peer, "a.0")
    text, position, gaps = b"", 0, 0
    while not text.endswith(b"last\n"):
        new = piece(peer)
        gaps += new["offset"] > position
        position = new["offset"] + len(new["data"])
        text += new["data"]
    assert gaps >= 1
    assert text.startswith(b"1\n2\n3\n")
    assert b"\0" not in text, "what was cut is left out, not told as zeros"
    follow(peer, "a.0", offset=position - 5, number=2)
    (host.job("a.0") / "out" / "on").touch()
    assert b"".join(each["data"] for each in to_the_end(peer)) == b""
    assert b"".join(each["data"] for each in to_the_end(peer, 2)) == b"last\n"
    follow(peer, "a.0", offset=position - 12, number=3)
    assert b"".join(each["data"] for each in to_the_end(peer, 3)) == b"100000\nlast\n"[-12:]


def test_one_that_listens_no_more_costs_the_supervisor_nothing_and_delays_no_job(host: Host) -> None:
    deaf, peer = host.peer(run=None), host.peer()
    peer.shell("a.0", f"head -c 30000000 /dev/zero; {UNTIL_GO}")
    for number in range(MOST):
        deaf.send("follow", job="a.0", path="log", offset=0, follower=number)
    assert peer.run("b.0", "echo hi")["exit_code"] == 0
    status = Path(f"/proc/{host.pid}/status").read_text()
    kilobytes = int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
    assert kilobytes < 100_000, "it holds what nobody takes"
    host.go("a.0")
    peer.end("a.0")


def test_no_more_files_than_agreed_and_none_after_unfollow(host: Host) -> None:
    peer = host.peer()
    peer.shell("a.0", UNTIL_GO + "echo x")
    for number in range(MOST):
        assert follow(peer, "a.0", number=number)["state"] == "following"
    assert follow(peer, "a.0", number=MOST)["error"] == "bad"
    for number in range(1, MOST):
        peer.ask("unfollow", follower=number)
    host.go("a.0")
    to_the_end(peer, 0)
    pushed = [each["follower"] for each in peer.pushed if each.get("push") == "piece" and each["over"]]
    assert pushed == []


def test_who_looks_on_is_no_controller(host: Host) -> None:
    """A `logs -f` that is left open must not keep alive what nobody controls."""
    peer, looker = host.peer(), host.peer(run=None)
    peer.shell("a.0", "sleep 600", lease_s=1, grace_s=0)
    peer.close()
    follow(looker, "a.0")
    while "over" not in (new := looker.ask("ping")) and not any(each.get("over") for each in looker.pushed):
        assert "error" not in new
    assert host.peer().ask("how", job="a.0")["reason"] == "lease"


# -- over a channel ----------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def local(tmp_path: Path) -> AsyncGenerator[tuple[Path, Channel, Channel]]:
    """A machine's folder, its controller's channel, and another process's."""
    secrets = {"KEY": VALUE}
    place = LocalPlace("local", LocalSettings(), tmp_path, secrets)
    machine = MachineId("run-0001")
    (offer,) = await place.offers(Needs())
    await place.create(machine, offer, 600.0)
    (seen,) = await place.list("run")
    channel = place.channel(seen, Fence("run", 1, PATIENCE_S))
    looker = place.channel(seen, Fence("run", 0, PATIENCE_S, looks_on=True))
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield Path(seen.address), channel, looker
    finally:
        await looker.close()
        await channel.close()
        await place.delete(machine)


def shell(script: str) -> Job:
    return Job(JOB, Command(("sh", "-c", script), secrets=("KEY",)), 300.0)


def test_a_secret_across_pieces_and_a_supervisor_that_dies_leave_no_trace(tmp_path: Path) -> None:
    lines = 200
    script = (
        f'i=0; while [ $i -lt {lines} ]; do printf "%s s3cret-" $i; sleep 0.01; echo "value-of-mine $KEY"; '
        "i=$((i+1)); done"
    )

    async def main() -> None:
        async with local(tmp_path) as (directory, channel, looker):
            await channel.start(shell(script))
            shown, position, killed = b"", 0, 0
            async for piece in looker.follow(JOB):
                assert piece.offset == position
                position = piece.next
                shown += piece.data
                if shown.count(b"\n") > 50 * (killed + 1) and killed < 2:
                    killed += 1
                    os.kill(int((directory / "supervisor.pid").read_text().split()[0]), signal.SIGKILL)
            assert killed == 2
            assert (await channel.ended(JOB)).exit_code == 0
            assert shown.decode().splitlines() == [f"{n} *** ***" for n in range(lines)]

    asyncio.run(main())


def test_following_what_has_ended_or_never_was_ends(tmp_path: Path) -> None:
    async def main() -> None:
        async with local(tmp_path) as (_, channel, looker):
            assert [piece async for piece in looker.follow(JOB)] == []
            await channel.start(shell("echo $KEY"))
            await channel.ended(JOB)
            pieces = [piece async for piece in looker.follow(JOB)]
            assert b"".join(piece.data for piece in pieces) == b"***\n"
            assert [piece async for piece in channel.follow(JOB, offset=pieces[-1].next)][-1].data == b""

    asyncio.run(main())
