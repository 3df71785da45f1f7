"""Containers that are processes end with the stand-in, also if that is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from standins.azure_ml import Processes
from tests.waiting import until

CANNOT = Processes.missing()
pytestmark = pytest.mark.skipif(CANNOT is not None, reason=f"NO TEST OF AZURE ML'S JOBS: {CANNOT}")
BEGIN = """\
import asyncio, sys, threading
from standins.azure_ml import Processes

async def main():
    await Processes().run("job", f"sleep 1000 & echo $$ >{sys.argv[1]}; wait", {})
    await asyncio.sleep(1000)

thread = threading.Thread(target=asyncio.run, args=(main(),))
thread.start()
thread.join()
"""


def run_in(folder: Path) -> list[str]:
    """The processes that have the folder's name in their words, or work for one that has."""
    found: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if str(folder) in words and int(process.name) != os.getpid():
            found.append(words)
    return found


def test_what_a_job_has_begun_ends_when_the_stand_in_is_killed(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    with subprocess.Popen([sys.executable, "-c", BEGIN, str(begun)]) as standin:
        until(begun.exists, "the job runs")
        assert len(run_in(tmp_path)) >= 3, "the stand-in, its child and the job's shell"
        standin.kill()
    until(lambda: not run_in(tmp_path), lambda: f"it is left: {run_in(tmp_path)}")
