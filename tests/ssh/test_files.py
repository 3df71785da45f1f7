"""Artefacts over ssh: whole or not at all, and nothing outside their folder."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import json
import os
import signal
import time
import tracemalloc
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from evalfleet.channels.artefacts import STANDARD_CAPS, Caps
from evalfleet.channels.parcels import flat
from evalfleet.channels.ssh.channel import SshChannel
from evalfleet.channels.ssh.target import HostLost
from evalfleet.channels.supervisor import parcel as packing
from evalfleet.channels.supervisor.parcel import BadParcel, ForgedParcel, Packer, Unpacker
from evalfleet.errors import ChannelError
from evalfleet.model import AttemptId, Bundle, Collected, Command, SetupStep
from evalfleet.names import INCOMING
from evalfleet.ports import Fence
from tests.waiting import PATIENCE_S

from .fleet import Fleet, Sshd
from .test_channel import machine, on, shell

JOB = AttemptId("t.0")


async def collected(
    hosts: Fleet, script: str, into: Path, caps: Caps = STANDARD_CAPS, **secrets: str
) -> Collected:
    async with machine(hosts, secrets=secrets) as (_, made, _):
        host_home = hosts.host_home(made.address)
        channel = SshChannel(host_home, made.id, Fence("run", 1, silent_s=PATIENCE_S), secrets, caps=caps)
        await channel.start(shell(JOB, script, *secrets))
        await channel.ended(JOB)
        first = await channel.collect(JOB, into)
        assert await channel.collect(JOB, into) == first
        await channel.close()
        await host_home.host.close()
        return first


def reasons(into: Path) -> dict[str, str]:
    return {each["name"]: each["reason"] for each in json.loads((into / "left_out.json").read_text())}


async def test_odd_names_links_and_what_is_no_file(hosts: Fleet, tmp_path: Path) -> None:
    script = """cd "$EVALFLEET_OUT"
        mkdir -p 'a b/ü' locked; echo x >'a b/ü/new
line'; echo y >"$(printf 'bad\\377')"; echo -n >-rf; echo z >locked/z; chmod 0 locked
        ln -s 'a b' inside; ln -s /etc/passwd out1; ln -s ../../.. out2; ln -s 'a b/../..' out3
        mkfifo pipe; echo mine >evalfleet.log; echo mine >left_out.json; chmod 4755 -- -rf; echo logged"""
    into = tmp_path / "deep" / "t.0"
    seen = await collected(hosts, script, into)
    assert (into / "a b/ü/new\nline").read_text() == "x\n"
    assert (into / "locked/z").read_text() == "z\n"
    assert (into / os.fsdecode(b"bad\xff")).read_text() == "y\n"
    assert (into / "-rf").stat().st_mode & 0o7777 == 0o755
    assert os.readlink(into / "inside") == "a b"
    assert (into / "evalfleet.log").read_text() == "logged\n"
    assert reasons(into) == {
        "out1": "the link leads outside",
        "out2": "the link leads outside",
        "out3": "the link leads outside",
        "pipe": "not a file",
        "evalfleet.log": "the name is evalfleet's own",
        "left_out.json": "the name is evalfleet's own",
    }
    assert seen.left_out == 6
    assert [path.name for path in into.parent.iterdir()] == ["t.0"]


async def test_small_artefacts_are_here_with_the_end(hosts: Fleet, tmp_path: Path) -> None:
    async with machine(hosts) as (_, made, channel):
        host = next(host for host in hosts.hosts if host.name == made.address)
        await channel.start(shell(JOB, 'echo said; echo x >"$EVALFLEET_OUT/x"'))
        await channel.ended(JOB)
        host.pause()  # nothing can be asked of it now
        try:
            assert await channel.collect(JOB, tmp_path / "t.0") == Collected(1, 2)
        finally:
            host.pause(signal.SIGCONT)
        assert (tmp_path / "t.0/x").read_text() == "x\n"
        assert (tmp_path / "t.0/evalfleet.log").read_text() == "said\n"


async def test_caps_are_kept_on_the_host(hosts: Fleet, tmp_path: Path) -> None:
    script = 'cd "$EVALFLEET_OUT"; echo {} >result.json; for i in $(seq 0 29); do echo 1234567 >f$i; done'
    few = await collected(hosts, script, tmp_path / "few", Caps(files=10))
    assert (few.files, few.left_out) == (10, 21)
    assert (tmp_path / "few/result.json").exists(), "the result comes first"
    small = await collected(hosts, script, tmp_path / "small", Caps(bytes=43))
    assert (small.files, small.bytes) == (6, 43)
    assert set(reasons(tmp_path / "small").values()) == {"too many bytes"}


async def occupy_threads() -> None:
    """As other hosts do, whose files go to the same disk: a file's next part waits for its turn."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    while True:
        await asyncio.to_thread(time.sleep, 0.01)


