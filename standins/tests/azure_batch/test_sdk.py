"""Microsoft's own client of Batch against the stand-in: it is the witness that this speaks as Batch does."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import pytest
from azure.core.exceptions import HttpResponseError, ResourceExistsError, ResourceNotFoundError
from azure.core.rest import HttpRequest
from azure.identity import ManagedIdentityCredential

from standins.azure_batch import Refused, StandIn, Throttled, Timing
from tests.waiting import until

QUICK = (0.0, 0.02)
FAST = Timing(QUICK, QUICK, QUICK)
IMAGE = {"publisher": "canonical", "offer": "ubuntu-24_04-lts", "sku": "server", "version": "latest"}
MACHINE = {"imageReference": IMAGE, "nodeAgentSKUId": "batch.node.ubuntu 24.04"}
NAT = {
    "name": "ssh",
    "protocol": "tcp",
    "backendPort": 22,
    "frontendPortRangeStart": 49000,
    "frontendPortRangeEnd": 49099,
}
T = TypeVar("T")
NETWORK = {"endpointConfiguration": {"inboundNATPools": [NAT]}}


OLD = {**MACHINE, "nodeAgentSKUId": "batch.node.ubuntu 18.04"}
CONTAINERS = {**MACHINE, "containerConfiguration": {"type": "dockerCompatible"}}
RESERVED = {"endpointConfiguration": {"inboundNATPools": [{**NAT, "frontendPortRangeStart": 50000}]}}


@pytest.fixture
def batch() -> Iterator[StandIn]:
    with StandIn(timing=FAST) as made:
        yield made


@pytest.fixture
def client(batch: StandIn, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, value in batch.environment.items():
        monkeypatch.setenv(name, value)
    module: Any = importlib.import_module("azure.batch")
    credential = ManagedIdentityCredential()
    with module.BatchClient(
        batch.endpoint, credential, connection_verify=str(batch.ca), retry_backoff_factor=0.05
    ) as made:
        yield made


def once(ask: Callable[[], T], good: Callable[[T], bool]) -> T:
    """The first answer that is good."""
    return until(lambda: next(((answer,) for answer in (ask(),) if good(answer)), None))[0]


def options(kind: str, **fields: Any) -> Any:
    """The client's own type of what is sent, read from JSON: what it does not know it drops."""
    models: Any = importlib.import_module("azure.batch.models")
    return getattr(models, kind)(fields)


def pool_body(**more: Any) -> dict[str, Any]:
    return {"vmSize": "Standard_D4s_v5", "virtualMachineConfiguration": MACHINE, **more}


def manager(**more: Any) -> dict[str, Any]:
    limit = {"maxWallClockTime": "PT1H", "maxTaskRetryCount": 0}
    return {"id": "pilot", "commandLine": "sleep 1000", "constraints": limit, **more}


def add_job(client: Any, id: str = "job", spot: bool = False, **more: Any) -> None:
    wanted = {"targetLowPriorityNodes": 1} if spot else {"targetDedicatedNodes": 1}
    pool = {**pool_body(networkConfiguration=NETWORK, **wanted), **more.pop("pool", {})}
    auto = {"poolLifetimeOption": "job", "keepAlive": False, "autoPoolIdPrefix": "ef", "pool": pool}
    body = {"poolInfo": {"autoPoolSpecification": auto}, "jobManagerTask": manager(), **more}
    client.create_job(options("BatchJobCreateOptions", id=id, **body))


def until_running(client: Any, id: str = "job") -> Any:
    return once(lambda: client.get_task(id, "pilot"), lambda task: str(task.state.value) == "running")


def test_a_pool_is_made_resized_and_deleted(batch: StandIn, client: Any) -> None:
    client.create_pool(options("BatchPoolCreateOptions", id="mine", targetDedicatedNodes=2, **pool_body()))
    nodes = once(lambda: list(client.list_nodes("mine")), lambda found: len(found) == 2)
    assert {node.is_dedicated for node in nodes} == {True}
    once(lambda: client.get_pool("mine"), lambda pool: pool.allocation_state.value == "steady")
    client.begin_resize_pool(
        "mine", options("BatchPoolResizeOptions", targetDedicatedNodes=0, targetLowPriorityNodes=1)
    )
    once(lambda: [node.is_dedicated for node in client.list_nodes("mine")], lambda kinds: kinds == [False])
    (counts,) = once(
        lambda: list(client.list_pool_node_counts()), lambda found: found[0].low_priority.idle == 1
    )
    assert (counts.pool_id, counts.dedicated.total) == ("mine", 0)
    client.begin_delete_pool("mine", polling_interval=0.05).result()
    with pytest.raises(ResourceNotFoundError):
        client.get_pool("mine")
    assert not batch.meters.running()


