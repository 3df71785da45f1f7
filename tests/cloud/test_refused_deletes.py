"""Deletes that Azure refuses: told at once, with what to do, and waited for. Machines are records only."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from evalfleet.errors import PlaceError
from evalfleet.events import MachineCondemned, MachineDeleteRefused
from evalfleet.journal import Store
from evalfleet.model import MachineId
from evalfleet.places.azure import AzurePlace
from evalfleet.places.azure.template import SCHEMA
from evalfleet.testing.harness import raised
from standins.azure import StandIn
from tests.cloud.desk import AzureDesk
from tests.cloud.places import GROUP, HOME, examine, place
from tests.cloud.rest import Rest
from tests.waiting import slowness, until

VM = "Microsoft.Compute/virtualMachines"
DISK = "Microsoft.Compute/disks"
LOCK = f"/resourceGroups/{GROUP}/providers/Microsoft.Authorization/locks/keep"
ONE = MachineId("pool-abc123-1")
TAGS = {"evalfleet-home": HOME, "evalfleet-machine": ONE, "evalfleet-owner": "tester"}


@pytest.fixture
def desk(azure: StandIn, tmp_path: Path) -> Iterator[AzureDesk]:
    made = AzureDesk(azure, tmp_path / "desk")
    made.bench(1)
    yield made
    made.sweep()


def lock(azure: StandIn, path: str = LOCK) -> None:
    answer = Rest(azure).ask("PUT", path, {"properties": {"level": "CanNotDelete"}})
    assert answer.status == 201


def unlock(azure: StandIn) -> None:
    assert Rest(azure).ask("DELETE", LOCK).status == 200


def test_a_locked_group_is_told_in_run_show_and_machines_and_the_run_waits(
    azure: StandIn, desk: AzureDesk
) -> None:
    run = desk.start_run("--workers", "1")
    until(lambda: azure.resources(VM), "a machine is asked for")
    lock(azure)
    cancel = desk.start("cancel", "r")
    refused = until(lambda: [m for m in desk.state().machines.values() if m.delete_refused], "it is told")
    (machine,) = refused
    assert "a lock forbids it on resourceGroups/rg (ScopeLocked)" in machine.delete_refused
    assert "az lock delete" in machine.delete_refused
    events = list(Store.open(desk.home, create=False, read_only=True).read("r"))
    condemned, told = (
        next(record.at for record in events if isinstance(record.event, kind))
        for kind in (MachineCondemned, MachineDeleteRefused)
    )
    assert told - condemned < 60e6 * slowness(), "within a minute"
    for words in (("show", "r"), ("machines",)):
        assert "cannot be deleted, and costs on until it is: " in desk.say(*words)
    shown = json.loads(desk.say("show", "r", "--json"))
    assert (shown["status"], shown["machines"][0]["phase"]) == ("running", "condemned")
    before = shown["cost"]["machines_usd"]
    until(lambda: json.loads(desk.say("show", "r", "--json"))["cost"]["machines_usd"] > before, "it costs on")
    (listed,) = json.loads(desk.say("machines", "--json"))
    assert "'keep' (CanNotDelete)" in listed["trouble"]
    assert run.popen.poll() is None, "the run waits for it"
    unlock(azure)
    done = run.wait()
    assert "cannot be deleted, and costs $" in done.out
    cancel.wait()
    assert not azure.left()
    assert not azure.meters.running()
    assert not json.loads(desk.say("show", "r", "--json"))["machines"][0]["delete_refused"]
    assert not [call for call in azure.server.calls if call[2] == 429], "Azure's limits by machine were kept"


def test_a_pool_tells_that_it_cannot_be_deleted_and_why(azure: StandIn, desk: AzureDesk) -> None:
    create = desk.start("pool", "create", "p", "--on", "azure", "--workers", "1")
    until(lambda: azure.resources(VM), "a machine is asked for")
    azure.faults.denied_actions.append(f"{VM}/delete")
    create.kill()
    delete = desk.start("pool", "delete", "p", "--yes")
    until(lambda: [m for m in desk.state("p").machines.values() if m.delete_refused], "it is told")
    told = desk.say("pool", "status", "p")
    assert "cannot be deleted, and costs on until it is: " in told
    assert "ask for the role Contributor" in told
    azure.faults.denied_actions.clear()
    delete.wait()
    assert not azure.left()


# -- beforehand, and afterwards ------------------------------------------------------------------


def test_doctor_tells_locks_and_missing_rights(azure: StandIn, tmp_path: Path) -> None:
    Rest(azure).furnish()
    assert examine(azure, tmp_path)["locks"].verdict == "good"
    lock(azure)
    check = examine(azure, tmp_path)["locks"]
    assert (check.verdict, "'keep' (CanNotDelete) on resourcegroups/rg" in check.found) == ("bad", True)
    azure.faults.denied_actions.append("Microsoft.Network/publicIPAddresses/delete")
    assert "publicIPAddresses/delete" in examine(azure, tmp_path)["permissions"].found


def reap(azure: StandIn, home: Path) -> list[str]:
    """Reap all that is found, and tell what could not be."""

    async def work() -> list[str]:
        made: AzurePlace = place(azure, home)
        try:
            found = await made.belongings()
            errors = [await raised(PlaceError, made.reap(each)) for each in found if each.kept_by]
            for each in found:
                if not each.kept_by:
                    await made.reap(each)
        finally:
            await made.close()
        return [str(error) for error in errors]

    return asyncio.run(work())


def test_reap_does_not_hide_what_is_locked(azure: StandIn, tmp_path: Path, rest: Rest) -> None:
    rest.new_vm(str(ONE), tags=TAGS)
    lock(azure)
    (error,) = reap(azure, tmp_path)
    assert "ScopeLocked" in error
    unlock(azure)
    assert not reap(azure, tmp_path)
    assert not azure.resources(VM)


def test_the_record_of_what_still_exists_stays_until_it_is_gone(
    azure: StandIn, tmp_path: Path, rest: Rest
) -> None:
    """Lists lag behind, and Azure need not give a disk the tags of its machine."""
    template = {"$schema": SCHEMA, "contentVersion": "1.0.0.0", "resources": []}
    path = f"/resourceGroups/{GROUP}/providers/Microsoft.Resources/deployments/evalfleet-{ONE}"
    rest.put(path, {"tags": TAGS, "properties": {"mode": "Incremental", "template": template}})
    disk = f"/resourceGroups/{GROUP}/providers/{DISK}/{ONE}-os"
    creation = {"creationData": {"createOption": "Empty"}, "diskSizeGB": 30}
    rest.put(disk, {"location": "eastus", "properties": creation})
    lock(azure, f"{disk}/providers/Microsoft.Authorization/locks/keep")

    async def work() -> None:
        made = place(azure, tmp_path)
        try:
            (belonging,) = await made.belongings()
            assert len(belonging.parts) == 1, "no list shows the disk as ours"
            assert "ScopeLocked" in str(await raised(PlaceError, made.reap(belonging)))
            assert rest.get(path).status == 200, "the record leads to the disk"
            rest.ask("DELETE", f"{disk}/providers/Microsoft.Authorization/locks/keep")
            await made.reap(belonging)
        finally:
            await made.close()

    asyncio.run(work())
    assert rest.get(path).status == 404
    assert not azure.resources(DISK)
