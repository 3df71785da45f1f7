"""A job: its orders, its state while it lives, and its end."""

from __future__ import annotations

import binascii
import json
import os
import stat
import time

from .files import file_size, job_name, read_file
from .host import NEVER
from .isolation import Box
from .output import CALLS, Growth, Log

TYPE_CHECKING = False  # importing typing would cost 3 ms
if TYPE_CHECKING:
    from typing import Any

GRACE_S = 5.0
LOG_CAP = 50_000_000
RESULT_CAP = 1 << 20


class HostJob:
    """A job as its supervisor knows it: alive until `reason` is set, its wrapper until `settle_until` is."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.id = str(spec["id"])
        self.path = "jobs/" + job_name(self.id)
        self.timeout = float(spec.get("timeout_s") or NEVER)
        self.lease = float(spec.get("lease_s") or NEVER)
        self.grace = float(spec.get("grace_s", GRACE_S))
        self.bundle = str(spec.get("bundle") or "")
        self.in_bundle = bool(spec.get("in_bundle"))
        self.graded = bool(spec.get("graded"))
        self.metered = bool(spec.get("metered"))  # its model calls go through the machine's meter
        self.box = Box.restored(spec.get("box"))
        self.fetch: dict[str, Any] = spec.get("fetch") or {}
        self.log = Log(self.path, int(spec.get("log_cap_bytes") or LOG_CAP))
        self.growth = Growth(self.path, float(spec.get("stall_s") or NEVER))
        self.pid: int | None = None
        self.born = 0
        self.pidfd: int | None = None
        self.child = False
        self.started = self.seconds = 0.0
        self.deadline = self.kill_at = self.settle_until = NEVER
        self.log_due = self.due = self.doubt_until = 0.0
        self.why: str | None = None
        self.reason: str | None = None
        self.code: int | None = None
        self.detail = ""

    @property
    def settling(self) -> bool:
        """Return True if its wrapper is gone, and what the job left behind is being ended."""
        return self.settle_until < NEVER

    @property
    def in_doubt(self) -> bool:
        """Return True if its command has ended, and it may yet turn out that this was an eviction."""
        return self.settling and self.doubt_until > 0.0 and self.why is None

    def run_from(self, started: float) -> None:
        self.started = started
        self.deadline = started + self.timeout
        now = time.monotonic()
        self.log_due = now + self.log.interval
        self.growth.begin(now)
        self.due = min(self.log_due, self.deadline, self.growth.due)

    def exit_code(self) -> int | None:
        text = read_file(self.path + "/exit", 100)
        try:
            return int(text) if text and text.endswith(b"\n") else None
        except ValueError:
            return None

    def unwatched_seconds(self) -> float:
        """Return how long it ran, if it ended unwatched. By the wall clock, which may have been set."""
        try:
            seconds = os.stat(self.path + "/exit").st_mtime - os.stat(self.path + "/pid").st_mtime
        except OSError:
            return 0.0
        return min(max(seconds, 0.0), self.timeout + self.grace)

    def end(self) -> None:
        self.reason = self.why or ("lost" if self.code is None else "exited")

    def pulse(self, now: float) -> dict[str, Any]:
        """Return its seconds and the size of its log. For set-up, which may last, also its last line."""
        pulse: dict[str, Any] = {"seconds": round(now - self.started, 1), "log_bytes": self.log.size()}
        if self.in_bundle:
            pulse["said"] = self.log.last_line()
        if self.metered:
            pulse["calls_bytes"] = file_size(f"{self.path}/meter/{CALLS}")  # it grows as calls begin and end
        return pulse

    def result_bytes(self) -> int:
        """Return the size of a result.json, which may be too large to be sent."""
        for name in ("/out/result.json", "/result.json"):
            try:
                about = os.lstat(self.path + name)
            except OSError:
                continue
            return about.st_size if stat.S_ISREG(about.st_mode) else 0
        return 0

    def how(self) -> dict[str, Any]:
        """Return how it ended, with its result, for a controller."""
        ending: dict[str, Any] = {"job": self.id, "reason": self.reason, "seconds": round(self.seconds, 3)}
        if self.code is not None:
            ending["exit_code"] = self.code
        # a collected job's out/ has moved; its result stays here until it is forgotten
        result = read_file(self.path + "/out/result.json", RESULT_CAP)
        if result is None:
            result = read_file(self.path + "/result.json", RESULT_CAP)
        if result is not None:
            try:
                ending["result"] = result.decode()
            except UnicodeDecodeError:
                ending["result64"] = binascii.b2a_base64(result, newline=False).decode()
        else:
            size = self.result_bytes()
            if size > RESULT_CAP:
                ending["result_bytes"] = size
        used = read_file(self.path + "/metered.json", RESULT_CAP) if self.metered else None
        if used:
            ending["metered"] = json.loads(used)
        if self.detail:
            ending["detail"] = self.detail
        elif result is None or self.code != 0:
            ending["detail"] = self.log.tail()
        return ending
