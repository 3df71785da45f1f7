"""The supervisor's loop, and what it answers. The working directory is the machine's."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import time
import traceback
from binascii import a2b_base64, b2a_base64

from .bundles import has_bundle, unpack_bundle
from .clients import Client, Clients
from .end import WARNED_S
from .files import ENVIRON, SOCKET, make_key, owner_of_parent, read_file, sha256, write_atomic
from .follow import FileFollower, Followers
from .host import NEVER, LoadMeter, boot_id, expiry_in, steady, time_left
from .job import HostJob
from .jobs import Jobs
from .notices import Notices
from .parcel import PROMPT_BYTES, is_light, pack
from .processes import adopt_orphans, host_environment

TYPE_CHECKING = False  # importing typing would cost 3 ms
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

PROTOCOLS = (1,)
"""What we speak. A release that brings N + 1 still speaks N: a controller may be older than its hosts."""
BEAT_S = 5.0
BACKLOG = 128
AFTERLIFE_S = 600.0
LONGEST_LIFE_S = 400 * 86400.0
"""Beyond the longest run: a machine whose life is longer would have none."""
EVICTED_GRACE_S = 3.0
PILOT = "EVALFLEET_PILOT"
"""Set where the machine is a job of a service, which asks it to end by a signal to all its processes."""
WITHOUT_HELLO = frozenset(
    ("hello", "ping", "follow", "unfollow", "expire", "leave", "quit", "watch", "anew", "evict")
)
"""What a place asks, or who only looks on. Nothing is answered to who does not show the machine's key."""
MODULES = (
    *("bundles", "clients", "end", "files", "follow", "graded_files", "host", "isolation", "job", "jobs"),
    *("machine", "mailbox", "main", "meter_process", "notices", "output", "parcel", "pilot", "processes"),
    *("server", "start", "trash", "verbs", "watch"),
)


class Refused(Exception):
    """A request that is answered with an error and ends its connection."""

    def __init__(self, error: str, detail: str) -> None:
        super().__init__(detail)
        self.error = error


