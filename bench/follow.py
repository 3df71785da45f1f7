"""From a line that an attempt writes on a lab host to the same line on the screens of those who follow it.

Ten `evalfleet logs -f` in processes of their own, over SSH, as users have them.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import threading
import time
from pathlib import Path

from evalfleet.lab import NamespaceHost

from .hosts import cannot, lab_of, start_run
from .result import Figures, Result, below, rounded
from .workspace import EVALFLEET, Workspace, environment, wait_until

FOLLOWERS, SECONDS = 10, 40.0
GO = "/srv/go"  # which an isolated job sees, unlike what is in /tmp
TASK = "talks"
# hosts of a lab have this computer's clock
SCRIPT = f"until [ -e {GO} ]; do date +%s.%N; sleep 0.37; done"
READY_S, END_S = 120.0, 60.0
COUNTED = (
    "latency: from `date` on the host to the line being read from the standard output of `logs -f`, all "
    "followers together; cost: CPU of the supervisor with the followers less that without, of one core"
)


def run(quick: bool) -> Result:
    if (error := cannot("follow")) is not None:
        return Result("follow", dict(error), {})
    followers, seconds = (2, 3.0) if quick else (FOLLOWERS, SECONDS)
    with lab_of(1) as lab, Workspace() as space:
        path = space.benchmark(["sh", "-c", SCRIPT], [{"id": TASK}])
        process = start_run(space, lab, path, 1)
        host = lab.hosts[0]
        wait_until(lambda: any(SCRIPT in each.argv for each in host.processes()), READY_S, 0.1)
        supervisor = _supervisor(host)
        alone = _share(supervisor, seconds)
        readers = [
            _Reader(space, (*lab.prefix, *EVALFLEET, "logs", "run", TASK, "-f")) for _ in range(followers)
        ]
        wait_until(lambda: all(reader.delays for reader in readers), READY_S, 0.1)
        since = time.time()
        followed = _share(supervisor, seconds)
        host.run(["touch", GO])
        space.finish(process, END_S)
        delays = sorted(delay for reader in readers for delay in reader.end(since))
    cost = max(followed - alone, 0.0)
    p95 = statistics.quantiles(delays, n=20)[-1]
    figures: Figures = {
        "followers": followers,
        "lines": len(delays),
        "p50_s": rounded(statistics.median(delays), 3),
        "p95_s": rounded(p95, 3),
        "worst_s": rounded(delays[-1], 3),
        "supervisor_alone_share_of_a_core": rounded(alone, 4),
        "supervisor_followed_share_of_a_core": rounded(followed, 4),
        "cost_share_of_a_core": rounded(cost, 4),
        "counted": COUNTED,
    }
    return Result("follow", figures, {"p95_s": below(p95, 1.0), "cost_share_of_a_core": below(cost, 0.01)})


class _Reader:
    """One who follows the log, and notes of each line when it was written and when it came."""

    def __init__(self, space: Workspace, argv: tuple[str, ...]) -> None:
        self._process = space.adopt(
            subprocess.Popen(
                argv,
                cwd=space.folder,
                env=environment(EVALFLEET_HOME=str(space.home)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        )
        self.delays: list[tuple[float, float]] = []
        """When each line was written, and how long it took."""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            now = time.time()
            if b"." in line and line.strip().replace(b".", b"").isdigit():
                written = float(line)
                self.delays.append((written, now - written))

    def end(self, since: float) -> list[float]:
        """The delays of lines that were written since then: what was there before came at once."""
        self._thread.join(END_S)
        return [delay for written, delay in self.delays if written >= since]


def _supervisor(host: NamespaceHost) -> int:
    """Its process: the first of ours. The others are its forks, which wait for jobs to keep."""
    return min(each.pid for each in host.processes() if any("supervis" in word for word in each.argv))


def _share(pid: int, seconds: float) -> float:
    """Of a core, while we look."""
    before, begun = _cpu_s(pid), time.monotonic()
    time.sleep(seconds)
    return (_cpu_s(pid) - before) / (time.monotonic() - begun)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
