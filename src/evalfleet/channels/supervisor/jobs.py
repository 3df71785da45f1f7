"""The jobs of a machine, from start to forgotten. The working directory is the machine's."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import time

from .files import make_folders, read_file, write_atomic
from .graded_files import Grading
from .isolation import USER, Box, HostIsolation, enclose, host_memory, open_up
from .job import NEVER, WRAPPER, WRAPPER_FAILED, HostJob
from .keeper import Bounds, KeptCommand, start_kept
from .meter_process import MeterProcess
from .parcel import has_bundle
from .processes import (
    age,
    birth,
    environ_of,
    is_still,
    kill,
    kill_marked,
    marked,
    marker,
    markers_of_jobs,
    parse_stat,
    reap_all,
    spawn,
)
from .seals import Seals
from .trash import Trash

TYPE_CHECKING = False  # importing typing would cost 3 ms
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

SETTLE_S = 5.0
LOST_AFTER_S = 2.0
POLL_S = 0.5
METER_GROUP, LEAST_FOR_METER = "meter", 256 << 20
BY_SIGNAL = (None, 128 + signal.SIGTERM, 128 + signal.SIGKILL)
"""The exit codes of a command that was told to end, by whomever."""
DOUBT_S, SIGNAL_DOUBT_S = 0.02, 2.0
"""So long after the end of a job, or after its end by a signal, that may turn out to be an eviction."""
WARNED_S = 30.0
"""So long after SIGCONT any end may turn out to be an eviction. Slurm sends it to all processes of a job
before it sends SIGTERM to the first of them: a job that heard that one before us cannot be taken for one that
ended by itself, however slowly the signals come."""
IDLE_S = 10.0
PRIVATE = ("work", "out", "home", "tmp")


class Jobs:
    """All jobs known here, and what must be done about them when.

    `tell(job)` is called once for each that ends. `due` may be early, never late: `tick` is to be called
    then, and `on_child` after every SIGCHLD.
    """

    def __init__(
        self,
        home: str,
        environ: dict[str, str],
        selector: selectors.BaseSelector,
        tell: Callable[[HostJob], None],
    ) -> None:
        self.home = home
        self.environ = {**environ, "EVALFLEET_MACHINE": home}
        self.selector = selector
        self.tell = tell
        self.known: dict[str, HostJob] = {}
        self.live: dict[str, HostJob] = {}
        self.due = NEVER
        self.may_be_evicted = False  # by a signal to all processes here, which reaches us in any order
        self.warned_until = 0.0
        self._mark = marker("EVALFLEET_MACHINE", home)
        self._children: dict[int, HostJob] = {}
        self._helpers: set[int] = set()
        self._trash = Trash(self.environ, self._helpers)
        self._forgotten: set[str] = set()
        self._tombstones = -1
        self._bundles: dict[str, tuple[int, list[str]]] = {}
        self._busy_at = 0.0
        self._host: HostIsolation | None = None
        self._opened: set[str] = set()
        self._empty_boxes: list[Box] = []
        self._left: list[HostJob] = []
        self.seals = Seals()
        self.metering = MeterProcess(selector, self.environ, self._on_meter, self._unmetered)
        self.wants: Callable[[HostJob, dict[str, Any]], None] | None = None  # its calls wait for more money

    @property
    def host(self) -> HostIsolation:
        """What this host offers to keep jobs apart, found out when it is first asked for."""
        if self._host is None:
            self._host = HostIsolation(self.home)
            write_atomic("groups", json.dumps(list(self._host.groups.values())))
        return self._host

    # -- beginnings --------------------------------------------------------------------------

    def restore(self) -> None:
        """Take up what a predecessor in this directory left."""
        self._forgotten = set(ids_in(read_file("forgotten") or b""))
        self._tombstones = os.open("forgotten", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._trash.restore()
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
        self._adopt(job)

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
            self._launch(job, spec)
        except (OSError, ValueError) as err:
            job.reason = why if refusal else "failed_to_start"
            job.detail = str(err)
            self.tell(job)
        self.known[job.id] = job
        return job

    def knows(self, id: str) -> bool:
        """Was a job of this id ever started here?"""
        return id in self.known or id in self._forgotten

    def _launch(self, job: HostJob, spec: dict[str, Any]) -> None:
        """Start the job's wrapper. Raises OSError or ValueError; harmless if one runs already."""
        argv = spec["argv"]
        if not argv:
            raise ValueError("the command is empty")
        bundle = self._bundle(job)
        told = {name: value for name, value in spec.items() if name != "secrets"}
        if spec.get("isolation") == "user":
            job.box = self._box(job, spec)
            told["box"] = job.box.told()
        else:
            make_folders(job.path, ("work", "out"))
        try:
            job.pid = self._launch_command(job, spec, bundle, told)
        except BaseException:
            if job.box is not None:
                self._empty_boxes.append(job.box)
            raise
        job.child = True
        self._children[job.pid] = job
        self.live[job.id] = job
        self._busy_at = time.monotonic()
        job.run_from(self._busy_at)
        self.due = min(self.due, job.due)

    def _launch_command(self, job: HostJob, spec: dict[str, Any], bundle: str, told: dict[str, Any]) -> int:
        """The pid of the job's wrapper, or of its keeper if it is isolated or grades."""
        with open(job.path + "/job.json", "w") as file:
            file.write(json.dumps(told))
        if bundle and not job.in_bundle:
            self._link(bundle, job.path + "/work")
        for more in more_bundles(spec):
            self._link(more, job.path + "/work", over=True)
        path = f"{self.home}/{job.path}"
        environ = {**self.environ, **spec.get("env", {}), **spec.get("secrets", {})}
        if job.metered:
            environ.update(self.metering.open(job, spec["metered"]))
            environ["EVALFLEET_METER"] = f"127.0.0.1:{self.metering.port}"
            for name in ("NO_PROXY", "no_proxy"):  # the meter is here, whatever is between us and the world
                environ[name] = ",".join(filter(None, (environ.get(name), "127.0.0.1")))
        environ["EVALFLEET_MACHINE"] = self.home
        environ["EVALFLEET_JOB"] = job.id
        environ["EVALFLEET_OUT"] = path + "/out"
        cwd = f"{self.home}/{bundle}" if bundle and job.in_bundle else path + "/work"
        grading = self._grading(job, spec)
        if grading is not None:
            environ.update(grading.environ())
        bounds = None
        if job.box is not None:
            own = {"HOME": path + "/home", "USER": USER, "LOGNAME": USER, "TMPDIR": "/tmp"}
            environ.update((name, value) for name, value in own.items() if name not in spec.get("env", {}))
            shown = [*(grading.shown() if grading is not None else []), *self._shown(bundle, spec)]
            bounds = Bounds(job.box, self.host, shown, int(spec.get("processes") or 0))
        if bounds is None and grading is None:
            return spawn(["sh", "-c", WRAPPER, "evalfleet", path, cwd, *spec["argv"]], environ, job.log.path)
        return start_kept(KeptCommand(path, cwd, spec["argv"], environ, bounds, grading))

    def _box(self, job: HostJob, spec: dict[str, Any]) -> Box:
        """Make the bounds of a job, and its folders its own. Raises OSError, ValueError."""
        if self.host.why_not:
            raise ValueError(f"jobs cannot be isolated here: {self.host.why_not}")
        make_folders(job.path, PRIVATE)
        os.chmod(job.path, 0o711)
        box = Box.make(self.host, int(spec.get("processes") or 0), int(spec.get("memory_bytes") or 0))
        box.own(*(f"{job.path}/{name}" for name in PRIVATE))
        return box

    def _shown(self, bundle: str, spec: dict[str, Any]) -> list[tuple[str, bool]]:
        """The files of its benchmark that an isolated job sees, read-only."""
        shown: list[tuple[str, bool]] = []
        for folder in (bundle, *more_bundles(spec)):
            if folder and folder not in self._opened:
                open_up(folder)
                self._opened.add(folder)
            if folder:
                shown.append((f"{self.home}/{folder}", True))
        return shown

    def _grading(self, job: HostJob, spec: dict[str, Any]) -> Grading | None:
        """What a job that grades another needs. Raises ValueError."""
        if not spec.get("grades"):
            return None
        graded = self.known.get(spec["grades"])
        if graded is None or graded.reason is None:
            raise ValueError(f"{spec['grades']} has not ended here: it cannot be graded")
        return Grading(
            f"{self.home}/{graded.path}",
            f"{self.home}/{job.path}/aside",
            graded.box.uid if graded.box is not None else -1,
            job.box.uid if job.box is not None else -1,
        )

    def _bundle(self, job: HostJob) -> str:
        """Where the job's bundle is; empty for none. `*` is the one that was prepared last, if any."""
        if job.bundle == "*":
            with os.scandir("bundles") as entries:
                found = [
                    (e.stat().st_mtime, e.path)
                    for e in entries
                    if not e.name.endswith((".tmp", ".part")) and not e.name.startswith(("score-", "task-"))
                ]
            return max(found)[1] if found else ""
        if not job.bundle:
            return ""
        if "/" in job.bundle or job.bundle.startswith("."):
            raise ValueError(f"no name for a bundle: {job.bundle}")
        return "bundles/" + job.bundle

    def _link(self, bundle: str, work: str, over: bool = False) -> None:
        """Link what is in the bundle; `over`: also where something else of that name is linked."""
        changed = os.stat(bundle).st_mtime_ns
        entries = self._bundles.get(bundle)
        if entries is None or entries[0] != changed:
            entries = self._bundles[bundle] = (changed, os.listdir(bundle))
        for name in entries[1]:
            if over and os.path.islink(f"{work}/{name}"):
                os.unlink(f"{work}/{name}")
            with contextlib.suppress(FileExistsError):  # an earlier start got this far
                os.symlink(f"{self.home}/{bundle}/{name}", f"{work}/{name}")

    def _adopt(self, job: HostJob) -> None:
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
        self.live[job.id] = job
        self._look(job)

    def _look(self, job: HostJob) -> None:
        """Does an adopted job live?"""
        pid, born = parse_stat(read_file(job.path + "/pid"))
        now = time.monotonic()
        if pid is not None and born is not None and self._is_wrapper(job, pid, born):
            if job.pid is None:
                job.pid, job.born = pid, born
                job.run_from(now - age(birth(pid) or 0, job.path + "/pid"))
                self._watch(job, pid)
            job.due = now
        elif pid is not None or now > job.started + LOST_AFTER_S:
            self._over(job, job.exit_code())
        else:
            job.due = now + 0.02  # its wrapper is just writing it
        self.due = min(self.due, job.due)

    def _is_wrapper(self, job: HostJob, pid: int, born: int) -> bool:
        return is_still(pid, born, self._mark, marker("EVALFLEET_JOB", job.id))

    def _watch(self, job: HostJob, pid: int) -> None:
        try:
            job.pidfd = os.pidfd_open(pid)
        except (AttributeError, OSError):
            return  # an old Python or kernel: it is polled

        def ended(key: selectors.SelectorKey, events: int) -> None:
            self._look(job)

        self.selector.register(job.pidfd, selectors.EVENT_READ, ended)

    def _unwatch(self, job: HostJob) -> None:
        if job.pidfd is not None:
            self.selector.unregister(job.pidfd)
            os.close(job.pidfd)
            job.pidfd = None

    # -- while they run ----------------------------------------------------------------------

    def tick(self, now: float, heard: float) -> None:
        """Do what is due. `heard` is when a controller last spoke."""
        if self._left:
            self._open_boxes()
        for job in list(self.live.values()):
            self._tend(job, now, heard)
        due = min((job.due for job in self.live.values()), default=NEVER)
        self.due = 0.0 if self._left else due

    def _tend(self, job: HostJob, now: float, heard: float) -> None:
        if job.settling:
            return self._settle(job)
        polled = not job.child and job.pidfd is None
        if polled:
            self._look(job)
            if job.settling or job.reason is not None or job.pid is None:
                return None
        if job.why is not None:
            if now >= job.kill_at:
                self._signal(job, signal.SIGKILL)
                job.kill_at = now + 1.0
        elif now >= job.deadline:
            self.end(job, "timed_out", job.grace)
        elif now >= heard + job.lease:
            self.end(job, "lease", job.grace)
        elif now >= job.growth.due and job.growth.stuck(now):
            self.end(job, "stalled", job.grace)
        if now >= job.log_due:
            job.log_due = now + job.log.check()
        ends = job.kill_at if job.why else min(job.deadline, heard + job.lease, job.growth.due)
        job.due = min(job.log_due, ends)
        if polled:
            job.due = min(job.due, now + POLL_S)
        return None

    def end(self, job: HostJob, why: str, grace: float) -> None:
        """Ask it to end, and kill it after the grace."""
        self.note_why(job, why)
        job.kill_at = job.due = time.monotonic() + grace
        self.due = min(self.due, job.due)
        self._signal(job, signal.SIGTERM)

    def note_why(self, job: HostJob, why: str) -> None:
        """Why it ends, also for a successor, should we not see its end."""
        job.why = why
        with contextlib.suppress(OSError):
            write_atomic(job.path + "/why", why)

    # -- model calls -------------------------------------------------------------------------

    def meter(self, program: bytes, orders: dict[str, Any], done: Callable[[str], None]) -> None:
        """See to it that the machine has a meter with these orders."""
        pid = self.metering.begin(program, orders, done)
        if pid:
            self._helpers.add(pid)
        if pid and self._host is not None:  # what jobs send to it must not take the memory of the machine
            with contextlib.suppress(OSError):
                enclose(self._host, METER_GROUP, pid, max(LEAST_FOR_METER, host_memory() // 4))

    def _on_meter(self, told: dict[str, Any]) -> None:
        """What the meter says unasked of a job that runs."""
        job = self.live.get(told.get("attempt", ""))
        if job is None or job.why is not None or job.settling:
            return
        if told["tell"] == "wants" and self.wants is not None:
            self.wants(job, told)
        elif told["tell"] == "wedged":  # it would go on asking for days
            self.end(job, "model", job.grace)
        elif told["tell"] == "refused":
            self.end(job, "budget", job.grace)

    def _unmetered(self) -> None:
        """There is no meter any more: what calls models cannot go on, and says nothing about the agent."""
        for job in [job for job in self.live.values() if job.metered]:
            if job.why is None and not job.settling:
                self.end(job, "unmetered", job.grace)

    def _signal(self, job: HostJob, signum: int) -> None:
        # its pid is its own as long as we have not reaped it
        if job.pid is not None and (job.child or self._is_wrapper(job, job.pid, job.born)):
            kill(job.pid, signum, group=True)

    # -- ends --------------------------------------------------------------------------------

    def on_child(self) -> None:
        for pid, code in reap_all():
            job = self._children.pop(pid, None)
            if job is None:
                self._helpers.discard(pid)
            elif code == WRAPPER_FAILED and job.exit_code() is None:
                self._wrapper_failed(job)
            elif code < 0:
                self._wrapper_killed(job, -code)
            else:
                self._over(job, code)
        for job in [job for job in self.live.values() if job.settling]:
            self._settle(job)

    def _wrapper_failed(self, job: HostJob) -> None:
        """The wrapper ran nothing: another one has (a start was repeated), or it could not."""
        owner = parse_stat(read_file(job.path + "/pid"))[0]
        if owner is not None and owner != job.pid:
            return self._adopt(job)
        job.why = "failed_to_start"
        job.detail = f"the wrapper could not start it (is the disk full?) {job.log.tail()}"
        return self._over(job, None)

    def _wrapper_killed(self, job: HostJob, signum: int) -> None:
        """Its wrapper was killed by us, or after its last word; if by a stranger, the job is lost."""
        code = job.exit_code()
        self._over(job, 128 + signum if code is None and job.why is not None else code)

    def _over(self, job: HostJob, code: int | None) -> None:
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
        self._settle(job)

    def _settle(self, job: HostJob) -> None:
        now = time.monotonic()
        found = job.child and job.pid is not None and kill(job.pid, signal.SIGKILL, group=True)
        if job.box is not None:
            found = job.box.kill() or found
        else:
            for pid in self._strays(job):
                found = kill(pid, signal.SIGKILL) or found
        if (found and now < job.settle_until) or now < job.doubt_until:
            job.due = now + 0.02
            self.due = min(self.due, job.due)
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
        found: list[int] = []
        for pid in map(int, kids.split()):
            if pid not in self._children and pid not in self._helpers:
                environ = environ_of(pid)
                # without a mark it can only be this job's if there is no other
                if mine in environ or (self._mark not in environ and len(self.live) == 1):
                    found.append(pid)
        return found

    def _finish(self, job: HostJob) -> None:
        job.end()
        if job.in_bundle:
            self._opened.clear()  # it has made files there
        self.live.pop(job.id, None)
        with contextlib.suppress(OSError):
            job.log.finish()
        if job.box is not None:
            self._left.append(job)
            self.due = 0.0  # after its end is told: that takes a while
        if job.metered:
            self.metering.close(job)
        if not job.graded:
            self._trash.discard(job.path + "/work")
        else:
            write_atomic(job.path + "/ended", "")  # its working directory stays, to be graded
        self.tell(job)

    def _open_boxes(self) -> None:
        """What only isolated jobs have goes with them, but for their artefacts."""
        for job in self._left:
            if job.box is not None and not job.box.remove():
                self._empty_boxes.append(job.box)
            for name in ("home", "tmp"):
                self._trash.discard(f"{job.path}/{name}")
        self._left = []

    def kill_everything(self, why: str) -> bool:
        """End all jobs at once. False if something of them still lives."""
        for job in self.live.values():
            if job.why is None:
                self.end(job, why, 0.0)
            self._signal(job, signal.SIGKILL)
            if job.box is not None:
                job.box.kill()
        self._kill_children(time.monotonic() + SETTLE_S)
        gone = kill_marked(SETTLE_S, *markers_of_jobs(self.home))
        for job in list(self.live.values()):
            job.seconds = time.monotonic() - job.started
            self._unwatch(job)
            self._finish(job)
        self._open_boxes()
        self.metering.end()
        return gone

    def _kill_children(self, until: float) -> None:
        """All that is left below us, also what bears no mark: as children die, theirs become ours."""
        while time.monotonic() < until:
            reap_all()
            kids = read_file(f"/proc/self/task/{os.getpid()}/children")
            if not kids:
                return
            for pid in map(int, kids.split()):
                kill(pid, signal.SIGKILL)
            time.sleep(0.002)

    def forget(self, ids: list[str], again: bool) -> None:
        """Drop ended jobs. Their ids stay taken, unless `again` says that they may be started anew."""
        jobs = [self.known[id] for id in ids if id in self.known and id not in self.live]
        if not again:
            ids_text = "".join(json.dumps(job.id) + "\n" for job in jobs)
            os.write(self._tombstones, ids_text.encode())
            self._forgotten.update(job.id for job in jobs)
        for job in jobs:
            del self.known[job.id]
            self._trash.discard(job.path)

    def verify(self, digest: str, files: dict[str, Any], shared: bool) -> str:
        """The name of a file of a bundle that is not as it must be: then the bundle and its set-up go."""
        steps = [job.id for job in self.known.values() if job.in_bundle and job.bundle == digest]
        wrong = self.seals.verify(digest, files, set_up=bool(steps), shared=shared)
        if wrong:
            self.seals.drop(digest)
            self._opened.discard("bundles/" + digest)
            self._bundles.pop("bundles/" + digest, None)
            self._trash.discard("bundles/" + digest)
            self.forget(steps, again=True)
        return wrong

    def changed_file(self, spec: dict[str, Any]) -> str:
        """A file of its benchmark that was changed since it was verified, if the job would be started now."""
        if self.knows(spec["id"]) or spec.get("in_bundle"):
            return ""
        bundles = [spec.get(key) or "" for key in ("bundle", "task_bundle", "score_bundle")]
        return next((wrong for name in bundles if name and (wrong := self.seals.changed(name))), "")

    def forget_set_up(self) -> None:
        """What set the machine up may be run again."""
        self.forget([job.id for job in self.known.values() if job.in_bundle], again=True)

    def clear(self) -> bool:
        """End all jobs and drop them as if they had never been; what set the machine up stays."""
        gone = self.kill_everything("stopped")
        self._children.clear()  # all were reaped: their pids may be anybody's
        self._helpers.clear()
        self._trash.restore()
        kept = {id for id, job in self.known.items() if job.in_bundle and job.code == 0}
        self.forget([id for id in self.known if id not in kept], again=True)
        os.ftruncate(self._tombstones, 0)
        self._forgotten.clear()
        return gone

    def tidy(self, now: float) -> None:
        """Remove what nobody needs any more. To be called now and then."""
        self._empty_boxes = [box for box in self._empty_boxes if not box.remove()]
        if self._trash.is_full or (now > self._busy_at + IDLE_S and not self.live):
            self._trash.empty()


def more_bundles(spec: dict[str, Any]) -> list[str]:
    """Where the bundles are that a job has beside its benchmark's; a later one hides what others have."""
    names = (str(spec.get(key) or "") for key in ("task_bundle", "score_bundle"))
    return ["bundles/" + name for name in names if name and has_bundle(name)]


def ids_in(tombstones: bytes) -> Iterator[str]:
    for line in tombstones.splitlines():
        with contextlib.suppress(ValueError):  # cut short by a crash or a full disk
            yield str(json.loads(line))
