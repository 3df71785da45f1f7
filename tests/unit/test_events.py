"""Events: what is written can be read, now and by later versions; what is newer is refused."""

from __future__ import annotations

import typing
from typing import Any

import msgspec
import pytest

from evalfleet import events as ev
from evalfleet.errors import JournalForeign
from evalfleet.events import SCHEMA, Event, Upgrade, decode, encode, kind_of, upgrade
from evalfleet.model import (
    Allowance,
    Answered,
    AttemptId,
    Broken,
    Cause,
    Collected,
    Cost,
    Lifetime,
    Limits,
    MachineId,
    Metered,
    ModelUse,
    Offer,
    Plan,
    Scored,
    Task,
    TaskId,
)

M, A, T = MachineId("r-h-1"), AttemptId("t.0"), TaskId("t")
OFFER = Offer(
    "cloud",
    "D4",
    "east",
    spot=True,
    capacity=4,
    cost=Cost(usd_per_hour=0.2, billing_step_s=60.0),
    life=Lifetime(teardown_s=120.0, settle_s=60.0),
)

EVENTS: tuple[Event, ...] = (
    ev.RunPlanned(Plan("r", "b", ("cloud",), {"x": [1, {"y": None}]}, limits=Limits(budget_usd=1.5)), 7),
    ev.TasksPlanned((Task(T, "d", {"n": 1, "é": "\u2028"}, 10.0, 3.5), Task(TaskId("")))),
    ev.ControllerStarted("host", 42, "0.1"),
    ev.MachineRequested(M, "worker-1", OFFER, 1_800_000_000_000_001),
    ev.MachineQueued(M),
    ev.MachineAllocated(M, 1_800_000_000_000_002, "start 1", "node"),
    ev.MachineUp(M, "10.0.0.1", "node"),
    ev.MachineReady(M, {"setup": 0.1}),
    ev.MachineSilent(M, 5),
    ev.PoolPlanned(Plan("p", "")),
    ev.PoolResized(3),
    ev.MachineStep(M, "image", "12 of 30"),
    ev.MachinePrepared(M, "b", {"setup": 1.5}),
    ev.MachineStopping(M),
    ev.MachineStopped(M),
    ev.MachineStarting(M, 62.0),
    ev.MachineHeard(M),
    ev.MachineAnswered(M),
    ev.MachineUnreachable(M, "no answer", "ssh"),
    ev.MachineMending(M, "restart", "silent"),
    ev.MachineExtended(M, 6),
    ev.MachineLeaseSet(M, 6),
    ev.MachineCondemned(M, "why", Cause.SETUP, "install", "place", True),
    ev.MachineDeleteRefused(M, "locked"),
    ev.MachineDeleted(M, 7),
    ev.MachineDeleted(M, 7, 1.5),
    ev.MachineDeleted(M, 7),
    ev.AttemptStarted(A, T, M),
    ev.AttemptStarted(A, T, M, Allowance(0.5, 1000)),
    ev.BudgetPassed(50),
    ev.AttemptEnded(A, Scored(0.1 + 0.2, True, 3, 0.01, "e", ("a.png",), 10.0), 1.25, "node"),
    ev.AttemptEnded(A, Broken(Cause.MACHINE_LOST, "gone", 0.25)),
    ev.AttemptEnded(
        A,
        Broken(Cause.CANCELLED),
        metered=Metered(0.5, 3, tokens={"in": 7}, models={"m": ModelUse(3, 0.5, 0, {"in": 7})}, refused="$1"),
    ),
    ev.AttemptCollected(A, Collected(1, 2, 3, "p"), Scored(1.0)),
    ev.AttemptEnded(A, Answered(3, 0.25, ("a.png",), 10.0), 1.25),
    ev.AttemptGraded(A, Scored(0.5)),
    ev.AttemptGraded(A, Broken(Cause.RESULT, "no number")),
    ev.GradingFailed("no environment"),
    ev.GradingRequested((A,)),
    ev.TasksReopened((T,)),
    ev.CircuitChanged("cloud", "open", "5 of 8 failed", 1_000_000),
    ev.CircuitChanged("cloud", "open", "no such image", permanent=True),
    ev.RunResumed(Limits(workers=3), (T,)),
    ev.StopRequested("budget", "spent", True),
    ev.StopRequested("user", "cancelled", by="ann@desk", why="wrong model"),
    ev.RunSteered("set", "ann@desk", "in a hurry", workers=8, budget_usd=2.5, attempts=2),
    ev.RunSteered("end", "ann@desk", attempt=A),
    ev.RunSteered("drain", "ann@desk", machine=M),
    ev.RunEnded("failed"),
    ev.Ignored(),
)


