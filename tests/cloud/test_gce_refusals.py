"""What Google refuses, by call or late, and what is not ours: machines are records only, since none gets as
far as a login."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from evalfleet.errors import PlaceError, RequestError
from evalfleet.model import MachineId, Needs, Offer
from evalfleet.places.gce import GcePlace, GceSettings
from evalfleet.places.gce.answers import GoogleFault
from evalfleet.places.gce.machine_types import type_of
from evalfleet.places.gce.names import timestamp
from evalfleet.places.gce.preflight import free_of, quotas_of
from evalfleet.places.gce.settings import account_of
from evalfleet.places.vm.answers import Problem
from evalfleet.ports import PlaceContext
from evalfleet.testing.harness import raised
from standins.gce import Failed, FailsLate, Late, Lost, Refused, StandIn, Stuck, Throttled
from standins.gce.contract import document_path
from standins.gce.identity import WORKLOAD_TOKEN
from tests.cloud.desk import GceDesk
from tests.cloud.gce_places import FAST, HOME, ZONE, examine, machine_id, offer, place
from tests.waiting import until_seen

ONE = machine_id()
N4 = {"n4-standard-4": 0.2}
INSERT = r"zones/[^/]+/instances$"


@pytest.fixture
def google() -> Iterator[StandIn]:
    with StandIn(timing=FAST) as made:
        yield made


def use(google: StandIn, home: Path, work: Callable[[GcePlace], Awaitable[Any]], **more: Any) -> Any:
    """With a place, which is closed."""

    async def main() -> Any:
        made = place(google, home, **more)
        try:
            return await work(made)
        finally:
            await made.close()

    return asyncio.run(main())


def refused(google: StandIn, home: Path, zone: str = ZONE, **more: Any) -> PlaceError:
    """What `create` answers; what it left is deleted."""

    async def work(made: GcePlace) -> PlaceError:
        error = await raised(PlaceError, made.create(ONE, offer(zone), 7200))
        await made.delete(ONE)
        assert not await made.list("run")
        return error

    error: PlaceError = use(google, home, work, **more)
    assert not google.left(), "a refused machine left something behind"
    assert not google.meters.running()
    return error


async def asked_for(
    google: StandIn,
    made: GcePlace,
    machine: MachineId = ONE,
    zone: str = ZONE,
    life_s: float = 7200.0,
    what: Offer | None = None,
) -> None:
    """Have it made, as far as records go: until it runs."""
    creating = asyncio.create_task(made.create(machine, what or offer(zone), life_s))
    await until_seen(
        lambda: creating.done() or any(each.status == "RUNNING" for each in google.instances()), "it runs"
    )
    creating.cancel()
    await asyncio.gather(creating, return_exceptions=True)


def test_a_machine_is_asked_for_with_everything_in_one_call(google: StandIn, tmp_path: Path) -> None:
    async def work(made: GcePlace) -> None:
        await asked_for(google, made, life_s=7200)

    use(google, tmp_path, work, labels={"team": "agents"})
    (instance,) = google.instances()
    inserts = [call for call in google.server.calls if call[0] == "POST" and re.search(INSERT, call[1])]
    assert len(inserts) == 1
    body = instance.body
    assert body["labels"]["evalfleet-home"] == HOME
    assert body["labels"]["team"] == "agents"
    assert body["disks"][0]["autoDelete"] is True
    assert body["disks"][0]["initializeParams"]["labels"] == body["labels"]
    assert "serviceAccounts" not in body, "the agent under test gets no identity"
    assert body["scheduling"]["instanceTerminationAction"] == "DELETE"
    now, ends_at = google.clock.now(), instance.ends_at
    assert ends_at is not None
    assert 7200 - 240 < ends_at - now <= 7200 - 30, (
        "Google ends it, up to 30 s late, by the time that was asked for"
    )
    metadata = instance.metadata
    assert metadata["enable-guest-attributes"] == "TRUE"
    assert metadata["block-project-ssh-keys"] == "TRUE"
    assert metadata["enable-oslogin"] == "FALSE"
    assert metadata["ssh-keys"].startswith("evalfleet:ssh-ed25519 ")
    assert "PRIVATE" not in str(body)


def test_a_newer_machine_series_gets_the_only_disk_that_it_takes(google: StandIn, tmp_path: Path) -> None:
    async def work(made: GcePlace) -> None:
        (n4,) = await made.offers(Needs())
        assert n4.cost.idle_usd_per_hour == pytest.approx(0.08 * 128 / 730, abs=1e-5)
        await asked_for(google, made, what=n4)

    use(google, tmp_path, work, types=("n4-standard-4",), prices=N4)
    (instance,) = google.instances()
    made = instance.body["disks"][0]["initializeParams"]
    assert made["diskType"].endswith("/hyperdisk-balanced")
    assert (made["provisionedIops"], made["provisionedThroughput"]) == ("3000", "140"), "no more is free"


def test_every_call_is_checked_against_googles_description(google: StandIn, tmp_path: Path) -> None:
    if document_path() is None:
        pytest.skip("NO CHECK AGAINST GOOGLE'S CONTRACTS: GOOGLE_CONTRACTS names no folder")
    google.allows_violations = True

    async def work(made: GcePlace) -> None:
        client = made._client  # pyright: ignore[reportPrivateUsage]
        path = f"{client.root}/zones/{ZONE}/instances"
        for body in (
            {"name": "x", "colour": "red"},
            {"name": "No Name"},
            {"scheduling": {"maxRunDuration": 5}},
        ):
            with pytest.raises(Exception, match="Invalid JSON payload"):
                await client.begin("POST", path, body)
        with pytest.raises(Exception, match="no parameter"):
            await client.get(path, colour="red")

    use(google, tmp_path, work)
    assert len(google.server.violations) >= 4


@pytest.mark.parametrize(
    ("code", "scope", "transient"),
    [
        ("ZONE_RESOURCE_POOL_EXHAUSTED", "offer", False),
        ("ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", "offer", False),
        ("UNSUPPORTED_OPERATION", "offer", True),
        ("RESOURCE_NOT_READY", "machine", True),
        ("QUOTA_EXCEEDED", "region", False),
        ("CONDITION_NOT_MET", "place", False),
        ("IAM_PERMISSION_DENIED", "place", False),
        ("CONCURRENT_OPERATIONS_QUOTA_EXCEEDED", "place", True),
    ],
)
def test_an_operation_that_fails_late_acts_by_its_scope(
    google: StandIn, tmp_path: Path, code: str, scope: str, transient: bool
) -> None:
    google.faults.add(FailsLate(code), method="POST", path=INSERT)
    error = refused(google, tmp_path)
    assert (error.scope, error.transient) == (scope, transient), str(error)


@pytest.mark.parametrize(
    ("answer", "scope", "remedy"),
    [
        (Refused(403, "accessNotConfigured", info="SERVICE_DISABLED"), "place", "gcloud services enable"),
        (Refused(403, "forbidden", info="IAM_PERMISSION_DENIED"), "place", "add-iam-policy-binding"),
        (Refused(412, "conditionNotMet"), "place", "organisation policy"),
        (
            Refused(403, "quotaExceeded", "Quota 'N2_CPUS' exceeded. Limit: 0.0 in region x."),
            "family",
            "quotas",
        ),
        (Refused(403, "quotaExceeded", "Quota 'CPUS_ALL_REGIONS' exceeded."), "place", "quotas"),
        (Refused(403, "quotaExceeded", "Quota 'IN_USE_ADDRESSES' exceeded."), "region", "quotas"),
    ],
)
def test_a_refusal_at_once_acts_by_its_scope(
    google: StandIn, tmp_path: Path, answer: Refused, scope: str, remedy: str
) -> None:
    google.faults.add(answer, method="POST", path=INSERT)
    error = refused(google, tmp_path)
    assert (error.scope, error.transient) == (scope, False), str(error)
    assert remedy in str(error)


@pytest.mark.parametrize("at_once", [True, False])
def test_a_quota_of_the_region_is_told_at_once_or_late(
    google: StandIn, tmp_path: Path, at_once: bool
) -> None:
    google.cloud.catalog.limits["us-central1", "IN_USE_ADDRESSES"] = 0
    google.cloud.catalog.refuses_quota_at_once = at_once
    error = refused(google, tmp_path)
    assert (error.scope, error.transient) == ("region", False)
    assert "IN_USE_ADDRESSES" in str(error)


def test_no_room_in_a_zone_and_a_type_that_is_not_sold_there(google: StandIn, tmp_path: Path) -> None:
    google.cloud.catalog.capacity[ZONE, ""] = 0
    error = refused(google, tmp_path)
    assert (error.scope, error.transient) == ("offer", False)
    google.cloud.catalog.capacity.clear()
    google.cloud.catalog.unsold.add((ZONE, "e2-standard-4"))
    error = refused(google, tmp_path)
    assert (error.scope, error.transient) == ("offer", False)


@pytest.mark.parametrize("status", [403, 429])
def test_a_rate_limit_is_a_wait(google: StandIn, tmp_path: Path, status: int) -> None:
    google.faults.add(Throttled(status), times=3)
    google.faults.add(Failed(503), method="POST", path=INSERT, times=1)

    async def work(made: GcePlace) -> None:
        await asked_for(google, made)

    use(google, tmp_path, work)
    assert len(google.instances()) == 1
    error = GoogleFault(status, (Problem("rateLimitExceeded", "too many"),)).refusal("x")
    assert (error.scope, error.transient) == ("place", True), "it is no quota that somebody must raise"


def test_an_answer_that_is_lost_makes_one_machine(google: StandIn, tmp_path: Path) -> None:
    google.faults.add(Lost(), method="POST", path=INSERT, times=1)

    async def work(made: GcePlace) -> None:
        await asked_for(google, made)

    use(google, tmp_path, work)
    assert len(google.instances()) == 1


def test_a_try_that_failed_before_is_not_taken_for_this_one(google: StandIn, tmp_path: Path) -> None:
    # of the three calls that this is about, the second repeats the first, and gets its answer
    google.faults.add(FailsLate("RESOURCE_NOT_READY"), method="POST", path=INSERT, times=3)

    async def work(made: GcePlace) -> None:
        await raised(PlaceError, made.create(ONE, offer(), 7200))
        await raised(PlaceError, made.create(ONE, offer(), 7200))
        await asked_for(google, made)

    use(google, tmp_path, work)
    assert len(google.instances()) == 1


def test_a_create_that_moves_to_another_zone_leaves_one_machine(google: StandIn, tmp_path: Path) -> None:
    """The first one lands after it was given up."""
    google.faults.add(Late(60.0), method="POST", path=f"{ZONE}/instances$", times=None)

    async def work(made: GcePlace) -> None:
        creating = asyncio.create_task(made.create(ONE, offer(), 7200))
        await until_seen(
            lambda: any(isinstance(met[0], Late) for met in google.faults.met), "it was asked for"
        )
        creating.cancel()
        await asyncio.gather(creating, return_exceptions=True)
        google.faults.rules.clear()
        await asked_for(google, made, zone="us-central1-b")
        google.jump(61.0)
        assert len(google.instances()) == 2, "the late one has landed"
        assert len(await made.list("run")) == 1
        await until_seen(lambda: len(google.instances()) == 1, "one of the two is deleted")
        await made.delete(ONE)

    use(google, tmp_path, work)
    assert not google.left()


def test_a_machine_that_is_being_made_in_another_zone_is_not_made_twice(
    google: StandIn, tmp_path: Path
) -> None:
    google.faults.add(Stuck(3600), method="POST", path=f"{ZONE}/instances$")

    async def work(made: GcePlace) -> None:
        creating = asyncio.create_task(made.create(ONE, offer(), 7200))
        await until_seen(
            lambda: any(isinstance(met[0], Stuck) for met in google.faults.met), "it was asked for"
        )
        creating.cancel()
        await asyncio.gather(creating, return_exceptions=True)
        error = await raised(PlaceError, made.create(ONE, offer("us-central1-b"), 7200))
        assert error.transient
        assert "another zone" in str(error)

    use(google, tmp_path, work)
    assert not google.instances()


def test_an_old_disk_of_that_name_is_not_attached(google: StandIn, tmp_path: Path) -> None:
    """Ours is deleted first; somebody else's is left alone, and keeps the machine from being made."""

    async def work(made: GcePlace) -> None:
        await asked_for(google, made)
        instance = google.instances()[0]
        first = instance.disk
        assert first is not None
        instance.body["disks"][0]["autoDelete"] = False
        google.do(lambda: google.cloud.spawn(google.api.instances.delete(instance)))
        await until_seen(lambda: not google.instances(), "it is gone, and its disk is not")
        await asked_for(google, made)
        second = google.instances()[0].disk
        assert second is not None
        assert second.id != first.id
        await made.delete(ONE)
        first.labels = {}
        google.do(lambda: google.cloud.disks.update({first.path: first}))
        error = await raised(PlaceError, made.create(ONE, offer(), 7200))
        assert (error.scope, error.transient) == ("machine", True)
        assert "not ours" in str(error)
        assert not google.instances()

    use(google, tmp_path, work)


