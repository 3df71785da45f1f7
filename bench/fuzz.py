"""A part of `hostile`: all input from hosts, fuzzed through the real readers to the disk and the terminal.

Inputs are mutated, and one that reaches lines which none before it reached is kept and mutated further.
(atheris does that in C. It comes as source only for some platforms, so it is not needed here.)
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import io
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from evalfleet import channels, views
from evalfleet import events as ev
from evalfleet.benchmarks import results as reading
from evalfleet.benchmarks.steps import read_steps
from evalfleet.channels.follow import MaskedStream
from evalfleet.channels.link import UNREADABLE, Incoming, OpenLink, decode_line
from evalfleet.channels.resident import Resident
from evalfleet.channels.secrecy import Secrets
from evalfleet.channels.ssh.channel import SshMover
from evalfleet.channels.ssh.host_home import HostHome
from evalfleet.channels.ssh.hosts import SshHost
from evalfleet.channels.ssh.target import Access, target
from evalfleet.errors import ChannelError, StaleController
from evalfleet.model import AttemptId, Command, Ended, Job, MachineId, Micros, Offer, Plan, Task, TaskId
from evalfleet.places import slurm
from evalfleet.places.ssh.examination import columns_of
from evalfleet.ports import Fence
from evalfleet.state import RunState, apply
from evalfleet.views.format import visible
from evalfleet.views.progress import Progress, progress_entry, progress_words, step_row, steps_table
from evalfleet.views.report import report
from evalfleet.views.results import results, task_detail
from evalfleet.views.show import show_run, show_task
from tests import parcels
from tests.integration.test_hostile_machine import CAPS, JOB, channel_to, civil, fetched, line, streamed

from . import fuzz_mail
from .result import Figures, Result, at_most, rounded

SECONDS, QUICK_SECONDS = 600.0, 8.0
LARGEST = 1 << 18
MOST_KEPT = 400
MOST_PIECES = 1000
"""In which one input comes: each is traced, line by line."""
MOST_SHOWN = 1 << 20
MOST_TOLD = 20
SLOW_S, GROWN_MB, HANGS_S = 10.0, 64.0, 120.0
AGAIN_S = 5.0
"""An input that hangs is interrupted so often: asyncio may take the first exception for a callback's."""
OVERTIME_S = 600.0
"""So long after its time the whole of it is ended, with a traceback, should nothing else have helped."""
SECRET = "sk-planted-0123456789"
SOURCES = tuple(
    os.path.dirname(module.__file__ or "") for module in (channels, views, reading, slurm) if module.__file__
)
TOKENS = (
    *(
        b'"',
        b"{",
        b"}",
        b"[",
        b"\n",
        b"\0",
        b"\x1b[2J",
        b"\xff",
        b"..",
        b"/",
        b"../",
        b"null",
        b"true",
        b"1e999",
    ),
    *(
        b"-1",
        b"9" * 400,
        b'"score":',
        b'"broken":"setup"',
        b'"push":"ended"',
        b'"job":"t.0"',
        b"\xe2\x80\xae",
    ),
    *(b'"error":', b'"seconds":', b'"link":', b'"file":', b'"size":', b"out/", b"log", b"left_out.json"),
    *(b"\n[... 5 bytes left out ...]\n", SECRET.encode(), SECRET[:9].encode(), b'"data":"AAAA"', b"\\ud800"),
)


class Unfit(AssertionError):
    """What must not be, of an input that no reader refused."""


class Target(NamedTuple):
    """One way in. `feed` is given the bytes and a folder that is thrown away; it raises what it finds."""

    name: str
    seeds: tuple[bytes, ...]
    feed: Callable[[bytes, Path], None]


def printable(text: str) -> None:
    """Raises Unfit for anything that a terminal would obey."""
    odd = re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", text)
    if odd is not None:
        raise Unfit(f"a control character is shown: {odd[0]!r}")
    if len(text) > MOST_SHOWN:
        raise Unfit(f"{len(text)} characters are shown")


# -- ways in ---------------------------------------------------------------------------------------


