"""The machine's end of a mailbox: lines to its supervisor for a controller that cannot reach it.

A mailbox is a set of objects. Each is written once and never changed. A controller opens a line L to the
machine when it takes the next free number of `new/1`, `new/2` ... That object is the first of the line, and
the others are `in/L/2`, `in/L/3` ... The machine answers with `out/L/1`, `out/L/2` ... Each object holds part
of the line's bytes. A line leads to the supervisor, or to a program that packs or unpacks files. Both ends
look for the next number, and write with each object how far they have read. The controller removes what was
read, and neither end writes more than WINDOW objects ahead of its reader. Objects in `new` stay until the
machine's end, so that no number is taken twice.

Each object ends with a keyed hash, by the machine's key, of its name and its content. Objects without the
right hash are no mail. Objects are not encrypted, so they hold no secret. A message with secrets is an object
of its own below `once`, and so are the addresses by which the machine reads and writes what comes next. The
machine removes such an object when it first reads it.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import selectors
import socket
import stat
import subprocess
import sys
import threading
import time
import traceback

TYPE_CHECKING = False  # importing typing would cost 3 ms
if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import Any, Protocol

    class Post(Protocol):
        """The objects of one mailbox. OSError: not now, perhaps later."""

        def read(self, name: str) -> bytes | None:
            """None if there is none. What is too long to be mail is cut off."""
            ...

        def create(self, name: str, content: bytes) -> bool:
            """Return False if there is an object of this name: nothing was written."""
            ...

        def remove(self, names: list[str]) -> None:
            """Remove those of the objects that are there."""
            ...

        def may_create(self, name: str) -> bool:
            """Return True if this end has what it needs to write the object."""
            ...

        def learn(self, urls: dict[str, str]) -> None:
            """Take up addresses of objects, each by its method and name."""
            ...

        def forget(self, part: str) -> None:
            """Drop the addresses of objects with this in their names."""
            ...


PAYLOAD_BYTES = 4 << 20
"""Of a line's bytes, so many go into one object."""
OBJECT_CAP = PAYLOAD_BYTES + (64 << 10)
WINDOW = 32
"""So many objects of a line may be written that its other end has not said to have read."""
IDLE_S = 900.0
"""Whoever says nothing for so long is gone. Who is there tells at least how far it has read."""
MOST_LINES = 64
MOST_NAMES = 100_000
"""A machine can fill its mailbox: no more than so many names are listed at once."""
LINGER_S = 0.02
BEAT_LOOKS = 5
"""So many slow looks a beat may wait for something to go with: alone it costs as much as anything."""
READ = 1 << 18
MARK = 32
TURN = 64
"""Objects that are read before anything else is done."""
LATE_S = 10.0
"""So long a machine that ends may take to write what it has said last."""
HTTP_S = 20.0
CREATE = {"If-None-Match": "*", "x-ms-blob-type": "BlockBlob"}
"""The headers with which S3 and Azure write an object only if there is none of its name."""
VERBS = ("put", "pack")
PROGRAM = """\
import json, os, sys
sys.path.append(sys.argv[1])
from supervisor import verbs
os.chdir(sys.argv[2])
line = b""
while not line.endswith(b"\\n"):
    line += os.read(0, 1) or sys.exit(2)
request = json.loads(line)
sys.exit(verbs.put_in(request) if sys.argv[3] == "put" else verbs.pack_out(request))
"""
"""Where a line that carries files leads to: `supervisor.verbs` as over SSH, in a process of its own."""


class NoMail(ValueError):
    """An object that nobody with the machine's key has written for this name."""


# -- what an object holds ------------------------------------------------------------------------------


def sealed(key: str, name: str, header: dict[str, Any], payload: bytes = b"") -> bytes:
    """Return an object's content: a line of JSON, some bytes of a line, and the hash of both."""
    body = json.dumps(header, separators=(",", ":")).encode() + b"\n" + payload
    return body + _mark(key, name, body)


