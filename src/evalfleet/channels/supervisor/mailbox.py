"""The machine's end of a mailbox: lines to its supervisor for who cannot reach it, as objects in a store.

A mailbox is a folder of objects that are written once each and never changed. Whoever opens a line to the
machine takes the next free number of `new/1`, `new/2` ...: that is the first object of his line L, and the
others are `in/L/2`, `in/L/3` ... What the machine answers is `out/L/1`, `out/L/2` ... Each holds part of the
line's bytes; a line leads to the supervisor, or to a program that packs or unpacks files. Both ends look for
the next number, and say with what they write how far they have read: so much is removed by the controller,
and no further than WINDOW ahead of its reader anybody writes. What is in `new` stays until the machine's end,
so that no number is taken twice.

Objects are sealed with the machine's key, each for its own name: whoever else can read the store learns
nothing, and what he writes there, or puts in another object's place, is no mail.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
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
            """False if there is an object of this name: nothing was written."""
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
LONGEST_NAME = 64
LINGER_S = 0.02
BEAT_LOOKS = 5
"""So many slow looks a beat may wait for something to go with: alone it costs as much as anything."""
READ = 1 << 18
SALT, MARK = 16, 32
TURN = 64
"""Objects that are read before anything else is done."""
LATE_S = 10.0
"""So long a machine that ends may take to write what it has said last."""
HTTP_S = 20.0
CLOCKS_S = 60.0
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
    """An object's content: a line of JSON and some bytes of a line, as only the key's holders can read it."""
    return seal(key, name, json.dumps(header, separators=(",", ":")).encode() + b"\n" + payload)


def seal(key: str, name: str, data: bytes) -> bytes:
    salt = os.urandom(SALT)
    hidden = _mixed(data, key, salt)
    return salt + hidden + _mark(key, name, salt + hidden)


def opened(key: str, name: str, content: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the payload. Raises NoMail."""
    body, mark = content[:-MARK], content[-MARK:]
    if len(content) < SALT + MARK or not hmac.compare_digest(mark, _mark(key, name, body)):
        raise NoMail(f"{name} is not sealed with the machine's key")
    line, _, payload = _mixed(body[SALT:], key, body[:SALT]).partition(b"\n")
    try:
        header: dict[str, Any] | None = json.loads(line)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise NoMail(f"{name} has no header")
    return header, payload


def _mixed(data: bytes, key: str, salt: bytes) -> bytes:
    """The same function hides and shows."""
    stream = hashlib.shake_256(b"mailbox" + key.encode() + salt).digest(len(data))
    mixed = int.from_bytes(data, "big") ^ int.from_bytes(stream, "big")
    return mixed.to_bytes(len(data), "big")


def _mark(key: str, name: str, data: bytes) -> bytes:
    return hmac.new(b"mark" + key.encode(), name.encode() + b"\0" + data, "sha256").digest()


def mail_new(number: int) -> str:
    return f"new/{number:010d}"


def mail_in(line: str, number: int) -> str:
    return f"in/{line}/{number:010d}"


def mail_out(line: str, number: int) -> str:
    return f"out/{line}/{number:010d}"


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


def serve_folders() -> None:
    """Lend a hand to who sees no mailbox of this computer's: what is asked by lines of JSON on the standard
    input is done with the mailbox in `folder`, and answered on the standard output, until the input ends."""
    sys.stdout.write("ok  \n")
    sys.stdout.flush()
    for line in sys.stdin:
        request = json.loads(line)
        post, answer = FolderPost(request["folder"]), {"n": request["n"]}
        try:
            if request["op"] == "create":
                answer["made"] = post.create(request["name"], base64.b64decode(request["content"]))
            elif request["op"] == "read":
                content = post.read(request["name"])
                answer["content"] = None if content is None else base64.b64encode(content).decode()
            elif request["op"] == "names":
                answer["names"] = post.names(request["name"])
            else:
                post.remove(request["names"])
        except OSError as err:
            answer["error"] = str(err)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


