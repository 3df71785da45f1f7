"""Google's machines as hosts of the lab: host keys, the firewall, limits, preemption, pools, mending."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from evalfleet.errors import MachineMute, RequestError
from evalfleet.events import MachineRequested
from evalfleet.model import AttemptId, Command, Job, Machine, Needs
from evalfleet.places.gce import GcePlace, prices
from evalfleet.places.gce.machine_types import type_of
from evalfleet.ports import Fence, ImageMaker
from evalfleet.testing.harness import find, raised
from lab import Lab
from standins.gce import Hosts, StandIn
from tests.cloud.desk import GceDesk
from tests.cloud.gce_places import FAST, HOME, ZONE, machine_id, offer, place
from tests.docs.pages import ROOT
from tests.waiting import PATIENCE_S, slowness, until_async, until_seen

CANNOT = Lab.missing()
pytestmark = pytest.mark.skipif(CANNOT is not None, reason=f"NO TEST OF REAL HOSTS: {CANNOT}")
ONE = machine_id()
LONG_S = 7200.0
TOKEN = "http://169.254.169.254/computeMetadata/v1/instance/service-accounts/default/token"
ASK = (
    "import urllib.request as u, urllib.error as e, sys\n"
    "try: u.urlopen(u.Request(sys.argv[1], headers={'Metadata-Flavor': 'Google'}), timeout=20); print(200)\n"
    "except e.HTTPError as err: print(err.code)\n"
)


@pytest.fixture(scope="module")
def google() -> Iterator[StandIn]:
    with StandIn(Hosts(), timing=FAST) as made:
        yield made


def use(google: StandIn, home: Path, work: Callable[[GcePlace], Awaitable[None]], **more: Any) -> None:
    """With a place, in the machines' network; nothing is left afterwards."""

    async def main() -> None:
        made = place(google, home, inside=True, **more)
        try:
            await work(made)
        finally:
            await asyncio.gather(*(made.delete(each.id) for each in await made.list("run")))
            await made.close()

    with google.hosts.lab.inside():
        asyncio.run(main())
    assert not google.left()
    assert not google.meters.running()


async def bring_up(made: GcePlace, life_s: float = LONG_S, *, spot: bool = False) -> Machine:
    await made.create(ONE, offer(spot=spot), life_s)
    seen = await find(made, ONE)
    assert seen is not None
    assert seen.phase == "up"
    return seen