def test_a_machine_of_somebody_elses_name_is_left_alone(google: StandIn, tmp_path: Path) -> None:
    async def work(made: GcePlace) -> None:
        await asked_for(google, made)
        google.instances()[0].labels["evalfleet-home"] = "other"
        disk = google.instances()[0].disk
        assert disk is not None
        google.do(lambda: google.cloud.disks.pop(disk.path))
        error = await raised(PlaceError, made.create(ONE, offer(), 7200))
        assert (error.scope, error.transient) == ("machine", True)
        assert "not ours" in str(error)
        await made.delete(ONE)
        assert len(google.instances()) == 1

    use(google, tmp_path, work)


@pytest.mark.parametrize("off_s", [86_400.0, -3600.0])
def test_a_limit_that_google_does_not_keep_is_no_limit(google: StandIn, tmp_path: Path, off_s: float) -> None:
    """What Google plans is read back; a machine that would live on, or not long enough for what it is to do,
    is deleted, and the place is not used."""
    check, planned = google.api.instances.check, google.clock.now() + 7200 + off_s

    def forgetful(zone: str, body: dict[str, Any]) -> Any:
        type, scheduling = check(zone, body)
        return type, {**scheduling, "terminationTime": timestamp(planned)}

    google.api.instances.check = forgetful  # type: ignore[method-assign]
    error = refused(google, tmp_path)
    assert (error.scope, error.transient) == ("place", False)
    assert f"Google would end it at {timestamp(planned)}" in str(error)


