"""Named pools of real SSH hosts, through the command line."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from evalfleet.channels.ssh.target import Access, Target, openssh
from evalfleet.events import MachineDeleted, MachineRequested
from evalfleet.model import AttemptId
from tests.e2e import harness
from tests.e2e.harness import task, tasks
from tests.e2e.pools import holders, machines, pool, registry, say, statuses, used
from tests.waiting import PATIENCE_S, until

from .fleet import Fleet


@pytest.fixture
def controller(hosts: Fleet, tmp_path: Path) -> Iterator[harness.Fleet]:
    """A home whose evalfleet.toml knows the hosts as place `lab3`."""
    made = harness.Fleet.at(tmp_path / "f")
    keys = "".join(f"{key} = {json.dumps(value)}\n" for key, value in hosts.settings().items())
    made.config(f'[places.lab3]\nkind = "ssh"\n{keys}')
    yield made
    made.sweep()


def left(hosts: Fleet) -> list[str]:
    return [str(path) for host in hosts.hosts for path in host.home.iterdir()]


def test_a_pool_of_hosts_from_create_to_delete(controller: harness.Fleet, hosts: Fleet) -> None:
    setup = [["sh", "-c", f"echo x >> {controller.folder}/setups; echo here > product"]]
    controller.bench([task(f"a_{n}", "cat product; sleep 0.1; score 1") for n in range(6)], setup=setup)
    refused = say(controller, "pool", "create", "p", "--on", "lab3", "--prefix", "host")
    refused.refused("machines of lab3 are called by their hosts: leave out --prefix")
    made = pool(controller, "create", "--on", "lab3", "--workers", "3")
    assert "worker-" not in made.said, "it has the name of its host from the first line on"
    assert statuses(controller) == {host.name: "ready" for host in hosts.hosts}

    def probed() -> list[str]:
        shown = say(controller, "pool", "status", "p", "--probe", "--json").json["machines"]
        return [machine["probe"] for machine in shown]

    until(lambda: probed() == ["ok"] * 3, "all answer: a busy computer may take longer than a probe waits")
    assert {worker["ip"] for worker in registry(controller)["workers"]} == {h.address for h in hosts.hosts}
    pool(controller, "prepare", "./b.toml")
    done = controller.run("--pool", "p")
    assert done.code == 0, done
    assert "worker-" not in done.said
    assert len(used(controller, "r")) == 3
    assert {machine.name for machine in controller.state("r").machines.values()} == set(statuses(controller))
    assert (controller.folder / "setups").read_text() == "x\n" * 3, "it was set up again"
    second = hosts.hosts[1].name
    pool(controller, "restart", second)
    entered = controller("pool", "ssh", "p", second, "--", "sh", "-c", "echo $HOME; exit 7")
    assert entered.code == 7, entered
    assert entered.out.strip() == str(hosts.hosts[1].home)
    pool(controller, "stop")
    assert not any(host.leftovers() for host in hosts.hosts), "something runs on a stopped host"
    pool(controller, "start")
    assert controller("run", "./b.toml", "--name", "s", "--pool", "p", "--first", "2").code == 0
    assert (controller.folder / "setups").read_text() == "x\n" * 3, "the disk did not stay"
    pool(controller, "delete", "--yes")
    assert not left(hosts)
    assert not any(host.leftovers() for host in hosts.hosts)


def test_a_host_that_is_down_makes_a_smaller_pool_until_it_is_back(
    controller: harness.Fleet, hosts: Fleet
) -> None:
    controller.bench(tasks(2))
    down = hosts.hosts[1]
    down.stop()
    try:
        made = pool(controller, "create", "--on", "lab3", "--workers", "3")
        assert "1 more was asked for: `evalfleet pool start p` tries again" in made.out
        assert set(statuses(controller).values()) == {"ready"}
        assert len(statuses(controller)) == 2
        assert controller.run("--pool", "p").code == 0
    finally:
        down.start()
    pool(controller, "start")
    assert len(statuses(controller)) == 3
    pool(controller, "delete", "--yes")


def test_no_host_at_all(controller: harness.Fleet, hosts: Fleet) -> None:
    for host in hosts.hosts:
        host.stop()
    try:
        done = say(controller, "pool", "create", "p", "--on", "lab3", "--workers", "2")
    finally:
        for host in hosts.hosts:
            host.start()
    assert done.code == 4
    assert "pool 'p' got no machine" in done.err.splitlines()[-1]
    assert say(controller, "pool", "ls", "--json").json == []


@pytest.mark.parametrize("lender", ["place", "pool"])
def test_a_drained_host_stays_out_of_its_run_until_that_is_undone(
    controller: harness.Fleet, hosts: Fleet, lender: str
) -> None:
    controller.bench([task(f"a_{n}", f"gate {n}; score 1") for n in range(1, 5)])
    keys = hosts.settings(hosts=[host.name for host in hosts.hosts[:2]])
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
    controller.config(f'[places.lab3]\nkind = "ssh"\n{lines}')
    if lender == "pool":
        pool(controller, "create", "--on", "lab3", "--workers", "2")
    where = ("--on", "lab3") if lender == "place" else ("--pool", "p")
    run = controller.start_run(*where, "--workers", "2")
    controller.started("a_1.0", "a_2.0")
    state = controller.state()
    drained = state.machines[state.attempts[AttemptId("a_1.0")].machine]
    assert say(controller, "drain", "r", drained.name, "--reason", "a reboot").code == 0
    controller.open_gate("1")
    controller.recorded(MachineDeleted)
    assert "is drained already" in say(controller, "drain", "r", drained.name).err
    controller.open_gate("2")
    controller.started("a_3.0")
    assert len(controller.recorded(MachineRequested)) == 2, "the drained host was asked for again"
    assert "may be used again by" in say(controller, "drain", "r", drained.name, "--undo").out
    controller.started("a_4.0")
    state = controller.state()
    assert state.machines[state.attempts[AttemptId("a_4.0")].machine].address == drained.address
    controller.open_gate("3", "4")
    done = run.wait()
    assert done.code == 0, done.said
    if lender == "pool":
        pool(controller, "delete", "--yes")


def test_two_runs_and_a_killed_controller(controller: harness.Fleet, hosts: Fleet) -> None:
    controller.bench([*tasks(2, "gate a; score 1", "a"), *tasks(2, "gate b; score 1", "b")])
    pool(controller, "create", "--on", "lab3", "--workers", "3")
    first = controller.start_run("--pool", "p", "--workers", "2", "--domain", "a")
    controller.started("a_1.0", "a_2.0")
    second = controller.start("run", "./b.toml", "--name", "s", "--pool", "p", "--domain", "b")
    controller.started("b_1.0")
    assert not used(controller, "r") & used(controller, "s"), "a host was shared"
    first.kill()
    assert {machine["run"] for machine in machines(controller).values()} == {"r", "s"}
    say(controller, "pool", "delete", "p", "--yes").refused("held by run")
    controller.open_gate("a")
    assert controller("resume", "r").code == 0
    assert holders(controller) == {"s"}
    controller.open_gate("b")
    assert second.wait().code == 0
    assert controller.starts() == ["a_1.0", "a_2.0", "b_1.0", "b_2.0"], "an attempt was started twice"
    until(lambda: not holders(controller), "all given back")
    pool(controller, "delete", "--yes")


def test_the_way_into_a_host_that_hangs_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:  # connects, and never says a word
        where = Target("mute", "127.0.0.1", mute.getsockname()[1])
        argv = openssh(where, Access(connect_timeout_s=0.5), ["true"])
        done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 255
    assert "timed out" in done.stderr
