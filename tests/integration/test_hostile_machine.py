"""A machine that says anything: through the real channel to the disk. What is outside stays as it was."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import tempfile
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evalfleet.channels.artefacts import Caps
from evalfleet.channels.link import Incoming, OpenLink
from evalfleet.channels.parcels import Stage
from evalfleet.channels.resident import Resident
from evalfleet.channels.ssh.channel import SshMover
from evalfleet.channels.ssh.host_home import HostHome
from evalfleet.channels.ssh.hosts import SshHost
from evalfleet.channels.ssh.target import Access, target
from evalfleet.channels.supervisor.parcel import BadParcel
from evalfleet.errors import ChannelError, MachineForged, StaleController
from evalfleet.model import AttemptId, Command, Ended, Job
from evalfleet.ports import Fence
from tests import parcels
from tests.waiting import PATIENCE_S

JOB = AttemptId("t.0")
Answers = Callable[[dict[str, Any]], "list[bytes] | None"]
CAPS = Caps(bytes=1 << 20, files=50)


def line(**fields: Any) -> bytes:
    return json.dumps(fields).encode() + b"\n"


def civil(message: dict[str, Any]) -> list[bytes]:
    """What a supervisor would answer."""
    states = {"start": "running", "how": "running", "fetch": "unknown"}
    return [line(n=message.get("n"), jobs={}, state=states.get(message["op"], ""))]


class Peer:
    """Listens as a supervisor does. `answers` gives the bytes for each request; None: as a civil one."""

    def __init__(self, socket: Path, answers: Answers) -> None:
        self.socket = socket
        self.connections = 0
        self.serving: set[asyncio.Task[None]] = set()
        self._answers = answers

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self.serving.add(task)
        with contextlib.suppress(ConnectionError):
            while asked := await reader.readline():
                message = json.loads(asked)
                told = self._answers(message)
                for data in civil(message) if told is None else told:
                    writer.write(data)
                    await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def dial(self, protocol: asyncio.Protocol) -> OpenLink:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_unix_connection(lambda: protocol, str(self.socket))
        return OpenLink(cast("asyncio.WriteTransport", transport))


@contextlib.asynccontextmanager
async def channel_to(answers: Answers) -> AsyncIterator[tuple[Resident, Peer, list[str]]]:
    """A real channel whose machine answers so; and what asyncio complained of, which must be nothing."""
    complaints: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(str(context)))
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        peer = Peer(Path(folder, "s"), answers)
        server = await asyncio.start_unix_server(peer.serve, peer.socket, limit=1 << 26)
        host = SshHost(target("nobody"), Access(), asyncio.Semaphore(1))
        mover = SshMover(HostHome(host, "home"), "machine", {}, CAPS)
        channel = Resident(peer.dial, mover, Fence("run", 1, 5.0), {})
        mover.ask = channel.ask
        try:
            yield channel, peer, complaints
        finally:
            await channel.close()
            server.close()
            await asyncio.gather(*peer.serving)
    assert complaints == []


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A file of the controller's user, which is afterwards as it was, as is all that is beside it."""
    home = tmp_path / "home"
    home.mkdir()
    (home / ".bashrc").write_text("precious\n")
    before = parcels.seen(home)
    yield home / ".bashrc"
    assert parcels.seen(home) == before


async def fetched(parcel: bytes, into: Path) -> str:
    """Collect what comes with a message. Returns the problem, if there is one."""
    data = base64.b64encode(parcel).decode()

    def answers(message: dict[str, Any]) -> list[bytes] | None:
        return [line(n=message["n"], state="here", data=data)] if message["op"] == "fetch" else None

    async with channel_to(answers) as (channel, _, _):
        return await problem_of(channel, into)


async def problem_of(channel: Resident, into: Path) -> str:
    """As the run sees it: of anything else than these two errors it would say that it is a bug."""
    try:
        return (await channel.collect(JOB, into)).problem
    except (ChannelError, OSError) as err:
        return str(err)