@pytest.mark.parametrize("for_pool", [False, True])
def test_the_limit_of_a_machine_that_a_killed_controller_asked_for_is_read_back_too(
    google: StandIn, tmp_path: Path, *, for_pool: bool
) -> None:
    """By what its labels say: the clock of the computer that takes it up may be another one's. A pool's
    machine may have work on its disk, and is stopped."""

    async def make(made: GcePlace) -> None:
        await asked_for(google, made)

    async def adopt(made: GcePlace) -> PlaceError:
        google.instances()[0].ends_at = google.clock.now() + 90_000
        error = await raised(PlaceError, made.create(ONE, offer(), 9000))
        assert [each.status for each in google.instances()] == ["TERMINATED"] * for_pool
        await made.delete(ONE)
        return error

    use(google, tmp_path, make, for_pool=for_pool)
    error: PlaceError = use(google, tmp_path, adopt, for_pool=for_pool)
    assert (error.scope, error.transient) == ("place", False)
    assert "Google would end it" in str(error)
    assert not google.left()


def test_the_firewall_is_ours_alone_and_follows_ssh_from(google: StandIn, tmp_path: Path) -> None:
    async def make(made: GcePlace) -> None:
        await asked_for(google, made)

    async def look(made: GcePlace) -> None:
        await made.list("run")

    use(google, tmp_path, make, ssh_from=("203.0.113.7/32",))
    rules = {
        path.rsplit("/", 1)[-1]: rule for path, rule in google.cloud.firewalls.items() if HOME[:6] in path
    }
    deny, allow = rules["evalfleet-abc123-gce-deny"], rules["evalfleet-abc123-gce-ssh"]
    assert deny["denied"] == [{"IPProtocol": "all"}]
    assert allow["priority"] < deny["priority"] < 65534
    assert allow["sourceRanges"] == ["203.0.113.7/32"]
    assert allow["targetTags"] == deny["targetTags"] == google.instances()[0].tags
    assert HOME in deny["description"], "a firewall has no labels"
    use(google, tmp_path, look, ssh_from=("198.51.100.1/32",))
    path = next(path for path in google.cloud.firewalls if path.endswith("evalfleet-abc123-gce-ssh"))
    assert google.cloud.firewalls[path]["sourceRanges"] == ["198.51.100.1/32"]


