"""The end of a job: it is asked to end, or its wrapper is gone. Then what it left behind is ended, too."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from .files import read_file, write_atomic
from .processes import (
    environ_of,
    is_still,
    kill,
    kill_marked,
    marked,
    marker,
    markers_of_jobs,
    reap_all,
)

TYPE_CHECKING = False  # importing typing would cost 3 ms
if TYPE_CHECKING:
    import selectors
    from collections.abc import Callable

    from .bundles import Bundles
    from .isolation import Box
    from .job import HostJob
    from .meter_process import MeterProcess
    from .trash import Trash

SETTLE_S = 5.0
BY_SIGNAL = (None, 128 + signal.SIGTERM, 128 + signal.SIGKILL)
"""The exit codes of a command that was told to end, by whomever."""
DOUBT_S, SIGNAL_DOUBT_S = 0.02, 2.0
"""So long after the end of a job, or after its end by a signal, that may turn out to be an eviction."""
WARNED_S = 30.0
"""So long after SIGCONT any end may turn out to be an eviction. Slurm sends it to all processes of a job
before it sends SIGTERM to the first of them: a job that heard that one before us cannot be taken for one that
ended by itself, however slowly the signals come."""


class Ender:
    """An ender of the jobs that are `live`. `report(job)` is called once for each, when it has ended.

    `children` are the wrappers that this process has started and not reaped, by pid. `helpers` are its other
    children: the meter, and processes that empty the trash.
    """

    def __init__(
        self,
        home: str,
        live: dict[str, HostJob],
        selector: selectors.BaseSelector,
        trash: Trash,
        bundles: Bundles,
        metering: MeterProcess,
        report: Callable[[HostJob], None],
    ) -> None:
        self.live = live
        self.children: dict[int, HostJob] = {}
        self.helpers = trash.helpers
        self.may_be_evicted = False  # by a signal to all processes here, which reaches us in any order
        self.warned_until = 0.0
        self.left: list[HostJob] = []  # isolated jobs, whose folders and groups are still there
        self.empty_boxes: list[Box] = []
        self._home = home
        self._mark = marker("EVALFLEET_MACHINE", home)
        self._selector = selector
        self._trash = trash
        self._bundles = bundles
        self._metering = metering
        self._report = report

    # -- asked for -------------------------------------------------------------------------------

    def ask(self, job: HostJob, why: str, grace: float) -> None:
        """Ask a job to end. The watch kills it after the grace."""
        self.note_why(job, why)
        job.kill_at = job.due = time.monotonic() + grace
        self.signal(job, signal.SIGTERM)

    def note_why(self, job: HostJob, why: str) -> None:
        """Record why a job ends, also for a successor, should this process not see its end."""
        job.why = why
        with contextlib.suppress(OSError):
            write_atomic(job.path + "/why", why)

    def signal(self, job: HostJob, signum: int) -> None:
        # its pid is its own as long as we have not reaped it
        if job.pid is not None and (job.child or self.is_wrapper(job, job.pid, job.born)):
            kill(job.pid, signum, group=True)

    def is_wrapper(self, job: HostJob, pid: int, born: int) -> bool:
        return is_still(pid, born, self._mark, marker("EVALFLEET_JOB", job.id))

    # -- seen ------------------------------------------------------------------------------------

    def over(self, job: HostJob, code: int | None) -> None:
        """The wrapper is gone: end what it left behind, then the job."""
        if job.settling or job.reason is not None:
            return
        now = time.monotonic()
        job.code = code
        job.seconds = now - job.started if job.pid is not None else job.unwatched_seconds()
        job.settle_until = now + SETTLE_S
        if self.may_be_evicted and job.why is None:
            doubt_s = SIGNAL_DOUBT_S if code in BY_SIGNAL else DOUBT_S
            job.doubt_until = max(now + doubt_s, self.warned_until)
        self._unwatch(job)
        self.settle(job)

    def settle(self, job: HostJob) -> None:
        now = time.monotonic()
        killed = job.child and job.pid is not None and kill(job.pid, signal.SIGKILL, group=True)
        if job.box is not None:
            killed = job.box.kill() or killed
        else:
            for pid in self._strays(job):
                killed = kill(pid, signal.SIGKILL) or killed
        if (killed and now < job.settle_until) or now < job.doubt_until:
            job.due = now + 0.02
        else:
            self._finish(job)

    def _strays(self, job: HostJob) -> list[int]:
        """The job's processes that left its group.

        Orphans become our children, so those are enough to look at, unless the job was a predecessor's.
        """
        mine = marker("EVALFLEET_JOB", job.id)
        kids = read_file(f"/proc/self/task/{os.getpid()}/children") if job.child else None
        if kids is None:
            return marked(self._mark, mine)
        strays: list[int] = []
        for pid in map(int, kids.split()):
            if pid not in self.children and pid not in self.helpers:
                environ = environ_of(pid)
                # without a mark it can only be this job's if there is no other
                if mine in environ or (self._mark not in environ and len(self.live) == 1):
                    strays.append(pid)
        return strays

    def _finish(self, job: HostJob) -> None:
        job.end()
        if job.in_bundle:
            self._bundles.forget_opened()
        self.live.pop(job.id, None)
        with contextlib.suppress(OSError):
            job.log.finish()
        if job.box is not None:
            self.left.append(job)
        if job.metered:
            self._metering.close(job)
        if not job.graded:
            self._trash.discard(job.path + "/work")
        else:
            write_atomic(job.path + "/ended", "")  # its working directory stays, to be graded
        self._report(job)

    def open_boxes(self) -> None:
        """Remove what only isolated jobs have, after their end is reported: that takes a while."""
        for job in self.left:
            if job.box is not None and not job.box.remove():
                self.empty_boxes.append(job.box)
            for name in ("home", "tmp"):
                self._trash.discard(f"{job.path}/{name}")
        self.left = []

    def _unwatch(self, job: HostJob) -> None:
        if job.pidfd is not None:
            self._selector.unregister(job.pidfd)
            os.close(job.pidfd)
            job.pidfd = None

    # -- all at once -----------------------------------------------------------------------------

    def kill_everything(self, why: str) -> bool:
        """End all jobs at once. Returns False if something of them still lives."""
        for job in self.live.values():
            if job.why is None:
                self.ask(job, why, 0.0)
            self.signal(job, signal.SIGKILL)
            if job.box is not None:
                job.box.kill()
        self._kill_children(time.monotonic() + SETTLE_S)
        gone = kill_marked(SETTLE_S, *markers_of_jobs(self._home))
        for job in list(self.live.values()):
            job.seconds = time.monotonic() - job.started
            self._unwatch(job)
            self._finish(job)
        self.open_boxes()
        self._metering.end()
        return gone

    def _kill_children(self, until: float) -> None:
        """Kill all that is left below this process, marked or not. As children die, theirs become ours."""
        while time.monotonic() < until:
            reap_all()
            kids = read_file(f"/proc/self/task/{os.getpid()}/children")
            if not kids:
                return
            for pid in map(int, kids.split()):
                kill(pid, signal.SIGKILL)
            time.sleep(0.002)
