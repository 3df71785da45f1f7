"""Results that another program made, written down as a run that has ended."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from evalfleet.api.runs import Run
from evalfleet.benchmarks.waa.trees import find_tasks
from evalfleet.channels.artefacts import STANDARD_CAPS, Caps
from evalfleet.controller import WallClock, folder_of
from evalfleet.errors import RequestError
from evalfleet.journal import Store
from evalfleet.names import check_run_name, default_run_name, safe_name
from evalfleet.planning.config import home_of
from evalfleet.views.live import Scribe

from .choice import Keep, chosen, numbered
from .files import copied
from .history import History, plan_of

__all__ = ["Keep", "import_waa"]


def import_waa(
    roots: Sequence[Path],
    *,
    name: str | None = None,
    trial: str | None = None,
    keep: Keep | None = None,
    home: Path | None = None,
    caps: Caps = STANDARD_CAPS,
) -> Run:
    """Make a run of the results in `roots`, and copy their files. Raises RequestError."""
    home = home or home_of(dict(os.environ), Path.cwd())
    now = WallClock().now()
    run = check_run_name(name) if name is not None else default_run_name("waa-import", now)
    tries = chosen(find_tasks(roots), trial, keep)
    store = Store.open(home)
    folder = _claimed(store, home, run)
    try:
        collected = {
            attempt: copied(past.folder.path, folder / safe_name(task) / safe_name(attempt), caps)
            for task, some in tries.items()
            for attempt, past in numbered(task, some)
        }
        history = History(plan_of(run, store.home_id, tries), tries, collected, now)
        store.create_past(run, now, history.events())
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    Scribe(home, store, run, is_newest=lambda: store.newest() == run).close()
    return Run(home, run)


def _claimed(store: Store, home: Path, run: str) -> Path:
    """The run's folder, which nobody else has. Raises RequestError when the name is taken."""
    folder = folder_of(home, run)
    if run in {info.name for info in store.streams()}:
        raise RequestError(f"the name {run!r} is taken; choose another with --name")
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise RequestError(f"{folder} exists and is no run's: remove it, or choose another --name") from None
    return folder