def test_the_stand_in_takes_a_network_as_people_write_it(google: StandIn, tmp_path: Path) -> None:
    async def make(made: GcePlace) -> None:
        rule = {"name": "mine", "network": "global/networks/default", "denied": [{"IPProtocol": "all"}]}
        client = made._client
        await client.change("POST", f"{client.root}/global/firewalls", rule)

    use(google, tmp_path, make)
    (rule,) = (rule for path, rule in google.cloud.firewalls.items() if path.endswith("/mine"))
    assert rule["network"].endswith("/global/networks/default")
    assert rule["network"].count("projects/") == 1


def test_what_was_left_is_found_by_labels_alone_and_reaped(google: StandIn, tmp_path: Path) -> None:
    async def work(made: GcePlace) -> None:
        await asked_for(google, made)

    async def reap(made: GcePlace) -> None:
        (found,) = await made.belongings()
        assert (found.machine, found.home, found.owner, found.where) == (ONE, HOME, "tester", ZONE)
        assert found.expires_at is not None
        assert len(found.parts) == 2
        await made.reap(found)
        assert not await made.belongings()

    use(google, tmp_path, work)
    use(google, tmp_path / "other", reap, home_id="fedcba987654")
    assert not google.left()


def test_tokens_are_renewed_and_a_login_that_is_over_stops_the_place(google: StandIn, tmp_path: Path) -> None:
    """google-auth's own code signs with the key, and exchanges that at the key's token_uri."""

    async def work(made: GcePlace) -> None:
        await made.list("run")
        google.identity.revoke()
        await made.list("run")
        google.identity.revoke()
        google.identity.is_disabled = True
        error = await raised(PlaceError, made.list("run"))
        assert (error.scope, error.transient) == ("place", False)
        assert "gcloud auth application-default login" in str(error)

    use(google, tmp_path, work)


