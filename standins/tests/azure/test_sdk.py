"""Microsoft's own clients against the stand-in: they are the witnesses that it speaks ARM."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from azure.core.exceptions import HttpResponseError, ResourceNotFoundError
from azure.identity import ClientSecretCredential, ManagedIdentityCredential

from standins.azure import StandIn, Throttled
from tests.cloud.rest import DEFINITION, VNET, Rest, compute, version_of, vm_body
from tests.cloud.templates import template

SCOPE = "https://management.azure.com/.default"


class Clients:
    """Of one subscription; signed in by a managed identity, as on a machine in Azure."""

    # Any: bodies are given as plain JSON, which the clients take, but their types do not say so
    def __init__(self, azure: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
        # every worker collects all tests, and few run these: the imports take seconds
        from azure.mgmt.compute import ComputeManagementClient
        from azure.mgmt.network import NetworkManagementClient
        from azure.mgmt.resource.deployments import DeploymentsMgmtClient
        from azure.mgmt.resource.resources import ResourceManagementClient

        for name, value in azure.environment.items():
            monkeypatch.setenv(name, value)
        credential = ManagedIdentityCredential()
        options: dict[str, Any] = {
            "base_url": azure.endpoint,
            "credential_scopes": [SCOPE],
            "connection_verify": str(azure.ca),
            "polling_interval": 0.05,
            "retry_backoff_factor": 0.05,
        }
        self.compute: Any = ComputeManagementClient(credential, azure.subscription, **options)
        self.network: Any = NetworkManagementClient(credential, azure.subscription, **options)
        self.resources: Any = ResourceManagementClient(credential, azure.subscription, **options)
        self.templates: Any = DeploymentsMgmtClient(credential, azure.subscription, **options)

    def close(self) -> None:
        for client in (self.compute, self.network, self.resources, self.templates):
            client.close()

    def furnish(self, name: str) -> str:
        """Group, network, address and interface; returns the interface's id."""
        groups, network = self.resources.resource_groups, self.network
        groups.create_or_update("rg", {"location": "eastus"})
        here: dict[str, Any] = {"location": "eastus"}
        vnet = network.virtual_networks.begin_create_or_update("rg", "net", VNET | here).result()
        body = here | {"sku": {"name": "Standard"}, "properties": {"publicIPAllocationMethod": "Static"}}
        ip = network.public_ip_addresses.begin_create_or_update("rg", f"{name}-ip", body).result()
        public = {"id": ip.id, "properties": {"deleteOption": "Delete"}}
        properties = {"subnet": {"id": vnet.subnets[0].id}, "publicIPAddress": public}
        body = here | {"properties": {"ipConfigurations": [{"name": "ip", "properties": properties}]}}
        nic = network.network_interfaces.begin_create_or_update("rg", f"{name}-nic", body).result()
        assert nic.ip_configurations[0].private_ip_address == "10.0.0.4"
        return str(nic.id)


@pytest.fixture
def clients(azure: StandIn, monkeypatch: pytest.MonkeyPatch) -> Any:
    azure.cloud.operations.retry_after_s = None
    made = Clients(azure, monkeypatch)
    yield made
    made.close()


def states(clients: Clients, name: str) -> list[str]:
    view = clients.compute.virtual_machines.instance_view("rg", name)
    return [status.code for status in view.statuses]


def test_the_life_of_a_machine(azure: StandIn, clients: Clients) -> None:
    nic = clients.furnish("vm")
    machines = clients.compute.virtual_machines
    body = vm_body("vm", nic, tags={"fleet": "f1"}, custom_data="#cloud-config\n{}")
    vm = machines.begin_create_or_update("rg", "vm", body).result()
    assert (vm.provisioning_state, vm.tags) == ("Succeeded", {"fleet": "f1"})
    assert vm.os_profile.custom_data is None, "Azure never tells it again"
    assert states(clients, "vm") == ["ProvisioningState/succeeded", "PowerState/running"]
    assert [each.name for each in machines.list("rg")] == ["vm"]
    assert [each.name for each in machines.list_all()] == ["vm"]

    tags = {"fleet": "f1", "expires": "soon"}
    assert machines.begin_update("rg", "vm", {"tags": tags}).result().tags == tags
    machines.begin_deallocate("rg", "vm").result()
    assert states(clients, "vm")[-1] == "PowerState/deallocated"
    machines.begin_start("rg", "vm").result()
    machines.begin_restart("rg", "vm").result()
    machines.begin_power_off("rg", "vm").result()
    assert states(clients, "vm")[-1] == "PowerState/stopped"
    assert [span.kind for span in azure.meters.running()] == ["address", "disk", "vm"]
    machines.begin_start("rg", "vm").result()
    machines.begin_redeploy("rg", "vm").result()

    machines.begin_delete("rg", "vm").result()
    with pytest.raises(ResourceNotFoundError):
        machines.get("rg", "vm")
    assert [each.id.type for each in azure.resources() if len(each.id.types) == 1] == [
        "Microsoft.Network/virtualNetworks"
    ], "disk, interface and address went with it"
    assert azure.meters.running() == []