def streamed(parcel: bytes, into: Path, chunk: int) -> str:
    """Collect what comes as a stream, in pieces."""
    stage = Stage(into, CAPS)
    try:
        for start in range(0, len(parcel), chunk):
            stage.unpacker.feed(parcel[start : start + chunk])
        return stage.settle({}).problem
    except (ChannelError, OSError) as err:
        return str(err)
    finally:
        stage.remove()


def check_told(problem: str) -> None:
    assert "\n" not in problem
    assert problem.isprintable()
    assert len(problem) < 500, problem


@pytest.mark.parametrize("way", sorted(parcels.forged(Path("/x/victim"))))
def test_a_forged_parcel_touches_nothing_outside(tmp_path: Path, victim: Path, way: str) -> None:
    # where a name must lead to hit the victim depends on how deep the parcel is unpacked
    into = victim.parent.parent / "run" / "t.0"
    parcel = parcels.forged(victim)[way]
    told = [asyncio.run(fetched(parcel, into))]
    into.parent.mkdir(exist_ok=True)
    parcels.check_home(into)
    told += [streamed(parcel, tmp_path / f"run{chunk}" / "t.0", chunk) for chunk in (7, 1 << 20)]
    for problem in told:
        check_told(problem)
    for chunk in (7, 1 << 20):
        parcels.check_home(tmp_path / f"run{chunk}" / "t.0")
    assert {path.name for path in tmp_path.iterdir()} == {"home", "run", "run7", f"run{1 << 20}"}


def test_a_sound_parcel_comes_home_either_way(tmp_path: Path) -> None:
    sound = parcels.parcel(parcels.file("out/x", b"fine"), parcels.link("out/l", "x"))
    assert streamed(sound, tmp_path / "a" / "t.0", 7) == ""
    assert asyncio.run(fetched(sound, tmp_path / "b" / "t.0")) == ""
    for way in "ab":
        assert (tmp_path / way / "t.0" / "l").read_bytes() == b"fine"
        assert (tmp_path / way / "t.0" / "evalfleet.log").read_bytes() == b"logged\n"


# -- messages -------------------------------------------------------------------------------------

DEEP = b'{"n": 1, "jobs": ' + b"[" * 200_000 + b"]" * 200_000 + b"}\n"
NONSENSE = {
    "garbage": b"\x00\xff\xfe garbage\n",
    "no object": b"[1, 2]\n",
    "deep": DEEP,
    "not a number": b'{"push": "beat", "cpu": NaN}\n',
    "too large a number": b'{"push": "beat", "cpu": 1e999}\n',
    "no UTF-8": b'{"push": "beat", "detail": "\xff"}\n',
    "half a character": b'{"push": "beat", "detail": "\\ud800"}\n',
    "no base64": b'{"push": "ended", "data": "!"}\n',
    "jobs that are none": b'{"n": 1, "jobs": [1]}\n',
    "jobs with states that are none": b'{"n": 1, "jobs": {"a": 1}}\n',
}
for _field in Incoming.__struct_fields__:
    NONSENSE[f"a wrong {_field}"] = line(**{"n": 1, "push": "ended", _field: {"a": [1]}})
del NONSENSE["a wrong jobs"]  # in a push, a beat's: nobody need read it
NONSENSE["a wrong metered"] = line(n=1, push="ended", metered={"usd": -1})  # it may have other keys


HELLO_ONLY = {"jobs that are none", "jobs with states that are none"}
CASES = [("hello", what) for what in NONSENSE] + [("start", what) for what in NONSENSE.keys() - HELLO_ONLY]


@pytest.mark.parametrize(("when", "what"), sorted(CASES))
def test_nonsense_gives_the_machine_up(when: str, what: str) -> None:
    said = NONSENSE[what]

    async def test() -> None:
        def answers(message: dict[str, Any]) -> list[bytes] | None:
            return [said] if message["op"] == when else None

        async with channel_to(answers) as (channel, peer, _):
            with pytest.raises(MachineForged, match="no supervisor of ours") as caught:
                await channel.start(Job(JOB, Command(("true",)), 1.0))
            check_told(str(caught.value))
            assert peer.connections == 3
            with pytest.raises(MachineForged):  # it is not asked again
                await channel.ended(JOB)
            assert peer.connections == 3

    asyncio.run(test())


