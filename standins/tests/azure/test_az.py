"""Microsoft's own command line, `az`, against the stand-in: an independent witness that it speaks ARM.

It is large, and has an environment of its own: `make test-gear` installs the newest one. AZ names another.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from standins.azure import StandIn
from tests.waiting import PATIENCE_S

AZ = os.environ.get("AZ", "")
pytestmark = pytest.mark.skipif(not AZ, reason="NO TEST BY MICROSOFT'S OWN az: it is not installed")
TEMPLATE = """{
  // as people write it, and az sends it
  "$schema": "https://schema.management.azure.com/schemas/2019-04-01/deploymentTemplate.json#",
  "contentVersion": "1.0.0.0",
  "parameters": {"secret": {"type": "secureString"} /* shown to nobody */ },
  "resources": [
    {
      "type": "Microsoft.Network/publicIPAddresses", "apiVersion": "2024-07-01", "name": "ip",
      "location": "East US", "sku": {"name": "standard"}, "properties": {"publicIPAllocationMethod": "static"}
    }
  ]
}
"""


class Az:
    """`az` with a folder of its own, registered and logged in at the stand-in."""

    def __init__(self, azure: StandIn, folder: Path) -> None:
        self._environ = {
            **os.environ,
            "AZURE_CONFIG_DIR": str(folder / "az"),
            "REQUESTS_CA_BUNDLE": str(azure.ca),
            "AZURE_CORE_INSTANCE_DISCOVERY": "false",
            "AZURE_CORE_COLLECT_TELEMETRY": "false",
            "AZURE_CORE_ONLY_SHOW_ERRORS": "true",
        }
        self.say("cloud", "register", "-n", "stand-in", "--endpoint-resource-manager", azure.endpoint)
        self.say("cloud", "set", "-n", "stand-in")
        who = ("-u", azure.client_id, "-p", azure.client_secret, "--tenant", azure.tenant)
        self.say("login", "--service-principal", *who)

    def say(self, *words: str) -> Any:
        done = subprocess.run(
            [AZ, *words, "-o", "json"], env=self._environ, capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return json.loads(done.stdout) if done.stdout.strip() else None


@pytest.fixture
def az(azure: StandIn, tmp_path: Path) -> Az:
    azure.faults.vm_limits = None
    made = Az(azure, tmp_path)
    made.say("group", "create", "-n", "rg", "-l", "eastus")
    return made


def test_a_deployment_from_a_file(azure: StandIn, az: Az, tmp_path: Path) -> None:
    (tmp_path / "template.json").write_text(TEMPLATE)
    file = ("--template-file", str(tmp_path / "template.json"), "--parameters", "secret=hush")
    shown = az.say("deployment", "group", "create", "-g", "rg", "-n", "d", *file)
    assert shown["properties"]["provisioningState"] == "Succeeded"
    assert "hush" not in json.dumps(shown)
    (address,) = azure.resources("Microsoft.Network/publicIPAddresses")
    assert address.location == "eastus"


def test_a_machine(azure: StandIn, az: Az, tmp_path: Path) -> None:
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-b", "2048", "-N", "", "-f", str(key)], check=True)
    image = "Canonical:0001-com-ubuntu-server-jammy:22_04-lts-gen2:latest"
    how = ("--image", image, "--size", "Standard_D4s_v5", "--ssh-key-values", f"{key}.pub")
    made = az.say("vm", "create", "-g", "rg", "-n", "vm", "--admin-username", "azureuser", *how)
    assert made["powerState"] == "VM running"
    assert made["publicIpAddress"]
    az.say("vm", "delete", "-g", "rg", "-n", "vm", "--yes")
    assert not azure.resources("Microsoft.Compute/virtualMachines")
