"""Controllers that die: what runs on hosts ends when their lease lapses, and what ended waits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from pathlib import Path

from evalfleet.channels.supervisor.processes import birth
from evalfleet.model import AttemptId, Machine
from evalfleet.ports import Fence
from tests.waiting import until

from .fleet import HOME_ID, Fleet, bring_up
from .test_run import results, start, write

CONTROLLER = """\
import asyncio, json, sys
import msgspec
from pathlib import Path
from evalfleet.model import AttemptId, Command, Job, Machine
from evalfleet.ports import Fence, PlaceContext
from evalfleet.places.ssh import SshPlace, SshSettings

async def main():
    told = json.load(sys.stdin)
    settings = msgspec.convert(told["settings"], SshSettings)
    place = SshPlace.make("lab", settings, PlaceContext(Path(told["home"]), told["home_id"], {}))
    channel = place.channel(msgspec.convert(told["machine"], Machine), Fence("run", 1, 20.0))
    for name, script in told["jobs"].items():
        command = Command(("sh", "-c", script))
        await channel.start(Job(AttemptId(name), command, 600.0, lease_s=told["lease_s"]))
    print("started", flush=True)
    await asyncio.gather(*(channel.ended(AttemptId(name)) for name in told["jobs"]))

asyncio.run(main())
"""
SLOW = 'echo $$ >"$EVALFLEET_OUT/pid"; echo working; sleep 300'
DONE = 'echo 5 >"$EVALFLEET_OUT/result.json"; sleep 300'
QUICK = 'sleep 0.3; echo 6 >"$EVALFLEET_OUT/result.json"; exit 3'


def killed_controller(hosts: Fleet, machine: Machine, lease_s: float) -> None:
    """One that starts three jobs, keeps its lease for a while, and is killed."""
    told = {
        "settings": hosts.settings(),
        "home": str(hosts.folder / "home-a"),
        "home_id": HOME_ID,
        "machine": {"id": machine.id, "phase": "up", "address": machine.address, "node": machine.node},
        "jobs": {"slow.0": SLOW, "done.0": DONE, "quick.0": QUICK},
        "lease_s": lease_s,
    }
    code = [sys.executable, "-c", CONTROLLER]
    with subprocess.Popen(code, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(told))
            process.stdin.close()
            assert process.stdout.readline() == "started\n"
        finally:
            process.kill()


async def test_past_the_lease_attempts_are_ended_on_the_host_and_results_wait(hosts: Fleet) -> None:
    place = hosts.place()
    machine = await bring_up(place)
    folder = next(host for host in hosts.hosts if host.name == machine.address).machine(machine.id)
    await asyncio.to_thread(killed_controller, hosts, machine, 2.0)
    until((folder / "jobs/slow.0/out/pid").exists)
    pid = int((folder / "jobs/slow.0/out/pid").read_text())
    until(lambda: birth(pid) is None)
    until(lambda: not list(folder.glob("jobs/*/work")))
    newer = place.channel(machine, Fence("run", 2, 20.0))
    ends = {name: await newer.ended(AttemptId(f"{name}.0")) for name in ("slow", "done", "quick")}
    assert {name: (end.reason, end.result) for name, end in ends.items()} == {
        "slow": ("lease", None),
        "done": ("lease", b"5\n"),
        "quick": ("exited", b"6\n"),
    }
    assert "working" in ends["slow"].detail
    assert ends["slow"].seconds > 1.0, "it was ended before its lease lapsed"
    await newer.close()
    await place.delete(machine.id)
    await place.close()


def test_results_finished_while_nobody_was_there_are_taken_up(hosts: Fleet, tmp_path: Path) -> None:
    folder = tmp_path / "f"
    write(folder, hosts, 3)
    script = (folder / "run.sh").read_text().replace("sleep 0.$", f'echo x >>"{folder}/starts"; sleep 1.$')
    (folder / "run.sh").write_text(script)
    run = start(folder, "run", "b.toml", "--on", "lab3", "--workers", "3", "--name", "r")
    with contextlib.ExitStack() as stack:
        stack.callback(run.kill)
        until(lambda: (folder / "starts").exists() and len((folder / "starts").read_text()) == 2 * 3)
    until(lambda: sum(len(list(host.ours.glob("*/*/jobs/t_*/exit"))) for host in hosts.hosts) == 3)
    start(folder, "resume", "r").finish()
    told = results(folder)
    assert (told["scored"], [task["attempts"] for task in told["tasks"]]) == (3, [1, 1, 1])
    assert (folder / "starts").read_text() == "x\n" * 3, "nothing was run again"
