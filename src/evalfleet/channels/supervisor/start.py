"""The start of a job: its folder, its files, its environment, and the process that becomes its command.

A job's process is watched by a wrapper, which records `pid` and `exit`: so the job outlives the supervisor.
For most jobs the wrapper is `sh`. A job that is isolated, or that grades another, has a keeper: a fork of the
supervisor that stays the supervisor's user. An isolated job can neither end its keeper nor write for it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal

from .bundles import folder_of, more_folders
from .files import make_folders, read_file
from .graded_files import Grading
from .isolation import USER, Box, HostIsolation, confine
from .processes import spawn

TYPE_CHECKING = False  # importing typing would cost 3 ms
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    from .bundles import Bundles
    from .job import HostJob
    from .meter_process import MeterProcess

FAILED = 125
PRIVATE = ("work", "out", "home", "tmp")

# Builtins only: each fork would cost 1 ms, and `read` takes a system call a byte. Under `set -C` the
# redirection creates `pid` or fails, so of all wrappers of one id ever started, one runs the command. The
# trap lets the wrapper outlive a SIGTERM to its group and record the exit code; commands get the default
# action back.
WRAPPER = """\
cd "$1" || exit 125
set -C
{ echo $$ >pid; } 2>/dev/null || exit 125
set +C
trap : HUP INT TERM
__j=$1
cd "$2" || exit 125
shift 2
"$@"
__s=$?
echo $__s >"$__j/exit"
exit $__s
"""


class Starter:
    """A starter of jobs. `host` is what keeps isolated ones apart."""

    def __init__(self, home: str, environ: dict[str, str], bundles: Bundles, metering: MeterProcess) -> None:
        self.host = HostIsolation(home)
        self._home = home
        self._environ = environ
        self._bundles = bundles
        self._metering = metering

    def start(self, job: HostJob, spec: dict[str, Any], graded: HostJob | None) -> int:
        """Start a job, which may grade another. Returns the pid of its wrapper. Harmless if one runs already.

        Raises OSError, ValueError."""
        if not spec["argv"]:
            raise ValueError("the command is empty")
        bundle, more = folder_of(job.bundle), more_folders(spec)
        about = {name: value for name, value in spec.items() if name != "secrets"}
        if spec.get("isolation") == "user":
            about["box"] = self._isolate(job, spec).record()
        else:
            make_folders(job.path, ("work", "out"))
        with open(job.path + "/job.json", "w") as file:
            file.write(json.dumps(about))
        if bundle and not job.in_bundle:
            self._bundles.link(bundle, job.path + "/work")
        for folder in more:
            self._bundles.link(folder, job.path + "/work", over=True)
        path = f"{self._home}/{job.path}"
        cwd = f"{self._home}/{bundle}" if bundle and job.in_bundle else path + "/work"
        environ = self._environment(job, spec)
        grading = self._grading(job, graded)
        if grading is not None:
            environ.update(grading.environ())
        if job.box is None and grading is None:
            return spawn(["sh", "-c", WRAPPER, "evalfleet", path, cwd, *spec["argv"]], environ, job.log.path)
        shown = [*(grading.shown() if grading is not None else [])]
        for folder in filter(None, (bundle, *more)):
            shown.append((f"{self._home}/{folder}", True))
            if job.box is not None:
                self._bundles.open_up(folder)

        def become() -> None:
            if job.box is not None:
                confine(job.box, self.host, path, shown, int(spec.get("processes") or 0))
            os.chdir(cwd)
            execute(spec["argv"], environ)

        return start_kept(path, become, grading)

    def _environment(self, job: HostJob, spec: dict[str, Any]) -> dict[str, str]:
        path = f"{self._home}/{job.path}"
        environ = {**self._environ}
        if job.box is not None:
            environ.update({"HOME": path + "/home", "USER": USER, "LOGNAME": USER, "TMPDIR": "/tmp"})
        environ.update({**spec.get("env", {}), **spec.get("secrets", {})})
        if job.metered:
            environ.update(self._metering.open(job, spec["metered"]))
            environ["EVALFLEET_METER"] = f"127.0.0.1:{self._metering.port}"
            for name in ("NO_PROXY", "no_proxy"):  # the meter is here, whatever is between us and the world
                environ[name] = ",".join(filter(None, (environ.get(name), "127.0.0.1")))
        environ["EVALFLEET_MACHINE"] = self._home
        environ["EVALFLEET_JOB"] = job.id
        environ["EVALFLEET_OUT"] = path + "/out"
        return environ

    def _isolate(self, job: HostJob, spec: dict[str, Any]) -> Box:
        """Make the bounds of a job, and its folders its own."""
        if self.host.why_not:
            raise ValueError(f"jobs cannot be isolated here: {self.host.why_not}")
        make_folders(job.path, PRIVATE)
        os.chmod(job.path, 0o711)
        job.box = Box.make(self.host, int(spec.get("processes") or 0), int(spec.get("memory_bytes") or 0))
        job.box.own(*(f"{job.path}/{name}" for name in PRIVATE))
        return job.box

    def _grading(self, job: HostJob, graded: HostJob | None) -> Grading | None:
        """Return what a job that grades another needs; None for other jobs."""
        if graded is None:
            return None
        return Grading(
            f"{self._home}/{graded.path}",
            f"{self._home}/{job.path}/aside",
            graded.box.uid if graded.box is not None else -1,
            job.box.uid if job.box is not None else -1,
        )


# -- keepers -----------------------------------------------------------------------------------------


def start_kept(folder: str, become: Callable[[], None], grading: Grading | None) -> int:
    """Fork a keeper for the job in a folder. Returns its pid. Raises OSError.

    The keeper makes the files of a job that grades ready, and forks. Its child calls `become`.
    """
    __import__("resource")  # now: each fork would load it anew
    pid = os.fork()
    if pid:
        return pid
    code = FAILED
    try:
        code = keep(folder, become, grading)
    except BaseException as err:  # in a fork: what the supervisor does next must not run here, too
        with contextlib.suppress(OSError):
            os.write(2, f"{type(err).__name__}: {err}\n".encode())
    finally:
        os._exit(code)


def keep(folder: str, become: Callable[[], None], grading: Grading | None) -> int:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, outlive)  # a handler, not SIG_IGN, which the command would inherit
    os.setsid()
    os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)  # the supervisor's connections and lock
    try:
        new_file(folder + "/pid", read_file("/proc/self/stat") or b"%d\n" % os.getpid())
    except FileExistsError:
        return FAILED  # another one of this id was started
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(folder + "/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    for target, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, target)
    put_back = grading.prepared() if grading is not None else None
    problem, report = os.pipe()
    child = os.fork()
    if not child:
        try:
            for signum in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(signum, signal.SIG_DFL)  # Python ignores them; a job expects the default
            become()
        except BaseException as err:  # in a fork that becomes the command, or nothing
            os.write(report, f"{type(err).__name__}: {err}".encode())
        finally:
            os._exit(FAILED)
    os.close(report)
    _, status = os.waitpid(child, 0)
    why = os.read(problem, 4096)
    if put_back is not None:
        put_back()
    if why:
        os.write(2, b"the job could not be started: " + why + b"\n")
        return FAILED
    code = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    new_file(folder + "/exit", b"%d\n" % code)
    return code


def execute(argv: list[str], environ: dict[str, str]) -> NoReturn:
    code = 127
    path = environ.get("PATH", os.defpath)
    for folder in [""] if "/" in argv[0] else path.split(":"):  # os.execvpe would load modules first
        program = os.path.join(folder, argv[0])
        try:
            os.execve(program, argv, environ)
        except OSError as err:
            if err.errno == errno.ENOEXEC:  # a script that does not say what it is for: the shell's
                os.execve("/bin/sh", ["sh", program, *argv[1:]], environ)
            if err.errno not in (errno.ENOENT, errno.ENOTDIR) and os.path.lexists(program):
                code = 126
    why = "not found" if code == 127 else "cannot be executed"
    os.write(2, f"{argv[0]}: {why}\n".encode("utf-8", "replace"))
    os._exit(code)


def outlive(signum: int, frame: object) -> None:
    """The keeper records how the command ended by a signal to both."""


def new_file(path: str, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)
