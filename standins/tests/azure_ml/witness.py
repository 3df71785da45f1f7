"""What Microsoft's own `azure-ai-ml` does with a workspace, in a Python that has it; prints what it saw."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any

TOLD: dict[str, str] = json.loads(sys.argv[1])
os.environ.update(REQUESTS_CA_BUNDLE=TOLD["ca"], SSL_CERT_FILE=TOLD["ca"])


def client() -> Any:
    from azure.identity import ClientSecretCredential

    azure_ai_ml: Any = importlib.import_module("azure.ai.ml")

    here = TOLD["endpoint"]
    credential = ClientSecretCredential(
        *(TOLD["tenant"], TOLD["client"], TOLD["secret"]),
        authority=here,
        disable_instance_discovery=True,
        connection_verify=TOLD["ca"],
    )
    cloud = {
        "azure_portal": "https://portal.azure.com/",
        "resource_manager": f"{here}/",
        "active_directory": f"{here}/",
        "aml_resource_id": "https://ml.azure.com/",
        "storage_endpoint": "core.windows.net",
        "registry_discovery_endpoint": f"{here}/",
    }
    where = (TOLD["subscription"], TOLD["group"], TOLD["workspace"])
    trusted = {"connection_verify": TOLD["ca"], "enable_telemetry": False}
    return azure_ai_ml.MLClient(credential, *where, cloud="standin", cloud_metadata=cloud, **trusted)


def instance(ml: Any, entities: Any) -> list[Any]:
    """As Windows Agent Arena's official script makes one; stopped, started, and deleted."""
    wanted = entities.ComputeInstance(
        name="w0Expexp0",
        size="Standard_D8_v3",
        idle_time_before_shutdown_minutes=600,
        ssh_public_access_enabled=True,
        tags={"a": "b"},
    )
    made = ml.compute.begin_create_or_update(wanted).result()
    saw = [made.name, made.type, made.state, made.size, made.ssh_public_access_enabled, made.tags]
    saw.append(made.idle_time_before_shutdown_minutes)
    ml.compute.begin_stop(made.name).result()
    saw.append(ml.compute.get(made.name).state)
    ml.compute.begin_start(made.name).result()
    saw.append(ml.compute.get(made.name).state)
    ml.compute.begin_restart(made.name).result()
    ml.compute.begin_delete(made.name).result()
    return saw


def main() -> None:
    azure_ai_ml: Any = importlib.import_module("azure.ai.ml")
    entities: Any = importlib.import_module("azure.ai.ml.entities")
    ml, saw = client(), dict[str, Any]()
    workspace = ml.workspaces.get(TOLD["workspace"])
    saw["workspace"] = [workspace.name, workspace.location]
    wanted = entities.AmlCompute(
        name="witness",
        size="Standard_D4s_v5",
        min_instances=0,
        max_instances=2,
        idle_time_before_scale_down=120,
        tier="low_priority",
    )
    made = ml.compute.begin_create_or_update(wanted).result()
    scale = [made.min_instances, made.max_instances, made.idle_time_before_scale_down]
    saw["cluster"] = [made.name, made.size, made.tier, *scale]
    ml.environments.create_or_update(entities.Environment(name="e", version="1", image="python:3.12"))
    job = azure_ai_ml.command(name="w1", command="sleep 600", environment="azureml:e:1", compute="witness")
    job.set_limits(timeout=600)
    ml.jobs.create_or_update(job)
    until = time.monotonic() + 60
    while (job := ml.jobs.get("w1")).status != "Running" and time.monotonic() < until:
        time.sleep(0.1)
    saw["job"] = [job.name, str(job.status), job.limits.timeout]
    saw["jobs"] = [each.name for each in ml.jobs.list()]
    saw["nodes"] = [node.node_state for node in ml.compute.list_nodes("witness")]
    ml.jobs.begin_cancel("w1").result()
    saw["cancelled"] = str(ml.jobs.get("w1").status)
    store = ml.datastores.get_default(include_secrets=True)
    saw["storage"] = [store.name, store.account_name, bool(store.credentials.account_key)]
    saw["instance"] = instance(ml, entities)
    ml.compute.begin_delete("witness").result()
    saw["left"] = [each.name for each in ml.compute.list()]
    print(json.dumps(saw))


if __name__ == "__main__":
    main()
