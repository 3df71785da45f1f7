"""Ways to a host: jump hosts, keys and names from ~/.ssh/config, and servers of other years."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evalfleet.errors import PlaceError
from evalfleet.model import AttemptId, MachineId
from evalfleet.ports import Fence
from tests.waiting import PATIENCE_S

from .fleet import HOME_ID, Fleet, Sshd, bring_up, fleet, keygen
from .test_channel import shell

# what the server of OpenSSH 8.2 (Ubuntu 20.04) offers and accepts unless told otherwise
OPENSSH_8_2 = """\
KexAlgorithms curve25519-sha256,curve25519-sha256@libssh.org,ecdh-sha2-nistp256,ecdh-sha2-nistp384,\
ecdh-sha2-nistp521,diffie-hellman-group-exchange-sha256,diffie-hellman-group16-sha512,\
diffie-hellman-group18-sha512,diffie-hellman-group14-sha256
Ciphers chacha20-poly1305@openssh.com,aes128-ctr,aes192-ctr,aes256-ctr,aes128-gcm@openssh.com,\
aes256-gcm@openssh.com
MACs umac-64-etm@openssh.com,umac-128-etm@openssh.com,hmac-sha2-256-etm@openssh.com,\
hmac-sha2-512-etm@openssh.com,hmac-sha1-etm@openssh.com,umac-64@openssh.com,umac-128@openssh.com,\
hmac-sha2-256,hmac-sha2-512,hmac-sha1
HostKeyAlgorithms rsa-sha2-512,rsa-sha2-256,ssh-rsa,ecdsa-sha2-nistp256,ssh-ed25519
PubkeyAcceptedAlgorithms ecdsa-sha2-nistp256,ecdsa-sha2-nistp384,ecdsa-sha2-nistp521,ssh-ed25519,\
rsa-sha2-512,rsa-sha2-256,ssh-rsa
"""
HARDENED = """\
KexAlgorithms ecdh-sha2-nistp384
Ciphers aes256-ctr
MACs hmac-sha2-512
MaxSessions 2
DisableForwarding yes
"""


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Fleet]:
    with fleet(tmp_path / "f", 3) as made:
        yield made


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's ~/.ssh without anything in it, and no agent."""
    folder = tmp_path / "user" / ".ssh"
    folder.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(folder.parent))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return folder


async def works(made: Fleet, into: Path, **settings: Any) -> None:
    """A machine comes up, runs a job, gives its files back, and goes."""
    place = made.place(**settings)
    machine = await bring_up(place)
    channel = place.channel(machine, Fence("run", 1, 20.0))
    await channel.start(shell("t.0", 'head -c 400000 /dev/zero >"$EVALFLEET_OUT/big"; exit 4'))
    assert (await channel.ended(AttemptId("t.0"))).exit_code == 4
    assert (await channel.collect(AttemptId("t.0"), into)).bytes == 400_000
    await channel.close()
    await place.delete(machine.id)
    await place.close()


async def refusal(made: Fleet, **settings: Any) -> str:
    place = made.place(**settings)
    with pytest.raises(PlaceError) as caught:
        await bring_up(place)
    await place.close()
    assert not caught.value.transient
    return str(caught.value)


def visits(made: Fleet) -> list[int]:
    """How many connections each host has let in."""
    logs = [(host.folder / "sshd.log").read_text() for host in made.hosts]
    return [log.count("Accepted publickey") for log in logs]


# -- jump hosts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("jumps", [1, 2])
async def test_through_jump_hosts(three: Fleet, tmp_path: Path, user: Path, jumps: int) -> None:
    inner, *others = (host.name for host in three.hosts)
    before = visits(three)
    await works(three, tmp_path / "t.0", hosts=[inner], jump=",".join(others[:jumps]))
    came = [after > earlier for after, earlier in zip(visits(three), before, strict=True)]
    assert came == [True] + [True] * jumps + [False] * (2 - jumps)


