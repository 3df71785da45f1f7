"""Machines that are jobs of a service, Batch or Azure ML, on stand-ins that run nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from evalfleet.errors import PlaceError, RequestError
from evalfleet.places.azure_batch import AzureBatchPlace, AzureBatchSettings
from evalfleet.places.azure_ml import AzureMlPlace, AzureMlSettings
from evalfleet.ports import PlaceContext
from standins import azure_batch, azure_ml
from standins.azure_ml import Failed
from tests.cloud import batch_places, ml_places
from tests.cloud.mail_desk import seen
from tests.cloud.services import (
    HOME,
    LIFE_S,
    ONE,
    STRANGER,
    Service,
    ServicePlace,
    desk,
    examine,
    offer,
    place,
    play,
)
from tests.waiting import until

ON_PAPER: dict[str, Callable[[], Service]] = {
    "ml": lambda: azure_ml.StandIn(ml_timing=ml_places.FAST),
    "batch": lambda: azure_batch.StandIn(timing=batch_places.FAST),
}


@pytest.fixture(params=list(ON_PAPER))
def paper(request: pytest.FixtureRequest) -> Iterator[Service]:
    with ON_PAPER[request.param]() as made:
        yield made


def test_an_api_or_a_storage_that_is_away_or_busy_is_asked_again(paper: Service, tmp_path: Path) -> None:
    async def act(made: ServicePlace) -> None:
        if isinstance(paper, azure_ml.StandIn):
            paper.faults.add(azure_ml.Throttled(), method="PUT", path="/jobs/", times=1)
        else:
            paper.faults.add(azure_batch.Throttled(), method="POST", path="/jobs", times=1)
        await made.create(ONE, offer(paper), LIFE_S)
        await seen(made, "pending")
        away = paper.faults.add(Failed(500), method="GET", path="/jobs")
        with pytest.raises(PlaceError) as refused:
            await made.list("run")
        assert refused.value.transient
        away.times = 0
        paper.storage.is_away = True
        with pytest.raises(PlaceError) as refused:
            await made.list("run")
        assert refused.value.transient
        paper.storage.is_away = False
        await seen(made, "pending")
        await made.delete(ONE)

    play(paper, tmp_path, act)
    until(lambda: not paper.left(), lambda: f"{paper.left()}")


def test_a_name_that_is_taken_by_others_is_refused_and_what_is_theirs_stays(
    paper: Service, tmp_path: Path
) -> None:
    async def act(made: ServicePlace) -> None:
        await made.create(ONE, offer(paper), LIFE_S)
        stranger = place(paper, tmp_path / "stranger", home_id=STRANGER)
        with pytest.raises(PlaceError, match="not this home's; set another `name`"):
            await stranger.create(ONE, offer(paper), LIFE_S)
        assert await stranger.list("run") == ()
        await stranger.close()
        await seen(made, "queued", "pending")
        await made.delete(ONE)

    play(paper, tmp_path, act)
    until(lambda: not paper.left(), lambda: f"{paper.left()}")


# -- before money is spent -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "more", "name", "verdict", "told"),
    [
        ("ml", {"workspace": "other"}, "workspace", "bad", "az ml workspace list"),
        ("ml", {"region": "westus2"}, "region", "bad", 'region = "eastus"'),
        ("ml", {"cluster": "mine"}, "cluster", "bad", "az ml compute list"),
        (
            "ml",
            {"image": "me/agent:1"},
            "image",
            "warn",
            "acr import -n standin --source docker.io/me/agent:1",
        ),
        (
            "ml",
            {"image": "python"},
            "image",
            "warn",
            "--source docker.io/library/python --image library/python",
        ),
        ("batch", {"image": "canonical:ubuntuserver:18.04-lts:latest"}, "image", "bad", "supported-images"),
        ("batch", {"node_agent": "batch.node.ubuntu 22.04"}, "image", "bad", "batch.node.ubuntu 24.04"),
        ("batch", {"region": "westus2"}, "region", "bad", "standin.eastus"),
        ("batch", {"subscription": "0000"}, "quota", "warn", "check `subscription`"),
    ],
)
def test_doctor_says_what_to_do(
    tmp_path: Path, kind: str, more: dict[str, Any], name: str, verdict: str, told: str
) -> None:
    with ON_PAPER[kind]() as paper:
        found = examine(paper, tmp_path, **more)[name]
    assert found.verdict == verdict, found
    assert told in found.remedy


def test_doctor_tells_who_is_not_let_in(paper: Service, tmp_path: Path) -> None:
    paper.identity.refuses = True
    found = examine(paper, tmp_path)
    assert list(found) == ["workspace" if isinstance(paper, azure_ml.StandIn) else "account"]
    (check,) = found.values()
    assert "az login" in check.remedy


SUBNET = "/subscriptions/x/virtualNetworks/n/subnets/s"


@pytest.mark.parametrize(
    ("kind", "more", "told"),
    [
        ("ml", {"workspace": ""}, "no workspace is known; set `workspace` and `resource_group`"),
        ("ml", {"workspace": "a b"}, "3 to 33 letters"),
        ("ml", {"subscription": ""}, "no subscription is known"),
        ("ml", {"sizes": ("Standard_ND96",)}, "prices = { Standard_ND96 = 0.5 }"),
        ("ml", {"name": "x"}, "must have {machine} in it"),
        ("ml", {"image": "a b"}, "'a b' is no container image"),
        ("ml", {"cluster": "mine", "sizes": ("a", "b")}, "must be the one size"),
        ("ml", {"cluster": "mine", "subnet": SUBNET}, "leave out `subnet`"),
        ("ml", {"public_ip": False}, "needs `subnet`"),
        ("ml", {"region": "East US"}, "must be written as 'eastus'"),
        ("ml", {"subnet": "n"}, "must be a subnet's id"),
        ("ml", {"endpoint": "http://x"}, "must begin with https://"),
        ("ml", {"ca": "nowhere.pem"}, "is no file"),
        ("batch", {"account": ""}, 'set account = "NAME.REGION"'),
        ("batch", {"account": "Evals"}, "must be NAME.REGION, such as evals.eastus"),
        ("batch", {"ssh_from": ()}, "`ssh_from` is not set"),
        ("batch", {"image": "ubuntu"}, "`image` must be publisher:offer:sku:version"),
        ("batch", {"images": ("a b",)}, "'a b' is no container image"),
        ("batch", {"ports": (50_000, 50_100)}, "none of 50000 to 55000"),
        ("batch", {"ports": (49_000, 49_010)}, "40 or more"),
        ("batch", {"user": "Root"}, "the user 'Root' cannot be made"),
        ("batch", {"public_ip": False}, "`jump` to a host"),
        ("batch", {"public_ip": False}, 'set reach = "mailbox"'),
        ("batch", {"public_ip": False, "reach": "mailbox"}, "needs `subnet`"),
        ("batch", {"container": "a/b:1"}, '`container` needs reach = "mailbox"'),
        ("batch", {"container": "a b", "reach": "mailbox"}, "'a b' is no container image"),
        ("batch", {"container_args": "-x", "reach": "mailbox"}, "`container_args` needs `container`"),
        ("batch", {"storage": "A-B"}, "3 to 24 small letters"),
        ("batch", {"storage_endpoint": "http://x"}, "must begin with https://"),
        ("batch", {"public_ip": False, "jump": "me@gate"}, "needs `subnet`"),
        ("batch", {"sizes": ("Standard_ND96",)}, "prices = { Standard_ND96 = 0.5 }"),
        ("batch", {"name": "x"}, "must have {machine} in it"),
        ("batch", {"registry_user": "a"}, "`registry_user` with `registry_password`"),
        (
            "batch",
            {"registry_user": "a", "registry_password": "not a name!"},
            "the name of a variable, never",
        ),
        ("batch", {"registry_user": "a", "registry_password": "P"}, "needs `container`"),
        ("batch", {"ca": "nowhere.pem"}, "is no file"),
    ],
)
def test_bad_settings_are_told_in_one_line_that_says_what_to_do(
    tmp_path: Path, kind: str, more: dict[str, Any], told: str
) -> None:
    context = PlaceContext(tmp_path, HOME, environ={"HOME": str(tmp_path)}, base=tmp_path)
    ml: dict[str, Any] = {"workspace": "evals", "resource_group": "evals", "subscription": "s"}
    batch: dict[str, Any] = {"account": "evals.eastus", "ssh_from": ("203.0.113.7/32",)}
    make: dict[str, Callable[[], object]] = {
        "ml": lambda: AzureMlPlace.make("p", AzureMlSettings(**{**ml, **more}), context),
        "batch": lambda: AzureBatchPlace.make("p", AzureBatchSettings(**{**batch, **more}), context),
    }
    with pytest.raises(RequestError) as refused:
        make[kind]()
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


# -- runs that cannot work -----------------------------------------------------------------------------


PRIVATE = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Network/virtualNetworks/n/subnets/private"
NOWHERE = "https://127.0.0.1:1"
"""In place of the host of an account in another region, which has no address: nobody answers here, either."""
ELSEWHERE = 'the Batch account standin is in eastus, not in westus2; set account = "standin.eastus"'
WRONG_TOKEN = (
    "wrong audience or resource 'https://batch.core.windows.net'. It should exactly match (including forward "
    "slash) with one of the allowed audiences 'https://batch.core.windows.net/' (AuthenticationFailed); the "
    "token is for another service: remove `scope` from the place"
)
ROLES = "the login needs the roles Storage Blob Data Contributor and Storage Blob Delegator"


def nothing(paper: Service) -> None:
    """The stand-in is as it is."""


def no_storage(paper: Service) -> None:
    assert isinstance(paper, azure_batch.StandIn)
    paper.service.has_storage = False


def no_rights(paper: Service) -> None:
    """The storage takes no key, and the login has no role there."""
    if isinstance(paper, azure_ml.StandIn):
        paper.service.has_key = False
    else:
        paper.storage.takes_keys = False
    paper.storage.roles.clear()


def other_size(paper: Service) -> None:
    """The workspace has a cluster `mine` of another size."""
    assert isinstance(paper, azure_ml.StandIn)
    inner = {"vmSize": "Standard_D8s_v3", "scaleSettings": {"minNodeCount": 0, "maxNodeCount": 2}}
    body = {"location": paper.region, "properties": {"computeType": "AmlCompute", "properties": inner}}
    paper.do(lambda: setattr(paper.service.add_cluster("mine", body), "state", "Succeeded"))


@pytest.mark.parametrize(
    ("kind", "more", "trouble", "told"),
    [
        (
            "ml",
            {"workspace": "other"},
            nothing,
            "there is no workspace other in the resource group evals; `az",
        ),
        ("ml", {"resource_group": "nobodys"}, nothing, "nobodys"),
        ("ml", {"region": "westus2"}, nothing, 'set region = "eastus", or leave it out'),
        ("ml", {"cluster": "mine"}, nothing, "the workspace has no cluster mine; `az ml compute list"),
        ("ml", {"cluster": "mine"}, other_size, 'set sizes = ["Standard_D8s_v3"]: by it they are priced'),
        ("ml", {}, no_rights, "Storage Blob Data Contributor"),
        ("ml", {"name": "x"}, nothing, "must have {machine} in it"),
        ("batch", {"account": "standin.westus2"}, nothing, ELSEWHERE),
        ("batch", {"account": "standin.westus2", "endpoint": NOWHERE}, nothing, ELSEWHERE),
        ("batch", {"scope": "https://batch.core.windows.net/.default"}, nothing, WRONG_TOKEN),
        ("batch", {}, no_storage, "standin has no storage account of its own (StorageMissing); set"),
        ("batch", {}, no_rights, ROLES),
        ("batch", {"pool": "mine"}, nothing, "was removed; each machine gets a pool of its own"),
        (
            "batch",
            {"reach": "ssh", "public_ip": False, "subnet": PRIVATE},
            nothing,
            'set reach = "mailbox", by',
        ),
    ],
)
def test_a_run_is_refused_in_one_line(
    tmp_path: Path, kind: str, more: dict[str, Any], trouble: Callable[[Service], None], told: str
) -> None:
    with ON_PAPER[kind]() as paper:
        trouble(paper)
        done = desk(paper, tmp_path, 1, **more)("run", "b.toml", "--on", "p", "--workers", "1", "--name", "r")
        assert done.code in (2, 4), done
        (said,) = (done.out + done.err).splitlines()
        assert told in said
        assert not paper.do(lambda: list(paper.service.jobs)), "nothing was begun"


@pytest.mark.parametrize(
    ("kind", "more", "told"),
    [
        ("ml", {"image": "me/agent:1"}, "name an `image`"),
        (
            "batch",
            {"image": "canonical:ubuntuserver:18.04-lts:latest", "node_agent": "batch.node.ubuntu 18.04"},
            "set `image` and `node_agent` to what `az batch pool supported-images list` shows",
        ),
    ],
)
def test_an_image_that_is_not_there_ends_the_place_with_the_remedy(
    tmp_path: Path, kind: str, more: dict[str, Any], told: str
) -> None:
    """Which only a node, or a call of the service, tells."""
    with ON_PAPER[kind]() as paper:
        if isinstance(paper, azure_ml.StandIn):
            missing = "Error: manifest for docker.io/me/agent:1 not found: manifest unknown"
            paper.service.troubles.pull_error = missing
        done = desk(paper, tmp_path, 1, **more)("run", "b.toml", "--on", "p", "--workers", "1", "--name", "r")
        assert done.code == 4, done
        (said,) = [line for line in done.out.splitlines() if " stopping: " in line]
        assert said.count(told) == 1, "the whole place says it, and so each size does not say it again"
        until(lambda: not paper.left(), lambda: f"{paper.left()}")
