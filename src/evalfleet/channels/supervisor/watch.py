"""The watch on jobs that run: time limits, leases, silence, and whether their wrapper is still there."""

from __future__ import annotations

import os
import selectors
import signal
import time

from .files import read_file
from .host import NEVER
from .processes import age, birth, parse_stat, reap_all
from .start import FAILED

TYPE_CHECKING = False  # importing typing would cost 3 ms
if TYPE_CHECKING:
    from .end import Ender
    from .job import HostJob

LOST_AFTER_S = 2.0
POLL_S = 0.5


class Watcher:
    """A watch on the jobs that are live. `tick` is to be called when one is due, `on_child` after each
    SIGCHLD."""

    def __init__(self, selector: selectors.BaseSelector, ender: Ender) -> None:
        self._selector = selector
        self._ender = ender
        self._live = ender.live

    def begin(self, job: HostJob, wrapper: int) -> None:
        """Watch a job that was just started."""
        job.pid, job.child = wrapper, True
        self._ender.children[wrapper] = job
        self._live[job.id] = job
        job.run_from(time.monotonic())

    def adopt(self, job: HostJob) -> None:
        """Watch a job whose wrapper is not our child."""
        job.child, job.pid = False, None
        job.run_from(time.monotonic())
        if job.why is not None:
            job.kill_at = job.started + job.grace
        gone = not os.path.exists(job.path + "/work")  # what goes last of a job when it ends
        if gone or (job.graded and os.path.exists(job.path + "/ended")):
            job.seconds = job.unwatched_seconds()
            job.code = job.exit_code()
            job.end()
            return
        self._live[job.id] = job
        self._look(job)

    def _look(self, job: HostJob) -> None:
        """Find out whether an adopted job lives."""
        pid, born = parse_stat(read_file(job.path + "/pid"))
        now = time.monotonic()
        if pid is not None and born is not None and self._ender.is_wrapper(job, pid, born):
            if job.pid is None:
                job.pid, job.born = pid, born
                job.run_from(now - age(birth(pid) or 0, job.path + "/pid"))
                self._wait_for(job, pid)
            job.due = now
        elif pid is not None or now > job.started + LOST_AFTER_S:
            self._ender.over(job, job.exit_code())
        else:
            job.due = now + 0.02  # its wrapper is just writing it

    def _wait_for(self, job: HostJob, pid: int) -> None:
        try:
            job.pidfd = os.pidfd_open(pid)
        except (AttributeError, OSError):
            return  # an old Python or kernel: it is polled

        def ended(key: selectors.SelectorKey, events: int) -> None:
            self._look(job)

        self._selector.register(job.pidfd, selectors.EVENT_READ, ended)

    def tick(self, now: float, heard: float) -> None:
        """Do what is due. `heard` is when a controller last spoke."""
        for job in list(self._live.values()):
            self._tend(job, now, heard)

    def _tend(self, job: HostJob, now: float, heard: float) -> None:
        ender = self._ender
        if job.settling:
            return ender.settle(job)
        polled = not job.child and job.pidfd is None
        if polled:
            self._look(job)
            if job.settling or job.reason is not None or job.pid is None:
                return None
        if job.why is not None:
            if now >= job.kill_at:
                ender.signal(job, signal.SIGKILL)
                job.kill_at = now + 1.0
        elif now >= job.deadline:
            ender.ask(job, "timed_out", job.grace)
        elif now >= heard + job.lease:
            ender.ask(job, "lease", job.grace)
        elif now >= job.growth.due and job.growth.stuck(now):
            ender.ask(job, "stalled", job.grace)
        if now >= job.log_due:
            job.log_due = now + job.log.check()
        ends = job.kill_at if job.why else min(job.deadline, heard + job.lease, job.growth.due)
        job.due = min(job.log_due, ends, now + POLL_S if polled else NEVER)
        return None

    def on_child(self) -> None:
        """Reap the children that have ended."""
        for pid, code in reap_all():
            job = self._ender.children.pop(pid, None)
            if job is None:
                self._ender.helpers.discard(pid)
            elif code == FAILED and job.exit_code() is None:
                self._wrapper_failed(job)
            elif code < 0:
                # by us, or after its last word; if by a stranger, the job is lost
                recorded = job.exit_code()
                killed = recorded is None and job.why is not None
                self._ender.over(job, 128 - code if killed else recorded)
            else:
                self._ender.over(job, code)
        for job in [job for job in self._live.values() if job.settling]:
            self._ender.settle(job)

    def _wrapper_failed(self, job: HostJob) -> None:
        """The wrapper ran nothing: another one has (a start was repeated), or it could not."""
        owner = parse_stat(read_file(job.path + "/pid"))[0]
        if owner is not None and owner != job.pid:
            return self.adopt(job)
        job.why = "failed_to_start"
        job.detail = f"the wrapper could not start it (is the disk full?) {job.log.tail()}"
        return self._ender.over(job, None)
