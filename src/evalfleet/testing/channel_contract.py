"""What every channel promises. Each test has a machine of its own that is up."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable

import msgspec

from evalfleet.errors import SetupFailed, StaleController
from evalfleet.model import AttemptId, Bundle, Command, Ended, Job, SetupStep
from evalfleet.ports import Channel

from .harness import Harness, promise, raised

JOB = AttemptId("task.0")


class ChannelContract:
    """Jobs are detached and named by the caller; any call may be repeated, by whoever comes after."""

    def harness(self) -> Harness:
        raise NotImplementedError("give the suite a harness with a fresh world")

    # -- jobs ----------------------------------------------------------------------------------

    @promise
    async def test_the_end_tells_code_and_result(self, h: Harness) -> None:
        channel = await _channel(h)
        await channel.start(_job(h, h.command(seconds=h.unit_s, score=0.5)))
        ended = await _end(h, channel)
        assert (ended.reason, ended.exit_code) == ("exited", 0)
        assert ended.result is not None
        assert msgspec.json.decode(ended.result) == {"score": 0.5}
        assert ended.seconds >= 0.5 * h.unit_s

    @promise
    async def test_a_failing_job_tells_its_code_and_no_result(self, h: Harness) -> None:
        channel = await _channel(h)
        await channel.start(_job(h, h.command(exit_code=3)))
        ended = await _end(h, channel)
        assert (ended.reason, ended.exit_code, ended.result) == ("exited", 3, None)

    @promise
    async def test_starting_twice_starts_once(self, h: Harness) -> None:
        channel = await _channel(h)
        job = _job(h, h.command(seconds=h.unit_s, mark="began"))
        await asyncio.gather(channel.start(job), channel.start(job))
        first = await _end(h, channel)
        await channel.start(job)
        assert await _end(h, channel) == first
        assert await h.marks("began") == 1

    @promise
    async def test_an_unknown_job_is_lost(self, h: Harness) -> None:
        channel = await _channel(h)
        assert (await _end(h, channel, AttemptId("never.0"))).reason == "lost"

    @promise
    async def test_following_a_job_begins_at_once_and_ends_with_it(self, h: Harness) -> None:
        channel = await _channel(h)
        assert [piece async for piece in channel.follow(AttemptId("never.0"))] == []
        await channel.start(_job(h, h.command(seconds=h.unit_s)))
        async with asyncio.timeout(h.patience_s + 20 * h.unit_s):
            pieces = [piece async for piece in channel.follow(JOB)]
        assert pieces[0].offset == 0
        assert all(one.next == other.offset for one, other in itertools.pairwise(pieces))
        assert (await _end(h, channel)).reason == "exited"

    @promise
    async def test_the_host_enforces_the_time_limit(self, h: Harness) -> None:
        channel = await _channel(h)
        await channel.start(_job(h, h.command(seconds=8 * h.unit_s, after="survived"), 2 * h.unit_s))
        await channel.close()  # nobody watches it
        ended = await _end(h, await _another(h, epoch=2))
        assert ended.reason == "timed_out"
        await h.wait(8)
        assert await h.marks("survived") == 0

    @promise
    async def test_stop_ends_the_job_and_its_processes(self, h: Harness) -> None:
        channel = await _channel(h)
        await channel.start(_job(h, h.command(seconds=6 * h.unit_s, mark="began", after="survived")))
        waiting = asyncio.create_task(_end(h, channel))
        await h.until(lambda: h.marks("began"), bool, "the job began")
        await channel.stop(JOB)
        assert (await waiting).reason == "stopped"
        assert (await _end(h, await _another(h))).reason == "stopped"
        await h.wait(7)
        assert await h.marks("survived") == 0

    @promise
    async def test_stop_may_be_repeated_and_come_too_late(self, h: Harness) -> None:
        channel = await _channel(h)
        await channel.start(_job(h, h.command(exit_code=3)))
        ended = await _end(h, channel)
        await channel.stop(JOB)
        await channel.stop(JOB)
        await channel.stop(AttemptId("never.0"))
        assert await _end(h, channel) == ended

    # -- controllers come and go ---------------------------------------------------------------

    @promise
    async def test_another_channel_attaches_to_the_job(self, h: Harness) -> None:
        channel = await _channel(h)
        job = _job(h, h.command(seconds=3 * h.unit_s, mark="began", score=1.0))
        await channel.start(job)
        same, newer = await _another(h, epoch=1), await _another(h, epoch=2)
        waiting = asyncio.create_task(_end(h, same))
        await channel.close()
        await same.start(job)
        first = await waiting
        await newer.start(job)
        second = await _end(h, newer)
        assert first.reason == second.reason == "exited"
        assert first.result == second.result is not None
        assert await h.marks("began") == 1

    @promise
    async def test_a_successor_takes_over_a_running_job(self, h: Harness) -> None:
        channel = await _channel(h)
        job = _job(h, h.command(seconds=3 * h.unit_s, mark="began", exit_code=5))
        await channel.start(job)
        newer = await _another(h, epoch=2)
        await newer.start(job)
        assert (await _end(h, newer)).exit_code == 5
        assert await h.marks("began") == 1

    @promise
    async def test_a_stale_controller_is_refused(self, h: Harness) -> None:
        old = await _channel(h)
        await old.start(_job(h, h.command(seconds=4 * h.unit_s, mark="began", exit_code=5)))
        newer = await _another(h, epoch=2)
        assert await newer.probe(None)
        await _refused(old.start(_job(h, h.command(mark="stale"), id="other.0")))
        await _refused(old.stop(JOB))
        for late in (await _another(h, epoch=1), old):
            await _refused(late.ended(JOB))
            await _refused(late.stop(JOB))
            await _refused(late.prepare(_bundle("stale", h.command(mark="stale"))))
        assert (await _end(h, newer)).exit_code == 5, "a stale controller touched the job"
        assert await h.marks("stale") == 0

    # -- set-up --------------------------------------------------------------------------------

    @promise
    async def test_each_step_runs_once(self, h: Harness) -> None:
        channel = await _channel(h)
        bundle = _bundle("one", h.command(mark="first"), h.command(mark="second"))
        await channel.prepare(bundle)
        await channel.prepare(bundle)
        await (await _another(h, epoch=2)).prepare(bundle)
        assert (await h.marks("first"), await h.marks("second")) == (1, 1)
        await (await _another(h, epoch=2)).prepare(_bundle("two", h.command(mark="first")))
        assert await h.marks("first") == 2, "another bundle is another set-up"

    @promise
    async def test_a_failing_step_is_named(self, h: Harness) -> None:
        channel = await _channel(h)
        bundle = _bundle("bad", h.command(mark="first"), h.command(exit_code=9), h.command(mark="third"))
        for _ in range(2):
            err = await raised(SetupFailed, channel.prepare(bundle))
            assert err.step == "step 2"
        assert (await h.marks("first"), await h.marks("third")) == (1, 0)

    @promise
    async def test_a_bundle_without_steps(self, h: Harness) -> None:
        channel = await _channel(h)
        await channel.prepare(Bundle())
        assert await channel.probe(None)

    @promise
    async def test_a_probe_tells_yes_or_no(self, h: Harness) -> None:
        channel = await _channel(h)
        await channel.prepare(_bundle("one"))
        assert await channel.probe(None)
        assert await channel.probe(h.command(exit_code=0))
        assert not await channel.probe(h.command(exit_code=1))
        assert await channel.probe(h.command(exit_code=0))

    # -- artefacts -----------------------------------------------------------------------------

    @promise
    async def test_collecting_may_be_repeated(self, h: Harness) -> None:
        channel = await _channel(h)
        await channel.start(_job(h, h.command(score=1.0)))
        ended = await _end(h, channel)
        into = h.directory / "home" / "task.0"
        first = await channel.collect(JOB, into)
        again = await channel.collect(JOB, into)
        other = await (await _another(h, epoch=2)).collect(JOB, into)
        assert first.problem == again.problem == other.problem == ""
        assert first.files >= 1
        if h.keeps_files:
            assert (into / "result.json").read_bytes() == ended.result
        later = await _end(h, await _another(h, epoch=2))
        assert later.result == ended.result, "collecting took the result away"

    @promise
    async def test_forgetting_never_fails(self, h: Harness) -> None:
        channel = await _channel(h)
        await channel.start(_job(h, h.command()))
        await _end(h, channel)
        for job in (JOB, JOB, AttemptId("never.0")):
            channel.forget(job)
        await h.wait(2)
        assert await channel.probe(None), "the machine did not survive it"
        await channel.close()
        channel.forget(JOB)

    @promise
    async def test_a_forgotten_job_does_not_start_again(self, h: Harness) -> None:
        channel = await _channel(h)
        job = _job(h, h.command(mark="began"))
        await channel.start(job)
        await _end(h, channel)
        channel.forget(JOB)
        await h.wait(2)
        await (await _another(h, epoch=2)).start(job)
        await h.wait(2)
        assert await h.marks("began") == 1

    @promise
    async def test_closing_twice_is_fine(self, h: Harness) -> None:
        channel = await _channel(h)
        assert await channel.probe(None)
        await channel.close()
        await channel.close()


# -- what the tests say in one word --------------------------------------------------------------


async def _channel(h: Harness, epoch: int = 1) -> Channel:
    place = h.place()
    return h.channel(place, await h.bring_up(place), epoch)


async def _another(h: Harness, epoch: int = 1) -> Channel:
    """The channel of another controller: it has its own place object, and found the machine by listing."""
    place = h.place()
    return h.channel(place, await h.until_up(place, h.machine_id()), epoch)


def _job(h: Harness, command: Command, timeout_s: float | None = None, id: str = JOB) -> Job:
    limit_s = h.long_s if timeout_s is None else timeout_s
    return Job(AttemptId(id), command, limit_s, lease_s=2 * h.long_s)


async def _end(h: Harness, channel: Channel, job: AttemptId = JOB) -> Ended:
    async with asyncio.timeout(h.patience_s + 20 * h.unit_s):
        return await channel.ended(job)


def _bundle(digest: str, *commands: Command) -> Bundle:
    return Bundle(digest, {}, tuple(SetupStep(f"step {n}", each) for n, each in enumerate(commands, 1)))


async def _refused(call: Awaitable[object]) -> None:
    await raised(StaleController, call)