def test_nonsense_in_the_same_packet_as_the_greeting_gives_the_machine_up() -> None:
    """The connection is gone before it is taken up. It was asked again and again, and all else waited."""

    async def test() -> None:
        def answers(message: dict[str, Any]) -> list[bytes] | None:
            return [civil(message)[0] + b"nonsense\n"] if message["op"] == "hello" else None

        async with channel_to(answers) as (channel, _, _):
            with pytest.raises(MachineForged, match="no supervisor of ours"):
                await asyncio.wait_for(channel.start(Job(JOB, Command(("true",)), 1.0)), PATIENCE_S)

    asyncio.run(test())


def test_an_end_in_the_same_packet_as_the_greeting_is_heard() -> None:
    """Who takes over is told that a job runs, and at once that it has ended. It waited for ever."""

    async def test() -> None:
        end = {"job": JOB, "reason": "exited", "exit_code": 3}

        def answers(message: dict[str, Any]) -> list[bytes] | None:
            if message["op"] == "hello":
                return [line(n=message["n"], jobs={JOB: "running"}) + line(push="ended", **end)]
            return [line(n=message["n"], state="ended", **end)] if message["op"] == "how" else None

        async with channel_to(answers) as (channel, _, _):
            await channel.start(Job(JOB, Command(("true",)), 1.0))
            ended = await asyncio.wait_for(channel.ended(JOB), PATIENCE_S)
            assert (ended.reason, ended.exit_code) == ("exited", 3)

    asyncio.run(test())


def test_a_line_without_end_is_given_up_in_little_memory() -> None:
    async def test() -> None:
        def answers(message: dict[str, Any]) -> list[bytes] | None:
            return [b"x" * (1 << 20)] * 100 if message["op"] == "start" else None

        async with channel_to(answers) as (channel, _, _):
            with pytest.raises(MachineForged, match="a line of more than 16 MB"):
                await channel.start(Job(JOB, Command(("true",)), 1.0))

    tracemalloc.start()
    try:
        asyncio.run(test())
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 80_000_000, f"{most} bytes of memory"


def test_what_a_machine_tells_of_other_jobs_is_not_kept() -> None:
    async def test() -> None:
        ends = [line(push="ended", job=f"other.{n}", reason="exited", data="") for n in range(1000)]
        ours = line(push="ended", job=JOB, reason="exited", exit_code=3)

        def answers(message: dict[str, Any]) -> list[bytes] | None:
            return [*civil(message), *ends, ours] if message["op"] == "start" else None

        async with channel_to(answers) as (channel, _, _):
            await channel.start(Job(JOB, Command(("true",)), 1.0))
            assert (await channel.ended(JOB)).exit_code == 3
            # of one that is not ours the machine is asked; it has never heard of it
            other = asyncio.create_task(channel.ended(AttemptId("other.1")))
            done, _ = await asyncio.wait((other,), timeout=0.2)
            assert not done, "an end was believed before anybody had started it"
            other.cancel()

    asyncio.run(test())


def test_how_a_job_ended_is_told_within_bounds() -> None:
    async def test() -> Ended:
        told = {"exit_code": 1 << 80, "seconds": -5e300, "detail": "x" * 100_000, "result": "y" * (2 << 20)}

        def answers(message: dict[str, Any]) -> list[bytes] | None:
            end = line(push="ended", job=JOB, reason="exited", **told)
            return [*civil(message), end] if message["op"] == "start" else None

        async with channel_to(answers) as (channel, _, _):
            await channel.start(Job(JOB, Command(("true",)), 1.0))
            return await channel.ended(JOB)

    ended = asyncio.run(test())
    assert ended == Ended("exited", detail="x" * 4096, unusable="is larger than 1 MB")
    msgspec.json.encode(ended)


