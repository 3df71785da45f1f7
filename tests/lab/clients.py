"""OpenSSH clients of lab hosts, for tests to look at faults with."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Sequence

import pytest

from lab import AnyLab, Host, Lab
from tests.waiting import PATIENCE_S, until

CANNOT = Lab.missing()
needs_lab = pytest.mark.skipif(CANNOT is not None, reason=f"NO TEST OF REAL HOSTS: {CANNOT}")

KEEP_ALIVE = ("ServerAliveInterval=1", "ServerAliveCountMax=2", "LogLevel=INFO")
TICKS = "while :; do echo tick; sleep 0.02; done"
SILENCE_S = 0.4


def ssh(
    lab: AnyLab, host: Host, command: str, *, user: str = "root", options: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    argv = lab.client.ssh(host, command, user=user, options=options)
    return subprocess.run(
        argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=PATIENCE_S, check=False
    )


class Session:
    """An OpenSSH client that stays connected; what it prints can be waited for."""

    def __init__(self, lab: AnyLab, host: Host, command: str) -> None:
        self._process = subprocess.Popen(
            lab.client.ssh(host, command, options=KEEP_ALIVE),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        until(lambda: self.new() > 0)

    def new(self) -> int:
        """How many bytes have come since the last call."""
        assert self._process.stdout is not None
        return len(self._process.stdout.read() or b"")

    def is_silent(self) -> bool:
        time.sleep(0.05)  # for what is on its way
        self.new()
        time.sleep(SILENCE_S)
        return self.new() == 0 and self._process.poll() is None

    def goes_on(self) -> bool:
        self.new()
        until(lambda: self.new() > 0)
        return self._process.poll() is None

    def end(self) -> str:
        """What the client says when it gives up."""
        self._process.wait(PATIENCE_S)
        assert self._process.stderr is not None
        return self._process.stderr.read().decode()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def session(lab: AnyLab, host: Host, command: str = TICKS) -> Iterator[Session]:
    made = Session(lab, host, command)
    try:
        yield made
    finally:
        made.close()
