"""What goes wrong on the stand-in, by script and by chance, and what its meters say afterwards."""

from __future__ import annotations

import http.client

import pytest

from standins.azure import Bucket, Failed, Late, Lost, Refused, SlowBoot, StandIn, Stuck, Throttled
from standins.azure.prices import price
from tests.cloud.rest import Rest, compute, network, vm_body
from tests.waiting import until

VM = "Microsoft.Compute/virtualMachines"
BROKEN = (http.client.RemoteDisconnected, ConnectionResetError)


def test_scripted_refusals_happen_as_often_as_told(azure: StandIn, rest: Rest) -> None:
    azure.faults.add(Throttled(7), path="/resourceGroups/rg$", times=1)
    azure.faults.add(Failed(503), path="/resourceGroups/rg$", times=1)
    azure.faults.add(Refused(400, "Odd"), path="/resourceGroups/rg$", times=1)
    replies = [rest.get("/resourceGroups/rg") for _ in range(4)]
    assert [reply.status for reply in replies] == [429, 503, 400, 200]
    assert replies[0].headers["Retry-After"] == "7"
    assert replies[2].code == "Odd"


def test_writes_have_a_limit_that_refills(azure: StandIn, rest: Rest) -> None:
    azure.faults.writes = Bucket(size=2, per_s=0.1)
    statuses = [rest.ask("PATCH", "/resourceGroups/rg", {}).status for _ in range(4)]
    assert statuses == [200, 200, 429, 429]
    assert rest.get("/resourceGroups/rg").status == 200, "reading is free"
    reply = rest.ask("PATCH", "/resourceGroups/rg", {})
    azure.jump(float(reply.headers["Retry-After"]))
    assert rest.ask("PATCH", "/resourceGroups/rg", {}).status == 200


def test_rates_come_from_the_seed() -> None:
    def statuses() -> list[int]:
        with StandIn(seed=5) as azure:
            rest = Rest(azure)
            azure.faults.add(Throttled(), rate=0.3)
            azure.faults.add(Failed(), rate=0.1)
            return [rest.get("/resourceGroups").status for _ in range(60)]

    first = statuses()
    assert {200, 429, 503} == set(first)
    assert first == statuses()


def test_a_create_lands_although_its_client_heard_nothing(azure: StandIn, rest: Rest) -> None:
    nic = rest.new_interface("vm")
    azure.faults.add(Lost(), method="PUT", path="virtualMachines/vm", times=1)
    with pytest.raises(BROKEN):
        rest.ask("PUT", compute("vm"), vm_body("vm", nic))
    until(lambda: rest.power("vm") == "PowerState/running")


def test_a_create_lands_late(azure: StandIn, rest: Rest) -> None:
    nic = rest.new_interface("vm")
    azure.faults.add(Late(60.0), method="PUT", path="virtualMachines/vm", times=1)
    with pytest.raises(BROKEN):
        rest.ask("PUT", compute("vm"), vm_body("vm", nic))
    assert rest.get(compute("vm")).status == 404
    assert rest.ask("DELETE", compute("vm")).status == 204, "there is nothing to delete yet"
    azure.jump(61.0)
    assert rest.power("vm") == "PowerState/running"


def test_a_stuck_create_can_be_deleted(azure: StandIn, rest: Rest) -> None:
    azure.faults.add(Stuck(), method="PUT", path="virtualMachines/vm", times=1)
    reply = rest.ask("PUT", compute("vm"), vm_body("vm", rest.new_interface("vm")))
    azure.jump(3600.0)
    assert rest.get(reply.headers["Azure-AsyncOperation"]).body["status"] == "InProgress"
    assert rest.get(compute("vm")).body["properties"]["provisioningState"] == "Creating"
    assert rest.ask("POST", f"{compute('vm')}/deallocate").code == "Conflict"
    rest.delete(compute("vm"))
    assert rest.get(reply.headers["Azure-AsyncOperation"]).body["error"]["code"] == "OperationPreempted"
    assert azure.meters.running() == []


def test_a_machine_that_never_boots_is_billed_until_it_is_deleted(azure: StandIn, rest: Rest) -> None:
    azure.faults.slow_boots.append(SlowBoot("vm", 5000.0, times=1))
    reply = rest.ask("PUT", compute("vm"), vm_body("vm", rest.new_interface("vm")))
    azure.jump(600.0)
    assert rest.get(reply.headers["Azure-AsyncOperation"]).body["status"] == "InProgress"
    azure.jump(700.0)
    assert rest.outcome(reply)["error"]["code"] == "OSProvisioningTimedOut"
    assert azure.meters.seconds("vm", azure.clock.now()) == pytest.approx(1300.0, abs=10.0)
    rest.delete(compute("vm"))
    assert azure.meters.running() == []


