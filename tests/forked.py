"""Processes of evalfleet that find all its modules loaded: a process that has loaded them forks each one.

Loading them is most of what a short command costs, and the tests start thousands. A process made so has its
own folder, variables, standard streams and signals. It differs from `python -m evalfleet` in three ways.
/proc shows the variables and the words of the process that forked it, so it is not for tests that look for
secrets there. It is no child of the tests, so the process that forked it tells how it ended. Its memory is
not cleared at the end, because that would copy all that is shared.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import importlib.metadata
import json
import os
import pkgutil
import runpy
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

READ_AT_START = ("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "GLIBC_", "GCONV_", "OPENSSL_", "SSLKEYLOGFILE")
"""How the names of variables begin that are read only as Python starts: a server has one value of each."""
PRELOADED = ("cli", "api", "benchmarks", "places", "places.slurm", "web")
"""Rooms of evalfleet whose modules are loaded before."""
PRELOADED_OTHERS = ("aiohttp.web",)
"""What stand-ins load."""
_LENGTH = struct.Struct("!I")
_servers: dict[tuple[tuple[str, str], ...], ForkServer] = {}


@dataclass(frozen=True)
class Request:
    """A process that is asked for."""

    words: Sequence[str]
    folder: str
    environ: Mapping[str, str]
    network: str = ""
    """The network namespace that it is in; none: that of the tests."""
    module: str = "evalfleet"
    """What is run as `python -m` does."""
    code: str = ""
    """What is run instead, as `python -c` does."""


class Forked:
    """A process that was forked elsewhere, with the methods of `Popen` that tests need."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status
        """The end of a pipe that tells how the process ended."""

    def poll(self) -> int | None:
        return self._take(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._take(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("evalfleet", timeout or 0)
        return code

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _take(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout_s)[0]:
            told = os.read(self._status, _LENGTH.size)
            os.close(self._status)
            assert told, f"who forked {self.pid} ended before it"
            self.returncode = os.waitstatus_to_exitcode(_LENGTH.unpack(told)[0])
        return self.returncode

    def __del__(self) -> None:
        if self.returncode is None:
            os.close(self._status)


class ForkServer:
    """The process that forks, seen from this one."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._end, theirs = socket.socketpair()
        with theirs:
            argv = [sys.executable, __file__, str(theirs.fileno())]
            self._server = subprocess.Popen(
                argv, cwd="/", env=environ, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )
        atexit.register(self.close)

    def fork(self, request: Request, streams: list[int]) -> Forked:
        status, told = os.pipe()
        data = json.dumps(asdict(request)).encode()
        socket.send_fds(self._end, [_LENGTH.pack(len(data))], [*streams, told])
        self._end.sendall(data)
        os.close(told)
        (pid,) = _LENGTH.unpack(_exactly(self._end, _LENGTH.size))
        return Forked(pid, status)

    def close(self) -> None:
        self._end.close()
        self._server.wait()


def fork(request: Request, streams: Sequence[int | IO[bytes]]) -> Forked:
    """Start `python -m MODULE WORDS` with these standard streams."""
    read = {name: value for name, value in request.environ.items() if name.startswith(READ_AT_START)}
    key = tuple(sorted(read.items()))
    if key not in _servers:
        _servers[key] = ForkServer(read)
    numbers = [stream if isinstance(stream, int) else stream.fileno() for stream in streams]
    return _servers[key].fork(request, numbers)


# -- in the process that forks -----------------------------------------------------------------------


def _exactly(end: socket.socket, count: int) -> bytes:
    """So many bytes, or fewer if the other one has closed."""
    data = b""
    while len(data) < count and (more := end.recv(count - len(data))):
        data += more
    return data


def _serve(end: socket.socket) -> Request:
    """Fork for each request. Returns only in processes that were forked: what each is to run."""
    pipes: dict[int, tuple[int, int]] = {}  # pidfd -> pid, and where its end is told
    with selectors.DefaultSelector() as selector:
        selector.register(end, selectors.EVENT_READ)
        while True:
            for ready, _ in selector.select():
                if ready.fd != end.fileno():
                    pid, pipe = pipes.pop(ready.fd)
                    selector.unregister(ready.fd)
                    with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
                        os.write(pipe, _LENGTH.pack(os.waitpid(pid, 0)[1]))
                    os.close(pipe)
                    os.close(ready.fd)
                    continue
                head, fds, *_ = socket.recv_fds(end, _LENGTH.size, 4)
                if not head:
                    os._exit(0)
                data = _exactly(end, *_LENGTH.unpack(head))
                *streams, pipe = fds
                pid = os.fork()
                if not pid:
                    for fd in (*pipes, *(kept for _, kept in pipes.values()), pipe):
                        os.close(fd)
                    selector.close()
                    end.close()
                    request = Request(**json.loads(data))
                    _become(request, streams)
                    return request
                for fd in streams:
                    os.close(fd)
                watched = os.pidfd_open(pid)
                pipes[watched] = pid, pipe
                selector.register(watched, selectors.EVENT_READ)
                end.sendall(_LENGTH.pack(pid))


def _become(request: Request, streams: list[int]) -> None:
    """Bring about what `python -m evalfleet WORDS` finds as it begins."""
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    if request.network:
        from lab.system import enter_network

        enter_network(Path(request.network))
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environ)
    time.tzset()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path[0] = request.folder
    sys.argv = ["evalfleet", *request.words]
    _open_streams()


def _open_streams() -> None:
    encoding = sys.stdout.encoding
    sys.stdin = os.fdopen(0, encoding=encoding, closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding=encoding, closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, encoding, "backslashreplace", closefd=False)


def _run(request: Request) -> None:
    """Run it, and end as Python does, but for clearing its memory."""
    code = 0
    try:
        if request.code:
            exec(compile(request.code, "<string>", "exec"), vars(sys.modules["__main__"]))
        else:
            runpy.run_module(request.module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.main_thread():
            thread.join()
    atexit._run_exitfuncs()  # pyright: ignore
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _preload() -> None:
    for name in PRELOADED_OTHERS:
        importlib.import_module(name)
    for room in PRELOADED:
        module = importlib.import_module(f"evalfleet.{room}")
        for each in pkgutil.iter_modules(getattr(module, "__path__", ()), f"{module.__name__}."):
            if not each.name.endswith("__main__"):
                importlib.import_module(each.name)
    gc.collect()
    gc.freeze()  # a collection would write to all objects, and so copy the memory that is shared


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # that of the terminal is for those who were forked
    _preload()
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        wanted = _serve(connection)
    _run(wanted)
