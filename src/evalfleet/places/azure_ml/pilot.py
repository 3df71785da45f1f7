"""The program of a machine's job: it is the machine's supervisor for as long as the job may run.

Azure runs it in the job's container (Python 3.8 and later, standard library only). What it needs is in the
blob `way`, which EVALFLEET_WAY leads to and which the first start removes: a job that Azure runs anew finds
nothing there, says so in its place, and leaves. From then on the token in the job's definition leads nowhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, NoReturn, cast

RESTARTED, NO_KVM = 76, 77
ORDER_S = 30.0
HTTP_S = 60.0
TRIES = 5
LOOK_S = 2.0
KVM_CREATE_VM = 0xAE01
PR_SET_DUMPABLE = 4


def ask(method: str, url: str, data: bytes | None = None) -> tuple[int, bytes]:
    """Status and content. Raises OSError if nobody answers, after some tries."""
    headers = {"x-ms-version": "2022-11-02", "x-ms-blob-type": "BlockBlob", "If-None-Match": "*"}
    if method != "PUT":
        headers = {"x-ms-version": "2022-11-02"}
    for left in reversed(range(TRIES)):
        request = urllib.request.Request(url, data=data, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=HTTP_S) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as err:
            err.close()
            if err.code < 500 or not left:
                return err.code, b""
        except OSError:
            if not left:
                raise
        time.sleep(2.0)
    raise AssertionError("the last try has returned")


def take_way(url: str) -> dict[str, Any] | None:
    """What only the first start is told; None for a later one, of which a mark is left."""
    status, content = ask("GET", url)
    if status == 200 and content and ask("DELETE", url)[0] == 202:
        return cast("dict[str, Any]", json.loads(content))
    if status in (200, 404):
        ask("PUT", url, b"")
        return None
    raise OSError(f"the storage answers {status}")


def why_no_kvm() -> str:
    """Make a virtual machine, of nothing: that /dev/kvm is there does not mean that it works."""
    try:
        with open("/dev/kvm", "r+b", buffering=0) as kvm:
            os.close(fcntl.ioctl(kvm, KVM_CREATE_VM, 0))
    except OSError as err:
        return f"/dev/kvm: {err.strerror or err}"
    return ""


class MailBlobs:
    """The machine's own container."""

    def __init__(self, way: dict[str, Any]) -> None:
        self.way = way

    def url(self, name: str) -> str:
        return f"{self.way['url']}/{name}?{self.way['query']}"

    def read(self, name: str) -> bytes:
        status, content = ask("GET", self.url(name))
        if status != 200:
            raise OSError(f"{name}: the storage answers {status}")
        return content

    def tell(self, name: str, **said: Any) -> None:
        ask("PUT", self.url(name), json.dumps(said).encode())


def left_s(box: MailBlobs, life_s: float) -> float:
    """The life of a machine begins when its node was had, which is before this."""
    try:
        at = float(json.loads(box.read("allocated"))["at"])
    except (OSError, ValueError, KeyError):
        return life_s
    return min(life_s, max(0.0, life_s - (time.time() - at)))


def watch(box: MailBlobs, pid: int) -> None:
    """End this process, as Azure would, as soon as somebody says so in the box."""
    while True:
        time.sleep(LOOK_S)
        with contextlib.suppress(OSError):
            if ask("GET", box.url("stop"))[0] == 200:
                os.kill(pid, signal.SIGUSR1)
                return


def supervise(box: MailBlobs, folder: Path, key: str, seconds: float) -> str:
    """Be the machine until its end. Returns how it ended."""
    (folder / "key").write_text(key)
    (folder / "key").chmod(0o600)
    program = folder.parent / "supervisor.pyz"
    program.write_bytes(box.read("program"))
    sys.path.insert(0, str(program))
    from supervisor.machine import halt_machine, order  # type: ignore[import-not-found]
    from supervisor.mailbox import Relay, open_post  # type: ignore[import-not-found]
    from supervisor.main import start  # type: ignore[import-not-found]

    def leave(signum: int, frame: object) -> NoReturn:
        raise SystemExit("stopped" if signum == signal.SIGUSR1 else "evicted")

    os.environ["EVALFLEET_MACHINE"] = str(folder)
    os.environ["EVALFLEET_PILOT"] = "1"
    relay = cast("Any", Relay(open_post(box.way), key, str(folder), 1.0, 2.0))
    ended = "expired"
    try:
        problem = cast("str", start(str(folder)))
        if problem:
            return problem
        with contextlib.suppress(OSError, AttributeError):  # nobody of the same user is to read our token
            ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        signal.signal(signal.SIGTERM, leave)
        signal.signal(signal.SIGUSR1, leave)
        order(folder, {"op": "expire", "seconds": seconds}, ORDER_S)
        threading.Thread(target=relay.run, daemon=True).start()
        threading.Thread(target=watch, args=(box, os.getpid()), daemon=True).start()
        box.tell("start", node=platform.node(), at=time.time())
        with open(folder / "supervisor.lock", "r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the supervisor has it while it lives: at its expiry it leaves
    except SystemExit as end:  # the node is taken back, or we are asked to go: what runs is not to blame
        ended = str(end.code)
        with contextlib.suppress(OSError):
            order(folder, {"op": "evict"}, ORDER_S)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        halt_machine(folder)
        relay.stop()
    return ended


def main() -> int:
    began, environ = time.time(), os.environ
    way = take_way(environ["EVALFLEET_WAY"])
    if way is None:
        sys.stderr.write("Azure has run this job anew: what ran here before is lost\n")
        return RESTARTED
    box = MailBlobs(way["box"])
    problem = why_no_kvm() if way["kvm"] else ""
    if problem:
        sys.stderr.write(problem + "\n")
        box.tell("end", why=problem, code=NO_KVM, at=time.time())
        return NO_KVM
    root = Path(tempfile.mkdtemp(prefix="evalfleet-"))
    (root / "machine").mkdir(0o700)
    try:
        ended = supervise(box, root / "machine", str(way["key"]), left_s(box, float(way["life_s"])))
        box.tell("end", why=ended, ran=time.time() - began, at=time.time())
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