async def says(made: GcePlace, machine: Machine, *command: str) -> str:
    """What people see who look into it."""
    argv = made.shell(machine, command)
    done = await asyncio.to_thread(
        subprocess.run, argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_its_host_key_is_known_before_the_first_connection_and_it_has_no_identity(
    google: StandIn, tmp_path: Path
) -> None:
    async def work(made: GcePlace) -> None:
        seen = await bring_up(made)
        told = google.instance(ONE).attributes["hostkeys/ssh-ed25519"]
        (known,) = (tmp_path / ".gce").rglob("*.known_hosts")
        assert told in known.read_text()
        assert told in await says(made, seen, "cat", "/etc/ssh/ssh_host_ed25519_key.pub")
        assert await says(made, seen, "whoami") == "evalfleet"
        assert await says(made, seen, "sudo", "-n", "whoami") == "root"
        assert await says(made, seen, "python3", "-c", ASK, TOKEN) == "404", "code under test has no token"
        # what the guest tells later does not count
        google.instance(ONE).attributes["hostkeys/ssh-ed25519"] = "AAAAforged"
        assert await says(made, seen, "whoami") == "evalfleet"

    use(google, tmp_path, work)


def test_without_a_host_key_there_is_no_connection_but_the_serial_log(
    google: StandIn, tmp_path: Path
) -> None:
    google.faults.boots_without_key = ONE

    async def work(made: GcePlace) -> None:
        error = await raised(MachineMute, made.create(ONE, offer(), LONG_S))
        assert "has not told its host key" in str(error)
        assert "console ends with" in str(error)
        assert "cloud-init" in str(error), "the serial log is told"

    try:
        use(google, tmp_path, work, answer_s=2.0)
    finally:
        google.faults.boots_without_key = ""


def test_ssh_is_open_to_whom_the_settings_name_also_in_the_default_network(
    google: StandIn, tmp_path: Path
) -> None:
    async def shut(made: GcePlace) -> None:
        error = await raised(MachineMute, made.create(ONE, offer(), LONG_S))
        assert "cannot be reached" in str(error)
        opened = place(google, tmp_path, inside=True, ssh_from=("198.18.0.0/15",))
        try:
            await opened.list("run")  # the rules follow the settings
            await opened.create(ONE, offer(), LONG_S)
            assert (await find(opened, ONE) or Machine(ONE, "gone")).phase == "up"
        finally:
            await opened.close()

    use(google, tmp_path, shut, ssh_from=("203.0.113.7/32",), answer_s=3.0)


def test_google_ends_a_machine_at_its_limit_with_its_disk(google: StandIn, tmp_path: Path) -> None:
    async def work(made: GcePlace) -> None:
        await bring_up(made)
        await asyncio.to_thread(google.jump, LONG_S)
        await until_seen(lambda: not google.left(), "Google has deleted it, and its disk")
        seen = await find(made, ONE)
        assert seen is not None
        assert (seen.phase, seen.detail) == ("gone", "Google ended it at its limit")
        await made.delete(ONE)
        assert await find(made, ONE) is None

    use(google, tmp_path, work)


def test_a_machine_that_somebody_deletes_or_stops_is_lost_and_neither_taken_back_nor_at_its_limit(
    google: StandIn, tmp_path: Path
) -> None:
    async def work(made: GcePlace) -> None:
        await bring_up(made)
        instance, instances = google.instance(ONE), google.api.instances
        google.do(lambda: google.cloud.spawn(instances.stop(instance)))
        await until_seen(lambda: google.instance(ONE).status == "TERMINATED", "it is stopped")
        seen = await find(made, ONE)
        assert seen is not None
        assert (seen.phase, seen.detail) == ("gone", "Google shows it as TERMINATED")
        google.do(lambda: google.cloud.spawn(instances.delete(instance)))
        await until_seen(lambda: not google.instances(), "it is deleted")
        assert await find(made, ONE) is None

    use(google, tmp_path, work)


def test_a_machine_that_is_taken_back_is_told_from_one_that_is_lost(google: StandIn, tmp_path: Path) -> None:
    async def work(made: GcePlace) -> None:
        seen = await bring_up(made, spot=True)
        channel = made.channel(seen, Fence("r", 1, 20.0))
        await channel.start(Job(AttemptId("t.0"), Command(("sleep", "600")), 600))
        google.preempt(ONE, notice_s=4.0)
        ended = await asyncio.wait_for(channel.ended(AttemptId("t.0")), PATIENCE_S)
        assert ended.reason == "evicted", "the machine is told half a minute ahead"
        await channel.close()
        await until_seen(lambda: not google.instances(), "it is gone")
        assert (await find(made, ONE) or Machine(ONE, "up")).phase == "evicted"
        other = place(google, tmp_path, inside=True)
        assert (await find(other, ONE) or Machine(ONE, "up")).phase == "evicted", (
            "also to the next controller"
        )
        await other.delete(ONE)
        await other.close()
        assert await find(made, ONE) is None

    use(google, tmp_path, work, spot=True)


def test_a_pools_machine_is_stopped_and_gets_a_new_limit_when_it_starts(
    google: StandIn, tmp_path: Path
) -> None:
    async def work(made: GcePlace) -> None:
        seen = await bring_up(made)
        first = google.instance(ONE).ends_at
        assert google.instance(ONE).scheduling["instanceTerminationAction"] == "STOP"
        await says(made, seen, "touch", "kept")
        await made.stop(ONE)
        await made.stop(ONE)
        assert google.instance(ONE).status == "TERMINATED"
        assert {span.kind for span in google.meters.running()} == {"disk"}
        assert (await find(made, ONE) or Machine(ONE, "up")).phase == "gone"
        seen = await bring_up(made, 2 * LONG_S)
        assert await says(made, seen, "ls", "kept") == "kept"
        second = google.instance(ONE).ends_at
        assert first is not None
        assert second is not None
        assert second > first + LONG_S / 2
        assert int(google.instance(ONE).labels["evalfleet-expires-at"]) > second
        await asyncio.to_thread(google.jump, 2 * LONG_S)
        await until_seen(lambda: google.instance(ONE).status == "TERMINATED", "it is stopped at its limit")
        assert (await made.belongings())[0].of_pool

    use(google, tmp_path, work, for_pool=True)


def test_a_machine_is_reset_then_stopped_and_started(google: StandIn, tmp_path: Path) -> None:
    async def work(made: GcePlace) -> None:
        assert (await made.offers(_needs()))[0].mends == ("reset", "restart")
        seen = await bring_up(made)
        ends_at = google.instance(ONE).ends_at
        await says(made, seen, "touch", "kept")
        await asyncio.to_thread(google.make_unreachable, ONE)
        await made.mend(ONE, "reset", LONG_S)
        assert await says(made, seen, "ls", "kept") == "kept"
        await asyncio.to_thread(google.make_unreachable, ONE, also_after_restart=True)
        await raised(MachineMute, made.mend(ONE, "reset", LONG_S))
        await made.mend(ONE, "restart", LONG_S)
        assert await says(made, seen, "ls", "kept") == "kept"
        assert google.instance(ONE).ends_at == ends_at, "its end has not moved"

    use(google, tmp_path, work, answer_s=6.0 * slowness())


def test_a_machine_without_a_public_address_is_reached_from_inside(google: StandIn, tmp_path: Path) -> None:
    async def work(made: GcePlace) -> None:
        google.cloud.clients_are_inside = True
        await bring_up(made)
        assert not google.instance(ONE).is_public

    try:
        use(google, tmp_path, work, public_ip=False, ssh_from=())
    finally:
        google.cloud.clients_are_inside = False


def test_a_machine_without_a_public_address_is_reached_by_a_jump_host(
    google: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One machine is the only way to another; the user knows its key."""
    monkeypatch.setenv("HOME", str(tmp_path))
    known, two = tmp_path / ".ssh/known_hosts", machine_id(2)

    async def work(made: GcePlace) -> None:
        jump = await bring_up(made)
        known.parent.mkdir()
        (line,) = tmp_path.glob(".gce/gce/hosts/*.known_hosts")
        known.write_text(line.read_text())
        # of another home: the firewall rules of a place are about all of its machines
        behind = place(
            google,
            tmp_path,
            inside=True,
            home_id="b" * 12,
            public_ip=False,
            ssh_from=(f"{jump.address}/32",),
            jump=f"evalfleet@{jump.address}",
        )
        try:
            await behind.create(two, offer(), LONG_S)
            seen = await find(behind, two)
            assert seen is not None
            assert seen.phase == "up"
            channel = behind.channel(seen, Fence("r", 1, 20.0))
            await channel.start(Job(AttemptId("t.0"), Command(("true",)), 60))
            ended = await asyncio.wait_for(channel.ended(AttemptId("t.0")), PATIENCE_S)
            assert ended.exit_code == 0
            await channel.close()
            assert not google.instance(two).is_public
        finally:
            await behind.delete(two)
            await behind.close()

    use(google, tmp_path, work)


def test_a_machine_becomes_an_image_and_others_are_made_from_it(google: StandIn, tmp_path: Path) -> None:
    names: list[str] = []

    async def capture(made: GcePlace) -> None:
        assert isinstance(made, ImageMaker)
        seen = await bring_up(made)
        await says(made, seen, "touch", "kept")
        rested: list[int] = []

        async def rest() -> None:
            rested.append(1)

        await made.reserve(ONE, "good")
        image = await made.capture(seen, "good", rest, lambda _: None)
        assert rested == [1]
        assert (image.name, image.state, image.home) == ("good", "ready", HOME)
        assert await made.capture(seen, "good", rest, lambda _: None) == image, "it may be repeated"
        await raised(RequestError, made.reserve(machine_id(2), "good"))
        await raised(RequestError, made.reserve(machine_id(2), "No Name"))
        names.append(image.setting.split('"')[1])
        await made.delete(ONE)
        assert [each.name for each in await made.images()] == ["good"]

    async def use_it(made: GcePlace) -> None:
        try:
            seen = await bring_up(made)
            assert await says(made, seen, "ls", "kept") == "kept"
        finally:
            for image in await made.images():
                await made.drop_image(image)
        assert not await made.images()

    async def main() -> None:
        made = place(google, tmp_path, inside=True)
        try:
            await capture(made)
        finally:
            await made.close()

    with google.hosts.lab.inside():
        asyncio.run(main())
    use(google, tmp_path, use_it, image=names[0])


def test_virtual_machines_can_run_where_the_benchmark_needs_it(google: StandIn, tmp_path: Path) -> None:
    async def work(made: GcePlace) -> None:
        (only,) = await made.offers(_needs(nested=True))
        assert only.size == "n2-standard-4", "E2 cannot"
        creating = asyncio.create_task(made.create(ONE, only, LONG_S))
        await until_async(lambda: _exists(google), "it is asked for")
        creating.cancel()
        await asyncio.gather(creating, return_exceptions=True)
        features = google.instance(ONE).body["advancedMachineFeatures"]
        assert features == {"enableNestedVirtualization": True}

    use(google, tmp_path, work, types=("e2-standard-4", "n2-standard-4"))


async def _exists(google: StandIn) -> bool:
    return bool(google.instances())


def _needs(*, nested: bool = False) -> Needs:
    return Needs(cpus=4, nested_virtualization=nested)


def test_a_run_falls_back_over_zones_regions_and_types(google: StandIn, tmp_path: Path) -> None:
    """A region has no quota, the next one no room for the type in one zone, and none for it in the other."""
    catalog = google.cloud.catalog
    zones = ["us-central1-a", "us-east1-b", "us-east1-c"]
    catalog.limits["us-central1", "CPUS"] = 0
    catalog.capacity |= {("us-east1-b", ""): 0, ("us-east1-c", "e2-standard-4"): 0}
    desk = GceDesk(google, tmp_path, zones=zones, types=["e2-standard-4", "n2-standard-4"])
    desk.bench(1)
    try:
        desk.done("run", "b.toml", "--on", "gce", "--name", "r", "--canary", "0", "--yes")
    finally:
        desk.sweep()
        catalog.limits.clear()
        catalog.capacity.clear()
    asked = [event.offer for event in desk.events() if isinstance(event, MachineRequested)]
    assert (asked[-1].size, asked[-1].region) == ("n2-standard-4", "us-east1-c")
    assert len({(each.size, each.region) for each in asked}) == len(asked), "none was asked twice"
    assert not google.left()


def test_a_pools_machine_that_google_does_not_start_again_is_kept(google: StandIn, tmp_path: Path) -> None:
    desk = GceDesk(google, tmp_path)

    def say(*words: str, code: int = 0) -> str:
        return desk.done("pool", *words, code=code).said

    capacity, denied = google.cloud.catalog.capacity, google.faults.denied
    try:
        say("create", "p", "--on", "gce", "--workers", "1")
        say("ssh", "p", "--", "touch", "kept")
        say("stop", "p")
        capacity[ZONE, ""] = 0
        told = say("start", "p", code=4)
        assert "does not have enough resources available" in told
        assert "start it again later" in told
        assert "did not start and keep their disks" in told
        capacity.clear()
        denied.add("compute.instances.start")
        assert "Required 'compute.instances.start' permission" in say("start", "p", code=4)
        denied.clear()
        assert {span.kind for span in google.meters.running()} == {"disk"}
        say("start", "p")
        assert say("ssh", "p", "--", "ls") == "kept\n"
    finally:
        capacity.clear()
        denied.clear()
        say("delete", "p", "--yes")
    assert not google.left()


@pytest.mark.slow
def test_what_the_page_about_google_shows_leads_to_a_result(google: StandIn, tmp_path: Path) -> None:
    """Its settings and commands as they stand there, but for whose project it is and who may connect."""
    page = (ROOT / "docs/gce.md").read_text()
    blocks = re.findall(r"^ *```(\w+)\n(.*?)^ *```$", page, re.MULTILINE | re.DOTALL)
    (toml,) = [body for kind, body in blocks if kind == "toml"]
    lines = [line.strip() for kind, body in blocks if kind == "sh" for line in body.splitlines()]
    commands = [line.partition(" # ")[0].split()[1:] for line in lines if line.startswith("evalfleet ")]
    assert [words[0] for words in commands] == ["doctor", "run", "run", "machines", "reap", "run"]
    desk = GceDesk(google, tmp_path)
    shutil.copytree(ROOT / "examples/mybench", tmp_path, dirs_exist_ok=True)
    ours = {'"my-project"': f'"{google.project}"', '"203.0.113.7/32"': '"*"'}
    for shown, used in ours.items():
        assert shown in toml
        toml = toml.replace(shown, used)
    desk.config(f'{toml}endpoint = "{google.endpoint_inside}"\nca = "{google.ca}"\nsettle_s = 0.5\n')
    try:
        for words in commands:
            fewer = ["2" if word == "10" else word for word in words]
            done = desk.done(*fewer, *(["--yes"] if words[0] == "run" else []))
            assert done.out or done.err, words
    finally:
        desk.sweep()
    scores = [task["score"] for task in desk.results("latest")["tasks"]]
    assert scores
    assert None not in scores
    told = re.search(r"costs about \$([\d.]+) an hour as e2-standard-4", page)
    assert told is not None
    price = prices.GcePriceBook(None)
    type = type_of("e2-standard-4")
    assert type is not None
    e2 = price.machine(type, "us-central1", spot=False)
    assert e2 is not None
    disk = price.extra(prices.disk("pd-balanced"), "us-central1").usd * 128
    assert float(told[1]) == round(e2.usd + disk + prices.ADDRESS_USD, 2)
    assert not google.left()
    assert not google.meters.running()
