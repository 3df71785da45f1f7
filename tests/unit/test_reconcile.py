"""What was counted, held against exports of clouds and of models' vendors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


def azure_row(
    home: str, day: str, usd: float, *, run: str = "run1", model: str = "OnDemand", **other: str
) -> str:
    tags = json.dumps({"evalfleet-home": home, "evalfleet-pool": run})[1:-1].replace('"', '""')
    return f'{day},{usd},{other.get("currency", "USD")},sub-1,Virtual Machines,{model},"{tags}"\n'


AZURE = "Date,CostInBillingCurrency,BillingCurrencyCode,SubscriptionId,MeterCategory,PricingModel,Tags\n"
FIRST, SECOND_DAY = 9.4856, 0.5144
"""Dollars of the run's machine before and after midnight."""


def rows(found: Reconciled) -> list[tuple[str, str, str]]:
    return [(row.day, row.subject, row.why) for row in found.rows]


def test_a_bill_that_agrees_is_told_by_day(workspace: Workspace) -> None:
    home = workspace.home_id
    text = AZURE + azure_row(home, "01/02/2026", FIRST) + azure_row(home, "01/03/2026", SECOND_DAY)
    text += azure_row("0ther", "01/02/2026", 500.0)
    found = reconcile(workspace, written(workspace, text), "run1", None)
    assert rows(found) == [("2026-01-02", "run1", ""), ("2026-01-03", "run1", "")]
    assert found.counted_usd == pytest.approx(10.0)
    assert found.billed_usd == pytest.approx(10.0)
    assert found.source == "Azure Cost Management"


@pytest.mark.parametrize(
    ("usd", "model", "why"),
    [
        (FIRST - 0.12, "OnDemand", ""),
        (FIRST - 0.9, "OnDemand", "counted from the request until the machine was seen to be gone"),
        (5.0, "OnDemand", "unexplained"),
        (20.0, "OnDemand", "unexplained"),
        (0.0, "Reservation", "a reservation or commitment has paid for it"),
    ],
)
def test_each_difference_is_explained_or_called_unexplained(
    workspace: Workspace, usd: float, model: str, why: str
) -> None:
    home = workspace.home_id
    text = AZURE + azure_row(home, "2026-01-02", usd, model=model) + azure_row(home, "2026-01-03", SECOND_DAY)
    found = reconcile(workspace, written(workspace, text), None, "2026-01")
    assert rows(found)[0] == ("2026-01-02", "run1", why)
    assert (found.unexplained_usd > 1) == (why == "unexplained")


def test_days_after_the_export_and_runs_of_others_are_explained(workspace: Workspace) -> None:
    home = workspace.home_id
    text = AZURE + azure_row(home, "2026-01-02", FIRST) + azure_row(home, "2026-01-01", 3.0, run="gone")
    text += azure_row(home, "2026-01-01", 0.2).replace('""evalfleet-pool"": ""run1""', '""owner"": ""me""')
    found = reconcile(workspace, written(workspace, text), None, "2026-01")
    assert rows(found) == [
        ("2026-01-01", "gone", "no run or pool here had it then"),
        (
            "2026-01-01",
            "shared",
            "images, snapshots, networks and the like that runs share: see `evalfleet images`",
        ),
        ("2026-01-02", "run1", ""),
        ("2026-01-03", "run1", "the export ends on 2026-01-02, and bills come late"),
    ]


def test_discounts_and_currencies_are_settings(workspace: Workspace) -> None:
    home = workspace.home_id
    (workspace.cwd / "evalfleet.toml").write_text("[cost]\ndiscount = 0.2\nrates = {EUR = 1.25}\n")
    amounts = [("2026-01-02", FIRST * 0.8 / 1.25), ("2026-01-03", SECOND_DAY * 0.8 / 1.25)]
    text = AZURE + "".join(azure_row(home, day, usd, currency="EUR") for day, usd in amounts)
    found = reconcile(workspace, written(workspace, text), "run1", None)
    assert [row.why for row in found.rows] == ["", ""]
    assert found.billed_usd == pytest.approx(8.0)


def test_an_export_of_two_currencies_is_added_up_in_dollars(workspace: Workspace) -> None:
    home = workspace.home_id
    (workspace.cwd / "evalfleet.toml").write_text("[cost]\nrates = {EUR = 1.25}\n")
    rows = azure_row(home, "2026-01-02", FIRST / 1.25, currency="EUR")
    rows += azure_row(home, "2026-01-03", SECOND_DAY, currency="USD")
    found = reconcile(workspace, written(workspace, AZURE + rows), "run1", None)
    assert [row.why for row in found.rows] == ["", ""]
    assert found.billed_usd == pytest.approx(FIRST + SECOND_DAY)


def test_sizes_that_a_reservation_has_paid_are_a_setting(workspace: Workspace) -> None:
    home = workspace.home_id
    text = AZURE + azure_row(home, DAY, 0.0)
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


