"""All that the dashboard shows of a run at once, and how that of a settled run is kept as a file."""

from __future__ import annotations

import gzip
import logging
from pathlib import Path
from typing import Any

import msgspec

from evalfleet.errors import FleetError
from evalfleet.files import replace
from evalfleet.journal import Store
from evalfleet.model import Micros, decodable
from evalfleet.names import folder_of
from evalfleet.state import RunState

from .board import Board
from .head import head

KEPT = ".dashboard.json.gz"
KEPT_VERSION = 6
"""To be raised when a snapshot changes: what was kept before is then made anew."""
WORTH_KEEPING = 3000
"""A run of fewer events is summed up as soon as a page asks for it."""

log = logging.getLogger(__name__)


class _Kept(msgspec.Struct):
    """The beginning of a snapshot that is kept as a file."""

    version: int
    run: str
    seq: int


def is_settled(state: RunState) -> bool:
    """Is it over, and all that it rented gone? Nothing of it changes then, unless it is taken up again."""
    return state.ended_at is not None and not state.undeleted


def packed_snapshot(board: Board, figures: dict[str, Any], now: Micros) -> bytes:
    """The snapshot of a run whose head has these `figures`, compressed."""
    document = {"seq": board.seq, "now": now // 1000, "run": figures, **board.tables(now)}
    return gzip.compress(msgspec.json.encode(document), compresslevel=1)


def keep_at_end(home: Path, store: Store, state: RunState, now: Micros) -> None:
    """Keep the snapshot of a run that has just ended, of which `state` is the fold: who looks first has it at
    once.

    It takes about ten microseconds a task. If it cannot be written, the dashboard makes it when it is asked
    for.
    """
    if state.events < WORTH_KEEPING or not is_settled(state):
        return
    try:
        board = Board.of(home, store, state)
        packed = packed_snapshot(board, head(state, now, live=False), now)
    except FleetError as err:
        log.warning("what the dashboard shows of %s was not kept: %s", state.plan.run, err)
        return
    keep_snapshot(board.folder, state.plan.run, board.seq, packed)


def keep_snapshot(folder: Path, run: str, seq: int, packed: bytes) -> None:
    """Write it, where that may be written."""
    first = msgspec.json.encode(_Kept(KEPT_VERSION, run, seq))
    try:
        if folder.is_dir():
            replace(folder / KEPT, first + b"\n" + packed)
    except OSError as err:
        log.warning("what the dashboard shows of %s was not kept: %s", run, err)


def kept_snapshot(home: Path, run: str) -> tuple[int, bytes] | None:
    """The number of its last event, and the snapshot, if one of this version is kept."""
    try:
        first, _, packed = (folder_of(home, run) / KEPT).read_bytes().partition(b"\n")
        kept = msgspec.json.decode(first, type=decodable(_Kept))
    except (OSError, msgspec.MsgspecError):
        return None
    return (kept.seq, packed) if (kept.version, kept.run) == (KEPT_VERSION, run) else None