class HttpPost:
    """A mailbox in a bucket, by the standard library's HTTPS and a token for this mailbox alone.

    `way`: `url`, below which its objects are; `query`, which all requests have (a shared access signature);
    `headers`, which all have (a bearer's token, an API's version); `create`, those that make a PUT fail if
    there is an object of this name; `sign`, keys with which each request is signed, as S3 wants it.
    """

    def __init__(self, way: dict[str, Any]) -> None:
        self.way = way
        self.ahead_s = 0.0
        """So far the store's clock is ahead of ours, as far as that matters."""

    def read(self, name: str) -> bytes | None:
        status, content = self._ask("GET", name, None, {})
        # S3 does not tell whether there is an object if we may not list, and a mailbox's token may not
        if status == 404 or (status == 403 and "sign" in self.way):
            return None
        if status != 200:
            raise OSError(f"the mailbox answers {status}")
        return content

    def create(self, name: str, content: bytes) -> bool:
        status, _ = self._ask("PUT", name, content, self.way.get("create") or {"If-None-Match": "*"})
        # for S3, a conflict is to be tried again; for others it means that there is an object
        if status == 412 or (status == 409 and "sign" not in self.way):
            return False
        # a token that may create, and not overwrite, is refused by some stores if there is an object
        if status == 403 and self.read(name) is not None:
            return False
        if status not in (200, 201):
            raise OSError(f"the mailbox answers {status}")
        return True

    def _ask(self, method: str, name: str, data: bytes | None, more: dict[str, str]) -> tuple[int, bytes]:
        import urllib.error  # here: who has a folder needs none of it
        import urllib.request

        query = self.way.get("query") or ""
        url = f"{self.way['url']}/{name}" + (f"?{query}" if query else "")
        own: dict[str, str] = self.way.get("headers") or {}
        while True:
            headers = {"Content-Type": "application/octet-stream", **own, **more}
            if "sign" in self.way:
                headers.update(aws_headers(self.way["sign"], method, url, data or b"", self.ahead_s))
            request = urllib.request.Request(url, data=data, headers=headers, method=method)
            try:
                with urllib.request.urlopen(request, timeout=HTTP_S) as answer:
                    return answer.status, answer.read(OBJECT_CAP + 1)
            except urllib.error.HTTPError as err:
                err.close()
                if err.code != 403 or "sign" not in self.way or not self._set_clock(err.headers.get("Date")):
                    return err.code, b""
            except (OSError, ValueError) as err:
                # no URL: there may be a token in it
                raise OSError(f"the mailbox does not answer ({type(err).__name__})") from None

    def _set_clock(self, told: str | None) -> bool:
        """Go by the store's clock, if ours is so far from it that what we sign is refused. Was it?"""
        from email.utils import parsedate_to_datetime

        try:
            ahead_s = parsedate_to_datetime(told or "").timestamp() - time.time()
        except (ValueError, TypeError, IndexError, OverflowError):
            return False
        was, self.ahead_s = self.ahead_s, ahead_s
        return abs(ahead_s - was) > CLOCKS_S


def aws_headers(
    keys: dict[str, str], method: str, url: str, data: bytes, ahead_s: float = 0.0, service: str = "s3"
) -> dict[str, str]:
    """Headers that sign a request (AWS Signature Version 4). `keys`: `id`, `secret`, `token`, `region`."""
    moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(time.time() + ahead_s))
    digest = hashlib.sha256(data).hexdigest()
    host, _, path = url.partition("://")[2].partition("/")
    headers = {"host": host, "x-amz-content-sha256": digest, "x-amz-date": moment}
    if keys.get("token"):
        headers["x-amz-security-token"] = keys["token"]
    names = ";".join(headers)
    told = [f"{name}:{value}" for name, value in headers.items()]
    request = "\n".join([method, "/" + path, "", *told, "", names, digest])
    scope = f"{moment[:8]}/{keys['region']}/{service}/aws4_request"
    signature = aws_signature(keys, moment, scope, request)
    del headers["host"]  # which is sent anyway
    by = f"Credential={keys['id']}/{scope}, SignedHeaders={names}, Signature={signature}"
    return {**headers, "Authorization": f"AWS4-HMAC-SHA256 {by}"}


def aws_signature(keys: dict[str, str], moment: str, scope: str, request: str) -> str:
    text = "\n".join(("AWS4-HMAC-SHA256", moment, scope, hashlib.sha256(request.encode()).hexdigest()))
    key = b"AWS4" + keys["secret"].encode()
    for part in (*scope.split("/"), text):
        key = hmac.new(key, part.encode(), "sha256").digest()
    return key.hex()


def open_post(way: dict[str, Any]) -> Post:
    """`way`: {"folder": PATH}, or what HttpPost needs."""
    return FolderPost(way["folder"]) if "folder" in way else HttpPost(way)


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
        dues = [max(line.due, self.retry_at) for line in self.lines.values() if line.may_write]
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
            name = str(header.get("line"))
            if name.isalnum() and len(name) <= LONGEST_NAME and name not in self.lines:
                self.receive(self.open(name, str(header.get("verb") or "")), header, payload)
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

    def receive(self, line: Line, header: dict[str, Any], payload: bytes) -> None:
        line.heard = time.monotonic()
        line.read += 1
        line.acknowledged = max(line.acknowledged, min(int(header.get("read") or 0), line.written))
        if header.get("way"):
            self.post = open_post(header["way"])  # another token: the one before is about to expire
        if header.get("end"):
            self.hang_up(line, forget=True)
            return
        line.inbox += payload
        line.half = line.half or bool(header.get("half"))
        self.pass_on(line)

    def open(self, name: str, verb: str) -> Line:
        for over in [line for line in self.lines.values() if line.sent_end]:
            del self.lines[over.name]
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
            while line.may_write and now >= line.due:
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
        # the answer to an earlier try may have been lost on its way to us
        if not self.post.create(name, content) and self.post.read(name) != content:
            self.hang_up(line, forget=True)  # somebody else writes there: the controller sees it, too
            return
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
            self.lines.pop(line.name, None)