def test_a_job_brings_its_pool_and_takes_it_along(batch: StandIn, client: Any) -> None:
    add_job(client)
    task = until_running(client)
    pool = client.get_job("job").execution_info.pool_id
    assert pool.startswith("ef_")
    node = client.get_node(pool, task.node_info.node_id)
    (end,) = node.endpoint_configuration.inbound_endpoints
    assert (end.backend_port, 49000 <= end.frontend_port <= 49099) == (22, True)
    assert task.constraints.max_wall_clock_time == timedelta(hours=1)
    counts = client.get_job_task_counts("job").task_counts
    assert (counts.active, counts.running, counts.completed) == (0, 1, 0)
    batch.paper.contents["wd/key"] = b"told"
    assert b"".join(client.download_task_file("job", "pilot", "wd/key")) == b"told", "read while it runs"
    client.begin_delete_job("job", polling_interval=0.05).result()
    once(lambda: list(client.list_pools()), lambda pools: not pools)
    assert not batch.meters.running()


def test_wall_clocks_end_tasks_and_jobs_with_nobody_there(batch: StandIn, client: Any) -> None:
    add_job(client, "short", constraints={"maxWallClockTime": "PT10M"})
    add_job(client, "long")
    until_running(client, "short")
    until_running(client, "long")
    batch.jump(3700)
    jobs = once(lambda: {each.id: each for each in client.list_jobs()}, lambda each: _all(each, "completed"))
    assert jobs["short"].execution_info.termination_reason == "MaxWallClockTimeExpiry"
    assert jobs["long"].execution_info.termination_reason == "JMComplete"
    assert client.get_task("long", "pilot").execution_info.failure_info.code == "TaskEnded"
    once(lambda: list(client.list_pools()), lambda pools: not pools)


def _all(jobs: dict[str, Any], state: str) -> bool:
    return {job.state.value for job in jobs.values()} == {state}


def test_a_task_whose_node_is_lost_is_run_again_whatever_its_retry_count(batch: StandIn, client: Any) -> None:
    add_job(client, spot=True)
    first = until_running(client)
    batch.preempt("job")
    again = once(
        lambda: until_running(client), lambda task: task.node_info.node_id != first.node_info.node_id
    )
    told = again.execution_info
    assert (told.requeue_count, told.retry_count) == (1, 0)
    batch.reboot("job")
    rebooted = once(lambda: until_running(client), lambda task: task.execution_info.requeue_count == 2)
    assert rebooted.node_info.node_id == again.node_info.node_id


def test_start_tasks_that_fail_and_quotas_are_told_in_the_services_words(batch: StandIn, client: Any) -> None:
    batch.faults.start_tasks_fail = True
    start = {"commandLine": "false", "waitForSuccess": True}
    add_job(client, pool={"startTask": start})
    pool = client.get_job("job").execution_info.pool_id
    (node,) = once(
        lambda: list(client.list_nodes(pool)),
        lambda found: bool(found) and _state(found) == "starttaskfailed",
    )
    assert node.start_task_info.failure_info.code == "FailureExitCode"
    log = b"".join(client.download_node_file(pool, node.id, "startup/stderr.txt"))
    assert log == batch.faults.start_task_words.encode()
    with pytest.raises(ResourceNotFoundError):
        b"".join(client.download_node_file(pool, node.id, "startup/wd/none"))
    batch.service.quota["dedicated"] = 4
    add_job(client, "more")
    pool = client.get_job("more").execution_info.pool_id
    shown = once(lambda: client.get_pool(pool), lambda shown: bool(shown.resize_errors))
    assert shown.resize_errors[0].code == "AccountCoreQuotaReached"


def test_a_pool_with_containers_takes_a_container_task(client: Any) -> None:
    machine = {
        **CONTAINERS,
        "containerConfiguration": {"type": "dockerCompatible", "containerImageNames": ["x"]},
    }
    task = manager(containerSettings={"imageName": "x", "containerRunOptions": "--shm-size=2g"})
    add_job(client, pool={"virtualMachineConfiguration": machine}, jobManagerTask=task)
    until_running(client)
    pool = client.get_pool(client.get_job("job").execution_info.pool_id)
    assert pool.virtual_machine_configuration.container_configuration.container_image_names == ["x"]


def _state(nodes: list[Any]) -> str:
    return str(nodes[0].state.value)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"id": "a b"}, "InvalidPropertyValue"),
        ({"poolInfo": {"poolId": "x", "autoPoolSpecification": {"keepAlive": True}}}, "InvalidPropertyValue"),
        ({"jobManagerTask": manager(containerSettings={"imageName": "x"})}, "InvalidPropertyValue"),
        ({"pool": {"vmSize": ""}}, "MissingRequiredProperty"),
        ({"pool": {"virtualMachineConfiguration": OLD}}, "InvalidPropertyValue"),
        ({"pool": {"virtualMachineConfiguration": CONTAINERS}}, "InvalidPropertyValue"),
        ({"pool": {"networkConfiguration": RESERVED}}, "InvalidPropertyValue"),
    ],
)
def test_what_batch_refuses_is_refused(client: Any, body: dict[str, Any], code: str) -> None:
    with pytest.raises(HttpResponseError) as refused:
        add_job(client, **body)
    assert refused.value.error is not None
    assert refused.value.error.code == code


