"""Keepers: forks of the supervisor, each of which starts one job and records how it ended.

A keeper stays root: it and its child write `pid` and `exit` as the `sh` wrapper of other jobs does, and an
isolated job can neither end it nor write for it. Who joins a control group waits for the kernel, so a
supervisor keeps a few spares that have done so, each with a user and groups that no job has had. A keeper
whose supervisor is gone before it has got a job goes, too.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal

from .files import read_file
from .grading import Grading
from .host import steady
from .isolation import Box, FileView, apart, confine, libc

TYPE_CHECKING = False  # importing typing would cost 3 ms
if TYPE_CHECKING:
    from typing import Any

FAILED = 125
ANOTHER = b"another one of this id was started"


class StartOrder:
    """What a keeper is to start: the command, the job's folder, where it works, and what it is given.

    `graded` is how to make a `Grading`, for a job that grades another; `view` how to make the `FileView` of
    an isolated one.
    """

    def __init__(
        self,
        folder: str,
        cwd: str,
        argv: list[str],
        environ: dict[str, str],
        graded: list[Any] | None = None,
        view: list[Any] | None = None,
        processes: int = 0,
    ) -> None:
        self.folder = folder
        self.cwd = cwd
        self.argv = argv
        self.environ = environ
        self.graded = graded
        self.view = view
        self.processes = processes


class Keeper:
    """The supervisor's end of a keeper. `box`: the bounds of the job that it will start, if isolated.

    There are two processes: the keeper, and its child, which waits for the order and becomes the command.
    Both are told at once, so that the child need not wait for the keeper, but for what grades: its files are
    made ready by the keeper first.
    """

    def __init__(self, box: Box | None) -> None:
        __import__("resource")  # now, as libc: each fork would load it anew

        if box is not None:
            libc()
        self.box = box
        kept, started = os.pipe(), os.pipe()
        self._pipes = [kept[1], started[1]]
        self.pid = os.fork()
        if self.pid:
            os.close(kept[0])
            os.close(started[0])
            return
        code = FAILED
        try:
            code = _keep(kept[0], *started, box)
        except BaseException as err:
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
        """It gets no (other) job: without one, it goes."""
        for fd in self._pipes:
            os.close(fd)
        self._pipes = []


def _keep(kept: int, ordered: int, give: int, box: Box | None) -> int:
    """Be a keeper. `kept` tells it of the job; `ordered` and `give` are the ends of its child's pipe."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, _outlive)  # a handler, not SIG_IGN, which the command would inherit
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for target in (0, 1, 2):
        os.dup2(null, target)
    _close_all_but(kept, ordered, give)  # the supervisor's connections and lock
    problem, tell = os.pipe()
    child = os.fork()
    if not child:
        for fd in (kept, give, problem):
            os.close(fd)
        _become(ordered, tell, box)
    os.close(ordered)
    os.close(tell)
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
    _, status = os.waitpid(child, 0)
    why = os.read(problem, 4096)
    if put_back is not None:
        put_back()
    if not why and not os.path.exists(order.folder + "/pid"):
        why = b"whoever waited to become it was killed"
    if why:
        if why != ANOTHER:
            os.dup2(_open_log(order, box), 2)
            os.write(2, b"the job could not be isolated: " + why + b"\n")
        return FAILED
    code = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    _new_file(order.folder + "/exit", b"%d\n" % code)
    return code


def _become(ordered: int, tell: int, box: Box | None) -> None:
    """Be the command."""
    try:
        for signum in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(signum, signal.SIG_DFL)  # Python ignores them; a job expects the default
        keeper = os.getppid()
        if box is not None:
            apart(box)
        order = _read_order(ordered)
        if order is None:
            os._exit(FAILED)
        try:
            _new_file(order.folder + "/pid", _about(keeper))
        except FileExistsError:
            os.write(tell, ANOTHER)
            os._exit(FAILED)
        log = _open_log(order, box)
        for target in (1, 2):
            os.dup2(log, target)
        if box is not None and order.view is not None:
            confine(box, FileView(*order.view), order.processes)
        os.chdir(order.cwd)
    except BaseException as err:
        os.write(tell, f"{type(err).__name__}: {err}".encode())
        os._exit(FAILED)
    _execute(order.argv, order.environ)


def _about(keeper: int) -> bytes:
    """Its pid and birth, and when the job began: a spare may have waited for long."""
    return (read_file(f"/proc/{keeper}/stat") or b"%d\n" % keeper) + b"began %.2f\n" % steady()


def _open_log(order: StartOrder, box: Box | None) -> int:
    log = os.open(order.folder + "/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    if box is not None:
        os.fchown(log, box.uid, box.uid)  # /dev/stderr can be opened then
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
