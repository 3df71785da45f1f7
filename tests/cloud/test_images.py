"""Images by their names, tags and states: whose they are, what is made anew, where there is a copy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from evalfleet.errors import RequestError
from evalfleet.model import Machine, MachineId
from evalfleet.ports import Image
from standins.azure import StandIn
from standins.azure.galleries import DEFINITION as DEFINITION_TYPE
from tests.cloud.desk import AzureDesk
from tests.cloud.places import GROUP, examine, offer, place
from tests.cloud.rest import DEFINITION, Rest, compute, version_of
from tests.waiting import PATIENCE_S

ONE = MachineId("pool-abc123-1")


def begin(azure: StandIn, home: Path, *machines: MachineId) -> None:
    """Machines that run and cannot be reached."""

    async def main() -> None:
        made = place(azure, home)
        creating = [asyncio.create_task(made.create(each, offer(), 7200)) for each in machines]
        async with asyncio.timeout(PATIENCE_S):
            while len([span for span in azure.meters.running() if span.kind == "vm"]) < len(machines):
                await asyncio.sleep(0.02)
        for task in creating:
            task.cancel()
        await asyncio.gather(*creating, return_exceptions=True)
        await made.close()

    asyncio.run(main())


def reserve(azure: StandIn, home: Path, image: str, machine: MachineId = ONE) -> None:
    async def main() -> None:
        made = place(azure, home)
        try:
            await made.reserve(machine, image)
        finally:
            await made.close()

    asyncio.run(main())


def test_what_a_stranger_has_under_the_name_is_left_alone(azure: StandIn, tmp_path: Path) -> None:
    begin(azure, tmp_path, ONE)
    gallery = f"/resourceGroups/{GROUP}/providers/Microsoft.Compute/galleries/evalfleet_abc123"
    rest = Rest(azure)
    rest.put(gallery, {"location": "eastus", "tags": {"evalfleet-home": "somebody"}})
    before = [each for each in azure.shown() if "galleries" in each["type"]]
    with pytest.raises(RequestError, match=r"is not ours .* left alone"):
        reserve(azure, tmp_path, "waa")
    assert [each for each in azure.shown() if "galleries" in each["type"]] == before
    rest.delete(gallery)
    reserve(azure, tmp_path, "waa")
    rest.put(f"{gallery}/images/theirs", DEFINITION)
    with pytest.raises(RequestError, match="is not ours"):
        reserve(azure, tmp_path, "theirs")


@pytest.mark.parametrize("name", ["", "-x", "a b", "x" * 81, "a/b"])
def test_a_name_that_azure_does_not_take_is_refused(azure: StandIn, tmp_path: Path, name: str) -> None:
    with pytest.raises(RequestError, match="cannot be called"):
        reserve(azure, tmp_path, name)


def test_a_name_goes_to_another_machine_only_as_long_as_it_is_empty(azure: StandIn, tmp_path: Path) -> None:
    two = MachineId("pool-abc123-2")
    begin(azure, tmp_path, ONE, two)
    reserve(azure, tmp_path, "waa", two)
    reserve(azure, tmp_path, "waa")
    generalize(Rest(azure), ONE)
    image = asyncio.run(capture(azure, tmp_path, "waa"))
    assert (image.state, image.regions, image.gb) == ("ready", ("eastus",), 128.0)
    assert image.usd_per_month == pytest.approx(6.4)
    azure.faults.denied_actions.append("Microsoft.Compute/galleries/images/versions/read")
    (shown,) = asyncio.run(images(azure, tmp_path))
    assert (shown.name, shown.state) == ("waa", "hidden"), "what may not be looked at is seen, and no error"
    azure.faults.denied_actions.clear()
    reserve(azure, tmp_path, "waa")  # its own: whoever comes after a crash has nothing left to do
    with pytest.raises(RequestError, match="there is an image 'waa' already"):
        reserve(azure, tmp_path, "waa", two)


def generalize(rest: Rest, machine: MachineId) -> None:
    rest.act(f"{compute(machine)}/deallocate")
    assert rest.ask("POST", f"{compute(machine)}/generalize").status == 200


def test_a_copy_that_failed_is_made_anew(azure: StandIn, tmp_path: Path) -> None:
    two = MachineId("pool-abc123-2")
    begin(azure, tmp_path, ONE, two)
    reserve(azure, tmp_path, "waa")
    rest = Rest(azure)
    generalize(rest, ONE)
    generalize(rest, two)
    (definition,) = azure.resources(DEFINITION_TYPE)
    path = str(definition.id).removeprefix(rest.root) + "/versions/1.0.0"
    azure.cloud.timing.copy_s = (600.0, 600.0)
    begun = rest.ask("PUT", path, {**version_of(rest, two, "eastus"), "tags": definition.tags})
    rest.delete(compute(two))
    azure.jump(600.0)
    assert rest.outcome(begun)["status"] == "Failed"
    azure.cloud.timing.copy_s = (0.0, 0.1)
    assert asyncio.run(capture(azure, tmp_path, "waa")).state == "ready"


def test_doctor_tells_where_an_image_has_no_copy(azure: StandIn, tmp_path: Path) -> None:
    begin(azure, tmp_path, ONE)
    reserve(azure, tmp_path, "waa")
    generalize(Rest(azure), ONE)
    image = asyncio.run(capture(azure, tmp_path, "waa")).parts[-1]
    found = examine(azure, tmp_path, image=image, regions=("eastus", "westus2"))
    assert found["image in eastus"].verdict == "good"
    assert found["image in westus2"].verdict == "bad"
    assert "`evalfleet machines --images`" in found["image in westus2"].remedy


async def capture(azure: StandIn, home: Path, image: str) -> Image:
    """Of a machine that was generalized already: it is not reached."""
    made = place(azure, home)
    try:
        return await made.capture(Machine(ONE, "up"), image, in_vain, lambda _: None)
    finally:
        await made.close()


async def images(azure: StandIn, home: Path) -> Sequence[Image]:
    made = place(azure, home)
    try:
        return await made.images()
    finally:
        await made.close()


async def in_vain() -> None:
    raise AssertionError("there is nothing to be put to rest")


def test_snapshots_of_machines_disks_are_listed_with_their_cost_and_left_alone(
    azure: StandIn, tmp_path: Path
) -> None:
    """People make them by hand, and Azure bills them for months."""
    disks = f"/subscriptions/{azure.subscription}/resourceGroups/{GROUP}/providers/Microsoft.Compute/disks"
    rest = Rest(azure)
    rest.ask("PUT", f"/resourceGroups/{GROUP}", {"location": "eastus"})
    for name, disk in (("mine", f"{ONE}-os"), ("strange", "database")):
        rest.put(
            f"/resourceGroups/{GROUP}/providers/Microsoft.Compute/snapshots/{name}",
            {
                "location": "eastus",
                "properties": {
                    "creationData": {"createOption": "Copy", "sourceResourceId": f"{disks}/{disk}"},
                    "diskSizeGB": 128,
                },
            },
        )
    (found,) = asyncio.run(images(azure, tmp_path))
    assert (found.kind, found.name, found.home, found.regions) == ("snapshot", "mine", "abc123", ("eastus",))
    assert found.usd_per_month == 6.4
    assert not found.setting
    desk = AzureDesk(azure, tmp_path / "desk")
    assert "snapshot" in desk.say("machines", "--images")
    assert json.loads(desk.say("machines", "--images", "--json"))[0]["kind"] == "snapshot"
    desk("machines", "--delete-image", "mine", "--yes").refused("there is no image 'mine' of yours")
    for name in ("mine", "strange"):
        rest.delete(f"/resourceGroups/{GROUP}/providers/Microsoft.Compute/snapshots/{name}")
