"""Keepers: forks of the supervisor, each of which starts one job and records how it ended.

A keeper stays root: it and its child write `pid` and `exit` as the `sh` wrapper of other jobs does, and an
isolated job can neither end it nor write for it. Who joins a control group waits for the kernel, so a
supervisor keeps a few spares that have done so, each with a user and groups that no job has had. A keeper
whose supervisor is gone before it has got a job goes, too. When its job has ended, a keeper says so before it
goes: the end of what the job saw of the file system, which waits for the kernel, is nobody's business then.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal

from .files import read_file
from .graded_files import Grading
from .host import steady
from .isolation import Box, FileView, apart, confine, libc

TYPE_CHECKING = False  # importing typing would cost 3 ms
if TYPE_CHECKING:
    from typing import Any

FAILED = 125
ANOTHER = b"another one of this id was started"


class StartOrder:
    """What a keeper is to start: the command, the job's folder, where it works, and what it is given.

    `path` is the folder seen from the machine's directory. `graded` is how to make a `Grading`, for a job
    that grades another; `shown` are the folders that an isolated one sees, and whether each is read-only.
    """

    def __init__(
        self,
        folder: str,
        path: str,
        cwd: str,
        argv: list[str],
        environ: dict[str, str],
        graded: list[Any] | None = None,
        shown: list[tuple[str, bool]] | None = None,
        processes: int = 0,
    ) -> None:
        self.folder = folder
        self.path = path
        self.cwd = cwd
        self.argv = argv
        self.environ = environ
        self.graded = graded
        self.shown = shown
        self.processes = processes


class Bounds:
    """What an isolated job will have: its user and groups, its view of the files, and its folder, open."""

    def __init__(self, box: Box, view: FileView, folder: int) -> None:
        self.box = box
        self.view = view
        self.folder = folder


class Keeper:
    """The supervisor's end of a keeper. `bounds`: those of the job that it will start, if isolated.

    `ended` can be read from once an isolated job has ended and its exit code is recorded.

    There are two processes: the keeper, and its child, which waits for the order and becomes the command.
    Both are told at once, so that the child need not wait for the keeper, but for what grades: its files are
    made ready by the keeper first.
    """

    def __init__(self, bounds: Bounds | None) -> None:
        __import__("resource")  # now, as libc: each fork would load it anew

        if bounds is not None:
            libc()
        self.box = bounds.box if bounds is not None else None
        kept, started, ended = os.pipe(), os.pipe(), os.pipe()
        self._pipes = [kept[1], started[1]]
        self.ended = ended[0]
        self.pid = os.fork()
        if self.pid:
            for fd in (kept[0], started[0], ended[1], *([bounds.folder] if bounds is not None else [])):
                os.close(fd)
            return
        code = FAILED
        try:
            code = _keep(kept[0], *started, ended[1], bounds)
        except BaseException as err:  # in a fork: what the supervisor does next must not run here, too
            with contextlib.suppress(OSError):
                os.write(2, f"{type(err).__name__}: {err}\n".encode())
        finally:
            os._exit(code)

    def start(self, order: StartOrder) -> None:
        """Raises OSError if the keeper is gone."""
        words = json.dumps(vars(order)).encode() + b"\n"
        try:
            _write_all(self._pipes[0], words)
            if order.graded is None:
                with contextlib.suppress(BrokenPipeError):  # the keeper tells why its child is gone
                    _write_all(self._pipes[1], words)
        finally:
            self.dismiss()

    def dismiss(self) -> None:
        """Tell it that it gets no (other) job: without one, it goes."""
        for fd in self._pipes:
            os.close(fd)
        self._pipes = []


def _keep(kept: int, ordered: int, give: int, ended: int, bounds: Bounds | None) -> int:
    """Be a keeper. `kept` tells it of the job; `ordered` and `give` are the ends of its child's pipe."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, _outlive)  # a handler, not SIG_IGN, which the command would inherit
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for target in (0, 1, 2):
        os.dup2(null, target)
    folder = bounds.folder if bounds is not None else null
    _close_all_but(kept, ordered, give, ended, folder)  # the supervisor's connections and lock
    problem, tell = os.pipe()
    child = os.fork()
    if not child:
        for fd in (kept, give, problem, ended):
            os.close(fd)
        _become(ordered, tell, bounds)
    os.close(ordered)
    os.close(tell)
    os.close(folder)
    order = _read_order(kept)
    if order is None:
        return FAILED
    put_back = None
    if order.graded is not None:
        put_back = Grading(*order.graded).prepared()
        order.graded = None
        with contextlib.suppress(BrokenPipeError):  # it has told its problem
            _write_all(give, json.dumps(vars(order)).encode() + b"\n")
    os.close(give)
    with contextlib.suppress(OSError):
        os.open(f"/proc/{child}/ns/mnt", os.O_RDONLY)  # the view ends with this process, not with the command
    _, status = os.waitpid(child, 0)
    why = os.read(problem, 4096)
    if put_back is not None:
        put_back()
    if not why and not os.path.exists(order.folder + "/pid"):
        why = b"whoever waited to become it was killed"
    if why:
        if why != ANOTHER:
            os.dup2(_open_log(order, bounds), 2)
            os.write(2, b"the job could not be isolated: " + why + b"\n")
        return FAILED
    code = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    _new_file(order.folder + "/exit", b"%d\n" % code)
    with contextlib.suppress(BrokenPipeError):  # that supervisor is gone; the next one watches this process
        os.write(ended, b"ended")
    return code


def _become(ordered: int, tell: int, bounds: Bounds | None) -> None:
    """Be the command."""
    try:
        for signum in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(signum, signal.SIG_DFL)  # Python ignores them; a job expects the default
        keeper = os.getppid()
        if bounds is not None:
            apart(bounds.box, bounds.view, bounds.folder)
        order = _read_order(ordered)
        if order is None:
            os._exit(FAILED)
        try:
            _new_file(order.path + "/pid", _about(keeper))  # not by its whole name, which may be covered
        except FileExistsError:
            os.write(tell, ANOTHER)
            os._exit(FAILED)
        log = _open_log(order, bounds)
        for target in (1, 2):
            os.dup2(log, target)
        if bounds is not None:
            confine(bounds.box, bounds.view, order.folder, order.shown or [], order.processes)
        os.chdir(order.cwd)
    except BaseException as err:  # in a fork that becomes the command, or nothing: its parent is told
        os.write(tell, f"{type(err).__name__}: {err}".encode())
        os._exit(FAILED)
    _execute(order.argv, order.environ)


def _about(keeper: int) -> bytes:
    """Its pid and birth, and when the job began: a spare may have waited for long."""
    return (read_file(f"/proc/{keeper}/stat") or b"%d\n" % keeper) + b"began %.2f\n" % steady()


def _open_log(order: StartOrder, bounds: Bounds | None) -> int:
    log = os.open(order.path + "/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    if bounds is not None:
        os.fchown(log, bounds.box.uid, bounds.box.uid)  # /dev/stderr can be opened then
    return log


def _execute(argv: list[str], environ: dict[str, str]) -> None:
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


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _read_order(fd: int) -> StartOrder | None:
    """None if it does not come, or not whole: whoever would have told it is gone."""
    words = b""
    while not words.endswith(b"\n"):
        chunk = os.read(fd, 1 << 16)
        if not chunk:
            return None
        words += chunk
    os.close(fd)
    return StartOrder(**json.loads(words))


def _close_all_but(*kept: int) -> None:
    begin = 3
    for fd in (*sorted(kept), max(map(int, os.listdir("/proc/self/fd"))) + 1):
        os.closerange(begin, fd)
        begin = fd + 1
