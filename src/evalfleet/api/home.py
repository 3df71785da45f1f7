"""The runs of a home, taken together: listing and verifying them. Loads nothing that runs anything."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from evalfleet.errors import JournalError, JournalForeign, RequestError
from evalfleet.journal import Store, StreamInfo
from evalfleet.journal.database import FILE, refuse_file
from evalfleet.model import after
from evalfleet.planning.workspace import Workspace
from evalfleet.views.follow import Follower
from evalfleet.views.results import RunSummary, summarised

if TYPE_CHECKING:
    from evalfleet.views.documents import VerifiedStream


def list_runs(
    workspace: Workspace, *, since_s: float | None = None, **wanted: str | None
) -> list[RunSummary]:
    """The runs of a home, newest first, each in a few figures.

    `since_s`: only those that were started so many seconds ago, or later. `wanted`: only those whose
    `benchmark`, `model` or `status` is this.
    """
    refuse_file(workspace.home)
    if not (workspace.home / FILE).exists():
        return []
    store, now = workspace.records(), workspace.now()
    since = None if since_s is None else after(now, -since_s)
    stored = store.summaries(RunSummary.VERSION)
    runs = [(info, body) for info, body in stored if info.kind == "run"]
    fresh: dict[str, RunSummary] = {}
    found: list[RunSummary] = []
    for info, body in reversed(runs):
        if since is not None and info.created_at < since:
            continue
        summary = _stored(body) or _computed(store, info, fresh)
        if summary.status == "running" and store.held(info, now) is None:
            summary = msgspec.structs.replace(summary, status="left")
        if all(getattr(summary, key) == value for key, value in wanted.items() if value is not None):
            found.append(summary)
    _keep(store, fresh)
    return found


def _stored(body: str | None) -> RunSummary | None:
    try:
        return None if body is None else msgspec.json.decode(body, type=RunSummary)
    except msgspec.MsgspecError:
        return None  # somebody wrote something else there: the journal tells


def _computed(store: Store, info: StreamInfo, fresh: dict[str, RunSummary]) -> RunSummary:
    """From the journal. A run that cannot be read is no reason not to show the others."""
    follower = Follower(store, info.name)
    try:
        follower.poll()
    except JournalForeign:
        return RunSummary(info.name, status="damaged")
    fresh[info.name] = summarised(follower.state)
    return fresh[info.name]


def _keep(store: Store, fresh: dict[str, RunSummary]) -> None:
    """For the next time, where that may be written. An older home is left as it is."""
    if fresh and store.keeps_summaries():
        with suppress(JournalError, RequestError):
            Store.open(store.home, create=False).keep_summaries(
                RunSummary.VERSION,
                [(name, each.events, msgspec.json.encode(each).decode()) for name, each in fresh.items()],
            )


def verify(workspace: Workspace, name: str | None = None) -> list[VerifiedStream]:
    """What is found when all events of a run or pool, or of all of them, are compared with their checksums.

    Each is applied as well, as every command does that shows or takes up a run.
    """
    store = workspace.records()
    names = [info.name for info in store.streams()] if name is None else [store.stream(name).name]
    return [_verified(store, each) for each in names]


def _verified(store: Store, name: str) -> VerifiedStream:
    found: VerifiedStream = {"name": name, "events": None, "not_covered": None, "problem": None}
    follower = Follower(store, name)
    try:
        follower.poll()
        return {**found, "events": follower.seq, "not_covered": store.uncovered(name)}
    except JournalForeign as err:
        return {**found, "events": follower.seq, "problem": str(err)}