def opened(key: str, name: str, content: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the header and the payload. Raises NoMail."""
    body, mark = content[:-MARK], content[-MARK:]
    if len(content) < MARK or not hmac.compare_digest(mark, _mark(key, name, body)):
        raise NoMail(f"{name} is not signed with the machine's key")
    line, _, payload = body.partition(b"\n")
    try:
        header: dict[str, Any] | None = json.loads(line)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise NoMail(f"{name} has no header")
    return header, payload


def _mark(key: str, name: str, data: bytes) -> bytes:
    return hmac.new(key.encode(), name.encode() + b"\0" + data, "sha256").digest()


def line_name(number: int) -> str:
    return f"{number:010d}"


def mail_new(number: int) -> str:
    return f"new/{line_name(number)}"


def mail_in(line: str, number: int) -> str:
    return f"in/{line}/{number:010d}"


def mail_out(line: str, number: int) -> str:
    return f"out/{line}/{number:010d}"


def once_of(name: str) -> str:
    """Return the name of the object that holds what must not stay in the store of a message."""
    return f"once/{name}"


def is_beat(payload: bytes | bytearray) -> bool:
    """Is there nothing in it but a beat, which nobody answers?"""
    return payload.startswith(b'{"push": "beat"') and payload.find(b"\n") == len(payload) - 1


class Pace:
    """When to look again: soon after something has happened, then less and less often."""

    def __init__(self, fast_s: float, slow_s: float) -> None:
        self.fast_s, self.slow_s = fast_s, slow_s
        self.delay_s = fast_s

    def stir(self) -> None:
        self.delay_s = self.fast_s

    def next(self) -> float:
        now, self.delay_s = self.delay_s, min(self.delay_s * 2, self.slow_s)
        return now


# -- where objects are ---------------------------------------------------------------------------------


class FolderPost:
    """A mailbox in a folder that both ends see, perhaps by a network's file system.

    No link in it is followed: an attempt that has the machine's user could plant one in place of a folder,
    and have files of whoever reads the mail written or removed.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def read(self, name: str) -> bytes | None:
        below, _, last = name.rpartition("/")
        try:
            with self._opened(below) as folder:
                fd = os.open(last, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=folder)
        except FileNotFoundError:
            os.stat(self.folder)  # raises, if all of it is away
            return None
        except OSError as err:
            if err.errno in (errno.ELOOP, errno.ENOTDIR):
                return b""  # a link, which is no mail
            raise
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return b""
            with open(fd, "rb", closefd=False) as file:
                return file.read(OBJECT_CAP + 1)
        finally:
            os.close(fd)

    def create(self, name: str, content: bytes) -> bool:
        below, _, last = name.rpartition("/")
        scratch = f".new-{os.urandom(8).hex()}"
        with self._opened(below, make=True) as folder:
            fd = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder)
            try:
                with open(fd, "wb") as file:
                    file.write(content)
                # whole or not at all, and the first one stays
                os.link(scratch, last, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
            except FileExistsError:
                return False
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(scratch, dir_fd=folder)
        return True

    def names(self, below: str) -> list[str]:
        found: list[str] = []
        with self._opened() as top, contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for folder, _, names, _ in os.fwalk(below, dir_fd=top):
                found += [f"{folder}/{name}" for name in names if not name.startswith(".")]
                if len(found) > MOST_NAMES:
                    break
        return sorted(found[:MOST_NAMES])

    def remove(self, names: list[str]) -> None:
        below: dict[str, list[str]] = {}
        for name in names:
            folder, _, last = name.rpartition("/")
            below.setdefault(folder, []).append(last)
        for folder, files in below.items():
            with contextlib.suppress(FileNotFoundError), self._opened(folder) as fd:
                for name in files:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=fd)

    def may_create(self, name: str) -> bool:
        return True

    def learn(self, urls: dict[str, str]) -> None:
        return None

    def forget(self, part: str) -> None:
        return None

    @contextlib.contextmanager
    def _opened(self, below: str = "", make: bool = False) -> Generator[int, None, None]:
        """A folder of the mailbox; the mailbox itself is never made anew, perhaps on another disk.

        To open a folder makes NFS ask whether it has changed: else a new file is not seen for a minute.
        """
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for part in below.split("/") if below else ():
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, dir_fd=fd)
                deeper = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
                os.close(fd)
                fd = deeper
            yield fd
        finally:
            os.close(fd)


