"""Children that are ended before they are done: nothing is left of them, and nobody complains."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from evalfleet.channels import children
from evalfleet.channels.supervisor.processes import kill_marked, markers_of_jobs
from tests.waiting import PATIENCE_S, until

ENDED_AS_THEY_END = """
import asyncio, os, random
from evalfleet.channels import children

async def main():
    for _ in range(100):
        process = await asyncio.create_subprocess_exec("true")
        for _ in range(random.randrange(4000)):
            os.getppid()
        await children.end(process)

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # so that who waits for a child comes late to its end
asyncio.run(main())
"""


def test_one_that_ends_by_itself_as_it_is_ended_gives_no_complaint() -> None:
    argv = [sys.executable, "-c", ENDED_AS_THEY_END]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stderr == ""


def test_one_whose_own_child_holds_its_output_open_is_not_waited_for(tmp_path: Path) -> None:
    async def ended() -> int | None:
        process = await asyncio.create_subprocess_exec(
            "sh", "-c", f"sleep 600 & echo $! > {tmp_path}/pid; wait", stdout=asyncio.subprocess.PIPE
        )
        await asyncio.to_thread(until, lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        await children.end(process)
        return process.returncode

    try:
        assert asyncio.run(asyncio.wait_for(ended(), PATIENCE_S)) == -signal.SIGKILL
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_killing_what_is_left_of_a_machine_leaves_the_exit_codes_of_other_children_alone() -> None:
    environ = {**os.environ, "EVALFLEET_MACHINE": "/m/left", "EVALFLEET_JOB": "j"}
    with (
        subprocess.Popen(["sh", "-c", "exit 7"]) as other,
        subprocess.Popen(["sleep", "600"], env=environ) as left,
    ):
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        assert kill_marked(PATIENCE_S, *markers_of_jobs("/m/left"))
    assert (other.returncode, left.returncode) == (7, -signal.SIGKILL)