@pytest.mark.parametrize("which", [1, 2])
@pytest.mark.parametrize("key", ["unknown", "changed"])
async def test_a_jump_hosts_key_is_verified_too(three: Fleet, user: Path, which: int, key: str) -> None:
    if key == "changed":
        jump = three.hosts[which]
        jump.stop()
        keygen(jump.folder / "host_key")
        jump.start()
    else:
        lines = [host.known for n, host in enumerate(three.hosts) if n != which]
        three.known_hosts.write_text("".join(lines))
    inner, first, second = (host.name for host in three.hosts)
    said = await refusal(three, hosts=[inner], jump=f"{first},{second}")
    assert three.hosts[which].name in said
    assert ("THE HOST KEY HAS CHANGED" if key == "changed" else "the host key is unknown") in said
    assert visits(three)[0] == 0


# -- ~/.ssh/config -------------------------------------------------------------------------------


async def test_all_from_the_users_config(
    three: Fleet, tmp_path: Path, user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Address, port, user, key and two jump hosts, by names that only the file knows."""
    lines = ["Host *", f"  User {getpass.getuser()}", f"  IdentityFile {three.key}"]
    for name, host in zip(("inner", "near", "far"), three.hosts, strict=True):
        lines += [f"Host {name}", f"  HostName {host.address}", f"  Port {host.port}"]
        lines += ["  ProxyJump far,near"] if name == "inner" else []
    (user / "config").write_text("\n".join(lines) + "\n")
    (user / "known_hosts").write_text(three.known_hosts.read_text())
    for variable in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(variable, "somebody-else")
    settings = {"hosts": ["inner"], "user": None, "key": None, "known_hosts": None}
    await works(three, tmp_path / "t.0", **settings)
    assert all(visits(three))


async def test_without_any_key_it_says_what_to_do(three: Fleet, user: Path) -> None:
    said = await refusal(three, hosts=[three.hosts[0].name], key=None)
    assert "or add the key to your agent" in said


# -- servers of other years ----------------------------------------------------------------------


@pytest.mark.parametrize("config", [OPENSSH_8_2, HARDENED], ids=["8.2", "hardened"])
async def test_other_servers(tmp_path: Path, user: Path, config: str) -> None:
    with fleet(tmp_path / "f", 1, config) as made:
        shown = subprocess.run(
            ["/usr/sbin/sshd", "-T", "-f", str(made.hosts[0].folder / "sshd_config")],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert "subsystem sftp" not in shown, "a server without it will do"
        assert config.split()[1] in shown
        await works(made, tmp_path / "t.0")


# -- to the supervisor ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "carried"), [("", False), ("AllowStreamLocalForwarding no\n", True)], ids=["allowed", "not"]
)
async def test_a_process_carries_our_messages_only_where_the_server_may_not(
    config: str, carried: bool
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="ef") as short, fleet(Path(short), 1, config) as made:
        place = made.place()
        channel = place.channel(await bring_up(place), Fence("run", 1, 20.0))
        await channel.start(shell("t.0", "exit 4"))
        assert (await channel.ended(AttemptId("t.0"))).exit_code == 4
        async with asyncio.timeout(PATIENCE_S):
            while len(carriers(made.hosts[0])) != int(carried):  # it takes a moment to leave
                await asyncio.sleep(0.05)
        await channel.close()
        await place.delete(MachineId(f"pool-{HOME_ID}-1"))
        await place.close()


def carriers(host: Sshd) -> list[int]:
    """Processes of ours that stand between the server and the supervisor."""
    found: list[int] = []
    for session in host.sessions():
        with contextlib.suppress(OSError):
            kids = Path(f"/proc/{session}/task/{session}/children").read_text().split()
            found += [
                int(kid) for kid in kids if Path(f"/proc/{kid}/cmdline").read_bytes().endswith(b"connect\0")
            ]
    return found
