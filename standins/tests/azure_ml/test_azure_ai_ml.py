"""Microsoft's own client against the stand-in for Azure ML: an independent witness of the protocol.

It has an environment of its own: `make test-gear` makes it. AZURE_AI_ML names the Python of another.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from standins.azure_ml import StandIn
from tests.cloud.ml_places import FAST
from tests.waiting import PATIENCE_S, until

CLIENT = os.environ.get("AZURE_AI_ML", "")
pytestmark = pytest.mark.skipif(not CLIENT, reason="NO TEST BY MICROSOFT'S OWN azure-ai-ml: not installed")
WITNESS = Path(__file__).with_name("witness.py")


def test_the_client_makes_a_cluster_runs_a_job_and_removes_all() -> None:
    with StandIn(ml_timing=FAST) as ml:
        told = {
            "ca": str(ml.ca),
            "tenant": ml.tenant,
            "client": ml.client_id,
            "secret": ml.client_secret,
            "endpoint": ml.endpoint,
            "subscription": ml.subscription,
            "group": ml.group,
            "workspace": ml.workspace,
        }
        argv = (CLIENT, str(WITNESS), json.dumps(told))
        done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, done.stderr[-3000:]
        saw = json.loads(done.stdout.splitlines()[-1])
        until(lambda: not ml.meters.running(), "no node is billed")
    assert saw["workspace"] == ["standin", "eastus"]
    assert saw["cluster"] == ["witness", "Standard_D4s_v5", "low_priority", 0, 2, 120.0]
    assert saw["job"][0] == "w1"
    assert "RUNNING" in saw["job"][1].upper()
    assert saw["job"][2] == 600
    assert saw["jobs"] == ["w1"]
    assert len(saw["nodes"]) == 1
    assert "CANCELED" in saw["cancelled"].upper()
    assert saw["storage"] == ["workspaceblobstore", "standinstorage", True]
    assert saw["instance"] == [
        *("w0Expexp0", "computeinstance", "Running", "Standard_D8_v3", True, {"a": "b"}),
        *(600, "Stopped", "Running"),
    ]
    assert saw["left"] == []