# -- anything ---------------------------------------------------------------------------------------

NAMES = st.sampled_from(
    [
        "out",
        "out/a",
        "out/a/b",
        "out/l",
        "out/l/x",
        "log",
        "job.json",
        "left_out.json",
        "log.masked",
        "dropped",
        "result.json",
        ".",
        "out/..",
        "../x",
        "../../home/.bashrc",
        "/x",
        "out/../..",
        "out/evalfleet.log",
        "out/left_out.json",
        "out/left_out.json.tmp",
        "out/result.json",
        "a\x00b",
        "€",
    ]
) | st.sampled_from(["", "out/" + "n" * 300])
ODD = st.none() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers(), max_size=2)
DROPS = st.lists(st.tuples(NAMES, st.text(max_size=5), st.integers()), max_size=3)
RECORDS = st.one_of(
    st.builds(parcels.file, NAMES, st.binary(max_size=20)),
    st.builds(parcels.folder, NAMES),
    st.builds(parcels.link, NAMES, st.one_of(NAMES, st.just("../../../home"), st.just("l/../../x"))),
    st.builds(lambda name, **fields: parcels.file(name, **fields), NAMES, size=ODD, mode=ODD, mtime=ODD),
    st.builds(lambda name: parcels.folder(name), ODD),
    st.binary(max_size=30),
)
ENDS = st.fixed_dictionaries(
    {}, optional={"changed": ODD | st.lists(NAMES, max_size=3), "left_out": ODD | DROPS}
)


@settings(max_examples=80)
@given(st.lists(RECORDS, max_size=6), ENDS, st.booleans(), st.integers(1, 200))
def test_any_parcel_stays_in_its_folder(
    records: list[bytes], end: dict[str, Any], begun: bool, chunk: int
) -> None:
    parcel = parcels.parcel(*records, **end) if begun else parcels.closed(b"".join(records), **end)
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        (top / "home").mkdir()
        (top / "home" / ".bashrc").write_text("precious\n")
        before = parcels.seen(top / "home")
        for way in ("a", "b"):
            into = top / way / "t.0"
            into.parent.mkdir()
            check_told(asyncio.run(fetched(parcel, into)) if way == "a" else streamed(parcel, into, chunk))
            parcels.check_home(into)
        assert parcels.seen(top / "home") == before
        assert {path.name for path in top.iterdir()} == {"home", "a", "b"}


FIELDS = st.dictionaries(
    st.sampled_from([*Incoming.__struct_fields__, "protocol"]),
    st.one_of(ODD, st.sampled_from(["ended", "beat", "exited", "lost", "running", "here", JOB, "stale"])),
    max_size=6,
)
SAID = st.one_of(
    st.binary(max_size=40).map(lambda data: data + b"\n"),
    FIELDS.map(lambda fields: line(**fields)),
    FIELDS.map(lambda fields: line(**{"job": JOB, **fields, "push": "ended"})),
)


@settings(max_examples=40)
@given(st.lists(SAID, max_size=5), st.sampled_from(["hello", "start"]))
def test_whatever_is_said_is_an_end_or_one_line(said: list[bytes], when: str) -> None:
    async def test(into: Path) -> None:
        def answers(message: dict[str, Any]) -> list[bytes] | None:
            return [*said, *civil(message)] if message["op"] == when else None

        async with channel_to(answers) as (channel, _, _):
            try:
                await channel.start(Job(JOB, Command(("true",)), 1.0))
                await channel.collect(JOB, into)
            except (ChannelError, StaleController, BadParcel) as err:
                check_told(str(err))

    with tempfile.TemporaryDirectory() as name:
        asyncio.run(asyncio.wait_for(test(Path(name) / "t.0"), PATIENCE_S))
        parcels.check_home(Path(name) / "t.0")
