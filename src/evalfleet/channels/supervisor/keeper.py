"""Keepers: forks of the supervisor, each of which starts one job and records how it ended.

A keeper stays the supervisor's user: it writes `pid` and `exit` as the `sh` wrapper of other jobs does, and
an isolated job can neither end it nor write for it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal

from .files import read_file
from .isolation import confine

TYPE_CHECKING = False  # importing typing would cost 3 ms
if TYPE_CHECKING:
    from typing import NoReturn

    from .graded_files import Grading
    from .isolation import Box, HostIsolation

FAILED = 125


class Bounds:
    """What an isolated job is given: a user and groups, and other folders than its own to see, each with
    whether it is read-only. `processes`: at most so many; 0: as many as any job may have."""

    def __init__(self, box: Box, host: HostIsolation, shown: list[tuple[str, bool]], processes: int) -> None:
        self.box = box
        self.host = host
        self.shown = shown
        self.processes = processes


class KeptCommand:
    """What a keeper is to start: the command, the job's folder, where it works, its environment.

    `bounds`: those of an isolated job. `grading`: what is made ready for a job that grades another.
    """

    def __init__(
        self,
        folder: str,
        cwd: str,
        argv: list[str],
        environ: dict[str, str],
        bounds: Bounds | None,
        grading: Grading | None,
    ) -> None:
        self.folder = folder
        self.cwd = cwd
        self.argv = argv
        self.environ = environ
        self.bounds = bounds
        self.grading = grading


def start_kept(command: KeptCommand) -> int:
    """Start a command. Returns the pid of its keeper. Raises OSError."""
    __import__("resource")  # now: each fork would load it anew
    pid = os.fork()
    if pid:
        return pid
    code = FAILED
    try:
        code = _keep(command)
    except BaseException as err:  # in a fork: what the supervisor does next must not run here, too
        with contextlib.suppress(OSError):
            os.write(2, f"{type(err).__name__}: {err}\n".encode())
    finally:
        os._exit(code)


def _keep(command: KeptCommand) -> int:
    """Be a keeper."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, _outlive)  # a handler, not SIG_IGN, which the command would inherit
    os.setsid()
    os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)  # the supervisor's connections and lock
    try:
        _new_file(command.folder + "/pid", read_file("/proc/self/stat") or b"%d\n" % os.getpid())
    except FileExistsError:
        return FAILED  # another one of this id was started
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(command.folder + "/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    if command.bounds is not None:
        os.fchown(log, command.bounds.box.uid, command.bounds.box.uid)  # /dev/stderr can be opened then
    for target, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, target)
    put_back = command.grading.prepared() if command.grading is not None else None
    problem, tell = os.pipe()
    child = os.fork()
    if not child:
        _become(command, tell)
    os.close(tell)
    _, status = os.waitpid(child, 0)
    why = os.read(problem, 4096)
    if put_back is not None:
        put_back()
    if why:
        os.write(2, b"the job could not be started: " + why + b"\n")
        return FAILED
    code = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    _new_file(command.folder + "/exit", b"%d\n" % code)
    return code


def _become(command: KeptCommand, tell: int) -> NoReturn:
    """Be the command."""
    try:
        for signum in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(signum, signal.SIG_DFL)  # Python ignores them; a job expects the default
        bounds = command.bounds
        if bounds is not None:
            confine(bounds.box, bounds.host, command.folder, bounds.shown, bounds.processes)
        os.chdir(command.cwd)
    except BaseException as err:  # in a fork that becomes the command, or nothing: its parent is told
        os.write(tell, f"{type(err).__name__}: {err}".encode())
        os._exit(FAILED)
    _execute(command.argv, command.environ)


def _execute(argv: list[str], environ: dict[str, str]) -> NoReturn:
    code = 127
    path = environ.get("PATH", os.defpath)
    for folder in [""] if "/" in argv[0] else path.split(":"):  # os.execvpe would load modules first
        try:
            os.execve(os.path.join(folder, argv[0]), argv, environ)
        except OSError as err:
            if err.errno == errno.ENOEXEC:  # a script that does not say what it is for: the shell's
                os.execve("/bin/sh", ["sh", os.path.join(folder, argv[0]), *argv[1:]], environ)
            if err.errno not in (errno.ENOENT, errno.ENOTDIR) and os.path.lexists(
                os.path.join(folder, argv[0])
            ):
                code = 126
    why = "not found" if code == 127 else "cannot be executed"
    os.write(2, f"{argv[0]}: {why}\n".encode("utf-8", "replace"))
    os._exit(code)


def _outlive(signum: int, frame: object) -> None:
    """The keeper records how the command ended by a signal to both."""


def _new_file(path: str, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)
