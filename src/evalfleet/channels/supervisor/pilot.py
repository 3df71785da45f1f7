"""A machine that is a job of a service, a pilot: its supervisor runs while the job does and ends with it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from .files import make_key, read_key
from .machine import halt_machine, order, remove_machine
from .mailbox import HttpPost, Relay, hide_memory, open_post, opened, sealed
from .main import start

TYPE_CHECKING = False  # importing typing would cost 3 ms
if TYPE_CHECKING:
    from typing import IO, Any, NoReturn

    from .mailbox import Post

ORDER_S = 30.0
PATIENCE_S, RETRY_S = 600.0, 5.0
STORE_PACE_S = (1.0, 2.0)
RESTARTED, NO_KVM = 76, 77
"""The job's exit code where the service has run it anew, so that what ran there before is lost; and where no
virtual machine can be made that the benchmark needs."""
MARKS = "mark"
ALLOCATED, START, END, STOP = (f"{MARKS}/{name}" for name in ("allocated", "start", "end", "stop"))
"""What is written down in the mailbox: when the node was had, that the pilot has begun, how it has ended, and
that it is asked to leave."""
STOP_S = 2.0
LOCK_S = 0.5
KVM_CREATE_VM = 0xAE01


def hold(folder: Path, seconds: float, post: Post | None, pace_s: tuple[float, float] = (0.2, 1.0)) -> int:
    """Be the machine in this folder until its time is over, it is told to leave or the service ends the job.

    `post`: its mailbox, if it is reached by one. Returns the job's exit code.
    """
    began = time.monotonic()

    def leave(signum: int, frame: object) -> NoReturn:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, leave)
    os.environ["EVALFLEET_MACHINE"] = str(folder)
    os.environ["EVALFLEET_PILOT"] = "1"
    relay: Relay | None = None
    try:
        # a process that was forked would have the token, too
        problem = _start_apart(folder) if isinstance(post, HttpPost) else start(str(folder))
        if problem:
            sys.stderr.write(f"{problem}\n")
            return 1
        left_s = seconds - (time.monotonic() - began)
        order(folder, {"op": "expire", "seconds": left_s}, ORDER_S)
        if post is not None:
            relay = Relay(post, read_key(str(folder)), str(folder), *pace_s)
            threading.Thread(target=relay.run, daemon=True).start()
        with open(folder / "supervisor.lock", "r+b") as lock:
            _wait_for(lock)  # it has the lock while it lives: at its expiry it leaves
    except SystemExit:  # the service takes the node back: what runs is not to blame for its end
        with contextlib.suppress(OSError):
            order(folder, {"op": "evict"}, ORDER_S)
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        halt_machine(folder)
        if relay is not None:
            relay.stop()
    return 0


def _wait_for(lock: IO[bytes]) -> None:
    """Looks again and again: a signal that comes just before a call that blocks, or to another thread, would
    be seen only once that returns."""
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOCK_S)


def _start_apart(folder: Path) -> str:
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    argv = [sys.executable, "-I", "-S", root, str(folder)]
    return "" if subprocess.run(argv, stdin=subprocess.DEVNULL).returncode == 0 else "no supervisor starts"


def why_no_kvm() -> str:
    """Make a virtual machine, of nothing: that /dev/kvm is there does not mean that it works."""
    try:
        with open("/dev/kvm", "r+b", buffering=0) as kvm:
            os.close(fcntl.ioctl(kvm, KVM_CREATE_VM, 0))
    except OSError as err:
        return f"/dev/kvm: {err.strerror or err}"
    return ""


def main(box: dict[str, Any], folder: Path) -> int:
    """A machine of a service that shares no files with the controller, in a new folder of its node.

    `box`: the `way` to its mailbox, its `key`, `life_s`, how long it may run, and `kvm`, whether it must be
    able to run virtual machines. Of all starts of the job, the first one counts: mail that was read once is
    not read again by another one.
    """
    life = PilotLife(open_post(box["way"]), box["key"])
    hide_memory()
    about = {"start": start_name(), "node": node_name(), "at": time.time()}
    if not life.begin(about):
        sys.stderr.write("the service has run this job anew: what ran before is lost\n")
        return RESTARTED
    problem = why_no_kvm() if box.get("kvm") else ""
    if problem:
        sys.stderr.write(f"{problem}\n")
        life.end(problem, NO_KVM)
        return NO_KVM
    os.mkdir(folder, 0o700)
    make_key(str(folder), box["key"])
    threading.Thread(target=life.watch, args=(folder, box["life_s"]), daemon=True).start()
    why, code = "", 1
    try:
        code = hold(folder, life.left_s(box["life_s"]), life.post, STORE_PACE_S)
        why = "no supervisor starts" if code else "expired"
    except SystemExit:
        why, code = "stopped" if life.stopped else "evicted", 0
        raise
    finally:
        remove_machine(folder)
        life.end(why, code)
    return code


def start_name() -> str:
    """The name of this start of the job as Slurm calls it; elsewhere one that nothing else has."""
    job = os.environ.get("SLURM_JOB_ID")
    return f"{job}.{os.environ.get('SLURM_RESTART_COUNT', '0')}" if job else os.urandom(8).hex()


def node_name() -> str:
    return os.environ.get("SLURMD_NODENAME") or platform.node()


class PilotLife:
    """What a pilot and its mailbox tell each other of the pilot's life."""

    def __init__(self, post: Post, key: str) -> None:
        self.post, self.key = post, key
        self.began = time.monotonic()
        self.stopped = self.knows_allocated = False

    def begin(self, about: dict[str, Any]) -> bool:
        """Are we the first? Again and again while the store is away."""
        content, until = sealed(self.key, START, about), time.monotonic() + PATIENCE_S
        while True:
            try:
                # the answer to an earlier try may have been lost on its way to us
                return self.post.create(START, content) or self.post.read(START) == content
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(RETRY_S)

    def end(self, why: str, code: int) -> None:
        ran_s = round(time.monotonic() - self.began, 3)
        said = {"why": why, "code": code, "ran_s": ran_s, "at": time.time()}
        with contextlib.suppress(OSError):
            self.post.create(END, sealed(self.key, END, said))

    def left_s(self, life_s: float) -> float:
        """The life of a machine begins when its node was had, if that is written down: before this."""
        left_s = life_s - (time.monotonic() - self.began)
        try:
            had = opened(self.key, ALLOCATED, self.post.read(ALLOCATED) or b"")[0]
            left_s = min(left_s, max(0.0, life_s - (time.time() - float(had["at"]))))
            self.knows_allocated = True
        except (OSError, ValueError, KeyError, TypeError):
            pass  # nobody has seen it yet
        return left_s

    def watch(self, folder: Path, life_s: float) -> None:
        """End this process, as its service would, as soon as somebody says so in the mailbox; and let the
        machine end sooner once somebody has written down when its node was had."""
        while True:
            time.sleep(STOP_S)
            with contextlib.suppress(OSError, ValueError):
                if not self.knows_allocated:
                    left_s = self.left_s(life_s)
                    if self.knows_allocated:
                        order(folder, {"op": "expire", "seconds": left_s}, ORDER_S)
                content = self.post.read(STOP)
                if content is not None and opened(self.key, STOP, content):
                    self.stopped = True
                    os.kill(os.getpid(), signal.SIGTERM)
                    return
