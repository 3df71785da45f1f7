"""The place `azure_vm`, as far as it needs no Azure: settings, offers, names, expiries, refusals."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncssh
import pytest

from evalfleet.errors import RequestError
from evalfleet.model import MachineId, Needs, Offer
from evalfleet.places.azure import AzurePlace, AzureSettings
from evalfleet.places.azure.answers import fault_of
from evalfleet.places.azure.arm import login_fault
from evalfleet.places.azure.names import moment, names_of, plain, stamp
from evalfleet.places.azure.prices import FILE, AzurePriceBook, disk
from evalfleet.places.azure.sizes import size_of
from evalfleet.places.azure.template import (
    API,
    COMPUTE,
    VM,
    cloud_config,
    daily,
    deployment,
    literal,
    names_standard,
    shutdown_at,
)
from evalfleet.places.vm.place import CallRate
from evalfleet.places.vm.price_book import save_prices
from evalfleet.places.vm.ssh_access import SshKeys
from evalfleet.ports import PlaceContext, Price, PriceTable
from tests.cloud.templates import build

ENVIRON = {"AZURE_SUBSCRIPTION_ID": "s"}
OPEN: dict[str, Any] = {"ssh_from": ("192.0.2.7/32",)}


def place(tmp_path: Path, environ: dict[str, str] = ENVIRON, **settings: Any) -> AzurePlace:
    context = PlaceContext(tmp_path, "abc123", {}, environ, tmp_path)
    return AzurePlace.make("azure", AzureSettings(**settings), context)


def offered(made: AzurePlace, needs: Needs) -> Sequence[Offer]:
    return asyncio.run(made.offers(needs))


# -- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "`ssh_from` is not set"),
        ({"ssh_from": ("home",)}, "'home' is no address or range"),
        ({**OPEN, "sizes": ()}, "must not be empty"),
        ({**OPEN, "sizes": ("D4s_v5",)}, "D4s_v5 is no size"),
        ({**OPEN, "sizes": ("Standard_F8s_v2",)}, "the price of Standard_F8s_v2 is not known"),
        ({**OPEN, "sizes": ("Standard_D4_v5",), "prices": {"Standard_D4_v5": 0.1}}, "Premium disks"),
        ({**OPEN, "regions": ("East US",)}, "'East US' must be written as 'eastus'"),
        ({**OPEN, "regions": ("west-us-2",)}, "'west-us-2' must be written as 'westus2'"),
        ({"ssh_from": ("2001:db8::7",)}, "'2001:db8::7' is IPv6"),
        ({**OPEN, "user": "admin"}, "Azure refuses the user 'admin'"),
        ({**OPEN, "user": "Ada Lovelace"}, "Azure refuses the user"),
        ({**OPEN, "tags": {"windows-team": "x"}}, "names that begin with 'windows' are taken"),
        ({**OPEN, "tags": {"evalfleet-home": "x"}}, "names that begin with 'evalfleet-' are taken"),
        ({**OPEN, "tags": {"team": "x" * 257}}, "more than 256 characters"),
        ({**OPEN, "tags": {"team": "x", "Team": "y"}}, "upper and lower case only"),
        ({**OPEN, "tags": {f"t{n}": "x" for n in range(45)}}, "no more than 44"),
        ({**OPEN, "name": "vm"}, "must have {machine} in it"),
        ({**OPEN, "image": "ubuntu"}, "`image` must be"),
        ({**OPEN, "subnet": "net1"}, "must be a subnet's id"),
        ({**OPEN, "tags": {"a/b": "c"}}, "tag 'a/b' cannot be used"),
        ({**OPEN, "endpoint": "http://arm"}, "must begin with https://"),
        ({**OPEN, "ca": "nowhere.pem"}, "is no file"),
    ],
)
def test_wrong_settings_are_told_before_anything_is_asked(
    tmp_path: Path, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(RequestError) as told:
        place(tmp_path, **settings)
    assert says in str(told.value)


def test_machines_without_a_public_address_need_no_ssh_from(tmp_path: Path) -> None:
    assert place(tmp_path, public_ip=False).name == "azure"


def test_an_empty_secret_of_ci_is_told_beforehand(tmp_path: Path) -> None:
    some = {**ENVIRON, "AZURE_TENANT_ID": "t", "AZURE_CLIENT_ID": "c", "AZURE_CLIENT_SECRET": ""}
    with pytest.raises(RequestError, match="AZURE_CLIENT_SECRET is empty although AZURE_TENANT_ID is set"):
        place(tmp_path, some, **OPEN)
    none = {**ENVIRON, **dict.fromkeys(("AZURE_TENANT_ID", "AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET"), "")}
    assert place(tmp_path, none, **OPEN).name == "azure", "a variable that is empty is not set"


OFFLINE = "ERROR: HTTPSConnectionPool(host='login.microsoftonline.com', port=443): Max retries exceeded"
NO_LOGIN = """DefaultAzureCredential failed to retrieve a token from the included credentials.
Attempted credentials:
\tManagedIdentityCredential: ManagedIdentityCredential authentication unavailable: timed out
\tAzureCliCredential: """


@pytest.mark.parametrize(
    ("said", "transient"),
    [
        (OFFLINE, True),
        ("Timed out waiting for Azure CLI", True),
        (NO_LOGIN + "Timed out waiting for Azure CLI", True),
        ("AADSTS90033: A transient error has occurred. Please try again.", True),
        (NO_LOGIN + "Please run 'az login' to set up an account", False),
        (NO_LOGIN + "Azure CLI not found on path", False),
        ("AADSTS700082: The refresh token has expired due to inactivity.", False),
        ("AADSTS7000215: Invalid client secret provided.", False),
    ],
)
def test_a_login_that_hiccups_is_no_lost_login(said: str, transient: bool) -> None:
    error = login_fault(Exception(said)).refusal("here")
    assert (error.transient, error.scope) == (transient, "place")
    assert transient or "az login" in str(error)


def test_azures_clock_and_its_limits_by_machine_are_kept() -> None:
    calls = CallRate(10.0, 4 / 60)
    assert [calls.wait_s(100.0) for _ in range(10)] == [0.0] * 10
    assert calls.wait_s(100.0) == pytest.approx(15.0)
    assert calls.wait_s(100.0) == pytest.approx(30.0), "those that wait queue up"
    assert calls.wait_s(100.0 + 600.0) == 0.0


def test_the_subscription_is_that_of_az(tmp_path: Path) -> None:
    profile = {"subscriptions": [{"id": "other"}, {"id": "chosen", "isDefault": True}]}
    (tmp_path / "azureProfile.json").write_text("\ufeff" + json.dumps(profile), "utf-8")
    assert place(tmp_path, {"AZURE_CONFIG_DIR": str(tmp_path)}, **OPEN)._account.subscription == "chosen"
    with pytest.raises(RequestError, match="no subscription is known"):
        place(tmp_path, {"AZURE_CONFIG_DIR": str(tmp_path / "none")}, **OPEN)


def test_microsofts_libraries_are_loaded_only_when_used() -> None:
    code = (
        "import sys; from evalfleet.places.azure import AzurePlace; "
        "print([name for name in sys.modules if name.split('.')[0] in ('azure', 'aiohttp', 'asyncssh')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# -- offers --------------------------------------------------------------------------------------


def test_offers_are_what_fits_and_cheapest_first(tmp_path: Path) -> None:
    sizes = ("Standard_D8s_v5", "Standard_D2s_v5", "Standard_D4ds_v5", "Standard_D4s_v5")
    made = place(tmp_path, sizes=sizes, regions=("centralus", "eastus"), **OPEN)
    offers = offered(made, Needs(cpus=4, memory_gb=16, disk_gb=100, nested_virtualization=True))
    assert [(each.size, each.region) for each in offers] == [
        ("Standard_D4s_v5", "eastus"),
        ("Standard_D4s_v5", "centralus"),
        ("Standard_D4ds_v5", "eastus"),
        ("Standard_D4ds_v5", "centralus"),
        ("Standard_D8s_v5", "eastus"),
        ("Standard_D8s_v5", "centralus"),
    ]
    assert not offered(made, Needs(disk_gb=129)), "the disk is smaller than what is needed"
    assert not offered(made, Needs(cpus=16))


def test_an_hour_has_its_disk_and_its_address_in_its_price(tmp_path: Path) -> None:
    made = place(tmp_path, sizes=("Standard_D4ds_v5",), regions=("eastus",), **OPEN)
    (offer,) = offered(made, Needs())
    assert offer.cost.usd_per_hour == pytest.approx(0.226 + 19.71 / 730 + 0.005, abs=1e-5)
    cheap = place(
        tmp_path, sizes=("Standard_D4ds_v5",), regions=("eastus",), prices={"Standard_D4ds_v5": 0.1}, **OPEN
    )
    (offer,) = offered(cheap, Needs())
    assert offer.cost.usd_per_hour == pytest.approx(0.1 + 19.71 / 730 + 0.005, abs=1e-5)


def test_zones_and_the_ceiling_shape_offers(tmp_path: Path) -> None:
    sizes = ("Standard_D4s_v5", "Standard_D16s_v5")
    made = place(tmp_path, sizes=sizes, regions=("eastus",), zones=("1", "2"), max_vcpus=9, **OPEN)
    offers = offered(made, Needs())
    assert [(each.size, each.region, each.capacity) for each in offers] == [
        ("Standard_D4s_v5", "eastus-1", 2),
        ("Standard_D4s_v5", "eastus-2", 2),
    ]


@pytest.mark.parametrize(
    ("name", "cpus", "memory", "local"),
    [
        ("Standard_D4ds_v5", 4, 16, True),
        ("Standard_D8s_v3", 8, 32, True),
        ("Standard_E2s_v5", 2, 16, False),
        ("Standard_D8ds_v6", 8, 32, True),
        ("Standard_F16s_v2", 16, 32, False),
        ("Standard_D4lds_v5", 4, 8, True),
        ("Standard_NC4as_T4_v3", 4, None, False),
        ("Standard_E4-2ds_v5", 4, 32, True),
    ],
)
def test_sizes(name: str, cpus: int, memory: float | None, local: bool) -> None:
    size = size_of(name)
    assert size is not None
    assert (size.cpus, size.memory_gb, size.series.local_disk) == (cpus, memory, local)


def test_nested_virtualisation_is_what_azures_pages_say() -> None:
    can = [
        "D4as_v5",
        "D4ads_v6",
        "E8s_v3",
        "E8as_v7",
        "FX4mds",
        "FX12mds_v2",
        "F8s_v2",
        "L8s_v3",
        "M64ms",
        "M16bs_v4",
    ]
    cannot = [
        "D4as_v4",
        "D4a_v4",
        "E4as_v4",
        "E4a_v4",
        "D4ps_v6",
        "DC4as_v5",
        "L8s_v2",
        "M12s_v3",
        "M48bds_v3",
        "M208s_v2",
        "B4ms",
    ]
    sizes = {name: size_of(f"Standard_{name}") for name in (*can, *cannot)}
    assert [name for name, size in sizes.items() if size is not None and size.series.nested] == can


def test_any_size_is_offered_whose_price_is_given_or_fetched(tmp_path: Path) -> None:
    sizes = ("Standard_D8ds_v6", "Standard_NC4as_T4_v3", "Standard_D4ps_v5")
    given = {"Standard_D8ds_v6": 0.5, "Standard_NC4as_T4_v3": 0.526, "Standard_D4ps_v5@eastus": 0.15}
    made = place(tmp_path, sizes=sizes, regions=("eastus", "westus2"), prices=given, **OPEN)
    offers = offered(made, Needs(cpus=4))
    assert ("Standard_D4ps_v5", "westus2") not in {(each.size, each.region) for each in offers}, "no price"
    assert {each.size for each in offers} == set(sizes)
    assert {each.size for each in offered(made, Needs(nested_virtualization=True))} == {"Standard_D8ds_v6"}
    table = PriceTable("2026-11-01", "list", (Price("Standard_F8s_v2", "eastus", 0.338, 0.05),))
    save_prices(tmp_path / FILE, table)
    fetched = place(tmp_path, sizes=("Standard_F8s_v2",), regions=("eastus",), **OPEN)
    (offer,) = offered(fetched, Needs(cpus=8, memory_gb=16))
    assert offer.cost.usd_per_hour > 0.338


def test_a_pause_for_maintenance_is_no_silence(tmp_path: Path) -> None:
    """Azure pauses machines for up to half a minute to maintain what they run on."""
    (offer, *_) = offered(place(tmp_path, **OPEN), Needs())
    assert offer.life.lost_s >= 40


def test_a_disk_is_billed_as_the_next_larger_one() -> None:
    book = AzurePriceBook(None)
    assert disk("Premium_LRS", 100) == disk("Premium_LRS", 128)
    twice = 2 * book.extra(disk("Premium_LRS", 2048), "eastus").usd
    assert book.extra(disk("Premium_LRS", 4096), "eastus").usd == pytest.approx(twice, abs=1e-5)


# -- names and times -----------------------------------------------------------------------------


def test_names_fit_azure_and_do_not_collide() -> None:
    assert plain("pool-abc123-1") == "pool-abc123-1"
    ids = ["Pool-abc123-1", "pool-abc123-1", "p.ool-abc123-1", "p_ool-abc123-1", "x" * 90, "x" * 91]
    made = {plain(each) for each in ids}
    assert len(made) == len(ids)
    assert all(len(each) <= 50 and each == each.lower() and "_" not in each for each in made)
    assert names_of(MachineId("p-abc123-1"), "corp-{machine}").vm == "corp-p-abc123-1"


def test_times_in_tags_can_be_read_back() -> None:
    assert moment(stamp(1_800_000_000.7)) == 1_800_000_000
    assert moment("tomorrow") is None


NOON = datetime(2026, 11, 15, 12, 0, 30, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("expires_s", "time"),
    [
        (4 * 3600, "1600"),  # by the minute before, never after
        (10, "1232"),  # sooner than half an hour Azure cannot
        (23 * 3600, "1100"),
        (14 * 86400, "1130"),  # a daily time comes within a day
    ],
)
def test_the_switch_is_set_to_the_expiry_as_far_as_a_daily_time_can(expires_s: float, time: str) -> None:
    at = shutdown_at(NOON, expires_s)
    assert daily(at) == time
    assert NOON + 1800 < at < NOON + 86400
    assert expires_s < 1860 or at <= NOON + expires_s


# -- refusals ------------------------------------------------------------------------------------


def deployment_error(code: str, message: str = "m", **more: Any) -> dict[str, Any]:
    inner = {"code": code, "message": message, **more}
    middle = {"code": "ResourceDeploymentFailure", "message": "it failed", "details": [inner]}
    return {"code": "DeploymentFailed", "message": "see details", "details": [middle]}


def hidden_error(outside: str, code: str, message: str = "m") -> dict[str, Any]:
    """As deployments show it below their API version 2022-09-01."""
    text = json.dumps({"status": "Failed", "error": deployment_error(code, message)}, indent=2)
    detail = {"code": outside, "message": text.replace("\n", "\r\n")}
    return {"code": "DeploymentFailed", "message": "see details", "details": [detail]}


REGIONAL = "exceeding approved Total Regional Cores quota"
FAMILY = "exceeding approved standardDDSv5Family Cores quota"


@pytest.mark.parametrize(
    ("status", "code", "message", "transient", "scope"),
    [
        (409, "AllocationFailed", "m", False, "offer"),
        (409, "SkuNotAvailable", "m", False, "offer"),
        (409, "OperationNotAllowed", FAMILY, False, "family"),
        (409, "OperationNotAllowed", REGIONAL, False, "region"),
        (409, "PublicIPCountLimitReached", "more than 10 public IP addresses", False, "region"),
        (400, "IPv4StandardSkuPublicIpCountLimitReached", "m", False, "region"),
        (409, "StaticPublicIPCountLimitReached", "m", False, "region"),
        (409, "StandardSkuPublicIPCountLimitReached", "m", False, "region"),
        (403, "LinkedAuthorizationFailed", "m", False, "place"),
        (403, "RequestDisallowedByAzure", "m", False, "region"),
        (409, "DeploymentQuotaExceeded", "m", False, "place"),
        (409, "ScopeLocked", "m", False, "place"),
        (401, "InvalidAuthenticationTokenTenant", "m", False, "place"),
        (409, "Conflict", "m", True, "machine"),
        (409, "PlatformImageNotFound", "m", False, "place"),
        (401, "InvalidAuthenticationToken", "m", False, "place"),
        (403, "AuthorizationFailed", "m", False, "place"),
        (429, "TooManyRequests", "m", True, "place"),
        (503, "ServerError", "m", True, "place"),
        (400, "InvalidParameter", "m", False, "offer"),
    ],
)
def test_what_an_error_means(status: int, code: str, message: str, transient: bool, scope: str) -> None:
    """The same, whether Azure tells what is inside as JSON, or as a text that is JSON."""
    as_text = hidden_error("Conflict", code, message)
    for told in (deployment_error(code, message), as_text):
        error = fault_of(status, told).refusal("here")
        assert (error.transient, error.scope) == (transient, scope)
        assert code in str(error)
        assert "{" not in str(error)
        assert code == "Conflict" or "Conflict" not in str(error)


@pytest.mark.parametrize(
    "code",
    ["AllocationFailed", "ZonalAllocationFailed", "OverconstrainedAllocationRequest", "SkuNotAvailable"],
)
def test_no_room_does_not_read_as_try_again(code: str) -> None:
    theirs = "Allocation failed. Please try again later or remove some constraints and retry."
    error = fault_of(409, hidden_error("Conflict", code, theirs)).refusal("Standard_D4s_v5 in eastus")
    assert (error.transient, error.scope) == (False, "offer")
    assert str(error).startswith(f"Standard_D4s_v5 in eastus: Azure has no room for it there ({code})")
    assert "try again" not in str(error)
    assert "retry" not in str(error)


def test_a_text_that_is_no_error_stays_as_it_is() -> None:
    for message in ("{not json", '{"a": 1}', "[1]"):
        assert message in str(fault_of(409, {"code": "Odd", "message": message}).refusal("here"))


def test_full_quota_may_be_free_again_when_machines_of_ours_use_it() -> None:
    fault = fault_of(409, deployment_error("OperationNotAllowed", FAMILY))
    assert fault.refusal("here", have_some=True).transient
    assert "Microsoft_Azure_Capacity" in str(fault.refusal("here"))


def test_a_policy_that_denies_is_named_and_is_for_good() -> None:
    info = {"type": "PolicyViolation", "info": {"policyAssignmentDisplayName": "only-in-europe"}}
    fault = fault_of(403, {"error": deployment_error("RequestDisallowedByPolicy", additionalInfo=[info])})
    error = fault.refusal("here")
    assert not error.transient
    assert "'only-in-europe'" in str(error)


def test_retry_after_is_kept() -> None:
    assert fault_of(429, {"error": {"code": "Busy"}}, "17").refusal("here").retry_after_s == 17
    assert fault_of(502, "<html>", "soon").refusal("here").retry_after_s is None


# -- templates -----------------------------------------------------------------------------------


def test_the_host_key_survives_the_way_through_custom_data(tmp_path: Path) -> None:
    pair = SshKeys(tmp_path, "").of_host(MachineId("p-abc123-1"))
    config = cloud_config(pair.private, pair.public)
    block = config.split("ed25519_private: |\n")[1].split("  ed25519_public: ")[0]
    private = "\n".join(line.removeprefix("    ") for line in block.splitlines())
    assert asyncssh.import_private_key(private).export_public_key().decode().strip() == pair.public


def test_tags_are_no_expressions() -> None:
    assert literal("[secret()]") == "[[secret()]"
    assert literal("plain") == "plain"


def test_each_type_is_spoken_to_by_a_version_that_was_looked_at() -> None:
    """Another version may mean another thing by the same words: read what it says before you change one."""
    assert API == {
        "Microsoft.Resources/deployments": "2021-04-01",
        "Microsoft.Compute/virtualMachines": "2024-07-01",
        "Microsoft.Compute/disks": "2024-03-02",
        "Microsoft.Network/networkInterfaces": "2024-07-01",
        "Microsoft.Network/publicIPAddresses": "2024-07-01",
        "Microsoft.Network/networkSecurityGroups": "2024-07-01",
        "Microsoft.Network/virtualNetworks": "2024-07-01",
        "Microsoft.DevTestLab/schedules": "2018-09-15",
    }
    resources: list[dict[str, Any]] = deployment(build("Standard"))["properties"]["template"]["resources"]
    assert {each["type"]: each["apiVersion"] for each in resources}.items() <= API.items()


def test_a_plain_machine_names_no_security_type() -> None:
    """Azure refuses "Standard" by name before 2025-11-01; from then on who names none gets TrustedLaunch."""
    assert COMPUTE == "2024-07-01"
    assert [names_standard(version) for version in (COMPUTE, "2025-10-31", "2025-11-01")] == [
        False,
        False,
        True,
    ]
    for security_type, profile in (
        ("Standard", None),
        ("TrustedLaunch", {"securityType": "TrustedLaunch"}),
    ):
        resources: list[dict[str, Any]] = deployment(build(security_type))["properties"]["template"][
            "resources"
        ]
        (vm,) = [each for each in resources if each["type"] == VM]
        assert vm["properties"].get("securityProfile") == profile