def test_everything_is_found_by_its_tag(clients: Clients) -> None:
    nic = clients.furnish("vm")
    body = vm_body("vm", nic, tags={"fleet": "f1"})
    clients.compute.virtual_machines.begin_create_or_update("rg", "vm", body).result()
    resources = clients.resources.resources
    found = list(resources.list(filter="tagName eq 'fleet' and tagValue eq 'f1'", expand="createdTime"))
    assert sorted(str(each.type) for each in found) == [
        "Microsoft.Compute/disks",
        "Microsoft.Compute/virtualMachines",
    ]
    assert list(resources.list(filter="tagName eq 'fleet' and tagValue eq 'f2'")) == []
    patch: Any = {"operation": "Merge", "properties": {"tags": {"expires": "soon"}}}
    clients.resources.tags.begin_update_at_scope(str(found[0].id), patch).result()
    names = [each.name for each in resources.list(filter="tagName eq 'expires'")]
    assert names == [found[0].name]


def test_the_generic_client_makes_and_deletes_by_id(azure: StandIn, clients: Clients) -> None:
    nic = clients.furnish("vm")
    id = f"/subscriptions/{azure.subscription}" + compute("vm")
    body: Any = vm_body("vm", nic)
    resources = clients.resources.resources
    made = resources.begin_create_or_update_by_id(id, parameters=body, api_version="2024-07-01").result()
    assert made.properties["provisioningState"] == "Succeeded"
    resources.begin_delete_by_id(id, api_version="2024-07-01").result()
    assert azure.resources("Microsoft.Compute/virtualMachines") == []
    clients.resources.resource_groups.begin_delete("rg").result()
    assert azure.resources() == []


def test_a_template_is_deployed(azure: StandIn, clients: Clients) -> None:
    clients.furnish("other")
    body = {
        "properties": {"mode": "Incremental", "template": template(), "parameters": {"name": {"value": "vm"}}}
    }
    deployments = clients.templates.deployments
    done = deployments.begin_create_or_update("rg", "d", body).result()
    assert (done.properties.provisioning_state, len(done.properties.output_resources)) == ("Succeeded", 4)
    assert [each.name for each in deployments.list_by_resource_group("rg")] == ["d"]
    azure.cloud.capacity.limits["eastus", "", ""] = 1
    body["properties"]["parameters"] = {"name": {"value": "more"}}
    with pytest.raises(HttpResponseError) as caught:
        deployments.begin_create_or_update("rg", "e", body).result()
    assert "AllocationFailed" in str(caught.value)
    failed = [
        each
        for each in clients.templates.deployment_operations.list("rg", "e")
        if each.properties.status_code
    ]
    assert [each.properties.target_resource.resource_name for each in failed] == ["more"]


def test_what_a_subscription_says_of_itself(azure: StandIn, clients: Clients) -> None:
    sizes = {sku.name: sku for sku in clients.compute.resource_skus.list(filter="location eq 'eastus'")}
    about = {each.name: each.value for each in sizes["Standard_D4s_v5"].capabilities}
    assert (about["vCPUs"], about["HyperVGenerations"]) == ("4", "V1,V2")
    usages = {each.name.value: each for each in clients.compute.usage.list("eastus")}
    assert (usages["cores"].current_value, usages["cores"].limit) == (0, 400)
    assert "PublicIPAddresses" in {each.name.value for each in clients.network.usages.list("eastus")}
    assert clients.resources.providers.get("Microsoft.Compute").registration_state == "Registered"
    image = clients.compute.virtual_machine_images.get(
        "eastus", "Canonical", "0001-com-ubuntu-server-jammy", "22_04-lts-gen2", "latest"
    )
    assert image.hyper_v_generation == "V2"


