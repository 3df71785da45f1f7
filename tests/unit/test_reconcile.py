"""The counted cost of machines beside a bill in the FOCUS format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec import structs

from evalfleet import events as ev
from evalfleet.api.reconcile import Reconciled, reconcile
from evalfleet.errors import RequestError
from evalfleet.journal import Store
from evalfleet.model import AttemptId, Metered, Metering, ModelUse, Scored, after
from evalfleet.planning.workspace import Workspace
from evalfleet.state import fold
from tests.unit.views_feed import START, Feed

DAY = "2026-01-02"
HOURS = 10.0
"""From 14:30:52 on: to the next day."""


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """A home whose run `run1` had one machine for ten hours at a dollar an hour, and paid for a model."""
    feed = Feed(tasks=1, machines=0, usd_per_hour=1.0)
    price = {"in": 2.5e-6, "cached": 1.25e-6, "out": 1e-5}
    plan = structs.replace(feed.state.plan, metering=Metering((), {"gpt-4o": price}))
    feed.records[0] = structs.replace(feed.records[0], event=ev.RunPlanned(plan, 1))
    machine = feed.machine(1, ready=False)
    feed.add(ev.MachineExtended(machine, after(START, 20 * 3600)))
    feed.now = after(START, 3600)
    feed.add(ev.MachineUp(machine))
    feed.add(ev.MachineReady(machine))
    attempt = AttemptId("t_0.0")
    feed.add(ev.AttemptStarted(attempt, feed.state.tasks[next(iter(feed.state.tasks))].task.id, machine))
    feed.now = after(START, 7200)
    metered = Metered(2.0, 4, models={"gpt-4o": ModelUse(4, 2.0)})
    feed.add(ev.AttemptEnded(attempt, Scored(1.0, True), 3000.0, metered=metered))
    feed.now = after(START, HOURS * 3600)
    feed.add(ev.MachineCondemned(machine, "nothing left to do"))
    feed.add(ev.MachineDeleted(machine, feed.now))
    store = Store.open(tmp_path / "home")
    store.create_past("run1", START, [(record.at, record.event) for record in feed.records])
    return Workspace({}, tmp_path, tmp_path / "home")


def written(workspace: Workspace, content: str, name: str = "export.csv") -> Path:
    path = workspace.cwd / name
    path.write_text(content)
    return path


HEAD = (
    "ChargePeriodStart,BilledCost,BillingCurrency,SubAccountId,ChargeDescription,CommitmentDiscountId,Tags\n"
)


def bill_row(
    home: str, day: str, usd: float, *, run: str = "run1", paid_by: str = "", currency: str = "USD"
) -> str:
    tags = json.dumps({"evalfleet-home": home, "evalfleet-pool": run}).replace('"', '""')
    return f'{day}T00:00:00Z,{usd},{currency},/subscriptions/sub-1,D4 v5,{paid_by},"{tags}"\n'


FIRST, SECOND_DAY = 9.4856, 0.5144
"""Dollars of the run's machine before and after midnight."""


def rows(found: Reconciled) -> list[tuple[str, str, str]]:
    return [(row.day, row.subject, row.why) for row in found.rows]


def test_a_bill_that_agrees_is_told_by_day(workspace: Workspace) -> None:
    home = workspace.home_id
    text = HEAD + bill_row(home, "2026-01-02", FIRST) + bill_row(home, "2026-01-03", SECOND_DAY)
    text += bill_row("0ther", "2026-01-02", 500.0)
    found = reconcile(workspace, written(workspace, text), "run1", None)
    assert rows(found) == [("2026-01-02", "run1", ""), ("2026-01-03", "run1", "")]
    assert found.counted_usd == pytest.approx(10.0)
    assert found.billed_usd == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("usd", "paid_by", "why"),
    [
        (FIRST - 0.12, "", ""),
        (FIRST - 0.9, "", "counted from the request until the machine was seen to be gone"),
        (5.0, "", "unexplained"),
        (20.0, "", "unexplained"),
        (0.0, "reservation-1", "a reservation or commitment has paid for it"),
        (3.0, "plan-1", "a reservation or commitment has paid for it"),
    ],
)
def test_each_difference_is_explained_or_called_unexplained(
    workspace: Workspace, usd: float, paid_by: str, why: str
) -> None:
    home = workspace.home_id
    text = (
        HEAD + bill_row(home, "2026-01-02", usd, paid_by=paid_by) + bill_row(home, "2026-01-03", SECOND_DAY)
    )
    found = reconcile(workspace, written(workspace, text), None, "2026-01")
    assert rows(found)[0] == ("2026-01-02", "run1", why)
    assert (found.unexplained_usd > 1) == (why == "unexplained")


def test_days_after_the_export_and_runs_of_others_are_explained(workspace: Workspace) -> None:
    home = workspace.home_id
    text = HEAD + bill_row(home, "2026-01-02", FIRST) + bill_row(home, "2026-01-01", 3.0, run="gone")
    text += bill_row(home, "2026-01-01", 0.2).replace('""evalfleet-pool"": ""run1""', '""owner"": ""me""')
    found = reconcile(workspace, written(workspace, text), None, "2026-01")
    assert rows(found) == [
        ("2026-01-01", "gone", "no run or pool of this home used it then"),
        (
            "2026-01-01",
            "shared",
            "images, snapshots, networks and the like that runs share",
        ),
        ("2026-01-02", "run1", ""),
        ("2026-01-03", "run1", "the export ends on 2026-01-02, and bills come late"),
    ]