def test_google_tells_credits_and_labels(workspace: Workspace) -> None:
    home = workspace.home_id

    def row(day: str, cost: float, credit: float) -> dict[str, Any]:
        labels = [{"key": "evalfleet-home", "value": home}, {"key": "evalfleet-pool", "value": "run1"}]
        return {
            "usage_start_time": f"{day}T05:00:00Z",
            "cost": cost,
            "currency": "USD",
            "project": {"id": "p"},
            "sku": {"description": "N2 Instance Core running in Americas"},
            "labels": labels,
            "credits": [{"type": "SUSTAINED_USAGE_DISCOUNT", "amount": credit}],
        }

    lines = [row("2026-01-02", FIRST + 1, -1.0), row("2026-01-03", SECOND_DAY, 0.0)]
    text = "\n".join(json.dumps(each) for each in lines)
    found = reconcile(workspace, written(workspace, text, "export.jsonl"), "run1", None)
    assert found.source == "Google Cloud billing"
    assert [row.why for row in found.rows] == ["", ""]
    head = "usage_start_time,cost,currency,project.id,sku.description,labels,credits\n"
    cells = [json.dumps(lines[0][name]).replace('"', '""') for name in ("labels", "credits")]
    csv = f'{head}2026-01-02 05:00:00 UTC,{FIRST + 1},USD,p,Core,"{cells[0]}","{cells[1]}"\n'
    assert reconcile(workspace, written(workspace, csv), "run1", None).rows[0].why == ""


def test_vendors_of_models_are_held_against_the_meter(workspace: Workspace) -> None:
    bucket = {
        "start_time": 1767312000,
        "results": [
            {"amount": {"value": 1.5, "currency": "usd"}, "line_item": "gpt-4o-2024-08-06, input"},
            {"amount": {"value": 0.5, "currency": "usd"}, "line_item": "gpt-4o-2024-08-06, output"},
            {"amount": {"value": 7.0, "currency": "usd"}, "line_item": "o3, output"},
        ],
    }
    path = written(workspace, json.dumps({"object": "page", "data": [bucket]}), "costs.json")
    found = reconcile(workspace, path, "run1", None)
    assert found.source == "OpenAI costs"
    assert rows(found) == [(DAY, "gpt-4o", ""), (DAY, "o3", "another key or program used it")]
    anthropic = f"usage_date_utc,model,cost_usd\n{DAY},gpt-4o,9.0\n2026-01-09,gpt-4o,1.0\n"
    found = reconcile(workspace, written(workspace, anthropic), "run1", None)
    assert (found.source, rows(found)) == ("Anthropic costs", [(DAY, "gpt-4o", "unexplained")])


def test_tokens_that_vendors_count_are_valued_as_the_meter_values_them(workspace: Workspace) -> None:
    """$2 at $2.5, $1.25 and $10 for a million tokens: 500,000 + 200,000 cached, and 50,000."""
    openai = (
        "start_time,model,input_tokens,input_cached_tokens,output_tokens\n"
        "1767312000,gpt-4o-2024-08-06,700000,200000,50000\n1767312000,o3,10,0,10\n"
    )
    found = reconcile(workspace, written(workspace, openai), "run1", None)
    assert found.source == "OpenAI usage"
    assert rows(found) == [(DAY, "gpt-4o", ""), (DAY, "o3 (no price)", "")]
    anthropic = (
        "usage_date_utc,model_version,usage_input_tokens_no_cache,usage_input_tokens_cache_write_5m,"
        f"usage_input_tokens_cache_read,usage_output_tokens\n{DAY},gpt-4o,500000,0,200000,150000\n"
    )
    found = reconcile(workspace, written(workspace, anthropic), "run1", None)
    assert (found.source, rows(found)) == ("Anthropic usage", [(DAY, "gpt-4o", "unexplained")])
    assert found.billed_usd == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "has no rows"),
        ("a,b\n1,2\n", "is no export that is known: Azure Cost Management, "),
        (AZURE + azure_row("0ther", DAY, 1.0), "it is of another account (this one: sub-1) or period"),
        (AZURE + azure_row("x", DAY, 1.0, currency="EUR"), "has amounts in EUR; say what one is in dollars"),
        (
            AZURE + azure_row("x", DAY, 1.0, currency="EUR") + azure_row("x", DAY, 1.0, currency="CHF"),
            "has amounts in CHF and EUR; say what one is in dollars",
        ),
        (AZURE + azure_row("x", "soon", 1.0), "row 1 of --export "),
        ("{", "cannot be read"),
    ],
)
def test_a_bad_export_is_refused_in_one_line(workspace: Workspace, content: str, told: str) -> None:
    with pytest.raises(RequestError) as refused:
        reconcile(workspace, written(workspace, content), "run1", None)
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_run_or_a_month_must_be_named(workspace: Workspace) -> None:
    path = written(workspace, AZURE)
    for run, month, told in (
        (None, None, "name one run"),
        ("run1", "2026-01", "name one run"),
        (None, "May", "--month"),
    ):
        with pytest.raises(RequestError, match=told):
            reconcile(workspace, path, run, month)
