"""Somebody's folder with an evalfleet.toml, and real evalfleet processes in it, against the stand-in."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evalfleet.errors import FleetError
from evalfleet.journal import Store
from evalfleet.state import RunState, fold
from standins.azure import StandIn
from tests.cloud.places import GROUP, LOST_S, SETTLE_S, SIZE, environment
from tests.waiting import PATIENCE_S, suspend

BENCH = """\
name = "b"
tasks = "tasks.jsonl"
command = ["sh", "run.sh", "{params.seconds}"]
files = ["run.sh"]
timeout_s = 60
"""
SCRIPT = """\
hostname >"$EVALFLEET_OUT/host"
sleep "$1"
echo '{"score": 1}' >"$EVALFLEET_OUT/result.json"
"""


class Done:
    """A process that has ended."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err
        assert "Traceback" not in out + err, out + err

    def __repr__(self) -> str:
        return f"exit {self.code}\n{self.out}\n{self.err}"


class Process:
    def __init__(self, popen: subprocess.Popen[bytes], out: Path, err: Path) -> None:
        self.popen = popen
        self._out, self._err = out, err

    def signal(self, signum: int) -> None:
        os.kill(self.popen.pid, signum)

    def suspend(self) -> None:
        suspend(self.popen.pid)

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()

    def wait(self) -> Done:
        code = self.popen.wait(PATIENCE_S)
        return Done(code, self._out.read_text("utf-8"), self._err.read_text("utf-8"))


class Desk:
    """With `inside`, processes are in the network of the stand-in's machines, and can reach them."""

    def __init__(
        self, azure: StandIn, folder: Path, owner: str = "tester", *, inside: bool = False, **more: Any
    ) -> None:
        self._azure = azure
        self._prefix: tuple[str, ...] = tuple(azure.hosts.lab.prefix) if inside else ()
        self._inside = inside
        self._count = 0
        self.folder = folder
        self.home = folder / "home"
        self.processes: list[Process] = []
        folder.mkdir(exist_ok=True)
        self.configure(owner=owner, **more)

    def configure(self, **more: Any) -> None:
        azure = self._azure
        given = {
            "kind": "azure_vm",
            "subscription": azure.subscription,
            "resource_group": GROUP,
            "endpoint": azure.endpoint_inside if self._inside else azure.endpoint,
            "ca": str(azure.ca),
            "sizes": [SIZE],
            "regions": ["eastus"],
            "ssh_from": ["*"],
            "settle_s": SETTLE_S,
            "lost_s": LOST_S,
            **more,
        }
        text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in given.items())
        (self.folder / "evalfleet.toml").write_text(f"[places.azure]\n{text}")

    def bench(self, tasks: int, seconds: float = 0.1, *, first: Sequence[float] = ()) -> None:
        """Tasks that take so long; the first ones as long as each of them says."""
        (self.folder / "b.toml").write_text(BENCH)
        (self.folder / "run.sh").write_text(SCRIPT)
        lasting = [*first, *[seconds] * (tasks - len(first))]
        lines = [{"id": f"t_{n}", "params": {"seconds": each}} for n, each in enumerate(lasting)]
        (self.folder / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    @property
    def environ(self) -> dict[str, str]:
        given = environment(self._azure, inside=self._inside)
        return {**os.environ, **given, "EVALFLEET_HOME": str(self.home), "TERM": "dumb"}

    def start(self, *words: str, env: Mapping[str, str] | None = None) -> Process:
        self._count += 1
        out, err = (self.folder / f"{self._count}.{name}" for name in ("out", "err"))
        with out.open("wb") as out_file, err.open("wb") as err_file:
            popen = subprocess.Popen(
                [*self._prefix, sys.executable, "-m", "evalfleet", *words],
                cwd=self.folder,
                env={**self.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=out_file,
                stderr=err_file,
            )
        process = Process(popen, out, err)
        self.processes.append(process)
        return process

    def done(self, *words: str, code: int = 0, env: Mapping[str, str] | None = None) -> Done:
        done = self.start(*words, env=env).wait()
        assert done.code == code, done
        return done

    def say(self, *words: str, code: int = 0) -> str:
        return self.done(*words, code=code).out

    def start_run(self, *words: str) -> Process:
        return self.start("run", "b.toml", "--on", "azure", "--name", "r", "--canary", "0", *words)

    def state(self, run: str = "r") -> RunState:
        try:
            return fold(Store.open(self.home, create=False, read_only=True).read(run))
        except FleetError:
            return RunState()  # not written yet

    def sweep(self) -> None:
        """End what a failed test left running."""
        for process in self.processes:
            if process.popen.poll() is None:
                process.signal(signal.SIGCONT)
                process.kill()