def test_lists_lag_but_single_resources_do_not(azure: StandIn, rest: Rest) -> None:
    azure.cloud.store.lag_s = 60.0
    rest.new_vm("vm")
    machines = "/providers/Microsoft.Compute/virtualMachines"
    assert rest.get(compute("vm")).status == 200
    assert rest.get(machines).body["value"] == []
    azure.jump(61.0)
    assert [each["name"] for each in rest.get(machines).body["value"]] == ["vm"]
    rest.delete(compute("vm"))
    assert rest.get(compute("vm")).status == 404
    assert [each["name"] for each in rest.get(machines).body["value"]] == ["vm"]
    azure.jump(61.0)
    assert rest.get(machines).body["value"] == []


def test_lists_come_in_pages(azure: StandIn, rest: Rest) -> None:
    azure.cloud.page_size = 2
    for n in range(5):
        rest.put(network(f"networkSecurityGroups/g{n}"), {"location": "eastus", "properties": {}})
    reply = rest.get(network("networkSecurityGroups"))
    sizes, names = [], []
    while True:
        sizes.append(len(reply.body["value"]))
        names += [each["name"] for each in reply.body["value"]]
        if "nextLink" not in reply.body:
            break
        reply = rest.get(reply.body["nextLink"])
    assert (sizes, names) == ([2, 2, 1], [f"g{n}" for n in range(5)])


def test_meters_run_from_allocation_to_deallocation(azure: StandIn, rest: Rest) -> None:
    rest.new_vm("vm")
    azure.jump(1000.0)
    rest.act(f"{compute('vm')}/powerOff")
    azure.jump(500.0)
    rest.act(f"{compute('vm')}/deallocate")
    azure.jump(5000.0)
    rest.delete(compute("vm"))
    azure.jump(5000.0)
    now = azure.clock.now()
    assert azure.meters.seconds("vm", now) == pytest.approx(1500.0, abs=20.0), (
        "stopped is billed, deallocated is not"
    )
    assert azure.meters.seconds("disk", now) == pytest.approx(6500.0, abs=20.0)
    assert azure.meters.seconds("address", now) == pytest.approx(6500.0, abs=20.0)
    assert azure.meters.running() == []


@pytest.mark.parametrize("policy", ["Delete", "Deallocate"])
def test_an_eviction_follows_its_policy(azure: StandIn, rest: Rest, policy: str) -> None:
    rest.new_vm("vm", priority="Spot", evictionPolicy=policy)
    azure.evict("vm", notice_s=30.0)
    azure.jump(29.0)
    assert rest.power("vm") == "PowerState/running"
    azure.jump(2.0)
    if policy == "Delete":
        assert rest.get(compute("vm")).status == 404
        assert azure.meters.running() == []
    else:
        assert rest.power("vm") == "PowerState/deallocated"
        assert sorted(span.kind for span in azure.meters.running()) == ["address", "disk"]


def test_an_operation_goes_on_although_nobody_polls(azure: StandIn, rest: Rest) -> None:
    rest.ask("PUT", compute("vm"), vm_body("vm", rest.new_interface("vm")))
    until(lambda: rest.power("vm") == "PowerState/running")
    assert azure.vm("vm").state == "Succeeded"


def test_the_price_list_is_filtered(azure: StandIn, rest: Rest) -> None:
    wanted = (
        "serviceName eq 'Virtual Machines' and armSkuName eq 'Standard_D4s_v5' and armRegionName eq 'eastus'"
    )
    reply = rest.get(f"{azure.endpoint}/api/retail/prices", **{"$filter": wanted})
    items = reply.body["Items"]
    assert {(each["serviceName"], each["armSkuName"], each["armRegionName"]) for each in items} == {
        ("Virtual Machines", "Standard_D4s_v5", "eastus")
    }
    regular, spot = price("Standard_D4s_v5", "eastus"), price("Standard_D4s_v5", "eastus", spot=True)
    linux, windows = "Virtual Machines DSv5 Series", "Virtual Machines DSv5 Series Windows"
    found = [
        (each["productName"], each["skuName"], each["effectiveStartDate"][:4], each["retailPrice"])
        for each in items
    ]
    assert sorted(found) == [
        (linux, "D4s v5", "2024", regular * 2),
        (linux, "D4s v5", "2026", regular),
        (linux, "D4s v5 Low Priority", "2026", 0.0001),
        (linux, "D4s v5 Spot", "2026", spot),
        (windows, "D4s v5", "2026", 9.0),
    ], "all that is sold under the name, and nothing else"
    narrow = rest.get(
        f"{azure.endpoint}/api/retail/prices", **{"$filter": f"{wanted} and productName eq '{windows}'"}
    )
    assert [each["retailPrice"] for each in narrow.body["Items"]] == [9.0]
