"""The machine's key: who does not show it to the supervisor gets nothing from it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from evalfleet.channels.supervisor.clients import FIRST_LINE_CAP, MOST_STRANGERS
from evalfleet.channels.supervisor.files import make_key, read_key
from evalfleet.channels.supervisor.machine import open_socket
from evalfleet.channels.supervisor.server import OPS
from evalfleet.errors import MachineForged
from evalfleet.model import MachineId, Needs
from evalfleet.places.local import LocalPlace, LocalSettings
from evalfleet.ports import Fence
from tests.waiting import PATIENCE_S, until

from .test_supervisor import UNTIL_GO, Host, hosting

REQUESTS: dict[str, dict[str, Any]] = {
    "hello": {"protocols": [1], "run": "run", "epoch": 999},
    "start": {"job": {"id": "forged.0", "argv": ["touch", "forged"], "timeout_s": 60}},
    "stop": {"job": "a.0"},
    "expire": {"seconds": 1e9},
    "leave": {"run": "run", "epoch": 999, "now": True},
    "forget": {"jobs": ["a.0"]},
    "watch": {"url": "http://127.0.0.1/", "headers": {}, "match": {}},
    "how": {"job": "a.0"},
    "fetch": {"job": "a.0", "bytes": 1, "files": 1},
    "put": {"digest": "d"},
}


@pytest.fixture
def host(tmp_path: Path) -> Any:
    with hosting(tmp_path / "machine") as made:
        yield made


def said_to(directory: Path, data: bytes) -> bytes:
    """All that the supervisor says to one who sends this, until it hangs up."""
    with open_socket(directory, PATIENCE_S) as sock:
        sock.sendall(data)
        heard = b""
        while chunk := sock.recv(1 << 16):
            heard += chunk
    return heard


def files_of(directory: Path) -> dict[str, bytes]:
    names = ("epoch", "expiry", "expired", "notices", "boot", "cleared", "forgotten")
    return {name: (directory / name).read_bytes() for name in names if (directory / name).exists()}


@pytest.mark.parametrize("op", OPS)
def test_an_agent_without_the_key_gets_nothing_and_changes_nothing(host: Host, op: str) -> None:
    peer = host.peer()
    peer.ask("expire", seconds=600)
    peer.shell("a.0", UNTIL_GO + "exit 7")
    before, pid = files_of(host.directory), host.pid
    for key in ({}, {"key": ""}, {"key": "0" * 64}, {"key": None}, {"key": [1]}):
        answer = said_to(
            host.directory, json.dumps({"op": op, "n": 5, **REQUESTS.get(op, {}), **key}).encode() + b"\n"
        )
        assert json.loads(answer) == {"n": 5, "error": "key", "detail": "that is not this machine's key"}
    assert "error" not in peer.ask("ping"), "the controller is still obeyed"
    host.go("a.0")
    assert peer.end("a.0")["exit_code"] == 7
    assert (files_of(host.directory), host.pid) == (before, pid)


def test_what_follows_a_wrong_key_in_one_packet_is_not_obeyed(host: Host) -> None:
    key = read_key(str(host.directory))
    wrong, right = {"op": "ping", "n": 1}, {"op": "expire", "n": 2, "seconds": 1, "key": key}
    answer = said_to(host.directory, b"".join(json.dumps(each).encode() + b"\n" for each in (wrong, right)))
    assert json.loads(answer)["error"] == "key"
    assert not (host.directory / "expiry").exists()


def test_a_stranger_cannot_make_the_supervisor_keep_a_long_line(host: Host) -> None:
    answer = json.loads(said_to(host.directory, b"x" * (FIRST_LINE_CAP + 1)))
    assert answer["error"] == "garbage"


def test_connections_without_the_key_do_not_use_up_the_supervisors_own(host: Host) -> None:
    peer = host.peer()
    strangers: list[socket.socket] = []

    def knock() -> bool:
        try:
            strangers.append(open_socket(host.directory, PATIENCE_S))
        except BlockingIOError:  # faster than the supervisor can look
            return False
        return len(strangers) >= 3 * MOST_STRANGERS

    try:
        until(knock, "so many connections")
        fds = Path(f"/proc/{host.pid}/fd")
        until(lambda: strangers[0].recv(1) == b"", "the oldest is dropped")
        assert "error" not in peer.ask("ping")
        assert "error" not in host.peer().ask("ping"), "and another controller gets in"
        assert sum(os.readlink(fd).startswith("socket:") for fd in fds.iterdir()) < MOST_STRANGERS + 10
    finally:
        for stranger in strangers:
            stranger.close()


def test_the_key_is_its_owners_alone_and_stays_when_supervisors_change(host: Host) -> None:
    file = host.directory / "key"
    assert file.stat().st_mode & 0o777 == 0o600
    key = read_key(str(host.directory))
    assert len(bytes.fromhex(key)) == 32
    host.kill()
    host.supervise()
    assert read_key(str(host.directory)) == key
    assert "error" not in host.peer().greeting


def test_the_first_key_stays_and_one_that_is_none_is_not_read(tmp_path: Path) -> None:
    assert read_key(str(tmp_path)) == ""
    assert make_key(str(tmp_path), "ab12") == "ab12"
    assert make_key(str(tmp_path), "cd34") == "ab12"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key"]
    (tmp_path / "key").write_text("ok nonsense\n")
    assert read_key(str(tmp_path)) == ""


def test_a_machine_whose_key_was_changed_is_no_longer_ours(tmp_path: Path) -> None:
    async def main() -> None:
        place = LocalPlace("local", LocalSettings(), tmp_path)
        machine = MachineId("run-0001")
        (offer,) = await place.offers(Needs())
        await place.create(machine, offer, 600.0)
        (seen,) = await place.list("run")
        (Path(seen.address) / "key").write_text("00\n")
        channel = place.channel(seen, Fence("run", 1, PATIENCE_S))
        try:
            with pytest.raises(MachineForged, match="not the one that its supervisor knows"):
                await channel.probe(None)
        finally:
            await channel.close()
            await place.delete(machine)
        assert await place.list("run") == ()

    asyncio.run(main())


def test_a_job_of_another_user_cannot_connect_nor_read_the_key(host: Host) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    pid = os.fork()
    if pid == 0:
        code = 0
        try:
            os.setuid(65534)
            for attempt in (
                lambda: (host.directory / "key").read_text(),
                lambda: socket.socket(socket.AF_UNIX).connect(str(host.directory / "supervisor.sock")),
                lambda: (host.directory / "expiry").write_text("{}"),
            ):
                try:
                    attempt()
                    code = 1
                except PermissionError:
                    pass
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("seconds", ["1e999", "-1e999", "NaN", "1e300", '"soon"', "null", "[]"])
def test_an_absurd_life_is_refused_or_bounded(host: Host, seconds: str) -> None:
    peer = host.peer()
    peer.ask("expire", seconds=600)
    request = f'{{"op": "expire", "n": 77, "seconds": {seconds}}}\n'
    peer.file.write(request.encode())
    peer.file.flush()
    answer = peer.answer(77)
    expiry = json.loads((host.directory / "expiry").read_text())
    years = (expiry["wall"] - time.time()) / (366 * 86400)
    assert years < 2
    assert ("error" in answer) == (seconds != "1e300"), answer