class Server:
    """The supervisor of one machine: its loop, and its answers."""

    def __init__(self, home: str) -> None:
        self.selector = selectors.DefaultSelector()
        self.clients = Clients(self.selector, self.receive)
        self.followers = Followers(self.clients)
        self.jobs = Jobs(home, environment(), self.selector, self.tell)
        self.waiting: dict[str, list[tuple[Client, Any]]] = {}
        self.epochs: dict[str, int] = {}
        self.heard = time.monotonic()
        self.beat_at = self.heard + BEAT_S
        self.expires = NEVER
        self.expired = False
        self.notices: Notices | None = None
        self.evicted = False
        self.taken = False
        self.load = LoadMeter()
        self.leaving = False
        self.done = False

    # -- life --------------------------------------------------------------------------------

    def open(self) -> None:
        """Take up the directory and listen. Raises OSError."""
        self.hash = content_hash()  # now: later our file may be gone
        self.key = sha256(make_key().encode())  # now: what a job makes of the file later is nothing to us
        for folder in ("jobs", "bundles", "trash"):
            os.makedirs(folder, exist_ok=True)
        own = read_file("/proc/self/stat")
        write_atomic("supervisor.pid", own.decode() if own else f"{os.getpid()}\n")
        adopt_orphans()
        self.wake, self.waker = socket.socketpair()
        self.wake.setblocking(False)
        self.waker.setblocking(False)
        signal.set_wakeup_fd(self.waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, on_sigchld)
        if os.environ.get(PILOT):
            signal.signal(signal.SIGTERM, self.on_sigterm)
            signal.signal(signal.SIGCONT, self.on_sigcont)
            self.jobs.ender.may_be_evicted = True
        self.selector.register(self.wake, selectors.EVENT_READ, self.on_signal)
        self.restore()
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(SOCKET)
        self.listener.bind(SOCKET)  # relative: an address holds 108 bytes
        if owner_of_parent() != os.geteuid():
            os.chown(SOCKET, owner_of_parent(), -1)  # the login's sshd connects, and must show the key
        self.listener.listen(BACKLOG)
        self.listener.setblocking(False)
        self.selector.register(self.listener, selectors.EVENT_READ, self.on_connect)

    def restore(self) -> None:
        self.epochs = json.loads(read_file("epoch") or b"{}")
        expiry = json.loads(read_file("expiry") or b"null")
        if expiry:
            left = time_left(expiry, ".")
            self.expires = steady() + left
            if expiry["boot"] != boot_id():  # from now on the clock of this boot counts again
                with contextlib.suppress(OSError):
                    self.keep_expiry(left)
        if os.path.exists("expired"):  # we are here only to tell how jobs ended
            self.expired = True
            self.expires = steady() + AFTERLIFE_S
        self.jobs.restore()
        # not `watch`: earlier versions kept another form of it there
        if watched := json.loads(read_file("notices") or b"null"):
            self.notices = Notices(self.selector, watched, self.on_notice)

    def run(self) -> None:
        while not self.done:
            due = min(self.jobs.due, self.clients.late_due, self.followers.due, self.beat_at)
            if self.notices is not None:
                due = min(due, self.notices.due)
            due = min(due, time.monotonic() + self.expires - steady())
            self.handle_events(max(due - time.monotonic(), 0.0))
            now = time.monotonic()
            if now >= due:
                self.guarded(self.tick, None, now)
            self.done = self.done or (self.leaving and not self.jobs.live)
            self.clients.flush()

    def handle_events(self, timeout_s: float) -> None:
        """Wait for the next events, and do what they ask for."""
        for key, events in self.selector.select(timeout_s):
            self.guarded(key.data, key, key, events)

    def guarded(self, call: Callable[..., None], key: Any, *args: Any) -> None:
        """Whatever is wrong with one event, the other jobs must not lose their supervisor."""
        try:
            call(*args)
        except Exception:
            traceback.print_exc()
            if key is not None:
                self.clients.drop_socket(key.fileobj)
            time.sleep(0.05)  # should it come again and again

    def tick(self, now: float) -> None:
        if now >= self.clients.late_due:
            self.clients.hurry()
        self.jobs.tick(now, self.heard)
        if now >= self.followers.due:
            self.followers.tick(now)
        if self.notices is not None and now >= self.notices.due:
            self.notices.tick(now)
        if steady() >= self.expires:
            self.read_waiting_requests()
        if steady() >= self.expires:
            self.expire()
        elif now >= self.beat_at:
            self.beat(now)

    def on_notice(self) -> None:
        """The machine is to be taken back: what runs is not to blame for ending, and nothing new begins."""
        if self.evicted:
            return
        self.evicted = True
        for job in list(self.jobs.live.values()):
            if job.in_doubt:
                self.jobs.ender.note_why(job, "evicted")
                job.doubt_until = 0.0
            elif job.why is None and not job.settling:
                self.jobs.ender.ask(job, "evicted", min(job.grace, EVICTED_GRACE_S))

    def on_sigterm(self, signum: int, frame: object) -> None:
        self.taken = True

    def on_sigcont(self, signum: int, frame: object) -> None:
        self.jobs.ender.warned_until = time.monotonic() + WARNED_S

    def on_signal(self, key: Any, events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self.wake.recv(4096)
        if self.taken:
            self.on_notice()
        self.jobs.watcher.on_child()

    def on_connect(self, key: Any, events: int) -> None:
        for _ in range(BACKLOG):  # all at once: who knocks without end must not keep others waiting
            try:
                sock, _ = self.listener.accept()
            except BlockingIOError:
                return
            except OSError:
                time.sleep(0.05)  # out of descriptors: the socket stays readable, so do not spin
                return
            self.clients.add(sock)

    def read_waiting_requests(self) -> None:
        """Read what was asked while the host was frozen or starved: it may be more time."""
        for _ in range(2):  # the first accepts new connections, the second reads what they sent
            self.handle_events(0.0)

    def expire(self) -> None:
        """The dead-man switch: nobody asked for more time. Results wait on the disk."""
        if self.expired and any(client.known for client in self.clients.all):
            self.expires = steady() + AFTERLIFE_S
            return
        self.done = True
        with open("expired", "w"):
            pass
        self.jobs.ender.kill_everything("lease")
        with contextlib.suppress(FileNotFoundError):
            os.unlink("expiry")

    def close(self) -> None:
        self.clients.close()
        with contextlib.suppress(FileNotFoundError, PermissionError):  # the directory may be root's now
            os.unlink(SOCKET)

    # -- requests ----------------------------------------------------------------------------

    def receive(self, client: Client, line: bytes) -> None:
        try:
            message = json.loads(line)
            op, n = message["op"], message.get("n")
            act = OPS.get(op)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return self.clients.refuse(client, None, "garbage", "not a request", close=True)
        if not client.known:
            client.known = sha256(str(message.get("key")).encode("utf-8", "replace")) == self.key
            if not client.known:
                return self.clients.refuse(client, n, "key", "that is not this machine's key", close=True)
        if act is None:
            return self.clients.refuse(client, n, "unknown", f"no such operation: {op}")
        if client.run is None and op not in WITHOUT_HELLO:
            return self.clients.refuse(client, n, "garbage", "say hello first", close=True)
        if client.run is not None:
            self.heard = time.monotonic()
        if not (os.path.isdir("jobs") and os.path.isdir("bundles")):
            # a job has removed what none can be started without: the next supervisor makes it again, if any
            self.done = True
            self.jobs.ender.kill_everything("lost")
            return
        try:
            answer = act(self, client, message)
        except Refused as refusal:
            return self.clients.refuse(client, n, refusal.error, str(refusal), close=True)
        except (ValueError, KeyError, TypeError, AttributeError) as err:
            return self.clients.refuse(client, n, "bad", f"{type(err).__name__}: {err}")
        except OSError as err:
            return self.clients.refuse(client, n, "io", str(err))
        if answer is not None and n is not None:
            answer["n"] = n
            # that a job runs is no news: the word of its end, if it is short, comes in the same packet
            self.clients.answer(client, answer, late=op == "start")
        return None

    def hello(self, client: Client, message: dict[str, Any]) -> dict[str, Any]:
        spoken = set(PROTOCOLS).intersection(message.get("protocols") or [message.get("protocol")])
        if not spoken:
            raise Refused("protocol", f"this supervisor speaks {PROTOCOLS}")
        run, epoch = str(message["run"]), int(message["epoch"])
        latest = self.epochs.get(run, -1)
        if epoch < latest:
            raise Refused("stale", f"epoch {latest} was here before epoch {epoch}")
        if epoch > latest:
            # durable first: a supervisor that forgets it would obey the old controller again
            write_atomic("epoch", json.dumps({**self.epochs, run: epoch}), durable=True)
            self.epochs[run] = epoch
            for other in [c for c in self.clients.all if c.run == run and c.epoch < epoch]:
                self.clients.refuse(other, None, "stale", f"epoch {epoch} has taken over", close=True)
        client.run, client.epoch = run, epoch
        self.heard = time.monotonic()
        jobs = {job.id: job.reason or "running" for job in self.jobs.known.values()}
        return {"protocol": max(spoken), "hash": self.hash, "pid": os.getpid(), "jobs": jobs}

    def start(self, client: Client, message: dict[str, Any]) -> dict[str, Any]:
        wrong = self.jobs.changed_file(message["job"])
        if wrong:
            return {"state": "changed", "detail": wrong}
        if (
            message["job"].get("metered")
            and not self.jobs.metering.port
            and not self.jobs.knows(message["job"]["id"])
        ):
            return {"state": "unmetered"}
        if self.evicted:
            job = self.jobs.start(message["job"], "the machine is to be taken back", "evicted")
        else:
            job = self.jobs.start(message["job"], "the machine has expired" if self.expired else "")
        return {"state": "running" if job is not None and job.reason is None else "ended"}

    def meter(self, client: Client, message: dict[str, Any]) -> dict[str, Any] | None:
        """Answer when the machine has a meter, and that has its orders, if there are any."""

        def done(wrong: str) -> None:
            state = {"state": "wrong" if wrong else "here", "detail": wrong}
            self.clients.answer(client, {"n": message.get("n"), **state})

        orders = message["orders"]
        if "upstreams" in orders:
            done(self.jobs.metering.instruct(orders))
        else:
            self.jobs.meter(a2b_base64(message["program"]), orders, done)
        return None

    def seal(self, client: Client, message: dict[str, Any]) -> dict[str, Any]:
        """Record what set-up made of a bundle's files."""
        if has_bundle(message["digest"]):
            self.jobs.bundles.renew(message["digest"])
        return {}

    def stop(self, client: Client, message: dict[str, Any]) -> dict[str, Any] | None:
        """Answered when the job and all its processes are gone."""
        job = self.jobs.live.get(message["job"])
        if job is None:
            return {}
        self.waiting.setdefault(job.id, []).append((client, message.get("n")))
        if job.why is None and not job.settling:
            self.jobs.ender.ask(job, "stopped", float(message.get("grace_s", job.grace)))
        return None

    def how(self, client: Client, message: dict[str, Any]) -> dict[str, Any]:
        job = self.jobs.known.get(message["job"])
        if job is None:
            return {"state": "unknown"}
        return {"state": "running"} if job.reason is None else {"state": "ended", **job.how()}

    def follow(self, client: Client, message: dict[str, Any]) -> dict[str, Any]:
        """Send what a file below the job's folder holds, and what is added to it. Changes nothing here."""
        job, offset = self.jobs.known.get(message["job"]), int(message["offset"])
        if job is None:
            return {"state": "unknown"}
        path, number = str(message["path"]), int(message["follower"])
        self.followers.add(FileFollower(client, number, job, path, max(offset, 0)))
        return {"state": "following"}

    def unfollow(self, client: Client, message: dict[str, Any]) -> dict[str, Any]:
        self.followers.remove(client, int(message["follower"]))
        return {}

    def forget(self, client: Client, message: dict[str, Any]) -> dict[str, Any]:
        self.jobs.forget(message["jobs"], bool(message.get("again")))
        return {}

    def ping(self, client: Client, message: dict[str, Any]) -> dict[str, Any]:
        return {"pid": os.getpid(), "hash": self.hash, "protocols": PROTOCOLS}

    def leave(self, client: Client, message: dict[str, Any]) -> dict[str, Any]:
        """Make room for another version, which adopts the jobs: at once, or between them. Ends nothing.

        A stale controller cannot ask for it: two versions would replace each other for ever.
        """
        latest = self.epochs.get(str(message["run"]), -1)
        if int(message["epoch"]) < latest:
            raise Refused("stale", f"epoch {latest} was here before epoch {message['epoch']}")
        self.leaving = True
        self.done = not self.jobs.live or bool(message.get("now"))
        return {"state": "leaving" if self.done else "later"}

    def fetch(self, client: Client, message: dict[str, Any]) -> dict[str, Any]:
        """An ended job's files as a parcel, if they are few and small: that saves a process a job."""
        job = self.jobs.known.get(message["job"])
        if job is None or job.reason is None or not is_light(job.path):
            return {"state": "apart" if job is not None else "unknown"}
        return {"state": "here", "data": self.parcel(job, message)}

    def parcel(self, job: HostJob, caps: dict[str, Any]) -> str:
        parcel: list[bytes] = []
        pack(job.path, parcel.append, int(caps["bytes"]), int(caps["files"]))
        return b2a_base64(b"".join(parcel), newline=False).decode()

    def put(self, client: Client, message: dict[str, Any]) -> dict[str, Any]:
        """Make a bundle of a small parcel. Without one, answer if it is here, or which large files are."""
        if "data" in message and not has_bundle(message["digest"]):
            unpack_bundle(message["digest"], [a2b_base64(message["data"])])
        if has_bundle(message["digest"]):
            return {"state": "here"}
        return {"state": "unknown", "same": self.jobs.bundles.found(message.get("large") or {})}

    def verify(self, client: Client, message: dict[str, Any]) -> dict[str, Any]:
        """Answer whether the files of a bundle are as they must be. If one is not, the whole bundle goes."""
        digest = message["digest"]
        if not has_bundle(digest):
            return {"state": "unknown"}
        wrong = self.jobs.verify(digest, message["files"], bool(message.get("shared")))
        return {"state": "changed" if wrong else "here", "detail": wrong}

    def isolation(self, client: Client, message: dict[str, Any]) -> dict[str, Any]:
        """Answer whether jobs can be users of their own here, and what that means, or why not."""
        host = self.jobs.host
        state = "user" if not host.why_not else "login" if os.geteuid() else "none"
        return {"state": state, "detail": host.why_not or host.words()}

    def set_expiry(self, client: Client, message: dict[str, Any]) -> dict[str, Any]:
        left = float(message["seconds"])
        if not abs(left) < NEVER:
            raise ValueError(f"no time to live: {left}")
        with contextlib.suppress(FileNotFoundError):
            os.unlink("beat.json")  # what it says of the life that was left holds no more
        self.keep_expiry(min(left, LONGEST_LIFE_S))
        with contextlib.suppress(FileNotFoundError):
            os.unlink("expired")
        self.expired = False
        return {}

    def keep_expiry(self, left: float) -> None:
        expiry = expiry_in(left)
        write_atomic("expiry", json.dumps(expiry), durable=True)
        os.chmod("expiry", 0o644)  # whether a host is held, all its logins' homes may know
        self.expires = expiry["steady"]

    def watch(self, client: Client, message: dict[str, Any]) -> dict[str, Any]:
        """Look from now on for the announcement that the machine is taken back."""
        watch = {name: message[name] for name in ("url", "headers", "match")}
        write_atomic("notices", json.dumps(watch))
        if self.notices is None:
            self.notices = Notices(self.selector, watch, self.on_notice)
        return {}

    def evict(self, client: Client, message: dict[str, Any]) -> dict[str, Any]:
        """Treat the machine as taken back from now on."""
        self.on_notice()
        return {}

    def anew(self, client: Client, message: dict[str, Any]) -> dict[str, Any]:
        """If the host has booted since this was last asked, what set it up is to be run again.

        A local disk is empty after some boots, and nothing that was started runs after any.
        """
        booted = boot_id().encode()
        before = read_file("boot")
        if before and before != booted:
            steps = [job.id for job in self.jobs.known.values() if job.in_bundle]
            self.jobs.forget(steps, again=True)
        write_atomic("boot", booted.decode())
        return {}

    def clear(self, client: Client, message: dict[str, Any]) -> dict[str, Any]:
        """The machine is for somebody else now. Answered when nothing lives of any job.

        `once` names the turn: who repeats it, not knowing whether it was done, ends nothing of its own.
        """
        once = str(message.get("once") or "").encode()
        if once and read_file("cleared") == once:
            return {}
        if not self.jobs.clear():
            return {"error": "alive", "detail": "some processes of an earlier job cannot be killed"}
        write_atomic("cleared", once.decode())
        return {}

    def quit(self, client: Client, message: dict[str, Any]) -> dict[str, Any]:
        """Answered when nothing lives of any job."""
        self.done = True
        return {"gone": self.jobs.ender.kill_everything("stopped")}

    # -- telling -----------------------------------------------------------------------------

    def tell(self, job: HostJob) -> None:
        if self.clients.listening:
            ended = {"push": "ended", **job.how()}
            if job.fetch and is_light(job.path, PROMPT_BYTES):
                ended["data"] = self.parcel(job, job.fetch)  # it saves a question and an answer
            self.clients.push(ended)
        for client, n in self.waiting.pop(job.id, ()):
            self.clients.answer(client, {"n": n})

    def beat(self, now: float) -> None:
        self.beat_at = now + BEAT_S
        self.jobs.tidy(now)
        if not (os.path.isdir("jobs") and os.path.isdir("bundles")):
            # a job has removed what none can be started without: the next supervisor makes it again, if any
            self.done = True
            self.jobs.ender.kill_everything("lost")
            return
        beat: dict[str, Any] = {
            "push": "beat",
            "at": time.time(),
            **self.load.measured(),
            "jobs": {job.id: job.pulse(now) for job in self.jobs.live.values()},
        }
        self.clients.push(beat)
        with contextlib.suppress(OSError):
            life = {"life": self.expires - steady()} if self.expires < NEVER else {}
            write_atomic("beat.json", json.dumps({**beat, **life}))


OPS: dict[str, Callable[[Server, Client, dict[str, Any]], dict[str, Any] | None]] = {
    "hello": Server.hello,
    "start": Server.start,
    "stop": Server.stop,
    "how": Server.how,
    "follow": Server.follow,
    "unfollow": Server.unfollow,
    "forget": Server.forget,
    "ping": Server.ping,
    "fetch": Server.fetch,
    "put": Server.put,
    "verify": Server.verify,
    "seal": Server.seal,
    "meter": Server.meter,
    "isolation": Server.isolation,
    "leave": Server.leave,
    "expire": Server.set_expiry,
    "watch": Server.watch,
    "anew": Server.anew,
    "evict": Server.evict,
    "clear": Server.clear,
    "quit": Server.quit,
}


def environment() -> dict[str, str]:
    """Return what jobs inherit. As root by sudo: the variables of the login, but for who and where it is."""
    own = host_environment(os.environ)
    if owner_of_parent() == os.geteuid():
        return own
    import pwd  # only here: others need none of it

    given = json.loads(read_file(ENVIRON) or b"{}")
    root = pwd.getpwuid(0)
    who = {"HOME": root.pw_dir, "USER": root.pw_name, "LOGNAME": root.pw_name, "SHELL": root.pw_shell}
    return {**given, **who, "PATH": own["PATH"]}


def on_sigchld(signum: int, frame: object) -> None:
    """Only a signal with a handler writes to the wakeup descriptor."""


def content_hash() -> str:
    """Return the hash of our own source, whether that is a folder or one file."""
    loader: Any = globals()["__spec__"].loader
    folder = os.path.dirname(__file__)
    return sha256(b"\0".join(loader.get_data(os.path.join(folder, name + ".py")) for name in MODULES))