def test_a_workload_that_another_identity_provider_vouches_for_gets_in(
    google: StandIn, tmp_path: Path
) -> None:
    (tmp_path / "subject").write_text(WORKLOAD_TOKEN)
    given = {
        "type": "external_account",
        "audience": "//iam.googleapis.com/locations/global/workforcePools/p/providers/x",
        "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
        "token_url": json.loads(google.key.read_text())["token_uri"],
        "credential_source": {"file": str(tmp_path / "subject")},
    }
    (tmp_path / "key.json").write_text(json.dumps(given))
    key = {"GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / "key.json")}

    async def work(made: GcePlace) -> None:
        assert not await made.list("run")

    use(google, tmp_path, work, environ={**key, "GOOGLE_CLOUD_PROJECT": google.project})
    assert {status for *_, status in google.server.calls} == {200}


def test_a_machine_of_googles_gets_in_by_its_own_account(google: StandIn, tmp_path: Path) -> None:
    """By another process: google-auth reads the metadata server's address when it is imported."""
    there = urlsplit(google.anonymous_endpoint).netloc
    desk = GceDesk(google, tmp_path, inside=False, project=google.project)
    environ = {"GCE_METADATA_HOST": there, "GCE_METADATA_IP": there, "HOME": str(tmp_path)}
    desk.environ.pop("GOOGLE_APPLICATION_CREDENTIALS")
    found = desk.done("doctor", "gce", "--json", env=environ)
    checks = {each["name"]: each["verdict"] for each in json.loads(found.out)["gce"]}
    assert checks["credentials"] == "good"


@pytest.mark.parametrize(
    ("environ", "project", "zones"),
    [
        ({"GOOGLE_CLOUD_PROJECT": "one", "CLOUDSDK_CORE_PROJECT": "two"}, "one", None),
        ({"CLOUDSDK_CORE_PROJECT": "two", "CLOUDSDK_COMPUTE_ZONE": "us-west1-b"}, "two", ("us-west1-b",)),
        ({"CLOUDSDK_COMPUTE_REGION": "europe-west1"}, "chosen", ("europe-west1-b", "europe-west1-c")),
    ],
)
def test_project_and_zones_are_those_that_googles_own_tools_would_use(
    tmp_path: Path, environ: dict[str, str], project: str, zones: tuple[str, ...] | None
) -> None:
    configurations = tmp_path / ".config/gcloud/configurations"
    configurations.mkdir(parents=True)
    (configurations / "config_default").write_text("[core]\nproject = chosen\n")
    context = PlaceContext(tmp_path, HOME, {}, {"HOME": str(tmp_path), **environ}, tmp_path)
    account = account_of("gce", GceSettings(ssh_from=("*",)), context)
    assert account.project == project
    assert account.zones[:2] == (zones or ("us-central1-a", "us-central1-b"))
    given = GceSettings(ssh_from=("*",), project="mine", zones=("us-east1-c",))
    mine = account_of("gce", given, context)
    assert (mine.project, mine.zones) == ("mine", ("us-east1-c",)), "the settings come first"


# -- doctor ------------------------------------------------------------------------------------------


def test_doctor_finds_nothing_wrong(google: StandIn, tmp_path: Path) -> None:
    found = examine(google, tmp_path, workers=5)
    assert not [check for check in found.values() if check.verdict == "bad"], found
    assert found["workers"].verdict == "good"


def test_doctor_tells_what_is_scarce_and_how_to_mend_it(google: StandIn, tmp_path: Path) -> None:
    google.cloud.catalog.limits["us-central1", "IN_USE_ADDRESSES"] = 3
    google.cloud.catalog.limits["us-central1", "SSD_TOTAL_GB"] = 100
    google.cloud.catalog.limits["", "CPUS_ALL_REGIONS"] = 8
    found = examine(google, tmp_path, workers=5)
    assert found["workers"].verdict == "bad"
    assert "SSD_TOTAL_GB" in found["workers"].remedy
    assert found["SSD_TOTAL_GB in us-central1"].verdict == "bad"
    google.cloud.catalog.limits["us-central1", "SSD_TOTAL_GB"] = 10_000
    found = examine(google, tmp_path, workers=5)
    assert found["workers"].found.startswith("2 of 5 machines")
    assert "CPUS_ALL_REGIONS" in found["workers"].remedy


@pytest.mark.parametrize(
    ("limits", "settings", "told"),
    [
        ({"CPUS": 9}, {}, "2 of 5 machines"),
        ({"N2_CPUS": 4}, {"types": ("n2-standard-4",)}, "1 of 5 machines"),
        ({"PREEMPTIBLE_CPUS": 12, "CPUS": 4}, {"spot": True}, "3 of 5 machines"),
        ({"PREEMPTIBLE_CPUS": 0, "CPUS": 8}, {"spot": True}, "2 of 5 machines"),
        ({"IN_USE_ADDRESSES": 3}, {}, "3 of 5 machines"),
        ({"IN_USE_ADDRESSES": 0}, {"public_ip": False}, ""),
        ({"INSTANCES": 4}, {}, "4 of 5 machines"),
        ({"SSD_TOTAL_GB": 300}, {}, "2 of 5 machines"),
        ({"DISKS_TOTAL_GB": 128}, {"disk": "pd-standard"}, "1 of 5 machines"),
        ({"HDB_TOTAL_GB": 300}, {"types": ("n4-standard-4",), "prices": N4}, "2 of 5 machines"),
        ({"HDB_TOTAL_IOPS": 9_000}, {"types": ("n4-standard-4",), "prices": N4}, "3 of 5 machines"),
        ({"HDB_TOTAL_GB": 0}, {"types": ("e2-standard-4", "n4-standard-4"), "prices": N4}, ""),
    ],
)
def test_every_quota_that_machines_count_in_is_compared_beforehand(
    google: StandIn, tmp_path: Path, limits: dict[str, int], settings: dict[str, Any], told: str
) -> None:
    google.cloud.catalog.limits |= {("us-central1", metric): many for metric, many in limits.items()}
    found = examine(google, tmp_path, workers=5, **settings)["workers"]
    assert (found.verdict, found.found[: len(told)]) == ("warn" if told else "good", told), found
    scarce = next(iter(limits))
    assert not told or ("vCPUs" if scarce.endswith("CPUS") else scarce) in found.remedy


def test_a_quota_of_spot_machines_that_is_used_up_is_used_up() -> None:
    e2 = type_of("e2-standard-4")
    assert e2 is not None
    used_up = {"metric": "PREEMPTIBLE_CPUS", "limit": 8.0, "usage": 8.0}
    free = free_of({"quotas": [used_up, {"metric": "CPUS", "limit": 24.0, "usage": 0.0}]})
    assert quotas_of(e2, free, spot=True) == ("PREEMPTIBLE_CPUS",)
    assert free["PREEMPTIBLE_CPUS"] == 0


def test_doctor_says_the_gcloud_command_that_mends_each_finding(google: StandIn, tmp_path: Path) -> None:
    google.do(google.cloud.networks.clear)
    google.cloud.catalog.unsold.add((ZONE, "e2-standard-4"))
    found = examine(google, tmp_path, image="projects/p/global/images/nothing", zones=(ZONE, "us-central1-z"))
    for name, command in {
        "network": "gcloud compute networks create default",
        "image": "gcloud compute images list",
        f"types in {ZONE}": "gcloud compute machine-types list",
        "zones of us-central1": "gcloud compute zones list",
    }.items():
        assert found[name].verdict in ("bad", "warn"), found
        assert command in found[name].remedy
    needs = Needs(cpus=4, nested_virtualization=True)
    assert "n2-standard-4" in examine(google, tmp_path, needs=needs)["nested virtualisation"].remedy
    google.faults.api_is_off = True
    (only,) = examine(google, tmp_path).values()
    assert (only.name, only.verdict) == ("credentials", "bad")
    assert "gcloud services enable compute.googleapis.com" in only.remedy


# -- bad input: nothing is asked -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"project": ""}, "no project is known"),
        ({"project": "My Project"}, "no id of a project"),
        ({"ssh_from": ()}, "`ssh_from` is not set"),
        ({"zones": ("europe-west1-b",), "regions": ("us-central1",)}, "in none of `regions`"),
        ({"types": ("e2-standard-4",), "nested": True}, "cannot run virtual machines"),
        ({"types": ("huge-1",)}, "no machine type"),
        ({"types": ("m3-ultramem-32",)}, "price"),
        ({"owner": "Jane Doe"}, "makes no label"),
        ({"labels": {"Team": "x"}}, "small letters"),
        ({"image": "ubuntu"}, "`image` must be"),
        ({"endpoint": "http://localhost/"}, "https"),
    ],
)
def test_bad_settings_are_one_line_and_nothing_is_spent(
    google: StandIn, tmp_path: Path, given: dict[str, Any], why: str
) -> None:
    environ = {key: value for key, value in google.environment.items() if "CREDENTIALS" not in key}
    environ = {**environ, "HOME": str(tmp_path), "GOOGLE_CLOUD_PROJECT": ""}
    with pytest.raises(RequestError, match=re.escape(why)) as told:
        place(google, tmp_path, environ=environ, **given)
    assert "\n" not in str(told.value)
    assert not google.server.calls


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "cannot be read"),
        ("{", "no JSON"),
        ('{"type": "api_key"}', "cannot log in"),
        ('{"installed": {"client_id": "x"}}', "cannot log in"),
    ],
)
def test_credentials_of_the_wrong_kind_are_told_before_anything_is_asked(
    google: StandIn, tmp_path: Path, text: str | None, why: str
) -> None:
    key = tmp_path / "key.json"
    if text is not None:
        key.write_text(text)
    with pytest.raises(RequestError, match=why):
        place(
            google,
            tmp_path,
            environ={"GOOGLE_APPLICATION_CREDENTIALS": str(key), "GOOGLE_CLOUD_PROJECT": "p"},
        )
    assert not google.server.calls


