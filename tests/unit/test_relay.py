"""The machine's end of a mailbox: what a supervisor says last is written although both are about to end."""

from __future__ import annotations

import functools
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from evalfleet.channels.supervisor.files import SOCKET
from evalfleet.channels.supervisor.mailbox import (
    WINDOW,
    FolderPost,
    Line,
    Relay,
    line_name,
    mail_new,
    mail_out,
    opened,
    sealed,
)
from tests.waiting import PATIENCE_S, until

KEY, LINE = "key", line_name(1)
PACE_S = (0.01, 0.05)


class SlowPost(FolderPost):
    """A store that does not answer who reads while it is `busy`."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.free, self.asked = threading.Event(), threading.Event()
        self.free.set()

    def read(self, name: str) -> bytes | None:
        if not self.free.is_set():
            self.asked.set()
            assert self.free.wait(PATIENCE_S)
        return super().read(name)


class CountedRelay(Relay):
    turns = 0

    def turn(self) -> None:
        self.turns += 1
        super().turn()


class Box:
    """A mailbox with one line, at whose other end this test is the supervisor."""

    def __init__(self, folder: Path) -> None:
        (folder / "mail").mkdir()
        self.post = SlowPost(str(folder / "mail"))
        self.relay = CountedRelay(self.post, KEY, str(folder), *PACE_S)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / SOCKET))
        self._listener.listen()
        self._listener.settimeout(PATIENCE_S)
        self._thread = threading.Thread(target=self.relay.run, daemon=True)
        self._thread.start()
        name = mail_new(1)
        self.post.create(name, sealed(KEY, name, {"n": 1, "read": 0}, b"hello\n"))
        self.supervisor, _ = self._listener.accept()
        assert self.supervisor.recv(100) == b"hello\n"

    def said(self) -> bytes:
        """What has come out of the line so far."""
        pieces: list[bytes] = []
        while (content := self.post.read(name := mail_out(LINE, len(pieces) + 1))) is not None:
            pieces.append(opened(KEY, name, content)[1])
        return b"".join(pieces)

    def close(self) -> None:
        self.post.free.set()
        self.relay.stop(0.0)
        self._thread.join()
        lines = [line.sock for line in self.relay.lines.values()]
        for sock in (self.supervisor, self._listener, self.relay.wake, self.relay.waker, *lines):
            sock.close()
        self.relay.selector.close()


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    made = Box(tmp_path)
    yield made
    made.close()


def test_what_is_said_while_the_store_is_slow_is_written_before_the_end(box: Box) -> None:
    """While the store is asked, nobody reads the socket: a last word, such as of an eviction, was lost."""
    box.post.free.clear()
    assert box.post.asked.wait(PATIENCE_S)
    box.supervisor.sendall(b"evicted\n")
    box.supervisor.close()
    stopper = threading.Thread(target=box.relay.stop, args=(PATIENCE_S,))
    stopper.start()
    stopper.join(0.2)
    box.post.free.set()
    stopper.join(PATIENCE_S)
    assert not stopper.is_alive()
    assert box.said() == b"evicted\n"


def test_a_relay_that_has_nothing_to_say_stops_at_once_and_a_beat_is_not_waited_for(box: Box) -> None:
    box.relay.pace.slow_s = 600.0
    box.supervisor.sendall(b'{"push": "beat"}\n')
    until(lambda: box.relay.lines[LINE].outbox)
    box.relay.stop(PATIENCE_S)
    assert box.relay.stopped.is_set()
    assert box.said() == b'{"push": "beat"}\n'


def _has_written(line: Line, number: int) -> bool:
    return line.written >= number


def test_a_line_whose_reader_is_behind_costs_nothing(box: Box) -> None:
    """Its window is full: there is nothing to do for it until the reader says how far it is."""
    line = box.relay.lines[LINE]
    for number in range(1, WINDOW + 1):
        box.supervisor.sendall(b"more\n")
        until(functools.partial(_has_written, line, number))
    line.outbox += b"more\n"
    line.due = 0.0
    turns, began = box.relay.turns, time.monotonic()
    time.sleep(0.5)
    assert line.owes
    assert box.relay.turns - turns <= 2 * (time.monotonic() - began) / PACE_S[0]


PILOT = """\
import signal, sys, threading, time
from pathlib import Path
from evalfleet.channels.supervisor.pilot import hold
folder = Path(sys.argv[1])
def strike():
    while not (folder / "expiry").exists():
        time.sleep(0.01)
    time.sleep(0.3)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
threading.Thread(target=strike, daemon=True).start()
sys.exit(hold(folder, 600.0, None))
"""


def test_a_pilot_hears_a_signal_that_does_not_wake_it(tmp_path: Path) -> None:
    """As one that comes just before it begins to wait, or that another thread gets."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PILOT, str(tmp_path)], timeout=PATIENCE_S)
    assert done.returncode == 0
    assert not (tmp_path / SOCKET).exists()