def stream_parcel(data: bytes, folder: Path) -> None:
    printable(streamed(data, folder / "run" / "t.0", max(1 + len(data) % 200, len(data) // MOST_PIECES)))
    with contextlib.suppress(FileNotFoundError):
        parcels.check_home(folder / "run" / "t.0")


def sealed_parcel(data: bytes, folder: Path) -> None:
    stream_parcel(parcels.closed(data), folder)


def fetch_parcel(data: bytes, folder: Path) -> None:
    (folder / "run").mkdir()
    printable(asyncio.run(asyncio.wait_for(fetched(parcels.closed(data), folder / "run" / "t.0"), 30)))
    parcels.check_home(folder / "run" / "t.0")


def say_lines(data: bytes, folder: Path) -> None:
    """At the greeting, or at the start of a job, then as a supervisor would."""
    when = ("hello", "start", "fetch")[len(data) % 3]

    async def listen() -> None:
        def answers(message: dict[str, Any]) -> list[bytes] | None:
            return [data + b"\n", *civil(message)] if message["op"] == when else None

        async with channel_to(answers) as (channel, _, _):
            await channel.start(Job(JOB, Command(("true",)), 1.0))
            await channel.collect(JOB, folder / "run" / "t.0")

    (folder / "run").mkdir()
    try:
        asyncio.run(asyncio.wait_for(listen(), 30))
    except (ChannelError, StaleController, OSError) as err:
        printable(str(err))
    parcels.check_home(folder / "run" / "t.0")


def read_log(data: bytes, folder: Path) -> None:
    masked = io.BytesIO()
    secrets = Secrets({"KEY": SECRET}, ("KEY",))
    secrets.copy_masked(io.BytesIO(data), masked)
    if SECRET.encode() in masked.getvalue():
        raise Unfit("a secret is shown")
    shown = visible(masked.getvalue().decode("utf-8", "replace"))
    printable(shown[:MOST_SHOWN].replace("\r", ""))
    secrets.mask_result(data)


def shell_answer(data: bytes, folder: Path) -> None:
    home = HostHome(SshHost(target("nobody"), Access(), asyncio.Semaphore(1)), "home")
    try:
        told = home.answer(data)
    except (ChannelError, OSError) as err:
        printable(str(err))
    else:
        if len(told.detail) > 1000:
            raise Unfit("an answer without bounds")


def host_told(data: bytes, folder: Path) -> None:
    """What a host says of itself: which machines it has, what it is, and how our program ended there."""
    home = HostHome(SshHost(target("nobody"), Access(), asyncio.Semaphore(1)), "home")
    for machine in home.machines_in(data)[:100]:
        printable(home.path_of(machine.folder, machine.folder))
    try:
        for text in columns_of(home.facts_in(data), "home").values():
            printable(text)
    except (ChannelError, OSError) as err:
        printable(str(err))
    try:
        home.check(len(data) % 130, data)
    except (ChannelError, OSError) as err:
        printable(str(err))


def pieces_of_log(data: bytes, folder: Path) -> None:
    """A followed file whose pieces are cut, repeated and left out as the first bytes say."""
    stream, shown, offset = MaskedStream(Secrets({"KEY": SECRET}, ("KEY",)), 0), b"", 0
    cuts, rest = data[:8], data[8:]
    for cut in cuts or b"\0":
        piece, rest = rest[:cut], rest[cut:]
        shown += stream.feed(offset, piece, False)[1]
        offset += len(piece) + (cut % 7 == 6)
    shown += stream.feed(offset, rest, True)[1]
    if SECRET.encode() in shown:
        raise Unfit("a secret is shown")


def show_steps(data: bytes, folder: Path) -> None:
    """What an agent writes down of its steps, to the table of them and the line about the newest."""
    steps, problem = read_steps(data)
    printable(steps_table([step_row(step) for step in steps[:MOST_TOLD]]))
    newest = Progress(len(steps), steps[-1] if steps else None, 1.0, problem)
    printable(progress_words(progress_entry(newest)))


def show_told(data: bytes, folder: Path) -> None:
    """What a supervisor says of isolation, set-up and model calls, to the journal and to the terminal."""
    said: list[str] = []
    for answer in data.split(b"\n"):
        with contextlib.suppress(*UNREADABLE):
            said += _shown_of(decode_line(answer), folder)
    for text in said:
        printable(text)
        if SECRET in text:
            raise Unfit("a secret is shown")


def _shown_of(message: Incoming, folder: Path) -> list[str]:
    channel = Resident(_nobody, SshMover(_HOME, "machine", {}, CAPS), Fence("run", 1, 5.0), {"KEY": SECRET})
    said: list[str] = []
    state = _state()
    ready = ev.MachineReady(MACHINE, isolated=channel.isolated_of(message))
    told = channel.ended_of(message)
    outcome = reading.outcome_of(TASK, told, healthy=True)
    ended = ev.AttemptEnded(JOB, outcome, told.seconds, "node", told.metered)
    for event in (ready, ended, ev.AttemptCollected(JOB), ev.RunEnded("done")):
        apply(state, AT, ev.decode(written := ev.encode(event)))
        said.append(str(written))
    said.append(channel.said_of(message, JOB))
    document = results(state, folder)
    return [*said, show_run(document), show_task(task_detail(state, TASK.id)), report(document, "md")]


def show_result(data: bytes, folder: Path) -> None:
    """From result.json and the end of the log to the journal, the report and the terminal."""
    raw, _, said = data.partition(b"\0\0")
    told = Ended("exited", 1, 1.0, raw[: 1 << 20], detail=said.decode("utf-8", "replace")[-4096:])
    outcome = reading.outcome_of(TASK, told, healthy=True)
    state = _state()
    for event in (ev.AttemptEnded(JOB, outcome, 1.0, "node"), ev.AttemptCollected(JOB), ev.RunEnded("done")):
        apply(state, AT, ev.decode(ev.encode(event)))
    document = results(state, folder)
    json.loads(report(document, "json"))
    shown = (show_run(document), show_task(task_detail(state, TASK.id)), report(document, "md"))
    for text in (*shown, report(document, "csv").replace("\r", "")):
        printable(text)


HOST_SAID = (
    b'{"user": "u", "python": "3.8", "cpus": 2, "memory_gb": 1.5, "disk_gb": 9, "gpus": ["A"], "held": []}',
    b'motd\nup pool-abc123-1 {"wall": 1.5}\npending pool-abc123-2 \nleft .left-pool-abc123-1-5 ',
    b'{"user": "u", "python": "3", "cpus": 1, "memory_gb": 1, "disk_gb": 1, '
    b'"held": [{"home": "h", "folder": "f", "owner": "o"}]}',
    b"Traceback\nOSError: it is full",
)
MACHINE_SAID = (
    line(n=1, state="user", detail="own user, own /tmp"),
    line(push="beat", jobs={JOB: {"said": f"fetching {SECRET}"}}),
    line(
        **{"push": "ended", "job": JOB, "reason": "exited", "exit_code": 0, "result": '{"score": 1}'},
        metered={
            **{"usd": 0.5, "calls": 2, "tokens": {"in": 5, "out": 2}, "refused": f"no money {SECRET}"},
            "models": {f"gpt-{SECRET}": {"calls": 2, "usd": 0.5, "tokens": {"in": 5}}},
        },
    ),
)
STEPS = (
    b'{"step_num": 1, "action_timestamp": "20260102@143052", "action": "click", "x": 1, "tokens": 5}\n',
    b'{"n": 2, "at": 1.5e9, "action": {"a": 1}, "ok": true, "screenshot": "a.png", "error": "x"}\n{"n"',
    b'{"steps": [{"step_id": 1, "timestamp": "0001-01-01T00:00:00+23:59", "metrics": {"prompt_tokens": 7}, '
    b'"tool_calls": [{"function_name": "f", "arguments": {"k": "v"}}]}]}',
)
_HOME = HostHome(SshHost(target("nobody"), Access(), asyncio.Semaphore(1)), "home")


async def _nobody(protocol: asyncio.Protocol) -> OpenLink:
    raise ConnectionRefusedError


AT: Micros = 1_800_000_000_000_000
TASK = Task(TaskId("t"), "domain")
MACHINE = MachineId("run-home-1")


def _state() -> RunState:
    state = RunState()
    for event in (
        ev.RunPlanned(Plan("run", "bench", home="home"), 1),
        ev.TasksPlanned((TASK,)),
        ev.MachineRequested(MACHINE, "worker-1", Offer("here", "host"), AT + 10**12),
        ev.MachineUp(MACHINE),
        ev.MachineReady(MACHINE),
        ev.AttemptStarted(AttemptId(JOB), TASK.id, MACHINE),
    ):
        apply(state, AT, event)
    return state


def targets() -> tuple[Target, ...]:
    sound = parcels.file("job.json", b"{}") + parcels.file("log", b"logged\n") + parcels.folder("out")
    bodies = (sound, sound + parcels.file("out/x") + parcels.link("out/l", "x") + parcels.folder("out/d"))
    forged = tuple(parcels.forged(Path("/x/victim")).values())
    spoken = (
        line(n=1, jobs={}, state="running"),
        line(push="ended", job=JOB, reason="exited", exit_code=0, seconds=1.5, result='{"score": 1}'),
        line(push="beat", cpu=0.5, memory=0.5, disk=0.5, jobs={JOB: {"log": 5, "said": "x"}}),
        line(n=2, error="stale", detail="epoch 7"),
    )
    told = (
        b'{"score": 1, "success": true, "num_steps": 3, "error": "x", "screenshots": ["a.png"]}\0\0the log',
        b'{"broken": "model", "error": "429", "cost_usd": 0.5}',
        b'{"score": 0.5, "seconds": 3, "limit_s": 60}',
    )
    return (
        Target("parcel, any bytes", tuple(item for item in forged if len(item) < LARGEST), stream_parcel),
        Target("parcel, its checksum right", bodies, sealed_parcel),
        Target("parcel in a message", bodies, fetch_parcel),
        Target("messages", spoken, say_lines),
        Target("results", told, show_result),
        Target("logs", (b"key: " + SECRET.encode(), b"a\n[... 5 bytes left out ...]\nb"), read_log),
        Target("answers of a shell", (b'{"error": "", "detail": "x"}', b"motd\n{}"), shell_answer),
        Target("what a host is", HOST_SAID, host_told),
        Target("pieces of a log", (b"\x05\x03\x0d\x40" * 2 + SECRET.encode() * 2,), pieces_of_log),
        Target("what a machine tells", MACHINE_SAID, show_told),
        Target("steps", STEPS, show_steps),
        *(Target(name, seeds, _shown_by(feed)) for name, seeds, feed in fuzz_mail.WAYS),
    )


def _shown_by(feed: Callable[[bytes, Path, Callable[[str], None]], None]) -> Callable[[bytes, Path], None]:
    return lambda data, folder: feed(data, folder, printable)


# -- mutation, guided by the lines that are reached ----------------------------------------------------


def mutated(rng: random.Random, kept: list[bytes]) -> bytes:
    data = bytearray(rng.choice(kept))
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice((1, 2, 8, 64, 1024)))
        match rng.randrange(7):
            case 0 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 1:
                data[at:at] = rng.choice(TOKENS)
            case 2:
                data[at:end] = rng.choice(TOKENS)
            case 3:
                del data[at:end]
            case 4:
                data[at:at] = data[at:end] * rng.choice((1, 2, 50))
            case 5:
                other = rng.choice(kept)
                begin = rng.randrange(len(other) + 1)
                data[at:end] = other[begin : begin + rng.choice((4, 64, 1024))]
            case _:
                data[at:at] = rng.randbytes(rng.choice((1, 4, 32)))
    return bytes(data[:LARGEST])


@contextlib.contextmanager
def reached(lines: set[tuple[str, int]]) -> Iterator[None]:
    """Notes which lines of the readers run meanwhile."""

    def inside(frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            lines.add((frame.f_code.co_filename, frame.f_lineno))
        return inside

    def entered(frame: FrameType, event: str, arg: object) -> Any:
        return inside if frame.f_code.co_filename.startswith(SOURCES) else None

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        yield
    finally:
        sys.settrace(before)


@dataclass
class Findings:
    """What a run of the fuzzer came to."""

    inputs: dict[str, int] = field(default_factory=dict[str, int])
    lines: int = 0
    crashes: list[str] = field(default_factory=list[str])
    outside: list[str] = field(default_factory=list[str])
    slowest_s: float = 0.0
    grown_mb: float = 0.0


def fuzz(seconds: float, each: tuple[Target, ...], seed: int = 0) -> Findings:
    """Feeds the targets for so long, a share each, and all their seeds in any case."""
    rng, found = random.Random(seed), Findings()
    lines: set[tuple[str, int]] = set()
    grown_from: float | None = None
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        top = Path(name)
        (top / "home").mkdir()
        (top / "home" / ".bashrc").write_text("precious\n")
        before = parcels.seen(top / "home")
        for n, aim in enumerate(each):
            kept = list(aim.seeds)
            until = begun + seconds * (n + 1) / len(each)
            found.inputs[aim.name] = 0
            seeds = list(aim.seeds)
            while (seeds or time.monotonic() < until) and len(found.crashes) + len(found.outside) < MOST_TOLD:
                data = seeds.pop() if seeds else mutated(rng, kept)
                _feed(aim, data, top, kept, lines, found)
                if parcels.seen(top / "home") != before or {p.name for p in top.iterdir()} != {"home"}:
                    found.outside.append(f"{aim.name}: {data!r}"[:500])
                found.inputs[aim.name] += 1
            if n == 0:
                grown_from = _memory_mb()
    found.lines = len(lines)
    found.grown_mb = max(0.0, _memory_mb() - (grown_from or 0.0))
    return found


def _feed(
    aim: Target, data: bytes, top: Path, kept: list[bytes], lines: set[tuple[str, int]], found: Findings
) -> None:
    known, cpu = len(lines), time.process_time()
    scratch = top / "scratch"
    scratch.mkdir()
    signal.signal(signal.SIGALRM, _not_done)
    signal.setitimer(signal.ITIMER_REAL, HANGS_S, AGAIN_S)
    try:
        with reached(lines):
            aim.feed(data, scratch)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as err:
        where = traceback.extract_tb(err.__traceback__)[-1]
        told = f"{type(err).__name__}: {err} ({where.filename}:{where.lineno})"
        found.crashes.append(f"{aim.name}: {told} of {data[:200]!r}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        shutil.rmtree(scratch, ignore_errors=True)
    found.slowest_s = max(found.slowest_s, time.process_time() - cpu)
    if len(lines) > known and len(kept) < MOST_KEPT:
        kept.append(data)


def _not_done(signum: int, frame: FrameType | None) -> None:
    raise Unfit(f"not done after {HANGS_S:g} s")


def _memory_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def run(quick: bool) -> Result:
    seconds = QUICK_SECONDS if quick else SECONDS
    if not quick:
        faulthandler.dump_traceback_later(seconds + OVERTIME_S, exit=True)
    begun = time.monotonic()
    found = fuzz(seconds, targets())
    faulthandler.cancel_dump_traceback_later()
    for problem in (*found.crashes, *found.outside):
        print(problem, file=sys.stderr)
    figures: Figures = {
        "inputs": {**found.inputs, "all": sum(found.inputs.values())},
        "seconds": rounded(time.monotonic() - begun),
        "lines_reached": found.lines,
        "slowest_input_cpu_s": rounded(found.slowest_s),
        "memory_grown_mb": rounded(found.grown_mb),
        "counted": "inputs of all ways in; an exception that is none of a reader's refusals, a control "
        "character or a secret that is shown is a crash; memory grown since the first way in was done",
    }
    aims = {
        "crashes": at_most(len(found.crashes), 0),
        "written_outside": at_most(len(found.outside), 0),
        "slowest_input_cpu_s": at_most(rounded(found.slowest_s) or 0.0, SLOW_S),
        "memory_grown_mb": at_most(rounded(found.grown_mb) or 0.0, GROWN_MB),
    }
    return Result("fuzz", figures, aims)
