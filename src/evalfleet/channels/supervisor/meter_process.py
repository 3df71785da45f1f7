"""The machine's meter of model calls: how its supervisor starts it, finds it again, and asks it.

The meter is a process of its own in the folder `meter`, so that calls go on while no supervisor lives. The
real keys come with the controller's orders. The supervisor passes them on and writes them nowhere.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import selectors
import socket
import sys

from .files import make_folder, read_file, write_atomic
from .output import CALLS

TYPE_CHECKING = False  # importing typing would cost 3 ms
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .job import HostJob

FOLDER = "meter"
SOCKET = FOLDER + "/meter.sock"
PROGRAM = FOLDER + "/meter.pyz"
PID = FOLDER + "/pid"
ANSWER_S = 5.0
PIPE_BYTES = 1 << 20
MOST_SAID = 1 << 20
LIST_CAP = 64 << 20
SETPIPE_SZ = 1031
SUMS = (
    *("usd", "calls", "unknown", "unknown_usd", "unknown_tokens"),
    *("throttled", "tokens", "models", "refused", "wedged"),
)
NO_CALLS = {"calls": 0, "usd": 0.0, "unknown": 0, "unknown_usd": 0.0}
TOKENS = ("in", "cached", "cache_write", "out", "reasoning")


class MeterProcess:
    """The meter as its supervisor sees it. The working directory is the machine's.

    `news` is called with what the meter tells unasked, `gone` when it is found to have ended.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        environ: dict[str, str],
        news: Callable[[dict[str, Any]], None],
        gone: Callable[[], None],
    ) -> None:
        self.port = 0  # 0: there is no meter
        self._selector = selector
        self._environ = environ
        self._news = news
        self._gone = gone
        self._watch: socket.socket | None = None
        self._said = b""
        self._starting: list[Callable[[str], None]] = []

    # -- its life ----------------------------------------------------------------------------

    def restore(self) -> None:
        """Find the meter that a supervisor before us has started."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            self._begin_watch()

    def begin(self, program: bytes, orders: dict[str, Any], done: Callable[[str], None]) -> int:
        """Start a meter if there is none. `orders` say where it listens. `done` is told what is wrong, or "".

        Returns the pid of a new one, else 0.
        """
        if self.port:
            done("")
            return 0
        self._starting.append(done)
        if len(self._starting) > 1:
            return 0
        try:
            return self._start(program, orders)
        except OSError as err:
            self._started(f"the meter cannot be started: {err}")
            return 0

    def instruct(self, orders: dict[str, Any]) -> str:
        """Pass on the meter's orders. Returns what is wrong with them, or "". Raises OSError, ValueError."""
        if not self.port:
            return "the meter has ended"
        return str(self.ask({"do": "orders", **orders}).get("wrong", ""))

    def _start(self, program: bytes, orders: dict[str, Any]) -> int:
        import subprocess  # only here: it is slow to load

        make_folder(FOLDER)
        os.chmod(FOLDER, 0o700)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(SOCKET)
        with open(PROGRAM, "wb") as file:
            file.write(program)
        reading, writing = os.pipe()
        try:
            with contextlib.suppress(OSError):
                fcntl.fcntl(writing, SETPIPE_SZ, PIPE_BYTES)  # so that we need not wait for its first steps
            process = subprocess.Popen(
                (sys.executable, "-I", "-S", PROGRAM),
                stdin=reading,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=self._environ,
                start_new_session=True,
            )
            _write_all(writing, _line({"folder": FOLDER, "upstreams": {}, **orders}))
        finally:
            os.close(reading)
            os.close(writing)
        write_atomic(PID, (read_file(f"/proc/{process.pid}/stat") or b"%d\n" % process.pid).decode())
        assert process.stdout is not None
        output = os.dup(process.stdout.fileno())
        process.stdout.close()
        process.returncode = 0  # whoever reaps our children reaps it
        said = bytearray()

        def heard(key: selectors.SelectorKey, events: int) -> None:
            data = os.read(output, 1 << 16)
            said.extend(data)
            if data and b"\n" not in said:
                return
            self._selector.unregister(output)
            os.close(output)
            self._on_first_line(bytes(said))

        self._selector.register(output, selectors.EVENT_READ, heard)
        return int(process.pid)

    def _on_first_line(self, said: bytes) -> None:
        try:
            json.loads(said)["port"]
            self._begin_watch()
        except (OSError, ValueError, KeyError, TypeError):
            lines = said.decode("utf-8", "replace").strip().splitlines()
            return self._started(lines[-1] if lines else "the meter ended at once")
        return self._started("")

    def _started(self, wrong: str) -> None:
        waiting, self._starting = self._starting, []
        for done in waiting:
            done(wrong)

    def _begin_watch(self) -> None:
        sock = _connected()
        try:
            sock.sendall(_line({"do": "watch"}))
            first, _, self._said = _first_line(sock).partition(b"\n")
            told = json.loads(first)
            self.port = int(told["port"])
        except BaseException:
            sock.close()
            raise
        sock.setblocking(False)
        self._watch = sock
        self._selector.register(sock, selectors.EVENT_READ, self._on_watch)

    def _on_watch(self, key: selectors.SelectorKey, events: int) -> None:
        sock = self._watch
        if sock is None:
            return
        try:
            data = sock.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or len(self._said) > MOST_SAID:
            self._leave()
            self._gone()
            return
        *lines, self._said = (self._said + data).split(b"\n")
        for line in lines:
            told = json.loads(line)
            if "tell" in told:
                self._news(told)

    def _leave(self) -> None:
        if self._watch is not None:
            self._selector.unregister(self._watch)
            self._watch.close()
        self._watch, self.port, self._said = None, 0, b""

    def end(self) -> None:
        """The machine is for somebody else now, whose calls another meter counts."""
        if self.port:
            with contextlib.suppress(OSError, ValueError):
                self.ask({"do": "end"})
        self._leave()

    # -- questions ---------------------------------------------------------------------------

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Raises OSError, ValueError."""
        with _connected() as sock:
            sock.sendall(_line(question))
            answer: dict[str, Any] = json.loads(_first_line(sock))
            return answer

    def open(self, job: HostJob, metered: dict[str, Any]) -> dict[str, str]:
        """The variables by which a job's command finds the meter, with a key of its own. Raises OSError."""
        key = "ef-" + os.urandom(20).hex()
        folder = f"{job.path}/{FOLDER}"
        make_folder(folder)
        os.chmod(folder, 0o700)
        limits = {name: metered[name] for name in ("usd", "tokens") if metered.get(name) is not None}
        try:
            self.ask({"do": "open", "attempt": job.id, "key": key, "folder": folder, **limits})
        except ValueError as err:
            raise OSError(errno.EPROTO, f"the meter answered nonsense: {err}") from None
        url = f"http://127.0.0.1:{self.port}"
        given: dict[str, str] = metered["env"]
        return {name: text.replace("{url}", url).replace("{key}", key) for name, text in given.items()}

    def close(self, job: HostJob) -> None:
        """Once a job has ended: what it used, in a file of its own; and its calls are an artefact of it."""
        sums: dict[str, Any] = {}
        if self.port:
            with contextlib.suppress(OSError, ValueError):
                sums = self.ask({"do": "close", "attempt": job.id})
        folder = f"{job.path}/{FOLDER}"
        if "usd" not in sums:
            sums = _sums_of(folder)
        told = {name: sums[name] for name in SUMS if name in sums}
        with contextlib.suppress(OSError):
            write_atomic(f"{job.path}/metered.json", json.dumps(told))
        for name in (CALLS, "calls"):
            with contextlib.suppress(OSError):  # it made none, or has put a folder of its own there
                os.replace(f"{folder}/{name}", f"{job.path}/out/{name}")