def test_discounts_and_currencies_are_settings(workspace: Workspace) -> None:
    home = workspace.home_id
    (workspace.cwd / "evalfleet.toml").write_text("[cost]\ndiscount = 0.2\nrates = {EUR = 1.25}\n")
    amounts = [("2026-01-02", FIRST * 0.8 / 1.25), ("2026-01-03", SECOND_DAY * 0.8 / 1.25)]
    text = HEAD + "".join(bill_row(home, day, usd, currency="EUR") for day, usd in amounts)
    found = reconcile(workspace, written(workspace, text), "run1", None)
    assert [row.why for row in found.rows] == ["", ""]
    assert found.billed_usd == pytest.approx(8.0)


def test_an_export_of_two_currencies_is_added_up_in_dollars(workspace: Workspace) -> None:
    home = workspace.home_id
    (workspace.cwd / "evalfleet.toml").write_text("[cost]\nrates = {EUR = 1.25}\n")
    rows = bill_row(home, "2026-01-02", FIRST / 1.25, currency="EUR")
    rows += bill_row(home, "2026-01-03", SECOND_DAY, currency="USD")
    found = reconcile(workspace, written(workspace, HEAD + rows), "run1", None)
    assert [row.why for row in found.rows] == ["", ""]
    assert found.billed_usd == pytest.approx(FIRST + SECOND_DAY)


def test_sizes_that_a_reservation_has_paid_are_a_setting(workspace: Workspace) -> None:
    home = workspace.home_id
    text = HEAD + bill_row(home, DAY, 0.0)
    (machine,) = fold(workspace.records().read("run1")).machines.values()
    size = machine.offer.size
    (workspace.cwd / "evalfleet.toml").write_text(f"[cost]\nreserved = [{size!r}]\n")
    found = reconcile(workspace, written(workspace, text), "run1", None)
    assert {row.why for row in found.rows} == {""}, "nothing is billed but a disk, and it has none"
    assert found.counted_usd == 0.0
    (workspace.cwd / "evalfleet.toml").write_text("[cost]\nreserved = ['Another']\n")
    again = Workspace({}, workspace.cwd, workspace.cwd / "home")  # which reads the file anew
    found = reconcile(again, written(again, text), "run1", None)
    assert found.counted_usd == pytest.approx(10.0)


def test_google_has_tags_as_a_list(workspace: Workspace) -> None:
    tags = {"evalfleet-home": workspace.home_id, "evalfleet-pool": "run1"}
    listed = [{"key": key, "value": value} for key, value in tags.items()]
    bill = [
        {"ChargePeriodStart": f"{day}T05:00:00Z", "BilledCost": usd, "BillingCurrency": "USD", "Tags": listed}
        for day, usd in ((DAY, FIRST), ("2026-01-03", SECOND_DAY))
    ]
    text = "\n".join(map(json.dumps, bill))
    found = reconcile(workspace, written(workspace, text, "focus.jsonl"), "run1", None)
    assert [row.why for row in found.rows] == ["", ""]


def test_a_label_that_had_to_be_plain_is_its_run_also_in_a_month(workspace: Workspace) -> None:
    records = [(record.at, record.event) for record in workspace.records().read("run1")]
    planned = records[0][1]
    assert isinstance(planned, ev.RunPlanned)
    renamed = ev.RunPlanned(structs.replace(planned.plan, run="Night.1"), 1)
    Store.open(workspace.home).create_past("Night.1", START, [(START, renamed), *records[1:]])
    text = HEAD + bill_row(workspace.home_id, DAY, FIRST, run="night-1")
    text += bill_row(workspace.home_id, DAY, FIRST) + bill_row("0ther", "2026-01-04", 1.0)
    found = reconcile(workspace, written(workspace, text), None, "2026-01")
    assert {(row.subject, row.why) for row in found.rows if row.day == DAY} == {("Night.1", ""), ("run1", "")}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "has no rows"),
        (HEAD + bill_row("x", DAY, float("nan")), "nan is not an amount"),
        ("[1, 2]", "'1' is not an object"),
        ("a,b\n1,2\n", "is not a FOCUS export (no column billedcost)"),
        (HEAD + bill_row("0ther", DAY, 1.0), "it is of another account (this one: sub-1) or period"),
        (HEAD + bill_row("x", DAY, 1.0, currency="EUR"), "has amounts in EUR; set the dollars of one"),
        (HEAD + bill_row("x", "soon", 1.0), "row 1 of --export "),
        ("{", "cannot read --export"),
    ],
)
def test_a_bad_export_is_refused_in_one_line(workspace: Workspace, content: str, told: str) -> None:
    with pytest.raises(RequestError) as refused:
        reconcile(workspace, written(workspace, content), "run1", None)
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_run_or_a_month_must_be_named(workspace: Workspace) -> None:
    path = written(workspace, HEAD)
    for run, month, told in (
        (None, None, "name one run"),
        ("run1", "2026-01", "name one run"),
        (None, "May", "--month"),
    ):
        with pytest.raises(RequestError, match=told):
            reconcile(workspace, path, run, month)
