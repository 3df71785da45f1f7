"""The place `lab` as its tests use it, and what they look for afterwards."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import msgspec

from evalfleet.model import Machine, MachineId
from evalfleet.ports import Place, PlaceContext
from evalfleet.testing import ShellHarness
from lab.keeper_client import FOLDER
from lab.network import Network
from lab.place import LabPlace, LabSettings
from lab.protocol import KeeperRecord
from tests.desk import Desk, Process
from tests.lab.marks import Marks, leave
from tests.waiting import PATIENCE_S, allow_for_load, until

HOME_ID = "abc123"
KIND = "lab.place:LabPlace"
MARKS_PORT = 7  # commands name it before their network is there, in which nobody else has it


def make_place(home: Path, **settings: Any) -> LabPlace:
    home.mkdir(exist_ok=True)
    return LabPlace.make("lab", msgspec.convert(settings, LabSettings), PlaceContext(home, HOME_ID))


def record_of(home: Path) -> KeeperRecord | None:
    try:
        return msgspec.json.decode((home / FOLDER / "lab.json").read_bytes(), type=KeeperRecord)
    except FileNotFoundError:
        return None


def keeper_of(home: Path) -> KeeperRecord:
    return until(lambda: record_of(home), "a keeper")


def remains(record: KeeperRecord) -> list[str]:
    """Of a keeper and its lab: processes, files, mounts, control groups. Its network goes with these."""
    lab = Path(record.lab)
    group = f"evalfleet-lab-{lab.name}"
    found = [str(path) for path in (lab,) if path.exists()]
    found += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(lab) in line]
    found += [folder for folder, _, _ in os.walk("/sys/fs/cgroup") if folder.endswith(group)]
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            about = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/cgroup").read_bytes()
            if os.fsencode(str(lab)) in about or group.encode() in about:
                found.append(f"process {pid}: {about!r}")
    with contextlib.suppress(OSError):
        # a dead one that nobody has waited for yet has no command line
        if Path(f"/proc/{record.pid}/cmdline").read_bytes():
            found.append(f"the keeper, process {record.pid}")
    return found


def assert_all_gone(*records: KeeperRecord) -> None:
    def left() -> list[str]:
        return [each for record in records for each in remains(record)]

    until(lambda: not left(), lambda: f"all to be gone: {left()}", look_s=0.05)


def end(home: Path) -> None:
    """For a test that failed: ends the keeper and so its lab."""
    record = record_of(home)
    if record is not None and Path(record.lab).exists():
        with contextlib.suppress(ProcessLookupError):
            os.kill(record.pid, signal.SIGTERM)
        assert_all_gone(record)


class LabHarness(ShellHarness):
    """Hosts share no files with us: marks come over their network, to a listener at its gateway."""

    unit_s = 0.6
    silent_s = 5.0
    patience_s = PATIENCE_S
    capacity = 2

    def __init__(self) -> None:
        super().__init__()
        allow_for_load(self)
        self._home = self.directory / "home-of-place"
        self._left: collections.Counter[str] = collections.Counter()
        self._listeners: dict[str, Marks] = {}

    def make_place(self) -> Place:
        return make_place(self._home, max_hosts=2)

    async def until_up(self, place: Place, machine: MachineId) -> Machine:
        seen = await super().until_up(place, machine)
        self._listen(keeper_of(self._home).network)
        return seen

    def _listen(self, network: str) -> None:
        if network not in self._listeners:
            self._listeners[network] = Marks(Network(Path(network)).socket(), self._left, MARKS_PORT)

    def _leave(self, mark: str) -> str:
        return leave(mark, MARKS_PORT)

    async def marks(self, mark: str) -> int:
        return self._left[mark]

    def close(self) -> None:
        for listener in self._listeners.values():
            listener.close()
        record = record_of(self._home)
        try:
            if record is not None:
                assert_all_gone(record)
        finally:
            end(self._home)
            super().close()


# -- runs ----------------------------------------------------------------------------------------

BENCH = """\
name = "b"
tasks = "tasks.jsonl"
command = ["sh", "run.sh", "{task_id}"]
files = ["run.sh"]
timeout_s = 60
"""
SCRIPT = """\
hostname >"$EVALFLEET_OUT/host"
ip -4 -o addr show eth0 >"$EVALFLEET_OUT/address"
sleep 1
echo '{"score": 1}' >"$EVALFLEET_OUT/result.json"
"""
# for the world outside, which is none of the lab's business
CONFIG = """\
Host *
  ProxyJump nowhere.invalid
  User nobody
"""


class Bench(Desk):
    """A desk with a benchmark, which knows nothing of the SSH of whoever runs the tests."""

    def __init__(self, folder: Path, tasks: int) -> None:
        super().__init__(folder, folder / "results", {"HOME": str(folder)})
        self.tasks = tasks
        (folder / ".ssh").mkdir()
        (folder / ".ssh/config").write_text(CONFIG)
        self.config(f'[places.lab]\nkind = "{KIND}"\n')
        (folder / "b.toml").write_text(BENCH)
        (folder / "run.sh").write_text(SCRIPT)
        (folder / "tasks.jsonl").write_text("".join(f'{{"id": "t_{n}"}}\n' for n in range(tasks)))

    def start_run(self, name: str, workers: int) -> Process:
        return self.start("run", "b.toml", "--on", "lab", "--workers", str(workers), "--name", name)

    def await_attempts(self, run: str, count: int) -> None:
        until(lambda: len(self.ended(run)) >= count, f"{count} results of {run}")

    def ended(self, run: str) -> list[Path]:
        return list((self.home / run).glob("t_*/*/result.json"))

    def artefact(self, run: str, name: str) -> set[str]:
        tasks = self.results(run)["tasks"]
        return {(self.home / task["artifacts"] / name).read_text().strip() for task in tasks}
