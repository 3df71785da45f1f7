"""The controller's side of a resident supervisor: a Channel over any connection to it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import random
import shutil
import tempfile
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from evalfleet.errors import ChannelError, MachineForged, RequestError, SetupFailed, StaleController
from evalfleet.model import (
    WANTS_FILE,
    Allowance,
    AttemptId,
    Bundle,
    Collected,
    Command,
    Ended,
    Isolated,
    Isolation,
    Job,
    LargeFile,
    Metered,
    Metering,
    ModelUse,
    Piece,
    SetupStep,
)
from evalfleet.ports import Fence, TellStep

from .follow import Follows
from .link import UNREADABLE, Dial, Incoming, Link, Lost, log_sizes, plain, said_in
from .program import meter_archive
from .secrecy import Secrets, is_maskable
from .supervisor.seals import content

PROTOCOLS = (1,)
"""What we speak. A release that brings N + 1 still speaks N: a supervisor may be older, or newer, than we."""
HELLO_S = 10.0
CLOSE_S = 5.0
FIRST_RETRY_S = 0.05
LAST_RETRY_S = 5.0
FORGET_AFTER_S = 0.2
PROBE_S = 30.0
LAST_BUNDLE = "*"
NONSENSE_BORNE = 2
"""So many connections may end because of what was said on them; the next one is the last."""
RESULT_CAP = 1 << 20
DETAIL_CAP = 4096
ERROR_CAP = 300
SAID_CAP = 400
NAME_CAP = 200
MOST_MODELS, MOST_KINDS = 100, 20
"""Of model calls: so many models an attempt, and so many kinds of tokens, are told apart."""
LONGEST_S = 1e9
HIGHEST_CODE = 1 << 31
SETUP = "setup-"
"""What ids of jobs that set a machine up begin with."""

_INTERRUPTED = frozenset({"lost", "stopped", "lease"})


SayWord = Callable[[str], None]
U = TypeVar("U", Metered, ModelUse)


OnLoad = Callable[[float, float, float, Mapping[str, int]], None]
"""Is told the shares of CPU, memory and disk that a machine uses, and how much its jobs have logged."""


class Mover(Protocol):
    """How files get to one machine and back; all that differs between places with a supervisor."""

    async def put(self, bundle: Bundle) -> None:
        """The bundle's files are complete on the machine when this returns. Raises SetupFailed."""
        ...

    async def collect(self, job: AttemptId, into: Path) -> Collected: ...