def test_a_job_of_a_name_that_is_taken_is_refused(client: Any) -> None:
    add_job(client)
    with pytest.raises(ResourceExistsError):
        add_job(client)


def test_throttling_is_asked_again_and_old_versions_are_not_known(batch: StandIn, client: Any) -> None:
    batch.faults.add(Throttled(), method="GET", path="/jobs", times=2)
    assert list(client.list_jobs()) == []
    assert [status for _, path, status in batch.server.calls if path == "/jobs"] == [503, 503, 200]
    batch.faults.add(Refused(403, "AuthorizationFailure"), path="/pools", times=1)
    with pytest.raises(HttpResponseError):
        list(client.list_pools())
    with pytest.raises(HttpResponseError, match="UnsupportedRequestVersion"):
        client.send_request(HttpRequest("GET", "/jobs?api-version=2022-01-01.15.0"))


def test_lists_come_in_pages_and_by_filter(client: Any) -> None:
    for n in range(5):
        add_job(client, f"job-{n}")
    add_job(client, "other")
    found = client.list_jobs(filter="startswith(id,'job-')", max_results=2)
    assert sorted(job.id for job in found) == [f"job-{n}" for n in range(5)]


def test_a_pool_scales_by_a_formula_that_knows_the_time_and_takes_no_two_within_30_seconds(
    batch: StandIn, client: Any
) -> None:
    models: Any = importlib.import_module("azure.batch.models")
    client.create_pool({"id": "p", "vmSize": "Standard_D4s_v5", "virtualMachineConfiguration": MACHINE})
    once(lambda: client.get_pool("p"), lambda pool: pool.allocation_state == "steady")
    end = batch.clock.stamp(batch.clock.now() + 600)
    formula = f'n = (time() < time("{end}") ? 2 : 0);\n$TargetDedicatedNodes = n;'
    asked = models.BatchPoolEnableAutoScaleOptions(
        auto_scale_formula=formula, auto_scale_evaluation_interval=timedelta(minutes=5)
    )
    client.enable_pool_auto_scale("p", asked)
    shown = once(lambda: client.get_pool("p"), lambda pool: pool.current_dedicated_nodes == 2)
    assert (shown.enable_auto_scale, shown.auto_scale_formula) == (True, formula)
    with pytest.raises(HttpResponseError, match="within 30 seconds"):
        client.enable_pool_auto_scale("p", asked)
    with pytest.raises(HttpResponseError, match="Automatic scaling is enabled"):
        client.begin_resize_pool("p", {"targetDedicatedNodes": 1})
    batch.jump(1000.0)
    once(lambda: client.get_pool("p"), lambda pool: pool.current_dedicated_nodes == 0)
    wrong = models.BatchPoolEnableAutoScaleOptions(auto_scale_formula="$TargetDedicatedNodes = many")
    with pytest.raises(HttpResponseError, match="AutoScalingFormulaSyntaxError"):
        client.enable_pool_auto_scale("p", wrong)
    client.disable_pool_auto_scale("p")
    assert not client.get_pool("p").enable_auto_scale


@pytest.mark.parametrize(("password", "state"), [("wrong", "unusable"), ("right", "idle")])
def test_a_registry_wants_the_right_password_which_is_not_shown_again(
    batch: StandIn, client: Any, password: str, state: str
) -> None:
    batch.service.registries["evals.azurecr.io"] = {"username": "u", "password": "right"}
    login = {"registryServer": "evals.azurecr.io", "username": "u", "password": password}

    def create(id: str, registry: dict[str, str]) -> None:
        contained = {
            "type": "dockerCompatible",
            "containerImageNames": ["evals.azurecr.io/a:1"],
            "containerRegistries": [registry],
        }
        machine = {**MACHINE, "containerConfiguration": contained}
        pool = {"id": id, "vmSize": "Standard_D4s_v5", "targetDedicatedNodes": 1}
        client.create_pool({**pool, "virtualMachineConfiguration": machine})

    create("p", login)
    (node,) = once(
        lambda: list(client.list_nodes("p")), lambda nodes: [each.state for each in nodes] == [state]
    )
    assert state == "idle" or "unauthorized" in node.errors[0].message
    machine = client.get_pool("p").virtual_machine_configuration
    (shown,) = machine.container_configuration.container_registries
    assert (shown.username, shown.password) == ("u", None)
    del login["password"]
    with pytest.raises(HttpResponseError, match="a user name and a password, or an identity"):
        create("q", login)
