"""Waiting for more to print, as long as somebody reads it."""

from __future__ import annotations

import select
import sys


def reader_left(seconds: float) -> bool:
    """Waits so long. True, at once, if whoever read our output has gone (`| head`): nothing needs be said."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # errors are told in any case
    return bool(poll.poll(seconds * 1000))