class Resident:
    """A channel to one machine. It keeps one connection, renewed when lost, while anybody waits.

    Every request may be repeated, so one whose answer was lost with the connection is sent again. What a
    hello tells of the jobs, and a question about those that are waited for, makes up for lost pushes.
    """

    def __init__(
        self,
        dial: Dial,
        mover: Mover,
        fence: Fence,
        secrets: Mapping[str, str],
        on_load: OnLoad | None = None,
    ) -> None:
        self._dial = dial
        self._mover = mover
        self._fence = fence
        self._values = secrets
        self._on_load = on_load
        self._secrets = Secrets(secrets, secrets)
        self._link: Link | None = None
        self._connecting: asyncio.Task[Link] | None = None
        self._refusal: ChannelError | None = None
        self._running: set[str] = set()
        self._seen: set[str] = set()
        self._ended: dict[str, Ended] = {}
        self._ours: set[str] = set()
        self._nonsense = 0
        self._waiters: dict[str, list[asyncio.Future[Ended]]] = {}
        self._forgets: list[str] = []
        self._flush: asyncio.TimerHandle | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._follows = Follows(self.ask, self._unfollow)
        self._asking = 0
        self._probes = 0
        self._bundles: dict[str, Bundle] = {}
        self._preparing = asyncio.Lock()
        self._set_up_said: tuple[AttemptId, str, Callable[[str], None]] | None = None
        self._metering: Metering | None = None  # what the machine's meter was told
        self._wanting: dict[str, asyncio.Future[Metered]] = {}

    # -- the channel -------------------------------------------------------------------------

    async def prepare(
        self, bundle: Bundle, left: Path | None = None, tell: TellStep | None = None
    ) -> dict[str, float]:
        if not bundle.digest:
            if bundle.files or bundle.steps:
                raise RequestError("a bundle with files or steps needs a digest")
            await self._ask("ping", {})
            return {}
        if self._link is None:
            await self._connected()  # tells which steps are behind it
        self._bundles[bundle.digest] = bundle
        async with self._preparing:  # two attempts at one task may both bring its files
            return await self._prepare(bundle, left, tell)

    async def _prepare(self, bundle: Bundle, left: Path | None, tell: TellStep | None) -> dict[str, float]:
        await self._put(bundle)
        timings: dict[str, float] = {}
        for number, step in enumerate(bundle.steps):
            job = Job(
                AttemptId(f"{SETUP}{bundle.digest}-{number}"), step.command, step.timeout_s, bundle.digest
            )
            with self._hearing(job.id, step.name, tell):
                seconds = await self._set_up(job, step, left, partial(_tell_word, tell, step.name))
            if seconds is not None:
                timings[step.name] = seconds
        if timings:
            await self._ask("seal", {"digest": bundle.digest})
        return timings

    async def _put(self, bundle: Bundle) -> None:
        """The bundle's files are on the machine, and are what they are here. Raises SetupFailed."""
        await self._mover.put(bundle)
        if not bundle.files:
            return
        files = await asyncio.to_thread(contents_of, bundle)
        wrong = ""
        for _ in range(2):
            answer = await self._ask("verify", {"digest": bundle.digest, "files": files})
            if answer.state == "here":
                return
            wrong = self._secrets.mask_text(answer.detail)[:ERROR_CAP]
            # somebody has changed them there: they are gone now, and what was set up with them
            for known in (self._running, self._seen, self._ours):
                known.difference_update({id for id in known if id.startswith(SETUP + bundle.digest)})
            for id in [id for id in self._ended if id.startswith(SETUP + bundle.digest)]:
                del self._ended[id]
            await self._mover.put(bundle)
        raise SetupFailed("files", f"{wrong} is changed there as soon as it is brought")

    @contextlib.contextmanager
    def _hearing(self, job: AttemptId, step: str, tell: TellStep | None) -> Generator[None]:
        """While a step runs, tell what the machine says of it. One that it has behind it is not told of."""
        if tell is None or self._is_behind(job):
            yield
            return
        tell(step, "")
        self._set_up_said = (job, "", lambda word: tell(step, word))
        try:
            yield
        finally:
            self._set_up_said = None

    def _is_behind(self, job: AttemptId) -> bool:
        """Does the machine know that it has ended?"""
        return job in self._ended or (job in self._seen and job not in self._running)

    async def _set_up(self, job: Job, step: SetupStep, left: Path | None, say: SayWord) -> float | None:
        """Run a step, unless the machine knows that it succeeded. One that was cut short is run anew.

        Returns its seconds; None if it had succeeded before.
        """
        repeated = sent = False
        while True:
            known = self._is_behind(job.id)
            await self._start(job, in_bundle=True)
            ended = await self.ended(job.id)
            if ended.reason == "exited" and ended.exit_code == 0:
                return None if known else ended.seconds
            file = step.file if ended.exit_code == WANTS_FILE and not sent else None
            failed = file is None and (repeated or ended.reason not in _INTERRUPTED)
            if failed and left is not None:
                await self._keep_what_is_left(job.id, left / step.name)
            await self._forget_for_another(job.id)
            if failed:
                raise SetupFailed(step.name, _account(ended, job.timeout_s))
            if file is not None:
                sent = True
                await self._send_file(file, say)
            else:
                repeated = True

    async def _send_file(self, file: LargeFile, say: SayWord) -> None:
        """In parts. What an earlier try brought there is not sent again."""
        with tempfile.TemporaryDirectory() as folder:
            for number, start in enumerate(range(0, file.bytes, file.part_bytes)):
                say(f"sent {start >> 20} of {file.bytes >> 20} MB")
                part = Path(folder) / str(number)
                try:
                    await asyncio.to_thread(_cut, file, start, part)
                except OSError as err:
                    raise SetupFailed("files", f"{file.path}: {err.strerror or err}") from err
                await self._mover.put(Bundle(f"{file.name}-{number}.part", {"part": str(part)}))
                part.unlink()

    async def isolate(self, wanted: Isolation) -> Isolated:
        if wanted not in ("auto", "user"):
            return Isolated(wanted)
        answer = await self._ask("isolation", {})
        why_not = answer.detail
        if answer.state == "login":  # a supervisor that is not root
            why_not = await self._elevate(wanted)
            answer = answer if why_not else await self._ask("isolation", {})
        isolated = self.isolated_of(answer, why_not)
        if isolated.kind == "none" and wanted == "user":
            raise SetupFailed(
                "isolation",
                f"attempts cannot be users of their own there: {isolated.detail}; "
                'come in on Linux as root or as who may sudo without a password, or set isolation = "none"',
            )
        return isolated

    def isolated_of(self, answer: Incoming, why_not: str = "") -> Isolated:
        """How a machine says that its attempts are kept apart."""
        detail = plain(self._secrets.mask_text(why_not or answer.detail), ERROR_CAP)
        return Isolated("user" if answer.state == "user" else "none", detail)

    async def _elevate(self, wanted: Isolation) -> str:
        """Give the machine a supervisor that is root, where that can be had. Empty, or why not."""
        return "the supervisor is not root"

    async def meter(self, metering: Metering) -> None:
        values = self._values
        self._check_values(api.secret for api in metering.apis)
        apis = {
            api.name: {"url": api.url, "key": values[api.secret], "header": api.header}
            for api in metering.apis
        }
        orders = {
            "upstreams": apis,
            "prices": metering.prices,
            "keep_calls": metering.keep_calls,
            "most_out": metering.most_out,
            "listen": ["0.0.0.0"] if metering.containers else ["127.0.0.1"],
            "mask": [value for value in values.values() if is_maskable(value)],
        }
        program = base64.b64encode(meter_archive()).decode()
        try:
            answer = await self._ask("meter", {"program": program, "orders": orders})
        except (StaleController, MachineForged):
            raise
        except ChannelError as err:
            if self._link is None:
                raise
            raise SetupFailed("meter", str(err)) from err  # a supervisor of an earlier version has none
        if answer.state != "here":
            raise SetupFailed("meter", self._secrets.mask_text(answer.detail)[:ERROR_CAP])
        self._metering = metering

    async def wants(self, job: AttemptId) -> Metered:
        future = self._wanting.get(job)
        if future is None:
            future = self._wanting[job] = asyncio.get_running_loop().create_future()
        try:
            return await asyncio.shield(future)
        finally:
            if future.done():
                self._wanting.pop(job, None)

    async def allow(self, job: AttemptId, allowance: Allowance, refused: str = "") -> None:
        limits = {"usd": allowance.usd, "tokens": allowance.tokens}
        await self._ask("allow", {"job": job, **limits, "refused": refused or None})

    async def forget_set_up(self) -> None:
        await self._ask("ping", {})  # tells what the machine knows, if nothing was asked of it yet
        known = {*self._seen, *self._ended} - self._running
        for job in sorted(id for id in known if id.startswith(SETUP)):
            await self._forget_for_another(AttemptId(job))

    async def _keep_what_is_left(self, job: AttemptId, into: Path) -> None:
        """Best effort: why the step failed is told in any case."""
        await asyncio.to_thread(shutil.rmtree, into, ignore_errors=True)  # of an earlier failure
        with contextlib.suppress(ChannelError, OSError):
            await self.collect(job, into)

    async def probe(self, command: Command | None) -> bool:
        if command is None:
            await self._ask("ping", {})
            return True
        self._probes += 1
        name = f"probe-{self._fence.epoch}-{self._probes}-{os.urandom(4).hex()}"
        job = Job(AttemptId(name), command, PROBE_S, LAST_BUNDLE, lease_s=4 * PROBE_S)
        await self._start(job)
        ended = await self.ended(job.id)
        await self._forget_for_another(job.id)
        return ended.reason == "exited" and ended.exit_code == 0

    async def start(self, job: Job) -> None:
        await self._start(job)

    async def _start(self, job: Job, in_bundle: bool = False) -> None:
        if self._link is None:
            await self._connected()
        self._ours.add(job.id)
        if job.id in self._seen or job.id in self._running or job.id in self._ended:
            return
        if job.metering is not None and self._metering != job.metering:
            await self.meter(job.metering)  # a controller before us may have had another key
        answer = await self._ask("start", {"job": self._spec(job, in_bundle)})
        if answer.state == "unmetered" and job.metering is not None:  # somebody has ended the meter
            await self.meter(job.metering)
            answer = await self._ask("start", {"job": self._spec(job, in_bundle)})
        if answer.state == "unmetered":
            raise SetupFailed("meter", "the meter of model calls does not stay")
        if answer.state == "changed":
            await self._restore(job, self._secrets.mask_text(answer.detail)[:ERROR_CAP])
            answer = await self._ask("start", {"job": self._spec(job, in_bundle)})
        if answer.state == "changed":
            raise MachineForged(f"a file of the benchmark is changed on it again and again: {job.bundle}")
        if answer.state == "running" and job.id not in self._ended:
            self._running.add(job.id)

    async def _restore(self, job: Job, wrong: str) -> None:
        """Bring the job's files again, and set the machine up anew: an attempt has changed them."""
        for digest in filter(None, (job.bundle, job.task_bundle, job.score_bundle)):
            bundle = self._bundles.get(digest)
            if bundle is None:  # a controller before this one has brought them
                raise MachineForged(f"{wrong}, a file of the benchmark, was changed on it")
            await self.prepare(bundle)

    def _check_values(self, names: Iterable[str]) -> None:
        missing = [name for name in names if not self._values.get(name)]
        if missing:
            raise RequestError(f"secret {missing[0]} has no value here; set it in the environment")

    def _spec(self, job: Job, in_bundle: bool) -> dict[str, Any]:
        command = job.command
        self._check_values(command.secrets)
        spec: dict[str, Any] = {
            "id": job.id,
            "argv": command.argv,
            "env": command.env,
            "timeout_s": job.timeout_s,
            "lease_s": job.lease_s,
            "log_cap_bytes": job.log_cap_bytes,
            "bundle": job.bundle,
        }
        if command.secrets:
            spec["secret_names"] = command.secrets  # for controllers of earlier versions
            hidden = {api.secret for api in job.metering.apis} if job.metering else set[str]()
            spec["secrets"] = {name: self._values[name] for name in command.secrets if name not in hidden}
        if job.metering is not None:
            variables = {name: text for api in job.metering.apis for name, text in api.env.items()}
            spec["metered"] = {"env": variables, **msgspec.to_builtins(job.allowance)}
        if job.stall_s:
            spec["stall_s"] = job.stall_s
        if in_bundle:
            spec["in_bundle"] = True
        elif job.isolation == "user":
            spec["isolation"] = "user"
        if job.graded:
            spec["graded"] = True
        if job.grades:
            spec.update(grades=job.grades, score_bundle=job.score_bundle)
        if job.task_bundle:
            spec["task_bundle"] = job.task_bundle
        return spec

    async def ended(self, job: AttemptId) -> Ended:
        if (known := self._ended.get(job)) is not None:
            return known
        if self._refusal is not None:  # it may have come in one packet with the answer to the job's start
            raise self._refusal
        future: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        waiters = self._waiters.setdefault(job, [])
        waiters.append(future)
        try:
            if self._link is None:
                await self._connected()  # asks about all jobs that are waited for
            elif job not in self._running:
                self._inquire(self._link, job)
            self._arm()
            return await future
        finally:
            waiters.remove(future)
            if not waiters:
                self._waiters.pop(job, None)
            if not future.cancel() and not future.cancelled():
                future.exception()  # seen: another way out was taken

    async def stop(self, job: AttemptId) -> None:
        await self._ask("stop", {"job": job})

    async def collect(self, job: AttemptId, into: Path) -> Collected:
        return await self._mover.collect(job, into)

    def follow(self, job: AttemptId, path: str = "log", offset: int = 0) -> AsyncGenerator[Piece]:
        # all that this channel could hand to a job: who looks on has started none, and learned no names
        return self._follows.pieces(job, path, offset, Secrets(self._values, self._values))

    def _unfollow(self, follower: int) -> None:
        if self._link is not None:
            self._link.queue("unfollow", {"follower": follower})
            self._link.flush()

    async def clear(self, once: str = "") -> None:
        await self._ask("clear", {"once": once})
        for known in (self._ended, self._running, self._seen, self._ours, self._forgets):
            known.clear()
        self._metering = None

    def forget(self, job: AttemptId) -> None:
        self._ended.pop(job, None)
        for known in (self._running, self._seen, self._ours):
            known.discard(job)
        self._forgets.append(job)
        if self._flush is None:
            with contextlib.suppress(RuntimeError):  # no loop: it goes with the next message
                self._flush = asyncio.get_running_loop().call_later(FORGET_AFTER_S, self._send_forgets)

    async def close(self) -> None:
        self._send_forgets()
        self._refusal = self._refusal or ChannelError("the channel is closed")
        for timer in (self._flush, self._watch):
            if timer is not None:
                timer.cancel()
        connecting = self._connecting
        if connecting is not None:
            connecting.cancel()
        if self._link is not None:
            self._link.close()
        self._fail(self._refusal)
        if connecting is not None:  # else it would be ended with the loop, and complain
            await asyncio.wait([connecting], timeout=CLOSE_S)

    # -- requests ----------------------------------------------------------------------------

    async def ask(self, op: str, body: dict[str, Any]) -> Incoming:
        """For a mover whose files go with the messages. Raises ChannelError."""
        return await self._ask(op, body)

    async def _ask(self, op: str, body: dict[str, Any]) -> Incoming:
        """The answer to a request, sent again after each loss of the connection."""
        self._asking += 1
        try:
            while True:
                link = self._link or await self._connected()
                self._queue_forgets(link)
                self._arm()
                try:
                    answer = await link.ask(op, body)
                except Lost:
                    continue
                if answer.error:
                    raise self._error(answer)
                return answer
        finally:
            self._asking -= 1

    def _error(self, answer: Incoming) -> ChannelError:
        detail = self._secrets.mask_text(answer.detail)[:ERROR_CAP]
        if answer.error == "stale":
            self._refusal = StaleController(f"the machine obeys another controller: {detail}")
            self._fail(self._refusal)  # the connection is not made anew: nobody would hear of an end
            return self._refusal
        if answer.error == "key":
            # the file was changed after the supervisor read it: by a job, as nothing of ours does
            self._refusal = MachineForged("the key on the machine is not the one that its supervisor knows")
            self._fail(self._refusal)
            return self._refusal
        return ChannelError(f"the supervisor answered {answer.error[:ERROR_CAP]}: {detail}")

    async def _forget_for_another(self, job: AttemptId) -> None:
        """Forget an ended job whose id may be started again."""
        await self._ask("forget", {"jobs": [job], "again": True})
        self._ended.pop(job, None)
        for known in (self._running, self._seen, self._ours):
            known.discard(job)

    def _send_forgets(self) -> None:
        self._flush = None
        if self._link is not None:
            self._queue_forgets(self._link)
            self._link.flush()

    def _queue_forgets(self, link: Link) -> None:
        if self._forgets:
            link.queue("forget", {"jobs": self._forgets})
            self._forgets = []

    # -- the connection ----------------------------------------------------------------------

    async def _connected(self) -> Link:
        """The connection, made anew if need be. Raises ChannelError when nothing was heard for too long."""
        if self._refusal is not None:
            raise self._refusal
        if self._link is not None:
            return self._link
        task = self._connecting or self._connect_since(asyncio.get_running_loop().time())
        try:
            # who asked may be cancelled; others wait for the same connection
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and self._refusal is not None:  # by `close`
                raise self._refusal from None
            raise

    def _connect_since(self, heard: float) -> asyncio.Task[Link]:
        self._connecting = asyncio.create_task(self._connect(heard + self._fence.silent_s))
        self._connecting.add_done_callback(self._on_connected)
        return self._connecting

    def _on_connected(self, task: asyncio.Task[Link]) -> None:
        self._connecting = None
        if not task.cancelled() and (err := task.exception()) is not None:
            self._fail(err)

    async def _connect(self, deadline: float) -> Link:
        loop = asyncio.get_running_loop()
        delay = FIRST_RETRY_S
        problem: object = "no answer"
        while True:
            queued = loop.time()
            await self._turn()
            deadline += loop.time() - queued  # so long it was we who did not ask
            try:
                async with asyncio.timeout_at(min(deadline, loop.time() + HELLO_S)):
                    return await self._greet(Link(loop, self))
            except OSError as err:  # TimeoutError and Lost are
                problem = str(err) or problem
            if self._refusal is not None:
                raise self._refusal
            if loop.time() + delay >= deadline:
                raise ChannelError(
                    f"nothing heard from the machine for {self._fence.silent_s:g} s ({problem})"
                )
            await asyncio.sleep(delay * random.uniform(0.5, 1.5))
            delay = min(delay * 2, LAST_RETRY_S)

    async def _turn(self) -> None:
        """For a place that connects to so many machines at once, and lets the others wait."""

    async def _greet(self, link: Link) -> Link:
        """Say hello and take up what the machine tells of its jobs."""
        try:
            line = await self._dial(link)
            link.connection_made(line.transport)
            hello = {"protocols": PROTOCOLS, "epoch": self._fence.epoch, "run": self._fence.run}
            op = "ping" if self._fence.looks_on else "hello"
            answer = await link.ask(op, {**hello, "key": line.key}, partial(self._take_up, link))
            if answer.error:
                raise self._error(answer)
            if link.lost:  # what came with the answer was no good: nobody will tell us of it again
                raise Lost
        except BaseException:
            link.drop()
            raise
        self._link = link
        for job in self._waiters:
            if job not in self._running:
                self._inquire(link, job)
        self._send_forgets()
        return link

    def _take_up(self, link: Link, hello: Incoming) -> None:
        """Note each job that the machine knows. The end of one may be told in the same packet."""
        if hello.error:
            return
        try:
            jobs = msgspec.json.decode(hello.jobs, type=dict[str, str])
        except UNREADABLE:
            self.on_nonsense(f"{bytes(hello.jobs)[:60]!r}")
            link.drop()
            return
        self._running = {job for job, state in jobs.items() if state == "running"}
        self._seen = set(jobs)

    def _inquire(self, link: Link, job: str) -> None:
        def answered(answer: Incoming | None) -> None:
            if answer is None:
                return  # asked again with the next connection
            if answer.error:
                self.on_refusal(answer)
                return  # unless it is refused for good, asked again with the next connection
            if answer.state == "running":
                self._running.add(job)
            elif answer.state == "ended":
                self._settle(job, self.ended_of(answer))
            else:
                self._settle(job, Ended("lost", detail="the machine knows of no such job"), keep=False)

        with contextlib.suppress(Lost):
            link.send("how", {"job": job}, answered)

    # -- what the link hears -----------------------------------------------------------------

    def on_push(self, message: Incoming) -> None:
        if message.push == "piece" and not self._follows.on_piece(message):
            self.on_nonsense("a piece of a file that nobody follows")
        if message.push == "beat":
            self._on_beat(message)
        if message.push == "wants" and (used := self._metered_of(message)) is not None:
            future = self._wanting.get(message.job)
            if future is None:
                future = self._wanting[message.job] = asyncio.get_running_loop().create_future()
            if not future.done():
                future.set_result(used)
        if message.push == "ended" and self.is_ours(message.job):
            self._settle(message.job, self.ended_of(message))
        elif message.push == "ended":
            self._running.discard(message.job)  # should we come to wait for it, the machine is asked

    def is_ours(self, job: str) -> bool:
        """Did we start it, or do we wait for it? Of other jobs a machine need tell us nothing."""
        return job in self._ours or job in self._waiters

    def on_nonsense(self, why: str) -> None:
        self._nonsense += 1
        if self._nonsense > NONSENSE_BORNE and self._refusal is None:
            said = self._secrets.mask_text(why)
            self._refusal = MachineForged(f"what answers there is no supervisor of ours: it said {said}")
            self._fail(self._refusal)

    def _on_beat(self, message: Incoming) -> None:
        if self._on_load is not None and not self._fence.looks_on:
            shares = (min(max(share, 0.0), 1.0) for share in (message.cpu, message.memory, message.disk))
            cpu, memory, disk = shares
            sizes = {job: size for job, size in log_sizes(message).items() if self.is_ours(job)}
            self._on_load(cpu, memory, disk, sizes)
        if self._set_up_said is not None:
            job, last, tell = self._set_up_said
            said = self.said_of(message, job)
            if said and said != last:
                self._set_up_said = (job, said, tell)
                tell(said)

    def said_of(self, beat: Incoming, job: str) -> str:
        """The last line of a job of set-up."""
        return plain(self._secrets.mask_end(said_in(beat, job)[-SAID_CAP:]), SAID_CAP)

    def on_refusal(self, message: Incoming) -> None:
        self._error(message)

    def on_lost(self, link: Link) -> None:
        if link is not self._link:
            return
        self._link = None
        self._running.clear()
        self._follows.on_lost()
        if self._refusal is None and (self._waiters or self._asking):
            self._connect_since(link.heard)

    def _settle(self, job: str, ended: Ended, keep: bool = True) -> None:
        self._running.discard(job)
        if keep:
            self._ended[job] = ended
        for future in self._waiters.get(job, ()):
            if not future.done():
                future.set_result(ended)

    def ended_of(self, message: Incoming) -> Ended:
        """How a job ended, within bounds: the machine may tell anything."""
        result = message.result.encode() if message.result is not None else message.result64
        detail, code = message.detail[-DETAIL_CAP:], message.exit_code
        unusable = ""
        if message.result_bytes > RESULT_CAP or (result is not None and len(result) > RESULT_CAP):
            result, unusable = None, f"is larger than {RESULT_CAP >> 20} MB"
        return Ended(
            message.reason,
            code if code is not None and abs(code) < HIGHEST_CODE else None,
            min(max(message.seconds, 0.0), LONGEST_S),
            self._secrets.mask_result(result) if result is not None else None,
            detail=self._secrets.mask_end(detail),
            unusable=unusable,
            metered=self._metered_of(message),
        )

    def _metered_of(self, message: Incoming) -> Metered | None:
        """What the answers of models said may hold what agents have asked them to say."""
        used = message.metered
        if used is None:
            return None
        models = {self._name(name): self._bounded(use) for name, use in [*used.models.items()][:MOST_MODELS]}
        mask = self._secrets.mask_text
        return msgspec.structs.replace(
            self._bounded(used),
            models=models,
            refused=mask(used.refused)[:ERROR_CAP],
            wedged=mask(used.wedged)[:ERROR_CAP],
        )

    def _name(self, text: str) -> str:
        """A name that an agent may have chosen: of a model, say."""
        return plain(self._secrets.mask_text(text), NAME_CAP)

    def _bounded(self, used: U) -> U:
        kinds = {self._name(kind): count for kind, count in [*used.tokens.items()][:MOST_KINDS]}
        return msgspec.structs.replace(used, tokens=kinds)

    def _fail(self, err: BaseException) -> None:
        self._follows.on_lost()
        for waiters in self._waiters.values():
            for future in waiters:
                if not future.done():
                    future.set_exception(err)

    def alive(self) -> None:
        """For a mover whose files do not go with the messages, which may have to wait behind them."""
        if self._link is not None:
            self._link.heard = asyncio.get_running_loop().time()

    # -- silence -----------------------------------------------------------------------------

    def _arm(self) -> None:
        """Watch the connection while anybody waits."""
        if self._watch is None:
            loop = asyncio.get_running_loop()
            self._watch = loop.call_later(min(self._fence.silent_s / 4, LAST_RETRY_S), self._check)

    def _check(self) -> None:
        now = asyncio.get_running_loop().time()
        late_s = now - self._watch.when() if self._watch is not None else 0.0
        self._watch = None
        if self._refusal is not None or not (self._waiters or self._asking or self._follows):
            return
        self._arm()
        if self._link is None:
            return
        if late_s > self._fence.silent_s / 4:
            self._link.heard = now  # it was we who did not listen: stopped, or too busy
        if now - self._link.heard > self._fence.silent_s / 2:
            self._link.drop()  # another connection may still get through in time
        else:
            self._link.queue("ping", {"n": 0})  # our word, too, must be heard: jobs have leases
            self._link.flush()


