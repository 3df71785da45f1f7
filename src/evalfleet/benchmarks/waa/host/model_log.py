"""Was the model's API failing when the time was up? The client's log has what httpx and the SDK wrote.

navi asks again 30 times, which takes longer than a task may: no Error line comes of it, and what looks like
an agent that took its time was an agent that was not answered.
"""

from __future__ import annotations

import glob
import os
import re
from itertools import takewhile

TAIL = 1 << 20
MANY = 6
"""Lines in a row, up to the end, that tell of a failure: one call of navi's has up to five of them."""
FAILING = frozenset((401, 403, 404, 408, 409, 429))

_CALL = re.compile(rb'HTTP Request: [A-Z]+ \S+ "HTTP/[0-9.]+ ([0-9]{3})|(Retrying request to )\S+ in ')


def trouble(out: str) -> str:
    """What an attempt's last calls came to, if they failed; empty if all was well, or unknown."""
    calls = [int(status) if status else 0 for status, _ in _CALL.findall(_newest_tail(out))]
    failed = list(takewhile(_is_failure, reversed(calls)))
    if len(failed) < MANY:
        return ""
    answers = [status for status in failed[:MANY] if status]
    return f"its last answer was {answers[0]}" if answers else "it does not answer"


def _newest_tail(out: str) -> bytes:
    logs = glob.glob(os.path.join(glob.escape(out), "client_logs", "normal-*.log"))
    try:
        with open(max(logs, key=os.path.getmtime, default=""), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            return file.read(TAIL)
    except OSError:
        return b""


def _is_failure(status: int) -> bool:
    """0: no answer came, and the call is repeated."""
    return status == 0 or status >= 500 or status in FAILING