async def test_a_big_file_is_streamed_also_to_a_slow_disk(hosts: Fleet, tmp_path: Path) -> None:
    script = 'head -c 64000000 /dev/zero >"$EVALFLEET_OUT/big"; echo {} >"$EVALFLEET_OUT/result.json"'
    others = asyncio.create_task(occupy_threads())
    tracemalloc.start()
    try:
        seen = await collected(hosts, script, tmp_path / "t.0")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        others.cancel()
    assert (tmp_path / "t.0/big").stat().st_size == 64_000_000
    assert seen == Collected(2, 64_000_003)
    assert most < 24_000_000, f"{most} bytes of memory for a file of 64 MB"


async def cut_as_it_comes(host: Sshd, into: Path, size: int, times: int) -> None:
    """Cut the connection when the file that is on its way home is partly here."""
    incoming = into.with_name(into.name + INCOMING)
    for _ in range(times):
        while not 0 < size_of(incoming / "job" / "out" / "big") < size // 2:
            await asyncio.sleep(0.001)
        host.cut()
        while incoming.exists():
            await asyncio.sleep(0.001)


def size_of(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


async def test_a_stream_that_is_cut_is_read_again(hosts: Fleet, tmp_path: Path) -> None:
    size, into = 30_000_000, tmp_path / "t.0"
    async with machine(hosts) as (_, made, channel):
        host = next(host for host in hosts.hosts if host.name == made.address)
        await channel.start(shell(JOB, f'head -c {size} /dev/urandom >"$EVALFLEET_OUT/big"; sleep 0.1'))
        await channel.ended(JOB)
        cuts = asyncio.create_task(cut_as_it_comes(host, into, size, times=2))
        seen = await channel.collect(JOB, into)
        assert cuts.done(), "it was not cut"
        assert (seen.files, seen.bytes) == (1, size)
        assert [path.name for path in tmp_path.iterdir()] == ["t.0"]


LOSES_THE_END = r"""#!/bin/sh
case "$*" in
*.pyz\ pack) echo >>{folder}/tries; python3 "$@" | head -c 900000 ;;
*) exec python3 "$@" ;;
esac
"""


async def test_a_stream_that_is_never_whole_leaves_nothing(hosts: Fleet, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    there.mkdir()
    (there / "python").write_text(LOSES_THE_END.format(folder=there))
    (there / "python").chmod(0o755)
    async with machine(hosts, python=str(there / "python")) as (_, _, channel):
        await channel.start(shell(JOB, 'head -c 1000000 /dev/urandom >"$EVALFLEET_OUT/big"'))
        await channel.ended(JOB)
        with pytest.raises(ChannelError, match=r"not come through 4 times: .* whole"):
            await channel.collect(JOB, here / "t.0")
        assert list(here.iterdir()) == []
        assert (there / "tries").read_text() == "\n" * 4


async def test_without_the_secrets_value_nothing_is_brought(hosts: Fleet, tmp_path: Path) -> None:
    async with machine(hosts, secrets={"TOKEN": "planted-value"}) as (_, made, channel):
        await channel.start(shell(JOB, 'echo "$TOKEN"', "TOKEN"))
        await channel.ended(JOB)
        poor = hosts.place("b", secrets={"TOKEN": ""})  # the plan names it, and nobody knows its value
        late = poor.channel(made, Fence("run", 1, 20.0))
        seen = await late.collect(JOB, tmp_path / "t.0")
        assert "TOKEN has no value here" in seen.problem
        assert list(tmp_path.iterdir()) == []
        await late.close()
        await poor.close()


@pytest.mark.parametrize(("err", "lost"), [(BrokenPipeError(), True), (OSError(28, "No space left"), False)])
async def test_a_socket_that_breaks_is_a_loss_and_a_full_disk_is_not(
    hosts: Fleet, err: OSError, lost: bool
) -> None:
    host = hosts.host_home(hosts.hosts[0].name).host

    async def breaks() -> None:
        async with host.process("true"):
            raise err

    with pytest.raises(HostLost if lost else type(err)) as caught:
        await breaks()
    assert isinstance(caught.value, HostLost) == lost
    await host.close()


async def test_files_of_a_job_that_never_was(hosts: Fleet, tmp_path: Path) -> None:
    async with machine(hosts) as (_, _, channel):
        with pytest.raises(ChannelError, match="no files of job"):
            await channel.collect(AttemptId("never.0"), tmp_path / "x")


# -- parcels, without a host ---------------------------------------------------------------------


def parcel(fill: Callable[[Packer], None], **end: Any) -> bytes:
    data = io.BytesIO()
    packer = Packer(data.write)
    fill(packer)
    packer.end({"left_out": [], **end})
    return data.getvalue()


def record(**fields: Any) -> bytes:
    return json.dumps(fields).encode() + b"\n"


@pytest.mark.parametrize(
    "evil",
    [
        record(folder="../x", mode=448),
        record(folder="/tmp/x", mode=448),
        record(folder="a/b", mode=448),
        record(file="../x", size=0, mode=384, mtime=0),
        record(file="", size=0, mode=384, mtime=0),
        record(file="a\0b", size=0, mode=384, mtime=0),
        record(file="x", size=-1, mode=384, mtime=0),
        record(file="x", size=1 << 40, mode=384, mtime=0),
        record(link="d", to="/tmp") + record(file="d/x", size=0, mode=384, mtime=0),
        record(link="..", to="x"),
        record(same="x", **{"as": "bundles/task-1/x"}),
        b"[]\n",
        b"nonsense\n",
        record(end="0" * 64),
    ],
)
def test_nothing_leaves_the_folder(tmp_path: Path, evil: bytes) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    with pytest.raises(BadParcel):
        Unpacker(str(inside), 1 << 30).feed(evil)
    assert [path.name for path in tmp_path.iterdir()] == ["inside"]
    assert not any(path.is_symlink() for path in inside.iterdir())


@pytest.mark.parametrize("other", ["/etc/passwd", "bundles/../key", "seals/x", "bundles/t/link"])
def test_a_bundle_shares_files_of_bundles_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("bundles/t", "seals", "top"):
        os.makedirs(folder)
    os.symlink("/etc/passwd", "bundles/t/link")
    for name in ("key", "seals/x"):
        Path(name).write_text("ours", "utf-8")
    with pytest.raises(BadParcel):
        Unpacker("top", shares=True).feed(record(same="x", **{"as": other}))
    assert os.listdir("top") == []


async def test_a_large_file_of_two_tasks_is_sent_to_a_machine_once(hosts: Fleet, tmp_path: Path) -> None:
    """On the machine both have one file, which an attempt has changed before a third task comes."""
    data = os.urandom(150_000)
    bundles = list[Bundle]()
    for n in range(4):
        folder = tmp_path / str(n)
        (folder / "deep").mkdir(parents=True)
        (folder / "deep/data.bin").write_bytes(data)
        (folder / "input.json").write_text(str(n), "utf-8")
        steps = (SetupStep("own", Command(("true",)), 60.0),) if n == 3 else ()
        bundles.append(Bundle(f"task-{n}", {"task": str(folder)}, steps))
    async with machine(hosts) as (_, made, channel):
        there = on(hosts, made) / "bundles"

        def inode(n: int) -> int:
            return (there / f"task-{n}/task/deep/data.bin").stat().st_ino

        await channel.prepare(bundles[0])
        await channel.prepare(bundles[1])
        assert inode(0) == inode(1)
        assert (there / "task-1/task/input.json").read_text("utf-8") == "1"
        (there / "task-0/task/deep/data.bin").write_bytes(b"changed")
        await channel.prepare(bundles[2])
        assert (there / "task-2/task/deep/data.bin").read_bytes() == data
        await channel.prepare(bundles[3])  # its steps may write: it has a file of its own
        assert inode(3) not in (inode(0), inode(2))


def test_every_way_of_cutting_a_parcel_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"12345\n")

    def fill(packer: Packer) -> None:
        packer.folder("out")
        packer.file("out/f", str(tmp_path / "f"))
        packer.link("out/l", "f")

    whole = parcel(fill)
    for cut in range(len(whole) + 1):
        top = tmp_path / f"top{cut}"
        top.mkdir()
        unpacker = Unpacker(str(top))
        for byte in (whole[:cut][:50], whole[:cut][50:]):
            unpacker.feed(byte)
        unpacker.close()
        assert (unpacker.end is not None) == (cut == len(whole))
        with contextlib.suppress(BadParcel):
            assert flat(whole[:cut], 10) is None  # the long way is needed for a link
    assert (tmp_path / f"top{len(whole)}" / "out/l").read_bytes() == b"12345\n"


@pytest.mark.parametrize("read", [1 << 12, 1 << 18, 4 << 20])
def test_a_record_without_end_is_refused_in_little_memory(tmp_path: Path, read: int) -> None:
    """However much comes at a time, and so however slow we are to read it."""
    unpacker = Unpacker(str(tmp_path))
    tracemalloc.start()
    try:
        with pytest.raises(ForgedParcel, match="a record is too long"):
            deque(map(unpacker.feed, itertools.repeat(b"x" * read)), maxlen=0)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 30_000_000, f"{most} bytes of memory"


def test_a_file_that_shrinks_is_named(tmp_path: Path) -> None:
    out = tmp_path / "job" / "out"
    out.mkdir(parents=True)
    (out / "f").write_bytes(b"x" * 1000)
    data = io.BytesIO()

    def write(chunk: bytes) -> None:
        data.write(chunk)
        if b'"out/f"' in chunk:
            os.truncate(out / "f", 10)

    packing.pack(str(tmp_path / "job"), write, 1 << 30, 10)
    (tmp_path / "top").mkdir()
    unpacker = Unpacker(str(tmp_path / "top"))
    unpacker.feed(data.getvalue())
    assert unpacker.end is not None
    assert unpacker.end["changed"] == ["out/f"]


def test_a_million_files_do_not_take_for_ever(tmp_path: Path) -> None:
    out = tmp_path / "job" / "out"
    (out / "many").mkdir(parents=True)
    for n in range(20_000):
        os.close(os.open(out / "many" / str(n), os.O_CREAT))
    sizes: list[int] = []
    packing.pack(str(tmp_path / "job"), lambda data: sizes.append(len(data)), 1 << 30, 100)
    assert len(sizes) == 1 + 1 + 100 + 1
    end: list[bytes] = []
    packing.pack(str(tmp_path / "job"), end.append, 1 << 30, 100)
    assert len(json.loads(end[-1])["left_out"]) == packing.MOST_LEFT_OUT + 1