@lru_cache(maxsize=8)
def _contents(digest: str, files: tuple[tuple[str, str], ...]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for name, source in files:
        if not os.path.isdir(source):
            found[name] = content(os.path.realpath(source))
            continue
        for folder, _, names in os.walk(source):
            for each in names:
                path = os.path.join(folder, each)
                if not os.path.islink(path):
                    found[os.path.normpath(os.path.join(name, os.path.relpath(path, source)))] = content(path)
    return found


def contents_of(bundle: Bundle) -> dict[str, list[Any]]:
    """What each file of a bundle is, read once a process: a thousand machines get the same."""
    return _contents(bundle.digest, tuple(bundle.files.items()))


def _account(ended: Ended, timeout_s: float) -> str:
    """One line and the end of the log: why a step did not succeed."""
    if ended.reason == "exited":
        why = f"exit code {ended.exit_code}"
    elif ended.reason == "timed_out":
        why = f"not done after {timeout_s:g} s"
    else:
        why = ended.reason.replace("_", " ")
    return f"{why}: {ended.detail.strip()}" if ended.detail.strip() else why


def _cut(file: LargeFile, start: int, part: Path) -> None:
    """Raises OSError."""
    with open(file.path, "rb") as source, part.open("wb") as target:
        source.seek(start)
        left = min(file.part_bytes, file.bytes - start)
        while left and (block := source.read(min(left, 1 << 20))):
            target.write(block)
            left -= len(block)
    if left:
        raise OSError("it is shorter than it was when the run was planned")


def _tell_word(tell: TellStep | None, step: str, word: str) -> None:
    if tell is not None:
        tell(step, word)
