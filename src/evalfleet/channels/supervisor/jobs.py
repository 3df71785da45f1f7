"""The jobs of a machine, from start to forgotten. The working directory is the machine's."""

from __future__ import annotations

import contextlib
import json
import os
import time

from .bundles import Bundles
from .end import Ender
from .files import read_file
from .host import NEVER
from .isolation import enclose, host_memory
from .job import HostJob
from .meter_process import MeterProcess
from .start import Starter
from .trash import Trash
from .watch import Watcher

TYPE_CHECKING = False  # importing typing would cost 3 ms
if TYPE_CHECKING:
    import selectors
    from collections.abc import Callable, Iterator
    from typing import Any

METER_GROUP, LEAST_FOR_METER = "meter", 256 << 20
IDLE_S = 10.0


class Jobs:
    """All jobs of a machine that are not forgotten. `report(job)` is called once for each that ends."""

    def __init__(
        self,
        home: str,
        environ: dict[str, str],
        selector: selectors.BaseSelector,
        report: Callable[[HostJob], None],
    ) -> None:
        environ = {**environ, "EVALFLEET_MACHINE": home}
        self.known: dict[str, HostJob] = {}
        self.live: dict[str, HostJob] = {}
        self.bundles = Bundles(home)
        self.trash = Trash(environ)
        self.metering = MeterProcess(selector, environ, self._on_meter, self._unmetered)
        self.starter = Starter(home, environ, self.bundles, self.metering)
        self.host = self.starter.host
        self.ender = Ender(home, self.live, selector, self.trash, self.bundles, self.metering, report)
        self.watcher = Watcher(selector, self.ender)
        self._report = report
        self._forgotten: set[str] = set()
        self._tombstones = -1
        self._busy_at = 0.0

    @property
    def due(self) -> float:
        """When `tick` is to be called."""
        if self.ender.left:
            return 0.0
        return min((job.due for job in self.live.values()), default=NEVER)

    def tick(self, now: float, heard: float) -> None:
        """Do what is due. `heard` is when a controller last spoke."""
        self.ender.open_boxes()
        self.watcher.tick(now, heard)

    # -- beginnings --------------------------------------------------------------------------

    def restore(self) -> None:
        """Take up what a predecessor in this directory left."""
        self._forgotten = set(ids_in(read_file("forgotten") or b""))
        self._tombstones = os.open("forgotten", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.trash.restore()
        self.metering.restore()
        for name in sorted(os.listdir("jobs")):
            self._restore("jobs/" + name)
        if not self.metering.port:
            self._unmetered()

    def _restore(self, path: str) -> None:
        if not os.path.exists(path + "/pid"):
            return  # its start was not completed: it may be started again
        try:
            job = HostJob(json.loads(read_file(path + "/job.json") or b""))
        except (ValueError, KeyError, TypeError):
            return
        if job.path != path:
            return
        why = read_file(path + "/why", 100)
        job.why = why.decode() if why else None
        self.known[job.id] = job
        self.watcher.adopt(job)

    def start(self, spec: dict[str, Any], refusal: str = "", why: str = "failed_to_start") -> HostJob | None:
        """Start the job, unless one of its id was ever started here. None if it is forgotten already.

        A failure, or a refusal to start anything new, is told as the job's end.
        """
        job = self.known.get(spec["id"])
        if job is not None or spec["id"] in self._forgotten:
            return job
        job = HostJob(spec)
        try:
            if refusal:
                raise ValueError(refusal)
            self.watcher.begin(job, self.starter.start(job, spec, self._graded(spec)))
            self._busy_at = time.monotonic()
        except (OSError, ValueError) as err:
            if job.box is not None:
                self.ender.empty_boxes.append(job.box)
            job.reason = why if refusal else "failed_to_start"
            job.detail = str(err)
            self._report(job)
        self.known[job.id] = job
        return job

    def _graded(self, spec: dict[str, Any]) -> HostJob | None:
        """The job that this one grades, if any. Raises ValueError."""
        graded = self.known.get(spec.get("grades") or "")
        if spec.get("grades") and (graded is None or graded.reason is None):
            raise ValueError(f"{spec['grades']} has not ended here: it cannot be graded")
        return graded

    def knows(self, id: str) -> bool:
        """Return True if a job of this id was ever started here."""
        return id in self.known or id in self._forgotten

    # -- model calls -------------------------------------------------------------------------

    def meter(self, program: bytes, orders: dict[str, Any], done: Callable[[str], None]) -> None:
        """See to it that the machine has a meter with these orders."""
        pid = self.metering.begin(program, orders, done)
        if pid:
            self.trash.helpers.add(pid)
            with contextlib.suppress(OSError):  # what jobs send to it must not take the memory of the machine
                enclose(self.host, METER_GROUP, pid, max(LEAST_FOR_METER, host_memory() // 4))

    def _on_meter(self, told: dict[str, Any]) -> None:
        """Act on what the meter reports unasked about a job that runs."""
        job = self.live.get(told.get("attempt", ""))
        if job is None or job.why is not None or job.settling:
            return
        if told["tell"] == "wedged":  # it would go on asking for days
            self.ender.ask(job, "model", job.grace)
        elif told["tell"] == "refused":
            self.ender.ask(job, "budget", job.grace)

    def _unmetered(self) -> None:
        """End the jobs that call models: they cannot go on without a meter, whatever the agent did."""
        for job in [job for job in self.live.values() if job.metered]:
            if job.why is None and not job.settling:
                self.ender.ask(job, "unmetered", job.grace)

    # -- ends --------------------------------------------------------------------------------

    def forget(self, ids: list[str], again: bool) -> None:
        """Drop ended jobs. Their ids stay taken, unless `again` says that they may be started anew."""
        jobs = [self.known[id] for id in ids if id in self.known and id not in self.live]
        if not again:
            ids_text = "".join(json.dumps(job.id) + "\n" for job in jobs)
            os.write(self._tombstones, ids_text.encode())
            self._forgotten.update(job.id for job in jobs)
        for job in jobs:
            del self.known[job.id]
            self.trash.discard(job.path)

    def verify(self, digest: str, files: dict[str, Any], shared: bool) -> str:
        """Return the name of a bundle's file that is not as it must be. Then the bundle and its set-up go."""
        steps = [job.id for job in self.known.values() if job.in_bundle and job.bundle == digest]
        wrong = self.bundles.verify(digest, files, set_up=bool(steps), shared=shared)
        if wrong:
            self.bundles.drop(digest)
            self.trash.discard("bundles/" + digest)
            self.forget(steps, again=True)
        return wrong

    def changed_file(self, spec: dict[str, Any]) -> str:
        """Return a file of its benchmark that was changed since it was verified, if the job would be new."""
        if self.knows(spec["id"]) or spec.get("in_bundle"):
            return ""
        bundles = [spec.get(key) or "" for key in ("bundle", "task_bundle", "score_bundle")]
        return next((wrong for name in bundles if name and (wrong := self.bundles.changed(name))), "")

    def clear(self) -> bool:
        """End all jobs and drop them as if they had never been. Successful set-up stays."""
        gone = self.ender.kill_everything("stopped")
        self.ender.children.clear()  # all were reaped: their pids may be anybody's
        self.trash.helpers.clear()
        self.trash.restore()
        kept = {id for id, job in self.known.items() if job.in_bundle and job.code == 0}
        self.forget([id for id in self.known if id not in kept], again=True)
        os.ftruncate(self._tombstones, 0)
        self._forgotten.clear()
        return gone

    def tidy(self, now: float) -> None:
        """Remove what nobody needs any more. To be called now and then."""
        self.ender.empty_boxes = [box for box in self.ender.empty_boxes if not box.remove()]
        if self.trash.is_full or (now > self._busy_at + IDLE_S and not self.live):
            self.trash.empty()


def ids_in(tombstones: bytes) -> Iterator[str]:
    for line in tombstones.splitlines():
        with contextlib.suppress(ValueError):  # cut short by a crash or a full disk
            yield str(json.loads(line))