def switch_off(google: StandIn) -> None:
    google.faults.api_is_off = True


def disable_the_account(google: StandIn) -> None:
    google.identity.is_disabled = True


def take_the_rights(google: StandIn) -> None:
    google.faults.denied.add("compute.projects.get")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (switch_off, "gcloud services enable compute.googleapis.com"),
        (disable_the_account, "gcloud auth application-default login"),
        (take_the_rights, "gcloud projects add-iam-policy-binding"),
    ],
)
def test_a_run_that_google_does_not_let_in_is_one_line_and_nothing_is_begun(
    google: StandIn, tmp_path: Path, spoil: Callable[[StandIn], None], says: str
) -> None:
    spoil(google)
    desk = GceDesk(google, tmp_path, inside=False)
    desk.bench(1)
    desk("run", "b.toml", "--on", "gce", "--name", "r").failed(4, "place 'gce'", says)
    assert not [call for call in google.server.calls if call[0] != "GET" and not call[1].endswith("/token")]
    assert not google.meters.spans
    assert not (desk.home / "r").exists()


def test_a_run_without_quota_ends_and_nothing_is_spent(google: StandIn, tmp_path: Path) -> None:
    google.cloud.catalog.limits["us-central1", "CPUS"] = 0
    desk = GceDesk(google, tmp_path, inside=False)
    desk.bench(1)
    done = desk.done("run", "b.toml", "--on", "gce", "--name", "r", "--canary", "0", code=4)
    told = [line for line in done.said.splitlines() if "CPUS" in line]
    assert told, done
    assert all("ask for more: https://console.cloud.google.com/iam-admin/quotas" in line for line in told[:1])
    assert not google.meters.spans, "not a second of a machine or a disk"
    assert not google.left()