class HttpPost:
    """A mailbox in a bucket, reached by HTTPS.

    `urls` holds a signed address for each method and object that this end may use: "GET new/0000000001".
    """

    def __init__(self, urls: dict[str, str]) -> None:
        self.urls = dict(urls)

    def read(self, name: str) -> bytes | None:
        if f"GET {name}" not in self.urls:
            return None
        status, _, content = self._ask("GET", name)
        if status == 404:
            return None
        if status != 200:
            raise OSError(f"the mailbox answers {status}")
        return content

    def create(self, name: str, content: bytes) -> bool:
        status, code, _ = self._ask("PUT", name, content)
        # S3 answers 409 where the call is to be repeated, and Azure where there is such an object
        if status == 412 or (status == 409 and code):
            return False
        if status not in (200, 201):
            raise OSError(f"the mailbox answers {status}")
        return True

    def remove(self, names: list[str]) -> None:
        for name in names:
            status, _, _ = self._ask("DELETE", name)
            if status not in (200, 202, 204, 404):
                raise OSError(f"the mailbox answers {status}")

    def may_create(self, name: str) -> bool:
        return f"PUT {name}" in self.urls

    def learn(self, urls: dict[str, str]) -> None:
        self.urls.update(urls)

    def forget(self, part: str) -> None:
        self.urls = {about: url for about, url in self.urls.items() if part not in about}

    def _ask(self, method: str, name: str, data: bytes | None = None) -> tuple[int, str, bytes]:
        """Return the status, Azure's code for an error, and the content."""
        import urllib.error  # here: a machine that has a folder needs none of it
        import urllib.request

        headers = {"Content-Type": "application/octet-stream", **CREATE} if method == "PUT" else {}
        url = self.urls.get(f"{method} {name}")
        if url is None:
            raise OSError("the mailbox has no address for this yet")
        request = urllib.request.Request(url, data=data, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=HTTP_S) as answer:
                return answer.status, "", answer.read(OBJECT_CAP + 1)
        except urllib.error.HTTPError as err:
            err.close()
            return err.code, err.headers.get("x-ms-error-code") or "", b""
        except (OSError, ValueError) as err:
            # no URL: it has a signature
            raise OSError(f"the mailbox does not answer ({type(err).__name__})") from None


def open_post(way: dict[str, Any]) -> Post:
    """Return the mailbox at `way`: {"folder": PATH}, or {"urls": ...} as HttpPost needs them."""
    return FolderPost(way["folder"]) if "folder" in way else HttpPost(way["urls"])


def hide_memory() -> None:
    """From now on nobody of the same user can look into this process, as there is a token in it."""
    import ctypes  # only here: it is slow to load

    with contextlib.suppress(OSError, AttributeError):  # not on Linux
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE


# -- lines ---------------------------------------------------------------------------------------------


class Line:
    """One line, and the socket that it leads to."""

    def __init__(self, name: str, sock: socket.socket, child: subprocess.Popen[bytes] | None) -> None:
        self.name, self.sock, self.child = name, sock, child
        self.heard = time.monotonic()
        self.read = self.told_read = 0
        self.written = self.acknowledged = 0
        self.outbox = bytearray()
        self.inbox = bytearray()
        self.due = 0.0
        self.over = self.sent_end = self.half = False
        self.events = 0
        self.pending: tuple[bytes, dict[str, Any], int] | None = None  # content, header, bytes of the line

    @property
    def owes(self) -> bool:
        """Is there something to be written: bytes, that it is over, or how far we have read?"""
        ends = self.over and not self.sent_end
        return bool(self.outbox) or ends or self.read - self.told_read >= WINDOW // 2

    @property
    def may_write(self) -> bool:
        return self.owes and self.written - self.acknowledged < WINDOW


