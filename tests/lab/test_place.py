"""The place `lab`: runs on real hosts of this computer, that outlive controllers and then are gone."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from evalfleet.errors import PlaceError
from evalfleet.model import AttemptId, Command, Job, Machine, MachineId, Needs
from evalfleet.ports import Fence
from evalfleet.testing import ChannelContract, Harness, PlaceContract
from lab.keeper_client import FOLDER
from lab.keys import new_key
from lab.protocol import KeeperRecord
from tests.docs.pages import ROOT
from tests.lab.clients import needs_lab
from tests.lab.places import (
    Bench,
    LabHarness,
    assert_all_gone,
    end,
    keeper_of,
    make_place,
    record_of,
)
from tests.processes import parent_of
from tests.waiting import PATIENCE_S, slowness, until

MACHINE = MachineId("pool-abc123-1")


@needs_lab
class TestLabPlace(PlaceContract, ChannelContract):
    def harness(self) -> Harness:
        return LabHarness()


# -- runs ----------------------------------------------------------------------------------------


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path, tasks=12)
    yield made
    end(made.home)


def assert_each_scored_once(bench: Bench, run: str) -> None:
    told = bench.results(run)
    assert (told["status"], told["scored"], told["broken"]) == ("done", bench.tasks, 0)
    assert len({task["task_id"] for task in told["tasks"]}) == bench.tasks


@needs_lab
def test_a_run_uses_several_hosts_and_leaves_none(bench: Bench) -> None:
    run = bench.start_run("r", 4)
    keeper = keeper_of(bench.home)
    run.finish()
    assert_each_scored_once(bench, "r")
    assert bench.artefact("r", "host") == {f"host-{n}" for n in range(4)}
    addresses = {machine["address"] for machine in bench.results("r")["machines"]}
    assert addresses == {f"198.18.1.{n}" for n in range(1, 5)}
    assert {line.split()[3].split("/")[0] for line in bench.artefact("r", "address")} == addresses
    assert_all_gone(keeper)


@needs_lab
def test_a_killed_controllers_attempts_are_adopted(bench: Bench) -> None:
    run = bench.start_run("r", 4)
    bench.await_attempts("r", 2)
    run.kill()
    keeper = keeper_of(bench.home)
    bench.start("resume", "r").finish()
    assert_each_scored_once(bench, "r")
    told = bench.results("r")
    assert (told["attempts"], told["controllers"], len(told["machines"])) == (bench.tasks, 2, 4)
    assert_all_gone(keeper)


def _other_than(first: KeeperRecord, home: Path) -> KeeperRecord | None:
    now = record_of(home)
    return now if now != first else None


@needs_lab
def test_a_killed_keepers_machines_are_replaced(bench: Bench) -> None:
    run = bench.start_run("r", 4)
    bench.await_attempts("r", 2)
    first = keeper_of(bench.home)
    os.kill(first.pid, signal.SIGKILL)
    assert_all_gone(first)
    second = until(lambda: _other_than(first, bench.home), "no other keeper came")
    run.finish()
    assert_each_scored_once(bench, "r")
    assert set(bench.results("r")["causes"]) <= {"machine_lost", "connection"}
    assert_all_gone(second)


@needs_lab
def test_two_runs_at_once_share_the_lab(bench: Bench) -> None:
    runs = [bench.start_run(name, 3) for name in ("one", "two")]
    for name in ("one", "two"):
        bench.await_attempts(name, 1)
    keeper = keeper_of(bench.home)
    for run in runs:
        run.finish()
    for name in ("one", "two"):
        assert_each_scored_once(bench, name)
    hosts = bench.artefact("one", "host") | bench.artefact("two", "host")
    assert len(hosts) == 6, "two runs had one host, or there were two labs"
    assert_all_gone(keeper)


@needs_lab
def test_what_the_page_shows_runs(bench: Bench) -> None:
    page = (ROOT / "docs/lab.md").read_text()
    commands = "".join(re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    assert "--on lab.place:LabPlace --workers 20" in commands
    shell = f'evalfleet() {{ "{sys.executable}" -m evalfleet "$@"; }}\nset -e\n{commands}'
    done = subprocess.run(
        ["bash", "-c", shell],
        cwd=ROOT,
        env={**os.environ, "EVALFLEET_HOME": str(bench.home)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "60 scored, 0 broken" in done.stdout
    assert re.search(r"machine +worker-\d+ on host-\d+", done.stdout)


# -- the keeper ----------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "home"
    end(tmp_path / "home")


def bring_up(home: Path, expires_s: float = 600.0, **settings: Any) -> None:
    """One machine, which stays when its controller leaves."""

    async def main() -> None:
        place = make_place(home, **settings)
        try:
            await place.create(MACHINE, (await place.offers(Needs()))[0], expires_s)
            assert [(seen.id, seen.phase) for seen in await place.list("pool")] == [(MACHINE, "up")]
        finally:
            await place.close()

    asyncio.run(main())


@needs_lab
def test_without_a_controller_all_ends_at_the_expiry(home: Path) -> None:
    bring_up(home, expires_s=10.0 * slowness())
    keeper = keeper_of(home)
    assert_all_gone(keeper)
    assert asyncio.run(make_place(home).list("pool")) == ()


def kill_with_its_shell(pid: int) -> None:
    """The shell would sweep away what a killed keeper leaves."""
    shell = parent_of(pid)
    assert Path(f"/proc/{shell}/cmdline").read_bytes().startswith(b"/bin/sh\0")
    os.kill(shell, signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)


@needs_lab
def test_machines_of_a_killed_keeper_are_not_listed(home: Path) -> None:
    bring_up(home)
    first = keeper_of(home)
    kill_with_its_shell(first.pid)
    assert Path(first.lab).exists(), "there is nothing to sweep away"
    assert asyncio.run(make_place(home).list("pool")) == ()
    assert not Path(first.lab).exists(), "it is said to be gone, but is not"
    bring_up(home)
    assert keeper_of(home).pid != first.pid


@needs_lab
def test_a_terminated_keeper_takes_its_hosts_along(home: Path) -> None:
    bring_up(home)
    keeper = keeper_of(home)
    os.kill(keeper.pid, signal.SIGTERM)
    assert_all_gone(keeper)


@needs_lab
def test_twenty_hosts_are_made_together(home: Path) -> None:
    async def main() -> None:
        place = make_place(home)
        offer = (await place.offers(Needs()))[0]

        async def make(*numbers: int) -> float:
            begun = time.monotonic()
            machines = [MachineId(f"pool-abc123-{n}") for n in numbers]
            await asyncio.gather(*(place.create(machine, offer, 600.0) for machine in machines))
            return time.monotonic() - begun

        await make(0)  # the keeper is there now
        before_s = await make(1)
        took = await make(*range(2, 19))
        one_s = max(before_s, await make(19))  # others may keep this computer busy meanwhile
        seen = await place.list("pool")
        assert {machine.phase for machine in seen} == {"up"}
        assert len({machine.address for machine in seen}) == 20
        await asyncio.gather(*(place.delete(machine.id) for machine in seen))
        await place.close()
        assert took < 17 * one_s, "they are made one after the other"

    asyncio.run(main())


@needs_lab
def test_a_host_key_that_changed_is_refused(home: Path) -> None:
    bring_up(home)
    known = Path(keeper_of(home).known_hosts)
    address = known.read_text().split()[0]
    known.write_text(f"{address} {new_key('other').public}\n")
    with pytest.raises(PlaceError, match="THE HOST KEY HAS CHANGED"):
        bring_up(home)


@needs_lab
def test_settings_reach_the_hosts(home: Path) -> None:
    settings: dict[str, Any] = {"disk_gb": 0.02, "user": "root", "memory_gb": 0.5, "cpus": 0.5}
    write = "head -c 40000000 /dev/zero >file; test $(stat -c %s file) -lt 40000000 && test $(id -un) = root"
    bring_up(home, **settings)

    async def main() -> int | None:
        place = make_place(home, **settings)
        channel = place.channel((await place.list("pool"))[0], Fence("r", 1, 20.0))
        await channel.start(Job(AttemptId("t.0"), Command(("sh", "-c", write)), 30.0))
        ended = await channel.ended(AttemptId("t.0"))
        await channel.close()
        await place.delete(MACHINE)
        await place.close()
        return ended.exit_code

    assert asyncio.run(main()) == 0


@needs_lab
def test_people_can_look_into_a_machine(home: Path) -> None:
    bring_up(home)
    place = make_place(home)
    seen = asyncio.run(place.list("pool"))[0]
    argv = place.shell(seen, ["sh", "-c", "hostname; id -un"])
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.stdout.split() == [seen.node, "lab"], done


@needs_lab
def test_a_stopped_machine_starts_again(home: Path) -> None:
    bring_up(home)

    async def stop() -> tuple[Machine, Sequence[str]]:
        place = make_place(home)
        seen = (await place.list("pool"))[0]
        await place.stop(MACHINE)
        await place.close()
        return seen, place.shell(seen, ["pgrep", "-f", "[s]upervisor-"])

    seen, argv = asyncio.run(stop())
    assert subprocess.run(argv, timeout=PATIENCE_S, check=False).returncode == 1, "its supervisor still runs"
    bring_up(home)
    assert asyncio.run(make_place(home).list("pool")) == (seen,)
    assert subprocess.run(argv, timeout=PATIENCE_S, check=False).returncode == 0


@needs_lab
def test_other_settings_are_refused_while_hosts_are_up(home: Path) -> None:
    bring_up(home)
    other = make_place(home, disk_gb=2.0)
    offer = asyncio.run(other.offers(Needs()))[0]
    with pytest.raises(PlaceError, match="up with other settings") as refusal:
        asyncio.run(other.create(MachineId("pool-abc123-2"), offer, 60.0))
    assert not refusal.value.transient


# -- without a lab -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("become", "missing"),
    [([], "root"), pytest.param(["--map-root-user"], r"root's rights \(.*\)", marks=needs_lab)],
    ids=["nobody", "root of a namespace"],
)
def test_without_root_one_line_says_what_is_missing(bench: Bench, become: list[str], missing: str) -> None:
    # a user of another namespace: our files stay readable, and root's rights are gone
    unprivileged = ["unshare", "--user", *become, "--"] if os.geteuid() == 0 else []
    done = subprocess.run(
        [*unprivileged, sys.executable, "-m", "evalfleet", "run", "b.toml", "--on", "lab"],
        cwd=bench.folder,
        env=bench.environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 2, done
    assert re.search(f"missing here: {missing}(,.*)?; `--on local` needs no root$", done.stderr.strip())
    assert len(done.stderr.splitlines()) == 1
    assert not (bench.home / FOLDER).exists()
    assert not list(bench.home.glob("[!.]*/")), "a run was started"
