"""The runs of a home, taken together: they are listed, verified, measured and deleted.

Nothing is loaded here that runs anything.
"""

from __future__ import annotations

import glob
import os
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from evalfleet.channels.samples import FOLDER, SERIES
from evalfleet.errors import JournalError, JournalForeign, RequestError
from evalfleet.files import points_to
from evalfleet.journal import Store, StreamInfo
from evalfleet.journal.database import FILE, refuse_file
from evalfleet.model import Micros, after, decodable
from evalfleet.names import safe_name
from evalfleet.planning.workspace import Workspace
from evalfleet.views.follow import Follower
from evalfleet.views.format import iso, plural
from evalfleet.views.results import RunSummary, summarised

if TYPE_CHECKING:
    from evalfleet.views.documents import VerifiedStream


def list_runs(
    workspace: Workspace,
    follow: Callable[[str], RunSummary] | None = None,
    /,
    *,
    since_s: float | None = None,
    **wanted: str | None,
) -> list[RunSummary]:
    """The runs of a home, newest first, each in a few figures.

    `since_s`: only those that were started so many seconds ago, or later. `wanted`: only those whose
    `benchmark`, `model` or `status` is this. `follow`: sums up a run that goes on, for one who lists often
    and need not read its journal from the beginning each time.
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
        summary = _stored(body)
        if summary is not None and summary.machines_up:
            summary = None  # it has cost more since
        if summary is None and follow is not None and store.held(info, now) is not None:
            summary = follow(info.name)
        summary = summary or _computed(store, info, now, fresh)
        if summary.status == "running" and store.held(info, now) is None:
            summary = msgspec.structs.replace(summary, status="left")
        if all(getattr(summary, key) == value for key, value in wanted.items() if value is not None):
            found.append(summary)
    _keep(store, fresh)
    return found


def _stored(body: str | None) -> RunSummary | None:
    try:
        return None if body is None else msgspec.json.decode(body, type=decodable(RunSummary))
    except msgspec.MsgspecError:
        return None  # somebody wrote something else there: the journal tells


def _computed(store: Store, info: StreamInfo, now: Micros, fresh: dict[str, RunSummary]) -> RunSummary:
    """The summary, computed from the journal. A run that cannot be read does not hide the others, nor does
    one whose numbers cannot be computed with."""
    follower = Follower(store, info.name)
    try:
        follower.poll()
        fresh[info.name] = summarised(follower.state, now)
    except (JournalForeign, ArithmeticError, ValueError):
        return RunSummary(info.name, status="damaged")
    return fresh[info.name]


def _keep(store: Store, fresh: dict[str, RunSummary]) -> None:
    """Store summaries for the next time, where that may be written. An older home is left as it is."""
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


# -- room on the disk --------------------------------------------------------------------------------

REMOVED = ".removed"
"""Where folders of a home go before they are deleted: what is half deleted is not taken for a run's."""


class Usage(Struct, frozen=True):
    """How much room a run takes. `run` is empty for what belongs to no run."""

    run: str
    status: str
    files: int
    """Bytes in its folder."""
    journal: int
    """Bytes of its events, about."""


def usage(workspace: Workspace) -> list[Usage]:
    """The runs of a home, the largest first, then what else is there."""
    journal = workspace.records().journal_bytes()
    runs = [
        Usage(each.run, each.status, _size(workspace.home / safe_name(each.run)), journal.get(each.run, 0))
        for each in list_runs(workspace)
    ]
    whole = _size(workspace.home)
    rest = max(0, whole - sum(each.files + each.journal for each in runs))
    return [*sorted(runs, key=lambda each: -each.files - each.journal), Usage("", "", rest, 0)]


def _size(folder: Path) -> int:
    """The bytes of all files in it; links count for nothing, and what vanishes meanwhile, too."""
    total = 0
    for parent, _, names in os.walk(folder, onerror=None):
        for name in names:
            with suppress(OSError):
                found = os.lstat(os.path.join(parent, name))
                total += found.st_size if stat.S_ISREG(found.st_mode) else 0
    return total


def remove(workspace: Workspace, name: str) -> None:
    """Delete a run: its journal and its folder. Raises RequestError unless it is over and has no machines."""
    store = workspace.store()
    info = store.stream(name)
    if info.kind == "pool":
        raise RequestError(f"{name!r} is a pool, not a run: `evalfleet pool delete {name}` deletes it")
    left = _machines_left(store, name)
    if left:
        raise RequestError(f"run {name!r} still has {left}: `evalfleet cancel {name}` deletes them first")
    away = _put_away(workspace.home, name)
    store.delete_stream(name, workspace.now())
    if points_to(workspace.home / "latest") == name:
        (workspace.home / "latest").unlink(missing_ok=True)
    machines = f"{glob.escape(safe_name(name))}-{store.home_id[:6]}-*"
    for series in (workspace.home / FOLDER).glob(f"{machines}{SERIES}"):
        series.unlink(missing_ok=True)
    shutil.rmtree(away, ignore_errors=True)


def _machines_left(store: Store, name: str) -> str:
    follower = Follower(store, name)
    try:
        follower.poll()
    except JournalForeign:
        return ""  # a damaged run may be deleted: `machines` and `reap` know what exists
    return plural(len(follower.state.undeleted), "machine") if follower.state.undeleted else ""


def _put_away(home: Path, name: str) -> Path:
    away = home / REMOVED / safe_name(name)
    shutil.rmtree(away, ignore_errors=True)
    away.parent.mkdir(exist_ok=True)
    with suppress(FileNotFoundError):
        os.replace(home / safe_name(name), away)
    return away


def outdated(workspace: Workspace, older_s: float) -> list[RunSummary]:
    """Runs that ended longer ago than that."""
    before = iso(after(workspace.now(), -older_s)) or ""
    return [each for each in list_runs(workspace) if each.ended_at is not None and each.ended_at < before]


def _artefacts(workspace: Workspace, name: str) -> list[Path]:
    """The folders of a run's tasks, and of what its machines got."""
    folder = workspace.home / safe_name(name)
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in paths if path.is_dir() and not path.is_symlink()]


def has_artefacts(workspace: Workspace, name: str) -> bool:
    """Is there anything left of what the attempts of a run left?"""
    return bool(_artefacts(workspace, name))


def drop_artefacts(workspace: Workspace, name: str) -> None:
    """Delete what the attempts of a run have left. Its journal, scores and reports stay."""
    for path in _artefacts(workspace, name):
        shutil.rmtree(path, ignore_errors=True)


def compact(workspace: Workspace) -> None:
    """Shrink the journal's file after runs were deleted, unless somebody works in this home."""
    store = workspace.store()
    shutil.rmtree(workspace.home / REMOVED, ignore_errors=True)
    if all(store.held(info, workspace.now()) is None for info in store.streams()):
        with suppress(JournalError):
            store.compact()
