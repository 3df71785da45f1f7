"""Which answers of Azure Machine Learning are worth another try, and what is to be done about the others."""

from __future__ import annotations

import pytest

from evalfleet.channels.mail.boxes import PilotEnd, PilotMarks, PilotStart
from evalfleet.channels.supervisor.pilot import NO_KVM
from evalfleet.model import Machine, MachineId
from evalfleet.places.azure.answers import fault_of
from evalfleet.places.azure_ml.instances import STATES
from evalfleet.places.azure_ml.service import STAGES, MlJob, MlNode, MlSighting, StagePatience, machine_of

ONE = MachineId("r-abc123-1")
PATIENCE = StagePatience(1200.0, 600.0)


@pytest.mark.parametrize(
    ("status", "code", "transient", "scope", "remedy"),
    [
        (0, "NoAnswer", True, "place", ""),
        (408, "RequestTimeout", True, "place", ""),
        (429, "TooManyRequests", True, "place", ""),
        (500, "InternalServerError", True, "place", ""),
        (502, "BadGateway", True, "place", ""),
        (503, "ServiceUnavailable", True, "place", ""),
        (504, "GatewayTimeout", True, "place", ""),
        (409, "Conflict", True, "machine", ""),
        (409, "ComputeBeingDeleted", True, "machine", ""),
        (409, "Canceled", True, "machine", ""),
        (401, "ExpiredAuthenticationToken", False, "place", "az login"),
        (401, "InvalidAuthenticationTokenTenant", False, "place", "az login --tenant"),
        (403, "AuthorizationFailed", False, "place", "role Contributor"),
        (403, "KeyBasedAuthenticationNotPermitted", False, "place", "Storage Blob Data Contributor"),
        (403, "StorageLoginRefused", False, "place", "Storage Blob Data Contributor"),
        (404, "SubscriptionNotFound", False, "place", "check `subscription`"),
        (409, "MissingSubscriptionRegistration", False, "place", "az provider register"),
        (409, "ScopeLocked", False, "place", "az lock"),
        (400, "ClusterCoreQuotaReached", False, "family", "the studio's page Quota"),
        (409, "AllocationFailed", False, "offer", "other sizes"),
        (409, "SkuNotAvailable", False, "offer", "other sizes"),
        (400, "UserError", False, "", ""),
        (400, "BadArgument", False, "", ""),
    ],
)
def test_answers_of_the_api(status: int, code: str, transient: bool, scope: str, remedy: str) -> None:
    refusal = fault_of(status, {"error": {"code": code, "message": "words"}}).refusal("ml")
    assert refusal.transient == transient, refusal
    assert remedy in str(refusal)
    if not transient and scope:
        assert refusal.scope == scope


def ended(words: str = "", **more: object) -> Machine:
    """The machine of a job that has failed, with these words in its log."""
    job = MlJob("j", "failed", "c", {})
    marks = PilotMarks(allocated=0.0, **more)  # type: ignore[arg-type]
    return machine_of(MlSighting(ONE, job, True, marks, ended_at=60.0, words=words), 100.0, PATIENCE)


@pytest.mark.parametrize(
    ("words", "permanent", "told"),
    [
        ("manifest for docker.io/a/b:1 not found: manifest unknown", True, "name an `image`"),
        ("Error response from daemon: pull access denied for a/b", True, "name an `image`"),
        ("unauthorized: authentication required", True, "name an `image`"),
        ("repository does not exist or may require docker login", True, "name an `image`"),
        ("invalid reference format", True, "name an `image`"),
        ("evalfleet: the image has no python3", True, "Python 3.8 or later"),
        ("evalfleet: python3 of the image is older than 3.8", True, "with a later one"),
        ('adding custom device "/dev/kvm": no such file or directory', True, "name other `sizes`"),
        ("toomanyrequests: You have reached your pull rate limit", False, "toomanyrequests"),
        ("net/http: TLS handshake timeout", False, "TLS handshake"),
        ("received unexpected HTTP status: 503 Service Unavailable", False, "503"),
        ("dial tcp: lookup mcr.microsoft.com: no such host", False, "no such host"),
        ("failed to register layer: no space left on device", False, "no space left"),
        ("Killed", False, "Killed"),
        ("", False, "failed before its container began"),
    ],
)
def test_containers_that_did_not_begin(words: str, permanent: bool, told: str) -> None:
    """Without the name of a start, the machine's place does not try it again."""
    machine = ended(words)
    assert machine.phase == "gone"
    assert told in machine.detail
    assert bool(machine.start) != permanent


@pytest.mark.parametrize(
    ("why", "code", "phase"),
    [
        ("evicted", 0, "evicted"),
        ("expired", 0, "gone"),
        ("stopped", 0, "gone"),
        ("/dev/kvm: no", NO_KVM, "gone"),
    ],
)
def test_pilots_that_ended(why: str, code: int, phase: str) -> None:
    begun = None if code else PilotStart("s", "n", 0.0)
    machine = ended(start=begun, end=PilotEnd(why, code, 50.0, 50.0))
    assert machine.phase == phase
    assert bool(machine.start) != bool(code)


@pytest.mark.parametrize("status", sorted(STAGES))
def test_no_status_is_borne_for_ever(status: str) -> None:
    """Whatever Azure says, a job whose pilot has not begun is over, or given up by one limit or another."""
    job = MlJob("j", status, "c", {})
    machine = machine_of(MlSighting(ONE, job, True, PilotMarks(), since=0.0), 1e6, PATIENCE)
    assert machine.phase in ("gone", "queued"), "`queued` ends with `queue_s`"
    assert machine.detail.startswith(f"Azure ML: {status}")


@pytest.mark.parametrize(
    ("status", "phase"),
    [
        ("running", "up"),
        ("notresponding", "up"),
        ("unknown", "up"),
        ("a word that is new", "up"),
        ("queued", "evicted"),
        ("preparing", "evicted"),
        ("starting", "evicted"),
        ("finalizing", "gone"),
        ("cancelrequested", "gone"),
        ("completed", "gone"),
    ],
)
def test_statuses_of_a_job_whose_pilot_has_begun(status: str, phase: str) -> None:
    """Its own beat counts, unless Azure says that the job is over or waits for another node."""
    marks = PilotMarks(allocated=0.0, start=PilotStart("s", "n", 0.0))
    machine = machine_of(MlSighting(ONE, MlJob("j", status, "c", {}), True, marks), 10.0, PATIENCE)
    assert machine.phase == phase


@pytest.mark.parametrize("status", ["queued", "preparing", "starting"])
def test_a_job_whose_pilot_has_begun_since_its_status_was_asked_for_is_up(status: str) -> None:
    marks = PilotMarks(allocated=0.0, start=PilotStart("s", "n", 0.0))
    seen = MlSighting(ONE, MlJob("j", status, "c", {}), True, marks, has_just_begun=True)
    machine = machine_of(seen, 10.0, PATIENCE)
    assert (machine.phase, machine.start, machine.ran_s) == ("up", "j.1", 10.0)


def test_an_unusable_node_is_worth_another_one() -> None:
    job = MlJob("j", "running", "c", {})
    marks = PilotMarks(allocated=0.0, start=PilotStart("s", "n", 0.0))
    machine = machine_of(MlSighting(ONE, job, True, marks, MlNode("n1", "unusable")), 10.0, PATIENCE)
    assert (machine.phase, bool(machine.start)) == ("gone", True)


def test_states_of_instances_are_in_one_class_each() -> None:
    assert set(STATES.values()) == {"comes", "runs", "rests", "failed", "goes"}