def test_there_is_an_example_of_every_kind() -> None:
    assert {type(event) for event in EVENTS} == set(typing.get_args(ev.Event))


@pytest.mark.parametrize("event", EVENTS, ids=kind_of)
def test_what_is_written_is_what_is_read(event: Event) -> None:
    body = encode(event)
    assert decode(body) == event
    assert encode(decode(body)) == body, "the same event is the same bytes"
    assert msgspec.json.decode(body)["kind"] == kind_of(event)


@pytest.mark.parametrize("event", EVENTS, ids=kind_of)
def test_fields_of_a_later_version_do_not_hurt(event: Event) -> None:
    """A field with a default is no schema change: what wrote it may be read by what does not know it."""
    loose: dict[str, Any] = msgspec.json.decode(encode(event))
    assert decode(msgspec.json.encode({**loose, "added_later": [1]})) == event


@pytest.mark.parametrize("body", [b"", b"{}", b'{"kind": "Nonsense"}', b'{"kind": "MachineUp"}', b"\xff"])
def test_what_cannot_be_read_is_said_to_be_foreign(body: bytes) -> None:
    with pytest.raises(JournalForeign):
        decode(body)


@pytest.mark.parametrize("schema", [1, 2])
def test_an_offer_that_was_written_before_it_had_parts_is_the_same_offer(schema: int) -> None:
    flat = b"""{"kind": "MachineRequested", "machine": "r-h-1", "name": "worker-1", "expires_at": 7,
        "offer": {"place": "cloud", "size": "D4", "region": "east", "usd_per_hour": 0.2, "spot": true,
        "capacity": 4, "billing_step_s": 60.0, "teardown_s": 120.0, "settle_s": 60.0, "nodes_stay": true}}"""
    assert decode(flat, schema) == ev.MachineRequested(M, "worker-1", OFFER, 7)


def test_a_newer_schema_is_refused_with_what_to_do() -> None:
    with pytest.raises(JournalForeign, match="upgrade evalfleet"):
        decode(encode(EVENTS[0]), SCHEMA + 1)


def test_limits_of_silence_in_an_old_plan_are_those_of_the_offers_now() -> None:
    limits = {"workers": 2, "silent_s": 20.0, "lost_s": 30.0}
    old = {"kind": "RunPlanned", "plan": {"run": "r", "benchmark": "b", "limits": limits}, "total": 1}
    assert decode(msgspec.json.encode(old), 1) == ev.RunPlanned(Plan("r", "b", limits=Limits(workers=2)), 1)


def test_upgrades_are_a_chain_over_the_kinds_that_changed() -> None:
    def rename(body: dict[str, Any]) -> dict[str, Any]:
        return {"kind": "MachineUp", "machine": body["id"]}

    def add_address(body: dict[str, Any]) -> dict[str, Any]:
        return {**body, "address": "10.0.0.1"}

    chain: dict[tuple[int, str], Upgrade] = {(1, "VmUp"): rename, (3, "MachineUp"): add_address}
    oldest = b'{"kind": "VmUp", "id": "m"}'
    assert decode(upgrade(oldest, 1, 4, chain)) == ev.MachineUp(MachineId("m"), "10.0.0.1")
    assert decode(upgrade(b'{"kind": "MachineUp", "machine": "m"}', 3, 4, chain)).address == "10.0.0.1"  # type: ignore[union-attr]
    assert decode(upgrade(encode(EVENTS[-1]), 1, 4, chain)) == EVENTS[-1], "what did not change stays"


def test_an_event_of_a_removed_feature_is_read_and_changes_nothing() -> None:
    for body in (
        b'{"kind":"NodeReleased","machine":"m","released_at":9,"why":"scaled down"}',
        b'{"kind":"AllowanceWanted","attempt":"t.0","used":{"usd":0.5,"waited":true}}',
        b'{"kind":"AllowanceGranted","attempt":"t.0","allowance":{"usd":0.75}}',
    ):
        assert ev.decode(body) == ev.Ignored()
    with pytest.raises(JournalForeign):
        ev.decode(b'{"kind":"NeverWritten"}')
