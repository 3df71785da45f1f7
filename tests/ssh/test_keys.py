"""Host keys are verified, always; and what else a connection needs."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from evalfleet.channels.ssh.target import Target, target
from evalfleet.errors import PlaceError, RequestError
from evalfleet.places.ssh import SshPlace

from .fleet import Fleet, bring_up, fleet, keygen


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Fleet]:
    with fleet(tmp_path, 1) as made:
        yield made


async def refusal(place: SshPlace) -> str:
    with pytest.raises(PlaceError) as caught:
        await bring_up(place)
    await place.close()
    assert not caught.value.transient
    return str(caught.value)


def fingerprint(fleet: Fleet) -> str:
    file = str(fleet.hosts[0].folder / "host_key.pub")
    return subprocess.run(
        ["ssh-keygen", "-lf", file], capture_output=True, text=True, check=True
    ).stdout.split()[1]


async def test_an_unknown_key_is_refused_with_the_line_to_add(one: Fleet) -> None:
    one.known_hosts.write_text("")
    said = await refusal(one.place())
    assert fingerprint(one) in said
    assert not one.hosts[0].ours.exists()
    line = re.search(rf"add this line to {one.known_hosts}: (.*)", said)
    assert line is not None
    one.known_hosts.write_text(line[1] + "\n")
    place = one.place()
    made = await bring_up(place)
    await place.delete(made.id)
    await place.close()


async def test_a_changed_key_is_refused_loudly_with_both_fingerprints(one: Fleet) -> None:
    before = fingerprint(one)
    one.hosts[0].stop()
    keygen(one.hosts[0].folder / "host_key")
    one.hosts[0].start()
    said = await refusal(one.place())
    assert "THE HOST KEY HAS CHANGED" in said
    assert before in said
    assert fingerprint(one) in said
    assert not one.hosts[0].ours.exists()


async def test_a_changed_key_ends_a_machine_that_we_had(one: Fleet) -> None:
    place = one.place()
    made = await bring_up(place)
    one.hosts[0].stop()
    key = one.hosts[0].folder / "host_key"
    kept = key.read_bytes()
    keygen(key)
    one.hosts[0].start()
    with pytest.raises(PlaceError, match="HAS CHANGED"):
        await place.extend(made.id, 60)
    one.hosts[0].stop()
    key.write_bytes(kept)
    one.hosts[0].start()
    await place.delete(made.id)
    await place.close()


async def test_user_known_hosts_none_does_not_switch_it_off(
    one: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "user"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "config").write_text("UserKnownHostsFile none\nStrictHostKeyChecking no\n")
    monkeypatch.setenv("HOME", str(home))
    assert "the host key is unknown" in await refusal(one.place(known_hosts=None))


async def test_config_agent_and_jump_host_are_honoured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fleet(tmp_path / "f", 2) as made:
        inner, jump = made.hosts
        home = tmp_path / "user"
        (home / ".ssh").mkdir(parents=True)
        (home / ".ssh" / "known_hosts").write_text(made.known_hosts.read_text())
        (home / ".ssh" / "config").write_text(
            f"Host inner\n  HostName {inner.address}\n  Port {inner.port}\n  ProxyJump jump\n"
            f"Host jump\n  HostName {jump.address}\n  Port {jump.port}\n"
        )
        monkeypatch.setenv("HOME", str(home))
        started = subprocess.run(["ssh-agent", "-s"], capture_output=True, text=True, check=True).stdout
        agent = dict(re.findall(r"(SSH_\w+)=([^;]+)", started))
        monkeypatch.setenv("SSH_AUTH_SOCK", agent["SSH_AUTH_SOCK"])
        try:
            subprocess.run(["ssh-add", "-q", str(made.key)], check=True)
            place = made.place(hosts=["inner"], key=None, known_hosts=None)
            machine = await bring_up(place)
            assert machine.address == "inner"
            assert len(jump.sessions()) > 0, "it did not go through the jump host"
            await place.delete(machine.id)
            await place.close()
        finally:
            os.kill(int(agent["SSH_AGENT_PID"]), 15)


async def test_a_wrong_key_is_refused_with_what_to_do(one: Fleet, tmp_path: Path) -> None:
    keygen(tmp_path / "other")
    said = await refusal(one.place(key=str(tmp_path / "other")))
    assert "set `user` and `key`" in said


@pytest.mark.parametrize(
    ("python", "said"), [("no-such-python", "has no no-such-python"), ("old", "needs 3.8")]
)
async def test_a_host_without_a_good_python_is_named(
    one: Fleet, tmp_path: Path, python: str, said: str
) -> None:
    if python == "old":
        stub = tmp_path / "python3.6"
        stub.write_text("#!/bin/sh\ncat >/dev/null\necho '3.6.9 (default)' >&2\nexit 98\n")
        stub.chmod(0o755)
        python = str(stub)
    told = await refusal(one.place(python=python))
    assert not list(one.hosts[0].home.iterdir())
    assert one.hosts[0].name in told
    assert said in told


def test_hosts_as_they_are_written() -> None:
    assert target("gpu1.example.org") == Target("gpu1.example.org", "gpu1.example.org")
    assert target("me@gpu2:2222") == Target("me@gpu2:2222", "gpu2", 2222, "me")
    assert target("[fe80::1]:22") == Target("[fe80::1]:22", "fe80::1", 22)
    assert target("fe80::1").host == "fe80::1"
    for bad in ("", "a b", "a:b", "@a", "a:123456"):
        with pytest.raises(RequestError):
            target(bad)