class Relay:
    """Carries the lines of a machine's mailbox until told to stop. It keeps nothing: it lives as long as the
    machine's supervisor does, and what it has read once it never reads again."""

    def __init__(
        self, post: Post, key: str, directory: str, fast_s: float = 0.2, slow_s: float = 1.0
    ) -> None:
        self.post = post
        self.key = key
        self.directory = os.path.abspath(directory)
        self.pace = Pace(fast_s, slow_s)
        self.selector = selectors.DefaultSelector()
        self.lines: dict[str, Line] = {}
        self.number = 0
        self.taken: dict[str, bytes] = {}  # objects that were read, and may not be removed yet
        self.look_at = self.retry_at = 0.0
        self.stop_by: float | None = None
        self.stopped = threading.Event()
        self.wake, self.waker = socket.socketpair()
        self.selector.register(self.wake, selectors.EVENT_READ)

    def run(self) -> None:
        """Until `stop`; whatever goes wrong with one line, or with the store, the others go on."""
        while not self.is_done():
            try:
                self.turn()
            except Exception:
                traceback.print_exc()
                time.sleep(self.pace.slow_s)  # should it come again and again
        self.stopped.set()

    def stop(self, patience_s: float = LATE_S) -> None:
        """End it, from the thread that runs it: what was said before is written, if the store takes it."""
        self.stop_by = time.monotonic() + patience_s
        self.waker.send(b"!")
        self.stopped.wait(patience_s)

    def is_done(self) -> bool:
        """Was it told to stop, and is everything written that was said before? What a supervisor said last
        may still be in its socket: while the store was asked, nobody has read it."""
        if self.stop_by is None:
            return False
        for line in self.lines.values():
            line.due = 0.0  # nothing will come that it could go with
        unread = any(key.data is not None for key, _ in self.selector.select(0.0))
        owes = any(line.owes for line in self.lines.values())
        return time.monotonic() > self.stop_by or not (unread or owes)

    def turn(self) -> None:
        now = time.monotonic()
        # a line whose reader is too far behind waits for a look, not for its turn
        dues = [max(line.due, self.retry_at) for line in self.lines.values() if self.may_write(line)]
        due = min([self.look_at, *dues])
        for key, events in self.selector.select(max(due - now, 0.0)):
            if key.data is None:
                self.wake.recv(1)
            else:
                self.on_ready(key.data, events)
        now = time.monotonic()
        if now >= self.look_at:
            try:
                self.look()
            except OSError:
                self.pace.delay_s = self.pace.slow_s  # the store is away
            self.look_at = time.monotonic() + self.pace.next()
        if now >= self.retry_at:
            try:
                self.write(now)
            except OSError:
                self.retry_at = time.monotonic() + self.pace.slow_s
        for line in [line for line in self.lines.values() if now - line.heard > IDLE_S]:
            self.hang_up(line, forget=True)

    # -- what comes in -------------------------------------------------------------------------

    def look(self) -> None:
        while (content := self.post.read(mail_new(self.number + 1))) is not None:
            self.number += 1  # also of what is no mail: its writer has taken the number
            self.pace.stir()
            header, payload = self.opened(mail_new(self.number), content)
            self.post.forget(mail_new(self.number))
            if header:
                self.receive(
                    self.open(line_name(self.number), str(header.get("verb") or "")), header, payload
                )
        for line in [line for line in self.lines.values() if not line.over]:
            for _ in range(TURN):
                name = mail_in(line.name, line.read + 1)
                if line.over or len(line.inbox) >= 2 * PAYLOAD_BYTES:
                    break
                content = self.post.read(name)
                if content is None:
                    break
                self.pace.stir()
                header, payload = self.opened(name, content)
                if header.get("once"):
                    header, payload = self.take(once_of(name), header)
                if header:
                    self.receive(line, header, payload)
                else:
                    self.hang_up(line, forget=True)  # somebody else writes there
                if len(payload) < PAYLOAD_BYTES:
                    break  # what comes after it is seldom there yet

    def opened(self, name: str, content: bytes) -> tuple[dict[str, Any], bytes]:
        """An empty header if it is no mail."""
        try:
            return opened(self.key, name, content)
        except (ValueError, RecursionError):
            return {}, b""

    def take(self, name: str, header: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """Read and remove an object below `once`. Return the header with what it adds, and its payload.

        After an OSError it may be called again.
        """
        if name not in self.taken:
            content = self.post.read(name)
            if content is None:
                return {}, b""  # another reader was quicker
            self.taken[name] = content
        self.post.remove([name])
        more, payload = self.opened(name, self.taken.pop(name))
        return ({**header, **more}, payload) if more else ({}, b"")

    def receive(self, line: Line, header: dict[str, Any], payload: bytes) -> None:
        line.heard = time.monotonic()
        line.read += 1
        if line.read > 1:
            self.post.forget(mail_in(line.name, line.read))
        elif line.child is None:
            payload = self.introduced(payload)
        line.acknowledged = max(line.acknowledged, min(int(header.get("read") or 0), line.written))
        if header.get("urls"):
            self.post.learn(header["urls"])
        if header.get("end"):
            self.hang_up(line, forget=True)
            return
        line.inbox += payload
        line.half = line.half or bool(header.get("half"))
        self.pass_on(line)

    def introduced(self, payload: bytes) -> bytes:
        """Return a line's first message with the machine's key, which is in no mail."""
        first, end, rest = payload.partition(b"\n")
        try:
            return json.dumps({**json.loads(first), "key": self.key}).encode() + end + rest
        except (ValueError, TypeError, RecursionError):
            return payload

    def open(self, name: str, verb: str) -> Line:
        for over in [line for line in self.lines.values() if line.sent_end]:
            self.drop(over)
        if len(self.lines) >= MOST_LINES:
            self.hang_up(min(self.lines.values(), key=lambda line: line.heard), forget=True)
        child = None
        if verb in VERBS:
            sock, other = socket.socketpair()
            root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
            argv = [sys.executable, "-I", "-S", "-c", PROGRAM, root, self.directory, verb]
            with other:
                child = subprocess.Popen(argv, stdin=other.fileno(), stdout=other.fileno())
        else:
            sock = self.connect()
        line = self.lines[name] = Line(name, sock, child)
        sock.setblocking(False)
        self.watch(line)
        return line

    def connect(self) -> socket.socket:
        from pathlib import Path

        from .machine import open_socket

        try:
            return open_socket(Path(self.directory))
        except OSError:
            sock, other = socket.socketpair()
            other.close()  # a line that is over at once: there is no supervisor
            return sock

    def pass_on(self, line: Line) -> None:
        """Hand what came in to the socket, as far as it takes it."""
        try:
            while line.inbox and not line.over:
                del line.inbox[: line.sock.send(line.inbox[:READ])]
            if line.half and not line.inbox and not line.over:
                line.sock.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError:
            line.inbox.clear()  # that it is over is read, too
        self.watch(line)

    def watch(self, line: Line) -> None:
        full = line.written - line.acknowledged >= WINDOW or len(line.outbox) >= 2 * PAYLOAD_BYTES
        wanted = 0 if line.over or full else selectors.EVENT_READ
        if line.inbox and not line.over:
            wanted |= selectors.EVENT_WRITE
        if wanted != line.events:
            if line.events:
                self.selector.unregister(line.sock)
            if wanted:
                self.selector.register(line.sock, wanted, line)
            line.events = wanted

    # -- what goes out -------------------------------------------------------------------------

    def may_write(self, line: Line) -> bool:
        return line.may_write and self.post.may_create(mail_out(line.name, line.written + 1))

    def on_ready(self, line: Line, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self.pass_on(line)
        if not events & selectors.EVENT_READ or line.over:
            return
        try:
            data = line.sock.recv(READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            patience_s = BEAT_LOOKS * self.pace.slow_s if is_beat(data) else LINGER_S
            due = time.monotonic() + patience_s  # more may follow at once
            line.due = min(line.due, due) if line.outbox else due
        line.outbox += data
        if not data:
            line.due = 0.0
            self.hang_up(line)
        self.watch(line)

    def write(self, now: float) -> None:
        for line in list(self.lines.values()):
            while self.may_write(line) and now >= line.due:
                self.write_one(line)
            self.watch(line)

    def write_one(self, line: Line) -> None:
        name = mail_out(line.name, line.written + 1)
        if line.pending is None:
            payload = bytes(line.outbox[:PAYLOAD_BYTES])
            header: dict[str, Any] = {"n": line.written + 1, "read": line.read}
            if line.over and len(payload) == len(line.outbox):
                header.update(end=True, code=line.child.wait() if line.child is not None else 0)
            line.pending = (sealed(self.key, name, header, payload), header, len(payload))
        content, header, count = line.pending
        calm = is_beat(line.outbox[:count])
        # False: it was written by an earlier try, or it is another's, which the controller sees
        self.post.create(name, content)
        self.post.forget(name)
        del line.outbox[:count]
        line.pending, line.written = None, line.written + 1
        line.told_read, line.sent_end = header["read"], "end" in header
        if not calm:
            self.pace.stir()

    def hang_up(self, line: Line, forget: bool = False) -> None:
        if not line.over:
            line.over = True
            self.watch(line)
            line.sock.close()
            if line.child is not None and forget:
                line.child.kill()
                line.child.wait()
        if forget:
            line.outbox.clear()
            line.sent_end, line.told_read = True, line.read  # there is nobody to be told anything
            self.drop(line)

    def drop(self, line: Line) -> None:
        self.lines.pop(line.name, None)
        self.post.forget(f"/{line.name}/")
