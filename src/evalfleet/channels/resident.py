"""The channel to a machine with a resident supervisor: setting it up, starting jobs, bringing files home."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec import structs

from evalfleet.errors import ChannelError, MachineForged, RequestError, SetupFailed, StaleController
from evalfleet.model import (
    FAILS_EVERYWHERE,
    FAILS_FOR_NOW,
    WANTS_FILE,
    AttemptId,
    Bundle,
    Collected,
    Command,
    Ended,
    Isolated,
    Isolation,
    Job,
    LargeFile,
    Metering,
    SetupStep,
)
from evalfleet.ports import Fence, TellStep

from .link import Dial, Incoming, plain
from .program import meter_archive
from .secrecy import forms_of, is_maskable
from .session import ERROR_CAP, OnLoad, Session
from .supervisor.bundles import content

PROBE_S = 30.0
LAST_BUNDLE = "*"
SETUP = "setup-"
"""What ids of jobs that set a machine up begin with."""

_INTERRUPTED = frozenset({"lost", "stopped", "lease"})


SayWord = Callable[[str], None]


class Mover(Protocol):
    """How files get to one machine and back; all that differs between places with a supervisor."""

    async def put(self, bundle: Bundle, contents: Mapping[str, list[Any]]) -> None:
        """The bundle's files are complete on the machine when this returns. Raises SetupFailed.

        `contents`: what its files are. What the machine has of it in another bundle need not be sent again.
        """
        ...

    async def collect(self, job: AttemptId, into: Path) -> Collected: ...


class Resident(Session):
    """A channel to one machine, over one conversation with its supervisor.

    What differs between places is how the supervisor is dialled, and how files get there and back.
    """

    def __init__(
        self,
        dial: Dial,
        mover: Mover,
        fence: Fence,
        secrets: Mapping[str, str],
        on_load: OnLoad | None = None,
    ) -> None:
        super().__init__(dial, fence, secrets, on_load)
        self._mover = mover
        self._probes = 0
        self._bundles: dict[str, Bundle] = {}
        self._preparing = asyncio.Lock()
        self._metering: Metering | None = None  # what the machine's meter was told

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
        files = await asyncio.to_thread(contents_of, bundle)
        await self._mover.put(bundle, files)
        if not bundle.files:
            return
        wrong = ""
        for _ in range(2):
            order = {"digest": bundle.digest, "files": files, "shared": not bundle.steps}
            answer = await self._ask("verify", order)
            if answer.state == "here":
                return
            wrong = self._secrets.mask_text(answer.detail)[:ERROR_CAP]
            # somebody has changed them there: they are gone now, and what was set up with them
            for known in (self._running, self._seen, self._ours):
                known.difference_update({id for id in known if id.startswith(SETUP + bundle.digest)})
            for id in [id for id in self._ended if id.startswith(SETUP + bundle.digest)]:
                del self._ended[id]
            await self._mover.put(bundle, {})  # all of it: what the machine has may be what was changed
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
            asks = ended.exit_code == WANTS_FILE and not sent
            file = step.file if asks else None
            told = asks and step.kept is not None and bool(self._values.get(step.kept.variable))
            failed = file is None and not told and (repeated or ended.reason not in _INTERRUPTED)
            if failed and left is not None:
                await self._keep_what_is_left(job.id, left / step.name)
            await self._forget_for_another(job.id)
            if failed:
                permanent = ended.reason == "exited" and ended.exit_code == FAILS_EVERYWHERE
                raise SetupFailed(step.name, _account(ended, job.timeout_s), permanent=permanent)
            if file is not None:
                sent = True
                await self._send_file(file, say)
            elif told and step.kept is not None:
                sent = True
                secrets = (*job.command.secrets, step.kept.variable)
                job = structs.replace(job, command=structs.replace(job.command, secrets=secrets))
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
                await self._mover.put(Bundle(f"{file.name}-{number}.part", {"part": str(part)}), {})
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
        addresses = ["0.0.0.0"] if metering.containers else ["127.0.0.1"]
        listen = {"listen": addresses, "port": metering.port or 0}
        program = base64.b64encode(meter_archive()).decode()
        await self._ask_for_meter({"program": program, "orders": listen})
        orders = {
            "upstreams": {
                api.name: {"url": api.url, "key": values[api.secret], "header": api.header}
                for api in metering.apis
            },
            "mask": [
                form.decode("latin-1")  # bytes, as JSON can have them
                for value in values.values()
                if is_maskable(value)
                for form in forms_of(value)
            ],
            "prices": metering.prices,
            "keep_calls": metering.keep_calls,
            "most_out": metering.most_out,
            "same_errors": metering.same_errors,
            "paths": metering.paths,
            "renames_max_tokens": metering.renames_max_tokens,
        }
        await self._ask_for_meter({"orders": orders})
        self._metering = metering

    async def _ask_for_meter(self, body: dict[str, Any]) -> None:
        """Have the machine's meter started, or give it orders. Raises SetupFailed."""
        try:
            answer = await self._ask("meter", body, is_secret="upstreams" in body["orders"])
        except (StaleController, MachineForged):
            raise
        except ChannelError as err:
            if self._link is None:
                raise
            raise SetupFailed("meter", str(err)) from err  # a supervisor of an earlier version has none
        if answer.state != "here":
            raise SetupFailed("meter", self._secrets.mask_text(answer.detail)[:ERROR_CAP])

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
        answer = await self._ask_to_start(job, in_bundle)
        if answer.state == "unmetered" and job.metering is not None:  # somebody has ended the meter
            await self.meter(job.metering)
            answer = await self._ask_to_start(job, in_bundle)
        if answer.state == "unmetered":
            raise SetupFailed("meter", "the meter of model calls does not stay")
        if answer.state == "changed":
            await self._restore(job, self._secrets.mask_text(answer.detail)[:ERROR_CAP])
            answer = await self._ask_to_start(job, in_bundle)
        if answer.state == "changed":
            raise MachineForged(f"a file of the benchmark is changed on it again and again: {job.bundle}")
        if answer.state == "running" and job.id not in self._ended:
            self._running.add(job.id)

    async def _ask_to_start(self, job: Job, in_bundle: bool) -> Incoming:
        spec = self._spec(job, in_bundle)
        return await self._ask("start", {"job": spec}, is_secret=bool(spec.get("secrets")))

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

    async def stop(self, job: AttemptId) -> None:
        await self._ask("stop", {"job": job})

    async def collect(self, job: AttemptId, into: Path) -> Collected:
        return await self._mover.collect(job, into)

    async def clear(self, once: str = "") -> None:
        await self._ask("clear", {"once": once})
        for known in (self._ended, self._running, self._seen, self._ours, self._forgets):
            known.clear()
        self._metering = None


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
    tells = ended.reason == "exited" and ended.exit_code in (FAILS_EVERYWHERE, FAILS_FOR_NOW)
    if tells and ended.detail.strip():
        return ended.detail.strip().splitlines()[-1]
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
