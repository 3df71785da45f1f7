"""What people may spend a month over all of their runs in a home: `[owners]` of evalfleet.toml."""

from __future__ import annotations

import fcntl
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace

import msgspec

from evalfleet.errors import RequestError
from evalfleet.planning.models import refuse_below_one_call
from evalfleet.planning.plan import Resolved
from evalfleet.planning.workspace import Workspace
from evalfleet.views.format import iso, usd

from .home import list_runs

LOCK = ".locks/owners"


def within_cap(workspace: Workspace, resolved: Resolved, cap_usd: float) -> Resolved:
    """The run with no more budget than is left of its owner's month. RequestError if nothing is."""
    plan = resolved.plan
    left_usd = cap_usd - _month_usd(workspace, plan.owner)
    if left_usd <= 0:
        raise RequestError(
            f"[owners]: the ${cap_usd:g} that {plan.owner} may spend this month are spent, or reserved by "
            "runs that are not over; raise the cap, or end those runs"
        )
    if plan.limits.budget_usd is not None and plan.limits.budget_usd <= left_usd:
        return resolved
    if plan.metering is not None:
        models = plan.models or (plan.model,)
        refuse_below_one_call("[owners]: what is left of the month,", left_usd, plan.metering.prices, models)
    limits = msgspec.structs.replace(plan.limits, budget_usd=left_usd)
    told = f"[owners]: {usd(left_usd)} are left of {plan.owner}'s ${cap_usd:g} this month: that is the budget"
    plan = msgspec.structs.replace(plan, limits=limits)
    return replace(resolved, plan=plan, warnings=(*resolved.warnings, told))


@contextmanager
def granting(workspace: Workspace, owner: str, run: str, budget_usd: float | None) -> Generator[None]:
    """While this lasts, the run is given its budget, and no other of the home is given one: two that come at
    once do not share what is left of their owner's month. Raises RequestError if the budget is beyond that.
    """
    owners = workspace.config.owners
    cap_usd = owners.get(owner, owners.get("*")) if owner else None
    if cap_usd is None or budget_usd is None:
        yield
        return
    with (workspace.home / LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        left_usd = max(0.0, cap_usd - _month_usd(workspace, owner, but=run))
        if budget_usd > left_usd:
            raise RequestError(
                f"[owners]: {usd(left_usd)} are left of {owner}'s ${cap_usd:g} this month, and the budget "
                f"would be ${budget_usd:g}; give at most what is left"
            )
        yield


def _month_usd(workspace: Workspace, owner: str, but: str = "") -> float:
    """What an owner's runs of this month have cost; of one that is not over, what it may cost."""
    month = str(iso(workspace.now()))[:7]
    spent = 0.0
    for run in list_runs(workspace):
        if run.owner == owner and run.run != but and str(run.started_at).startswith(month):
            cost = (run.machines_usd or 0.0) + (run.models_usd or 0.0)
            spent += max(cost, run.budget_usd or 0.0) if run.status in ("running", "left") else cost
    return spent