def test_throttled_clients_wait_and_succeed(azure: StandIn, clients: Clients) -> None:
    azure.faults.add(Throttled(retry_after_s=1), method="PUT", times=1)
    clients.resources.resource_groups.create_or_update("rg", {"location": "eastus"})
    assert [status for method, _, status in azure.server.calls if method == "PUT"] == [429, 201]


def test_a_failed_operation_raises_its_error(azure: StandIn, clients: Clients) -> None:
    nic = clients.furnish("vm")
    azure.cloud.capacity.limits["eastus", "", ""] = 0
    with pytest.raises(HttpResponseError) as caught:
        clients.compute.virtual_machines.begin_create_or_update("rg", "vm", vm_body("vm", nic)).result()
    assert caught.value.error is not None
    assert caught.value.error.code == "AllocationFailed"
    assert clients.compute.virtual_machines.get("rg", "vm").provisioning_state == "Failed"


def test_a_service_principal_signs_in(azure: StandIn) -> None:
    options: dict[str, Any] = {"connection_verify": str(azure.ca), "disable_instance_discovery": True}
    good = ClientSecretCredential(
        azure.tenant, azure.client_id, azure.client_secret, authority=azure.endpoint, **options
    )
    with good:
        token = good.get_token(SCOPE).token
    claims = base64.urlsafe_b64decode(token.split(".")[1] + "==")
    assert azure.tenant.encode() in claims


def test_microsofts_client_makes_an_image_of_a_machine(azure: StandIn, clients: Clients) -> None:
    machines, galleries = clients.compute.virtual_machines, clients.compute.galleries
    nic = clients.furnish("vm")
    machines.begin_create_or_update("rg", "vm", vm_body("vm", nic)).result()
    machines.begin_deallocate("rg", "vm").result()
    machines.generalize("rg", "vm")
    view = machines.instance_view("rg", "vm")
    assert "OSState/generalized" in [status.code for status in view.statuses]
    galleries.begin_create_or_update("rg", "g", {"location": "eastus"}).result()
    clients.compute.gallery_images.begin_create_or_update("rg", "g", "waa", DEFINITION).result()
    body = version_of(Rest(azure), "vm", "eastus", "westus2")
    versions = clients.compute.gallery_image_versions
    made = versions.begin_create_or_update("rg", "g", "waa", "1.0.0", body).result()
    assert made.provisioning_state == "Succeeded"
    assert [each.name for each in made.publishing_profile.target_regions] == ["East US", "West US 2"]
    assert len([span for span in azure.meters.running() if span.kind == "image"]) == 2
    listed = clients.resources.resources.list(filter="resourceType eq 'Microsoft.Compute/galleries/images'")
    assert [each.name for each in listed] == ["g/waa"]
    versions.begin_delete("rg", "g", "waa", "1.0.0").result()
    clients.compute.gallery_images.begin_delete("rg", "g", "waa").result()
    galleries.begin_delete("rg", "g").result()
    assert not [span for span in azure.meters.running() if span.kind == "image"]


def test_microsofts_client_runs_a_script_on_a_machine_that_runs(azure: StandIn, clients: Clients) -> None:
    nic = clients.furnish("vm")
    machines = clients.compute.virtual_machines
    machines.begin_create_or_update("rg", "vm", vm_body("vm", nic)).result()
    command = {"commandId": "RunShellScript", "script": ["true"]}
    result = machines.begin_run_command("rg", "vm", command).result()
    assert [(status.code, status.level) for status in result.value] == [
        ("ProvisioningState/succeeded", "Info")
    ]
    azure.cloud.timing.run_command_s = (600.0, 600.0)
    first = machines.begin_run_command("rg", "vm", command)
    with pytest.raises(HttpResponseError, match="execution is in progress") as refused:
        machines.begin_run_command("rg", "vm", command)
    assert refused.value.status_code == 409
    azure.jump(600.0)
    first.result()
    machines.begin_deallocate("rg", "vm").result()
    with pytest.raises(HttpResponseError, match="when the VM is not running"):
        machines.begin_run_command("rg", "vm", command)
    with pytest.raises(HttpResponseError, match="commandId"):
        machines.begin_run_command("rg", "vm", {"script": ["true"]})
