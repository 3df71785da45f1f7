"""Processes: started, recognised again by their birth, found by their marks, and ended."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

from .files import read_file
from .host import steady

TYPE_CHECKING = False  # importing typing would cost 3 ms
if TYPE_CHECKING:
    from typing import Any

KEPT_ENV = frozenset(
    (
        *("PATH", "HOME", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TMPDIR", "TZ", "TERM"),
        *("USER", "LOGNAME", "SHELL", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR"),
        *("http_proxy", "https_proxy", "no_proxy", "all_proxy"),
        *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY"),
        # which GPUs of its node a job of a service was given: without them it would use those of others
        *("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"),
        "ZE_AFFINITY_MASK",
    )
)


_libc: list[Any] = []


def libc() -> Any:
    if not _libc:
        import ctypes

        _libc.append(ctypes.CDLL(None, use_errno=True))
    return _libc[0]


def checked(result: int, what: str) -> None:
    if result:
        import ctypes

        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def environment_of(pid: int) -> dict[str, str]:
    """Return the variables that a process was started with."""
    words = (read_file(f"/proc/{pid}/environ") or b"").decode("utf-8", "surrogateescape").split("\0")
    return dict(word.split("=", 1) for word in words if "=" in word)


def host_environment(environ: Any) -> dict[str, str]:
    """Return what a job may inherit of the environment: where things are, never a key."""
    kept = {name: value for name, value in environ.items() if name in KEPT_ENV}
    kept.setdefault("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    kept.setdefault("LANG", "C.UTF-8")
    return kept


def spawn(argv: list[str], environ: dict[str, str], log: str) -> int:
    """Start `sh` in a session of its own, with nothing of ours but its output in `log`."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, log, flags, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    ignored = [signal.SIGPIPE, signal.SIGXFSZ]  # by Python; a job expects the default
    try:  # a tenth of what subprocess.Popen costs
        return os.posix_spawn("/bin/sh", argv, environ, file_actions=actions, setsid=True, setsigdef=ignored)
    except NotImplementedError:  # no setsid in this system's posix_spawn
        return _fork(argv, environ, log, flags)


def _fork(argv: list[str], environ: dict[str, str], log: str, flags: int) -> int:
    output = os.open(log, flags, 0o600)
    pid = os.fork()
    if pid:
        os.close(output)
        return pid
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, null), (1, output), (2, output)):
            os.dup2(source, target)
        for signum in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD):
            signal.signal(signum, signal.SIG_DFL)
        os.execve("/bin/sh", argv, environ)
    finally:
        os._exit(125)


def birth(pid: int) -> int | None:
    """Return the ticks since boot when a process started. 0: no /proc. None: it does not live."""
    line = read_file(f"/proc/{pid}/stat")
    if line is not None:
        return parse_stat(line)[1]
    if os.path.exists("/proc/self/stat"):
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return 0


def parse_stat(line: bytes | None) -> tuple[int | None, int | None]:
    """Return (pid, birth) of a line of /proc/<pid>/stat, or of a bare pid (birth 0). A zombie has none."""
    head, _, rest = (line or b"").rpartition(b")")
    try:
        if not head:
            return int(rest), 0
        fields = rest.split()
        return int(head.split()[0]), (None if fields[0] in b"ZX" else int(fields[19]))
    except (ValueError, IndexError):
        return None, None


def is_still(pid: int, born: int, *marks: bytes) -> bool:
    """Is it the process that a file was written about? One that has got the pid since has other marks.

    Where the birth was recorded, that tells; where there is no /proc, nobody does.
    """
    now = birth(pid)
    if born or not now:
        return now == born
    environ = environ_of(pid)
    return all(mark in environ for mark in marks)


def environ_of(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return b"\0" + file.read()
    except OSError:
        return b""


def marker(name: str, value: str) -> bytes:
    return b"\0" + name.encode() + b"=" + os.fsencode(value) + b"\0"


def markers_of_jobs(machine: str) -> tuple[bytes, bytes]:
    """Return what only the environments of a machine's jobs have, and not its supervisor's."""
    return marker("EVALFLEET_MACHINE", machine), b"\0EVALFLEET_JOB="


def marked(*markers: bytes) -> list[int]:
    """Return all processes but this one whose environment has every marker. Empty where there is no /proc."""
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []
    me = os.getpid()
    marked_pids: list[int] = []
    for pid in pids:
        environ = b"" if pid == me else environ_of(pid)
        if environ and all(mark in environ for mark in markers):
            marked_pids.append(pid)
    return marked_pids


def kill(pid: int, signum: int, group: bool = False) -> bool:
    """Send a signal. Returns False if there is nothing (of ours) to signal."""
    try:
        (os.killpg if group else os.kill)(pid, signum)
    except OSError:
        return False
    return True


def kill_marked(patience_s: float, *markers: bytes) -> bool:
    """Kill every other process whose environment has the markers. Returns False if one still lives."""
    until = time.monotonic() + patience_s
    while True:
        pids = marked(*markers)
        for pid in pids:
            kill(pid, signal.SIGKILL)
        if not pids:
            return True
        if time.monotonic() > until:
            return False
        time.sleep(0.01)


def reap_all() -> list[tuple[int, int]]:
    """Return (pid, exit code) of each child that has ended. If killed, the code is the signal below 0."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if not pid:
            return ended
        ended.append((pid, -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)))


def adopt_orphans() -> None:
    """Become the parent of whatever a job leaves behind, so that it is found. Best effort, on Linux."""
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(ImportError, OSError, AttributeError):
        libc().prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def age(born: int, file: str) -> float:
    """Return the seconds since a job began: by its wrapper's birth, or since its pid was recorded."""
    began = (read_file(file) or b"").partition(b"\nbegan ")[2]  # an earlier version's, which began late
    with contextlib.suppress(ValueError):
        return max(steady() - float(began), 0.0)
    if born and hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME) - born / os.sysconf("SC_CLK_TCK")
    return max(time.time() - os.stat(file).st_mtime, 0.0)
