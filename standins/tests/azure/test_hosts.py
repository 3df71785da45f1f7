"""The stand-in's machines are real hosts: what custom data asks for is there, and power is power."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab import Lab, keys
from standins.azure import Hosts, StandIn
from tests.cloud.rest import Json, Rest, compute, network, vm_body
from tests.waiting import PATIENCE_S, until

CANNOT = Lab.missing()
pytestmark = pytest.mark.skipif(CANNOT is not None, reason=f"NO TEST OF REAL HOSTS: {CANNOT}")


@pytest.fixture(scope="module")
def azure() -> Iterator[StandIn]:
    with StandIn(Hosts()) as made:
        yield made


@pytest.fixture(scope="module")
def rest(azure: StandIn) -> Rest:
    made = Rest(azure)
    made.furnish()
    allow(made, "198.18.0.1")
    made.put(network("virtualNetworks/net/subnets/s"), guarded_subnet(made))
    return made


def guarded_subnet(rest: Rest) -> Json:
    group = {"id": rest.root + network("networkSecurityGroups/nsg")}
    return {"properties": {"addressPrefix": "10.0.0.0/24", "networkSecurityGroup": group}}


def allow(rest: Rest, source: str) -> None:
    rule = {
        "protocol": "Tcp",
        "access": "Allow",
        "direction": "Inbound",
        "priority": 100,
        "sourceAddressPrefix": source,
        "sourcePortRange": "*",
        "destinationAddressPrefix": "*",
        "destinationPortRange": "22",
    }
    body = {"location": "eastus", "properties": {"securityRules": [{"name": "ssh", "properties": rule}]}}
    rest.put(network("networkSecurityGroups/nsg"), body)


class Login:
    """A user's own OpenSSH client, that knows the host's key beforehand."""

    def __init__(self, azure: StandIn, folder: Path) -> None:
        self._azure = azure
        self._folder = folder
        self.pair = keys.new_key("user")
        self.host_pair = keys.new_key("host")
        keys.write_private(folder / "key", self.pair.private)

    def custom_data(self, **config: object) -> str:
        host_keys = {
            "ed25519_private": self.host_pair.private.decode(),
            "ed25519_public": self.host_pair.public,
        }
        return "#cloud-config\n" + json.dumps({"ssh_keys": host_keys, **config})

    def is_shut_out(self, address: str) -> bool:
        """Is there silence or a refusal?"""
        return self.run(address, "true", connect_s=1).returncode == 255

    def run(
        self, address: str, command: str, user: str = "azureuser", connect_s: int = 15
    ) -> subprocess.CompletedProcess[str]:
        (self._folder / "known").write_text(f"{address} {self.host_pair.public}\n")
        options = [
            "StrictHostKeyChecking=yes",
            "BatchMode=yes",
            f"ConnectTimeout={connect_s}",
            "IdentityAgent=none",
        ]
        options += (f"UserKnownHostsFile={self._folder}/known", "GlobalKnownHostsFile=none", "LogLevel=ERROR")
        flags = [word for option in options for word in ("-o", option)]
        argv = [*self._azure.hosts.lab.prefix, "ssh", "-F", "none", "-i", f"{self._folder}/key", *flags]
        return subprocess.run(
            [*argv, f"{user}@{address}", command],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=PATIENCE_S,
            check=False,
        )


@pytest.fixture
def login(azure: StandIn, tmp_path: Path) -> Login:
    return Login(azure, tmp_path)


def address_of(rest: Rest, name: str) -> str:
    found: str = rest.get(network(f"publicIPAddresses/{name}-ip")).body["properties"]["ipAddress"]
    return found


def new_vm(rest: Rest, login: Login, name: str, size: str = "Standard_D4ds_v5", **config: object) -> str:
    rest.new_vm(name, size=size, key=login.pair.public, custom_data=login.custom_data(**config))
    return address_of(rest, name)


def test_custom_data_is_honoured(rest: Rest, login: Login) -> None:
    address = new_vm(
        rest,
        login,
        "init",
        bootcmd=["echo early > /etc/early"],
        runcmd=['echo "$(id -un) $(cat /etc/given)" > /etc/ran', ["touch", "/etc/two words"]],
        write_files=[{"path": "/etc/given", "content": "Z2l2ZW4K", "encoding": "b64", "permissions": "0600"}],
        users=["default", {"name": "other", "ssh_authorized_keys": [login.pair.public]}],
    )
    done = login.run(
        address, "cloud-init status --wait && hostname && sudo cat /etc/early /etc/ran /etc/given; ls /etc"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:5] == ["status: done", "init", "early", "root given", "given"]
    assert "two words" in done.stdout
    other = login.run(address, "id -un; sudo -n true", user="other")
    assert other.stdout.strip() == "other"
    assert other.returncode != 0, "it has not been given sudo"


def test_a_failing_command_is_in_the_serial_log(rest: Rest, login: Login) -> None:
    address = new_vm(rest, login, "broken", runcmd=["echo about to fail; exit 3"])
    done = login.run(address, "cloud-init status --wait")
    assert (done.returncode, "exit code 3" in done.stdout) == (1, True)
    uris = rest.ask("POST", f"{compute('broken')}/retrieveBootDiagnosticsData").body
    log = rest.get(uris["serialConsoleLogBlobUri"]).body
    assert "about to fail" in log
    assert "failed with exit code 3" in log


def test_a_deallocated_machine_keeps_its_disk_and_may_get_another_address(
    azure: StandIn, rest: Rest, login: Login
) -> None:
    rest.new_vm(
        "moving",
        method="Dynamic",
        size="Standard_D4ds_v5",
        key=login.pair.public,
        custom_data=login.custom_data(runcmd=["echo once >> /etc/runs"]),
    )
    before = address_of(rest, "moving")
    login.run(
        before, "cloud-init status --wait; sudo sh -c 'echo kept > /etc/kept; echo lost > /mnt/lost'; sync"
    )
    rest.act(f"{compute('moving')}/deallocate")
    assert rest.power("moving") == "PowerState/deallocated"
    assert "ipAddress" not in rest.get(network("publicIPAddresses/moving-ip")).body["properties"]
    assert not azure.hosts.host(str(azure.vm("moving").id)).is_on
    rest.act(f"{compute('moving')}/start")
    after = address_of(rest, "moving")
    assert after != before
    done = login.run(after, "cat /etc/kept /etc/runs; ls /mnt")
    assert done.stdout.split() == ["kept", "once"], (
        "its local disk is empty, and first-boot commands ran once"
    )
    assert login.is_shut_out(before)


def test_a_static_address_stays(rest: Rest, login: Login) -> None:
    address = new_vm(rest, login, "static")
    rest.act(f"{compute('static')}/deallocate")
    rest.act(f"{compute('static')}/start")
    assert address_of(rest, "static") == address
    assert login.run(address, "true").returncode == 0


def test_an_unreachable_machine_is_mended_by_what_mends_it(azure: StandIn, rest: Rest, login: Login) -> None:
    address = new_vm(rest, login, "silent")
    azure.make_unreachable("silent")
    assert rest.power("silent") == "PowerState/running"
    assert login.is_shut_out(address)
    rest.act(f"{compute('silent')}/restart")
    assert login.run(address, "true").returncode == 0
    azure.make_unreachable("silent", also_after_restart=True)
    rest.act(f"{compute('silent')}/restart")
    assert login.is_shut_out(address)
    rest.act(f"{compute('silent')}/redeploy")
    assert login.run(address, "true").returncode == 0


EVENTS = "http://169.254.169.254/metadata/scheduledevents?api-version=2020-07-01"
ASK = f"""\
import json, urllib.request
ask = urllib.request.Request({EVENTS!r}, headers={{"Metadata": "true"}})
print(urllib.request.urlopen(ask, timeout=60).read().decode())
"""


def scheduled_events(login: Login, address: str) -> Json:
    done = login.run(address, f"python3 -c '{ASK.replace(chr(39), chr(34))}'")
    assert done.returncode == 0, done.stderr
    found: Json = json.loads(done.stdout)
    return found


def test_an_eviction_is_announced_to_the_machine_and_then_happens(
    azure: StandIn, rest: Rest, login: Login
) -> None:
    data = login.custom_data()
    rest.new_vm("spot", key=login.pair.public, custom_data=data, priority="Spot", evictionPolicy="Deallocate")
    address = address_of(rest, "spot")
    assert scheduled_events(login, address)["Events"] == []
    azure.evict("spot", notice_s=20.0)
    event = scheduled_events(login, address)["Events"][0]
    assert (event["EventType"], event["Resources"]) == ("Preempt", ["spot"])
    assert rest.power("spot") == "PowerState/running"
    azure.jump(20.0)
    until(lambda: rest.power("spot") == "PowerState/deallocated")
    assert login.is_shut_out(address)


LIST = """\
import json, os, ssl, urllib.request
identity = os.environ["IDENTITY_ENDPOINT"] + "?api-version=2019-08-01&resource=https://management.azure.com"
ask = urllib.request.Request(identity, headers={"X-IDENTITY-HEADER": os.environ["IDENTITY_HEADER"]})
token = json.load(urllib.request.urlopen(ask, timeout=60))["access_token"]
groups = os.environ["ENDPOINT"] + "/subscriptions/" + os.environ["AZURE_SUBSCRIPTION_ID"]
groups += "/resourcegroups?api-version=2021-04-01"
ask = urllib.request.Request(groups, headers={"Authorization": "Bearer " + token})
tls = ssl.create_default_context(cafile=os.environ["SSL_CERT_FILE"])
print([each["name"] for each in json.load(urllib.request.urlopen(ask, timeout=60, context=tls))["value"]])
"""


@pytest.mark.usefixtures("rest")
def test_a_client_in_the_labs_network_reaches_it(azure: StandIn) -> None:
    done = subprocess.run(
        [*azure.hosts.lab.prefix, sys.executable, "-c", LIST],
        env={**azure.environment_inside, "ENDPOINT": azure.endpoint_inside},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "['rg']\n"), done.stderr


def test_deleting_leaves_nothing(azure: StandIn, rest: Rest, login: Login) -> None:
    address = new_vm(rest, login, "gone")
    count = len(azure.hosts.lab.hosts)
    rest.delete(compute("gone"))
    assert len(azure.hosts.lab.hosts) == count - 1
    assert [str(each.id) for each in azure.resources() if "/gone" in str(each.id)] == []
    assert [span.id for span in azure.meters.running() if "/gone" in span.id] == []
    assert login.is_shut_out(address)


def test_a_machine_deleted_while_it_boots_leaves_no_host(azure: StandIn, rest: Rest, login: Login) -> None:
    nics = [rest.new_interface(f"brief-{n}") for n in range(6)]
    count = len(azure.hosts.lab.hosts)
    for n, nic in enumerate(nics):
        rest.ask("PUT", compute(f"brief-{n}"), vm_body(f"brief-{n}", nic, key=login.pair.public))
    until(lambda: len(azure.hosts.lab.hosts) > count)
    for n in range(6):
        rest.delete(compute(f"brief-{n}"))
    assert len(azure.hosts.lab.hosts) == count


def test_security_groups_are_in_force(rest: Rest, login: Login) -> None:
    address = new_vm(rest, login, "guarded")
    assert login.run(address, "true").returncode == 0
    allow(rest, "198.18.77.77/32")
    until(lambda: login.is_shut_out(address))
    allow(rest, "198.18.0.1")
    until(lambda: not login.is_shut_out(address))


def test_a_machine_without_public_address_is_reached_from_its_network_alone(rest: Rest, login: Login) -> None:
    jump = new_vm(rest, login, "jump")
    subnet = {"id": rest.root + network("virtualNetworks/net/subnets/s")}
    configuration = {"name": "ip", "properties": {"subnet": subnet}}
    nic = {"location": "eastus", "properties": {"ipConfigurations": [configuration]}}
    rest.put(network("networkInterfaces/hidden-nic"), nic)
    id = rest.root + network("networkInterfaces/hidden-nic")
    rest.put(compute("hidden"), vm_body("hidden", id, key=login.pair.public, custom_data=login.custom_data()))
    shown = rest.get(network("networkInterfaces/hidden-nic")).body
    address = shown["properties"]["ipConfigurations"][0]["properties"]["privateIPAddress"]
    assert login.is_shut_out(address)
    done = login.run(jump, f"timeout 10 bash -c 'head -c 7 </dev/tcp/{address}/22'")
    assert done.stdout == "SSH-2.0"
