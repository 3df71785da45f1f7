"""What Google's own clients find at the stand-in. Runs in their environment, which has nothing of ours.

    witnesses.py api|sdk|login WHERE...

prints one JSON document. `api`: google-api-python-client, `sdk`: google-cloud-compute, both without a login
over http; `login`: google-auth with a service account's key, over https.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from typing import Any

PROJECT, ZONE, NAME = "stand-in-project", "us-central1-a", "witness-1"
LABELS = {"team": "witness"}
DISK = "projects/debian-cloud/global/images/family/debian-12"
LINK = "www.googleapis.com/auth/cloud-platform"


def module(name: str) -> Any:
    """Modules that the types of this repository know nothing of."""
    return importlib.import_module(name)


def body(zone: str = ZONE) -> dict[str, Any]:
    """As `gcloud` sends it for a spot machine."""
    return {
        "name": NAME,
        "machineType": f"zones/{zone}/machineTypes/e2-standard-4",
        "labels": LABELS,
        "disks": [
            {"boot": True, "autoDelete": True, "initializeParams": {"sourceImage": DISK, "diskSizeGb": "20"}}
        ],
        "networkInterfaces": [
            {"network": "global/networks/default", "accessConfigs": [{"type": "ONE_TO_ONE_NAT"}]}
        ],
        "scheduling": {
            "provisioningModel": "SPOT",
            "preemptible": True,
            "automaticRestart": False,
            "instanceTerminationAction": "STOP",
            "maxRunDuration": {"seconds": "3600"},
        },
    }


def by_api_client(endpoint: str, full_zone: str) -> dict[str, Any]:
    """A machine's life by the client that is made from the discovery document."""
    discovery, errors = module("googleapiclient.discovery"), module("googleapiclient.errors")
    nobody = module("google.auth.credentials").AnonymousCredentials()
    options = {"api_endpoint": endpoint}
    compute = discovery.build(
        "compute", "v1", credentials=nobody, client_options=options, static_discovery=True
    )
    machines, here = compute.instances(), {"project": PROJECT, "zone": ZONE}
    one = {**here, "instance": NAME}

    def finish(asked: Any, zone: str = ZONE) -> dict[str, Any]:
        begun = asked.execute()
        waits = compute.zoneOperations()
        while begun["status"] != "DONE":
            begun = waits.wait(project=PROJECT, zone=zone, operation=begun["name"]).execute()
        return dict(begun)

    def refused(asked: Any) -> int:
        try:
            asked.execute()
        except errors.HttpError as err:
            return int(err.resp.status)
        return 200

    def planned_end() -> Any:
        shown = machines.get(**one).execute()
        return shown["resourceStatus"]["scheduling"].get("terminationTimestamp")

    found: dict[str, Any] = {}
    elsewhere = finish(machines.insert(project=PROJECT, zone=full_zone, body=body(full_zone)), full_zone)
    found["full"] = [each["code"] for each in elsewhere["error"]["errors"]]
    found["inserted"] = finish(machines.insert(**here, body=body()))["status"]
    shown = machines.get(**one).execute()
    found["status"], found["address"] = shown["status"], shown["networkInterfaces"][0]["networkIP"]
    found["taken"] = refused(machines.insert(**here, body=body()))
    found["ends"] = planned_end()
    lists = machines.aggregatedList(project=PROJECT, filter="labels.team=witness").execute()["items"]
    found["listed"] = [each["name"] for scope in lists.values() for each in scope.get("instances", ())]
    found["warned"] = any("warning" in scope for scope in lists.values())
    found["told_no_key"] = refused(machines.getGuestAttributes(**one, queryPath="hostkeys/"))
    limit: dict[str, Any] = {"maxRunDuration": {"seconds": "7200"}, "instanceTerminationAction": "DELETE"}
    limit |= {"provisioningModel": "SPOT", "preemptible": True, "automaticRestart": False}
    found["moved_while_it_ran"] = refused(machines.setScheduling(**one, body=limit))
    finish(machines.stop(**one))
    found["stopped"] = machines.get(**one).execute()["status"]
    found["ends_stopped"] = planned_end()
    finish(machines.setScheduling(**one, body=limit))
    finish(machines.start(**one))
    found["ends_again"] = planned_end()
    found["serial"] = "contents" in machines.getSerialPortOutput(**one, port=1).execute()
    quotas = compute.regions().get(project=PROJECT, region="us-central1").execute()["quotas"]
    found["cpus"] = next(each["usage"] for each in quotas if each["metric"] == "CPUS")
    found["deleted"] = finish(machines.delete(**one))["status"]
    found["gone"] = refused(machines.get(**one))
    return found


def by_sdk(endpoint: str, full_zone: str) -> dict[str, Any]:
    """A machine's life by the generated library, whose types refuse what they do not know."""
    compute_v1, exceptions = module("google.cloud.compute_v1"), module("google.api_core.exceptions")
    nobody = module("google.auth.credentials").AnonymousCredentials()

    def client(kind: str) -> Any:
        transports = module(f"google.cloud.compute_v1.services.{kind}.transports")
        name = next(name for name in dir(transports) if name.endswith("RestTransport"))
        host, _, _ = endpoint.removeprefix("http://").partition("/")
        made = getattr(transports, name)(host=host, url_scheme="http", credentials=nobody)
        classes = {"instances": "InstancesClient", "zone_operations": "ZoneOperationsClient"}
        return getattr(compute_v1, classes[kind])(transport=made)

    machines = client("instances")
    # else `.result()` asks Google itself
    machines.transport._extended_operations_services = {"zone_operations": client("zone_operations")}
    found: dict[str, Any] = {}

    def insert(zone: str) -> Any:
        given = compute_v1.Instance.from_json(json.dumps(body(zone)))
        return machines.insert(project=PROJECT, zone=zone, instance_resource=given)

    try:
        insert(full_zone).result(timeout=60)
    except exceptions.GoogleAPICallError as err:
        found["full"] = str(err)
    insert(ZONE).result(timeout=60)
    one = {"project": PROJECT, "zone": ZONE, "instance": NAME}
    shown = machines.get(**one)
    found["status"], found["labels"] = shown.status, dict(shown.labels)
    found["ends"] = shown.resource_status.scheduling.termination_timestamp
    pages = machines.aggregated_list(project=PROJECT)
    found["listed"] = [each.name for _, scope in pages for each in scope.instances]
    machines.stop(**one).result(timeout=60)
    found["stopped"] = machines.get(**one).status
    machines.delete(**one).result(timeout=60)
    try:
        machines.get(**one)
    except exceptions.NotFound:
        found["gone"] = 404
    return found


def by_login(endpoint: str, key: str, ca: str) -> dict[str, Any]:
    """google-auth signs with the key, and exchanges that for a token at the key's own token_uri."""
    service_account = module("google.oauth2.service_account")
    requests = module("google.auth.transport.requests")
    scopes = [f"https://{LINK}"]
    credentials = service_account.Credentials.from_service_account_file(key, scopes=scopes)
    session = requests.AuthorizedSession(credentials)
    session.verify = ca
    answer = session.get(f"{endpoint}/projects/{PROJECT}", timeout=60)
    without = module("requests").get(f"{endpoint}/projects/{PROJECT}", verify=ca, timeout=60)
    return {"status": answer.status_code, "name": answer.json()["name"], "without": without.status_code}


WITNESSES: dict[str, Callable[..., dict[str, Any]]] = {"api": by_api_client, "sdk": by_sdk, "login": by_login}

if __name__ == "__main__":
    print(json.dumps(WITNESSES[sys.argv[1]](*sys.argv[2:])))
