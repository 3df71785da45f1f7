"""The controller's conversation with a supervisor: requests, the connection, what is heard of jobs."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import msgspec

from evalfleet.clock import pauses
from evalfleet.errors import ChannelError, MachineForged, StaleController
from evalfleet.model import (
    AttemptId,
    Ended,
    Metered,
    ModelUse,
    Piece,
)
from evalfleet.ports import Fence

from .follow import Follows
from .link import UNREADABLE, Dial, Incoming, Link, Lost, load_of, plain, said_in, written_bytes
from .samples import Load
from .secrecy import Secrets

PROTOCOLS = (1,)
"""What we speak. A release that brings N + 1 still speaks N: a supervisor may be older, or newer, than we."""
HELLO_S = 10.0
CLOSE_S = 5.0
FIRST_RETRY_S = 0.05
LAST_RETRY_S = 5.0
FORGET_AFTER_S = 0.2
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

U = TypeVar("U", Metered, ModelUse)


OnLoad = Callable[[Load, Mapping[str, int]], None]
"""Is told how busy a machine is, and how much its jobs have logged."""


class Session:
    """A conversation with one machine's supervisor. It keeps one connection, renewed when lost, while anybody
    waits.

    Every request may be repeated, so one whose answer was lost with the connection is sent again. What a
    hello tells of the jobs, and a question about those that are waited for, makes up for lost pushes.
    """

    hello_s = HELLO_S
    """How long the first answer of a new connection may take."""
    watch_s = LAST_RETRY_S
    """How often, at most, the other side is asked for a word while somebody waits."""

    def __init__(
        self, dial: Dial, fence: Fence, secrets: Mapping[str, str], on_load: OnLoad | None = None
    ) -> None:
        self._dial = dial
        self._fence = fence
        self._values = secrets
        self._on_load = on_load
        self._secrets = Secrets(secrets, secrets)
        self._link: Link | None = None
        self._connecting: asyncio.Task[Link] | None = None
        self._refusal: ChannelError | None = None
        self._running: set[str] = set()  # jobs that run, as the machine told
        self._seen: set[str] = set()  # jobs that the machine knew when it was greeted
        self._ended: dict[str, Ended] = {}  # jobs that have ended, and how
        self._ours: set[str] = set()  # jobs that were started here
        self._nonsense = 0
        self._waiters: dict[str, list[asyncio.Future[Ended]]] = {}
        self._forgets: list[str] = []
        self._flush: asyncio.TimerHandle | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._follows = Follows(self.ask, self._unfollow)
        self._asking = 0
        self._set_up_said: tuple[AttemptId, str, Callable[[str], None]] | None = None

    # -- jobs --------------------------------------------------------------------------------

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

    def follow(self, job: AttemptId, path: str = "log", offset: int = 0) -> AsyncGenerator[Piece]:
        # all that this channel could hand to a job: who looks on has started none, and learned no names
        return self._follows.pieces(job, path, offset, Secrets(self._values, self._values))

    def _unfollow(self, follower: int) -> None:
        if self._link is not None:
            self._link.queue("unfollow", {"follower": follower})
            self._link.flush()

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
        """Ask on behalf of a mover whose files go with the messages. Raises ChannelError."""
        return await self._ask(op, body)

    async def _ask(self, op: str, body: dict[str, Any], *, is_secret: bool = False) -> Incoming:
        """The answer to a request, sent again after each loss of the connection."""
        self._asking += 1
        try:
            while True:
                link = self._link or await self._connected()
                self._queue_forgets(link)
                self._arm()
                try:
                    answer = await link.ask(op, body, is_secret=is_secret)
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
        problem: object = "no answer"
        for pause_s in pauses(FIRST_RETRY_S, LAST_RETRY_S, 2):
            queued = loop.time()
            await self._turn()
            deadline += loop.time() - queued  # so long it was we who did not ask
            try:
                async with asyncio.timeout_at(min(deadline, loop.time() + self.hello_s)):
                    return await self._greet(Link(loop, self))
            except OSError as err:  # TimeoutError and Lost are
                problem = str(err) or problem
            if self._refusal is not None:
                raise self._refusal
            if loop.time() + pause_s >= deadline:
                raise ChannelError(
                    f"nothing heard from the machine for {self._fence.silent_s:g} s ({problem})"
                )
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
        raise AssertionError("pauses have no end")

    async def _turn(self) -> None:
        """Wait for one's turn, at a place that connects to only so many machines at once."""

    async def _greet(self, link: Link) -> Link:
        """Say hello and take up what the machine tells of its jobs."""
        try:
            line = await self._dial(link)
            link.use(line)
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
            sizes = {job: size for job, size in written_bytes(message).items() if self.is_ours(job)}
            self._on_load(load_of(message), sizes)
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
            self._watch = loop.call_later(self._watch_s, self._check)

    @property
    def _watch_s(self) -> float:
        return min(self._fence.silent_s / 4, self.watch_s)

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
        elif now - self._link.asked > self._watch_s / 2:
            self._link.queue("ping", {"n": 0})  # our word, too, must be heard: jobs have leases
            self._link.flush()
