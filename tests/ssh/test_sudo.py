"""Hosts whose login is not root but may sudo without a password, as cloud images make them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from evalfleet.channels.ssh.channel import SshChannel
from evalfleet.channels.ssh.host_home import HostHome
from evalfleet.errors import SetupFailed
from evalfleet.model import AttemptId, Bundle, Command, Isolation, Job, SetupStep
from evalfleet.places.ssh import SshPlace, SshSettings
from evalfleet.ports import Fence, PlaceContext
from tests.waiting import until

from .fleet import HOME_ID, SSHD, Sshd, bring_up, keygen

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not sys.platform.startswith("linux") or shutil.which("sudo") is None,
    reason="needs root on Linux, and sudo: a login is made up",
)

LOGIN, UID = "cloud", 4321
OTHER, OTHER_UID = "guest", 4322

# What the two logins are is known in the server's own view of the files only.
ENTER = f"""\
set -e
mount -t tmpfs -o mode=755 none /home
for name in passwd shadow sudoers; do cp -p /etc/$name /home/$name; done
echo '{LOGIN}:x:{UID}:{UID}::/home/{LOGIN}:/bin/sh' >>/home/passwd
echo '{OTHER}:x:{OTHER_UID}:{OTHER_UID}::/home/{OTHER}:/bin/sh' >>/home/passwd
echo '{LOGIN}:*:19000:0:99999:7:::' >>/home/shadow
echo '{OTHER}:*:19000:0:99999:7:::' >>/home/shadow
echo '{LOGIN} ALL=(ALL) NOPASSWD: ALL' >>/home/sudoers
for name in passwd shadow sudoers; do mount --bind /home/$name /etc/$name; done
for login in {LOGIN}:{UID} {OTHER}:{OTHER_UID}; do
  mkdir -m 750 /home/${{login%:*}}
  chown ${{login#*:}}:${{login#*:}} /home/${{login%:*}}
done
cp "$1" /home/login.pub
shift
exec "$@"
"""


class CloudHost(Sshd):
    """An sshd whose logins are `cloud`, who may sudo, and `guest`, who may not."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, Path("/home/login"), "SetEnv https_proxy=http://proxy:1")
        config = folder / "sshd_config"
        config.write_text(config.read_text().replace(f"SetEnv HOME={self.home}\n", ""))
        self.login_key = folder / "login"
        keygen(self.login_key)
        (folder / "known_hosts").write_text(self.known)

    def start(self) -> None:
        Path("/run/sshd").mkdir(exist_ok=True)
        argv = [SSHD, "-D", "-f", str(self.folder / "sshd_config"), "-E", str(self.folder / "sshd.log")]
        enter = ["unshare", "--mount", "sh", "-c", ENTER, "enter", f"{self.login_key}.pub"]
        self.process = subprocess.Popen([*enter, *argv])
        until(self._answers, "sshd to listen")
        self.home = Path(f"/proc/{self.process.pid}/root/home/{LOGIN}")

    def place(self, user: str = LOGIN, isolation: str | None = "user") -> SshPlace:
        settings = {
            "hosts": [self.name],
            "user": user,
            "key": str(self.login_key),
            "known_hosts": str(self.folder / "known_hosts"),
            "isolation": isolation,
        }
        context = PlaceContext(self.folder / "home", HOME_ID, {})
        return SshPlace.make("cloud", msgspec.convert(settings, SshSettings), context)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CloudHost]:
    made = CloudHost(tmp_path_factory.mktemp("cloud"))
    made.start()
    try:
        yield made
    finally:
        made.stop()


def channel_of(
    place: SshPlace, host: CloudHost, machine: str, epoch: int = 1, made: bool = False
) -> SshChannel:
    home: HostHome = place._fleet.homes[host.name]
    return SshChannel(home, machine, Fence("run", epoch, 20.0), {}, made=made)


async def said(channel: SshChannel, name: str, script: str, kind: Isolation, tmp_path: Path) -> str:
    """What an attempt prints."""
    id = AttemptId(name)
    await channel.start(Job(id, Command(("sh", "-c", script)), 60.0, "b", isolation=kind))
    await channel.ended(id)
    await channel.collect(id, tmp_path / name)
    return (tmp_path / name / "evalfleet.log").read_text()


async def test_attempts_are_users_of_their_own_where_the_login_may_sudo(
    host: CloudHost, tmp_path: Path
) -> None:
    (host.home / "notes").write_text("the login's own")
    (host.home / "notes").chmod(0o644)
    place = host.place()
    try:
        machine = await bring_up(place)
        channel = channel_of(place, host, machine.id)
        isolated = await channel.isolate("user")
        assert isolated.kind == "user"
        assert "own user" in isolated.detail

        (tmp_path / "grade.py").write_text("print('honest')")
        step = SetupStep(
            "mark", Command(("sh", "-c", "id -u >who; echo $https_proxy >>who; echo $HOME >>who"))
        )
        await channel.prepare(Bundle("b", {"grade.py": str(tmp_path / "grade.py")}, (step,)))
        words = "cat who; id -u; sudo -n id -u; cat ~cloud/*; echo x >>grade.py; cat ../../../key; kill -9 -1"
        told = await said(channel, "t.1", words, "user", tmp_path)
        root, proxy, home, uid = told.splitlines()[:4]
        assert (root, proxy, home) == ("0", "http://proxy:1", "/root"), "set-up runs as the supervisor does"
        assert int(uid) not in (0, UID)
        assert "\n0\n" not in told.partition(uid)[2], "sudo does nothing for an attempt"
        assert "the login's own" not in told
        ours = host.home / ".evalfleet" / HOME_ID / machine.id
        assert (ours / "bundles/b/grade.py").read_text() == "print('honest')"
        assert ours.stat().st_uid == 0
        assert (ours / "key").stat().st_mode & 0o077 == 0

        assert (ours / "supervisor.sock").stat().st_uid == UID, "its sshd connects without a process between"

        # another controller, which only knows the login, takes over, and gives the host back clean
        await channel.close()
        os.kill(int((ours / "supervisor.pid").read_text().split()[0]), signal.SIGKILL)
        later = channel_of(place, host, machine.id, epoch=2)
        assert int(await said(later, "t.2", "id -u", "user", tmp_path)) not in (0, UID, int(uid))
        await later.close()
        assert [seen.id for seen in await place.list("pool")] == [machine.id]
        assert (await place._fleet.homes[host.name].facts()).held[0].folder == machine.id
        await place.delete(machine.id)
        assert [path.name for path in host.home.iterdir()] == ["notes"]
    finally:
        (host.home / "notes").unlink()
        await place.close()


async def test_sudo_is_used_unasked_only_on_machines_that_we_made(host: CloudHost) -> None:
    place = host.place(isolation=None)
    try:
        machine = await bring_up(place)
        lent, made = (channel_of(place, host, machine.id, made=made) for made in (False, True))
        isolated = await lent.isolate("auto")
        assert (isolated.kind, isolated.detail) == (
            "none",
            'the login is not root; with isolation = "user", sudo is tried',
        )
        assert (await made.isolate("auto")).kind == "user"
        await lent.close()
        await made.close()
        await place.delete(machine.id)
        assert not list(host.home.iterdir())
    finally:
        await place.close()


async def test_a_login_that_may_not_sudo_is_told_so(host: CloudHost) -> None:
    place = host.place(user=OTHER)
    try:
        machine = await bring_up(place)
        channel = channel_of(place, host, machine.id, made=True)
        with pytest.raises(SetupFailed, match="may not sudo without a password; come in"):
            await channel.isolate("user")
        assert (await channel.isolate("auto")).kind == "none"
        await channel.close()
        await place.delete(machine.id)
    finally:
        await place.close()
    with contextlib.suppress(FileNotFoundError):
        assert not list((host.home.parent / OTHER).iterdir())