def _sums_of(folder: str) -> dict[str, Any]:
    """What a job used, from the list of its calls: its meter is gone. What was in flight is unknown."""
    calls: dict[int, dict[str, Any]] = {}
    for line in (read_file(f"{folder}/{CALLS}", LIST_CAP) or b"").splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            call = json.loads(line)
            calls[call["n"]] = call  # what is said of its end goes before what was said of its beginning
    for call in [*calls.values()]:
        begun = calls.get(call.get("of", 0))
        if begun is not None:  # its answer was fetched later, and counts there
            calls[begun["n"]] = {"model": begun.get("model"), "usd": 0.0}
    whole: dict[str, Any] = {**NO_CALLS, "unknown_tokens": 0, "throttled": 0, "tokens": {}, "models": {}}
    for call in calls.values():
        of_model = whole["models"].setdefault(str(call.get("model")), {**NO_CALLS, "tokens": {}})
        is_unknown = "usd" not in call and ("status" not in call or "at_most_tokens" in call)
        for sums in (whole, of_model):
            sums["calls"] += 1
            sums["usd"] += call.get("usd", 0.0)
            sums["unknown"] += is_unknown
            sums["unknown_usd"] += call.get("at_most_usd", 0.0)
            for kind in TOKENS:
                if kind in call:
                    sums["tokens"][kind] = sums["tokens"].get(kind, 0) + call[kind]
        told = call.get("in", 0) + call.get("out", 0)
        whole["unknown_tokens"] += max(0, call.get("at_most_tokens", 0) - told)
        whole["throttled"] += call.get("status") == 429
    return whole


def _connected() -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(ANSWER_S)
        sock.connect(SOCKET)  # relative: an address holds 108 bytes
    except BaseException:
        sock.close()
        raise
    return sock


def _first_line(sock: socket.socket) -> bytes:
    said = b""
    while b"\n" not in said:
        data = sock.recv(1 << 16)
        if not data:
            raise OSError(errno.EPIPE, "the meter hung up")
        said += data
    return said


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
