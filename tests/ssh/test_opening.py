"""A session that is opened just as its connection is lost: asyncssh stumbles there, and we must not."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncssh
import msgspec
import pytest

from evalfleet.channels.ssh.hosts import SshHost
from evalfleet.channels.ssh.target import HostDown, target
from evalfleet.places.ssh import SshSettings
from evalfleet.places.ssh.place import access_of
from evalfleet.ports import PlaceContext

from .fleet import HOME_ID, Fleet


class Cut(asyncssh.SSHClientSession[bytes]):
    """A session whose connection is gone as soon as `moment` is reached: what its channel is told then."""

    def __init__(self, moment: str, times: list[int]) -> None:
        self._moment = moment
        self._times = times
        self._channel: Any = None

    def connection_made(self, chan: Any) -> None:
        self._channel = chan
        self._reached("connection_made")

    def session_started(self) -> None:
        self._reached("session_started")

    def _reached(self, moment: str) -> None:
        if moment == self._moment and self._times[0]:
            self._times[0] -= 1
            self._channel.process_connection_close(ConnectionResetError("gone"))


def host_of(hosts: Fleet) -> SshHost:
    settings = msgspec.convert(hosts.settings(), SshSettings)
    access = access_of("lab", settings, PlaceContext(hosts.folder, HOME_ID))
    return SshHost(target(hosts.hosts[0].name), access, asyncio.Semaphore(1))


@pytest.mark.parametrize("moment", ["connection_made", "session_started"])
async def test_a_connection_lost_while_a_session_is_opened_is_made_anew(hosts: Fleet, moment: str) -> None:
    host = host_of(hosts)
    times = [1]
    wire, _ = await host.session(lambda: Cut(moment, times), "cat")
    assert times == [0]
    assert wire.used == 1
    await host.close()


@pytest.mark.parametrize("moment", ["connection_made", "session_started"])
async def test_one_that_is_lost_again_and_again_is_a_host_that_is_down(hosts: Fleet, moment: str) -> None:
    host = host_of(hosts)
    with pytest.raises(HostDown, match="opens no session"):
        await host.session(lambda: Cut(moment, [1]), "cat")
    assert not host.connected
    await host.close()
